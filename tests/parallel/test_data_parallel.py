"""parallel.offload; which ranks hold the same parameters, and how ranks cut those."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from compose import Composition, Parallel
from compose.ops.tensors import local_tensor
from compose.parallel import data_parallel
from compose.proof.report import Report
from compose.weights import materialize
from tests.support.helpers import Keys, make_job, parallel, prove_case, proved, ranks_in, refused
from tests.support.pool import Pool, make_mesh

MESHES: dict[str, Keys] = {
    "one": {},
    "data and tensor": parallel(dp_shard=2, tp=2) | {"train__micro_batch": 4},
    "pipeline": parallel(pp=2, dp_replicate=2)
    | {"model__tie_embeddings": True, "optimizer__offload": "cpu"},
}


def _prove(keys: Keys) -> tuple[Report, bool]:
    with mock.patch.object(data_parallel, "CPUOffloadPolicy", side_effect=CPUOffloadPolicy) as policy:
        return prove_case(keys), policy.called


@pytest.mark.parametrize("mesh", MESHES)
def test_as_one_process(pool: Pool, mesh: str) -> None:
    result = pool.run(_prove, ranks_in(MESHES[mesh]), MESHES[mesh] | parallel(offload="cpu"))
    proved([report for report, _ in result])
    assert all(used for _, used in result)


def test_parameters_are_made_in_host_memory_and_buffers_are_not() -> None:
    """The device, here, is meta."""
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(3, 4))
    model[0].register_buffer("scale", torch.ones(4))
    no_mesh: Any = None
    materialize(Composition(model, no_mesh, offload=True), torch.device("meta"))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert {b.device.type for b in model.buffers()} == {"meta"}


def test_a_hook_between_the_weights_of_a_unit(alone: None) -> None:
    """In a backward in two parts it leaves a unit's gradients in two types, which FSDP does not sum."""
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    how = data_parallel.Sharding(2, param_dtype=torch.bfloat16)
    data = data_parallel.apply_data_parallel(model, [["0", "1"]], make_mesh(Parallel(zero=2)), how)
    model(torch.ones(1, 2))
    data.gather()
    state: Any = fully_shard.state(model[0])  # type: ignore[attr-defined]
    group = state._fsdp_param_group
    model[0].weight.grad = torch.ones_like(model[0].weight)
    group.post_backward()
    group.pre_backward(False)
    for parameter in model[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    data.finish_backward(last=True)
    assert model[0].bias.grad is None
    for parameter in (model[0].weight, model[1].weight, model[1].bias):
        assert parameter.grad.dtype == torch.float32
        assert local_tensor(parameter.grad).eq(1).all()


def test_what_cannot_be_offloaded() -> None:
    keys = parallel(offload="cpu", zero=2) | {"optimizer__name": "muon"}
    assert refused(make_job, 2, **keys) == [
        'parallel.zero: 2 keeps whole parameters on the device, and parallel.offload = "cpu" none; use'
        ' parallel.zero = 3, or parallel.offload = "none"',
        'optimizer.name: muon sends matrices from device to device, and parallel.offload = "cpu" has'
        ' them in host memory; use "adamw", or parallel.offload = "none"',
    ]


def _ranks_of_data(parallel: Parallel) -> list[list[int]]:
    """The ranks that hold the same shard as this one, and those that share parameters with it."""
    meshes = data_parallel._data_meshes(make_mesh(parallel), parallel.zero)
    return [[] if mesh is None else mesh.mesh.flatten().tolist() for mesh in meshes]


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        (Parallel(dp_shard=2, cp=2), [[], [0, 1, 2, 3]]),
        (Parallel(dp_shard=1, dp_replicate=2, cp=2), [[0, 2], [0, 1]]),
        (Parallel(dp_shard=1, dp_replicate=2, cp=2, zero=0), [[0, 1, 2, 3], [0]]),
    ],
)
def test_ranks_that_share_parameters(pool: Pool, parallel: Parallel, expected: list[list[int]]) -> None:
    assert pool.run(_ranks_of_data, 4, parallel)[0] == expected


def test_stacks_of_few_matrices_are_cut_within_them() -> None:
    cut = {(2, 6, 8): 2, (2, 3, 5): 0, (8, 3, 4): 0, (6, 8): 0, (6,): 0}
    assert {shape: data_parallel._stacked_dim(4, shape) for shape in cut} == cut
