"""A router's product on a GPU is as exact as one of float32; experts' products equal the loop's."""

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from compose.ops import layers as module
from compose.ops import operators
from compose.ops.layers import RMSNorm, grouped_mm, wide_linear
from models.layers import moe


def results(tokens: int, dtype: torch.dtype, gpu: bool) -> tuple[list[Tensor], int]:
    """Logits, their bytes kept for backward, and the gradients of input, weight and bias."""
    torch.manual_seed(0)
    given = [torch.randn(tokens, 40), torch.randn(6, 40), torch.randn(6)]
    weight = torch.randn(tokens, 6)
    inputs = [x.bfloat16().to(dtype).requires_grad_() for x in given]
    kept: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)

    def product(left: Tensor, right: Tensor) -> Tensor:  # a CPU has none to another type
        assert left.dtype == right.dtype == torch.bfloat16
        return left.float() @ right.float()

    with (
        mock.patch.object(operators, "device_of", return_value="cuda" if gpu else "cpu"),
        mock.patch.object(module, "_to_float32", product),
    ):
        with hooks:
            logits = wide_linear(*inputs)
        gradients = torch.autograd.grad((logits * weight.to(logits.dtype)).sum(), inputs)
    return [logits, *gradients], sum(x.nbytes for x in kept if x.dtype == torch.float32)


@pytest.mark.parametrize("tokens", [0, 1, 300])
def test_is_as_exact_as_in_float32(tokens: int) -> None:
    exact, _ = results(tokens, torch.float64, gpu=False)
    plain, kept = results(tokens, torch.bfloat16, gpu=False)
    result, fewer = results(tokens, torch.bfloat16, gpu=True)
    assert result[0].dtype == torch.float32
    torch.testing.assert_close(result[0], exact[0].float(), rtol=1e-5, atol=1e-5)
    for value, other, want in zip(result[1:], plain[1:], exact[1:], strict=True):
        assert value.dtype == torch.bfloat16
        error, least = ((x.double() - want).norm() for x in (value, other))
        assert error <= 1.01 * least, "rounding to bfloat16 is all that is lost"
    assert fewer < kept or not tokens, "no copy in float32 is kept"


def test_float32_weights_keep_their_bits() -> None:
    rows, weight = torch.randn(3, 8).bfloat16(), torch.randn(5, 8)
    with mock.patch.object(operators, "device_of", return_value="cuda"):
        result = wide_linear(rows, weight)
    assert torch.equal(result, rows.float() @ weight.t())


def test_a_norm_of_one_token_has_gradients() -> None:
    x, norm, expected = torch.randn(8, requires_grad=True), RMSNorm(8, eps=1e-6), nn.RMSNorm(8, 1e-6)
    pairs = [torch.autograd.grad(one(x).square().sum(), (x, one.weight)) for one in (norm, expected)]
    torch.testing.assert_close(*pairs)


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0]])
def test_grouped_mm_equals_the_loop_bitwise(counts: list[int]) -> None:
    torch.manual_seed(0)
    given = torch.tensor(counts)
    rows = torch.randn(sum(counts), 7, requires_grad=True)
    weight = torch.randn(4, 5, 7, requires_grad=True)
    result, expected = grouped_mm(rows, weight, given), moe.grouped_mm(rows, weight, given)
    assert torch.equal(result, expected)
    grads = torch.randn_like(result)
    for one, other in zip(
        torch.autograd.grad(result, (rows, weight), grads),
        torch.autograd.grad(expected, (rows, weight), grads),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_grouped_mm_is_an_operator_as_pytorch_wants_it() -> None:
    rows = torch.randn(9, 7, requires_grad=True)
    weight = torch.randn(4, 5, 7, requires_grad=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(grouped_mm, (rows, weight, torch.tensor([3, 0, 5, 1])), test_utils=tests)
