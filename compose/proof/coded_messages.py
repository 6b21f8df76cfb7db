"""The proof of messages in fewer bytes: results with what was lost are those of plain messages.

A code rounds, so a coded gradient is not one process's. But each rank can tell what its own messages
lost (compose/compression/account.py). A coded gradient plus all that was lost must be the plain
gradient, to the last digits. One process computes with the weights as they were received, and its
optimizer takes the coded gradients. What was lost is compared with what the code is expected to lose.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compose.composition import Composition
from compose.compression.account import Account
from compose.compression.activations import Lost
from compose.compression.compression import Compression
from compose.compression.units import Unit
from compose.ops.local_tensor import local_tensor
from compose.parallel.mesh import axis_size
from compose.proof.comparison import Comparison

CODES = 1e-6
"""The relative error of what is computed with codes, in float32 whatever the gradient's type is."""
MARGIN = 1.25
"""What is lost may be this many times what is expected: rounding is not quite random."""
_SURE = 4.0
"""And so many standard deviations of it more, which matters for few elements."""


class CodedMessages:
    """What the coded messages of a composition lose in a step. All ranks call each method."""

    def __init__(self, composition: Composition) -> None:
        self.composition = composition
        self.replicas = axis_size(composition.mesh, "dp_replicate")
        self.label = ""
        self.coded: list[bool] = []  # by step: whether gradients lost something
        self.lossy: set[str] = set()  # parameters whose gradient lost something in the last step

    def begin(self, step: int) -> None:
        """Open the accounts of a step, which is the first if ``step`` is 0."""
        self.label = f" {step + 1}" if step else ""
        self._compression.open_accounts()
        if self._compression.activations:
            self._compression.activations.open_account()

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


def allowed(expected: float, elements: int) -> float:
    """Return the norm that what was lost may have, if so much is expected of so many elements."""
    return expected * (MARGIN + _SURE / max(elements, 1) ** 0.5)


def compare_coded(
    messages: CodedMessages,
    comparison: Comparison,
    model: nn.Module,
    gradients: Mapping[str, Tensor],
    missing: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Compare what messages lost with what is expected; return the weights that were received.

    Args:
        messages: The messages of a step that has just run.
        comparison: Gets the rows.
        model: The whole model.
        gradients: This rank's whole gradients, as the optimizer gets them.
        missing: What they lack.
        weights: This rank's whole master weights.

    Returns:
        Whole weights, the same on every rank; none if weights and gradients are not coded.
    """
    for (name, gradient), total in sorted(messages.activations().items()):
        what = "lost of activations' gradients" if gradient else "lost of activations"
        size, expected = total.whole**0.5, total.expected**0.5
        if size:
            limit = allowed(expected, total.elements)
            comparison.value(f"{what}{messages.label}", name, total.lost**0.5 / size, limit / size)
    if not messages.codes_parameters:
        return {}
    received = messages.received()
    for quantity, lost, whole, expected in (
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
        sizes = _greatest({name: float(whole[name].double().norm()) for name in lost})
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
    return shared(received)


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


def shared(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of all ranks by name, each from the first rank that has it; a collective."""
    everyone: list[dict[str, tuple[torch.Size, torch.dtype]]] = [
        {} for _ in range(dist.get_world_size())
    ]
    dist.all_gather_object(everyone, {name: (t.shape, t.dtype) for name, t in held.items()})
    sources = {name: rank for rank, names in reversed(list(enumerate(everyone))) for name in names}
    found = {}
    for name, rank in sorted(sources.items()):
        shape, dtype = everyone[rank][name]
        device = next(iter(held.values())).device if held else torch.device("cpu")
        own = rank == dist.get_rank()
        found[name] = held[name].contiguous() if own else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(found[name], src=rank)
    return found
