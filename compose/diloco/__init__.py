"""Workers that train alone and exchange their weights every few steps (DiLoCo).

The table [outer] and its rules. Messages for users call a worker an island.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from compose.config.setup import Rules, all_keys_read
from compose.errors import ConfigError, Decay, NonNegative, ReadWith
from compose.parallel.comm import Density

if TYPE_CHECKING:
    from compose.config.job import Job

ROW = 4096
"""Elements of which top_k sends the largest; a place among them takes 12 bits."""
_ISLANDS = ReadWith("is read with islands; set {}", every=())
_TOP_K = ReadWith("is read with top_k; set {}", dtype=("top_k",))
_BEST = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}


@dataclass(frozen=True)
class Outer:
    """The table [outer]: how often islands exchange what they have learned, and in which form."""

    every: NonNegative = 0
    """Steps between exchanges: each rank of dp_replicate becomes an island, which trains alone between
    them; 0: no islands."""
    lr: Annotated[float, Field(ge=0), _ISLANDS] = 0.0
    """Learning rate of the outer step; 0: by the number of islands, 0.4 to 0.8."""
    momentum: Annotated[Decay, _ISLANDS] = 0.9
    """Nesterov momentum of the outer step."""
    fragments: Annotated[NonNegative, _ISLANDS] = 0
    """Layers that are exchanged at a time, each such fragment once in outer.every steps; 0: all at
    once."""
    delay: Annotated[NonNegative, _ISLANDS] = 0
    """Steps that an exchange may take while training goes on; less than those between two exchanges."""
    mix: Annotated[Decay, _ISLANDS] = 0.0
    """How much of an island's own weights stays when the common ones arrive."""
    dtype: Annotated[Literal["float32", "bfloat16", "int8", "e3m0", "top_k"], _ISLANDS] = "float32"
    """How the change of the weights is sent: e3m0 is a float of 4 bits, and top_k sends only the
    largest elements, in 2 bits each."""
    density: Annotated[Density, _ISLANDS, _TOP_K] = 0.015625
    """With top_k: the part of each 4,096 elements that is sent."""
    offload: Annotated[bool, _ISLANDS] = True
    """Keep the outer weights and their momentum in host memory."""
    grace: Annotated[NonNegative, _ISLANDS] = 0
    """Seconds that an exchange waits for islands that are late, once half of them are there; a late one
    trains on, and joins the next exchange. 0: it waits for all."""


def best_lr(workers: int) -> float:
    """Return the outer learning rate for a number of workers: that of the largest known one below.

    The values are those of the scaling laws of DiLoCo (Charles et al. 2025, arXiv:2503.09799, figure
    7): 0.4 for one worker, 0.6 for two and four, 0.8 for eight.
    """
    return _BEST[max(known for known in _BEST if known <= workers)]


RUN_RULES = Rules["Job"]()


@RUN_RULES.add(
    "with outer.every, dp_replicate is 2 or more",
    "its ranks are the islands, and one alone has none to exchange with",
)
def _several(job: "Job") -> None:
    every = job.config.outer.every
    if every and job.islands == 1:
        raise ConfigError(
            f"outer.every: {every} is for islands, the ranks of parallel.dp_replicate, which is 1; use"
            " parallel.dp_replicate = 2 or more, or outer.every = 0"
        )


RUN_RULES.add(
    "the other keys of [outer] go with outer.every, and density with top_k",
    "a key that changes nothing would look like one that works",
)(all_keys_read("outer", lambda job: job.config.outer))


@RUN_RULES.add(
    "outer.every is a multiple of the fragments, and outer.delay is less than the steps between two"
    " exchanges",
    "fragments take turns, and one exchange ends before the next begins",
)
def _fragments(job: "Job") -> None:
    outer, layers = job.config.outer, len(job.resolved.checkpoint)
    if not outer.every:
        return
    count = math.ceil(layers / outer.fragments) if outer.fragments and layers else 1
    if outer.every % count:
        nearest = max(1, round(outer.every / count)) * count
        raise ConfigError(
            f"outer.every: {outer.every} is not a multiple of the {count} fragments that"
            f" outer.fragments = {outer.fragments} makes of {layers} layers; nearest: {nearest}"
        )
    if outer.delay >= outer.every // count:
        raise ConfigError(
            f"outer.delay: {outer.delay} is not less than the {outer.every // count} steps from one"
            f" exchange to the next (outer.every / fragments, of which there are {count}); nearest:"
            f" {outer.every // count - 1}"
        )


@RUN_RULES.add("outer.density is a multiple of 4 / 4,096", "what is sent of a row fills whole bytes")
def _density(job: "Job") -> None:
    density = job.config.outer.density
    kept = density * ROW
    if kept % 4:
        nearest = max(1, round(kept / 4)) * 4 / ROW
        raise ConfigError(
            f"outer.density: {density} is {kept:g} of {ROW} elements, and {ROW} are cut into fours;"
            f" nearest: {nearest!r}"
        )


@RUN_RULES.add(
    "outer.grace goes without top_k",
    "what an island could not send is kept for the next exchange, also if it missed this one",
)
def _late(job: "Job") -> None:
    outer = job.config.outer
    if outer.grace and outer.dtype == "top_k":
        raise ConfigError(
            f'outer.grace: {outer.grace} is not proved with outer.dtype = "top_k", whose unsent rest'
            " counts a change twice if an exchange is missed; use outer.grace = 0, or"
            ' outer.dtype = "e3m0"'
        )


@RUN_RULES.add(
    "train.patience and checkpoint.keep_best go without outer.every",
    "each island has a validation loss of its own, and all must end and save at the same steps",
)
def _one_loss(job: "Job") -> Iterator[str]:
    train, keep = job.config.train, job.config.checkpoint
    keys = {"train.patience": train.patience, "checkpoint.keep_best": keep.keep_best}
    for key, value in keys.items():
        if value and job.config.outer.every:
            yield (
                f"{key}: {value} goes by one validation loss, and each island has its own; use {key} ="
                " 0, or outer.every = 0"
            )


TABLES = {"outer": Outer}


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
