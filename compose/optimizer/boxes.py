"""Boxes of a tensor: one slice for each dim, as places in the whole parameter."""

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from compose.base.local_tensor import local_tensor

Box = tuple[slice, ...]

# Elements worked on at once. An element-wise step needs float32 copies of these and no other memory.
CHUNK = 2**22


def local(tensor: Tensor | None) -> Tensor:
    """Return this rank's part of a tensor, with at least one dim; the part shares its memory."""
    assert tensor is not None
    part = local_tensor(tensor)
    return part if part.ndim else part.unsqueeze(0)


def lengths(box: Sequence[slice]) -> list[int]:
    """Return the length of each dim."""
    return [max(0, held.stop - held.start) for held in box]


def size(box: Sequence[slice]) -> int:
    """Return the number of elements."""
    return math.prod(lengths(box))


def within(box: Sequence[slice], outer: Sequence[slice]) -> Box:
    """Return the places of a box counted from where another box begins.

    Args:
        box: The box.
        outer: A box that contains it.

    Returns:
        The shifted box.
    """
    return tuple(
        slice(held.start - base.start, held.stop - base.start)
        for held, base in zip(box, outer, strict=True)
    )


def chunks(box: Sequence[slice]) -> Iterator[Box]:
    """Yield boxes of at most ``CHUNK`` elements that together make up ``box``."""
    count = size(box)
    if count <= CHUNK:
        yield tuple(box)
        return
    dim, length = next((dim, length) for dim, length in enumerate(lengths(box)) if length > 1)
    each = max(1, CHUNK * length // count)
    for start in range(box[dim].start, box[dim].stop, each):
        part = slice(start, min(start + each, box[dim].stop))
        yield from chunks((*box[:dim], part, *box[dim + 1 :]))
