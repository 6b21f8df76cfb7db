"""A loss of its own: a model's folder says what it learns, and nothing else has to be changed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

import models
from compose.proof.report import Report
from tests.support.helpers import ROOT, prove_case, proved
from tests.support.pool import Pool
from tests.support.training import keys_for, lines, train

# A sample is four numbers; their largest is learnt, with the absolute error.
FOLDER = {
    "__init__.py": '''
from dataclasses import dataclass
import torch
from torch import nn
from .plan import plan

@dataclass(frozen=True)
class Config:
    width: int = 8
    """Inner width."""

    def flops_per_token(self, seq_len):
        return 30.0 * self.width

class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(4, config.width)
        self.down = nn.Linear(config.width, 1)

    def forward(self, numbers):
        return self.down(self.up(numbers).relu()).flatten()

    @torch.no_grad()
    def init_parameter(self, name, tensor, generator):
        tensor.normal_(0.0, 0.5, generator=generator)

def absolute_error(output, targets):
    return (output - targets).masked_fill(targets.isnan(), 0.0).abs().sum()

class Numbers:
    name, token_set, tokenizer, content = "numbers", None, None, "numbers 1"

    def __len__(self):
        return 1000

    def read(self, index, epoch=0):
        numbers = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"numbers": numbers, "targets": numbers.max()}

class Largest:
    sampler = None

    def check(self, config):
        return []

    def open(self, path, config):
        return Numbers()

    def random_batch(self, config, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn(samples, 4, generator=generator)
        targets = numbers.max(1).values
        targets[0] = float("nan")
        return {"numbers": numbers, "targets": targets}

    def loss(self, config):
        return absolute_error

PRESETS = {"debug": Config()}
task = Largest()
''',
    "plan.py": """
from compose import Plan

def plan(model, parallel):
    return Plan(shard=["up", "down"])
""",
}


def write(root: Path) -> Path:
    """A folder ``largest`` beside those of models/."""
    folder = root / "largest"
    folder.mkdir(parents=True)
    for name, text in FOLDER.items():
        (folder / name).write_text(text)
    return root


@contextmanager
def known(root: Path) -> Iterator[None]:
    """While within, the folders of ``root`` are models."""
    models.__path__.append(str(root))
    try:
        yield
    finally:
        models.__path__.remove(str(root))
        for name in [name for name in sys.modules if ".largest" in name]:
            del sys.modules[name]


KEYS: dict[str, object] = {"model__name": "largest", "train__global_batch": 8}


def _proved(root: Path) -> Report:
    with known(root):
        return prove_case(KEYS | {"parallel__dp_shard": dist.get_world_size()})


def _trained(root: Path, keys: dict[str, object]) -> None:
    with known(root):
        train(keys)


def test_a_folder_with_a_loss_of_its_own(pool: Pool, tmp_path: Path) -> None:
    """It is proved and trained on two ranks, by the same code as a language model."""
    root = write(tmp_path / "others")
    proved(pool.run(_proved, 2, root))
    keys = KEYS | {"train__steps": 40, "optimizer__lr": 0.03, "parallel__dp_shard": 2}
    pool.run(_trained, 2, root, keys_for(tmp_path / "run", **keys))
    losses = [line["loss"] for line in lines(tmp_path / "run")]
    assert losses[-1] < 0.8 * losses[0]


def test_compose_knows_no_task_by_name() -> None:
    """A diffusion transformer has a folder of its own."""
    words = ("diffusion", "velocity", "patches", "flow matching")
    for path in sorted((ROOT / "compose").rglob("*.py")):
        results = [word for word in words if word in path.read_text().lower()]
        assert not results, (path, results)
