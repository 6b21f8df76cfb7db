"""The loop over experts as one operator: a compiled graph gets what the loop gives."""

import pytest
import torch

from compose.ops.layers import grouped_mm as operator
from models.layers.moe import grouped_mm


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0]])
def test_equals_the_loop_bitwise(counts: list[int]) -> None:
    torch.manual_seed(0)
    given = torch.tensor(counts)
    rows = torch.randn(sum(counts), 7, requires_grad=True)
    weight = torch.randn(4, 5, 7, requires_grad=True)
    found, expected = operator(rows, weight, given), grouped_mm(rows, weight, given)
    assert torch.equal(found, expected)
    grads = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, (rows, weight), grads),
        torch.autograd.grad(expected, (rows, weight), grads),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_is_an_operator_as_pytorch_wants_it() -> None:
    rows = torch.randn(9, 7, requires_grad=True)
    weight = torch.randn(4, 5, 7, requires_grad=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, (rows, weight, torch.tensor([3, 0, 5, 1])), test_utils=tests)
