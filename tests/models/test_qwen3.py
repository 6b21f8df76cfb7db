"""Qwen3: equal to transformers' implementation, and its plan equal to one process."""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import models.qwen3
from compose import Parallel
from compose.errors import ConfigError
from compose.parallel.local_parallel import _LocalRMSNorm
from compose.plan import resolve
from compose.proof.report import Report
from models.layers.attention import AttentionCore
from models.qwen3 import PRESETS, Config, Model
from models.qwen3.hf import hf_name
from models.qwen3.model import Attention
from tests.support.helpers import ROOT, agreed, make_config, parallel, prove_step, tier
from tests.support.pool import Pool
from tests.support.transformers_models import QWEN3, RowByRow


def reference(config: Config) -> nn.Module:
    """transformers' Qwen3 of the same shape."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.hidden_dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            max_position_embeddings=8192,
            tie_word_embeddings=config.tie_embeddings,
        )
    )


@pytest.mark.parametrize(
    "config",
    [
        QWEN3,
        dataclasses.replace(QWEN3, tie_embeddings=True),
        dataclasses.replace(QWEN3, n_kv_heads=6, n_layers=1),
        dataclasses.replace(QWEN3, n_kv_heads=1, n_layers=1),
    ],
    ids=["gqa", "tied", "mha", "mqa"],
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


@pytest.mark.parametrize(
    "config",
    [QWEN3, *(dataclasses.replace(PRESETS[name], n_layers=2) for name in ("debug", "debug_moe"))],
    ids=["odd", "debug", "debug_moe"],
)
def test_flops_equal_what_torch_counts(config: Config) -> None:
    torch.manual_seed(0)
    batch, seq_len = 2, 37
    model, tokens = Model(config), torch.randint(config.vocab_size, (batch, seq_len))
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, AttentionCore):
                setattr(module, name, RowByRow())
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    counted = counter.get_total_flops() / (batch * seq_len)
    assert config.flops_per_token(seq_len) == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize(
    ("preset", "billions", "without_embeddings", "digits"),
    [
        ("0.6b", 0.6, 0.44, 2),
        ("1.7b", 1.7, 1.4, 1),
        ("4b", 4.0, 3.6, 1),
        ("8b", 8.2, 6.95, 2),
        ("14b", 14.8, 13.2, 1),
        ("32b", 32.8, 31.2, 1),
    ],
)
def test_published_sizes(preset: str, billions: float, without_embeddings: float, digits: int) -> None:
    """As the model cards give them, rounded to as many digits."""
    with torch.device("meta"):
        model = Model(PRESETS[preset])
    whole = sum(p.numel() for p in model.parameters())
    ends = {id(p): p.numel() for p in (model.tok_embeddings.weight, model.output.weight)}
    assert round(whole / 1e9, 1) == billions
    assert round((whole - sum(ends.values())) / 1e9, digits) == without_embeddings


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"head_dim": 15}, "head_dim: 15 is not even, and RoPE rotates pairs"),
        ({"head_dim": 0}, "head_dim: 0 should be at least 1, below 2^31"),
        ({"n_heads": 7}, "n_kv_heads: 2 does not divide n_heads 7"),
        ({"n_layers": 0}, "n_layers: 0 should be at least 1, below 2^12"),
        ({"norm_eps": 0.0}, "norm_eps: 0.0 should be above 0"),
        ({"rope_theta": -1.0}, "rope_theta: -1.0 should be above 0"),
    ],
)
def test_config_errors(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}$"):
        Config(**keys)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        make_config(1, model__name="qwen3", **{f"model__{key}": value for key, value in keys.items()})
    assert caught.value.problems == [f"command line: model.{message}"]


def test_keys_of_llama_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(1, model__name="qwen3", model__rope_scaling=8.0)
    assert str(caught.value) == (
        "command line: model.rope_scaling: unknown key; did you mean model.route_scale?"
    )


PIPELINE: dict[str, object] = {
    "parallel__pp": 2,
    "train__micro_batch": 1,
    "train__global_batch": 4,
    "model__n_layers": 4,
}
# Ranks and keys. Where the key/value heads are fewer than tp, ranks share them, and k_norm's input.
PROVED: dict[str, tuple[int, dict[str, object]]] = {
    "alone": (1, {}),
    "tp 2": (2, parallel(tp=2)),
    "tp 2, sequence and logits whole": (2, parallel(tp=2, sequence=False, loss=False)),
    "tp 4, shared heads": (4, parallel(tp=4)),
    "tp 4, shared heads, sequence and logits whole": (4, parallel(tp=4, sequence=False, loss=False)),
    "tp 4, one key/value head": (4, parallel(tp=4) | {"model__n_kv_heads": 1}),
    "dp_shard 2, tp 2": (4, parallel(dp_shard=2, tp=2)),
    "dp_shard 2, tp 2, zero 0": (4, parallel(dp_shard=2, tp=2, zero=0)),
    "cp 2": (2, parallel(cp=2, cp_method="ring")),
    "cp 2, tp 2": (4, parallel(cp=2, tp=2, cp_method="ulysses")),
    "pp 2, tied": (
        2,
        PIPELINE | {"parallel__pp_schedule": "ZBVZeroBubble", "model__tie_embeddings": True},
    ),
    "pp 2, tp 2": (4, PIPELINE | {"parallel__tp": 2}),
    "bfloat16, tp 2": (2, parallel(tp=2) | {"precision__param": "bfloat16"}),
}


SLOW = {"tp 4, shared heads", "cp 2, tp 2", "bfloat16, tp 2"}
# As with Llama, whose plan is alike there.
LEFT = {
    "tp 2, sequence and logits whole",
    "tp 4, shared heads, sequence and logits whole",
    "tp 4, one key/value head",
    "dp_shard 2, tp 2, zero 0",
    "pp 2, tp 2",
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=tier(slow=case in SLOW, full=case in LEFT)) for case in PROVED]
)
def test_equals_one_process(pool: Pool, case: str) -> None:
    ranks, keys = PROVED[case]
    keys = keys | {"model__name": "qwen3"}
    report = agreed(pool.run(prove_step, ranks, keys))
    assert report.ok, str(report)
    heads = {row.name for row in report.rows if re.search(r"\.[qk]_norm\.weight$", row.name)}
    assert len(heads) == 2 * int(str(keys.get("model__n_layers", 2)))


@contextmanager
def norms_of_heads_are_taken_as_whole(norm: str) -> Iterator[None]:
    """As if every tp rank gave ``norm`` the same heads: its gradient, of which each rank found a part,
    counts as whole."""
    real = _LocalRMSNorm.forward

    def fake(self: _LocalRMSNorm, x: Tensor) -> Tensor:
        if getattr(self, "fault", "") != norm:
            return real(self, x)
        return F.rms_norm(x, self.normalized_shape, self.weight.to_local(), self.eps)  # type: ignore[attr-defined]

    made = Attention.__init__

    def marked(self: Attention, *args: Any) -> None:
        made(self, *args)
        getattr(self, norm).fault = norm

    with (
        mock.patch.object(_LocalRMSNorm, "forward", fake),
        mock.patch.object(Attention, "__init__", marked),
    ):
        yield


def _with_whole_norms(norm: str, keys: dict[str, object]) -> Report:
    with norms_of_heads_are_taken_as_whole(norm):
        return prove_step(keys)


@pytest.mark.parametrize(
    ("norm", "sequence"), [pytest.param("q_norm", True, marks=pytest.mark.slow), ("k_norm", False)]
)
def test_norm_not_summed_over_tp_is_named(pool: Pool, norm: str, sequence: bool) -> None:
    keys = parallel(tp=4, sequence=sequence) | {"model__name": "qwen3"}
    report = pool.run(_with_whole_norms, 4, norm, keys)[0]
    rows = {(row.quantity, row.name): row for row in report.rows}
    assert rows["loss", "step 1"].ok  # forward is right
    failed = {row.name for row in report.failed if row.quantity == "gradient"}
    assert failed == {f"layers.{i}.attention.{norm}.weight" for i in range(2)}, str(report)


def test_a_norm_of_heads_under_replicate_is_refused() -> None:
    config = Config(n_layers=2)
    right = models.qwen3.plan(config, Parallel(tp=2))
    pattern = "layers.*.attention.[qk]_norm"
    tensor = {n: s for n, s in right.tensor.items() if n != pattern}
    wrong = dataclasses.replace(right, tensor=tensor, replicate=[pattern])
    with torch.device("meta"):
        model = Model(config)
    with pytest.raises(ConfigError) as raised:
        resolve(wrong, model)
    assert str(raised.value).splitlines() == [
        f"plan.tensor: layers.*.attention.{name} is in a module with LocalInput, and has no style of"
        " compose.parallel.local_parallel; give it one, or that module PrepareModuleInput"
        for name in ("q_norm", "k_norm")
    ]


def test_page_shows_the_real_difference() -> None:
    """docs/new-architecture.md: what its diffs take from llama and add for qwen3 stands there so."""
    page = (ROOT / "docs" / "new-architecture.md").read_text()
    shown = re.findall(r"^```diff\n(.*?)^```$", page, re.M | re.S)
    lines = [line for block in shown for line in block.splitlines() if line.strip()]
    assert any(line[0] == "-" for line in lines)
    assert any(line[0] == "+" for line in lines)
    files = {
        name: "\n".join(path.read_text() for path in sorted((ROOT / "models" / name).glob("*.py")))
        for name in ("llama", "qwen3")
    }
    for line in lines:
        sides = {"-": ["llama"], "+": ["qwen3"], " ": ["llama", "qwen3"]}[line[0]]
        for side in sides:
            found = [other.strip() for other in files[side].splitlines()]
            assert line[1:].strip() in found, f"{side} has no line {line[1:].strip()!r}"
