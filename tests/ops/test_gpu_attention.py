"""The kernels of GPUs are called as PyTorch's operators want it, and give what the definition does."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from compose import AttentionOptions, Documents
from compose.ops import gpu_attention, kernel_table
from compose.ops.attention import attention_forward, gradients, merged, tensors_of
from compose.ops.attention_layout import task_of
from compose.ops.kernel_table import Gpu
from compose.planner.recorder import Recorder
from tests.support.gpu_kernels import AMPERE, HOPPER, on_cpu, play
from tests.support.plain_attention import plain

HALF, SINGLE = torch.bfloat16, torch.float32


class _Calls(TorchDispatchMode):
    """The names of the operators of attention that ran, with their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "attention" in func.overloadpacket.__name__:
            self.calls.append((func.overloadpacket.__name__, result))
        return result


class _WithoutGuards(TorchFunctionMode):
    """Methods become operators: without CUDA some methods refuse even a fake tensor of it."""

    def __init__(self, host: Any) -> None:
        """Take the numbers of the one tensor in host memory that may be read."""
        super().__init__()
        self.host = host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.numpy:
            return self.host
        if func not in (Tensor.__getitem__, Tensor.__setitem__):
            name = getattr(func, "__name__", "")
            guarded = name in ("contiguous", "new_zeros", "new_full", "copy_", "__invert__")
            name = name.replace("__invert__", "bitwise_not")
            run = getattr(torch.ops.aten, name) if guarded else func
            return run(*args, **(kwargs or {}))
        x, index = args[:2]
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in index:
            gap = x.ndim + 1 + index.count(None) - len(index)
            at = index.index(Ellipsis)
            index = (*index[:at], *[slice(None)] * gap, *index[at + 1 :])
        dim = 0
        for each in index:
            if isinstance(each, int):
                x, dim = x.select(dim, each), dim - 1
            elif each is None:
                x = x.unsqueeze(dim)
            elif each != slice(None):
                x = torch.ops.aten.slice(x, dim, each.start, each.stop)
            dim += 1
        return x if func is Tensor.__getitem__ else torch.ops.aten.copy_(x, args[2])


# By name: the device, the type, widths of keys and values, documents, window, starts of queries and of
# keys, the operator, and its calls in the forward.
FLASH, CUDNN = "_flash_attention", "_scaled_dot_product_cudnn_attention"


EFFICIENT = "_scaled_dot_product_efficient_attention"


PIECES = ((128, 384), (0, 128, 256, 384))


TRACED: dict[str, tuple[Gpu, torch.dtype, tuple[int, int], bool, int, Any, str, int]] = {
    "cudnn": (HOPPER, HALF, (64, 64), False, 0, None, CUDNN, 1),
    "cudnn, latent": (HOPPER, HALF, (192, 128), False, 0, None, CUDNN, 1),
    "cudnn, ring": (HOPPER, HALF, (64, 64), False, 0, PIECES, CUDNN, 6),
    "flash": (AMPERE, HALF, (64, 64), False, 0, None, FLASH, 1),
    "flash, latent": (AMPERE, HALF, (192, 128), False, 0, None, FLASH, 1),
    "flash, documents": (HOPPER, HALF, (64, 64), True, 0, None, FLASH, 1),
    "flash, window": (HOPPER, HALF, (64, 64), False, 100, None, FLASH, 1),
    "efficient": (HOPPER, SINGLE, (64, 64), False, 0, None, EFFICIENT, 1),
    "efficient, narrow": (HOPPER, SINGLE, (12, 20), False, 0, None, EFFICIENT, 1),
    "efficient, documents": (HOPPER, SINGLE, (64, 64), True, 0, None, EFFICIENT, 1),
    "efficient, window": (HOPPER, SINGLE, (64, 64), False, 100, None, EFFICIENT, 2),
    "efficient, ring": (HOPPER, SINGLE, (64, 64), False, 0, PIECES, EFFICIENT, 6),
    "efficient, float16": (Gpu((7, 5)), torch.float16, (64, 64), False, 0, None, EFFICIENT, 1),
}


@pytest.mark.parametrize("name", TRACED)
def test_traced_on_fake_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls have the right arguments, and results the right layout, by PyTorch's meta code."""
    device, kind, (width, values), documents, window, pieces, operator, times = TRACED[name]
    monkeypatch.setattr(kernel_table, "device_of", lambda q: device)
    length, heads, groups = 512, 6, 2
    starts = pieces or ((0,), (0,))
    ids = torch.arange(length).expand(2, -1) // 200
    extents = Documents(ids).extents if documents else None
    numbers = None if extents is None else extents.numpy()
    queries = length // 4 * len(starts[0]) if pieces else length
    with FakeTensorMode(allow_non_fake_inputs=True), _Calls() as seen, _WithoutGuards(numbers):
        bounds = torch.empty(2 * length + 1, dtype=torch.int32, device="cuda:0") if documents else None
        task = task_of((bounds, extents), starts, (True, window, 0.1, 0.0))
        q, k, v, grad = (
            torch.empty(2, n, h, w, dtype=kind, device="cuda:0")
            for n, h, w in (
                (queries, heads, width),
                (length, groups, width),
                (length, groups, values),
                (queries, heads, values),
            )
        )
        out, lse = merged(task, q, k, v)
        result = gradients(task, (grad, None), (q, k, v), (out.to(kind), lse))
    assert [called for called, _ in seen.calls] == (
        [f"{operator}{'_forward' if operator == FLASH else ''}"] * times
        + [f"{operator}_backward"] * times
    )
    made = seen.calls[0][1][0]  # tokens first, whatever the order of its dims
    assert (made if operator == FLASH else made.transpose(1, 2)).is_contiguous()
    assert out.shape == grad.shape
    assert (lse.shape, lse.dtype) == (q.shape[:-1], torch.float32)
    assert [x.shape for x in result] == [q.shape, k.shape, v.shape]
    assert all(x.is_contiguous() and x.device.type == "cuda" for x in result)


LAYOUTS = {
    "whole": ((0,), (0,)),
    "pieces of a ring": ((6, 18), (0, 6, 12, 18)),
    "pieces, all keys": ((6, 18), (0,)),
}


@pytest.mark.parametrize("widths", [(192, 128), (16, 12)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("device", "kind", "operator"),
    [(HOPPER, HALF, CUDNN), (AMPERE, HALF, FLASH), (HOPPER, SINGLE, EFFICIENT)],
    ids=["cudnn", "flash", "efficient"],
)
def test_values_narrower_than_keys(
    device: Gpu,
    kind: torch.dtype,
    operator: str,
    layout: str,
    widths: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With shared heads, sinks, and views of one tensor as a ring sends it: output and gradients."""
    width, values = widths
    torch.manual_seed(0)
    q_starts, k_starts = LAYOUTS[layout]
    places = torch.cat([torch.arange(a, a + (6 if len(q_starts) > 1 else 24)) for a in q_starts])
    q, both = (
        torch.randn(2, 24, *sizes, dtype=torch.float64) for sizes in ((4, width), (2, width + values))
    )
    sinks = torch.randn(4, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, both, sinks)]
    k, v = both[..., :width], both[..., width:]
    options = AttentionOptions()
    right = plain(q, k, v, None, sinks, options)[0][:, places]
    weights = torch.randn_like(right)
    calls: list[str] = []
    play(monkeypatch, device, kind)
    with on_cpu(calls):
        given = (None, None, sinks, q_starts, k_starts, *options.given(q))
        result, _ = attention_forward(q[:, places], k, v, *given)
        one = torch.autograd.grad((result * weights).sum(), inputs)
    other = torch.autograd.grad((right * weights).sum(), inputs)
    for here, there in zip((result, *one), (right, *other), strict=True):
        torch.testing.assert_close(here, there, atol=1e-11, rtol=1e-9)
    # cuDNN has no call with more keys than queries that ends with the same token.
    used = FLASH if operator == CUDNN and layout == "pieces, all keys" else operator
    assert calls
    assert all(name.startswith(used) for name in calls), calls


@pytest.mark.parametrize("window", [0, 1, 300, 4096])
@pytest.mark.parametrize("length", [512, 8192, 131072])
def test_a_mask_has_a_bounded_size(length: int, window: int) -> None:
    """Linear in the length at most: a tile has 64 queries, or a mask as large as masks may be."""
    q, k = (torch.empty(2, n, length, 64, device="meta") for n in (6, 2))
    bounds = torch.empty(2 * length + 1, dtype=torch.int32, device="meta")
    result = gpu_attention.EfficientParts(
        task_of((bounds, None), ((0,), (0,)), (True, window, 0.1, 0.0)), q, k, square=True
    )
    sizes = [(q1 - q0) * (k1 - k0) for (q0, q1), (k0, k1), _ in result.tiles]
    assert 2 * max(sizes) <= max(gpu_attention._MASK, 2 * 64 * length)
    assert sum(q1 - q0 for (q0, q1), *_ in result.tiles) == length
    assert len(sizes) <= length // 64


def test_rows_of_one_document_need_no_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then cuDNN is chosen. The number of documents is known to the host."""
    play(monkeypatch, HOPPER, HALF)
    q, k, v = (torch.randn(2, 16, 2, 8, dtype=torch.float64) for _ in range(3))
    for ids, operator in ((torch.zeros(2, 16), CUDNN), (torch.arange(32).view(2, 16) // 10, FLASH)):
        calls: list[str] = []
        with on_cpu(calls):
            result = attention_forward(
                q, k, v, *tensors_of(Documents(ids)), None, (0,), (0,), *AttentionOptions().given(q)
            )
        assert [name.removesuffix("_forward") for name in calls] == [operator]
        torch.testing.assert_close(result[0], plain(q, k, v, ids, None, AttentionOptions())[0])


@pytest.mark.parametrize("device", [HOPPER, AMPERE], ids=["hopper", "ampere"])
def test_documents_without_keys_here_take_a_mask(device: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a ring without causality has a part of the keys, and then those of the next rank."""
    play(monkeypatch, device, HALF)
    q, k, v = (torch.randn(2, 16, 2, 8, dtype=torch.float64) for _ in range(3))
    ids, options = torch.arange(32).view(2, 16) // 6, AttentionOptions(causal=False)
    given, calls, parts = tensors_of(Documents(ids)), list[str](), []
    with on_cpu(calls):
        for start in (0, 8):
            here = slice(start, start + 8)
            starts = ((0,), (start,))
            parts.append(
                attention_forward(
                    q[:, :8], k[:, here], v[:, here], *given, None, *starts, *options.given(q)
                )
            )
    assert calls == [EFFICIENT] * len(calls) != []
    weights = torch.stack([lse for _, lse in parts]).softmax(0)
    result = sum(out * weight[..., None] for (out, _), weight in zip(parts, weights, strict=True))
    torch.testing.assert_close(result, plain(q, k, v, ids, None, options)[0][:, :8])


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient", "efficient, window"])
def test_the_planner_counts_each_as_attention(
    name: str, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The FLOPs of the tokens that attend, 2 and 5 products; a mask is read once for all heads."""
    device, kind, (width, _), _, window, _, operator, times = TRACED[name]
    play(monkeypatch, device, kind)
    q, k, v, grad = (torch.empty(2, 512, n, width, dtype=kind, device="meta") for n in (6, 2, 2, 6))
    task, recorder = task_of((None, None), ((0,), (0,)), (True, window, 0.1, 0.0)), Recorder()
    out, lse = merged(task, q, k, v)
    with recorder if backward else nullcontext():
        if backward:
            gradients(task, (grad, None), (q, k, v), (out, lse))
    with nullcontext() if backward else recorder:
        if not backward:
            merged(task, q, k, v)
    works = [w for w in recorder.record_of.work if getattr(w, "kind", "") == "attention"]
    assert len(works) == times
    assert all(w.name.startswith(f"aten.{operator}") for w in works)  # type: ignore[union-attr]
    pairs = 256 * 256 + 256 * 355 if window else 512 * 513 / 2
    flops = sum(w.flops for w in works)  # type: ignore[union-attr]
    assert flops == 2 * (5 if backward else 2) * 2 * 6 * width * pairs
    if name == "efficient, window" and not backward:
        # Heads of keys and values are repeated for each head of queries; the mask is there once.
        tiles = [12 * (2 * 256 + 2 * n) * width + 12 * 256 + 256 * n for n in (256, 355)]
        assert sum(w.bytes for w in works) == pytest.approx(4 * sum(tiles), rel=1e-4)  # type: ignore[union-attr]
