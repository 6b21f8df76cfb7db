"""Finer choices for the best few compositions, and the choice between those that take equally long."""

from collections.abc import Iterator, Sequence
from typing import Any

from compose.parallel.mesh import AXES
from compose.planner.candidates import (
    FREED,
    REFINED,
    Candidate,
    Space,
    fits,
    order,
    value_of,
    with_keys,
)
from compose.planner.quick_estimate import ModelShape, micro_batches, quick

_NEAR = 1.02  # a simpler composition may take so much longer
_BASES = 2  # recorded candidates that are refined
# Layers of a rank, times micro-batches, of a record with a budget, which takes all layers, at most.
_MOST_LAYERS = 150


def ranked(space: Space, recorded: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates, the best first: the simplest of those within 2% of the fastest."""
    results = sorted(recorded, key=lambda c: order(space, c))
    if not results or space.objective == "memory" or not fits(space, results[0]):
        return results
    *same, step, _ = order(space, results[0])
    near = [c for c in results if order(space, c)[:-2] == tuple(same)]
    near = [c for c in near if order(space, c)[-2] <= step * _NEAR]
    best = min(near, key=lambda c: (complexity(c), order(space, c)))
    return [best, *(c for c in results if c is not best)]


def complexity(candidate: Candidate) -> int:
    """Return how many things a person has to understand of a composition, beyond plain FSDP."""
    config, parallel = candidate.config, candidate.config.parallel
    return sum(
        (
            sum(getattr(parallel, axis) > 1 for axis in (*AXES, "ep") if axis != "dp_shard"),
            parallel.pp > 1,  # its micro-batches, and its bubble
            parallel.pp > 1 and parallel.pp_schedule != "1F1B",
            2 * (parallel.offload != "none"),
            config.optimizer.offload != "none",
            config.activation_checkpoint.mode == "budget",
            config.train.loss_chunk > 0,
            sum(getattr(config.comm, key) != "off" for key in ("weights", "gradients", "activations")),
        )
    )


def refinements(space: Space, shape: ModelShape, recorded: Sequence[Candidate]) -> list[Candidate]:
    """Return finer variants of the best recorded candidates that may be better, the best first.

    Their quick estimates are corrected by the record of the candidate that they are variants of.
    """
    results: list[tuple[tuple[Any, ...], int, Candidate]] = []
    bases = ranked(space, recorded)[:_BASES]
    for base in bases:
        size, step = base.reserved / base.rough.memory, base.recorded.step_seconds / base.rough.step
        for keys in _variants(space, shape, base):
            config = with_keys(base.config, keys)
            if micro_batches(config) < max(1, config.parallel.pp if config.parallel.pp > 1 else 1):
                continue
            one = Candidate(config, base.keys | keys, quick(shape, config, space.cluster))
            # A simpler one wins if it is nearly as fast.
            more = _NEAR if complexity(one) > complexity(bases[0]) else 1.0
            place = order(space, one, size, step * more)
            if place < order(space, bases[0]):
                results.append((place, len(results), one))
    return [candidate for *_, candidate in sorted(results, key=lambda row: row[:2])]


def _variants(space: Space, shape: ModelShape, base: Candidate) -> Iterator[dict[str, Any]]:
    config, free = base.config, {key for key in REFINED if key not in space.fixed}
    train, parallel = config.train, config.parallel
    micros = [train.micro_batch]
    if "train.micro_batch" not in space.fixed:
        micros = [m for m in (train.micro_batch, train.micro_batch * 2, train.micro_batch // 2) if m]
    layers = shape.count * min(3, micro_batches(config))
    mode, budget = "activation_checkpoint.mode", "activation_checkpoint.budget"
    ways = [dict[str, Any]()]
    # A pipeline would need a record of all layers of every rank.
    if parallel.pp == 1 and budget in free and mode not in space.fixed and layers <= _MOST_LAYERS:
        ways += [{mode: "budget", budget: value} for value in REFINED[budget]]
    chunks = [train.loss_chunk]
    if "train.loss_chunk" in free and train.micro_batch * train.seq_len // parallel.cp > 4096:
        chunks += REFINED["train.loss_chunk"]
    places = [config.optimizer.offload]
    if "optimizer.offload" in free and not fits(space, base) and parallel.offload == "none":
        places += REFINED["optimizer.offload"]
    for way in ways:
        for micro in micros:
            for chunk in chunks:
                for place in places:
                    if chunk != train.loss_chunk and way == {} and micro <= train.micro_batch:
                        continue  # it costs time, and is for what needs the memory
                    keys = {"train.micro_batch": micro, "train.loss_chunk": chunk}
                    keys = way | keys | {"optimizer.offload": place}
                    yield {key: value for key, value in keys.items() if value != value_of(config, key)}
    for key in space.freed:
        for value in FREED.get(key, ()):
            if key == "train.global_batch":
                value = int(value * train.global_batch)
            yield {key: value}
