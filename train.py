"""torchrun --nproc-per-node N train.py [FILE.toml] [--table.key=value ...] [--dry-run] [--help]"""

from collections.abc import Sequence

from compose import init_mesh
from compose.cli.command_line import parse, run
from compose.cli.dry_run import describe
from compose.train.processes import process_group
from compose.train.trainer import Trainer


def main(arguments: Sequence[str]) -> None:
    command = parse(arguments, program="train.py", trains=True)
    if command.dry_run:
        describe(command.job)
        return
    with process_group(command.config, command.job.islands) as device:
        mesh = init_mesh(command.config.parallel, device.type)
        Trainer(command.job, mesh, device, command.data).run()


if __name__ == "__main__":
    run(main)
