"""Elementwise results on meta that are remembered, and the copies that kernels of a CPU make."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compose.planner.operator_figures import RememberedResults, casts, tensors_in
from compose.planner.record import Operator
from compose.planner.recorder import Recorder

aten: Any = torch.ops.aten


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "broadcast": (aten.add.Tensor, (_meta(3, 1, 5), _meta(4, 1))),
    "types": (aten.mul.Tensor, (_meta(3, 5, dtype=torch.bfloat16), _meta(3, 5))),
    "a whole number": (aten.mul.Tensor, (_meta(3, dtype=torch.int32), 2)),
    "a number with a fraction": (aten.mul.Tensor, (_meta(3, dtype=torch.int32), 2.0)),
    "a bool": (aten.add.Tensor, (_meta(3, dtype=torch.bool), True)),
    "transposed": (aten.logaddexp.default, (_meta(4, 3).t(), _meta(4, 3).t())),
    "part of a row": (aten.exp.default, (_meta(4, 6)[:, 1:4],)),
    "where": (aten.where.self, (_meta(4, 1, dtype=torch.bool), _meta(4, 3), _meta(3))),
    "compared": (aten.eq.Tensor, (_meta(4, 3), _meta(3))),
    "no elements": (aten.sigmoid.default, (_meta(0, 3),)),
    "a product": (aten.mm.default, (_meta(4, 3), _meta(3, 5))),
    "a list": (aten.cat.default, ([_meta(4, 3), _meta(2, 3)],)),
}


def test_as_computed() -> None:
    shapes = RememberedResults()
    for turn in range(2):
        for name, (func, args) in CASES.items():
            result, right = shapes.run(func, args, {}), func(*args)
            for what in ("shape", "dtype", "device"):
                assert getattr(result, what) == getattr(right, what), (name, turn)
            assert result.stride() == right.stride(), (name, turn)
    assert len(shapes._known) == len(CASES)


@pytest.mark.parametrize("name", CASES)
def test_each_result_has_its_own_memory(name: str) -> None:
    shapes, (func, args) = RememberedResults(), CASES[name]
    one, two = shapes.run(func, args, {}), shapes.run(func, args, {})
    given = [x.untyped_storage()._cdata for x in tensors_in(args)]
    assert len({*given, one.untyped_storage()._cdata, two.untyped_storage()._cdata}) >= 3


def test_what_writes_or_is_a_view_is_run_each_time() -> None:
    shapes, x = RememberedResults(), _meta(3, 4)
    for _ in range(2):
        assert shapes.run(aten.add_.Tensor, (x, 1.0), {}) is x
        view = shapes.run(aten.t.default, (x,), {})
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
        same = shapes.run(aten._unsafe_view.default, (x, [12]), {})  # its schema does not say so
        assert same.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert not shapes._known


def test_values_are_not_remembered() -> None:
    shapes = RememberedResults()
    for value in (1.0, 2.0):
        result = shapes.run(aten.mul.Tensor, (torch.ones(2), value), {})
        assert result.tolist() == [value, value]


def test_a_cpu_casts_before_it_adds() -> None:
    wide, narrow = torch.empty(6), torch.empty(6, dtype=torch.bfloat16)
    assert casts("add_", [wide, narrow], [wide], [wide]) == 6 * 4
    assert casts("add_", [narrow, wide], [narrow], [narrow]) == 2 * 6 * 4
    assert casts("add", [wide, wide], [], [wide]) == 0
    assert casts("mul", [wide, narrow], [narrow], [narrow]) == 6 * 4  # out=narrow, which is not read
    assert casts("mm", [wide, narrow], [], [wide]) == 0
    one: Tensor = torch.tensor(1.0)
    assert casts("mul", [narrow, one], [], [narrow]) == 0


def test_experts_are_products() -> None:
    """A product of experts and its two gradients: (experts, m, n, k), each of as many FLOPs."""
    recorder, bf16 = Recorder(), torch.bfloat16
    rows, weight = _meta(64, 32, dtype=bf16), _meta(4, 32, 48, dtype=bf16)
    grad, ends = _meta(64, 48, dtype=bf16), _meta(4, dtype=torch.int32)
    with recorder:
        torch.ops.aten._grouped_mm(rows, weight, offs=ends)
        torch.ops.aten._grouped_mm(grad, weight.transpose(1, 2), offs=ends)
        torch.ops.aten._grouped_mm(rows.t(), grad, offs=ends)
    work = [w for w in recorder.record_of.work if isinstance(w, Operator) and w.kind == "product"]
    assert [w.shape for w in work] == [(4, 16, 48, 32), (4, 16, 32, 48), (4, 32, 48, 16)]
    assert {w.flops for w in work} == {2 * 64 * 32 * 48}
