"""AdamW with its state in host memory or files: bitwise the run without, in less memory."""

import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from compose.checkpoint import store
from compose.optim import offload
from compose.optim.offload import OffloadedAdamW
from compose.optim.offload_files import TensorFile
from tests.support.checkpoints import (
    SAVING,
    assert_bitwise,
    goes_on_from_a_state_dict,
    train_on,
    trained_state,
)
from tests.support.helpers import Keys, parallel, prove_case, proved, refusals
from tests.support.pool import Pool
from tests.support.training import keys_for, lines, train_until_error, trainer_of

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


@pytest.mark.parametrize("where", ["cpu", "nvme", "slow files"])
def test_bitwise_the_fused_step(tmp_path: Path, where: str) -> None:
    """In pieces of 1,024 elements and what is left of a parameter. Slow files are waited for: memory of
    a piece is not filled anew before it is written, nor is a step over before."""
    ours_in = None if where == "cpu" else tmp_path / "rank-0"
    theirs, second = _steps(lambda groups, **o: torch.optim.AdamW(groups, fused=True, **o))
    real = TensorFile.write

    def write(self: TensorFile, start: int, values: torch.Tensor) -> None:
        time.sleep(0.002 if where == "slow files" else 0)
        real(self, start, values)

    with small_pieces(), mock.patch.object(TensorFile, "write", write):
        ours, first = _steps(lambda groups, **o: OffloadedAdamW(groups, folder=ours_in, **o))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        for key, value in second.state[b].items():
            assert torch.equal(first.state[a][key], value), key
    assert isinstance(first, OffloadedAdamW)
    moved = sum(p.numel() for p in ours) - ours[1].numel()
    assert first.bytes_moved == (16 * moved if ours_in else 0)


@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_goes_on_from_a_state_dict(tmp_path: Path, where: str) -> None:
    """In files the state has to get into them; on a GPU it stays in host memory."""
    folders = iter(tmp_path / name for name in ("one", "other"))

    def make(named: Any) -> OffloadedAdamW:
        return OffloadedAdamW(named, folder=next(folders) if where == "nvme" else None)

    goes_on_from_a_state_dict(make, torch.float32)


def test_a_skipped_step_moves_nothing(pool: Pool, tmp_path: Path) -> None:
    keys = keys_for(tmp_path, optimizer__offload="nvme", train__skip_nonfinite=True)
    keys |= {"model__n_layers": 1, "train__stop_after": 4, "train__global_batch": 2}
    assert pool.run(train_until_error, 1, keys, float("nan"), "clip_grad_norm_") == [""]
    moved = [line["offload"]["optimizer_bytes"] for line in lines(tmp_path)]
    assert moved == [moved[0], moved[0], 0, moved[0]]
    assert lines(tmp_path)[2]["offload"]["optimizer_waited"] == 0


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
    """Allow ``extra`` bytes of memory over now, without that of files."""
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
    trainer = trainer_of(keys)
    with mock.patch.object(offload, "CHUNK", 2**16):
        try:
            if extra is None:
                trainer.run()
            else:
                with no_more_than(extra):
                    trainer.run()
        except RuntimeError as error:
            return str(error)
    return {name: p.detach().clone() for name, p in trainer.composition.named_parameters()}


@pytest.mark.slow
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
    result = pool.run(_limited, 1, in_files, room)[0]
    assert isinstance(result, dict), result
    assert_bitwise(result, expected)
    for line in lines(tmp_path / "files"):
        assert line["offload"]["optimizer_bytes"] == 4 * size
        assert line["offload"]["optimizer_waited"] > 0


MESH = parallel(dp_shard=2, tp=2) | {"model__n_layers": 3}


def _train_in_pieces(keys: Keys) -> dict[str, torch.Tensor]:
    with small_pieces():
        return trained_state(keys)


@pytest.mark.slow
def test_goes_on_bitwise(pool: Pool, tmp_path: Path) -> None:
    """From a checkpoint of files into files, and into memory; uneven shards, tp and accumulation."""
    in_files = SAVING | MESH | {"optimizer__offload": "nvme", "checkpoint__interval": 1}
    expected = train_on(pool, tmp_path / "plain", {}, MESH, 4)
    for steps in (2, 4):
        keys = keys_for(tmp_path / "a", **(in_files | {"train__stop_after": steps}))
        result = pool.run(_train_in_pieces, 4, keys)[0]
        assert store.problems(tmp_path / "a" / "checkpoints" / store.name_of(steps)) == []
        if steps == 2:
            shutil.copytree(tmp_path / "a", tmp_path / "b")
    into_memory = train_on(pool, tmp_path / "b", {}, MESH, 4)
    assert_bitwise(result, expected)
    assert_bitwise(into_memory, expected)
    assert not (tmp_path / "a" / "offload" / "rank-0").exists()


def _prove_in_pieces(keys: Keys) -> Any:
    with small_pieces():
        return prove_case(keys)


@pytest.mark.parametrize("where", ["cpu", "nvme"])
@pytest.mark.slow
def test_as_one_process(pool: Pool, tmp_path: Path, where: str) -> None:
    keys = MESH | {"optimizer__offload": where, "optimizer__offload_dir": tmp_path}
    proved(pool.run(_prove_in_pieces, 4, keys))


REFUSED: list[tuple[Keys, str]] = [
    (
        {"optimizer__offload": "nvme", "optimizer__name": "muon"},
        'optimizer.name: muon with optimizer.offload = "nvme"; use "adamw", or'
        ' optimizer.offload = "none"',
    ),
    (
        {"optimizer__offload": "cpu", "precision__optimizer_state": "bfloat16"},
        'precision.optimizer_state: bfloat16 with optimizer.offload = "cpu"; use "float32", or'
        ' optimizer.offload = "none"',
    ),
]
test_what_cannot_be_offloaded = refusals(REFUSED)
