"""gpt-oss. The trainer looks for the four names below in a model's folder."""

from .model import PRESETS
from .model import GptOss as Model
from .model import GptOssConfig as Config
from .plan import plan

__all__ = ["PRESETS", "Config", "Model", "plan"]
