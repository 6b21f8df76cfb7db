"""Figures of probes at other degrees, from those of few small meshes.

With tp every size is a + b / tp, so two probes (tp 2 and 4) give all. With cp each rank has 1 / cp of
the tokens, and each rank more adds a step of the ring. With ep each rank has 1 / ep of the experts.
"""

import math
from collections.abc import Callable, Sequence

from compose.errors import ConfigError
from compose.planner.layer_probe import RESULTS, FigureName, Figures

Made = Callable[[int, int, int], Figures]
"""Makes the probe of a tp, a cp and an ep."""


def combined(tp: int, cp: int, ep: int, made: Made) -> Figures:
    """Return the figures at any degrees, from those of few probes.

    Raises ConfigError if the model cannot be cut so.
    """
    try:
        result = made(min(tp, 2), 1, 1)
        if tp > 2:
            result = _at(result, made(4, 1, 1), tp)
    except ConfigError:  # such a tp does not divide the heads, but ``tp`` may
        result = made(tp, 1, 1)
    if cp > 1:
        pairs = [(2, made(1, 2, 1))] + ([(4, made(1, 4, 1))] if cp > 2 else [])
        result = _with_cp(result, made(1, 1, 1), pairs, tp, cp)
    if ep > 1:
        result = _with_ep(result, made(1, 1, 1), made(1, 1, 2), tp, cp, ep)
    return result


def _at(one: Figures, two: Figures, degree: int) -> Figures:
    """Return the figures at a degree of tp, of which each is a + b / degree, from those at 2 and 4."""
    result: Figures = {}
    for part, values in one.items():
        # b = 4 (x - y), a = 2 y - x
        result[part] = tuple(
            max(0.0, 2 * y - x + 4 * (x - y) / degree)
            for x, y in zip(values, two.get(part, values), strict=True)
        )
    return result


def _with_cp(
    base: Figures, one: Figures, pairs: list[tuple[int, Figures]], tp: int, cp: int
) -> Figures:
    """Return the figures of a rank with 1 / cp of the tokens.

    What a token costs grows by the same amount with each rank more, as with the steps of a ring.
    """

    def each(figures: Figures, part: FigureName, degree: int) -> list[float]:
        """Return figures for each token of a rank."""
        return _divided(figures.get(part, (0.0,) * len(part.tokens)), part, 1 / degree)

    result: Figures = {}
    (first, two), (last, most) = pairs[0], pairs[-1]
    for part in {**base, **two}:
        if part.what in ("op", *RESULTS) or not part.tokens:
            if part not in base:
                continue
            values = list(base[part])
        else:
            values = each(two, part, first)
            if last > first:
                more = each(most, part, last)
                way = (cp - first) / (last - first)
                values = [x + (y - x) * way for x, y in zip(values, more, strict=True)]
            if part in base:
                alone = one.get(part, (0.0,) * len(values))
                values = [
                    x * (y / z) if z else x for x, y, z in zip(base[part], values, alone, strict=True)
                ]
            else:
                values = _divided(values, part, tp)
        if part.tokens:
            values = _divided(values, part, cp)
        if values:
            result[part] = tuple(values)
    return result


def _divided(values: Sequence[float], part: FigureName, share: float) -> list[float]:
    """Return figures of a part, divided where they grow with tokens."""
    return [v / (share if grows else 1) for v, grows in zip(values, part.tokens, strict=True)]


def _with_ep(base: Figures, one: Figures, two: Figures, tp: int, cp: int, ep: int) -> Figures:
    """Return the figures of a rank with 1 / ep of the experts."""
    result = dict(base)
    for part, values in two.items():
        alone, here = one.get(part), base.get(part)
        if here is None or alone is None:  # messages to experts
            result[part] = tuple(_divided(values, part, tp * cp))
        elif part.what == "op":  # a rank has fewer experts, and each has the rows of more ranks
            result[part] = tuple(
                x * ep ** round(math.log2(z / y)) if y and z else x
                for x, y, z in zip(here, alone, values, strict=True)
            )
        elif part.what == "own gradients":  # those of experts are fewer: a + b / ep
            experts = 2 * (1 - values[0] / alone[0]) if alone[0] else 0.0
            result[part] = (here[0] * max(0.0, 1 - experts + experts / ep),)
        elif part.tokens:
            result[part] = tuple(
                x * (z / y) if y else x for x, y, z in zip(here, alone, values, strict=True)
            )
    return result
