"""A diffusion transformer, trained by flow matching. ``task`` says what it learns, and from what."""

from .flow import FlowMatching
from .model import PRESETS
from .model import DiT as Model
from .model import DiTConfig as Config
from .plan import plan

task = FlowMatching()

__all__ = ["PRESETS", "Config", "Model", "plan", "task"]
