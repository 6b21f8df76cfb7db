"""The forms in which Hugging Face's files store a tensor of a model.

A tensor lies there as it is, as a stack's slices, transposed, or in the 4 bits of MXFP4. A model's
``hf.py`` says which of its tensors have another form than the first two.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from compose.errors import ConfigError

Region = Sequence[slice]
Read = Callable[[str, Region], Tensor]


@dataclass(frozen=True)
class Part:
    """A stored tensor from which a tensor of a model is made."""

    shape: tuple[int, ...]
    """Its shape."""
    dtype: str = ""
    """The name of its type in the files, such as "U8"; empty: any float."""
    beside: str = ""
    """The stored tensor that says nothing without this one; empty: there is none."""


class Form(Protocol):
    """A way to store a tensor."""

    def parts(self, name: str, shape: Sequence[int]) -> Mapping[str, Part]:
        """Return the stored tensors by name.

        Args:
            name: Hugging Face's name of the tensor.
            shape: The shape of the whole tensor in the model.

        Returns:
            The stored tensors.
        """
        ...

    def fill(self, target: Tensor, name: str, region: Region, read: Read) -> None:
        """Fill ``target`` with a region of the tensor.

        Args:
            target: The region's tensor, of any float type.
            name: Hugging Face's name of the tensor.
            region: One slice for each dim of the whole tensor in the model.
            read: Reads a region of a stored tensor.
        """
        ...

    def stored(self, tensor: Tensor) -> Iterable[Tensor]:
        """Return the stored tensors of a whole tensor, in the order of ``parts``.

        Args:
            tensor: The whole tensor of the model.

        Returns:
            The stored tensors.

        Raises:
            ConfigError: This form can be read, and not written.
        """
        ...


class Whole:
    """The tensor as it is."""

    def parts(self, name: str, shape: Sequence[int]) -> Mapping[str, Part]:
        """Return the one stored tensor."""
        return {name: Part(tuple(shape))}

    def fill(self, target: Tensor, name: str, region: Region, read: Read) -> None:
        """Fill ``target`` with a region of the tensor."""
        target.copy_(read(name, region))

    def stored(self, tensor: Tensor) -> Iterable[Tensor]:
        """Return the tensor."""
        return [tensor]


class Stack:
    """A stack whose slices are stored one by one; '{}' in the name stands for the index."""

    def parts(self, name: str, shape: Sequence[int]) -> Mapping[str, Part]:
        """Return one stored tensor for each slice."""
        return {name.format(i): Part(tuple(shape[1:])) for i in range(shape[0])}

    def fill(self, target: Tensor, name: str, region: Region, read: Read) -> None:
        """Fill ``target`` with a region of the stack."""
        for place, index in enumerate(range(region[0].start, region[0].stop)):
            target[place].copy_(read(name.format(index), region[1:]))

    def stored(self, tensor: Tensor) -> Iterable[Tensor]:
        """Return the slices."""
        return tensor


class Transposed:
    """The tensor with its last two dims swapped."""

    def parts(self, name: str, shape: Sequence[int]) -> Mapping[str, Part]:
        """Return the one stored tensor."""
        return {name: Part((*shape[:-2], shape[-1], shape[-2]))}

    def fill(self, target: Tensor, name: str, region: Region, read: Read) -> None:
        """Fill ``target`` with a region of the tensor."""
        target.copy_(read(name, (*region[:-2], region[-1], region[-2])).mT)

    def stored(self, tensor: Tensor) -> Iterable[Tensor]:
        """Return the tensor with its last two dims swapped."""
        return [tensor.mT]


# The sixteen values of e2m1: a sign, two bits of exponent, one of mantissa (section 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BLOCK = 32  # values that share a scale
_BIAS, _NAN = 127, 255  # of a scale's exponent; the exponent that stands for no number


@dataclass(frozen=True)
class Mxfp4:
    """A stack of matrices in MXFP4, to be read only.

    MXFP4 is of the OCP Microscaling Formats specification, version 1.0 (2023), sections 5 and 6. Each
    32 neighbours of the last dim (..., K) share a scale 2^(s - 127), one byte s of
    ``NAME_scales`` (..., K / 32). The values lie two in a byte of ``NAME_blocks`` (..., K / 32, 16),
    the first of them in the lower four bits.
    """

    def parts(self, name: str, shape: Sequence[int]) -> Mapping[str, Part]:
        """Return the stored blocks and scales."""
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        groups = (*shape[:-1], -(-shape[-1] // _BLOCK))
        return {
            blocks: Part((*groups, _BLOCK // 2), "U8", beside=scales),
            scales: Part(groups, "U8", beside=blocks),
        }

    def fill(self, target: Tensor, name: str, region: Region, read: Read) -> None:
        """Fill ``target`` with a region of the tensor, one matrix after another."""
        first, *rows, last = region
        groups = slice(last.start // _BLOCK, -(-last.stop // _BLOCK))
        skipped = last.start - groups.start * _BLOCK
        for place, index in enumerate(range(first.start, first.stop)):
            held = (slice(index, index + 1), *rows, groups)
            blocks = read(f"{name}_blocks", (*held, slice(0, _BLOCK // 2)))[0]
            values = dequantized(blocks, read(f"{name}_scales", held)[0])
            target[place].copy_(values[..., skipped : skipped + last.stop - last.start])

    def stored(self, tensor: Tensor) -> Iterable[Tensor]:
        """Raise ConfigError: nothing here rounds weights to 4 bits."""
        raise ConfigError("MXFP4: is read, and not written: a model that was trained is no 4-bit model")


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values of MXFP4.

    Args:
        blocks: (..., K / 32, 16), uint8: two values each, the first in the lower four bits.
        scales: (..., K / 32), uint8: exponents with a bias of 127; 255 stands for no number.

    Returns:
        (..., K), float32, in which all of them are exact, up to 2^127.
    """
    pairs = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    values = torch.tensor(_E2M1)[pairs.int()]
    exponents = scales[..., None].int()
    scaled = torch.ldexp(values, exponents - _BIAS).masked_fill(exponents == _NAN, torch.nan)
    return scaled.flatten(-2)
