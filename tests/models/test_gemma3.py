"""Gemma 3: equal to transformers' implementation, and its plan equal to one process."""

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
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from compose.checkpoint.hf_folder import load_hf
from compose.config.rules import meshes
from compose.data.tokenizer import Bytes
from compose.errors import ConfigError
from compose.ops.layers import RMSNorm
from compose.parallel.local_parallel import _LocalRMSNorm
from compose.planner.few_layers import runs_of
from compose.proof.report import Report
from models.gemma3 import PRESETS, Config, Model
from models.gemma3.hf import hf_config, hf_name
from models.gemma3.model import Block, Scale, Softcap
from models.layers.attention import AttentionCore
from tests.support.command_lines import execute
from tests.support.experts import AXES, keys_of
from tests.support.helpers import agreed, make_config, make_job, parallel, prove_case, prove_step, tier
from tests.support.hugging_face import save_model
from tests.support.pool import Pool
from tests.support.transformers_models import GEMMA3 as ODD
from tests.support.transformers_models import RowByRow, compare, published, randomize


def drawn(seed: int) -> Config:
    """Odd sizes, windows longer and shorter than the text, every distance of global layers."""
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2, 3])
    return Config(
        vocab_size=rng.randint(40, 130),
        dim=heads * rng.randint(5, 14),
        n_layers=rng.randint(1, 7),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=2 * rng.randint(2, 9),
        hidden_dim=rng.randint(20, 90),
        norm_eps=rng.choice([1e-6, 1e-3]),
        global_every=rng.randint(1, 8),
        window=rng.choice([1, 4, 17, 60, 100]),
        rope_theta=rng.choice([300.0, 1e6]),
        rope_scaling=rng.choice([1.0, 8.0]),
        rope_local_theta=rng.choice([50.0, 1e4]),
        query_pre_attn_scalar=rng.choice([0, 5, 168]),
        final_softcap=rng.choice([0.0, 2.0, 30.0]),
        tie_embeddings=rng.random() < 0.7,
    )


CONFIGS = {"odd": ODD, **{f"drawn {seed}": drawn(seed) for seed in range(20)}}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=tier(slow=False, full=n not in ("odd", "drawn 1"))) for n in CONFIGS]
)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    config = CONFIGS[name]
    model = Model(config)
    randomize(model)
    tensors = published(dict(model.named_parameters()), hf_name)
    compare(tmp_path, model, tensors, hf_config(config), batch=2)


def theirs(folder: Path, tensors: dict[str, Tensor], config: Config, **options: Any) -> Any:
    """transformers' model of these weights."""
    from transformers import Gemma3ForCausalLM

    save_file(published(tensors, hf_name), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(config)))
    return Gemma3ForCausalLM.from_pretrained(folder, **options)


def test_capped_scores_equal_transformers(tmp_path: Path) -> None:
    """Its attention can cap scores, though its Gemma 3 does not ask for it."""
    torch.manual_seed(0)
    model = Model(dataclasses.replace(ODD, attention_softcap=1.5))
    randomize(model)
    other = theirs(tmp_path, dict(model.named_parameters()), ODD, attn_implementation="eager")
    tokens = torch.randint(ODD.vocab_size, (2, 61))
    with torch.no_grad():
        expected, without = (other(tokens, softcap=cap).logits for cap in (1.5, None))
        found = model(tokens)
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    assert float((without - expected).norm() / expected.norm()) > 1e-2


def test_bfloat16_is_as_near_to_float64_as_transformers(tmp_path: Path) -> None:
    """1 + weight is not rounded, and the embedding's factor is, as theirs."""
    torch.manual_seed(0)
    model = Model(dataclasses.replace(ODD, dim=66))  # its root is no number of bfloat16
    randomize(model)
    model.bfloat16()
    other = theirs(tmp_path, dict(model.named_parameters()), model.config, dtype=torch.bfloat16)
    tokens = torch.randint(ODD.vocab_size, (4, 61))
    with torch.no_grad():
        stream = model.embedding_scale(model.tok_embeddings(tokens))
        assert torch.equal(stream, other.model.embed_tokens(tokens))
        norm = model.get_submodule("layers.0.attention_norm")
        its = other.model.layers[0].input_layernorm
        assert torch.equal(norm(stream), its(stream))
        found, expected = model(tokens).double(), other(tokens).logits.double()
        exact = model.double()(tokens)
    mine, yours = (float((x - exact).norm() / exact.norm()) for x in (found, expected))
    assert mine < 1.5 * yours


def test_flops_equal_what_torch_counts() -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(PRESETS["debug"], n_layers=3, window=9)
    batch, seq_len = 2, 37
    model, tokens = Model(config), torch.randint(config.vocab_size, (batch, seq_len))
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, AttentionCore):
                setattr(module, name, RowByRow(child.options.window))
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    counted = counter.get_total_flops() / (batch * seq_len)
    assert config.flops_per_token(seq_len) == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize(
    ("preset", "millions"), [("1b", 698), ("4b", 3209), ("12b", 10_759), ("27b", 25_600)]
)
def test_published_sizes(preset: str, millions: int) -> None:
    """Parameters beside the embedding: table 1 of the paper."""
    with torch.device("meta"):
        model = Model(PRESETS[preset])
    whole = sum(p.numel() for p in model.parameters())
    assert round((whole - model.tok_embeddings.weight.numel()) / 1e6) == millions


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"head_dim": 15}, "head_dim: 15 is not even, and RoPE rotates pairs"),
        ({"n_heads": 7}, "n_kv_heads: 2 does not divide n_heads 7"),
        ({"n_layers": 0}, "n_layers: 0 should be at least 1, below 2^12"),
        ({"window": 0}, "window: 0 should be at least 1, below 2^31"),
        ({"global_every": 0}, "global_every: 0 should be at least 1, below 2^31"),
        ({"norm_eps": 0.0}, "norm_eps: 0.0 should be above 0"),
        ({"rope_local_theta": -1.0}, "rope_local_theta: -1.0 should be above 0"),
        ({"rope_scaling": 0.0}, "rope_scaling: 0.0 should be above 0"),
        ({"final_softcap": -1.0}, "final_softcap: -1.0 should be above 0, or 0 for none"),
        ({"attention_softcap": -1.0}, "attention_softcap: -1.0 should be above 0, or 0 for none"),
        (
            {"query_pre_attn_scalar": -1},
            "query_pre_attn_scalar: -1 should be at least 1, below 2^31, or 0 for head_dim",
        ),
    ],
)
def test_config_errors(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}$"):
        Config(**keys)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        make_config(1, model__name="gemma3", **{f"model__{key}": value for key, value in keys.items()})
    assert caught.value.problems == [f"command line: model.{message}"]


def test_capped_logits_have_no_loss_in_chunks() -> None:
    keys: dict[str, object] = {"model__name": "gemma3", "train__loss_chunk": 8}
    assert make_job(1, **keys).resolved.output == "output"
    with pytest.raises(ConfigError) as caught:
        make_job(1, model__final_softcap=30.0, **keys)
    assert caught.value.problems == [
        "train.loss_chunk: 8 needs a projection whose output are the logits, and the model's plan names"
        " none (plan.output); use train.loss_chunk = 0"
    ]


def test_the_planner_tells_local_layers_from_global_ones() -> None:
    """They have the same weights, and cost another time and memory. Float8 leaves the ends apart."""
    runs = runs_of(make_job(1, model__name="gemma3", model__n_layers=8))
    assert runs is not None
    assert runs.lengths == ((1, 1, 1, 2, 1, 1, 1),)


def test_a_norm_begins_as_its_input_normalized() -> None:
    """The weight is added to 1, in float32: a small one is not rounded away."""
    norm = RMSNorm(8, eps=1e-6, offset=1.0)
    nn.init.constant_(norm.weight, 2.0**-9)
    x = torch.randn(3, 8)
    expected = torch.nn.functional.rms_norm(x, (8,), None, 1e-6) * (1 + 2.0**-9)
    assert torch.allclose(norm(x), expected, rtol=1e-6)
    narrow, one = x.bfloat16(), 1 + norm.weight.bfloat16()
    assert torch.equal(one, torch.ones(8))  # in bfloat16 nothing would be left of it
    wide = torch.nn.functional.rms_norm(narrow.float(), (8,), None, 1e-6) * (1 + 2.0**-9)
    assert torch.equal(norm.bfloat16()(narrow), wide.bfloat16())


SMALL: dict[str, object] = {
    "model__name": "gemma3",
    "model__dim": 36,
    "model__n_heads": 4,
    "model__head_dim": 10,
    "model__hidden_dim": 50,
    "model__global_every": 2,
    "model__window": 5,
    "model__rope_theta": 500.0,
    "model__rope_scaling": 2.0,
    "model__rope_local_theta": 50.0,
    "model__query_pre_attn_scalar": 7,
}
CAPPED = "model__attention_softcap 2.0 model__final_softcap 1.5"
# A batch's documents are shorter and longer than the window.
CASES = {
    "cp 2 tp 2 train__seq_len 13": "slow",
    f"pp 2 tp 2 sequence false {CAPPED}": "suite",
    f"tp 2 cp 2 cp_method ulysses train__seq_len 14 {CAPPED}": "slow",
    "pp 2 ds 2 pp_schedule ZBVZeroBubble model__n_layers 4 model__tie_embeddings false": "slow",
    "dr 2 ds 2 zero 1 activation_checkpoint__mode selective": "slow",
    "tp 4 model__n_kv_heads 1 sequence false loss false": "slow",
    "ds 2 tp 2 zero 0 train__micro_batch 1": "full",
    "ds 2 cp 2 zero 2 cp_method allgather": "full",
    "ds 2 tp 2 precision__param bfloat16": "full",
    f"pp 2 cp 2 model__n_layers 3 {CAPPED}": "full",
    "ds 2 tp 2 train__loss_chunk 7": "full",
    "ds 2 tp 2 compile__mode block": "full",
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=tier(slow=t == "slow", full=t == "full")) for c, t in CASES.items()]
)
def test_equals_one_process(pool: Pool, case: str) -> None:
    ranks, keys = keys_of(SMALL, case)
    report = agreed(pool.run(prove_case, ranks, keys))
    assert report.ok, str(report)
    norms = {row.name for row in report.rows if re.search(r"norm\.weight$", row.name)}
    assert len(norms) == 1 + 6 * int(str(keys["model__n_layers"]))


@pytest.mark.full
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_every_mesh_of_eight_ranks(pool: Pool, pp: int) -> None:
    """ZeRO stages, cp methods and capped scores in turn."""
    proved = 0
    for degrees in meshes(8):
        if degrees["pp"] != pp:
            continue
        case = " ".join(f"{short} {degrees[axis]}" for short, axis in AXES.items())
        case += f" zero {proved % 4} cp_method {('ring', 'allgather', 'ulysses')[proved % 3]}"
        case += f" model__n_layers 4 model__n_heads 8 model__n_kv_heads 8 model__dim 64 {CAPPED}"
        count, keys = keys_of(SMALL, case)
        report = agreed(pool.run(prove_case, count, keys))
        assert report.ok, f"{case}\n{report}"
        proved += 1
    assert proved == {1: 20, 2: 10, 4: 4}[pp]


@contextmanager
def post_norms_are_taken_as_whole() -> Iterator[None]:
    """As if every tp rank gave the norms after attention the same tokens: the gradient, of which each
    rank found a part, counts as whole."""
    real, made = _LocalRMSNorm.forward, Block.__init__

    def fake(self: Any, x: Tensor) -> Tensor:
        return self.normalized(x, self.weight.to_local()) if hasattr(self, "fault") else real(self, x)

    def marked(self: Any, *args: Any) -> None:
        made(self, *args)
        self.attention_post_norm.fault = True

    with (
        mock.patch.object(_LocalRMSNorm, "forward", fake),
        mock.patch.object(Block, "__init__", marked),
    ):
        yield


def _with_whole_norms(keys: dict[str, object]) -> Report:
    with post_norms_are_taken_as_whole():
        return prove_step(keys)


def test_a_norm_not_summed_over_tp_is_named(pool: Pool) -> None:
    report = pool.run(_with_whole_norms, 2, parallel(tp=2) | {"model__name": "gemma3"})[0]
    rows = {(row.quantity, row.name): row for row in report.rows}
    assert rows["loss", "step 1"].ok  # forward is right
    failed = {row.name for row in report.failed if row.quantity == "gradient"}
    assert failed == {f"layers.{i}.attention_post_norm.weight" for i in range(2)}, str(report)


def test_a_stage_scales_and_caps_once() -> None:
    """What is no weight of a module that stages share out is a module too."""
    pipeline = make_job(1, model__name="gemma3", model__final_softcap=3.0).resolved.pipeline
    model = Model(dataclasses.replace(PRESETS["debug"], final_softcap=3.0))
    assert pipeline is not None
    assert isinstance(model.get_submodule(pipeline.first[-1]), Scale)
    assert isinstance(model.get_submodule(pipeline.last[-1]), Softcap)


@pytest.mark.slow
def test_generate_says_what_a_plain_loop_says(tmp_path: Path) -> None:
    """From a Hugging Face folder, on two ranks that share vocabulary and heads."""
    keys = SMALL | {"model__n_layers": 4, "model__final_softcap": 30.0}
    save_model(tmp_path / "hf", keys)
    job = make_job(1, **keys)
    model = Model(job.config.model.config)
    load_hf(model, tmp_path / "hf", hf_name)
    known = Bytes().encode("def __init__(self):\n")
    for _ in range(8):
        with torch.no_grad():
            known.append(int(model(torch.tensor([known]))[0, -1].argmax()))
    words = ["--prompt", "def __init__(self):\n", "--max-tokens=8", "--temperature=0"]
    words += ["--parallel.tp=2", "--parallel.dp_shard=1"]
    done = execute("-m", "compose", "generate", str(tmp_path / "hf"), *words, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout == Bytes().decode(known) + "\n"
