"""Workers that train alone and exchange their weights every few steps (DiLoCo)."""

from typing import Any

from compose.diloco.options import Outer

TABLES = {"outer": Outer}


def islands(config: Any) -> int:
    """Return how many parts of the job train alone: the ranks of dp_replicate, if [outer] is on."""
    return config.parallel.dp_replicate if config.outer.every else 1


def run_rules() -> list[Any]:
    """Return the rules of [outer]."""
    from compose.diloco.options import ISLANDS

    return ISLANDS


def hooks(trainer: Any) -> list[Any]:
    """Return the outer loop of a run with several workers."""
    if trainer.job.islands == 1:
        return []
    from compose.diloco.loop import OuterLoop

    config, layers = trainer.config, trainer.job.resolved.checkpoint
    timeout, last = config.comm.first_step_timeout, config.train.steps
    return [OuterLoop(config.outer, trainer.composition, layers, trainer.worker, timeout, last)]
