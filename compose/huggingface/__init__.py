"""This room answers how Hugging Face folders become models and checkpoints, and the way back.

It exports ``load_hf``, which fills a model from a folder, also if the model is cut already.
"""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.huggingface.folder import load_hf

__all__ = ["load_hf"]

export(__name__, {"load_hf": "compose.huggingface.folder"})
