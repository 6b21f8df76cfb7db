"""Samples are a function of (seed, step); no mesh changes them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from compose.config import Data
from compose.data import (
    Batches,
    Source,
    check_source,
    open_source,
    pack,
    random_batch,
    shuffled,
)
from compose.errors import ConfigError
from compose.loss import IGNORE
from compose.tokenizer import SEPARATOR


def batches(source: Source, share: tuple[int, int] = (0, 1), **keys: int) -> Batches:
    options = {"seq_len": 7, "global_batch": 6, "vocab_size": 300, "seed": 3} | keys
    return Batches(source, share=share, **options)


def row(n: int, separator: int = -1) -> Source:
    return Source("row", np.arange(n) % 290, separator)


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
        parts = [batches(row(500), (index, count)).batch(6 * step) for index in range(count)]
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
    source = open_source(Data())
    assert len(source.tokens) > 5_000_000
    assert source.tokens.max() == SEPARATOR
    first = bytes(source.tokens[: int(np.argmax(source.tokens == SEPARATOR))].tolist())
    assert first.decode().isprintable() is False
    assert b"import" in bytes(source.tokens[:20000][source.tokens[:20000] < 256].tolist())


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"xyz")
    (tmp_path / "a.txt").write_text("é")
    source = open_source(Data(path=str(tmp_path / "*.txt")))
    assert source.tokens.tolist() == [0xC3, 0xA9, 256, 120, 121, 122, 256]
    assert open_source(Data(path=str(tmp_path / "b.txt"))).tokens.tolist() == [120, 121, 122, 256]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files(tmp_path: Path, dtype: str) -> None:
    tokens = np.array([1, 2, 65_000, 4, 3], dtype=dtype)
    tokens.tofile(tmp_path / "t.bin")
    source = open_source(Data(path=str(tmp_path / "t.bin"), token_dtype=dtype, separator=4))  # type: ignore[arg-type]
    assert isinstance(source.tokens, np.memmap)
    assert source.tokens.tolist() == tokens.tolist()
    assert source.separator == 4
    np.save(tmp_path / "t.npy", tokens)
    assert open_source(Data(path=str(tmp_path / "t.npy"))).tokens.tolist() == tokens.tolist()


def error(data: Data, seq_len: int = 4, vocab_size: int = 300) -> str:
    with pytest.raises(ConfigError) as caught:
        check_source(open_source(data), seq_len, vocab_size)
    return str(caught.value)


def test_bad_data(tmp_path: Path) -> None:
    def path(name: str) -> str:
        return str(tmp_path / name)

    assert error(Data(path=path("no*"))) == f"data.path: no file at {path('no*')}"
    assert error(Data(path=str(tmp_path))) == (
        f"data.path: {tmp_path} is a folder; name its files, as {tmp_path}/*"
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
        "data.separator: 300 is outside the vocabulary; model.vocab_size 300 allows 0 to 299"
    )
    Path(path("a[1].txt")).write_text("literally this")
    assert len(open_source(Data(path=path("a[1].txt"))).tokens) == 15


def test_an_id_that_the_first_look_missed_is_named_when_read() -> None:
    source = Source("late", np.array([1] * 20 + [999] * 20), -1)
    with pytest.raises(ConfigError, match="late holds token id 999"):
        batches(source).batch(0)


def test_random_batch_is_uneven() -> None:
    batch = random_batch(8, 64, 50, seed=0)
    targets = (batch["targets"] != IGNORE).sum(1)
    assert len(set(targets.tolist())) > 4
    assert batch["document_ids"].max() > 4
    assert {name: value.shape for name, value in batch.items()} == dict.fromkeys(batch, (8, 64))
    same = random_batch(8, 64, 50, seed=0)
    assert all(torch.equal(same[name], value) for name, value in batch.items())
