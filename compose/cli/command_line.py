"""The common part of all command lines: parsing, help, early checks and exit codes."""

import contextlib
import io
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, NoReturn, cast

from compose.cli import COMMANDS, PATH_FLAGS, STORE_FLAGS, TRAIN, Usage, help_text
from compose.config import rules
from compose.config.hugging_face import hub_name, left_out, model_folder
from compose.config.job import Job
from compose.config.models import folder_name, shipped
from compose.config.tables import TABLES, Config, Model
from compose.config.toml import COMMAND_LINE, DEFAULT, load, nearest_key, tomllib
from compose.data.datasets import OpenData, open_data, with_steps
from compose.errors import (
    ConfigError,
    did_you_mean,
    local_path,
    noted,
    or_say,
    read_own,
    whole_number,
    written,
)
from compose.object_storage import Remote, any_path, as_path


class ParsedWords(NamedTuple):
    """A parsed command line."""

    plain: list[str]
    """The words that are no option."""
    overrides: list[tuple[str, str]]
    """Keys with the text of their values."""
    flags: dict[str, str]
    """The flags with their values; "" for a flag without one."""
    given: list[tuple[str, str]]
    """The flags that take a value, in their order; a flag may be given several times."""

    @property
    def file(self) -> str:
        """The TOML file of a command that reads one; recipes/NAME.toml comes with compose."""
        file = self.plain[0] if self.plain else DEFAULT
        known = Path(file).parts[:-1] == ("recipes",) and not Path(file).exists()
        return str(shipped(file)) if known and shipped(file).exists() else file


@dataclass(frozen=True)
class Command:
    """A command line that was read and checked."""

    job: Job
    data: OpenData | None
    """The opened data; None for a program that does not train, and for a dry run."""
    dry_run: bool

    @property
    def config(self) -> Config:
        """The tables of the config; its degrees are those of this rank's mesh, of one island."""
        return replace(self.job.config, parallel=self.job.degrees)


def parse(arguments: Sequence[str], program: str, trains: bool = False) -> Command:
    """Read a command line, load its file, and check all that one process can check.

    A program that trains also reads the data, writes ``run.dir``, and has the flags of TRAIN.
    """
    given = read_arguments(arguments, program, TRAIN if trains else COMMANDS["verify"])
    dry_run = "--dry-run" in given.flags
    if "--world-size" in given.flags and not dry_run:
        raise flag_error("--world-size", "goes with --dry-run; else torchrun sets it")
    world_size = number_of(given, "--world-size", "ranks") or launched_ranks()
    config, job, data = load(given.file, given.overrides), None, None
    _say_source(config.checkpoint.load_hf)
    problems, of_data = list[str](), list[str]()
    if trains and (config.train.epochs or not dry_run):
        with noted(of_data):
            data = open_data(config)
            config = with_steps(config, data)
    with noted(problems):
        if trains and config.run.elastic:
            from compose.cli.elastic import choose

            job, line = choose(config, world_size)
            _warn(f"{given.file}: {line}")
        else:
            job = rules.check(config, world_size)
    if data and job and config.metrics.samples_every:
        from compose.train.samples import Prompts

        with noted(of_data):
            Prompts(config, data.sets)
    if not dry_run:
        problems += device_problems(config)
    problems += of_data
    if trains and not dry_run and is_first_rank():
        problems += _of_first_rank(config, job)
    if problems or job is None:
        raise ConfigError(*(f"{given.file}: {problem}" for problem in problems))
    return Command(job, data, dry_run)


def flag_error(flag: str, text: str) -> ConfigError:
    """Return the error for the value of a flag, or for a command."""
    return ConfigError(f"{COMMAND_LINE}: {flag}: {text}")


def number_of(given: ParsedWords, flag: str, counted: str, default: int = 0) -> int:
    """Return the number after a flag, or ``default`` if the flag is absent."""
    if flag not in given.flags:
        return default
    if not 1 <= (number := whole_number(given.flags[flag])) < 2**31:
        raise flag_error(flag, f"{given.flags[flag] or 'an empty one'} is not a number of {counted}")
    return number


def check_out(flag: str, path: Path) -> None:
    """Raise ConfigError if the file of a flag cannot be written, before it is computed."""
    with written(f"{COMMAND_LINE}: {flag}: cannot write", path):
        if path.is_dir():
            raise flag_error(flag, f"{path} is a folder")
        # A link, a device or a pipe is written as it is.
        if not path.is_symlink() and (path.is_file() or not path.exists()):
            tempfile.TemporaryFile(dir=path.parent).close()  # its name is new


def launched_ranks() -> int:
    """Return the number of ranks that torchrun has started; 1 without torchrun."""
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    needed = needed if "RANK" in os.environ else ()
    for name in (*needed, "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        value = os.environ.get(name, "" if name in needed else "1")
        most = 2**16 if name == "MASTER_PORT" else 2**31
        if not value or (name != "MASTER_ADDR" and not 0 <= whole_number(value) < most):
            raise ConfigError(f"environment: {name} is {value!r}; start ranks with torchrun")
    if not needed:
        return 1
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= size:
        raise ConfigError(f"environment: RANK is {rank} of {size} ranks; start them with torchrun")
    return size


def read_words(
    words: Sequence[str], flags: Mapping[str, str], keys: bool = True, stores: bool = False
) -> ParsedWords:
    """Parse a command line: its flags, --help and -h, and --table.key=value with ``keys``.

    With ``stores`` a word that is no option may be a URL.
    """
    known = [*flags, "--help"]
    result = ParsedWords([], [], {}, [])
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word:
            raise ConfigError(f"{COMMAND_LINE}: a word is empty; a variable of the shell may be unset")
        if not word.startswith("-"):
            bare = word.lstrip("\u2013\u2014")  # dashes that an editor makes of two hyphens
            key = bare.partition("=")[0] if "=" in bare else ""
            if keys and (bare != word or ("." in key and "/" not in key)) and not os.path.lexists(word):
                raise flag_error(word, f"no such file; did you mean --{bare}?")
            result.plain.append(named_path(word, here=not stores))
            continue
        name, equals, value = ("--help" if word == "-h" else word).partition("=")
        if name in known and not flags.get(name):
            if equals:
                raise flag_error(name, f"takes no value, got {value or 'an empty one'}")
            result.flags[name] = ""
            continue
        if name not in known and not (keys and "." in name):
            hint = did_you_mean(name, known, 0.85) or (keys and nearest_key(name))
            hint = hint or did_you_mean(name, known) or "; see --help"
            raise flag_error(name, f"unknown option{hint}")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise flag_error(name, f"needs a value: {name}=value")
            value = rest.pop(0)
        if name in flags:
            if name in PATH_FLAGS:
                value = named_path(value, f"{name}: ", here=name not in STORE_FLAGS)
            result.flags[name] = value
            result.given.append((name, result.flags[name]))
        else:
            result.overrides.append((name.removeprefix("--"), value))
    return result


def named_path(text: str, flag: str = "", here: bool = True) -> str:
    """Return a path of a command line, with ``~`` expanded; one that is not ``here`` may be a URL."""
    try:
        return local_path(text) if here else any_path(text)
    except ValueError as error:
        raise ConfigError(f"{COMMAND_LINE}: {flag}{text} {error}") from None


def model_path(text: str, flag: str = "") -> Path:
    """Return a model's folder; for a name in the hub's cache it says which folder that is."""
    path = named_path(text, flag, here=False)
    folder = model_folder(path)
    if folder != path:
        _warn(f"{flag}{hub_name(folder)} of the hub's local cache: {folder}")
    return as_path(folder)


def _say_source(folder: str) -> None:
    """Say which folder of the hub's cache a model comes from, and which of its layers are left out."""
    if name := hub_name(folder):
        _warn(f"checkpoint.load_hf: {name} of the hub's local cache: {folder}")
    if folder and (line := left_out(as_path(folder))):
        _warn(f"checkpoint.load_hf: {line}")


def _warn(line: str) -> None:
    if is_first_rank():
        print(line, file=sys.stderr, flush=True)


def read_flags(command: str, words: Sequence[str]) -> ParsedWords:
    """Return the words of a command without keys; --help prints its text and exits."""
    usage = COMMANDS[command]
    if {"--help", "-h"} & set(words):
        print(usage.text, end="")
        raise SystemExit(0)
    return read_words(words, usage.flags, keys=False, stores=command == "convert")


def read_arguments(words: Sequence[str], program: str, usage: Usage) -> ParsedWords:
    """Return the words of a program that reads a TOML file.

    ``--help`` prints every key and exits; with the name of a table, those of this table.
    """
    result = read_words(words, usage.flags)
    if "--help" in result.flags:
        given, tables = dict(result.overrides), []
        path, model = given.get("model.path"), given.get("model.name", Model.name)
        model = folder_name(path) if path else model
        for word in result.plain:
            if word in TABLES:
                tables.append(word)
            elif not word.endswith(".toml"):
                near = did_you_mean(word, TABLES, 0.55)
                raise flag_error("--help", f"unknown table {word}{near}")
        print(("" if tables else usage.head(program)) + help_text(model, tables or TABLES))
        raise SystemExit(0)
    if len(result.plain) > 1:
        raise ConfigError(f"{COMMAND_LINE}: one TOML file at a time, got {' and '.join(result.plain)}")
    return result


def device_problems(config: Config) -> list[str]:
    """Return why this machine cannot give the run ``run.device``; empty if it can."""
    import torch

    if config.run.device == "cuda" and not torch.cuda.is_available():
        return ["run.device: cuda is not available here; use cpu or auto"]
    return []


def _of_first_rank(config: Config, job: Job | None) -> list[str]:
    """Return problems with the first weights and the folder of a run, on this machine."""
    # These modules take long to import, and --help needs none of them.
    from compose.checkpoint.store import newest_first
    from compose.train.trackers import missing_libraries

    keep, lora, problems = config.checkpoint, config.model.lora, list[str]()

    def begun(folder: str) -> bool:
        """Return whether a run goes on, and the folder that it began with is gone."""
        gone = keep.resume == "auto" and not as_path(folder).is_dir()
        return bool(gone and config.run.dir and newest_first(as_path(config.run.dir) / "checkpoints"))

    # A checkpoint has whole weights, or the adapters alone, of which dpo.beta needs the first ones too.
    if keep.load_hf and job and (lora.rank or not begun(keep.load_hf)):
        from compose.checkpoint.hf_folder import source_problems

        problems += [f"checkpoint.load_hf: {problem}" for problem in source_problems(job)]
    compared = "dpo" in TABLES and config.dpo.beta
    if lora.load and job and (compared or not begun(lora.load)):
        from compose.checkpoint.peft import adapter_problems

        problems += [f"model.lora.load: {problem}" for problem in adapter_problems(job)]
    problems += missing_libraries(config)
    with noted(problems), written("run.dir: cannot write to", as_path(config.run.dir or "runs")):
        problems += _run_dir(config)
    return problems


def _run_dir(config: Config) -> list[str]:
    from compose.checkpoint.store import newest_first
    from compose.train.run_folder import strangers

    folder, keep = as_path(config.run.dir or "runs"), config.checkpoint
    kept, auto = config.run.dir and newest_first(folder / "checkpoints"), keep.resume == "auto"
    if config.run.dir and (problems := strangers(folder)):
        return problems
    # A run that saves may have stopped before its first checkpoint. Then it begins again.
    resumes = auto and (kept or ((keep.interval or keep.memory) and _may_begin_again(folder)))
    names = ("config.toml", "metrics.jsonl") if config.run.dir and not resumes else ()
    left = [name for name in names if (folder / name).exists()]
    if kept and not auto:
        left.append("checkpoints")
    if left:
        why = ", and no checkpoint" if auto else ""
        cure = 'set checkpoint.resume = "auto" to go on, or ' if kept else ""
        return [f"run.dir: {folder} already holds {left[0]} of a run{why}; {cure}choose another folder"]
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(folder, Remote):
        (folder / ".written").write_bytes(b"by a run, to see whether it can\n")
        (folder / ".written").unlink()
    else:
        tempfile.TemporaryFile(dir=folder).close()  # its name is new
    return []


def _may_begin_again(folder: Path) -> bool:
    """Tell whether the files in a folder are of a run that has not trained yet, or that saves.

    Other files are a person's own, or the results of a run that has ended. A run that was killed as it
    began has its lock and no metrics.
    """
    try:
        metrics, lock = folder / "metrics.jsonl", folder / ".lock"
        if not metrics.exists() and not lock.exists():
            return False
        trained = metrics.exists() and metrics.stat().st_size > 0
        kept = tomllib.loads(read_own(folder / "config.toml").decode())["checkpoint"]
        return bool(kept["interval"] or kept["memory"] or not trained)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def is_first_rank() -> bool:
    """Return whether torchrun has made this rank the first one; also without torchrun."""
    return os.environ.get("RANK", "0") == "0"


def run(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Call ``main`` with the command line, and exit with the code that it returns.

    For a ConfigError the program prints its lines on standard error, once for all ranks, and exits with
    code 2.
    """
    # A stream that was closed is None, and a file would get its number.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 (open to the end)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    # Escape letters that the encoding lacks, as standard error does.
    cast(io.TextIOWrapper, sys.stdout).reconfigure(errors="backslashreplace")
    code = _outcome(main)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # A thread of gloo may still be releasing a tensor. If it asks a finalizing interpreter for its
    # lock, the process aborts: a successful run would exit with SIGABRT.
    os._exit(code)


def _outcome(main: Callable[[Sequence[str]], int | None]) -> int:
    try:
        code = main(sys.argv[1:]) or 0
        with or_say("standard output"), contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        return code
    except ConfigError as error:
        return _refused(error.problems)
    except SystemExit as request:
        if isinstance(request.code, str):  # of a model's or a plan's own code
            print(request.code, file=sys.stderr)
            return 1
        return request.code or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
    except Exception as error:
        # Without the right to look into a folder even is_dir() of a path in it raises.
        if isinstance(error, PermissionError) and error.filename:
            return _refused([f"{error.filename}: {error.strerror}"])
        traceback.print_exc()
        return 1


def _refused(problems: Sequence[str]) -> int:
    if not is_first_rank():
        # Torchrun ends all ranks when one exits. Give the first rank time to print. If this rank
        # still runs after that, the first rank has nothing to print, or is on another node, whose end
        # this node's torchrun may not notice. Then the first rank of this node prints.
        time.sleep(20 if os.environ.get("LOCAL_RANK", "0") == "0" else 30)
    print("\n".join(problems), file=sys.stderr)
    return 2
