"""The order in which candidates get a record: quick estimates, corrected by the records so far."""

import math
from collections.abc import Sequence

from compose.planner.candidate import Candidate, Space, order

_ALIKE = 2  # candidates that are alike, of which each has its turn before others of their kind
Kind = tuple[object, ...]


class Turns:
    """The candidates that wait for a record.

    A quick estimate can be wrong by a factor, which those of one kind have in common: a schedule that
    holds more, a way to recompute. So each record corrects the estimates of all that are like it, and
    the next candidate is the best by corrected figures.
    """

    def __init__(self, space: Space, every: Sequence[Candidate]) -> None:
        self._space = space
        self._left = list(every)
        self._seen: dict[Kind, int] = {}

    def next(self, found: Sequence[Candidate]) -> Candidate | None:
        """Return the candidate whose turn it is.

        Args:
            found: The candidates that have a record.

        Returns:
            The candidate; None if none is left.
        """
        if not self._left:
            return None
        factors: dict[Kind, tuple[float, float]] = {}

        def place(number: int) -> tuple[object, ...]:
            candidate = self._left[number]
            kind = _kind(candidate)
            if kind not in factors:
                factors[kind] = _factors(kind, found)
            late = self._seen.get(_mesh(candidate), 0) >= _ALIKE
            return (late, *order(self._space, candidate, *factors[kind]))

        candidate = self._left.pop(min(range(len(self._left)), key=place))
        mesh = _mesh(candidate)
        self._seen[mesh] = self._seen.get(mesh, 0) + 1
        return candidate


def _mesh(candidate: Candidate) -> Kind:
    parallel = candidate.config.parallel
    return parallel.pp, parallel.cp, parallel.tp, parallel.ep, parallel.zero


def _kind(candidate: Candidate) -> Kind:
    """Return what quick estimates that err alike have in common."""
    parallel, config = candidate.config.parallel, candidate.config
    return (
        parallel.pp_schedule if parallel.pp > 1 else "",
        config.activation_checkpoint.mode,
        parallel.zero,
        parallel.offload,
        config.train.micro_batch,
        parallel.cp > 1,
        parallel.tp > 1,
        parallel.ep > 1,
    )


def _factors(kind: Kind, found: Sequence[Candidate]) -> tuple[float, float]:
    """Return what the records nearest in kind have over their quick estimates: in bytes, in seconds."""
    if not found:
        return 1.0, 1.0

    def equal(candidate: Candidate) -> int:
        return sum(a == b for a, b in zip(kind, _kind(candidate), strict=True))

    most = max(map(equal, found))
    near = [candidate for candidate in found if equal(candidate) == most]
    size = sum(math.log(c.reserved / c.rough.memory) for c in near) / len(near)
    steps = [(c.found.step_seconds, c.rough.step) for c in near if c.found]
    step = sum(math.log(one / other) for one, other in steps) / len(near)
    return math.exp(size), math.exp(step)
