"""The proof of the outer loop: workers are compared with one process that is all of them, in float64.

The weights and buffers of each worker are moved at random, by moves that every rank can draw. So only
the outer loop is compared. The one process knows the table [outer] and the whole model, and shares no
code with the loop. It asks the loop which workers were late, and for the order of elements in a
message, since codes are of blocks of a message.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from compose.build import build
from compose.config.job import Job
from compose.diloco import Outer
from compose.diloco.loop import OuterLoop
from compose.diloco.messages import Code
from compose.ops.tensors import gathered_objects, local_shard, local_tensor
from compose.proof.comparison import Comparison
from compose.proof.observers import CODES, allowed
from compose.proof.one_process import EXACT
from compose.proof.report import Report, or_infinite, tolerance_of
from compose.train.workers import Worker, this_worker
from compose.weights import named_generator

ROUNDS = 3
_SIZE = 1e-2  # of a move, the standard deviation
_GRACE = 1.0  # seconds, in a proof at most
_PATIENCE = 30.0  # seconds until a worker that is late on purpose goes on
_DECAY = 0.95  # of what top_k has not sent, the part that is added to what it sends next
_SINGLE = 1e-6  # the relative error of buffers, which are float32, also in a message
_BLOCK = 256  # elements that share a scale in int8 and e3m0
_ROW, _ROWS = 4096, 32  # of top_k: elements of a row, and rows that share two magnitudes
_E3M0 = torch.tensor([0.0, *(2.0**e for e in range(-6, 1))])
_HALFWAY = torch.tensor([2.0**-7, *(0.75 * 2.0**e for e in range(-5, 1))])

Message = Sequence[tuple[str, Tensor]]
"""The elements of one rank's message of a fragment: names, and places in the flat parameter."""
Values = dict[str, Tensor]


def fragments_of_model(
    shapes: Mapping[str, torch.Size], layers: Sequence[str], each: int
) -> list[Values]:
    """Return the places in each flat parameter that each fragment has.

    Layer i of F fragments is in fragment i mod F. The rows of other parameters are dealt by their
    number times the golden ratio, modulo 1.
    """
    results: list[Values] = [{} for _ in range(-(-len(layers) // each) if each and layers else 1)]
    rest = dict(shapes)
    for number, layer in enumerate(layers):
        for name in [name for name in rest if name.startswith(f"{layer}.")]:
            results[number % len(results)][name] = torch.arange(rest.pop(name).numel())
    filled = [sum(map(len, one.values())) for one in results]
    total = sum(shape.numel() for shape in rest.values())
    levels = range(total + sum(filled) + 1)
    level = bisect_right(levels, total, key=lambda n: sum(max(0, n - size) for size in filled)) - 1
    got = [max(0, level - size) for size in filled]
    got[filled.index(min(filled))] += total - sum(got)
    for one, (begin, end) in zip(results, pairwise(accumulate(got, initial=0)), strict=True):
        for name, shape in rest.items() if begin < end else ():
            rows = torch.arange(shape[0] if shape else 1)
            dealt = rows * 2654435769 % 2**32  # 2^32 over the golden ratio
            mine = (dealt >= begin * 2**32 // total) & (dealt < end * 2**32 // total)
            width = torch.arange(shape.numel() // max(1, len(rows)))
            one[name] = (rows[mine, None] * len(width) + width).flatten()
    return results


@dataclass
class OuterLoopInOneProcess:
    """All workers in one process: the values of each, buffers too, and the common ones; flat."""

    options: Outer
    fragments: Sequence[Values]
    messages: Sequence[Sequence[Message]]  # by fragment and rank of a worker
    workers: list[Values]
    averaged: Sequence[str]  # the names of the buffers
    missed: Callable[[str, int], bool]
    """Whether an exchange, by its name, went on without a worker; asked when it has ended."""

    def __post_init__(self) -> None:
        trained = {name for fragment in self.fragments for name in fragment}
        self.common = {n: value.clone() for n, value in self.workers[0].items() if n in trained}
        self.momentum = {name: torch.zeros_like(value) for name, value in self.common.items()}
        self.residuals: dict[tuple[int, int, int], Tensor] = {}
        self.due: dict[int, tuple[int, float, str, list[tuple[Values, Values]]]] = {}
        many = len(self.workers)
        self.lr = self.options.lr or (0.4 if many < 2 else 0.6 if many < 8 else 0.8)

    def after_step(self, step: int, last: int) -> None:
        """Do what all workers do after a step; of ``last`` steps, the last one ends all exchanges."""
        many = len(self.fragments)
        between = self.options.every // many
        for fragment in [f for f, (due, *_) in self.due.items() if step >= min(due, last)]:
            self._end(fragment)
        if step == last:
            for fragment in range(many):
                self._begin(fragment, step, 0, 0.0)
        elif step % between == 0:
            delay, mix = self.options.delay, self.options.mix
            self._begin((step // between - 1) % many, step, delay, mix)

    def _begin(self, fragment: int, step: int, delay: int, mix: float) -> None:
        """Note what each worker sends of a fragment: the change as it arrives, and buffers."""
        sent = []
        for index, weights in enumerate(self.workers):
            change = {name: value - weights[name] for name, value in self.common.items()}
            if self.options.dtype != "float32":
                change = self._compressed(fragment, index, change)
            # The last fragment brings buffers.
            brings = self.averaged if fragment == len(self.fragments) - 1 else ()
            sent.append((change, {name: weights[name].float().double() for name in brings}))
        self.due[fragment] = (step + delay, mix, f"{step}.{fragment}", sent)
        if delay == 0:
            self._end(fragment)

    def _compressed(self, fragment: int, index: int, change: Values) -> Values:
        arrived = {name: torch.zeros_like(value) for name, value in change.items()}
        for rank, message in enumerate(self.messages[fragment]):
            parts = [change[name][places] for name, places in message]
            vector = torch.cat([torch.zeros(0, dtype=torch.float64), *parts])
            key = (fragment, index, rank)
            if key in self.residuals:
                vector = vector + _DECAY * self.residuals[key]
            result, _ = received(self.options, vector)
            if self.options.dtype == "top_k":
                self.residuals[key] = vector - result
            for (name, places), part in zip(message, result.split([*map(len, parts)]), strict=True):
                arrived[name][places] = part
        return arrived

    def _end(self, fragment: int) -> None:
        _, mix, exchange, sent = self.due.pop(fragment)
        present = [index for index in range(len(sent)) if not self.missed(exchange, index)]
        if not present:
            return
        for name, places in self.fragments[fragment].items():
            changes = [sent[index][0][name][places] for index in present]
            gradient = torch.stack(changes).mean(0)
            momentum = self.options.momentum * self.momentum[name][places] + gradient
            self.momentum[name][places] = momentum
            self.common[name][places] -= self.lr * (gradient + self.options.momentum * momentum)
            for weights in (self.workers[index] for index in present):
                own, common = weights[name][places], self.common[name][places]
                weights[name][places] = mix * own + (1 - mix) * common
        for name in sent[0][1]:
            mean = torch.stack([sent[index][1][name] for index in present]).mean(0)
            for index in present:
                self.workers[index][name] = mean.clone()


def messages_of(loop: OuterLoop) -> list[list[Message]]:
    """Return the elements of each rank's message of each fragment; a collective of the worker."""
    own: list[Message] = []
    for spans in loop.fragments:
        results = []
        for span in spans:
            parameter = span.parameter.copies[0]
            places = torch.arange(parameter.numel()).view(parameter.shape)
            begin, end = span.own
            results.append((span.parameter.name, span.take(local_shard(places, parameter))[begin:end]))
        own.append(results)
    everyone = gathered_objects(own)
    return [[of_rank[fragment] for of_rank in everyone] for fragment in range(len(own))]


class ObservedCode:
    """The code of a loop, with a note of what this rank's own messages lose on their way."""

    def __init__(self, code: Code, options: Outer) -> None:
        self.code, self.options, self.size = code, options, code.size
        self.vector, self.sent = torch.zeros(0), torch.zeros(0)
        self.seen = torch.zeros(4, dtype=torch.float64)
        """Squares of what was sent, of what was lost, and of what should be; the elements."""

    def encode(self, x: Tensor) -> Tensor:
        """Return the bytes of a vector."""
        self.vector, self.sent = x.cpu(), self.code.encode(x)
        return self.sent

    def decode(self, codes: Tensor, like: Tensor) -> Tensor:
        """Return the vector of the bytes."""
        result = self.code.decode(codes, like)
        if torch.equal(codes.cpu(), self.sent.cpu()):
            parts = self.vector, self.vector - result.cpu()
            squares = [*(x.square() for x in parts), received(self.options, self.vector)[1]]
            self.seen += torch.tensor([*(x.sum() for x in squares), len(result)])
        return result

    def compare(self, comparison: Comparison) -> None:
        """Add a row; a collective of the worker."""
        everyone = torch.stack(gathered_objects(self.seen))
        whole, lost, expected, elements = everyone.sum(0).tolist()
        limit = allowed(expected**0.5, int(elements))
        if self.options.dtype == "top_k":  # what it should lose is known exactly
            limit = expected**0.5 * (1 + CODES)
        error, limit = (lost**0.5 / whole**0.5, limit / whole**0.5) if whole else (None, 0.0)
        comparison.value("lost of changes", "outer.dtype", error, limit)


def prove(job: Job, mesh: DeviceMesh, device: torch.device) -> Report | None:
    """Return the proof of the outer loop, if the job has workers."""
    return prove_outer_loop(job, mesh, device) if job.islands > 1 else None


def prove_outer_loop(job: Job, mesh: DeviceMesh, device: torch.device) -> Report:
    """Compare weights and buffers after some rounds of a job with one process; a collective of all."""
    worker, config, layers = this_worker(), job.config, job.resolved.checkpoint
    composition = build(job, mesh, device, replace(job.options, precision=EXACT))
    options = replace(config.outer, grace=min(config.outer.grace, _GRACE))
    # One step more than whole rounds: the run may end while messages are on their way.
    last, timeout = ROUNDS * options.every + 1, config.comm.first_step_timeout
    loop = OuterLoop(options, composition, layers, worker, timeout, last)
    observed = ObservedCode(loop.code, options)
    loop.code = cast(Code, observed)
    loop.start(0)
    kept = job.model.state_dict(keep_vars=True)
    buffers = [(n, b) for n, b in job.model.named_buffers() if n in kept and b.is_floating_point()]
    here = dict(composition.model.named_buffers())
    local: dict[str, list[Tensor]] = {}
    for name, tensor in [
        *composition.named_parameters(),
        *((name, here[name]) for name, _ in buffers if name in here),
    ]:
        local.setdefault(name, []).append(tensor.detach())
    whole = _joined({name: t.shape for name, t in [*job.model.named_parameters(), *buffers]}, local)
    trained = {name: p.shape for name, p in job.model.named_parameters() if p.requires_grad}
    one = OuterLoopInOneProcess(
        options,
        fragments_of_model(trained, layers, options.fragments),
        messages_of(loop) if options.dtype != "float32" else [],
        [{n: value.flatten().clone() for n, value in whole.items()} for _ in range(worker.count)],
        [name for name, _ in buffers],
        lambda exchange, index: _late(worker, exchange, index),
    )
    between = options.every // len(one.fragments)
    at = [0, options.delay // 2, options.delay]  # moves elsewhere would show nothing else
    with torch.no_grad():
        for step in range(1, last + 1):
            if step % between in {(place + after) % between for place in at for after in (0, 1)}:
                for index, values in enumerate(one.workers):
                    moves = _moves(whole, step, index)
                    for name, move in moves.items():
                        values[name] += move.flatten()
                        for tensor in local.get(name, ()) if index == worker.index else ():
                            local_tensor(tensor).add_(local_shard(move, tensor).to(tensor.device))
            if step == between and options.grace and worker.index == worker.count - 1:
                _wait(worker, f"{step}.0")  # this worker is late, and the others go on
            loop.after_update(step)
            one.after_step(step, last)
    loop.close(failed=False)
    comparison = Comparison(torch.device(mesh.device_type), tolerance_of(EXACT))
    own = [(name, right, local.get(name, [])) for name, right in one.workers[worker.index].items()]
    common = [
        (name, right, [loop.weights[name]] if name in loop.weights else [])
        for name, right in one.common.items()
    ]
    for quantity, rows in (("outer weight", common), ("island's weight", own)):
        for name, flat, copies in rows:
            right = flat.view_as(whole[name])
            parts = [local_shard(right, local[name][0]) for _ in copies]
            errors = [
                or_infinite(float((local_tensor(result).cpu() - part).norm()))
                for result, part in zip(copies, parts, strict=True)
            ]
            # A value that begins at zero stays there if no message carries it: then none may differ.
            error = max(errors) / (float(right.norm()) or 1.0) if errors else None
            limit = _SINGLE if name in one.averaged else comparison.tolerance.update
            comparison.value(quantity, name, error, limit)
    if options.dtype != "float32":
        observed.compare(comparison)
    if options.grace:
        waited = not _late(worker, f"{between}.0", worker.count - 1)
        comparison.value("waited for a late island", "outer.grace", float(waited), 0.0)
    home = "cpu" if options.offload else device.type
    away = any(value.device.type != home for value in loop.weights.values())
    comparison.value("outer weights elsewhere", "outer.offload", float(away), 0.0)
    if options.fragments and len(one.fragments) == 1:
        comparison.unused.append("outer.fragments")
    if not options.offload and device.type == "cpu":  # the memory is the same
        comparison.unused.append("outer.offload")
    return comparison.report((), comparison.tolerance.loss)


def _wait(worker: Worker, exchange: str) -> None:
    until = time.monotonic() + _PATIENCE
    while not worker.store.check([f"there/{exchange}"]) and time.monotonic() < until:
        time.sleep(0.02)


def _late(worker: Worker, exchange: str, index: int) -> bool:
    """Return whether an exchange with outer.grace went on without a worker."""
    key = f"there/{exchange}"
    present = worker.store.get(key).decode().split() if worker.store.check([key]) else [str(index)]
    return str(index) not in present


def _moves(like: Values, step: int, index: int) -> Values:
    """Draw a move of all that a worker trains, the same on every rank."""
    return {
        name: torch.empty_like(value).normal_(
            0.0, _SIZE, generator=named_generator(step * 1000 + index, name)
        )
        for name, value in like.items()
    }


def _joined(shapes: Mapping[str, torch.Size], local: Mapping[str, Sequence[Tensor]]) -> Values:
    """Return whole tensors, of which each rank of the worker has a part; a collective."""
    values = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for name, copies in local.items():
        local_shard(values[name], copies[0]).copy_(local_tensor(copies[0]))
    everyone = gathered_objects(values)
    for name, value in values.items():
        for other in everyone:
            value.copy_(torch.where(value == 0, other[name], value))
    return values


def received(options: Outer, change: Tensor) -> tuple[Tensor, Tensor]:
    """Return a vector (N,), float64, as other workers receive it, and its expected loss (N,).

    The loss is the square of the error of each element: for rounding step^2 / 12, for top_k the
    error's.
    """
    if options.dtype == "top_k":
        result = _largest(_rows(change, _ROW), round(options.density * _ROW)).flatten()[: len(change)]
        return result, (change - result).square()
    blocks = _rows(change, _BLOCK)
    most = blocks.abs().amax(1, keepdim=True)
    if options.dtype == "int8":
        # bfloat16 is the upper half of a float32. In the middle it is rounded up here.
        steps = (((most / 127).view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)
        result = (blocks * (1 / steps).nan_to_num(posinf=0.0)).round().clamp(-127, 127) * steps
    elif options.dtype == "e3m0":
        scales = most.bfloat16().float()
        ratio = blocks.abs() / scales.clamp(min=torch.finfo(torch.float32).tiny)
        result = _E3M0[torch.bucketize(ratio, _HALFWAY, right=True)] * blocks.sign() * scales
        steps = _E3M0.diff()[torch.bucketize(ratio, _E3M0[1:-1], right=True)] * scales
    else:  # float32 in a proof is float64, and loses nothing; bfloat16 has 8 bits of a magnitude
        result = change.bfloat16() if options.dtype == "bfloat16" else change
        steps = torch.exp2(torch.frexp(change).exponent - 8.0) * (options.dtype == "bfloat16")
    result, steps = (x.expand_as(blocks) if x.ndim > 1 else x for x in (result, steps))
    result, steps = (x.flatten()[: len(change)].double() for x in (result, steps))
    return result, steps.square() / 12 * (change != 0)


def _largest(rows: Tensor, kept: int) -> Tensor:
    """Return the ``kept`` largest elements of each row, as one of the two magnitudes of its group.

    These are the means of those above and not above the mean. A row with fewer elements that are not 0
    repeats its largest.
    """
    places = rows.abs().topk(kept, 1).indices
    sent = rows.gather(1, places).double()
    places = torch.where(sent == 0, places[:, :1], places)
    sent = torch.where(sent == 0, sent[:, :1], sent)
    result = torch.zeros_like(rows, dtype=torch.float64)
    for group, where, into in zip(*(x.split(_ROWS) for x in (sent, places, result)), strict=True):
        sizes = group.abs()
        above = sizes > _mean(sizes[sizes > 0])
        levels = torch.where(above, _mean(sizes[above]), _mean(sizes[~above & (sizes > 0)]))
        into.scatter_(1, where, levels.bfloat16().double() * group.sign())
    return result


def _rows(x: Tensor, width: int) -> Tensor:
    """Return a vector as float32 rows; the last one is filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -len(x) % width)).view(-1, width).float()


def _mean(x: Tensor) -> Tensor:
    return x.sum() / max(1, len(x))
