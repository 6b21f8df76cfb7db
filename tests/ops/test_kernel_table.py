"""Which kernel of a GPU is chosen."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from compose.ops import kernel_table
from compose.ops.kernel_table import TABLE, Gpu, Kernel, Problem, device_of, kernel_of, widths_of
from tests.support.gpu_kernels import HOPPER

BLACKWELL = Gpu((10, 0), cudnn=91900)
HALF, SINGLE = torch.bfloat16, torch.float32


def problem(dtype: torch.dtype = HALF, widths: tuple[int, int] = (128, 128), **others: Any) -> Problem:
    return Problem(dtype, *widths, **others)


CHOICES: dict[str, tuple[Gpu, Problem, Kernel]] = {
    "Hopper": (HOPPER, problem(), "cudnn"),
    "Blackwell": (BLACKWELL, problem(), "cudnn"),
    "Blackwell Ultra": (Gpu((10, 3), 91900), problem(), "cudnn"),
    "float16": (HOPPER, problem(torch.float16), "cudnn"),
    "narrow values": (HOPPER, problem(widths=(64, 40)), "cudnn"),
    "latent attention": (HOPPER, problem(widths=(192, 128)), "cudnn"),
    "wide heads": (HOPPER, problem(widths=(256, 256)), "flash"),
    "wider than latent": (HOPPER, problem(widths=(192, 136)), "flash"),
    "documents": (HOPPER, problem(documents=True), "flash"),
    "window": (HOPPER, problem(window=True), "flash"),
    "more keys than queries": (HOPPER, problem(square=False), "flash"),
    "odd lengths": (HOPPER, problem(even=False), "flash"),
    "old cuDNN": (Gpu((9, 0), 91500), problem(), "flash"),
    "no cuDNN": (Gpu((9, 0)), problem(), "flash"),
    "deterministic": (Gpu((9, 0), 91900, deterministic=True), problem(), "flash"),
    "Ampere": (Gpu((8, 0), 91900), problem(), "flash"),
    "Ada": (Gpu((8, 9), 91900), problem(widths=(192, 192)), "flash"),
    "Ada, little shared memory": (Gpu((8, 9), 91900), problem(widths=(200, 200)), "efficient"),
    "Ada, widest": (Gpu((8, 9), 91900), problem(widths=(256, 256)), "flash"),
    "consumer Blackwell": (Gpu((12, 0), 91900), problem(widths=(224, 64)), "efficient"),
    "beyond flash": (HOPPER, problem(widths=(264, 264)), "efficient"),
    "documents out of order": (HOPPER, problem(documents=True, in_order=False), "efficient"),
    "float32": (HOPPER, problem(SINGLE), "efficient"),
    "float32, documents, window": (HOPPER, problem(SINGLE, documents=True, window=True), "efficient"),
    "Turing": (Gpu((7, 5)), problem(torch.float16), "efficient"),
    "bfloat16 on Turing": (Gpu((7, 5)), problem(HALF), "plain"),
    "float64": (HOPPER, problem(torch.float64), "plain"),
    "soft cap": (HOPPER, problem(softcap=True), "plain"),
    "soft cap, float32": (HOPPER, problem(SINGLE, softcap=True), "plain"),
    "FA3": (Gpu((9, 0), 91900, "FA3"), problem(widths=(256, 256)), "flash"),
    "FA3, soft cap": (Gpu((9, 0), 91900, "FA3"), problem(softcap=True), "plain"),
    "FA3, float32": (Gpu((9, 0), 91900, "FA3"), problem(SINGLE), "efficient"),
    # The operators of FlashAttention-2 are gone where another is activated.
    "FA3 on Ampere": (Gpu((8, 0), 91900, "FA3"), problem(), "efficient"),
    "FA3 on Blackwell": (Gpu((10, 0), 91900, "FA3"), problem(), "cudnn"),
    "one's own": (Gpu((9, 0), 91900, "mine"), problem(), "flash"),
    "one's own, wide": (Gpu((9, 0), 91900, "mine"), problem(widths=(264, 264)), "efficient"),
    "FA4": (Gpu((10, 0), 91900, "FA4"), problem(documents=True), "flash"),
    "FA4, latent": (Gpu((10, 0), 91900, "FA4"), problem(widths=(192, 128)), "flash"),
    "FA4, wide": (Gpu((10, 0), 91900, "FA4"), problem(widths=(256, 256)), "efficient"),
    "FA4 on Hopper": (Gpu((9, 0), 91900, "FA4"), problem(widths=(256, 256)), "flash"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choice(name: str) -> None:
    device, asked, kernel = CHOICES[name]
    assert kernel_of(device, asked) == kernel


def test_each_row_is_chosen_by_a_case() -> None:
    chosen = {
        next(i for i, (_, takes) in enumerate(TABLE) if takes(device, asked))
        for device, asked, _ in CHOICES.values()
    }
    assert chosen == set(range(len(TABLE)))


@pytest.mark.parametrize(
    ("kernel", "device", "widths", "padded"),
    [
        ("flash", HOPPER, (192, 128), (192, 192)),
        ("flash", HOPPER, (12, 20), (24, 24)),
        ("flash", Gpu((10, 0), 91900, "FA4"), (192, 128), (192, 128)),
        ("flash", Gpu((10, 0), 91900, "FA4"), (100, 64), (104, 104)),
        ("flash", Gpu((9, 0), 91900, "FA4"), (192, 128), (192, 192)),
        ("cudnn", HOPPER, (192, 128), (192, 128)),
        ("efficient", HOPPER, (12, 20), (16, 24)),
    ],
)
def test_widths(kernel: Kernel, device: Gpu, widths: tuple[int, int], padded: tuple[int, int]) -> None:
    assert widths_of(kernel, device, problem(widths=widths)) == padded


def test_the_device_is_read_from_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's settings decide: kernels of SDPA, determinism, an activated flash kernel."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    q: Any = SimpleNamespace(is_cuda=True, device="cuda")
    assert device_of(q) == Gpu((9, 0), 91900)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert device_of(q) == Gpu((9, 0))
    with monkeypatch.context() as activated:
        activated.setattr(kernel_table, "current_flash_attention_impl", lambda: "FA3")
        assert device_of(q) == Gpu((9, 0), 91900, "FA3")
    torch.use_deterministic_algorithms(True)
    try:
        assert device_of(q) == Gpu((9, 0), 91900, deterministic=True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert not device_of(q).deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch.version, "cuda", None)  # the numbers of MIOpen are others
    assert device_of(q).cudnn == 0


def test_the_planner_sees_flash_attention_2() -> None:
    device = device_of(torch.empty(1, device="meta"))
    assert kernel_of(device, problem()) == "flash"
    assert device.flash == "FA2"
