"""The answer in sentences: what to run, why not what a reader would expect, and what it costs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compose.config.tables import Config, value_of
from compose.errors import ConfigError, in_columns
from compose.pipeline.schedules import ASYNCHRONOUS
from compose.planner.candidates import (
    DEGREES,
    FREED,
    PLAIN,
    TEXTBOOK,
    TIGHT,
    Candidate,
    Space,
    candidates,
    capacity,
    fits,
    known_as,
    lack_of_node,
    order,
    shape_for,
    with_keys,
)
from compose.planner.cluster import MeasuredCollective, load_cluster
from compose.planner.explain import neighbours, promise
from compose.planner.quick_memory import micro_batches
from compose.planner.quick_units import units_of_rank
from compose.planner.report import GIB, describe, recomputation, seconds
from compose.planner.search import record_all

_DAY = 86400.0
_HELPS = 1.05  # a step that is less than so much faster is not worth what it costs
_PER_PARAMETER = 20
"""Tokens for each parameter at which loss is least for the FLOPs (Hoffmann et al. 2022, table 3)."""
_COMPILED = "compile.mode"
_TRIES = 3  # records of a composition that a reader would expect, until one fits
# The next device up, with nodes of the same size.
_NEXT = {"a100_40gb": "a100_80gb", "a100_80gb": "h100_sxm", "h100_sxm": "h200", "h200": "b200"}


@dataclass(frozen=True)
class Alternative:
    """A composition beside the best one: what a reader would expect, or with one thing changed."""

    name: str
    candidate: Candidate | None = None
    """Its record; None if it is not legal, or does not fit where one thing changed."""
    note: str = ""
    """Why there is no record; or what was bought and its verb, as "more devices are"."""

    @property
    def step(self) -> float | None:
        """Seconds of a step; None if there is no record."""
        return self.candidate and self.candidate.recorded.step_seconds

    def as_data(self, space: Space) -> dict[str, Any]:
        """Return the composition, its step and whether it fits, for JSON."""
        if self.candidate is None:
            return {"step_seconds": None, "why": self.note}
        return {
            "step_seconds": self.step,
            "composition": composition_in_words(space, self.candidate),
            "fits": fits(space, self.candidate),
            "reserved": self.candidate.reserved,
        }


def composition_in_words(space: Space, candidate: Candidate) -> str:
    """Return a composition in plain words."""
    config, node = candidate.config, space.node
    parallel, inner = config.parallel, config.parallel.tp
    parts = []
    shared = parallel.dp_shard * parallel.cp
    if shared > 1:
        name = {0: "DDP", 3: "FSDP (ZeRO-3)"}.get(parallel.zero, f"ZeRO-{parallel.zero}")
        parts.append(f"{name} over {shared} devices")
    if parallel.dp_replicate > 1:
        parts.append(f"{parallel.dp_replicate} replicas")
    if inner > 1:
        parts.append(f"tensor parallel {inner} {'over nodes' if node % inner else 'in the node'}")
    if parallel.cp > 1:
        parts.append(f"context parallel {parallel.cp}")
    if parallel.ep > 1:
        parts.append(f"experts over {parallel.ep}")
    if parallel.pp > 1:
        stale = ", gradients of older weights" * (parallel.pp_schedule in ASYNCHRONOUS)
        parts.append(f"a pipeline of {parallel.pp} ({parallel.pp_schedule}{stale})")
    mesh = ", ".join(parts) or "one device"
    again = config.activation_checkpoint.mode
    text = f"{mesh}; {'no' if again == 'none' else recomputation(config)} recomputation"
    text += f", micro-batches of {config.train.micro_batch}"
    if parallel.offload == "cpu":
        text += ", with parameters and optimizer in host memory"
    elif config.optimizer.offload != "none":
        text += ", with the optimizer in host memory"
    for key in FREED:
        if (value := value_of(config, key)) != value_of(space.config, key):
            text += f", {key} {value}"
    return text


def expected(space: Space, recorded: Sequence[Candidate]) -> list[Alternative]:
    """Return plain FSDP and the textbook's mesh, each with its record or why there is none.

    The textbook's mesh has tp over the node, with pp and data parallel between nodes. In one node ZeRO
    alone is the textbook's too, so there it stands for a mesh that the reader would try next.
    """
    node, results = space.node, list[Alternative]()
    for best in recorded[:1]:  # a step of another batch, if that is free, is no comparison
        batch = best.config.train.global_batch
        space = replace(space, config=with_keys(space.config, {"train.global_batch": batch}))
        recorded = [c for c in recorded if c.config.train.global_batch == batch]
    for name, known, keys in (
        (PLAIN, PLAIN, {"pp": 1, "tp": 1, "dp_shard": space.world_size, "ep": 1, "zero": 3}),
        (f"tensor parallel {node} in the node", TEXTBOOK, {"tp": node}),
    ):
        mine = next((c for c in recorded if known_as(space, c.config.parallel) == known), None)
        if mine and fits(space, mine):
            results.append(Alternative(name, mine))
        elif node > 1 or known == PLAIN:
            named = {f"parallel.{axis}": n for axis, n in {"dp_replicate": 1, "cp": 1, **keys}.items()}
            results.append(_recorded_with(space, name, named, mine))
    return results


def _recorded_with(
    space: Space, name: str, keys: Mapping[str, int], short: Candidate | None
) -> Alternative:
    """Record the best composition by quick estimates that has these degrees.

    If it does not fit, its record corrects the quick estimates, and the next one is recorded. ``short``
    is one that was recorded and does not fit.
    """
    for key, value in keys.items():
        pinned, axis = value_of(space.config, key), key.partition(".")[2]
        if key in space.fixed and pinned not in (value, -1):
            return Alternative(name, note=f"{key} is pinned to {pinned}")
        if axis == "tp" and value > 1 and axis not in shape_for(space).axes:
            return Alternative(name, note=f"the plan of {space.config.model.name} cannot cut tp")
    pins = {key: value_of(space.config, key) for key in DEGREES if key in space.fixed}
    degrees = {key: degree for key, degree in {**pins, **keys}.items() if key in DEGREES[:-1]}
    product = abs(math.prod(degrees.values()))
    if space.world_size % product:
        needs = " x ".join(f"{key.partition('.')[2]} {n}" for key, n in degrees.items() if n > 1)
        return Alternative(name, note=f"{needs} does not divide {space.world_size:,} devices")
    data, train = keys.get("parallel.dp_shard", 1), space.config.train
    micro = train.micro_batch if "train.micro_batch" in space.fixed else 1
    batch = f"{train.global_batch:,} samples a step"
    if train.global_batch % (data * micro):
        to = f" to {data:,} devices" * (data > 1) + f" in micro-batches of {micro:,}" * (micro > 1)
        return Alternative(name, note=f"{batch} cannot be dealt{to}")
    here = replace(space, config=with_keys(space.config, dict(keys)), fixed={*space.fixed, *keys})
    left = list(candidates(here, shape_for(space), anyway=True))
    why = f"no mesh of it divides {batch} and the model's layers"
    try:  # what no candidate with these degrees can do
        alone = {"parallel.cp": 1, "parallel.tp": 1, "parallel.ep": 1, **keys}
        units_of_rank(shape_for(space), with_keys(space.config, alone), space.cluster)
    except ConfigError as error:
        why = error.problems[0]
    for _ in range(_TRIES):
        if not left:
            break
        factor = short.reserved / max(1.0, short.rough.memory) if short else 1.0
        number = min(range(len(left)), key=lambda i: order(here, left[i], factor))
        [made] = record_all(here, [left.pop(number).config])
        if isinstance(made, ConfigError):
            why = made.problems[0]
            continue
        if fits(space, made):
            return Alternative(name, made)
        short = made if short is None or made.reserved < short.reserved else short
    return Alternative(name, short, "" if short else why)


def _twice_as_fast(row: MeasuredCollective) -> MeasuredCollective:
    seconds = tuple(value / 2 for value in row.seconds)
    return replace(row, inverse_bandwidth=row.inverse_bandwidth / 2, seconds=seconds)


def sensitivities(space: Space, best: Candidate) -> list[Alternative]:
    """Return the steps with twice the devices, twice the memory, links twice as fast, and compiled."""
    cluster, config = space.cluster, best.config
    device = replace(cluster.device, memory=cluster.device.memory * 2)
    roomy = replace(space, cluster=replace(cluster, device=device))
    over = "between" if space.world_size > cluster.node else "within"
    link = getattr(cluster, over)
    rows = tuple(
        _twice_as_fast(row) if (row.ranks * row.stride <= cluster.node) == (over == "within") else row
        for row in cluster.measured.collectives
    )
    link = replace(link, bandwidth=link.bandwidth * 2, in_switch=link.in_switch * 2)
    fast = replace(cluster, **{over: link}, measured=replace(cluster.measured, collectives=rows))
    wider = [
        with_keys(config, {key: value_of(config, key) * 2, "parallel.pp_layers": ()})
        for key in ("parallel.dp_shard", "parallel.dp_replicate")
        if key not in space.fixed and (key == "parallel.dp_shard" or config.parallel.zero in (0, 3))
    ]
    more = replace(space, world_size=space.world_size * 2)
    results = [
        _variant("twice the devices", more, best, [c for one in wider for c in _around(space, one)]),
        _variant("twice the memory", roomy, best, _around(space, config)),
    ]
    if (larger := results[1].candidate) and fits(space, best):
        # A composition that is slower, or that today's memory holds, is no gain of more memory.
        here = not any(order(space, larger)[:2])
        if here or larger.recorded.step_seconds > best.recorded.step_seconds:
            results[1] = Alternative("twice the memory", best)
    if space.world_size > 1:
        name = f"links {'between nodes ' if over == 'between' else ''}twice as fast"
        results.append(_variant(name, replace(space, cluster=fast), best, [config]))
    notes = ("more devices are", "more memory is", "faster links are")
    results = [replace(one, note=note) for one, note in zip(results, notes, strict=False)]
    if cluster.backend == "nccl" and config.compile.mode == "off" and _COMPILED not in space.fixed:
        compiled = with_keys(config, {_COMPILED: "block"})
        results.append(_variant(f'{_COMPILED} = "block"', space, best, [compiled]))
    return results


def further(space: Space, best: Candidate) -> list[Alternative]:
    """Return the step with half the batch, and that of as many of the next device."""
    results, batch = [], {"train.global_batch": best.config.train.global_batch // 2}
    if best.config.train.global_batch % 2 == 0:
        half = replace(space, config=with_keys(space.config, batch))
        around = _around(space, with_keys(best.config, batch))
        results.append(_variant("half the batch", half, best, around))
    if name := _NEXT.get(space.cluster.name):
        other = replace(space, cluster=load_cluster(name))
        results.append(_variant(f"as many of {name}", other, best, _around(space, best.config)))
    return results


def further_in_words(best: Candidate, other: Alternative) -> str:
    """Return one of those steps, with its tokens a second beside the best candidate's."""
    if other.candidate is None:
        return f"with {other.name}: {other.note or 'this composition and its neighbours do not fit'}"
    one, now = other.candidate.recorded, best.recorded
    rate = one.tokens_per_second_per_device / now.tokens_per_second_per_device
    return f"with {other.name}: {seconds(one.step_seconds)} a step, {rate:.2f} times the tokens/s"


def _around(space: Space, config: Config) -> list[Config]:
    """Return a composition, and the same with other recomputation or micro-batches."""
    changes = [
        keys
        for name, keys in neighbours(space, config)
        if name.startswith(("recompute", "micro_batch"))
    ]
    return [config, *(with_keys(config, keys) for keys in changes)]


def _variant(name: str, space: Space, best: Candidate, configs: Sequence[Config]) -> Alternative:
    """Record the best of some compositions in another space, by quick estimates."""
    shape = shape_for(space)
    legal = [config for config in configs if micro_batches(config)]
    if not legal:
        batch = space.config.train.global_batch
        return Alternative(name, note=f"{batch:,} samples cannot be dealt to these devices")
    for config in sorted(legal, key=lambda one: promise(space, shape, best, one))[:2]:
        [made] = record_all(space, [config])
        if not isinstance(made, ConfigError) and fits(space, made):
            return Alternative(name, made)
    return Alternative(name)


def sentences(
    space: Space,
    best: Candidate,
    others: Sequence[Alternative],
    variants: Sequence[Alternative],
    tokens: tuple[float, str],
) -> list[str]:
    """Return three sentences: what to run, why not what a reader would expect, what it costs.

    ``tokens`` are those of the run, with their words, as "1T tokens".
    """
    estimate, room = best.recorded, capacity(space.cluster) / GIB
    whole, composition = fits(space, best), composition_in_words(space, best)
    held = f"{best.reserved / GIB:.1f} of {room:.1f} GiB"
    if whole:
        first = (
            f"Run {composition}: a step takes {seconds(estimate.step_seconds)}, at"
            f" {estimate.tokens_per_second_per_device:,.0f} tokens/s a device and {estimate.mfu:.1%}"
            f" MFU, and the fullest device holds {held}"
        )
    else:
        lack = lack_of_node(space, best) or f"needs {held} of a device"
        first = f"Nearest to fit is {composition}: it {lack}"
    clauses = [_instead(space, best, other) for other in others]
    last = []
    if whole:
        took = tokens[0] / (estimate.tokens_per_second_per_device * space.all_ranks)
        hours = took * space.all_ranks / 3600
        energy = ""
        if kwh := kwh_of(space, best, tokens[0]):
            known = all(cluster.host_power for cluster, _ in space.devices)
            energy = f" and {kwh:,.0f} kWh"
            energy += "" if known else " of devices alone, as host_power is unknown"
        last = [f"{tokens[1]} take {span(took)}, {hours:,.0f} device-hours{energy}"]
    for one in variants:
        if one.step and one.step < estimate.step_seconds and not one.note and whole:  # it costs nothing
            last.append(f"with {one.name} a step takes {seconds(one.step)}")
    bought = [one for one in variants if one.note]
    last += [_to_buy(best, whole, bought)] if bought else []
    texts = [first, "; ".join(clauses), "; ".join(last)]
    return [f"{text[0].upper()}{text[1:]}." for text in texts if text]


def kwh_of(space: Space, candidate: Candidate, tokens: float) -> float | None:
    """Return the kWh of a run of so many tokens; None if the power of a device is not known."""
    of_step, train = candidate.recorded.kwh, candidate.config.train
    return of_step and of_step * tokens / (train.global_batch * train.seq_len)


def _instead(space: Space, best: Candidate, other: Alternative) -> str:
    candidate = other.candidate
    if candidate is None:
        return f"{other.name} is not possible: {other.note}"
    if candidate.config == best.config:
        return f"{other.name} is this composition"
    if not fits(space, candidate):
        over = (candidate.reserved - capacity(space.cluster)) / GIB
        return f"{other.name} {lack_of_node(space, candidate) or f'lacks {over:.1f} GiB a device'}"
    step, now = candidate.recorded.step_seconds, best.recorded.step_seconds
    text = f"{other.name} takes {seconds(step)} ({step / now - 1:+.1%})"
    full = candidate.reserved / capacity(space.cluster)
    return text + f", but fills {full:.0%} of a device" * (step < now and full > TIGHT)


def _to_buy(best: Candidate, whole: bool, variants: Sequence[Alternative]) -> str:
    known = [(one.name, one.step, one.note) for one in variants if one.step]
    if not known:
        helps = "helps this composition" if whole else "makes it fit"
        return f"neither twice the devices nor twice the memory {helps}"
    if not whole:
        return f"it fits with {' or '.join(name for name, _, _ in known)}"
    gains = [best.recorded.step_seconds / step for _, step, _ in known]
    words = [f"{gain:.2f} times{' as fast' * (i == 0)}" for i, gain in enumerate(gains)]
    texts = [f"{word} with {name}" for word, (name, _, _) in zip(words, known, strict=True)]
    if max(gains) < _HELPS:
        return f"a step is {', '.join(texts)}, so none of them helps"
    buys = known[gains.index(max(gains))][2]
    return f"a step is {', '.join(texts)}, so {buys} the next thing to buy"


def span(seconds: float) -> str:
    """Return a long time in hours, days or years."""
    days = seconds / _DAY
    if days < 2:
        return f"{seconds / 3600:.3g} hours"
    years = days / 365.25
    if days < 999.5:
        return f"{days:.3g} days"
    return f"{years:.3g} years" if years < 999.5 else f"{years:,.0f} years"


def example_tokens(space: Space) -> float:
    """Return 20 tokens for each parameter that computes on a token (Hoffmann et al. 2022, table 3)."""
    return _PER_PARAMETER * shape_for(space).active


def batch_table(rows: Sequence[tuple[Space, Candidate]], tokens: float) -> str:
    """Return the best candidate of each global batch, with the days that ``tokens`` take."""
    cells = [["batch", "tokens", "tokens/s", "days", "device-hours", "composition"]]
    for space, best in rows:
        rate, train = best.recorded.tokens_per_second_per_device, space.config.train
        took = tokens / (rate * space.all_ranks)
        figures = [f"{rate:,.0f}", f"{took / _DAY:,.2f}", f"{took * space.all_ranks / 3600:,.0f}"]
        figures = figures if fits(space, best) else ["does not fit", "-", "-"]
        batch = [f"{train.global_batch:,}", f"{train.global_batch * train.seq_len:,}"]
        cells.append([*batch, *figures, describe(best)])
    return "\n".join(in_columns(cells))


def legend(space: Space) -> str:
    """Return what the columns of the table are."""
    kind = space.config.precision.param
    rates = [cluster.device.peak[kind] / 1e12 for cluster, ranks in space.devices for _ in range(ranks)]
    peak = f"{sum(rates) / len(rates):,.0f} TFLOP/s of {kind}{' on average' if space.kinds else ''}"
    return (
        f"step s: an optimizer step; tokens/s: of a device; MFU: of {peak}, by the model's FLOPs;"
        "\nbubble: share of a step that pipeline ranks wait; GiB: reserved on the"
        f" fullest device, of {capacity(space.cluster) / GIB:.1f}; micro: samples a forward"
    )
