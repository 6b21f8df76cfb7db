"""Figures of an operator from its arguments: FLOPs, the shape of a product, bytes, copies on a CPU."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compose.ops.attention_layout import attention_pairs

WEIGHTS = ".weights"
"""The end of a grouped product's name, if it is the gradient of weights: then k is an expert's rows."""


class RememberedResults:
    """Runs operators on meta, and remembers shape, stride and dtype of results that are new tensors.

    On meta PyTorch runs many operators as Python programs, which take most of a record's time. A known
    result is a new tensor. What is computed in place changes nothing on meta.
    """

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[torch.Size, tuple[int, ...], torch.dtype]]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator."""
        returns = func._schema.returns
        inplace = func._schema.name.endswith("_") and torch.Tag.pointwise in func.tags
        if inplace and args[0].device.type == "meta":
            return args[0]
        if not returns or any(each.alias_info for each in returns):
            return func(*args, **kwargs)
        key = _key((func, args, *kwargs.items()))
        if key in self._known:
            made = [
                torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                for shape, stride, dtype in self._known[key]
            ]
            return made[0] if len(returns) == 1 else tuple(made)
        result = func(*args, **kwargs)
        made = [result] if len(returns) == 1 else result
        taken = [t.untyped_storage()._cdata for t in tensors_in((args, kwargs))]
        if key and all(type(t) is Tensor and _is_new(t, taken) for t in made):
            self._known[key] = [(t.shape, t.stride(), t.dtype) for t in made]
        return result


def _is_new(tensor: Tensor, taken: Sequence[int]) -> bool:
    """Tell whether a tensor on meta is all of its storage, which is none of those ``taken``."""
    storage = tensor.untyped_storage()
    whole = storage.nbytes() == tensor_bytes(tensor) and not tensor.storage_offset()
    return tensor.device.type == "meta" and whole and storage._cdata not in taken


def _key(given: Any) -> Any:
    """Return what decides an operator's result; None if it is not remembered."""
    if isinstance(given, Tensor):
        return (given.shape, given.stride(), given.dtype) if given.device.type == "meta" else None
    if isinstance(given, (list, tuple)):
        keys = tuple(map(_key, given))
        return None if None in keys else keys
    try:
        hash(given)
    except TypeError:
        return None
    return type(given), given


def tensors_in(given: Any) -> list[Tensor]:
    """Return the tensors in an argument, a result, or lists and dicts of them, in their order."""
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, dict):
        given = given.values()
    elif not isinstance(given, (list, tuple)):
        return []
    return [tensor for each in given for tensor in tensors_in(each)]


# Elementwise operators of tensors whose types may differ.
_MIXED = ["add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "maximum", "minimum", "where"]


def casts(
    operator: str, given: Sequence[Tensor], changed: Sequence[Tensor], made: Sequence[Any]
) -> int:
    """Return the bytes of copies in a common type, which an elementwise kernel makes on a CPU.

    Kernels of a GPU cast what they load and store.
    """
    if operator.removesuffix("_") not in _MIXED or len({t.dtype for t in given}) < 2:
        return 0
    if not operator.endswith("_"):  # an out= is written and not read
        given = [t for t in given if not any(t is c for c in changed)]
    common = torch.result_type(given[0], given[1]) if len(given) > 1 else given[0].dtype
    for one in given[2:]:
        common = torch.promote_types(common, one.dtype)
    size = common.itemsize
    written = changed or [t for t in made if isinstance(t, Tensor)]
    inputs = sum(size * t.numel() for t in given if t.ndim and t.dtype not in (common, torch.bool))
    return inputs + sum(size * t.numel() for t in written[:1] if t.ndim and t.dtype != common)


def chunk_copies(given: Sequence[Tensor], chunks: int, out: Tensor) -> int:
    """Return the bytes of copies of FSDP's chunk_cat on a CPU: padded ones, and in one piece."""
    size = 0
    for each in given:
        rows = each.shape[0]
        if rows % chunks:
            size += each.numel() // max(1, rows) * -(-rows // chunks) * chunks * each.element_size()
    return size + (out.numel() * given[0].element_size() if given[0].dtype != out.dtype else 0)


def changed(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes to, of those that it was given."""
    results: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            results += tensors_in(given)
    return results


def argument(func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return an argument of an operator by its name; None if it was not given."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[i] if i < len(args) else kwargs.get(name)
    return None


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; what expand repeats is there once."""
    sizes = (n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not n)
    return math.prod(sizes) * tensor.element_size()


def bytes_of_lists(args: Any) -> int:
    """Return the bytes of the largest list of tensors, as all_gather and reduce_scatter may take."""
    lists = [leaf for leaf in args if isinstance(leaf, (list, tuple))]
    sizes = [sum(map(tensor_bytes, tensors_in(each))) for each in lists]
    return max(sizes, default=0)


def attention_flops(given: Sequence[Tensor], name: str, causal: bool, left: int) -> float:
    """Return the FLOPs of a kernel of attention for the pairs of tokens that attend.

    Backward computes the scores again, and has four products besides (Dao 2023, arXiv:2307.08691).
    Queries are (B, H, L, K), or (B, L, H, K) for the kernel that takes windows; ``left`` is its window.
    Documents that are laid end to end, (T, H, K), count as one, since only the device knows their ends.
    """
    backward = name.endswith("backward")
    q, k, v = (x if x.ndim == 4 else x[None] for x in (given[1:4] if backward else given[:3]))
    tokens = 1 if name.startswith("_flash_attention") else 2
    length, keys = q.shape[tokens], k.shape[tokens]
    pairs = attention_pairs(length, keys, causal, left + 1)
    if not causal and left >= 0:
        pairs /= 2  # of earlier keys, the first query sees all and the last one none
    pairs *= q.shape[0] * q.shape[3 - tokens]
    scores, values = 2.0 * pairs * q.shape[3], 2.0 * pairs * v.shape[3]
    return 3 * scores + 2 * values if backward else scores + values


def product_shape(given: list[Tensor], flops: float) -> tuple[int, ...]:
    """Return (batch, m, n, k) of a product, from its FLOPs and its factors."""
    left, right = given[-2], given[-1]
    if left.ndim == 1 or right.ndim == 1:
        left, right = given[0], given[1]
    batch = left.shape[0] if left.ndim == 3 else 1
    m, k = left.shape[-2], left.shape[-1]
    n = round(flops / (2 * batch * m * k)) if batch * m * k else 0
    return batch, m, n, k


def grouped_shape(left: Tensor, right: Tensor, made: Tensor) -> tuple[int, int, int, int]:
    """Return (experts, m, n, k) of a grouped product whose groups are equally long.

    One of the three has a matrix for each expert. Its dim that the others lack is split: rows of the
    left factor (m), columns of the right one (n), or the dim that is summed (k), in gradients of
    weights.
    """
    (m, k), n = left.shape[-2:], right.shape[-1]
    experts = next((x.shape[0] for x in (left, right, made) if x.ndim == 3), 1)
    if left.ndim == right.ndim:
        return experts, m, n, k if left.ndim == 3 else k // experts
    return (experts, m // experts, n, k) if right.ndim == 3 else (experts, m, n // experts, k)


def group_of(args: Any, kwargs: Mapping[str, Any]) -> dist.ProcessGroup:
    """Return the process group that an operator's arguments name."""
    # The group comes last; other words, such as "sum", may name no group.
    for leaf in reversed((*args, *kwargs.values())):
        if isinstance(leaf, str):
            try:
                return dist.distributed_c10d._resolve_process_group(leaf)  # type: ignore[arg-type]
            except (ValueError, RuntimeError):
                continue
        if isinstance(leaf, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(leaf)
            except (RuntimeError, TypeError):
                continue
        if isinstance(leaf, dist.ProcessGroup):
            return leaf
    raise ValueError("a message without a process group")
