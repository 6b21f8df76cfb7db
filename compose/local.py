"""The memory behind a tensor: what this rank holds of it."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or a plain tensor itself; the memory, not a copy.

    A weight that FSDP gathers in its own way (float8) is a subclass that wraps its memory: what copies,
    compares, saves or sums its bytes wants these.
    """
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held._tensor if hasattr(held, "fsdp_pre_all_gather") else held  # type: ignore[attr-defined]
