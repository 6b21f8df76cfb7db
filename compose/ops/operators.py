"""Functions as operators of PyTorch and as kernels of torch.compile; whose kernels compute."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def device_of(tensor: Tensor) -> str:
    """Return the type of the device whose kernels compute with ``tensor``.

    The planner runs a step on meta tensors in place of another device's, and puts a function here that
    returns that device's type. So call it as ``operators.device_of``.
    """
    return tensor.device.type


BODIES: dict[Any, Callable[..., Any]] = {}
"""The function of each registered operator. Whoever records what an operator does runs it."""


def operator(name: str, mutates: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that registers a function as an operator; a compiler does not look into it."""

    def register(function: Callable[..., Any]) -> Any:
        registered = torch.library.custom_op(name, function, mutates_args=mutates)
        namespace, _, short = name.partition("::")
        BODIES[getattr(getattr(torch.ops, namespace), short).default] = function
        return registered

    return register


class _Compiler:
    missing = False  # of this machine, as the first attempt to compile has shown


def compiles(tensor: Tensor) -> bool:
    """Tell whether functions of a tensor are to be compiled: it is on a GPU, and no mode is on.

    A mode sees each operator, as a count of FLOPs does, and would see none of a kernel's.
    """
    return tensor.is_cuda and not (_Compiler.missing or torch.compiler.is_compiling() or _watched())


def _watched() -> bool:
    return bool(_get_current_dispatch_mode_stack() or _get_current_function_mode_stack())


def run_compiled(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """Return ``function(*tensors)``, by one kernel of torch.compile on a GPU if that is possible.

    It is compiled whatever ``compile.mode`` is: no graph of the model changes. If it cannot be, a line
    says so once, and PyTorch's operators do the work. Another size of the tensors' first dims is no
    reason to compile again.
    """
    if _Compiler.missing or _watched():
        return function(*tensors)
    from torch._dynamo.exc import TorchDynamoException  # what compiles nothing starts faster

    for tensor in tensors:
        if len(tensor) > 1:  # of one row PyTorch always makes a graph of its own
            torch._dynamo.mark_dynamic(tensor, 0)
    try:
        return _compiled(function)(*tensors)
    except TorchDynamoException as error:
        _Compiler.missing = True
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"the loss and rounding to bfloat16 run uncompiled, and slower: {reason}", flush=True)
        return function(*tensors)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


def kernel(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """Return a function as it is, or the kernel that torch.compile makes of it on any device.

    The kernel serves tensors of any length, but for the last dim's.
    """
    return _kernel(function) if compiled else function


@functools.cache
def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    made = torch.compile(function)

    def run(*given: Any) -> Any:
        return made(*(_of_any_length(x) if isinstance(x, Tensor) else x for x in given))

    return run


def _of_any_length(x: Tensor) -> Tensor:
    """Return ``x`` so that a kernel for it is one for any length of all dims but the last."""
    # Dynamo would also guard the base of a view, and compile again for each place in it.
    x = x.data
    torch._dynamo.maybe_mark_dynamic(x, list(range(x.ndim - 1)))
    return x
