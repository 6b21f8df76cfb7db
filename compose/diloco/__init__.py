"""Workers that train alone and exchange their weights every few steps (DiLoCo)."""

from typing import Any

from compose.diloco.options import Outer

TABLES = {"outer": Outer}


def islands(config: Any) -> int:
    """Return how many parts of the job train alone: the ranks of dp_replicate, if [outer] is on."""
    return config.parallel.dp_replicate if config.outer.every else 1


def run_rules() -> list[Any]:
    """Return the rules of [outer]."""
    from compose.diloco.rules import ISLANDS

    return ISLANDS


def hooks(trainer: Any) -> list[Any]:
    """Return the outer loop of a run with several workers."""
    from compose.diloco.hook import DiLoCo

    return [DiLoCo(trainer)] if trainer.job.islands > 1 else []
