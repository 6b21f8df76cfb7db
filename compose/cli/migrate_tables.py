"""Keys of other trainers by tables: what each becomes here, is not needed, or is refused.

``migrate_keys/*.toml`` has a table for each format. A row gives our key, or a fact, such as
``train.steps~samples``, which :mod:`compose.cli.migrate_meaning` works out with others. Whatever its
section, a row is read as cases: patterns of the value, with spaces between, and what is set or said
then. A case ``true`` without ``false`` means that nothing is done for false.

A row sets a key to its own value, or to one of the file by a conversion: ``$value`` (one word),
``$list`` (all of it), ``$first``, ``$second``, ``$minutes``. ``KEY~on`` sets KEY to ``KEY~value`` if no
file sets it, ``KEY~instead`` goes before KEY, and ``KEY~raw`` may hold a variable without a value.
"""

import contextlib
import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from compose.cli.migrate_files import Leaves, shown, unset
from compose.config.json_files import typed, types_of
from compose.config.tables import TABLES
from compose.config.toml import tomllib
from compose.errors import Fraction, NonNegative, Positive, attribute, toml_value

FORMATS = ("deepspeed", "training_arguments", "accelerate", "torchtitan", "megatron")
"""In the order in which their defaults count."""
# Types of facts that are no keys, by what stands after the ~.
_COUNTS = ("accumulation", "machines", "microbatch", "per_machine", "per_rank", "processes")
_KINDS: dict[str, Any] = {
    **dict.fromkeys(_COUNTS, Positive),
    **dict.fromkeys(("samples", "schedule", "schedule_samples", "warmup_samples"), NonNegative),
    **dict.fromkeys(("absolute", "minutes", "steps"), float),
    "warmup": Annotated[float, Field(ge=0)],
    **dict.fromkeys(("group", "layers"), Positive),
    "ratio": Fraction,
}
_SIZES = ("model.dim", "model.n_layers", "model.n_heads", "model.hidden_dim")
_SIZES += ("parallel.dp_replicate", "parallel.cp", "parallel.tp", "parallel.pp")
_TEXTS = ("run.dir", "data.path", "data.validation", "checkpoint.load_hf", "optimizer.offload_dir")
_LISTS = {"unused": "unused", "changed": "note"}
"""Sections of lists of keys by what is said of them, and what that is in a case."""
_SAID = {"refuse": "refused", "note": "changed in meaning", "unused": "not needed", "set": "to set"}
"""Words in a case that set no key, and the kind of their entry."""


class KnownValue(NamedTuple):
    """The value of one of our keys, or of a fact, and where it comes from."""

    value: Any
    origin: str


class ReportLine(NamedTuple):
    """A line of the report on one leaf of a file."""

    kind: str
    """mapped, changed in meaning, not needed, unknown or refused."""
    line: str


class KeyMeaning(NamedTuple):
    """The meaning of a key in a table."""

    section: str
    cases: Mapping[str, Mapping[str, Any]]
    """Values and remarks, by a pattern of the key's value; the first that fits counts."""

    def case(self, value: Any) -> Mapping[str, Any] | None:
        """Return the case of a value; None if there is none."""
        text = str(value).lower()
        fitting = (case for each, case in self.cases.items() if fnmatchcase(text, each.lower()))
        return next(fitting, None)

    @property
    def keys(self) -> Sequence[str]:
        """The keys of ours, and the facts, that the first case with any sets."""
        if self.section == "only":
            return []
        cases = ([key for key in case if "." in key] for case in self.cases.values())
        return next(filter(None, cases), [])


@dataclass(frozen=True)
class TrainerTable:
    """The table of one trainer."""

    title: str
    rows: Mapping[str, KeyMeaning]
    """By a key's name, or a pattern of names; the first that fits counts."""
    rewrite: Sequence[Sequence[str]]
    strict: Sequence[str]  # patterns of keys of which an unknown one is refused
    defaults: Mapping[str, Any]
    defaults_with: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    default_notes: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    typo: float = 0.85  # how much an unknown key must be like a known one to be refused
    programs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    words: Sequence[str] = ()  # keys whose value is several words

    @functools.cached_property
    def names(self) -> list[str]:
        """Every key that the table accounts for, without patterns."""
        return sorted(name for name in self.rows if "*" not in name)

    def plain(self, key: str) -> str:
        """Return a key as the table writes it."""
        for pattern, other in self.rewrite:
            key = re.sub(pattern, other, key)
        return key

    def row(self, name: str) -> KeyMeaning | None:
        """Return the row of a key; None if the table does not know the key."""
        patterns = (row for each, row in self.rows.items() if "*" in each and fnmatchcase(name, each))
        return self.rows.get(name) or next(patterns, None)

    def unknown(self, where: str, name: str, value: Any) -> ReportLine:
        """Return the entry of a key that the table does not know."""
        names = self.names
        like = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        last = name.rpartition(".")[2]
        like = like or [each for each in names if each.rpartition(".")[2] == last]
        hint = f"; the nearest known key is {like[0]}" if like else ""
        near = bool(difflib.get_close_matches(name, names, n=1, cutoff=self.typo))
        strict = any(fnmatchcase(name, pattern) for pattern in self.strict)
        text = f"{where} = {shown(value)}: {self.title} has no such key{hint}"
        return (
            ReportLine("refused", f"{text}, or remove it")
            if near or strict
            else ReportLine("unknown", text)
        )


@functools.cache
def load_formats() -> dict[str, TrainerTable]:
    """Return the table of each format."""
    folder, results = files("compose.cli") / "migrate_keys", {}
    for name in FORMATS:
        table = tomllib.loads((folder / f"{name}.toml").read_text("utf-8"))
        results[name] = TrainerTable(rows=_rows(table), **table)
    return results


def _rows(table: dict[str, Any]) -> dict[str, KeyMeaning]:
    """Take the sections of keys out of a table, and return their rows."""
    rows = list[tuple[str, str, Mapping[str, Any]]]()
    notes = table.pop("notes", {})
    for name, ours in table.pop("same").items():
        note = {"note": notes[name]} if name in notes else {}
        rows.append(("same", name, {"none": {"unused": "is not set"}, "*": {ours: "$list"} | note}))
    for names, given in table.pop("cases").items():
        cases = {each: case for patterns, case in given.items() for each in patterns.split()}
        switch = {"true": cases["true"], "false": {}} if "true" in cases else {}
        rows.append(("cases", names, switch | cases))
    for names, row in table.pop("only", {}).items():
        off = {str(value): {} for value in row["off"]}
        rows.append(("only", names, off | {"*": {"refuse": row["why"]}}))
    for section, said in _LISTS.items():
        for why, names in table.pop(section, {}).items():
            rows.append((section, names, {"*": {said: why}}))
    results = dict[str, KeyMeaning]()
    for section, names, cases in rows:
        for name in names.split():
            results.setdefault(name, KeyMeaning(section, cases))
    return results


@dataclass
class KnownValues:
    """All that the files say, by our keys and by facts."""

    values: dict[str, KnownValue] = field(default_factory=dict)
    entries: list[ReportLine] = field(default_factory=list)
    auto: dict[str, str] = field(default_factory=dict)
    """Where "auto" stands, and the keys of ours that a program fills in."""
    left: set[str] = field(default_factory=set)
    """Keys of ours, and facts, whose default is TrainingArguments'."""
    waiting: dict[str, str] = field(default_factory=dict)
    """Keys of ours that "auto" gives, and whose program's file is not there, and others to set; why."""
    programs: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Programs whose defaults go before those of their file's table."""

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
        self.values[key] = KnownValue(value, "; ".join(filter(None, dict.fromkeys([*origins, text]))))

    def note(self, kind: str, text: str, key: str = "") -> None:
        """Add a line to the report, with the place that ``key`` comes from."""
        place = f"{self.values[key].origin}: " if key in self.values else ""
        self.entries.append(ReportLine(kind, place + text))

    def changed(self, text: str, key: str = "") -> None:
        """Note that something has another meaning here."""
        self.note("changed in meaning", text, key)

    def read(self, file: str, table: TrainerTable, leaves: Leaves) -> None:
        """Account for every leaf of a file."""
        others: dict[str, list[str]] = {}
        names = {table.plain(key) for key, value in leaves if value is not None}
        for title, program in table.programs.items():
            if any(names.issuperset(keys.split()) for keys in program["by"]):
                self.programs[title] = program
        off = [name for name, value in leaves if name.endswith(".enabled") and value is False]
        off = tuple(name[: -len("enabled")].removesuffix("shared_parameters.") for name in off)
        for key, value in leaves:
            name = table.plain(key)
            row, where = table.row(name), f"{file}: {key}"
            if row is None:
                self.entries.append(table.unknown(where, name, value))
            elif value is None or value in ("", {}, []):
                self.note("not needed", f"{where}: is not set")
            elif value == "auto" and row.section not in _LISTS and "auto" not in row.cases:
                self.auto[where] = " ".join(dict.fromkeys(key.partition("~")[0] for key in row.keys))
                self.left.update(row.keys, (key.removesuffix("~instead") for key in row.keys))
            elif row.section == "only" and name.startswith(off):
                self.note("not needed", f"{where}: its part is off")
            elif row.section == "only" and len(row.cases) == 1:
                others.setdefault(row.cases["*"]["refuse"], []).append(key)
            else:
                words = value if row.section == "cases" and isinstance(value, list) else [value]
                if name in table.words:
                    words = [part for word in words for part in str(word).split()]
                for word in words:
                    self._apply(where, row, value, word)
        for why, keys in others.items():
            self.note("refused", f"{file}: {', '.join(keys)}: {why}")

    def _apply(self, where: str, row: KeyMeaning, value: Any, word: Any) -> None:
        """Set and say what a row has for one word of a value."""
        case = row.case(word)
        if case is None:
            known = ", ".join(each for each in row.cases if "*" not in each)
            self.note("refused", f"{where}: {shown(word)} is not known here; nearest: one of {known}")
            return
        texts = []
        for key, setting in case.items():
            if key in _SAID:
                continue
            try:
                self._set(where, key, _converted(setting, value, word))
            except ValueError as error:
                self.note("refused", f"{where}: {error}")
                return
            except LookupError as error:
                self.note("to set", f"{where}: {error.args[0]}")
                return
            texts.append(key.partition("~")[0])
        into = f" -> {', '.join(dict.fromkeys(texts))}" if texts else ""
        said = f"{where} = {shown(value)}"
        for name, kind in _SAID.items():
            if name in case:
                self.note(kind, f"{said}{into if name == 'note' else ''}: {case[name]}")
                return
        if texts:
            self.note("mapped", said + into)
        else:
            self.note("not needed", f"{where} = {shown(word)}: needs no key here")

    def _set(self, where: str, key: str, value: Any) -> None:
        """Set a key or a fact. Raises ValueError if it cannot be, LookupError if it may be left out."""
        own = key if key in _TEXTS else "the number of ranks" if key[:6] == "world~" else ""
        if key.endswith("~raw"):
            self.values.setdefault(key, KnownValue(value, where))
            return
        if variable := unset(value) or (own and value is True and "a name"):
            line = f"{variable} has no value in this script"
            if own:
                raise LookupError(f"{line}, and {own} is left out")
            raise ValueError(f"{line}; write a value in its place")
        value = as_key(key, value)
        if self.get(key, value) != value:
            other = f"{self.values[key].origin} says {toml_value(self.get(key))}"
            line = f"says {toml_value(value)} for {key.partition('~')[0]}, and {other}"
            raise ValueError(f"{line}; remove one of them")
        self.values.setdefault(key, KnownValue(value, where))


def _converted(setting: Any, value: Any, word: Any) -> Any:
    """Return the value that a case sets: its own, or the file's, by the name of a conversion."""
    if setting == "$value":
        return word
    if setting == "$list":
        return value
    if setting == "$minutes":
        return 60 * as_key("~minutes", word)
    if setting in ("$first", "$second"):
        if not isinstance(value, list) or len(value) != 2:
            raise ValueError(f"expected a list of 2 values, got {toml_value(value)}")
        return value[setting == "$second"]
    return setting


def as_key(key: str, value: Any) -> Any:
    """Return a value with the type of one of our keys, or of a fact; ValueError says what is wrong."""
    ours, _, fact = key.partition("~")
    table, _, name = ours.rpartition(".")
    kind = _KINDS.get(fact)
    if fact in ("", "value", "instead") and table in TABLES:
        kind = types_of(TABLES[table]).get(attribute(name))
        kind = Positive if ours in _SIZES else kind
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
