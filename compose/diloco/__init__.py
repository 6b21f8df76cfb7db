"""Workers that train alone and exchange their weights every few steps (DiLoCo)."""

from typing import Any

from compose.diloco.options import ISLANDS, Outer

TABLES = {"outer": Outer}
RUN_RULES = ISLANDS


def islands(config: Any) -> int:
    """Return how many parts of the job train alone: the ranks of dp_replicate, if [outer] is on."""
    return config.parallel.dp_replicate if config.outer.every else 1


def between_workers(
    job: Any, outer: Outer, workers: int, link: Any = None, seconds: float = 0.0
) -> list[str]:
    """Return lines with the bytes that workers send each other; with a link, with the time too.

    ``job`` is that of one worker, and ``seconds`` are those of its step.
    """
    from compose.diloco.messages import as_lines

    return as_lines(job, outer, workers, link, seconds)


def hooks(trainer: Any) -> list[Any]:
    """Return the outer loop of a run with several workers."""
    if trainer.job.islands == 1:
        return []
    from compose.diloco.loop import OuterLoop

    config, layers = trainer.config, trainer.job.resolved.checkpoint
    timeout, last = config.comm.first_step_timeout, config.train.steps
    return [OuterLoop(config.outer, trainer.composition, layers, trainer.worker, timeout, last)]
