"""Writes a cluster as TOML, so that ``load_cluster`` reads the same values again."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from compose.errors import docs, toml_value
from compose.planner.cluster import Cluster


def as_toml(cluster: Cluster, notes: Sequence[str] = ()) -> str:
    """Return a cluster as the text of a TOML file.

    Args:
        cluster: The cluster; its name is that of the file, and stands nowhere in it.
        notes: Lines for the head of the file: where the figures come from.

    Returns:
        The text. Each key has its description as a comment. Floats are written with all their digits.
    """
    lines = [f"# {note}" for note in notes]
    own = {key: value for key, value in _fields(cluster).items() if key != "name"}
    tables = {key: value for key, value in own.items() if dataclasses.is_dataclass(value)}
    lines += ["", *_keys(own, docs(Cluster), tables)]
    for key, value in tables.items():
        lines += ["", f"[{key}]", *_keys(_fields(value), docs(type(value)), {})]
    return "\n".join(lines) + "\n"


def _fields(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}


def _keys(values: Mapping[str, Any], words: Mapping[str, str], but: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if key in but:
            continue
        if key in words:
            yield f"# {words[key]}"
        if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            yield f"{key} = ["
            yield from (f"  {toml_value(_fields(row))}," for row in value)
            yield "]"
        else:
            yield f"{key} = {toml_value(value)}"
