"""Checkpoints that anyone may have made: none runs code, none is whole that is not."""

import ast
import io
import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from compose.checkpoint import store
from compose.checkpoint.dcp_storage import SUMS, PartsReader, load_parts, save_parts
from compose.checkpoint.hf_conversion import export
from compose.checkpoint.local_shards import LocalShard, ShardLoadPlanner
from compose.errors import ConfigError
from tests.support.checkpoints import tensor_at
from tests.support.helpers import ROOT

AT = MetadataIndex("a")
VALUES = torch.arange(12.0).view(4, 3)
STATE = {
    "step": 2,
    "samples": 16,
    "tokens": 256,
    "scale": {"value": 65536.0, "clean": 2},
    "model": {"name": "llama", "dim": 64},
    "data": {"tokenizer": None, "samples": [9], "weights": [], "seq_len": 16, "seed": 0},
    "seed": 0,
    "ranks": 1,
    "versions": {"torch": "2.13.0"},
}


def _parts() -> dict[str, Any]:
    """A tensor, and another."""
    return {
        "model.a": LocalShard(torch.Size((4, 3)), torch.Size((0, 0)), VALUES.clone()),
        "model.b": LocalShard(torch.Size(()), torch.Size(()), torch.tensor(7)),
    }


def _sum(folder: Path) -> None:
    """Write a manifest that fits whatever is there."""
    files = [path for path in folder.iterdir() if path.name != store.MANIFEST]
    manifest = json.dumps({"files": store.manifest_entries(files)})
    (folder / store.MANIFEST).write_text(manifest)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One as a run writes it."""
    folder = store.begin(tmp_path, 2)
    save_parts(folder, _parts())
    (folder / store.STATE).write_text(json.dumps(STATE))
    (folder / "config.toml").write_text("")
    done = store.publish(folder, store.manifest_entries(folder.iterdir()))
    assert store.problems(done) == []
    return done


class Touches:
    """Unpickled by a reader that trusts it, makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _read(folder: Path) -> dict[str, Any]:
    parts = {
        name: LocalShard(p.shape, p.offsets, torch.zeros_like(p.local)) for name, p in _parts().items()
    }
    load_parts(PartsReader(folder), parts)
    return {name: part.local for name, part in parts.items()}


@pytest.mark.parametrize("beside", [True, False])
def test_a_pickle_is_not_opened(checkpoint: Path, tmp_path: Path, beside: bool) -> None:
    """DCP's own description, as generate, convert and a run that resumes come by it: no code runs."""
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Touches(tmp_path / "caught")))
    if not beside:
        (checkpoint / "metadata.json").unlink()
    _sum(checkpoint)
    if beside:
        assert store.problems(checkpoint) == []
        assert torch.equal(_read(checkpoint)["model.a"], VALUES)
    else:
        assert store.problems(checkpoint) == ["metadata.json is not in manifest.json"]
        for read in (PartsReader(checkpoint).read_metadata, lambda: export(checkpoint, tmp_path / "b")):
            with pytest.raises(ConfigError, match=r"metadata\.json"):
                read()
    assert not (tmp_path / "caught").exists()


def test_a_shard_that_is_a_trap(checkpoint: Path, tmp_path: Path) -> None:
    """DCP's own files are pickles: one in place of ours is read as numbers, or not at all."""
    shard, trap = checkpoint / SHARD, tmp_path / "trap"
    torch.save(Touches(tmp_path / "caught"), trap)
    shard.write_bytes(trap.read_bytes().ljust(shard.stat().st_size, b"\0"))
    _read(checkpoint)
    item = ReadItem(LoadItemType.BYTE_IO, AT, torch.Size(), AT, torch.Size(), torch.Size())
    with pytest.raises(TypeError, match="a is no tensor"):
        ShardLoadPlanner().load_bytes(item, io.BytesIO(trap.read_bytes()))
    assert not (tmp_path / "caught").exists()


Change = Callable[[dict[str, Any]], Any]


def _edit(folder: Path, name: str, change: Change) -> None:
    """Change a JSON file, and have the manifest know it."""
    content = json.loads((folder / name).read_text())
    changed = change(content)
    (folder / name).write_text(json.dumps(content if changed is None else changed))
    if name != store.MANIFEST:
        _sum(folder)


def _set(*way: Any) -> Change:
    """Set what lies the way of all but the last, to the last."""

    def change(content: Any) -> None:
        *path, key, value = way
        for step in path:
            content = content[step]
        content[key] = value

    return change


def _without(name: str) -> Change:
    return lambda content: content["files"].pop(name) and None


def _box(field: int, value: Any) -> Change:
    return _set("tensors", "model.a", "chunks", 0, field, value)


def _twice(content: dict[str, Any]) -> None:
    content["tensors"]["model.a"] |= {
        "shape": [8, 3],
        "chunks": content["tensors"]["model.a"]["chunks"] * 2,
    }


SHARD = "__0_0.safetensors"
# By file: what is changed in it, and what is said. "~" stands for "FILE cannot be read".
FLAWS: dict[str, list[tuple[Change, str]]] = {
    "state.json": [
        (_set("step", "two"), '~: step: expected a whole number, got "two"'),
        (_set("step", -2), "~: step: -2 should be greater than or equal to 0"),
        (_set("step", 3), "state.json is of step 3, the folder of step 2"),
        (_set("step", None), "~: step: expected a whole number, got null"),
        (_set("samples", 1.5), "~: samples: expected a whole number, got 1.5"),
        (_set("samples", 2**63), "~: samples: 9223372036854775808 should be less than"),
        (_set("tokens", [1]), "~: tokens: expected a whole number, got a list"),
        (_set("scale", "value", 0.0), "~: scale.value: 0.0 should be greater than 0"),
        (_set("scale", "value", True), "~: scale.value: expected a number, got true"),
        (_set("scale", 4), "~: scale: expected an object, got 4"),
        (_set("model", "llama"), '~: model: expected an object, got "llama"'),
        (_set("model", "name", 1), "~: model.name: expected a string, got 1"),
        (_set("hugging_face", 1), "~: hugging_face: expected a string, got 1"),
        (_set("data", []), "~: data: expected an object, got a list"),
        (_set("data", "tokenizer", 3), "~: data.tokenizer: expected a string, got 3"),
        (_set("data", "samples", ["9"]), '~: data.samples[0]: expected a whole number, got "9"'),
        (_set("ranks", 0), "~: ranks: 0 should be greater than or equal to 1"),
        (_set("versions", {"torch": 2}), "~: versions.torch: expected a string, got 2"),
        (lambda content: [content], "~: is a list, not an object"),
        (lambda content: {"step": 2}, "~: samples: is missing"),
    ],
    "manifest.json": [
        (lambda content: {"files": {}}, "state.json is not in manifest.json"),
        (_without(SHARD), f"{SHARD} is not in manifest.json"),
        (_without("state.json"), "state.json is not in manifest.json"),
        (_without("metadata.json"), "metadata.json is not in manifest.json"),
        (lambda content: {}, "~: files: is missing"),
        (lambda content: {"files": []}, "~: files: expected an object, got a list"),
        (_set("files", SHARD, "size", "9"), f"~: files.{SHARD}.size: expected a whole"),
        (_set("files", SHARD, "size", -1), f"~: files.{SHARD}.size: -1 should be"),
        (_set("files", SHARD, "crc32", 2**32), f"~: files.{SHARD}.crc32: 4294967296"),
        (_set("files", SHARD, 7), f"~: files.{SHARD}: expected an object, got 7"),
        *(
            (
                _set("files", name, {"size": 1, "crc32": 1}),
                f"manifest.json names {name!a}, which is no file of the folder's own",
            )
            for name in ("../../secret", "\x1b[2J")
        ),
    ],
    "metadata.json": [
        (_set("tensors", []), "~: tensors: expected an object, got a list"),
        (_set("tensors", "model.a", "dtype", "object"), "~: @: dtype: 'object' is none of F32"),
        (_set("tensors", "model.a", "shape", [5, 3]), "~: @: its regions are not the whole of [5, 3]"),
        (_twice, "~: @: its regions are not the whole of [8, 3]"),
        (_set("tensors", "model.a", "chunks", []), "~: @: its regions are not the whole of [4, 3]"),
        (_box(0, "/etc/passwd"), "~: @: '/etc/passwd' is no name of a shard"),
        (_box(0, 3), "~: @.chunks[0][0]: expected a string, got 3"),
        (_box(1, -8), "~: @.chunks[0][1]: -8 should be greater than or equal to 0"),
        (_box(2, 44), "~: @: 44 bytes at"),
        (_box(3, [1, 0]), "~: @: a region of [4, 3] at [1, 0] is not in [4, 3]"),
        (_box(3, [0]), "~: @: a region of 1 and 2 dims, of 2"),
        (_box(4, [0, 3]), "~: @.chunks[0][4][0]: 0 should be greater than"),
        (_box(4, 3), "~: @.chunks[0][4]: expected a list, got 3"),
    ],
}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [pytest.param(n, *row, id=f"{n} {row[1]}") for n, rows in FLAWS.items() for row in rows],
)
def test_wrong_content_is_named(checkpoint: Path, name: str, change: Change, words: str) -> None:
    _edit(checkpoint, name, change)
    problem, *more = store.problems(checkpoint)
    words = words.replace("~", f"{name} cannot be read").replace("@", "tensors.model.a")
    assert problem.startswith(words)
    assert not more or name == store.MANIFEST


def test_a_description_of_more_than_there_is(checkpoint: Path) -> None:
    size = (checkpoint / SHARD).stat().st_size
    _edit(checkpoint, "metadata.json", _box(1, size))
    assert store.problems(checkpoint) == [
        f"metadata.json has {size + 48:,} bytes in {SHARD}, of {size:,}"
    ]


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "metadata.json", SHARD, "config.toml"])
def test_a_file_that_leads_out(checkpoint: Path, tmp_path: Path, name: str) -> None:
    shutil.move(checkpoint / name, tmp_path / "elsewhere")
    (checkpoint / name).symlink_to(tmp_path / "elsewhere")
    assert store.problems(checkpoint) == [f"{name} cannot be read: is a symbolic link"]


def test_every_flipped_bit_is_named(tmp_path: Path) -> None:
    """200 of them, in tensors and in the description before them."""
    folder, parts = store.begin(tmp_path, 2), _parts()
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64)):
        local = torch.arange(40 + number).to(dtype)
        parts[f"model.{number}"] = LocalShard(local.shape, torch.Size((0,)), local)
    entries = save_parts(folder, parts)
    (folder / store.STATE).write_text(json.dumps(STATE))
    rest = [path for path in folder.iterdir() if path.name not in entries]
    folder = store.publish(folder, {**store.manifest_entries(rest), **entries})
    assert not store.problems(folder)
    [shard] = folder.glob("__*.safetensors")
    whole, chance = shard.read_bytes(), random.Random(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(200):
        place, content = chance.randrange(len(whole)), bytearray(whole)
        where = tensor_at(shard, place) if place >= header else ""
        content[place] ^= 1 << chance.randrange(8)
        shard.write_bytes(content)
        [problem] = store.problems(folder)
        if where:
            assert problem == f"{shard.name} is not what was written (checksum) in {where}"
        assert problem.startswith(f"{shard.name} is not what was written (checksum)")
        shard.write_bytes(whole)


@pytest.mark.parametrize("sums", ["[1]", "null", '{"a": []}', '{"b": 1}', "{"])
def test_damage_beside_sums_that_are_none(tmp_path: Path, sums: str) -> None:
    """Anyone may have made them."""
    file = tmp_path / SHARD
    save_file({"a": torch.ones(1)}, file, {SUMS: sums})
    said = store._problem(file, store.FileEntry(file.stat().st_size, 0))
    assert said.startswith(f"{SHARD} is not what was written (checksum)")


def test_what_is_missing_is_said_once(checkpoint: Path) -> None:
    """Where ranks share the reading."""
    _edit(checkpoint, store.MANIFEST, lambda content: {"files": {}})
    words = ["state.json is not in manifest.json", "metadata.json is not in manifest.json"]
    assert [store.problems(checkpoint, (rank, 2)) for rank in range(2)] == [words, []]


# These functions of such modules are harmless.
PICKLES = {"dump", "dumps"}
TRUSTING = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def _trusts(tree: ast.Module) -> list[int]:
    """The lines that would run what a file says."""
    results = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in TRUSTING:
            results += [node.lineno for name in node.names if name.name not in PICKLES]
        if isinstance(node, ast.Import):
            results += [node.lineno for name in node.names if name.name in TRUSTING - {"pickle"}]
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "pickle":
            results += [node.lineno] if node.attr not in PICKLES else []
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            results += [node.lineno] if function in ("eval", "exec", "__import__") else []
            results += [node.lineno] if given.get("weights_only", "True") != "True" else []
            results += [node.lineno] if given.get("allow_pickle", "False") != "False" else []
            if function in ("torch.load", "yaml.load"):
                results += [] if "weights_only" in given else [node.lineno]
            if function == "dcp.load":  # whose own planner and reader unpickle
                ours = given.get("planner") == "ShardLoadPlanner()" and "reader" in given.get(
                    "storage_reader", ""
                )
                results += [] if ours else [node.lineno]
            results += [node.lineno] if function.endswith("FileSystemReader") else []
    return results


def test_nothing_trusts_a_file() -> None:
    """Neither unpickles, nor evaluates, nor loads more than weights; and no class of a file is made."""
    paths = [
        path
        for place in ("compose", "models", "benchmarks", "examples", "train.py")
        for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
    ]
    trees = {path: ast.parse(path.read_text()) for path in paths}
    assert len(trees) > 80
    assert [f"{path}:{line}" for path, tree in trees.items() for line in _trusts(tree)] == []


@pytest.mark.parametrize(
    "line",
    [
        "import dill",
        "from pickle import load",
        "pickle.loads(x)",
        "pickle.Unpickler(x).load()",
        "eval(x)",
        "exec(x)",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "np.load(x, allow_pickle=True)",
        "dcp.load(x)",
        "FileSystemReader(x)",
    ],
)
def test_what_trusts_a_file_is_seen(line: str) -> None:
    assert _trusts(ast.parse(line)) == [1]
