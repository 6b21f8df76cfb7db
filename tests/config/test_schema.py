"""The JSON schema of a TOML file takes what the program takes, and names each key."""

from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from compose.config.schema import schema
from compose.config.tables import TABLES
from compose.config.toml import tomllib
from compose.errors import docs
from tests.support.helpers import ROOT

FILES = [ROOT / "train.toml", *sorted((ROOT / "recipes").glob("*.toml"))]
VALIDATOR = Draft7Validator(schema())


def problems(text: str) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(tomllib.loads(text))]


def test_it_is_a_schema() -> None:
    Draft7Validator.check_schema(schema())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files(file: Path) -> None:
    assert problems(file.read_text()) == []


def test_every_key_is_described() -> None:
    for name, kind in TABLES.items():
        part: Any = schema()
        for word in name.split("."):
            part = part["properties"][word]
        for key, doc in docs(kind).items():
            assert part["properties"][key]["description"] == doc


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nstep = 3", "Additional properties are not allowed ('step' was unexpected)"),
        ("[trian]\nsteps = 3", "Additional properties are not allowed ('trian' was unexpected)"),
        ('[train]\nsteps = "3"', "'3' is not of type 'integer'"),
        ("[parallel]\nzero = 4", "4 is not one of [0, 1, 2, 3]"),
        ("[optimizer]\nbeta1 = 1.5", "1.5 is greater than or equal to the maximum of 1"),
        ('extends = ["a.toml"]', "['a.toml'] is not of type 'string'"),
    ],
)
def test_mistakes(text: str, message: str) -> None:
    assert problems(text) == [message]


def test_keys_of_models() -> None:
    """A key of any packaged model is checked, and one of a model of one's own is let through."""
    assert problems('[model]\nn_layers = 2\nmy_key = "a"') == []
    assert problems('[model]\nn_layers = "two"') != []
