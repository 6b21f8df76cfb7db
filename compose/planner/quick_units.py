"""The units of a model as one rank has them at any degrees: seconds and bytes, from its probes."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from compose.config.job import Job, make_job
from compose.config.tables import Config
from compose.errors import ConfigError
from compose.memory.activation_checkpointing import ActivationCheckpoint, UnitCost, unit_costs, within
from compose.parallel.mesh import AXES, Parallel
from compose.parallel.tensor_parallel import check_heads
from compose.planner import costs
from compose.planner.cluster import Cluster
from compose.planner.layer_probe import (
    LAST,
    FigureName,
    Figures,
    SmallModel,
    batch_of,
    config_of_probe,
    probe,
    small,
)
from compose.planner.probe_scaling import combined
from compose.planner.record import Operator
from compose.planner.record_cache import packed_rows, remembered, tables_of
from compose.planner.step_time import bytes_seconds, dispatch, operator_seconds


@dataclass(frozen=True)
class ModelShape:
    """A model, as far as quick estimates know it; its probes are made when they are needed first."""

    stacks: Mapping[tuple[int, ...], int]
    """How many stacks of experts there are, by their shapes."""
    active: float
    """The parameters that compute on a token."""
    axes: frozenset[str]
    """The axes of tp, cp, pp and ep that the model's plan can cut."""
    job: Job
    few: SmallModel
    cache: Path | None = None
    """The folder of probes that were made before; None: none is used."""
    known: dict[Any, Any] = field(default_factory=dict, compare=False)
    """Results of parts of quick estimates, by what decides them."""

    @property
    def count(self) -> int:
        """The number of layers."""
        return len(self.few.order)


@dataclass(frozen=True)
class _ModelAndData:
    """A config that compares equal to any other with the same model and data."""

    key: str
    config: Config = field(compare=False)


def shape_of(config: Config, cache: Path | None = None) -> ModelShape:
    """Return what a quick estimate takes of a config's model; it holds the model's probes."""
    return _shape_of(
        _ModelAndData(repr((config.model, config.train.seq_len, config.data)), config), cache
    )


@lru_cache(8)
def _shape_of(asked: _ModelAndData, cache: Path | None) -> ModelShape:
    alone = replace(asked.config.parallel, **dict.fromkeys((*AXES, "ep"), 1))
    job = make_job(replace(asked.config, parallel=alone), 1)
    few = small(job)
    routed = {id(p) for n, _ in job.resolved.expert for p in job.model.get_submodule(n).parameters()}
    cuts = {
        "tp": job.resolved.tensor,
        "cp": job.resolved.context,
        "pp": job.resolved.pipeline,
        "ep": job.resolved.expert,
    }
    top_k, weights = getattr(job.config.model.config, "top_k", 1), list(job.model.parameters())
    stacks = Counter(tuple(p.shape) for p in weights if p.ndim == 3 and id(p) in routed)
    active = sum(p.numel() * (min(1, top_k / len(p)) if id(p) in routed else 1) for p in weights)
    axes = frozenset(axis for axis, cut in cuts.items() if cut)
    return ModelShape(stacks, active, axes, job, few, cache)


class UnitEstimate(NamedTuple):
    """One unit on one rank, for one micro-batch."""

    forward: float
    """Seconds of operators, and of messages that nothing hides."""
    backward: float
    """The same, with what is computed again."""
    issue: tuple[float, float]
    """Seconds in which the host issues both, without what data parallel adds."""
    sent: dict[str, float]
    """Seconds of both that are messages, by axis."""
    kept: float
    """Bytes that wait for backward."""
    working: float
    """Bytes that backward adds at most to what earlier units keep."""
    results: float
    """Bytes of the results of products, whose gradients those of weights need."""
    own: float
    """Bytes of gradients that backward has beside them."""
    dense: float
    """Numbers of a rank without data parallel."""
    experts: float
    number: int
    """Its experts, of all ranks."""
    tensors: int
    """Its parameters."""
    trained: float
    """The part of them that is trained."""


def units_of_rank(shape: ModelShape, config: Config, cluster: Cluster) -> dict[str, UnitEstimate]:
    """Return the units by name, as one rank has them."""
    parallel = config.parallel
    own = (
        *(parallel.tp, parallel.cp, parallel.ep, parallel.ranks, parallel.cp_method),
        *(
            parallel.sequence,
            parallel.loss,
            config.precision,
            config.train.micro_batch,
            config.compile.mode,
            cluster,
        ),
    )
    recomputed = config.activation_checkpoint, config.train.loss_chunk
    key = *own, *recomputed, parallel.pp > 1, parallel.offload, shards(config)[0] > 1
    if key not in shape.known:
        if own not in shape.known:
            shape.known[own] = {
                unit: _priced(rows, config, cluster)
                for unit, rows in _figures(shape, config, cluster).items()
            }
        kept = _kept_groups(shape, config.activation_checkpoint)
        stream = stream_bytes(config)
        shape.known[key] = {
            unit: _unit(priced, config, cluster, kept.get(unit, _NOTHING_AGAIN), stream, unit == LAST)
            for unit, priced in shape.known[own].items()
        }
    return shape.known[key]


_Rows = dict[FigureName, tuple[float, ...]]


def _figures(shape: ModelShape, config: Config, cluster: Cluster) -> dict[str, _Rows]:
    """Return the figures of each unit at a config's tp, cp and ep for one micro-batch.

    Raises ConfigError if the model cannot be cut so.
    """
    parallel, device = config.parallel, cluster.device
    if heads := shape.job.resolved.heads:  # probes of tp 2 and 4 say nothing of them
        check_heads(*heads, parallel.tp)
    own = (
        *(parallel.cp_method, parallel.sequence, parallel.loss, config.precision, cluster.backend),
        *(device.capability, cluster.target.float8),
    )
    key = "figures", parallel.tp, parallel.cp, parallel.ep, *own
    if key not in shape.known:

        def made(*degrees: int) -> Figures:
            if (degrees, own) not in shape.known:
                shape.known[degrees, own] = _probed(shape, config, degrees, cluster)
            if isinstance(shape.known[degrees, own], ConfigError):
                raise shape.known[degrees, own]
            return shape.known[degrees, own]

        shape.known[key] = combined(parallel.tp, parallel.cp, parallel.ep, made)
    by_unit: dict[str, _Rows] = {}
    samples, length = batch_of(config.train.seq_len, shape.few.prime)
    factor = config.train.micro_batch * config.train.seq_len / (samples * length)
    for part, values in shape.known[key].items():
        grows = part.tokens or (False,) * len(values)
        scaled = (v * factor if g else v for v, g in zip(values, grows, strict=True))
        by_unit.setdefault(part.unit, {})[part] = tuple(scaled)
    return by_unit


def _probed(
    shape: ModelShape, config: Config, degrees: tuple[int, ...], cluster: Cluster
) -> Figures | ConfigError:
    """Return the figures of a probe, by its file if there is one, or why the model cannot be cut."""

    def made() -> tuple[Sequence[Any], Sequence[str]]:
        try:
            return [*probe(shape.job, config, shape.few, degrees, cluster).items()], ()
        except ConfigError as error:
            return (), error.problems

    of = config_of_probe(config, degrees, shape.few.prime)
    model, parallel, device = of.model, of.parallel, cluster.device.capability
    played = cluster.backend, device, cluster.target.float8
    decides = repr((model, parallel, of.train.seq_len, packed_rows(of.data), played, tables_of(of)))
    rows, problems = remembered(shape.cache, "probe", model.name, decides, made)
    if problems:
        return ConfigError(*problems)
    return {
        FigureName(unit, phase, what, number, tuple(form), tuple(grows)): tuple(values)
        for (unit, phase, what, number, form, grows), values in rows
    }


_Ways = tuple[tuple[float, tuple[str, ...] | None], ...]
"""Shares of equal layers, and the groups whose results each keeps; None: it computes nothing again."""
_NOTHING_AGAIN: _Ways = ((1.0, None),)


def _kept_groups(shape: ModelShape, options: ActivationCheckpoint) -> dict[str, _Ways]:
    """Return how the layers of each kind are recomputed."""
    kinds, mode = shape.few.counts, options.mode
    if mode == "budget":
        if "costs" not in shape.known:
            asked = shape.job.config
            decides = repr((asked.model, asked.train.seq_len, asked.data))
            made = remembered(
                shape.cache, "units", asked.model.name, decides, lambda: _costs_of_units(shape)
            )
            shape.known["costs"] = {unit: UnitCost(**fields) for unit, fields in made.items()}
        of_layer = {str(i): shape.known["costs"][unit] for i, unit in enumerate(shape.few.order)}
        chosen = within(of_layer, options.budget)
        result: dict[str, _Ways] = {}
        for kind, count in kinds.items():
            ways = Counter(chosen[str(i)] for i, unit in enumerate(shape.few.order) if unit == kind)
            result[kind] = tuple((number / count, way) for way, number in ways.items())
        return result
    ways = _NOTHING_AGAIN
    if mode == "full":
        ways = ((1.0, ()),)
    elif mode == "every_k":
        ways = ((1 / options.every, ()), (1 - 1 / options.every, None))
    elif mode == "selective":
        groups = {one if one in ("attention", "messages") else "matmul" for one in options.keep}
        ways = ((1.0, tuple(sorted(groups))),)
    return dict.fromkeys(kinds, ways)


def _costs_of_units(shape: ModelShape) -> dict[str, dict[str, Any]]:
    names = {unit: name for name, unit in shape.few.units.items() if unit in shape.few.counts}
    costs = unit_costs(shape.few.model, [*names.values()], shape.job.options.sample)
    return {unit: asdict(costs[name]) for unit, name in names.items()}


class _Priced(NamedTuple):
    """Seconds and bytes of a unit, before recomputation."""

    spent: Mapping[tuple[str, str], float]
    """Seconds of operators by phase and group."""
    sent: Mapping[str, Mapping[str, float]]
    """Seconds of messages that nothing hides, by phase and axis."""
    issued: Mapping[str, float]
    """Pieces of work that the host issues, by phase, and those of a forward that keeps products."""
    size: Mapping[str, float]
    """Amounts of memory by name."""


def _priced(rows: _Rows, config: Config, cluster: Cluster) -> _Priced:
    parallel = config.parallel
    fused = "memory" if config.compile.mode == "off" else "fused"
    spent: dict[tuple[str, str], float] = defaultdict(float)
    size: dict[str, float] = defaultdict(float)
    sent: dict[str, dict[str, float]] = {phase: defaultdict(float) for phase in "FEB"}
    issued: dict[str, float] = dict.fromkeys(("F", "E", "B", "cheap"), 0.0)
    for part, values in rows.items():
        phase = part.phase
        if phase == "M":
            size[part.what] = values[0]
        elif part.what == "op":
            flops, moved, *sizes = values
            name, kind, dtype = part.form
            shape = tuple(max(1, round(n)) for n in sizes)
            work = Operator(0, 0, name, kind, flops, round(moved), dtype, shape)
            spent[phase, "matmul"] += operator_seconds(cluster, work)
            issued[phase] += 1
        elif part.what == "attention":
            count, flops, moved = values
            name, dtype, head = part.form
            if count:
                of_one = flops / count, round(moved / count)
                work = Operator(0, 0, name, "attention", *of_one, dtype, (head,))
                spent[phase, "attention"] += count * operator_seconds(cluster, work)
                issued[phase] += count
        elif part.what == fused:
            kernels, *moved = values
            name, of_samples = part.form
            if kernels and not (of_samples and config.train.micro_batch == 1):
                took = bytes_seconds(cluster, name, sum(moved) / kernels)
                spent[phase, "memory"] += kernels * took
                issued[phase] += kernels
                issued["cheap"] += kernels * (phase == "F")
        elif part.what == "message":
            count, moved = values
            kind, axis, _ = part.form
            took = count * _message(cluster, parallel, kind, axis, moved / max(1, count))
            sent[phase][axis.partition("+")[0]] += took
            issued[phase] += count
    for phase in "FB":  # a ring's messages run beside its attention
        shown = sent[phase].get("cp", 0.0)
        if shown and parallel.cp_method == "ring":
            sent[phase]["cp"] = max(0.0, shown - spent[phase, "attention"] * (1 - 1 / parallel.cp))
    return _Priced(spent, sent, issued, size)


def _unit(
    priced: _Priced, config: Config, cluster: Cluster, ways: _Ways, stream: float, last: bool
) -> UnitEstimate:
    spent, sent, issued, size = priced
    begin, end, backward = (sum(v for (p, _), v in spent.items() if p == phase) for phase in "FEB")
    axes = dict.fromkeys(axis for phase in "FEB" for axis in sent[phase])  # sums depend on their order
    every = defaultdict(float, {axis: sum(sent[phase][axis] for phase in "FEB") for axis in axes})
    kept, working = 0.0, size["backward"]
    again = issued_again = 0.0
    segment = config.activation_checkpoint.segment
    for share, groups in ways:
        if groups is None:
            kept += share * size["kept"]
            continue
        # Recomputation ends with what backward needs last, of a segment's last layer.
        inner = 1 - 1 / segment
        again += share * (begin - sum(spent["F", group] for group in groups) + inner * end)
        for axis in axes:
            # Two messages are around a pair of products, and the one that sums is kept.
            first, last_ones = sent["F"][axis], sent["E"][axis]
            took = (first + last_ones) / 2 if "messages" in groups else first + inner * last_ones
            every[axis] += share * took
        issued_again += share * (issued["cheap"] if groups else issued["F"] + inner * issued["E"])
        kept += share * (stream / segment + sum(size[f"{group} kept"] for group in groups))
        kept += share * size["rows kept"] * ("messages" in groups)
        alone = sum(size[f"{group} alone"] for group in groups)
        working = max(working, size["backward"] + alone + (segment - 1) * size["kept"])
    if config.train.loss_chunk and last:
        # Logits of a chunk in the products' type and twice in float32; weights' gradient in float32.
        tokens = config.train.micro_batch * config.train.seq_len / config.parallel.cp
        logits, chunk = size["matmul kept"], min(1.0, config.train.loss_chunk / tokens)
        kept += 4 * size["trained weights"] - logits
        shown = chunk * logits * (1 + 8 / config.precision.param_dtype.itemsize)
        working = kept + shown + stream
    issue, issue_back = dispatch(cluster, config.compile.mode != "off")
    shown = sum((*sent["F"].values(), *sent["E"].values()))
    numbers = size["weights"] + size["expert weights"]
    here = size["weights"] + size["expert weights"] / config.parallel.ep
    issued_back = issued["B"] * issue_back + issued_again * issue
    return UnitEstimate(
        begin + end + shown,
        backward + again + sum(every.values()) - shown,
        ((issued["F"] + issued["E"]) * issue, issued_back),
        dict(every),
        kept,
        working,
        size["matmul kept"],
        min(size["own gradients"], config.precision.param_dtype.itemsize * here),
        # Both ends of a pipeline have a copy of a tied weight.
        size["weights"] + size["tied"] * (config.parallel.pp > 1),
        size["expert weights"] / config.parallel.ep,
        int(size["experts"]),
        int(size["tensors"]),
        (size["trained weights"] + size["trained expert weights"]) / numbers if numbers else 1.0,
    )


def _message(cluster: Cluster, parallel: Parallel, kind: str, axis: str, size: float) -> float:
    """Return the seconds of a message of tp, cp or ep."""
    if axis == "ep":
        return costs.collective_seconds(cluster, kind, size, parallel.ep, 1, parallel.ranks)
    ranks = math.prod(getattr(parallel, each) for each in axis.split("+") if hasattr(parallel, each))
    stride = 1 if "tp" in axis else parallel.tp
    return costs.collective_seconds(cluster, kind, size, ranks, stride, parallel.ranks)


def stream_bytes(config: Config) -> float:
    """Return the bytes of what stages send for a micro-batch."""
    parallel, train = config.parallel, config.train
    tokens = train.micro_batch * train.seq_len / parallel.cp
    # With sequence parallel each rank of tp sends its part of the stream.
    share = parallel.tp if parallel.sequence else 1
    width = getattr(config.model.config, "dim", 0)
    return tokens / share * width * config.precision.param_dtype.itemsize


def shards(config: Config) -> tuple[int, int]:
    """Return the ranks that share weights, and those that share experts."""
    parallel = config.parallel
    if parallel.zero == 0:
        return 1, 1
    over = parallel.dp_shard * parallel.cp
    return over, over * parallel.tp // math.gcd(over * parallel.tp, parallel.ep)  # as expert_mesh
