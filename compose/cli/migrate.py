"""The command migrate: a TOML file out of the config files of another trainer.

The files are JSON, YAML or TOML, or shell scripts, which migrate_files.py reads.
"""

import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compose.cli.command_line import flag_error, number_of, read_flags
from compose.cli.migrate_files import Leaves, command_line, leaves_of, shown
from compose.cli.migrate_meaning import work_out
from compose.cli.migrate_tables import FORMATS, KnownValues, ReportLine, TrainerTable, load_formats
from compose.config import rules
from compose.config.hugging_face import model_folder
from compose.config.json_files import unreadable
from compose.config.tables import TABLES
from compose.config.toml import load, tomllib
from compose.errors import ConfigError, did_you_mean, read_file, toml_value

KINDS = ("mapped", "changed in meaning", "not needed", "unknown", "to set", "refused")
_NAMES = {"data.path": "stdlib", "checkpoint.load_hf": "", "data.validation": ""}
# The formats that a file may have, by how its name ends; others are command lines.
_OF_SUFFIX = {
    ".toml": ("torchtitan",),
    ".yaml": ("accelerate", "training_arguments"),
    ".yml": ("accelerate", "training_arguments"),
    ".json": ("deepspeed", "training_arguments"),
}
# The format of a file that a key names, by the key's last part, and what the keys in it begin with.
_NAMED = {
    "deepspeed_config_file": ("deepspeed", ""),
    "deepspeed": ("deepspeed", ""),
    "config_file": ("accelerate", ""),
    "fsdp_config": ("training_arguments", "fsdp_config."),
}
_WANTED = {
    "model.name": "and its preset or its fields",
    "data.path": "what is trained on",
    "train.seq_len": "tokens of a sample",
    "train.steps": "or train.epochs",
    "train.global_batch": "and train.micro_batch",
    "optimizer.lr": "and the schedule",
}

_COMMENTS = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING = re.compile(r'("(?:\\.|[^"\\\n])*")|,(?=\s*[}\]])')


def migrate(arguments: Sequence[str]) -> int:
    """Print a TOML file for the files of another trainer, and a report on standard error."""
    given = read_flags("migrate", arguments)
    if not given.plain:
        raise flag_error("migrate", "needs FILE...; see --help")
    world, steps = number_of(given, "--world-size", "ranks"), number_of(given, "--steps", "steps")
    text, entries = migrated([Path(name) for name in given.plain], world, steps)
    print(report(entries), file=sys.stderr)
    if refused := [entry.line for entry in entries if entry.kind == "refused"]:
        raise ConfigError(*refused)
    print(text, end="")
    return 0


def report(entries: Sequence[ReportLine]) -> str:
    """Return a line for each leaf of the files, under what became of it."""
    lines: list[str] = []
    for kind in KINDS[:-1]:
        own = [entry.line for entry in entries if entry.kind == kind]
        lines += [f"{kind}: {len(own)}", *(f"  {line}" for line in own)] if own else []
    return "\n".join(lines)


def migrated(paths: Sequence[Path], world: int = 0, steps: int = 0) -> tuple[str, list[ReportLine]]:
    """Return the text of a TOML file for some files of other trainers, and what became of each leaf."""
    tables, facts = load_formats(), KnownValues()
    read = {path: read_leaves(path) for path in paths}
    kinds = {path: format_of(path, leaves, tables) for path, leaves in read.items()}
    _add_named(read, kinds, tables)
    used = {name: tables[name] for name in FORMATS if name in kinds.values()}
    names = Counter(path.name for path in read)
    titles = {path: path.name if names[path.name] == 1 else str(path) for path in read}
    for path, kind in kinds.items():
        facts.read(titles[path], tables[kind], read[path])
    world = work_out(facts, used, world, steps)
    text = _toml(facts, ", ".join(titles.values()), world)
    if not any(entry.kind == "refused" for entry in facts.entries):
        _check(text, facts, world)
    return text, list(dict.fromkeys(facts.entries))  # a list of words is said once


def read_leaves(path: Path) -> Leaves:
    """Return the leaves of a file; a ConfigError names the file, and the line where there is one."""
    try:
        text = read_file(path).decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {unreadable(error)}") from None
    if not text.strip():
        raise ConfigError(f"{path}: is empty; give a file with keys")
    try:
        leaves = _parsed(path, text)
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not leaves:
        raise ConfigError(f"{path}: has no keys; give a file with keys")
    return leaves


def _parsed(path: Path, text: str) -> Leaves:
    if path.suffix == ".toml":
        return list(leaves_of(tomllib.loads(text)))
    if path.suffix in (".yaml", ".yml"):
        return list(leaves_of(_yaml(text)))
    if path.suffix == ".json" or text.lstrip().startswith(("{", "/*", "//")):
        return list(leaves_of(_json(text)))
    return command_line(text)


def _json(text: str) -> Any:
    for pattern in (_COMMENTS, _TRAILING):
        # Lines stay where they are, so that an error names the right one.
        text = pattern.sub(lambda part: part[1] or "\n" * part[0].count("\n"), text)
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        end = "the file ends too early" if error.pos >= len(text.rstrip()) else error.msg
        raise ValueError(f"line {error.lineno}: JSON syntax: {end}") from None


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key}: stands twice; remove one of them")
        result[key] = value
    return result


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ValueError(
            "is YAML, which needs PyYAML; pip install 'dtensor-compose[migrate]'"
        ) from None

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            own = [self.construct_object(key, True) for key, _ in node.value]
            _once([(str(key), None) for key in own])
            return super().construct_mapping(node, deep)

    try:
        return Loader(text).get_single_data() or {}
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{line}YAML syntax: {problem or ' '.join(str(error).split())}") from None


def _add_named(
    read: dict[Path, Leaves], kinds: dict[Path, str], tables: Mapping[str, TrainerTable]
) -> None:
    """Add the files that keys name, which may be in the folder of the naming file too."""
    paths = [path for path, kind in kinds.items() if kind in ("accelerate", "training_arguments")]
    for path in paths:
        for key, value in read[path]:
            name = tables[kinds[path]].plain(key)
            last = name.rpartition(".")[2]
            kind, above = _NAMED.get(last, ("", ""))
            row = tables[kinds[path]].row(name)
            is_set = row is not None and any("." in key for key in row.case(value) or {})
            if not kind or not value or is_set or (kind in kinds.values() and not above):
                continue
            file = Path(str(value))
            other = next((p for p in (file, path.parent / file.name) if os.path.isfile(p)), None)
            if other is None:
                raise ConfigError(f"{path}: {last}: {shown(value)} is not here; give that file too")
            read[other] = [(f"{above}{inner}", leaf) for inner, leaf in read_leaves(other)]
            kinds[other] = kind
            paths.append(other)


def format_of(path: Path, leaves: Leaves, tables: dict[str, TrainerTable]) -> str:
    """Return the format that knows most of the leaves' keys, of those that have a file of this kind."""
    scores = {}
    fitting = _OF_SUFFIX.get(path.suffix, ("training_arguments", "megatron"))
    for name, table in tables.items():
        if name not in fitting and leaves[0][0][:2] != "--":
            continue
        scores[name] = sum(table.plain(key) in table.names for key, _ in leaves) / len(leaves)
    best = max(scores, key=lambda name: scores[name])
    if not scores[best]:
        names = {key for table in tables.values() for key in table.names}
        key = leaves[0][0]
        titles = ", ".join(table.title for table in tables.values())
        raise ConfigError(f"{path}: {key}: is no key of {titles}{did_you_mean(key, names)}")
    return best


def _toml(facts: KnownValues, sources: str, world: int) -> str:
    """Return the TOML of our keys, each with a comment on where it comes from."""
    lines = [f"# Made by compose migrate from {sources}."]
    here = dict(facts.values)
    for key, other in _NAMES.items():  # what a file names may not be on this machine
        fact = here.get(key)
        if fact and fact.value != other and not Path(model_folder(str(fact.value))).exists():
            del here[key]
            text = f"{key} = {toml_value(fact.value)} ({fact.origin}) is not on this machine"
            cure = ', with model.preset = "hf"' if key == "checkpoint.load_hf" else ""
            facts.entries.append(ReportLine("to set", f"{text}; set the key to a path{cure}"))
    if "checkpoint.load_hf" in here:
        here["model.preset"] = here["checkpoint.load_hf"]._replace(value="hf")
    wanted = _WANTED | ({"model.lora.targets": 'as "all-linear"'} if "model.lora.rank" in here else {})
    for key, what in wanted.items():
        other = {"model.name": "model.preset", "train.steps": "train.epochs"}.get(key, key)
        if key not in here and other not in here and key not in facts.values:
            facts.entries.append(ReportLine("to set", f"{key}, {what}: no file says it"))
    lines += [f"# to set: {entry.line}" for entry in facts.entries if entry.kind == "to set"]
    if world:
        lines.append(f"# run: torchrun --nproc-per-node {world} train.py FILE.toml")
        lines[-1] += f" (or --nnodes N, {world} ranks in all)" if world > 8 else ""
    for table in TABLES:
        rows = [(key, fact) for key, fact in here.items() if key.rpartition(".")[0] == table]
        lines += ["", f"[{table}]"] if rows else []
        for key, fact in rows:
            mark, value = ("# ", "?") if fact.value is None else ("", toml_value(fact.value))
            lines.append(f"{mark}{key.rpartition('.')[2]} = {value}  # {fact.origin}")
    return "\n".join(lines) + "\n"


def _check(text: str, facts: KnownValues, world: int) -> None:
    """Add to the report what our own reader and rules say of the file that is to be printed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "migrated.toml"
        file.write_text(text, encoding="utf-8")
        try:
            config = load(str(file))
            if world and {"model.name", "model.preset"} & set(facts.values):
                rules.check(config, world)
        except ConfigError as error:
            for problem in error.problems:
                line = problem.removeprefix(f"{file}: ")
                fact = facts.values.get(line.partition(": ")[0])
                origin = f"{fact.origin}: " if fact else ""
                facts.entries.append(ReportLine("refused", f"{origin}{line}"))
