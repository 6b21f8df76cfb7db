"""A pipeline of which rank $FAILS raises in the $KIND ("forward" or "backward") of a stage.

It is train.py, or with the word "own" a loop of one's own. When it did is written to the file $WHEN."""

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compose.pipeline.stage import PlainStage

CALLS = 3  # of the stage, before the one that fails


class Broken(torch.autograd.Function):
    """Passes on what it is given; its backward raises."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        fail()
        return gradient


def fail() -> None:
    """Raise, and note when."""
    Path(os.environ["WHEN"]).write_text(str(time.time()))
    raise ArithmeticError("the fault of this test")


def put_in() -> None:
    """Put the fault into this rank's stages."""
    real, calls = PlainStage.forward, [0]

    def forward(self: PlainStage, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        last = calls[0] > CALLS
        if last and os.environ["KIND"] == "forward":
            fail()
        output = real(self, *args, **kwargs)
        return Broken.apply(output) if last else output

    PlainStage.forward = forward


def own_loop(words: list[str]) -> None:
    """Train without train.py and what it starts."""
    from compose import forward_backward, init_mesh
    from compose.build import build
    from compose.config import rules
    from compose.config.toml import load
    from compose.data.samples import random_batch

    dist.init_process_group("gloo")
    keys = [tuple(word.removeprefix("--").split("=", 1)) for word in words]
    job = rules.check(load("train.toml", keys), dist.get_world_size())  # type: ignore[arg-type]
    composition = build(job, init_mesh(job.degrees, "cpu"), torch.device("cpu"))
    train, vocabulary = job.config.train, job.config.model.config.vocab_size
    for step in range(100):
        batch = random_batch(train.global_batch, train.seq_len, vocabulary, step)
        forward_backward(composition, batch, micro_batch=train.micro_batch)


if __name__ == "__main__":
    if os.environ["RANK"] == os.environ["FAILS"]:
        put_in()
    if sys.argv[1] == "own":
        own_loop(sys.argv[2:])
    else:
        runpy.run_path("train.py", run_name="__main__")
