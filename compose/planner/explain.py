"""Why other compositions lose: for each one that a person would ask about, the figure that decides."""

from collections.abc import Iterator
from typing import Any

from compose.planner.candidate import Candidate, Space, capacity
from compose.planner.quick import Facts, Quick, micro_batches, quick
from compose.planner.search import facts_for, with_keys

_WORDS = {
    "compute": "more computation",
    "tp": "messages of tp",
    "cp": "messages of cp that attention does not hide",
    "ep": "messages to experts",
    "bubble": "the pipeline's bubble",
    "dp": "messages of data parallel that computation does not hide",
    "optimizer": "the optimizer",
    "offload": "copies from and to host memory",
}


def alternatives(space: Space, best: Candidate) -> list[str]:
    """Return one line for each neighbour of the best candidate.

    The differences are those of the quick estimates, which are rough.
    """
    facts = facts_for(space)
    now = quick(facts, best.config, space.cluster)
    lines = []
    for name, keys in _neighbours(space, best):
        config = with_keys(best.config, {"parallel.pp_layers": (), **keys})
        if not micro_batches(config):
            lines.append(f"{name}: its ranks do not divide the global batch")
            continue
        lines.append(f"{name}: {_difference(space, facts, now, quick(facts, config, space.cluster))}")
    return lines


def _difference(space: Space, facts: Facts, now: Quick, other: Quick) -> str:
    room = capacity(space.cluster)
    if other.memory > room >= now.memory:
        over = (other.memory - room) / 2**30
        most = max(other.bytes, key=lambda k: other.bytes[k] - now.bytes[k])
        more = (other.bytes[most] - now.bytes[most]) / 2**30
        return f"does not fit by {over:.1f} GiB ({most} +{more:.1f} GiB)"
    change = other.step - now.step
    part = max(other.seconds, key=lambda k: _more(now, other, k) * (1 if change >= 0 else -1))
    of_part = _more(now, other, part)
    each = of_part / max(1, facts.count) * 1000
    return (
        f"{change:+.2f} s a step; most of it {_WORDS[part]}: {of_part:+.2f} s, {each:+.1f} ms a layer"
    )


def _more(now: Quick, other: Quick, part: str) -> float:
    return other.seconds.get(part, 0.0) - now.seconds.get(part, 0.0)


def _neighbours(space: Space, best: Candidate) -> Iterator[tuple[str, dict[str, Any]]]:
    parallel, node = best.config.parallel, space.cluster.node
    for axis in ("tp", "cp", "pp", "dp_replicate"):
        degree = getattr(parallel, axis)
        if f"parallel.{axis}" in space.fixed:
            continue
        if parallel.dp_shard % 2 == 0:
            leaves = " leaves the node" if axis == "tp" and degree * 2 > node >= degree else ""
            yield (
                f"{axis} {degree * 2}{leaves}",
                {f"parallel.{axis}": degree * 2, "parallel.dp_shard": parallel.dp_shard // 2},
            )
        if degree > 1:
            name = f"no {axis}" if degree == 2 else f"{axis} {degree // 2}"
            yield (
                name,
                {f"parallel.{axis}": degree // 2, "parallel.dp_shard": parallel.dp_shard * 2},
            )
        if degree > 2:
            keys = {f"parallel.{axis}": 1, "parallel.dp_shard": parallel.dp_shard * degree}
            yield f"no {axis}", keys
    for zero in (1, 2, 3):
        if zero != parallel.zero and parallel.dp_shard * parallel.cp > 1:
            yield f"zero {zero}", {"parallel.zero": zero}
    for mode in ("none", "selective", "full"):
        if mode != best.config.activation_checkpoint.mode:
            yield f"recompute {mode}", {"activation_checkpoint.mode": mode}
    if parallel.offload == "none":
        yield "offload", {"parallel.offload": "cpu", "parallel.zero": 3}
    micro = best.config.train.micro_batch
    yield f"micro_batch {micro * 2}", {"train.micro_batch": micro * 2}
    if micro > 1:
        yield f"micro_batch {micro // 2}", {"train.micro_batch": micro // 2}


def reasons(space: Space, best: Candidate) -> dict[str, str]:
    """Return a reason for each key of the best candidate, by the key."""
    parallel, node = best.config.parallel, space.cluster.node
    room = capacity(space.cluster) / 2**30
    within = parallel.tp <= node
    return {
        "parallel.tp": "inside a node of " + str(node) if within else f"over nodes of {node}",
        "parallel.cp": "ranks that share a sequence",
        "parallel.pp": "stages of the model",
        "parallel.dp_shard": "what is left, so that the state is shared",
        "parallel.dp_replicate": "copies of the sharded state",
        "parallel.ep": "ranks that share the experts",
        "parallel.zero": "the fastest stage that fits",
        "parallel.pp_schedule": "the smallest bubble of those that fit",
        "activation_checkpoint.mode": f"{best.reserved / 2**30:.1f} of {room:.1f} GiB are used",
        "parallel.offload": "nothing else fits",
        "train.micro_batch": "samples of one forward",
    }
