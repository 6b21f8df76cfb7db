"""Object storage: a URL reads as a folder of this machine does, or one line says why not."""

import io
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.registry import _registry, known_implementations

from compose import object_storage
from compose.build import fill_weights
from compose.checkpoint.hf_folder import load_hf, name_of
from compose.checkpoint.safetensors_files import TensorFiles
from compose.config.tables import Data
from compose.data.batches import Batches
from compose.data.samples import open_samples
from compose.data.tokenizer import open_tokenizer
from compose.errors import ConfigError
from compose.object_storage import Remote, StoreError, any_path, as_path, files_at
from tests.support.data_made import token_set
from tests.support.helpers import make_job, refusal
from tests.support.hugging_face import MODELS, save_model
from tests.support.tokenizers_made import save_tokenizer


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """An empty folder of two stores."""
    yield as_path(f"memory://{tmp_path}" if request.param == "memory" else f"file://{tmp_path}/store")
    fsspec.filesystem("memory").store.clear()


def uploaded(source: Path, target: Path) -> Path:
    """Copy a folder into a store; return the place there."""
    for path in source.rglob("*"):
        if path.is_file():
            (target / path.relative_to(source)).write_bytes(path.read_bytes())
    return target


def test_a_url_is_a_path(store: Path) -> None:
    file = store / "a" / "b.txt"
    assert not store.exists()
    assert not store.is_dir()
    assert file.write_bytes(b"0123456789") == 10
    assert (store.is_dir(), file.is_dir(), file.is_file(), store.is_file()) == (
        True,
        False,
        True,
        False,
    )
    assert (file.read_bytes(), file.read_text()) == (b"0123456789", "0123456789")
    assert file.stat().st_size == file.lstat().st_size == 10
    with file.open("rb") as opened:
        assert (opened.read(3), opened.seek(8), opened.read(), opened.read()) == (b"012", 8, b"89", b"")
    with file.open("rb", buffering=0) as opened:
        room = bytearray(4)
        opened.seek(3)
        assert (opened.readinto(room), bytes(room)) == (4, b"3456")
    assert isinstance(file.parent.parent, Remote)
    assert file.parent.parent == store
    assert as_path(str(file)) == file
    asked = store / "t.bin?name=b.c"  # Megatron's index has the same query
    assert (asked.suffix, asked.with_suffix(".idx")) == (".bin", store / "t.idx?name=b.c")
    assert str(Path("x") / file.relative_to(store)) == "x/a/b.txt"
    assert list(store.glob("*")) == [store / "a"]
    assert files_at(f"{store}/*/*.txt") == files_at(f"{store}/**/b*") == files_at(str(file)) == [file]
    assert files_at(f"{store}/no") == files_at(f"{store}/no*") == []
    (store / "a").rename(store / "c")
    moved = store / "c"
    assert isinstance(moved, Remote)
    assert (file.exists(), moved.sizes()) == (False, {"b.txt": 10})
    (store / "c/b.txt").unlink()
    (store / "c/b.txt").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError, match="o such file"):
        (store / "c/b.txt").read_bytes()


class Flaky:
    """A question that fails so often before it is answered."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __call__(self, *_: Any) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "answered"


def test_what_cannot_be_reached_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(object_storage, "_WAITS", (0.0, 0.001, 0.002))
    path = Remote("memory://x/y")
    assert path._ask(Flaky(OSError(121, "InternalError"), TimeoutError())) == "answered"
    said = "memory://x/y: cannot be reached, and is tried again for a while: down\n"
    assert path._ask(Flaky(OSError(5, "down"), OSError(5, "down"))) == "answered"
    assert capfd.readouterr().err.endswith(said)
    with pytest.raises(StoreError) as caught:
        path._ask(Flaky(*[ConnectionError("no\nroute")] * 4))
    assert (str(caught.value), caught.value.strerror) == ("memory://x/y: no route", "no route")
    assert isinstance(caught.value, ConfigError)
    capfd.readouterr()


class NoCredentialsError(Exception):
    """As botocore names it."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError("Access Denied"), "Access Denied"),
        (NoCredentialsError("Unable to locate credentials"), "Unable to locate credentials"),
        (OSError(22, "The specified bucket is not valid."), "The specified bucket is not valid."),
        (OSError("Forbidden: b/x\nno access to it"), "Forbidden: b/x no access to it"),
    ],
)
def test_what_is_refused_is_asked_once(error: Exception, words: str) -> None:
    with pytest.raises(StoreError) as caught:
        Remote("memory://x/y")._ask(Flaky(error))
    assert str(caught.value) == f"memory://x/y: {words}"


def test_a_driver_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    bit = {"class": "no_such_driver.FileSystem", "err": "Install it"}
    monkeypatch.setitem(known_implementations, "gs", bit)
    monkeypatch.delitem(_registry, "gs", raising=False)
    for text, why in (
        ("gs://b/x", "needs a package that is not installed here: pip install no_such_driver"),
        ("memry://b", "is in a store that fsspec does not know; did you mean memory?"),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is compared whole)
            any_path(text)
        assert str(caught.value) == why


def _text(folder: Path) -> str:
    (folder / "t").mkdir()
    for name, text in (("b.txt", "the second text. " * 9), ("a.txt", "a first one. " * 9)):
        (folder / "t" / name).write_text(text)
    return "t/*.txt"


def _bin(folder: Path) -> str:
    np.arange(200, dtype=np.uint16).tofile(folder / "x.bin")
    return "x.bin"


def _npy(folder: Path) -> str:
    np.save(folder / "x.npy", np.arange(200, dtype=np.uint16))
    return "x.npy"


def _chat(folder: Path) -> str:
    save_tokenizer(token_set(folder / "chat", kind="chat", replies=4, learnt=40))
    return "chat"


def _set(folder: Path) -> str:
    save_tokenizer(token_set(folder / "set"))
    return "set"


@pytest.mark.parametrize("make", [_text, _bin, _npy, _set, _chat])
def test_data_are_the_same_from_a_store(
    store: Path, tmp_path: Path, make: Callable[[Path], str]
) -> None:
    """Every sample and its order, and the digest that a resumed run compares."""
    (tmp_path / "here").mkdir()
    name = make(tmp_path / "here")
    uploaded(tmp_path / "here", store)
    shutil.move(tmp_path / "here", tmp_path / "there")
    sets = [open_samples(f"{each}/{name}", Data(), 8, 300) for each in (tmp_path / "there", store)]
    assert sets[0].content == sets[1].content
    local, remote = (Batches([each], global_batch=4, seed=3) for each in sets)
    for first in range(0, 24, 4):
        a, b = local.batch(first), remote.batch(first)
        assert all(torch.equal(a[key], b[key]) for key in a)


class Files(SimpleHTTPRequestHandler):
    """The files of a folder, and a page for each folder in it."""

    parts = True
    """Whether a part of a file can be asked for."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def send_head(self) -> Any:
        asked = re.fullmatch("bytes=([0-9]+)-([0-9]+)", self.headers.get("Range", ""))
        if not (asked and self.parts):
            return super().send_head()
        first, last = map(int, asked.groups())
        part = Path(self.translate_path(self.path)).read_bytes()[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        return io.BytesIO(part)


class Whole(Files):
    parts = False


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[[type[Files]], str]]:
    """The address of a server of HTTP for ``tmp_path``."""
    servers: list[ThreadingHTTPServer] = []

    def start(kind: type[Files]) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(kind, directory=str(tmp_path)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("make", [_text, _bin, _npy, _set, _chat])
def test_data_from_a_server_of_http(
    served: Callable[[type[Files]], str], tmp_path: Path, make: Callable[[Path], str]
) -> None:
    """A folder is one, not the page that lists it; a query is no part of a name; a server without parts
    is refused in one line."""
    name, url = make(tmp_path), served(Files)
    query = "?download=true" if make in (_bin, _npy) else ""
    here = open_samples(f"{tmp_path}/{name}", Data(), 8, 300)
    there = open_samples(f"{url}/{name}{query}", Data(), 8, 300)
    assert here.content == there.content
    for index in range(len(here)):
        a, b = here.read(index), there.read(index)
        assert all(torch.equal(a[key], b[key]) for key in a)
    if make is not _text:  # text is read whole
        url = f"{served(Whole)}/{name}"
        said = refusal(lambda: open_samples(url, Data(), 8, 300).read(1))
        assert said.endswith(": its server sends the whole file in place of a part; copy it here")


def test_what_is_wrong_with_data_in_a_store(store: Path, tmp_path: Path) -> None:
    folder = uploaded(token_set(tmp_path / "set"), store)
    (folder / "tokens-00001.bin").unlink()
    (folder / "ends-00000.bin").write_bytes(b"")

    def lines(path: Path) -> list[str]:
        return refusal(open_samples, str(path), Data(), 8, 64).replace(str(store), "").splitlines()

    assert lines(folder) == [
        "/tokens-00001.bin: is missing",
        "/ends-00000.bin: has 0 bytes, not the 16 of manifest.json",
    ]
    assert lines(folder / "no") == ["no file at /no"]
    folder = uploaded(token_set(tmp_path / "more"), store / "more")
    save_tokenizer(tmp_path / "t")
    opened = open_samples(str(uploaded(tmp_path / "t", folder)), Data(), 8, 64)
    (folder / "tokens-00000.bin").write_bytes(b"12")
    assert refusal(opened.read, 0).startswith(f"{folder}/tokens-00000.bin: ")


def test_weights_from_a_store(store: Path, tmp_path: Path) -> None:
    """Each part of each tensor, of several files; and the tokenizer beside them."""
    keys = MODELS["llama"]
    save_model(tmp_path / "hf", keys)
    folder = uploaded(tmp_path / "hf", store)
    here, there = TensorFiles(tmp_path / "hf"), TensorFiles(folder)
    assert {n: (e.shape, e.dtype) for n, e in here.entries.items()} == {
        n: (e.shape, e.dtype) for n, e in there.entries.items()
    }
    for name, entry in here.entries.items():
        cut = [slice(1, 3), slice(0, 5)][: len(entry.shape)]
        for region in ([], cut, [slice(2, 2), *cut[1:]]):
            assert torch.equal(here.read(name, region), there.read(name, region))
    job = make_job(1, **keys, checkpoint__load_hf=str(folder))
    model, other = (job.model.__class__(job.config.model.config) for _ in range(2))
    load_hf(model, tmp_path / "hf", name_of("llama", job.config.model.config))
    fill_weights(other, job, torch.device("cpu"))
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_weights_that_are_no_safetensors(store: Path, tmp_path: Path) -> None:
    for data, words in (
        (b"\xff" * 64, "is no safetensors file"),
        (b"\x08" + bytes(7) + b"{", "ends too early"),
        (b"\x02" + bytes(7) + b"[]", "is a list, not an object"),
        (b"", "ends too early"),
    ):
        (store / "model.safetensors").write_bytes(data)
        line = refusal(TensorFiles, store)
        assert line.startswith(f"{store}/model.safetensors: cannot be read: ")
        assert words in line


def test_a_tokenizer_from_a_store(store: Path, tmp_path: Path) -> None:
    folder = uploaded(save_tokenizer(tmp_path / "t").parent, store)
    assert open_tokenizer(folder).encode("a text") == open_tokenizer(tmp_path / "t").encode("a text")
    assert os.listdir(tmp_path / "t")
