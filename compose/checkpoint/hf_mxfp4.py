"""MXFP4, the 4 bits in which weights may be published.

The format is that of the OCP Microscaling Formats specification, version 1.0 (2023), sections 5 and
6. Each 32 neighbours along the last dim of a tensor (..., K) share a scale 2^(s - 127). Files hold one
byte s for them in ``NAME_scales`` (..., K / 32), and two values in each byte of ``NAME_blocks``
(..., K / 32, 16), the first in the lower four bits.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from compose.checkpoint.safetensors_files import TensorEntry

# The values of e2m1 by their bits: a sign, two bits of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BLOCK = 32  # values that share a scale
_BIAS, _NAN = 127, 255  # of a scale's exponent; the exponent that stands for no number
_TYPE = "U8"


class Mxfp4:
    """A stack of matrices in MXFP4, which is read and not written."""

    def names(self, name: str) -> Sequence[str]:
        """Return the names of the stored tensors."""
        return [f"{name}_blocks", f"{name}_scales"]

    def problems(
        self, name: str, shape: Sequence[int], entries: Mapping[str, TensorEntry]
    ) -> list[tuple[str, str]]:
        """Return what is wrong with the stored tensors."""
        groups = (*shape[:-1], -(-shape[-1] // _BLOCK))
        blocks, scales = self.names(name)
        wanted = {blocks: (*groups, _BLOCK // 2), scales: groups}
        found = []
        for one, other in ((blocks, scales), (scales, blocks)):
            entry = entries.get(one)
            if entry is None:
                where = f"{entries[other].path.name} holds {other.rpartition('.')[2]}"
                found.append((one, f"is missing, and {where}"))
                continue
            file = entry.path.name
            if entry.shape != wanted[one]:
                found.append((one, f"in {file} is {entry.shape}, the model's is {wanted[one]}"))
            elif entry.dtype != _TYPE:
                found.append((one, f"in {file} is {entry.dtype}, not {_TYPE}"))
        return found

    def fill(
        self,
        target: Tensor,
        name: str,
        region: Sequence[slice],
        read: Callable[[str, Sequence[slice]], Tensor],
    ) -> None:
        """Fill a part of our tensor, one matrix after another."""
        blocks, scales = self.names(name)
        stack, *rows, last = region
        groups = slice(last.start // _BLOCK, -(-last.stop // _BLOCK))
        first = last.start - groups.start * _BLOCK
        for place, index in enumerate(range(stack.start, stack.stop)):
            held = (slice(index, index + 1), *rows, groups)
            values = dequantized(read(blocks, (*held, slice(0, _BLOCK // 2))), read(scales, held))[0]
            target[place].copy_(values[..., first : first + last.stop - last.start])


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values (..., K), float32, of blocks (..., K / 32, 16) and scales (..., K / 32)."""
    values = torch.tensor(_E2M1)[torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()]
    exponents = scales[..., None].int()
    scaled = torch.ldexp(values, exponents - _BIAS).masked_fill(exponents == _NAN, torch.nan)
    return scaled.flatten(-2)
