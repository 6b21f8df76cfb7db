"""The command train, and what train.py runs."""

from collections.abc import Sequence

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
    from compose.train.processes import process_group
    from compose.train.trainer import Trainer

    with process_group(command.config, command.job.islands) as device:
        mesh = init_mesh(command.config.parallel, device.type)
        Trainer(command.job, mesh, device, command.data).run()


if __name__ == "__main__":
    run(train)
