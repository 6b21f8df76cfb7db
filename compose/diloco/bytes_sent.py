"""What DiLoCo workers will send each other, and how long training waits for it, before a run."""

import copy

from compose.apply import apply
from compose.config.job import Job
from compose.diloco.messages import first_rank_messages
from compose.diloco.options import Outer
from compose.parallel.mesh import init_mesh
from compose.planner.cluster import Link
from compose.planner.fake_world import fake_group


def sent_bytes(job: Job, outer: Outer) -> list[int]:
    """Return what a rank of a DiLoCo worker sends to each other worker, for each fragment.

    It is the rank that sends most, of the first ranks of stages.
    """
    shapes = {name: p.shape for name, p in job.model.named_parameters() if p.requires_grad}
    ranks = []
    for stage in range(job.degrees.pp):
        with fake_group(stage * job.world_size // job.degrees.pp, job.world_size):
            mesh, model = init_mesh(job.degrees), copy.deepcopy(job.model)
            composition = apply(model, job.resolved, mesh, job.options)
            ranks.append(first_rank_messages(outer, composition, shapes, job.resolved.checkpoint))
    return max(ranks, key=sum)


def as_lines(messages: list[int], workers: int, outer: Outer) -> list[str]:
    """Return lines with the bytes of a round, and those that are sent at once."""
    sent = [size * (workers - 1) for size in messages]
    rows = ((f"in {outer.every} steps", sum(sent)), ("at once, at most", max(sent)))
    return [
        f"bytes that a rank sends to other islands ({outer.dtype}, fragments {len(sent)}):",
        *(f"  {what:<20}{size:>18,}  {size / 2**30:9.3f} GiB" for what, size in rows),
    ]


def wait_line(messages: list[int], workers: int, outer: Outer, link: Link, step_seconds: float) -> str:
    """Return a line with the time that exchanges add to training; each rank has its own ``link``."""
    takes = [size * (workers - 1) / link.usable + link.latency for size in messages]
    waited = sum(max(0.0, seconds - outer.delay * step_seconds) for seconds in takes)
    return (
        f"  a round takes {sum(takes):.3g} s between nodes; training waits for {waited:.3g} s of it,"
        f" {waited / (outer.every * step_seconds):.1%} of its steps (outer.delay {outer.delay})"
    )
