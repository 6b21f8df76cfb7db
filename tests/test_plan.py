"""Strict resolution: what PyTorch only warns of is an error here."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from compose import Plan
from compose.config.models import find_model, model_names
from compose.parallel.mesh import Parallel
from compose.plan import resolve
from models.llama import Config, Model, plan
from tests.support.helpers import refusal


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {str(i): nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for i in range(2)}
        )
        self.output = nn.Linear(4, 3, bias=False)


GOOD = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}


def problems(plan: Plan, model: nn.Module | None = None) -> list[str]:
    return refusal(resolve, plan, model or Tiny()).splitlines()


def test_patterns_become_names_in_the_models_order() -> None:
    resolved = resolve(
        Plan(
            tensor=GOOD,
            replicate=["output"],
            shard=["layers.*.*", ["output"]],
            checkpoint=["layers.[01]"],
        ),
        Tiny(),
    )
    assert [name for name, _ in resolved.tensor] == [
        "layers.0.up",
        "layers.1.up",
        "layers.0.down",
        "layers.1.down",
    ]
    assert resolved.replicate == ["output"]
    assert resolved.shard == [
        *([f"layers.{i}.{leaf}"] for i in range(2) for leaf in ("up", "down")),
        ["output"],
    ]
    assert resolved.checkpoint == ["layers.0", "layers.1"]


def test_pattern_that_matches_nothing() -> None:
    assert problems(Plan(checkpoint=["layer.*"])) == [
        "plan.checkpoint: pattern 'layer.*' matches no module; did you mean layers.*?"
    ]
    assert problems(Plan(shard=["layers.*", ["outptu"]])) == [
        "plan.shard: pattern 'outptu' matches no module; did you mean output?"
    ]
    # A star is one part of a name, as in parallelize_module.
    assert problems(Plan(checkpoint=["*.up"])) == ["plan.checkpoint: pattern '*.up' matches no module"]


CURE = "; give its module a style, or list it in replicate if its input is the same on all tp ranks"


def test_parameter_that_no_pattern_covers() -> None:
    assert problems(Plan(tensor={**GOOD, "output": PrepareModuleInput(input_layouts=None)})) == [
        f"plan.tensor: parameter output.weight is matched by no pattern{CURE}"
    ]
    assert problems(Plan(tensor={"layers.*.up": ColwiseParallel()}, replicate=["output"])) == [
        f"plan.tensor: parameter layers.*.down.{leaf} (2 of them) is matched by no pattern{CURE}"
        for leaf in ("weight", "bias")
    ]


def test_module_matched_twice() -> None:
    assert problems(Plan(tensor=GOOD, replicate=["output", "layers.0.up"])) == [
        "plan.tensor or replicate: layers.0.up is matched by more than one pattern"
    ]


def test_either_name_covers_a_tied_parameter() -> None:
    config = Config(tie_embeddings=True, n_layers=1)
    model = Model(config)
    assert problems(Plan(shard=["layers.*", ["tok_embeddings", "norm"]]), model) == [
        "plan.shard: tok_embeddings.weight and output.weight are one tied parameter; put their modules"
        " in one unit"
    ]
    resolve(Plan(shard=["layers.*", ["tok_embeddings", "norm", "output"]]), model)
    resolve(plan(config, Parallel(tp=2)), model)


def test_parameters_that_a_copy_changes() -> None:
    first, second, third = layers = [nn.Linear(3, 3) for _ in range(3)]
    parts = [*layers, nn.Embedding(3, 3, max_norm=1.0), nn.EmbeddingBag(3, 3, sparse=True)]
    second.weight.register_hook(lambda gradient: 2 * gradient)
    third.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    third.bias.data = first.bias.data
    first.register_buffer("mean", first.weight.detach()[0])
    second.kept = {"bias": second.bias.data}  # type: ignore[assignment]
    hook = "has a hook, which its parts would not have; change the gradient after forward_backward, or"
    hook += " by a torch.autograd.Function in forward"
    assert problems(Plan(), nn.Sequential(*parts)) == [
        f"parameter 1.weight {hook}",
        f"parameter 2.weight {hook}",
        "parameters 0.bias and 2.bias are two in one memory, which a copy separates; make them one"
        " parameter",
        "3 has max_norm, by which forward changes its weight, and ranks would lose such changes; leave"
        " it out, and scale in forward what it returns",
        "4 has sparse gradients, which no sum over ranks takes; give it sparse=False",
        *(
            f"parameter {name} are in one memory, which a copy separates; compute that in forward"
            for name in ("0.weight and 0.mean", "1.bias and 1.kept")
        ),
    ]


class Rooted(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(4))


def test_units_that_fully_shard_would_get_wrong() -> None:
    assert problems(Plan(shard=["layers", "output"])) == [
        "plan.shard: layers is a list of modules; name them: layers.*"
    ]
    assert problems(Plan(shard=["layers.*", "layers.0.up", "output"])) == [
        "plan.shard: layers.0 is a list of modules; name them: layers.0.*",
        "plan.shard: layers.1 is a list of modules; name them: layers.1.*",
        "plan.shard: layers.0.up is inside layers.0, another unit",
    ]
    tied = Tiny()
    tied.get_submodule("layers.0.up").weight = tied.get_parameter("layers.1.up.weight")
    assert problems(Plan(shard=["layers.*.up", "layers.*.down", "output"]), tied) == [
        "plan.shard: layers.0.up.weight and layers.1.up.weight are one tied parameter;"
        " put their modules in one unit"
    ]
    resolve(Plan(shard=[["layers.*.up"], "layers.*.down", "output"]), tied)
    resolve(Plan(shard=["layers.*.*", "output"]), Rooted())
    assert problems(Plan(tensor=GOOD, replicate=["output"]), Rooted()) == [
        "plan.tensor: parameter positions is the model's own, which no pattern can name; move it into a"
        " module, and list that in replicate if its input is the same on all tp ranks"
    ]


def test_a_layer_that_is_there_twice() -> None:
    """Its second name is that of no module which a pattern could name."""
    layer = nn.Linear(2, 2)
    model = nn.ModuleDict({"layers": nn.ModuleList([layer, layer]), "output": nn.Linear(2, 2)})
    assert resolve(Plan(shard=["layers.*", "output"]), model).shard == [["layers.0"], ["output"]]


def test_a_list_of_parameters_is_no_unit() -> None:
    """FSDP never gathered it, since it is never called."""
    model = nn.ModuleDict({"output": nn.Linear(2, 2)})
    model.scales = nn.ParameterList([torch.ones(2)])
    assert resolve(Plan(shard=["output"]), model).shard == [["output"]]
    assert problems(Plan(shard=["output", "scales"]), model) == [
        "plan.shard: scales has no forward for which FSDP would gather it; name the module that uses"
        " it, or leave it out if that is the model"
    ]


def test_output() -> None:
    assert resolve(Plan(output="output"), Tiny()).output == "output"
    assert resolve(Plan(), Tiny()).output == ""
    assert problems(Plan(output="outptu")) == [
        "plan.output: pattern 'outptu' matches no module; did you mean output?"
    ]
    assert problems(Plan(output="layers.*.up")) == [
        "plan.output: layers.0.up and layers.1.up are several modules; name one"
    ]
    assert problems(Plan(output="layers.0.up")) == [
        "plan.output: layers.0.up is no nn.Linear without bias: Linear(in_features=4, out_features=8,"
        " bias=True)"
    ]


@pytest.mark.parametrize("name", model_names())
@pytest.mark.parametrize("sequence", [True, False])
def test_every_style_of_a_printed_plan_has_a_name(name: str, sequence: bool) -> None:
    folder = find_model(name)
    for shape in folder.presets.values():
        assert " object at 0x" not in str(folder.plan(shape, Parallel(tp=2, ep=2, sequence=sequence)))


def test_what_float8_leaves_out() -> None:
    listed = Plan(float8=["layers.*.up"], float8_except=["layers.1"])
    result = resolve(listed, Tiny())
    assert (result.float8, result.float8_except) == (["layers.0.up", "layers.1.up"], ["layers.1"])
    assert str(listed).splitlines() == ["float8     layers.*.up", "           but not in layers.1"]
    assert problems(Plan(float8=["layers.*.up"], float8_except=["layers.2", "output"])) == [
        "plan.float8_except: pattern 'layers.2' matches no module; did you mean layers.1?"
    ]
    assert problems(Plan(float8=["layers.*.up"], float8_except=["layers.0.down", "output"])) == [
        "plan.float8_except: layers.0.down has nothing that plan.float8 names",
        "plan.float8_except: output has nothing that plan.float8 names",
    ]


def test_print() -> None:
    text = str(Plan(tensor=GOOD, replicate=["output"], shard=[["layers.*", "output"]]))
    assert text.splitlines() == [
        f"tensor     layers.*.up    {GOOD['layers.*.up']!r}",
        f"tensor     layers.*.down  {GOOD['layers.*.down']!r}",
        "replicate  output",
        "shard      layers.* + output",
    ]
    assert str(Plan()) == ""
