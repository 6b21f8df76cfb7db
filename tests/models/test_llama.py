"""Llama: equal to transformers' implementation, and FLOPs equal to what torch counts."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from compose.data.samples import random_batch
from models.layers.attention import AttentionCore, Documents
from models.layers.rope import inverse_frequencies
from models.llama import PRESETS, Config, Model
from models.llama.hf import hf_name
from tests.support.transformers_models import RowByRow

ODD = Config(vocab_size=91, dim=48, n_layers=3, n_heads=6, n_kv_heads=2, hidden_dim=70)


def reference(config: Config) -> nn.Module:
    """transformers' Llama of the same shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    scaling = {"rope_type": "default"}
    if config.rope_scaling != 1:
        scaling = {
            "rope_type": "llama3",
            "factor": config.rope_scaling,
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_seq_len,
        }
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.hidden_dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            rms_norm_eps=config.norm_eps,
            rope_parameters={**scaling, "rope_theta": config.rope_theta},
            max_position_embeddings=8192,
            tie_word_embeddings=config.tie_embeddings,
        )
    )


@pytest.mark.parametrize(
    "config",
    [
        ODD,
        dataclasses.replace(ODD, tie_embeddings=True),
        dataclasses.replace(ODD, rope_scaling=8.0, rope_theta=500_000.0, rope_original_seq_len=32),
        dataclasses.replace(ODD, n_kv_heads=6, n_layers=1),
        dataclasses.replace(ODD, n_kv_heads=1, n_layers=1),
    ],
    ids=["gqa", "tied", "rope scaling", "mha", "mqa"],
)
def test_logits_equal_transformers(config: Config) -> None:
    torch.manual_seed(0)
    model, other = Model(config), reference(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    weights = {hf_name(name): p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    other.load_state_dict(weights, strict=True)
    tokens = torch.randint(config.vocab_size, (2, 61))
    with torch.no_grad():
        expected, found = other(tokens).logits, model(tokens)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_documents_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    model = Model(ODD)
    batch = {n: v[1:] for n, v in random_batch(2, 40, ODD.vocab_size, seed=0).items()}
    packed = model(batch["tokens"], batch["positions"], batch["document_ids"])
    ids = batch["document_ids"][0]
    assert ids.max() >= 3
    for document in ids.unique():
        here = ids == document
        torch.testing.assert_close(packed[:, here], model(batch["tokens"][:, here]))


def test_document_mask() -> None:
    mask = Documents(torch.tensor([[0, 0, 1]])).mask
    assert mask.tolist() == [[[[True, False, False], [True, True, False], [False, False, True]]]]


@pytest.mark.parametrize("config", [ODD, dataclasses.replace(PRESETS["debug"], n_layers=2)])
def test_flops_equal_what_torch_counts(config: Config) -> None:
    torch.manual_seed(0)
    batch, seq_len = 2, 37
    model, tokens = Model(config), torch.randint(config.vocab_size, (batch, seq_len))
    expected = model(tokens)
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, AttentionCore):
                setattr(module, name, RowByRow())
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens)
        logits.sum().backward()
    torch.testing.assert_close(logits, expected)
    counted = counter.get_total_flops() / (batch * seq_len)
    assert config.flops_per_token(seq_len) == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize(
    ("preset", "billions"),
    [("1b", 1.236), ("3b", 3.213), ("8b", 8.030), ("70b", 70.554), ("405b", 405.853)],
)
def test_published_sizes(preset: str, billions: float) -> None:
    with torch.device("meta"):
        model = Model(PRESETS[preset])
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=5e-4)


@pytest.mark.parametrize("turns", [(1.0, 4.0), (1.5, 3.0)])
def test_frequencies_between_the_bands_are_interpolated(turns: tuple[float, float]) -> None:
    """llama3's rule, pair by pair: what turns seldom is slowed, what turns often is kept, and between
    them the part that is kept grows with the turns within the first length."""
    low, high = turns
    plain, scaled = (
        inverse_frequencies(64, 500_000.0, factor, low, high, 8192).tolist() for factor in (1.0, 8.0)
    )
    between = 0
    for before, after in zip(plain, scaled, strict=True):
        turned = before * 8192 / (2 * math.pi)
        if turned <= low or turned >= high:
            expected = before if turned >= high else before / 8
        else:
            between += 1
            kept = (turned - low) / (high - low)
            expected = kept * before + (1 - kept) * before / 8
            assert before / 8 < after < before
        assert after == pytest.approx(expected, rel=1e-5)
    assert between >= 2
