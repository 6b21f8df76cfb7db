"""The command compose, which is python -m compose too."""

import gc
from collections.abc import Sequence
from importlib import import_module

from compose.cli import COMMANDS
from compose.errors import ConfigError, did_you_mean


def main(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names, or list the commands."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("compose COMMAND ..., or python -m compose COMMAND ...; COMMAND --help says more\n")
        width = max(map(len, COMMANDS))
        for name, usage in COMMANDS.items():
            print(f"  {name:<{width}}  {usage.summary}")
        return 0
    name, *words = arguments
    if name not in COMMANDS:
        near, known = did_you_mean(name, COMMANDS), ", ".join(COMMANDS)
        raise ConfigError(f"compose: {name}: unknown command{near} (known: {known})")
    command = getattr(import_module(f"compose.cli.{COMMANDS[name].module}"), name)
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    return command(words)


def script() -> None:
    """Run the command line; the entry point of the command compose."""
    gc.disable()  # imports make many objects and no garbage
    import_module("compose.cli.command_line").run(main)


if __name__ == "__main__":
    script()
