"""A JSON file of anyone's is what it should be, or one line says what is wrong with it, and where."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from compose.config.json_files import Count, read_json
from tests.support.helpers import refusal


class Part(BaseModel):
    name: Annotated[str, Field(pattern=r"^[0-9]+$")]
    size: Count


class Whole(BaseModel):
    kind: Literal["a", "b"]
    rate: float = 0.5
    parts: tuple[Part, ...]
    more: dict[str, Any] = {}


GOOD = b'{"kind": "a", "parts": [{"name": "01", "size": 3}], "of later": [null]}'


def refused(path: Path, content: bytes, kind: type = Whole) -> str:
    path.write_bytes(content)
    (line,) = refusal(read_json, path, kind).splitlines()
    return line.removeprefix(f"{path}: ")


def test_what_is_right_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for start in (b"", b"\xef\xbb\xbf"):  # a byte order mark is none of JSON's business
        path.write_bytes(start + GOOD)
        assert read_json(path, Whole) == Whole(kind="a", parts=(Part(name="01", size=3),))
    path.write_bytes(b'{"a": [1, 1.5, "\\u00e9"], "b": -3e2}')
    assert read_json(path, dict[str, Any]) == {"a": [1, 1.5, "é"], "b": -300.0}


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (b'"a"', b'"c"', "kind: \"c\" should be 'a' or 'b'"),
        (b'"a"', b"[]", "kind: a list should be 'a' or 'b'"),
        (b'"kind": "a", ', b"", "kind: is missing"),
        (b"3}", b'"3"}', 'parts[0].size: expected a whole number, got "3"'),
        (b"3}", b"true}", "parts[0].size: expected a whole number, got true"),
        (b"3}", b"3.0}", "parts[0].size: expected a whole number, got 3.0"),
        (b"3}", b"-3}", "parts[0].size: -3 should be greater than or equal to 0"),
        (b"3}", b"1" * 20 + b"}", f"parts[0].size: {'1' * 20} should be less than {2**63}"),
        (b"3}", b"1" * 9999 + b"}", f"holds a number out of range: {'1' * 60}..."),
        (b"3}", b"NaN}", "holds NaN, which is not JSON"),
        (b"[null]", b"[-Infinity]", "holds -Infinity, which is not JSON"),
        (b"[null]", b"[1e999]", "holds a number out of range: 1e999"),
        (b'"01"', b"1", "parts[0].name: expected a string, got 1"),
        (b'"01"', b'"../01"', "parts[0].name: \"../01\" should match pattern '^[0-9]+$'"),
        (b"[{", b"[7, {", "parts[0]: expected an object, got 7"),
        (b"null]", b"null], " + b'"parts": {}', "parts: expected a list, got an object"),
        (b"null]", b"null], " + b'"rate": "x"', 'rate: expected a number, got "x"'),
        (b"null]", b"null], " + b'"more": 1', "more: expected an object, got 1"),
        (b"null]", b"null", "is not JSON: Expecting ',' delimiter: line 1 column 70 (char 69)"),
        (b"null]", b"\xff]", "is not UTF-8: byte 65: invalid start byte"),
        (b"null", b"[" * 500 + b"]" * 500, "is nested too deeply"),
        (b"null", b"[" * 50000 + b"]" * 50000, "is nested too deeply"),
        (b'"a"', b'"\\ud800"', "is not JSON: "),
        (GOOD, b"[1]", "is a list, not an object"),
        (GOOD, b'"' + b"x" * 99 + b'"', f'is "{"x" * 59}..., not an object'),
        (GOOD, b"", "is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (GOOD, GOOD.decode().encode("utf-16"), "is not UTF-8: byte 0: invalid start byte"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: bytes, new: bytes, line: str) -> None:
    result = refused(tmp_path / "a.json", GOOD.replace(old, new))
    assert result == line or (line.endswith("JSON: ") and result.startswith(line))


def test_any_object_may_be_asked_for(tmp_path: Path) -> None:
    path, kind = tmp_path / "a.json", dict[str, Any]
    assert refused(path, b"[1]", kind) == "is a list, not an object"
    assert refused(path, b'{"a": {"b": NaN}}', kind) == "holds NaN, which is not JSON"
    assert refused(path, b'{"a": 1', kind).startswith("is not JSON: ")
    assert refused(path, b'{"a": ' * 300 + b"1" + b"}" * 300, kind) == "is nested too deeply"
    words = refused(path, b'{"\\u001b[31m": 1.5}', dict[str, int])
    assert words == r"'\x1b[31m': expected a whole number, got 1.5"


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        return refusal(read_json, path, Whole)

    assert refused(tmp_path / "none") == f"{tmp_path}/none: no such file"
    assert refused(tmp_path) == f"{tmp_path}: cannot be read: is no file"
    os.mkfifo(tmp_path / "pipe")
    assert refused(tmp_path / "pipe") == f"{tmp_path}/pipe: cannot be read: is no file"
    (tmp_path / "loop").symlink_to("loop")
    assert refused(tmp_path / "loop").startswith(f"{tmp_path}/loop: cannot be read: Too many levels")
    assert refused(tmp_path / "a\0b").endswith("embedded null byte")
