"""The forms of what messages keep between steps, since anyone may have made a checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compose.compression.codecs import SCALE_BYTES
from compose.compression.feedback import KEPT
from compose.compression.gathers import DifferenceGather
from compose.compression.low_rank import LowRank
from compose.compression.reductions import InBlocks
from compose.compression.sparse import Largest
from compose.errors import ConfigError

Forms = dict[str, tuple[tuple[int, ...], torch.dtype | None]]
"""The shape and the type of each tensor that a state may hold; None is any float type."""


def forms_of(part: Any) -> Forms:
    """Return the forms of what a reduction or a gather keeps."""
    if isinstance(part, (DifferenceGather, InBlocks)):
        layout, code = part.packing.layout, part.packing.code
        rows = part.levels.far.size() if part.levels else layout.ranks
        if isinstance(part, DifferenceGather):
            return {"base": ((rows, layout.numel), None)}
        shape = rows * part.packing.blocks, code.size + SCALE_BYTES
        return {"feedback": (shape, torch.uint8)} if part.feedback else {}
    found: Forms = {}
    if isinstance(part, (LowRank, Largest)) and part.feedback:
        blocks = -(-part.layout.ranks * part.layout.numel // KEPT.size)
        found["feedback"] = (blocks, KEPT.width(torch.float32)), torch.uint8
    if isinstance(part, LowRank):
        found |= {f"factor{i}": ((c, part.rank), torch.float32) for i, (_, c) in part.shapes.items()}
    return found


def check(state: Mapping[str, Tensor], forms: Forms) -> None:
    """Raise ConfigError for a tensor of a state that has another form, or none."""
    for name, value in state.items():
        if name not in forms:
            raise ConfigError(f"{name} is no name of what messages keep")
        shape, dtype = forms[name]
        right = value.dtype == dtype if dtype else value.is_floating_point()
        if tuple(value.shape) != shape or not right:
            wanted = f"{dtype or 'floats'} {list(shape)}"
            raise ConfigError(f"{name} is {value.dtype} {list(value.shape)}, not {wanted}")
