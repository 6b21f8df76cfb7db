"""The command train, and what train.py runs; with --dry-run a description of the run.

For a dry run the plan is applied to the model on meta over a fake process group, whose collectives do
nothing. So one process shows what any number of ranks would hold.
"""

import copy
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from compose.apply import apply
from compose.cli.command_line import is_first_rank, parse, run
from compose.config.addons import provided
from compose.config.job import Job
from compose.errors import in_columns
from compose.memory.float8 import select_layers
from compose.memory.quantized import count_parameters
from compose.optim.lr_schedule import short_of_warmup
from compose.parallel.mesh import AXES, init_mesh
from compose.train.held_state import PlacedParameter, copied_bytes, placements, state_bytes

_PURPOSES = ("weights", "gradients", "activations")


def train(arguments: Sequence[str], program: str = "compose train") -> None:
    """Train what a TOML file describes, or with --dry-run describe it."""
    command = parse(arguments, program, trains=True)
    if command.dry_run:
        describe(command.job)
        return
    # A command line that is refused, and --help, need nothing of these.
    from compose.train.processes import outlive, process_group, stand_by

    for stream in (sys.stdout, sys.stderr):
        outlive(stream)
    ranks = command.job.world_size * command.job.islands
    if ranks <= int(os.environ.get("RANK", "0")):  # of a run that chooses its mesh
        code = stand_by(command.config)
        if code == 0 and command.config.checkpoint.memory:
            from compose.train.run_folder import remove_copies

            remove_copies(Path(command.config.run.dir))
        sys.exit(code)

    from compose.train.trainer import Trainer

    with process_group(command.config, command.job.islands, ranks) as device:
        mesh = init_mesh(command.config.parallel, device.type)
        Trainer(command.job, mesh, device, command.data).run()


def describe(job: Job) -> None:
    """Print the dry run of a checked job; if there are several ranks, only rank 0 prints."""
    if not is_first_rank():
        return
    pp = job.degrees.pp
    placed = [_stage(job, rank * job.world_size // pp) for rank in range(pp)]
    print(_mesh_line(job), "", "plan", str(job.plan), sep="\n")
    print("", *_table([p for stage in placed for p in stage], pp), sep="\n")
    print("", *_summary(placed, job), sep="\n")
    for line in (line for _, lines in provided("held") for line in lines(job, placed)):
        print(line)
    if short := short_of_warmup(job.config.train.steps, job.config.optimizer):
        print("", short, sep="\n")
    if job.config.comm.codes:
        print("", *_messages(job), sep="\n")
    if job.islands > 1:
        for _, lines in provided("between_workers"):
            print("", *lines(job, job.config.outer, job.islands), sep="\n")


def _stage(job: Job, rank: int) -> list[PlacedParameter]:
    """Return the parameters that ``rank`` holds."""
    from compose.planner.fake_world import fake_group

    with fake_group(rank, job.world_size):
        mesh = init_mesh(job.degrees)
        model = copy.deepcopy(job.model)
        apply(model, job.resolved, mesh, job.options)
        return placements(model, mesh, job.config)


def _messages(job: Job) -> list[str]:
    """Return the bytes that the rank sends which sends most, of the first ranks of stages."""
    from compose.planner.trace import sent_bytes

    pp = job.degrees.pp
    ranks = [sent_bytes(job, rank * job.world_size // pp) for rank in range(pp)]
    most = max(ranks, key=lambda sent: sum(sent.values()))
    comm = job.config.comm
    compressed = [f"{name} {getattr(comm, name)}" for name in _PURPOSES if getattr(comm, name) != "off"]
    lines = [f"bytes that a rank sends in a step ({', '.join(compressed)}):"]
    for purpose in _PURPOSES:
        levels = {level: size for (what, level), size in most.items() if what == purpose}
        if plain := levels.pop("plain", 0):
            shown = ", ".join(f"{size:,} to {level} ranks" for level, size in sorted(levels.items()))
            share = sum(levels.values()) / plain
            lines.append(f"  {purpose:<20}{shown}; plain {plain:,} ({share:.3f})")
    return lines


def _mesh_line(job: Job) -> str:
    parallel = job.degrees
    degrees = ", ".join(f"{axis} {getattr(parallel, axis)}" for axis in AXES)
    experts = f" (ep {parallel.ep} over them)" if parallel.ep > 1 else ""
    lines = [f"mesh: {job.world_size} ranks: {degrees}{experts}; zero {parallel.zero}"]
    if job.islands > 1:
        how = f"exchange weights every {job.config.outer.every} steps; all below is of one"
        lines.insert(0, f"islands: {job.islands}, which {how}")
    if parallel.pp > 1:
        lines.append(
            f"pipeline: {parallel.pp_schedule}, layers of its stages {list(parallel.pp_layers)}"
        )
    return "\n".join(lines)


def _table(placed: list[PlacedParameter], pp: int) -> list[str]:
    """Return a line for each parameter; equal layers share one line with their number."""
    known = [*AXES, "dp_shard_cp", "dp_replicate_cp", "expert_replicate", "expert_shard", "ep"]
    axes = [axis for axis in known if any(axis in p.placements for p in placed)]
    groups: dict[tuple[object, ...], list[PlacedParameter]] = {}
    for p in placed:
        pattern = re.sub(r"\.\d+\.", ".*.", p.name)
        equal = (p.pp, pattern, p.shape, tuple(p.placements.items()), p.local_shape)
        groups.setdefault(equal, []).append(p)
    rows = [("parameter", *(["pp"] if pp > 1 else []), "shape", *axes, "local shape", "bytes")]
    for group in groups.values():
        p, several = group[0], len(group) > 1
        name = f"{p.name} ... {group[-1].name} ({len(group)})" if several else p.name
        placed_on = [p.placements.get(axis, "R") for axis in axes]
        size = f"{p.local_bytes:,}" + (f" x {len(group)}" if several else "")
        stage = [str(p.pp)] if pp > 1 else []
        rows.append((name, *stage, _shape(p.shape), *placed_on, _shape(p.local_shape), size))
    return in_columns(rows, left=len(rows[0]))


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _summary(placed: list[list[PlacedParameter]], job: Job) -> list[str]:
    """Return the parameter count, the FLOPs, and the bytes on the rank that holds most."""
    config = job.config
    parameters = count_parameters(job.model)
    adapters = sum(p.numel() for p in job.model.parameters() if p.requires_grad)
    train, lora = config.train, config.model.lora
    sizes = [state_bytes(stage, job) for stage in placed]
    fullest = max(range(len(placed)), key=lambda stage: sum(sizes[stage].values()))
    *rows, (_, whole) = sizes[fullest].items()
    rank = f"first of pp rank {fullest}" if len(placed) > 1 else "first"
    tokens = job.global_batch * train.seq_len
    lines = [
        f"parameters: {parameters:,}" + (f", of which {adapters:,} are trained" if lora.rank else ""),
        f"FLOPs per token: {config.model.config.flops_per_token(train.seq_len):,.0f}"
        f" (forward and backward, seq_len {train.seq_len})",
        f"steps: {train.last_step:,} of {job.global_batch:,} samples, {tokens:,} tokens",
        f"bytes per rank (the {rank}, which holds most):",
        *(f"  {name:<20}{_bytes(size)}" for name, size in rows),
        f"  {'state in all':<20}{_bytes(sum(size for _, size in rows))}",
    ]
    if every := config.checkpoint.memory:
        size = 2 * max(copied_bytes(stage, job) for stage in placed)
        lines.append(
            f"  {'copies on the host':<20}{_bytes(size)} (two, checkpoint.memory = {every}; as many"
            " again for a peer on another node, without replicas there)"
        )
    if config.precision.float8 != "off":
        recipe, tp = config.precision.float8, config.parallel.tp
        lines.insert(2, str(select_layers(job.model, job.resolved, tp, recipe, job.device_type)))
    if whole:
        lines.append(f"  {'gathered in a step':<20}{_bytes(whole)} ({config.precision.param})")
    return lines


def _bytes(size: int) -> str:
    return f"{size:>18,}  {size / 2**30:9.3f} GiB"


if __name__ == "__main__":
    run(train)
