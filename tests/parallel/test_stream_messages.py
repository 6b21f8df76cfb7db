"""compile.async_tp: which messages of a block Inductor does in pieces beside products.

The graphs are those that Inductor makes on a GPU, up to the pass that fuses messages with products;
the fused operators themselves need symmetric memory.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V
from torch.testing._internal.distributed.fake_pg import FakeStore

from compose import forward_backward
from compose.build import fill_weights, parallelize
from compose.data.samples import random_batch
from compose.memory.compilation import Compile
from compose.ops.torch_versions import async_tp_groups, enable_async_tp
from compose.parallel.mesh import init_mesh
from compose.parallel.stream_messages import send_stream
from tests.support.helpers import make_job, tier
from tests.support.pool import Pool, make_mesh

TP = 2
GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


@pytest.fixture
def fake_group() -> Iterator[None]:
    torch._dynamo.reset()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)
    with (
        mock.patch.object(dist, "is_nccl_available", return_value=True),
        inductor_config.patch(_micro_pipeline_tp=False),
    ):
        yield
    async_tp_groups.clear()
    dist.destroy_process_group()
    torch._dynamo.reset()


def _counting(graphs: list[Counter[str]]) -> Callable[..., Any]:
    """A backend that appends what messages Inductor's graphs have, and runs the graphs as they were."""

    def compile(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        passed = copy.deepcopy(graph)
        view_to_reshape(passed)
        with V.set_fake_mode(detect_fake_mode(inputs)):
            post_grad_passes(passed, is_inference=False)
        nodes = [str(node.target).split(".") for node in passed.graph.nodes]
        names = [words[1] for words in nodes if words[0] in ("symm_mem", "_c10d_functional")]
        graphs.append(Counter(name for name in names if name != "wait_tensor"))
        return graph.forward

    def cut(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    return aot_autograd(
        fw_compiler=compile,
        bw_compiler=compile,
        partition_fn=cut,
        decompositions=select_decomp_table(),
    )


@pytest.mark.parametrize("micro_batch", [1, pytest.param(2, marks=tier(slow=True))])
def test_messages_that_are_fused(fake_group: None, micro_batch: int) -> None:
    """Both gathers and both scatters of the forward; of the backward those of one product's gradient.

    The gradient of a gathered input is a sum of several products, which PyTorch does not fuse.
    """
    graphs: list[Counter[str]] = []
    job = make_job(TP, model__n_layers=1, parallel__tp=TP)
    cpu, options = torch.device("cpu"), Compile("block", backend=_counting(graphs))
    mesh = init_mesh(job.degrees)
    enable_async_tp(mesh["tp"].get_group().group_name)
    composition = parallelize(job, mesh, cpu, replace(job.config.options, compile=options))
    fill_weights(composition, job, cpu)
    batch = random_batch(micro_batch, job.config.train.seq_len, 257, seed=0)
    with (  # the fake group adds nothing up
        mock.patch("compose.train.step.check_gradients"),
        mock.patch("compose.train.step.same_rows"),
    ):
        forward_backward(composition, batch, micro_batch=micro_batch)
    fused = {"fused_all_gather_matmul": 2}
    assert graphs == [fused | {"fused_matmul_reduce_scatter": 2}, fused | {SCATTER: 2}]


def _messages(rows: int) -> None:
    """A gather and a scatter, alone and as a graph has them, forward and backward."""
    group, rank = make_mesh(make_job(TP, parallel__tp=TP).degrees)["tp"].get_group(), dist.get_rank()
    torch.manual_seed(0)
    parts = torch.randn(TP, rows, 4, 3, dtype=torch.float64)
    wholes = torch.randn(TP, rows, 4 * TP, 3, dtype=torch.float64)
    joined, summed = torch.cat(list(parts), 1), wholes.sum(0).chunk(TP, 1)[rank]
    expected = {"gather": (parts, joined, wholes, summed), "scatter": (wholes, summed, parts, joined)}
    for there, back in (("gather", "scatter"), ("scatter", "gather")):
        given, result, of_found, of_given = expected[there]
        for run in (send_stream, torch.compile(send_stream, backend="aot_eager", fullgraph=True)):
            sent = given[rank].clone().requires_grad_()
            got = run(there, back, group.group_name, sent)  # type: ignore[arg-type]
            (made,) = torch.autograd.grad(got, sent, of_found[rank])
            torch.testing.assert_close(got, result)
            torch.testing.assert_close(made, of_given)


@pytest.mark.parametrize("rows", [1, pytest.param(3, marks=tier(slow=True))])
def test_messages_bring_the_same_in_a_graph(pool: Pool, rows: int) -> None:
    pool.run(_messages, TP, rows)
