"""torch.compile: the same gradients on every mesh, one graph for all layers that are alike."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from compose import forward_backward
from compose.build import fill_weights, parallelize
from compose.data.samples import random_batch
from compose.memory.compilation import Compile, compiled_parts, graphs_compiled
from compose.proof.one_process import EXACT
from tests.support.helpers import (
    Keys,
    make_job,
    parallel,
    prove_on,
    prove_step,
    ranks_in,
    refusals,
    share_of,
    tiered,
)
from tests.support.pool import Pool, make_mesh


def _compiled(keys: dict[str, Any], mode: str) -> tuple[int, int, float]:
    """On every rank: graphs, breaks of graphs, and the greatest relative error of a gradient."""
    torch._dynamo.reset()
    counters.clear()
    job = make_job(dist.get_world_size(), model__n_layers=3, train__seq_len=24, **keys)
    # No rounding may stand between the two: PyTorch splits one operator into several.
    job = replace(job, config=replace(job.config, precision=EXACT))
    config, mesh, cpu = job.config, make_mesh(job.degrees), torch.device("cpu")
    batch = random_batch(8, 24, config.model.config.vocab_size, seed=2)
    results: list[list[torch.Tensor]] = []
    for options in (Compile(), Compile(mode, backend="aot_eager")):  # type: ignore[arg-type]
        composition = parallelize(job, mesh, cpu, replace(config.options, compile=options))
        fill_weights(composition, job, cpu)
        model = composition.model
        assert "_orig_mod" not in "".join(name for name, _ in model.named_parameters())
        for _ in range(2):
            model.zero_grad()
            forward_backward(composition, share_of(batch, mesh), micro_batch=2)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([getattr(gradient, "_local_tensor", gradient) for gradient in gradients])
    errors = [
        ((one - other).norm() / other.norm().clamp(min=1e-30)).item()
        for one, other in zip(results[1], results[0], strict=True)
    ]
    return graphs_compiled(), sum(counters["graph_break"].values()), max(errors)


MOE: Keys = {"model__name": "qwen3", "model__preset": "debug_moe"}
LATENT: Keys = {"model__name": "deepseek_v3", "model__preset": "debug"}
SELECTIVE: Keys = {"activation_checkpoint__mode": "selective"}
BUDGET: Keys = {"activation_checkpoint__mode": "budget", "activation_checkpoint__budget": 0.5}
WINDOW: Keys = {"model__window": 5, "model__sinks": True}
# By name: keys, and graphs on each rank.
CASES: dict[str, tuple[Keys, int]] = {
    "fsdp x tp": (parallel(dp_shard=2, tp=2), 1),
    "selective": (SELECTIVE, 1),
    "ring": (parallel(cp=2), 1),
    # The norms, attention, and the experts: as one kernel, and as an operator that is a loop.
    "experts": (MOE | {"precision__param": "bfloat16"}, 3),
    "experts, float32": (MOE, 3),
}
MORE: dict[str, tuple[Keys, int]] = {
    "tp without sequence": (parallel(tp=2, sequence=False), 1),
    # The stream's shape is tried without gradients first: one graph more on the first stage.
    "pp": (parallel(pp=2, pp_layers="[2, 1]"), 2),
    "replicas": (parallel(dp_replicate=2, zero=0), 1),
    "every_k": ({"activation_checkpoint__mode": "every_k"}, 2),
    "full, fsdp": (parallel(dp_shard=2) | {"activation_checkpoint__mode": "full"}, 1),
    **{name: (parallel(cp=2, cp_method=name), 1) for name in ("allgather", "ulysses")},
    "window": (WINDOW, 1),
    "ring, window": (parallel(cp=2) | WINDOW, 1),
    "qwen3 x tp": (parallel(tp=2) | {"model__name": "qwen3"}, 1),
    "ring, selective": (parallel(cp=2) | SELECTIVE, 1),
    "tp, selective": (parallel(tp=2) | SELECTIVE, 1),
    "allgather, budget": (parallel(cp=2, cp_method="allgather") | BUDGET, 2),
    # The norms, and attention; and what only some layers have.
    "ep x tp": (MOE | parallel(ep=2, tp=2), 3),
    "deepseek": (LATENT | parallel(dp_shard=2, ep=2), 4),
    "ep, bfloat16": (MOE | parallel(dp_shard=2, ep=2) | {"precision__param": "bfloat16"}, 3),
    "gpt-oss": (parallel(cp=2) | {"model__name": "gpt_oss"}, 4),
    "experts x tp": (MOE | parallel(tp=2), 3),
    "capacity": (MOE | {"model__capacity_factor": 1.0}, 3),
}


@pytest.mark.parametrize("name", tiered(CASES | MORE, (CASES | MORE).keys() - {"experts"}, MORE))
def test_one_graph_for_layers_that_are_alike(pool: Pool, name: str) -> None:
    keys, graphs = (CASES | MORE)[name]
    for result, breaks, error in pool.run(_compiled, ranks_in(keys), keys, "block"):
        assert (result if name != "pp" else graphs, breaks) == (graphs, 0)
        assert error < 1e-12


@pytest.mark.parametrize("name", ["alone", "ring", "experts"])
@pytest.mark.slow
def test_whole_model(pool: Pool, name: str) -> None:
    keys = {"alone": {}, "ring": parallel(cp=2), "experts": MOE}[name]
    graphs, breaks, error = pool.run(_compiled, ranks_in(keys), keys, "model")[0]
    assert error < 1e-12
    if name != "ring":  # FSDP's hooks end graphs
        assert (graphs, breaks) == (1, 0)


@pytest.mark.full
def test_inductor_equals_one_process(pool: Pool) -> None:
    prove_on(pool, parallel(dp_shard=2, tp=2) | {"compile__mode": "block"}, prove_step)


def _many_steps() -> tuple[int, int]:
    """Graphs, and recompilations, over 50 steps whose numbers of documents differ."""
    torch._dynamo.reset()
    counters.clear()
    job = make_job(1, train__seq_len=24, **WINDOW)
    cpu, options = torch.device("cpu"), Compile("block", backend="aot_eager")
    composition = parallelize(
        job, make_mesh(job.degrees), cpu, replace(job.config.options, compile=options)
    )
    fill_weights(composition, job, cpu)
    seen = set()
    for step in range(50):
        batch = random_batch(2, 24, job.config.model.config.vocab_size, seed=step)
        ends = torch.rand(2, 24, generator=torch.Generator().manual_seed(step)) < step / 50
        batch["document_ids"] = ends.long().cumsum(1)
        seen.add(int(ends.sum()))
        forward_backward(composition, batch)
    assert len(seen) > 20
    return graphs_compiled(), sum(counters["graph_break"].values())


def test_no_recompilation_for_other_documents(pool: Pool) -> None:
    assert pool.run(_many_steps, 1) == [(1, 0)]


def test_parts_leave_out_what_is_opaque() -> None:
    layer = nn.ModuleDict(
        {
            "norm": nn.LayerNorm(3),
            "attention": nn.ModuleDict(
                {"wq": nn.Linear(3, 3), "q_norm": nn.LayerNorm(3), "core": nn.Identity()}
            ),
            "feed_forward": nn.Sequential(nn.Linear(3, 3)),
        }
    )
    model = nn.ModuleDict({"0": layer, "1": nn.Linear(3, 3)})
    assert list(compiled_parts(model, ["0", "1"], [])) == ["0", "1"]
    assert list(compiled_parts(model, ["0", "1"], ["0.attention.core"])) == [
        "0.norm",
        "0.attention.q_norm",
        "0.feed_forward",
        "1",
    ]


REFUSED: list[tuple[Keys, str]] = [
    (
        parallel(pp=2, pp_schedule="ZBVZeroBubble") | {"compile__mode": "block", "model__n_layers": 4},
        'compile.mode: "block" makes graphs whose backward cannot run in two parts, as ZBVZeroBubble'
        ' does; use parallel.pp_schedule = "Interleaved1F1B", or compile.mode = "off"',
    ),
    (
        MOE | {"activation_checkpoint__mode": "budget", "compile__mode": "block"},
        'activation_checkpoint.mode: "budget" does not see into the parts of a layer that are compiled'
        ' alone, as with experts; use activation_checkpoint.mode = "full" or "every_k", or compile.mode'
        ' = "off"',
    ),
]
test_refused = refusals(REFUSED, {"run__device": "cpu"})
