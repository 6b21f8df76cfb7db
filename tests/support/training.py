"""Training runs on the ranks of a pool, and what they leave."""

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from compose.data.token_files import open_token_set
from compose.train import trainer as trainer_module
from compose.train.metrics import StepMetrics
from compose.train.processes import TrainingError
from compose.train.trainer import Trainer
from compose.train.workers import this_worker
from tests.support.helpers import Keys, make_job
from tests.support.pool import make_mesh

STEP = StepMetrics(
    step=7,
    loss=1.0 / 3.0,
    grad_norm=0.25,
    lr=3e-3,
    tokens=7000,
    samples=70,
    tokens_per_second=12_345.6,
    mfu=None,
    memory=3 * 2**29,
)


def trainer_of(keys: Keys) -> Trainer:
    """On every rank, of an island too: the trainer of train.toml with ``keys``, on the CPU."""
    job = make_job(dist.get_world_size() * this_worker().count, **keys)
    return Trainer(job, make_mesh(job.degrees), torch.device("cpu"))


def train(keys: Keys) -> None:
    """On every rank: a run of train.toml with ``keys``."""
    trainer_of(keys).run()


@contextmanager
def signalled(number: int, after: int = 2) -> Iterator[None]:
    """This process gets a signal in the step that comes after so many."""
    real = Trainer.step

    def step(trainer: Trainer) -> StepMetrics:
        if trainer.progress.step == after:
            os.kill(os.getpid(), number)
        return real(trainer)

    with mock.patch.object(Trainer, "step", step):
        yield


def lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def logged_steps(folder: Path) -> list[int]:
    """The steps that a run's metrics.jsonl has."""
    return [line["step"] for line in lines(folder)]


def wait_for_steps(folder: Path, count: int, processes: Sequence["subprocess.Popen[str]"]) -> None:
    """Wait until a run of ``processes`` has logged so many steps; nobody reads its output."""
    end = time.monotonic() + 300
    while len(lines(folder) if (folder / "metrics.jsonl").exists() else []) < count:
        assert all(process.poll() is None for process in processes), processes[0].communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def wait_for_second_step(process: "subprocess.Popen[str]") -> None:
    """Read the output of a run, which prints each step, up to the second."""
    assert process.stdout is not None
    while not re.match(r"step +2\b", process.stdout.readline()):
        assert process.poll() is None, process.communicate()[1]


def keys_for(folder: Path, **keys: object) -> dict[str, object]:
    """The keys of a run in ``folder``."""
    return {"run__dir": folder, "metrics__tensorboard": False, **keys}


def train_until_error(keys: dict[str, object], value: float, where: str) -> str:
    """Train, with a loss or gradient that turns into ``value`` in the third step."""
    real, calls = getattr(trainer_module, where), []

    def fake(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return torch.tensor(value) if len(calls) == 3 else real(*args, **kwargs)

    with mock.patch.object(trainer_module, where, fake):
        try:
            train(keys)
        except TrainingError as error:
            return str(error)
    return ""


def mean_loss(model: torch.nn.Module, folder: Path) -> float:
    """Over all replies of a token set, each conversation alone."""
    chats = open_token_set(folder)
    assert chats.trained is not None
    total, count, start = 0.0, 0, 0
    for end in chats.ends.tolist():
        ids = torch.from_numpy(chats.tokens.read(start, end))
        learnt = torch.from_numpy(chats.trained.read(start, end) > 0)
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        each = F.cross_entropy(logits.float(), ids[1:], reduction="none")
        total += float(each[learnt[1:]].sum())
        count += int(learnt[1:].sum())
        start = end
    return total / count
