"""Boxes of a tensor: one slice for each dim, as places in the whole parameter."""

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from compose.ops.local_tensor import local_tensor

Region = tuple[slice, ...]

# Elements worked on at once. An element-wise step needs float32 copies of these and no other memory.
CHUNK = 2**22


def local(tensor: Tensor | None) -> Tensor:
    """Return this rank's part of a tensor, with at least one dim; the part shares its memory."""
    assert tensor is not None
    part = local_tensor(tensor)
    return part if part.ndim else part.unsqueeze(0)


def lengths(region: Sequence[slice]) -> list[int]:
    """Return the length of each dim."""
    return [max(0, held.stop - held.start) for held in region]


def size(region: Sequence[slice]) -> int:
    """Return the number of elements."""
    return math.prod(lengths(region))


def within(region: Sequence[slice], outer: Sequence[slice]) -> Region:
    """Return the places of a region counted from where another region begins."""
    return tuple(
        slice(held.start - base.start, held.stop - base.start)
        for held, base in zip(region, outer, strict=True)
    )


def chunks(region: Sequence[slice]) -> Iterator[Region]:
    """Yield regions of at most ``CHUNK`` elements that together make up ``region``."""
    count = size(region)
    if count <= CHUNK:
        yield tuple(region)
        return
    dim, length = next((dim, length) for dim, length in enumerate(lengths(region)) if length > 1)
    each = max(1, CHUNK * length // count)
    for start in range(region[dim].start, region[dim].stop, each):
        part = slice(start, min(start + each, region[dim].stop))
        yield from chunks((*region[:dim], part, *region[dim + 1 :]))
