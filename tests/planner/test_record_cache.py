"""Records on disk: what is read is what was written, and what decides a record is in its name."""

import hashlib
import json
import os
import zlib
from pathlib import Path

import pytest

from compose.config.job import Job
from compose.planner import record_cache
from compose.planner.few_layers import LayerRuns, few_micro_batches, runs_of
from compose.planner.record import TracedStep
from compose.planner.record_cache import CacheFile, RecordFile, default_folder, remembered
from compose.planner.trace import RankStep, trace
from tests.support.helpers import keys_in, make_job

SMALL = "dp_shard=2 model.n_layers=6 model.dim=64 train.seq_len=64 train.global_batch=16"
STAGES = "pp=2 dp_shard=1 model.n_layers=10"


def of(keys: str = "", ranks: int = 2) -> Job:
    return make_job(ranks, **(keys_in(SMALL) | keys_in(keys)))


def name_of(folder: Path, job: Job, rank: int = 0) -> Path | None:
    runs = runs_of(job)
    return RecordFile(folder, job, runs and runs.fewest(), rank).file.path


def made(job: Job) -> TracedStep:
    return trace(RankStep(job, micro_batches=len(few_micro_batches(job)), device_type="cpu"))


def test_what_was_written_is_read_bitwise(tmp_path: Path) -> None:
    job = of(f"{STAGES} model.n_layers=2")
    traced, file = made(job), RecordFile(tmp_path, job, None, 0)
    assert file.read() is None
    file.write(traced)
    assert file.read() == traced
    assert traced.broadcast
    file.file.write({"segments": 3})
    assert file.read() is None


@pytest.mark.parametrize(
    "keys",
    ["model.n_layers=9", "train.global_batch=32", "optimizer.lr=1", "run.dir=x"],
)
def test_depth_and_length_of_a_run_share_a_record(tmp_path: Path, keys: str) -> None:
    assert name_of(tmp_path, of()) == name_of(tmp_path, of(keys))


def test_a_deeper_pipeline_shares_records(tmp_path: Path) -> None:
    first, deeper = of(STAGES), of(f"{STAGES} model.n_layers=16")
    assert first.degrees.pp_layers != deeper.degrees.pp_layers
    assert name_of(tmp_path, first) == name_of(tmp_path, deeper)
    assert name_of(tmp_path, first) != name_of(tmp_path, first, 1)


def test_a_layer_more_in_one_stage_or_another_is_another_record(tmp_path: Path) -> None:
    job = of("pp=2 dp_shard=1 pp_schedule=ZBVZeroBubble model.n_layers=20")
    runs = runs_of(job)
    assert runs
    assert runs.lengths == ((1, 4), (5,), (5,), (4, 1))
    more = [((1, 4), (3,), (3,), (3, 1)), ((1, 3), (3,), (3,), (4, 1))]
    names = [RecordFile(tmp_path, job, LayerRuns(lengths), 0).file.path for lengths in more]
    assert names[0] != names[1]


OTHERS = (
    "model.n_heads=2",
    "model.dim=128",
    "train.seq_len=128",
    "train.micro_batch=1",
    "train.loss_chunk=32",
    "dp_shard=1 tp=2",
    "zero=1",
    "precision.param=bfloat16",
    "activation_checkpoint.mode=full",
    "optimizer.name=muon",
    "train.global_batch=4",
    'model.lora.rank=2 model.lora.targets=["layers.*.attention.w*"]',
)


def test_what_decides_a_record_is_in_its_name(tmp_path: Path) -> None:
    names = [name_of(tmp_path, of(keys)) for keys in ("", *OTHERS)]
    assert len(set(names)) == len(names)


def test_other_code_makes_other_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = name_of(tmp_path, of())
    monkeypatch.setattr(record_cache, "sources", lambda name: "other")
    assert name_of(tmp_path, of()) != before


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    file, content = CacheFile(tmp_path, "costs", "a", "b"), {"x": [1, 0.1, "text", None, True]}
    assert file.read() is None
    file.write(content)
    assert file.read() == content
    assert CacheFile(tmp_path, "costs", "a", "c").read() is None
    assert file.path
    whole = file.path.read_bytes()
    foreign = zlib.compress(json.dumps("x").encode())[:-1]
    for broken in (b"", whole[:-5], whole[:40] + b"x" + whole[41:], _signed(foreign), _signed(b"no")):
        file.path.write_bytes(broken)
        assert file.read() is None
    file.write(content)
    assert file.path.read_bytes() == whole


def test_what_is_remembered_is_made_once(tmp_path: Path) -> None:
    """For the same sources and question; without a folder it is made each time."""
    asked: list[int] = []

    def make() -> list[int]:
        asked.append(1)
        return [len(asked), 7]

    results = [remembered(tmp_path, "flight", "llama", words, make) for words in ("a", "a", "b")]
    assert results == [[1, 7], [1, 7], [2, 7]]
    assert remembered(None, "flight", "llama", "a", make) == [3, 7]


def _signed(content: bytes) -> bytes:
    return hashlib.sha256(content).digest() + content


def test_what_another_process_would_name_otherwise_is_not_kept(tmp_path: Path) -> None:
    file = CacheFile(tmp_path, "costs", repr(object()))
    file.write(1)
    assert file.read() is None
    assert not [*tmp_path.iterdir()]


def test_the_oldest_records_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        (tmp_path / str(number)).write_bytes(b"x" * 100)
        os.utime(tmp_path / str(number), (number, number))
    monkeypatch.setattr(record_cache, "_LIMIT", 250)
    record_cache._remove_oldest(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_a_home_that_cannot_be_written_has_no_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "dtensor-compose/records"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert default_folder() is None
