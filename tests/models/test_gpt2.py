"""GPT-2: equal to transformers' implementation, and its plan equal to one process."""

import dataclasses
import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from compose.checkpoint.hf_folder import TensorFiles, differences, load_hf, name_of
from compose.cli.generate import _check_length, job_of
from compose.config.rules import meshes
from compose.config.tables import Config as RunConfig
from compose.errors import ConfigError
from compose.optim.optimizers import Optimizer
from compose.optim.parameter_rules import parameter_rules
from compose.parallel import local_parallel
from models.gpt2 import PRESETS, Config, Model
from models.gpt2.hf import config_from_hf, hf_config, hf_name
from models.layers.attention import AttentionCore
from tests.support.experts import AXES, keys_of
from tests.support.faults import Fault, assert_named, partial_gradients_are_taken_as_whole, with_fault
from tests.support.helpers import agreed, make_config, make_job, prove_case, tier
from tests.support.pool import Pool
from tests.support.transformers_models import GPT2 as ODD
from tests.support.transformers_models import RowByRow, compare, published, randomize

# Odd sizes: tp divides neither the vocabulary nor the hidden width.
KEYS: dict[str, object] = {
    "model__name": "gpt2",
    "model__max_seq_len": 16,
    "model__dim": 36,
    "model__n_heads": 4,
    "model__hidden_dim": 51,
}


def drawn(seed: int) -> Config:
    """Odd sizes; the longest text is one that just fits."""
    rng = random.Random(seed)
    heads = rng.choice([1, 2, 3, 5])
    return Config(
        vocab_size=rng.randint(40, 130),
        max_seq_len=rng.choice([61, 64, 100]),
        dim=heads * rng.randint(3, 14),
        n_layers=rng.randint(1, 3),
        n_heads=heads,
        hidden_dim=rng.randint(5, 150),
        norm_eps=rng.choice([1e-5, 1e-3]),
        tie_embeddings=rng.random() < 0.7,
    )


CONFIGS = {"odd": ODD, **{f"drawn {seed}": drawn(seed) for seed in range(20)}}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=tier(full=n not in ("odd", "drawn 1"))) for n in CONFIGS]
)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    config = CONFIGS[name]
    model = Model(config)
    randomize(model)
    tensors = published(dict(model.named_parameters()), hf_name)
    compare(tmp_path, model, tensors, hf_config(config), batch=2)


def test_presets_are_of_the_published_sizes() -> None:
    """The paper's table 2 says 117M and 1542M, which its authors corrected later."""
    for preset, millions in {"124m": 124, "1558m": 1558}.items():
        with torch.device("meta"):
            model = Model(PRESETS[preset])
        assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


def test_flops_equal_what_torch_counts() -> None:
    torch.manual_seed(0)
    batch, seq_len, config = 2, 37, dataclasses.replace(PRESETS["debug"], n_layers=2)
    model, tokens = Model(config), torch.randint(config.vocab_size, (batch, seq_len))
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, AttentionCore):
                setattr(module, name, RowByRow())
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    counted = counter.get_total_flops() / (batch * seq_len)
    assert config.flops_per_token(seq_len) == pytest.approx(counted, rel=0.02)


def test_muon_has_the_matrices_of_layers() -> None:
    job = make_job(1, **KEYS, train__seq_len=16)
    found = parameter_rules(job.model, job.plan, Optimizer(name="muon", weight_decay=0.5))
    assert {name for name, rule in found.items() if rule.optimizer == "muon"} == {
        f"layers.{layer}.{part}.weight"
        for layer in (0, 1)
        for part in (*(f"attention.w{x}" for x in "qkvo"), "feed_forward.w1", "feed_forward.w2")
    }
    vectors = {name for name, p in job.model.named_parameters() if p.ndim == 1}
    assert {name for name, rule in found.items() if not rule.weight_decay} == vectors


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dim": 100}, "dim: 100 is not a multiple of n_heads = 8"),
        ({"max_seq_len": 0}, "max_seq_len: 0 should be at least 1, below 2^31"),
        ({"hidden_dim": 0}, "hidden_dim: 0 should be at least 1, below 2^31"),
        ({"n_layers": 0}, "n_layers: 0 should be at least 1, below 2^12"),
        ({"norm_eps": 0.0}, "norm_eps: 0.0 should be above 0"),
    ],
)
def test_config_errors(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}$"):
        Config(**keys)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        make_config(1, model__name="gpt2", **{f"model__{key}": value for key, value in keys.items()})
    assert caught.value.problems == [f"command line: model.{message}"]


def test_a_sample_fits_into_the_table_of_positions() -> None:
    make_config(1, **KEYS, train__seq_len=16)
    with pytest.raises(ConfigError) as caught:
        make_config(1, **KEYS, train__seq_len=17)
    assert caught.value.problems == [
        "train.seq_len: 17 is more than the 16 positions that the model has; nearest: 16, or"
        " model.max_seq_len = 17"
    ]


def test_a_text_fits_into_the_table_of_positions(tmp_path: Path) -> None:
    _check_length(3, 13, 16)
    _check_length(3, 10**6, None)
    for prompt, more, message in (
        (
            3,
            14,
            "command line: --max-tokens: 14 after a prompt of 3 are more than the 16 positions that the"
            " model has; nearest: 13",
        ),
        (
            16,
            1,
            "command line: --prompt: has 16 tokens, and the model has 16 positions; give at most 15",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            _check_length(prompt, more, 16)
        assert caught.value.problems == [message]
    # The length of the config's own samples is no matter here.
    (tmp_path / "config.json").write_text(json.dumps(hf_config(ODD)))
    assert RunConfig().train.seq_len > ODD.max_seq_len
    assert job_of(tmp_path, [], []).config.train.seq_len == ODD.max_seq_len


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "relu"}, 'activation_function: "relu" cannot be expressed here, only'),
        ({"activation_function": "gelu"}, 'activation_function: "gelu" cannot be expressed here, only'),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: true cannot be"),
        ({"scale_attn_weights": False}, "scale_attn_weights: false cannot be"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn: true cannot be"),
        ({"add_cross_attention": True}, "add_cross_attention: true cannot be"),
        ({"n_ctx": 512}, "n_ctx: 512 cannot be expressed here, only 1024"),
        ({"max_position_embeddings": 2048}, "max_position_embeddings: 2048 cannot be expressed here"),
        ({"n_embd": 770}, "n_embd: 770 is not a multiple of n_head = 12"),
        ({"rope_theta": 1e4}, "rope_theta: 10000.0 is of a key that is not known here"),
    ],
)
def test_what_ours_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}"):
        config_from_hf(hf_config(PRESETS["124m"]) | change)
    same = {"activation_function": "gelu_pytorch_tanh", "attn_pdrop": 0.1, "n_inner": 3072}
    assert config_from_hf(hf_config(PRESETS["124m"]) | same) == PRESETS["124m"]


def test_older_files_are_read(tmp_path: Path) -> None:
    """The published files: names without the prefix, and causal masks beside the weights."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model, filled = Model(ODD), Model(ODD)
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in published(dict(model.named_parameters()), hf_name).items()
    }
    names = name_of("gpt2", ODD)
    for layer in range(ODD.n_layers):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 70, 70).tril()
    save_file(tensors, tmp_path / "model.safetensors")
    load_hf(filled, tmp_path, names)
    for name, parameter in model.named_parameters():
        assert torch.equal(filled.get_parameter(name), parameter), name

    del tensors["h.1.attn.c_attn.weight"]
    tensors["wpe.weight"] = torch.zeros(64, ODD.dim)
    tensors["h.0.crossattention.c_attn.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors")
    assert sorted(differences(TensorFiles(tmp_path), filled, names)) == [
        f"{tmp_path}: h.0.crossattention.c_attn.weight is not of this model",
        f"{tmp_path}: transformer.h.1.attn.c_attn.weight is missing",
        f"{tmp_path}: wpe.weight is (64, 42), the model's is (70, 42)",
    ]


CASES = {
    "tp 2": "suite",
    "pp 2 cp 2 train__seq_len 13": "suite",
    "ds 2 tp 2 sequence false loss false model__tie_embeddings false": "slow",
    "cp 2 tp 2 cp_method ulysses train__seq_len 14": "slow",
    "pp 2 tp 2 pp_schedule ZBVZeroBubble model__n_layers 4": "slow",
    "tp 4 zero 0 train__loss_chunk 5": "slow",
    "dr 2 ds 2 zero 1 activation_checkpoint__mode selective": "full",
    "ds 2 tp 2 precision__param bfloat16": "slow",
    "tp 2 comm__activations int8 model__dim 64": "full",
    "ds 2 tp 2 compile__mode block": "full",
    "ds 2 tp 2 optimizer__name muon": "full",
    "tp 2 precision__float8 tensorwise model__dim 64 model__hidden_dim 96 model__n_layers 3": "full",
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=tier(slow=t == "slow", full=t == "full")) for c, t in CASES.items()]
)
def test_equals_one_process(pool: Pool, case: str) -> None:
    ranks, keys = keys_of(KEYS, case)
    report = agreed(pool.run(prove_case, ranks, keys))
    assert report.ok, str(report)


@pytest.mark.full
@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_every_mesh_of_eight_ranks(pool: Pool, pp: int) -> None:
    """ZeRO stages, cp methods and tied embeddings in turn."""
    proved = 0
    for degrees in meshes(8):
        if degrees["pp"] != pp:
            continue
        case = " ".join(f"{short} {degrees[axis]}" for short, axis in AXES.items())
        case += f" zero {proved % 4} cp_method {('ring', 'allgather', 'ulysses')[proved % 3]}"
        case += f" model__tie_embeddings {str(proved % 5 < 3).lower()}"
        count, keys = keys_of(KEYS, f"{case} model__n_layers 6 model__n_heads 8")
        report = agreed(pool.run(prove_case, count, keys | {"model__dim": 40}))
        assert report.ok, f"{case}\n{report}"
        proved += 1
    assert proved == {1: 20, 2: 10, 4: 4, 8: 1}[pp]


@contextmanager
def a_bias_is_added_before_the_sum() -> Iterator[None]:
    """Each rank of tp adds the bias to its part of the sum, which then has it once for each rank."""
    row = local_parallel._RowLinear

    def fake(self: Any, input: Tensor) -> Tensor:
        return F.linear(input, local_parallel._local(self.weight), local_parallel._local(self.bias))

    with mock.patch.object(row, "forward", fake):
        yield


# All but the keys' biases, which change no logit: a query's scores all move by the same.
EVERYTHING = {"embeddings.*", "*norm.*", "*.w[qvo12].*", "*.wk.weight"}


@pytest.mark.parametrize(
    ("fault", "keys", "names"),
    [
        (a_bias_is_added_before_the_sum, {}, EVERYTHING),
        pytest.param(
            a_bias_is_added_before_the_sum,
            {"parallel__sequence": False},
            EVERYTHING,
            marks=pytest.mark.slow,
        ),
        (
            partial_gradients_are_taken_as_whole,
            {},
            {"*.wo.bias", "*.w2.bias", "*norm.*", "embeddings.positions.weight"},
        ),
    ],
)
def test_a_wrong_bias_is_named(
    pool: Pool, fault: Fault, keys: dict[str, object], names: set[str]
) -> None:
    _, mesh = keys_of(KEYS, "tp 2")
    assert_named(pool.run(with_fault, 2, fault, mesh | keys)[0], "gradient", names)
