"""Runs on islands: what they leave, and how they go on."""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from compose.checkpoint import store
from compose.checkpoint.checkpointer import Checkpointer, SaveReport
from compose.config.tables import Checkpoint, Config
from compose.object_storage import as_path
from compose.proof.comparison import whole
from compose.train.metrics import StepMetrics
from compose.train.processes import TrainingError, process_group
from compose.train.trainer import Trainer
from compose.train.workers import SpareRanks, Worker, WorkerCheckpoints, this_worker
from tests.support.checkpoints import shards
from tests.support.command_lines import free_port
from tests.support.helpers import Keys, keys_in, printed, ranks_in, refusal
from tests.support.pool import Pool, forks
from tests.support.training import keys_for, lines, logged_steps, trainer_of

RUN = keys_in(
    "train.seq_len=16 train.global_batch=8 train.micro_batch=1 train.steps=10 checkpoint.interval=5"
    " outer.every=4"
)
MESHES = {"one rank": "", "zero 3": "dp_shard=2", "tp": "tp=2 dp_shard=1"}
# All are saved in the middle of a round, the first three while messages are on their way.
OUTER = {
    "streaming": keys_in("outer.fragments=1 outer.delay=1 outer.mix=0.5"),
    "top_k": keys_in("outer.dtype=top_k outer.delay=2"),
    "int8, late": keys_in("outer.dtype=int8 outer.delay=3"),
    "diloco": {},
}
DROPPED = (
    "{}: what messages kept is of another mesh, of other codes, or of an earlier version,"
    " and is dropped"
)


def trainer_on(keys: Keys, islands: int = 2) -> Trainer:
    """This rank's trainer of a run on islands."""
    trainer = trainer_of({"parallel__dp_replicate": islands, **keys})
    assert trainer.job.islands == this_worker().count == islands
    return trainer


def run(keys: Keys, islands: int = 2, broken_from: int = 0) -> list[str]:
    """Train; what is said on this rank, or why it cannot begin. Saves of the second island may fail."""
    real = store.publish

    def publish(folder: Path, files: Any, elsewhere: bool = False) -> Path:
        if broken_from and this_worker().index == 1 and int(folder.name[-8:]) >= broken_from:
            raise OSError(28, "No space left on device")
        return real(folder, files, elsewhere)

    with (
        printed() as said,
        mock.patch.object(store, "publish", publish),
    ):
        try:
            refused = refusal(lambda: trainer_on(keys, islands).run())
        except TrainingError as error:
            return [*said, str(error)]
    return refused.splitlines() or said


def steps(run_dir: Path) -> list[str]:
    """The names of a run's checkpoints, those set aside too."""
    return sorted(p.name.removeprefix("step-000000") for p in (run_dir / "checkpoints").iterdir())


def train(pool: Pool, folder: Path, keys: Keys, mesh: str = "zero 3", islands: int = 2) -> list[str]:
    degrees = keys_in(MESHES[mesh])
    whole = keys_for(folder, **RUN, **degrees) | keys
    return pool.run(run, ranks_in(degrees) * islands, whole, islands, islands=islands)[0]


def folders(run_dir: Path, islands: int = 2) -> list[Path]:
    return [run_dir, *(run_dir / "islands" / str(i) for i in range(1, islands))]


def state(run_dir: Path, step: int, islands: int = 2) -> list[dict[str, int]]:
    return [shards(one / "checkpoints" / f"step-{step:08d}") for one in folders(run_dir, islands)]


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTER)
def test_goes_on_bitwise_in_the_middle_of_a_round(pool: Pool, tmp_path: Path, name: str) -> None:
    train(pool, tmp_path / "whole", OUTER[name])
    train(pool, tmp_path / "parts", OUTER[name] | {"train__stop_after": 5})
    said = train(pool, tmp_path / "parts", OUTER[name])
    assert said[0] == f"{tmp_path / 'parts'}/checkpoints/step-00000005: resumed after step 5"
    assert state(tmp_path / "parts", 10) == state(tmp_path / "whole", 10)
    for one, other in zip(folders(tmp_path / "whole"), folders(tmp_path / "parts"), strict=True):
        right = [line["loss"] for line in lines(one)]
        assert [line["loss"] for line in lines(other)] == right
        assert len(right) == 10
    losses = [[line["loss"] for line in lines(one)] for one in folders(tmp_path / "whole")]
    assert losses[0] != losses[1]  # they do not train on the same samples


def test_all_islands_end_with_the_same_weights(pool: Pool, tmp_path: Path) -> None:
    result = pool.run(_ends, 4, keys_for(tmp_path, **RUN, **OUTER["streaming"]), islands=2)
    for weights in result[2:]:
        for name, value in result[0].items():
            assert torch.equal(weights[name], value), name


def _ends(keys: Keys) -> dict[str, torch.Tensor]:
    trainer = trainer_on({"parallel__dp_shard": 2, **keys})
    trainer.run()
    return {name: whole(p) for name, p in trainer.composition.named_parameters()}


def _stopped(keys: Keys, at: int) -> int:
    """Train on; the second island gets SIGTERM in step ``at``. The step after which this one stops."""
    trainer = trainer_on(keys)
    step = trainer.step

    def stepped() -> StepMetrics:
        if this_worker().index == 1 and trainer.progress.step == at:
            os.kill(os.getpid(), signal.SIGTERM)
        if this_worker().index == 0:
            time.sleep(0.05)  # the islands are not at the same step
        return step()

    with mock.patch.object(trainer, "step", stepped):
        trainer.run()
    return trainer.progress.step


@pytest.mark.parametrize("at", [2, 3, 5])
def test_all_islands_stop_after_the_same_step(pool: Pool, tmp_path: Path, at: int) -> None:
    keys = keys_for(tmp_path, **RUN, **OUTER["streaming"])
    stopped = pool.run(_stopped, 2, keys, at, islands=2)
    assert stopped[0] == stopped[1] <= 10
    assert stopped[0] > at
    name = f"step-{stopped[0]:08d}"
    assert all((one / "checkpoints" / name).exists() for one in folders(tmp_path))
    assert len(state(tmp_path, stopped[0])) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["streaming", "diloco"])
def test_goes_on_on_another_mesh_inside_islands(pool: Pool, tmp_path: Path, name: str) -> None:
    """Outer weights and momentum are cut anew; only messages on their way are lost."""
    train(pool, tmp_path / "whole", OUTER[name])
    train(pool, tmp_path, OUTER[name] | {"train__stop_after": 5})
    folder, lost = f"{tmp_path}/checkpoints/step-00000005", name == "streaming"
    said = train(pool, tmp_path, OUTER[name], mesh="tp")
    assert said[0] == f"{folder}: resumed after step 5"
    assert [line for line in said if "dropped" in line] == [DROPPED.format(folder)] * lost
    for one, other in zip(folders(tmp_path / "whole"), folders(tmp_path), strict=True):
        right, result = ([line["loss"] for line in lines(run)] for run in (one, other))
        assert result[:5] == right[:5]
        assert result[5] == pytest.approx(right[5], rel=1e-5 if lost else 1e-4)
        assert result[5:] == pytest.approx(right[5:], rel=0.05 if lost else 1e-4)


def _as_before_rows(folder: Path) -> None:
    """Give a checkpoint's messages the label of when fragments were cut from what ranks hold."""
    for path in folder.glob("comm-*.safetensors"):
        with safe_open(path, "pt") as file:
            label = json.loads(file.metadata()["of"])
        assert label.pop() == "rows"
        save_file(load_file(path), path, {"of": json.dumps(label)})
    files = [path for path in folder.iterdir() if path.name != store.MANIFEST]
    (folder / store.MANIFEST).write_text(json.dumps({"files": store.manifest_entries(files)}))


@pytest.mark.slow
def test_messages_of_earlier_fragments_are_dropped(pool: Pool, tmp_path: Path) -> None:
    train(pool, tmp_path, OUTER["streaming"] | {"train__stop_after": 5})
    for one in folders(tmp_path):
        _as_before_rows(one / "checkpoints" / "step-00000005")
    said = train(pool, tmp_path, OUTER["streaming"])
    assert said[1] == DROPPED.format(f"{tmp_path}/checkpoints/step-00000005")
    assert logged_steps(tmp_path) == list(range(1, 11))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(2, 4, marks=pytest.mark.slow),
        pytest.param(4, 2, marks=pytest.mark.slow),
        (1, 2),
        (2, 1),
    ],
)
def test_goes_on_with_another_number_of_islands(
    pool: Pool, tmp_path: Path, before: int, after: int
) -> None:
    """All begin with the weights of the first island, and its outer weights, if there are any."""
    alone: Keys = {"outer__every": 0}
    begun: Keys = {"train__stop_after": 5} | (alone if before == 1 else {})
    train(pool, tmp_path, begun, "zero 3", before)
    saved = state(tmp_path, 5, 1)
    said = train(pool, tmp_path, alone if after == 1 else {}, "zero 3", after)
    assert said[0] == f"{tmp_path}/checkpoints/step-00000005: resumed after step 5"
    results = [lines(one) for one in folders(tmp_path, after)]
    assert [line["step"] for line in results[0]] == list(range(1, 11))
    assert [line["step"] for line in results[-1]][-5:] == list(range(6, 11))
    assert state(tmp_path, 5, 1) == saved


def _late(keys: Keys) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train; the second island is late once. How many took part in exchanges, and the weights."""
    trainer = trainer_on({"parallel__dp_shard": 2, **keys})
    step, took_part = trainer.step, []

    def stepped() -> StepMetrics:
        if this_worker().index == 1 and trainer.progress.step == 1:
            time.sleep(4)
        metrics = step()
        if metrics.more["outer"]["bytes"] or metrics.step % 2 == 0:
            took_part.append(metrics.more["outer"]["islands"])
        return metrics

    with mock.patch.object(trainer, "step", stepped):
        trainer.run()
    return took_part, {name: whole(p) for name, p in trainer.composition.named_parameters()}


@pytest.mark.slow
def test_an_island_that_is_late_joins_the_next_exchange(pool: Pool, tmp_path: Path) -> None:
    keys = keys_for(tmp_path, **(RUN | keys_in("outer.every=2 outer.grace=1 train.steps=4")))
    result = pool.run(_late, 4, keys, islands=2)
    for took_part, weights in result:
        assert took_part == [1, 2]  # the exchange after the last step waits for all
        assert all(torch.equal(weights[name], value) for name, value in result[0][1].items())


DRIFT = keys_in("train.steps=8 outer.every=8 checkpoint.interval=2 checkpoint.keep_last=8")


def _without(run_dir: Path, *gone: int) -> None:
    for step in gone:
        shutil.rmtree(run_dir / "checkpoints" / store.name_of(step))


def test_islands_without_a_common_step_do_not_begin(pool: Pool, tmp_path: Path) -> None:
    keys = keys_for(tmp_path, **(RUN | DRIFT))
    pool.run(run, 2, keys | {"train__stop_after": 6}, islands=2)
    first, second = folders(tmp_path)
    _without(first, 2)
    _without(second, 4, 6)
    said = pool.run(run, 2, keys, islands=2)
    line = (
        f"run.dir: {tmp_path}: its islands have no checkpoint of the same step (island 0: 6, 4;"
        " island 1: 2), and none may lose what it has learned: put a folder back, or copy one into the"
        " checkpoints of all islands to go on from it alone"
    )
    assert said == [[line], [line]]
    assert (steps(first), steps(second)) == (["04", "06"], ["02"])
    whole, lacking = (one / "checkpoints" / store.name_of(4) for one in (first, second))
    shutil.copytree(whole, lacking)
    said = pool.run(run, 2, keys, islands=2)  # the cure
    root = first / "checkpoints"
    assert said[0][:2] == [
        f"{root}/step-00000004: resumed after step 4",
        f"{root}/step-00000006: other islands lack this step; kept as step-00000006.earlier-1",
    ]
    assert steps(first) == ["04", "06", "06.earlier-1", "08"]
    assert steps(second) == ["02", "04", "06", "08"]


@pytest.mark.slow
def test_islands_pass_over_what_one_has_not_sent_whole(pool: Pool, tmp_path: Path) -> None:
    """One that was killed in an upload has no such step, and all go on from the one before."""
    place, here = tmp_path / "store", tmp_path / "here"
    keys = keys_for(as_path(f"file://{place}"), run__staging=str(here), **(RUN | DRIFT))
    pool.run(run, 2, keys | {"train__stop_after": 4}, islands=2)
    first, second = (Path("checkpoints"), Path("islands/1/checkpoints"))
    (place / second / store.name_of(4) / store.MANIFEST).unlink()
    shutil.rmtree(here)  # they go on on other machines
    said = pool.run(run, 2, keys, islands=2)
    assert said[0][:2] == [
        f"file://{place}/{first}/step-00000002: resumed after step 2",
        f"file://{place}/{first}/step-00000004: other islands lack this step; kept as"
        " step-00000004.earlier-1",
    ]
    part = f"file://{place}/{second}/step-00000004"
    assert said[1][0] == f"island 1: {part}: was not sent whole, and is passed over"
    assert steps(place) == ["02", "04", "04.earlier-1", "06", "08"]
    assert steps(place / "islands/1") == ["02", "04", "06", "08"]


@pytest.mark.slow
def test_a_step_that_all_islands_have_is_kept(pool: Pool, tmp_path: Path) -> None:
    """The second island's saves fail from step 4 on, and it says so; the first one keeps step 2."""
    keys = keys_for(tmp_path, **(RUN | DRIFT | {"checkpoint__keep_last": 1}))
    said = pool.run(run, 2, keys, 2, 4, islands=2)
    first, second = folders(tmp_path)
    assert (steps(first), steps(second)) == (["02", "04", "06", "08"], ["02"])
    assert not any("failed" in line for line in said[0])
    assert said[1] == [
        f"island 1: checkpoint of step {step} failed: No space left on device; training goes on"
        for step in (4, 6, 8)
    ] + ["the checkpoint of step 8, the last, could not be saved: start again, to go on"]
    said = pool.run(run, 2, keys, islands=2)
    assert said[0][0] == f"{first}/checkpoints/step-00000002: resumed after step 2"
    # The first island's later checkpoints are whole, and not called damaged.
    kept = {"04.earlier-1", "06.earlier-1", "08", "08.earlier-1"}
    assert kept <= set(steps(first)) <= kept | {"06"}
    assert "08" in steps(second)


def test_what_an_island_has_not_sent_whole_is_no_candidate(tmp_path: Path) -> None:
    root, shared = as_path(f"file://{tmp_path}"), dist.HashStore()
    for step in (2, 4):
        (tmp_path / store.name_of(step)).mkdir()
        (tmp_path / store.name_of(step) / "config.toml").touch()
    (tmp_path / store.name_of(2) / store.MANIFEST).touch()
    peers, names = WorkerCheckpoints(Worker(1, 2, shared)), [store.name_of(4), store.name_of(2)]
    shared.set("everyone/checkpoints/1/0", json.dumps([names, 2]))
    assert peers.candidates(root) == [root / store.name_of(2)]
    assert json.loads(shared.get("everyone/checkpoints/1/1"))[0] == [store.name_of(2)]
    assert peers.others_lack(root, [], 3) == []


def _at_island(index: int, shared: dist.Store, folder: Path = Path(), last: int = 1) -> Checkpointer:
    """A checkpointer that has only what it needs to prune and to speak."""
    one = Checkpointer.__new__(Checkpointer)
    one.kept, one.config = folder, Config(checkpoint=Checkpoint(keep_last=last))
    one.passed = set()
    one.peers = WorkerCheckpoints(Worker(index, 2, shared))
    return one


@pytest.mark.parametrize(
    ("last", "cases"),
    [
        (1, [([], [2, 4, 6, 8]), ([2], [2, 4, 6, 8]), ([2, 6], [6, 8]), ([8], [8])]),
        # If the newest that all have is damaged, islands go on from the one before.
        (2, [([2, 6], [2, 4, 6, 8]), ([4, 6], [4, 6, 8]), ([6, 8], [6, 8])]),
    ],
)
def test_no_island_prunes_what_another_goes_on_from(
    tmp_path: Path, last: int, cases: list[tuple[list[int], list[int]]]
) -> None:
    shared = dist.HashStore()
    for step in (2, 4, 6, 8):
        folder = tmp_path / store.name_of(step)
        folder.mkdir()
        (folder / store.MANIFEST).touch()
    first = _at_island(0, shared, folder=tmp_path, last=last)
    for others, left in cases:
        shared.set("told/checkpoints/1", json.dumps([store.name_of(step) for step in others]))
        first._prune(store.Progress(8, 0, 0))
        assert [store.step_of(p) for p in sorted(tmp_path.iterdir())] == left


@pytest.mark.parametrize(
    ("island", "rank", "said"), [(0, 0, "word\n"), (0, 1, ""), (1, 0, "island 1: word\n"), (1, 1, "")]
)
def test_each_island_speaks_of_its_own_files(
    island: int, rank: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = _at_island(island, dist.HashStore())
    one.thread, one.failures = mock.Mock(is_alive=lambda: False), 0
    one.report = SaveReport(4, 0.0, problem="No space left on device")
    with mock.patch.object(dist, "get_rank", return_value=rank):
        one.finished()
    line = "checkpoint of step 4 failed: No space left on device; training goes on\n"
    assert capsys.readouterr().out == said.replace("word\n", line)


def _leave(index: int, port: int) -> None:
    """One of two islands without torchrun; the second one asks the store once more, late."""
    place = {"RANK": index, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    with process_group(Config(), 2):
        if index == 1:
            time.sleep(0.5)
            this_worker().told("last", "word")


def test_the_island_with_the_store_leaves_last() -> None:
    port = free_port()
    both = [forks().Process(target=_leave, args=(index, port)) for index in (0, 1)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]


class Shared(dist.HashStore):
    """A store that another thread may use too, as the clone of a rank's connection."""

    def clone(self) -> "Shared":
        return self


def test_a_spare_ends_with_the_code_of_the_run() -> None:
    """And the run's first rank waits until the spares know. The first code that is said counts."""
    shared = Shared()
    codes: list[int] = []
    run = SpareRanks(shared, 2)
    begun = time.monotonic()
    run.release(2, patience=0.3)
    assert time.monotonic() - begun >= 0.3
    run.release(1, patience=0.0)
    with mock.patch("signal.signal"):
        codes += [SpareRanks(shared, 1).wait() for _ in range(2)]
    assert codes == [2, 2]
    begun = time.monotonic()
    run.release(0, patience=60.0)
    assert time.monotonic() - begun < 30


def test_a_signal_to_a_spare_reaches_the_run() -> None:
    """Here both are this process: the spare notes it, and then the run's first rank gets it."""
    shared, got = Shared(), list[int]()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    handlers = {}
    try:
        SpareRanks(shared, 1).listen()
        with mock.patch("signal.signal", handlers.__setitem__):
            spare = threading.Thread(target=SpareRanks(shared, 1).wait)
            spare.start()
            while signal.SIGUSR1 not in handlers:
                time.sleep(0.01)
        assert not got
        handlers[signal.SIGUSR1](signal.SIGUSR1, None)
        end = time.monotonic() + 60
        while not got and time.monotonic() < end:
            time.sleep(0.05)
        assert got == [signal.SIGUSR1]
        SpareRanks(shared, 1).release(0)
        spare.join(60)
        assert not spare.is_alive()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_spare_fails_with_the_store() -> None:
    """It was in a rank that has failed, or in its torchrun."""

    class Gone(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Connection was closed")

    with mock.patch("signal.signal"):
        assert SpareRanks(Gone(), 1).wait() == 1
