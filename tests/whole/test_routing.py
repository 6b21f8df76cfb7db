"""Routing in training: what is counted, acted on and reported is the same on every mesh."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from compose import Parallel
from compose.config.tables import Config
from compose.parallel.expert_parallel import RoutingMetrics
from compose.proof import routing_trace
from compose.train.metrics import TensorBoard
from models.layers.router import MoEConfig, Router
from tests.support.helpers import parallel, ranks_in
from tests.support.pool import Pool, make_mesh
from tests.support.small_models import DEEPSEEK, QWEN
from tests.support.training import STEP, keys_for, lines, train


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        pytest.param(
            QWEN,
            {"dp_replicate": 2, "cp": 2, "tp": 2, "dp_shard": 1, "ep": 8},
            marks=pytest.mark.full,
        ),
        pytest.param(DEEPSEEK, {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 4}, marks=pytest.mark.slow),
    ],
    ids=["qwen3", "deepseek_v3"],
)
def test_trains_the_same_on_every_mesh(
    pool: Pool, tmp_path: Path, model: dict[str, object], mesh: dict[str, int]
) -> None:
    keys = model | {"model__n_layers": 3, "train__seq_len": 32, "train__global_batch": 8}
    keys |= {"model__bias_rate": 0.01, "train__stop_after": 8}
    for name, degrees in (("one", {}), ("many", mesh)):
        there = keys_for(tmp_path / name, **(keys | parallel(**degrees)))
        pool.run(train, ranks_in(there), there)
    one = lines(tmp_path / "one")
    assert len(one) == 8
    for a, b in zip(one, lines(tmp_path / "many"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert list(b["routing"]) == list(a["routing"]), "every stage's, in order"
        for router, expected in a["routing"].items():
            result = b["routing"][router]
            assert result["load"] == expected["load"], f"step {a['step']}, {router}"
            assert result == pytest.approx(expected, rel=1e-4)
    reports = list(one[-1]["routing"].values())
    assert len(reports) == (3 if model is QWEN else 2)
    for report in reports:
        assert set(report) == {"load", "dropped", "balance_loss", "z_loss", "bias_change"}
        assert report["load"] >= 1
        assert report["dropped"] == 0
        # An expert may stand at the mean, whose bias then stays.
        assert 0.005 < report["bias_change"] < 0.01001


def test_reports_are_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoard(Config(), tmp_path, 0, print)
    routing = {"layers.1.moe.router": {"load": 1.25, "dropped": 3.0}}
    step = replace(STEP, more={"routing": routing})
    writer.write(step)
    writer.close()
    assert step.values()["routing"] == routing
    assert "load 1.25" in step.console(10, 1.0)
    assert "load" not in STEP.console(10, 1.0)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {"load/layers.1.moe.router", "dropped/layers.1.moe.router", "loss"} <= set(
        events.Tags()["scalars"]
    )
    assert events.Scalars("load/layers.1.moe.router")[0].value == 1.25


class _Reads(TorchDispatchMode):
    """Counts the tensors that the host reads one by one."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def _reported() -> int:
    """How many values were read one by one for the report; a wrong report is an error."""
    config = MoEConfig(n_experts=4, top_k=2, bias_rate=0.1)
    routers = {name: Router(6, config) for name in ("a", "b")}
    model = nn.ModuleDict(routers)
    mesh = make_mesh(Parallel(dp_shard=1))
    assert RoutingMetrics(model, mesh)() == {"a": {}, "b": {}}, "before the first step"
    for name, router in routers.items():
        router(torch.randn(2, 3, 6)).weights.sum().backward()
        router.finish_step(router.tally + len(name) * torch.arange(7))
    with _Reads() as reads:
        result = RoutingMetrics(model, mesh)()
    expected = {
        name: {key: float(value) for key, value in router.last.items()}
        for name, router in routers.items()
    }
    assert result == expected
    assert len(expected["b"]) == 5
    return reads.count


def test_the_host_reads_all_reports_at_once(pool: Pool) -> None:
    assert pool.run(_reported, 1) == [0]


def _of_stages(names: list[list[str]]) -> tuple[list[dict[str, dict[str, float]]], int]:
    """Return routers' metrics of two steps, and how often ranks sent objects."""
    mesh, own = make_mesh(Parallel(pp=2)), names[dist.get_rank()]
    config = MoEConfig(n_experts=4, top_k=2, bias_rate=0.1)
    routers = {name: Router(6, config) for name in own}
    model = nn.ModuleDict(routers)
    result, metrics = [], RoutingMetrics(model, mesh)
    gather = mock.patch.object(dist, "all_gather_object", side_effect=dist.all_gather_object)
    with gather as objects:
        for step in range(2):
            for name, router in routers.items():
                router.finish_step(router.tally + (len(name) + step) * torch.arange(7))
            result.append(metrics())
            assert all(
                result[-1][n][key] == float(x) for n in own for key, x in routers[n].last.items()
            )
    return result, objects.call_count


@pytest.mark.parametrize("names", [[["a", "b"], ["c"]], [[], ["a"]], [[], []]])
def test_stages_tell_each_other_numbers_alone(pool: Pool, names: list[list[str]]) -> None:
    """And their names once."""
    (first, objects), second = pool.run(_of_stages, 2, names)
    assert second == (first, objects)
    assert objects == 1
    assert [list(each) for each in first] == [[*names[0], *names[1]]] * 2
    assert all(len(report) == 5 for each in first for report in each.values())


class _Routing(NamedTuple):
    experts: Tensor
    weights: Tensor
    margin: Tensor


class _OwnRouter(nn.Module):
    """A router of a user's own, without a capacity: it has no ``keep``, and returns no ``kept``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False)

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        best, experts = scores.topk(2)
        return experts[..., :1], (best[..., 0] - best[..., 1]) / best[..., 0]

    def forward(self, x: Tensor) -> _Routing:
        scores = self.gate(x).softmax(-1)
        experts, margin = self.choose(scores)
        return _Routing(experts, scores.gather(-1, experts), margin)

    def finish_step(self, tally: Tensor) -> None:
        pass


def test_a_proof_follows_a_router_without_capacity() -> None:
    torch.manual_seed(0)
    model, x, ids = nn.Sequential(_OwnRouter()), torch.randn(1, 5, 4), [torch.arange(5)]
    with routing_trace.watch(model) as recorder:
        model(x).weights.sum().backward()
    choices = recorder.choices({"0": ids})["0"]
    assert choices.drops is None
    other = replace(choices, experts=(choices.experts + 1) % 3)
    with routing_trace.follow(model, {"0": [other]}, ids, within=2.0) as natural:
        assert torch.equal(model(x).experts.view(5, 1), other.experts)
    assert torch.equal(natural["0"].experts, choices.experts)
    assert torch.equal(model(x).experts.view(5, 1), choices.experts)
