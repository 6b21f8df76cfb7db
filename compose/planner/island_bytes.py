"""The bytes that islands send each other, and the time that they take on a cluster."""

import copy

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from compose.apply import apply
from compose.config.job import Job
from compose.diloco.message import first_rank_messages
from compose.diloco.options import Outer
from compose.parallel.mesh import init_mesh
from compose.planner.cluster import Link


def island_bytes(job: Job, outer: Outer) -> list[int]:
    """Return what a rank sends to each other island, for each fragment.

    Args:
        job: The checked job of an island.
        outer: The table [outer].

    Returns:
        The bytes of the rank that sends most, of the first ranks of stages.
    """
    shapes = {name: p.shape for name, p in job.model.named_parameters() if p.requires_grad}
    ranks = []
    for stage in range(job.degrees.pp):
        first = stage * job.world_size // job.degrees.pp
        dist.init_process_group("fake", store=FakeStore(), rank=first, world_size=job.world_size)
        try:
            mesh, model = init_mesh(job.degrees), copy.deepcopy(job.model)
            composition = apply(model, job.resolved, mesh, job.options)
            ranks.append(first_rank_messages(outer, composition, shapes, job.resolved.checkpoint))
        finally:
            dist.destroy_process_group()
    return max(ranks, key=sum)


def in_lines(messages: list[int], islands: int, outer: Outer) -> list[str]:
    """Return lines with the bytes of a round, and those that are sent at once.

    Args:
        messages: What :func:`island_bytes` returned.
        islands: The number of islands.
        outer: The table [outer].
    """
    sent = [size * (islands - 1) for size in messages]
    rows = ((f"in {outer.every} steps", sum(sent)), ("at once, at most", max(sent)))
    return [
        f"bytes that a rank sends to other islands ({outer.dtype}, fragments {len(sent)}):",
        *(f"  {what:<20}{size:>18,}  {size / 2**30:9.3f} GiB" for what, size in rows),
    ]


def waits(messages: list[int], islands: int, outer: Outer, link: Link, step_seconds: float) -> str:
    """Return a line with the time that exchanges add to training.

    Args:
        messages: What :func:`island_bytes` returned.
        islands: The number of islands.
        outer: The table [outer].
        link: The link between islands, as each rank has it.
        step_seconds: Seconds of a step of an island.
    """
    takes = [size * (islands - 1) / link.usable + link.latency for size in messages]
    waited = sum(max(0.0, seconds - outer.delay * step_seconds) for seconds in takes)
    return (
        f"  a round takes {sum(takes):.3g} s between nodes; training waits for {waited:.3g} s of it,"
        f" {waited / (outer.every * step_seconds):.1%} of its steps (outer.delay {outer.delay})"
    )
