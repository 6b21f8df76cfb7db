"""Which parameter is trained by what, by its name in the whole model."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from compose import ConfigError, Parallel, Pipeline, Plan
from compose.config.models import find_model
from compose.optim.optimizers import Optimizer, ParameterRule
from compose.optim.parameter_rules import parameter_rules
from tests.support.helpers import Keys, parallel, refusals

MUON = Optimizer(name="muon", weight_decay=0.5)


def rules(name: str, options: Optimizer, **fields: object) -> dict[str, ParameterRule]:
    folder = find_model(name)
    preset = "debug_moe" if name == "qwen3" else "debug"
    config = replace(folder.presets[preset], **fields)  # type: ignore[type-var]
    with torch.device("meta"):
        model = folder.Model(config)
    return parameter_rules(model, folder.plan(config, Parallel()), options)


FREE = ("gemma3", "llama", "mixtral", "qwen3")  # their embeddings may be tied or not
UNTIED_OR_TIED = [
    pytest.param(name, {"tie_embeddings": tied}, id=f"{name}, {'tied' if tied else 'untied'}")
    for name in FREE
    for tied in (False, True)
]


@pytest.mark.parametrize(
    ("name", "fields"), [*UNTIED_OR_TIED, pytest.param("deepseek_v3", {}, id="deepseek_v3")]
)
def test_muon_has_the_matrices_of_layers(name: str, fields: Keys) -> None:
    result = rules(name, MUON, **fields)
    assert {key for key, rule in result.items() if rule.optimizer == "muon"} == {
        key
        for key in result
        if key.startswith("layers.") and "norm" not in key and ".router." not in key
    }
    assert any(".router." in key for key in result) == (name in ("mixtral", "qwen3", "deepseek_v3"))
    decay = {key: rule.weight_decay for key, rule in result.items()}
    assert all(value == (0.0 if "norm" in key else 0.5) for key, value in decay.items())
    assert all(rule.lr_scale == 1.0 for rule in result.values())
    assert not any(rule.optimizer == "muon" for rule in rules(name, Optimizer()).values())


def test_biases_of_stacked_experts_are_no_matrices() -> None:
    result = rules("gpt_oss", MUON, n_layers=2)
    vectors = ("norm.weight", "bias", "sinks.weight")
    for key, rule in result.items():
        matrix = key.startswith("layers.") and not key.endswith(vectors)
        assert (rule.optimizer == "muon") == (matrix and ".router." not in key), key
        assert rule.weight_decay == (0.0 if key.endswith(vectors) else 0.5), key
    assert {f"layers.1.moe.experts.{name}" for name in ("gate_up_bias", "down_bias")} < result.keys()


def test_a_matrix_of_one_row_is_a_vector() -> None:
    result = rules("qwen3", MUON, n_layers=1, shared_dim=8, shared_gate=True)
    assert result["layers.0.moe.shared.w1.weight"].optimizer == "muon"
    assert result["layers.0.moe.shared_gate.weight"].optimizer == "adamw"


class Odd(nn.Module):
    """A layer with an embedding, a kernel of a convolution, a bias, and what another module shares."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 4), nn.Embedding(5, 4), nn.Conv2d(1, 2, 3)])
        self.layers.append(nn.Linear(4, 6, bias=False))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.layers[3].weight  # type: ignore[assignment]
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x


ODD = Plan(pipeline=Pipeline(first=[], layers="layers", last=["head"]))


def test_muon_has_nothing_else() -> None:
    result = parameter_rules(Odd(), ODD, MUON)
    assert [name for name, rule in result.items() if rule.optimizer == "muon"] == ["layers.0.weight"]
    assert set(result) >= {"layers.3.weight", "head.weight", "scale"}
    assert result["scale"].weight_decay == 0.0


def test_patterns() -> None:
    options = replace(
        MUON,
        lr_scale=("layers.*.attention=0.5", "layers.*.attention.w[qk].weight = 2", "output=0"),
        weight_decay_scale=("layers.1=2", "layers.*.*_norm=0.25", "norm.weight=1"),
        muon_except=("layers.*.feed_forward.w2", "layers.0.attention.wq.weight"),
    )
    result = rules("llama", options, n_layers=2)
    assert result["layers.0.attention.wq.weight"] == ParameterRule("adamw", 2.0, 0.5)
    assert result["layers.1.attention.wk.weight"] == ParameterRule("muon", 2.0, 1.0)
    assert result["layers.0.attention.wo.weight"] == ParameterRule("muon", 0.5, 0.5)
    assert result["layers.1.feed_forward.w2.weight"] == ParameterRule("adamw", 1.0, 1.0)
    assert result["layers.1.ffn_norm.weight"] == ParameterRule("adamw", 1.0, 0.125)
    assert result["norm.weight"] == ParameterRule("adamw", 1.0, 0.5)
    assert result["output.weight"] == ParameterRule("adamw", 0.0, 0.5)


def test_a_tied_weight_has_one_rule_by_any_name() -> None:
    options = Optimizer(lr_scale=("output=0.5",))
    result = rules("llama", options, tie_embeddings=True)
    assert (
        result["output.weight"] == result["tok_embeddings.weight"] == ParameterRule("adamw", 0.5, 0.1)
    )


REFUSED: list[tuple[Keys, str]] = [
    (
        {"optimizer__lr_scale": '["outptu=0.5"]'},
        "optimizer.lr_scale: pattern 'outptu' matches no module or parameter; did you mean output?",
    ),
    (
        {"optimizer__weight_decay_scale": '["layers.*.attention.wg.weight=0"]'},
        "optimizer.weight_decay_scale: pattern 'layers.*.attention.wg.weight' matches no module or"
        " parameter; did you mean layers.*.attention.wv.weight?",
    ),
    (
        {"optimizer__muon_except": '["layers.*.feed_forwrd"]', "optimizer__name": "muon"},
        "optimizer.muon_except: pattern 'layers.*.feed_forwrd' matches no module or parameter;"
        " did you mean layers.*.feed_forward?",
    ),
    (
        {"optimizer__lr_scale": '["output"]'},
        'optimizer.lr_scale: \'output\' is not "PATTERN=NUMBER", as "output=0.5", with a number of'
        " at least 0",
    ),
    (
        {"optimizer__lr_scale": '["output=-1"]'},
        'optimizer.lr_scale: \'output=-1\' is not "PATTERN=NUMBER", as "output=0.5", with a number'
        " of at least 0",
    ),
    (
        {"optimizer__name": "muon", "optimizer__muon_except": '["layers"]'},
        "optimizer.name: muon trains matrices in layers, and finds none (Plan.pipeline names the"
        ' layers); use "adamw"',
    ),
    (
        {"precision__master": "bfloat16"},
        "precision.master: bfloat16 keeps less than precision.param = float32 uses; use"
        ' precision.param = "bfloat16"',
    ),
]
# In a pipeline too, of which no rank holds all names.
test_refused_before_training = refusals(
    [(keys | parallel(pp=pp), line) for pp in (1, 2) for keys, line in REFUSED]
)


def test_a_plan_without_layers_has_no_muon() -> None:
    with pytest.raises(ConfigError, match="muon trains matrices in layers, and finds none"):
        parameter_rules(Odd(), Plan(), MUON)
