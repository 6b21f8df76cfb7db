"""Files of an optimizer's state are scratch: what they hold; nothing of others is touched."""

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from compose.build import build_optimizer
from compose.optim.offload import OffloadedAdamW
from compose.optim.offload_files import MARK, ScratchFolder, TensorFile, page_aligned
from compose.optim.optimizers import make_state
from compose.train.processes import Signals, TrainingError
from compose.train.trainer import Trainer
from tests.support.command_lines import QUICK, begin, command, execute
from tests.support.helpers import Keys, built, refused
from tests.support.pool import Pool
from tests.support.training import keys_for, trainer_of, wait_for_second_step


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
    assert refused(second.step) == [f"optimizer.offload_dir: {folder} is in use by another run"]
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
    assert refused(optimizer.step) == [
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
    assert refused(_offloaded(tmp_path / "rank-0").step) == [
        f"optimizer.offload_dir: {tmp_path / 'rank-0'} is a link; remove it, or choose another folder"
    ]
    assert tree(tmp_path) == before
    (tmp_path / "file").touch()
    said = refused(_offloaded(tmp_path / "file" / "rank-0").step)
    assert said[0].startswith("optimizer.offload_dir: cannot write to ")


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
    """Return the first step's refusal, and this rank's first files after it."""
    job, composition = built(keys)
    optimizer = build_optimizer(composition, job, folder=folder)
    if said := refused(make_state, optimizer):
        return said, []
    there = Path(job.config.optimizer.offload_dir or folder / "offload") / f"rank-{dist.get_rank()}"
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
    line = (
        f"optimizer.offload_dir: {tmp_path}/run/offload is a link; give optimizer.offload_dir = where"
        " it leads"
    )
    assert pool.run(_refusal, 2, keys, tmp_path / "run") == [[line]] * 2


def _refusal(keys: Keys, folder: Path) -> list[str]:
    return refused(_built, keys, folder)


ENDS = {"well": "", "a fault": "TrainingError", "Ctrl-C": "KeyboardInterrupt"}


def _left(keys: Keys, how: str) -> tuple[str, list[str]]:
    """How a run ended, and its files then, when nothing has been let go of yet."""
    trainer = trainer_of(keys)
    config = trainer.config
    real, raised = Trainer.step, ""

    def step(self: Trainer) -> Any:
        result = real(self)
        if how == "a fault" and result.step == 2:
            raise TrainingError
        assert any(Path(config.optimizer.offload_dir).rglob("*.exp_avg"))
        return result

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
    result = pool.run(_left, 2, keys_for(tmp_path / "run", **keys), how)
    assert result == [(ENDS[how], [])] * 2


@pytest.mark.full
def test_a_killed_run_and_the_next(tmp_path: Path) -> None:
    """The command is killed, so Python's own ways out do not run; the next one has 2 ranks."""
    given = [*QUICK, "--optimizer.offload=nvme", f"--optimizer.offload_dir={tmp_path}/scratch"]
    given += ["--train.steps=40", "--checkpoint.interval=0", "--metrics.console_every=1"]
    process = begin(command("train.py", *given, f"--run.dir={tmp_path}/a"))
    wait_for_second_step(process)
    process.kill()
    process.communicate()
    assert (tmp_path / "scratch" / "rank-0" / "00000.exp_avg").exists()
    done = execute("train.py", *given, f"--run.dir={tmp_path}/b", "--train.stop_after=2", ranks=2)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "scratch").iterdir()) == []


def test_no_room(tmp_path: Path) -> None:
    full, folder = OSError(28, "No space left on device"), ScratchFolder(tmp_path / "a")
    with mock.patch.object(os, "posix_fallocate", side_effect=full):
        assert refused(TensorFile, folder, "0.exp_avg", 10) == [
            f"optimizer.offload_dir: {tmp_path / 'a'} has no room for the optimizer's state"
            " (No space left on device)"
        ]
    with mock.patch.object(ScratchFolder, "open", side_effect=full):
        (line,) = refused(TensorFile, folder, "1.exp_avg", 10)
        assert line.endswith("has no room for the optimizer's state (No space left on device)")
    file, memory = TensorFile(folder, "2.exp_avg", 1024), page_aligned(1024, pinned=False)
    with mock.patch.object(os, "pwritev", side_effect=full):
        assert refused(file.write, 0, memory) == [
            f"optimizer.offload_dir: {tmp_path / 'a' / '2.exp_avg'}: No space left on device"
        ]


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_holds_what_was_written(tmp_path: Path, direct: bool) -> None:
    """Past the page cache where the file system can, through it where not; mapped all the same."""
    with mock.patch.object(os, "O_DIRECT", getattr(os, "O_DIRECT", 0) if direct else -1):
        file = TensorFile(ScratchFolder(tmp_path / "a"), "0.exp_avg", 2500)
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
