"""Reads a TOML file and a command line into a Config, and reports all mistakes at once."""

import dataclasses
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compose.config.hugging_face import HF, config_problems, described_model
from compose.config.json_files import typed, types_of, unreadable
from compose.config.models import find_model, folder_name, module_of
from compose.config.tables import TABLES, Checkpoint, Config, Model, value_of
from compose.errors import (
    ConfigError,
    attribute,
    did_you_mean,
    docs,
    local_path,
    noted,
    open_own,
    refused_in,
    toml_value,
    type_name,
)
from compose.object_storage import as_path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

COMMAND_LINE = "command line"
DEFAULT = "train.toml"
_MOST_FILES = 100  # in a chain of files that extend one another
_SHOWN = 200  # characters of a line in a message


class _UnderflowedFloat(float):
    """A number in a file that is not 0, but becomes 0 as a float."""

    text = ""


def _float(text: str) -> float:
    value = float(text)
    if value == 0 and set(text.lower().partition("e")[0]) & set("123456789"):
        value = _UnderflowedFloat(value)
        value.text = text
    return value


_INSTEAD_OF = {
    ("train", "epochs"): ("train", "steps"),
    ("train", "steps"): ("train", "epochs"),
    ("model", "preset"): ("model", "name"),
    ("model", "path"): ("model", "name"),
    ("model", "name"): ("model", "path"),
}


@dataclass
class Keys:
    """Raw values by (table, key), the file or command line of each, and all files that were read."""

    values: dict[tuple[str, str], Any] = field(default_factory=dict)
    origins: dict[tuple[str, str], str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def set(self, table: str, key: str, value: Any, origin: str) -> None:
        """Set a raw value, or those of a table within the table."""
        inner = f"{table}.{key}"
        if inner in TABLES and isinstance(value, dict):
            for name, each in value.items():
                self.set(inner, name, each, origin)
        else:
            self.values[table, key], self.origins[table, key] = value, origin
            # A nearer file's train.epochs takes the place of a farther one's train.steps, and so back.
            # Its preset hf takes the place of a farther one's name.
            other = _INSTEAD_OF.get((table, key), ("", ""))
            used = value == HF if key == "preset" else value
            if used and self.origins.get(other, origin) != origin:
                del self.values[other], self.origins[other]

    def of(self, table: str) -> dict[str, Any]:
        """Return the raw values of a table."""
        return {key: value for (name, key), value in self.values.items() if name == table}

    def error(self, table: str, key: str, text: str) -> ConfigError:
        """Return the error for what is wrong with a key."""
        return ConfigError(f"{self.origins[table, key]}: {table}.{key}: {text}")


def load(file: str, overrides: Sequence[tuple[str, str]] = (), alone: bool = False) -> Config:
    """Read a file, apply overrides, and check each key by itself.

    Overrides are keys with the text of their values: ("train.steps", "20"). ``alone``: the file comes
    from a folder that anyone may have made, so it may not name another file. Raises ConfigError with
    every problem. ``rules.check`` checks the rules between keys.
    """
    keys = _read(file, Keys(), alone=alone)
    if alone:  # its run's place is of no use, and an older one may be a name that is now refused
        for key in (("run", "dir"), ("checkpoint", "memory")):  # the second one needs the first
            keys.values.pop(key, None)
    return _config(keys, overrides, file, alone)


def given_keys(file: str, overrides: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
    """Return the file that sets each key "table.key", or COMMAND_LINE."""
    keys = _read(file, Keys())
    results = {f"{table}.{key}": origin for (table, key), origin in keys.origins.items()}
    return results | {name: COMMAND_LINE for name, _ in overrides}


def files_of(file: str) -> list[str]:
    """Return a TOML file and all that it extends."""
    return _read(file, Keys()).files


def override(config: Config, overrides: Sequence[tuple[str, str]]) -> Config:
    """Return ``config`` with overrides applied, checked as in :func:`load`."""
    keys = Keys()
    for name, value in values_of(config).items():
        table, _, key = name.rpartition(".")
        keys.set(table, key, value, config.source)
    return _config(keys, overrides, config.source)


def without_file(overrides: Sequence[tuple[str, str]]) -> Config:
    """Return the defaults of all keys with overrides applied, checked as in :func:`load`."""
    return _config(Keys(), overrides, COMMAND_LINE)


def _config(
    keys: Keys, overrides: Sequence[tuple[str, str]], source: str, alone: bool = False
) -> Config:
    for name, text in overrides:
        table, _, key = name.partition(".")
        inner, _, rest = key.partition(".")
        if rest and f"{table}.{inner}" in TABLES:
            table, key = f"{table}.{inner}", rest
        if any("\ud800" <= c <= "\udfff" for c in text):  # bytes of an argument
            why = f"{toml_value(text)} is not UTF-8, which config.toml has to be; give another"
            keys.problems.append(f"{COMMAND_LINE}: {name}: {why}")
            continue
        value = _parse_value(text)
        wanted = types_of(TABLES[table]).get(attribute(key)) if table in TABLES else None
        # A folder may be named 2024 or 2026-11-29, and a shell takes quotes away.
        if type_name(wanted).startswith("str") and not isinstance(value, (str, list)):
            value = text
        keys.set(table, key, value, COMMAND_LINE)
    tables = {
        name: kind(**_checked(name, kind, keys, keys.of(name)))
        for name, kind in TABLES.items()
        if kind is not Model
    }
    if tables["train"].epochs and ("train", "steps") in keys.values:
        both = f"{tables['train'].epochs:g} and train.steps = {tables['train'].steps}"
        text = f"{both} both say how long the run is; remove one of them"
        keys.problems += keys.error("train", "epochs", text).problems
    model = Model()
    with noted(keys.problems):
        model = _model(keys, tables["checkpoint"], "" if alone else tables["run"].dir, alone)
    tables["model"] = dataclasses.replace(model, lora=tables.pop("model.lora"))
    for table, key in keys.values:
        if table not in TABLES:
            unknown = f"unknown table{did_you_mean(table, TABLES, 0.55)}"
            keys.problems.append(f"{keys.origins[table, key]}: {table}: {unknown}")
    if keys.problems:
        raise ConfigError(*dict.fromkeys(keys.problems))
    return Config(**tables, source=source)


def _read(file: str, keys: Keys, above: tuple[str, ...] = (), alone: bool = False) -> Keys:
    """Add the raw values of a file to ``keys``; those ``above`` extend it."""
    if len(above) > _MOST_FILES:
        raise ConfigError(
            f"{file}: is the last of more than {_MOST_FILES} files that extend one another"
        )
    text = ""
    try:
        place = os.path.realpath(file)  # not Path.resolve, which fails for a loop of links
        if place in above:
            raise ConfigError(f"{file}: extends itself")
        with open_own(as_path(file), "r") if alone else open(file, encoding="utf-8") as opened:
            # Some editors begin a file with a byte order mark, which has no meaning.
            text = opened.read().removeprefix("\ufeff")
        content = tomllib.loads(text, parse_float=_float)
        keys.files.append(file)
    except FileNotFoundError:
        named_in = f"{keys.files[-1]}: extends: " if above else ""
        make = "; name another, or make a folder with one: compose init DIR"
        cure = make if file == DEFAULT else ""
        raise ConfigError(f"{named_in}{file}: no such file{cure}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: {_syntax_error(text, error)}") from None
    except (OSError, ValueError, RecursionError) as error:
        inside = os.path.join(file, DEFAULT)
        near = f"; did you mean {inside}?" if os.path.isfile(inside) else ""
        raise ConfigError(f"{file}: {unreadable(error)}{near}") from None
    base = content.pop("extends", None)
    if base is not None and alone:
        raise ConfigError(f"{file}: extends: is of a checkpoint, whose files stand alone")
    if isinstance(base, str) and base:
        try:
            base = local_path(base)
        except ValueError as error:
            raise ConfigError(f"{file}: extends: {toml_value(base)} {error}") from None
        _read(os.path.join(os.path.dirname(file), base), keys, (*above, place))
    elif base is not None:
        keys.problems.append(f'{file}: extends: expected a file name in quotes, as "base.toml"')
    for table, values in content.items():
        if not isinstance(values, dict):
            keys.problems.append(f"{file}: {table}: unknown key{nearest_key(table)}")
            continue
        if not values and table not in TABLES:
            keys.problems.append(f"{file}: {table}: unknown table{did_you_mean(table, TABLES, 0.55)}")
        for key, value in values.items():
            keys.set(table, key, value, file)
    return keys


def _syntax_error(text: str, error: ValueError) -> str:
    """Return the parser's message with the text of the line that it names."""
    words = str(error)
    place = words.partition("(at line ")[2].partition(",")[0]
    if not place.isdigit():
        return f"TOML syntax: {words}"
    line = text.split("\n")[int(place) - 1].strip()[:_SHOWN]
    return f"line {place}: TOML syntax: {words.partition(' (at line')[0]}: {line}"


def _parse_value(text: str) -> Any:
    """Return ``text`` as a TOML value; a text that is none stays a string."""
    try:
        result = tomllib.loads(f"value = {text}", parse_float=_float)
    except (ValueError, RecursionError):
        return text
    return result["value"] if len(result) == 1 else text  # several lines are not one value


def nearest_key(key: str, table: str = "", known: Sequence[str] = ()) -> str:
    """Return a hint for an unknown key of a table with some known ones, or an empty string.

    It is a table of that name, a similar key, or the same key of another table.
    """
    key = key.lstrip("-")
    for name in (key, f"{table}.{key}"):
        if name in TABLES:
            return f"; it is a table: --{name}.key=value, or [{name}] in a file"
    if key == "extends":
        return "; it belongs before the first table of a file"
    here, everywhere = {name: f"{table}.{name}" for name in known}, dict[str, str]()
    for other, kind in TABLES.items():
        for name in docs(kind):
            everywhere.setdefault(name, f"{other}.{name}")
    for names, likeness in ((here, 0.85), (everywhere, 1.0), (here, 0.6), (everywhere, 0.7)):
        if like := difflib.get_close_matches(key, names, n=1, cutoff=likeness):
            return f"; did you mean {names[like[0]]}?"
    return ""


def _checked(table: str, kind: type, keys: Keys, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``values`` that have their field's type, by field; note a problem for others."""
    types, known = types_of(kind), list(docs(kind))
    good, fields = {}, {each.name for each in dataclasses.fields(kind)}
    for key, value in values.items():
        several = value if isinstance(value, list) else [value]
        vanished = [one.text for one in several if isinstance(one, _UnderflowedFloat)]
        try:
            if key not in known:
                bare = f"is no key, since {kind.__name__} has no line of text under it"
                hint = f"unknown key{nearest_key(key, table, known)}"
                raise ValueError(bare if key in fields else hint)
            if vanished:
                raise ValueError(f"{vanished[0]} is too near 0 for a float, which would be 0")
            good[attribute(key)] = typed(types[attribute(key)], value)
        except ValueError as error:
            keys.problems += keys.error(table, key, str(error)).problems
    return good


def _model(keys: Keys, begun: Checkpoint, run: str, alone: bool) -> Model:
    """Return the table [model]: name, preset, and the fields of that model's own config.

    ``begun`` is the table [checkpoint]; ``run`` is the folder of a run that may be resumed. A file that
    stands ``alone`` has every field, and no folder is read for it. Raises ConfigError if there is no
    such model.
    """
    given = keys.of("model")
    chosen = {key: given.pop(key) for key in list(given) if key in docs(Model)}
    words = _checked("model", Model, keys, chosen)
    if len(words) < len(chosen):
        return Model()
    name, preset = words.get("name", Model.name), words.get("preset", Model.preset)
    own, path = None, words.get("path", "")
    if path:
        path = folder_name(path)
        if problem := _path_problem(keys, words, path, alone):
            raise keys.error("model", "path", problem)
        name = words["name"] = path
    elif os.path.isabs(name):
        raise keys.error("model", "name", f"{toml_value(name)} is a folder; set model.path to it")
    if preset == HF and not alone:
        key = ("checkpoint", "load_hf") if begun.load_hf else ("model", "preset")
        with refused_in(keys.origins[key]):
            own = _described(begun, run, words, given)
        name = own.name if own else name
    if name != words.get("name", name):
        key, cure = ("path", "") if path else ("name", f"set it to {name}, or ")
        text = f"{words['name']!r} is not what {begun.load_hf} holds; {cure}leave it out"
        raise keys.error("model", key, text)
    with refused_in(keys.origins.get(("model", "path" if path else "name"), "model")):
        folder = find_model(name)
    if preset != HF and preset not in folder.presets:
        near = did_you_mean(preset, folder.presets)
        known = ", ".join(folder.presets)
        text = f"unknown preset {preset!r} of {name}{near} (known: {known})"
        raise keys.error("model", "preset", text)
    values = _checked("model", folder.Config, keys, given)
    config = own.config if own else folder.Config() if preset == HF else folder.presets[preset]
    try:
        config = dataclasses.replace(config, **values)  # type: ignore[type-var]
    except ValueError as error:  # the config's own check, "field: reason"
        blamed = str(error).partition(":")[0]
        origins = (keys.origins.get(("model", key)) for key in (blamed, *values))
        keys.problems.append(f"{next(filter(None, origins), 'model')}: model.{error}")
    if own and values and as_path(begun.load_hf).is_dir():
        for problem in config_problems(as_path(begun.load_hf), name, config):
            keys.problems += keys.error("checkpoint", "load_hf", problem).problems
    return Model(name, path, preset, config)


def _path_problem(keys: Keys, words: Mapping[str, Any], path: str, alone: bool) -> str:
    """Return why the folder of ``model.path`` is not taken; "" if it is."""
    origin, shown = keys.origins["model", "path"], toml_value(words["path"])
    if words.get("name", path) != path:
        return f"{shown} stands beside model.name = {toml_value(words['name'])}; remove one of them"
    # Whoever has made a checkpoint would else choose which code runs here.
    if alone and origin != COMMAND_LINE and module_of(path) not in sys.modules:
        return f"its code runs if the command names it: --model.path={path}"
    if not Path(path).is_dir():
        beside = os.path.join(os.path.dirname(origin), words["path"])
        near = f"; did you mean {beside}?" if Path(beside).is_dir() else ""
        return f"{shown}: no such folder{near}"
    return ""


def _described(
    begun: Checkpoint, run: str, words: Mapping[str, Any], given: Mapping[str, Any]
) -> Model | None:
    """Return the model of ``load_hf``; if it is gone, that of the run's newest checkpoint.

    None stands for fields that are all given, as in the file that a run has written.
    """
    folder = as_path(begun.load_hf)
    if "name" in words and not set(docs(find_model(words["name"]).Config)) - set(given):
        return None
    if not begun.load_hf:
        raise ConfigError(
            f'model.preset: "{HF}" is the model of checkpoint.load_hf, which is empty; set it to a'
            " folder with config.json"
        )
    if run and begun.resume == "auto" and not folder.is_dir():
        for file in sorted(as_path(run).glob("checkpoints/step-*/config.toml"), reverse=True):
            with suppress(ConfigError):
                return load(str(file), alone=True).model
    with refused_in("checkpoint.load_hf"):
        chosen = words.get("name", "")
        name, config = described_model(folder, chosen if words.get("path") else "", chosen)
        return Model(name=name, config=config)


def dump(config: Config) -> str:
    """Return ``config`` as TOML, with every key of every table, so that no default matters."""
    tables: dict[str, list[str]] = {}
    for name, value in values_of(config).items():
        table, _, key = name.rpartition(".")
        tables.setdefault(table, []).append(f"{key} = {toml_value(value)}")
    return "\n".join("\n".join([f"[{table}]", *lines, ""]) for table, lines in tables.items())


def values_of(config: Config) -> dict[str, Any]:
    """Return the value of every key, by "table.key", with those of the model's own config."""
    results = dict[str, Any]()
    for table, kind in TABLES.items():
        values = value_of(config, table)
        results |= {f"{table}.{key}": getattr(values, attribute(key)) for key in docs(kind)}
        if isinstance(values, Model) and values.config:
            own = docs(type(values.config))
            results |= {f"{table}.{key}": getattr(values.config, key) for key in own}
    if config.train.epochs:  # then the steps follow from the data, which are not open yet
        del results["train.steps"]
    return results
