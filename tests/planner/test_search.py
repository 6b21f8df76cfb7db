"""The planner: what it picks, what it writes, and what it refuses."""

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compose.cli.command_line import read_words
from compose.cli.plan import _looked_at, _short, _write, _write_file
from compose.cli.question import Question
from compose.config.toml import given_keys, load
from compose.errors import ConfigError
from compose.parallel.mesh import Parallel, crosses_nodes
from compose.planner import search as search_module
from compose.planner.against_run import against
from compose.planner.candidates import (
    DEGREES,
    REFINED,
    TRIED,
    Candidate,
    Space,
    candidates,
    capacity,
    shape_for,
    with_keys,
)
from compose.planner.cluster import load_cluster
from compose.planner.estimate import Estimate, RankPeak, weakest
from compose.planner.quick_estimate import QuickEstimate, quick
from compose.planner.quick_memory import micro_batches
from compose.planner.report import SearchResult
from compose.planner.search import RecordQueue, fewest, search
from tests.support.command_lines import answered, execute
from tests.support.helpers import ROOT, keys_in, refusal

TRAIN = str(ROOT / "train.toml")
SMALL = ["--model.n_layers=2", "--model.dim=64", "--train.seq_len=64", "--train.global_batch=8"]


def space(file: str, cluster: str, ranks: int, **keys: object) -> Space:
    """A space in which all that the search tries is free, but for ``keys`` (with __ for the dot)."""
    overrides = [(name.replace("__", "."), str(value)) for name, value in keys.items()]
    tried = {*DEGREES, *TRIED}
    fixed = {key for key, where in given_keys(file, overrides).items() if key not in tried}
    fixed |= {name for name, _ in overrides}
    return Space(load(file, overrides), load_cluster(cluster), ranks, frozenset(fixed))


def picks(where: Space, count: int = 1, offload: bool = False) -> list[Candidate]:
    """The candidates with the best quick estimates of those that fit by it."""
    facts, room = shape_for(where), capacity(where.cluster)
    results = [c for c in candidates(where, facts, offload) if c.rough.memory <= room]
    return sorted(results, key=lambda c: c.rough.step)[:count]


LLAMA_8B = keys_in("model.preset=8b precision.param=bfloat16 train.global_batch=64 train.seq_len=4096")


def test_a_record_corrects_the_quick_estimates_of_its_kind() -> None:
    """Quick estimates of ZBV are five times too small here, and those of 1F1B right."""
    where = space(TRAIN, "h100_sxm", 16)

    def made(schedule: str, tp: int, step: float, size: float) -> Candidate:
        keys = {"parallel.pp": 2, "parallel.tp": tp, "parallel.pp_schedule": schedule}
        rough = QuickEstimate({"compute": step}, {"weights": size * 2**30})
        return Candidate(with_keys(where.config, keys), keys, rough)

    def recorded(candidate: Candidate, size: float) -> Candidate:
        peak = RankPeak(int(size * 2**30), int(size * 2**30), {})
        result = Estimate([peak], candidate.rough.step, 1.0, 0.5, 0.0, {}, {}, [])
        return replace(candidate, estimate=result)

    every = [made("ZBVZeroBubble", tp, tp / 10, 40) for tp in (1, 2, 4)]
    every += [made("1F1B", tp, tp, 39) for tp in (1, 2, 4)]
    turns, result, order = RecordQueue(where, every), [], []
    for _ in every:
        candidate = turns.next(result)
        parallel = candidate.config.parallel
        order.append((parallel.pp_schedule, parallel.tp))
        result.append(recorded(candidate, 200 if parallel.pp_schedule == "ZBVZeroBubble" else 39))
    assert order[:4] == [("ZBVZeroBubble", 1), ("1F1B", 1), ("1F1B", 2), ("1F1B", 4)]
    assert set(order) == {(c.config.parallel.pp_schedule, c.config.parallel.tp) for c in every}


def test_the_best_without_a_pipeline_is_recorded_first_too() -> None:
    """Records of pipelines alone say nothing of quick estimates without one."""
    where, every = space(TRAIN, "h100_sxm", 16), []
    for number, (pp, replicas) in enumerate([(2, 1), (4, 1), (8, 1), (1, 4), (1, 2)]):
        keys = {"parallel.pp": pp, "parallel.dp_replicate": replicas, "parallel.tp": 2}
        rough = QuickEstimate({"compute": number + 1.0}, {"weights": 2.0**30})
        every.append(Candidate(with_keys(where.config, keys), keys, rough))
    assert RecordQueue(where, every).next_round([], 6) == [every[0], every[3], every[1]]


def test_fsdp_with_and_without_offload_does_not_share_its_turns() -> None:
    where, every = space(TRAIN, "h100_sxm", 16), []
    for number, (tp, offload) in enumerate([(1, "none"), (1, "none"), (1, "cpu"), (2, "none")]):
        keys = {"parallel.tp": tp, "parallel.offload": offload}
        rough = QuickEstimate({"compute": number + 1.0}, {"weights": 2.0**30})
        every.append(Candidate(with_keys(where.config, keys), keys, rough))
    turns = RecordQueue(where, every)
    assert [turns.next([]) for _ in every] == every


def test_a_mesh_that_cannot_cut_the_model_is_no_candidate() -> None:
    """GPT-2 of 1,558M parameters has 25 heads, also if all candidates are asked for; a Llama has 8."""
    shape = keys_in("model.name=gpt2 model.preset=1558m train.seq_len=1024 train.global_batch=64")
    where = space(TRAIN, "a100_40gb", 8, **shape)
    every = list(candidates(where, shape_for(where), anyway=True))
    assert {candidate.config.parallel.tp for candidate in every} == {1}
    assert all(math.isfinite(candidate.rough.memory) for candidate in every)
    where = space(TRAIN, "h100_sxm", 24, train__global_batch=48)
    heads = where.config.model.config.n_heads
    assert {
        heads % candidate.config.parallel.tp for candidate in candidates(where, shape_for(where))
    } == {0}


def test_one_node_holds_a_7b_by_zero_alone() -> None:
    best = picks(space(TRAIN, "h100_sxm", 8, **LLAMA_8B))[0].config.parallel
    assert (best.tp, best.pp, best.cp, best.dp_shard) == (1, 1, 1, 8)
    assert best.zero >= 2


def test_long_sequences_take_context_parallel() -> None:
    shape = keys_in("train.seq_len=131072 train.global_batch=8")
    best = picks(space(TRAIN, "h100_sxm", 8, **(LLAMA_8B | shape)))[0].config
    assert best.parallel.cp >= 2
    assert best.activation_checkpoint.mode in ("selective", "full")


def test_a_70b_keeps_tp_in_the_node_and_the_pipeline_short() -> None:
    shape = keys_in("model.preset=70b train.seq_len=8192 train.global_batch=512 cp=1")
    where = space(TRAIN, "h100_sxm", 512, **(LLAMA_8B | shape))
    best = picks(where)[0]
    assert best.config.parallel.tp <= 8  # by records FSDP alone takes 9.29 s, with tp 4 9.36 s
    assert best.config.parallel.pp <= 8
    fastest: dict[bool, float] = {}
    # Replicas have zero 3 alone.
    for candidate in picks(replace(where, fixed={*where.fixed, "parallel.dp_replicate"}), 10_000):
        shards = candidate.config.parallel.zero == 3
        fastest.setdefault(shards, candidate.rough.step)
    assert fastest[True] == pytest.approx(fastest[False], rel=0.05)


def test_two_small_devices_take_offload_and_recomputation() -> None:
    shape = {"model__n_layers": 42, "train__global_batch": 16, "train__loss_chunk": 1024}
    where = space(TRAIN, "rtx4090", 2, **(LLAMA_8B | shape))
    assert not picks(where)
    best = picks(where, offload=True)[0].config
    assert best.parallel.offload == "cpu"
    assert best.activation_checkpoint.mode == "full"


def test_a_schedule_that_splits_the_backward_recomputes_only_if_it_is_asked_for() -> None:
    """Each group of weights would recompute its layer."""

    def tried(**keys: object) -> set[tuple[str, str]]:
        of = space(TRAIN, "h100_sxm", 4, parallel__pp=2, model__n_layers=8, **keys)
        where = replace(of, objective="memory")  # else nothing recomputes where all fits without
        configs = [one.config for one in candidates(where, shape_for(where), anyway=True)]
        return {(one.parallel.pp_schedule, one.activation_checkpoint.mode) for one in configs}

    both, modes = ("1F1B", "Interleaved1F1B"), ("none", "selective", "full")
    free = {(schedule, mode) for schedule in both for mode in modes} | {("ZBVZeroBubble", "none")}
    assert tried() == free
    asked = tried(parallel__pp_schedule="ZBVZeroBubble")
    assert asked == {("ZBVZeroBubble", mode) for mode in modes}


def test_a_schedule_decides_which_micro_batches_are_tried(tmp_path: Path) -> None:
    """DualPipeV takes 2 pp of them at least, a table exactly its own number, PipeDream one."""
    table = tmp_path / "table.csv"
    table.write_text("0F0,0F1,0F2,0F3,,0B0,0B1,0B2,0B3\n,1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n")
    shape = {"parallel__pp": 2, "model__n_layers": 8, "train__global_batch": 32}

    def tried(schedule: str) -> set[int]:
        where = space(TRAIN, "h100_sxm", 4, **shape, parallel__pp_schedule=schedule)
        every = list(candidates(where, shape_for(where), anyway=True))
        assert all(math.isfinite(one.rough.step) for one in every)
        return {micro_batches(one.config) for one in every}

    assert min(tried("DualPipeV")) == 4
    assert tried(str(table)) == {4}
    assert min(tried("PipeDream")) == 1


def test_a_pipeline_with_more_stages_than_layers_is_not_estimated() -> None:
    where = space(TRAIN, "h100_sxm", 8, model__n_layers=4)
    config = with_keys(where.config, {"parallel.pp": 8, "train.micro_batch": 1})
    assert math.isinf(quick(shape_for(where), config, where.cluster).memory)


def test_a_degree_that_the_plan_cannot_cut_is_refused() -> None:
    problem = "parallel.ep: 2: the plan of llama cannot cut ep; use 1"
    assert refusal(search, space(TRAIN, "h100_sxm", 8, parallel__ep=2)) == problem


def test_a_reason_that_is_not_the_mesh_is_told() -> None:
    where = space(TRAIN, "cpu", 2, precision__param="float16")
    assert "float16" in refusal(search, where)


def test_ctrl_c_before_the_first_record_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*unused: object) -> Iterator[Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(search_module, "_recorded", stopped)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        search(space(TRAIN, "h100_sxm", 2), progress=said.append)
    assert not any("best so far" in line for line in said)


def test_only_what_is_free_changes() -> None:
    where = space(TRAIN, "h100_sxm", 8, parallel__tp=2, parallel__zero=3, train__global_batch=64)
    result = list(candidates(where, shape_for(where)))
    assert {c.config.parallel.tp for c in result} == {2}
    assert {c.config.parallel.zero for c in result} == {3}
    assert len({c.config.parallel.dp_shard for c in result}) > 1
    assert {c.config.train.global_batch for c in result} == {64}
    assert {c.config.model for c in result} == {where.config.model}


@pytest.mark.slow
def test_memory_ranks_candidates_when_asked() -> None:
    shape = "model.n_layers=2 model.dim=64 train.seq_len=64 train.global_batch=8 train.micro_batch=1"
    keys = keys_in(f"{shape} activation_checkpoint.mode=none")
    where = space(TRAIN, "h100_sxm", 4, **keys)
    fast = [c.estimate.step_seconds for c in search(where, most=4).candidates if c.estimate]
    lean = [c.reserved for c in search(replace(where, objective="memory"), most=4).candidates]
    assert fast == sorted(fast)
    assert lean == sorted(lean)


CANDIDATE = {
    *("keys", "fits", "step_seconds", "tokens_per_second_per_device", "mfu", "bubble", "exposed"),
    *("memory", "why", "host_bytes", "kwh", "lacks"),
}


def run(*arguments: str) -> Any:
    return answered("-m", "compose", "plan", *arguments)


@pytest.mark.slow
def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("plan.json", "plan.html", "best.toml")]
    words = ["--cluster=h100_sxm", "--world-size=4", "--candidates=2", "--explain"]
    written = [f"--json={files[0]}", f"--report={files[1]}", f"--write={files[2]}"]
    done = run(TRAIN, *SMALL, *words, *written)
    assert done.returncode == 0, done.stderr
    data = json.loads(files[0].read_text())
    assert set(data) >= {"cluster", "world_size", "capacity", "candidates"}
    assert len(data["candidates"]) == 2
    for candidate in data["candidates"]:
        assert set(candidate) - {"timeline"} == CANDIDATE
        assert set(candidate["memory"]) == {"allocated", "reserved", "by_category", "by_stage"}
        assert candidate["memory"]["reserved"] >= candidate["memory"]["allocated"]
        assert sum(candidate["memory"]["by_category"].values()) == candidate["memory"]["allocated"]
    first, second = (candidate["step_seconds"] for candidate in data["candidates"])
    assert first <= 1.02 * second  # of those within 2% the simplest comes first
    assert "<html" in files[1].read_text()
    dry = execute("train.py", str(files[2]), "--dry-run", "--world-size=4")
    assert dry.returncode == 0, dry.stderr
    best, keys = load(str(files[2])).parallel, data["candidates"][0]["keys"]
    assert all(getattr(best, key.partition(".")[2]) == keys[key] for key in DEGREES)


def test_a_device_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "stdout"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, link):
        _write_file("--json", path, "[]")
        assert os.read(reader, 100) == b"[]"
    os.close(reader)
    assert pipe.is_fifo()
    assert link.is_symlink()


def test_keys_of_every_table_are_written(tmp_path: Path) -> None:
    file, lora = tmp_path / "best.toml", ["--model.lora.rank=4", '--model.lora.targets=["layers.*.w*"]']
    given = read_words(
        [TRAIN, f"--write={file}", "--checkpoint.async=false", *lora], {"--write": "FILE"}
    )
    where = space(TRAIN, "cpu", 1)
    question = Question(load(TRAIN, given.overrides), where.cluster, 1, TRAIN, {})
    _write(
        given,
        question,
        where,
        [Candidate(where.config, {}, quick(shape_for(where), where.config, where.cluster))],
        {},
    )
    config = load(str(file))
    assert not config.checkpoint.async_
    assert (config.model.lora.rank, config.model.lora.targets) == (4, ("layers.*.w*",))


def test_as_is_estimates_the_files_own_mesh() -> None:
    mesh = ["--parallel.tp=2", "--parallel.pp=2", "--train.micro_batch=1"]
    done = run(TRAIN, *SMALL, *mesh, "--cluster=h100_sxm", "--world-size=8", "--as-is")
    assert done.returncode == 0, done.stderr
    assert "pipeline rank 1" in done.stdout
    header, row, *_ = done.stdout.splitlines()
    assert header.split()[:3] == ["pp", "dp_shard", "tp"]
    assert row.split()[:3] == ["2", "2", "2"]


ON_8 = ["--cluster=h100_sxm", "--world-size=8"]
BAD = [
    (
        ["--cluster=h100_sxm"],
        "command line: plan: needs --gpus, as 16xa100_40gb, or --cluster and --world-size",
    ),
    (
        [*ON_8, "--objective=tim"],
        "command line: --objective: tim is none of time, memory, devices, params; did you mean time?",
    ),
    ([*ON_8, "--candidates=0"], "command line: --candidates: 0 is not a number of candidates"),
    (
        [*ON_8, "--objective=devices", "--tokens=1e9"],
        "command line: --days: --objective devices needs a number above 0, as 30",
    ),
    (
        [*ON_8, "--as-is", "--parallel.tp=3"],
        f"{TRAIN}: parallel: the degrees' product tp 3 does not divide the world size 8; nearest:"
        " parallel.tp = 2",
    ),
]


@pytest.mark.parametrize(("words", "line"), BAD)
def test_bad_input_is_one_line(words: list[str], line: str) -> None:
    done = run(TRAIN, *words)
    assert (done.returncode, done.stderr.strip()) == (2, line)


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "ranks", "limit"),
    [
        ("llama3_70b_tp8_pp8_dp8_zero1.toml", 512, 90),
        ("llama3_405b_tp8_pp16_fsdp64.toml", 16384, 90),
        ("qwen3_235b_a22b_ep8_pp8_dp32_zero1.toml", 1024, 150),
        ("deepseek_v3_671b_pp16_ep64.toml", 1024, 150),
    ],
)
def test_large_models_are_planned_in_time(tmp_path: Path, file: str, ranks: int, limit: float) -> None:
    """``limit``: seconds, on two cores with nothing beside it."""
    began, best = time.monotonic(), tmp_path / "best.toml"
    words = ["--cluster=h100_sxm", f"--world-size={ranks}", f"--write={best}"]
    done = run(str(ROOT / "recipes" / file), *words)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < limit
    dry = execute("train.py", str(best), "--dry-run", f"--world-size={ranks}")
    assert dry.returncode == 0, dry.stderr


def test_a_degree_that_leaves_the_node_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert not crosses_nodes(Parallel(tp=16))
    assert not crosses_nodes(Parallel(tp=8, ep=4), 8)
    assert crosses_nodes(Parallel(tp=16), 8) == "tp 16 crosses nodes of 8 ranks"
    assert crosses_nodes(Parallel(tp=3, ep=16), 8) == "tp 3 and ep 16 cross nodes of 8 ranks"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert crosses_nodes(Parallel(tp=4)) == "tp 4 crosses nodes of 2 ranks"


def test_an_axis_that_the_plan_cannot_cut_is_left_out() -> None:
    where = space(TRAIN, "h100_sxm", 8, train__global_batch=64)
    facts = replace(shape_for(where), axes=frozenset({"cp", "pp"}))
    assert {c.config.parallel.tp for c in candidates(where, facts)} == {1}
    assert {c.config.parallel.pp for c in candidates(where, facts)} > {1}


def test_layers_of_stages_that_are_kept_are_those_of_every_candidate() -> None:
    where = space(
        TRAIN, "h100_sxm", 8, train__global_batch=64, parallel__pp=2, parallel__pp_layers="[3, 2]"
    )
    where = replace(where, fixed=["parallel.pp_layers"])
    layers = {
        (c.config.parallel.pp, c.config.parallel.pp_layers) for c in candidates(where, shape_for(where))
    }
    assert layers == {(2, (3, 2))}


@pytest.mark.slow
def test_the_fewest_devices_are_found() -> None:
    shape = {"model__n_layers": 2, "train__global_batch": 8, "train__micro_batch": 1}
    where = space(TRAIN, "h100_sxm", 8, **shape)
    one = search(replace(where, world_size=1), most=2).candidates[0].estimate
    assert one is not None
    rate = one.tokens_per_second_per_device
    few, result = fewest(where, tokens=rate * 0.9 * 86400, days=1)
    assert (few.world_size, bool(result)) == (1, True)
    more, result = fewest(where, tokens=rate * 1.2 * 86400, days=1)
    assert more.world_size > 1
    assert result
    assert result[0].estimate
    assert result[0].estimate.tokens_per_second_per_device * more.world_size >= rate * 1.2
    assert fewest(where, tokens=1e30, days=1)[1] == []


def test_all_devices_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees a token a second: four of six are too few for five a second."""
    monkeypatch.setattr(search_module, "_recorded", Recorded())
    where = space(TRAIN, "h100_sxm", 6, train__global_batch=48)
    found, result = fewest(where, tokens=5 * 86400, days=1)
    assert (found.world_size, bool(result)) == (6, True)


@pytest.mark.slow
def test_a_prediction_is_held_against_a_run(tmp_path: Path) -> None:
    folder, corrected = tmp_path / "run", tmp_path / "corrected.toml"
    keys = ["--model.n_layers=2", "--train.seq_len=128", "--train.steps=5", f"--run.dir={folder}"]
    done = execute("train.py", *keys, "--profile.steps=[4,4]", "--profile.memory=true")
    assert done.returncode == 0, done.stderr
    rows = {row.name: row for row in against(folder, load_cluster("cpu"))}
    # Bytes are those of the profile; seconds are those of a machine that the file does not describe.
    for name in ("peak memory", *(f"memory: {c}" for c in ("weights", "gradients", "optimizer"))):
        assert rows[name].ratio == pytest.approx(1, rel=0.015)
    assert rows["memory: activations"].ratio == pytest.approx(1, rel=0.05)
    for name in ("step", "product", "attention", "other"):
        assert rows[name].predicted > 0 < rows[name].measured
    told = run(f"--against={folder}", "--cluster=cpu", f"--write={corrected}")
    assert told.returncode == 0, told.stderr
    assert "measured / predicted" in told.stdout
    again = {row.name: row for row in against(folder, load_cluster(str(corrected)))}
    for name in ("product", "attention"):
        assert abs(math.log(again[name].ratio)) < abs(math.log(rows[name].ratio)) or again[
            name
        ].ratio == pytest.approx(1, abs=0.25)


def test_a_folder_without_a_run_is_one_line(tmp_path: Path) -> None:
    done = run(f"--against={tmp_path}", "--cluster=cpu")
    assert done.returncode == 2
    assert done.stderr == f"{tmp_path}/config.toml: no such file\n"
    done = run(f"--against={tmp_path}")
    assert done.stderr == "command line: plan: --against needs --cluster, on which the run was made\n"


@pytest.mark.slow
def test_where_nothing_fits_it_says_by_how_much() -> None:
    shape = ["--model.preset=70b", "--train.seq_len=4096", "--train.micro_batch=1"]
    fixed = ["--activation_checkpoint.mode=full", "--parallel.offload=none", "--parallel.tp=1"]
    words = ["--cluster=rtx4090", "--world-size=1", "--candidates=1", "--train.global_batch=1"]
    done = run(TRAIN, *shape, *fixed, *words)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("nothing fits; the best is short of ")
    assert last.endswith("GiB a device; more devices would help")  # other cures are of pinned keys


class Recorded:
    """Records by formula: twice a quick estimate's time and ``size`` times its bytes; or all equal."""

    def __init__(
        self, size: float = 1.0, backwards: bool = False, interrupted: int = 0, equal: bool = False
    ) -> None:
        self.size, self.backwards, self.interrupted = size, backwards, interrupted
        self.equal = equal
        self.rounds: list[list[Candidate]] = []

    def __call__(
        self, space: Space, chosen: Sequence[Candidate]
    ) -> Iterator[tuple[int, Candidate | ConfigError]]:
        self.rounds.append(list(chosen))
        places = list(range(len(chosen)))
        for number, place in enumerate(reversed(places) if self.backwards else places):
            if self.interrupted and number == self.interrupted:
                raise KeyboardInterrupt
            one = chosen[place]
            size = 2**30 if self.equal else int(one.rough.memory * self.size)
            step = 1.0 if self.equal else 2 * one.rough.step
            made = Estimate([RankPeak(size, size, {})], step, 1.0, 0.5, 0.0, {}, {}, [])
            yield place, replace(one, estimate=made)


def searched(
    monkeypatch: pytest.MonkeyPatch, by: Recorded, cluster: str = "h100_sxm", **options: Any
) -> SearchResult:
    monkeypatch.setattr("compose.planner.search._recorded", by)
    return search(space(TRAIN, cluster, 16, **LLAMA_8B), **options)


def test_the_answer_does_not_depend_on_which_record_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for equal in (False, True):  # among equal ones the order of records must not decide
        first, second = Recorded(equal=equal), Recorded(equal=equal, backwards=True)
        assert searched(monkeypatch, first) == searched(monkeypatch, second)
        assert first.rounds == second.rounds
        assert sum(map(len, first.rounds)) == 6


def test_plain_fsdp_and_the_textbooks_mesh_are_always_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    by = Recorded()
    searched(monkeypatch, by)
    degrees = [c.config.parallel for c in by.rounds[0]]
    assert any(p.dp_shard == 16 and p.zero == 3 for p in degrees)
    assert any(p.dp_shard == 8 and p.dp_replicate == 2 for p in degrees)
    assert any(p.tp == 8 and p.cp == 1 for p in degrees)


def test_a_cap_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    result = searched(monkeypatch, Recorded(), seconds=0.0)
    assert (result.capped, len(result.candidates), result.certain) == (True, 1, False)
    told: list[str] = []
    result = searched(monkeypatch, Recorded(interrupted=2), progress=told.append)
    assert (result.capped, len(result.candidates)) == (True, 2)
    assert told[-1] == "interrupted: these are the best so far"
    assert _looked_at(replace(result, let_through=40)) == (
        "2 of 40 candidates that may fit were looked at"
    )
    assert _looked_at(replace(result, let_through=0)) == (
        "no candidate may fit, and 2 of those that need least memory were looked at"
    )


def test_nothing_fits_is_said_only_if_it_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_in("pp=1 cp=1 zero=3 train.micro_batch=1 activation_checkpoint.mode=full")
    where = space(TRAIN, "h100_sxm", 16, **(LLAMA_8B | keys))
    monkeypatch.setattr("compose.planner.search._recorded", Recorded(size=100.0))
    short = search(where, most=3)
    assert not short.certain
    text = _short(where, short.candidates[0], short)
    assert text.startswith(f"6 of {short.let_through} candidates that may fit were looked at, and none")
    assert text.endswith(f"; --candidates {short.let_through} looks at all of them")
    every = search(where, most=short.let_through)
    assert (every.certain, len(every.candidates)) == (True, every.let_through)
    free = replace(where, fixed=frozenset(where.fixed) - {"parallel.offload"})
    text = _short(free, every.candidates[0], every)
    assert text.startswith("nothing fits; the best is short of ")
    assert text.endswith(" GiB a device; more devices would help")  # what is free was tried
    none = search(replace(where, cluster=load_cluster("rtx4090"), world_size=2))
    assert (none.let_through, none.certain) == (0, True)


def test_offload_is_tried_where_no_candidate_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may fit by its quick estimate, and does not by its record."""
    keys = keys_in("tp=1 pp=1 cp=1 ep=1 dp_replicate=1 zero=3 train.micro_batch=1")
    keys |= keys_in("activation_checkpoint.mode=full")
    where = space(TRAIN, "h100_sxm", 16, **(LLAMA_8B | keys))
    where = replace(where, fixed=frozenset(where.fixed) - {"parallel.offload"})
    monkeypatch.setattr(search_module, "_recorded", Recorded(size=100.0))
    result = search(where)
    assert [c.config.parallel.offload for c in result.candidates] == ["cpu", "none"]
    assert result.certain


class Refusing(Recorded):
    """Records in which one way to recompute is not legal."""

    def __call__(
        self, space: Space, chosen: Sequence[Candidate]
    ) -> Iterator[tuple[int, Candidate | ConfigError]]:
        assert len(self.rounds) < 20, "the search does not end"
        for place, made in super().__call__(space, chosen):
            budget = chosen[place].config.activation_checkpoint.mode == "budget"
            yield place, ConfigError("no budget") if budget else made


def test_a_refinement_that_is_refused_is_not_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a budget with compiled experts, which only the rules know of."""

    def finer(where: Space, shape: object, recorded: Sequence[Candidate]) -> list[Candidate]:
        keys = {"activation_checkpoint.mode": "budget"}
        return [replace(recorded[0], config=with_keys(recorded[0].config, keys))]

    by = Refusing()
    monkeypatch.setattr(search_module, "refinements", finer)
    result = searched(monkeypatch, by)
    assert len(result.candidates) == 6
    chosen = [one.config.activation_checkpoint.mode for made in by.rounds for one in made]
    assert chosen.count("budget") == 1


def test_refinements_take_no_candidate_out_of_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing fits, all that may fit are recorded before this is certain."""
    by = Recorded(size=100.0)
    monkeypatch.setattr(search_module, "_recorded", by)
    keys = keys_in("tp=1 pp=1 cp=1 dp_replicate=1 train.micro_batch=4")
    where = space(TRAIN, "h100_sxm", 16, **(LLAMA_8B | keys))
    where = replace(where, fixed=frozenset(where.fixed) - {*REFINED})  # they are free too
    result = search(where)
    assert result.certain
    recorded = [one.config for made in by.rounds for one in made]
    assert all(one.config in recorded for one in candidates(where, shape_for(where)))


@pytest.mark.slow
def test_picks_repeat_with_one_core_and_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = "model.n_layers=2 model.dim=64 train.seq_len=64 train.global_batch=8 train.micro_batch=1"
    where = space(TRAIN, "h100_sxm", 4, **keys_in(shape))
    monkeypatch.setattr("compose.planner.record_pool.cores", lambda: 1)
    first = search(where, most=4)
    monkeypatch.setattr("compose.planner.record_pool.cores", lambda: 2)
    for _ in range(2):  # records are made, and read
        assert search(replace(where, cache=tmp_path), most=4) == first
    assert list(tmp_path.iterdir())


def test_kinds_of_device_get_shares_by_their_speeds() -> None:
    """The candidates that are recorded have the speeds, for the run that they are written for."""
    kinds = ((load_cluster("h100_sxm"), 8), (load_cluster("a100_80gb"), 8))
    where = space(TRAIN, "a100_80gb", 16, model__n_layers=2, precision__param="bfloat16")
    free = frozenset(where.fixed) - {"parallel.speeds"}
    where = replace(where, cluster=weakest(kinds), kinds=kinds, fixed=free)
    result = search(where, most=2).candidates
    assert result
    for one in result:
        speeds = one.keys.get("parallel.speeds", ())
        assert one.config.parallel.speeds == speeds
        assert len(speeds) in (0, one.config.parallel.pp * one.config.parallel.data_ranks)
    assert any(one.keys.get("parallel.speeds") for one in result)
