"""The commands init, schema and completion: files for a project, its editor and its shell."""

import importlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from compose.cli import COMMANDS, train
from compose.cli.command_line import flag_error, read_flags
from compose.config.json_files import described
from compose.config.models import PACKAGE, find_model, model_names, shipped
from compose.config.tables import TABLES, Model
from compose.config.toml import COMMAND_LINE
from compose.errors import docs, written

_MODEL, _RECIPE = "llama", "recipes/llama_one_gpu.toml"
_SCHEMA = "train.schema.json"


def init(arguments: Sequence[str]) -> int:
    """Make the folder of a project."""
    given = read_flags("init", arguments)
    if len(given.plain) != 1:
        raise flag_error("init", f"needs one folder, got {len(given.plain)}")
    folder, files = Path(given.plain[0]), _files()
    for name in files:
        if (folder / name).exists():
            raise flag_error("init", f"{folder / name} is there already; choose another folder")
    with written(f"{COMMAND_LINE}: init: cannot write", folder):
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    print(
        f"{folder}: train.toml trains the model in model/, a copy of {_MODEL}\n"
        f"  cd {shlex.quote(str(folder))} && compose train\n"
        "  torchrun --nproc-per-node 2 -m compose verify train.toml",
        flush=True,
    )
    return 0


def _files() -> dict[str, str]:
    (place,) = importlib.import_module(f"{PACKAGE}.{_MODEL}").__path__
    files = {f"model/{file.name}": file.read_text("utf-8") for file in Path(place).glob("*.py")}
    files = {
        name: text.replace("from ..layers", f"from {PACKAGE}.layers") for name, text in files.items()
    }
    program = Path(train.__file__).read_text("utf-8")
    files["train.py"] = program.replace('"compose train"', '"train.py"')
    for name in ("train.toml", _RECIPE):
        text = shipped(name).read_text("utf-8")
        head, _, keys = text.partition(f'[model]\nname = "{_MODEL}"')
        keys, none, own = keys.partition("\n")[2], 'path = ""     ', 'path = "model"'
        keys = own + keys.removeprefix(none) if keys.startswith(none) else f"{own}\n{keys}"
        files[name] = f"#:schema {'../' * name.count('/') or './'}{_SCHEMA}\n{head}[model]\n{keys}"
    files[_SCHEMA] = json.dumps(schema_of_files(), indent=1) + "\n"
    return files


def schema(arguments: Sequence[str]) -> int:
    """Print the JSON schema of a TOML file."""
    if plain := read_flags("schema", arguments).plain:
        raise flag_error("schema", f"takes no {plain[0]}; compose schema > FILE writes a file")
    print(json.dumps(schema_of_files(), indent=1))
    return 0


def completion(arguments: Sequence[str]) -> int:
    """Print what a shell completes."""
    (shell, *more) = read_flags("completion", arguments).plain or [""]
    if shell not in _SHELLS or more:
        raise flag_error("completion", f"needs one of {', '.join(_SHELLS)}")
    keys = [f"--{table}.{key}=" for table, kind in TABLES.items() for key in docs(kind)]
    words = {
        name: [f"{flag}=" if value else flag for flag, value in usage.flags.items()]
        + (keys if usage.file else [])
        for name, usage in COMMANDS.items()
    }
    print(_SHELLS[shell](words))
    return 0


def _bash(words: dict[str, list[str]]) -> str:
    rows = "\n".join(f"        {name}) words='{' '.join(own)}' ;;" for name, own in words.items())
    return f"""\
_compose() {{
    local words current="${{COMP_WORDS[COMP_CWORD]}}"
    case "${{COMP_WORDS[1]}}" in
{rows}
    esac
    [ "$COMP_CWORD" -eq 1 ] && words='{" ".join(words)}'
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    [[ "${{COMPREPLY[0]}}" == *= ]] && compopt -o nospace
}}
complete -o default -F _compose compose"""


def _zsh(words: dict[str, list[str]]) -> str:
    rows = "\n".join(f"        {name}) own=({' '.join(own)}) ;;" for name, own in words.items())
    return f"""\
#compdef compose
_compose() {{
    local -a own
    case $words[2] in
{rows}
    esac
    if (( CURRENT == 2 )); then
        compadd -- {" ".join(words)}
    else
        compadd -S '' -- ${{(M)own:#*=}}
        compadd -- ${{own:#*=}}
        _files
    fi
}}
compdef _compose compose"""


def _fish(words: dict[str, list[str]]) -> str:
    lines = []
    for name, own in words.items():
        about = shlex.quote(COMMANDS[name].summary)
        lines.append(f"complete -c compose -n __fish_use_subcommand -a {name} -d {about}")
        for word in own:
            option = word.strip("-=") + (" -r" if word.endswith("=") else "")
            lines.append(f"complete -c compose -n '__fish_seen_subcommand_from {name}' -l {option}")
    return "\n".join(lines)


_SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}


def schema_of_files() -> dict[str, Any]:
    """Return the schema of TOML files (JSON Schema, draft 7): each key with its type and description.

    The fields of the models' own configs are in the table model, which may have others too: those of a
    model in ``model.path``.
    """
    tables: dict[str, dict[str, Any]] = {}
    for name, kind in TABLES.items():
        table = {"type": "object", "properties": _keys(kind), "additionalProperties": kind is Model}
        above, _, inner = name.rpartition(".")
        (tables[above]["properties"] if above else tables)[inner] = table
    for name in model_names():
        for key, value in _keys(find_model(name).Config).items():
            others = tables["model"]["properties"].setdefault(key, {"anyOf": []})
            if "anyOf" in others:
                del value["default"]  # a preset sets its own
                value["description"] = f"{name}: {value['description']}"
                others["anyOf"].append(value)
    extends = {"type": "string", "description": "A file whose keys these are laid over."}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A run of dtensor-compose",
        "type": "object",
        "properties": {"extends": extends, **tables},
        "additionalProperties": False,
    }


def _keys(kind: type) -> dict[str, dict[str, Any]]:
    return {
        key: TypeAdapter(of).json_schema()
        | {"description": doc, "default": json.loads(json.dumps(default))}
        for key, of, default, doc in described(kind)
    }
