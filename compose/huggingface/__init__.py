"""Hugging Face's folders: read into a model that may be cut already, made into a checkpoint, written
from one. Exports the loading."""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.huggingface.folder import load_hf

__all__ = ["load_hf"]

export(__name__, {"load_hf": "compose.huggingface.folder"})
