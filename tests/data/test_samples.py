"""Samples of text, of token files and of chats, which stay separate; or one line why not."""

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from compose.__main__ import main
from compose.config.tables import Data
from compose.data import samples as samples_module
from compose.data.datasets import LanguageModelling
from compose.data.samples import (
    Conversations,
    Samples,
    Windows,
    open_samples,
    pack,
    pack_into_bins,
    random_batch,
)
from compose.data.token_files import ArrayFile, TokenRow
from compose.data.tokenizer import SEPARATOR
from compose.errors import ConfigError
from compose.ops.batch import IGNORE
from tests.support.data_made import CHAT, chats
from tests.support.helpers import make_config, refusal
from tests.support.tokenizers_made import save_tokenizer


def tokens_of(samples: Samples) -> np.ndarray:
    """The whole row under a set of windows."""
    assert isinstance(samples, Windows)
    return samples.row.read(0, len(samples.row))


@pytest.mark.parametrize(("tokens", "windows"), [(8, 1), (14, 1), (15, 2), (21, 2), (22, 3), (28, 3)])
def test_each_token_of_a_window_has_a_successor(tokens: int, windows: int) -> None:
    """In a row of n L tokens the last window would lack its last target."""
    source = Windows("row", TokenRow([np.arange(tokens)]), -1, seq_len=7, vocab_size=300)
    assert len(source) == windows
    last = source.read(windows - 1)
    assert {name: len(value) for name, value in last.items()} == dict.fromkeys(last, 7)
    assert last["targets"][-1] == 7 * windows


def test_pack() -> None:
    windows = torch.tensor([[5, 6, 9, 7, 8, 1, 9, 9, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9]])
    packed = pack(windows, windows[:, :-1] == 9)
    assert packed["tokens"].tolist() == windows[:, :-1].tolist()
    # The last token of a document is its separator, whose successor is another document's.
    assert packed["targets"].tolist() == [
        [6, 9, IGNORE, 8, 1, 9, IGNORE, IGNORE],
        [2, 3, 4, 5, 6, 7, 8, 9],
    ]
    assert packed["document_ids"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 2], [0] * 8]
    assert packed["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], list(range(8))]


def test_documents_that_begin_with_the_token_that_ends_one() -> None:
    """As GPT-2's; a set knows where its documents end, in whatever window they do."""
    rows = [[9, 1, 2, 9], [9, 9], [9, 3, 4, 5, 6, 7, 9], [9, 8, 9, 1, 9], [9, 2, 2, 2, 9]]
    ends = np.cumsum([len(row) for row in rows])
    known: Any = SimpleNamespace(ends=ends)
    source = Windows("set", TokenRow([np.concatenate(rows)]), 9, 5, 10, "", known)
    numbers = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    places = np.concatenate([np.arange(len(row)) for row in rows])
    for index in range(len(source)):
        sample, window = source.read(index), slice(5 * index, 5 * index + 5)
        documents = torch.from_numpy(numbers[window])
        assert torch.equal(sample["document_ids"], documents - documents[0])
        begins = torch.from_numpy(places[window])
        first = sample["document_ids"] == 0
        assert torch.equal(sample["positions"][~first], begins[~first])
        last = torch.from_numpy(np.isin(np.arange(5 * index, 5 * index + 5) + 1, ends))
        assert torch.equal(sample["targets"] == IGNORE, last)


def test_without_a_separator_a_window_is_one_document() -> None:
    samples = Windows("row", TokenRow([np.arange(100)]), -1, seq_len=7, vocab_size=300)
    batch = samples.read(3)
    assert (batch["targets"] - batch["tokens"] == 1).all()
    assert (batch["document_ids"] == 0).all()


def test_stdlib_text() -> None:
    tokens = tokens_of(opened(Data()))
    assert len(tokens) > 300_000
    assert tokens.max() == SEPARATOR
    first = bytes(tokens[: int(np.argmax(tokens == SEPARATOR))].tolist())
    assert first.decode().isprintable() is False
    assert b"import" in bytes(tokens[:20000][tokens[:20000] < 256].tolist())


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"xyz")
    (tmp_path / "a.txt").write_text("é")
    b = [*b"xyz", SEPARATOR]
    assert tokens_of(opened(Data(path=str(tmp_path / "b.txt")))).tolist() == b
    both = tokens_of(opened(Data(path=str(tmp_path / "*.txt")))).tolist()
    assert both == [*"é".encode(), SEPARATOR, *b]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files(tmp_path: Path, dtype: str) -> None:
    tokens = np.array([1, 2, 65_000, 4, 3], dtype=dtype)
    tokens.tofile(tmp_path / "t.bin")
    result = opened(Data(path=str(tmp_path / "t.bin"), token_dtype=dtype, separator=4))  # type: ignore[arg-type]
    assert isinstance(result, Windows)
    assert isinstance(result.row.parts[0], ArrayFile)
    assert tokens_of(result).tolist() == tokens.tolist()
    assert result.separator == 4
    np.save(tmp_path / "t.npy", tokens)
    (tmp_path / "t.npy").rename(tmp_path / "T.NPY")
    assert tokens_of(opened(Data(path=str(tmp_path / "T.NPY")))).tolist() == tokens.tolist()


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_a_token_file_with_the_index_of_megatron(tmp_path: Path, code: int, dtype: str) -> None:
    """Its type is read there, whatever data.token_dtype is."""
    tokens = np.array([1, 2, 250, 4, 3], dtype=dtype)
    tokens.tofile(tmp_path / "t.bin")
    (tmp_path / "t.idx").write_bytes(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, 1, 2))
    result = opened(Data(path=str(tmp_path / "t.bin"), token_dtype="uint32"))
    assert tokens_of(result).tolist() == tokens.tolist()


def test_a_bad_index_of_megatron(tmp_path: Path) -> None:
    path, index = tmp_path / "t.bin", tmp_path / "t.idx"
    path.write_bytes(bytes(10))
    index.write_bytes(b"MMIDIDX\0\0" + struct.pack("<QB", 1, 7))
    assert error(Data(path=str(path))) == (f"cannot read {path}: t.idx says that it holds no integers")
    index.write_bytes(b"MMIDIDX\0\0" + struct.pack("<QB", 1, 4))
    assert error(Data(path=str(path))) == (f"cannot read {path}: 10 bytes are no row of int32 (t.idx)")
    index.write_text("an index of something else")
    assert len(tokens_of(opened(Data(path=str(path))))) == 5


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.zst", "a.tgz", "a.JSONL.GZ"])
def test_compressed_text_is_refused(tmp_path: Path, name: str) -> None:
    for file in ("0.txt", name):
        (tmp_path / file).write_text("some text")
    for path in (tmp_path / name, tmp_path / "*"):
        assert error(Data(path=str(path))) == (f"{path}: {name} is compressed; unpack it first")


@pytest.mark.parametrize(
    "name", ["a.parquet", "a.arrow", "a.jsonl", "a.ndjson", "a.json", "a.JSONL", "A.Parquet"]
)
def test_documents_in_a_table_are_no_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    document, program = '{"text": "some text"}', "a file of a program, as the other one may be"
    path.write_text(document)
    assert error(Data(path=str(path))) == (
        f"{path}: {name} would be read as bytes, not as the documents in it; make a folder"
        " of tokens first: python -m compose tokenize --tokenizer tokenizer.json --out DIR"
        f" {path}"
    )
    (tmp_path / "a.py").write_text(program)
    among = Data(path=str(tmp_path / "*"))
    if name.lower() in ("a.parquet", "a.arrow"):
        assert f"{name} would be read as bytes" in error(among)
    else:
        assert len(tokens_of(opened(among))) == len(document) + len(program) + 2


@pytest.mark.parametrize("name", ["data-00000-of-00001.arrow", "dataset_dict.json"])
def test_a_folder_of_save_to_disk_is_sent_to_tokenize(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    assert error(Data(path=str(tmp_path))) == (
        f"{tmp_path} is a folder of datasets.save_to_disk; make a folder of tokens first:"
        f" python -m compose tokenize --tokenizer tokenizer.json --out DIR {tmp_path}"
    )


def test_where_python_lies_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment named test holds a library as any other does."""
    root = tmp_path / "test" / "lib"
    (root / "tests").mkdir(parents=True)
    (root / "a.py").write_text("abc")
    (root / "tests" / "b.py").write_text("de")
    monkeypatch.setattr(samples_module.sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    row = samples_module._stdlib.__wrapped__()
    assert row.read(0, len(row)).tolist() == [*b"abc", SEPARATOR]


def opened(data: Data, seq_len: int = 2, vocab_size: int = 1 << 16) -> Samples:
    assert isinstance(data.path, str)
    return open_samples(data.path, data, seq_len, vocab_size)


def error(data: Data, seq_len: int = 4, vocab_size: int = 300) -> str:
    return refusal(opened, data, seq_len, vocab_size)


def test_bad_data(tmp_path: Path) -> None:
    folder = tmp_path
    (folder / "short.txt").write_text("abc")
    np.array([1, 2, 400, 3, 4, 5], dtype=np.uint16).tofile(folder / "t.bin")
    np.save(folder / "n.npy", np.array([1, -2, 3, 4, 5]))
    np.save(folder / "f.npy", np.ones((2, 3)))
    np.save(folder / "good.npy", np.arange(9))
    (folder / "cut.npy").write_bytes(b"\x93NUMPY")
    for name in ("empty.bin", "empty.npy"):
        (folder / name).touch()
    np.savez(folder / "two.npz", a=np.ones(3), b=np.ones(3))
    (folder / "two.npz").rename(folder / "two.npy")
    (folder / "a[1].txt").write_text("literally this")
    for name, line in {
        "short.txt": " has 4 tokens; one sample needs train.seq_len + 1 = 5",
        "t.bin": " holds token id 400; model.vocab_size 300 allows 0 to 299",
        "n.npy": " holds token id -2; model.vocab_size 300 allows 0 to 299",
        "f.npy": " holds float64 of shape (2, 3); a token file is one row of integers",
        "*.bin": " names 2 files, empty.bin among them; a token file stands alone",
        "two.npy": " is an archive of arrays; a token file is one array",
    }.items():
        assert error(Data(path=f"{folder}/{name}")) == f"{folder}/{name}{line}"
    for name in ("cut.npy", "empty.bin", "empty.npy"):
        path = f"{folder}/{name}"
        assert error(Data(path=path)).startswith(f"cannot read {path}: ")
    assert error(Data(path=f"{folder}/no*")) == f"no file at {folder}/no*"
    assert error(Data(path=str(folder))) == (
        f"{folder} is a folder without manifest.json; name its files, as {folder}/*,"
        " or tokenize them first"
    )
    assert error(Data(path=f"{folder}/good.npy", separator=300)) == (
        "data.separator 300 is outside the vocabulary; model.vocab_size 300 allows 0 to 299"
    )
    assert len(tokens_of(opened(Data(path=f"{folder}/a[1].txt")))) == 15


def test_an_id_that_the_first_look_missed_is_named_when_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "_CHECKED", 20)
    late = TokenRow([np.ones(20, int), np.full(20, 999)])
    samples = Windows("late", late, -1, seq_len=7, vocab_size=300)
    with pytest.raises(ConfigError, match="late holds token id 999"):
        samples.read(3)


def test_random_batch_is_uneven() -> None:
    batch = random_batch(8, 64, 50, seed=0)
    targets = (batch["targets"] != IGNORE).sum(1)
    assert len(set(targets.tolist())) > 4
    assert batch["document_ids"].max() > 4
    assert {name: value.shape for name, value in batch.items()} == dict.fromkeys(batch, (8, 64))
    same = random_batch(8, 64, 50, seed=0)
    assert all(torch.equal(same[name], value) for name, value in batch.items())


def token_set(folder: Path, count: int = 40) -> Path:
    tokenizer = save_tokenizer(folder / "tokenizer")
    words = ["tokenize", "--chat", "--workers=1", "--tokenizer", str(tokenizer), "--out"]
    assert main([*words, str(folder / "out"), str(chats(folder / "chats.jsonl", count))]) == 0
    return folder / "out"


@pytest.mark.parametrize("seq_len", [300, 64, 33])
def test_conversations_are_packed_whole(
    tmp_path: Path, seq_len: int, capsys: pytest.CaptureFixture[str]
) -> None:
    out = token_set(tmp_path)
    assert " 40 conversations, 1 without a reply left out\n" in capsys.readouterr().out
    samples = open_samples(str(out), Data(), seq_len, 300)
    assert isinstance(samples, Conversations)
    whole = samples.token_set
    assert whole is not None
    assert whole.trained is not None
    seen = []
    for index in range(len(samples)):
        sample = samples.read(index)
        assert {name: value.shape for name, value in sample.items()} == dict.fromkeys(
            sample, (seq_len,)
        )
        real = sample["positions"] >= 0
        assert (sample["targets"][~real] == IGNORE).all()
        documents = sample["document_ids"][real]
        assert (documents.diff() >= 0).all()
        for document in documents.unique():
            here = real & (sample["document_ids"] == document)
            assert torch.equal(sample["positions"][here], torch.arange(int(here.sum())))
            # Which conversation it is, by its tokens and masks in the token set.
            ids = sample["tokens"][here].numpy()
            (number,) = [
                n
                for n, (start, end) in enumerate(zip([0, *whole.ends[:-1]], whole.ends, strict=True))
                if np.array_equal(whole.tokens.read(int(start), int(end) - 1)[:seq_len], ids)
            ]
            start = int([0, *whole.ends][number])
            following = whole.tokens.read(start + 1, start + 1 + len(ids))
            learnt = whole.trained.read(start + 1, start + 1 + len(ids)) > 0
            targets = np.where(learnt, following, IGNORE)
            assert sample["targets"][here].tolist() == targets.tolist()
            assert learnt.any()
            seen.append(number)
    cut = [n for n in range(40) if samples.lengths[n] == 0]
    assert sorted(seen + cut) == list(range(40))
    assert bool(cut) == (seq_len == 33)  # of these the reply begins beyond it


def test_what_became_of_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table at the end of the command, and at the start of a run; bad rows are left out if asked."""
    tokenizer, file = save_tokenizer(tmp_path / "tokenizer"), tmp_path / "chats.jsonl"
    rows = [{"messages": CHAT}, {"messages": CHAT[:1]}, {"messages": 5}]
    rows += [{"messages": [*CHAT[:2], {"role": "assistant", "content": "4" * n}]} for n in (1, 90)]
    lines = [json.dumps(row) for row in rows]
    file.write_text("\ufeff" + "\n".join([*lines, "{"]), encoding="utf-8")
    words = ["tokenize", "--chat", "--workers=1", "--tokenizer", str(tokenizer), "--out"]
    with pytest.raises(ConfigError, match=r"chats\.jsonl:3: has no list of messages in 'messages'$"):
        main([*words, str(tmp_path / "1"), str(file)])
    out = tmp_path / "2"
    assert main([*words, str(out), "--skip-bad", str(file)]) == 0
    made = open_samples(str(out), Data(), 64, 300)
    assert isinstance(made, Conversations)
    assert made.token_set is not None
    lengths = np.diff(made.token_set.ends, prepend=0)
    learnt = int(made.trained.read(0, len(made.trained)).sum())
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == (
        f"{out}: {lengths.sum():,} tokens, 3 conversations, 1 without a reply left out"
    )
    assert [line.split()[:3] for line in printed[1:4]] == [
        ["rows", "6"],
        ["replies", "4", "to"],
        ["tokens", "learnt", str(learnt)],
    ]
    assert printed[4:7] == [
        f"  longest{max(lengths):>21,}  tokens; half have at most {int(np.median(lengths))}, 99 %"
        f" {int(np.percentile(lengths, 99))}",
        f"  empty{1:>23}  left out: no reply to learn",
        f"  bad{2:>25}  left out (--skip-bad), for example:",
    ]
    assert printed[7] == f"    {file}:3: has no list of messages in 'messages'"
    assert printed[8].startswith(f"    {file}:6: is not JSON: ")
    cut = lengths[lengths > 65]
    kept = int((np.concatenate([made.read(n)["targets"] for n in range(len(made))]) != IGNORE).sum())
    assert made.table().splitlines() == [
        f"  rows{4:>24}",
        f"  replies{4:>21}",
        f"  conversations{3:>15}",
        f"  cut{len(cut):>25}  at train.seq_len 64: {(cut - 65).sum()} tokens are lost",
        f"  left out{0:>20}  of these: nothing to learn remains",
        f"  tokens learnt{kept:>15}  in an epoch, of {made.lengths.sum()}",
        f"  samples{len(made):>21}  {100 * made.lengths.sum() / (64 * len(made)):.1f} % full",
    ]


def test_nothing_to_learn_is_refused(tmp_path: Path) -> None:
    out = token_set(tmp_path)
    assert refusal(open_samples, str(out), Data(), 5, 300) == (
        f"{out} has no conversation with something to learn within train.seq_len 5"
    )


def test_chats_without_a_reply_are_refused(tmp_path: Path) -> None:
    """All marks of what is learnt are 0, as a template without a generation block leaves them."""
    out = token_set(tmp_path)
    for path in out.glob("trained-*.bin"):
        path.write_bytes(bytes(path.stat().st_size))
    config = make_config(1, train__seq_len=200, model__vocab_size=300)
    with pytest.raises(ConfigError, match="has nothing to learn: no token of its"):
        LanguageModelling().open(str(out), config)


def test_an_empty_conversation_is_left_out() -> None:
    """compose tokenize writes none, but a folder may come from elsewhere."""
    values = np.arange(13)
    read = SimpleNamespace(read=lambda start, end: values[start:end], digest="")
    manifest = SimpleNamespace(tokenizer=SimpleNamespace(sha256=""))
    ends = np.array([4, 4, 8, 13])
    made: Any = SimpleNamespace(tokens=read, trained=read, ends=ends, manifest=manifest)
    samples = Conversations("x", made, 8, 20)
    assert samples.lengths.tolist() == [3, 0, 3, 4]
    assert sorted(n for each in samples.bins for n in each) == [0, 2, 3]


def test_bins_are_nearly_full() -> None:
    chance = np.random.default_rng(0)
    for size in (7, 100, 1000):
        lengths = np.minimum(chance.geometric(4 / size, 3000), size)
        lengths[::50] = 0
        bins = pack_into_bins(lengths, size)
        assert sorted(n for each in bins for n in each) == np.flatnonzero(lengths).tolist()
        assert max(lengths[each].sum() for each in bins) <= size
        assert len(bins) <= 11 / 9 * np.ceil(lengths.sum() / size) + 1
        assert lengths.sum() / (size * len(bins)) > 0.98
    assert pack_into_bins(np.zeros(3, int), 5) == []
