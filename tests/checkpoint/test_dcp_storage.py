"""A checkpoint's files: every box of every tensor comes back, to others' readers too, and is summed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException

from compose.checkpoint import dcp_storage, store
from compose.checkpoint.dcp_storage import PartsReader, load_parts, save_parts
from compose.checkpoint.local_shards import LocalShard
from compose.ops.tensors import checksums
from tests.support.pool import Pool

Box = tuple[slice, ...]

# Four ranks write WRITTEN of (7, 5, 3), and three read READ: no edge is another's.
WRITTEN: list[Box] = [
    (slice(0, 3), slice(0, 2)),
    (slice(0, 3), slice(2, 5)),
    (slice(3, 7), slice(0, 4)),
    (slice(3, 7), slice(4, 5)),
]
READ: list[Box] = [(slice(2, 5),), (slice(0, 7), slice(1, 5), slice(1, 2)), (slice(6, 7), slice(4, 5))]


def _tensors() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(3)
    whole = torch.randn(7, 5, 3, generator=made)
    return {
        "float32": whole,
        "bfloat16": whole.bfloat16(),
        "int64": (whole * 1000).long(),
        "bool": whole > 0,
    }


def _part(whole: Tensor, box: Box, **kind: Any) -> LocalShard:
    """A box of ``whole``, not yet filled; ``kind`` of another type or layout."""
    full = (*box, *(slice(0, n) for n in whole.shape[len(box) :]))
    local = torch.zeros_like(whole[full], **kind)
    return LocalShard(whole.shape, torch.Size(s.start for s in full), local)


def _write(folder: Path) -> dict[str, dict[str, int]]:
    parts = {}
    for name, whole in _tensors().items():
        part = _part(whole, WRITTEN[dist.get_rank()])
        part.local.copy_(whole[WRITTEN[dist.get_rank()]])
        parts[name] = part
    parts["scalar"] = LocalShard(torch.Size(), torch.Size(), torch.tensor(3.5))
    empty = torch.zeros(0, 4) if dist.get_rank() else torch.arange(8.0).view(2, 4)
    parts["only the first has it"] = LocalShard(torch.Size((2, 4)), torch.Size((0, 0)), empty)
    return save_parts(folder, parts, dist.group.WORLD)


def _read(folder: Path, dtype: torch.dtype | None = None) -> None:
    kind: dict[str, Any] = {"dtype": dtype} if dtype else {}
    whole = _tensors()
    box = READ[dist.get_rank()] if dist.get_rank() < len(READ) else None
    parts = {name: _part(tensor, box, **kind) for name, tensor in whole.items() if box}
    parts["scalar"] = LocalShard(torch.Size(), torch.Size(), torch.zeros((), **kind))
    parts["only the first has it"] = _part(torch.zeros(2, 4), (slice(0, 2), slice(1, 3)), **kind)
    load_parts(PartsReader(folder), parts, dist.group.WORLD)
    for name, tensor in whole.items():
        if box:
            assert torch.equal(parts[name].local, tensor[box].to(**kind)), name
    assert parts["scalar"].local == 3.5
    assert parts["only the first has it"].local.tolist() == [[1, 2], [5, 6]]


def test_every_box_comes_back(pool: Pool, tmp_path: Path) -> None:
    """Also into another type."""
    pool.run(_write, 4, tmp_path)
    pool.run(_read, 4, tmp_path)
    pool.run(_read, 4, tmp_path, torch.float64)


def test_others_read_it(pool: Pool, tmp_path: Path) -> None:
    """DCP's own reader of safetensors files finds whole tensors, safetensors itself each part."""
    pool.run(_write, 4, tmp_path)
    results = {name: torch.zeros_like(tensor) for name, tensor in _tensors().items()}
    reader = HuggingFaceStorageReader(str(tmp_path))
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.load(results, storage_reader=reader, no_dist=True)
    for name, tensor in _tensors().items():
        assert torch.equal(results[name], tensor), name
    for rank, box in enumerate(WRITTEN):
        with safe_open(tmp_path / f"__{rank}_0.safetensors", "pt") as file:
            for name, tensor in _tensors().items():
                assert torch.equal(file.get_tensor(name), tensor[box]), name


@pytest.mark.parametrize("block", [10, 64, 2**20])
def test_what_is_written_is_summed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Blocks of any size give the checksums of reading; a file cut short has none."""
    monkeypatch.setattr(dcp_storage, "_BLOCK", block)
    monkeypatch.setattr(dcp_storage, "_AT_ONCE", 3 * block)
    parts: dict[str, Any] = {
        name: LocalShard(whole.shape, torch.Size((0, 0, 0)), whole)
        for name, whole in _tensors().items()
    }
    entries = save_parts(tmp_path, parts)
    sums = {key: int(checksums([part.local])) for key, part in parts.items()}
    with safe_open(tmp_path / "__0_0.safetensors", "pt") as file:
        assert json.loads(file.metadata()["checksums"]) == sums
    assert entries == store.manifest_entries(tmp_path.glob("__*"))
    name = "__0_0.safetensors"
    with pytest.raises(OSError, match=f"{name} was not written whole"):
        store.publish(tmp_path, {name: {"size": 1, "crc32": 0}})
    parts["one more"] = LocalShard(torch.Size((2,)), torch.Size((0,)), torch.zeros(2, device="meta"))
    with pytest.raises(CheckpointException):
        save_parts(tmp_path / "broken", parts)


def test_a_file_that_ends_too_early(pool: Pool, tmp_path: Path) -> None:
    pool.run(_write, 4, tmp_path)
    for path in tmp_path.glob("__*"):
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(Exception, match=r"__\d_0\.safetensors ends too early"):
        pool.run(_read, 4, tmp_path)
