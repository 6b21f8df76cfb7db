"""The rotation of blocks by the orthogonal Hadamard matrix, which spreads an outlier over its block.

The matrix of a block is the Kronecker product of two small ones. Two products with these take far fewer
FLOPs than one with the whole. A block is seen as rows (few, each). The first product mixes the rows by
sums and differences, and a compiler makes one kernel of these. The second is a matrix product.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from compose.compression.kernels import compiles, kernel


def rotated_blocks(x: Tensor) -> Tensor:
    """Return blocks (..., size) times the orthogonal Hadamard matrix, which is its own inverse."""
    _, each = factors(x.shape[-1])
    return (mixed(x).view(-1, each) @ _second(x)).view(x.shape)


def mixed(x: Tensor) -> Tensor:
    """Return blocks (..., size) after the first product, whose matrix has elements of 1 and -1."""
    few, each = factors(x.shape[-1])
    blocks = x.reshape(-1, few, each)
    if compiles():
        return kernel(_mixed)(blocks).view(x.shape)
    return (_hadamard(few, x.dtype, x.device) @ blocks).view(x.shape)


def end_rotation(out: Tensor, x: Tensor, add: bool) -> None:
    """Write the second product.

    Args:
        out: (..., size), of any float type.
        x: Of this shape, what :func:`mixed` returned.
        add: Whether to add to ``out`` what it holds.
    """
    _, each = factors(x.shape[-1])
    if out.dtype == x.dtype and out.is_contiguous():
        out.view(-1, each).addmm_(x.view(-1, each), _second(x), beta=int(add))
        return
    found = (x.view(-1, each) @ _second(x)).view(out.shape)
    out.copy_(out + found if add else found)


def mixed_rows(rows: Sequence[Tensor]) -> Tensor:
    """Return the first product of blocks, given as rows (..., each), as (..., few each)."""
    rows, apart = list(rows), 1
    while apart < len(rows):
        for i in range(len(rows)):
            if not i & apart:
                one, other = rows[i], rows[i + apart]
                rows[i], rows[i + apart] = one + other, one - other
        apart *= 2
    return torch.cat(rows, -1)


def factors(size: int) -> tuple[int, int]:
    """Return two powers of two whose product is ``size``; the second is not the smaller one."""
    few = 1 << (size.bit_length() - 1) // 2
    return few, size // few


def _mixed(x: Tensor) -> Tensor:
    return mixed_rows(x.unbind(1))


def _second(x: Tensor) -> Tensor:
    """Return the matrix of the second product, which also makes up for the length of the first."""
    few, each = factors(x.shape[-1])
    return _hadamard(each, x.dtype, x.device) / math.sqrt(few * each)


@functools.cache
def _hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the matrix of 1 and -1."""
    whole = torch.ones(1, 1, dtype=dtype)
    while len(whole) < size:
        whole = torch.cat([torch.cat([whole, whole], 1), torch.cat([whole, -whole], 1)])
    return whole.to(device)
