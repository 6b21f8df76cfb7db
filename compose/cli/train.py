"""The command train, and what train.py runs."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from compose.cli.command_line import parse, run
from compose.cli.dry_run import describe
from compose.parallel.mesh import init_mesh


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


if __name__ == "__main__":
    run(train)
