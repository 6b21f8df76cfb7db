"""The tools besides training: python -m compose COMMAND ..."""

import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from compose.cli.command_line import parse, read_arguments, run, world_size_of
from compose.cli.convert import convert
from compose.cli.measure import measure
from compose.cli.plan import plan
from compose.cli.samples import generate
from compose.cli.tokenize import tokenize
from compose.config import rules
from compose.config.toml import load
from compose.errors import ConfigError, did_you_mean
from compose.parallel.islands import current, speaks
from compose.parallel.mesh import AXES, init_mesh
from compose.parallel.processes import process_group
from compose.pipeline import timeline
from compose.pipeline.schedules import build_table
from compose.proof.observers import parts_of_add_ons
from compose.proof.prove import prove
from compose.proof.report import joined

_ABOUT_VERIFY = """\
Runs a few steps of the composition that FILE describes, on the ranks that torchrun starts, and the same
with the whole model in plain PyTorch on one process. Compares all results, and exits with 0 if they are
equal.
"""
_ABOUT_SCHEDULE = """\
Draws which micro-batch each pipeline rank runs at what time, and prints what each rank waits and keeps.

  --out         a picture of it
  --world-size  ranks; default: as few as the degrees of FILE need
"""
_ABOUT_LEGAL = """\
Lists each mesh of N ranks that FILE can run on, and counts the others by the reason.

  --world-size  ranks
"""


def _verify(arguments: Sequence[str]) -> int:
    """Prove that the composition equals one process: torchrun -m compose verify FILE.toml."""
    job = parse(arguments, "python -m compose verify", about=_ABOUT_VERIFY).job
    with process_group(job.config, job.islands) as device:
        mesh = init_mesh(job.degrees, device.type)
        reports = [part(job, mesh, device) for part in (prove, *parts_of_add_ons("prove"))]
        report = joined([one for one in reports if one])
        if dist.get_rank() == 0:
            verdicts = current().everyone("verify", "" if report.ok else str(report))
            several = verdicts if job.islands > 1 else []
            wrong = [f"island {i}: {text}" for i, text in enumerate(several) if text]
            if speaks():
                print("\n".join(wrong) or report, flush=True)
    return 0 if report.ok else 1


def _schedule(arguments: Sequence[str]) -> int:
    """Draw the pipeline's timeline: python -m compose schedule FILE.toml [--out timeline.svg|.png]."""
    flags = {"--out": "FILE.svg or .png", "--world-size": "N"}
    given = read_arguments(arguments, "python -m compose schedule", flags, _ABOUT_SCHEDULE)
    out = given.flags.get("--out", "")
    if out and Path(out).suffix not in (".svg", ".png"):
        raise ConfigError(f"command line: --out: {out} is neither .svg nor .png")
    config = load(given.file, given.overrides)
    degrees = [getattr(config.parallel, axis) for axis in AXES]
    world_size = world_size_of(given) or math.prod(max(1, degree) for degree in degrees)
    try:
        job = rules.check(config, world_size)
        if job.degrees.pp == 1:
            raise ConfigError("parallel.pp: 1 has no schedule; set --parallel.pp=2 or more")
    except ConfigError as error:
        raise ConfigError(*(f"{given.file}: {problem}" for problem in error.problems)) from None
    parallel, micro_batches = job.degrees, job.micro_batches
    name, virtual_stages = parallel.pp_schedule, parallel.pp_virtual_stages
    table = build_table(name, parallel.pp, virtual_stages, micro_batches)
    title = (
        f"{name}: {parallel.pp} ranks, {micro_batches} micro-batches, layers {list(parallel.pp_layers)}"
    )
    slots = timeline.simulate(table)
    terminal = sys.stdout.isatty()
    print(
        title, timeline.as_text(slots, terminal, shutil.get_terminal_size((100, 24)).columns), sep="\n"
    )
    print(timeline.report(table, name, virtual_stages))
    try:
        if out.endswith(".svg"):
            Path(out).write_text(timeline.as_svg(timeline.drawing(slots, title)), encoding="utf-8")
        elif out:
            timeline.write_png(timeline.drawing(slots, title), out)
    except OSError as error:
        raise ConfigError(f"command line: --out: cannot write {out}: {error.strerror}") from None
    return 0


def _legal(arguments: Sequence[str]) -> int:
    """List the legal meshes of N ranks: python -m compose legal FILE.toml --world-size N."""
    given = read_arguments(arguments, "python -m compose legal", {"--world-size": "N"}, _ABOUT_LEGAL)
    world_size = world_size_of(given)
    if not world_size:
        raise ConfigError("command line: legal: needs --world-size N, the number of ranks")
    config = load(given.file, given.overrides)
    legal, refused = [], Counter[str]()
    for degrees, problems in rules.survey(config, world_size):
        if problems:
            refused[problems[0]] += 1
        else:
            legal.append(degrees)
    print("  ".join(AXES))
    for degrees in legal:
        print("  ".join(f"{degrees[axis]:<{len(axis)}}" for axis in AXES).rstrip())
    end = ":" if refused else ""
    print(f"{len(legal)} meshes of {world_size} ranks are legal, {refused.total()} are not{end}")
    for problem, count in refused.most_common():
        print(f"{count:>4}  {problem}")
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "verify": _verify,
    "schedule": _schedule,
    "legal": _legal,
    "plan": plan,
    "convert": convert,
    "tokenize": tokenize,
    "generate": generate,
    "measure": measure,
}


def main(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names, or list the commands."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("python -m compose COMMAND ...\n")
        for name, command in COMMANDS.items():
            print(f"  {name:<10}{command.__doc__}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        known = ", ".join(COMMANDS)
        near = did_you_mean(arguments[0], COMMANDS)
        raise ConfigError(f"compose: {arguments[0]}: unknown command{near} (known: {known})")
    return command(arguments[1:])


if __name__ == "__main__":
    run(main)
