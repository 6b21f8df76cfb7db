"""Products in float8: the formulas, which layers, and equality with one process on every mesh."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.torch_version import TorchVersion

import compose.memory.float8 as float8
from compose import (
    Options,
    Parallel,
    Pipeline,
    Plan,
    Precision,
    Trial,
    apply,
    forward_backward,
    verify,
)
from compose.config.models import find_model
from compose.data.samples import random_batch
from compose.memory.float8 import EXCEPTED, Choice, apply_float8, float8_styles, select_layers
from compose.ops.torch_versions import splits_functions
from compose.plan import resolve
from compose.planner.trace import RankStep, trace
from compose.proof.report import Report
from tests.support.checkpoints import goes_on_bitwise, shards, train_on
from tests.support.faults import (
    assert_named,
    gradients_are_averaged_over_ranks,
    partial_gradients_are_taken_as_whole,
    with_fault,
)
from tests.support.helpers import (
    FLOAT8_SHAPE,
    Keys,
    built,
    make_config,
    make_job,
    parallel,
    prove_on,
    prove_step,
    proved,
    refused,
    tiered,
)
from tests.support.mutation import mutated
from tests.support.pool import Pool, make_mesh
from tests.support.training import lines

RECIPES = ("tensorwise", "rowwise", "rowwise_gw_hp")


def rounded(x: Tensor, dim: int | None, kind: torch.dtype, power_of_2: bool) -> Tensor:
    """Round ``x`` to 8 bits, scaled so that the largest (along ``dim``) just fits."""
    top = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = (torch.finfo(kind).max / top.double().clamp(min=1e-12)).float()
    if power_of_2:
        scale = 2.0 ** scale.log2().floor()
    return (x * scale).to(kind).float() / scale


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_computes_what_the_formula_says(recipe: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 32, bias=False), nn.Linear(48, 32))
    apply_float8(model, Choice(recipe, True, {"0": 32}, {}))
    layer, plain = model
    assert isinstance(layer, nn.Linear)
    assert type(plain) is nn.Linear
    layer.weight.data[0] *= 50  # an outlier, which a scale of its own row alone sees
    weight, x = layer.weight.detach(), torch.randn(2, 9, 48).requires_grad_()
    out_gradient = torch.randn(2, 9, 32)
    result = layer(x)
    result.backward(out_gradient)

    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    rows, gradient = x.detach().flatten(0, 1), out_gradient.flatten(0, 1)
    whole = recipe == "tensorwise"
    by_row, by_column = (None, None) if whole else (1, 0)
    of_gradient = e5m2 if whole else e4m3
    y = rounded(rows, by_row, e4m3, not whole) @ rounded(weight, by_row, e4m3, not whole).T
    torch.testing.assert_close(result.flatten(0, 1), y)
    of_weight = by_column if recipe == "rowwise" else None
    grad_input = rounded(gradient, by_row, of_gradient, not whole) @ rounded(
        weight, of_weight, e4m3, not whole
    )
    assert x.grad is not None
    torch.testing.assert_close(x.grad.flatten(0, 1), grad_input)
    if recipe == "rowwise_gw_hp":
        grad_weight = gradient.T @ rows
    else:
        grad_weight = rounded(gradient, by_column, of_gradient, not whole).T @ rounded(
            rows, by_column, e4m3, not whole
        )
    torch.testing.assert_close(layer.weight.grad, grad_weight)
    exact = rows @ weight.T
    assert 5e-3 < float((result.detach().flatten(0, 1) - exact).norm() / exact.norm()) < 5e-2, (
        "8 bits, not 32"
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens", [100, 96])
def test_products_of_any_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch, recipe: Any, tokens: int
) -> None:
    """A kernel's rows are whole 16 bytes, padded only where they must be; the result is the same."""
    sizes, copies = [], []
    kernel, pad = torch._scaled_mm, torch.nn.functional.pad

    def scaled_mm(left: Tensor, right: Tensor, **options: Any) -> Tensor:
        sizes.extend([left.shape[1], *right.shape])
        return kernel(left, right, **options)

    def padded(x: Tensor, *args: Any) -> Tensor:
        copies.append(x.shape)
        return pad(x, *args)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(torch.nn.functional, "pad", padded)

    def run(emulate: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(48, 32)).bfloat16(), torch.randn(tokens, 48)
        apply_float8(model, Choice(recipe, emulate, {"0": 32}, {}))
        x = x.bfloat16().requires_grad_()
        model(x).square().sum().backward()
        assert x.grad is not None
        return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    expected, result = run(emulate=True), run(emulate=False)
    assert len(sizes) == (6 if recipe == "rowwise_gw_hp" else 9)
    assert not any(size % 16 for size in sizes)
    assert len(copies) == (2 if tokens % 16 and recipe != "rowwise_gw_hp" else 0)
    for value, want in zip(result, expected, strict=True):
        torch.testing.assert_close(value, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


def test_the_planner_runs_any_number_of_tokens() -> None:
    wide: dict[str, Any] = {"model__dim": 2048, "model__hidden_dim": 8192, "model__n_layers": 1}
    job = make_job(1, **wide, precision__float8="tensorwise", train__seq_len=50)
    assert trace(RankStep(job, micro_batches=1)).record


def chosen(preset: str, recipe: Any, tp: int = 1, emulate: bool = False) -> Choice:
    folder = find_model("llama")
    config = folder.presets[preset]
    model = folder.on_meta(config)
    resolved = resolve(folder.plan(config, Parallel(tp=tp)), model)
    with mock.patch.object(float8, "emulated", return_value=emulate):
        return select_layers(model, resolved, tp, recipe, "cuda")


def kinds(names: Any) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


@pytest.mark.parametrize(
    ("preset", "recipe", "tp", "left"),
    [
        ("8b", "tensorwise", 1, {"wk", "wv"}),  # 1024 x 4096
        ("8b", "rowwise", 1, {"wk", "wv"}),
        ("8b", "rowwise_gw_hp", 2, {"wq", "wk", "wv", "wo"}),  # 2048 outputs, 4096 x 2048
        ("8b", "tensorwise", 4, {"wq", "wk", "wv"}),  # 1024 outputs
        ("8b", "rowwise", 4, {"wq", "wk", "wv", "wo"}),  # 4096 x 1024
        ("1b", "rowwise", 1, {"wq", "wk", "wv", "wo", "w2"}),  # 2048 outputs
        ("1b", "tensorwise", 1, {"wk", "wv"}),  # 512 x 2048
        ("70b", "tensorwise", 1, set()),  # 1024 x 8192
    ],
)
def test_shapes_that_cannot_gain_are_left_out(
    preset: str, recipe: str, tp: int, left: set[str]
) -> None:
    choice = chosen(preset, recipe, tp)
    everything = {"wq", "wk", "wv", "wo", "w1", "w2", "w3"}
    assert kinds(name for name, why in choice.left.items() if why != EXCEPTED) == left
    assert kinds(choice.converted) == everything - left


def test_the_run_says_how_many_and_why() -> None:
    assert str(chosen("8b", "tensorwise")) == (
        "float8 tensorwise (by the device): 150 of 224 linear layers;"
        " 14 left out: in the plan's float8_except; 60 left out: 1024 x 4096 is too small to gain"
    )
    assert str(chosen("debug", "rowwise", 8, emulate=True)) == (
        "float8 rowwise (emulated here, for no gain in speed): 15 of 35 linear layers;"
        " 14 left out: in the plan's float8_except; 6 left out: 4 x 128 is no multiple of 16"
    )


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3"])
def test_the_first_layer_and_the_last_are_left_out(name: str) -> None:
    folder = find_model(name)
    config = folder.presets["debug"]
    model = folder.on_meta(config)
    resolved = resolve(folder.plan(config, Parallel()), model)
    last = str(sum(1 for _ in model.get_submodule("layers").children()) - 1)
    choice = select_layers(model, resolved, 1, "tensorwise", "cpu")
    excepted = {name for name, why in choice.left.items() if why == EXCEPTED}
    linear = {n for n in resolved.float8 if isinstance(model.get_submodule(n), nn.Linear)}
    assert excepted == {n for n in linear if n.split(".")[1] in ("0", last)}
    assert len({name.split(".")[1] for name in choice.converted}) == int(last) - 1


def test_a_plan_that_leaves_out_all(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = importlib.import_module("models.llama.plan")
    monkeypatch.setattr(plans, "outermost", lambda n_layers: ["layers.0", "layers.1"])
    assert refused(make_config, 1, precision__float8="rowwise") == [
        "precision.float8: rowwise would change none of 14 linear layers: they are in the plan's"
        ' float8_except; use precision.float8 = "off"'
    ]


def test_styles_of_tensor_parallel_send_8_bits() -> None:
    from torchao.float8.float8_tensor_parallel import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
    )

    gather = PrepareModuleInput(input_layouts=None, desired_input_layouts=None)
    styles = [
        ("a", gather),
        ("a.up", ColwiseParallel(use_local_output=False)),
        ("a.down", RowwiseParallel()),
        ("b", gather),
        ("b.up", ColwiseParallel()),
    ]
    modules = ["a", "a.up", "a.down", "b", "b.up"]
    choice = Choice("tensorwise", False, {"a.up": 16, "a.down": 16}, {"b.up": "small"})
    result = dict(float8_styles(styles, modules, choice))
    types = [type(result[name]) for name in modules]
    assert types == [
        PrepareFloat8ModuleInput,
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareModuleInput,  # b.up would be given 8 bits
        ColwiseParallel,
    ]
    assert not result["a.up"].use_local_output  # type: ignore[attr-defined]
    rows = Choice("rowwise", False, choice.converted, choice.left)
    assert float8_styles(styles, modules, rows) == styles


LLAMA = FLOAT8_SHAPE | {"train__global_batch": 8, "train__micro_batch": 2}
SELECTIVE: Keys = {"activation_checkpoint__mode": "selective"}
EXPERTS: Keys = {"model__name": "deepseek_v3", "model__preset": "debug"}
V = parallel(pp=2, pp_schedule="ZBVZeroBubble") | {"model__n_layers": 4}
IN_THE_SUITE: dict[str, Keys] = {
    "uneven shards": parallel(dp_shard=3) | {"train__global_batch": 6},
    "tp, rowwise": parallel(tp=2) | {"precision__float8": "rowwise"},
    "ring": parallel(cp=2) | {"train__seq_len": 30},
    "ZBVZeroBubble": V,
}
FULL: dict[str, Keys] = {
    "zero 3": parallel(dp_shard=2),
    "uneven shards, rowwise": IN_THE_SUITE["uneven shards"] | {"precision__float8": "rowwise"},
    "fsdp x tp, selective": parallel(dp_shard=2, tp=2) | SELECTIVE,
    "tp without sequence": parallel(tp=2, sequence=False),
    "tp, gw_hp": parallel(tp=2) | {"precision__float8": "rowwise_gw_hp"},
    "tp, key/value heads left out": parallel(tp=4) | {"model__hidden_dim": 256},
    "hsdp, bfloat16": parallel(dp_replicate=2, dp_shard=2) | {"precision__param": "bfloat16"},
    "float16, tied, alone": {"precision__param": "float16", "model__tie_embeddings": True},
    "experts with a shared one": parallel(tp=2, ep=2, dp_shard=2) | EXPERTS,
    "offloaded": parallel(dp_shard=2, offload="cpu"),
}
CASES = IN_THE_SUITE | FULL


def _without_noise(keys: dict[str, object]) -> Report:
    """Norms stay ones. Other weights turn the last bit of what the largest element is, and with it of
    a scale, by which all values then round anew."""
    with mutated("compose.proof.verify:spread", "normal_(0.0, _SPREAD,", "normal_(0.0, 0.0,"):
        return prove_step(keys)


def keys_for(name: str) -> Keys:
    given = LLAMA | CASES[name]
    if given.get("model__name"):
        given = {key: v for key, v in given.items() if key not in ("model__dim", "model__hidden_dim")}
    return given


@pytest.mark.parametrize("name", tiered(CASES, IN_THE_SUITE.keys() - {"tp, rowwise"}, FULL))
def test_equals_one_process(pool: Pool, name: str) -> None:
    if name == "ZBVZeroBubble" and not splits_functions():
        pytest.skip("torch before 2.13 cannot run backward of a float8 layer in two parts")
    prove_on(pool, keys_for(name), prove_step)


class Ends(nn.Module):
    """Linear layers between two linear ends."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(16, 16), nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def _ends() -> Report:
    torch.manual_seed(0)
    names = ["into", "layers.*", "head"]
    plan = Plan(shard=names, float8=names, pipeline=Pipeline(["into"], "layers", ["head"]))
    batch = {"x": torch.randn(8, 8, 16), "targets": torch.randint(16, (8, 8))}
    parallel = Parallel(pp=2, dp_shard=2, pp_layers=(1, 1))
    options = Options(parallel, Precision(float8="tensorwise"))
    return verify(Ends(), plan, make_mesh(parallel), batch, options, Trial(micro_batch=2))


def test_stages_have_the_layers_that_are_replaced(pool: Pool) -> None:
    """They ran those of before, whose weights the optimizer did not have."""
    proved(pool.run(_ends, 4))


def test_a_tied_weight_stays_one() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(32, 16), "head": nn.Linear(16, 32, bias=False)})
    model["head"].weight = model["table"].weight
    apply_float8(model, Choice("tensorwise", True, {"head": 32}, {}), shards=2)
    assert model["head"].weight is model["table"].weight


@pytest.mark.slow
def test_scales_are_those_of_the_whole(pool: Pool) -> None:
    """Where all scales are those of one process and nothing else is rounded, hardly a rounding falls
    apart; each tp rank's own scales of its part would make errors of 0.1."""
    report = pool.run(_without_noise, 4, keys_for("fsdp x tp, selective"))[0]
    assert max(row.error for row in report.rows if row.quantity == "gradient") < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [partial_gradients_are_taken_as_whole, gradients_are_averaged_over_ranks]
)
def test_faults_are_above_its_tolerance(pool: Pool, fault: Any) -> None:
    tp = fault is partial_gradients_are_taken_as_whole
    keys = LLAMA | {"parallel__tp" if tp else "parallel__dp_shard": 2}
    norms = {"layers.*.attention_norm.weight", "layers.*.ffn_norm.weight", "norm.weight"}
    assert_named(pool.run(with_fault, 2, fault, keys)[0], "gradient", norms if tp else {"*"})


def _bytes_gathered(keys: dict[str, object]) -> int:
    """Bytes that this rank's all-gathers of parameters send in a step."""
    job, composition = built(keys)
    sent: list[int] = []
    real = DefaultAllGather.__call__

    def counted(self: Any, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kw: Any) -> Any:
        sent.append(input_tensor.numel() * input_tensor.itemsize)
        return real(self, output_tensor, input_tensor, *args, **kw)

    batch = random_batch(2, 32, job.config.model.config.vocab_size, seed=0)
    with mock.patch.object(DefaultAllGather, "__call__", counted):
        forward_backward(composition, batch)
    # Later runs of the model, with other weights, compute their own scales.
    for parameter in composition.model.parameters():
        held = parameter._local_tensor  # type: ignore[attr-defined]
        assert getattr(held, "_precomputed_scale", None) is None
    return sum(sent)


def test_weights_are_gathered_in_8_bits(pool: Pool) -> None:
    """By FSDP: those of the layers, a fourth of their float32 bytes; embedding, head and norms as
    before."""
    keys = FLOAT8_SHAPE | {"parallel__dp_shard": 2, "train__micro_batch": 1, "train__global_batch": 2}
    plain = pool.run(_bytes_gathered, 2, keys | {"precision__float8": "off"})[0]
    result = pool.run(_bytes_gathered, 2, keys)[0]
    job = make_job(2, **keys)
    model = job.model
    weights = sum(
        model.get_submodule(name).weight.numel()  # type: ignore[union-attr,operator]
        for name in job.resolved.float8
        if isinstance(model.get_submodule(name), nn.Linear)
    )
    gathers = 2  # in forward and backward
    assert plain - result == gathers * 3 * weights // 2


@pytest.mark.full
def test_checkpoints_hold_plain_weights_and_go_on_bitwise(pool: Pool, tmp_path: Path) -> None:
    mesh = parallel(dp_shard=2, tp=2)
    goes_on_bitwise(pool, tmp_path, LLAMA, mesh)
    saved = [tmp_path / run / "checkpoints" / "step-00000004" for run in ("whole", "parts")]
    assert shards(saved[0]) == shards(saved[1])
    # On one process, without the subclass, and without torchao.
    plain = train_on(pool, tmp_path / "parts", LLAMA | {"precision__float8": "off"}, {}, 6)
    assert all(value.isfinite().all() for value in plain.values())
    losses = [line["loss"] for line in lines(tmp_path / "whole")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("message", "keys", "emulate"),
    [
        (
            "rowwise would change none of 14 linear layers: the first's part of 72 x 72 is no multiple"
            ' of 16; use precision.float8 = "off"',
            {"precision__float8": "rowwise", "model__dim": 72, "model__n_heads": 4},
            True,
        ),
        (
            "tensorwise would change none of 14 linear layers: the first's part of 64 x 64 is too small"
            ' to gain; use precision.float8 = "off"',
            {"precision__float8": "tensorwise"},
            False,
        ),
    ],
)
def test_refused(message: str, keys: Keys, emulate: bool) -> None:
    with mock.patch.object(float8, "emulated", return_value=emulate):
        assert refused(make_job, 1, **keys) == [f"precision.float8: {message}"]


@pytest.mark.parametrize(("version", "fails"), [("2.12.1", True), ("2.13.0", False)])
def test_backward_in_two_parts(monkeypatch: pytest.MonkeyPatch, version: str, fails: bool) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    message = (
        "precision.float8: tensorwise makes a layer one function of input and weight, whose backward"
        f" torch {version} cannot run in two parts, as ZBVZeroBubble does; use torch 2.13, or"
        ' parallel.pp_schedule = "Interleaved1F1B"'
    )
    assert refused(make_job, 2, **FLOAT8_SHAPE | V) == ([message] if fails else [])


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "torchao" else real(n, *a)
    )
    assert refused(make_job, 1, precision__float8="rowwise") == [
        "precision.float8: needs torchao; pip install 'dtensor-compose[float8]', or use"
        ' precision.float8 = "off"'
    ]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["act"], "act is ReLU: neither an nn.Linear nor a module with PrepareModuleInput"),
        (["iner"], "pattern 'iner' matches no module; did you mean inner?"),
        (
            [],
            'the model\'s plan has nothing under it; add it, or use precision.float8 = "off"',
        ),
    ],
)
def test_plans_are_strict(pool: Pool, names: list[str], message: str) -> None:
    assert pool.run(_problems, 1, Plan(float8=names))[0] == [f"plan.float8: {message}"]


def _problems(plan: Plan) -> list[str]:
    model = nn.ModuleDict({"inner": nn.Linear(16, 16), "act": nn.ReLU()})
    options = Options(precision=Precision(float8="rowwise"))
    return refused(apply, model, plan, make_mesh(Parallel()), options)
