"""What sends the weights and gradients of FSDP's units, and of models that FSDP does not cut."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from compose.compression.account import Account
from compose.compression.all_reduce import CodedSum, PlainSum
from compose.compression.blocks import Blocks
from compose.compression.exchange import OwnMemory, Scratch, Traffic
from compose.compression.feedback import Feedback
from compose.compression.forms import Forms, check, forms_of
from compose.compression.gathers import CodedGather, DifferenceGather
from compose.compression.layout import Layout
from compose.compression.low_rank import LowRank
from compose.compression.reductions import InBlocks, Levels, Plain, Reduction
from compose.compression.sparse import Largest
from compose.parallel.comm import Comm

ROTATED = True
"""Whether blocks of 4 bits are rotated. Only a benchmark turns it off, to show what it is worth."""
LOSSY = ("int4", "powersgd", "top_k")
"""The types of gradients that are for slow links; between neighbours int8 takes their place."""


@dataclass
class Moment:
    """Where training is; all units of a stage share it."""

    step: int = 0
    """Optimizer steps since the run began."""
    scale: float = 1.0
    """The loss scale of the gradients."""
    last: bool = True
    """Whether this is the last micro-batch of the step."""


@dataclass
class Cut:
    """The parameters of one unit, before they are cut."""

    names: tuple[str, ...]
    shapes: list[tuple[int, ...]]
    """The shapes on this rank of tp."""
    trained: list[bool]
    """Whether each has a gradient."""
    dims: list[int] | None = None
    """The dim along which each is cut; None is the first."""

    def named(self, trained: bool) -> list[str]:
        """Return the names of all parameters, or of those that have gradients."""
        return [n for n, has in zip(self.names, self.trained, strict=True) if has or not trained]

    def layout(self, ranks: int, trained: bool = False) -> Layout:
        """Return the layout of all parameters, or of those that have gradients."""
        dims = self.dims or [0] * len(self.shapes)
        rows = list(zip(self.shapes, dims, self.trained, strict=True))
        some = [(shape, dim) for shape, dim, has in rows if has or not trained]
        return Layout.of([shape for shape, _ in some], ranks, [dim for _, dim in some])


@dataclass
class Unit:
    """One unit's messages."""

    cut: Cut
    gather: CodedGather | None = None
    reductions: dict[str, Reduction] = field(default_factory=dict)
    """The sums, by what they are over: "shards" or "replicas"."""
    ranks: int = 1
    """The ranks that share the unit."""
    replicas: dist.ProcessGroup | None = None
    """The ranks that hold the same shard, if there are others."""

    def pieces(self, flat: Tensor, trained: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield names and parts of a rank's row (S,), of all parameters or those with gradients."""
        layout, names = self.cut.layout(self.ranks, trained), self.cut.named(trained)
        for name, part, piece in zip(names, layout.parts, layout.pieces(flat), strict=True):
            yield name, piece.view(part.shape)

    def missing(self) -> Tensor | None:
        """Return what this rank's gradients lack, (S,), if accounts are open; a collective."""
        lost = {kind: reduction.account.missing for kind, reduction in self.reductions.items()}
        shards, total = lost.get("shards"), lost.get("replicas")
        if shards is None:
            return total
        if self.replicas is not None:
            shards = shards.clone()
            dist.all_reduce(shards, group=self.replicas)
        return shards if total is None else total + shards

    @property
    def parts(self) -> dict[str, Reduction | CodedGather]:
        """What sends, by name."""
        return {**self.reductions, **({"gather": self.gather} if self.gather else {})}

    @property
    def accounts(self) -> list[Account]:
        """What the messages lose, for a proof."""
        return [part.account for part in self.parts.values()]


@dataclass(frozen=True)
class Place:
    """The ranks that hold a unit."""

    shards: int
    """The ranks that share it."""
    replicas: dist.ProcessGroup | None = None
    """The ranks that hold the same shard; None if there is no other."""
    levels: Levels | None = None
    """The groups of two levels, among the ranks that share it, or among replicas if none share it."""


class Units:
    """The messages of a stage's units, as [comm] asks for them."""

    def __init__(self, comm: Comm, traffic: Traffic) -> None:
        self.comm, self.traffic, self.moment = comm, traffic, Moment()
        self.units: list[Unit] = []
        # Units share both: one is for gradients before the sum, one for these with their remainder.
        self.scratch, self.wanted = Scratch(), Scratch()
        self.module: nn.Module | None = None
        self.proving = False
        self.kept: dict[str, Tensor] = {}

    def open_accounts(self, opened: bool = True) -> None:
        """Note from now on what messages lose, and begin a step; or note nothing any more."""
        self.proving = opened
        for unit in self.units:
            for account in unit.accounts:
                account.open = opened
                account.clear()

    def attach(self, module: FSDPModule, cut: Cut, place: Place) -> CodedGather | None:
        """Let FSDP send a unit's weights and gradients so."""
        unit = Unit(cut, ranks=place.shards, replicas=place.replicas)
        self.units.append(unit)
        layout = cut.layout(place.shards, trained=True)
        # Ranks that share a replica are neighbours, and other replicas are far.
        traffic = self.traffic.among(place.shards if place.replicas else self.comm.near)
        if place.shards > 1:
            unit.gather = self._gather(cut.layout(place.shards), place.levels, traffic)
            if unit.gather:
                module.set_custom_all_gather(cast(Any, unit.gather))
            if self.comm.gradients != "off":
                kind = "int8" if place.replicas and self.comm.gradients in LOSSY else None
                chosen = self._reduction(layout, place.levels, traffic, kind)
                unit.reductions["shards"] = chosen
                plain, start = Plain(traffic), self.comm.start_step
                shard_sum = ShardSum(chosen, plain, self.moment, start, layout.numel, self.scratch)
                module.set_custom_reduce_scatter(cast(Any, shard_sum))
        if place.replicas and self.comm.gradients != "off":
            row = Layout(layout.parts, 1)
            levels = None if place.shards > 1 else place.levels
            far = self.traffic.among(1 if place.shards > 1 else self.comm.near)
            sums = self._replica_sum(unit, row, place.replicas, levels, far)
            module.set_all_reduce_hook(sums.hook)
        return unit.gather

    def whole(self, cut: Cut, group: dist.ProcessGroup, levels: Levels | None) -> "ReplicaSum":
        """Return the all-reduce of the gradients of a unit that FSDP does not cut."""
        unit = Unit(cut)
        self.units.append(unit)
        traffic = self.traffic.among(self.comm.near)
        found = self._replica_sum(unit, cut.layout(1, trained=True), group, levels, traffic)
        self._restore(unit)
        return found

    def state(self) -> dict[str, Tensor]:
        """Return what the next step depends on, by name."""
        return {
            f"{unit.cut.names[0]}.{kind}.{name}": value
            for unit in self.units
            for kind, part in unit.parts.items()
            for name, value in part.state().items()
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what :meth:`state` returned. Units that do not exist yet take it when they are made."""
        self.kept = state
        if self.units:
            check(state, {name: form for unit in self.units for name, form in _forms(unit).items()})
        for unit in self.units:
            self._restore(unit)

    def _restore(self, unit: Unit) -> None:
        forms = _forms(unit)
        check({name: value for name, value in self.kept.items() if name in forms}, forms)
        for kind, part in unit.parts.items():
            begin = f"{unit.cut.names[0]}.{kind}."
            part.restore(
                {k.removeprefix(begin): v for k, v in self.kept.items() if k.startswith(begin)}
            )

    def _gather(self, layout: Layout, levels: Levels | None, traffic: Traffic) -> CodedGather | None:
        if self.comm.weights == "int8":
            return CodedGather(layout, self._blocks(8), traffic)
        if self.comm.weights == "int4_diff":
            return DifferenceGather(layout, self._blocks(4), traffic, levels)
        return None

    def _blocks(self, bits: int) -> Blocks:
        return Blocks(bits, self.comm.block, rotate=ROTATED and bits == 4)

    def _feedback(self) -> Feedback | None:
        return Feedback(self.wanted) if self.comm.error_feedback else None

    def _replica_sum(
        self,
        unit: Unit,
        layout: Layout,
        group: dist.ProcessGroup,
        levels: Levels | None,
        traffic: Traffic,
    ) -> "ReplicaSum":
        comm, ranks = self.comm, group.size()
        over = layout if comm.gradients in ("powersgd", "top_k") else layout.among(ranks)
        unit.reductions["replicas"] = reduction = self._reduction(over, levels, traffic)
        reduction.account.open = self.proving
        back = self._blocks(16 if comm.gradients == "bfloat16" else 8)
        chosen = CodedSum(layout, ranks, reduction, back, traffic)
        return ReplicaSum(chosen, PlainSum(traffic), self.moment, comm.start_step, group)

    def _reduction(
        self, layout: Layout, levels: Levels | None, traffic: Traffic, kind: str | None = None
    ) -> Reduction:
        comm = self.comm
        kind = kind or comm.gradients
        if kind == "powersgd":
            return LowRank(layout, comm.rank, traffic, self._feedback())
        if kind == "top_k":
            return Largest(layout, comm.density, traffic, self._feedback())
        code = self._blocks({"bfloat16": 16, "int8": 8, "int4": 4}[kind])
        feedback = comm.error_feedback and kind == "int4"
        near = self._blocks(8) if kind == "int4" else code
        return InBlocks(layout, code, traffic, feedback, levels, near)


def _forms(unit: Unit) -> Forms:
    """Return the forms of what a unit keeps, by whole names."""
    begin, parts = unit.cut.names[0], unit.parts.items()
    return {f"{begin}.{kind}.{name}": f for kind, p in parts for name, f in forms_of(p).items()}


class ShardSum(OwnMemory):
    """The reduce-scatter of one unit, for ``FSDPModule.set_custom_reduce_scatter``."""

    def __init__(
        self,
        chosen: Reduction,
        plain: Plain,
        moment: Moment,
        start_step: int,
        numel: int,
        scratch: Scratch,
    ) -> None:
        self.chosen, self.plain, self.moment, self.start_step = chosen, plain, moment, start_step
        self.numel, self.scratch = numel, scratch

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory. That of gradients before the sum is the scratch, which all units share."""
        numel = math.prod(size)
        if numel <= self.numel:
            return super().allocate(size, dtype=dtype, device=device)
        return self.scratch.empty(numel, dtype, device).view(*size)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fill ``output_tensor`` with the sum over ranks of this rank's row.

        Args:
            output_tensor: (S,).
            input_tensor: (n S,), for n ranks.
            group: The n ranks.
            op: The sum; FSDP divides by nothing here.
            async_op: Ignored; FSDP waits for what is on its stream.

        Raises:
            RuntimeError: FSDP asks for a mean, or a parameter has no gradient.
        """
        if op != dist.ReduceOp.SUM:
            raise RuntimeError(f"gradients are summed here, and FSDP asked for {op}")
        rows = input_tensor.view(group.size(), -1)
        if rows.shape[1] != self.numel:
            raise RuntimeError(
                f"a unit's gradients are {rows.shape[1]} numbers on each rank, and its parameters"
                f" {self.numel}: one of them has no gradient, which comm.gradients needs"
            )
        self.plain.traffic.instead("gradients", rows[0].nbytes * (group.size() - 1))
        reduction = self.chosen if self.moment.step >= self.start_step else self.plain
        reduction(rows, group, self.moment.scale, output_tensor)


class ReplicaSum:
    """The all-reduce over replicas of one unit's gradients, once a step.

    FSDP calls its hook after each reduction. Until the last micro-batch of a step the sums are put
    aside, and FSDP adds zeros.
    """

    def __init__(
        self,
        chosen: CodedSum,
        plain: PlainSum,
        moment: Moment,
        start_step: int,
        group: dist.ProcessGroup,
    ) -> None:
        self.chosen, self.plain, self.moment, self.start_step = chosen, plain, moment, start_step
        self.group = group
        self.aside: Tensor | None = None

    def hook(self, flat: Tensor) -> None:
        """Make ``flat`` (S,) the step's sum over replicas, or zeros if the step goes on."""
        if not self.moment.last:
            self.aside = flat.clone() if self.aside is None else self.aside.add_(flat)
            flat.zero_()
            return
        if self.aside is not None:
            flat.add_(self.aside)
            self.aside = None
        self.sum(flat)

    def sum(self, flat: Tensor) -> None:
        """Make ``flat`` (S,) its sum over the replicas."""
        ranks = self.group.size()
        self.plain.traffic.instead("gradients", 2 * -(-flat.nbytes // ranks) * (ranks - 1))
        chosen = self.chosen if self.moment.step >= self.start_step else self.plain
        chosen(flat, self.group, self.moment.scale)
