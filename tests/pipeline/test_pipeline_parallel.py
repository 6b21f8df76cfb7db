"""Every schedule, cut, and composition of a pipeline, proved equal to one process."""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

from compose import Options, Parallel, Pipeline, Plan, Trial, apply, forward_backward, verify
from compose.data.samples import random_batch
from compose.ops.batch import count_targets
from compose.ops.cross_entropy import cross_entropy
from compose.pipeline.pipeline_parallel import PipelineRunner
from compose.pipeline.schedules import ASYNCHRONOUS, SCHEDULES, build_table
from compose.pipeline.split import _costs, balanced, check_layers
from compose.pipeline.stage import PlainStage, _disjoint
from compose.plan import resolve
from compose.proof.comparison import whole as full
from compose.proof.report import Report
from models.llama import Config as LlamaConfig
from models.llama import Model as Llama
from models.llama import plan as llama_plan
from tests.support.helpers import (
    Keys,
    in_turn,
    make_job,
    parallel,
    proofs,
    prove_on,
    prove_step,
    proved,
    ranks_in,
    refusal,
    refused,
    tiered,
)
from tests.support.pool import Pool, make_mesh


def batches(micro_batches: int, data_ranks: int = 1) -> dict[str, object]:
    return {"train__micro_batch": 1, "train__global_batch": micro_batches * data_ranks}


@pytest.mark.parametrize(
    "case",
    tiered(("2-tied", "4-untied", "2-untied", "4-tied"), ("4-untied",), ("2-untied", "4-tied")),
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(pool: Pool, schedule: str, case: str) -> None:
    """Layers as FLOPs ask for."""
    pp, tied = int(case[0]), case.endswith("-tied")
    keys = parallel(pp=pp, pp_schedule=schedule) | batches(8)
    keys |= {"model__n_layers": 6, "model__tie_embeddings": tied}
    report = prove_on(pool, keys, prove_step)
    quantities = {row.quantity for row in report.rows}
    usual = {"initial weight", "gradient", "loss", "grad_norm", "update", "copies", "trained"}
    assert quantities == (usual | {"tied copies"} if tied else usual)
    parameters = 2 + 6 * 9 + (not tied)
    assert sum(row.quantity == "gradient" for row in report.rows) == parameters


# Counts that the number of ranks does not divide, where the schedule has them; uneven cuts, ends that
# hold no layer; one virtual stage, and three.
UNEVEN: list[Keys] = [
    parallel(pp=2, pp_schedule="GPipe", pp_layers="[5,1]") | batches(3),
    parallel(pp=2, pp_schedule="1F1B", pp_layers="[0,6]") | batches(5),
    parallel(pp=2, pp_schedule="1F1B", pp_layers="[6,0]") | batches(1),
    parallel(pp=2, pp_schedule="Interleaved1F1B", pp_layers="[1,3,2,0]") | batches(3),
    parallel(pp=2, pp_schedule="LoopedBFS", pp_layers="[0,1,2,3]") | batches(5),
    parallel(pp=2, pp_schedule="InterleavedZeroBubble", pp_layers="[3,1,1,1]") | batches(3),
    parallel(pp=2, pp_schedule="ZBVZeroBubble", pp_layers="[0,4,1,1]") | batches(5),
    parallel(pp=2, pp_schedule="DualPipeV", pp_layers="[2,3,1,0]") | batches(5),
    parallel(pp=2, pp_schedule="Interleaved1F1B", pp_virtual_stages=3) | batches(4),
    parallel(pp=2, pp_schedule="InterleavedZeroBubble", pp_virtual_stages=1) | batches(4),
    parallel(pp=4, pp_schedule="GPipe", pp_layers="[1,3,1,1]") | batches(6),
    parallel(pp=4, pp_schedule="1F1B", pp_layers="[0,3,2,1]") | batches(7),
    parallel(pp=4, pp_schedule="1F1B", pp_layers="[2,2,2,0]") | batches(2),
    parallel(pp=4, pp_schedule="Interleaved1F1B", pp_layers="[0,1,1,1,1,1,1,0]") | batches(10),
    parallel(pp=4, pp_schedule="LoopedBFS", pp_layers="[0,1,1,1,1,1,1,0]") | batches(3),
    parallel(pp=4, pp_schedule="InterleavedZeroBubble", pp_layers="[0,1,1,1,1,1,1,0]") | batches(10),
    parallel(pp=4, pp_schedule="ZBVZeroBubble", pp_layers="[0,1,1,1,1,1,1,0]") | batches(5),
    parallel(pp=4, pp_schedule="DualPipeV", pp_layers="[0,1,1,1,1,1,1,0]") | batches(9),
]


def _words(keys: Keys) -> str:
    return " ".join(f"{key.split('__')[1]} {value}" for key, value in keys.items())


def _in_turn(cases: Sequence[Keys], quick: Callable[[Keys], bool]) -> list[Any]:
    return [
        pytest.param(*p.values, id=_words(p.values[0]), marks=p.marks) for p in in_turn(cases, quick)
    ]


@pytest.mark.parametrize(
    "keys", _in_turn(UNEVEN, lambda keys: ranks_in(keys) == 2 and "F1B" in str(keys))
)
def test_uneven(pool: Pool, keys: Keys) -> None:
    tied = int(str(keys["train__global_batch"])) % 2 == 0
    prove_on(pool, keys | {"model__n_layers": 6, "model__tie_embeddings": tied}, prove_step)


FULL: Keys = {"activation_checkpoint__mode": "full"}
PRODUCTS: list[Keys] = [
    *(
        parallel(pp=2, dp_shard=2, zero=zero, pp_schedule=schedule) | batches(4, 2)
        for zero in range(4)
        for schedule in ("1F1B", "InterleavedZeroBubble")
    ),
    # A stage without attention cuts its sequences as the others do.
    parallel(pp=2, cp=2, cp_balance="none", pp_layers="[0,4]") | batches(4),
    parallel(pp=2, dp_replicate=2, pp_schedule="ZBVZeroBubble") | batches(3, 2),
    parallel(pp=2, tp=2, pp_schedule="ZBVZeroBubble") | batches(4),
    parallel(pp=2, tp=2, sequence=False, loss=False, pp_schedule="DualPipeV") | batches(4),
    parallel(pp=2, tp=2, pp_schedule="Interleaved1F1B") | batches(2),
    parallel(pp=2, cp=2, cp_method="ring", pp_schedule="InterleavedZeroBubble") | batches(4),
    parallel(pp=2, cp=2, cp_method="allgather", pp_schedule="GPipe") | batches(4),
    parallel(pp=2, cp=2, cp_method="ulysses", pp_schedule="ZBVZeroBubble") | batches(4),
    parallel(pp=2, cp=2, cp_method="ring", pp_schedule="LoopedBFS") | batches(4),
    # Recomputation, which a split backward does twice.
    parallel(pp=2, cp=2, pp_schedule="1F1B") | batches(4) | FULL,
    parallel(pp=2, cp=2, pp_schedule="ZBVZeroBubble") | batches(4) | FULL,
    # Samples of odd length, in micro-batches of three.
    parallel(pp=2, cp=2, pp_schedule="DualPipeV")
    | {"train__seq_len": 29, "train__micro_batch": 3, "train__global_batch": 12},
]


@pytest.mark.parametrize(
    "keys",
    _in_turn(PRODUCTS, lambda keys: "ZBVZeroBubble" in keys.values() and "full" not in keys.values()),
)
def test_products(pool: Pool, keys: Keys) -> None:
    prove_on(pool, keys | {"model__n_layers": 4, "model__tie_embeddings": True}, prove_step)


V_CASES = {
    f"{schedule}-{zero}": parallel(pp=2, cp=2, dp_shard=2, zero=zero, pp_schedule=schedule)
    for schedule in ("ZBVZeroBubble", "DualPipeV")
    for zero in (1, 2, 3)
}
V_SLOW = {"ZBVZeroBubble-3", "DualPipeV-2"}
test_v_schedules_with_documents_tied_weights_cp_and_zero = proofs(
    V_CASES,
    batches(4, 2) | {"model__n_layers": 4, "model__tie_embeddings": True},
    V_SLOW,
    V_CASES.keys() - V_SLOW,
    prove_step,
)
HALF_CASES = {
    f"{schedule}-{zero}": parallel(pp=2, dp_shard=2, zero=zero, pp_schedule=schedule)
    for schedule in ("1F1B", "ZBVZeroBubble")
    for zero in (1, 3)
}
HALF_SLOW = {"1F1B-1", "ZBVZeroBubble-3"}
test_bfloat16 = proofs(
    HALF_CASES,
    batches(4, 2) | {"precision__param": "bfloat16", "model__n_layers": 4},
    HALF_SLOW,
    HALF_CASES.keys() - HALF_SLOW,
    prove_step,
)


def test_csv_of_actions(pool: Pool, tmp_path: Path) -> None:
    """A table of one's own: GPipe with its backwards in the other order."""
    rows = [row[:3] + row[:2:-1] for row in build_table("GPipe", 2, 0, 3)]
    (tmp_path / "own.csv").write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    prove_on(pool, parallel(pp=2, pp_schedule=tmp_path / "own.csv") | batches(3), prove_step)


def _small(tied: bool = False) -> LlamaConfig:
    return LlamaConfig(n_layers=3, dim=32, n_heads=4, hidden_dim=48, tie_embeddings=tied)


def _accumulated_over_calls() -> float:
    """Largest relative difference between gradients of two calls, of different shapes, and of the sum
    of what one process finds in each."""
    config, degrees = _small(tied=True), Parallel(pp=2, dp_shard=1)
    mesh = make_mesh(degrees)
    # The second has shorter samples, the third fewer.
    shapes = ((4, 16), (4, 12), (3, 12))
    parts = [random_batch(*shape, config.vocab_size, seed) for seed, shape in enumerate(shapes)]
    torch.manual_seed(0)
    whole = Llama(config)
    composition = apply(copy.deepcopy(whole), llama_plan(config, degrees), mesh)
    for part in parts:
        forward_backward(composition, part, micro_batch=1)
        inputs = dict(part)
        targets = inputs.pop("targets")
        loss = cross_entropy(whole(**inputs), targets) / count_targets(targets)
        loss.backward()
    return max(
        float((full(p.grad) - whole.get_parameter(name).grad).norm() / full(p.grad).norm())  # type: ignore[operator]
        for name, p in composition.model.named_parameters()
    )


def test_gradients_accumulate_over_calls(pool: Pool) -> None:
    assert max(pool.run(_accumulated_over_calls, 2)) < 1e-5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return x + torch.tanh(self.inner(x)) * (1 if scale is None else scale[:, None])


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [Block() for _ in range(4)]
        blocks[3].inner.weight = blocks[0].inner.weight
        self.into, self.blocks = nn.Linear(5, 6), nn.ModuleList(blocks)


class Nested(nn.Module):
    """Layers in a plain ModuleList inside another module; two of them share a weight; float input."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body(), nn.Linear(6, 7)
        self.register_buffer("shift", torch.rand(6))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = self.body.into(x)
        for block in self.body.blocks:
            x = block(x, scale) + self.shift
        return self.head(x)


NESTED = Plan(
    shard=[["body.into"], ["body.blocks.0", "body.blocks.3"], "body.blocks.[12]", "head"],
    pipeline=Pipeline(first=["body.into"], layers="body.blocks", last=["head"]),
)


def _own_model(schedule: str, layers: tuple[int, ...]) -> Report:
    """Verify layers that share a weight, on another stage or their own; weights and the buffer that
    count are those of rank 0."""
    torch.manual_seed(dist.get_rank())
    generator = torch.Generator().manual_seed(0)
    batch = {
        "x": torch.randn(4, 5, generator=generator),
        "scale": torch.randn(4, generator=generator),
        "targets": torch.arange(4),
    }
    return verify(
        Nested(),
        NESTED,
        make_mesh(Parallel(pp=2)),
        batch,
        Options(Parallel(pp=2, pp_schedule=schedule, pp_layers=layers)),
        Trial(micro_batch=1, loss_function=nn.CrossEntropyLoss(reduction="sum")),
    )


@pytest.mark.parametrize(
    ("schedule", "layers"),
    [("1F1B", (2, 2)), ("1F1B", (4, 0)), ("ZBVZeroBubble", (1, 1, 1, 1)), ("LoopedBFS", (0, 1, 3, 0))],
    ids=str,
)
def test_own_model_with_layers_that_share_a_weight(
    pool: Pool, schedule: str, layers: tuple[int, ...]
) -> None:
    proved(pool.run(_own_model, 4, schedule, layers))


class Layer(nn.Module):
    """All layers have one norm. Weights enter the stream once or several times, alone or together."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = norm, nn.Linear(6, 6)
        self.one, self.two, self.both = (nn.Parameter(torch.rand(6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.norm(x) + (self.one + self.both)).tanh() * self.one.sigmoid()
        return x + self.inner(x + (self.two + self.both))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.LayerNorm(6)
        self.into, self.layers = nn.Linear(5, 6), nn.ModuleList(Layer(norm) for _ in range(4))
        self.head = nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _error(model: nn.Module, plan: Plan, mesh: DeviceMesh, options: Options) -> float:
    plain, loss = copy.deepcopy(model), nn.CrossEntropyLoss(reduction="sum")
    batch = {"x": torch.randn(4, 5), "targets": torch.arange(4)}
    (loss(plain(batch["x"]), batch["targets"]) / 4).backward()
    composition = apply(model, plan, mesh, options)
    forward_backward(composition, batch, micro_batch=1, loss_function=loss)
    error = 0.0
    for name, parameter in composition.named_parameters():
        one, other = (
            torch.zeros_like(p) if p.grad is None else full(p.grad)
            for p in (plain.get_parameter(name), parameter)
        )
        error = max(error, float((other - one).abs().max()))
    return error


def _shared(schedule: str) -> tuple[Report, float]:
    """The proof, and the greatest error of a gradient against plain PyTorch."""
    torch.manual_seed(0)
    model, batch = Shared(), {"x": torch.randn(4, 5), "targets": torch.arange(4)}
    plan = Plan(pipeline=Pipeline(["into"], "layers", ["head"]))
    options, mesh = Options(Parallel(pp=2, pp_schedule=schedule)), make_mesh(Parallel(pp=2))
    loss = nn.CrossEntropyLoss(reduction="sum")
    report = verify(model, plan, mesh, batch, options, Trial(micro_batch=1, loss_function=loss))
    return report, _error(model, plan, mesh, options)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_stages_that_share_a_module_and_weights_used_twice(pool: Pool, schedule: str) -> None:
    results = pool.run(_shared, 2, schedule)
    proved([report for report, _ in results])
    assert max(error for _, error in results) < 1e-6


class Turned(nn.Module):
    """What it returns, and the gradient that it hands back, lie transposed, as those of a GRU may."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mT).tanh().mT


def _turned(schedule: str) -> float:
    torch.manual_seed(0)
    model: Any = Shared()
    model.into = nn.Sequential(nn.Linear(5, 36), nn.Unflatten(1, (6, 6)))
    model.layers = nn.ModuleList(Turned() for _ in range(4))
    model.head = nn.Sequential(nn.Flatten(), nn.Linear(36, 7))
    options = Options(Parallel(pp=2, pp_schedule=schedule))
    plan = Plan(pipeline=Pipeline(["into"], "layers", ["head"]))
    return _error(model, plan, make_mesh(options.parallel), options)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_stream_that_lies_with_gaps(pool: Pool, schedule: str) -> None:
    """Messages do not take it: a rank failed, and the other waited for it."""
    assert max(pool.run(_turned, 2, schedule)) < 1e-6


class Cut(Layer):
    """It gives no gradient to the layers before it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


def _cut(schedule: str, frozen: bool = True) -> float:
    """The greatest error of a gradient against plain PyTorch."""
    torch.manual_seed(0)
    model = Shared()
    model.layers[3] = Cut(nn.LayerNorm(6))
    for part in (model.into, *model.layers[:3]) if frozen else ():
        part.requires_grad_(False)
    plan = Plan(pipeline=Pipeline(["into"], "layers", ["head"]))
    options, mesh = Options(Parallel(pp=2, pp_schedule=schedule)), make_mesh(Parallel(pp=2))
    return _error(model, plan, mesh, options)


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "DualPipeV"])
def test_a_detached_stream_loses_no_gradient_behind_it(pool: Pool, schedule: str) -> None:
    assert max(pool.run(_cut, 2, schedule)) < 1e-6


def _cut_and_trained(schedule: str) -> str:
    return refusal(_cut, schedule, frozen=False)


@pytest.mark.parametrize(("schedule", "stage"), [("1F1B", 1), ("InterleavedZeroBubble", 2)])
def test_weights_behind_which_the_stream_is_detached(pool: Pool, schedule: str, stage: int) -> None:
    """They had gradients of 0, by which weight decay moved them."""
    assert pool.run(_cut_and_trained, 2, schedule) == 2 * [
        f"plan.pipeline: stage {stage} gives its input no gradient, as x.detach() does, and stages"
        " before it would get zeros, by which an optimizer decays weights; freeze their weights by"
        " requires_grad_(False), or use parallel.pp = 1"
    ]


def _modes() -> list[set[bool]]:
    plan, options = Plan(pipeline=Pipeline(["into"], "layers", ["head"])), Options(Parallel(pp=2))
    model = Shared().eval()
    composition = apply(model, plan, make_mesh(Parallel(pp=2)), options)
    assert composition.pipeline is not None
    parts = (model, *(stage.module for stage in composition.pipeline.stages))
    seen = []
    for change in (model.train, model.eval):
        assert change() is model
        seen.append({module.training for part in parts for module in part.modules()})
    return seen


def test_stages_are_in_the_mode_of_the_model(pool: Pool) -> None:
    """A stage stayed in evaluation, as a model of transformers is when it was read."""
    assert pool.run(_modes, 2) == [[{True}, {False}]] * 2


def _refusals() -> list[str]:
    config, degrees = _small(), Parallel(pp=2)
    mesh = make_mesh(degrees)
    unknown = Options(replace(degrees, pp_schedule="2F2B"))
    plan = llama_plan(config, degrees)
    composition = apply(Llama(config), plan, mesh)
    batch = random_batch(5, 16, config.vocab_size, seed=0)
    with pytest.raises(RuntimeError) as caught:
        composition.model(batch["tokens"])
    return [
        *refused(apply, Llama(config), Plan(), mesh),
        *refused(apply, Llama(config), plan, mesh, unknown),
        str(caught.value),
        *refused(forward_backward, composition, batch, micro_batch=2),
        *refused(forward_backward, composition, {"input_ids": batch.pop("tokens"), **batch}),
    ]


def test_groups_of_weights_are_in_one_order_on_all_ranks() -> None:
    """A weight of the first group enters again behind another one; PyTorch goes by addresses."""
    weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    a, between, b = (get_gradient_edge(weight).node for weight in weights)
    early, late, other = (weight.view(1).grad_fn for weight in weights)

    def group(params: set[Any], *places: Any) -> dict[str, Any]:
        return {"params": params, "intermediates": [*places], "grads": [(None,) for _ in places]}

    middle = group({between}, other)
    one = [group({a, b}, early, late), middle]
    two = [group({a, b}, early, late), middle, group({b}, early, late)]
    for groups in (one, two):
        result = _disjoint(groups, weights)
        assert [each["params"] for each in result] == [{a, b}, {between}]


def test_refusals(pool: Pool) -> None:
    assert pool.run(_refusals, 2)[0] == [
        "plan.pipeline: the model's plan has nothing under it; add it, or use parallel.pp = 1",
        "parallel.pp_schedule: unknown schedule '2F2B' (known:"
        f" {', '.join([*SCHEDULES, *ASYNCHRONOUS])}, or a .csv file)",
        "this rank holds some stages of the model: run it by compose.forward_backward",
        "micro_batch: 5 samples are no whole number of micro-batches of 2, which a pipeline needs",
        "batch: has no tokens, the first argument of the model's forward; give it under that name",
    ]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.out.weight = self.into.weight
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def _tied_and_placed_otherwise() -> list[str]:
    """The refusal of a table and an output that tensor parallel cuts along other dims, on 2 stages."""
    degrees = Parallel(pp=2, tp=2)
    cut = {"into": ColwiseParallel(), "out": ColwiseParallel(output_layouts=Replicate())}
    pipeline = Pipeline(first=["into"], layers="layers", last=["out"])
    plan = Plan(tensor=cut, replicate=["layers.*"], pipeline=pipeline)
    return refused(apply, Tied(), plan, make_mesh(degrees), Options(degrees))


def test_a_tied_weight_that_two_stages_place_otherwise_is_refused(pool: Pool) -> None:
    lines = pool.run(_tied_and_placed_otherwise, 4)
    start = "plan.tensor: into.weight and out.weight are one tied parameter but are placed differently:"
    assert all(line.startswith(start) for (line,) in lines), lines


def test_another_number_of_samples_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial gathers weights over ranks of which some may have other numbers of samples."""
    runner, tried = object.__new__(PipelineRunner), list[int]()
    runner.streams = {}

    def trial(first: Tensor, inputs: object) -> Tensor:
        tried.append(len(first))
        return torch.empty(len(first), 5, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)

    monkeypatch.setattr(runner, "_try_stream", trial)
    for samples in (2, 1, 3, 2):
        stream = runner.stream(torch.zeros(samples, 5), {"positions": torch.zeros(samples, 5)})
        assert (stream.shape, stream.dtype) == ((samples, 5, 8), torch.bfloat16)
        assert stream.requires_grad
        assert stream.is_leaf
    assert tried == [2]
    runner.stream(torch.zeros(2, 6), {"positions": torch.zeros(2, 6)})
    assert tried == [2, 2]


class _Slices(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (2 * x)[:, 1:]


def test_a_stream_that_is_a_view_can_be_detached_in_place() -> None:
    """A backward in two parts does that."""
    stage = PlainStage(_Slices(), mock.Mock(), last=False)
    stream = stage(torch.ones(2, 3, requires_grad=True), targets=torch.ones(2))
    assert stream.detach_().tolist() == [[2.0, 2.0]] * 2


def test_cut_by_flops() -> None:
    """The slowest stage of the balanced cut does no more than that of any other."""
    job = make_job(1, model__n_layers=7, model__vocab_size=2000)
    config, model, plan = job.config, job.model, job.plan
    assert plan.pipeline
    length, dim = config.train.seq_len, config.model.config.dim
    layer = config.model.config
    per_layer = 2 * length * (2 * dim * dim + 2 * dim * 16 + 3 * dim * layer.hidden_dim)
    per_layer += 2 * length * (length + 1) * dim
    head = 2 * length * dim * 2000
    for stages in (2, 3, 4, 5):
        result = balanced(model, plan.pipeline, stages, length)
        cuts = [
            cut
            for cut in itertools.product(range(8), repeat=stages)
            if sum(cut) == 7 and all(cut[1:-1])
        ]
        slowest = {cut: max(*(n * per_layer for n in cut), cut[-1] * per_layer + head) for cut in cuts}
        assert slowest[result] == min(slowest.values()), (stages, result)
        # The head is worth some layers here, so an even cut is not the best.
        assert result[-1] < result[0]


def test_cut_by_weights() -> None:
    """A model that takes no token ids is cut by its matrices: 30, 4 of 36 each, 42."""
    pipeline = NESTED.pipeline
    assert pipeline
    assert _costs(Nested(), pipeline, 2048) == (30, [36] * 4, 42)
    assert [balanced(Nested(), pipeline, n, 2048) for n in (2, 3)] == [(2, 2), (1, 2, 1)]


def test_layers_by_hand() -> None:
    check_layers([0, 3, 2], 3, 5)
    for layers, stages, problem in [
        ([3, 2], 4, "[3, 2] is for 2 stages; this pipeline has 4"),
        ([3, 3], 2, "[3, 3] adds up to 6 layers; the model has 5; nearest: [2, 3]"),
        ([1, 1], 2, "[1, 1] adds up to 2 layers; the model has 5; nearest: [3, 2]"),
        (
            [10**9, 3],
            2,
            f"{[10**9, 3]} adds up to {10**9 + 3} layers; the model has 5; nearest: [2, 3]",
        ),
        ([3, 0, 2], 3, "[3, 0, 2] leaves stage 1 nothing to do; give it a layer"),
    ]:
        assert refused(check_layers, layers, stages, 5) == [f"parallel.pp_layers: {problem}"]


def test_plans_that_no_pipeline_fits() -> None:
    model = Nested()
    for pipeline, problem in [
        (
            Pipeline([], "body.block", ["head"]),
            "there is no module 'body.block'; did you mean body.blocks?",
        ),
        (Pipeline(["body.into"], "head", []), "head holds no layers"),
        (
            Pipeline([], "body.blocks", ["head"]),
            "parameter body.into.weight is of no stage; name its module in first or last",
        ),
    ]:
        assert refused(resolve, Plan(pipeline=pipeline), model)[0] == f"plan.pipeline: {problem}"
