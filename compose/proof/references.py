"""The values that a proof asks of one process, each with the error that one process itself makes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from compose.memory.float8 import NOTHING, Choice
from compose.proof.one_process import EXACT, Arithmetic, FromComposition, OneProcess
from compose.proof.report import State
from compose.proof.routing_trace import Choices

# float64 rounds 2^29 times more finely than float32.
_FINER = 2.0**-29
# In float64 a sum of parts that cancel leaves 2^-29 of the error that float32 makes there. Any other
# gradient is about a million times that error.
_ZERO = 1e-4
# A margin counts as a tie up to this many times the greatest change of a margin by rounding.
_TIE = 2.0


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
    parts: float = 0.0
    """The norm of the parts that it is the sum of, if they are known."""


class References:
    """One process, run as the composition computes, and run otherwise to measure its rounding.

    In a reduced precision the ``own`` run takes the composition's micro-batches, so that it rounds as
    often. Otherwise it takes other micro-batches, since a correct result does not depend on them.
    ``one`` makes a run, and ``finest`` is the most exact arithmetic that the model can compute in.
    """

    def __init__(
        self,
        model: nn.Module,
        arithmetic: Arithmetic,
        one: Callable[..., OneProcess],
        *,
        micro_batch: int | None,
        samples: int,
        tie: float,
        float8: Choice = NOTHING,
        finest: Arithmetic = EXACT,
    ) -> None:
        self.model, self.tie = model, tie
        run = partial(one, tie=tie)
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

    @property
    def _runs(self) -> list[OneProcess]:
        runs = {id(run): run for run in (self.own, self.exact, self.again, self.coarse) if run}
        return list(runs.values())

    def step(
        self,
        batch: Mapping[str, Tensor],
        found: Mapping[str, Sequence[Choices]],
        given: FromComposition | None = None,
    ) -> None:
        """Take one optimizer step in each run."""
        if self.own.arithmetic.reduced and found:
            # Rounding may move a composition's margins as far as it moves one process's. The two move
            # independently, so they may move in opposite directions.
            moved = _moved(self.own.natural(batch), self.exact.natural(batch))
            self.tie = max(self.tie, _TIE * moved)
        for run in self._runs:
            run.tie = self.tie
            run.step(batch, found, given)

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
        found = replace(found, parts=float(self.own.parts.get(name, 0.0)) ** 0.5)
        if found.state == "zero":
            self.zeros.add(name)
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
