"""GPT as Megatron-LM trained it. It is no model of the toolkit: published times are of this shape."""

from .model import GPT as Model
from .model import GPTConfig as Config
from .plan import plan

PRESETS = {"debug": Config()}

__all__ = ["PRESETS", "Config", "Model", "plan"]
