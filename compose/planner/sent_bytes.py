"""The bytes of coded messages in a step, counted as a run counts them, in a fake world."""

import copy

from torch import nn

from compose.apply import apply
from compose.build import build_optimizer, loss_function
from compose.config.job import Job
from compose.ops.dropout import DropoutKey
from compose.parallel.mesh import init_mesh
from compose.plan import resolve
from compose.planner.fake_world import OnMeta, fake_world
from compose.planner.recorder import Recorder
from compose.planner.trace import Played, step_batch, trace
from compose.train.step import forward_backward

_MOST = 4
"""Micro-batches that are run; of more, each sends what the last of these does."""


def sent_bytes(job: Job, rank: int) -> dict[tuple[str, str], int]:
    """Return what ``rank`` sends in a step, by purpose and distance, as ``Traffic.take`` does.

    It is not the first step, whose differences have no base yet.

    Args:
        job: The checked job, with coded messages.
        rank: The rank.

    Returns:
        The bytes; empty if none are sent.
    """
    count = job.micro_batches
    if job.degrees.pp > 1 or count <= _MOST:
        return _counted(job, rank, count)
    less, most = (_counted(job, rank, number) for number in (_MOST - 1, _MOST))
    return {key: size + (count - _MOST) * (size - less.get(key, 0)) for key, size in most.items()}


def _counted(job: Job, rank: int, micro_batches: int) -> dict[tuple[str, str], int]:
    config, kernels = job.config, job.device_type
    model: nn.Module = copy.deepcopy(job.model)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to("meta"))
    first = rank % (job.world_size // job.degrees.pp)
    objects = None
    if rank != first:
        # The first rank of a pipeline tells the others what stages send.
        objects = trace(Played(job, first, micro_batches=0, device_type=kernels)).broadcast
    with fake_world(rank, job.world_size, Recorder(kernels), kernels, objects):
        mesh = init_mesh(job.degrees, kernels)
        with OnMeta(["cuda"], kernels="cpu"):
            composition = apply(model, resolve(job.plan, model), mesh, job.options)
            optimizer = build_optimizer(composition, job)
        batch = step_batch(job, micro_batches)
        assert composition.compression is not None
        for _ in range(2):
            composition.compression.begin_at(config.comm.start_step)
            composition.compression.traffic.take()
            with OnMeta(kernels=kernels):
                forward_backward(
                    composition,
                    batch,
                    micro_batch=config.train.micro_batch,
                    loss_function=loss_function(config),
                    dropout=DropoutKey(0),
                )
            optimizer.zero_grad()
        return composition.compression.traffic.take()
