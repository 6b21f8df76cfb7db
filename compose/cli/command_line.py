"""The common part of all command lines: arguments, help, early checks and exit codes."""

import contextlib
import dataclasses
import os
import sys
import tempfile
import time
import traceback
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from compose.checkpoint.hf_folder import source_problems
from compose.checkpoint.peft import adapter_problems
from compose.checkpoint.store import newest_first
from compose.config import rules
from compose.config.job import Job
from compose.config.models import find_model, model_names
from compose.config.tables import TABLES, Config, Model
from compose.config.toml import COMMAND_LINE, load, nearest_key
from compose.data.datasets import OpenData, open_data
from compose.errors import (
    ConfigError,
    attribute,
    did_you_mean,
    docs,
    local_path,
    toml_value,
    type_name,
    whole_number,
)
from compose.train.folder import strangers


class Words(NamedTuple):
    """A command line taken apart."""

    plain: list[str]
    """The words that are no option."""
    overrides: list[tuple[str, str]]
    """Keys with the text of their values."""
    flags: dict[str, str]
    """The flags with their values; "" for a flag without one."""
    given: list[tuple[str, str]]
    """The flags in their order. One may stand there several times."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of a command that reads a TOML file."""

    file: str
    """The TOML file."""
    overrides: list[tuple[str, str]]
    """Keys that replace those of the file, with the text of their values."""
    flags: dict[str, str]
    """The flags with their values; "" for a flag without one."""


@dataclass(frozen=True)
class Command:
    """A command line that was read and checked."""

    job: Job
    """The job to run."""
    data: OpenData | None
    """The opened data; None for a program that does not train, and for a dry run."""
    dry_run: bool
    """Whether --dry-run was given."""

    @property
    def config(self) -> Config:
        """The tables of the config."""
        return self.job.config


# The flags of all commands whose value is a path. Plain words are paths too.
PATH_FLAGS = {"--against", "--cluster", "--config", "--json", "--original", "--out", "--report"}
PATH_FLAGS |= {"--prompts", "--tokenizer", "--write"}
# The flags of a program that trains, with the name of each flag's value.
TRAIN_FLAGS = {"--dry-run": "", "--world-size": "N"}
ABOUT_TRAIN = """\
Trains what FILE describes, on one process or on the ranks that torchrun starts.

  --dry-run     print mesh, plan, parameters and bytes per rank without starting a process group
  --world-size  with --dry-run: for how many ranks
"""
USAGE = """\
{program} [FILE.toml] [--table.key=value ...]{flags}

{about}
FILE defaults to train.toml. A value is parsed as TOML; a bare word is a string. --help TABLE lists the
keys of one table alone.
"""


def parse(
    arguments: Sequence[str], program: str, trains: bool = False, about: str = ABOUT_TRAIN
) -> Command:
    """Read a command line, load its file, and check all that one process can check.

    ``--help`` prints every key and exits.

    Args:
        arguments: The words after the program's name.
        program: The program's name, for --help.
        trains: Whether the program reads the data and writes ``run.dir``. Then it also has the flags
            --dry-run and --world-size N.
        about: What the program does, and its flags, for --help.

    Returns:
        The checked command.

    Raises:
        ConfigError: All problems found.
    """
    given = read_arguments(arguments, program, TRAIN_FLAGS if trains else {}, about)
    dry_run = "--dry-run" in given.flags
    if "--world-size" in given.flags and not dry_run:
        raise ConfigError(f"{COMMAND_LINE}: --world-size: goes with --dry-run; else torchrun sets it")
    world_size = world_size_of(given) or launched_ranks()
    config, job, data = load(given.file, given.overrides), None, None
    problems: list[str] = []
    try:
        job = rules.check(config, world_size)
    except ConfigError as error:
        problems += error.problems
    if not dry_run:
        problems += device_problems(config)
        if trains:
            try:
                data = open_data(config)
            except ConfigError as error:
                problems += error.problems
            problems += _of_first_rank(config, job)
    if problems or job is None:
        raise ConfigError(*(f"{given.file}: {problem}" for problem in problems))
    return Command(job, data, dry_run)


def world_size_of(given: Arguments) -> int:
    """Return the number after --world-size, or 0 if the flag is absent.

    Raises:
        ConfigError: The value is not a number of ranks.
    """
    value = given.flags.get("--world-size")
    if value is None:
        return 0
    if not 1 <= (ranks := whole_number(value)) < 2**31:
        raise ConfigError(f"{COMMAND_LINE}: --world-size: {value} is not a number of ranks")
    return ranks


def launched_ranks() -> int:
    """Return the number of ranks that torchrun has started; 1 without torchrun.

    Raises:
        ConfigError: A variable that torchrun sets is missing or is no number.
    """
    if "RANK" not in os.environ:
        return 1
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        value = os.environ.get(name, "")
        if not value or (name != "MASTER_ADDR" and whole_number(value) < 0):
            raise ConfigError(f"environment: {name} is {value!r}; start ranks with torchrun")
    return max(1, int(os.environ["WORLD_SIZE"]))


def read_words(words: Sequence[str], flags: Mapping[str, str], keys: bool = True) -> Words:
    """Take a command line apart.

    The flags --help and -h are always known.

    Args:
        words: The words of the command line.
        flags: The name of each flag's value, by flag; "" for a flag without one.
        keys: Whether --table.key=value is allowed.

    Returns:
        The parts.

    Raises:
        ConfigError: An option is unknown, lacks its value, or has one where none is allowed.
    """
    known = [*flags, "--help"]
    found = Words([], [], {}, [])
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            found.plain.append(named_path(word))
            continue
        name, equals, value = ("--help" if word == "-h" else word).partition("=")
        if name in known and not flags.get(name):
            if equals:
                raise ConfigError(
                    f"{COMMAND_LINE}: {name}: takes no value, got {value or 'an empty one'}"
                )
            found.flags[name] = ""
            continue
        if name not in known and not (keys and "." in name):
            hint = did_you_mean(name, known, 0.85) or (keys and nearest_key(name))
            hint = hint or did_you_mean(name, known) or "; see --help"
            raise ConfigError(f"{COMMAND_LINE}: {name}: unknown option{hint}")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{COMMAND_LINE}: {name}: needs a value: {name}=value")
            value = rest.pop(0)
        if name in flags:
            found.flags[name] = named_path(value, f"{name}: ") if name in PATH_FLAGS else value
            found.given.append((name, found.flags[name]))
        else:
            found.overrides.append((name.removeprefix("--"), value))
    return found


def named_path(text: str, flag: str = "") -> str:
    """Return a path of a command line, with ``~`` expanded.

    Raises:
        ConfigError: It is no path of this machine.
    """
    try:
        return local_path(text)
    except ValueError as error:
        raise ConfigError(f"{COMMAND_LINE}: {flag}{text} {error}") from None


def read_arguments(
    words: Sequence[str], program: str, flags: Mapping[str, str], about: str = ""
) -> Arguments:
    """Return the file, the overrides and the flags of a command line.

    ``--help`` prints every key and exits; with the name of a table, those of this table.

    Args:
        words: The words of the command line.
        program: The program's name, for --help.
        flags: The name of each flag's value, by flag; "" for a flag without one.
        about: What the program does, and its flags, for --help.

    Returns:
        The arguments; the file defaults to train.toml.

    Raises:
        ConfigError: An option is unknown, or there is more than one file.
    """
    found = read_words(words, flags)
    if "--help" in found.flags:
        model, tables = dict(found.overrides).get("model.name", Model.name), []
        for word in found.plain:
            if word in TABLES:
                tables.append(word)
            elif not word.endswith(".toml"):
                near = did_you_mean(word, TABLES)
                raise ConfigError(f"{COMMAND_LINE}: --help: unknown table {word}{near}")
        usage = "" if tables else usage_text(program, flags, about)
        print(usage + help_text(model, tables or TABLES))
        raise SystemExit(0)
    if len(found.plain) > 1:
        raise ConfigError(f"{COMMAND_LINE}: one TOML file at a time, got {' and '.join(found.plain)}")
    return Arguments(found.plain[0] if found.plain else "train.toml", found.overrides, found.flags)


def read_flags(words: Sequence[str], flags: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the plain words and the flags of a command line without keys.

    Args:
        words: The words of the command line.
        flags: The name of each flag's value, by flag; "" for a flag without one.

    Returns:
        The plain words, and the flags with their values.

    Raises:
        ConfigError: A flag is unknown or lacks its value.
    """
    found = read_words(words, flags, keys=False)
    return found.plain, found.flags


def device_problems(config: Config) -> list[str]:
    """Return why this machine cannot give the run ``run.device``; empty if it can."""
    if config.run.device == "cuda" and not torch.cuda.is_available():
        return ["run.device: cuda is not available here; use cpu or auto"]
    return []


def _of_first_rank(config: Config, job: Job | None) -> list[str]:
    """Return problems with the first weights and the folder of a run, on this machine."""
    problems: list[str] = []
    if _is_first_rank():
        if config.checkpoint.load_hf and job:
            problems += [f"checkpoint.load_hf: {problem}" for problem in source_problems(job)]
        if config.model.lora.load and job:
            problems += [f"model.lora.load: {problem}" for problem in adapter_problems(job)]
        problems += _run_dir(config)
    return problems


def _run_dir(config: Config) -> list[str]:
    folder, keep = Path(config.run.dir or "runs"), config.checkpoint
    # A run that saves may have stopped before its first checkpoint. Then it begins again.
    resumes = keep.resume == "auto" and (keep.interval or newest_first(folder / "checkpoints"))
    try:
        for name in ("config.toml", "metrics.jsonl") if config.run.dir and not resumes else ():
            if (folder / name).exists():
                why = ", and no checkpoint" if keep.resume == "auto" else ""
                return [f"run.dir: {folder} already holds {name} of a run{why}; choose another folder"]
        if keep.resume == "none" and config.run.dir and newest_first(folder / "checkpoints"):
            return [f"run.dir: {folder} already holds checkpoints of a run; choose another folder"]
        if config.run.dir and (problems := strangers(folder)):
            return problems
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # its name is new
            pass
    except OSError as error:
        return [f"run.dir: cannot write to {folder}: {error.strerror}"]
    except ValueError as error:
        return [f"run.dir: cannot write to {str(folder)!r}: {error}"]
    return []


def usage_text(program: str, flags: Mapping[str, str], about: str) -> str:
    """Return how a program is called and what it does.

    Args:
        program: The program's name.
        flags: The name of each flag's value, by flag; "" for a flag without one.
        about: What the program does, and its flags.

    Returns:
        The text.
    """
    shown = "".join(f" [{name}{takes and ' ' + takes}]" for name, takes in flags.items())
    return USAGE.format(program=program, flags=shown, about=about) + "\n"


def help_text(model: str, tables: Iterable[str]) -> str:
    """Return every key of some tables with its type, default and description."""
    lines: list[str] = []
    for table in tables:
        lines += [f"[{table}]", *_help_rows(TABLES[table]), ""]
        if TABLES[table] is Model:
            folder = find_model(model)
            lines.insert(-1, f"  models: {', '.join(model_names())}")
            lines.insert(-1, f"  presets of {folder.name}: {', '.join(folder.presets)}")
            lines.insert(-1, f"  fields of {folder.name}'s config (a preset sets its own):")
            lines[-1:-1] = [f"  {row}" for row in _help_rows(folder.Config)]
    return "\n".join(lines).rstrip()


def _help_rows(kind: type) -> list[str]:
    types = typing.get_type_hints(kind, include_extras=True)
    defaults = {f.name: f.default for f in dataclasses.fields(kind)}
    return [
        f"  {key:<22} {type_name(types[attribute(key)])}, default"
        f" {toml_value(defaults[attribute(key)])}\n      {doc}"
        for key, doc in docs(kind).items()
    ]


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def run(main: Callable[[Sequence[str]], int | None]) -> typing.NoReturn:
    """Call ``main`` with the command line, and exit with the code that it returns.

    For a ConfigError the program prints its lines on standard error, once for all ranks, and exits with
    code 2.
    """
    code = _outcome(main)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # A thread of gloo may still be releasing a tensor. If it asks a finalizing interpreter for its
    # lock, the process aborts: a successful run would exit with SIGABRT.
    os._exit(code)


def _outcome(main: Callable[[Sequence[str]], int | None]) -> int:
    try:
        return main(sys.argv[1:]) or 0
    except ConfigError as error:
        if not _is_first_rank():
            # Torchrun ends all ranks when one exits. Give the first rank time to print. If this rank
            # still runs after that, the first rank has nothing to print.
            time.sleep(20)
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    except SystemExit as request:
        return request.code if isinstance(request.code, int) else 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
    except Exception:
        traceback.print_exc()
        return 1
