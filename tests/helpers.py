"""Configs for tests: train.toml with a model and a batch small enough for a matrix of runs."""

from pathlib import Path

import torch
import torch.distributed as dist

from compose import legality
from compose.config import Config
from compose.errors import ConfigError
from compose.prove import prove
from compose.report import Report
from compose.toml import load
from tests.pool import make_mesh

ROOT = Path(__file__).parent.parent
SMALL = {
    "model.n_layers": 2,
    "model.dim": 64,
    "model.hidden_dim": 96,
    "train.seq_len": 32,
}


def make_config(world_size: int, **keys: object) -> Config:
    """train.toml with SMALL and ``keys`` (``parallel__tp=2``) on top, checked."""
    values = SMALL | {name.replace("__", "."): value for name, value in keys.items()}
    overrides = [
        (name, str(value).lower() if isinstance(value, bool) else str(value))
        for name, value in values.items()
    ]
    config, problems = legality.check(load(str(ROOT / "train.toml"), overrides), world_size)
    if problems:
        raise ConfigError(*problems)
    return config


def prove_case(keys: dict[str, object]) -> Report:
    """On every rank of a pool: the proof for train.toml with ``keys``."""
    config = make_config(dist.get_world_size(), **keys)
    return prove(config, make_mesh(config.parallel), torch.device("cpu"))
