"""Dropout in models of transformers: GPT-2, BERT and ViT, and where it cannot be tied."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compose import (
    ActivationCheckpoint,
    DropoutKey,
    Options,
    Parallel,
    Plan,
    Trial,
    apply,
    forward_backward,
    verify,
)
from compose.proof.report import Report
from tests.support.helpers import agreed, refusal, tier
from tests.support.pool import Pool, make_mesh
from tests.support.transformers_models import bert

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "attention_probs_dropout_prob": 0.1,
    "hidden_dropout_prob": 0.1,
}


def _gpt2(attention: str = "eager") -> tuple[nn.Module, Plan]:
    from transformers import GPT2Config, GPT2LMHeadModel

    make: Any = GPT2Config
    config = make(
        vocab_size=11,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=8,
        use_cache=False,
        attn_implementation=attention,
        bos_token_id=0,
        eos_token_id=0,
    )
    ends = ["transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head"]
    return GPT2LMHeadModel(config), Plan(
        shard=["transformer.h.*", ends], checkpoint=["transformer.h.*"]
    )


def _bert() -> tuple[nn.Module, Plan]:
    sizes = {"vocab_size": 11, "max_position_embeddings": 8, "num_labels": 11}
    model = bert("BertForTokenClassification", 0.1, **sizes, attn_implementation="eager")
    return model, Plan(checkpoint=["bert.encoder.layer.*"])


def _vit() -> tuple[nn.Module, Plan]:
    from transformers import ViTConfig, ViTForImageClassification

    make: Any = ViTConfig
    config = make(
        image_size=8, patch_size=4, num_channels=1, num_labels=3, attn_implementation="eager", **SIZES
    )
    return ViTForImageClassification(config), Plan(checkpoint=["vit.layers.*"])


MODELS = {"gpt2": _gpt2, "bert": _bert, "vit": _vit}


def _loss(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, -2), targets.flatten(), reduction="sum")


def _batch(name: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    if name == "vit":
        pixels = torch.randn(4, 1, 8, 8, generator=generator)
        return {"pixel_values": pixels, "targets": torch.arange(4) % 3}
    tokens = torch.randint(11, (4, 7), generator=generator)
    return {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:]}


def _proof(name: str, recompute: str) -> Report:
    torch.manual_seed(0)
    model, plan = MODELS[name]()
    parallel = Parallel(dp_shard=2)
    options = Options(parallel, activation_checkpoint=ActivationCheckpoint(recompute))  # type: ignore[arg-type]
    batches, trial = [_batch(name)] * 2, Trial(micro_batch=1, loss_function=_loss)
    return verify(model.train(), plan, make_mesh(parallel), batches, options, trial)


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        pytest.param(name, mode, marks=tier(slow=(name, mode) != ("gpt2", "full")))
        for name in MODELS
        for mode in ("none", "full")
    ],
)
def test_equals_one_process(pool: Pool, name: str, recompute: str) -> None:
    report = agreed(pool.run(_proof, 2, name, recompute))
    assert all(row.ok for row in report.rows), str(report)


def _refused() -> str:
    model, plan = _gpt2("sdpa")
    composition = apply(model, plan, make_mesh(Parallel(dp_shard=1)))
    return refusal(
        forward_backward, composition, _batch("gpt2"), loss_function=_loss, dropout=DropoutKey(0)
    )


def test_attention_that_drops_in_its_kernel(pool: Pool) -> None:
    assert pool.run(_refused, 1) == [
        "dropout: transformer.h.0.attn drops inside scaled_dot_product_attention, which takes no mask;"
        ' have it drop nothing, or use attn_implementation="eager" of transformers'
    ]
