"""The codes of [outer] by their definitions, and what each is expected to lose.

This shares no code with compose/diloco/codes.py, which it judges.
"""

import torch
from torch import Tensor

from compose.diloco.options import Outer

_BLOCK = 256  # elements that share a scale in int8 and e3m0
_ROW, _ROWS = 4096, 32  # of top_k: elements of a row, and rows that share two magnitudes
_E3M0 = torch.tensor([0.0, *(2.0**e for e in range(-6, 1))])
_HALFWAY = torch.tensor([2.0**-7, *(0.75 * 2.0**e for e in range(-5, 1))])


def received(options: Outer, change: Tensor) -> tuple[Tensor, Tensor]:
    """Return what other islands get of a vector (N,), float64 in host memory, and its expected loss.

    The loss is the square of the error of each element (N,). Rounding to values that are a step apart
    has the mean square step^2 / 12. For top_k it is the error itself.
    """
    if options.dtype == "top_k":
        found = _largest(_rows(change, _ROW), round(options.density * _ROW)).flatten()[: len(change)]
        return found, (change - found).square()
    blocks = _rows(change, _BLOCK)
    most = blocks.abs().amax(1, keepdim=True)
    if options.dtype == "int8":
        # bfloat16 is the upper half of a float32. In the middle it is rounded up here.
        steps = (((most / 127).view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)
        found = (blocks * (1 / steps).nan_to_num(posinf=0.0)).round().clamp(-127, 127) * steps
    elif options.dtype == "e3m0":
        scales = most.bfloat16().float()
        ratio = blocks.abs() / scales.clamp(min=torch.finfo(torch.float32).tiny)
        found = _E3M0[torch.bucketize(ratio, _HALFWAY, right=True)] * blocks.sign() * scales
        steps = _E3M0.diff()[torch.bucketize(ratio, _E3M0[1:-1], right=True)] * scales
    else:  # float32 in a proof is float64, and loses nothing; bfloat16 has 8 bits of a magnitude
        found = change.bfloat16() if options.dtype == "bfloat16" else change
        steps = torch.exp2(torch.frexp(change).exponent - 8.0) * (options.dtype == "bfloat16")
    found, steps = (x.expand_as(blocks) if x.ndim > 1 else x for x in (found, steps))
    found, steps = (x.flatten()[: len(change)].double() for x in (found, steps))
    return found, steps.square() / 12 * (change != 0)


def _largest(rows: Tensor, kept: int) -> Tensor:
    """Return the ``kept`` largest elements of each row, each as one of the two magnitudes of its group.

    These are the means of those above and not above the mean. A row with fewer elements that are not 0
    sends its largest in place of those that it lacks.
    """
    places = rows.abs().topk(kept, 1).indices
    sent = rows.gather(1, places).double()
    places = torch.where(sent == 0, places[:, :1], places)
    sent = torch.where(sent == 0, sent[:, :1], sent)
    found = torch.zeros_like(rows, dtype=torch.float64)
    for group, where, into in zip(*(x.split(_ROWS) for x in (sent, places, found)), strict=True):
        sizes = group.abs()
        above = sizes > _mean(sizes[sizes > 0])
        levels = torch.where(above, _mean(sizes[above]), _mean(sizes[~above & (sizes > 0)]))
        into.scatter_(1, where, levels.bfloat16().double() * group.sign())
    return found


def _rows(x: Tensor, width: int) -> Tensor:
    """Return a vector as float32 rows; the last one is filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -len(x) % width)).view(-1, width).float()


def _mean(x: Tensor) -> Tensor:
    return x.sum() / max(1, len(x))
