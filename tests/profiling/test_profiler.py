"""Runs with some steps profiled: what is left of them, and that nothing else changes."""

import contextlib
import gzip
import io
import json
import pickle
import resource
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda._memory_viz import trace as listed
from torch.profiler import record_function

from compose.config import rules
from compose.data.batches import Batches
from compose.data.datasets import open_data, with_steps
from compose.ops.tensors import local_tensor
from compose.profiling.profiler import Recording
from compose.profiling.summary import CATEGORIES, KINDS
from compose.profiling.trace import Trace
from compose.train.processes import TrainingError
from compose.train.trainer import Trainer
from tests.support.helpers import Keys, keys_in, make_config, make_job, ranks_in, refusal, tier
from tests.support.pool import Pool
from tests.support.training import keys_for, lines, signalled, trainer_of


def _trainer(keys: Keys) -> Trainer:
    return trainer_of({"train__global_batch": 4} | keys)


def _train(keys: dict[str, Any], slow: int = -1) -> list[Tensor]:
    """This rank's part of the weights after training; on rank ``slow`` data takes long to make, but for
    the first step's."""
    make, before = Batches.batch, dist.Work.wait

    def batch(self: Batches, first: int) -> dict[str, Tensor]:
        time.sleep(6.0 * (dist.get_rank() == slow and first > 0))  # longer than others' work delays it
        return make(self, first)

    trainer = _trainer(keys)
    with mock.patch.object(Batches, "batch", batch):
        trainer.run()
    assert dist.Work.wait is before
    return [local_tensor(p).detach().clone() for p in trainer.composition.model.parameters()]


def _printed(keys: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        _train(keys)
    return printed.getvalue()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "traces").iterdir())


def summary(folder: Path, steps: str) -> dict[str, Any]:
    return json.loads((folder / "traces" / f"step{steps}_summary.json").read_text())


def test_files_and_a_run_as_without(pool: Pool, tmp_path: Path) -> None:
    """On two ranks, of which the second is profiled in steps 2 and 3 of 4."""
    keys = {"train__steps": 4, "parallel__dp_shard": 2}
    chosen = {"profile__steps": [2, 3], "profile__ranks": [1], "profile__memory": True}
    plain = pool.run(_train, 2, keys_for(tmp_path / "plain", **keys))
    profiled = pool.run(_train, 2, keys_for(tmp_path / "profiled", **keys, **chosen))
    assert not (tmp_path / "plain" / "traces").exists()
    folder = tmp_path / "profiled"
    assert files(folder) == [
        "step2-3_rank1.json.gz",
        "step2-3_rank1_memory.pickle",
        "step2-3_summary.json",
    ]
    for one, other in zip(plain, profiled, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for a, b in zip(lines(tmp_path / "plain"), lines(folder), strict=True):
        varies = ("tokens_per_second", "memory")
        assert {k: v for k, v in a.items() if k not in varies} == {
            k: v for k, v in b.items() if k not in varies
        }

    with gzip.open(folder / "traces" / "step2-3_rank1.json.gz") as file:
        content = json.load(file)
    trace = Trace(content)
    assert trace.steps == [2, 3]
    results = summary(folder, "2-3")
    assert (results["steps"], len(results["ranks"])) == ([2, 3], 1)
    result = results["ranks"][0]
    assert result["rank"] == 1
    assert list(result["time"]) == list(KINDS)
    assert sum(result["time"].values()) == pytest.approx(1)
    assert min(result["time"].values()) >= 0
    assert all(result["time"][kind] > 0 for kind in KINDS)
    assert 2e6 * result["seconds_per_step"] == pytest.approx(trace.end - trace.start)

    # A vocabulary of 257: FSDP fills the second rank's part up to the first one's.
    memory, (filled, size) = result["memory"], (4 * sum(p.numel() for p in w) for w in profiled)
    assert memory["most"]["weights"] == filled
    assert filled <= memory["most"]["gradients"] < filled + size
    assert memory["most"]["optimizer"] == 2 * size + 4 * len(profiled[1])  # its counts of steps
    assert list(memory["at_peak"]) == list(memory["most"]) == list(CATEGORIES)
    assert sum(memory["at_peak"].values()) == memory["peak"]
    # Events alone show this.
    live = most = 0
    for event in sorted(content["traceEvents"], key=lambda event: event.get("ts", 0)):
        if event["name"] == "[memory]":
            live += event["args"]["Bytes"]
            most = max(most, live)
    kept = memory["most"]["weights"] + memory["most"]["optimizer"]
    buffers = memory["peak"] - kept - most
    assert 0 <= buffers < 2**15  # cosines and sines
    # The forward of 2 samples leaves at least this behind in two layers.
    assert memory["most"]["activations"] > 2 * (2 * 32) * 4 * (8 * 64 + 4 * 96)
    assert memory["most"]["communication"] > 0

    snapshot = pickle.loads((folder / "traces" / "step2-3_rank1_memory.pickle").read_bytes())
    assert "del " in listed(snapshot)
    events = snapshot["device_traces"][0]
    assert {e["category"] for e in events} == {*CATEGORIES, "unknown"} - {"other"}
    assert any("aten::mm" in [f["name"] for f in e["frames"]] for e in events)


def test_gradients_that_are_not_reduced_yet(pool: Pool, tmp_path: Path) -> None:
    """With ZeRO-1 those of the first micro-batches are whole; with ZeRO-3 none is for long."""
    keys = {
        "train__steps": 2,
        "train__global_batch": 8,
        "parallel__dp_shard": 2,
        "profile__steps": [2, 2],
    }
    most = {}
    for zero in (1, 3):
        folder = tmp_path / str(zero)
        weights = pool.run(_train, 2, keys_for(folder, parallel__zero=zero, **keys))
        most[zero] = summary(folder, "2-2")["ranks"][0]["memory"]["most"]
        assert most[zero]["weights"] == 4 * sum(p.numel() for p in weights[0])
    whole = 4 * sum(p.numel() for part in weights for p in part)
    assert whole <= most[1]["gradients"] < 1.6 * whole
    assert most[3]["gradients"] < whole


def test_recomputation_shows_in_activations(pool: Pool, tmp_path: Path) -> None:
    results = {}
    for mode in ("none", "full"):
        chosen = {"train__steps": 1, "profile__steps": [1, 1], "activation_checkpoint__mode": mode}
        pool.run(_train, 1, keys_for(tmp_path / mode, model__n_layers=6, **chosen))
        results[mode] = summary(tmp_path / mode, "1-1")["ranks"][0]["memory"]["most"]
    assert results["full"]["activations"] < 0.6 * results["none"]["activations"]
    assert results["full"]["gradients"] == results["none"]["gradients"] == results["none"]["weights"]
    # Made within the range.
    assert results["full"]["optimizer"] > 2 * results["full"]["weights"]


def test_a_model_of_wide_products(pool: Pool, tmp_path: Path) -> None:
    keys = {"model__n_layers": 1, "model__dim": 256, "model__hidden_dim": 4096, "train__steps": 2}
    pool.run(_train, 1, keys_for(tmp_path, profile__steps=[2, 2], **keys))
    shares = summary(tmp_path, "2-2")["ranks"][0]["time"]
    assert shares["matmul"] > 0
    assert shares["communication"] == 0


@pytest.mark.slow
def test_a_slow_rank_and_who_waits_for_it(pool: Pool, tmp_path: Path) -> None:
    chosen = {"train__steps": 2, "profile__steps": [2, 2], "profile__ranks": []}
    pool.run(_train, 2, keys_for(tmp_path, parallel__dp_shard=2, **chosen), 1)
    waits, slow = (result["time"] for result in summary(tmp_path, "2-2")["ranks"])
    assert max(slow, key=slow.__getitem__) == "data"
    assert max(waits, key=waits.__getitem__) == "communication"
    assert slow["communication"] < waits["communication"]


MIXED = {
    "pp x tp": "pp=2 tp=2 pp_schedule=ZBVZeroBubble model.n_layers=4 train.global_batch=8",
    "ring, compiled": "cp=2 compile.mode=block compile.backend=aot_eager",
    "muon, zero 2": "zero=2 dp_shard=2 optimizer.name=muon",
    "float8": "dp_shard=2 precision.float8=tensorwise model.dim=128 model.hidden_dim=192",
}


def _train_mixed(keys: dict[str, Any]) -> int:
    return sum(w.numel() for w in _train(keys))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=tier(n in ("ring, compiled", "float8"), full=n == "pp x tp"))
        for n in MIXED
    ],
)
def test_on_meshes(pool: Pool, tmp_path: Path, name: str) -> None:
    keys = keys_in(f"train.steps=2 profile.steps=[1,2] profile.ranks=[] {MIXED[name]}")
    ranks = ranks_in(keys)
    weights = pool.run(_train_mixed, ranks, keys_for(tmp_path, **keys))
    results = summary(tmp_path, "1-2")["ranks"]
    assert [result["rank"] for result in results] == list(range(ranks))
    for result, size in zip(results, weights, strict=True):
        assert sum(result["time"].values()) == pytest.approx(1)
        assert min(result["time"][kind] for kind in ("matmul", "attention", "communication")) > 0
        assert 4 * size <= result["memory"]["most"]["weights"] < 4.1 * size  # FSDP fills parts up
        assert result["memory"]["most"]["gradients"] >= 4 * size
        assert result["memory"]["most"]["communication"] > 0


def _stopped(keys: dict[str, Any]) -> None:
    """Train, and be asked to stop in the third step."""
    with signalled(signal.SIGTERM):
        _train(keys)


@pytest.mark.slow
def test_a_run_that_ends_or_begins_within_the_steps(pool: Pool, tmp_path: Path) -> None:
    keys = keys_for(tmp_path, train__steps=5, checkpoint__interval=2)
    pool.run(_stopped, 1, {**keys, "profile__steps": [2, 4]})
    assert files(tmp_path) == ["step2-3_rank0.json.gz", "step2-3_summary.json"]
    pool.run(_train, 1, {**keys, "profile__steps": [2, 4]})
    assert files(tmp_path)[2:] == ["step4-4_rank0.json.gz", "step4-4_summary.json"]
    assert summary(tmp_path, "4-4")["steps"] == [4, 4]
    (tmp_path / "traces").rename(tmp_path / "before")
    printed = pool.run(_printed, 1, {**keys, "train__steps": 6, "profile__steps": [2, 4]})[0]
    assert "profile.steps: [2, 4] are over: the run goes on after step 5\n" in printed
    assert not (tmp_path / "traces").exists()


def _fails(keys: dict[str, Any]) -> str:
    """Train until a step fails."""
    with mock.patch.object(Trainer, "_may_be_taken", side_effect=TrainingError("no")):
        try:
            _train(keys)
        except TrainingError as error:
            assert not (Path(keys["run__dir"]) / "traces").exists()
            assert not torch.autograd._profiler_enabled()
            return str(error)
    return ""


@pytest.mark.parametrize("steps", [[1, 3], [2, 3]], ids=["recording", "prepared"])
def test_a_failed_step_ends_the_profile(pool: Pool, tmp_path: Path, steps: list[int]) -> None:
    keys = {"train__steps": 3, "profile__steps": steps, "parallel__dp_shard": 2}
    assert pool.run(_fails, 2, keys_for(tmp_path / "fails", **keys)) == ["no"] * 2
    pool.run(_train, 2, keys_for(tmp_path / "again", **keys))
    assert files(tmp_path / "again")[0] == f"step{steps[0]}-3_rank0.json.gz"


def _printed_without_a_folder(keys: dict[str, Any], folder: Path) -> str:
    """The same, where something comes into the place of the traces once the run has begun."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer = _trainer(keys)
        (folder / "traces").touch()
        trainer.run()
    return printed.getvalue()


def test_what_cannot_be_written_ends_no_run(pool: Pool, tmp_path: Path) -> None:
    keys = keys_for(tmp_path, train__steps=3, profile__steps=[2, 2])
    printed = pool.run(_printed_without_a_folder, 1, keys, tmp_path)[0]
    assert f"rank 0: not written: [Errno 17] File exists: '{tmp_path}/traces'\n" in printed
    assert len(lines(tmp_path)) == 3


def _printed_with_a_broken_trace(keys: dict[str, Any], fault: str) -> str:
    """The same of the run's second start, where Kineto's trace is no JSON, or has no room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    write, begin = Recording.write, Recording.start

    def small(self: Recording, path: Path) -> dict[str, Any]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            return write(self, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def named(self: Recording) -> None:
        begin(self)
        with record_function('a "name"'):
            pass

    where, other = ("write", small) if fault == "no room" else ("start", named)
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        mock.patch.object(Recording, where, other),
    ):
        _trainer(keys).run()
    return printed.getvalue()


@pytest.mark.parametrize("fault", ["no room", "no JSON"])
def test_a_trace_that_is_not_whole_ends_no_run(pool: Pool, tmp_path: Path, fault: str) -> None:
    """No part of it stays, and none of an earlier one; other ranks do not wait."""
    keys = keys_for(tmp_path, train__steps=3, profile__steps=[2, 2], profile__ranks=[0])
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces/step2-2_rank0.json.tmp").touch()
    said = pool.run(_printed_with_a_broken_trace, 2, keys, fault)[0]
    no_room = (
        f"{tmp_path}/traces/step2-2_rank0.json: the trace could not be written; the disk may be full"
    )
    no_json = "the trace is no JSON, which a range's name may cause: Expecting"
    line = next(line for line in said.splitlines() if "not written" in line)
    assert line.startswith(f"  rank 0: not written: {no_room if fault == 'no room' else no_json}")
    assert files(tmp_path) == ["step2-2_summary.json"]
    assert len(lines(tmp_path)) == 3


REFUSED = {
    "profile.steps=[5,3]": "steps: [5, 3] ends before it begins; nearest: [3, 5]",
    "profile.steps=[3,900]": "steps: [3, 900] goes beyond the run's last step, 250; nearest: [3, 250]",
    "profile.steps=[30,40] train.stop_after=20": "steps: [30, 40] goes beyond the run's last step, 20;"
    " nearest: [20, 20]",
    "profile.steps=[0,2]": "steps: [0, 2] begins before the first step, 1; nearest: [1, 2]",
    "profile.steps=[0,900]": "steps: [0, 900] begins before the first step, 1; nearest: [1, 250]",
    "profile.steps=[5,0]": "steps: [5, 0] ends before it begins; nearest: [1, 5]",
    "profile.steps=[4]": "steps: [4] should be a first and a last step; nearest: [4, 4]",
    "profile.steps=[1,2] profile.ranks=[0,2]": "ranks: 2 is none of the 2 ranks; nearest: 1",
    "profile.memory=true": "memory: true is never read; set profile.steps too",
    "profile.ranks=[1]": "ranks: [1] is never read; set profile.steps too",
}


@pytest.mark.parametrize("line", REFUSED)
def test_refused(line: str) -> None:
    assert refusal(make_job, 2, **keys_in(line)) == f"profile.{REFUSED[line]}"


def test_the_last_step_of_epochs_is_known_with_the_data() -> None:
    """A plan reads none; a run does, and refuses what goes beyond."""
    planned = make_config(1, **keys_in("profile.steps=[3,900] train.epochs=0.001"))
    trained = with_steps(planned, open_data(planned))
    end = trained.train.steps
    assert refusal(rules.check, trained, 1) == (
        f"profile.steps: [3, 900] goes beyond the run's last step, {end}; nearest: [3, {end}]"
    )
