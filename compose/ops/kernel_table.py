"""Which kernel computes an attention on CUDA, and why: one table, a pure function of what it is given.

The limits are those of PyTorch 2.13 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, and
torch/nn/attention/_fa3.py and _fa4.py). What a soft cap, documents, windows and pieces of a sequence
need decides too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

Kernel = Literal["cudnn", "flash", "efficient", "plain"]


@dataclass(frozen=True)
class Gpu:
    """The facts of a GPU, and PyTorch's settings, on which the choice depends."""

    capability: tuple[int, ...]
    """The compute capability."""
    cudnn: int = 0
    """The version of cuDNN, as PyTorch numbers it; 0: its attention is not to be used."""
    flash: str = "FA2"
    """The implementation that PyTorch's flash operators run: FA2, or one that was activated."""
    deterministic: bool = False
    """Whether only deterministic kernels may run."""


@dataclass(frozen=True)
class Problem:
    """An attention, as far as the choice depends on it."""

    dtype: torch.dtype
    width: int
    """Width of queries and keys."""
    values: int
    """Width of the values."""
    documents: bool = False
    """Whether rows hold several documents."""
    window: bool = False
    softcap: bool = False
    square: bool = True
    """Whether each causal part has as many queries as keys."""
    even: bool = True
    """Whether 128 divides the lengths of all parts."""
    in_order: bool = True
    """Whether rows of several lengths describe it, so that no mask is needed."""

    @property
    def half(self) -> bool:
        """Whether it is in a type of 16 bits."""
        return self.dtype in (torch.bfloat16, torch.float16)

    @property
    def widths(self) -> tuple[int, int]:
        """The widths as kernels take them: multiples of 8."""
        return self.width + -self.width % 8, self.values + -self.values % 8


HOPPER_AND_BLACKWELL = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities of NVIDIA's data-center GPUs since Hopper; AMD's MI300X says (9, 4)."""
LATENT = (192, 128)
"""Widths of DeepSeek's latent attention, for which cuDNN and FlashAttention 4 have kernels."""


def _activated(device: Gpu, problem: Problem) -> bool:
    major, widest = device.capability[0], max(problem.widths)
    fits = {
        "FA3": major == 9 and widest <= 256,
        "FA4": (major == 9 and widest <= 256)
        or (major == 10 and (widest <= 128 or problem.widths == LATENT)),
    }
    other = device.flash != "FA2" and widest <= 256
    return problem.half and problem.in_order and fits.get(device.flash, other)


def _cudnn(device: Gpu, problem: Problem) -> bool:
    known = device.capability in HOPPER_AND_BLACKWELL and device.cudnn > 91500
    one_mask = problem.square and problem.even and not (problem.documents or problem.window)
    fits = max(problem.widths) <= 128 or problem.widths == LATENT
    return problem.half and known and one_mask and fits and not device.deterministic


def _flash(device: Gpu, problem: Problem) -> bool:
    widest = max(problem.widths)
    # Its backward does not fit into the shared memory of these.
    small = (8, 6) <= device.capability <= (8, 9) or device.capability[0] == 12
    fits = widest <= 256 and not (small and 192 < widest <= 224)
    known = device.flash == "FA2" and device.capability >= (8, 0)
    return problem.half and problem.in_order and known and fits


def _efficient(device: Gpu, problem: Problem) -> bool:
    if problem.dtype == torch.bfloat16:
        return device.capability >= (8, 0)
    return problem.dtype in (torch.float32, torch.float16)


TABLE: tuple[tuple[Kernel, Callable[[Gpu, Problem], bool]], ...] = (
    ("plain", lambda device, problem: problem.softcap),  # no kernel of PyTorch has a soft cap
    ("flash", _activated),  # FlashAttention 3, 4 or another was activated, so it is wanted
    ("cudnn", _cudnn),  # the fastest that PyTorch has itself on Hopper and Blackwell; one mask only
    ("flash", _flash),  # FlashAttention-2 has windows, and documents as rows of several lengths
    ("efficient", _efficient),  # it takes float32, old GPUs, wide heads, and any mask
    ("plain", lambda device, problem: True),  # the rest, as float64
)
"""Kernels, and whether each is for a device and a problem; the first one that is, is chosen."""


def kernel_of(device: Gpu, problem: Problem) -> Kernel:
    """Return the name of the kernel for a problem."""
    return next(kernel for kernel, takes in TABLE if takes(device, problem))


def widths_of(kernel: Kernel, device: Gpu, problem: Problem) -> tuple[int, int]:
    """Return the widths to which queries and keys, and values, are padded for the kernel."""
    narrower_values = device.flash == "FA4" and device.capability[0] == 10
    if kernel == "flash" and not (narrower_values and problem.widths == LATENT):
        return max(problem.widths), max(problem.widths)
    return problem.widths


@dataclass(frozen=True)
class PlannedDevice:
    """The device that tensors on meta stand for, and their rows."""

    gpu: Gpu = Gpu((8, 0))
    packed: bool = False
    """Whether rows hold several documents, which no tensor on meta can tell."""


def planned() -> PlannedDevice:
    """Return what tensors on meta stand for.

    The planner puts a function here that returns the device of its plan. So call it as
    ``kernel_table.planned``.
    """
    return PlannedDevice()


def planned_for(capability: tuple[int, ...], packed: bool) -> PlannedDevice:
    """Return a device with this PyTorch, and rows of one or of several documents."""
    return PlannedDevice(Gpu(capability, CUDNN, current_flash_attention_impl() or "FA2"), packed)


CUDNN = 91900
"""The version of cuDNN that comes with PyTorch 2.13."""
KERNELS = ("cudnn", "flash2", "flash3", "flash4", "efficient")
"""The kernels that have a time of their own."""


def kernel_that_runs(operator: str) -> str:
    """Return the kernel of one of PyTorch's operators of attention; empty for one of no GPU."""
    for name in ("cudnn", "efficient"):
        if name in operator:
            return name
    if "flash" not in operator or "cpu" in operator:
        return ""
    return (current_flash_attention_impl() or "FA2").replace("FA", "flash")


def device_of(q: Tensor) -> Gpu:
    """Return the device of a tensor, and PyTorch's settings for it."""
    if not q.is_cuda:
        return planned().gpu
    usable = torch.version.cuda is not None and torch.backends.cuda.cudnn_sdp_enabled()
    strict = torch.are_deterministic_algorithms_enabled()
    return Gpu(
        torch.cuda.get_device_capability(q.device),
        (torch.backends.cudnn.version() or 0) if usable else 0,
        current_flash_attention_impl() or "FA2",
        strict and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )
