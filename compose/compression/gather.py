"""Gathers of a unit's weights in fewer bytes, for ``FSDPModule.set_custom_all_gather``.

All ranks compute with the weights as they were received. Master weights stay exact.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from compose.compression.codec import Blocks
from compose.compression.packing import Packing, UnitLayout
from compose.errors import ConfigError
from compose.ops import operators
from compose.ops.torch_versions import ALL_GATHER
from compose.parallel.hpz import OwnMemory

Forms = dict[str, tuple[tuple[int, ...], torch.dtype | None]]
"""The shape and the type of each tensor that a state may hold; None is any float type."""


@dataclass(frozen=True)
class Levels:
    """The groups of a two-level exchange."""

    intra: dist.ProcessGroup  # this rank and its neighbours, which are consecutive ranks, as in a node
    inter: dist.ProcessGroup  # the ranks with the same place among their neighbours


@dataclass(frozen=True)
class Traffic:
    """Bytes that this rank has sent, by purpose and distance; "plain" is for plain messages.

    A group's neighbours are ``near`` consecutive ranks of it, as on one node. A message to all ranks
    counts once for each.
    """

    near: int = 1
    sent: dict[tuple[str, str], int] = field(default_factory=dict)

    def among(self, near: int) -> "Traffic":
        """Return the same count, for groups of which so many ranks are neighbours."""
        return Traffic(near, self.sent)

    def count(self, purpose: str, each: int, ranks: int, near: int | None = None) -> None:
        """Count a message of ``each`` bytes to every other rank, of which ``near`` are neighbours."""
        close = min(ranks, self.near if near is None else near)
        for level, others in (("near", close - 1), ("far", ranks - close)):
            if others:
                self.add(purpose, level, each * others)

    def add(self, purpose: str, level: str, bytes_: int) -> None:
        """Count bytes to "near" or "far" ranks, over an axis, or "plain" ones."""
        self.sent[purpose, level] = self.sent.get((purpose, level), 0) + bytes_

    def take(self) -> dict[tuple[str, str], int]:
        """Return the bytes since the last call."""
        sent = dict(self.sent)
        self.sent.clear()
        return sent


class Sender:
    """A way to send a unit's weights or gradients."""

    observer: Any = None
    """The object that is told of every message, a :class:`losses.Losses`; None in training."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.kept: dict[str, Tensor] = {}  # the tensors on which the next message depends, by name
        self.forms: Forms = {}
        """The forms of what it may keep, since anyone may have made a checkpoint."""

    def restore(self, state: dict[str, Tensor], prefix: str) -> None:
        """Take the tensors out of a state whose names begin with a prefix; raise as :func:`check`."""
        own = {name: state.pop(prefix + name) for name in self.forms if prefix + name in state}
        check(own, self.forms)
        self.kept.clear()
        self.kept.update(own)


class QuantizedGather(Sender, OwnMemory):
    """The all-gather of one unit in blocks of 8 bits: qwZ of ZeRO++ (arXiv:2306.10209)."""

    def __init__(
        self, layout: UnitLayout, code: Blocks, traffic: Traffic, levels: Levels | None = None
    ) -> None:
        super().__init__(traffic)
        self.packing = Packing(layout, code)
        self.in_step = self.sent = False
        """Whether an optimizer step goes on, in which weights do not change; whether they were sent."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill ``output_tensor`` (n S,) with the shards (S,) of n ranks, as they are received.

        This rank's shard may be a part of it. FSDP waits for what is on its stream in any case.
        """
        rows = output_tensor.view(group.size(), -1)
        self.traffic.add("weights", "plain", input_tensor.nbytes * (group.size() - 1))
        if self.observer:
            self.observer.gathers(self, input_tensor, group.rank())
        self.fill(rows, input_tensor, group)
        if self.observer:
            self.observer.gathered(rows[group.rank()])

    def fill(self, rows: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
        """Fill rows (n, S) from each rank's ``own`` (S,)."""
        message = self.packing.pack(own[None])[0]
        self.traffic.count("weights", message.numel(), group.size())
        self.packing.unpack(gathered(message, group), rows)

    def to_send(self, own: Tensor, rank: int) -> Tensor | None:
        """Return what the next message is to hold of ``own`` (S,); None if nothing will be rounded."""
        return own


class DifferenceGather(QuantizedGather):
    """The all-gather of what has changed, in blocks of 4 bits (SDP4Bit, Jia et al. 2024, 2410.15526).

    The received weights stay here as the base of the next difference, which a step's first gather
    sends. The first gather of all sends the weights themselves. With ``levels`` a rank keeps one part
    for each of its neighbours, and they gather the unit from one another, plain.
    """

    def __init__(
        self, layout: UnitLayout, code: Blocks, traffic: Traffic, levels: Levels | None = None
    ) -> None:
        super().__init__(layout, code, traffic)
        self.levels = levels
        rows = levels.inter.size() if levels else layout.ranks
        self.forms = {"base": ((rows, layout.numel), None)}
        self.own: Tensor | None = None
        """This rank's row of the base, if gathers may write to the base."""
        self.writes_base = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a gather; on a CPU, which copies slowly, a later one gets the base itself.

        FSDP writes this rank's exact weights to it, and :meth:`fill` puts back the received ones. On a
        GPU another stream may still read the base.
        """
        base = self.kept.get("base")
        if base is None or self.own is None or not self._has_all or base.dtype != dtype:
            return super().allocate(size, dtype=dtype, device=device)
        self.writes_base = True
        return base.view(*size)

    def fill(self, rows: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
        """Fill rows (n, S) from each rank's ``own`` (S,)."""
        inter = self.levels.inter if self.levels else group
        near = 1 if self.levels else None
        base = self.kept.get("base")
        if base is None or not self._has_all:
            base = self._received(own, inter, near)
        if self.in_step and not self.sent:
            self.kept["base"], self.sent = base, True
            whole = self.levels is None and operators.device_of(base) == "cpu"
            self.own = base[group.rank()].clone() if whole else None
        if self.writes_base:
            assert self.own is not None
            base[group.rank()], self.writes_base = self.own, False
            return
        if self.levels is None:
            rows.copy_(base)
            return
        # Rank k near + j of the unit is place j on node k.
        intra = self.levels.intra
        self.traffic.count("weights", base.nbytes, intra.size(), intra.size())
        parts = gathered(base.reshape(-1), intra).view(intra.size(), inter.size(), -1)
        rows.copy_(parts.transpose(0, 1).reshape(rows.shape))

    @property
    def _has_all(self) -> bool:
        return self.in_step and self.sent

    def to_send(self, own: Tensor, rank: int) -> Tensor | None:
        """Return the difference; None in the first gather of all."""
        if "base" not in self.kept or self.sent:
            return None
        return own - self.kept["base"][self.levels.inter.rank() if self.levels else rank]

    def _received(self, own: Tensor, group: dist.ProcessGroup, near: int | None) -> Tensor:
        if "base" not in self.kept:
            self.traffic.count("weights", own.nbytes, group.size(), near)
            return gathered(own, group)
        base = self.kept["base"]
        wide = torch.promote_types(own.dtype, torch.float32)
        # Plain parameters travel as they are: their base is zero.
        sent = self.packing.compressed_only(base[group.rank()][None]).to(wide)
        message = self.packing.pack(own.to(wide) - sent)[0]
        self.traffic.count("weights", message.numel(), group.size(), near)
        # Within a step nobody else reads the base.
        base = base.to(wide) if self.in_step else base.to(wide, copy=True)
        self.packing.unpack(gathered(message, group), base, base=True)
        return base.to(own.dtype)


GATHERS = {"int8": (QuantizedGather, 8), "int4_diff": (DifferenceGather, 4)}
"""The gather of each value of comm.weights, and its bits."""


def gathered(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' messages, (ranks, bytes), of this rank's (bytes,)."""
    out = row.new_empty(group.size(), row.numel())
    # It is looked up at each call, as FSDP does: a measurement may have replaced it.
    getattr(dist, ALL_GATHER)(out.view(-1), row.contiguous(), group)
    return out


def levels_of(mesh: DeviceMesh, near: int, zero: int) -> Levels | None:
    """Return the groups of ``near`` neighbours among the ranks of data parallel, and across them.

    In ZeRO stage 0 the ranks are replicas. There is nothing to return if there is only one level. The
    call creates process groups, so every rank makes it.
    """
    first = 1 if zero == 0 else 2
    rows = mesh.mesh.flatten(first, 3).movedim(first, -1)
    count = rows.shape[-1]
    if near in (1, count):
        return None
    placed = rows.reshape(-1, count // near, near)
    groups = [
        dist.new_subgroups_by_enumeration(some.reshape(-1, some.shape[-1]).tolist())[0]
        for some in (placed, placed.transpose(1, 2))
    ]
    return Levels(*(cast(dist.ProcessGroup, group) for group in groups))


def check(state: Mapping[str, Tensor], forms: Forms) -> None:
    """Raise ConfigError for a tensor of a state that has another form, or none."""
    for name, value in state.items():
        if name not in forms:
            raise ConfigError(f"{name} is no name of what messages keep")
        shape, dtype = forms[name]
        right = value.dtype == dtype if dtype else value.is_floating_point()
        if tuple(value.shape) != shape or not right:
            wanted = f"{dtype or 'floats'} {list(shape)}"
            raise ConfigError(f"{name} is {value.dtype} {list(value.shape)}, not {wanted}")
