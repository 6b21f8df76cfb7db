"""AdamW with its state in host memory or files: bitwise the run without, in less memory."""

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from compose.build import build, build_optimizer
from compose.checkpoint import store
from compose.errors import ConfigError
from compose.optim import offload
from compose.optim.offload import OffloadedAdamW
from compose.optim.offload_files import MARK, Scratch, TensorFile, page_aligned
from compose.optim.optimizers import make_state
from compose.train.processes import Signals, TrainingError
from compose.train.trainer import Trainer
from tests.support.checkpoints import SAVING, train_on, trained_state
from tests.support.command_lines import QUICK, command, execute
from tests.support.helpers import ROOT, Keys, agreed, make_config, make_job, prove_case
from tests.support.pool import Pool, make_mesh
from tests.support.training import keys_for, lines

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


def _offloaded(folder: Path) -> OffloadedAdamW:
    parameter = nn.Parameter(torch.ones(2000))
    parameter.grad = torch.ones(2000)
    return OffloadedAdamW([{"params": [parameter]}], folder=folder)


def tree(folder: Path) -> dict[str, str]:
    """All that is in it: a file's text, where a link leads."""
    return {
        str(p.relative_to(folder)): os.readlink(p) if p.is_symlink() else p.read_text()
        for p in sorted(folder.rglob("*"))
        if p.is_symlink() or p.is_file()
    }


def test_files_are_scratch(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "rank-0"
    first, second = (_offloaded(folder) for _ in range(2))
    first.step()
    assert {p.name: p.stat().st_size for p in folder.iterdir() if p.name != MARK} == {
        "00000.exp_avg": 8192,
        "00000.exp_avg_sq": 8192,
    }
    with pytest.raises(ConfigError) as refused:
        second.step()
    assert str(refused.value).endswith(f"optimizer.offload_dir: {folder} is in use by another run")
    del first
    assert not folder.exists()
    second.step()
    second.close()
    assert not folder.exists()


OTHERS = {
    "a file": lambda folder, other: (folder / "thesis.txt").write_text("mine"),
    "a file of our name": lambda folder, other: (folder / "00000.exp_avg").write_text("mine"),
    "a folder": lambda folder, other: (folder / "sub").mkdir() or (folder / "sub/a").write_text("b"),
    "a link": lambda folder, other: (folder / "00000.exp_avg").symlink_to(other / "kept"),
    "a link for the mark": lambda folder, other: (folder / MARK).symlink_to(other / "kept"),
    "a link among ours": lambda folder, other: (
        (folder / MARK).touch(),
        (folder / "00000.exp_avg").symlink_to(other / "kept"),
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_folder_of_others_is_left_alone(tmp_path: Path, what: str) -> None:
    folder, other = tmp_path / "rank-0", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    (other / "kept").write_text("kept")
    OTHERS[what](folder, other)
    before = tree(tmp_path)
    name = MARK if what == "a link for the mark" else next(p.name for p in folder.glob("[a-z0-9]*"))
    optimizer = _offloaded(folder)
    with pytest.raises(ConfigError) as refused:
        optimizer.step()
    assert refused.value.problems == [
        f"optimizer.offload_dir: {folder} holds {name!r}, which no run made there; choose another"
        " folder, or take it away"
    ]
    del optimizer
    assert tree(tmp_path) == before


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "00000.exp_avg").write_text("kept")
    (tmp_path / "rank-0").symlink_to(tmp_path / "other")
    before = tree(tmp_path)
    with pytest.raises(ConfigError) as refused:
        _offloaded(tmp_path / "rank-0").step()
    assert refused.value.problems == [
        f"optimizer.offload_dir: {tmp_path / 'rank-0'} is a link; remove it, or choose another folder"
    ]
    assert tree(tmp_path) == before
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as refused:
        _offloaded(tmp_path / "file" / "rank-0").step()
    assert refused.value.problems[0].startswith("optimizer.offload_dir: cannot write to ")


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    """And nothing else: a file that a person put there later stays."""
    (tmp_path / MARK).touch()
    for name in ("00000.exp_avg", "00007.exp_avg_sq", "notes.exp_avg", "notes"):
        (tmp_path / name).write_text(name)
    optimizer = _offloaded(tmp_path)
    optimizer.step()
    assert {p.name for p in tmp_path.iterdir()} - {MARK, "notes", "notes.exp_avg"} == {
        "00000.exp_avg",
        "00000.exp_avg_sq",
    }
    optimizer.close()
    assert tree(tmp_path) == {MARK: "", "notes": "notes", "notes.exp_avg": "notes.exp_avg"}


def _built(keys: Keys, folder: Path) -> tuple[list[str], list[str]]:
    """What is said of the first step, and what is in this rank's folder after it."""
    job = make_job(2, **keys)
    config, mesh = job.config, make_mesh(job.degrees)
    optimizer = build_optimizer(build(job, mesh, torch.device("cpu")), job, folder=folder)
    try:
        make_state(optimizer)
    except ConfigError as error:
        return error.problems, []
    there = Path(config.optimizer.offload_dir or folder / "offload") / f"rank-{dist.get_rank()}"
    return [], sorted(p.name for p in there.iterdir())[:2]


def test_each_rank_has_its_own(pool: Pool, tmp_path: Path) -> None:
    """A file of a person's is in one rank's folder, and a killed run of more ranks left its own."""
    keys: Keys = {"optimizer__offload": "nvme", "parallel__dp_shard": 2, "model__n_layers": 1}
    folder = tmp_path / "offload"
    for rank, names in {1: ["thesis"], 2: [MARK, "00000.exp_avg"], 3: ["00000.exp_avg"]}.items():
        (folder / f"rank-{rank}").mkdir(parents=True)
        for name in names:
            (folder / f"rank-{rank}" / name).write_text(name)
    good, bad = pool.run(_built, 2, keys | {"optimizer__offload_dir": folder}, tmp_path)
    assert good == ([], [MARK, "00000.exp_avg"])
    assert bad[0] == [
        f"optimizer.offload_dir: {folder}/rank-1 holds 'thesis', which no run made there; choose"
        " another folder, or take it away"
    ]
    assert tree(folder) == {"rank-1/thesis": "thesis", "rank-3/00000.exp_avg": "00000.exp_avg"}
    assert not (folder / "rank-2").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "offload").symlink_to(folder)
    for said, _ in pool.run(_built_or_not, 2, keys, tmp_path / "run"):
        assert said == [
            f"optimizer.offload_dir: {tmp_path}/run/offload is a link; give optimizer.offload_dir ="
            " where it leads"
        ]


def _built_or_not(keys: Keys, folder: Path) -> tuple[list[str], list[str]]:
    try:
        return _built(keys, folder)
    except ConfigError as error:
        return error.problems, []


ENDS = {"well": "", "a fault": "TrainingError", "Ctrl-C": "KeyboardInterrupt"}


def _left(keys: Keys, how: str) -> tuple[str, list[str]]:
    """How a run ended, and its files then, when nothing has been let go of yet."""
    job = make_job(2, **keys)
    config = job.config
    trainer = Trainer(job, make_mesh(job.degrees), torch.device("cpu"))
    real, raised = Trainer.step, ""

    def step(self: Trainer) -> Any:
        found = real(self)
        if how == "a fault" and found.step == 2:
            raise TrainingError
        assert any(Path(config.optimizer.offload_dir).rglob("*.exp_avg"))
        return found

    sent = signal.SIGINT if how == "Ctrl-C" else None
    asked = mock.patch.object(Signals, "asked", return_value=sent)
    with mock.patch.object(Trainer, "step", step), asked:
        try:
            trainer.run()
        except (TrainingError, KeyboardInterrupt) as error:
            raised = type(error).__name__
    dist.barrier()
    return raised, [str(path) for path in Path(config.optimizer.offload_dir).rglob("*")]


@pytest.mark.parametrize("how", ENDS)
def test_removed_when_the_run_ends(pool: Pool, tmp_path: Path, how: str) -> None:
    keys: Keys = {"optimizer__offload": "nvme", "parallel__dp_shard": 2, "train__steps": 3}
    keys |= {"optimizer__offload_dir": tmp_path / "scratch", "checkpoint__interval": 0}
    found = pool.run(_left, 2, keys_for(tmp_path / "run", **keys), how)
    assert found == [(ENDS[how], [])] * 2


@pytest.mark.full
def test_a_killed_run_and_the_next(tmp_path: Path) -> None:
    """Of the command itself, on 2 ranks, which ends without Python's own ways out."""
    given = [*QUICK, "--optimizer.offload=nvme", f"--optimizer.offload_dir={tmp_path}/scratch"]
    given += ["--train.steps=40", "--checkpoint.interval=0", "--metrics.console_every=1"]
    process = subprocess.Popen(
        command("train.py", *given, f"--run.dir={tmp_path}/a"), cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith(b"step  2"):
        assert process.poll() is None
    process.kill()
    process.communicate()
    assert (tmp_path / "scratch" / "rank-0" / "00000.exp_avg").exists()
    done = execute("train.py", *given, f"--run.dir={tmp_path}/b", "--train.stop_after=2", ranks=2)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "scratch").iterdir()) == []


def test_no_room(tmp_path: Path) -> None:
    full, folder = OSError(28, "No space left on device"), Scratch(tmp_path / "a")
    with mock.patch.object(os, "posix_fallocate", side_effect=full), pytest.raises(ConfigError) as said:
        TensorFile(folder, "0.exp_avg", 10)
    assert str(said.value) == (
        f"optimizer.offload_dir: {tmp_path / 'a'} has no room for the optimizer's state"
        " (No space left on device)"
    )


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_holds_what_was_written(tmp_path: Path, direct: bool) -> None:
    """Past the page cache where the file system can, through it where not; mapped all the same."""
    with mock.patch.object(os, "O_DIRECT", getattr(os, "O_DIRECT", 0) if direct else -1):
        file = TensorFile(Scratch(tmp_path / "a"), "0.exp_avg", 2500)
        memory = page_aligned(2048, pinned=False)
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
    job = make_job(1, **keys)
    trainer = Trainer(job, make_mesh(job.degrees), torch.device("cpu"))
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
    found = pool.run(_limited, 1, in_files, room)[0]
    assert isinstance(found, dict), found
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    for line in lines(tmp_path / "files"):
        assert line["offload"]["optimizer_bytes"] == 4 * size
        assert line["offload"]["optimizer_waited"] > 0


MESH: Keys = {"parallel__dp_shard": 2, "parallel__tp": 2, "model__n_layers": 3}


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
        found = pool.run(_train_in_pieces, 4, keys)[0]
        assert store.problems(tmp_path / "a" / "checkpoints" / store.name_of(steps)) == []
        if steps == 2:
            shutil.copytree(tmp_path / "a", tmp_path / "b")
    into_memory = train_on(pool, tmp_path / "b", {}, MESH, 4)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
        assert torch.equal(into_memory[key], value), key
    assert not (tmp_path / "a" / "offload" / "rank-0").exists()


def _prove_in_pieces(keys: Keys) -> Any:
    with small_pieces():
        return prove_case(keys)


@pytest.mark.parametrize("where", ["cpu", "nvme"])
@pytest.mark.slow
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
