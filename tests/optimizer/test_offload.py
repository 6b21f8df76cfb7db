"""AdamW with its state in host memory or files: bitwise the run without, in less memory."""

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from compose.build import build
from compose.checkpoint import store
from compose.errors import ConfigError
from compose.optimizer import OffloadedAdamW, offload
from compose.optimizer.files import TensorFile, page_aligned
from compose.trainer import Trainer
from tests.helpers import make_config, prove_case
from tests.pool import Pool, make_mesh
from tests.test_checkpoint import SAVING, Keys, _train, train
from tests.test_trainer import keys_for, lines
from tests.test_verify import agreed

SHAPES = [(57, 131), (1024,), (3000,), (5, 7, 300), (1,), ()]


def small_pieces() -> Any:
    return mock.patch.object(offload, "CHUNK", 1024)


def _steps(make: Any) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = make([{"params": parameters}], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(5):
        for number, parameter in enumerate(parameters):
            # One that has a gradient at times only.
            given = number != 1 or step % 2
            parameter.grad = torch.randn(parameter.shape, generator=generator) if given else None
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_bitwise_the_fused_step(tmp_path: Path, where: str) -> None:
    """In pieces of 1,024 elements and what is left of a parameter."""
    ours_in = tmp_path / "rank-0" if where == "nvme" else None
    theirs, second = _steps(lambda groups, **o: torch.optim.AdamW(groups, fused=True, **o))
    with small_pieces():
        ours, first = _steps(lambda groups, **o: OffloadedAdamW(groups, folder=ours_in, **o))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        for key, value in second.state[b].items():
            assert torch.equal(first.state[a][key], value), key
    assert isinstance(first, OffloadedAdamW)
    moved = sum(p.numel() for p in ours) - ours[1].numel()
    assert first.moved.bytes == (16 * moved if where == "nvme" else 0)


def test_files_are_scratch(tmp_path: Path) -> None:
    (tmp_path / "left-behind").write_text("by a run that crashed")
    parameter = nn.Parameter(torch.ones(2000))
    parameter.grad = torch.ones(2000)
    first, second = (OffloadedAdamW([{"params": [parameter]}], folder=tmp_path) for _ in range(2))
    first.step()
    assert {p.name: p.stat().st_size for p in tmp_path.iterdir()} == {
        "00000.exp_avg": 8192,
        "00000.exp_avg_sq": 8192,
    }
    with pytest.raises(ConfigError) as refused:
        second.step()
    assert str(refused.value).endswith(f"optimizer.offload_dir: {tmp_path} is in use by another run")
    del first
    assert not tmp_path.exists()


def test_no_room(tmp_path: Path) -> None:
    full = OSError(28, "No space left on device")
    with mock.patch.object(os, "posix_fallocate", side_effect=full), pytest.raises(ConfigError) as said:
        TensorFile(tmp_path / "a", 10)
    assert str(said.value) == (
        f"optimizer.offload_dir: {tmp_path} has no room for the optimizer's state"
        " (No space left on device)"
    )


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_holds_what_was_written(tmp_path: Path, direct: bool) -> None:
    """Past the page cache where the file system can, through it where not; mapped all the same."""
    with mock.patch.object(os, "O_DIRECT", getattr(os, "O_DIRECT", 0) if direct else -1):
        file, memory = TensorFile(tmp_path / "a", 2500), page_aligned(2048, pinned=False)
        assert not file.mapped().any()
        values = torch.randn(2500)
        for start in (0, 2048):
            part = memory[: min(2048, 2500 - start)]
            part.copy_(values[start : start + 2048])
            file.write(start, part)
        assert torch.equal(file.mapped(), values)
        file.mapped()[2400] = 7.0
        file.read(2048, memory[:452])
        assert memory[352] == 7.0
        assert torch.equal(memory[:352], values[2048:2400])


BIG: Keys = {
    "model__n_layers": 1,
    "model__vocab_size": 2**17,
    "train__seq_len": 8,
    "train__global_batch": 1,
    "train__micro_batch": 1,
    "train__stop_after": 3,
}


@contextmanager
def no_more_than(extra: int) -> Iterator[None]:
    """Of memory that is not files', over what this process has now."""
    now = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmData")
    )
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + extra, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _limited(keys: Keys, extra: int | None) -> Any:
    """The weights after a run that may take ``extra`` bytes for all of its steps, or why it failed."""
    config = make_config(1, **keys)
    mesh, cpu = make_mesh(config.parallel), torch.device("cpu")
    trainer = Trainer(config, mesh, build(config, mesh, cpu), cpu)
    with mock.patch.object(offload, "CHUNK", 2**16):
        try:
            if extra is None:
                trainer.run()
            else:
                with no_more_than(extra):
                    trainer.run()
        except RuntimeError as error:
            return str(error)
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def test_state_that_memory_has_no_room_for(pool: Pool, tmp_path: Path) -> None:
    """16.8 million parameters, whose state is 134.5 MB. All that a run takes besides its weights fits
    into less, gradients and stacks of threads too, and ends with the weights of a run that has room."""
    plain = keys_for(tmp_path / "plain", **BIG)
    in_files = keys_for(tmp_path / "files", **BIG, optimizer__offload="nvme")
    room = 126 * 2**20
    expected = pool.run(_limited, 1, plain, None)[0]
    size = 4 * sum(value.numel() for value in expected.values())
    assert room < 2 * size
    assert "allocate memory" in str(pool.run(_limited, 1, plain, room)[0])
    found = pool.run(_limited, 1, in_files, room)[0]
    assert isinstance(found, dict), found
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    for line in lines(tmp_path / "files"):
        assert line["offload"]["optimizer_bytes"] == 4 * size
        assert line["offload"]["optimizer_waited"] > 0


MESH: Keys = {"parallel__dp_shard": 2, "parallel__tp": 2, "model__n_layers": 3}


def _train_in_pieces(keys: Keys) -> dict[str, torch.Tensor]:
    with small_pieces():
        return _train(keys)


def test_goes_on_bitwise(pool: Pool, tmp_path: Path) -> None:
    """From a checkpoint of files into files, and into memory; uneven shards, tp and accumulation."""
    in_files = SAVING | MESH | {"optimizer__offload": "nvme", "checkpoint__interval": 1}
    expected = train(pool, tmp_path / "plain", {}, MESH, 4)
    for steps in (2, 4):
        keys = keys_for(tmp_path / "a", **(in_files | {"train__stop_after": steps}))
        found = pool.run(_train_in_pieces, 4, keys)[0]
        assert store.problems(tmp_path / "a" / "checkpoints" / store.name_of(steps)) == []
        if steps == 2:
            shutil.copytree(tmp_path / "a", tmp_path / "b")
    into_memory = train(pool, tmp_path / "b", {}, MESH, 4)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
        assert torch.equal(into_memory[key], value), key
    assert not (tmp_path / "a" / "offload" / "rank-0").exists()


def _prove_in_pieces(keys: Keys) -> Any:
    with small_pieces():
        return prove_case(keys)


@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_as_one_process(pool: Pool, tmp_path: Path, where: str) -> None:
    keys = MESH | {"optimizer__offload": where, "optimizer__offload_dir": tmp_path}
    report = agreed(pool.run(_prove_in_pieces, 4, keys))
    assert report.ok, report


def _problems(keys: Keys) -> list[str]:
    try:
        make_config(dist.get_world_size() if dist.is_initialized() else 1, **keys)
    except ConfigError as error:
        return error.problems
    return []


def test_what_cannot_be_offloaded() -> None:
    keys: Keys = {"optimizer__offload": "nvme", "optimizer__name": "muon"}
    assert _problems(keys) == [
        'optimizer.name: muon with optimizer.offload = "nvme"; use "adamw", or'
        ' optimizer.offload = "none"'
    ]
    keys = {"optimizer__offload": "cpu", "precision__optimizer_state": "bfloat16"}
    assert _problems(keys) == [
        'precision.optimizer_state: bfloat16 with optimizer.offload = "cpu"; use "float32", or'
        ' optimizer.offload = "none"'
    ]
