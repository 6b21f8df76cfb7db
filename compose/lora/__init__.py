"""This room answers which adapters a model has, and how they start (LoRA, arXiv:2106.09685)."""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.lora.adapt import adapt
    from compose.lora.options import Lora

__all__ = ["Lora", "adapt"]

export(__name__, {"Lora": "compose.lora.options", "adapt": "compose.lora.adapt"})
