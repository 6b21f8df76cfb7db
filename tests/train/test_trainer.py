"""Runs: the same on every mesh, stopped by what should stop them, said once."""

import gc
import math
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from compose.checkpoint import store
from compose.config.rules import check
from compose.config.toml import load
from compose.optim.lr_schedule import learning_rate
from compose.train import trainer as trainer_module
from compose.train.processes import LAUNCHER_DIED, Signals, TrainingError
from compose.train.readings import Reading, StepClock, read_step
from compose.train.trainer import Trainer
from compose.train.workers import Worker
from tests.support.command_lines import QUICK, TIMEOUT, answered, begin, command, execute, launch
from tests.support.helpers import ROOT, make_job
from tests.support.pool import Pool
from tests.support.training import (
    keys_for,
    lines,
    logged_steps,
    train,
    train_until_error,
    trainer_of,
    wait_for_second_step,
)

DEFAULT = {"model.n_layers": 2, "model.dim": 128, "model.hidden_dim": 384, "train.seq_len": 256}


@pytest.mark.slow
def test_metrics_agree_on_one_rank_and_on_eight(pool: Pool, tmp_path: Path) -> None:
    """Six steps of train.toml with two layers, on 1 rank and on 2 x 2 x 2 of different axes; of two
    sets of data, and with 31 samples to validate on, which no batch divides."""
    text, held_out = tmp_path / "text.txt", tmp_path / "held_out.txt"
    text.write_text("All work and no play makes Jack a dull boy.\n" * 200)
    held_out.write_text((ROOT / "README.md").read_text()[: 31 * 64])
    data = {
        "data__path": ["stdlib", str(text)],
        "data__weights": [3, 1],
        "data__validation": held_out,
        "train__validate_every": 4,
    }
    meshes: dict[str, dict[str, int]] = {
        "one": {},
        "data": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
        "pipeline": {"pp": 2, "cp": 2, "tp": 2},
    }
    for name, mesh in meshes.items():
        keys = keys_for(tmp_path / name, train__stop_after=6, **data)
        keys |= {f"parallel__{axis}": degree for axis, degree in mesh.items()}
        keys |= {name.replace(".", "__"): value for name, value in DEFAULT.items()}
        pool.run(train, 8 if mesh else 1, keys | {"train__seq_len": 64, "train__global_batch": 8})
    one = lines(tmp_path / "one")
    assert [line["step"] for line in one] == list(range(1, 7))
    for name in ("data", "pipeline"):
        for a, b in zip(one, lines(tmp_path / name), strict=True):
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
            assert all(a[key] == b[key] for key in ("step", "lr", "tokens", "samples", "epochs"))
            assert ("validation_loss" in a) == (a["step"] in (4, 6))
            if "validation_loss" in a:
                assert b["validation_loss"] == pytest.approx(a["validation_loss"], rel=1e-5)
    assert one[-1]["loss"] < one[0]["loss"] - 0.5
    assert one[-1]["tokens"] == 6 * 8 * 64
    assert one[-1]["samples"] == 48
    assert one[-1]["epochs"][str(text)] == 12 / 137
    assert one[-1]["validation_loss"] < one[3]["validation_loss"]
    assert one[0]["mfu"] is None


@pytest.mark.slow
def test_stop_after_leaves_the_schedule_unchanged(pool: Pool, tmp_path: Path) -> None:
    pool.run(train, 1, keys_for(tmp_path / "short", train__steps=30, train__stop_after=4))
    pool.run(train, 1, keys_for(tmp_path / "long", train__steps=30))
    short, long = lines(tmp_path / "short"), lines(tmp_path / "long")
    assert (len(short), len(long)) == (4, 30)
    for a, b in zip(short, long, strict=False):
        assert [a[key] for key in ("loss", "grad_norm", "lr")] == [
            b[key] for key in ("loss", "grad_norm", "lr")
        ]


def test_no_steps_follow_the_schedules_last(pool: Pool, tmp_path: Path) -> None:
    keys = keys_for(tmp_path, train__steps=2, train__stop_after=4, model__n_layers=1)
    pool.run(train, 1, keys)
    assert len(lines(tmp_path)) == 2


def test_config_snapshot_runs_again(pool: Pool, tmp_path: Path) -> None:
    keys = keys_for(tmp_path / "run", train__steps=2, parallel__tp=2)
    pool.run(train, 2, keys)
    snapshot = load(str(tmp_path / "run" / "config.toml"))
    assert snapshot.parallel.dp_shard == 1, "degrees are resolved"
    assert snapshot == replace(make_job(2, **keys).config, source=snapshot.source)
    assert check(snapshot, 2).config == snapshot


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("where", "what"), [("forward_backward", "loss"), ("clip_grad_norm_", "gradient norm")]
)
def test_non_finite_stops_the_run(
    pool: Pool, tmp_path: Path, where: str, what: str, value: float
) -> None:
    result = pool.run(train_until_error, 2, keys_for(tmp_path), value, where)
    assert (
        result
        == [
            f"step 3: the {what} is {value}; the weights are still those of step 2 (a lower"
            " optimizer.lr or a longer optimizer.warmup may help)"
        ]
        * 2
    )
    assert logged_steps(tmp_path) == [1, 2]


def _rates(keys: dict[str, object]) -> list[tuple[set[float], float]]:
    """At each of the optimizer's steps: the rates of its groups, and the one that it should have."""
    trainer, result = trainer_of(keys), []
    optimizer, train = trainer.optimizer, trainer.config.train
    real = optimizer.step

    def step() -> None:
        rate = learning_rate(len(result), train.steps, trainer.config.optimizer)
        result.append(({group["lr"] for group in optimizer.param_groups}, rate))
        real()

    with mock.patch.object(optimizer, "step", step):
        trainer.run()
    assert all(p.grad is None for p in trainer.composition.model.parameters()), (
        "gradients are of one step"
    )
    return result


def test_each_step_is_taken_at_its_own_rate(pool: Pool, tmp_path: Path) -> None:
    """The optimizer's rate, not only the one that metrics.jsonl tells."""
    keys = keys_for(tmp_path, train__steps=5, optimizer__warmup=2, model__n_layers=1)
    result = pool.run(_rates, 1, keys | {"optimizer__lr_scale": '["output=0.5"]'})[0]
    assert len({rate for _, rate in result}) == 5
    assert [rates for rates, _ in result] == [{rate, rate / 2} for _, rate in result]
    assert [line["lr"] for line in lines(tmp_path)] == [rate for _, rate in result]


def _train_at_peak(keys: dict[str, object]) -> float:
    with mock.patch.object(trainer_module, "device_peak", return_value=1e12):
        trainer = trainer_of(keys)
        trainer.run()
    return trainer.config.model.config.flops_per_token(trainer.config.train.seq_len)


def test_mfu(pool: Pool, tmp_path: Path) -> None:
    keys = keys_for(tmp_path, train__steps=1, model__n_layers=1, parallel__dp_shard=2)
    flops = pool.run(_train_at_peak, 2, keys)[0]
    line = lines(tmp_path)[0]
    assert line["mfu"] == pytest.approx(line["tokens_per_second"] * flops / 2e12)


def _read(z_loss: bool) -> Reading:
    rank = dist.get_rank()
    loss, norm = torch.tensor(0.1), torch.tensor(1 / 3, dtype=torch.float64)
    return read_step(loss, norm, loss.double() * 2 if z_loss else None, [rank, 3 - rank, 0])


def test_a_reading_is_of_all_ranks(pool: Pool) -> None:
    """Numbers as they are; of what ranks say, the greatest."""
    loss = torch.tensor(0.1).item()
    assert pool.run(_read, 2, True) == [Reading(loss, 1 / 3, 2 * loss, (1, 3, 0))] * 2
    assert pool.run(_read, 1, False) == [Reading(loss, 1 / 3, None, (0, 3, 0))]


def test_the_clock_runs_from_reading_to_reading() -> None:
    """A device's work after a reading is in the next one; time between steps is in none."""
    times = [0.0, 5.0, 7.0, 8.0, 108.0, 110.0, 111.0]
    with mock.patch("compose.train.readings.time.perf_counter", side_effect=times):
        clock = StepClock()
        clock.begin()
        assert clock.read() == 2
        clock.end()
        clock.begin()
        assert clock.read() == 1 + 2
        clock.end()


def _asked(rank: int, orphan: int = -1) -> signal.Signals | None:
    signals, own = Signals(torch.device("cpu"), Worker()), dist.get_rank()
    with mock.patch("compose.train.heartbeat.launcher_died", return_value=own == orphan):
        if own in (rank, orphan):
            signals._note(signal.SIGTERM, None)
    nothing = torch.zeros((), dtype=torch.float64)
    return signals.asked(1, *read_step(nothing, nothing, None, [signals.code]).flags)


def test_a_signal_to_one_rank_is_all_ranks(pool: Pool) -> None:
    for rank, expected in ((0, signal.SIGTERM), (1, signal.SIGTERM), (-1, None)):
        assert pool.run(_asked, 2, rank) == [expected] * 2


def test_the_death_of_a_torchrun_is_no_warning(pool: Pool, tmp_path: Path) -> None:
    """It counts on all ranks, and more than a warning; the run is saved, and fails."""
    for rank in (0, 1):
        assert pool.run(_asked, 2, rank, 1) == [LAUNCHER_DIED] * 2
    folder = tmp_path / "my run"
    keys = keys_for(folder, model__n_layers=1)
    assert pool.run(_orphaned, 1, keys) == [
        f"stopped by the death of a torchrun after step 1; saved: the same command with"
        f" '--run.dir={folder}' goes on"
    ]
    assert store.newest_first(folder / "checkpoints")


def _orphaned(keys: dict[str, object]) -> str:
    with mock.patch.object(Signals, "asked", return_value=LAUNCHER_DIED):
        try:
            trainer_of(keys).run()
        except TrainingError as error:
            return str(error)
    return ""


def _compared(keys: dict[str, object]) -> tuple[list[tuple[int, bool]], str]:
    """After how many of the optimizer's steps copies were compared, and whether all gradients were
    there; how the run ended, which the second comparison was told to fail."""
    trainer, result, said = trainer_of(keys), [], ""
    steps = mock.patch.object(trainer.optimizer, "step", side_effect=trainer.optimizer.step)

    def fake(composition: Any, optimizer: Any) -> list[str]:
        there = all(p.grad is not None for p in composition.model.parameters())
        result.append((step.call_count, there and optimizer is trainer.optimizer))
        return ["rank 1 differs in norm.weight"] if len(result) == 2 else []

    with steps as step, mock.patch("compose.train.held_state.replica_mismatches", fake):
        try:
            trainer.run()
        except TrainingError as error:
            said = str(error)
    return result, said


def test_copies_are_compared_every_so_often(pool: Pool, tmp_path: Path) -> None:
    """Before the step that would spread what differs; and not at all with 0."""
    keys = {"train__steps": 5, "model__n_layers": 1, "comm__check_every": 2}
    result, said = pool.run(_compared, 1, keys_for(tmp_path / "a", **keys))[0]
    assert result == [(1, True), (3, True)]
    assert said.startswith("step 4: rank 1 differs in norm.weight: silent corruption; ")
    assert logged_steps(tmp_path / "a") == [1, 2, 3]
    keys = keys_for(tmp_path / "b", **keys | {"comm__check_every": 0})
    assert pool.run(_compared, 1, keys)[0] == ([], "")


def _gc_during_steps(keys: dict[str, object]) -> tuple[list[bool], bool]:
    seen: list[bool] = []
    real = Trainer.step

    def spy(self: Trainer) -> Any:
        seen.append(gc.isenabled())
        return real(self)

    with mock.patch.object(Trainer, "step", spy):
        train(keys)
    return seen, gc.isenabled()


def test_garbage_collector_rests_during_steps(pool: Pool, tmp_path: Path) -> None:
    keys = keys_for(tmp_path, train__steps=2)
    assert pool.run(_gc_during_steps, 1, keys) == [([False, False], True)]


def test_two_ranks_train(tmp_path: Path) -> None:
    """With torchrun's variables. A real torchrun trains in tests/whole/test_nodes.py."""
    done = execute("train.py", *QUICK, "--train.steps=3", f"--run.dir={tmp_path}/run", ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 3/3") == 1
    assert logged_steps(tmp_path / "run") == [1, 2, 3]
    assert list((tmp_path / "run").glob("events*"))


def test_output_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    """The log may be on a disk that is full, as the one of the checkpoints is."""
    words = command("train.py", *QUICK, "--train.steps=3", f"--run.dir={tmp_path}/run")
    with Path("/dev/full").open("w") as full:
        done = begin(words, stdout=full, stderr=full)
        assert done.wait(TIMEOUT) == 0
    assert logged_steps(tmp_path / "run") == [1, 2, 3]


@pytest.mark.slow
def test_bad_input_is_said_once_with_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    arguments = ["--parallel.tpp=2", "--train.steps=x"]
    alone = launch("train.py", *arguments)
    assert (alone.returncode, alone.stdout) == (2, "")
    assert alone.stderr.splitlines() == [
        'command line: train.steps: expected int, got "x"',
        "command line: parallel.tpp: unknown key; did you mean parallel.tp?",
    ]
    forked = execute("train.py", *arguments)
    assert (forked.returncode, forked.stdout, forked.stderr) == (2, "", alone.stderr)
    several = launch("train.py", *arguments, ranks=2)
    assert several.stderr.count("unknown key") == 1
    assert "exitcode  : 2" in several.stderr
    verify = execute("-m", "compose", "verify", "nowhere.toml")
    assert (verify.returncode, verify.stderr) == (2, "nowhere.toml: no such file\n")


def test_run_dir_that_cannot_be_written_or_is_taken(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = answered("train.py", f"--run.dir={tmp_path}/file/run")
    assert (done.returncode, done.stderr) == (
        2,
        f"train.toml: run.dir: cannot write to {tmp_path}/file/run: Not a directory\n",
    )
    (tmp_path / "metrics.jsonl").write_text("kept\n")
    done = answered("train.py", f"--run.dir={tmp_path}")
    assert (done.returncode, done.stderr) == (
        2,
        f"train.toml: run.dir: {tmp_path} already holds metrics.jsonl of a run, and no"
        " checkpoint; choose another folder\n",
    )
    assert (tmp_path / "metrics.jsonl").read_text() == "kept\n"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.full)])
def test_ctrl_c_ends_after_the_step(tmp_path: Path, ranks: int) -> None:
    arguments = command(
        "train.py", *QUICK, f"--run.dir={tmp_path}", "--metrics.console_every=1", ranks=ranks
    )
    process = begin(arguments)
    wait_for_second_step(process)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=180)
    steps = len(lines(tmp_path))
    assert f"stopped by Ctrl-C after step {steps}\n" in output
    if not ranks:
        assert process.returncode == 130
        assert errors == ""


@pytest.mark.slow
def test_a_ranks_failure_is_shown_once(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "from compose.cli.command_line import parse, run\n"
        "from compose.train.processes import process_group\n"
        "def main(arguments):\n"
        "    with process_group(parse(arguments, 'fails.py').config):\n"
        "        if dist.get_rank() == 1:\n"
        "            raise ValueError('what went wrong')\n"
        "        dist.all_reduce(torch.ones(1))\n"
        "run(main)\n"
    )
    start = time.time()
    done = launch(str(script), ranks=2)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: what went wrong") == 1
    assert done.stderr.count("rank 1 failed:") == 1
    assert "rank 0 failed" not in done.stderr
    assert time.time() - start < 180
