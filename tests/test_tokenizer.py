"""The files of a tokenizer: what is odd is named, and copying follows no link."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from compose.config import Data
from compose.data import Batches
from compose.data.datasets import keep_tokenizer
from compose.data.sources import open_samples
from compose.data.tokenizer import JsonTokenizer, carry, open_tokenizer
from compose.errors import ConfigError
from tests.data_made import token_set
from tests.helpers import make_config
from tests.tokenizers_made import save_tokenizer

OUT = "is a link that leads out of its folder; put the file itself there"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path / "tokenizer").parent


def refused(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        open_tokenizer(path)
    assert all("\n" not in line for line in caught.value.problems)
    return [line.replace(f"{path}/", "") for line in caught.value.problems]


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ("[]", "is a list, not an object"),
        ("null", "is null, not an object"),
        ('{"eos_token": NaN}', "holds NaN, which is not JSON"),
        ('{"eos_token": 5}', "eos_token: is no token: neither a string nor has it content"),
        (
            '{"eos_token": {"content": 5}}',
            "eos_token: is no token: neither a string nor has it content",
        ),
        ('{"pad_token": ["a"]}', "pad_token: is no token: neither a string nor has it content"),
        ('{"a": ' * 5000, "is nested too deeply"),
        ('{"a": "\xff"}', "is not UTF-8: byte 7: invalid start byte"),
    ],
)
def test_odd_configs_are_named(tokenizer: Path, config: str, line: str) -> None:
    (tokenizer / "tokenizer_config.json").write_bytes(config.encode("latin-1"))
    assert refused(tokenizer) == [f"tokenizer_config.json: {line}"]


def test_what_a_config_may_hold(tokenizer: Path) -> None:
    config: dict[str, Any] = {
        "add_eos_token": True,
        "eos_token": {"content": "<|im_end|>"},
        "bos_token": "<s>",
        "pad_token": None,
    }
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    found = open_tokenizer(tokenizer)
    assert found.special == {"eos_token": "<|im_end|>", "bos_token": "<s>"}
    assert found.end == found.tokenizer.token_to_id("<|im_end|>")


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff", b"[" * 5000, b'{"model": 5}', b"\xef\xbb\xbf{}"]
)
def test_what_is_no_tokenizer_is_named(tokenizer: Path, content: bytes) -> None:
    (tokenizer / "tokenizer.json").write_bytes(content)
    (line,) = refused(tokenizer)
    assert line.startswith("tokenizer.json: is no tokenizer.json: ")


def test_a_panic_of_its_library_is_named(tokenizer: Path) -> None:
    """Where its Rust code panics, tokenizers raises what is no Exception."""

    class PanicException(BaseException):
        pass

    class Loaded:
        @staticmethod
        def from_str(text: str) -> None:
            raise PanicException("range end index 18446744073709551615 out of range")

    with mock.patch("tokenizers.Tokenizer", Loaded):
        (line,) = refused(tokenizer)
    assert (
        line
        == "tokenizer.json: is no tokenizer.json: range end index 18446744073709551615 out of range"
    )


def test_a_tokenizer_that_cannot_encode_is_named(tmp_path: Path) -> None:
    words = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(words))
    with pytest.raises(ConfigError) as caught:
        JsonTokenizer(path).encode("what it lacks")
    (line,) = caught.value.problems
    assert line.startswith(f"{path}: cannot encode a text: ")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_link_out_of_the_folder_is_not_followed(tokenizer: Path, tmp_path: Path, name: str) -> None:
    path = tokenizer / name
    path.unlink(missing_ok=True)
    (tmp_path / "secret").write_text("{}")
    path.symlink_to("../secret")
    assert refused(tokenizer) == [f"{name}: {OUT}"]
    with pytest.raises(ConfigError, match=OUT):
        carry(tokenizer, tmp_path / "copy")
    assert not list((tmp_path / "copy").glob("*"))


def test_a_link_that_a_person_names_is(tokenizer: Path, tmp_path: Path) -> None:
    link = tmp_path / "other" / "tokenizer.json"
    link.parent.mkdir()
    link.symlink_to(tokenizer / "tokenizer.json")
    assert open_tokenizer(link).sha256 == open_tokenizer(tokenizer).sha256


def test_copies_replace_links(tokenizer: Path, tmp_path: Path) -> None:
    """What stands in the way of a copy is replaced, and where a link of it leads is left alone."""
    mine, folder = tmp_path / "mine", tmp_path / "run"
    mine.write_text("mine")
    folder.mkdir()
    for name in ("tokenizer.json", ".tokenizer.json.new", "tokenizer_config.json"):
        (folder / name).symlink_to(mine)
    carry(tokenizer, folder)
    assert mine.read_text() == "mine"
    assert sorted(path.name for path in folder.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    for path in tokenizer.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()
        assert not (folder / path.name).is_symlink()


def test_a_run_writes_its_tokenizer_into_no_link(tokenizer: Path, tmp_path: Path) -> None:
    data = token_set(tmp_path / "data")
    (data / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    batches = Batches([open_samples(str(data), Data(), 8, 64)], global_batch=1, seed=0)
    config, folder = dataclasses.replace(make_config(1), data=Data()), tmp_path / "run" / "tokenizer"
    folder.parent.mkdir()
    (tmp_path / "else").mkdir()
    folder.symlink_to(tmp_path / "else")
    with pytest.raises(ConfigError, match=f"run.dir: {folder}: is a link; remove it"):
        keep_tokenizer(config, batches, folder)
    assert not list((tmp_path / "else").iterdir())
    folder.unlink()
    keep_tokenizer(config, batches, folder)
    assert [path.name for path in folder.iterdir()] == ["tokenizer.json"]
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()
    with pytest.raises(ConfigError, match=f"run.dir: {folder}: cannot be written: Is a directory"):
        keep_tokenizer(config, batches, folder)
