"""A run loses nothing in its folder, writes nothing outside, and reports what it finds there."""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import gc
import io
import os
import resource
import shutil
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import compose.checkpoint.checkpointer as checkpointer_module
from compose.build import _scratch, build, build_optimizer
from compose.checkpoint import store
from compose.checkpoint.checkpointer import Checkpointer
from compose.checkpoint.hf_conversion import export
from compose.checkpoint.loading import changes, workers_of
from compose.checkpoint.local_shards import LocalShard, named_tensors, staged
from compose.checkpoint.store import Progress
from compose.cli.command_line import _run_dir
from compose.composition import Composition
from compose.config.job import Job
from compose.config.tables import Config
from compose.config.toml import dump
from compose.data.datasets import open_data, training_batches
from compose.object_storage import Remote, StoreError, as_path
from compose.train import run_folder
from compose.train.processes import TrainingError
from compose.train.run_folder import RunFolder, RunReport, _unmade
from compose.train.trainer import Trainer
from compose.train.workers import Worker
from tests.support.checkpoints import parallelize_without_weights
from tests.support.helpers import ROOT, TINY, Keys, make_job, refusal
from tests.support.pool import Pool, make_mesh
from tests.support.training import keys_for, logged_steps, trainer_of

CPU = torch.device("cpu")


def _keys(folder: Path, **keys: object) -> Keys:
    return TINY | keys_for(folder, **{"checkpoint__interval": 2, **keys})


def _job(folder: Path, **keys: object) -> Job:
    return make_job(1, **_keys(folder, **keys))


def _config(folder: Path, **keys: object) -> Config:
    return _job(folder, **keys).config


def _trainer(folder: Path, **keys: object) -> Trainer:
    return trainer_of(_keys(folder, **keys))


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_lost(alone: None, tmp_path: Path) -> None:
    """Does not begin at step 1 over what is left of it; one that never had any does."""
    run, root = tmp_path / "run", tmp_path / "run/checkpoints"
    (run / ".writing").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')  # killed before its first save
    _trainer(run, train__stop_after=2).run()
    assert logged_steps(run) == [1, 2]
    kept = shutil.copytree(root, tmp_path / "kept")
    (root / store.name_of(2) / store.MANIFEST).unlink()

    def refused() -> str:
        words = refusal(_trainer, run, train__stop_after=3)
        assert logged_steps(run) == [1, 2]
        gc.collect()  # of what holds the lock, as the process would that ends here
        return words

    cure = (
        "and a run that begins at step 1 would write over the rest: put one back into"
        f" {root}, or begin anew in another run.dir"
    )
    assert refused() == f"run.dir: {run}: none of its checkpoints is whole, {cure}"
    shutil.rmtree(root)
    assert refused() == f"run.dir: {run}: its checkpoints are gone, {cure}"
    shutil.copytree(kept, root)
    assert _trainer(run, train__stop_after=3).progress.step == 2
    config = _config(run, checkpoint__resume="none")
    (run / "metrics.jsonl").unlink()
    (run / "config.toml").unlink()
    assert _run_dir(config) == [
        f"run.dir: {run} already holds checkpoints of a run; "
        'set checkpoint.resume = "auto" to go on, or choose another folder'
    ]


def test_what_a_run_goes_on_with_is_said(
    alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another batch, rate or precision, in one line; and that no step is left to train."""
    held_out = [tmp_path / f"{name}.txt" for name in "ab"]
    for path in held_out:
        path.write_text(f"{path.stem} text\n" * 9)
    more = {"train__validate_every": 1}
    _trainer(tmp_path, train__stop_after=2, data__validation=held_out[0], **more).run()
    capsys.readouterr()
    _trainer(tmp_path, train__stop_after=1, data__validation=held_out[1], **more).run()
    said = capsys.readouterr().out
    assert "step-00000002: the data are not what they were (validation " in said
    assert f"{tmp_path}: 2 steps are done, and train.stop_after = 1: nothing is left to train" in said
    assert logged_steps(tmp_path) == [1, 2]
    folder = tmp_path / "checkpoints" / store.name_of(2)
    assert "goes on with" not in said
    more = {"train__global_batch": 4, "optimizer__lr": 0.01, "precision__param": "bfloat16"}
    _trainer(tmp_path, train__stop_after=2, train__micro_batch=1, **more)
    assert (
        f"{folder}: goes on with train.global_batch = 4 (was 2), optimizer.lr = 0.01 (was 0.003),"
        ' precision.param = "bfloat16" (was "float32")\n'
    ) in capsys.readouterr().out


def test_what_is_sent_is_part_of_training(tmp_path: Path) -> None:
    """Codes of messages and stale weights change what is trained; checks and meshes do not."""
    (tmp_path / "config.toml").write_text(dump(_config(tmp_path)))
    same = {"comm__check_state": True, "comm__timeout": 5, "parallel__pp_schedule": "GPipe"}
    assert changes(tmp_path, _config(tmp_path, **same)) == []
    config = _config(tmp_path)
    compressed = dataclasses.replace(config.comm, gradients="powersgd", rank=2)
    assert changes(tmp_path, dataclasses.replace(config, comm=compressed)) == [
        'comm.gradients = "powersgd" (was "off")',
        "comm.rank = 2 (was 4)",
    ]
    stale = dataclasses.replace(config.parallel, pp_schedule="PipeDream")
    assert changes(tmp_path, dataclasses.replace(config, parallel=stale)) == [
        'parallel.pp_schedule = "PipeDream" (was "1F1B")'
    ]


def test_a_run_that_never_saved_is_not_written_over(alone: None, tmp_path: Path) -> None:
    """It cannot go on, so checkpoint.interval on the next command does not begin it anew."""
    _trainer(tmp_path, checkpoint__interval=0, train__steps=2).run()
    before = logged_steps(tmp_path)
    problem = f"run.dir: {tmp_path} already holds config.toml of a run, and no checkpoint"
    assert _run_dir(_config(tmp_path)) == [f"{problem}; choose another folder"]
    assert logged_steps(tmp_path) == before == [1, 2]
    text = (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(text.replace("memory = 0", "memory = 1"))
    assert _run_dir(_config(tmp_path)) == []  # killed before its first copy
    (tmp_path / "config.toml").write_text(text)
    (tmp_path / "metrics.jsonl").write_text("")
    assert _run_dir(_config(tmp_path)) == []  # failed before its first step
    (tmp_path / "metrics.jsonl").unlink()
    assert _run_dir(_config(tmp_path)) == []  # killed before it opened its metrics
    (tmp_path / ".lock").unlink()
    assert _run_dir(_config(tmp_path)) == [f"{problem}; choose another folder"]


def test_a_persons_own_files_are_not_written_over(tmp_path: Path) -> None:
    """Only both files of a run that died before its first checkpoint let it begin again."""
    config, own, log = _config(tmp_path), tmp_path / "config.toml", tmp_path / "metrics.jsonl"
    refused = "run.dir: {} already holds {} of a run, and no checkpoint; choose another folder"
    own.write_text("[checkpoint]\ninterval = 100\n")
    assert _run_dir(config) == [refused.format(tmp_path, "config.toml")]
    log.write_text('{"loss": 1.0}\n')
    for text in ("[train]\nsteps = 5\n", "my notes", "checkpoint = 5"):
        own.write_text(text)
        assert _run_dir(config) == [refused.format(tmp_path, "config.toml")]
    own.unlink()
    assert _run_dir(config) == [refused.format(tmp_path, "metrics.jsonl")]
    own.write_text(dump(config))
    assert _run_dir(config) == []


def test_a_folder_here_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    assert _unmade(folder, folder) == f"run.dir: cannot write to {folder}: Not a directory"
    staging = f"run.staging: cannot write to {folder}: Not a directory; set it to a folder here"
    assert _unmade(folder, Remote("s3://bucket/run")) == staging
    assert _unmade(tmp_path / "new", tmp_path) == ""


def test_changes_of_what_cannot_be_read(tmp_path: Path) -> None:
    config = _config(tmp_path)
    assert changes(tmp_path, config) == []
    for text in ("train = 5", "\x00", "[train]\nlr = [[", dump(config)):
        (tmp_path / "config.toml").write_text(text)
        assert changes(tmp_path, config) == []
    down = StoreError(5, "down", "config.toml")
    with mock.patch.object(Remote, "open", side_effect=down):  # then nobody knows what has changed
        place = as_path(f"file://{tmp_path}")
        assert refusal(changes, place, config) == refusal(workers_of, place) == "config.toml: down"


LINKS = [".lock", "config.toml", "metrics.jsonl", ".saved", "checkpoints", "traces", "tokenizer"]


@pytest.mark.parametrize("name", LINKS)
def test_a_link_in_a_runs_folder(alone: None, tmp_path: Path, name: str) -> None:
    """Could lead anywhere: refused, and nothing is written there."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.write_text("mine")
    (run / name).symlink_to(outside)
    words = [f"run.dir: {run / name} is a symbolic link; a run writes within run.dir"]
    assert [refusal(RunFolder, str(run))] == _run_dir(_config(run)) == words
    assert outside.read_text() == "mine"
    (run / name).unlink()
    wrong = run / name
    wrong.write_text("") if name in LINKS[-3:] else wrong.mkdir()
    kind = "folder" if name in LINKS[-3:] else "file"
    assert _run_dir(_config(run)) == [f"run.dir: {wrong} is not a {kind}; move it away"]


def test_a_link_in_place_of_an_islands_folder(alone: None, tmp_path: Path) -> None:
    """Refused before the start, and by the island, which may be on another machine."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / "islands").mkdir(parents=True)
    outside.mkdir()
    (run / "islands/1").symlink_to(outside)
    words = [f"run.dir: {run}/islands/1 is no folder of an island; move it away"]
    assert _run_dir(_config(run)) == words
    island = mock.Mock(index=1, count=2, everyone=lambda *_: [str(run), ""])
    assert [refusal(RunFolder, str(run), worker=island)] == words
    (run / "islands/1").unlink()
    (run / "islands/1").mkdir()
    (run / "islands/1/checkpoints").symlink_to(outside)
    link = f"run.dir: {run}/islands/1/checkpoints is a symbolic link; a run writes within run.dir"
    assert _run_dir(_config(run)) == [link]
    (run / "islands/1/checkpoints").unlink()
    RunFolder(str(run), worker=island).release()
    assert list(outside.iterdir()) == []
    assert (run / "islands/1/.lock").is_file()


@pytest.mark.parametrize("link", ["offload", "offload/island-1"])
def test_the_offload_of_an_island_stays_in_the_run(tmp_path: Path, link: str) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / link).parent.mkdir(parents=True, exist_ok=True)
    outside.mkdir()
    (run / link).symlink_to(outside)
    assert refusal(_scratch, _config(run), None, "island-1") == (
        f"optimizer.offload_dir: {run / link} is a link; give optimizer.offload_dir = where it leads"
    )


@pytest.mark.parametrize(
    ("links", "keys"),
    [
        # A file of this name becomes config.toml or metrics.jsonl once it is whole.
        ([".config.toml.new"], {}),
        ([".metrics.jsonl.new"], {}),
        (
            [f"traces/step1-1_rank0{end}" for end in (".json", ".json.gz", "_memory.pickle")],
            {"profile__steps": "[1, 1]", "profile__memory": True},
        ),
    ],
    ids=["config", "metrics", "traces"],
)
def test_a_link_in_place_of_a_file_is_replaced(
    alone: None, tmp_path: Path, links: list[str], keys: dict[str, object]
) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    outside.write_text("mine")
    for link in links:
        (run / link).parent.mkdir(parents=True, exist_ok=True)
        (run / link).symlink_to(outside)
    _trainer(run, train__stop_after=1, checkpoint__interval=0, **keys).run()
    assert outside.read_text() == "mine"
    assert not any(path.is_symlink() for path in run.rglob("*"))


def test_what_is_not_ours_stays(alone: None, tmp_path: Path) -> None:
    """Folders may have a name like one of ours; convert has no such name at all."""
    root = tmp_path / "run/checkpoints"
    for name in (".writing-mine", ".deleting-step-1", ".writing-step-00000002"):
        (root / name).mkdir(parents=True)
    store.clean(root)
    assert sorted(path.name for path in root.iterdir()) == [".deleting-step-1", ".writing-mine"]
    _trainer(tmp_path / "run", train__stop_after=2).run()
    (tmp_path / ".writing-out").mkdir()
    (tmp_path / ".writing-out/mine").write_text("mine")
    export(root / store.name_of(2), tmp_path / "out")
    assert (tmp_path / "out/config.json").exists()
    assert (tmp_path / ".writing-out/mine").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writing-out", "out", "run"]


def test_the_newest_whole_checkpoint_is_spared(tmp_path: Path) -> None:
    """And the one before it, though damaged ones are newer, and more than are kept."""
    for step in (2, 4, 6, 8, 10, 12):
        folder = tmp_path / store.name_of(step)
        folder.mkdir()
        (folder / store.MANIFEST).write_text("")
    store.prune(tmp_path / store.name_of(6), keep_last=2, keep_every=0)
    assert [store.step_of(each) for each in store.newest_first(tmp_path)] == [12, 10, 8, 6, 4]


def test_what_is_published_is_on_the_device_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file, the manifest and the folder before it has its name, and then the folder's own."""
    done: list[str] = []
    flush, rename = os.fsync, Path.rename

    def flushed(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        flush(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        done.append("renamed")
        return rename(path, target)

    folder = store.begin(tmp_path, 2)
    (folder / "a").write_text("a")
    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", renamed)
    store.publish(folder, store.manifest_entries(folder.iterdir()))
    before, after = done[: done.index("renamed")], done[done.index("renamed") + 1 :]
    assert {str(folder / "a"), str(folder / store.MANIFEST), str(folder)} <= set(before)
    assert before[0] == str(folder / f".{store.MANIFEST}.new"), "before it is a manifest"
    assert after == [str(tmp_path)]


def test_metrics_are_on_the_device_before_a_checkpoint(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that loses its power must not lose lines of steps that are not taken again."""
    done: list[str] = []
    flush, publish = os.fsync, store.publish
    monkeypatch.setattr(
        os,
        "fsync",
        lambda number: (done.append(os.readlink(f"/proc/self/fd/{number}")), flush(number)),
    )
    monkeypatch.setattr(store, "publish", lambda *a, **k: (done.append("published"), publish(*a, **k)))
    _trainer(tmp_path, train__stop_after=2).run()
    assert str(tmp_path / "metrics.jsonl") in done[: done.index("published")]


@pytest.mark.parametrize(
    ("last", "line"),
    [
        (4, "step 3: a rank was too late in a save, and no save can follow: start again, to go on"),
        (2, "the checkpoint of step 2, the last, could not be saved: start again, to go on"),
    ],
)
def test_a_save_after_which_none_can_follow(alone: None, tmp_path: Path, last: int, line: str) -> None:
    """Ranks that have waited for too long for another one meet no more in gloo's group."""
    trainer = _trainer(tmp_path, checkpoint__async=False, train__stop_after=last)
    late = RuntimeError("Application timeout caused pair closure")
    broken = mock.patch.object(checkpointer_module, "gathered_objects", side_effect=late)
    with broken, pytest.raises(TrainingError) as caught:
        trainer.run()
    assert str(caught.value) == line


def test_a_lock_of_another_node_is_waited_for(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file server keeps the lock of a node that is lost, for a while. One of this node is real."""
    monkeypatch.setattr(run_folder, "_LOOK", 0.01, raising=False)
    monkeypatch.setattr(run_folder, "_LEASE", 5.0, raising=False)
    lock = tmp_path / ".lock"
    for holder, waits in (("process 7 on lost", True), (f"process 7 on {os.uname().nodename}", False)):
        lock.write_text(f"{holder}\n")
        held = lock.open()
        fcntl.flock(held, fcntl.LOCK_EX)
        line = f"run.dir: {tmp_path} is in use by another run ({holder})"
        if not waits:
            assert refusal(RunFolder, str(tmp_path)) == line
            continue
        timer = threading.Timer(0.3, held.close)
        timer.start()
        RunFolder(str(tmp_path)).release()
        timer.join()
        assert capsys.readouterr().out == f"{line}; waits for 5 s, in case that node is lost\n"
        assert lock.read_text() == f"process {os.getpid()} on {os.uname().nodename}\n"
    held.close()


def test_a_lock_on_a_full_disk(alone: None, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        said = refusal(RunFolder, str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said == f"run.dir: cannot write to {tmp_path}: .lock: {os.strerror(errno.EFBIG)}"


@pytest.mark.parametrize("quick", [{}, {"precision__param": "bfloat16"}, {"compile__mode": "block"}])
def test_a_slow_start_on_a_gpu_is_said(
    alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], quick: dict[str, str]
) -> None:
    """In float32 and without a compiler, as train.toml is made for a laptop."""
    job = _job(tmp_path, **quick)
    config, on_gpu = job.config, mock.Mock(mesh=mock.Mock(device_type="cuda"))
    on_gpu.float8.recipe = "off"
    batches = training_batches(config, open_data(config))
    with (
        contextlib.closing(
            RunReport(job, RunFolder(str(tmp_path), False), batches, 0, Worker())
        ) as report,
        mock.patch("compose.train.run_folder.overview", return_value={}),
    ):
        report.begin(job, on_gpu, None)
    said = (
        'this GPU is faster with precision.param = "bfloat16" and compile.mode = "block"'
        " (recipes/llama_one_gpu.toml)\n"
    )
    assert (said in capsys.readouterr().out) == (not quick)
    assert (ROOT / "recipes/llama_one_gpu.toml").exists()


def test_a_run_begins_with_a_table(
    alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run with adapters, begun anew and gone on with."""
    text = tmp_path / "a.txt"
    text.write_bytes(b"x" * (24 * 32 + 1))
    keys = {
        "data__path": str(text),
        "train__epochs": 2,
        "train__global_batch": 8,
        "train__seq_len": 32,
        "train__stop_after": 2,
        "model__lora__rank": 2,
        "model__lora__targets": '["layers.*.attention.wq"]',
    }
    for adapters in ("drawn by train.seed 0", "of the checkpoint of step 2"):
        _trainer(tmp_path / "run", **keys).run()
        rows = [line[2:] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
        assert rows == [
            f"weights     drawn by train.seed 0; adapters {adapters}",
            "parameters  9,872, of which 64 are trained (0.65%)",
            f"samples     24 of 32 tokens ({text} 24)",
            "packing     windows of one row of tokens",
            "tokens      512, 256 in a step",
            "epochs      0.6667",
            "steps       2 of 6",
            "mesh        1 rank: zero 3",
            "device      cpu",
            # 4 bytes of each weight, 12 more of each that is trained.
            f"memory      {(4 * 9872 + 12 * 64) / 2**30:.3g} GiB of weights, gradients and optimizer on"
            " the first rank; python -m compose plan tells activations too",
        ]
    keys |= {"train__global_batch": 4, "train__stop_after": 3}
    assert refusal(_trainer, tmp_path / "run", **keys) == (
        "train.epochs: 2 is not 12 steps: the 2 before had 16 samples, with another train.global_batch"
        " than 4; use that again, or train.steps = 10"
    )
    del keys["train__epochs"]
    capsys.readouterr()
    _trainer(tmp_path / "run", **keys, train__steps=10).run()
    said = capsys.readouterr().out
    assert "  tokens      640, 128 in a step\n  epochs      0.8333\n  steps       3 of 10\n" in said


class OnGpu(Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def test_what_comes_from_a_gpu_is_staged_in_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is pinned once, used again, and unpinned at its end. A save waits once."""
    pinned, unpinned, stream = dict[int, int](), list[int](), mock.Mock()
    cuda = mock.Mock()
    cuda.cudaHostRegister = lambda address, size, flags: pinned.update({address: size})
    cuda.cudaHostUnregister = unpinned.append
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)

    def shards(value: float) -> dict[str, LocalShard]:
        values = {"a": torch.full((3, 2), value), "b": torch.full((4,), value), "none": torch.empty(0)}
        nowhere = torch.Size((0,))
        return {n: LocalShard(v.shape, nowhere, v.as_subclass(OnGpu)) for n, v in values.items()}

    copy = staged(shards(1.0))
    addresses = {copy[name].local.data_ptr(): copy[name].local.nbytes for name in ("a", "b")}
    copy = staged(shards(2.0), copy)
    assert [copy[name].local.sum().item() for name in ("a", "b")] == [12, 8]
    assert pinned == addresses
    assert stream.synchronize.call_count == 2
    assert not unpinned
    del copy
    assert sorted(unpinned) == sorted(addresses)


def test_what_is_staged_is_a_copy(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of the saved step is written, whatever training does meanwhile."""
    one = {"a": LocalShard(torch.Size((2,)), torch.Size((0,)), torch.ones(2))}
    copy = staged(one)
    again = staged({"a": LocalShard(torch.Size((2,)), torch.Size((0,)), torch.full((2,), 3.0))}, copy)
    one["a"].local.fill_(2)
    assert again["a"].local.tolist() == [3, 3]
    job = _job(tmp_path)
    composition = build(job, make_mesh(job.degrees), CPU)
    optimizer = build_optimizer(composition, job)
    checkpointer = Checkpointer(job.config, composition, optimizer, tmp_path)
    trained, write = threading.Event(), Checkpointer._write

    def later(self: Checkpointer, *arguments: Any) -> None:
        trained.wait(60)
        write(self, *arguments)

    monkeypatch.setattr(Checkpointer, "_write", later)
    before = {n: copies[0].clone() for n, copies in named_tensors(composition, optimizer).items()}
    checkpointer.save(Progress(2, 4, 64))
    with torch.no_grad():
        for parameter in composition.model.parameters():
            parameter.fill_(7)
    trained.set()
    checkpointer.wait()
    assert checkpointer.resume() == Progress(2, 4, 64)
    for name, copies in named_tensors(composition, None).items():
        assert torch.equal(copies[0], before[name]), name


def test_a_frozen_weight_is_kept(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter of a model of one's own that is not trained comes back; one that is not there is
    named."""
    job, name = _job(tmp_path), "layers.0.attention.wq.weight"
    job.model.get_parameter(name).requires_grad_(False)

    def checkpointer(composition: Composition) -> Checkpointer:
        return Checkpointer(job.config, composition, build_optimizer(composition, job), tmp_path)

    mesh = make_mesh(job.degrees)
    composition = build(job, mesh, CPU)
    checkpointer(composition).save(Progress(2, 4, 64), wait=True)
    again = parallelize_without_weights(job, mesh, CPU)
    checkpointer(again).resume()
    before = dict(composition.named_parameters())
    assert not before[name].requires_grad
    for which, parameter in again.named_parameters():
        assert torch.equal(parameter, before[which]), which
    without = functools.partial(named_tensors, adapters=True)
    monkeypatch.setattr(checkpointer_module, "named_tensors", lambda *args: without(*args[:2]))
    checkpointer(composition).save(Progress(4, 8, 128), wait=True)
    assert refusal(checkpointer(again).resume) == (
        f"{tmp_path / 'checkpoints/step-00000004'}: has no model.{name}, a frozen weight, which older"
        " versions did not save; begin anew in another run.dir"
    )


def _stepped(folder: Path, without: str = "", **keys: object) -> Checkpointer:
    """The checkpointer of a model after one step, in which a parameter had no gradient."""
    job = _job(folder, **keys)
    composition = build(job, make_mesh(job.degrees), CPU)
    optimizer = build_optimizer(composition, job)
    for name, parameter in composition.named_parameters():
        parameter.grad = None if name == without else torch.ones_like(parameter)
    optimizer.step()
    return Checkpointer(job.config, composition, optimizer, folder)


def test_only_state_in_files_is_not_staged(alone: None, tmp_path: Path) -> None:
    """On a GPU the counts of steps are on the device, and are written from their copies too."""
    checkpointer = _stepped(tmp_path, optimizer__offload="nvme")
    checkpointer.save(Progress(1, 2, 32), wait=True)
    assert checkpointer.report
    assert checkpointer.report.problem == ""
    assert checkpointer.stage
    kept = [name for name in checkpointer.stage if name.startswith("optimizer.")]
    assert kept == [f"optimizer.{n}.step" for n, _ in checkpointer.composition.named_parameters()]


def test_a_parameter_without_a_gradient_so_far(alone: None, tmp_path: Path) -> None:
    """Has no state, also after a restart; that of another optimizer is refused all the same."""
    name = "layers.0.attention.wq.weight"
    before = _stepped(tmp_path, without=name)
    before.save(Progress(1, 2, 32), wait=True)
    job = _job(tmp_path)
    composition = build(job, make_mesh(job.degrees), CPU)
    optimizer = build_optimizer(composition, job)
    assert Checkpointer(job.config, composition, optimizer, tmp_path).resume() == Progress(1, 2, 32)
    expected = named_tensors(before.composition, before.optimizer)
    found = named_tensors(composition, optimizer)
    assert found.keys() == expected.keys()
    assert f"optimizer.{name}.step" not in found
    for key, copies in expected.items():
        assert torch.equal(found[key][0], copies[0]), key
    other = _job(tmp_path, optimizer__name="muon")
    muon = build_optimizer(composition, other)
    assert "go on with the optimizer.name and muon_except that it was made with" in refusal(
        Checkpointer(other.config, composition, muon, tmp_path).resume
    )


def test_a_warning_in_the_last_save(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Does not end the run before it is published."""
    publish = Checkpointer._publish

    def warned(self: Checkpointer, *arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return publish(self, *arguments)

    def died(*unused: object) -> None:
        raise AssertionError("SIGTERM would have ended the process")

    monkeypatch.setattr(Checkpointer, "_publish", warned)
    before = signal.signal(signal.SIGTERM, died)
    try:
        _trainer(tmp_path, train__stop_after=2).run()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert store.problems(tmp_path / "checkpoints" / store.name_of(2)) == []


def _opened(folders: list[Path], saves: bool) -> str:
    """Open a folder of the same name in each rank's own place; what is said."""
    os.chdir(folders[dist.get_rank()])
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            return refusal(lambda: RunFolder("run", saves).release()) or said.getvalue()
    finally:
        os.chdir(ROOT)


def test_a_folder_that_not_all_ranks_see(pool: Pool, tmp_path: Path) -> None:
    """Nodes may share no file system: a run that saves is refused, another says it."""
    here, there = tmp_path / "here", tmp_path / "there"
    for each in (here, there):
        (each / "run").mkdir(parents=True)
    assert pool.run(_opened, 2, [here, here], True) == ["", ""]
    line = (
        "run.dir: run is not the same folder on all nodes: rank 1 on"
        f" {os.uname().nodename} has another; "
    )
    cure = "give one that all share, or set checkpoint.interval = 0"
    assert pool.run(_opened, 2, [here, there], True) == [line + cure] * 2
    assert pool.run(_opened, 2, [here, there], False) == [f"{line}nothing can be saved there\n", ""]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".lock"]


def _trained(folders: list[Path], interval: int) -> str:
    os.chdir(folders[dist.get_rank()])
    more = {"checkpoint__interval": interval, "parallel__dp_shard": 2, "train__micro_batch": 1}
    keys = _keys(Path("run"), **more)
    try:
        return refusal(lambda: trainer_of(keys).run_folder.release())
    finally:
        os.chdir(ROOT)


def test_a_run_that_saves_needs_a_folder_that_all_ranks_see(pool: Pool, tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    folders = [tmp_path / "here", tmp_path / "there"]
    for result in pool.run(_trained, 2, folders, 1):
        assert result.startswith("run.dir: run is not the same folder on all nodes: rank 1 on ")
    assert pool.run(_trained, 2, folders, 0) == ["", ""]
