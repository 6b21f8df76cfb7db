"""The records that jobs need, the processes that make them, and what a rank costs by them.

A process makes one record, and there are at most as many at a time as there are cores.
"""

import gc
import os
import signal
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import forkserver, get_context
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from unittest import mock

import torch

from compose.config.job import Job
from compose.errors import ConfigError
from compose.pipeline.schedules import Action
from compose.planner.cluster import Cluster
from compose.planner.costs import for_ranks
from compose.planner.few_layers import (
    FEWEST,
    LayerRuns,
    busiest_rank,
    few_micro_batches,
    places,
    reduced,
    runs_of,
)
from compose.planner.memory import categorize, rank_memory, replay
from compose.planner.rank_costs import RankCosts, as_data, from_data, renamed, with_all_layers
from compose.planner.record import Record, TracedStep
from compose.planner.record_cache import (
    BROKEN,
    CacheFile,
    RecordFile,
    sent_as_data,
    sent_from_data,
    sources,
)
from compose.planner.step_time import action_seconds, in_pieces
from compose.planner.sweep import cores

if TYPE_CHECKING:
    from compose.planner.trace import RankStep


_TRACE = "compose.planner.trace"  # and torch._dynamo with it, which records from files do without


class RecordPool:
    """Runs functions in processes, and yields what they return as they end.

    A process runs one function, since PyTorch keeps what it knows of a world's groups for the next one.
    """

    def __init__(self, workers: int = 0) -> None:
        """``workers``: processes at a time; 0: as many as this process has cores."""
        self._workers = workers or cores()
        self._ended: deque[tuple[Any, Any]] = deque()
        self._left: deque[tuple[Any, Callable[..., Any], Any]] = deque()
        self._running: dict[Any, tuple[Any, BaseProcess]] = {}

    def __enter__(self) -> "RecordPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for _, process in self._running.values():
            process.kill()
        for reader, (_, process) in self._running.items():
            process.join()
            reader.close()

    def submit(self, name: Hashable, function: Callable[..., Any], *args: Any) -> None:
        """Run a function of a module, whose result :meth:`results` yields with ``name``."""
        self._left.append((name, function, args))

    def known(self, name: Hashable, result: object) -> None:
        """Have :meth:`results` yield a result that is there already."""
        self._ended.append((name, result))

    def results(self) -> Iterator[tuple[Any, Any]]:
        """Yield names and results until no function runs. A ConfigError is a result too.

        Raises RuntimeError for another error in a process, or if something has ended the process.
        """
        while self._ended or self._left or self._running:
            while self._left and len(self._running) < self._workers:
                self._start(*self._left.popleft())
            if self._ended:
                yield self._ended.popleft()
                continue
            for reader in wait([*self._running]):
                name, process = self._running.pop(reader)
                try:
                    result, error = cast(Any, reader).recv()
                except EOFError:
                    process.join()
                    result, error = None, f"a process that made a record has ended ({process.exitcode})"
                    if process.exitcode == -signal.SIGKILL:
                        error += ": the host's memory may be full; use fewer cores (taskset)"
                process.join()
                cast(Any, reader).close()
                if error:
                    raise RuntimeError(error)
                self._ended.append((name, result))

    def _start(self, name: Hashable, function: Callable[..., Any], args: Any) -> None:
        import_module(_TRACE)  # once, for all forked processes
        context = _processes()
        reader, writer = context.Pipe(duplex=False)
        process = cast(Any, context).Process(target=_run, args=(writer, function, args), daemon=True)
        process.start()
        writer.close()
        self._running[reader] = name, process


def _run(writer: Any, function: Callable[..., Any], args: Any) -> None:
    """Run a function in a process of its own, and send what it returns, or its error."""
    gc.disable()  # as in a training run; the process ends with its record
    torch.set_num_threads(1)  # a forked process would wait for OpenMP's threads, which it has not
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the search, which ends the pool
    # FSDP warns about a view that is never changed in place here.
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    try:
        result, error = function(*args), ""
    except ConfigError as problem:
        result, error = problem, ""
    except Exception:
        result, error = None, traceback.format_exc()
    writer.send((result, error))


def _processes() -> BaseContext:
    """Return how to start the processes that make records. They see no GPU.

    PyTorch's optimizers ask CUDA even for tensors without data, and a forked copy of a process that has
    used CUDA cannot call it.
    """
    if not torch.cuda.is_available():
        return get_context("fork")
    context = get_context("forkserver")
    context.set_forkserver_preload([_TRACE])
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        forkserver.ensure_running()
    return context


@dataclass(frozen=True)
class OtherProgram:
    """The differences of another program, whose times are published, from the composition.

    The host issues its operators one by one, and attention goes over whole rows.
    """

    change: Callable[[Record, Job], None]
    """It changes the record before it is costed; a function of a module, since it goes to a process."""
    fused: bool = True
    """Whether operators that follow one another in a layer are one kernel."""
    exchange: float = 0.0
    """Seconds of each action of a pipeline in which the host waits for its neighbours."""


class JobRecords:
    """The records that a job needs: of one rank of each kind, each with few layers and one more."""

    def __init__(self, job: Job, rows: Sequence[Sequence[Action]]) -> None:
        self.job, self.runs = job, runs_of(job)
        runs, last = self.runs, max(action.stage for row in rows for action in row)
        self._stages = [sorted({action.stage for action in row}) for row in rows]
        self.first = next(rank for rank, mine in enumerate(self._stages) if 0 in mine)
        """The pipeline rank of the first stage; a table of a file may put it anywhere."""
        self._equal: dict[Any, list[int]] = {}
        for rank, mine in enumerate(self._stages):
            self._equal.setdefault(_kind(runs, mine, last), []).append(rank)
        # The longest of those that are equal is recorded, so that fewer layers may stand for all.
        self._chosen = {
            kind: max(own, key=lambda r: sum(runs.layers()[s] for s in self._stages[r]) if runs else 0)
            for kind, own in self._equal.items()
        }
        self.kept = {
            rank: _kept(runs, self._stages[rank], len(self._equal[kind]))
            for kind, rank in self._chosen.items()
        }
        """The layers of each record, by the rank that is recorded."""
        self.made: dict[tuple[int, int], RankCosts] = {}
        """The records by rank and place in ``kept``."""

    def costs(self) -> list[RankCosts]:
        """Return the costs of each pipeline rank."""
        results: dict[int, RankCosts] = {}
        for kind, source in self._chosen.items():
            records = [self.made[source, i] for i in range(len(self.kept[source]))]
            for rank in self._equal[kind]:
                numbers = dict(zip(self._stages[source], self._stages[rank], strict=True))
                base, *longer = [renamed(one, numbers) for one in records]
                if self.runs is not None and longer:
                    more = list(zip(self.runs.places(), longer, strict=True))
                    base = with_all_layers(base, self.runs, more)
                results[rank] = base
        return [results[rank] for rank in sorted(results)]


def rank_costs(
    job: Job,
    cluster: Cluster,
    rows: Sequence[Sequence[Action]],
    other: OtherProgram | None = None,
    cache: Path | None = None,
) -> list[RankCosts]:
    """Return the costs of each pipeline rank."""
    [(_, result)] = costs_of_ranks([JobRecords(job, rows)], cluster, other, cache)
    if isinstance(result, ConfigError):
        raise result
    return result


def costs_of_ranks(
    plans: Sequence[JobRecords], cluster: Cluster, other: OtherProgram | None, cache: Path | None
) -> Iterator[tuple[int, list[RankCosts] | ConfigError]]:
    """Yield the place of each job with the costs of its pipeline ranks, as they end."""
    left = set(range(len(plans)))
    with RecordPool() as pool:

        def submit(place: int, rank: int, number: int, stream: Any = None) -> None:
            plan, name = plans[place], (place, rank, number)
            asked = RecordRequest(plan.job, cluster, other, rank, plan.kept[rank][number], stream)
            files = _Files(cache, asked) if cache else None
            if known := files and files.read():
                pool.known(name, known)
            else:
                pool.submit(name, _recorded, asked, files)

        # The rank of the first stage tells others what they receive: they begin after it.
        for place in sorted(left, key=lambda place: -len(plans[place].kept)):
            for number in range(len(plans[place].kept[plans[place].first])):
                submit(place, plans[place].first, number)
        for name, result in pool.results():
            place, rank, number = name
            if place not in left:
                continue  # another of its records has failed
            plan = plans[place]
            if isinstance(result, ConfigError):
                left.discard(place)
                yield place, result
                continue
            plan.made[rank, number], stream = result
            if (rank, number) == (plan.first, 0):
                for other_rank in [r for r in plan.kept if r != plan.first]:
                    for i in range(len(plan.kept[other_rank])):
                        submit(place, other_rank, i, stream)
            if len(plan.made) == sum(map(len, plan.kept.values())):  # all records are there
                left.discard(place)
                yield place, plan.costs()


def _kind(runs: LayerRuns | None, stages: Sequence[int], last: int) -> Any:
    """Return a key that is equal for ranks of which one record serves all."""
    if runs is None:
        return tuple(stages)
    # A run that is too short to leave layers out is another kind of stage.
    shapes = [tuple(min(n, FEWEST) for n in runs.lengths[s]) for s in stages]
    # Stages that follow one another on a rank pass tensors without a message and its buffer.
    follow = tuple(s + 1 in stages for s in stages)
    return follow, *((shape, s == 0, s == last) for shape, s in zip(shapes, stages, strict=True))


def _kept(runs: LayerRuns | None, stages: Sequence[int], ranks: int) -> list[LayerRuns | None]:
    """Return the layers of each record; all layers in one record, if that is less work."""
    if runs is None or not runs.places():
        return [None]
    all_layers = sum(runs.layers()[s] for s in stages)
    several = [runs.fewest(), *map(runs.fewest, runs.places())]
    if ranks == 1 and all_layers <= sum(kept.layers()[s] for kept in several for s in stages):
        return [None]
    return [*several]


class RecordRequest(NamedTuple):
    """A record that is wanted: of a rank of the pipeline, with the layers that are kept, or all."""

    job: Job
    cluster: Cluster
    other: OtherProgram | None
    pp_rank: int
    kept: LayerRuns | None
    stream: Any
    """The messages between stages, as the rank of the first stage broadcast them; None for it."""


class _Files:
    """The files of a record, and of what it costs on a cluster."""

    def __init__(self, folder: Path, asked: RecordRequest) -> None:
        cluster, other, compile = asked.cluster, asked.other, asked.job.config.compile
        of = asked.stream, other is None, *_played(cluster, other).items()
        self._asked, self.record = asked, RecordFile(folder, asked.job, asked.kept, asked.pp_rank, *of)
        priced = repr((cluster, other, compile.mode != "off"))
        read_by = sources(asked.job.config.model.name, planner=True)
        self._costs = CacheFile(folder, "costs", *self.record.decides, priced, read_by)

    def read(self) -> tuple[RankCosts, Any] | None:
        """Return what the record costs, and the stream; None if there is no record."""
        try:
            costs, sent = self._costs.read()
            return from_data(costs), _stream(self._asked, sent_from_data(sent))
        except BROKEN:
            traced = self.record.read()
            return traced and self.priced(traced)

    def priced(self, traced: TracedStep) -> tuple[RankCosts, Any]:
        """Return what a record costs, and the stream, and keep it."""
        costs, stream = _priced(traced, self._asked)
        self._costs.write((as_data(costs), sent_as_data(traced.broadcast)))
        return costs, stream


def _stream(asked: RecordRequest, sent: Sequence[Any]) -> Any:
    """Return the messages between stages, which the first rank has ``sent``."""
    return sent[0] if asked.stream is None and sent else asked.stream


def step_of(asked: RecordRequest, micro_batches: int) -> "RankStep":
    """Return the step that is traced for a record."""
    from compose.planner.trace import RankStep

    job, runs, kept, few = asked.job, runs_of(asked.job), asked.kept, dict[str, Any]()
    if runs and kept:
        few = {"model": reduced(job, runs, kept), "pp_layers": kept.layers()}
    return RankStep(
        job,
        rank=busiest_rank(job, asked.pp_rank),
        micro_batches=micro_batches,
        documents=asked.other is None,
        objects=None if asked.stream is None else [asked.stream],
        **few,
        **_played(asked.cluster, asked.other),
    )


def _recorded(asked: RecordRequest, files: _Files | None) -> tuple[RankCosts, Any]:
    """Make the record of a rank, put it into ``files``, and return what it costs, and the stream."""
    from compose.planner.trace import trace

    traced = trace(step_of(asked, len(few_micro_batches(asked.job))))
    if files:
        files.record.write(traced)
    return files.priced(traced) if files else _priced(traced, asked)


def _priced(traced: TracedStep, asked: RecordRequest) -> tuple[RankCosts, Any]:
    job, cluster, other, _, kept, _ = asked
    record, count = traced.record, len(few_micro_batches(job))
    if other:
        other.change(record, job)
    categorize(record, job.resolved.output)
    runs = runs_of(job)
    where = places(job, runs, kept) if runs and kept else {}
    cluster = for_ranks(cluster, job.world_size)
    if job.config.compile.async_tp:
        in_pieces(record, cluster, job.degrees)
    fused = other.fused if other else job.config.compile.mode != "off"
    seconds = action_seconds(record, cluster, job.degrees, count, fused, compiled=other is None)
    grows = cluster.backend == "nccl"  # as train/processes.py sets the allocator
    peaks = replay(((place, change) for _, place, change in record.changes), grows)
    memory, host = (rank_memory(one, count, where) for one in (record, record.of_host))
    costs = RankCosts(memory, peaks.reserved - peaks.allocated, seconds, host)
    return costs, _stream(asked, traced.broadcast)


def _played(cluster: Cluster, other: OtherProgram | None) -> dict[str, Any]:
    """Return the properties of the devices on which a record depends."""
    target, capability = cluster.target, cluster.device.capability
    return {
        "device_type": target.device_type,
        "float8": target.float8,
        # In programs before 2025 FlashAttention-2 computes attention on every device.
        "capability": (8, 0) if other else tuple(capability),
    }
