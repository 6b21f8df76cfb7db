"""Llama 3 and its family. The trainer looks for the four names below in a model's folder."""

from .config import PRESETS
from .config import LlamaConfig as Config
from .model import Llama as Model
from .plan import plan

__all__ = ["PRESETS", "Config", "Model", "plan"]
