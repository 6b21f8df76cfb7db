"""Times of ranks: who is slow is named, and shares by speed balance a step."""

import functools
import io
import time
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from compose.parallel.mesh import Parallel, deal
from compose.pipeline.split import fewest_at_most
from compose.train.rank_times import ForwardClock, RankTimes, speeds_of
from compose.train.workers import Worker
from models.llama.model import Attention
from tests.support import training
from tests.support.helpers import Keys, keys_in, parallel, refusals
from tests.support.pool import Pool

FAST = 0.05  # seconds that a fast rank takes for a row


def _train_slowly(keys: Keys, factors: tuple[float, ...], sleeps: bool) -> str:
    """Train on ranks that take time for each row of a layer's forward, each by its own factor; return
    what is said. They sleep, or their clock alone goes on by that time, and by no other."""
    seconds, passed = FAST * factors[torch.distributed.get_rank()], 0.0
    real = Attention.forward

    @functools.wraps(real)
    def slow(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal passed
        passed += seconds * len(x)
        if sleeps:
            time.sleep(seconds * len(x))
        return real(self, x, *args, **kwargs)

    def now(_: ForwardClock) -> float:
        return passed

    said, clock = io.StringIO(), mock.patch.object(ForwardClock, "_now", now)
    with (
        mock.patch.object(Attention, "forward", slow),
        nullcontext() if sleeps else clock,
        redirect_stdout(said),
    ):
        training.train(keys)
    return said.getvalue()


def _run(
    pool: Pool, folder: Path, factors: tuple[float, ...], sleeps: bool = True, **keys: object
) -> tuple[list[dict[str, Any]], list[str]]:
    """The steps of a run, and the lines that its first rank says."""
    base = keys_in("train.global_batch=12 train.micro_batch=3 train.stop_after=8 model.n_layers=1")
    given = training.keys_for(folder, **(base | parallel(dp_shard=len(factors)) | keys))
    said = pool.run(_train_slowly, len(factors), given, factors, sleeps)
    return training.lines(folder), said[0].splitlines()


def _seconds(steps: list[dict[str, Any]]) -> float:
    """The slowest rank's time, in the quicker of the last two steps: a busy machine adds to it."""
    return min(max(step["rank_seconds"].values()) for step in steps[-2:])


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "sleeps"), [(1, False), (3, True)])
def test_a_measured_slow_rank_gets_fewer_samples(
    pool: Pool, tmp_path: Path, zero: int, sleeps: bool
) -> None:
    """One of two ranks at half speed: the step takes at most 1.1 of the ideal, with the same losses."""
    times: dict[str, Any] = {"metrics__slow_rank": 9.0}
    equal, _ = _run(pool, tmp_path / "equal", (1.0, 2.0), sleeps, parallel__zero=zero, **times)
    keys: dict[str, Any] = parallel(zero=zero, speeds="measure")
    dealt, said = _run(pool, tmp_path / "dealt", (1.0, 2.0), sleeps, **keys)
    assert [line.partition("; ")[2] for line in said if line.startswith("step 6: speeds")] == [
        "samples of each: 8, 4"
    ]
    ideal = 12 * FAST / 1.5  # 8 rows by one, 4 by the other at half its speed
    assert _seconds(equal) > 1.4 * ideal
    assert _seconds(dealt) < 1.1 * ideal
    for step, right in zip(dealt, equal, strict=True):
        assert step["loss"] == pytest.approx(right["loss"], rel=1e-5)
        assert step["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-4)
        assert step["samples"] == right["samples"]


def test_the_slow_rank_is_named(pool: Pool, tmp_path: Path) -> None:
    """After the two first steps and as many as it must be slow; once. Validation takes no part."""
    file = tmp_path / "validation.txt"
    file.write_text("some words " * 20)
    more = {"metrics__slow_rank": 1.5, "metrics__slow_steps": 3, "train__stop_after": 7}
    more |= {"data__validation": file, "train__validate_every": 2}
    steps, lines = _run(pool, tmp_path / "run", (1.0, 3.0), sleeps=False, **more)
    for step in steps:
        assert step["rank_seconds"] == pytest.approx({"0": 6 * FAST, "1": 18 * FAST})
    said = [line for line in lines if line.startswith("slow for")]
    assert said == ["slow for 3 steps: rank 1 takes 3.0 times the median"]


def test_ranks_are_compared_within_their_stage() -> None:
    """Stages have unequal work; a rank that has its stage alone is compared with all."""
    hook, said = RankTimes.__new__(RankTimes), list[str]()
    hook.mesh = mock.Mock(mesh_dim_names=("pp",), size=lambda axis: 2)
    hook.say = lambda text, own=False: said.append(text)
    hook.factor, hook.patience = 1.5, 1
    for row in ([1.0, 1.0, 3.0, 3.0], [1.0, 1.0, 3.0, 9.0], [1.0, 3.0]):
        hook.places = {rank: divmod(rank, len(row) // 2) for rank in range(len(row))}
        hook.slow = dict.fromkeys(hook.places, 0)
        hook._name(row)
    words = "slow for 1 steps: rank {} (stage 1) takes 3.0 times the median"
    assert said == [words.format(3), words.format(1)]


def test_a_slow_rank_of_a_later_island_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    hook = RankTimes.__new__(RankTimes)
    hook.mesh, hook.say = mock.Mock(mesh_dim_names=("pp",), size=lambda axis: 1), Worker(1, 2).say
    hook.factor, hook.patience = 1.5, 1
    hook.places, hook.slow = {0: (0, 0), 1: (0, 1)}, {0: 0, 1: 0}
    for rank in (0, 1):
        with mock.patch.object(dist, "get_rank", return_value=rank):
            hook.slow[1] = 0
            hook._name([1.0, 2.0])
    line = "island 1: slow for 1 steps: rank 1 takes 2.0 times the median\n"
    assert capsys.readouterr().out == line


def test_the_clock_adds_up_forwards() -> None:
    module, other, x = nn.Identity(), nn.Identity(), torch.ones(2)
    clock = ForwardClock([module], "cpu")
    times = [0.0, 0.25, 10.0, 10.5]  # who asked more often would find no number
    with mock.patch("compose.train.rank_times.time.perf_counter", side_effect=times):
        assert module(x) is x
        module(x)
        other(x)
    assert clock.take() == 0.75
    assert clock.take() == 0


def test_speeds_are_rows_per_second_within_a_stage() -> None:
    """Stage 1 has more work than stage 0; its second data rank takes twice as long."""
    places = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}
    assert speeds_of([[1.0, 1.0, 3.0, 6.0]], places, [4, 4]) == [1.0, 0.5]
    # With half the rows in the same time it is half as fast, and odd steps do not count.
    steps = [[1.0, 1.0], [9.0, 1.0], [0.1, 1.0]]
    assert speeds_of(steps, {0: (0, 0), 1: (0, 1)}, [4, 2]) == [1.0, 0.5]


def test_noise_of_a_measurement_leaves_shares_equal() -> None:
    shares = deal(16, (1.0, 0.97), 2)
    assert [share.samples for share in shares] == [8, 8]


def test_stages_go_by_speed() -> None:
    """The second pipeline rank is half as fast, and its second data rank is slower yet."""
    table = Parallel(pp=2, dp_shard=2, speeds=(1.0, 1.0, 0.6, 0.4))
    assert table.stage_speeds == [1.0, 0.5]
    assert table.data_speeds == [1.0, 0.8]
    assert fewest_at_most(0.0, [1.0] * 6, 0.0, 2) == (3, 3)
    assert fewest_at_most(0.0, [1.0] * 6, 0.0, 2, table.stage_speeds) == (4, 2)


test_refused = refusals(
    [
        (
            keys_in("compile.mode=model metrics.slow_rank=1.5"),
            'metrics.slow_rank: 1.5 times layers, and compile.mode = "model" has none; use'
            ' compile.mode = "block"',
        ),
        (
            keys_in("metrics.slow_steps=4"),
            "metrics.slow_steps: 4 is read with slow_rank; set metrics.slow_rank",
        ),
    ]
)
