"""Gemma 3. The trainer looks for the four names below in a model's folder."""

from .model import PRESETS
from .model import Gemma3 as Model
from .model import Gemma3Config as Config
from .plan import plan

__all__ = ["PRESETS", "Config", "Model", "plan"]
