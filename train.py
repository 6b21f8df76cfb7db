"""torchrun --nproc-per-node N train.py [FILE.toml] [--table.key=value ...] [--dry-run] [--help]"""

from collections.abc import Sequence

from compose.cli.command_line import run
from compose.cli.train import train


def main(arguments: Sequence[str]) -> None:
    train(arguments, "train.py")


if __name__ == "__main__":
    run(main)
