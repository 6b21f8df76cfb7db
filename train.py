"""torchrun --nproc-per-node N train.py [FILE.toml] [--table.key=value ...] [--dry-run] [--help]"""

from collections.abc import Sequence

from compose import init_mesh
from compose.build import cut, fill
from compose.cli import parse, run
from compose.dry_run import describe
from compose.runtime import process_group
from compose.trainer import Trainer


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments, program="train.py", trains=True)
    config = options.config
    if options.dry_run:
        describe(config, options.world_size)
        return
    with process_group(config) as device:
        mesh = init_mesh(config.parallel, device.type)
        model = cut(config, mesh, device)
        trainer = Trainer(config, mesh, model, device)
        if not trainer.resumed:
            fill(model, config, device)
        trainer.run()


if __name__ == "__main__":
    run(main)
