"""The comparison of what each rank has with what one process has, gathered from every rank."""

import math
import statistics
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compose.composition import Composition
from compose.ops.tensors import gathered_objects, on_first_rank
from compose.proof.references import Expected, difference
from compose.proof.report import (
    LOOSE,
    SAME_ROUNDING,
    ComparisonRow,
    Report,
    State,
    Tolerance,
    or_infinite,
    unused,
)
from compose.proof.routing_trace import Difference

_NOT_HELD = -1.0  # the error of a tensor of which this rank has no part


@dataclass
class _RankRow:
    """One comparison on this rank."""

    row: ComparisonRow
    """Its error and rank are not filled in, and its tolerance is what is allowed at least."""
    error: float
    own: float = 0.0
    """One process's own error, relative."""
    shaken: float = 0.0
    """An update's relative error if each gradient has an error of a usual size."""
    scale: float = 0.0
    """The size of an element, a root mean square; 0 if one process has no such value."""
    cancels: float = 1.0
    """By how much the parts of a sum are larger than the sum: they are what is rounded."""


class Comparison:
    """Compares what each rank has with what rank 0 expects.

    ``prefix`` begins each row's quantity. ``loose`` is the state of a row whose allowed error is above
    ``LOOSE``.
    """

    def __init__(
        self, device: torch.device, tolerance: Tolerance, prefix: str = "", loose: State = ""
    ) -> None:
        self.device, self.tolerance, self.prefix, self.loose = device, tolerance, prefix, loose
        self.compared: list[_RankRow] = []
        self.sums: dict[str, list[int]] = {}  # checksums of this rank's copies, by name
        # The distance of gradients from float64: this rank's, and one process's.
        self.from_exact: list[float] = []
        self.own_from_exact: list[float] = []
        self.unused: list[str] = []  # keys of the config that took no part, the same on every rank
        self.notes: list[str] = []  # what the report says after its rows, the same on every rank

    def tensor(
        self,
        quantity: str,
        name: str,
        values: Sequence[Tensor],
        shape: torch.Size,
        expected: Expected | None,
        tolerance: float,
    ) -> None:
        """Compare the whole tensors that this rank holds with one process's; a collective.

        The error is ||value - expected|| / ||expected||, in Frobenius norms. Only rank 0's ``expected``
        counts. Unless ``tolerance`` is 0, it grows with one process's own error.
        """
        right = torch.zeros(shape, dtype=torch.float64, device=self.device)
        state: State = ""
        if expected is not None:
            right.copy_(expected.value)
            state = expected.state
        errors_of_one = (expected.rounding, expected.shaken) if expected else (0.0, 0.0)
        both = torch.tensor(errors_of_one, dtype=torch.float64, device=self.device)
        dist.broadcast(right, src=0)
        dist.broadcast(both, src=0)
        rounding, shaken = both.tolist()
        root = max(shape.numel(), 1) ** 0.5
        size = float(right[right.isfinite()].norm()) or rounding
        if not size:  # all zeros: the error is an element's, a root mean square
            size, tolerance = root, 0.0
        errors = [or_infinite(float(difference(value, right).norm()) / size) for value in values]
        held = "buffer" in quantity or quantity == "initial weight"  # a mask may hold infinities
        if not (held or right.isfinite().all()):  # nothing can be learnt from it
            errors = [math.inf for _ in errors]
        self.compared.append(
            _RankRow(
                ComparisonRow(self.prefix + quantity, name, 0.0, tolerance, 0, state),
                max(errors, default=_NOT_HELD),
                own=rounding / size,
                shaken=shaken / size,
                scale=size / root,
                cancels=max(1.0, expected.parts / size) if expected else 1.0,
            )
        )

    def value(self, quantity: str, name: str, error: float | None, tolerance: float) -> None:
        """Note an error that this rank has computed itself, None if it holds no such value."""
        row = ComparisonRow(self.prefix + quantity, name, 0.0, tolerance, 0)
        self.compared.append(_RankRow(row, _NOT_HELD if error is None else or_infinite(error)))

    def rounding(self, values: Sequence[Tensor], shape: torch.Size, expected: Expected | None) -> None:
        """Note how far a gradient is from float64, for :meth:`same_rounding`; a collective."""
        exact = torch.zeros(shape, dtype=torch.float64, device=self.device)
        if expected is not None and expected.exact is not None:
            exact.copy_(expected.exact)
            self.own_from_exact.append(expected.rounding)
        dist.broadcast(exact, src=0)
        distances = [float((value.double() - exact).norm()) for value in values]
        self.from_exact.append(max(distances, default=0.0))

    def same_rounding(self) -> None:
        """Check that all gradients together are as far from float64 as one process's; a collective.

        A type that is not applied makes them more exact; one that is applied too often, less exact.
        """
        worst = torch.tensor(self.from_exact, dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        result, own = float(worst.norm()), math.hypot(*self.own_from_exact)
        ratio = max(result / own, own / result) if result and own else float(result != own) * math.inf
        first = dist.get_rank() == 0
        self.value("rounding", "all gradients", ratio if first else None, SAME_ROUNDING)

    def same_everywhere(self, name: str, values: Sequence[Tensor]) -> None:
        """Note a parameter's checksums, to check that ranks hold the same bits of it; no collective."""
        flat = [v.cpu().contiguous().flatten().view(torch.uint8) for v in values]
        self.sums[name] = [zlib.crc32(each.numpy().tobytes()) for each in flat]

    def copies(self, name: str, values: Sequence[Tensor]) -> None:
        """Check that all ranks' copies of a tied parameter have the same bits; a collective."""
        first = shared({name: values[0]} if values else {}, self.device)[name]
        self.tensor("tied copies", name, values, first.shape, Expected(first), 0.0)

    def _checksums(self) -> list[ComparisonRow]:
        """Compare all ranks' checksums: the error is 0 where they are the same, else infinite."""
        everyone, rows = gathered_objects(self.sums), []
        for name in self.sums:
            held = [(rank, value) for rank, sums in enumerate(everyone) for value in sums[name]]
            others = [rank for rank, value in held if value != held[0][1]]
            error = math.inf if others else 0.0
            rows.append(ComparisonRow(f"{self.prefix}copies", name, error, 0.0, min(others, default=0)))
        return rows

    def _same_bits(self, rows: Sequence[ComparisonRow]) -> ComparisonRow:
        """Return the median over parameters of an update's error, in units of one process's own.

        A median is taken because the gradients of a few parameters may be only rounding.
        """
        pairs = [(row, each.own) for row, each in zip(rows, self.compared, strict=False)]
        errors = [row.error / own for row, own in pairs if row.quantity.endswith("update") and own]
        middle = statistics.median(errors) if errors else 0.0
        return ComparisonRow(
            f"{self.prefix}rounding", "all updates", middle, self.tolerance.same_bits, 0
        )

    def report(self, routing: Sequence[Difference], tie: float) -> Report:
        """Gather the errors of all ranks, and return the report; a collective.

        ``routing`` are the differences of each router and step, where only rank 0's count, and ``tie``
        is the margin up to which a choice of a router is as good as random.
        """
        everyone = gathered_objects([each.error for each in self.compared])
        # One process's error by quantity, relative and of an element.
        means = _mean_squares((c.row.quantity, 0.0 if c.row.state else c.own) for c in self.compared)
        of_elements = _mean_squares(
            (c.row.quantity, c.own * c.scale) for c in self.compared if not c.row.state
        )
        rows = []
        for each, errors in zip(self.compared, zip(*everyone, strict=True), strict=True):
            row, state = each.row, each.row.state
            rank = max(range(len(errors)), key=errors.__getitem__)
            error = math.inf if errors[rank] == _NOT_HELD else errors[rank]
            mean = means[row.quantity] * each.cancels
            allowed = self.tolerance.allowed(row.tolerance, each.own, mean)
            if row.tolerance:
                # A float32 row that no float64 row stands behind may not become loose by this.
                shaken = self.tolerance.times * each.shaken
                allowed = max(allowed, min(shaken, LOOSE) if self.loose == "loose" else shaken)
            if not state and each.scale and row.tolerance and allowed > LOOSE:
                state = self.loose
            if state == "zero" and each.scale:
                # Terms cancel here, and their rounding is left. It depends on the kernels, and one
                # process's may be very small by chance, or none. So the rounding of other values is
                # allowed.
                allowed = max(allowed, of_elements.get(row.quantity, 0.0) / each.scale)
            rows.append(replace(row, error=error, rank=rank, tolerance=allowed, state=state))
        rows += [
            ComparisonRow(f"{self.prefix}{d.kind}", f"{d.router}, step {d.step}", d.margin, tie, 0)
            for d in routing
        ]
        if self.tolerance.same_bits:
            rows.append(self._same_bits(rows))
        rows += [*self._checksums(), *map(unused, self.unused)]
        notes = [f"{d}{': a tie' if d.margin <= tie else ''}" for d in routing if d.tokens]
        return on_first_rank(lambda: Report(rows, (*notes, *self.notes)))


def _mean_squares(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the root mean square of the numbers of each name."""
    results: dict[str, list[float]] = {}
    for name, number in pairs:
        results.setdefault(name, []).append(number)
    return {name: math.hypot(*numbers) / len(numbers) ** 0.5 for name, numbers in results.items()}


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor (a collective), or the tensor itself, as a detached copy."""
    if isinstance(tensor, DTensor):  # its part may be in host memory, where collectives do not work
        tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    return tensor.detach().clone()


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return the whole gradient of a parameter, zeros if it has none; a collective."""
    if parameter.grad is None:  # its part may be in host memory, as that of a gradient
        placed = isinstance(parameter, DTensor)
        device = parameter.device_mesh.device_type if placed else parameter.device
        return torch.zeros(parameter.shape, device=device)
    return whole(parameter.grad)


def parameters_of(composition: Composition) -> dict[str, list[nn.Parameter]]:
    """Return this rank's parameters by their names in the whole model; one may have several copies."""
    held: dict[str, list[nn.Parameter]] = {}
    for name, parameter in composition.named_parameters():
        held.setdefault(name, []).append(parameter)
    return held


def buffers_of(model: nn.Module, composed: nn.Module) -> Iterator[tuple[str, torch.Size, list[Tensor]]]:
    """Yield name and shape of each buffer of the whole model, and what this rank has of it."""
    here = dict(composed.named_buffers())
    for name, buffer in model.named_buffers():
        yield name, buffer.shape, [here[name]] if name in here else []


def shared(held: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of all ranks by name, each from the first rank that has it; a collective."""
    everyone = gathered_objects({name: (t.shape, t.dtype) for name, t in held.items()})
    sources = {name: rank for rank, names in reversed(list(enumerate(everyone))) for name in names}
    results = {}
    for name, rank in sorted(sources.items()):
        shape, dtype = everyone[rank][name]
        own = rank == dist.get_rank()
        results[name] = (
            held[name].contiguous() if own else torch.empty(shape, dtype=dtype, device=device)
        )
        dist.broadcast(results[name], src=rank)
    return results
