"""Probes: one layer of each kind and the model's ends, run once on a small mesh of meta tensors.

A probe tells what a unit computes, sends, reads and keeps. Sizes at other degrees follow from few
probes (probe_scaling.py). The number of tokens is a prime, which divides only the sizes that grow with
tokens.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

from torch import nn

from compose.config.job import Job, make_job
from compose.config.tables import Config
from compose.memory.activation_checkpointing import ActivationCheckpoint
from compose.ops import kernel_table
from compose.ops.dropout import DropoutKey
from compose.ops.tensors import local_tensor, tied_names
from compose.parallel.mesh import init_mesh
from compose.planner import memory
from compose.planner.cluster import Cluster
from compose.planner.few_layers import busiest_rank, kind_of, without_layers
from compose.planner.operator_figures import WEIGHTS
from compose.planner.record import Operator, Record, RecordedMessage, Wait
from compose.planner.record_cache import packed_rows
from compose.planner.step_time import NO_KERNEL, axis_of, equal_kernel, joined

_PRIMES = (17, 19, 23, 29, 31)
_TOKENS = 32768  # of a probe, at least: what does not grow with tokens should be little of all
_PIECES = 8  # of a sequence, which the meshes of probes divide it into
FIRST, LAST = "first", "last"
"""The model's ends; the other units are kinds of layers, by number."""
_OF_TOKENS = (memory.ACTIVATIONS, memory.TEMPORARIES, memory.LOGITS, memory.COMMUNICATION)


class FigureName(NamedTuple):
    """The name of a row of figures."""

    unit: str
    phase: str
    """F, E for the end of a forward that recomputation leaves out, B, or M for memory."""
    what: str
    """op, attention, memory, fused, message; or the name of an amount of memory."""
    number: int = 0
    form: tuple[Any, ...] = ()
    """Names and types, which degrees do not change."""
    tokens: tuple[bool, ...] = ()
    """Which of the figures grow with the tokens of a rank."""


Figures = dict[FigureName, tuple[float, ...]]


class SmallModel(NamedTuple):
    """A model with one layer of each kind."""

    model: nn.Module
    units: dict[str, str]
    """The unit of each module that a step marks."""
    counts: dict[str, int]
    """How many layers the whole model has of each kind."""
    order: tuple[str, ...]
    """The kind of each layer of the whole model."""
    prime: int
    """A divisor of a probe's tokens, and of no width of the model."""


def small(job: Job) -> SmallModel:
    """Return a copy of a job's model on meta with one layer of each kind."""
    pipeline = job.resolved.pipeline
    sizes = {size for p in job.model.parameters() for size in p.shape}
    prime = next((p for p in _PRIMES if all(size % p for size in sizes)), _PRIMES[0])
    if pipeline is None:
        return SmallModel(copy.deepcopy(job.model), {}, {}, (), prime)
    layers = job.model.get_submodule(pipeline.layers)._modules
    units = dict.fromkeys(pipeline.first, FIRST) | dict.fromkeys(pipeline.last, LAST)
    kinds: dict[Any, str] = {}
    order, gone = [], set[str]()
    for name, layer in layers.items():
        assert layer is not None
        kind = kind_of(layer)
        if kind in kinds:
            gone.add(name)
        else:
            kinds[kind] = str(len(kinds))
            units[f"{pipeline.layers}.{name}"] = kinds[kind]
        order.append(kinds[kind])
    model = without_layers(job.model, pipeline.layers, gone)
    return SmallModel(model, units, dict(Counter(order)), tuple(order), prime)


def batch_of(seq_len: int, prime: int) -> tuple[int, int]:
    """Return the samples of a probe's batch, and the tokens of each: nearly ``seq_len``."""
    unit = prime * _PIECES
    if seq_len < 15 * unit:
        return prime, seq_len
    return max(1, _TOKENS // seq_len), seq_len // unit * unit


def config_of_probe(config: Config, degrees: tuple[int, ...], prime: int) -> Config:
    """Return ``config`` on a mesh of tp, cp and ep, without what a probe does not look at."""
    tp, cp, ep = degrees
    parallel = replace(config.parallel, pp=1, dp_replicate=1, dp_shard=ep, cp=cp, tp=tp, ep=ep)
    parallel = replace(parallel, zero=3, zero3_reshard=0, offload="none", pp_layers=())
    samples, seq_len = batch_of(config.train.seq_len, prime)
    train = replace(
        config.train, seq_len=seq_len, micro_batch=samples, global_batch=samples * ep, loss_chunk=0
    )
    config = replace(config, compile=replace(config.compile, mode="off", async_tp=False))
    return replace(config, parallel=parallel, train=train, activation_checkpoint=ActivationCheckpoint())


def probe(
    job: Job, config: Config, few: SmallModel, degrees: tuple[int, ...], cluster: Cluster
) -> Figures:
    """Return the figures of each unit on a mesh of tp, cp and ep, else as ``config`` says."""
    # Probes that were kept in files do without these and torch._dynamo.
    from compose.apply import apply
    from compose.planner.fake_world import OnMeta, fake_world
    from compose.planner.recorder import Recorder
    from compose.planner.trace import buffers_on_meta, forward_and_backward, marks, step_batch

    tp, cp, ep = degrees
    config = config_of_probe(config, degrees, few.prime)
    job = make_job(config, tp * cp * ep, job.model)
    target, device_type = cluster.target, cluster.target.device_type
    model, recorder = buffers_on_meta(copy.deepcopy(few.model)), Recorder(device_type)
    here = {name for name, _ in model.named_modules()}
    resolved = job.resolved.without(n for n, _ in job.model.named_modules() if n not in here)
    planned = kernel_table.planned_for(cluster.device.capability, packed_rows(config.data))
    choice = mock.patch.object(kernel_table, "planned", return_value=planned)
    rank = busiest_rank(job)
    with choice, fake_world(rank, job.world_size, recorder, device_type, float8=target.float8):
        mesh = init_mesh(config.parallel, device_type)
        with OnMeta(["cuda"], kernels="cpu"):
            composition = apply(model, resolved, mesh, job.options)
        weights = dict(composition.named_parameters())
        recorder.note(weights.values(), "weights")
        batch = step_batch(job, 1)
        recorder.note(batch.values(), "activations")
        with marks(recorder, composition, resolved), OnMeta(kernels=device_type), recorder:
            forward_and_backward(composition, batch, job, DropoutKey(1))
    record = recorder.record_of
    memory.categorize(record, resolved.output)
    units = units_of(record, few.units)
    figures = {**_work(record, units, (job, cluster), few.prime), **_memory(record, units, few.prime)}
    experts = {n for name, _ in resolved.expert for n in weights if n.startswith(f"{name}.")}
    tied = {name for names in tied_names(model) for name in names}
    for name, weight in weights.items():
        unit = next((u for m, u in few.units.items() if name.startswith(f"{m}.")), LAST)
        # The model's ends are one unit of FSDP then, which stays whole until the backward.
        unit = LAST if name in tied else unit
        what, ranks = "weights", cp * ep
        if name in experts:
            what, ranks = "expert weights", ranks * tp
            figures[FigureName(unit, "M", "experts")] = (len(weight),)
        size = local_tensor(weight).numel() * (ranks if weight.ndim else 1)
        for part in (what, f"trained {what}") if weight.requires_grad else (what,):
            _add(figures, FigureName(unit, "M", part), (size,))
        _add(figures, FigureName(unit, "M", "tensors"), (1,))
        if name in tied:
            figures[FigureName(FIRST, "M", "tied")] = (size,)
    return figures


def _add(figures: Figures, part: FigureName, values: Iterable[float]) -> None:
    old = figures.get(part)
    figures[part] = tuple(a + b for a, b in zip(old, values, strict=True)) if old else tuple(values)


def units_of(record: Record, names: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the unit and the phase of each segment; both are empty before the forward."""
    result, unit, loss = [], FIRST, False
    for segment in record.segments:
        kind = segment.action[1]
        if kind not in ("F", "B"):
            result.append(("", ""))
            continue
        if segment.unit:
            unit = names.get(segment.unit, LAST)
        elif kind == "B" and not loss:
            unit = LAST
        loss = kind == "B"
        result.append((unit, kind))
    return result


def _work(record: Record, units: list[tuple[str, str]], of: tuple[Job, Cluster], prime: int) -> Figures:
    figures: Figures = {}
    job, on_gpu = of[0], of[1].backend == "nccl"
    numbers: Counter[tuple[str, str]] = Counter()
    ends = _ends(record, units)
    for work in record.work:
        unit, phase = units[work.segment]
        if not phase:
            continue
        phase = "E" if id(work) in ends else phase
        if isinstance(work, RecordedMessage):
            whole = work.kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
            if work.received or len(work.ranks) < 2 or (work.stream and whole):
                continue  # those of data parallel are others at other degrees
            form = work.kind, axis_of(work, job.degrees), bool(work.stream)
            _add(figures, FigureName(unit, phase, "message", 0, form, (False, True)), (1, work.bytes))
        elif isinstance(work, Operator) and work.kind == "attention":
            form = work.name, work.dtype, work.shape[-1]
            part = FigureName(unit, phase, "attention", 0, form, (False, True, True))
            _add(figures, part, (1, work.flops, work.bytes))
        elif isinstance(work, Operator) and work.kind != "memory":
            numbers[unit, phase] += 1
            form = work.name, work.kind, work.dtype
            # The rows of experts are those of tokens, whatever their share of them is.
            rows = 3 if work.name.endswith(WEIGHTS) else 1 if "grouped_mm" in work.name else -1
            grows = tuple(n % prime == 0 or at == rows for at, n in enumerate(work.shape))
            part = FigureName(unit, phase, "op", numbers[unit, phase], form, (True, True, *grows))
            figures[part] = (work.flops, work.bytes, *work.shape)
    own = replace(record, work=[w for w in record.work if not _of_shards(record, w, units, prime)])
    for what, layers in (("memory", False), ("fused", True)):
        each = joined(own, layers, on_gpu)
        for place, work in enumerate(each):
            if not isinstance(work, Operator) or work.kind != "memory" or work.name in NO_KERNEL:
                continue
            unit, phase = units[work.segment]
            # The loss runs in pieces of a fixed size, and there are more of them with more tokens.
            pieces = unit == LAST
            fixed = 0 if pieces else _fixed_bytes(record, work, prime)
            if phase and work.bytes:
                phase = "E" if id(own.work[place]) in ends else phase
                form = (equal_kernel(work.name), _of_samples(own.work, place, job))
                part = FigureName(unit, phase, what, 0, form, (pieces, True, False))
                _add(figures, part, (1, work.bytes - fixed, fixed))
    return figures


_NEAR = 4  # pieces of work between a message and its copies


def _of_samples(works: Sequence[Operator | RecordedMessage | Wait], place: int, job: Job) -> bool:
    """Tell whether work is a copy for a message of tp: parts of a single sample need none."""
    one = works[place]
    if not isinstance(one, Operator) or not one.name.endswith(".cat"):
        return False
    near = works[max(0, place - _NEAR) : place + _NEAR]
    return any(isinstance(w, RecordedMessage) and axis_of(w, job.degrees) == "tp" for w in near)


def _ends(record: Record, units: list[tuple[str, str]]) -> set[int]:
    """Return the ids of work at the end of units' forwards, after what backward needs last."""
    result = set[int]()
    needed: dict[str, bool] = {}
    output: dict[str, tuple[int, ...]] = {}
    for work in reversed(record.work):
        unit, phase = units[work.segment]
        if phase != "F":
            continue
        if isinstance(work, Operator):
            output.setdefault(unit, work.writes)  # which the next unit needs
            made = (record.allocations[place] for place in work.writes if place not in output[unit])
            needed[unit] = needed.get(unit, False) or any(
                units[-1 if one.freed is None else one.freed][1] != "F" for one in made
            )
        if not needed.get(unit):
            result.add(id(work))
    return result


def _fixed_bytes(record: Record, work: Operator, prime: int) -> int:
    """Return the bytes that an operator reads and writes whatever the number of tokens is."""
    sizes = [record.allocations[place].bytes for place in {*work.reads, *work.writes}]
    if all(n % prime for n in (work.bytes, *work.shape, *sizes)):
        return work.bytes
    # An embedding reads few rows of its table.
    return min(work.bytes, sum(n for n in sizes if n % prime and n <= work.bytes))


def _of_shards(
    record: Record, work: Operator | RecordedMessage | Wait, units: list[tuple[str, str]], prime: int
) -> bool:
    """Tell whether work is data parallel's, on whole weights or gradients."""
    if not isinstance(work, Operator) or work.kind != "memory":
        return False
    space, _, short = work.name.partition(".")
    loss = units[work.segment][0] == LAST and not record.segments[work.segment].unit
    copies = short in ("_to_copy", "copy_", "div", "_foreach_copy_") and not loss
    return space == "fsdp" or (copies and _fixed_bytes(record, work, prime) == work.bytes)


_KEPT_BY = {"product": "matmul", "attention": "attention"}
# These results are of a whole operator.
RESULTS = ("attention kept", "attention alone", "matmul kept", "matmul alone")


def _memory(record: Record, units: list[tuple[str, str]], prime: int) -> Figures:
    """Return the bytes that each unit keeps for backward, and that it has at most at a time."""
    live: Counter[str] = Counter()
    begin: dict[tuple[str, str], Counter[str]] = {}
    most: dict[tuple[str, str], Counter[str]] = {}
    end: dict[tuple[str, str], Counter[str]] = {}
    for segment, place, change in record.changes:
        allocation = record.allocations[place]
        key = units[segment]
        begin.setdefault(key, Counter(live))
        # The loss runs in pieces of a fixed size.
        grows = units[allocation.segment][0] == LAST or allocation.bytes % prime == 0
        if allocation.category == memory.GRADIENTS:
            live["gradients"] += change
        elif allocation.category in _OF_TOKENS and allocation.within in ("", "message"):
            live["tokens" if grows else "gradients"] += change
        if key not in most or live.total() > most[key].total():
            most[key] = Counter(live)
        end[key] = Counter(live)
    figures: Figures = {}

    def note(unit: str, what: str, size: float, tokens: bool = True) -> None:
        figures[FigureName(unit, "M", what, 0, (), (tokens,))] = (size,)

    for (unit, phase), peak in most.items():
        if not phase:
            continue
        before, after = begin[unit, phase], end[unit, phase]
        if phase == "F":
            note(unit, "kept", after["tokens"] - before["tokens"])
        else:
            note(unit, "backward", peak["tokens"] - after["tokens"])
            note(unit, "own gradients", peak["gradients"] - after["gradients"], False)
    kept: Counter[tuple[str, str]] = Counter()
    for work in record.work:
        unit, phase = units[work.segment]
        if phase != "F" or isinstance(work, Wait):
            continue
        if isinstance(work, Operator):
            for place in work.writes if work.kind != "memory" else ():
                allocation = record.allocations[place]
                group = _KEPT_BY.get(work.kind, "matmul")
                kept[unit, f"{group} kept"] += allocation.bytes
                if units[allocation.freed or -1][1] == "F":  # backward would not need it
                    kept[unit, f"{group} alone"] += allocation.bytes
        elif work.kind == "reduce_scatter" and not work.stream:
            kept[unit, "messages kept"] += work.bytes // len(work.ranks)
            kept[unit, "messages alone"] += work.bytes // len(work.ranks)
        elif work.kind == "all_to_all":
            kept[unit, "rows kept"] += work.bytes
    for (unit, what), size in kept.items():
        note(unit, what, size)
    return figures
