"""Keys of other trainers by tables: what each becomes here, is not needed, or is refused.

``foreign_keys/*.toml`` has a table for each format. A row gives our key, or a fact, such as
``train.steps~samples``, which :mod:`compose.cli.foreign_meaning` works out with others.
"""

import contextlib
import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any, NamedTuple, get_type_hints

from compose.cli.foreign_files import Leaves, shown, unset
from compose.config.tables import TABLES
from compose.config.toml import tomllib, typed
from compose.errors import Fraction, NonNegative, Positive, attribute, toml_value

FORMATS = ("deepspeed", "training_arguments", "accelerate", "torchtitan", "megatron")
"""In the order in which their defaults count."""
# Types of facts that are no keys, by what stands after the ~.
_KINDS: dict[str, Any] = {
    "accumulation": Positive,
    "machines": Positive,
    "microbatch": Positive,
    "per_machine": Positive,
    "per_rank": Positive,
    "processes": Positive,
    "ratio": Fraction,
    "samples": NonNegative,
    "schedule": NonNegative,
    "absolute": float,
    "warmup": float,
}
_TEXTS = ("run.dir", "data.path", "data.validation", "checkpoint.load_hf", "optimizer.offload_dir")
_LISTS = {"unused": "not needed", "changed": "changed in meaning"}
"""Tables of lists of keys by what is said of them, and the kind of their entries."""
_SPECIAL = ("note", "refuse", "unused")


class Fact(NamedTuple):
    """The value of one of our keys, or of a fact, and where it comes from."""

    value: Any
    origin: str


class Entry(NamedTuple):
    """A line of the report on one leaf of a file."""

    kind: str
    """mapped, changed in meaning, not needed, unknown or refused."""
    line: str


@dataclass
class Facts:
    """All that the files say, by our keys and by facts."""

    values: dict[str, Fact] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    auto: dict[str, str] = field(default_factory=dict)
    """Where "auto" stands, and the key of ours that a program fills in; "" if there is none."""
    waiting: set[str] = field(default_factory=set)
    """Keys of ours that "auto" gives, and whose program's file is not there."""

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Return the value of a key or a fact."""
        return self.values[key].value if key in self.values else otherwise

    def pop(self, key: str, otherwise: Any = None) -> Any:
        """Return the value of a key or a fact, and forget it."""
        return self.values.pop(key).value if key in self.values else otherwise

    def put(self, key: str, value: Any, *sources: str, text: str = "") -> None:
        """Set a key by what others say; the text says how, the sources are facts."""
        origins = [self.values[name].origin for name in (*sources, key) if name in self.values]
        self.values[key] = Fact(value, "; ".join(filter(None, dict.fromkeys([*origins, text]))))

    def note(self, kind: str, text: str, key: str = "") -> None:
        """Add a line to the report, with the place that ``key`` comes from."""
        place = f"{self.values[key].origin}: " if key in self.values else ""
        self.entries.append(Entry(kind, place + text))

    def read(self, file: str, table: Mapping[str, Any], leaves: Leaves) -> None:
        """Account for every leaf of a file."""
        others: dict[str, list[str]] = {}
        off = [name for name, value in leaves if name.endswith(".enabled") and value is False]
        off = tuple(name[: -len("enabled")].removesuffix("shared_parameters.") for name in off)
        for key, value in leaves:
            name = plain(table, key)
            where = f"{file}: {key}"
            row = next(_rows(table, name), None)
            if row is None:
                self.entries.append(self._unknown(where, name, value, table))
            elif value is None or value in ("", {}, []) or (value == "none" and row[0] == "same"):
                self.entries.append(Entry("not needed", f"{where}: is not set"))
            elif value == "auto" and row[0] not in _LISTS and "auto" not in row[1]:
                self.auto[where] = _key_of(row)
            elif row[0] == "only" and name.startswith(off):
                self.entries.append(Entry("not needed", f"{where}: its part is off"))
            elif row[0] == "only" and row[1]["off"] == ["any"]:
                others.setdefault(row[1]["why"], []).append(key)
            else:
                self._apply(where, table, name, value, row)
        for why, keys in others.items():
            self.entries.append(Entry("refused", f"{file}: {', '.join(keys)}: {why}"))

    def _unknown(self, where: str, name: str, value: Any, table: Mapping[str, Any]) -> Entry:
        names = sorted(known_keys(table))
        like = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        last = name.rpartition(".")[2]
        like = like or [each for each in names if each.rpartition(".")[2] == last]
        hint = f"; the nearest known key is {like[0]}" if like else ""
        near = bool(difflib.get_close_matches(name, names, n=1, cutoff=table.get("typo", 0.85)))
        strict = any(fnmatchcase(name, pattern) for pattern in table["strict"])
        text = f"{where} = {shown(value)}: {table['title']} has no such key{hint}"
        return Entry("refused", f"{text}, or remove it") if near or strict else Entry("unknown", text)

    def _apply(
        self, where: str, table: Mapping[str, Any], name: str, value: Any, row: tuple[str, Any]
    ) -> None:
        kind, what = row
        said = f"{where} = {shown(value)}"
        if kind in _LISTS:
            self.entries.append(Entry(_LISTS[kind], f"{said}: {what}"))
        elif kind == "only":
            off = [str(each).lower() for each in what["off"]]
            if str(value).lower() in off:
                self.entries.append(Entry("not needed", f"{said}: is off"))
            else:
                self.entries.append(Entry("refused", f"{said}: {what['why']}"))
        elif kind == "same":
            note = table.get("notes", {}).get(name, "")
            self._set(said, {what: value, **({"note": note} if note else {})}, where)
        else:
            words = value if isinstance(value, list) else [value]
            if name in table.get("words", ()):
                words = [part for word in words for part in str(word).split()]
            for word in words:
                case = _case(what, word)
                if case is None:
                    known = ", ".join(each for each in what if "*" not in each)
                    line = f"{where}: {shown(word)} is not known here; nearest: one of {known}"
                    self.entries.append(Entry("refused", line))
                else:
                    given = {"$value": word, "$list": value}
                    self._set(said, {k: given.get(str(v), v) for k, v in case.items()}, where)

    def _set(self, said: str, settings: Mapping[str, Any], where: str) -> None:
        """Set keys and facts by a row, or report why not."""
        texts = []
        for key, value in settings.items():
            if key in _SPECIAL:
                continue
            own = key if key in _TEXTS else "the number of ranks" if key[:6] == "world~" else ""
            if variable := unset(value) or (own and value is True and "a name"):
                line = f"{where}: {variable} has no value in this script"
                if own:
                    self.entries.append(Entry("to set", f"{line}, and {own} is left out"))
                else:
                    self.entries.append(Entry("refused", f"{line}; write a value in its place"))
                return
            try:
                value = as_key(key, value)
            except ValueError as error:
                self.entries.append(Entry("refused", f"{where}: {error}"))
                return
            if key in self.values and self.values[key].value != value:
                other = f"{self.values[key].origin} says {toml_value(self.values[key].value)}"
                line = f"{where}: says {toml_value(value)} for {key.partition('~')[0]}, and {other}"
                self.entries.append(Entry("refused", f"{line}; remove one of them"))
                return
            self.values.setdefault(key, Fact(value, where))
            texts.append(key.partition("~")[0])
        into = f" -> {', '.join(dict.fromkeys(texts))}" if texts else ""
        if "refuse" in settings:
            self.entries.append(Entry("refused", f"{said}: {settings['refuse']}"))
        elif "note" in settings:
            self.entries.append(Entry("changed in meaning", f"{said}{into}: {settings['note']}"))
        elif texts:
            self.entries.append(Entry("mapped", said + into))
        else:
            self.entries.append(Entry("not needed", f"{said}: {settings.get('unused', 'is off')}"))


def as_key(key: str, value: Any) -> Any:
    """Return a value with the type of one of our keys, or of a fact; ValueError says what is wrong."""
    table, _, name = key.rpartition(".")
    kind = _KINDS.get(key.partition("~")[2])
    if "~" not in key and table in TABLES:
        kind = get_type_hints(TABLES[table], include_extras=True).get(attribute(name))
    if kind is None:
        return value
    if isinstance(value, list) and key in _TEXTS:
        value = " ".join(map(str, value))
    if isinstance(value, str) and re.fullmatch(r"\s*[-+]?[\d_.]+(e[-+]?\d+)?\s*", value.lower()):
        value = float(value)
    if isinstance(value, float) and value.is_integer():
        with contextlib.suppress(ValueError):
            return typed(kind, int(value))
    try:
        return typed(kind, value)
    except ValueError as error:
        words = str(error).replace("expected int", "expected a whole number")
    raise ValueError(words.replace("expected float", "expected a number"))


@functools.cache
def load_tables() -> dict[str, dict[str, Any]]:
    """Return the table of each format."""
    folder = files("compose.cli") / "foreign_keys"
    return {name: tomllib.loads((folder / f"{name}.toml").read_text("utf-8")) for name in FORMATS}


def plain(table: Mapping[str, Any], key: str) -> str:
    """Return a key as the table writes it."""
    for pattern, other in table["rewrite"]:
        key = re.sub(pattern, other, key)
    return key


def known_keys(table: Mapping[str, Any]) -> set[str]:
    """Return every key that a table accounts for, without patterns."""
    lists = [
        *table.get("only", {}),
        *(text for kind in _LISTS for text in table.get(kind, {}).values()),
    ]
    names = {key for text in lists for key in text.split()}
    return {key for key in names | set(table["same"]) | set(table["cases"]) if "*" not in key}


def _rows(table: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """Yield what a table says about a key: first by its name, then by patterns."""
    if name in table["same"]:
        yield "same", table["same"][name]
    if name in table["cases"]:
        yield "cases", table["cases"][name]
    sections: Iterable[tuple[str, Any]] = (
        *(("only", (keys, rest)) for keys, rest in table.get("only", {}).items()),
        *((kind, (keys, why)) for kind in _LISTS for why, keys in table.get(kind, {}).items()),
    )
    for exact in (True, False):
        for kind, (keys, rest) in sections:
            for each in keys.split():
                if each == name if exact else ("*" in each and fnmatchcase(name, each)):
                    yield kind, rest


def _key_of(row: tuple[str, Any]) -> str:
    """Return the key of ours that a row sets; "" if there is none."""
    kind, what = row
    keys = [what] if kind == "same" else [key for case in what.values() for key in case]
    return next((key.partition("~")[0] for key in keys if kind != "only" and "." in key), "")


def _case(cases: Mapping[str, Any], value: Any) -> Mapping[str, Any] | None:
    text = str(value).lower()
    for each, result in cases.items():
        if fnmatchcase(text, each.lower()):
            return result
    return None
