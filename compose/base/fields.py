"""The parts of a config's keys: their types, their descriptions, and their values as TOML.

A table of train.toml is a frozen dataclass next to the code that uses it. ``train.py --help`` prints
the text under each field. A field without text is no key.
"""

import ast
import dataclasses
import datetime
import functools
import inspect
import itertools
import keyword
import textwrap
import types
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, Field


def _not_0_in_float32(value: float) -> float:
    if 0 < value < 2.0**-126:
        raise ValueError("is 0 in float32, which has nothing below 1.2e-38")
    return value


Positive = Annotated[int, Field(ge=1, lt=2**63)]
NonNegative = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(gt=0)]
Epsilon = Annotated[float, Field(ge=0), AfterValidator(_not_0_in_float32)]


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
    if get_origin(kind) is types.UnionType:
        return " or ".join(type_name(choice) for choice in get_args(kind))
    return getattr(kind, "__name__", str(kind))


def whole_number(text: str) -> int:
    """Return the number that a text of 1 to 18 digits is; -1 for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else -1


def toml_value(value: Any) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = "".join(
            {'"': '\\"', "\\": "\\\\"}.get(c, c if c.isprintable() else f"\\u{ord(c):04x}")
            for c in value
        )
        return f'"{escaped}"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, int) and value.bit_length() > 4096:  # Python refuses to write it in decimal
        return hex(value)
    return repr(value)
