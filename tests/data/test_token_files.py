"""Data of a stranger's: whatever a token set or a token file holds, it is read as numbers within its
folder, or one line names what is wrong."""

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compose.config.tables import Data
from compose.data import token_files
from compose.data.samples import Conversations, Samples, open_samples
from compose.data.token_files import ArrayFile, TokenRow, open_bin, open_token_set
from compose.errors import ConfigError
from tests.support.data_made import TOKENS, token_set
from tests.support.helpers import refusal


def refused(path: Path, **keys: Any) -> list[str]:
    """Return problems of the data at ``path``, without folders."""
    lines = refusal(opened, path, **keys).splitlines()
    return [line.replace(f"{path}/", "").replace(str(path), "") for line in lines]


def opened(path: Path, seq_len: int = 8, **keys: Any) -> Samples:
    return open_samples(str(path), Data(**keys), seq_len, 64)


def test_what_is_right_is_read(tmp_path: Path) -> None:
    made = open_token_set(token_set(tmp_path))
    assert made.tokens.read(0, 40).tolist() == list(range(40))
    assert made.ends.tolist() == [9, 20, 25, 40]


@pytest.mark.parametrize(
    ("place", "value", "line"),
    [
        ("dtype", "O", "dtype: \"O\" should be '<u2' or '<u4'"),
        ("dtype", "<f8", "dtype: \"<f8\" should be '<u2' or '<u4'"),
        ("dtype", ["u1", 7], "dtype: a list should be '<u2' or '<u4'"),
        ("kind", "texts", "kind: \"texts\" should be 'text', 'chat' or 'pairs'"),
        ("format", "1", 'format: expected a whole number, got "1"'),
        ("format", 2, "is of format 2, this reads 1"),
        ("tokenizer", [], "tokenizer: expected an object, got a list"),
        ("tokenizer__sha256", 5, "tokenizer.sha256: expected a string, got 5"),
        ("tokenizer__vocab_size", 2.5, "tokenizer.vocab_size: expected a whole number, got 2.5"),
        ("tokenizer__vocab_size", None, "tokenizer.vocab_size: is missing"),
        ("tokenizer__end", -2, "tokenizer.end: -2 should be greater than or equal to -1"),
        ("tokenizer__end", 50, "tokenizer.end: 50 is no id of its vocabulary"),
        ("added", None, "added: is missing"),
        ("rows", None, "rows: is missing"),
        ("shards", {}, "shards: expected a list, got an object"),
        ("shards__1", 3, "shards[1]: expected an object, got 3"),
        ("shards__0__tokens", -20, "shards[0].tokens: -20 should be greater than or equal to 0"),
        ("shards__0__tokens", 2**70, f"shards[0].tokens: {2**70} should be less than {2**63}"),
        ("shards__0__documents", True, "shards[0].documents: expected a whole number, got true"),
        (
            "shards__1__name",
            "../../else/00000",
            "shards[1].name: \"../../else/00000\" should match pattern '^[0-9]{1,20}$'",
        ),
    ],
)
def test_each_field_of_a_manifest_is_checked(tmp_path: Path, place: str, value: Any, line: str) -> None:
    assert refused(token_set(tmp_path, **{place: value})) == [f"manifest.json: {line}"]


def test_files_are_those_of_the_manifest(tmp_path: Path) -> None:
    token_set(tmp_path)
    (tmp_path / "ends-00001.bin").unlink()
    (tmp_path / "tokens-00000.bin").write_bytes(bytes(39))
    assert refused(tmp_path) == [
        "tokens-00000.bin: has 39 bytes, not the 40 of manifest.json",
        "ends-00001.bin: is missing",
    ]
    (tmp_path / "manifest.json").write_text('{"format": 1')
    assert refused(tmp_path)[0].startswith("manifest.json: is not JSON: ")


@pytest.mark.parametrize("ends", [[-1, 20], [9, 21], [9, 8], [2**63 - 1, 20]])
def test_an_index_lies_within_its_shard(tmp_path: Path, ends: list[int]) -> None:
    np.array(ends).astype("<i8").tofile(token_set(tmp_path) / "ends-00001.bin")
    assert refused(tmp_path) == ["ends-00001.bin: is no index of the 20 tokens of its shard"]


def test_ids_of_chats_have_a_row_in_the_model(tmp_path: Path) -> None:
    samples = opened(token_set(tmp_path, "chat"))
    assert isinstance(samples, Conversations)
    np.full(20, 64, np.uint16).tofile(tmp_path / "tokens-00001.bin")
    with pytest.raises(ConfigError, match=r"holds token id 64; model\.vocab_size 64 allows 0 to 63"):
        [samples.read(index) for index in range(len(samples))]


@pytest.mark.parametrize(
    "name", ["tokens-00001.bin", "manifest.json", "tokenizer.model", "tokenizer_config.json"]
)
def test_a_token_set_is_read_within_its_folder(tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 40)
    path = token_set(tmp_path / "set") / name
    path.unlink(missing_ok=True)
    path.symlink_to(secret)
    assert refused(path.parent) == [
        f"{name}: is a link that leads out of its folder; put the file itself there"
    ]


def test_a_shard_is_a_file(tmp_path: Path) -> None:
    (token_set(tmp_path) / "tokens-00001.bin").unlink()
    os.mkfifo(tmp_path / "tokens-00001.bin")
    assert refused(tmp_path) == ["tokens-00001.bin: is no file"]


def test_the_hub_s_cache_is_one_folder(tmp_path: Path) -> None:
    """There a snapshot is links to ../../blobs."""
    place = tmp_path / "datasets--a--b"
    made = token_set(place / "snapshots/0123")
    (place / "blobs").mkdir()
    for number, path in enumerate(sorted(made.iterdir())):
        blob = place / "blobs" / str(number)
        path.rename(blob)
        path.symlink_to(os.path.relpath(blob, made))
    assert open_token_set(made).tokens.read(0, 40).tolist() == list(range(40))
    (tmp_path / "secret").write_bytes(b"x" * 40)
    (place / "blobs/model").symlink_to(tmp_path / "secret")
    (made / "tokenizer.model").symlink_to("../../blobs/model")
    assert len(refused(made)) == 1


def test_a_set_of_nothing_says_so(tmp_path: Path) -> None:
    assert refused(token_set(tmp_path, shards=[])) == [
        " has 0 tokens; one sample needs train.seq_len + 1 = 9"
    ]


def npy(path: Path, header: str, content: bytes = TOKENS.tobytes(), version: int = 1) -> Path:
    """A .npy file with this header."""
    size = len(header).to_bytes(2 if version == 1 else 4, "little")
    path.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + size + header.encode() + content)
    return path


GOOD = "{'descr': '<u2', 'fortran_order': False, 'shape': (40,)}"


def test_headers_of_npy_files(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"

    def words(header: str, **keys: Any) -> str:
        (line,) = refused(npy(path, header, **keys))
        return line

    row = "; a token file is one row of integers"
    assert len(opened(npy(path, GOOD))) == len(opened(npy(path, GOOD, version=2))) == 4
    assert len(opened(npy(path, GOOD.replace("False", "True")))) == 4  # of one dim the same
    for old, new, kind in (
        ("<u2", "|O", "object of shape (40,)"),
        ("<u2", "<f2", "float16 of shape (40,)"),
        ("'<u2'", "[('a', '<u2')]", "[('a', '<u2')] of shape (40,)"),
        ("40,", "20, 2", "uint16 of shape (20, 2)"),
        ("40,", "", "uint16 of shape ()"),
    ):
        assert words(GOOD.replace(old, new)) == f" holds {kind}{row}"
    size = len(GOOD) + 10 + 80
    for count in (41, 10**30, -1):
        assert words(GOOD.replace("40", str(count))) == (
            f"cannot read : it has {size - 2 + len(str(count))} bytes, which are not {count} of uint16"
        )
    changed = [
        GOOD.replace(*each) for each in (("40,", "'40',"), ("'<u2'", "'?!'"), ("'<u2'", "None, "))
    ]
    for bad in ("", "{'descr'", "(" * 9000, "'x'", "{}", "\0" * 20, "[" * 200 + "]" * 200, *changed):
        assert words(bad).startswith("cannot read : its header is not numpy's: ")
    assert words(GOOD, version=9).startswith("cannot read : its header is not numpy's: ")
    path.write_bytes(b"\x93NUMPY\x01\x00\xff\xff{'descr'")
    assert refused(path)[0].startswith("cannot read : its header is not numpy's: ")


def test_a_bin_file_is_full_of_its_type(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"12345")
    assert refused(path) == ["cannot read : 5 bytes are no row of uint16 (data.token_dtype)"]


@pytest.mark.parametrize("kind", ["bin", "npy", "set", "chat"])
def test_a_file_that_is_cut_short_is_named(tmp_path: Path, kind: str) -> None:
    """It would be the end of a process that has it mapped."""
    path = tmp_path / f"a.{kind}"
    if kind in ("set", "chat"):
        samples = opened(token_set(path, "chat" if kind == "chat" else "text"))
        path /= "tokens-00001.bin"
    elif kind == "npy":
        samples = opened(npy(path, GOOD))
    else:
        TOKENS.tofile(path)
        samples = opened(path)
    size, read = path.stat().st_size, [samples.read(index) for index in range(len(samples))]
    os.truncate(path, size - 30)
    assert refusal(lambda: [samples.read(index) for index in range(len(samples))]) == (
        f"{path}: was cut short since it was opened: has {size - 30} bytes of {size}"
    )
    path.unlink()
    with pytest.raises(ConfigError, match=r"can no longer be read: No such file or directory"):
        samples.read(len(read) - 1)


def test_of_a_long_file_a_digest_is_of_blocks_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, count = np.zeros(300_000, np.uint16), 300_000

    def digest(tokens: np.ndarray) -> str:
        tokens.tofile(tmp_path / "a.bin")
        return TokenRow([ArrayFile(tmp_path / "a.bin", tokens.dtype, count)]).digest

    whole = digest(tokens)
    assert whole == TokenRow([tokens]).digest
    monkeypatch.setattr(token_files, "_WHOLE", count - 1)
    monkeypatch.setattr(token_files, "_SPREAD", 8)
    part = digest(tokens)
    assert part != whole
    for place in (0, count - 1, 130_000):
        changed = tokens.copy()
        changed[place] = 1
        assert digest(changed) != part


def test_rows_in_parts_are_read_as_one() -> None:
    parts = [np.arange(3), np.zeros(0, int), np.arange(3, 4), np.arange(4, 11)]
    joined = TokenRow(parts)
    assert len(joined) == 11
    for start in range(11):
        for stop in range(start, 12):
            assert joined.read(start, stop).tolist() == list(range(start, min(stop, 11)))


@pytest.mark.parametrize(("head", "dtype"), [((20240520, 1), "uint16"), ((20240801, 7), "uint32")])
def test_the_header_of_llm_c_is_no_tokens(tmp_path: Path, head: tuple[int, int], dtype: str) -> None:
    """Of a large vocabulary its words would be ids. What the line says helps."""
    tokens, header = np.arange(20, dtype=dtype), np.zeros(256, "<i4")
    header[:3] = *head, len(tokens)
    (tmp_path / "t.bin").write_bytes(header.tobytes() + tokens.tobytes())
    said = refusal(open_bin, tmp_path / "t.bin", "t.bin", dtype)
    command = "tail -c +1025 t.bin > NEW.bin"
    why = "it begins with llm.c's header, which is no tokens; cut it off"
    assert said == f"cannot read t.bin: {why}: {command}"
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert open_bin(tmp_path / "NEW.bin", "NEW.bin", dtype)[:].tolist() == tokens.tolist()
