"""Copies in shared memory: what a killed run goes on from, on any mesh, and what is passed over."""

import errno
import fcntl
import io
import json
import os
import random
import re
import shutil
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from compose.checkpoint import dcp_storage, in_memory, loading, store
from compose.checkpoint.checkpointer import Checkpointer
from compose.checkpoint.in_memory import _CopyHeader, _damage, _SharedFile
from compose.checkpoint.local_shards import LocalShard
from compose.train.run_folder import remove_copies, remove_left
from compose.train.trainer import Trainer
from tests.support.checkpoints import MESHES, SAVING, assert_bitwise, trained_state
from tests.support.helpers import (
    ROOT,
    Keys,
    make_job,
    parallel,
    printed,
    ranks_in,
    refusal,
    refusals,
    tiered,
)
from tests.support.pool import Pool
from tests.support.small_models import lora
from tests.support.training import keys_for, lines, signalled, train, trainer_of

COPIES: Keys = (
    SAVING
    | {"model__n_layers": 2, "data__path": str(ROOT / "README.md")}
    | {"checkpoint__interval": 0, "checkpoint__memory": 1}
)


class Killed(Exception):
    """Stands for a kill: no clean-up follows."""


@dataclass
class Machines:
    """Where each rank's shared memory is, and to which node a rank belongs."""

    root: Path
    nodes: list[int]

    def __enter__(self) -> None:
        rank = dist.get_rank()
        node = self.nodes[rank] if self.nodes else 0
        root = self.root / f"memory-{node}"
        root.mkdir(parents=True, exist_ok=True)
        self.patches = [
            mock.patch.object(in_memory, "ROOT", root),
            mock.patch.dict(os.environ, {"GROUP_RANK": str(node)}),
        ]
        for patch in self.patches:
            patch.__enter__()

    def __exit__(self, *unused: object) -> None:
        for patch in self.patches:
            patch.__exit__(None, None, None)


def of_interest(said: list[str]) -> list[str]:
    return [line for line in said if "resumed" in line or "cop" in line or "passed" in line]


def until_killed(keys: Keys, machines: Machines, steps: int) -> list[str]:
    """On every rank: train so many steps, whose copies are whole, and leave all as a kill does."""
    real = Trainer.step

    def step(self: Trainer) -> Any:
        if self.progress.step == steps:
            self.checkpointer.wait()
            raise Killed
        copies = self.checkpointer.copies
        if copies and copies.thread:
            copies.thread.join()  # or the next copy may be left out
        return real(self)

    with machines, mock.patch.object(Trainer, "step", step), printed() as said:
        trainer = trainer_of(keys)
        with pytest.raises(Killed):
            trainer.run()
        copies = trainer.checkpointer.copies
        assert copies
        assert copies.thread
        copies.thread.join()
        os.close(copies.lock)  # as the end of a process does
    return of_interest(said)


def going_on(keys: Keys, machines: Machines) -> tuple[dict[str, Tensor], list[str]]:
    """On every rank: the state at the run's end, and what the start has printed."""
    with machines, printed() as said:
        state = trained_state(keys)
    return state, of_interest(said)


@dataclass
class Scene:
    """A run in a folder, and its machines."""

    pool: Pool
    folder: Path
    keys: Keys
    nodes: tuple[int, ...] = ()

    @property
    def machines(self) -> Machines:
        return Machines(self.folder / "machines", list(self.nodes))

    def kill_after(self, steps: int, **keys: object) -> list[str]:
        both = keys_for(self.folder / "run", **(COPIES | self.keys | keys | {"train__stop_after": 7}))
        return self.pool.run(until_killed, ranks_in(both), both, self.machines, steps)[0]

    def go_on(self, **keys: object) -> tuple[dict[str, Tensor], list[str]]:
        both = keys_for(self.folder / "run", **(COPIES | self.keys | keys | {"train__stop_after": 7}))
        return self.pool.run(going_on, ranks_in(both), both, self.machines)[0]

    def run(self, function: Callable[..., Any], **keys: object) -> list[Any]:
        both = keys_for(self.folder / "run", **(COPIES | self.keys | keys | {"train__stop_after": 7}))
        return self.pool.run(function, ranks_in(both), both, self.machines)

    def undisturbed(self) -> dict[str, Tensor]:
        keys = COPIES | self.keys | {"checkpoint__memory": 0, "train__stop_after": 7}
        both = keys_for(self.folder / "whole", **keys)
        return self.pool.run(trained_state, ranks_in(both), both)[0]

    def files(self, node: int = 0) -> list[Path]:
        return sorted((self.folder / "machines" / f"memory-{node}").glob("dtensor-compose-*/*"))

    def resumed(self, ranks: int, step: int, of_peers: int = 0) -> str:
        kept = f"kept, {of_peers} of them by peers" if of_peers else "kept by themselves"
        run = self.folder / "run"
        return f"{run}: copies in memory of {ranks} ranks, {kept}: resumed after step {step}"


def ends_unsaved(keys: Keys, machines: Machines) -> None:
    """On every rank: train to the end, with copies, and be killed before the last save has ended."""
    with (
        machines,
        mock.patch.object(Checkpointer, "save"),
        mock.patch.object(Checkpointer, "end") as end,
    ):
        trainer = trainer_of(keys)
        copies = trainer.checkpointer.copies
        assert copies

        def killed() -> None:
            assert copies.thread
            copies.thread.join()
            raise Killed

        end.side_effect = killed
        real = Trainer.step

        def step(self: Trainer) -> Any:
            if copies.thread:
                copies.thread.join()  # or the next copy may be left out
            return real(self)

        with mock.patch.object(Trainer, "step", step), pytest.raises(Killed):
            trainer.run()
        os.close(copies.lock)


def interrupted(keys: Keys, machines: Machines) -> None:
    """On every rank: Ctrl-C in the third step."""
    with machines, signalled(signal.SIGINT), pytest.raises(KeyboardInterrupt):
        train(keys)


def lacking_room_once(keys: Keys, machines: Machines) -> list[str]:
    """On every rank: the second rank has no room for the first copy of its peer; what is said."""
    real, made = in_memory._SharedFile.reserve, []

    def reserve(self: Any, *args: Any) -> None:
        if self.path.name.endswith(".peer") and dist.get_rank() == 1:
            made.append(self.path)
            if len(made) == 1:
                raise OSError(errno.ENOSPC, "No space left on device")
        real(self, *args)

    with machines, mock.patch.object(in_memory._SharedFile, "reserve", reserve):
        return until_killed(keys, Machines(machines.root, machines.nodes), 4)


OTHERS: dict[str, Keys] = {
    "residuals": parallel(dp_shard=2) | {"comm__gradients": "powersgd", "comm__rank": 2},
}


@pytest.mark.parametrize(
    "mesh",
    tiered(
        ("tensor, uneven", "one", "replicas", "v-schedule", *OTHERS),
        slow=("tensor, uneven", "one", "replicas", "v-schedule"),
    ),
)
def test_a_killed_run_goes_on_bitwise(pool: Pool, tmp_path: Path, mesh: str) -> None:
    """There is no checkpoint on the disk. At the end nothing is left in memory."""
    scene = Scene(pool, tmp_path, MESHES.get(mesh) or OTHERS.get(mesh) or {})
    expected = scene.undisturbed()
    scene.kill_after(4)
    assert not (tmp_path / "run" / "checkpoints").exists()
    state, said = scene.go_on()
    assert said == [scene.resumed(ranks_in(scene.keys), 4)]
    assert_bitwise(state, expected)
    assert scene.files() == []
    for a, b in zip(lines(tmp_path / "whole"), lines(tmp_path / "run"), strict=True):
        assert (a["loss"], a["grad_norm"], a["samples"]) == (b["loss"], b["grad_norm"], b["samples"])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tensor, uneven", "pipeline"),
        pytest.param("v-schedule", "one", marks=pytest.mark.slow),
        pytest.param("one", "context", marks=pytest.mark.slow),
    ],
)
def test_goes_on_on_another_mesh(pool: Pool, tmp_path: Path, before: str, after: str) -> None:
    scene = Scene(pool, tmp_path, {})
    expected = scene.undisturbed()
    scene.kill_after(2, **MESHES[before])
    state, said = scene.go_on(**MESHES[after])
    assert said == [scene.resumed(ranks_in(MESHES[before]), 2)]
    for name, value in expected.items():
        bound = 1e-3 if name.startswith("model.") else 1e-2
        error = (state[name].double() - value.double()).norm()
        assert float(error) <= bound * float(value.double().norm()) + 1e-12, name
    for a, b in zip(lines(tmp_path / "whole"), lines(tmp_path / "run"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert a["samples"] == b["samples"]


def test_a_lost_nodes_state_is_with_its_peers(pool: Pool, tmp_path: Path) -> None:
    """Of two nodes the second comes back without its memory, later the first."""
    scene = Scene(pool, tmp_path, parallel(dp_shard=2, tp=2), (0, 0, 1, 1))
    expected = scene.undisturbed()
    scene.kill_after(3)
    shutil.rmtree(tmp_path / "machines" / "memory-1")
    assert scene.kill_after(5) == [scene.resumed(4, 3, of_peers=2)]
    shutil.rmtree(tmp_path / "machines" / "memory-0")
    state, said = scene.go_on()
    assert said == [scene.resumed(4, 5, of_peers=2)]
    assert_bitwise(state, expected)
    assert scene.files(0) == scene.files(1) == []


@pytest.mark.slow
def test_parts_of_another_node_are_sent(pool: Pool, tmp_path: Path) -> None:
    """On another mesh ranks need parts that only the other node has."""
    scene = Scene(pool, tmp_path, {}, (0, 0, 1, 1))
    expected = scene.undisturbed()
    scene.kill_after(3, **parallel(dp_shard=4))
    for path in [*scene.files(0), *scene.files(1)]:
        if ".peer" in path.name:
            path.unlink()
    state, said = scene.go_on(**parallel(tp=2, dp_shard=2))
    assert said == [scene.resumed(4, 3)]
    for name, value in expected.items():
        assert float((state[name] - value).norm()) <= 1e-2 * float(value.norm()) + 1e-12, name


@pytest.mark.slow
def test_replicas_need_no_peers(pool: Pool, tmp_path: Path) -> None:
    scene = Scene(pool, tmp_path, parallel(dp_replicate=2, dp_shard=2), (0, 0, 1, 1))
    expected = scene.undisturbed()
    scene.kill_after(4)
    assert not [path for path in (*scene.files(0), *scene.files(1)) if ".peer" in path.name]
    shutil.rmtree(tmp_path / "machines" / "memory-0")
    state, said = scene.go_on()
    assert said == [scene.resumed(2, 4)]
    assert_bitwise(state, expected)


def flip(path: Path, place: int) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_every_flipped_bit_of_a_copy_is_named(tmp_path: Path) -> None:
    """200 of them, in parts of several types."""
    state, slot, chance = {}, _SharedFile(tmp_path / "copy"), random.Random(0)
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64)):
        local = torch.arange(40 + number).to(dtype)
        state[f"model.{number}"] = LocalShard(local.shape, torch.Size((0,)), local)
    slot.fill(state)
    copy = _CopyHeader(1, "", slot.layout, [slot.layout], slot.tensors, slot.sums(), {}, "")
    whole = slot.path.read_bytes()
    assert not _damage(slot.path, copy)
    for _ in range(200):
        name = chance.choice([*state])
        [chunk] = slot.tensors[name].chunks
        content = bytearray(whole)
        content[chunk.begin + chance.randrange(chunk.length)] ^= 1 << chance.randrange(8)
        slot.path.write_bytes(content)
        assert _damage(slot.path, copy) == name


def test_what_is_damaged_is_named_and_passed_over(pool: Pool, tmp_path: Path) -> None:
    """A flipped bit in the newest copy of a rank, and one in the text beside another."""
    scene = Scene(pool, tmp_path, parallel(dp_shard=2))
    expected = scene.undisturbed()
    scene.kill_after(4)
    newest = max(p for p in scene.files() if "-00001-" in p.name and p.suffix != ".json")
    flip(newest, newest.stat().st_size // 2)
    damaged, lacking, resumed = scene.kill_after(5)
    assert damaged.startswith(f"copies in memory: {newest.name} of step 4 is damaged in ")
    assert lacking == "copies in memory: step 4 lacks parts, and is passed over"
    assert resumed == scene.resumed(2, 3)
    text = max(p for p in scene.files() if p.name.endswith("-00000-1.json"))
    flip(text, 40)
    state, said = scene.go_on()
    assert said == [
        f"copies in memory: the description of {text.stem} is not what was written (checksum)",
        "copies in memory: step 5 lacks parts, and is passed over",
        scene.resumed(2, 4),
    ]
    assert_bitwise(state, expected)


def test_memory_is_read_and_not_the_disk(pool: Pool, tmp_path: Path) -> None:
    """The checkpoint of the same step has no shards that could be read; a newer one is taken."""
    scene = Scene(pool, tmp_path, parallel(dp_shard=2) | {"checkpoint__interval": 4})
    scene.kill_after(4)
    checkpoint = tmp_path / "run" / "checkpoints" / store.name_of(4)
    kept = {path: path.read_bytes() for path in checkpoint.glob("__*")}
    assert kept
    for path in kept:
        path.unlink()
    assert scene.kill_after(5) == [scene.resumed(2, 4)]
    for path, content in kept.items():
        path.write_bytes(content)
    newer = checkpoint.rename(checkpoint.with_name(store.name_of(6)))
    state = (newer / store.STATE).read_text()
    (newer / store.STATE).write_text(state.replace('"step": 4', '"step": 6'))
    manifest = store.manifest_entries(p for p in newer.iterdir() if p.name != store.MANIFEST)
    (newer / store.MANIFEST).write_text(json.dumps({"files": manifest}))
    _, said = scene.go_on(train__stop_after=6)
    assert said == [
        f"copies in memory are of step 5, before {newer.name}",
        f"{newer}: resumed after step 6",
    ]


def test_a_damaged_checkpoint_is_not_before_a_whole_copy(pool: Pool, tmp_path: Path) -> None:
    scene = Scene(pool, tmp_path, {"checkpoint__interval": 4})
    scene.kill_after(5)
    checkpoint = tmp_path / "run" / "checkpoints" / store.name_of(4)
    newer = checkpoint.rename(checkpoint.with_name(store.name_of(6)))
    next(newer.glob("__*")).unlink()
    _, said = scene.go_on()
    assert [line.partition(": damaged")[0] for line in said] == [
        f"copies in memory are of step 5, before {newer.name}",
        str(newer),
        scene.resumed(1, 5),
    ]


def test_a_last_save_that_was_killed_is_made_up_for(pool: Pool, tmp_path: Path) -> None:
    """The last step is in memory alone. The start that reads it has no step to take, and saves it."""
    scene = Scene(pool, tmp_path, parallel(dp_shard=2) | {"checkpoint__interval": 100})
    expected = scene.undisturbed()
    scene.run(ends_unsaved)
    assert not (tmp_path / "run" / "checkpoints").exists()
    state, said = scene.go_on()
    assert said == [scene.resumed(2, 7)]
    assert_bitwise(state, expected)
    assert store.problems(tmp_path / "run" / "checkpoints" / store.name_of(7)) == []
    assert scene.files() == []


def test_ctrl_c_loses_no_step_that_was_copied(pool: Pool, tmp_path: Path) -> None:
    """Copies go at the end of a run. So its state is saved, though checkpoint.interval is 0."""
    scene = Scene(pool, tmp_path, {})
    scene.run(interrupted)
    _, said = scene.go_on()
    assert said == [f"{tmp_path / 'run' / 'checkpoints' / store.name_of(3)}: resumed after step 3"]


def ends_with_broken_messages(keys: Keys, machines: Machines) -> None:
    """On every rank: train to the end, while the messages of copies fail from the first one on."""
    late = RuntimeError("Application timeout caused pair closure")
    with machines:
        trainer = trainer_of(keys)
        with (
            mock.patch.object(in_memory, "gathered", side_effect=late),
            mock.patch.object(dist, "barrier", side_effect=late),
        ):
            trainer.run()


def test_a_run_ends_well_whose_copies_have_failed(pool: Pool, tmp_path: Path) -> None:
    """Its ranks meet no more in the group of copies."""
    scene = Scene(pool, tmp_path, parallel(dp_shard=2) | {"checkpoint__interval": 100})
    scene.run(ends_with_broken_messages)
    assert store.problems(tmp_path / "run" / "checkpoints" / store.name_of(7)) == []
    assert scene.files() == []


def test_no_rank_waits_for_a_peer_without_room(pool: Pool, tmp_path: Path) -> None:
    """That copy is given up on every rank, with one line; the next one is whole."""
    scene = Scene(pool, tmp_path, parallel(dp_shard=2), (0, 1))
    assert scene.run(lacking_room_once) == [
        [],
        [
            "rank 1: the copy in memory of step 1 failed: No space left on device; training goes on",
        ],
    ]
    assert scene.go_on()[1] == [scene.resumed(2, 4)]


def test_a_fork_is_another_run(pool: Pool, tmp_path: Path) -> None:
    """It does not go on from the copies of the first, nor remove them."""
    scene = Scene(pool, tmp_path, {})
    scene.kill_after(3)
    fork = Scene(pool, tmp_path, {})
    (tmp_path / "run").rename(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert fork.go_on()[1] == []
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "first").rename(tmp_path / "run")
    assert scene.go_on()[1] == [scene.resumed(1, 3)]


def test_a_part_is_read_whole(tmp_path: Path) -> None:
    """Though the system gives fewer bytes than were asked for, as Linux does beyond 2 GiB."""

    class Short(io.BytesIO):
        def readinto(self, memory: Any) -> int:
            return super().readinto(memoryview(memory)[:5])

    (tmp_path / "copy").touch()
    group: Any = None
    reader = loading.SentPartsReader(tmp_path, ["copy"], {}, group)
    short = mock.Mock(side_effect=lambda *_, **__: Short(bytes(range(100))))
    tensor = torch.zeros(40, dtype=torch.uint8)
    with (
        mock.patch.object(loading, "open_own", short),
        mock.patch.object(dcp_storage, "open_own", short),
    ):
        reader._fill(tensor, "__0_0.safetensors", 10)
    assert tensor.tolist() == [*range(10, 50)]


NOBODY = 2**22 + 1  # a number that Linux gives to no process


def leftovers(root: Path, free: int = 0) -> list[str]:
    """Copies of other runs that a start leaves, if it needs 1,000 bytes."""
    usage = mock.patch.object(shutil, "disk_usage", return_value=mock.Mock(free=free))
    with mock.patch.object(in_memory, "ROOT", root), usage:
        remove_left(root / f"{in_memory.PREFIX}own", 1000)
    return sorted(path.name for path in root.iterdir())


def test_only_what_dead_runs_have_left_is_removed(tmp_path: Path) -> None:
    """A locked folder is in use. While a launcher lives, it may start its ranks again. What is younger
    than an hour stays if there is room."""
    for name, pid in {"dead": NOBODY, "own": NOBODY, "restarting": os.getpid()}.items():
        (tmp_path / f"dtensor-compose-{name}").mkdir()
        (tmp_path / f"dtensor-compose-{name}" / f"{pid}-abc-00000-0").touch()
    (tmp_path / "of-another").mkdir()
    locked = tmp_path / "dtensor-compose-locked"
    locked.mkdir()
    handle = os.open(locked, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    names = ["dtensor-compose-locked", "dtensor-compose-own", "dtensor-compose-restarting"]
    assert leftovers(tmp_path, free=1000) == ["dtensor-compose-dead", *names, "of-another"]
    old = tmp_path / "dtensor-compose-old"
    old.mkdir()
    os.utime(old, (0, time.time() - 3700))
    assert leftovers(tmp_path, free=1000) == ["dtensor-compose-dead", *names, "of-another"]
    assert leftovers(tmp_path) == [*names, "of-another"]
    os.close(handle)
    with mock.patch.object(os, "geteuid", return_value=os.getuid() + 1):
        assert leftovers(tmp_path) == [*names, "of-another"]
    assert leftovers(tmp_path) == [*names[1:], "of-another"]


def test_what_another_container_has_left_stays_for_an_hour(tmp_path: Path) -> None:
    """Its processes have numbers of their own, so nobody here knows whether they live. An hour after
    the last copy was written, they are taken for dead."""
    here = os.stat("/proc/self/ns/pid").st_ino
    owners = {"dead": (NOBODY, here), "lives": (os.getpid(), here)}
    owners |= {"old": (os.getpid(), here + 1), "young": (NOBODY, here + 1)}
    owners["written"] = NOBODY, here + 1
    for name, (process, space) in owners.items():
        copies = tmp_path / f"dtensor-compose-{name}" / f"{process}.{space}-abc-00000-0"
        copies.parent.mkdir()
        copies.touch()
        for path in [copies.parent, copies][: {"lives": 2, "old": 2, "written": 1}.get(name, 0)]:
            os.utime(path, (0, time.time() - 3700))
    assert leftovers(tmp_path) == [f"dtensor-compose-{name}" for name in ("lives", "written", "young")]


def test_a_node_of_spares_keeps_nothing_of_a_run_that_has_ended(tmp_path: Path) -> None:
    run, name = tmp_path / "run", uuid.uuid4().hex
    folders = [tmp_path / f"dtensor-compose-{each}" for each in (name, "other")]
    for folder in (run, *folders):
        folder.mkdir()
    (run / ".copies").write_text(f"{name} 1f")
    handle = os.open(folders[0], os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    with mock.patch.object(in_memory, "ROOT", tmp_path):
        remove_copies(run)
        assert all(folder.exists() for folder in folders), "a rank holds a lock"
        os.close(handle)
        remove_copies(run)
        remove_copies(tmp_path)  # a run without copies
        (run / ".copies").write_text("other")  # no name that a run has made
        remove_copies(run)
    assert [folder.exists() for folder in folders] == [False, True]


def without_room(keys: Keys, root: Path) -> tuple[str, list[str]]:
    """On every rank: the refusal where shared memory is small; what is said where it fills up later."""
    with Machines(root, []):
        free = mock.patch.object(shutil, "disk_usage", return_value=mock.Mock(free=1000))
        with free:
            refused = refusal(train, keys)

        def full(*_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with mock.patch.object(os, "posix_fallocate", full), printed() as said:
            train(keys)
    return refused, of_interest(said)


def test_too_little_memory_is_refused(pool: Pool, tmp_path: Path) -> None:
    """With the number, on every rank; if it is used up later, the run trains on."""
    keys = keys_for(tmp_path / "run", **COPIES, train__stop_after=2)
    ((refused, said),) = pool.run(without_room, 1, keys, tmp_path)
    found = re.fullmatch(
        r"checkpoint\.memory: two copies of 1 ranks take ([\d,]+) bytes of \S+, and 1,000 are free on"
        r" \S+: make it larger \(docker run --shm-size\), or use checkpoint\.memory = 0",
        refused,
    )
    assert found
    job = make_job(1, **keys)
    parameters = sum(p.numel() for p in job.model.parameters())
    assert int(found[1].replace(",", "")) == 2 * 3 * 4 * parameters
    assert said == [
        f"rank 0: the copy in memory of step {step} failed: No space left on device; training goes on"
        for step in (1, 2)
    ]
    assert len(lines(tmp_path / "run")) == 2


WITH: Keys = {"run__dir": "runs/a", "checkpoint__memory": 5}
KEY = "checkpoint.memory: 5"
test_refusals = refusals(
    [
        (
            {"run__dir": ""},
            f"{KEY} needs a run.dir, by which a restart knows its copies; set run.dir, or use 0",
        ),
        (
            {"run__dir": "s3://bucket/run"},
            f"{KEY} goes with a run.dir of this machine, and s3://bucket/run is none; use 0",
        ),
        (
            {"checkpoint__resume": "none"},
            f'{KEY} is for a restart, and checkpoint.resume = "none" begins anew; use "auto", or 0',
        ),
        (
            {"parallel__dp_replicate": 2, "outer__every": 4},
            f"{KEY} does not go with islands, which go on from one step; use outer.every = 0, or 0",
        ),
        (
            {"optimizer__offload": "cpu"},
            f'{KEY} is not proved with optimizer.offload = "cpu"; use checkpoint.memory = 0, or'
            ' optimizer.offload = "none"',
        ),
        (
            lora(2),
            f"{KEY} is not proved with model.lora.rank = 2; use checkpoint.memory = 0, or"
            " model.lora.rank = 0",
        ),
    ],
    WITH,
)
