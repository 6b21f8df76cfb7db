"""The JSON schema of a TOML file, by which an editor checks and completes it."""

import dataclasses
import json
import typing
from typing import Any

from pydantic import TypeAdapter

from compose.config.models import find_model, model_names
from compose.config.tables import TABLES, Model
from compose.errors import attribute, docs


def schema() -> dict[str, Any]:
    """Return the schema (JSON Schema, draft 7): every key with its type, default and description.

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
    types = typing.get_type_hints(kind, include_extras=True)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    return {
        key: TypeAdapter(types[attribute(key)]).json_schema()
        | {"description": doc, "default": json.loads(json.dumps(defaults[attribute(key)]))}
        for key, doc in docs(kind).items()
    }
