"""The proof of messages in fewer bytes: results with what was lost are those of plain messages.

A code rounds, so a coded gradient is not one process's. But each rank can tell what its own messages
lost (compose/compression/account.py). A coded gradient plus all that was lost must be the plain
gradient, to the last digits. One process computes with the weights as they were received, and its
optimizer takes the coded gradients. What was lost is compared with what the code is expected to lose.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compose.composition import Composition
from compose.compression.account import Account
from compose.compression.activations import Lost
from compose.compression.compression import Compression
from compose.compression.gathers import CodedGather
from compose.compression.low_rank import LowRank
from compose.compression.reductions import InBlocks
from compose.compression.sparse import Largest
from compose.compression.units import LOSSY, Unit
from compose.config.tables import Config
from compose.ops.tensors import local_tensor
from compose.parallel.comm import Comm
from compose.parallel.mesh import axis_size
from compose.proof.comparison import Comparison, parameters_of, shared, whole
from compose.proof.observers import CODES, Messages, Observer, Subject, allowed

SILENT = {"timeout", "start_timeout", "prefetch", "check_every", "measure_every"}
"""The keys that change no number."""
_ADDED = 0.2
"""The part of a remainder that int4 adds to a gradient."""
# Kernels of a GPU add in any order, and a code may make one of its steps of such rounding.
_ON_GPU = 1e-2


def extra_steps(config: Config) -> int:
    """Return how many steps a proof takes more: differences of weights are sent from the second on."""
    return int(config.comm.compresses)


def shortened(config: Config, steps: int) -> tuple[Config, tuple[str, ...]]:
    """Return the config for a proof of so many steps, and notes: one plain step, then coded ones."""
    start = min(config.comm.start_step, steps - 1, 1)
    if start == config.comm.start_step:
        return config, ()
    note = f"comm.start_step: {config.comm.start_step}, and here {start}: {steps} steps are taken"
    return replace(config, comm=replace(config.comm, start_step=start)), (note,)


def observe(subject: Subject) -> Observer | None:
    """Return what watches the coded messages of a composition, if it has any."""
    return CodedMessages(subject) if subject.composition.compression else None


class CodedMessages(Observer):
    """What the coded messages of a composition lose in a step. All ranks call each method."""

    lossy_messages = True

    def __init__(self, subject: Subject) -> None:
        self.subject, self.composition = subject, subject.composition
        self.replicas = axis_size(self.composition.mesh, "dp_replicate")
        self.label = ""
        self.begin = locals_of(self.composition) if subject.final else None
        self.coded: list[bool] = []  # by step: whether gradients lost something
        self.lossy: set[str] = set()  # parameters whose gradient lost something in the last step

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Open the accounts of a step, which is the first if ``step`` is 0."""
        self.label = f" {step + 1}" if step else ""
        self._compression.open_accounts()
        if self._compression.activations:
            self._compression.activations.open_account()
        yield

    def after_backward(self, gradients: Mapping[str, Tensor]) -> Messages:
        """Compare what messages lost with what is expected, and return what they carried."""
        scale = self.subject.loss_scale
        missing = {name: value / scale for name, value in self.missing().items()}
        received = compare_coded(self, gradients, missing)
        return Messages(received, missing, self.lossy)

    def compare(self) -> None:
        """Compare the keys that took part, and the weights with those of a run without accounts."""
        compare_keys(self._compression, self.coded, self.subject.comparison)
        if self.begin is not None:
            compare_unwatched(self.subject, self.begin)

    def received(self) -> dict[str, Tensor]:
        """Return this rank's whole weights as all ranks received them, by name in the whole model."""
        found = {}
        for module, unit in self._units():
            if unit.gather and unit.gather.account.received is not None:
                found |= self._whole(module, unit, unit.gather.account.received, trained=False)
        return found

    def missing(self) -> dict[str, Tensor]:
        """Return what this rank's whole gradients lack, by name in the whole model; float64."""
        found: dict[str, Tensor] = {}
        for module, unit in self._units():
            total = unit.missing()
            if total is not None:
                for name, value in self._whole(module, unit, total, trained=True).items():
                    found[name] = found[name] + value if name in found else value
        runner = self.composition.pipeline
        for tied in runner.ties if runner else ():
            # Its gradient is the sum over the stages that hold a copy.
            group = self.composition.mesh.get_group("pp")
            everyone: list[Tensor | None] = [None] * group.size()
            dist.all_gather_object(everyone, found.get(tied.name), group=group)
            if tied.name in found:
                found[tied.name] = sum((t for t in everyone if t is not None), start=torch.zeros(()))
        # The first rank, whose rows count, may hold none of them: a later stage does.
        self.lossy = set(_greatest({n: 1.0 for n, value in found.items() if bool(value.any())}))
        self.coded.append(bool(self.lossy))
        return found

    def expected(self, weights: bool) -> dict[str, float]:
        """Return the norm of what weights or gradients are expected to lose, by name.

        Parameters that have no formula are left out.
        """
        own: dict[str, float] = {}
        whole_names = self._whole_names()
        for module, unit in self._units():
            accounts: list[Account] = [r.account for r in unit.reductions.values()]
            if weights:
                accounts = [unit.gather.account] if unit.gather else []
            elif any(a.missing is not None and not len(a.squares) for a in accounts):
                continue
            names = [whole_names[module.get_parameter(n)] for n in unit.cut.named(not weights)]
            for account in accounts:
                for squares in [account.squares] if weights else account.expected:
                    for name, square in zip(names, squares.tolist(), strict=False):
                        own[name] = own.get(name, 0.0) + square
        # All replicas gather the same weights.
        return _norms(own, self.replicas if weights else 1)

    def strayed(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return by what norm all remainders are not what was lost, as found and expected, by name."""
        found: dict[str, float] = {}
        expected: dict[str, float] = {}
        whole_names = self._whole_names()
        for module, unit in self._units():
            names = [whole_names[module.get_parameter(n)] for n in unit.cut.named(trained=True)]
            for reduction in unit.reductions.values():
                for own, squares in zip((found, expected), reduction.account.strayed, strict=True):
                    for name, square in zip(names, squares.tolist(), strict=False):
                        own[name] = own.get(name, 0.0) + square
        return _norms(found), _norms(expected)

    def activations(self) -> dict[tuple[str, bool], Lost]:
        """Return what all ranks' activations lost in a step, by module and whether it is a gradient."""
        own = self._compression.activations
        if own is None:
            return {}
        everyone: list[dict[tuple[str, bool], Lost]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, own.account or {})
        total: dict[tuple[str, bool], Lost] = {}
        for one in everyone:
            for place, lost in one.items():
                total[place] = total[place].plus(lost) if place in total else lost
        return total

    @property
    def codes_parameters(self) -> bool:
        """Whether weights or gradients are coded."""
        return bool(self._compression.stages)

    @property
    def _compression(self) -> Compression:
        assert self.composition.compression is not None
        return self.composition.compression

    def _units(self) -> Iterator[tuple[nn.Module, Unit]]:
        for stage in self._compression.stages:
            for unit in stage.units:
                assert stage.module is not None
                yield stage.module, unit

    def _whole_names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self.composition.named_parameters()}

    def _whole(self, module: nn.Module, unit: Unit, flat: Tensor, trained: bool) -> dict[str, Tensor]:
        """Return the parts of a rank's row (S,) as whole tensors; a collective."""
        found, whole_names = {}, self._whole_names()
        for name, piece in unit.pieces(flat, trained):
            parameter = module.get_parameter(name)
            own = local_tensor(parameter)
            index = tuple(slice(size) for size in own.shape)
            local = piece[index].view(own.shape)
            found[whole_names[parameter]] = _full(parameter, local)
        return found


def _full(parameter: nn.Parameter, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local.clone()
    like = DTensor.from_local(
        local.contiguous(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return like.full_tensor()


def compare_coded(
    messages: CodedMessages, gradients: Mapping[str, Tensor], missing: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Compare what messages lost with what is expected; return the weights that were received.

    ``gradients`` are this rank's whole gradients as the optimizer gets them, and ``missing`` what they
    lack. Returned are whole weights, the same on every rank; none if weights and gradients are plain.
    """
    comparison, model = messages.subject.comparison, messages.subject.model
    for (name, gradient), total in sorted(messages.activations().items()):
        what = "lost of activations' gradients" if gradient else "lost of activations"
        size, expected = total.whole**0.5, total.expected**0.5
        if size:
            limit = allowed(expected, total.elements)
            comparison.value(f"{what}{messages.label}", name, total.lost**0.5 / size, limit / size)
    if not messages.codes_parameters:
        return {}
    received = messages.received()
    weights = {name: whole(some[0]) for name, some in parameters_of(messages.composition).items()}
    for quantity, lost, all_of, expected in (
        (
            "lost of weights",
            # A plain weight travels in the type of the computation.
            {n: value.double() - weights[n].to(value.dtype).double() for n, value in received.items()},
            weights,
            messages.expected(weights=True),
        ),
        (
            "lost of gradients",
            missing,
            {name: gradients[name].double() + value for name, value in missing.items()},
            messages.expected(weights=False),
        ),
    ):
        sizes = _greatest({name: float(all_of[name].double().norm()) for name in lost})
        for name, parameter in model.named_parameters():
            size = sizes.get(name, 0.0)
            if name in expected and size:
                limit = allowed(expected[name], parameter.numel())
                error = float(lost[name].norm()) / size if name in lost else None
                comparison.value(f"{quantity}{messages.label}", name, error, limit / size)
    strayed, expected = messages.strayed()
    for name, parameter in model.named_parameters():
        size = sizes.get(name, 0.0)
        if expected.get(name) and size:
            limit = allowed(expected[name], parameter.numel())
            what = f"lost of remainders{messages.label}"
            comparison.value(what, name, strayed[name] / size, max(limit / size, CODES))
    return shared(received, comparison.device)


def _norms(own: Mapping[str, float], times: int = 1) -> dict[str, float]:
    """Return the root of the sum of all ranks' squares over ``times``, by name; a collective."""
    everyone: list[Mapping[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    total: dict[str, float] = {}
    for one in everyone:
        for name, square in one.items():
            total[name] = total.get(name, 0.0) + square / times
    return {name: square**0.5 for name, square in total.items()}


def _greatest(own: Mapping[str, float]) -> dict[str, float]:
    """Return the greatest value of all ranks by name; a collective."""
    everyone: list[Mapping[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    names = {name for one in everyone for name in one}
    return {name: max(one.get(name, 0.0) for one in everyone) for name in names}


def compare_keys(compression: Compression, coded: list[bool], comparison: Comparison) -> None:
    """Note a row for each key that took part, and the names of the others; a collective."""
    comm, activations = compression.comm, compression.activations
    parts: list[Any] = [p for s in compression.stages for u in s.units for p in u.parts.values()]
    blocks = [p for p in parts if isinstance(p, InBlocks | CodedGather)]
    low = [p for p in parts if isinstance(p, LowRank)]
    largest = [p for p in parts if isinstance(p, Largest)]
    lossy: list[Any] = [*low, *largest] + [
        p for p in blocks if isinstance(p, InBlocks) and p.packing.code.bits == 4
    ]
    counts = [pair for p in largest for pair in zip(p.counts, p.layout.parts, strict=True)]
    right: dict[str, list[bool]] = {
        "weights": [
            True for p in blocks if isinstance(p, CodedGather) and bool(p.account.squares.any())
        ],
        "activations": [True] * bool(activations and activations.account),
        "block": [p.packing.code.size == comm.block for p in blocks],
        "near": [p.levels.near.size() == comm.near for p in parts if getattr(p, "levels", None)],
        "rank": [q.shape[1] == comm.rank for p in low for q in p.factors.values()],
        "density": [n == math.ceil(comm.density * part.numel) for n, part in counts if part.coded],
        "error_feedback": [(p.feedback is not None) == comm.error_feedback for p in lossy],
    }
    right["block"] += [activations.code.block == comm.block] if activations else []
    given = [p.account.given for p in blocks if p.account.added]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (right, coded, sum(given, torch.zeros(2))))
    right = {key: [ok for one, _, _ in everyone for ok in one[key]] for key in right}
    steps = [any(step) for step in zip(*(one for _, one, _ in everyone), strict=True)]
    begun = [step >= comm.start_step for step in range(len(steps))]
    right["gradients"] = right["start_step"] = [steps == begun] if any(steps) else []
    if comm.error_feedback and sum(steps) < 2:  # the first message has nothing to add
        right["error_feedback"] = []
    asked = {f.name for f in fields(Comm) if getattr(comm, f.name) != f.default} - SILENT
    for key in sorted(asked | ({"error_feedback"} if comm.gradients in LOSSY else set())):
        if right[key]:
            error = 0.0 if all(right[key]) else math.inf
            comparison.value("form of messages", f"comm.{key}", error, 0.0)
        else:
            comparison.unused.append(f"comm.{key}")
    added, square = sum((one for _, _, one in everyone), torch.zeros(2)).tolist()
    if square:
        comparison.value("added", "comm.error_feedback", abs(added / square - _ADDED), _ADDED / 2)


def locals_of(composition: Composition) -> list[Tensor]:
    """Return copies of what this rank holds of all parameters."""
    return [local_tensor(p).detach().clone() for _, p in composition.named_parameters()]


def compare_unwatched(subject: Subject, begin: list[Tensor]) -> None:
    """Compare the weights after a proof's steps with those after the same steps without accounts.

    An account may only note, so they are the same bit by bit. A collective.
    """

    def trained(noting: bool) -> list[Tensor]:
        def prepare(again: Composition) -> None:
            for (_, parameter), value in zip(again.named_parameters(), begin, strict=True):
                local_tensor(parameter).detach().copy_(value)
            assert again.compression is not None
            again.compression.comm = replace(again.compression.comm, measure_every=0)
            if noting and again.compression.activations:
                again.compression.activations.open_account(exact=False)

        return locals_of(subject.train_again(prepare))

    watched, comparison = subject.composition, subject.comparison
    assert watched.compression is not None
    exact = watched.compression.activations is not None  # then results were not those of codes
    found, error = trained(noting=True) if exact else locals_of(watched), 0.0
    for one, other, before in zip(found, trained(noting=False), begin, strict=True):
        if not torch.equal(one, other):
            apart, moved = (float((x - other).double().norm()) for x in (one, before))
            error = max(error, apart / moved if moved else math.inf)
    tolerance = 0.0 if comparison.device.type == "cpu" else _ON_GPU
    comparison.value("unwatched update", "all parameters", error, tolerance)
