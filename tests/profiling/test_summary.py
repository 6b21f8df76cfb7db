"""A trace tells time and memory, where they are known."""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, record_function

from compose.profiling.summary import CATEGORIES, KINDS, allocations, as_text, peak, time_shares
from compose.profiling.trace import Trace, step_span


def _traced(tmp_path: Path, work: Callable[[], None]) -> Trace:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded, step_span(1):
        work()
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    return Trace(json.loads((tmp_path / "trace.json").read_text()))


def _products() -> None:
    x, w = torch.ones(512, 1024), torch.ones(1024, 1024, requires_grad=True)
    (x @ w).sum().backward()


def _attention(backend: SDPBackend) -> None:
    q, k, v = (torch.ones(1, 4, 1024, 32, requires_grad=True) for _ in range(3))
    with sdpa_kernel(backend):
        F.scaled_dot_product_attention(q, k, v).sum().backward()


def _optimizer() -> None:
    with record_function("compose::optimizer"):
        torch.mm(torch.ones(1024, 1024), torch.ones(1024, 1024))


def _data() -> None:
    with record_function("compose::data"):
        time.sleep(0.2)
        torch.mm(torch.ones(512, 512), torch.ones(512, 512))


WORK: dict[str, tuple[Callable[[], None], str]] = {
    "products": (_products, "matmul"),
    "flash attention": (partial(_attention, SDPBackend.FLASH_ATTENTION), "attention"),
    "attention of products": (partial(_attention, SDPBackend.MATH), "attention"),
    "optimizer": (_optimizer, "optimizer"),
    "data": (_data, "data"),
    "python": (partial(time.sleep, 0.2), "idle"),
}


@pytest.mark.parametrize("name", WORK)
def test_known_work_is_classified(tmp_path: Path, name: str) -> None:
    work, kind = WORK[name]
    work()
    trace = _traced(tmp_path, work)
    shares = time_shares(trace)
    assert shares[kind] == pytest.approx(1, abs=1e-2) if kind == "idle" else shares[kind] > 0
    assert {r.label for r in trace.ranges if r.name == "aten::mm"} <= {kind}
    assert sum(shares.values()) == pytest.approx(1)
    if kind != "matmul":
        assert shares["matmul"] == 0
    if "attention" in name or kind == "matmul":  # in both passes
        kernels = [r for r in trace.ranges if r.name.startswith("aten::") and r.label == kind]
        assert {r.backward for r in kernels} == {False, True}


def test_text() -> None:
    shares = dict.fromkeys(KINDS, 0.0) | {"matmul": 0.9, "idle": 0.1}
    bytes_ = {category: 2**20 * number for number, category in enumerate(CATEGORIES)}
    good = {"seconds_per_step": 0.25, "time": shares}
    good |= {"memory": {"peak": 15 * 2**20, "at_peak": bytes_, "most": bytes_}}
    results = [{"rank": 0, **good}, {"rank": 3, "problem": "no room"}]
    assert as_text({"steps": [5, 7], "ranks": results}, Path("a/traces")).splitlines() == [
        "profile of steps 5 to 7, in a/traces",
        "  rank 3: not written: no room",
        "  time, %  s/step  matmul  attention  communication  optimizer  data  other  idle",
        "  rank 0    0.250    90.0        0.0            0.0        0.0   0.0    0.0  10.0",
        "  memory, MiB        all  weights  gradients  optimizer  activations  communication  other",
        "  rank 0, at peak  15.00     0.00       1.00       2.00         3.00           4.00   5.00",
        "    most of each             0.00       1.00       2.00         3.00           4.00   5.00",
    ]


def _event(name: str, start: float, end: float, cat: str = "cpu_op", **args: Any) -> dict[str, Any]:
    thread = 7 if cat == "kernel" else 1
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "tid": thread,
        "ts": start,
        "dur": end - start,
        "args": {key.replace("_", " "): value for key, value in args.items()},
    }


def _memory(time: float, address: int, size: int) -> dict[str, Any]:
    about = {"Addr": address, "Bytes": size, "Device Type": 1}
    return {"ph": "i", "name": "[memory]", "tid": 1, "ts": time, "args": about}


def test_the_time_of_a_thread() -> None:
    """Each moment counts once, for the innermost range; a product is what the range around it is."""
    events = [
        _event("ProfilerStep#1", 0, 100, "user_annotation"),
        _event("compose::data", 0, 20, "user_annotation"),
        _event("aten::mm", 5, 9),
        _event("aten::linear", 20, 40),
        _event("aten::mm", 22, 37),
        _event("a range", 40, 50, "user_annotation"),
        _event("aten::add", 42, 45),
        _event("aten::scaled_dot_product_attention", 50, 60),
        _event("aten::bmm", 51, 55),
        _event("autograd::engine::evaluate_function: MmBackward0", 60, 70),
        _event("aten::mm", 62, 66),
        _event("compose::optimizer", 70, 78, "user_annotation"),
        _event("aten::mm", 71, 75),
        _event("c10d::allreduce_", 78, 90),
        _event("aten::mm", 1, 99) | {"tid": 2},
        _event("ProfilerStep#2", 110, 120, "user_annotation"),
        _event("aten::mm", 130, 140),
    ]
    expected = {
        "matmul": 15 + 4,
        "attention": 10,
        "communication": 12,
        "optimizer": 8,
        "data": 20,
        "other": 5 + 3 + 6,
        "idle": 7 + 10 + 10 + 10,
    }
    shares = time_shares(Trace({"traceEvents": events}))
    assert {kind: 120 * share for kind, share in shares.items()} == pytest.approx(expected)


def test_kernels_of_a_gpu() -> None:
    """Overlapping kernels count once, computation before communication."""
    events = [
        _event("ProfilerStep#4", 0, 90, "user_annotation"),
        _event("compose::data", 0, 6, "user_annotation"),
        _event("aten::mm", 10, 11, External_id=1),
        _event("autograd::engine::evaluate_function: X", 12, 15, External_id=8),
        _event("aten::_scaled_dot_product_flash_attention_backward", 13, 14, External_id=2),
        _event("compose::optimizer", 15, 16, "user_annotation", External_id=3),
        _event("aten::mm", 15, 16, External_id=4),
        _event("fsdp::all_gather_copy_in", 17, 18, External_id=5),
        _event("Memcpy HtoD", 2, 4, "gpu_memcpy", External_id=9),
        _event("sm90_gemm", 10, 20, "kernel", External_id=1),
        _event("flash_bwd", 20, 28, "kernel", External_id=2),
        _event("ncclDevKernel_AllGather", 15, 40, "kernel", External_id=5),  # 12 of it alone
        _event("nvjet", 50, 60, "kernel", External_id=4),
        _event("copies", 60, 61, "kernel", External_id=5),
        _event("triton_poi_fused_add", 70, 80, "kernel"),
        _event("triton_tem_fused_mm", 80, 85, "kernel"),
        _event("fmha_cutlassF", 95, 100, "kernel"),
    ]
    shares = time_shares(Trace({"traceEvents": events}, gpu=True))
    expected = {
        "matmul": 15,
        "attention": 13,
        "communication": 13,
        "optimizer": 10,
        "data": 4,
        "other": 12,
        "idle": 33,
    }
    assert {kind: 100 * share for kind, share in shares.items()} == pytest.approx(expected)


def test_memory_of_a_gpu() -> None:
    """Memory from before that is freed counts until then; the host's does not count; a collective's
    output is an activation if it is kept for backward."""
    host = _memory(3, 1, 1000)
    host["args"]["Device Type"] = 0
    events = [
        _event("ProfilerStep#1", 0, 90, "user_annotation"),
        _event("kernel", 1, 2, "kernel"),
        _event("aten::mm", 1, 4),
        host,
        _memory(2, 100, 64),
        _memory(5, 50, -16),
        _event("_c10d_functional::all_gather_into_tensor", 5.5, 5.9),
        _memory(5.6, 600, 128),
        _memory(5.7, 700, 256),
        _memory(5.8, 700, -256),
        _event("FSDP::pre_forward", 6, 9, "user_annotation"),
        _memory(7, 200, 32),
        _event("autograd::engine::evaluate_function: MmBackward0", 10, 20),
        _memory(11, 300, 300),
        _memory(12, 100, -64),
        _memory(13, 400, 1),
        _memory(14, 400, -1),
        _event("FSDP::post_backward_reduce (layers.0)", 15, 19, "user_annotation"),
        _memory(16, 500, 4),
        _memory(17, 300, -300),
    ]
    result = allocations(Trace({"traceEvents": events}, gpu=True), [])
    expected = dict.fromkeys(CATEGORIES, 0) | {"weights": 10, "activations": 64 + 128}
    assert peak(result, {"weights": 10, "other": 20}) == {
        "peak": 10 + 4 + 64 + 128 + 32 + 300,
        "at_peak": expected | {"other": 4, "communication": 32, "gradients": 300},
        "most": expected | {"other": 20, "communication": 256, "gradients": 300},
    }
