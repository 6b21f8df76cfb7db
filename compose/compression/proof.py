"""The proof of messages in fewer bytes: results with what was lost are those of plain messages.

Each rank notes what its own messages lost. A gradient plus all that was lost must be the plain
gradient, to the last digits. One process computes with the weights as they were received, and its
optimizer takes the gradients as they are. The losses are compared with those that codes should have.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compose.composition import Composition
from compose.compression.compressor import CompressedUnit, Compression
from compose.compression.losses import Account, ActivationAccount, ActivationLoss, missing_of
from compose.compression.reduce import LOSSY
from compose.config.tables import Config
from compose.ops.tensors import gathered_objects, local_tensor
from compose.parallel.comm import Comm
from compose.parallel.mesh import axis_size
from compose.proof.comparison import Comparison, parameters_of, shared, whole
from compose.proof.observers import CODES, MessageEffects, Observer, Subject, allowed
from compose.proof.report import or_infinite

_CHECKS = {"check_every", "check_state", "check_messages"}
SILENT = {"timeout", "start_timeout", "prefetch", "measure_every"} | _CHECKS
"""The keys that change no number."""
_ADDED = 0.2
"""The part of a residual that int4 adds to a gradient."""
# Kernels of a GPU add in any order, and a code may make one of its steps of such rounding.
_ON_GPU = 1e-2


def extra_steps(config: Config) -> int:
    """Return how many steps a proof takes more: differences of weights are sent from the second on."""
    return int(config.comm.compresses)


def shortened(config: Config, steps: int) -> tuple[Config, tuple[str, ...]]:
    """Return the config for a proof of so many steps, and notes: one plain step, then others."""
    start = min(config.comm.start_step, steps - 1, 1)
    if start == config.comm.start_step:
        return config, ()
    note = f"comm.start_step: {config.comm.start_step}, and here {start}: {steps} steps are taken"
    return replace(config, comm=replace(config.comm, start_step=start)), (note,)


def observe(subject: Subject) -> Observer | None:
    """Return what watches the compressed messages of a composition, if it has any."""
    if subject.composition.compression:
        return CompressedMessages(subject)
    comm = subject.run.setup.options.comm
    subject.comparison.unused += [f"comm.{key}" for key in sorted(_asked(comm)) if comm.codes]
    return None


def _asked(comm: Comm) -> set[str]:
    """Return the keys that are not as by default, and that change numbers."""
    return {f.name for f in fields(comm) if getattr(comm, f.name) != f.default} - SILENT


class CompressedMessages(Observer):
    """The losses of the compressed messages of a step. All ranks call each method."""

    lossy_messages = True

    def __init__(self, subject: Subject) -> None:
        self.subject, self.composition = subject, subject.composition
        self.compression = cast(Compression, self.composition.compression)
        self.activations = ActivationAccount()
        self.replicas = axis_size(self.composition.mesh, "dp_replicate")
        self.label = ""
        self.begin = locals_of(self.composition) if not subject.run.label else None
        self.lossy_steps: list[bool] = []  # by step: whether gradients lost something
        self.lossy: set[str] = set()  # parameters whose gradient lost something in the last step

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Open the accounts of a step, which is the first if ``step`` is 0."""
        self.label = f" {step + 1}" if step else ""
        if not step:
            self.compression.attach(Account)
        for unit in self.compression.units:
            for account in accounts_of(unit).values():
                account.begin()
        if self.compression.activations:
            self.compression.activations.observer = self.activations = ActivationAccount()
        yield

    def after_backward(self, gradients: Mapping[str, Tensor]) -> MessageEffects:
        """Compare what messages lost with what is expected, and return what they carried."""
        scale = self.subject.run.setup.loss_scale
        missing = {name: value / scale for name, value in self.missing().items()}
        received = compare_losses(self, gradients, missing)
        return MessageEffects(received, missing, self.lossy)

    def compare(self) -> None:
        """Compare the keys that took part, and the weights with those of a run unwatched."""
        compare_keys(self, self.subject.comparison)
        if self.begin is not None:
            compare_unwatched(self.subject, self.begin)

    def received(self) -> dict[str, Tensor]:
        """Return this rank's whole weights as all ranks received them, by name in the whole model."""
        results = {}
        for unit in self.compression.units:
            account = accounts_of(unit).get("gather")
            if account and account.received is not None:
                results |= self._whole(unit, account.received, trained=False)
        return results

    def missing(self) -> dict[str, Tensor]:
        """Return what this rank's whole gradients lack, by name in the whole model; float64."""
        results: dict[str, Tensor] = {}
        for unit in self.compression.units:
            total = missing_of(unit)
            if total is not None:
                for name, value in self._whole(unit, total, trained=True).items():
                    results[name] = results[name] + value if name in results else value
        runner = self.composition.pipeline
        for tied in runner.ties if runner else ():
            # Its gradient is the sum over the stages that hold a copy.
            group = self.composition.mesh.get_group("pp")
            everyone = gathered_objects(results.get(tied.name), group)
            if tied.name in results:
                results[tied.name] = sum((t for t in everyone if t is not None), start=torch.zeros(()))
        # The first rank, whose rows count, may hold none of them: a later stage does.
        self.lossy = set(_greatest({n: 1.0 for n, value in results.items() if bool(value.any())}))
        self.lossy_steps.append(bool(self.lossy))
        return results

    def expected(self, weights: bool) -> dict[str, float]:
        """Return the norm of what weights or gradients are expected to lose, by name.

        Parameters that have no formula are left out.
        """
        parts: list[tuple[CompressedUnit, Tensor]] = []
        for unit in self.compression.units:
            accounts = [a for kind, a in accounts_of(unit).items() if weights == (kind == "gather")]
            if weights or all(a.missing is None or len(a.squares) for a in accounts):
                parts += [(unit, squares) for a in accounts for squares in a.expected]
        # All replicas gather the same weights.
        return self._norms(parts, not weights, self.replicas if weights else 1)

    def strayed(self) -> list[dict[str, float]]:
        """Return by what norm all residuals are not what was lost: measured, and expected, by name."""
        accounts = [(unit, a) for unit in self.compression.units for a in accounts_of(unit).values()]
        return [self._norms([(unit, a.strayed[i]) for unit, a in accounts]) for i in (0, 1)]

    def _norms(
        self, parts: Iterable[tuple[CompressedUnit, Tensor]], trained: bool = True, times: int = 1
    ) -> dict[str, float]:
        """Return the root of all ranks' squares (parts,) over ``times``, by name; a collective."""
        own: dict[str, float] = defaultdict(float)
        whole_names = self._whole_names()
        for unit, squares in parts:
            for name, square in zip(unit.named(trained), squares.tolist(), strict=False):
                own[whole_names[unit.model.get_parameter(name)]] += square
        total: dict[str, float] = defaultdict(float)
        for one in gathered_objects(own):
            for name, square in one.items():
                total[name] += square / times
        return {name: square**0.5 for name, square in total.items()}

    def of_activations(self) -> dict[tuple[str, bool], ActivationLoss]:
        """Return what all ranks' activations lost in a step, by module and whether it is a gradient."""
        if self.compression.activations is None:
            return {}
        total: dict[tuple[str, bool], ActivationLoss] = defaultdict(ActivationLoss)
        for one in gathered_objects(self.activations.by_module):
            for place, loss in one.items():
                total[place] = total[place].plus(loss)
        return total

    def _whole_names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self.composition.named_parameters()}

    def _whole(self, unit: CompressedUnit, flat: Tensor, trained: bool) -> dict[str, Tensor]:
        """Return the parts of a rank's row (S,) as whole tensors; a collective."""
        result, whole_names = {}, self._whole_names()
        for parameter, piece in unit.pieces(flat, trained):
            result[whole_names[parameter]] = _full(parameter, piece)
        return result


def accounts_of(unit: CompressedUnit) -> dict[str, Account]:
    """Return the accounts of a unit's sums and its gather, by name."""
    return {kind: sender.observer for kind, sender in unit.senders.items()}


def _full(parameter: nn.Parameter, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local.clone()
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(
        local.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride
    ).full_tensor()


def compare_losses(
    messages: CompressedMessages, gradients: Mapping[str, Tensor], missing: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Compare what messages lost with what is expected; return the whole weights that were received.

    ``gradients`` are this rank's whole ones as the optimizer gets them, and ``missing`` what they lack.
    """
    comparison, model = messages.subject.comparison, messages.subject.model
    for (name, gradient), total in sorted(messages.of_activations().items()):
        what = ("activations' gradients" if gradient else "activations") + messages.label
        size, expected = total.whole**0.5, total.expected**0.5
        if size:
            limit = allowed(expected, total.elements)
            comparison.value(f"lost of {what}", name, total.loss**0.5 / size, limit / size)
            comparison.value(f"rounding of {what}", name, max(0.0, total.worst - 1), 0.0)
    if not messages.compression.stages:
        return {}
    received = messages.received()
    weights = {name: whole(some[0]) for name, some in parameters_of(messages.composition).items()}
    for quantity, losses, all_of, expected in (
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
        sizes = _greatest({name: float(all_of[name].double().norm()) for name in losses})
        for name, parameter in model.named_parameters():
            size = sizes.get(name, 0.0)
            if name in expected and size:
                limit = allowed(expected[name], parameter.numel())
                error = float(losses[name].norm()) / size if name in losses else None
                comparison.value(f"{quantity}{messages.label}", name, error, limit / size)
    strayed, expected = messages.strayed()
    for name, parameter in model.named_parameters():
        size = sizes.get(name, 0.0)
        if expected.get(name) and size:
            limit = allowed(expected[name], parameter.numel())
            what = f"lost of residuals{messages.label}"
            comparison.value(what, name, strayed[name] / size, max(limit / size, CODES))
    return shared(received, comparison.device)


def _greatest(own: Mapping[str, float]) -> dict[str, float]:
    """Return the greatest value of all ranks by name; a collective."""
    everyone = gathered_objects(own)
    names = {name for one in everyone for name in one}
    return {name: max(one.get(name, 0.0) for one in everyone) for name in names}


def compare_keys(messages: CompressedMessages, comparison: Comparison) -> None:
    """Note a row for each key that took part, and the names of the others; a collective."""
    compression, lossy = messages.compression, messages.lossy_steps
    comm, activations = compression.comm, compression.activations
    senders: list[Any] = [s for unit in compression.units for s in unit.senders.values()]
    accounts = [(kind, a) for unit in compression.units for kind, a in accounts_of(unit).items()]
    in_blocks = [s for s in senders if hasattr(s, "packing")]
    largest = [s for s in senders if hasattr(s, "counts")]
    counts = [pair for s in largest for pair in zip(s.counts, s.layout.parts, strict=True)]
    kept = [item for s in senders for item in s.kept.items()]
    fine = [s for s in in_blocks if s.packing.code.bits != 4]  # which loses too little for feedback
    feedback = [s.feedback is not None for s in senders if hasattr(s, "feedback") and s not in fine]
    right: dict[str, list[bool]] = {
        "weights": [True for kind, a in accounts if kind == "gather" and bool(a.squares.any())],
        "activations": [True] * bool(messages.activations.by_module),
        "block": [s.packing.code.size == comm.block for s in in_blocks],
        "near": [s.levels.intra.size() == comm.near for s in senders if getattr(s, "levels", None)],
        "rank": [q.shape[1] == comm.rank for name, q in kept if name.startswith("factor")],
        "density": [n == math.ceil(comm.density * part.numel) for n, part in counts if part.compressed],
        "error_feedback": [result == comm.error_feedback for result in feedback],
    }
    right["block"] += [activations.code.block == comm.block] if activations else []
    given = [a.given for _, a in accounts if a.added]
    everyone = gathered_objects((right, lossy, sum(given, torch.zeros(2))))
    right = {key: [ok for one, _, _ in everyone for ok in one[key]] for key in right}
    steps = [any(step) for step in zip(*(one for _, one, _ in everyone), strict=True)]
    begun = [step >= comm.start_step for step in range(len(steps))]
    right["gradients"] = right["start_step"] = [steps == begun] if any(steps) else []
    if comm.error_feedback and sum(steps) < 2:  # the first message has nothing to add
        right["error_feedback"] = []
    for key in sorted(_asked(comm) | ({"error_feedback"} if comm.gradients in LOSSY else set())):
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
    """Compare the weights after a proof's steps with those of the same steps unwatched."""

    def trained(noting: bool) -> list[Tensor]:
        def prepare(again: Composition) -> None:
            for (_, parameter), value in zip(again.named_parameters(), begin, strict=True):
                local_tensor(parameter).detach().copy_(value)
            compression = cast(Compression, again.compression)
            compression.comm = replace(compression.comm, measure_every=0)
            if noting and compression.activations:
                compression.activations.observer = ActivationAccount(exact=False)

        return locals_of(subject.train_again(prepare))

    watched, comparison = subject.composition, subject.comparison
    # With an account of activations, the watched results were not those of codes.
    exact = cast(Compression, watched.compression).activations is not None
    result, error = trained(noting=True) if exact else locals_of(watched), 0.0
    for one, other, before in zip(result, trained(noting=False), begin, strict=True):
        if not torch.equal(one, other):
            gap, moved = (float((x - other).double().norm()) for x in (one, before))
            error = max(error, or_infinite(gap / moved) if moved else math.inf)
    tolerance = 0.0 if comparison.device.type == "cpu" else _ON_GPU
    comparison.value("unwatched update", "all parameters", error, tolerance)
