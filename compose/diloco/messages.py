"""Messages between DiLoCo workers: a checksum, the change of weights in a code, and buffers.

Ranks with the same place in their workers send each other bytes. The codes are blocks as in
compose/compression, floats of 4 bits without a mantissa (Streaming DiLoCo, Douillard et al. 2025,
arXiv:2501.18512), and the largest elements in 2 bits with error feedback (SparseLoCo, Sarfi et al.
2025, arXiv:2508.15706).
"""

import copy
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compose.apply import apply
from compose.composition import Composition
from compose.compression.codec import SCALE_BYTES, Blocks, numbers
from compose.diloco import ROW, Outer
from compose.diloco.fragments import Region, region_of, rows_of, shares
from compose.ops.tensors import local_tensor, persistent_buffers
from compose.parallel.mesh import axis_size, init_mesh
from compose.train.processes import TrainingError
from compose.train.workers import Worker

if TYPE_CHECKING:
    from compose.config.job import Job
    from compose.planner.cluster import Link

CHECK = 8
"""Bytes at the front of a message: a checksum of the outer weights."""
BLOCK = 256
"""Elements that share a scale in int8 and e3m0."""
_ROWS = 32
"""Rows that share the two magnitudes of top_k."""


@dataclass(frozen=True)
class BlockCode:
    """Blocks of compose/compression; where elements have no scale, each is a block."""

    blocks: Blocks
    dtype: torch.dtype  # the type of what is sent; it counts if nothing is to be lost

    def size(self, elements: int) -> int:
        """Return the bytes of so many elements."""
        return -(-elements // self.blocks.size) * self.blocks.width(self.dtype)

    def encode(self, x: Tensor) -> Tensor:
        """Return the bytes of a vector."""
        return self.blocks.encode(_rows(x, self.blocks.size)).flatten()

    def decode(self, codes: Tensor, like: Tensor) -> Tensor:
        """Return the vector of the bytes, with the length and the type of ``like``."""
        rows = codes.view(-1, self.blocks.width(self.dtype))
        return self.blocks.decode(rows, like.dtype).flatten()[: len(like)]


class E3M0:
    """Blocks of floats with a sign and 3 bits of exponent: 0, or the largest magnitude over 1 to 64."""

    width = BLOCK // 2 + SCALE_BYTES

    def size(self, elements: int) -> int:
        """Return the bytes of so many elements."""
        return -(-elements // BLOCK) * self.width

    def encode(self, x: Tensor) -> Tensor:
        """Return the bytes of a vector."""
        rows = _rows(x, BLOCK).float()
        scales = rows.abs().amax(1, keepdim=True).to(torch.bfloat16)
        ratio = rows.abs() / scales.float().clamp(min=torch.finfo(torch.float32).tiny)
        # Powers of two have their borders at 0.75 of the upper one; that to 0 is at half the least.
        exponent = torch.frexp(ratio / 0.75).exponent + 6
        codes = torch.where(ratio < 2.0**-7, 0, exponent.clamp(1, 7))
        codes = (codes | (rows < 0).int() << 3).to(torch.uint8)
        low, high = codes.chunk(2, 1)
        return torch.cat([low | high << 4, scales.view(torch.uint8)], 1).flatten()

    def decode(self, codes: Tensor, like: Tensor) -> Tensor:
        """Return the vector of the bytes."""
        rows = codes.view(-1, self.width)
        packed, scales = rows[:, :-SCALE_BYTES], numbers(rows[:, -SCALE_BYTES:], torch.bfloat16)
        values = torch.cat([packed & 15, packed >> 4], 1).int()
        exponent = values & 7
        size = torch.where(exponent > 0, torch.exp2((exponent - 7).float()), 0.0)
        signed = torch.where(values >> 3 > 0, -size, size)
        return (signed * scales.float()).flatten()[: len(like)].to(like.dtype)


@dataclass(frozen=True)
class TopKCode:
    """The largest elements of each row: 12 bits for the place, one for the sign, one for the magnitude.

    A magnitude is one of two, which 32 rows share: the means of those below and above their mean. A row
    with fewer elements than are sent repeats its largest. One of zeros has one place, with both signs.
    """

    kept: int  # elements of a row that are sent, a multiple of 4

    def size(self, elements: int) -> int:
        """Return the bytes of so many elements."""
        rows = -(-elements // ROW)
        return rows * (self.kept * 3 // 2 + self.kept // 4) + -(-rows // _ROWS) * 2 * SCALE_BYTES

    def encode(self, x: Tensor) -> Tensor:
        """Return the bytes of a vector."""
        rows = _rows(x, ROW).float()
        places = rows.abs().topk(self.kept, 1).indices
        kept = rows.gather(1, places)
        places = torch.where(kept == 0, places[:, :1], places)
        kept = torch.where(kept == 0, kept[:, :1], kept)
        groups = _rows(kept.abs().flatten(), _ROWS * self.kept)
        middle = _mean(groups, groups > 0)
        upper = groups > middle
        low, high = _mean(groups, (groups > 0) & ~upper), _mean(groups, upper)
        levels = torch.cat([low, high], 1).to(torch.bfloat16)
        negative = kept < 0
        negative[:, -1] |= (kept == 0).all(1)  # one place with two signs: a row of zeros
        bits = upper.flatten()[: kept.numel()].view_as(kept).int() | negative.int() << 1
        a, b, c, d = bits.to(torch.uint8).unflatten(1, (-1, 4)).unbind(2)
        first, second = places.int().unflatten(1, (-1, 2)).unbind(2)
        thirds = [first & 255, first >> 8 | (second & 15) << 4, second >> 4]
        body = torch.cat(
            [torch.stack(thirds, 2).to(torch.uint8).flatten(1), a | b << 2 | c << 4 | d << 6], 1
        )
        return torch.cat([body.flatten(), levels.view(torch.uint8).flatten()])

    def decode(self, codes: Tensor, like: Tensor) -> Tensor:
        """Return the vector of the bytes."""
        rows, wide = -(-len(like) // ROW), self.kept * 3 // 2 + self.kept // 4
        body = codes[: rows * wide].view(rows, wide)
        levels = numbers(codes[rows * wide :][None], torch.bfloat16).view(-1, 2).float()
        one, two, three = body[:, : self.kept * 3 // 2].int().unflatten(1, (-1, 3)).unbind(2)
        places = torch.stack([one | (two & 15) << 8, two >> 4 | three << 4], 2).flatten(1)
        packed = body[:, self.kept * 3 // 2 :].int()
        bits = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], 2).flatten(1)
        of_row = levels.repeat_interleave(_ROWS, 0)[:rows]
        size = torch.where(bits & 1 > 0, of_row[:, 1:], of_row[:, :1])
        negative = bits & 2 > 0
        zeros = (places == places[:, :1]).all(1) & (negative != negative[:, :1]).any(1)
        size = torch.where(zeros[:, None], 0.0, size)
        out = torch.zeros(rows, ROW, device=codes.device)
        out.scatter_(1, places.long(), torch.where(negative, -size, size))
        return out.flatten()[: len(like)].to(like.dtype)


Code = BlockCode | E3M0 | TopKCode
"""A form in which a vector of floats is sent."""


def code_of(options: Outer, dtype: torch.dtype) -> Code:
    """Return the code that the table asks for, for vectors of a type."""
    if options.dtype in ("float32", "bfloat16"):
        return BlockCode(Blocks(0 if options.dtype == "float32" else 16, 1), dtype)
    if options.dtype == "int8":
        return BlockCode(Blocks(8, BLOCK), dtype)
    return E3M0() if options.dtype == "e3m0" else TopKCode(round(options.density * ROW))


def _rows(x: Tensor, width: int) -> Tensor:
    """Return a vector as rows; the last one is filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -len(x) % width)).view(-1, width)


def _mean(x: Tensor, where: Tensor) -> Tensor:
    """Return the mean of the elements of each row that are chosen, (rows, 1); 0 if none is."""
    # In float64 the order of the sum does not matter: all devices send the same levels.
    total, count = torch.where(where, x, 0.0).double().sum(1, True), where.sum(1, True)
    return total / count.clamp(min=1)


def ended(messages: list[Tensor | None]) -> "Future[list[Tensor | None]]":
    """Return an exchange that has ended."""
    future: Future[list[Tensor | None]] = Future()
    future.set_result(messages)
    return future


_LOOK = 0.02  # seconds between two looks into the store
_MISSES = 2  # exchanges in a row that go on without a worker, which has not read their messages


class WorkerExchange:
    """The exchanges of one rank with those at its place in other workers, in a thread of their own."""

    def __init__(self, worker: Worker, rank: int, timeout: timedelta, grace: float) -> None:
        """Connect; every rank of every worker must. With ``grace`` 0 it waits for all late workers."""
        self.worker, self.rank, self.grace, self.timeout = worker, rank, grace, timeout
        self.sent = 0  # bytes that this rank has sent since the last metrics
        # With their destinations: memory must stay until a message is read.
        self._unread: list[tuple[int, dist.Work, Tensor]] = []
        self._missed = [0] * worker.count  # exchanges in a row by worker, on which all agree
        if worker.count > 1:
            store = dist.PrefixStore(f"between {rank}", worker.store)
            self._group: Any = dist.ProcessGroupGloo(store, worker.index, worker.count, timeout)
            self._thread = ThreadPoolExecutor(1, "exchange")

    def begin(self, name: str, message: Tensor, waits: bool = False) -> "Future[list[Tensor | None]]":
        """Begin to exchange messages of equal length, (bytes,) in host memory, under a name of its own.

        The result is in the order of workers, with None for one that misses it. ``waits`` turns
        ``grace`` off.
        """
        if self.worker.count == 1:
            return ended([message])
        grace = 0.0 if waits else self.grace
        if grace and self.rank == 0:
            self.worker.store.set(f"ready/{name}/{self.worker.index}", "")
        return self._thread.submit(self._run, name, message, grace)

    def _run(self, name: str, message: Tensor, grace: float) -> list[Tensor | None]:
        index, count = self.worker.index, self.worker.count
        present = self._present(name, grace)
        self._missed = [0 if i in present else misses + 1 for i, misses in enumerate(self._missed)]
        others = [other for other in range(count) if other != index]
        received: list[Tensor | None] = [None] * count
        waits = []
        before, self._unread = self._unread, []
        for other in others:
            if index in present:
                self._unread.append((other, self._group.send([message], other, 0), message))
            if other in present:
                received[other] = torch.empty_like(message)
                waits.append(self._group.recv([received[other]], other, 0))
        for wait in waits:
            wait.wait()
        if index in present:
            received[index] = message
            self.sent += len(message) * len(others)
        # A worker that takes part has read all earlier messages. A late one reads them later.
        self._unread += [sent for sent in before if sent[0] not in present]
        for other, work, _ in before:
            if other in present:
                work.wait()
        return received

    def close(self) -> None:
        """Wait until all messages of this rank are read, and end."""
        if self.worker.count > 1:
            self._thread.shutdown()
            for _, work, _ in self._unread:
                work.wait()
            self._unread.clear()

    def _present(self, name: str, grace: float) -> set[int]:
        """Return the workers that take part, on which all ranks of all workers agree."""
        count, store = self.worker.count, self.worker.store
        if not grace:
            return set(range(count))
        begun, key = time.monotonic(), f"there/{name}"
        while not store.check([key]):
            if time.monotonic() - begun > self.timeout.total_seconds():
                absent = [i for i in range(count) if not store.check([f"ready/{name}/{i}"])]
                raise TrainingError(
                    f"the exchange after step {name.partition('.')[0]} has waited"
                    f" {self.timeout.total_seconds():.0f} s for these islands:"
                    f" {', '.join(map(str, absent))}"
                )
            if self.rank == 0:
                ready = [i for i in range(count) if store.check([f"ready/{name}/{i}"])]
                # Messages to a worker that stays slower would fill the memory, so it is waited for.
                enough = 2 * len(ready) >= count and all(
                    i in ready or misses < _MISSES for i, misses in enumerate(self._missed)
                )
                if len(ready) == count or (enough and time.monotonic() - begun > grace):
                    # The first to propose decides for all.
                    store.compare_set(key, "", " ".join(map(str, ready)))
            time.sleep(_LOOK)
        return set(map(int, store.get(key).decode().split()))


def checksum(values: Tensor) -> Tensor:
    """Return 8 bytes, (8,) uint8, that depend on each bit of a vector."""
    words = values.contiguous().view(torch.int32).to(torch.int64)
    places = torch.arange(len(words), device=words.device) % 8191 + 1
    return (words * places).sum()[None].view(torch.uint8)


def averaged_buffers(model: nn.Module) -> list[Tensor]:
    """Return the buffers that training changes, such as a router's bias; workers average them."""
    return [buffer for buffer in persistent_buffers(model).values() if buffer.is_floating_point()]


def outer_dtype(composition: Composition) -> torch.dtype:
    """Return the type of the outer weights: that of the model's own, and float32 at least."""
    own = {p.dtype for _, p in composition.named_parameters() if p.requires_grad}
    wide = {torch.promote_types(dtype, torch.float32) for dtype in own} or {torch.float32}
    return max(wide, key=lambda dtype: dtype.itemsize)


def first_rank_messages(
    options: Outer, composition: Composition, shapes: dict[str, torch.Size], layers: list[str]
) -> list[int]:
    """Return the bytes of the message of each fragment to one other worker, without asking other ranks.

    This rank counts as the first one of those that hold the same parts. The model may be on meta;
    ``shapes`` are those of all its parameters that are trained.
    """
    mesh = composition.mesh
    stage = mesh.size() // axis_size(mesh, "pp")
    regions: dict[str, tuple[Region, int]] = {}
    for name, parameter in composition.named_parameters():
        ranks = stage * composition.holding_ranks(name)
        if isinstance(parameter, DTensor):
            cuts = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
            ranks //= math.prod(size for size, placement in cuts if not placement.is_replicate())
        regions[name] = region_of(parameter), ranks
    code, result = code_of(options, outer_dtype(composition)), []
    for fragment in shares(dict(sorted(shapes.items())), layers, options.fragments):
        elements = 0
        for name, part in fragment.items():
            if name in regions:
                region, ranks = regions[name]
                elements += -(-rows_of(part, region)[1] // ranks)
        result.append(CHECK + code.size(elements))
    result[-1] += 4 * sum(buffer.numel() for buffer in averaged_buffers(composition.model))
    return result


def sent_bytes(job: "Job", outer: Outer) -> list[int]:
    """Return the bytes that a worker's rank sends to another worker, for each fragment.

    It is the rank that sends most, of the first ranks of stages.
    """
    return max((sent for sent, _ in _first_ranks(job, outer)), key=sum)


def _first_ranks(job: "Job", outer: Outer) -> list[tuple[list[int], int]]:
    """Return for the first rank of each stage the bytes of its messages, and of its outer weights."""
    from compose.planner.fake_world import fake_group

    shapes = {name: p.shape for name, p in job.model.named_parameters() if p.requires_grad}
    ranks, copies = [], 2 if outer.momentum else 1
    for stage in range(job.degrees.pp):
        with fake_group(stage * job.world_size // job.degrees.pp, job.world_size):
            mesh, model = init_mesh(job.degrees), copy.deepcopy(job.model)
            composition = apply(model, job.resolved, mesh, job.options)
            sent = first_rank_messages(outer, composition, shapes, job.resolved.checkpoint)
            trained = [p for name, p in composition.named_parameters() if name in shapes]
            size = copies * outer_dtype(composition).itemsize
            ranks.append((sent, size * sum(local_tensor(p).numel() for p in trained)))
    return ranks


def as_lines(
    job: "Job", outer: Outer, workers: int, link: "Link | None" = None, step_seconds: float = 0.0
) -> list[str]:
    """Return lines with the bytes of a round and of one exchange; with a rank's link the time too."""
    ranks = _first_ranks(job, outer)
    sent = [size * (workers - 1) for size in max((messages for messages, _ in ranks), key=sum)]
    lines = [f"bytes that a rank sends to other islands ({outer.dtype}, fragments {len(sent)}):"]
    for what, size in ((f"in {outer.every} steps", sum(sent)), ("at once, at most", max(sent))):
        lines.append(f"  {what:<20}{size:>18,}  {size / 2**30:9.3f} GiB")
    if link:
        takes = [size / link.usable + link.latency for size in sent]
        waited = sum(max(0.0, seconds - outer.delay * step_seconds) for seconds in takes)
        lines.append(
            f"  a round takes {sum(takes):.3g} s; training waits for {waited:.3g} s of"
            f" it, {waited / (outer.every * step_seconds):.1%} of its steps (outer.delay {outer.delay})"
        )
    kept, where = max(size for _, size in ranks), "in host memory" if outer.offload else "on the device"
    what = f"outer weights{' and momentum' if outer.momentum else ''}, not counted above"
    return [*lines, f"{what}: {kept:,} bytes of a rank, {kept / 2**30:.3f} GiB, {where}"]
