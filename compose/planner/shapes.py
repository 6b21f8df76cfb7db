"""Shapes of elementwise results on meta, each computed once.

On meta PyTorch runs many elementwise operators as Python programs, which take most of a record's time.
Their result depends on nothing but the shapes, strides and types of what they are given.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Result(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Shapes:
    """Runs operators, and remembers the results of elementwise ones."""

    def __init__(self) -> None:
        self._known: dict[Any, _Result] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator on meta.

        Args:
            func: The operator.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            What the operator returns. A known elementwise result is a new tensor of the same shape.
        """
        key = _key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        if key in self._known:
            shape, stride, dtype = self._known[key]
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        result = func(*args, **kwargs)
        if type(result) is Tensor and result.device.type == "meta" and not result.storage_offset():
            self._known[key] = _Result(result.shape, result.stride(), result.dtype)
        return result


def _key(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what decides the result's shape; None for an operator whose result is not remembered."""
    schema = func._schema
    if torch.Tag.pointwise not in func.tags:
        return None
    if len(schema.returns) != 1 or schema.returns[0].alias_info is not None:
        return None
    found: list[Any] = [func, tuple(kwargs)]
    for given in (*args, *kwargs.values()):
        if not isinstance(given, Tensor):
            found.append((type(given), given))
        elif given.device.type == "meta":
            found.append((given.shape, given.stride(), given.dtype))
        else:
            return None
    try:
        key = tuple(found)
        hash(key)
    except TypeError:
        return None
    return key
