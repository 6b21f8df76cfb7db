"""The place and the layout of each of our tensors in a Hugging Face folder.

A stack may be stored slice by slice, several tensors as one, and a matrix transposed. Both ways are
bitwise. Files may also have a tensor in MXFP4 (OCP Microscaling Formats specification 1.0, 2023,
sections 5 and 6), which is read and not written. 32 neighbours along the last dim of a tensor (..., K)
share a scale 2^(s - 127). There is one byte s for them in ``NAME_scales`` (..., K / 32), and two values
in each byte of ``NAME_blocks`` (..., K / 32, 16), the first in the lower four bits.

Any matrix (M, N) may be in e4m3 with a scale for each block, as DeepSeek-V3's are (arXiv:2412.19437,
section 3.3.2; 128 x 128 there). ``NAME_scale_inv`` (M / 128, N / 128, rounded up) has the factors of
its values. It is read in float32, and not written.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compose.checkpoint.safetensors_files import DTYPES, TensorEntry, TensorFiles

# The values of e2m1 by their bits: a sign, two bits of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BLOCK = 32  # values that share a scale
_BIAS, _NAN = 127, 255  # of a scale's exponent; the exponent that stands for no number
_TYPE = "U8"
E4M3 = "F8_E4M3"
"""The type, in the format of the files, of a matrix with a scale for each block."""


def mxfp4_names(name: str) -> tuple[str, str]:
    """Return the names of the tensors in which a tensor in MXFP4 is stored."""
    return f"{name}_blocks", f"{name}_scales"


def mxfp4_problems(
    name: str, shape: Sequence[int], entries: Mapping[str, TensorEntry]
) -> list[tuple[str, str]]:
    """Return what is wrong with the stored tensors of a tensor in MXFP4."""
    groups = (*shape[:-1], -(-shape[-1] // _BLOCK))
    blocks, scales = mxfp4_names(name)
    results = []
    for one, wanted, other in ((blocks, (*groups, _BLOCK // 2), scales), (scales, groups, blocks)):
        entry = entries.get(one)
        if entry is None:
            where = f"{entries[other].path.name} holds {other.rpartition('.')[2]}"
            results.append((one, f"is missing, and {where}"))
        elif entry.shape != wanted:
            where = f"in {entry.path.name}"
            results.append((one, f"{where} is {entry.shape}, the model's is {wanted}"))
        elif entry.dtype != _TYPE:
            results.append((one, f"in {entry.path.name} is {entry.dtype}, not {_TYPE}"))
    return results


def read_mxfp4(
    target: Tensor, name: str, region: Sequence[slice], read: Callable[[str, Sequence[slice]], Tensor]
) -> None:
    """Fill a part of our tensor, one matrix after another."""
    blocks, scales = mxfp4_names(name)
    stack, *rows, last = region
    groups = slice(last.start // _BLOCK, -(-last.stop // _BLOCK))
    first = last.start - groups.start * _BLOCK
    for place, index in enumerate(range(stack.start, stack.stop)):
        stored = (slice(index, index + 1), *rows, groups)
        packed = read(blocks, (*stored, slice(0, _BLOCK // 2)))
        values = dequantized(packed, read(scales, stored))[0]
        target[place].copy_(values[..., first : first + last.stop - last.start])


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values (..., K), float32, of blocks (..., K / 32, 16) and scales (..., K / 32)."""
    values = torch.tensor(_E2M1)[torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()]
    exponents = scales[..., None].int()
    scaled = torch.ldexp(values, exponents - _BIAS).masked_fill(exponents == _NAN, torch.nan)
    return scaled.flatten(-2)


def scales_of(name: str) -> str:
    """Return the name of the scales of a matrix in e4m3."""
    return f"{name}_scale_inv"


def scale_problems(files: TensorFiles, name: str) -> list[tuple[str, str]]:
    """Return what is wrong with the scales of a matrix in e4m3."""
    entry, scales = files.entries[name], files.entries.get(scales_of(name))
    if len(entry.shape) != 2:
        return [(name, f"is {entry.dtype} of shape {entry.shape}; only matrices are read from it")]
    if scales is None:
        return [(scales_of(name), f"is missing, and {entry.path.name} holds {name} in {entry.dtype}")]
    wanted = tuple(-(-n // block) for n, block in zip(entry.shape, files.blocks, strict=True))
    if scales.shape != wanted:
        return [(scales_of(name), f"is {scales.shape}, blocks of {files.blocks} need {wanted}")]
    if scales.dtype not in DTYPES:
        return [(scales_of(name), f"is {scales.dtype}, not one of {', '.join(DTYPES)}")]
    return []


def read_values(files: TensorFiles, name: str, region: Sequence[slice]) -> Tensor:
    """Read a part of a tensor; that of a matrix in e4m3 is multiplied by its scales, in float32."""
    values = files.read(name, region)
    if files.entries[name].dtype != E4M3:
        return values
    sides = list(zip(region, files.blocks, strict=True))
    cover = [slice(at.start // block, -(-at.stop // block)) for at, block in sides]
    scales = files.read(scales_of(name), cover).float()
    for dim, (at, block) in enumerate(sides):
        # The block of each row or column of the part, counted from the first block that was read.
        own = torch.arange(at.start, at.stop) // block - at.start // block
        scales = scales.index_select(dim, own)
    return values.float() * scales


@dataclass(frozen=True)
class Stored:
    """The place of one of our tensors in the tensors of a folder."""

    name: str  # Hugging Face's name; '{}' in it stands for the index in a stack
    transposed: bool = False
    """Theirs is a matrix whose two dims are swapped, or a stack of such matrices."""
    part: int = 0  # which part of theirs ours is, along ``dim`` (that of a slice, in a stack)
    parts: int = 1  # how many of our tensors make theirs
    base: str = ""
    """A prefix of the name. Files that the model without its head has written leave it out."""
    mxfp4: bool = False
    """Whether files may hold ours in MXFP4; then only the name applies besides."""
    rows: tuple[int, ...] = ()  # rows of each part, if they differ
    dim: int = 0  # the dim along which theirs has parts

    def __post_init__(self) -> None:
        assert 0 <= self.part < self.parts, "the part is one of the parts"

    def names(self, shape: Sequence[int]) -> list[str]:
        """Return the name of each tensor that holds a part of ours."""
        return [self.name.format(i) for i in range(shape[0])] if self.stacked else [self.name]

    @property
    def stacked(self) -> bool:
        """Whether each slice of ours is a tensor of theirs."""
        return "{}" in self.name

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of theirs (of one slice, if they are several) for that of ours."""
        own = tuple(shape[1:] if self.stacked else shape)
        whole = list(own)
        if self.parts > 1:
            whole[self.dim] = sum(self.rows) or own[self.dim] * self.parts
        return (*whole[:-2], whole[-1], whole[-2]) if self.transposed else tuple(whole)

    def in_mxfp4(self, files: Container[str]) -> bool:
        """Return whether ``files`` hold ours in MXFP4, at least in part."""
        return self.mxfp4 and any(name in files for name in mxfp4_names(self.name))

    def resolved(self, name: str, files: Container[str]) -> str:
        """Return the name under which ``files`` hold a tensor, or its own name if they lack it."""
        short = name.removeprefix(self.base)
        return short if name not in files and short in files else name

    def region(self, region: Sequence[slice], shape: Sequence[int]) -> list[slice]:
        """Return the place in theirs of a region of ours (both of one slice, in a stack)."""
        theirs = list(region)
        if self.part:
            before = sum(self.rows[: self.part]) if self.rows else self.part * shape[self.dim]
            own = region[self.dim]
            theirs[self.dim] = slice(own.start + before, own.stop + before)
        return [*theirs[:-2], theirs[-1], theirs[-2]] if self.transposed else theirs

    def ours(self, theirs: Tensor) -> Tensor:
        """Return what was read from such a region, in our layout."""
        return theirs.mT if self.transposed else theirs

    def theirs(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the tensors of theirs that ``parts`` make, in the order of :meth:`names`."""
        for own in zip(*parts, strict=True) if self.stacked else [tuple(parts)]:
            whole = own[0] if len(own) == 1 else torch.cat(own, self.dim)
            yield whole.mT.contiguous() if self.transposed else whole


def stored(entry: str | Stored) -> Stored:
    """Return a place; a name alone is that of a tensor that is stored as it is here."""
    return Stored(entry) if isinstance(entry, str) else entry


Named = tuple[str, Stored, Tensor]
"""Our name, the place in the files, and the tensor."""


def grouped(tensors: Iterable[Named]) -> list[list[Named]]:
    """Return our tensors in groups, each of one tensor of theirs, or one stack."""
    groups: dict[str, list[Named]] = {}
    for one in tensors:
        groups.setdefault(one[1].name, []).append(one)
    for group in groups.values():
        group.sort(key=lambda one: one[1].part)
        parts = [place.part for _, place, _ in group]
        assert parts == list(range(group[0][1].parts)), f"{group[0][1].name} has the parts {parts}"
    return list(groups.values())
