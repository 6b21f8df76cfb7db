"""Kernels of a device, each run once forward and backward and held against float64.

A kernel passes if its result is about as near to float64 as plain PyTorch in the kernel's own type is.
The bound is never a fixed number.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from compose.ops import attention as attention_operator
from compose.ops import kernel_table
from compose.ops.attention import AttentionOptions, attention_forward, tensors_of
from compose.ops.batch import Documents
from compose.ops.cross_entropy import cross_entropy
from compose.ops.layers import rms_norm
from compose.proof.one_process import PlainAttention
from models.layers.moe import grouped_mm

Figures = dict[str, Any]
Work = Callable[[torch.device], Figures | None]
SLACK = 3.0
"""How many times the error of plain PyTorch in the same type is allowed."""
FLOOR = 1e-6
"""An error of float32 that is always allowed: sums in another order."""


class Skipped(Exception):
    """The path cannot run here, for a reason of one line."""


class Heads(NamedTuple):
    """The shape of attention: tokens, heads of queries and of keys, widths of keys and of values."""

    length: int = 256
    heads: int = 4
    groups: int = 4
    k: int = 64
    v: int = 64


def compared(
    kernel: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    given: Sequence[Tensor],
    dtype: torch.dtype,
) -> Figures:
    """Run both in ``dtype``, and ``plain`` in float64; AssertionError: the kernel is too far off.

    Args:
        kernel: Takes the tensors and returns one.
        plain: The same by plain PyTorch.
        given: Tensors in float64; each gets a gradient.
        dtype: The type of the kernel.

    Returns:
        The largest relative error of the result and the gradients, and plain PyTorch's own.
    """
    torch.manual_seed(1)
    seed = torch.randn_like(plain(*given))

    def run(function: Callable[..., Tensor], kind: torch.dtype) -> list[Tensor]:
        # The values of every run are those that the kernel's type can hold.
        inputs = [x.to(dtype).to(kind).detach().requires_grad_() for x in given]
        out = function(*inputs)
        return [out, *torch.autograd.grad(out, inputs, seed.to(dtype).to(out.dtype))]

    exact, coarse, result = run(plain, torch.float64), run(plain, dtype), run(kernel, dtype)
    figures = {"error": 0.0, "plain": 0.0}
    for number, (one, other, right) in enumerate(zip(result, coarse, exact, strict=True)):
        size = right.norm() + 1e-30
        error, rounding = (((x.double() - right).norm() / size).item() for x in (one, other))
        figures = {"error": max(figures["error"], error), "plain": max(figures["plain"], rounding)}
        what = f"gradient {number}" if number else "the result"
        assert error <= SLACK * rounding + FLOOR, (
            f"{what} is {error:.1e} away from float64, and plain PyTorch in"
            f" {_name(dtype)} is {rounding:.1e} away"
        )
    return figures


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def qkv(shape: Heads, device: torch.device, rows: int = 2) -> list[Tensor]:
    """Return queries, keys and values in float64, (B, L, heads, width)."""
    torch.manual_seed(0)
    widths = ((shape.heads, shape.k), (shape.groups, shape.k), (shape.groups, shape.v))
    # Drawn on the CPU: a failure on one device can be repeated on another.
    return [torch.randn(rows, shape.length, *width).double().to(device) for width in widths]


def plain(
    q: Tensor, k: Tensor, v: Tensor, window: int = 0, causal: bool = True, ids: Tensor | None = None
) -> Tensor:
    """Return attention by its definition, (B, L, H, V)."""
    shared = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(shared, 2) for x in (k, v))
    scores = torch.einsum("blhk,bshk->bhls", q, k) * q.shape[-1] ** -0.5
    places = torch.arange(q.shape[1], device=q.device)
    distance = places[:, None] - places
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    seen = seen & (distance < window) if window else seen
    if ids is not None:
        seen = seen & (ids[:, None] == ids)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bhls,bshv->blhv", weights, v)


# PyTorch's own kernels, called as they are.


def dense(backend: SDPBackend, shape: Heads, dtype: torch.dtype, device: torch.device) -> Figures:
    """Causal attention by one kernel of SDPA."""

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        shared = shape.heads != shape.groups
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        return out.transpose(1, 2)

    try:
        return compared(kernel, plain, qkv(shape, device), dtype)
    except RuntimeError as error:
        if "No available kernel" in str(error):
            raise Skipped(f"torch {torch.__version__} has no such kernel here") from None
        raise


def flash(shape: Heads, window: int, lengths: Sequence[int], device: torch.device) -> Figures:
    """The flash kernel by its own operator: dense, or rows of several lengths laid end to end."""
    given = qkv(shape, device, rows=1)
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int() if lengths else None
    ids = None
    if lengths:
        ids = torch.repeat_interleave(torch.tensor(lengths, device=device))

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x[0] if lengths else x for x in (q, k, v))
        longest = max(lengths, default=shape.length)
        left = window - 1 if window else -1
        out, *_ = torch.ops.aten._flash_attention_forward(
            *rows,
            ends,
            ends,
            longest,
            longest,
            0.0,
            True,
            False,
            window_size_left=left,
            window_size_right=0,
        )
        return out[None] if lengths else out

    return compared(kernel, partial(plain, window=window, ids=ids), given, torch.bfloat16)


def cpu_flash(dtype: torch.dtype, device: torch.device) -> Figures:
    """The CPU's flash kernel."""

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, True)
        return out.transpose(1, 2)

    return compared(kernel, plain, qkv(Heads(), device), dtype)


def grouped(counts: Sequence[int], device: torch.device) -> Figures:
    """Products of experts with so many rows each."""
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), 64).double().to(device)
    weights = torch.randn(len(counts), 96, 64).double().to(device)
    number = torch.tensor(counts, device=device)

    def loop(x: Tensor, w: Tensor) -> Tensor:
        parts = x.split(list(counts))
        return torch.cat([part @ one.T for part, one in zip(parts, w, strict=True)])

    return compared(lambda x, w: grouped_mm(x, w, number), loop, (rows, weights), torch.bfloat16)


def scaled(rowwise: bool, device: torch.device) -> Figures:
    """A product in float8, against float64 of the same rounded factors; it has no backward."""
    torch.manual_seed(0)
    a, b = (torch.randn(n, 64).to(device) for n in (128, 96))
    # One scale serves a row, or all rows.
    largest = [x.abs().amax(1, keepdim=True) if rowwise else x.abs().max() for x in (a, b)]
    scales = [each / torch.finfo(torch.float8_e4m3fn).max for each in largest]
    small = [(x / s).to(torch.float8_e4m3fn) for x, s in zip((a, b), scales, strict=True)]
    left, right = (x.double() * s.double() for x, s in zip(small, scales, strict=True))
    result = torch._scaled_mm(
        small[0], small[1].T, scales[0], scales[1].T if rowwise else scales[1], out_dtype=torch.bfloat16
    )
    exact = left @ right.T
    error, rounding = (
        ((x.double() - exact).norm() / exact.norm()).item() for x in (result, exact.bfloat16())
    )
    assert error <= SLACK * rounding, (
        f"the product is {error:.1e} away from float64, and bfloat16 {rounding:.1e}"
    )
    return {"error": error, "plain": rounding}


def norm(dtype: torch.dtype, device: torch.device) -> Figures:
    """RMSNorm as models call it."""
    torch.manual_seed(0)
    given = [torch.randn(4, 32, 256).double().to(device), torch.rand(256).double().to(device) + 0.5]

    def by_definition(x: Tensor, weight: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y = x.to(wide)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
        return (y * weight.to(wide)).to(x.dtype)

    def as_called(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, (256,), weight, 1e-5)

    return compared(as_called, by_definition, given, dtype)


def loss(dtype: torch.dtype, device: torch.device) -> Figures:
    """Cross-entropy of a large vocabulary."""
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 64, 5000).double().to(device), torch.randint(5000, (2, 64))
    targets = targets.to(device)

    def by_definition(x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32)).flatten(0, 1)
        return F.cross_entropy(wide, targets.flatten(), reduction="sum")

    return compared(lambda x: cross_entropy(x, targets), by_definition, (logits,), dtype)


def adamw(implementation: str, device: torch.device) -> Figures:
    """Three steps of one of torch's AdamWs, against the same in float64."""

    def trained(kind: torch.dtype, fused: bool = False, foreach: bool = False) -> Tensor:
        torch.manual_seed(0)
        start, *gradients = (torch.randn(1000).to(device, kind) for _ in range(4))
        weight = torch.nn.Parameter(start)
        optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1, fused=fused, foreach=foreach)
        for gradient in gradients:
            weight.grad = gradient
            optimizer.step()
        return weight.detach().double()

    exact = trained(torch.float64)
    plainly = trained(torch.float32)
    error, rounding = (
        ((x - exact).norm() / exact.norm()).item()
        for x in (trained(torch.float32, **{implementation: True}), plainly)
    )
    assert error <= SLACK * rounding + FLOOR, (
        f"the weights are {error:.1e} away from float64, and a loop's {rounding:.1e}"
    )
    return {"error": error, "plain": rounding}


# Attention as models call it: by the kernel that compose chooses.


def chosen(
    shape: Heads,
    dtype: torch.dtype,
    device: torch.device,
    *,
    options: AttentionOptions | None = None,
    documents: bool = False,
    sinks: bool = False,
    ring: bool = False,
    kernel: str = "",
) -> Figures:
    """The operator of compose.attention; with ``ring``, for the queries of one of two ranks.

    It runs by the kernel that the table chooses, or by the one that is named.
    """
    options = options or AttentionOptions()
    # A quarter of it is a multiple of 128, as cuDNN's kernel needs.
    shape = shape if device.type == "cpu" else shape._replace(length=512)
    given = qkv(shape, device)
    starts = (shape.length // 4, 3 * shape.length // 4) if ring else (0,)
    ids = (torch.rand(2, shape.length) < 0.02).long().cumsum(1) if documents else None
    result = None if ids is None else Documents(ids, device)
    size = shape.length // (4 if ring else 1)
    places = torch.cat([torch.arange(first, first + size) for first in starts]).to(device)
    extra = [torch.randn(shape.heads).double().to(device)] if sinks else []

    def run(plainly: bool, q: Tensor, k: Tensor, v: Tensor, *of_heads: Tensor) -> Tensor:
        rows, where = (q, (0,)) if plainly else (q[:, places], starts)
        others = (*tensors_of(result), *(of_heads or (None,)), where, (0,), *options.given(q))
        with PlainAttention() if plainly else nullcontext():
            out, _ = attention_forward(rows, k, v, *others)
        return out[:, places] if plainly else out

    ran: set[str] = set()

    def kernel_of(of: kernel_table.Gpu, problem: kernel_table.Problem) -> str:
        result = kernel or kernel_table.kernel_of(of, problem)
        ran.add(result)
        if not any(name == result and takes(of, problem) for name, takes in kernel_table.TABLE):
            raise Skipped(f"the {result} kernel is not for this")
        return result

    with mock.patch.object(attention_operator, "kernel_of", kernel_of):
        figures = compared(partial(run, False), partial(run, True), [*given, *extra], dtype)
    return {**figures, "kernel": " and ".join(sorted(ran)) or None}


HALVES = (torch.bfloat16, torch.float16)
GQA, WIDE, LATENT = Heads(groups=1), Heads(k=256, v=256), Heads(k=192, v=128)
UNEVEN, EMPTY = (5, 40, 16, 3), (0, 48, 0, 16)


def kernels(kind: str) -> Iterator[tuple[str, Work]]:
    """Yield PyTorch's kernels for a type of device, by name."""
    if kind == "cuda":
        backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        shapes = {"dense": Heads(), "gqa": GQA, "K 256": WIDE, "K 192 V 128": LATENT}
        for name, backend in backends.items():
            for what, shape in shapes.items():
                yield f"{name} {what}", partial(dense, backend, shape, torch.bfloat16)
        yield "flash float16", partial(dense, backends["flash"], Heads(), torch.float16)
        efficient = partial(dense, SDPBackend.EFFICIENT_ATTENTION, Heads(), torch.float32)
        yield "efficient float32", efficient
        lengths = (100, 3, 153)
        yield "flash operator", partial(flash, Heads(), 0, ())
        yield "flash window", partial(flash, GQA, 50, ())
        yield "flash varlen", partial(flash, Heads(), 0, lengths)
        yield "flash varlen, gqa, window", partial(flash, GQA, 50, lengths)
        yield "flash varlen K 256", partial(flash, WIDE, 0, lengths)
    else:
        for dtype in (torch.float32, torch.bfloat16):
            yield f"flash {_name(dtype)}", partial(cpu_flash, dtype)
    yield "grouped_mm uneven", partial(grouped, UNEVEN)
    yield "grouped_mm empty", partial(grouped, EMPTY)
    yield "scaled_mm tensorwise", partial(scaled, False)
    yield "scaled_mm rowwise", partial(scaled, True)
    for dtype in (torch.float32, *HALVES):
        yield f"rms_norm {_name(dtype)}", partial(norm, dtype)
        yield f"cross_entropy {_name(dtype)}", partial(loss, dtype)
    for implementation in ("fused", "foreach"):
        yield f"adamw {implementation}", partial(adamw, implementation)


def attentions(kind: str) -> Iterator[tuple[str, Work]]:
    """Yield the kinds of attention that models have, by name, in each type, and by each kernel."""
    kinds: dict[str, Callable[..., Figures]] = {
        "full": partial(chosen, Heads()),
        "gqa": partial(chosen, GQA),
        "not causal": partial(chosen, Heads(), options=AttentionOptions(causal=False)),
        "window": partial(chosen, GQA, options=AttentionOptions(window=50)),
        "documents": partial(chosen, Heads(), documents=True),
        "documents, window": partial(
            chosen, Heads(), options=AttentionOptions(window=50), documents=True
        ),
        "sinks": partial(chosen, GQA, sinks=True),
        "soft cap": partial(chosen, Heads(), options=AttentionOptions(softcap=20.0)),
        "K 40": partial(chosen, Heads(k=40, v=40)),
        "K 192 V 128": partial(chosen, LATENT),
        "K 256": partial(chosen, WIDE),
        "ring": partial(chosen, Heads(), ring=True),
        "ring, documents": partial(chosen, Heads(), documents=True, ring=True),
        "ring, window": partial(chosen, Heads(), options=AttentionOptions(window=50), ring=True),
    }
    for name, work in kinds.items():
        for dtype in (torch.float32, *HALVES):
            yield f"{name} {_name(dtype)}", partial(_in_type, work, dtype)
    for kernel, names in BY_KERNEL.items() if kind == "cuda" else ():
        for name in names:
            work = partial(kinds[name], kernel=kernel)
            yield f"{name} bfloat16 by {kernel}", partial(_in_type, work, torch.bfloat16)


MASKED = ("window", "documents", "documents, window", "sinks", "ring, documents", "ring, window")
BY_KERNEL = {
    "cudnn": ("full", "gqa", "not causal", "ring", "K 192 V 128"),
    "flash": ("full", "gqa", "not causal", "ring", "K 40", "K 192 V 128", "K 256", *MASKED),
    "efficient": ("full", "gqa", "not causal", "ring", "K 40", "K 192 V 128", "K 256", *MASKED),
}


def _in_type(work: Callable[..., Figures], dtype: torch.dtype, device: torch.device) -> Figures:
    return work(dtype=dtype, device=device)
