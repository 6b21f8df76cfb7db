"""The compressed messages of a composition: its units, its steps, and the state between them."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ParallelStyle

from compose.compression.activations import Activations, RowCode
from compose.compression.gather import GATHERS, QuantizedGather, Sender, Traffic, check, levels_of
from compose.compression.losses import Losses, cosine
from compose.compression.packing import ReusedMemory, UnitLayout
from compose.compression.reduce import GRADIENT_CODES, LOSSY, GradientCode, StepProgress, SumSettings
from compose.errors import ConfigError
from compose.ops.tensors import local_tensor
from compose.parallel.comm import Comm
from compose.parallel.data_parallel import cuts_stacks
from compose.parallel.gradient_sum import USE_ALL, has_shards
from compose.parallel.hpz import OwnMemory
from compose.train.hooks import Hook
from compose.train.readings import Reading


class Compression:
    """The compressed messages of a composition."""

    def __init__(self, comm: Comm, mesh: DeviceMesh, zero: int, compiled: bool) -> None:
        self.comm, self.device, self.compiled = comm, mesh.device_type, compiled
        self.traffic, self.progress = Traffic(), StepProgress(comm.start_step)
        self.levels = levels_of(mesh, comm.near, zero) if comm.compresses else None
        self.stages: list[StageMessages] = []
        self.activations: Activations | None = None
        if comm.activations != "off":
            code = RowCode(comm.activations, comm.block, compiled)
            self.activations = Activations(code, self.traffic)
        self.observe: Callable[[Sender], Losses | None] | None = None
        """Makes the observer of each sender; None in training."""
        self.cosine: float | None = None

    def styles(
        self, styles: Iterable[tuple[str, ParallelStyle]], axis: str
    ) -> list[tuple[str, ParallelStyle]]:
        """Return styles, with copies of those that can send codes over an axis, which do so."""
        return self.activations.styles(styles, axis) if self.activations else list(styles)

    def stage(self) -> "StageMessages | None":
        """Return the messages of a new stage's units, if they are compressed."""
        if not self.comm.compresses:
            return None
        self.stages.append(StageMessages(self))
        return self.stages[-1]

    @property
    def units(self) -> "list[CompressedUnit]":
        """The units of all stages."""
        return [unit for stage in self.stages for unit in stage.units]

    def senders(self) -> Iterator[tuple[str, Sender]]:
        """Yield all senders, each with the beginning of the names of what it keeps."""
        for number, stage in enumerate(self.stages):
            yield from ((f"{number}.{begin}", sender) for begin, sender in stage.senders())

    def attach(self, observe: Callable[[Sender], Losses | None] | None) -> None:
        """Let observers be told of every message from now on, also of senders that are yet to come."""
        self.observe = observe
        for _, sender in self.senders():
            sender.observer = observe and observe(sender)

    @contextmanager
    def optimizer_step(self, scale: float) -> Iterator[None]:
        """Let gradients be those of one optimizer step; weights must not change inside."""
        every, progress, self.cosine = self.comm.measure_every, self.progress, None
        measures = self.comm.gradients != "off" and every > 0 and progress.step % every == 0
        measures = measures and progress.step >= progress.start_step
        measures = measures and self.observe is None  # a proof reads its own after the step
        if measures:
            self.attach(lambda sender: Losses() if isinstance(sender, GradientCode) else None)
        progress.scale = scale
        gathers = [sender for _, sender in self.senders() if isinstance(sender, QuantizedGather)]
        for gather in gathers:
            gather.in_step, gather.sent = True, False
        try:
            yield
        finally:
            for gather in gathers:
                gather.in_step = False
        if measures:
            self.cosine = cosine(self.units, self.device)
            self.attach(None)
        progress.step += 1

    def metrics(self) -> dict[str, float]:
        """Return what this rank has sent since the last call; see docs/communication.md."""
        sent = self.traffic.take()
        plain = sum(size for (_, level), size in sent.items() if level == "plain")
        metrics: dict[str, float] = {
            f"{purpose}_{level}": size for (purpose, level), size in sent.items() if level != "plain"
        }
        if plain:
            metrics["ratio"] = sum(metrics.values()) / plain
        codes = [sender for _, sender in self.senders() if isinstance(sender, GradientCode)]
        kept = [c.feedback for c in codes if "feedback" in c.kept]  # a frozen unit sends none
        norms = [torch.linalg.vector_norm(feedback.blocks()) for feedback in kept]
        norm = {"feedback_norm": float(torch.stack(norms).norm())} if norms else {}
        return metrics | norm | ({} if self.cosine is None else {"cosine": self.cosine})

    def state(self) -> dict[str, Tensor]:
        """Return what the next step depends on, by name: residuals, factors and what was sent last."""
        kept = {begin + name: v for begin, s in self.senders() for name, v in s.kept.items()}
        for number, stage in enumerate(self.stages):
            kept |= {f"{number}.{name}": value for name, value in stage.restored.items()}
        return kept

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what :meth:`state` returned. Raises ConfigError for anything else."""
        stages = tuple(f"{number}." for number, _ in enumerate(self.stages))
        check({name: v for name, v in state.items() if not name.startswith(stages)}, {})
        for begin, stage in zip(stages, self.stages, strict=True):
            stage.restore({k.removeprefix(begin): v for k, v in state.items() if k.startswith(begin)})

    def of_gradients(self) -> dict[str, Tensor]:
        """Return a copy of what sums of gradients keep, by the names of :meth:`state`."""
        gathers = tuple(begin for begin, s in self.senders() if isinstance(s, QuantizedGather))
        # Also what units will take that do not exist before their first sum.
        return {n: value.clone() for n, value in self.state().items() if not n.startswith(gathers)}

    def undo(self, before: Mapping[str, Tensor]) -> None:
        """Let sums of gradients keep what :meth:`of_gradients` returned."""
        for begin, sender in self.senders():
            for name, value in [*sender.kept.items()] if isinstance(sender, GradientCode) else ():
                known = before.get(begin + name)
                if known is None:
                    del sender.kept[name]
                else:  # in place: another stream has made this memory, and will read it
                    value.copy_(known)


@dataclass
class CompressedUnit:
    """One unit's parameters and messages."""

    model: nn.Module  # the stage, or the whole model
    shapes: dict[str, tuple[int, ...]]  # the shapes before they are cut, on this rank of tp
    trained: set[str]
    dim_of: Callable[[Sequence[int]], int] = lambda shape: 0  # the dim along which a shape is cut
    ranks: int = 1  # that share the unit
    replicas: dist.ProcessGroup | None = None
    """The ranks that hold the same shard, if there are others."""
    senders: dict[str, Sender] = field(default_factory=dict)
    """Its "gather", and the sums of gradients by what they are over: "shards" or "replicas"."""

    @staticmethod
    def of(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> "CompressedUnit":
        """Return the unit of parameters that are not cut yet, and not sent."""
        shapes = {name: tuple(local_tensor(p).shape) for name, p in parameters.items()}
        trained = {name for name, p in parameters.items() if p.requires_grad}
        return CompressedUnit(model, shapes, trained)

    def named(self, trained: bool) -> list[str]:
        """Return the names of all parameters, or of those that have gradients."""
        return [name for name in self.shapes if name in self.trained or not trained]

    def layout(self, trained: bool) -> UnitLayout:
        """Return the layout of all parameters, or of those that have gradients."""
        shapes = [self.shapes[name] for name in self.named(trained)]
        return UnitLayout.of(shapes, self.ranks, [self.dim_of(shape) for shape in shapes])

    def pieces(self, flat: Tensor, trained: bool) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield this rank's parameters, all or those with gradients, and their parts of a row (S,)."""
        layout, names = self.layout(trained), self.named(trained)
        for name, part, piece in zip(names, layout.parts, layout.pieces(flat), strict=True):
            parameter = self.model.get_parameter(name)
            shape = local_tensor(parameter).shape
            # Without the padding.
            yield parameter, piece.view(part.shape)[tuple(slice(size) for size in shape)].view(shape)

    def named_senders(self) -> Iterator[tuple[str, Sender]]:
        """Yield the senders, each with the beginning of the names of what it keeps."""
        first = next(iter(self.shapes))
        yield from ((f"{first}.{kind}.", sender) for kind, sender in self.senders.items())


class StageMessages:
    """The messages of a stage's units, as :class:`compose.parallel.data_parallel.UnitMessages` says."""

    def __init__(self, owner: Compression) -> None:
        self.owner, self.comm = owner, owner.comm
        self.settings = SumSettings(owner.comm, owner.traffic, owner.compiled)
        self.reduces = owner.comm.gradients != "off"
        self.last = True  # whether this is the last micro-batch of the step
        self.scratch = ReusedMemory()
        self.units: list[CompressedUnit] = []
        self.unsent: dict[nn.Module, CompressedUnit] = {}
        self.gathers: dict[nn.Module, QuantizedGather] = {}
        self.restored: dict[str, Tensor] = {}  # what units that do not exist yet will take

    def see(self, model: nn.Module, units: Sequence[Sequence[str]]) -> None:
        """Note the units' parameters before ``fully_shard``; see :class:`UnitMessages`."""
        seen: set[nn.Parameter] = set()
        for unit in units:
            results: dict[str, nn.Parameter] = {}
            for name in unit:
                for leaf, parameter in _in_order(model.get_submodule(name)):
                    # A tied one counts once, and one without shards is not sent by FSDP.
                    if parameter not in seen and has_shards(parameter):
                        seen.add(parameter)
                        results[f"{name}.{leaf}" if name else leaf] = parameter
            self.unsent[model.get_submodule(unit[0])] = CompressedUnit.of(model, results)

    def attach(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        replicas: DeviceMesh | None,
        dim_of: Callable[[Sequence[int]], int],
        own_mesh: bool = False,
    ) -> None:
        """Let FSDP send the unit that begins with ``module`` so."""
        unit = self.unsent[module]
        if not unit.shapes or not isinstance(module, FSDPModule):
            return
        levels = None if own_mesh else self.owner.levels  # which are of the data axes
        unit.dim_of = dim_of
        unit.ranks, unit.replicas = mesh.size(), replicas.get_group() if replicas else None
        # Ranks that share a replica are neighbours.
        own = self.owner.traffic.among(unit.ranks if unit.replicas else self.comm.near)
        if unit.ranks > 1 and self.comm.weights != "off":
            kind, bits = GATHERS[self.comm.weights]
            gather = kind(unit.layout(trained=False), self.settings.blocks(bits), own, levels)
            unit.senders["gather"] = self.gathers[module] = gather
            module.set_custom_all_gather(cast(Any, gather))
        if unit.ranks > 1 and self.reduces:
            within = "int8" if unit.replicas and self.comm.gradients in LOSSY else self.comm.gradients
            settings = replace(self.settings, traffic=own, levels=levels)
            code = GRADIENT_CODES[within](settings, unit.layout(trained=True), 0)
            unit.senders["shards"] = code
            module.set_custom_reduce_scatter(cast(Any, ShardSum(self, code)))
        if unit.replicas and self.reduces:
            module.set_all_reduce_hook(self._replica_sum(unit, unit.replicas, own_mesh).hook)
        self._add(unit)

    def whole(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup
    ) -> Callable[[Tensor], None]:
        """Return the all-reduce of the flat gradients of a unit that FSDP does not cut."""
        unit = CompressedUnit.of(model, parameters)
        result = self._replica_sum(unit, group)
        self._add(unit)
        return result.sum

    def _replica_sum(
        self, unit: CompressedUnit, group: dist.ProcessGroup, own_mesh: bool = False
    ) -> "ReplicaSum":
        near, levels = self.comm.near, None if own_mesh else self.owner.levels
        if unit.ranks > 1:  # other replicas are far
            near, levels = 1, None
        settings = replace(self.settings, traffic=self.owner.traffic.among(near), levels=levels)
        row = replace(unit.layout(trained=True), ranks=1)
        code = GRADIENT_CODES[self.comm.gradients](settings, row, group.size())
        unit.senders["replicas"] = code
        return ReplicaSum(self, code, group)

    def _add(self, unit: CompressedUnit) -> None:
        self.units.append(unit)
        for begin, sender in unit.named_senders():
            sender.restore(self.restored, begin)
            sender.observer = self.owner.observe and self.owner.observe(sender)

    def senders(self) -> Iterator[tuple[str, Sender]]:
        """Yield the senders of all units, as :meth:`CompressedUnit.named_senders` does."""
        for unit in self.units:
            yield from unit.named_senders()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what senders kept. Units that do not exist yet take it when they are made."""
        self.restored = dict(state)
        if self.units:
            check(
                state, {begin + n: form for begin, s in self.senders() for n, form in s.forms.items()}
            )
        for begin, sender in self.senders():
            sender.restore(self.restored, begin)


def _in_order(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield names and parameters as FSDP orders them: those of children come first."""
    for name, child in module.named_children():
        yield from ((f"{name}.{leaf}", parameter) for leaf, parameter in _in_order(child))
    yield from module.named_parameters(recurse=False)


class ShardSum(OwnMemory):
    """The reduce-scatter of one unit, for ``FSDPModule.set_custom_reduce_scatter``."""

    def __init__(self, stage: StageMessages, code: GradientCode) -> None:
        self.stage, self.code = stage, code

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory. That of gradients before the sum is the scratch, which all units share."""
        numel = math.prod(size)
        if numel <= self.code.layout.numel:
            return super().allocate(size, dtype=dtype, device=device)
        return self.stage.scratch.empty(numel, dtype, device).view(*size)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fill ``output_tensor`` (S,) with the sum over ranks of this rank's row of (n S,)."""
        rows, numel = input_tensor.view(group.size(), -1), self.code.layout.numel
        if rows.shape[1] != numel:
            has = f"a unit has gradients of {rows.shape[1]} of its {numel} numbers on a rank"
            raise ConfigError(f"model: {has}, and comm.gradients needs them all; {USE_ALL}")
        self.code.traffic.add("gradients", "plain", rows[0].nbytes * (group.size() - 1))
        progress = self.stage.owner.progress
        progress.chosen(self.code).reduce_scatter(rows, group, progress.scale, output_tensor)


class ReplicaSum:
    """The all-reduce over replicas of one unit's gradients, once a step.

    FSDP calls its hook after each reduction. Before the last micro-batch the sums are put aside, and
    FSDP adds zeros.
    """

    def __init__(self, stage: StageMessages, code: GradientCode, group: dist.ProcessGroup) -> None:
        self.stage, self.code, self.group = stage, code, group
        self.aside: Tensor | None = None

    def hook(self, flat: Tensor) -> None:
        """Make ``flat`` (S,) the step's sum over replicas, or zeros if the step goes on."""
        if flat.is_cuda:  # FSDP made it on another stream, and lets it go before this one has read it
            flat.record_stream(torch.cuda.current_stream(flat.device))
        if not self.stage.last:
            self.aside = flat.clone() if self.aside is None else self.aside.add_(flat)
            flat.zero_()
            return
        if self.aside is not None:
            flat.add_(self.aside)
            self.aside = None
        self.sum(flat)

    def sum(self, flat: Tensor) -> None:
        """Make ``flat`` (S,) its sum over the replicas."""
        ranks, progress = self.group.size(), self.stage.owner.progress
        plain = 2 * -(-flat.nbytes // ranks) * (ranks - 1)
        self.code.traffic.add("gradients", "plain", plain)
        progress.chosen(self.code).all_reduce(flat, self.group, progress.scale)


class CompressionHook(Hook):
    """Reports what messages send, and keeps what they have not sent."""

    def __init__(self, compression: Compression, skips: bool = False) -> None:
        """``skips``: whether a step whose numbers are not finite is skipped, and training goes on."""
        self.compression, self.skips = compression, skips
        # Earlier versions cut stacks along their first dim. With a mark, their state is not read.
        self.fingerprint = ("stacks",) * any(cuts_stacks(unit.model) for unit in compression.units)
        self.sent: dict[str, float] = {}
        self.before: dict[str, Tensor] = {}

    def before_step(self, step: int) -> None:
        """Note what a skipped step must leave as it was; what validation has sent is no step's."""
        self.compression.traffic.take()
        self.before = self.compression.of_gradients() if self.skips else {}

    def see(self, reading: Reading, scale: float) -> None:
        """Undo what a skipped step has kept: what it has sent does not reach the weights."""
        if self.skips and reading.problem:
            self.compression.undo(self.before)
        self.before = {}

    def before_update(self, step: int) -> None:
        """Note what the step has sent."""
        self.sent = self.compression.metrics()

    def metrics(self) -> dict[str, Any]:
        """Return what the step has sent."""
        return {"comm": self.sent}

    def state(self) -> dict[str, Tensor] | None:
        """Return residuals, factors and what was sent last."""
        return self.compression.state()

    def load(self, state: dict[str, Tensor], read: Collection[str], step: int) -> None:
        """Go on with what was kept; the names of all begin with the number of a stage."""
        self.compression.progress.step = step
        own = [name for name in state if name.partition(".")[0].isdecimal()]
        self.compression.restore({n: state.pop(n).to(self.compression.device) for n in own})
