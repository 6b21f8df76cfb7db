"""Values of files from any source: read as the expected type, or refused with a one-line error."""

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from compose.errors import (
    ConfigError,
    attribute,
    cut,
    did_you_mean,
    docs,
    read_file,
    read_own,
    shown,
    toml_value,
    type_name,
)

T = TypeVar("T")
_SHOWN = 200  # characters of a value in a message
Count = Annotated[int, Field(ge=0, lt=2**63)]
"""A field that counts or measures; it fits a signed integer of 64 bits."""
_KINDS = {
    "bool_type": "true or false",
    "float_type": "a number",
    "string_type": "a string",
    **dict.fromkeys(("dataclass_type", "dict_type", "model_type"), "an object"),
    **dict.fromkeys(("int_from_float", "int_type"), "a whole number"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
}
"""The type that each kind of pydantic error asks for."""


_OFF = (None, False, [], {}, "")


class KnownKeys:
    """Every known key of one kind of file."""

    def __init__(
        self,
        read: str,
        only: Mapping[str, tuple[Any, ...]],
        besides: str,
        cures: Mapping[str, str] | None = None,
    ) -> None:
        """Take keys that are read, ``only`` with some values change nothing, or never change anything.

        Names are separated by spaces; ``cures`` has what to do about a key of ``only``.
        """
        self.read, self.besides = frozenset(read.split()), frozenset(besides.split())
        self.only = {key: values for names, values in only.items() for key in names.split()}
        self.cures = cures or {}

    def problems(self, values: Mapping[str, Any]) -> list[str]:
        """Return a line for each key that may change something and is not supported here.

        A key that nobody knows is off if its value is empty.
        """
        return [
            f"{key if key.isidentifier() else shown(key)}: {shown(value)} is not supported here"
            f"{self.cures.get(key, '')}"
            for key, value in values.items()
            if key not in self.read
            and key not in self.besides
            and value not in self.only.get(key, _OFF)
        ]


def read_json(path: Path, kind: type[T], own: bool = False) -> T:
    """Read a JSON file as a value of ``kind``.

    Every type is checked strictly, and numbers are finite. Fields that ``kind`` does not have are
    ignored.
    """
    try:
        content = read_own(path) if own else read_file(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    try:
        return parse_json(content, kind)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_json(content: bytes, kind: type[T]) -> T:
    """Parse the content of a JSON file as :func:`read_json` does."""
    try:
        # Some editors begin a file with a byte order mark, which has no meaning.
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: byte {error.start}: {error.reason}") from None
    try:
        # Python's parser refuses numbers that are not JSON; pydantic takes them where a field is Any.
        json.loads(text, parse_constant=_refused, parse_float=_finite, parse_int=_whole)
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise ValueError(_line(error)) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def unreadable(error: Exception) -> str:
    """Return why a text file cannot be read, in words."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 (byte {error.start}); save it as UTF-8"
    return f"cannot read it: {getattr(error, 'strerror', None) or error}"


def _refused(name: str) -> Any:
    raise ValueError(f"holds {name}, which is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"holds a number out of range: {cut(digits)}")
    return value


def _whole(digits: str) -> int:
    # Python has a limit of digits, and its error message names a setting.
    if len(digits) > 400:
        raise ValueError(f"holds a number out of range: {cut(digits)}")
    return int(digits)


def _line(error: ValidationError) -> str:
    """Return the first error in words."""
    first = error.errors(include_url=False, include_context=False)[0]
    place, value, words = field_name(first["loc"]), _value(first["input"]), first["msg"]
    if first["type"] == "json_invalid":
        if "recursion limit" in words:
            return "is nested too deeply"
        return f"is not JSON: {words.removeprefix('Invalid JSON: ')}"
    if first["type"] == "missing":
        return f"{place}: is missing"
    wanted = _KINDS.get(first["type"])
    if wanted and not place:
        return f"is {value}, not {wanted}"
    start = f"{place}: " if place else ""
    if wanted:
        return f"{start}expected {wanted}, got {value}"
    _, should, reason = words.partition(" should ")
    return f"{start}{value}{should}{reason}" if should else f"{start}{value}: {words}"


def field_name(place: Sequence[int | str]) -> str:
    """Return the path of a field, such as ``shards[3].tokens``."""
    parts = [
        # The text of a key must not move a terminal's cursor.
        f"[{part}]" if isinstance(part, int) else f".{cut(part if part.isprintable() else ascii(part))}"
        for part in place
    ]
    return "".join(parts).removeprefix(".")


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return shown(value)


@functools.cache
def types_of(table: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass, with what restricts it."""
    return get_type_hints(table, include_extras=True)


def described(table: type) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield each key of a table with its type, its default and its text."""
    types, defaults = types_of(table), {each.name: each.default for each in fields(table)}
    for key, doc in docs(table).items():
        yield key, types[attribute(key)], defaults[attribute(key)], doc


@functools.cache
def _reader(kind: Any, text: bool) -> TypeAdapter[Any]:
    """Return what reads values of a type. To make one takes longer than to read a file with it."""
    return TypeAdapter(kind, config=ConfigDict(strict=not text, allow_inf_nan=False))


def typed(kind: Any, value: Any, text: bool = False) -> Any:
    """Return a value of a TOML file as a field of type ``kind``; with ``text`` it is a flag's.

    Raises ValueError, which says what is wrong with the value.
    """
    # A frozen dataclass has tuples for TOML's arrays.
    given = tuple(value) if isinstance(value, list) else value
    try:
        return _reader(kind, text).validate_python(given)
    except ValidationError as error:
        detail = error.errors()[0]
    got = cut(str(value) if text else toml_value(value), _SHOWN)
    if not text and detail["type"].endswith(("_type", "literal_error")):
        raise ValueError(f"expected {type_name(kind)}, got {got}{_meant(kind, value)}")
    reason = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
    raise ValueError(f"{got} {reason.partition(', unable')[0]}")


def _meant(kind: Any, value: Any) -> str:
    """Return a hint for a value of another type, as true for "True", or an empty string."""
    name, is_text = type_name(kind), isinstance(value, str)
    near = did_you_mean(value, name.split('"'), 0.8) if is_text and " or " in name else ""
    alone = tuple(value.strip("[]").split(",")) if is_text else (value,)
    for one in () if near or isinstance(value, bool) else (value, alone):
        with suppress(ValidationError):
            meant = toml_value(_reader(kind, text=True).validate_python(one))
            # A shell takes away the quotes in a list of texts.
            quoted = is_text and str(value).startswith("[")
            return f"; in a shell: '{meant}'" if quoted else f"; did you mean {meant}?"
    return near
