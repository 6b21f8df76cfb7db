"""GPT-2: its table of positions, older files, and what Muon trains."""

import json
from pathlib import Path

import torch

from compose.checkpoint.hf_folder import TensorFiles, differences, load_hf, name_of
from compose.cli.generate import _check_length, job_of
from compose.config.tables import Config as RunConfig
from compose.optim.optimizers import Optimizer
from compose.optim.parameter_rules import parameter_rules
from models.gpt2 import Model
from models.gpt2.hf import hf_config, hf_name
from tests.support.helpers import make_config, make_job, refused
from tests.support.small_models import GPT2
from tests.support.transformers_models import GPT2 as ODD
from tests.support.transformers_models import published


def test_muon_has_the_matrices_of_layers() -> None:
    job = make_job(1, **GPT2, train__seq_len=16)
    result = parameter_rules(job.model, job.plan, Optimizer(name="muon", weight_decay=0.5))
    assert {name for name, rule in result.items() if rule.optimizer == "muon"} == {
        f"layers.{layer}.{part}.weight"
        for layer in (0, 1)
        for part in (*(f"attention.w{x}" for x in "qkvo"), "feed_forward.w1", "feed_forward.w2")
    }
    vectors = {name for name, p in job.model.named_parameters() if p.ndim == 1}
    assert {name for name, rule in result.items() if not rule.weight_decay} == vectors


def test_a_sample_fits_into_the_table_of_positions() -> None:
    make_config(1, **GPT2, train__seq_len=16)
    assert refused(make_config, 1, **GPT2, train__seq_len=17) == [
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
        assert refused(_check_length, prompt, more, 16) == [message]
    # The length of the config's own samples is no matter here.
    (tmp_path / "config.json").write_text(json.dumps(hf_config(ODD)))
    assert RunConfig().train.seq_len > ODD.max_seq_len
    assert job_of(tmp_path, [], []).config.train.seq_len == ODD.max_seq_len


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
