"""GPT-2. The trainer looks for the four names below in a model's folder."""

from .model import GPT2 as Model
from .model import PRESETS
from .model import GPT2Config as Config
from .plan import plan

__all__ = ["PRESETS", "Config", "Model", "plan"]
