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
from compose.compression.losses import Losses
from compose.compression.packing import Scratch, UnitLayout
from compose.compression.reduce import GRADIENT_CODES, LOSSY, GradientCode, Progress, Settings
from compose.ops.tensors import local_tensor
from compose.parallel.comm import Comm
from compose.parallel.data_parallel import cuts_stacks
from compose.parallel.hpz import OwnMemory
from compose.train.hooks import Hook
from compose.train.readings import Reading


class Compression:
    """The compressed messages of a composition."""

    def __init__(self, comm: Comm, mesh: DeviceMesh, zero: int, compiled: bool) -> None:
        self.comm, self.device, self.compiled = comm, mesh.device_type, compiled
        self.traffic, self.progress = Traffic(), Progress(comm.start_step)
        self.levels = levels_of(mesh, comm.near, zero) if comm.compresses else None
        self.stages: list[StageMessages] = []
        self.activations: Activations | None = None
        if comm.activations != "off":
            code = RowCode(comm.activations, comm.block, compiled)
            self.activations = Activations(code, self.traffic)
        self.observe: Callable[[Sender], Losses] | None = None
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
    def units(self) -> "list[Unit]":
        """The units of all stages."""
        return [unit for stage in self.stages for unit in stage.units]

    def attach(self, observe: Callable[[Sender], Losses] | None) -> None:
        """Let observers be told of every message from now on, also of senders that are yet to come."""
        self.observe = observe
        for unit in self.units:
            for sender in unit.senders.values():
                sender.observer = observe and observe(sender)

    @contextmanager
    def optimizer_step(self, scale: float) -> Iterator[None]:
        """Let gradients be those of one optimizer step; weights must not change inside."""
        every, self.cosine = self.comm.measure_every, None
        progress, loses = self.progress, self.comm.gradients != "off"
        measures = bool(self.stages) and loses and every > 0 and progress.step % every == 0
        measures = measures and progress.step >= progress.start_step
        measures = measures and self.observe is None  # a proof reads its own after the step
        if measures:
            self.attach(lambda _: Losses())
        self.progress.scale = scale
        gathers = [unit.gather for unit in self.units if unit.gather]
        for gather in gathers:
            gather.in_step, gather.sent = True, False
        try:
            yield
        finally:
            for gather in gathers:
                gather.in_step = False
        if measures:
            self.cosine = self._cosine()
            self.attach(None)
        self.progress.step += 1

    def _cosine(self) -> float:
        """Return the cosine between the gradients and those of plain messages; a collective."""
        sums = torch.zeros(3, dtype=torch.float64)
        for unit in self.units:
            missing = unit.missing()
            for parameter, piece in unit.pieces(missing, True) if missing is not None else ():
                assert parameter.grad is not None
                sent = local_tensor(parameter.grad).double()
                true = sent + piece.to(sent.device)
                pairs = ((sent, true), (sent, sent), (true, true))
                sums += torch.stack([(a * b).sum() for a, b in pairs]).cpu()
        sums = sums.to(self.device)
        dist.all_reduce(sums)
        both, sent_square, true_square = sums.tolist()
        return both / max((sent_square * true_square) ** 0.5, 1e-300)

    def metrics(self) -> dict[str, float]:
        """Return what this rank has sent since the last call, for metrics.jsonl.

        These are bytes of weights and gradients to near and far ranks, and of activations over tp and
        ep; ``ratio``, these over plain messages; ``feedback_norm``, the norm of residuals; and, if it
        was measured, ``cosine`` of the gradients and those of plain messages.
        """
        sent = self.traffic.take()
        plain = sum(size for (_, level), size in sent.items() if level == "plain")
        metrics: dict[str, float] = {
            f"{purpose}_{level}": size for (purpose, level), size in sent.items() if level != "plain"
        }
        if plain:
            metrics["ratio"] = sum(metrics.values()) / plain
        residuals = [c.feedback for unit in self.units for c in unit.codes.values() if c.feedback]
        if residuals:
            norms = [torch.linalg.vector_norm(residual.blocks()) for residual in residuals]
            metrics["feedback_norm"] = float(torch.stack(norms).norm())
        return metrics | ({} if self.cosine is None else {"cosine": self.cosine})

    def state(self) -> dict[str, Tensor]:
        """Return what the next step depends on, by name: residuals, factors and what was sent last."""
        return {
            f"{number}.{name}": value
            for number, stage in enumerate(self.stages)
            for name, value in stage.kept()
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what :meth:`state` returned. Raises ConfigError for anything else."""
        stages = tuple(f"{number}." for number, _ in enumerate(self.stages))
        check({name: v for name, v in state.items() if not name.startswith(stages)}, {})
        for begin, stage in zip(stages, self.stages, strict=True):
            stage.restore({k.removeprefix(begin): v for k, v in state.items() if k.startswith(begin)})

    def of_gradients(self) -> dict[str, Tensor]:
        """Return a copy of what sums of gradients keep, by the names of :meth:`state`."""
        gathers = tuple(
            f"{number}.{unit.prefix('gather')}"
            for number, stage in enumerate(self.stages)
            for unit in stage.units
        )
        # Also what units will take that do not exist before their first sum.
        return {n: value.clone() for n, value in self.state().items() if not n.startswith(gathers)}

    def undo(self, before: Mapping[str, Tensor]) -> None:
        """Let sums of gradients keep what :meth:`of_gradients` returned."""
        for number, stage in enumerate(self.stages):
            for unit in stage.units:
                for kind, code in unit.codes.items():
                    for name, value in [*code.kept.items()]:
                        known = before.get(f"{number}.{unit.prefix(kind)}{name}")
                        if known is None:
                            del code.kept[name]
                        else:  # in place: another stream has made this memory, and will read it
                            value.copy_(known)


@dataclass
class Unit:
    """One unit's parameters and messages."""

    model: nn.Module  # the stage, or the whole model
    shapes: dict[str, tuple[int, ...]]  # the shapes before they are cut, on this rank of tp
    trained: set[str]
    dim_of: Callable[[Sequence[int]], int] = lambda shape: 0  # the dim along which a shape is cut
    ranks: int = 1  # that share the unit
    replicas: dist.ProcessGroup | None = None
    """The ranks that hold the same shard, if there are others."""
    gather: QuantizedGather | None = None
    codes: dict[str, GradientCode] = field(default_factory=dict)
    """The sums of gradients, by what they are over: "shards" or "replicas"."""

    @staticmethod
    def of(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> "Unit":
        """Return the unit of parameters that are not cut yet, and not sent."""
        shapes = {name: tuple(local_tensor(p).shape) for name, p in parameters.items()}
        return Unit(model, shapes, {name for name, p in parameters.items() if p.requires_grad})

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

    def prefix(self, kind: str) -> str:
        """Return the beginning of the names of what a sender keeps."""
        return f"{next(iter(self.shapes))}.{kind}."

    def missing(self) -> Tensor | None:
        """Return what this rank's gradients lack, (S,), if they are observed; a collective."""
        missing = {kind: code.observer.missing for kind, code in self.codes.items() if code.observer}
        shards, total = missing.get("shards"), missing.get("replicas")
        if shards is None:
            return total
        if self.replicas is not None:
            shards = shards.clone()
            dist.all_reduce(shards, group=self.replicas)
        return shards if total is None else total + shards

    @property
    def senders(self) -> dict[str, Sender]:
        """The sums and the gather, by name."""
        return {**self.codes, **({"gather": self.gather} if self.gather else {})}


class StageMessages:
    """The messages of a stage's units, as :class:`compose.parallel.data_parallel.UnitMessages` says."""

    def __init__(self, owner: Compression) -> None:
        self.owner, self.comm = owner, owner.comm
        self.settings = Settings(owner.comm, owner.traffic, owner.compiled)
        self.reduces = owner.comm.gradients != "off"
        self.last = True  # whether this is the last micro-batch of the step
        self.scratch = Scratch()
        self.units: list[Unit] = []
        self.unsent: dict[nn.Module, Unit] = {}
        self.gathers: dict[nn.Module, QuantizedGather] = {}
        self.restored: dict[str, Tensor] = {}

    def see(self, model: nn.Module, units: Sequence[Sequence[str]]) -> None:
        """Note the units' parameters before ``fully_shard``; see :class:`UnitMessages`."""
        seen: set[nn.Parameter] = set()
        for unit in units:
            results: dict[str, nn.Parameter] = {}
            for name in unit:
                for leaf, parameter in _in_order(model.get_submodule(name)):
                    # A tied one counts once, and one without dims is not sent by FSDP.
                    if parameter not in seen and parameter.ndim:
                        seen.add(parameter)
                        results[f"{name}.{leaf}" if name else leaf] = parameter
            self.unsent[model.get_submodule(unit[0])] = Unit.of(model, results)

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
        # Ranks that share a replica are neighbours, and other replicas are far.
        own = self.owner.traffic.among(unit.ranks if unit.replicas else self.comm.near)
        over = self.owner.traffic.among(1 if unit.ranks > 1 else self.comm.near)
        if unit.ranks > 1 and self.comm.weights != "off":
            kind, bits = GATHERS[self.comm.weights]
            gather = kind(unit.layout(trained=False), self.settings.blocks(bits), own, levels)
            unit.gather = self.gathers[module] = gather
            module.set_custom_all_gather(cast(Any, gather))
        if unit.ranks > 1 and self.reduces:
            within = "int8" if unit.replicas and self.comm.gradients in LOSSY else self.comm.gradients
            settings = replace(self.settings, traffic=own, levels=levels)
            unit.codes["shards"] = GRADIENT_CODES[within](settings, unit.layout(trained=True), 0)
            module.set_custom_reduce_scatter(cast(Any, ShardSum(self, unit.codes["shards"])))
        if unit.replicas and self.reduces:
            settings = replace(self.settings, traffic=over, levels=None if unit.ranks > 1 else levels)
            module.set_all_reduce_hook(self._replica_sum(unit, settings, unit.replicas).hook)
        self._add(unit)

    def whole(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup
    ) -> Callable[[Tensor], None]:
        """Return the all-reduce of the flat gradients of a unit that FSDP does not cut."""
        unit, traffic = Unit.of(model, parameters), self.owner.traffic.among(self.comm.near)
        settings = replace(self.settings, traffic=traffic, levels=self.owner.levels)
        result = self._replica_sum(unit, settings, group)
        self._add(unit)
        return result.sum

    def _replica_sum(self, unit: Unit, settings: Settings, group: dist.ProcessGroup) -> "ReplicaSum":
        row = replace(unit.layout(trained=True), ranks=1)
        unit.codes["replicas"] = GRADIENT_CODES[self.comm.gradients](settings, row, group.size())
        return ReplicaSum(self, unit.codes["replicas"], group)

    def _add(self, unit: Unit) -> None:
        self.units.append(unit)
        for kind, sender in unit.senders.items():
            self._take(sender, unit.prefix(kind))
            sender.observer = self.owner.observe and self.owner.observe(sender)

    def senders(self) -> Iterator[tuple[str, Sender]]:
        """Yield all senders, each with the beginning of the names of what it keeps."""
        for unit in self.units:
            for kind, sender in unit.senders.items():
                yield unit.prefix(kind), sender

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what senders keep, by name, and what units that do not exist yet will take."""
        for prefix, sender in self.senders():
            yield from ((prefix + name, value) for name, value in sender.kept.items())
        yield from self.restored.items()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what senders kept. Units that do not exist yet take it when they are made."""
        self.restored = dict(state)
        if self.units:
            check(
                state, {begin + n: form for begin, s in self.senders() for n, form in s.forms.items()}
            )
        for prefix, sender in self.senders():
            self._take(sender, prefix)

    def _take(self, sender: Sender, prefix: str) -> None:
        sender.restore(self.restored, prefix)
        for name in sender.kept:  # else the memory of a base would be held for the whole run
            self.restored.pop(prefix + name)


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
        if op != dist.ReduceOp.SUM:
            raise RuntimeError(f"gradients are summed here, and FSDP asked for {op}")
        rows, numel = input_tensor.view(group.size(), -1), self.code.layout.numel
        if rows.shape[1] != numel:
            raise RuntimeError(
                f"a unit's gradients are {rows.shape[1]} numbers on each rank, and its parameters"
                f" {numel}: one of them has no gradient, which comm.gradients needs"
            )
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
        """Note what a skipped step must leave as it was."""
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
        device = self.compression.device
        self.compression.restore({name: state.pop(name).to(device) for name in own})
