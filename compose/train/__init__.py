"""One run: a step, the loop around it, what it reports, and how it ends. Exports the functions of a
step; the trainer is for train.py."""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.train.step import clip_grad_norm_, forward_backward
    from compose.train.trainer import Trainer

__all__ = ["Trainer", "clip_grad_norm_", "forward_backward"]

export(
    __name__,
    {
        "Trainer": "compose.train.trainer",
        "clip_grad_norm_": "compose.train.step",
        "forward_backward": "compose.train.step",
    },
)
