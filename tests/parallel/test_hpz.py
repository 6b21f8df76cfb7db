"""Zero-3 gathers within near ranks, and ahead of their units: as one process, and as few as said."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from compose import Comm, Composition, Options, Parallel, Plan, apply, forward_backward
from compose.ops.torch_versions import ALL_GATHER
from compose.parallel.hpz import hpz_experts
from compose.planner.record import RecordedMessage
from compose.planner.trace import RankStep, trace
from tests.support.command_lines import answered
from tests.support.helpers import Keys, make_job, parallel, proofs, refusals
from tests.support.pool import Pool, make_mesh

NEAR = parallel(zero3_reshard=2) | {"train__micro_batch": 1, "train__global_batch": 8}
MOE: Keys = {"model__name": "qwen3", "model__preset": "debug_moe", "parallel__dp_shard": 4}
FLOAT8: Keys = {"precision__float8": "tensorwise", "model__dim": 128, "model__hidden_dim": 192}
RECOMPUTED: Keys = {"activation_checkpoint__mode": "full", "comm__prefetch": 1}
QUICK: dict[str, Keys] = {"data": parallel(dp_shard=4) | {"train__global_batch": 12}}
SLOW: dict[str, Keys] = {  # two are of eight ranks
    "context, offload": parallel(dp_shard=2, cp=2, offload="cpu")
    | {"model__vocab_size": 259, "model__hidden_dim": 90, "comm__prefetch": 3},
    "pipeline": parallel(pp=2, dp_shard=4, pp_schedule="ZBVZeroBubble")
    | {"model__n_layers": 4, "model__tie_embeddings": True, "comm__prefetch": 1},
    "experts": MOE | parallel(tp=2, ep=2) | {"comm__prefetch": 1},
}
FULL: dict[str, Keys] = {
    "replicas": parallel(dp_replicate=2, dp_shard=4),
    "experts that stay": MOE | parallel(tp=2, ep=4),
    "experts of all": MOE | parallel(tp=2, ep=8),
    "tensor, bfloat16": parallel(dp_shard=4, tp=2) | {"precision__param": "bfloat16"},
    "float8": parallel(dp_shard=4) | FLOAT8,
    "1F1B": parallel(pp=2, dp_shard=4) | {"comm__prefetch": 2},
    "recomputation": MOE | parallel(tp=2) | RECOMPUTED,
}
test_as_one_process = proofs(QUICK | SLOW | FULL, NEAR, SLOW, FULL)


class _Layers(nn.Module):
    """Layers that can be told apart by the size of what is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4 * (i + 1)) for i in range(5))

    def forward(self, input: Tensor) -> Tensor:
        for layer in self.layers:
            input = torch.tanh(layer(input))[:, :4]
        return input


@contextmanager
def _gathers(note: Callable[[str, int, list[int]], None]) -> Iterator[None]:
    """Call ``note(where, layer, ranks)`` for each all-gather of a layer, whose own ranks it runs over;
    where: forward or backward."""

    def noted(
        real: Callable[..., Any], output: Tensor, input: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        where = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        note(where, output.numel() // 20 - 1, dist.get_process_group_ranks(group))
        return real(output, input, group, async_op)

    with mock.patch.object(dist, ALL_GATHER, partial(noted, getattr(dist, ALL_GATHER))):
        yield


def _step(parallel: Parallel, micro_batches: int, note: Any, prefetch: int = 0) -> Composition:
    """Two steps of _Layers, the gathers of the second being noted."""
    torch.manual_seed(0)
    mesh = make_mesh(parallel)
    options = Options(parallel, comm=Comm(prefetch=prefetch))
    composition = apply(_Layers(), Plan(shard=["layers.*"]), mesh, options)
    batch = {"input": torch.randn(micro_batches, 4), "targets": torch.zeros(micro_batches).long()}
    loss = nn.CrossEntropyLoss(reduction="sum")
    for step in range(2):
        with _gathers(note if step else lambda *_: None):
            forward_backward(composition, batch, micro_batch=1, loss_function=loss)
    return composition


def _ranks_of_gathers(parallel: Parallel, micro_batches: int, near: int) -> tuple[Any, bool]:
    results: list[tuple[str, int, list[int]]] = []
    parallel = replace(parallel, zero3_reshard=near)
    composition = _step(parallel, micro_batches, lambda *what: results.append(what))
    return results, any(gather.kept is not None for data in composition.data for gather in data.gathers)


@pytest.mark.parametrize("replicas", [1, 2])
def test_only_the_first_gather_of_a_step_leaves_the_neighbours(pool: Pool, replicas: int) -> None:
    parallel = Parallel(dp_replicate=replicas, dp_shard=4)
    results = pool.run(_ranks_of_gathers, 4 * replicas, parallel, 2, 2)
    for rank, (result, kept) in enumerate(results):
        first = rank // 4 * 4
        everyone, near = list(range(first, first + 4)), [rank // 2 * 2, rank // 2 * 2 + 1]
        # The last unit stays from forward to backward; it is gathered from all, as without.
        freed = range(4)
        assert result == [
            *(("forward", layer, everyone) for layer in range(5)),
            *(("backward", layer, near) for layer in reversed(freed)),
            *(("forward", layer, near) for layer in freed),
            ("forward", 4, everyone),
            *(("backward", layer, near) for layer in reversed(freed)),
        ]
        assert not kept


def test_experts_that_stay_are_gathered_once_in_a_step() -> None:
    """Two neighbours hold all experts between them. Ranks 0 and 2 share the first half."""
    job = make_job(4, **MOE, **parallel(ep=2, zero3_reshard=2))
    work = trace(RankStep(job, micro_batches=2)).record.work
    gathers = [m for m in work if isinstance(m, RecordedMessage) and m.kind == "all_gather"]
    assert [m.ranks for m in gathers].count((0, 2)) == job.config.model.config.n_layers == 2


@pytest.mark.parametrize("near", [0, 4])
def test_all_ranks_are_the_default(pool: Pool, near: int) -> None:
    for result, _ in pool.run(_ranks_of_gathers, 4, Parallel(dp_shard=4), 1, near):
        assert {tuple(ranks) for _, _, ranks in result} == {(0, 1, 2, 3)}


def _order(prefetch: int) -> list[tuple[str, int]]:
    """List gathers and layers in order, through forward and backward."""
    results: list[tuple[str, int]] = []

    def ran(layer: int, *_: Any) -> None:
        results.append(("run", layer))

    real = nn.Linear.forward

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        layer = self.out_features // 4 - 1
        ran(layer)
        output = real(self, input)
        if output.requires_grad:
            # Before the gradient of the layer's weight; FSDP's own hook was there first.
            output.grad_fn.register_prehook(partial(ran, layer))  # type: ignore[union-attr]
        return output

    def note(where: str, layer: int, ranks: list[int]) -> None:
        results.append(("gather", layer))

    with mock.patch.object(nn.Linear, "forward", forward):
        _step(Parallel(dp_shard=2), 1, note, prefetch=prefetch)
    return results[results.index(("gather", 0)) :]


def test_prefetch_begins_gathers_earlier(pool: Pool) -> None:
    def events(text: str) -> list[tuple[str, int]]:
        return [({"g": "gather", "r": "run"}[word[0]], int(word[1])) for word in text.split()]

    expected = {
        0: "g0 r0 g1 r1 g2 r2 g3 r3 g4 r4  g3 r4 g2 r3 g1 r2 g0 r1 r0",
        1: "g0 g1 r0 g2 r1 g3 r2 g4 r3 r4  g3 r4 g2 r3 g1 r2 g0 r1 r0",
        2: "g0 g1 g2 r0 g3 r1 g4 r2 r3 r4  g3 g2 r4 g1 r3 g0 r2 r1 r0",
        9: "g0 g1 g2 g3 g4 r0 r1 r2 r3 r4  g3 g2 g1 g0 r4 r3 r2 r1 r0",
    }
    for prefetch, text in expected.items():
        for result in pool.run(_order, 2, prefetch):
            assert result == events(text), prefetch


def test_experts_of_the_same_span() -> None:
    assert [hpz_experts(8, tp, ep) for tp, ep in ((1, 1), (2, 4), (1, 8), (1, 16), (3, 16))] == [
        8, 4, 1, 0, 0,
    ]  # fmt: skip


KEY = "parallel.zero3_reshard"
SHARED = "the ranks that share parameters; nearest:"
REFUSED: list[tuple[Keys, str]] = [
    (
        parallel(dp_shard=4, cp=2, zero3_reshard=3),
        f"{KEY}: 3 does not divide dp_shard x cp = 8, {SHARED} 2",
    ),
    (
        parallel(dp_shard=8, zero3_reshard=16),
        f"{KEY}: 16 does not divide dp_shard x cp = 8, {SHARED} 8",
    ),
    (
        parallel(zero3_reshard=1),
        f"{KEY}: 1 would keep every parameter whole, as parallel.zero = 2 does; nearest: 0",
    ),
    (parallel(zero3_reshard=2), f"{KEY}: 2 does not divide dp_shard x cp = 1, {SHARED} 0"),
    (
        parallel(dp_shard=8, zero3_reshard=1),
        f"{KEY}: 1 would keep every parameter whole, as parallel.zero = 2 does; nearest: 2",
    ),
    (
        parallel(dp_shard=8, zero=2, zero3_reshard=2),
        f"{KEY}: 2 is where parameters are between forward and backward, and parallel.zero = 2 keeps"
        " them whole; use parallel.zero = 3, or parallel.zero3_reshard = 0",
    ),
]
test_refused = refusals(REFUSED, {"train__micro_batch": 1})


def test_dry_run_counts_what_is_kept() -> None:
    keys = ["--parallel.zero3_reshard=4", "--precision.param=bfloat16"]
    done = answered("train.py", "--dry-run", "--world-size=8", *keys)
    assert done.returncode == 0, done.stderr
    parameters = int(done.stdout.partition("parameters: ")[2].split()[0].replace(",", ""))
    assert f"gathered in a step  {2 * parameters // 4:>18,}" in done.stdout
