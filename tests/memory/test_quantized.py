"""Frozen weights in 8 or 4 bits: torchao's codes, gradients as with dequantized weights, every mesh."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from compose.build import fill_weights
from compose.memory.quantized import (
    Base,
    count_parameters,
    packed,
    quantize,
    quantized_layers,
    rounded,
)
from tests.support.faults import with_fault
from tests.support.helpers import Keys, agreed, make_job, prove_case, proved, refusals, tiered
from tests.support.mutation import mutated
from tests.support.pool import Pool
from tests.support.small_models import ATTENTION, QWEN, keys_of, lora

SIZES: Keys = {"model__dim": 64, "model__n_heads": 8, "model__n_kv_heads": 2, "model__hidden_dim": 192}
NF4, INT8 = lora(targets=ATTENTION, base="nf4"), lora(targets="all-linear", base="int8")


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_rows_are_those_of_torchao(base: Base) -> None:
    """Each row by itself, in as many bytes as is said."""
    from torchao.quantization import Int8Tensor, NF4Tensor, PerRow

    weight = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    weight[2] = 0
    rows, values = packed(weight, base), rounded(weight, base)
    assert rows.shape == (6, 132 if base == "int8" else 72)
    assert torch.equal(rows[1:4], packed(weight[1:4], base))
    assert not values[2].any()
    layer = torch.nn.Linear(128, 6)  # with values, as in a loop of a user's own
    layer.weight.data.copy_(weight)
    quantize(torch.nn.ModuleDict({"layer": layer}), ["layer"], base)
    assert torch.equal(layer.weight, rows)
    if base == "int8":
        assert torch.equal(values, Int8Tensor.from_hp(weight, PerRow()).dequantize())
    else:  # with scales of 8 bits
        theirs = NF4Tensor.from_tensor(weight, 64, 4).get_original_weight()
        assert float((values - theirs).norm() / values.norm()) < 0.01
        assert float((values - weight).norm() / weight.norm()) < 0.1


def _plain(quantized: Any, keys: Keys) -> Any:
    """The same model with plain weights: what the quantized one has dequantized."""
    model = make_job(1, **keys, model__lora__base="full").model.to_empty(device="cpu").double()
    weights = {n: layer.dequantized(torch.float64) for n, layer in quantized_layers(quantized).items()}
    model.load_state_dict({**quantized.state_dict(), **weights})
    return model


@pytest.mark.parametrize("base", ["int8", "nf4"])
@pytest.mark.parametrize("dora", [False, True])
def test_gradients_equal_those_with_dequantized_weights(base: Base, dora: bool) -> None:
    keys = SIZES | lora(targets="all-linear", dora=dora)
    job = make_job(1, **keys, model__lora__base=base)
    fill_weights(job.model, job, torch.device("cpu"))
    quantized: Any = job.model
    assert len(quantized_layers(quantized)) == 14
    for name, parameter in quantized.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.double()
        if name.endswith(".B"):
            parameter.data.normal_(std=0.1)
    plain = _plain(quantized, keys)
    tokens = torch.randint(257, (2, 17), generator=torch.Generator().manual_seed(1))
    losses = []
    for model in (quantized, plain):
        logits = model(tokens[:, :-1])
        losses.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        losses[-1].backward()
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), rel=1e-12)
    for (name, one), other in zip(quantized.named_parameters(), plain.parameters(), strict=True):
        assert one.requires_grad == other.requires_grad == (".lora." in name)
        if one.requires_grad:
            assert float((one.grad - other.grad).norm() / other.grad.norm()) < 1e-10, name
    assert count_parameters(quantized) == count_parameters(plain)


CASES = {
    "ds 3": SIZES | INT8,  # uneven shards
    "ds 2 precision__param bfloat16": SIZES | NF4,
    "pp 2 dr 2 zero 0": SIZES | NF4 | {"model__lora__dropout": 0.2},
    "ds 2 cp 2 zero 2": SIZES | INT8 | {"model__lora__dora": True},
    # Of the rows of wk and wv two ranks have none.
    "ds 4 model__n_heads 32 model__n_kv_heads 1 model__lora__rank 2 model__lora__dora true": SIZES
    | NF4,
    "ds 2 zero 1 activation_checkpoint__mode full": SIZES | NF4,
    "ds 2 parallel__offload cpu": SIZES | INT8,
    "ds 2 ep 2": QWEN | lora(targets=ATTENTION, base="int8"),
}


@pytest.mark.parametrize("case", tiered(CASES, CASES))
def test_equals_one_process(pool: Pool, case: str) -> None:
    ranks, keys = keys_of(CASES[case], case)
    report = proved(pool.run(prove_case, ranks, keys), case)
    assert "not proved" not in str(report)


@pytest.mark.slow
def test_rows_of_another_rank_are_seen(pool: Pool) -> None:
    """Every rank begins with the first rows."""
    place, old = "compose.weights:fill_from_rows", "local_region(parameter)[0]"
    fault = partial(mutated, place, old, "slice(0, len(local_tensor(parameter)))")
    ranks, keys = keys_of(SIZES | INT8, "ds 2")
    report = agreed(pool.run(with_fault, ranks, fault, keys))
    failed = {row.name for row in report.rows if not row.ok and row.quantity == "initial weight"}
    assert "layers.0.attention.wq.weight" in failed


REFUSED: list[tuple[Keys, str]] = [
    (
        INT8 | {"parallel__tp": 2, "parallel__dp_shard": 1},
        'parallel.tp: 2 does not go with model.lora.base = "int8"; use 1',
    ),
    (
        NF4 | {"compile__mode": "block"},
        'compile.mode: "block" does not go with model.lora.base = "nf4"; use "off"',
    ),
    (
        NF4 | {"precision__float8": "rowwise"},
        'precision.float8: "rowwise" does not go with model.lora.base = "nf4"; use "off"',
    ),
    (
        NF4 | {"model__hidden_dim": 90},
        'model.lora.base: "nf4" has a scale for each 64 inputs, and layers.0.feed_forward.w2 has 90;'
        ' use model.lora.base = "int8"',
    ),
    (
        {"model__lora__base": "int4"},
        'command line: model.lora.base: expected "full" | "int8" | "nf4", got "int4"',
    ),
]
test_refused = refusals(REFUSED, SIZES | {"parallel__dp_shard": 1})
