"""Boxes of a tensor, one slice for each dim, in places of the whole parameter."""

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from compose.base.local_tensor import local_tensor

Box = tuple[slice, ...]

# Elements worked on at once: float32 copies of them are all that an element-wise step holds besides.
CHUNK = 2**22


def local(tensor: Tensor | None) -> Tensor:
    """This rank's part of a parameter, gradient or state, which has one dim at least; its memory."""
    assert tensor is not None
    part = local_tensor(tensor)
    return part if part.ndim else part.unsqueeze(0)


def lengths(box: Sequence[slice]) -> list[int]:
    """Of each dim."""
    return [max(0, held.stop - held.start) for held in box]


def size(box: Sequence[slice]) -> int:
    """Number of elements."""
    return math.prod(lengths(box))


def within(box: Sequence[slice], outer: Sequence[slice]) -> Box:
    """The places of ``box`` counted from where ``outer`` begins."""
    return tuple(
        slice(held.start - base.start, held.stop - base.start)
        for held, base in zip(box, outer, strict=True)
    )


def chunks(box: Sequence[slice]) -> Iterator[Box]:
    """Boxes of at most ``CHUNK`` elements that make up ``box``."""
    count = size(box)
    if count <= CHUNK:
        yield tuple(box)
        return
    dim, length = next((dim, length) for dim, length in enumerate(lengths(box)) if length > 1)
    each = max(1, CHUNK * length // count)
    for start in range(box[dim].start, box[dim].stop, each):
        part = slice(start, min(start + each, box[dim].stop))
        yield from chunks((*box[:dim], part, *box[dim + 1 :]))
