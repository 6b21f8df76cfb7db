"""The values that a proof asks of one process, each with the error that one process itself makes.

Before anything is compared, the model is asked whether it can be: it runs twice and in float64. A model
that gives another result each time cannot be compared with anything. And ordinary code may mix types.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from compose.errors import ConfigError
from compose.memory.float8 import NOTHING, Choice
from compose.memory.precision import Precision
from compose.ops.batch import count_targets, targets_of
from compose.ops.cross_entropy import LossFunction
from compose.parallel.mesh import Parallel
from compose.pipeline.schedules import ASYNCHRONOUS
from compose.proof.one_process import EXACT, FromComposition, OneProcess, Widened
from compose.proof.optimizers import Named
from compose.proof.report import State
from compose.proof.routing_trace import Choices
from compose.weights import named_generator

if TYPE_CHECKING:
    from compose.proof.verify import ProofRun, Trial

_FINER = 2.0**-29  # float64 rounds so much more finely than float32
# In float64 a sum of parts that cancel leaves 2^-29 of the error that float32 makes there. Any other
# gradient is about a million times that error.
_ZERO = 1e-4
# The loss of this many samples in one forward is the sum of their own losses, within such a share.
_TOGETHER, _ALONE, _ALONE_IN_FLOAT64 = 4, 1e-4, 1e-6
_TIE = 2.0  # times the greatest change of a margin by rounding, up to which a margin is a tie


@dataclass(frozen=True)
class Expected:
    """A value of one process."""

    value: Tensor
    rounding: float = 0.0
    """The norm of the value's own error."""
    exact: Tensor | None = None
    """The same value in float64."""
    state: State = ""
    """"zero": only rounding is left, since the terms of the sum cancel. "unused": the sum has no terms.
    Neither can show a fault as other values do.
    """
    parts: float = 0.0
    """The norm of the parts that it is the sum of, if they are known."""
    shaken: float = 0.0
    """The norm of an update's change if each element of the gradient has an error of a usual size."""


class References:
    """One process, run as the composition computes, and run otherwise to measure its rounding.

    In a reduced precision the ``own`` run takes the composition's micro-batches, so that it rounds as
    often. Otherwise it takes other micro-batches, since a correct result does not depend on them.
    ``ranks`` is the number of those that share the ``samples``.
    """

    def __init__(
        self, model: nn.Module, run: "ProofRun", trial: "Trial", samples: int, ranks: int, tie: float
    ) -> None:
        self.model, self.tie = model, tie
        setup, precision, finest, split = run.setup, run.precision, run.finest, trial.micro_batch
        # The samples of one forward in the composition, and for a run that must not use as many.
        cut = split or -(-samples // ranks)
        other = None if cut < samples else (samples + 1) // 2

        def one(kind: Precision, micro_batch: int | None, float8: Choice = NOTHING) -> OneProcess:
            return OneProcess(
                model,
                kind,
                trial.loss_function,
                setup.reference_optimizer,
                max_norm=trial.max_norm,
                micro_batch=micro_batch,
                loss_scale=setup.loss_scale,
                tie=tie,
                float8=float8,
                widens=run.widens,
            )

        self.exact = one(finest, other)
        self.again: OneProcess | None = None
        if precision == finest:
            self.own = self.exact
            self.again = one(finest, cut)
            self.coarse = one(Precision(), other) if finest == EXACT else self.again
        else:
            self.own = self.coarse = one(precision, split if precision.reduced else other, setup.float8)
        self.shaken: OneProcess | None = None
        self.shaken_from = partial(one, finest, other)
        self.zeros: set[str] = set()

    def clip_at(self, limit: float) -> None:
        """Set the greatest norm of the gradients of all runs; 0 clips nothing."""
        for run in self._runs:
            run.max_norm = limit

    @property
    def _runs(self) -> list[OneProcess]:
        runs = {id(run): run for run in (self.own, self.exact, self.again, self.coarse) if run}
        return list(runs.values())

    def step(
        self,
        batch: Mapping[str, Tensor],
        routing: Mapping[str, Sequence[Choices]],
        given: FromComposition | None = None,
    ) -> None:
        """Take one optimizer step in each run."""
        for run in self._runs:
            run.received = given.received if given else {}
        if self.own.precision.reduced and routing:
            # Rounding may move a composition's margins as far as one process's, in opposite directions.
            moved = _moved(self.own.natural(batch), self.exact.natural(batch))
            self.tie = max(self.tie, _TIE * moved)
        for run in self._runs:
            run.tie = self.tie
            run.step(batch, routing, given)
        if given is None:
            self._shake()

    def _shake(self) -> None:
        """Take a step with exact gradients, to which errors of their rows' typical size are added.

        AdamW magnifies the error of an element whose gradient is about zero. One process's own may be
        small there by chance.
        """
        self.shaken = self.shaken or self.shaken_from()
        self.shaken.max_norm = self.exact.max_norm
        finer = _FINER if self.coarse not in (self.own, self.again) else 1.0
        for name, exact in self.exact.gradients.items():
            errors = (self.coarse.gradients.get(name, exact) - exact).double()
            # A token that no sample has gives its embedding no gradient.
            terms = exact != 0
            typical = (errors.square().sum(-1, True) / terms.sum(-1, True).clamp(min=1)).sqrt()
            signs = torch.randint(2, exact.shape, generator=named_generator(0, name))
            change = (2 * signs - 1).to(errors) * typical * terms * finer
            self.shaken.parameters[name].grad = exact + change.to(exact)
        self.shaken.take_step()

    def expected(self, of: Callable[[OneProcess], Tensor]) -> Expected:
        """Return what the own run has, with its error."""
        own, exact, coarse = of(self.own), of(self.exact), of(self.coarse)
        rounding = _distance(coarse, exact)
        size = float(exact[exact.isfinite()].double().norm())
        state: State = "zero" if size <= _ZERO * rounding else ""
        if self.again:
            # Micro-batches change it by rounding. More than float32's is a fault: samples are mixed.
            recut = _distance(of(self.again), own)
            most = recut if self.coarse is self.again else rounding
            rounding = max(rounding * _FINER, min(recut, most))
        return Expected(own, rounding, exact, state)

    def gradient(self, name: str) -> Expected:
        """Return the gradient of a parameter in the last step."""
        like = self.model.get_parameter(name)
        result = self.expected(lambda run: run.gradients.get(name, torch.zeros_like(like)))
        result = replace(result, parts=float(self.own.parts.get(name, 0.0)) ** 0.5)
        if result.state == "zero":
            self.zeros.add(name)
        return result if name in self.own.gradients else replace(result, state="unused")

    def update(self, name: str) -> Expected:
        """Return the change of a parameter over all steps.

        A gradient that is only rounding makes AdamW's steps random. So the state of the gradient is the
        update's too, and its error says nothing of other updates.
        """
        result = self.expected(lambda run: run.change(name))
        if self.shaken:
            shaken = _distance(self.shaken.change(name), self.exact.change(name))
            result = replace(result, shaken=shaken)
        return replace(result, state="zero") if name in self.zeros else result

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
    """Return the greatest change of a margin by rounding, over decisions that are the same in both."""
    greatest = 0.0
    for name, choices in own.items():
        other = exact[name]
        at = other.places(choices.ids)
        same = (choices.experts.sort(1).values == other.experts[at].sort(1).values).all(1)
        pairs = [(choices.margins[same], other.margins[at][same])]
        if choices.drops and other.drops:
            drops, others = choices.drops, other.drops
            same = (drops.experts == others.experts[at]) & (drops.kept == others.kept[at])
            pairs.append((drops.margins[same], others.margins[at][same]))
        for one, another in pairs:
            moved = (one.double() - another.double()).abs()
            greatest = max([greatest, *moved[moved.isfinite()].tolist()])
    return greatest


def _distance(one: Tensor, other: Tensor) -> float:
    return float(difference(one, other).norm())


def difference(one: Tensor, other: Tensor) -> Tensor:
    """Return ``one - other`` in float64, and 0 where both are the same infinity or no number."""
    same = (one.isinf() & (one == other)) | (one.isnan() & other.isnan())
    return (one.double() - other.double()).masked_fill(same, 0.0)


def check_provable(batches: Sequence[Mapping[str, Tensor]], parallel: Parallel) -> None:
    """Raise ConfigError unless there is a batch, each has a target, and steps are those of a batch."""
    if parallel.pp > 1 and parallel.pp_schedule in ASYNCHRONOUS:
        raise ConfigError(
            f"parallel.pp_schedule: {parallel.pp_schedule} takes gradients of older weights, which are"
            ' not those of one process; use parallel.pp_schedule = "1F1B" to prove all else'
        )
    if not batches:
        raise ConfigError("batch: an empty list has no step to prove; give at least one batch")
    for batch in batches:
        if not count_targets(targets_of(batch)):
            raise ConfigError(
                "batch: no target is trained on, so that nothing can be proved; give targets other"
                " than -100, or floats other than NaN"
            )


def examine(
    model: nn.Module, batch: Mapping[str, Tensor], loss_function: LossFunction, micro_batch: int | None
) -> tuple[bool, str]:
    """Check that a model and a loss can be compared, and return whether they run in float64."""

    def run(kind: Precision) -> tuple[OneProcess, Mapping[str, Tensor]]:
        one = OneProcess(model, kind, loss_function, _none, micro_batch=1)
        return one, one.begin(batch)

    one, given = run(Precision())
    inputs = {name: value[:micro_batch] for name, value in given.items() if name != "targets"}
    with one.modes():
        check_repeats(one.model, lambda: one.forward(inputs))
    exact, given = run(EXACT)
    sample = {name: value[:1] for name, value in given.items()}
    count = torch.ones((), device=batch["targets"].device)
    with exact.modes():
        widens, problem = float64_problem(lambda: exact.accumulate(sample, count))
    with nullcontext() if problem else Widened(widens), one.modes():
        _check_alone(*((one, _ALONE) if problem else (exact, _ALONE_IN_FLOAT64)), given)
    return widens, problem


@torch.no_grad()
def _check_alone(one: OneProcess, share: float, batch: Mapping[str, Tensor]) -> None:
    """Raise ConfigError unless samples in one forward have the loss that they have one by one."""

    def loss(rows: Tensor) -> float:
        part = {name: value[rows] for name, value in batch.items()}
        targets = part.pop("targets")
        return float(one.plain_loss(one.forward(part), targets))

    samples = len(batch["targets"])  # a single one is taken twice: a mean differs then too
    rows = torch.arange(max(2, min(_TOGETHER, samples))) % samples
    alone = [loss(row) for row in rows[:, None]]
    if not math.isfinite(sum(alone)):
        raise ConfigError(
            f"model: the loss of one process is {sum(alone)}; does the model run by itself?"
        )
    if not abs(loss(rows) - sum(alone)) <= share * sum(map(abs, alone)):
        raise ConfigError(
            "loss_function: samples in one forward give another loss than one by one, so that meshes"
            " differ: it has to return the sum over targets, not their mean (with PyTorch's losses,"
            ' reduction="sum"), and the model may compute nothing over samples'
        )


def _none(precision: Precision, named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.0)


def float64_problem(train: Callable[[], object]) -> tuple[bool, str]:
    """Return whether a model needs ``Widened`` for float64, and why it cannot run in float64 at all."""
    reason = ""
    for widens in (False, True):
        mode = Widened(widens)
        try:
            with mode:
                train()
        except (RuntimeError, NotImplementedError, TypeError) as error:
            reason = str(error).strip().partition("\n")[0]
            continue
        if not mode.narrowed:
            return widens, ""
        reason = f"{mode.narrowed[0]} rounds float64 to fewer bits"
    return False, reason


def check_repeats(model: nn.Module, forward: Callable[[], Any]) -> None:
    """Check that a model gives the same bits twice, and does not depend on how a batch is cut."""
    for name, module in model.named_modules():
        norm = module if isinstance(module, nn.modules.batchnorm._BatchNorm) else None
        if norm and (norm.training or norm.running_mean is None):
            raise ConfigError(
                f"model: {name or 'the model'} is {type(module).__name__}, whose result depends on"
                " which samples are in one forward, so that meshes differ; use GroupNorm or LayerNorm,"
                " or running statistics with eval()"
            )
    held = {"buffer": model.named_buffers, "parameter": model.named_parameters}
    before, results = dict[str, Tensor](), list[list[Tensor]]()
    with torch.no_grad():
        for _ in range(2):  # the first forward may make a buffer
            tensors = [item for named in held.values() for item in named()]
            before = {name: tensor.clone() for name, tensor in tensors} | before
            results.append(_tensors(forward()))
        for kind, named in held.items():
            moved = [n for n, t in named() if n in before and not _same([before[n]], [t])]
            if moved:
                raise ConfigError(
                    f"model: forward changes the {kind} {moved[0]}, so that results depend on how a"
                    " batch is cut into forwards; change it outside of forward"
                )
        with _LowestUniform():
            results.append(_tensors(forward()))
        if all(_same(results[0], other) for other in results[1:]):
            return
        name = _first_random(model, forward)
    module = model.get_submodule(name)
    raise ConfigError(
        f"model: {name or 'the forward'} ({type(module).__name__}) is random: one process gives two"
        " results for the same batch, so that nothing can be compared; use nn.Dropout, whose masks do"
        " not depend on the mesh, or call its eval()"
    )


class _LowestUniform(TorchFunctionMode):
    """Within this mode uniform numbers are the lowest, so that what seldom happens does happen."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        if func in (torch.bernoulli, Tensor.bernoulli_):
            return result.mul_(named.get("p", args[-1]) >= 1)
        if func in (torch.rand, torch.rand_like, Tensor.uniform_):
            result.fill_(args[1] if func is Tensor.uniform_ and len(args) > 1 else 0.0)
        return result


def _first_random(model: nn.Module, forward: Callable[[], Any]) -> str:
    """Return the name of the first module that gives other outputs for the same inputs."""
    runs: list[dict[str, list[tuple[list[Tensor], list[Tensor]]]]] = [{}, {}]
    for run in runs:

        def note(name: str, run: Any, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            run.setdefault(name, []).append((_tensors((args, kwargs)), _tensors(output)))

        with ExitStack() as hooks:
            for name, module in model.named_modules():
                hook = partial(note, name, run)
                hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
            with _LowestUniform() if run is runs[1] else nullcontext():
                forward()
    for name, calls in runs[0].items():
        for (given, result), (same, other) in zip(calls, runs[1].get(name, ()), strict=False):
            if _same(given, same) and not _same(result, other):
                return name
    return ""


def _tensors(tree: Any) -> list[Tensor]:
    """Return copies of all tensors in an output; that of transformers is a dict with attributes."""
    leaves = tree_flatten(dict(tree) if isinstance(tree, Mapping) else tree)[0]
    inner = [x for leaf in leaves for x in ([leaf] if isinstance(leaf, Tensor) else _held(leaf))]
    return [x.detach().clone() for x in inner]


def _held(leaf: Any) -> list[Tensor]:
    return [x for x in getattr(leaf, "__dict__", {}).values() if isinstance(x, Tensor)]


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(
        x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num())
        for x, y in zip(one, other, strict=True)
    )
