"""Samples are a function of (seed, step); no mesh changes them."""

import struct
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from compose.checkpoint.checkpointer import Checkpointer
from compose.config.tables import Data, Train
from compose.data import rows, sources
from compose.data.batches import Batches, in_order
from compose.data.datasets import described, open_data, training_batches
from compose.data.order import Interleaving, shuffled
from compose.data.packing import pack, random_batch
from compose.data.rows import Row, Stored
from compose.data.sources import Samples, Windows, open_samples
from compose.data.tokenizer import SEPARATOR
from compose.errors import ConfigError
from compose.ops.batch import IGNORE
from tests.support.data_made import sets_of


def batches(*sets: Windows, share: tuple[int, int] = (0, 1), **keys: Any) -> Batches:
    return Batches(sets, share=share, **{"global_batch": 6, "seed": 3, **keys})


def row(n: int, name: str = "row", first: int = 0) -> Windows:
    return Windows(name, Row([np.arange(first, first + n) % 290]), -1, seq_len=7, vocab_size=300)


def tokens_of(samples: Samples) -> np.ndarray:
    """The whole row under a set of windows."""
    assert isinstance(samples, Windows)
    return samples.row.read(0, len(samples.row))


@pytest.mark.parametrize("size", [1, 2, 3, 64, 65, 1000, 4097])
@pytest.mark.parametrize("key", [0, 1, 12345])
def test_shuffled_is_a_permutation(size: int, key: int) -> None:
    order = [shuffled(i, size, key) for i in range(size)]
    assert sorted(order) == list(range(size))
    if size >= 64:
        assert order != list(range(size))
        assert order != [shuffled(i, size, key + 1) for i in range(size)]
        # No drift: neighbours end up as far apart as in a random order.
        steps = np.abs(np.diff(order))
        assert 0.25 < steps.mean() / size < 0.42


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_ranks_slices_make_up_the_global_batch(count: int) -> None:
    for step in (0, 5, 17):
        whole = batches(row(500)).batch(6 * step)
        parts = [batches(row(500), share=(index, count)).batch(6 * step) for index in range(count)]
        for name, value in whole.items():
            assert torch.equal(torch.cat([part[name] for part in parts]), value)


def test_an_epoch_sees_every_window_once() -> None:
    source = row(7 * 12 + 1)
    seen = torch.cat([batches(source).batch(6 * step)["tokens"][:, 0] for step in range(2)])
    again = torch.cat([batches(source).batch(6 * step)["tokens"][:, 0] for step in range(2, 4)])
    assert sorted(seen.tolist()) == sorted(again.tolist()) == [7 * i for i in range(12)]
    assert seen.tolist() != again.tolist()
    assert not torch.equal(
        batches(source).batch(0)["tokens"], batches(source, seed=4).batch(0)["tokens"]
    )


@pytest.mark.parametrize(("tokens", "windows"), [(8, 1), (14, 1), (15, 2), (21, 2), (22, 3), (28, 3)])
def test_each_token_of_a_window_has_a_successor(tokens: int, windows: int) -> None:
    """Of a row of n L tokens the last window would lack its last target."""
    source = row(tokens)
    assert len(source) == windows
    last = source.read(windows - 1)
    assert {name: len(value) for name, value in last.items()} == dict.fromkeys(last, 7)
    assert last["targets"][-1] == 7 * windows


@pytest.mark.parametrize("global_batch", [1, 2, 6])
def test_samples_are_counted_from_the_first_of_the_run(global_batch: int) -> None:
    """Sample n is the same in every batch and share; and an older checkpoint goes on where it was."""
    source, count = row(7 * 30 + 1), 2 if global_batch > 1 else 1
    wanted = [source.read(shuffled(n, 30, 3 * 1_000_003))["tokens"].tolist() for n in range(24)]
    found = [
        sample.tolist()
        for first in range(0, 24, global_batch)
        for index in range(count)
        for sample in batches(source, global_batch=global_batch, share=(index, count)).batch(first)[
            "tokens"
        ]
    ]
    assert found == wanted


def test_for_a_gpu_the_next_batch_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, in a thread; after a jump too. A sample that cannot be read is told in its turn."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(Tensor, "pin_memory", lambda value: value.clone())
    plain = batches(row(500))
    ahead = batches(row(500), device=torch.device("cuda", 0))
    real, reads = ahead._read, list[tuple[int, bool]]()

    def read(first: int) -> dict[str, Tensor]:
        reads.append((first, threading.current_thread() is threading.main_thread()))
        if first == 606:
            raise ConfigError("a sample cannot be read")
        return real(first)

    monkeypatch.setattr(ahead, "_read", read)
    for first in (0, 6, 12, 600):
        for name, value in ahead.batch(first).items():
            assert torch.equal(value, plain.batch(first)[name])
    assert ahead.reader
    ahead.reader.submit(lambda: None).result()
    assert reads == [(first, False) for first in (0, 6, 12, 18, 600, 606)]
    with pytest.raises(ConfigError, match="a sample cannot be read"):
        ahead.batch(606)
    ahead.reader.shutdown()


def test_each_set_of_a_mixture_has_an_order_of_its_own() -> None:
    mixed = batches(row(7 * 40 + 1, "a"), row(7 * 40 + 1, "b"), global_batch=80)
    order: list[list[int]] = [[], []]
    for number, first in enumerate(mixed.batch(0)["tokens"][:, 0].tolist()):
        order[mixed.interleaving.place(number)[0]].append(first)
    assert sorted(order[0]) == sorted(order[1]) == [7 * i for i in range(40)]
    assert sum(a == b for a, b in zip(*order, strict=True)) < 10


def test_a_file_of_other_tokens_is_told_from_the_one_before(tmp_path: Path) -> None:
    """Of the same length; on a resume, the run says so."""
    tokens = np.arange(100, dtype=np.uint16)
    kinds: dict[str, Callable[[Path], object]] = {
        "a.txt": lambda path: path.write_bytes(bytes(tokens.tolist())),
        "a.bin": tokens.tofile,
        "a.npy": lambda path: np.save(path, tokens),
    }
    for name, write in kinds.items():
        tokens[60] = 60
        config = sets_of(path=str(tmp_path / name))
        seen = []
        for value in (60, 61, 60):
            tokens[60] = value
            write(tmp_path / name)
            sources._text.cache_clear()  # a run that resumes is another process
            seen.append(described(training_batches(config, open_data(config)), config))
        assert seen[0] == seen[2]
        assert {key for key in seen[0] if seen[0][key] != seen[1][key]} == {"content"}
        words: list[str] = []
        here = cast(Checkpointer, SimpleNamespace(data=seen[1], _say=words.append))
        Checkpointer._compare_data(here, Path("step"), seen[0])
        assert words == [
            f"step: the data are not what they were (content {seen[0]['content']}, now"
            f" {seen[1]['content']}); samples are counted on"
        ]


def test_of_a_long_file_a_digest_is_of_blocks_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, count = np.zeros(300_000, np.uint16), 300_000

    def digest(tokens: np.ndarray) -> str:
        tokens.tofile(tmp_path / "a.bin")
        return Row([Stored(tmp_path / "a.bin", tokens.dtype, count)]).digest

    whole = digest(tokens)
    assert whole == Row([tokens]).digest
    monkeypatch.setattr(rows, "_WHOLE", count - 1)
    monkeypatch.setattr(rows, "_SPREAD", 8)
    part = digest(tokens)
    assert part != whole
    for place in (0, count - 1, 130_000):
        changed = tokens.copy()
        changed[place] = 1
        assert digest(changed) != part


def test_pack() -> None:
    windows = torch.tensor([[5, 6, 9, 7, 8, 1, 9, 9, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9]])
    packed = pack(windows, separator=9)
    assert packed["tokens"].tolist() == windows[:, :-1].tolist()
    # The last token of a document is its separator, whose successor is another document's.
    assert packed["targets"].tolist() == [
        [6, 9, IGNORE, 8, 1, 9, IGNORE, IGNORE],
        [2, 3, 4, 5, 6, 7, 8, 9],
    ]
    assert packed["document_ids"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 2], [0] * 8]
    assert packed["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], list(range(8))]


def test_without_a_separator_a_window_is_one_document() -> None:
    batch = batches(row(100)).batch(0)
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
    assert tokens_of(opened(Data(path=str(tmp_path / "*.txt")))).tolist() == [
        0xC3,
        0xA9,
        256,
        120,
        121,
        122,
        256,
    ]
    assert tokens_of(opened(Data(path=str(tmp_path / "b.txt")))).tolist() == [120, 121, 122, 256]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files(tmp_path: Path, dtype: str) -> None:
    tokens = np.array([1, 2, 65_000, 4, 3], dtype=dtype)
    tokens.tofile(tmp_path / "t.bin")
    found = opened(Data(path=str(tmp_path / "t.bin"), token_dtype=dtype, separator=4))  # type: ignore[arg-type]
    assert isinstance(found, Windows)
    assert isinstance(found.row.parts[0], Stored)
    assert tokens_of(found).tolist() == tokens.tolist()
    assert found.separator == 4
    np.save(tmp_path / "t.npy", tokens)
    assert tokens_of(opened(Data(path=str(tmp_path / "t.npy")))).tolist() == tokens.tolist()


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_a_token_file_with_the_index_of_megatron(tmp_path: Path, code: int, dtype: str) -> None:
    """Its type is read there, whatever data.token_dtype is."""
    tokens = np.array([1, 2, 250, 4, 3], dtype=dtype)
    tokens.tofile(tmp_path / "t.bin")
    (tmp_path / "t.idx").write_bytes(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, 1, 2))
    found = opened(Data(path=str(tmp_path / "t.bin"), token_dtype="uint32"))
    assert tokens_of(found).tolist() == tokens.tolist()


def test_a_bad_index_of_megatron(tmp_path: Path) -> None:
    path, index = tmp_path / "t.bin", tmp_path / "t.idx"
    path.write_bytes(bytes(10))
    index.write_bytes(b"MMIDIDX\0\0" + struct.pack("<QB", 1, 7))
    assert error(Data(path=str(path))) == (
        f"data.path: cannot read {path}: t.idx says that it holds no integers"
    )
    index.write_bytes(b"MMIDIDX\0\0" + struct.pack("<QB", 1, 4))
    assert error(Data(path=str(path))) == (
        f"data.path: cannot read {path}: 10 bytes are no row of int32 (t.idx)"
    )
    index.write_text("an index of something else")
    assert len(tokens_of(opened(Data(path=str(path))))) == 5


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.zst"])
def test_compressed_text_is_refused(tmp_path: Path, name: str) -> None:
    for file in ("0.txt", name):
        (tmp_path / file).write_text("some text")
    for path in (tmp_path / name, tmp_path / "*"):
        assert error(Data(path=str(path))) == (
            f"data.path: {path}: {name} is compressed; unpack it first"
        )


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.ndjson", "a.json"])
def test_documents_in_a_table_are_no_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    document, program = '{"text": "some text"}', "a file of a program, as the other one may be"
    path.write_text(document)
    assert error(Data(path=str(path))) == (
        f"data.path: {path}: {name} would be read as bytes, not as the documents in it; make a folder"
        " of tokens first: python -m compose tokenize --tokenizer tokenizer.json --out DIR"
        f" {path}"
    )
    (tmp_path / "a.py").write_text(program)
    among = Data(path=str(tmp_path / "*"))
    if name == "a.parquet":
        assert "a.parquet would be read as bytes" in error(among)
    else:
        assert len(tokens_of(opened(among))) == len(document) + len(program) + 2


def test_a_set_without_a_target_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    tokens = np.full(40, 7, np.uint16)
    tokens.tofile(path)
    keys: dict[str, Any] = {"path": str(path), "separator": 7}
    message = f"{path} has nothing to learn: no token of its 9 samples of train.seq_len 4 is a target"
    for key in ("path", "validation"):
        config = sets_of(**{"path": "stdlib", "separator": 7} | {key: str(path)})
        config = replace(config, train=Train(seq_len=4, validate_every=1))
        with pytest.raises(ConfigError) as caught:
            open_data(config)
        assert caught.value.problems == [f"data.{key}: {message}"]
    tokens[20] = 8  # one sample of nine has something to learn
    tokens.tofile(path)
    assert open_data(replace(sets_of(**keys), train=Train(seq_len=4))).sets


def opened(data: Data, seq_len: int = 2, vocab_size: int = 1 << 16) -> Samples:
    assert isinstance(data.path, str)
    return open_samples(data.path, data, seq_len, vocab_size)


def error(data: Data, seq_len: int = 4, vocab_size: int = 300) -> str:
    with pytest.raises(ConfigError) as caught:
        opened(data, seq_len, vocab_size)
    return f"data.path: {caught.value}"


def test_bad_data(tmp_path: Path) -> None:
    def path(name: str) -> str:
        return str(tmp_path / name)

    assert error(Data(path=path("no*"))) == f"data.path: no file at {path('no*')}"
    assert error(Data(path=str(tmp_path))) == (
        f"data.path: {tmp_path} is a folder without manifest.json; name its files, as {tmp_path}/*,"
        " or tokenize them first"
    )
    Path(path("short.txt")).write_text("abc")
    assert error(Data(path=path("short.txt"))) == (
        f"data.path: {path('short.txt')} has 4 tokens; one sample needs train.seq_len + 1 = 5"
    )
    np.array([1, 2, 400, 3, 4, 5], dtype=np.uint16).tofile(path("t.bin"))
    assert error(Data(path=path("t.bin"))) == (
        f"data.path: {path('t.bin')} holds token id 400; model.vocab_size 300 allows 0 to 299"
    )
    np.save(path("n.npy"), np.array([1, -2, 3, 4, 5]))
    assert error(Data(path=path("n.npy"))) == (
        f"data.path: {path('n.npy')} holds token id -2; model.vocab_size 300 allows 0 to 299"
    )
    np.save(path("f.npy"), np.ones((2, 3)))
    assert error(Data(path=path("f.npy"))) == (
        f"data.path: {path('f.npy')} holds float64 of shape (2, 3); a token file is one row of integers"
    )
    Path(path("cut.npy")).write_bytes(b"\x93NUMPY")
    assert error(Data(path=path("cut.npy"))).startswith(f"data.path: cannot read {path('cut.npy')}: ")
    Path(path("empty.bin")).touch()
    assert error(Data(path=path("empty.bin"))).startswith(
        f"data.path: cannot read {path('empty.bin')}: "
    )
    assert error(Data(path=path("*.bin"))) == (
        f"data.path: {path('*.bin')} names 2 files, empty.bin among them; a token file stands alone"
    )
    Path(path("empty.npy")).touch()
    assert error(Data(path=path("empty.npy"))).startswith("data.path: cannot read ")
    np.savez(path("two.npz"), a=np.ones(3), b=np.ones(3))
    Path(path("two.npz")).rename(path("two.npy"))
    assert error(Data(path=path("two.npy"))) == (
        f"data.path: {path('two.npy')} is an archive of arrays; a token file is one array"
    )
    np.save(path("good.npy"), np.arange(9))
    assert error(Data(path=path("good.npy"), separator=300)) == (
        "data.path: data.separator 300 is outside the vocabulary; model.vocab_size 300 allows 0 to 299"
    )
    Path(path("a[1].txt")).write_text("literally this")
    assert len(tokens_of(opened(Data(path=path("a[1].txt"))))) == 15


def test_an_id_that_the_first_look_missed_is_named_when_read() -> None:
    late = Row([np.ones(20, int), np.full(20, 999)])
    with pytest.raises(ConfigError, match="late holds token id 999"):
        batches(Windows("late", late, -1, seq_len=7, vocab_size=300)).batch(0)


def test_rows_in_parts_are_read_as_one() -> None:
    parts = [np.arange(3), np.zeros(0, int), np.arange(3, 4), np.arange(4, 11)]
    joined = Row(parts)
    assert len(joined) == 11
    for start in range(11):
        for stop in range(start, 12):
            assert joined.read(start, stop).tolist() == list(range(start, min(stop, 11)))


@pytest.mark.parametrize(
    "weights", [[1], [1, 1], [7, 3], [1, 0.001], [5, 3, 2], [1, 2, 3, 4, 5], [0.1, 0.2, 0.7]]
)
def test_sets_get_their_share_of_any_stretch(weights: list[float]) -> None:
    exact = [Fraction(str(weight)) for weight in weights]
    dealt = Interleaving(exact)
    places = [dealt.place(number) for number in range(3000)]
    for index in range(len(weights)):
        # Each set's own numbers come once, in order.
        assert [n for which, n in places if which == index] == list(range(dealt.taken(3000)[index]))
    share = [weight / sum(exact) for weight in exact]
    for stop in (1, 2, 10, 77, 500, 3000):
        for start in (0, stop // 3, stop // 2):
            counts = Counter(which for which, _ in places[start:stop])
            for index, part in enumerate(share):
                assert abs(counts[index] - part * (stop - start)) < len(weights) + 1


def test_a_mixture_goes_through_epochs_of_each_set() -> None:
    """Of 12 and 5 windows by 2 to 1: each is seen once in every epoch of its own."""
    mixed = batches(
        row(7 * 12 + 1, "a"), row(7 * 5 + 1, "b", first=100), weights=[Fraction(2), Fraction(1)]
    )
    seen = torch.cat([mixed.batch(6 * step)["tokens"][:, 0] for step in range(15)]).tolist()
    ours, others = [n for n in seen if n < 100], [n for n in seen if n >= 100]
    assert (len(ours), len(others)) == (60, 30)
    for epoch in range(5):
        assert sorted(ours[12 * epoch : 12 * epoch + 12]) == [7 * i for i in range(12)]
    for epoch in range(6):
        assert sorted(others[5 * epoch : 5 * epoch + 5]) == [100 + 7 * i for i in range(5)]
    assert ours[:12] != ours[12:24]
    assert mixed.epochs(90) == {"a": 5.0, "b": 6.0}
    assert mixed.epochs(6) == {"a": 4 / 12, "b": 2 / 5}


def test_without_weights_sets_are_mixed_by_size() -> None:
    mixed = batches(row(7 * 40 + 1, "a"), row(7 * 20 + 1, "b", first=100))
    assert mixed.epochs(60) == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_validation_sees_each_sample_once(count: int) -> None:
    """11 samples in batches of 4: the last batch has one row that holds nothing."""
    samples = row(7 * 11 + 1)
    parts = [list(in_order(samples, 4, (index, count))) for index in range(count)]
    assert {len(part) for part in parts} == {3}
    whole = [{k: torch.cat([part[i][k] for part in parts]) for k in parts[0][i]} for i in range(3)]
    tokens = torch.cat([batch["tokens"] for batch in whole])
    assert torch.equal(tokens[:11].flatten(), torch.arange(77))
    targets = torch.cat([batch["targets"] for batch in whole])
    assert (targets[11] == IGNORE).all()
    assert (whole[2]["positions"][3] == -1).all()
    assert torch.equal(targets[:11].flatten(), torch.arange(1, 78))


def test_bad_mixtures(tmp_path: Path) -> None:
    def problems(**keys: Any) -> list[str]:
        try:
            open_data(sets_of(**keys))
        except ConfigError as error:
            return error.problems
        return []

    (tmp_path / "a.txt").write_text("some text")
    a = str(tmp_path / "a.txt")
    assert problems(path=(a, "stdlib"), weights=(1.0, 2.0)) == []
    assert problems(path=(a, a)) == [f"data.path: {a} stands there twice"]
    assert problems(path=()) == ["data.path: names nothing"]
    assert problems(path=(a,), weights=(1.0, 2.0)) == [
        "data.weights: has 2 numbers for the 1 of data.path"
    ]
    assert problems(path=(a, "no1"), validation="no2") == [
        "data.path: no file at no1",
        "data.validation: no file at no2",
    ]


def test_random_batch_is_uneven() -> None:
    batch = random_batch(8, 64, 50, seed=0)
    targets = (batch["targets"] != IGNORE).sum(1)
    assert len(set(targets.tolist())) > 4
    assert batch["document_ids"].max() > 4
    assert {name: value.shape for name, value in batch.items()} == dict.fromkeys(batch, (8, 64))
    same = random_batch(8, 64, 50, seed=0)
    assert all(torch.equal(same[name], value) for name, value in batch.items())
