"""Paths that a person gives: ~ is a home folder, and what would be an odd folder is refused."""

import shutil
import typing
from pathlib import Path

import pytest
from fsspec.registry import _registry, known_implementations

from compose.cli import COMMANDS, PATH_FLAGS
from compose.cli.command_line import read_words
from compose.config.hugging_face import ModelFolderPath
from compose.config.tables import TABLES
from compose.config.toml import load
from compose.errors import LocalPath, attribute, docs, local_path
from compose.object_storage import AnyPath, AnyPaths
from models.dit import task
from tests.support.command_lines import answered
from tests.support.helpers import ROOT, refusal

REMOTE = "is in a remote store, which cannot be used; give a folder of this machine"
LONG = "cannot be a path: a name in it has 300 bytes, and at most 255 may be"
HOME = "has $HOME, and variables are not expanded here; write its value, or ~"
KEYS = ["checkpoint.load_hf", "data.path", "data.validation", "model.lora.load", "run.dir"]
STORES = set(KEYS)  # they also take what is in object storage
KEYS += ["model.path", "optimizer.offload_dir", "parallel.pp_schedule", "run.staging"]
DRIVER = "needs a package that is not installed here: pip install no_such_driver"
# Keys and flags of any text that name no file.
WORDS = {"model.name", "model.preset"}
FLAGS = {
    *("--prompt", "--max-tokens", "--temperature", "--top-p", "--seed", "--cache", "--dtype"),
    *("--field", "--end", "--workers", "--world-size", "--objective", "--tokens", "--days", "--free"),
    *("--candidates", "--classes", "--per-class", "--steps", "--guidance", "--seconds", "--gpus"),
    *("--model", "--seq-len", "--batch", "--keep", "--shape", "--fields", "--roles"),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder, and an empty folder to be in."""
    (tmp_path / "home").mkdir()
    driver = {"class": "no_such_driver.FileSystem", "err": "Install it"}
    monkeypatch.setitem(known_implementations, "gs", driver)
    monkeypatch.delitem(_registry, "gs", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    Path("train.toml").write_text("")
    return tmp_path / "home"


def test_what_a_path_becomes(home: Path) -> None:
    assert local_path("~") == str(home)
    assert local_path("~/runs/*.txt") == f"{home}/runs/*.txt"
    odd = ("a/~/b", "./~me", "/a b", "C:/x", "a:b", "5$", "$5", "../x")
    for same in ("", "stdlib", "Interleaved1F1B", *odd):
        assert local_path(same) == same


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("s3://bucket/run", REMOTE),
        ("gs://bucket", REMOTE),
        ("hf://datasets/x", REMOTE),
        ("file:///data/x", REMOTE),
        ("$HOME/run", HOME),
        ("runs/${HOME}", HOME.replace("$HOME", "${HOME}")),
        ("runs/job-$HOME", HOME),
        ("runs/" + "½" * 150, LONG),
        ("½" * 100 + "/½" * 2000, "cannot be a path: it has 6,200 bytes, and at most 4,095 may be"),
        ("~a\0b", "cannot be a path: it has a null character"),
        (
            "~nobody-of-that-name/x",
            "names no known home folder; a folder of that name is ./~nobody-of-that-name/x",
        ),
    ],
)
def test_what_no_path_may_be(home: Path, text: str, why: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is compared whole)
        local_path(text)
    assert str(caught.value) == why


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_names_a_path(home: Path, key: str) -> None:
    """In a file and on a command line, alone and in a list."""
    if key == "model.path":
        shutil.copytree(ROOT / "models/llama", home / "x")
    table, _, name = key.rpartition(".")
    result = load("train.toml", [(key, "~/x")])
    for part in key.split("."):
        result = getattr(result, part)
    assert result == f"{home}/x"
    (line,) = problems([(key, "a b" * 100)])
    assert line.startswith(f"command line: {key}: ")
    assert line.endswith(LONG)
    for text, why in (("gs://b/x", DRIVER if key in STORES else REMOTE), ("$HOME/x", HOME)):
        assert problems([(key, text)]) == [f'command line: {key}: "{text}" {why}']
        Path("odd.toml").write_text(f'[{table}]\n{name} = "{text}"')
        assert problems(file="odd.toml") == [f'odd.toml: {key}: "{text}" {why}']


def problems(overrides: typing.Any = (), file: str = "train.toml") -> list[str]:
    return refusal(load, file, overrides).splitlines()


def test_a_list_of_paths(home: Path) -> None:
    assert load("train.toml", [("data.path", '["~/x", "y"]')]).data.path == (f"{home}/x", "y")
    assert load("train.toml", [("data.path", '["memory://y", "~"]')]).data.path == (
        "memory://y",
        str(home),
    )
    (line,) = problems([("data.path", '["x", "gs://y"]')])
    assert line == f'command line: data.path: ["x", "gs://y"] {DRIVER}'
    assert problems([("data.path", "[1]")]) == [
        "command line: data.path: expected str or list of str, got [1]"
    ]


def test_a_file_that_another_extends(home: Path) -> None:
    (home / "base.toml").write_text("[train]\nsteps = 3")
    Path("mine.toml").write_text('extends = "~/base.toml"')
    assert load("mine.toml").train.steps == 3
    Path("mine.toml").write_text('extends = "https://x/base.toml"')
    assert problems(file="mine.toml") == [f'mine.toml: extends: "https://x/base.toml" {REMOTE}']


def test_every_key_of_any_text_is_a_path_or_a_word() -> None:
    texts, paths = set(), set()
    for table, kind in TABLES.items():
        types = typing.get_type_hints(kind, include_extras=True)
        for key in docs(kind):
            if types[attribute(key)] in (LocalPath, AnyPath, AnyPaths, ModelFolderPath):
                paths.add(f"{table}.{key}")
            elif types[attribute(key)] is str:
                texts.add(f"{table}.{key}")
    assert paths == set(KEYS)
    assert texts == WORDS


def test_every_flag_is_of_a_path_or_of_a_word() -> None:
    flags = [usage.flags for usage in COMMANDS.values()]
    assert task.sampler is not None
    taken = {name for each in (*flags, task.sampler.flags) for name, value in each.items() if value}
    assert taken - PATH_FLAGS == FLAGS
    assert taken >= PATH_FLAGS
    assert read_words(["--out=~/x", "--free", "a.b"], {"--out": "FILE", "--free": "KEY"}).flags == {
        "--out": local_path("~/x"),
        "--free": "a.b",
    }


COMMAND_LINES = [
    (["train", "s3://b/x.toml"], "s3://b/x.toml"),
    (["train", "--run.dir=gs://b/run", "--train.stop_after=1"], 'run.dir: "gs://b/run"'),
    (["init", "s3://b/x"], "s3://b/x"),
    (["convert", "run", "gs://b/out"], "gs://b/out"),
    (["convert", "$HOME/run", "out"], "$HOME/run"),
    (["convert", "run", "out", "--original=gs://b/x"], "--original: gs://b/x"),
    (["convert", "run", "out", "--config", "s3://b/x"], "--config: s3://b/x"),
    (["generate", "gs://b/run", "--prompt", "~"], "gs://b/run"),
    (["generate", "run", "--prompt=~", "--tokenizer=gs://b/x"], "--tokenizer: gs://b/x"),
    (["tokenize", "--tokenizer=t", "--out=s3://b/x", "a.txt"], "--out: s3://b/x"),
    (["tokenize", "--tokenizer=t", "--out=x", "s3://b/a.txt"], "s3://b/a.txt"),
    (["plan", "s3://b/x.toml", "--cluster=cpu", "--world-size=2"], "s3://b/x.toml"),
    (["plan", "--cluster=cpu", "--against=s3://b/run"], "--against: s3://b/run"),
    (["plan", "--cluster=cpu", "--world-size=2", "--write=s3://b/x"], "--write: s3://b/x"),
    (["measure", "--out=s3://b/x.toml"], "--out: s3://b/x.toml"),
    (["schedule", "--parallel.pp=2", "--out=s3://b/x.svg"], "--out: s3://b/x.svg"),
    (["verify", "s3://b/x.toml"], "s3://b/x.toml"),
    (["legal", "s3://b/x.toml", "--world-size=2"], "s3://b/x.toml"),
    (["migrate", "s3://b/x.json"], "s3://b/x.json"),
    (["doctor", "--json=s3://b/x.json"], "--json: s3://b/x.json"),
]


@pytest.mark.parametrize(("words", "line"), COMMAND_LINES)
def test_a_command_that_gets_no_path(home: Path, words: list[str], line: str) -> None:
    """One line, and nothing is written."""
    done = answered("-m", "compose", *words)
    assert done.returncode == 2
    why = HOME if "$" in line else DRIVER if "gs:" in line else REMOTE
    assert done.stderr == f"command line: {line} {why}\n"
    assert [path.name for path in Path().iterdir()] == ["train.toml"]


def test_every_command_is_tried() -> None:
    assert {words[0] for words, _ in COMMAND_LINES} == set(COMMANDS) - {"schema", "completion"}


def test_a_checkpoint_of_a_run_that_was_in_no_folder(home: Path) -> None:
    """Its run wrote into a folder of that name, which a person has moved."""
    Path("config.toml").write_text('[run]\ndir = "s3://bucket/run"\n[train]\nsteps = 3')
    assert load("config.toml", alone=True).train.steps == 3
