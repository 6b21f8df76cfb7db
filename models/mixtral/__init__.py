"""Mixtral. The trainer looks for the four names below in a model's folder."""

from .model import PRESETS
from .model import Mixtral as Model
from .model import MixtralConfig as Config
from .plan import plan

__all__ = ["PRESETS", "Config", "Model", "plan"]
