"""python -m compose COMMAND ...: tools beside training."""

from collections.abc import Callable, Sequence

import torch.distributed as dist

from compose.cli import parse, run
from compose.errors import ConfigError, did_you_mean
from compose.mesh import init_mesh
from compose.prove import prove
from compose.runtime import process_group


def _verify(arguments: Sequence[str]) -> int:
    """torchrun -m compose verify FILE.toml: prove that the composition equals one process."""
    config = parse(arguments, program="python -m compose verify").config
    with process_group(config) as device:
        report = prove(config, init_mesh(config.parallel, device.type), device)
        if dist.get_rank() == 0:
            print(report, flush=True)
    return 0 if report.ok else 1


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"verify": _verify}


def main(arguments: Sequence[str]) -> int:
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
