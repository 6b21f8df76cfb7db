"""The planner's memory: what ranks on CPUs allocate, and the same from few layers as from all."""

import gc
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from compose.config.job import Job
from compose.pipeline.schedules import Action
from compose.planner import estimate, record_pool
from compose.planner.cluster import load_cluster
from compose.planner.few_layers import LayerRuns, few_micro_batches
from compose.planner.memory import ActionMemory, Bytes, RankMemory, categorize, peak, stand_ins
from compose.planner.record import Allocation, Record, StepSegment
from tests.support.helpers import ROOT, keys_in, make_job, ranks_in, tier

MOE = "model.name=qwen3 model.n_experts=4 model.expert_dim=64 model.head_dim=16"
MIXED = (
    "model.name=deepseek_v3 model.n_experts=4 model.n_groups=1 model.top_groups=1 model.expert_dim=64"
    " model.kv_rank=32 model.nope_dim=16 model.rope_dim=16 model.v_dim=16"
)


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """benchmarks/planner_memory.py, which finds the modules beside it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("planner_memory")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


BASE = (
    "model.n_layers=2 model.dim=64 model.hidden_dim=192 train.seq_len=64 train.micro_batch=1"
    " train.global_batch=4 model.vocab_size=1000"
)
ROWS = {
    "a stage of each schedule's kinds": "pp=2 pp_schedule=DualPipeV model.n_layers=4",
    "zero 1, bfloat16, several micro-batches": "dp_shard=2 zero=1 precision.param=bfloat16"
    " activation_checkpoint.mode=full train.global_batch=6",
    "offloaded": "offload=cpu activation_checkpoint.offload=true optimizer.implementation=foreach",
    "experts": f"dp_shard=2 ep=2 optimizer.name=muon {MIXED}",
    "tp and chunks of the loss": "tp=2 train.loss_chunk=20 optimizer.offload=nvme model.vocab_size=777",
    "cp": "cp=2 activation_checkpoint.mode=selective",
    "1F1B with tied ends": "pp=2 model.n_layers=4 model.tie_embeddings=true",
    "halves": "pp=2 model.n_layers=4 pp_schedule=InterleavedZeroBubble",
    "the turn of a V": "pp=4 pp_schedule=ZBVZeroBubble model.n_layers=8 model.n_heads=2"
    " model.n_kv_heads=2 train.global_batch=16",
    "budget": "model.name=qwen3 model.n_layers=3 model.dim=128 model.hidden_dim=331 model.n_heads=4"
    " model.n_kv_heads=2 model.head_dim=16 activation_checkpoint.mode=budget train.seq_len=144"
    " activation_checkpoint.budget=0.8 precision.param=bfloat16 precision.master=bfloat16"
    " precision.reduce=bfloat16 optimizer.implementation=fused",
    "segments": "dp_shard=2 model.n_layers=8 activation_checkpoint.mode=full"
    " activation_checkpoint.segment=3",
    "hsdp": "dp_replicate=2 dp_shard=2 zero=2",
}
LONG = ("the turn of a V", "budget", "tp and chunks of the loss", "experts")


@pytest.mark.parametrize("name", [pytest.param(n, marks=tier(slow=True, full=n in LONG)) for n in ROWS])
def test_equal_to_what_ranks_allocate(benchmark: ModuleType, name: str) -> None:
    keys = keys_in(BASE) | keys_in(ROWS[name])
    dotted = {key.replace("__", "."): value for key, value in keys.items()}
    for line in benchmark.row_lines(dotted, ranks_in(keys)):
        for how in ("table", "replay"):
            if how in line:
                assert abs(line[how]["error"]) < 0.002, (how, line)
                assert abs(line[how]["category_error"]) < 0.03, (how, line)


def test_garbage_of_an_earlier_profile_does_not_count(benchmark: ModuleType) -> None:
    class Cycle:
        pass

    cycle: Any = Cycle()
    with torch.profiler.profile(profile_memory=True):
        cycle.tensor = torch.zeros(500)
    cycle.itself = cycle
    gc.collect()  # only a full collection finds it from here on
    del cycle
    seen = benchmark.Allocations(torch.device("cpu"))
    with seen.watched():
        seen.begin([])
        gc.collect()
        kept = torch.zeros(1000)
    assert seen.peak() == kept.nbytes


def _several(runs: LayerRuns | None, stages: Any, ranks: int) -> list[LayerRuns | None]:
    assert runs is not None
    return [runs.fewest(), *map(runs.fewest, runs.places())]


def _peaks(job: Job) -> list[tuple[int, Any]]:
    rows = estimate.schedule_rows(job)
    ranks = estimate.rank_costs(job, load_cluster("cpu"), rows)
    return [peak(r.memory, row, job.micro_batches) for r, row in zip(ranks, rows, strict=True)]


FEW = {
    "dense": "dp_shard=2 model.n_layers=6",
    "local and global": "dp_shard=2 model.name=gemma3 model.n_layers=10 model.global_every=5"
    " model.window=4",
    "moe": f"dp_shard=2 model.n_layers=6 {MOE}",
    "mixed": f"dp_shard=2 model.n_layers=9 model.n_dense_layers=4 {MIXED}",
    "virtual stages": "pp=2 pp_schedule=Interleaved1F1B pp_virtual_stages=2 model.n_layers=20"
    " train.global_batch=8",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_few_layers_stand_for_all(name: str) -> None:
    job = make_job(2, **keys_in(FEW[name]))
    with mock.patch.object(record_pool, "_kept", return_value=[None]):
        whole = _peaks(job)
    with mock.patch.object(record_pool, "_kept", _several):
        few = _peaks(job)
    assert few == whole


def _rank(**actions: ActionMemory) -> RankMemory:
    named = {"F": (0, "F", "middle"), "B": (0, "B", "middle"), "step": (-1, "step", "last")}
    memory = RankMemory(Bytes({"weights": 100}), Bytes({"activations": 1}))
    for name, action in actions.items():
        stage, kind, _ = named[name]
        places = ("first", "middle", "last") if stage >= 0 else ("last",)
        for place in places:
            memory.actions[stage, kind, place] = action
    return memory


def test_activations_of_the_warm_up_add_up() -> None:
    """A stage that has n micro-batches in flight holds those of n, and buffers of all."""
    forward = ActionMemory(
        Bytes({"activations": 10}), {("forward", "", "1"): Bytes({"activations": 12})}
    )
    backward = ActionMemory(Bytes({"activations": -10}), {("backward", "", "1"): Bytes({"logits": 5})})
    rank = _rank(F=forward, B=backward, step=ActionMemory())
    order = "F0 F1 F2 B0 F3 B1 B2 B3"
    row = [Action(0, word[0], int(word[1])) for word in order.split()]
    size, shares = peak(rank, row, 4)
    assert size == 100 + 4 + 30 + 5
    assert shares == {"weights": 100, "activations": 34, "logits": 5}


def test_both_halves_stand_for_a_backward() -> None:
    known = {(1, "I", "middle"), (1, "W", "middle"), (0, "B", "last")}
    assert stand_ins((1, "B", "middle"), known) == [(1, "I", "middle"), (1, "W", "middle")]
    assert stand_ins((0, "I", "last"), known) == [(0, "B", "last")]
    assert stand_ins((0, "W", "last"), known) == []
    assert stand_ins((0, "B", "last"), known) == [(0, "B", "last")]


def test_micro_batches_with_each_kind_of_action() -> None:
    assert few_micro_batches(make_job(1, train__global_batch=16)) == [0, 1, 7]
    line = "pp=2 model.n_layers=4 train.global_batch=16 pp_schedule=DualPipeV"
    job = make_job(2, **keys_in(line))
    chosen = few_micro_batches(job)
    actions = [action for row in estimate.schedule_rows(job) for action in row]
    between, kept = (
        {(a.stage, a.kind) for a in actions if a.micro_batch in some}
        for some in (range(1, job.micro_batches - 1), chosen[1:-1])
    )
    assert kept == between
    assert len(chosen) < job.micro_batches


def test_categories_of_allocations() -> None:
    forward, backward, step = (
        StepSegment((0, "F", 0), "forward", "layers.0"),
        StepSegment((0, "B", 0), "backward", "layers.0"),
        StepSegment((-1, "step", 0), "optimizer", ""),
    )
    output = StepSegment((0, "F", 0), "forward", "output")
    record = Record([forward, output, backward, step])

    def add(segment: int, within: str, freed: int | None, by: str = "") -> Allocation:
        result = Allocation(8, 0, segment, within, freed=freed, freed_within=by)
        record.allocations.append(result)
        return result

    expected = {
        "gathered": add(0, "gather", 0),
        "activations": add(0, "", 2),
        "temporaries": add(0, "", 0),
        "logits": add(1, "", 2),
        "gradients": add(2, "", 2, "reduce"),
        "communication": add(2, "reduce", 2, "reduce"),
    }
    last = add(3, "", 3)
    categorize(record, "output")
    assert {name: each.category for name, each in expected.items()} == {n: n for n in expected}
    assert last.category == "temporaries"
