"""What every command line shares: arguments, help, checks before anything starts, exit codes."""

import dataclasses
import os
import sys
import time
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from compose import legality
from compose.config import TABLES, Config, Model, docs, toml_value, type_name
from compose.data import check_source, open_source
from compose.errors import ConfigError, did_you_mean
from compose.registry import find_model, model_names
from compose.toml import COMMAND_LINE, load, nearest_key


@dataclass(frozen=True)
class Options:
    config: Config
    world_size: int
    dry_run: bool


FLAGS = ("--dry-run", "--world-size", "--help")
USAGE = """\
{program} [FILE.toml] [--table.key=value ...]{flags}

FILE defaults to train.toml. A value is parsed as TOML; a bare word is a string.
"""


def parse(arguments: Sequence[str], program: str, dry_run: bool = False) -> Options:
    """Read a command line, load its file and check all that can be checked by one process.

    With ``dry_run`` the flags --dry-run and --world-size N are known too. ``--help`` prints every
    key and exits. Raises ConfigError with all problems found.
    """
    file, overrides, flags = _split(arguments, dry_run)
    if "--help" in flags:
        print(help_text(program, dry_run))
        raise SystemExit(0)
    world_size = int(flags.get("--world-size", os.environ.get("WORLD_SIZE", "1")))
    config, problems = legality.check(load(file, overrides), world_size)
    options = Options(config, world_size, "--dry-run" in flags)
    if not options.dry_run:
        problems += _surroundings(config)
    if problems:
        raise ConfigError(*(f"{file}: {problem}" for problem in problems))
    return options


def _split(
    arguments: Sequence[str], dry_run: bool
) -> tuple[str, list[tuple[str, str]], dict[str, str]]:
    """The file, the overrides and the flags of a command line."""
    known = FLAGS if dry_run else ("--help",)
    files: list[str] = []
    overrides: list[tuple[str, str]] = []
    flags: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            files.append(word)
            continue
        name, equals, value = ("--help" if word == "-h" else word).partition("=")
        if name in ("--help", "--dry-run") and name in known:
            flags[name] = ""
            continue
        if name not in known and "." not in name:
            hint = nearest_key(name)
            raise ConfigError(
                f"{COMMAND_LINE}: {name}: unknown option{hint or did_you_mean(name, known)}"
            )
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{COMMAND_LINE}: {name}: needs a value: {name}=value")
            value = rest.pop(0)
        if name == "--world-size":
            if not value.isdigit() or int(value) < 1:
                raise ConfigError(f"{COMMAND_LINE}: {name}: {value} is not a number of ranks")
            flags[name] = value
        else:
            overrides.append((name.removeprefix("--"), value))
    if len(files) > 1:
        raise ConfigError(f"{COMMAND_LINE}: one TOML file at a time, got {' and '.join(files)}")
    if "--world-size" in flags and "--dry-run" not in flags:
        raise ConfigError(f"{COMMAND_LINE}: --world-size: goes with --dry-run; else torchrun sets it")
    return files[0] if files else "train.toml", overrides, flags


def _surroundings(config: Config) -> list[str]:
    """Problems with the device, the data and the folder, on this machine."""
    problems = []
    if config.run.device == "cuda" and not torch.cuda.is_available():
        problems.append("run.device: cuda is not available here; use cpu or auto")
    try:
        source = open_source(config.data)
        check_source(source, config.train.seq_len, config.model.config.vocab_size)
    except ConfigError as error:
        problems += error.problems
    if _is_first_rank():
        problems += _run_dir(Path(config.run.dir or "runs"), bool(config.run.dir))
    return problems


def _run_dir(folder: Path, chosen: bool) -> list[str]:
    if chosen and (folder / "metrics.jsonl").exists():
        return [f"run.dir: {folder} already holds a run; choose another folder or remove it"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return [f"run.dir: cannot write to {folder}: {error.strerror}"]
    return []


def help_text(program: str, dry_run: bool) -> str:
    """Usage, and every key with its type, default and doc."""
    flags = " [--dry-run [--world-size N]]" if dry_run else ""
    lines = [USAGE.format(program=program, flags=flags)]
    if dry_run:
        lines.append(
            "--dry-run prints mesh, plan, parameters and bytes per rank without starting a process\n"
            "group; --world-size says for how many ranks.\n"
        )
    for table, kind in TABLES.items():
        lines += [f"[{table}]", *_help_rows(kind), ""]
        if kind is Model:
            folder = find_model(Model.name)
            lines.insert(-1, f"  models: {', '.join(model_names())}")
            lines.insert(-1, f"  presets of {folder.name}: {', '.join(folder.presets)}")
            lines.insert(-1, f"  fields of {folder.name}'s config (a preset sets its own):")
            lines[-1:-1] = [f"  {row}" for row in _help_rows(folder.Config)]
    return "\n".join(lines).rstrip()


def _help_rows(kind: type) -> list[str]:
    types = typing.get_type_hints(kind, include_extras=True)
    defaults = {f.name: f.default for f in dataclasses.fields(kind)}
    return [
        f"  {key:<22} {type_name(types[key])}, default {toml_value(defaults[key])}\n      {doc}"
        for key, doc in docs(kind).items()
    ]


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def run(main: Callable[[Sequence[str]], int | None]) -> typing.NoReturn:
    """Call ``main`` with the command line and exit with what it returns.

    ConfigError becomes its lines on standard error, once whatever the number of ranks, and exit
    code 2.
    """
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        if _is_first_rank():
            print("\n".join(error.problems), file=sys.stderr, flush=True)
        else:
            # Torchrun ends all ranks when the first exits: leave the first rank time to speak.
            time.sleep(20)
        sys.exit(2)
