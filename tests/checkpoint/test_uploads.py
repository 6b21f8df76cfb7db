"""A run whose folder is in object storage: what it saves there, and from what it goes on."""

import contextlib
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from compose import object_storage
from compose.checkpoint import rank_state, store
from compose.checkpoint.hf_folder import checkpoints
from compose.checkpoint.uploads import CLAIM, Uploads, staging_of
from compose.cli.command_line import parse
from compose.cli.commands import convert
from compose.object_storage import Remote, StoreError, as_path
from compose.train.processes import TrainingError
from compose.train.trainer import Trainer
from tests.support.checkpoints import MESHES, assert_bitwise, shards, train_on
from tests.support.command_lines import TIMEOUT, begin, command, free_port, kill_sessions, of_rank
from tests.support.helpers import TINY, Keys, refusal
from tests.support.pool import Pool
from tests.support.training import keys_for, lines, logged_steps, train, trainer_of

SMALL: Keys = TINY | {"train__micro_batch": 1, "checkpoint__interval": 2}


@pytest.fixture
def run(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of a run in a store, of whose failures no try waits for long."""
    monkeypatch.setattr(object_storage, "_WAITS", (0.001, 0.001))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return as_path(f"file://{tmp_path}/store/run")


def trained(run: Path, steps: int, **keys: object) -> Trainer:
    trainer = trainer_of(keys_for(run, **(SMALL | {"train__stop_after": steps} | keys)))
    trainer.run()
    return trainer


def steps_in(run: Path) -> list[int]:
    return sorted(map(store.step_of, store.newest_first(run / "checkpoints")))


def test_a_run_in_a_store(run: Path, tmp_path: Path) -> None:
    """It keeps what a run in a folder keeps, bitwise, and leaves no checkpoint on the disk."""
    here = tmp_path / "here"
    trained(here, 7, checkpoint__keep_every=2)
    first = trained(run, 3, checkpoint__keep_every=2)
    assert steps_in(run) == [2, 3]
    shutil.rmtree(first.folder)  # another machine
    there = trained(run, 7, checkpoint__keep_every=2).folder
    assert steps_in(run) == steps_in(here) == [2, 4, 6, 7]
    for step in (4, 7):
        name = f"checkpoints/{store.name_of(step)}"
        assert shards(run / name) == shards(here / name)
    assert there == staging_of(run, "")
    assert list((there / "checkpoints").iterdir()) == []
    assert logged_steps(run) == list(range(1, 8))
    assert [line["loss"] for line in lines(run)] == [line["loss"] for line in lines(here)]
    names = {path.name for path in run.glob("*")}
    assert {"config.toml", "metrics.jsonl", "checkpoints", store.MARK} <= names


class Broken:
    """A store in which some writes fail."""

    def __init__(self, part: str, error: Exception | None = None) -> None:
        self.part, self.error, self.real = part, error or OSError(5, "down"), Remote.put

    def __enter__(self) -> None:
        def put(path: Remote, source: Path) -> None:
            if self.part in str(path):
                path._ask(self.fail)
            self.real(path, source)

        self.patch = mock.patch.object(Remote, "put", put)
        self.patch.start()

    def fail(self, *_: Any) -> None:
        raise self.error

    def __exit__(self, *_: object) -> None:
        self.patch.stop()


def test_an_upload_that_fails(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Training goes on. At the end the run fails and says where its state is; the next one sends it."""
    trained(run, 2)
    with Broken("__0_0"), pytest.raises(TrainingError) as caught:
        trained(run, 6)
    here = staging_of(run, "")
    last = f"checkpoints/{store.name_of(6)}"
    assert str(caught.value) == f"{run / last}: down; it is in {here / last}"
    assert [each.name for each in (here / "checkpoints").iterdir()] == [store.name_of(6)]
    said = capfd.readouterr().out
    assert "checkpoint of step 4 failed: down; training goes on" in said
    assert steps_in(run) == [2]
    trained(run, 7)
    said = capfd.readouterr().out
    assert f"{run / last}: sent now; an earlier run left it in {here / last}" in said
    assert f"{run / last}: resumed after step 6" in said
    assert steps_in(run) == [6, 7]


def test_a_run_of_which_nothing_was_sent(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its state is here, and the next start sends it; not if the place was emptied meanwhile."""
    for emptied in (False, True):
        with Broken(""), pytest.raises(TrainingError):
            trained(run, 2)
        if emptied:
            shutil.rmtree(str(run).removeprefix("file://"))
        capfd.readouterr()
        trained(run, 4)
        said, name = capfd.readouterr().out, store.name_of(2)
        here = staging_of(run, "") / "checkpoints" / name
        assert (f"{run}/checkpoints/{name}: resumed after step 2" in said) is not emptied
        assert (f"{here}: {run} does not have its run; kept as {name}.earlier-1" in said) is emptied
        assert (here.with_name(f"{name}.earlier-1")).exists() is emptied
        shutil.rmtree(str(run).removeprefix("file://"))


def test_metrics_are_those_of_the_store(run: Path) -> None:
    """Those here may have more steps, which another machine has taken anew."""
    first = trained(run, 5).folder
    other = first.with_name("other")
    first.rename(other)
    store.remove(run / "checkpoints" / store.name_of(5))
    trained(run, 6, optimizer__lr=0.5)
    expected = lines(run)
    shutil.rmtree(first)
    other.rename(first)
    log = first / "metrics.jsonl"
    log.write_text(log.read_text() + "\n".join(log.read_text().splitlines()[-1:] * 9))
    trained(run, 6)
    assert lines(run) == expected


def test_a_file_that_vanishes_in_a_push(run: Path, tmp_path: Path) -> None:
    """A profiler removes its trace once that is packed: no save fails for it."""
    assert isinstance(run, Remote)
    uploads, trace = Uploads(tmp_path / "here", run), tmp_path / "here/traces/a.json"
    trace.parent.mkdir(parents=True)
    trace.touch()
    uploads.begin()
    with mock.patch.object(uploads, "_check_claim", side_effect=trace.unlink):
        uploads.push()
    assert not (run / "traces/a.json").exists()


def test_a_log_that_cannot_be_sent(run: Path) -> None:
    with Broken("metrics.jsonl"), pytest.raises(TrainingError) as caught:
        trained(run, 1, checkpoint__interval=0)
    assert str(caught.value) == f"{run}: down; the rest of the run is in {staging_of(run, '')}"


def test_a_checkpoint_whose_log_cannot_be_sent(run: Path) -> None:
    """A run that goes on from it would have a metrics.jsonl that lacks steps."""
    with Broken("metrics.jsonl"), pytest.raises(TrainingError):
        trained(run, 2)
    assert not (run / "checkpoints" / store.name_of(2) / store.MANIFEST).exists()


def test_a_file_that_is_not_sent_whole(run: Path) -> None:
    real, folder = Remote.put, run / "checkpoints" / store.name_of(2)

    def put(path: Remote, source: Path) -> None:
        real(path, source)
        if "__0_0" in str(path):
            path.write_bytes(source.read_bytes()[:-1])

    with mock.patch.object(Remote, "put", put), pytest.raises(TrainingError) as caught:
        trained(run, 2)
    assert str(caught.value).startswith(f"{folder}: __0_0.safetensors was not sent whole; it is in ")
    assert not (folder / store.MANIFEST).exists()


def test_a_save_that_another_rank_has_begun_stays(run: Path, tmp_path: Path) -> None:
    """Ranks of one node share its folder, and do not wait for the end of each other's uploads."""
    assert isinstance(run, Remote)
    root = trained(tmp_path / "here", 2).folder / "checkpoints"
    uploads = Uploads(root.parent, run)
    uploads.begin()
    older, own, next_one = (store.begin(root, step) for step in (1, 2, 4))
    own.rmdir()  # it was published
    assert uploads.send_checkpoint(own, [], dist.group.WORLD) == ""  # type: ignore[arg-type]
    assert list(root.iterdir()) == [next_one]
    assert not older.exists()
    assert store.problems(run / "checkpoints" / store.name_of(2)) == []


@pytest.mark.parametrize(
    ("name", "cut", "why"),
    [
        ("manifest.json", None, "was not sent whole, and is passed over"),
        ("state.json", None, "damaged and passed over: state.json is missing"),
        ("__0_0.safetensors", None, "damaged and passed over: __0_0.safetensors is missing"),
        ("__0_0.safetensors", 100, "damaged and passed over: __0_0.safetensors has 100 of"),
    ],
)
def test_what_is_not_there_as_a_whole_is_no_checkpoint(
    run: Path, name: str, cut: int | None, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(run, 4)
    newest = run / "checkpoints" / store.name_of(4)
    content = (newest / name).read_bytes()
    (newest / name).unlink()
    if cut:
        (newest / name).write_bytes(content[:cut])
    capfd.readouterr()
    trained(run, 6, checkpoint__keep_last=3)
    said = capfd.readouterr().out
    assert f"{newest}: {why}" in said
    assert "resumed after step 2" in said
    for step in (2, 4, 6):  # the step was saved again
        assert store.problems(run / "checkpoints" / store.name_of(step)) == []


def test_a_store_that_is_down_is_no_damage(run: Path) -> None:
    """A run does not go back to an older checkpoint because the newest cannot be reached."""
    trained(run, 4)
    real = Remote._ask

    def ask(path: Remote, question: Any) -> Any:
        if "__0_0" in str(path):
            raise StoreError(5, "down", str(path))
        return real(path, question)

    with mock.patch.object(Remote, "_ask", ask):
        line = refusal(trained, run, 6)
    assert line == f"{run}/checkpoints/{store.name_of(4)}/__0_0.safetensors: down"


def test_another_run_takes_the_place(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The files that the other run has written since stay as they are."""
    trained(run, 2)
    real, newer = Uploads.begin, run / "checkpoints" / store.name_of(4)

    def begin(self: Uploads) -> None:
        real(self)
        (self.remote / CLAIM).write_bytes(b"process 1 on another, 0")
        for file in (run / "checkpoints" / store.name_of(2)).glob("*"):
            (newer / file.name).write_bytes(file.read_bytes())
        (self.remote / "metrics.jsonl").write_bytes(b"another's")

    with mock.patch.object(Uploads, "begin", begin), pytest.raises(TrainingError) as caught:
        trained(run, 4)
    assert "was taken by another run (process 1 on another); it is in" in str(caught.value)
    assert (run / "metrics.jsonl").read_bytes() == b"another's"
    names = [store.name_of(step) for step in (2, 4)]
    assert sorted(folder.name for folder in (run / "checkpoints").glob("*")) == names
    for file in (run / "checkpoints" / names[0]).glob("*"):
        assert (newer / file.name).read_bytes() == file.read_bytes(), file


def test_another_run_takes_the_place_in_an_upload(run: Path, tmp_path: Path) -> None:
    """The manifest would say that the other run's files, of the same names, are these."""
    assert isinstance(run, Remote)
    real, root = Uploads.send, trained(tmp_path / "here", 2).folder / "checkpoints"
    uploads, name = Uploads(root.parent, run), store.name_of(2)
    uploads.begin()
    uploads.push()  # nothing is left to be sent, for which the claim would be looked at

    def send(self: Uploads, *given: Any) -> None:
        real(self, *given)
        (run / CLAIM).write_bytes(b"process 1 on another, 0")

    with mock.patch.object(Uploads, "send", send):
        problem = uploads.send_checkpoint(root / f".writing-{name}", [], dist.group.WORLD)  # type: ignore[arg-type]
    assert problem.endswith("was taken by another run (process 1 on another)")
    assert not (run / "checkpoints" / name / store.MANIFEST).exists()


def test_a_deletion_that_is_interrupted_leaves_no_checkpoint(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(run, 4)
    oldest = run / "checkpoints" / store.name_of(2)
    removal = "fsspec.implementations.local.LocalFileSystem.rm"
    with mock.patch(removal, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        store.remove(oldest)
    assert oldest.exists()
    assert not (oldest / store.MANIFEST).exists()
    capfd.readouterr()
    trained(run, 6)
    said = capfd.readouterr().out
    assert f"{oldest}: was not sent whole, and is passed over" in said
    assert "resumed after step 4" in said
    assert steps_in(run) == [4, 6]


def test_what_is_being_sent_is_not_read(run: Path) -> None:
    """Whoever takes the newest checkpoint of a run that trains would find a part of one."""
    trained(run, 2)
    (run / "checkpoints" / store.name_of(4) / "state.json").write_bytes(b"{}")
    assert checkpoints(run) == [run / "checkpoints" / store.name_of(2)]


def test_an_end_in_the_first_upload_is_no_loss(run: Path) -> None:
    """The next run begins anew, as in a folder."""
    with Broken("manifest"), pytest.raises(TrainingError):
        trained(run, 2)
    shutil.rmtree(staging_of(run, ""))
    trained(run, 2)
    assert store.problems(run / "checkpoints" / store.name_of(2)) == []


def test_to_hugging_face_and_back_through_a_store(run: Path, tmp_path: Path) -> None:
    trained(run, 2)
    for target in (run.parent / "hf", tmp_path / "hf"):
        assert convert([str(run), str(target)]) == 0
    there, here = (each / "model.safetensors" for each in (run.parent / "hf", tmp_path / "hf"))
    assert there.read_bytes() == here.read_bytes()
    assert convert([str(run.parent / "hf"), str(run.parent / "again")]) == 0
    assert store.problems(run.parent / "again/checkpoints" / store.name_of(0)) == []
    with Broken(".safetensors"):
        assert "down" in refusal(convert, [str(run.parent / "hf"), str(run.parent / "cut")])
    assert not (run.parent / "cut/checkpoints" / store.name_of(0) / store.MANIFEST).exists()
    again = refusal(convert, [str(run), str(run.parent / "hf")])
    assert again == f"{run.parent / 'hf'}: exists already; choose another target"


def test_a_run_keeps_its_name_at_a_service(run: Path, tmp_path: Path) -> None:
    """A machine that has not seen the run goes on with it at wandb, and does not begin another."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    (first / "wandb.id").write_text("x7\n")
    for folder in (first, second):
        assert isinstance(run, Remote)
        uploads = Uploads(folder, run)
        uploads.begin()
        uploads.push()
    assert (second / "wandb.id").read_text() == "x7\n"


def test_a_bucket_that_cannot_be_written(run: Path) -> None:
    with mock.patch.object(Remote, "write_bytes", side_effect=StoreError(13, "Access Denied", "x")):
        line = refusal(parse, ["train.toml", f"--run.dir={run}"], "train.py", trains=True)
    assert line == f"train.toml: run.dir: cannot write to {run}: Access Denied"


def _left(folder: Path, fault: str, steps: int) -> list[str]:
    """What each rank's own node keeps of checkpoints; the second rank's part is not written or sent."""
    staging = folder / str(dist.get_rank())
    keys = SMALL | {"run__staging": staging, "train__stop_after": steps}

    def write(target: Path, rank: int, *_: Any) -> dict[str, Any]:
        if rank == 1 and fault == "full":
            raise OSError(28, fault)
        return {}

    waits = mock.patch.object(object_storage, "_WAITS", (0.001,))
    wrong = mock.patch.object(rank_state, "write", write)
    with waits, wrong, Broken(fault), contextlib.suppress(TrainingError):
        train(keys_for(as_path(f"file://{folder}/store"), **keys))
    (kept,) = staging.rglob("checkpoints")
    return [each.name for each in kept.iterdir()]


@pytest.mark.parametrize(
    ("fault", "steps", "left"),
    [
        ("full", 2, [[], []]),
        ("step-00000002/__1_0", 4, [[], []]),
        ("__1_0", 4, [["step-00000004"], [".writing-step-00000004"]]),
    ],
)
def test_what_failed_saves_leave_on_each_node(
    pool: Pool, tmp_path: Path, fault: str, steps: int, left: list[list[str]]
) -> None:
    """Nothing, but for the newest that could not be sent."""
    assert pool.run(_left, 2, tmp_path, fault, steps) == left


def _beside_another(folder: Path) -> list[str]:
    """Train; the second rank's node has a part of a checkpoint that an earlier start could not send."""
    staging, place = folder / str(dist.get_rank()), as_path(f"file://{folder}/store")
    if dist.get_rank() == 1:
        (staging_of(place, str(staging)) / "checkpoints" / store.name_of(2)).mkdir(parents=True)
    train(keys_for(place, **(SMALL | {"run__staging": str(staging), "train__stop_after": 2})))
    (kept,) = staging.rglob("checkpoints")
    return [*store.problems(place / "checkpoints" / store.name_of(2)), *map(str, kept.iterdir())]


def test_a_part_of_an_earlier_start_is_not_sent(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(_beside_another, 2, tmp_path) == [[], []]


@pytest.mark.slow
def test_resumes_from_a_store_on_another_mesh(pool: Pool, tmp_path: Path) -> None:
    """Two ranks, and four with other degrees: bitwise as from a folder."""
    place = as_path(f"file://{tmp_path}/run")
    staged: Keys = {"run__staging": tmp_path / "staging"}
    for mesh, steps in (("data", 2), ("context", 4)):
        expected = train_on(pool, tmp_path / "here", {}, MESHES[mesh], steps)
        assert_bitwise(train_on(pool, place, staged, MESHES[mesh], steps), expected)
    assert [line["samples"] for line in lines(place)] == [8, 16, 24, 32]


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A loopback S3 server with a bucket, in a thread of this process."""
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer
    from moto.s3.models import s3_backends
    from s3fs import S3FileSystem

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    backend = s3_backends["123456789012"]["aws"]
    backend.create_bucket("bucket", "us-east-1")
    yield lambda: [str(key) for key in list(backend.buckets["bucket"].keys)]
    server.stop()
    backend.reset()
    S3FileSystem.clear_instance_cache()


def steps_of(keys: list[str], file: str = store.MANIFEST) -> set[int]:
    return {store.step_of(Path(key).parent) for key in keys if key.endswith(f"/{file}")}


@pytest.mark.slow
def test_a_run_in_s3_is_killed_thrice_and_goes_on_on_another_mesh(
    s3: Callable[[], list[str]], pool: Pool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Bitwise the run in a folder that nobody kills, and the same samples; no start has what the last
    one left on the disk."""
    small = [f"--{key.replace('__', '.')}={value}" for key, value in SMALL.items()]
    run, seed = as_path("s3://bucket/runs/mine"), random.randrange(2**32)
    print(f"seed {seed}")  # another in each run: a failure shows which
    chance = random.Random(seed)

    def start(steps: int, *words: str) -> list["subprocess.Popen[str]"]:
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        keys = [
            *small,
            f"--run.dir={run}",
            f"--train.stop_after={steps}",
            "--metrics.tensorboard=false",
        ]
        line, port = command("train.py", *keys, *words), free_port()  # the last start's may be taken
        ranks = [begin(line, **of_rank(rank, 2, port)) for rank in range(2)]
        request.addfinalizer(lambda: kill_sessions(each for each in ranks if each.poll() is None))
        return ranks

    def newest() -> int:
        return max(steps_of(s3()), default=0)

    def in_an_upload(before: int) -> bool:
        keys = s3()
        whole, begun = steps_of(keys), steps_of(keys, "__0_0.safetensors")
        return max(whole, default=0) > before and max(begun - whole, default=0) > max(whole)

    for wanted, uploading in ((4, False), (8, True), (12, False)):
        before, processes, end = newest(), start(40), time.monotonic() + TIMEOUT
        while not (in_an_upload(before) if uploading else newest() >= wanted):
            assert all(each.poll() is None for each in processes), processes[0].communicate()
            assert time.monotonic() < end
            time.sleep(0.02)  # the ranks need the processor, and the store is in this process
        time.sleep(0 if uploading else chance.random() / 5)
        assert all(each.poll() is None for each in processes)  # it was still training
        kill_sessions(processes)
        for each in processes:
            each.communicate()
    mesh: Keys = {"parallel__tp": 2, "parallel__dp_shard": 1}
    for steps, words in ((40, []), (44, ["--parallel.tp=2", "--parallel.dp_shard=1"])):
        started = start(steps, *words)
        said = [each.communicate(timeout=TIMEOUT) for each in started]
        assert [each.returncode for each in started] == [0, 0], said
        assert f"{run}/checkpoints/step-" in said[0][0]
    keys = keys_for(tmp_path / "here", **(SMALL | {"train__stop_after": 40}))
    pool.run(train, 2, keys)
    pool.run(train, 2, keys | mesh | {"train__stop_after": 44})
    for step in (42, 44):
        name = f"checkpoints/{store.name_of(step)}"
        assert shards(run / name) == shards(tmp_path / "here" / name)
    there, here = (
        [(a["step"], a["loss"], a["samples"]) for a in lines(p)] for p in (run, tmp_path / "here")
    )
    assert there == here
    assert steps_of(s3(), "state.json") == {42, 44}  # what was half sent is gone


@pytest.mark.slow
def test_what_s3_refuses_is_one_line(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from s3fs import S3FileSystem

    def line(url: str) -> str:
        return refusal(parse, ["train.toml", f"--run.dir={url}"], "train.py", trains=True)

    where = "train.toml: run.dir: cannot write to s3://"
    assert line("s3://nobodys/run") == f"{where}nobodys/run: The specified bucket does not exist"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    S3FileSystem.clear_instance_cache()
    assert line("s3://bucket/run") == f"{where}bucket/run: Unable to locate credentials"
