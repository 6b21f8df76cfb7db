"""The error for mistakes in a user's input, and what all readers of input share.

Hints at the nearest known word; paths that a person gives; reads and writes that stay inside a folder
which anyone may have made; types and texts of a config's keys.

A table of train.toml is a frozen dataclass. ``train.py --help`` prints the text under each field. A
field without text is no key.
"""

import ast
import contextlib
import dataclasses
import datetime
import difflib
import errno
import functools
import inspect
import itertools
import json
import keyword
import os
import re
import stat
import textwrap
import traceback
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, Field

_SHOWN = 200  # characters of a word
_LONG = re.compile(rf"\S{{{2 * _SHOWN},}}")


class ConfigError(Exception):
    """Input that cannot work: one line for each problem, with the key, the reason and a cure.

    Characters in a name or a value that a terminal would obey are written as escapes.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = [shortened(printable(problem)) for problem in problems]
        super().__init__("\n".join(self.problems))


@contextmanager
def noted(problems: list[str]) -> Iterator[None]:
    """Add the problems of a ConfigError raised inside to ``problems``, and go on."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


@contextmanager
def refused_in(file: str) -> Iterator[None]:
    """Put the name of a file before each problem of a ConfigError raised inside."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(f"{file}: {problem}" for problem in error.problems)) from None


@contextmanager
def refused_if(line: str) -> Iterator[None]:
    """Turn what a model raises into a ConfigError: ``line``, with the cause and its place for {}."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigError) or "OutOfMemory" in type(error).__name__:
            raise
        lines = str(error).strip().splitlines() or [""]
        cause = f"{type(error).__name__}: {lines[-1 if lines[0].endswith(':') else 0]}"
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        forwards = [f for f in frames if f.f_code.co_name == "forward" and "self" in f.f_locals]
        if forwards:
            cause += f" (in forward of {type(forwards[-1].f_locals['self']).__name__})"
        raise ConfigError(line.replace("{}", cause)) from error


@contextmanager
def or_say(line: str) -> Iterator[None]:
    """Turn an OSError inside into a ConfigError: ``line``, with the reason of the system."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{line}: {error.strerror or error}") from None


@contextmanager
def written(where: str, path: Path) -> Iterator[None]:
    """Say which path cannot be written, with ``where`` before it, if a write inside fails."""
    try:
        with or_say(f"{where} {path}"):
            yield
    except ValueError as error:
        raise ConfigError(f"{where} {str(path)!r}: {error}") from None


def printable(text: str) -> str:
    """Return ``text`` on one line; invisible characters become escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str) -> str:
    """Return ``text`` with every long word cut: names and values in it may have any length."""
    return _LONG.sub(lambda word: f"{word[0][:_SHOWN]}...", text)


def did_you_mean(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return ``; did you mean X?`` for the nearest known word (likeness: 0 to 1), or ""."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f"; did you mean {near[0]}?" if near else ""


_VALUE = 60  # characters of a value in a message


def shown(value: Any) -> str:
    """Return a value as JSON writes it, cut off if it is long."""
    return cut(json.dumps(value, default=str))


def cut(text: str, most: int = _VALUE) -> str:
    """Return a text, cut off if it is long."""
    return text if len(text) <= most else f"{text[:most]}..."


def in_columns(rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Return a line for each row, in columns: the first ``left`` to the left, others to the right."""
    sides = [
        f"{'<' if place < left else '>'}{max(map(len, column))}"
        for place, column in enumerate(zip(*rows, strict=True))
    ]
    return ["  ".join(map(format, row, sides)).rstrip() for row in rows]


URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_NAME, _PATH = 255, 4095  # bytes of a file's name, and of a path, on Linux
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]\w*\}?")


def local_path(text: str) -> str:
    """Return ``text`` with a home folder in place of ``~``; ValueError for a store or a variable.

    Variables are not expanded: they differ between nodes, and where one is unset the path is another.
    """
    if URL.match(text):
        raise ValueError("is in a remote store, which cannot be used; give a folder of this machine")
    if result := _VARIABLE.search(text):
        raise ValueError(f"has {result[0]}, and variables are not expanded here; write its value, or ~")
    if "\0" in text:
        raise ValueError("cannot be a path: it has a null character")
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise ValueError(f"names no known home folder; a folder of that name is ./{text}")
    longest = max(len(os.fsencode(part)) for part in path.split(os.sep))
    if longest > _NAME:
        raise ValueError(
            f"cannot be a path: a name in it has {longest} bytes, and at most {_NAME} may be"
        )
    if (size := len(os.fsencode(path))) > _PATH:
        raise ValueError(f"cannot be a path: it has {size:,} bytes, and at most {_PATH:,} may be")
    return path


# The type of a key that names a file or a folder, and may have other values too, as "stdlib".
LocalPath = Annotated[str, AfterValidator(local_path)]


_CACHED = ("datasets--", "models--")
LEADS_OUT = "is a link that leads out of its folder; put the file itself there"


def leads_out(path: Path, folder: Path) -> bool:
    """Return whether ``path`` is a link to a place outside of ``folder``.

    A snapshot in Hugging Face's cache, ``models--NAME/snapshots/HASH``, has links to files in ``blobs``
    beside ``snapshots``.
    """
    if not path.is_symlink():
        return False
    root, result = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    blobs = [
        each.parent.parent / "blobs"
        for each in (root, *root.parents)
        if each.parent.name == "snapshots" and each.parent.parent.name.startswith(_CACHED)
    ]
    return not (result.is_relative_to(root) or result.parent in blobs)


def refuse_link_out(path: Path, folder: Path) -> None:
    """Raise ConfigError for a link that leads out of ``folder``."""
    if leads_out(path, folder):
        raise ConfigError(f"{path}: {LEADS_OUT}")


def _elsewhere(path: Path) -> bool:
    """Return whether a path is in a store (object_storage.py), which has no links and no half files."""
    return type(path).open is not Path.open


def there(path: Path) -> bool:
    """Return whether there is anything at ``path``, also a link to nothing."""
    return path.exists() if _elsewhere(path) else os.path.lexists(path)


def open_own(path: Path, mode: str = "rb", buffering: int = -1) -> Any:
    """Open a regular file as ``open`` does; text is UTF-8, and the caller closes it.

    Raises OSError for a symbolic link, which could lead anywhere, and for a pipe, which could block.
    """
    if _elsewhere(path):
        return path.open(mode, buffering)

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)

    try:
        encoding = None if "b" in mode else "utf-8"
        file = open(path, mode, buffering, encoding, opener=opener)  # noqa: SIM115 (the caller closes it)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a symbolic link", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is no file", str(path))
    return file


def fill(file: Any, memory: memoryview) -> int:
    """Read from an unbuffered file until the memory is full or the file ends; return the bytes read."""
    left = memory
    while left and (count := file.readinto(left)):
        left = left[count:]
    return len(memory) - len(left)


def read_own(path: Path) -> bytes:
    """Return the content of a regular file that is no link."""
    with open_own(path) as file:
        return file.read()


def state_of(path: Path) -> os.stat_result:
    """Return the system's data about a regular file; links are followed. A pipe is an OSError."""
    state = path.stat()
    if not stat.S_ISREG(state.st_mode):
        raise OSError(errno.EINVAL, "is no file", str(path))
    return state


def read_file(path: Path) -> bytes:
    """Return the content of a regular file; links are followed."""
    state_of(path)
    return path.read_bytes()


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a small file whole or not at all; a link at ``path`` is replaced, and not followed."""
    data = content.encode() if isinstance(content, str) else content
    if _elsewhere(path):
        path.write_bytes(data)
        return
    aside = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        aside.unlink()
    # The mode "x" does not follow links either.
    with aside.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _not_0_in_float32(value: float) -> float:
    if 0 < value < 2.0**-126:
        raise ValueError("is 0 in float32, which has nothing below 1.2e-38")
    return value


Positive = Annotated[int, Field(ge=1, lt=2**63)]
NonNegative = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(gt=0)]
Epsilon = Annotated[float, Field(gt=0), AfterValidator(_not_0_in_float32)]


def attribute(key: str) -> str:
    """Return the field of a key: a keyword of Python, such as async, gets an underscore."""
    return f"{key}_" if keyword.iskeyword(key) else key


@functools.cache
def docs(table: type) -> dict[str, str]:
    """Return the text under each field of a dataclass, by key, in the order of the fields."""
    inherited = [docs(base) for base in table.__bases__ if dataclasses.is_dataclass(base)]
    body = ast.parse(textwrap.dedent(inspect.getsource(table))).body[0].body  # type: ignore[attr-defined]
    return {name: text for base in inherited for name, text in base.items()} | {
        key.target.id.rstrip("_"): " ".join(text.value.value.split())
        for key, text in itertools.pairwise(body)
        if isinstance(key, ast.AnnAssign)
        and isinstance(key.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def type_name(kind: Any) -> str:
    """Return the name of a type, such as ``int``; for a choice ``"a" | "b"``."""
    if get_origin(kind) is Annotated:
        return type_name(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return " | ".join(toml_value(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return f"list of {type_name(get_args(kind)[0])}"
    if get_origin(kind) in (types.UnionType, Union):
        return " or ".join(type_name(choice) for choice in get_args(kind))
    return getattr(kind, "__name__", str(kind))


def whole_number(text: str) -> int:
    """Return the number that a text of 1 to 18 digits is; -1 for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else -1


def _toml_character(c: str) -> str:
    if c in '"\\':
        return f"\\{c}"
    if c.isprintable():
        return c
    return f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}"


def toml_value(value: Any) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{"".join(map(_toml_character, value))}"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, int) and value.bit_length() > 4096:  # Python refuses to write it in decimal
        return hex(value)
    return repr(value)


class ReadWith:
    """Marks, in a key's type, that it is read only if another key of its table has one of some values.

    ``ReadWith("is read with top_k; set {}", dtype="top_k")``. No value stands for any but the default.
    One of several keys is enough, and the first is the cure.
    """

    def __init__(self, otherwise: str, **keys: tuple[str, ...]) -> None:
        self.otherwise, self.keys = otherwise, keys

    def problem(self, name: str, table: Any) -> str:
        """Return why a key of ``table`` is not read; "" if it is."""
        for key, values in self.keys.items():
            if getattr(table, key) in (values or {getattr(table, key)} - {getattr(type(table), key)}):
                return ""
        key, values = next(iter(self.keys.items()))
        wanted = " = " + " or ".join(map(toml_value, values)) if values else ""
        return self.otherwise.format(f"{name}.{key}{wanted}")
