"""What one process computes in plain PyTorch; the proof compares a composition with it.

It runs several times: once as the composition computes, and once exactly, in float64. The distance
between the two is the error that one process makes by rounding. It measures how far a composition may
be from one process.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from compose.errors import ConfigError
from compose.loss.cross_entropy import LossFunction, count_targets
from compose.operators.dropout import DropoutKey, Masks, dropouts
from compose.parallel.routing import routers
from compose.precision.float8 import NOTHING, Choice, Recipe, apply_float8
from compose.precision.options import Precision
from compose.proof.examine import check_repeats, float64_problem, in_float64
from compose.proof.optimizers import Named
from compose.proof.plain_attention import PlainAttention
from compose.proof.routing_trace import Choices, follow

State = Literal["", "zero", "unused", "loose", "coarse"]

# float64 rounds 2^29 times more finely than float32.
_FINER = 2.0**-29
# In float64 a sum of parts that cancel leaves 2^-29 of the error that float32 makes there. Any other
# gradient is about a million times that error.
_ZERO = 1e-4
# A margin counts as a tie up to this many times the greatest change of a margin by rounding.
_TIE = 2.0


@dataclass(frozen=True)
class Arithmetic:
    """The types that a training step computes in. The defaults are float32 throughout."""

    param: torch.dtype = torch.float32
    """Type of forward and backward."""
    reduce: torch.dtype = torch.float32
    """Type in which gradients are reduced."""
    master: torch.dtype = torch.float32
    """Type of the weights that the optimizer updates."""
    state: torch.dtype = torch.float32
    """Type of the optimizer's running means."""
    float8: Recipe = "off"
    """The float8 recipe of linear layers."""

    @property
    def reduced(self) -> bool:
        """Whether anything rounds more coarsely than float32 does."""
        types = (self.param, self.reduce, self.master, self.state)
        return self.float8 != "off" or any(kind.itemsize < 4 for kind in types)

    def kept(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the type in which a parameter is kept; a frozen one has no master."""
        return self.master if parameter.requires_grad else self.param

    def __str__(self) -> str:
        if not self.reduced:
            return str(self.param).removeprefix("torch.")
        names = {"param": self.param, "reduce": self.reduce, "master": self.master, "state": self.state}
        parts = [f"{name} {str(kind).removeprefix('torch.')}" for name, kind in names.items()]
        return ", ".join([*parts, *([f"float8 {self.float8}"] if self.float8 != "off" else [])])


def arithmetic_of(precision: Precision) -> Arithmetic:
    """Return the types of the table [precision] as torch's."""
    return Arithmetic(
        precision.param_dtype,
        precision.reduce_dtype,
        precision.master_dtype,
        precision.state_dtype,
        precision.float8,
    )


def precision_of(arithmetic: Arithmetic) -> Precision:
    """Return the table [precision] for ``arithmetic``; it may hold float64, unlike any file."""
    kinds = (arithmetic.param, arithmetic.reduce, arithmetic.master, arithmetic.state)
    param, reduce, master, state = (str(kind).removeprefix("torch.") for kind in kinds)
    return Precision(
        param=cast(Any, param),
        reduce=cast(Any, reduce),
        float8=arithmetic.float8,
        master=cast(Any, master),
        optimizer_state=cast(Any, state),
    )


EXACT = Arithmetic(torch.float64, torch.float64, torch.float64, torch.float64)
"""The arithmetic of a proof's logic: its rounding is too small to hide a fault."""

OptimizerOf = Callable[[Arithmetic, Named], torch.optim.Optimizer]
"""Makes one process's optimizer for some arithmetic, from named whole parameters."""


@dataclass(frozen=True)
class Coded:
    """What a composition with coded messages received and sent in a step, whole, by name."""

    received: Mapping[str, Tensor]
    """Weights that forward and backward use."""
    gradients: Mapping[str, Tensor]
    """Gradients that the optimizer takes."""


class OneProcess:
    """Optimizer steps of the whole model on the global batch, without any of compose's techniques.

    It is plain PyTorch, with three exceptions. ``compose.apply_float8`` makes the float8 layers
    (torchao's, in the reduced run alone). Routers are told what compose/parallel/routing.py tells them.
    Where a routing is a tie, it follows the composition.

    ``micro_batch`` is the number of samples of one forward; None is all. ``tie`` is the margin of a
    routing up to which its choice is as good as random. ``widens``: what float64 it computes with needs
    ``examine.Widened``.
    """

    def __init__(
        self,
        model: nn.Module,
        arithmetic: Arithmetic,
        loss_function: LossFunction,
        optimizer: OptimizerOf,
        *,
        max_norm: float,
        micro_batch: int | None,
        loss_scale: float,
        tie: float,
        float8: Choice = NOTHING,
        widens: bool = False,
    ) -> None:
        self.model = copy.deepcopy(model)
        drops = dropouts(self.model)
        self.dropout = Masks(self.model, [self.model], drops) if drops else None
        self.arithmetic, self.loss_function = arithmetic, loss_function
        self.widens = widens and arithmetic == EXACT
        self.max_norm, self.micro_batch = max_norm, micro_batch
        self.loss_scale, self.tie = loss_scale, tie
        if arithmetic.float8 != "off":
            apply_float8(self.model, float8)
        wide = torch.promote_types(arithmetic.param, torch.float32)
        self.parameters = dict(self.model.named_parameters())
        for parameter in self.parameters.values():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(arithmetic.kept(parameter)).to(wide)
        self.initial = {name: p.detach().clone() for name, p in self.parameters.items()}
        trained = [(name, p) for name, p in self.parameters.items() if p.requires_grad]
        self.optimizer = optimizer(arithmetic, trained)
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.gradients: dict[str, Tensor] = {}
        self.received: Mapping[str, Tensor] = {}
        self.choices: dict[str, Choices] = {}

    def step(
        self,
        batch: Mapping[str, Tensor],
        found: Mapping[str, Sequence[Choices]],
        coded: "Coded | None" = None,
    ) -> None:
        """Take one optimizer step; note loss, norm and gradients.

        Args:
            batch: The global batch.
            found: What the composition's routers chose, by router; a routing that is a tie follows it.
            coded: What the composition received and sent, if its messages are coded.
        """
        self.received = coded.received if coded else {}
        targets = batch["targets"]
        count = count_targets(targets).clamp(min=1)
        batch = self.begin(batch)
        ids = _ids(targets)
        calls = ids.split(self.micro_batch or len(ids))
        with follow(self.model, found, calls, self.tie) as self.choices, in_float64(self.widens):
            self.losses.append(self.accumulate(batch, count))
        for router in routers(self.model).values():
            router.finish_step(router.tally)
        found_gradients = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        for gradient in found_gradients.values():
            gradient /= self.loss_scale
        self.gradients = {name: gradient.clone() for name, gradient in found_gradients.items()}
        for name, gradient in coded.gradients.items() if coded else ():
            if name in found_gradients:  # frozen weights have none
                found_gradients[name].copy_(gradient)
        limit = self.max_norm if self.max_norm > 0 else float("inf")
        self.norms.append(nn.utils.clip_grad_norm_(list(self.parameters.values()), limit))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def begin(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tell routers and dropout that a step begins; return the batch with what dropout needs."""
        targets = batch["targets"]
        for router in routers(self.model).values():
            router.tokens_per_step, router.loss_scale = targets.shape[:2].numel(), self.loss_scale
        if self.dropout is None:
            return batch
        samples = torch.arange(len(targets), device=targets.device)
        return {**batch, **self.dropout.begin(DropoutKey(len(self.losses)), samples, None)}

    def accumulate(self, batch: Mapping[str, Tensor], count: Tensor) -> Tensor:
        """Add the gradient of a batch, and return its loss: sums over targets, divided by ``count``."""
        total = torch.zeros((), dtype=torch.float64, device=count.device)
        samples = len(batch["targets"])
        size = self.micro_batch or samples
        for start in range(0, samples, size):
            part = {name: value[start : start + size] for name, value in batch.items()}
            targets = part.pop("targets")
            output = self.forward(part)
            loss = self.loss_function(output, targets) / count
            (loss * self.loss_scale).backward()
            total += loss.detach()
            if self.arithmetic.reduce.itemsize < 4:
                for parameter in self.parameters.values():
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad.to(self.arithmetic.reduce).to(parameter.dtype)
        return total

    @torch.no_grad()
    def natural(self, batch: Mapping[str, Tensor]) -> dict[str, Choices]:
        """Return what routers choose by themselves, by their names."""
        inputs = {name: value for name, value in self.begin(batch).items() if name != "targets"}
        targets = batch["targets"]
        ids = _ids(targets)
        size = self.micro_batch or len(ids)
        with follow(self.model, {}, ids.split(size), 0.0) as choices, in_float64(self.widens):
            for start in range(0, len(ids), size):
                self.forward({n: v[start : start + size] for n, v in inputs.items()})
        return choices

    def forward(self, inputs: Mapping[str, Tensor]) -> Any:
        """Run the model on a part of a batch, without its targets."""
        kind = self.arithmetic.param
        inputs = {n: v.to(kind) if v.is_floating_point() else v for n, v in inputs.items()}
        held = {n: self._received(n, p) for n, p in self.parameters.items()}
        cast = {n: p.to(kind) if p.is_floating_point() else p for n, p in held.items()}
        with PlainAttention():
            return torch.func.functional_call(self.model, cast, args=(), kwargs=dict(inputs))

    def _received(self, name: str, parameter: Tensor) -> Tensor:
        """Return a parameter with the value that ranks received; its gradient is the parameter's."""
        if name not in self.received:
            return parameter
        return parameter + (self.received[name].to(parameter) - parameter).detach()

    def change(self, name: str) -> Tensor:
        """Return the change of a parameter over all steps."""
        return self.parameters[name].detach() - self.initial[name]


def _ids(targets: Tensor) -> Tensor:
    """Return numbers of the batch's tokens, row by row."""
    shape = targets.shape[:2]
    return torch.arange(shape.numel()).view(shape)


def _check_sum(loss_function: LossFunction, output: object, targets: Tensor) -> None:
    """Raise ConfigError if the loss is a mean: only a sum doubles when all targets come twice."""
    if not isinstance(output, Tensor) or output.ndim == 0 or len(output) != len(targets):
        return
    with torch.no_grad():
        once = float(loss_function(output, targets))
        twice = float(loss_function(torch.cat([output, output]), torch.cat([targets, targets])))
    if abs(twice - 2 * once) > 1e-2 * abs(once):
        ratio = twice / once if once else float("inf")
        raise ConfigError(
            f"loss_function: all targets twice give {ratio:.3g} times the loss, not 2: it has to return"
            ' the sum over targets, not their mean; with PyTorch\'s losses, reduction="sum"'
        )


def examine(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    loss_function: LossFunction,
    micro_batch: int | None,
) -> tuple[bool, str]:
    """Check that a model and a loss can be compared, and return whether they run in float64.

    Args:
        model: The whole model.
        batch: The global batch.
        loss_function: The loss function.
        micro_batch: Samples in one forward; None is all.

    Returns:
        As ``examine.float64_problem``.

    Raises:
        ConfigError: The loss is a mean, or the model's result is not a function of the batch.
    """

    def run(kind: Arithmetic) -> tuple[OneProcess, Mapping[str, Tensor]]:
        one = OneProcess(
            model, kind, loss_function, _none, max_norm=0.0, micro_batch=1, loss_scale=1.0, tie=0.0
        )
        return one, one.begin(batch)

    one, given = run(Arithmetic())
    inputs = {name: value[:micro_batch] for name, value in given.items() if name != "targets"}
    check_repeats(one.model, lambda: one.forward(inputs))
    with torch.no_grad():
        _check_sum(loss_function, one.forward(inputs), batch["targets"][:micro_batch])
    exact, given = run(EXACT)
    sample = {name: value[:1] for name, value in given.items()}
    count = torch.ones((), device=batch["targets"].device)
    return float64_problem(lambda: exact.accumulate(sample, count))


def _none(arithmetic: Arithmetic, named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.0)


@dataclass(frozen=True)
class Expected:
    """A value that one process found."""

    value: Tensor
    rounding: float = 0.0
    """The norm of the value's own error."""
    exact: Tensor | None = None
    """The same value in float64."""
    state: State = ""
    """"zero": only rounding is left, since the terms of the sum cancel. "unused": the sum has no terms.
    Neither can show a fault as other values do.
    """


class References:
    """One process, run as the composition computes, and run otherwise to measure its rounding.

    In a reduced precision the ``own`` run takes the composition's micro-batches, so that it rounds as
    often. Otherwise it takes other micro-batches, since a correct result does not depend on them.
    ``finest`` is the most exact arithmetic that the model can compute in.
    """

    def __init__(
        self,
        model: nn.Module,
        arithmetic: Arithmetic,
        loss_function: LossFunction,
        optimizer: OptimizerOf,
        *,
        max_norm: float,
        micro_batch: int | None,
        samples: int,
        loss_scale: float,
        tie: float,
        float8: Choice = NOTHING,
        finest: Arithmetic = EXACT,
        widens: bool = False,
    ) -> None:
        self.model, self.tie = model, tie
        run = partial(
            OneProcess, model, loss_function=loss_function, optimizer=optimizer, max_norm=max_norm
        )
        run = partial(run, loss_scale=loss_scale, tie=tie, widens=widens)
        other = _other_split(micro_batch, samples)
        self.exact = run(finest, micro_batch=other)
        self.again: OneProcess | None = None
        if arithmetic == finest:
            self.own = self.exact
            self.again = run(finest, micro_batch=micro_batch)
            self.coarse = run(Arithmetic(), micro_batch=other) if finest == EXACT else self.again
        else:
            split = micro_batch if arithmetic.reduced else other
            self.own = self.coarse = run(arithmetic, micro_batch=split, float8=float8)
        self.zeros: set[str] = set()
        self.moving: dict[str, int] = {}  # elements of a parameter that have a gradient

    @property
    def _runs(self) -> list[OneProcess]:
        runs = {id(run): run for run in (self.own, self.exact, self.again, self.coarse) if run}
        return list(runs.values())

    def step(
        self,
        batch: Mapping[str, Tensor],
        found: Mapping[str, Sequence[Choices]],
        coded: Coded | None = None,
    ) -> None:
        """Take one optimizer step in each run.

        Args:
            batch: The global batch.
            found: What the composition's routers chose, by router.
            coded: What the composition received and sent, if its messages are coded.
        """
        if self.own.arithmetic.reduced and found:
            # Rounding may move a composition's margins as far as it moves one process's. The two move
            # independently, so they may move in opposite directions.
            moved = _moved(self.own.natural(batch), self.exact.natural(batch))
            self.tie = max(self.tie, _TIE * moved)
        for run in self._runs:
            run.tie = self.tie
            run.step(batch, found, coded)

    def expected(self, of: Callable[[OneProcess], Tensor]) -> Expected:
        """Return what the own run has, with its error."""
        own, exact, coarse = of(self.own), of(self.exact), of(self.coarse)
        rounding = _distance(coarse, exact)
        size = float(exact.double().norm())
        state: State = "zero" if size <= _ZERO * rounding else ""
        if self.again:
            rounding = max(rounding * _FINER, _distance(of(self.again), own))
        return Expected(own, rounding, exact, state)

    def gradient(self, name: str) -> Expected:
        """Return the gradient of a parameter in the last step."""
        like = self.model.get_parameter(name)
        found = self.expected(lambda run: run.gradients.get(name, torch.zeros_like(like)))
        if found.state == "zero":
            self.zeros.add(name)
        self.moving[name] = max(self.moving.get(name, 0), int(found.value.count_nonzero()))
        return found if name in self.own.gradients else replace(found, state="unused")

    def update(self, name: str) -> Expected:
        """Return the change of a parameter over all steps.

        A gradient that is only rounding makes AdamW's steps random. So the state of the gradient is the
        update's too, and its error says nothing of other updates.
        """
        found = self.expected(lambda run: run.change(name))
        return replace(found, state="zero") if name in self.zeros else found

    def buffer(self, name: str) -> Expected:
        """Return a buffer after all steps."""
        return replace(self.expected(lambda run: run.model.get_buffer(name)), state="")

    def loss(self) -> Expected:
        """Return the loss of the last step."""
        return self.expected(lambda run: run.losses[-1])

    def norm(self) -> Expected:
        """Return the norm of all gradients in the last step, before clipping."""
        return self.expected(lambda run: run.norms[-1])


def _moved(own: Mapping[str, Choices], exact: Mapping[str, Choices]) -> float:
    """Return the greatest change of a margin by rounding, over decisions that both runs made alike."""
    greatest = 0.0
    for name, choices in own.items():
        other = exact[name]
        place = torch.empty_like(other.ids)
        place[other.ids] = torch.arange(len(place))
        at = place[choices.ids]
        same = (choices.experts.sort(1).values == other.experts[at].sort(1).values).all(1)
        pairs = [(choices.margins[same], other.margins[at][same])]
        if choices.drops and other.drops:
            here, there = choices.drops, other.drops
            alike = (here.experts == there.experts[at]) & (here.kept == there.kept[at])
            pairs.append((here.margins[alike], there.margins[at][alike]))
        for one, another in pairs:
            moved = (one.double() - another.double()).abs()
            greatest = max([greatest, *moved[moved.isfinite()].tolist()])
    return greatest


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm())


def _other_split(micro_batch: int | None, samples: int) -> int | None:
    """Return the samples of one forward for a run that must not use the same ``micro_batch``."""
    if micro_batch is not None and micro_batch < samples:
        return None
    return (samples + 1) // 2
