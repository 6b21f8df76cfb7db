"""This room answers how one run trains: a step, the loop around it, its reports, and its end.

It exports the functions of a step; the trainer is for train.py.
"""

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
