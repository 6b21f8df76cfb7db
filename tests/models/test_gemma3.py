"""Gemma 3: capped scores, rounding, norms, its stages and generated text."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from compose.checkpoint.hf_folder import load_hf
from compose.data.tokenizer import ByteTokenizer
from compose.ops.layers import RMSNorm
from compose.planner.few_layers import runs_of
from models.gemma3 import PRESETS, Config, Model
from models.gemma3.hf import hf_config, hf_name
from models.gemma3.model import RoundedScale, Softcap
from tests.support.command_lines import execute
from tests.support.helpers import make_job, refused
from tests.support.hugging_face import save_model
from tests.support.small_models import GEMMA3
from tests.support.transformers_models import GEMMA3 as ODD
from tests.support.transformers_models import published, randomize


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
        result = model(tokens)
    assert float((result - expected).norm() / expected.norm()) < 1e-5
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
        # Kernels sum squares in another order; a rounded 1 + weight would change a quarter of them.
        assert float((norm(stream) != its(stream)).double().mean()) < 0.05
        result, expected = model(tokens).double(), other(tokens).logits.double()
        exact = model.double()(tokens)
    mine, yours = (float((x - exact).norm() / exact.norm()) for x in (result, expected))
    assert mine < 1.5 * yours


def test_capped_logits_have_no_loss_in_chunks() -> None:
    keys: dict[str, object] = {"model__name": "gemma3", "train__loss_chunk": 8}
    assert make_job(1, **keys).resolved.output == "output"
    assert refused(make_job, 1, model__final_softcap=30.0, **keys) == [
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


def test_a_stage_scales_and_caps_once() -> None:
    """Stages share out modules, so scale and softcap are modules too."""
    pipeline = make_job(1, model__name="gemma3", model__final_softcap=3.0).resolved.pipeline
    model = Model(dataclasses.replace(PRESETS["debug"], final_softcap=3.0))
    assert pipeline is not None
    assert isinstance(model.get_submodule(pipeline.first[-1]), RoundedScale)
    assert isinstance(model.get_submodule(pipeline.last[-1]), Softcap)


@pytest.mark.slow
def test_generate_says_what_a_plain_loop_says(tmp_path: Path) -> None:
    """From a Hugging Face folder, on two ranks that share vocabulary and heads."""
    keys = GEMMA3 | {"model__n_layers": 4, "model__final_softcap": 30.0}
    save_model(tmp_path / "hf", keys)
    job = make_job(1, **keys)
    model = Model(job.config.model.config)
    load_hf(model, tmp_path / "hf", hf_name)
    known = ByteTokenizer().encode("def __init__(self):\n")
    for _ in range(8):
        with torch.no_grad():
            known.append(int(model(torch.tensor([known]))[0, -1].argmax()))
    words = ["--prompt", "def __init__(self):\n", "--max-tokens=8", "--temperature=0"]
    words += ["--parallel.tp=2", "--parallel.dp_shard=1"]
    done = execute("-m", "compose", "generate", str(tmp_path / "hf"), *words, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ByteTokenizer().decode(known) + "\n"
