"""The time that each rank computes in a step, without its waits for others; and what follows from it.

A rank's time is that of its layers' forwards. FSDP gathers a layer before its forward, and a pipeline
receives before it, so neither wait is in the time. Ranks of tp, cp and ep wait for each other within a
layer: they have the time of the slowest of them.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from statistics import median, median_low
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compose.ops.tensors import gathered
from compose.parallel.mesh import axis_size
from compose.pipeline.stand_ins import OtherStageModule
from compose.train.hooks import Hook
from compose.train.readings import Reading

if TYPE_CHECKING:
    from compose.train.trainer import Trainer

_SKIPPED = 2  # steps in which layers may be compiled, and memory is found
_MEASURED = 3  # steps by whose times samples are dealt


class ForwardClock:
    """Adds up the seconds that modules take in forward, on the device that runs them."""

    def __init__(self, modules: Iterable[nn.Module], device_type: str) -> None:
        """Time the forwards of ``modules`` from now on; on a GPU by events, which wait for nothing."""
        self.on_cuda = device_type == "cuda"
        self.spans: list[tuple[Any, Any]] = []
        for module in modules:
            module.forward = self._timed(module.forward)

    def _timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        spans, now = self.spans, self._now

        @wraps(forward)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = now()
            result = forward(*args, **kwargs)
            spans.append((begin, now()))
            return result

        return timed

    def _now(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> float:
        """Return the seconds since the last call, after the device has been waited for."""
        spans = [a.elapsed_time(b) / 1000 if self.on_cuda else b - a for a, b in self.spans]
        self.spans.clear()
        return sum(spans)


class RankTimes(Hook):
    """Gathers every rank's time of a step, names slow ranks, and deals samples by speed, if asked to.

    This takes one message of a number from each rank in a step.
    """

    def __init__(self, trainer: "Trainer") -> None:
        config, resolved = trainer.config, trainer.job.resolved
        self.trainer = weakref.ref(trainer)
        self.factor, self.patience = config.metrics.slow_rank, config.metrics.slow_steps
        self.measures = config.parallel.speeds == "measure"
        self.say, self.mesh = trainer.worker.say, trainer.mesh
        held = dict(trainer.composition.model.named_modules())
        names = resolved.checkpoint or [unit[0] for unit in resolved.shard]
        layers = [held[name] for name in names if name in held]
        here = [layer for layer in layers if not isinstance(layer, OtherStageModule)]
        self.clock, self.layers = ForwardClock(here, trainer.mesh.device_type), max(1, len(here))
        # By rank: its place on pp, and its data rank.
        ranks = trainer.mesh.mesh.flatten(1, 2).flatten(2)
        self.places = {
            int(rank): (stage, data)
            for stage, row in enumerate(ranks)
            for data, part in enumerate(row)
            for rank in part
        }
        self.steps: list[list[float]] = []
        self.slow = dict.fromkeys(self.places, 0)

    def see(self, reading: Reading, scale: float) -> None:
        """Gather the times of the step; a collective."""
        trainer, group = self.trainer(), torch.distributed.group.WORLD
        assert trainer is not None
        assert group is not None
        rows, seconds = trainer.share.rows_run if trainer.share else 1, self.clock.take()
        mine = torch.tensor([seconds, seconds / (self.layers * rows)], dtype=torch.float64)
        times, paces = torch.stack(gathered(mine.to(self.mesh.device_type), group)).T.tolist()
        self.steps.append(times)
        if self.factor and len(self.steps) > _SKIPPED:
            self._name(paces)

    def metrics(self) -> dict[str, Any]:
        """Return ``rank_seconds`` by rank, and ``stage_seconds`` of each stage's slowest rank."""
        times = self.steps[-1]
        result = {"rank_seconds": {str(rank): times[rank] for rank in self.places}}
        if axis_size(self.mesh, "pp") > 1:
            stages: dict[str, float] = {}
            for rank, (stage, _) in self.places.items():
                stages[str(stage)] = max(times[rank], stages.get(str(stage), 0.0))
            result["stage_seconds"] = stages
        return result

    def before_step(self, step: int) -> None:
        """Deal the samples by the times of the first steps, once."""
        self.clock.spans.clear()  # those of validation
        if self.measures and len(self.steps) == _SKIPPED + _MEASURED:
            self._deal(step)
        if len(self.steps) > _SKIPPED + _MEASURED:
            del self.steps[: -_SKIPPED - _MEASURED - 1]

    def _deal(self, step: int) -> None:
        trainer = self.trainer()
        assert trainer is not None
        rows = [share.rows_run for share in trainer.job.shares]
        measured = speeds_of(self.steps[_SKIPPED:], self.places, rows)
        if not all(trainer.job.can_run(s.micro_batches) for s in trainer.job.dealt(measured)):
            schedule = trainer.config.parallel.pp_schedule
            self.say(f"step {step}: {schedule} cannot run shares by the measured speeds; they stay")
            return
        shares = trainer.deal(measured)
        samples = ", ".join(str(share.samples) for share in shares)
        shown = ", ".join(f"{speed:.2f}" for speed in measured)
        self.say(f"step {step}: speeds of the data ranks [{shown}]; samples of each: {samples}")

    def _name(self, times: Sequence[float]) -> None:
        """Say which ranks have been slow for so many steps, by their times for a layer and a row."""
        named = []
        for rank, (stage, _) in self.places.items():
            peers = [times[other] for other, place in self.places.items() if place[0] == stage]
            usual = median_low(peers if len(peers) > 1 else list(times))
            self.slow[rank] = self.slow[rank] + 1 if times[rank] > self.factor * usual else 0
            if self.slow[rank] == self.patience:
                where = f" (stage {stage})" if axis_size(self.mesh, "pp") > 1 else ""
                ratio = times[rank] / usual if usual else float("inf")
                named.append(f"rank {rank}{where} takes {ratio:.1f} times the median")
        if named:
            self.say(f"slow for {self.patience} steps: {', '.join(named)}", own=True)


def speeds_of(
    steps: Sequence[Sequence[float]], places: dict[int, tuple[int, int]], rows: Sequence[int]
) -> list[float]:
    """Return the data ranks' relative speeds in rows per second, 1 for the fastest.

    ``steps`` has the seconds of each rank, by step. A data rank is as fast as its slowest rank is,
    compared with others of that stage.
    """
    per_row = {
        rank: median(times[rank] for times in steps) / rows[data] for rank, (_, data) in places.items()
    }
    best: dict[int, float] = {}
    for rank, (stage, _) in places.items():
        best[stage] = min(per_row[rank], best.get(stage, per_row[rank]))
    speeds = len(rows) * [1.0]
    for rank, (stage, data) in places.items():
        if per_row[rank] > 0:
            speeds[data] = min(speeds[data], best[stage] / per_row[rank])
    return speeds
