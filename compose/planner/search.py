"""The search: every candidate gets a quick estimate, and the best of them get a record."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from compose.config import rules
from compose.config.job import Job
from compose.config.tables import Config, value_of
from compose.errors import ConfigError
from compose.parallel.mesh import AXES, resolve_degrees
from compose.planner.candidates import (
    DEGREES,
    FREED,
    HYBRID,
    OFFLOADED,
    PLAIN,
    REFINED,
    TEXTBOOK,
    Candidate,
    Space,
    all_by_estimates,
    candidate_of,
    candidates,
    complexity,
    dividing,
    fits,
    known_as,
    least_short,
    order,
    shape_for,
    with_keys,
)
from compose.planner.estimate import estimate, estimate_of_kinds, estimates, speeds_of
from compose.planner.quick_estimate import quick
from compose.planner.quick_memory import micro_batches
from compose.planner.quick_units import ModelShape, units_of_rank
from compose.planner.report import SearchResult, describe

MOST = 6
"""Candidates that are recorded."""
_FIRST, _NEXT = 3, 2  # candidates of the first round of records, and of each later one
_REFINED = 2  # of all, finer variants of the best ones
_SHORT = 3  # candidates that are recorded if nothing fits
_OF_A_MESH = 2  # candidates of one mesh that are recorded before those of other meshes
_NEAR = 1.02  # a simpler composition may take so much longer
_BASES = 2  # recorded candidates that are refined
# Layers of a rank, times micro-batches, of a record with a budget, which takes all layers, at most.
_MOST_LAYERS = 150
_WAYS = {  # modes that are refined, by their keys
    "activation_checkpoint.budget": "budget",
    "activation_checkpoint.every": "every_k",
    "activation_checkpoint.segment": "full",
}
_UNREAD = {key: value_of(Config(), key) for key in _WAYS}  # a mode does not read others' keys
_Traits = tuple[object, ...]


class RecordQueue:
    """The candidates that wait for a record.

    A quick estimate can be wrong by a factor, which those of one kind have in common: a schedule that
    holds more, a way to recompute. So each record corrects the estimates of all that are like it, and
    the next candidate is the best by corrected figures.
    """

    def __init__(self, space: Space, every: Sequence[Candidate]) -> None:
        self._space = space
        self._left = list(every)
        self._seen: dict[_Traits, int] = {}

    def add(self, more: Sequence[Candidate]) -> None:
        """Let more candidates wait."""
        self._left += more

    def next_round(self, recorded: Sequence[Candidate], most: int) -> list[Candidate]:
        """Return the candidates that are recorded next, ``most`` at most."""
        if recorded:
            return self._best(recorded, min(most, _NEXT))
        first = self._best(recorded, 1)
        for name in (PLAIN, TEXTBOOK, HYBRID, OFFLOADED):
            near = [c for c in self._left if known_as(self._space, c.config.parallel) == name]
            if near and not any(known_as(self._space, c.config.parallel) == name for c in first):
                first.append(self._take(min(near, key=lambda c: order(self._space, c))))
        # Records of pipelines correct no estimate without a pipeline.
        if all(c.config.parallel.pp > 1 for c in first):
            flat = [c for c in self._left if c.config.parallel.pp == 1]
            first += [self._take(min(flat, key=lambda c: order(self._space, c)))] if flat else []
        first += self._best(recorded, _FIRST - len(first))
        return first[:most]

    def _best(self, recorded: Sequence[Candidate], most: int) -> list[Candidate]:
        return [self.next(recorded) for _ in range(min(most, len(self._left)))]

    def next(self, recorded: Sequence[Candidate]) -> Candidate:
        """Return the candidate whose turn it is."""
        factors: dict[_Traits, tuple[float, float]] = {}

        def place(candidate: Candidate) -> tuple[object, ...]:
            kind = _kind(candidate)
            if kind not in factors:
                factors[kind] = _factors(kind, recorded)
            late = self._seen.get(_mesh(candidate), 0) >= _OF_A_MESH
            return (late, *order(self._space, candidate, *factors[kind]))

        return self._take(min(self._left, key=place))

    def _take(self, candidate: Candidate) -> Candidate:
        self._left = [other for other in self._left if other is not candidate]
        mesh = _mesh(candidate)
        self._seen[mesh] = self._seen.get(mesh, 0) + 1
        return candidate


def _mesh(candidate: Candidate) -> _Traits:
    parallel = candidate.config.parallel
    degrees = (getattr(parallel, axis) for axis in (*AXES, "ep"))
    return *degrees, parallel.zero, parallel.offload


def _kind(candidate: Candidate) -> _Traits:
    """Return a key that is equal for candidates whose quick estimates have the same error."""
    parallel, config = candidate.config.parallel, candidate.config
    return (
        parallel.pp_schedule if parallel.pp > 1 else "",
        config.activation_checkpoint.mode,
        parallel.zero,
        parallel.offload,
        config.train.micro_batch,
        parallel.cp > 1,
        parallel.tp > 1,
        parallel.ep > 1,
    )


def _factors(kind: _Traits, recorded: Sequence[Candidate]) -> tuple[float, float]:
    """Return the mean ratio of records nearest in kind to their quick estimates: of bytes, seconds."""
    if not recorded:
        return 1.0, 1.0

    def equal(candidate: Candidate) -> int:
        return sum(a == b for a, b in zip(kind, _kind(candidate), strict=True))

    most = max(map(equal, recorded))
    near = [candidate for candidate in recorded if equal(candidate) == most]
    size = sum(math.log(c.reserved / c.rough.memory) for c in near) / len(near)
    steps = [(c.estimate.step_seconds, c.rough.step) for c in near if c.estimate]
    step = sum(math.log(one / other) for one, other in steps) / len(near)
    return math.exp(size), math.exp(step)


def own(space: Space) -> Candidate:
    """Return the candidate of the config's own mesh."""
    degrees = resolve_degrees(space.config.parallel, space.world_size)
    config = replace(space.config, parallel=degrees)
    keys = {key: getattr(degrees, key.partition(".")[2]) for key in DEGREES}
    job = rules.check(config, space.world_size, space.cluster.target)
    rough = quick(shape_for(space), job.config, space.cluster)
    if space.kinds:
        return _of_kinds(space, Candidate(config, keys, rough), job)
    return Candidate(job.config, keys, rough, estimate(job, space.cluster, cache=space.cache))


def _of_kinds(space: Space, candidate: Candidate, job: Job) -> Candidate:
    """Return a candidate with its record on several kinds of device, with shares by their speeds.

    Where unequal shares are refused, all are as large as those of the slowest device.
    """
    keys, speeds = candidate.keys, speeds_of(job.degrees, space.kinds, job.config.precision.param)
    if speeds and "parallel.speeds" not in space.fixed:
        key = {"parallel.speeds": speeds}
        uneven = with_keys(candidate.config, key)  # layers of stages are dealt anew
        with suppress(ConfigError):
            job = rules.check(uneven, space.world_size, space.cluster.target, job.model)
            keys = keys | key
    result = estimate_of_kinds(job, space.kinds, space.cache)
    return replace(candidate, config=job.config, keys=keys, estimate=result)


def record_all(space: Space, configs: Sequence[Config]) -> list[Candidate | ConfigError]:
    """Record several compositions, and return each as a candidate, or why it is not legal.

    Their records share as many processes as there are cores.
    """
    shape = shape_for(space)
    results = dict(_recorded(space, [candidate_of(space, shape, c) for c in configs]))
    return [results[place] for place in range(len(configs))]


def _recorded(
    space: Space, chosen: Sequence[Candidate]
) -> Iterator[tuple[int, Candidate | ConfigError]]:
    """Yield the place of each candidate with its record, or why it is not legal, as they end."""
    jobs, model = dict[int, Job](), shape_for(space).job.model
    for place, candidate in enumerate(chosen):
        try:
            jobs[place] = rules.check(candidate.config, space.world_size, space.cluster.target, model)
        except ConfigError as error:
            yield place, error
    places = list(jobs)
    if space.kinds:
        for place, job in jobs.items():
            try:
                yield place, _of_kinds(space, chosen[place], job)
            except ConfigError as error:
                yield place, error
        return
    for number, result in estimates(list(jobs.values()), space.cluster, space.cache):
        place = places[number]
        if isinstance(result, ConfigError):
            yield place, result
        else:
            yield place, replace(chosen[place], config=jobs[place].config, estimate=result)


def search(
    space: Space,
    most: int = MOST,
    seconds: float = math.inf,
    progress: Callable[[str], None] = lambda text: None,
) -> SearchResult:
    """Record the best candidates by their quick estimates.

    Plain FSDP, FSDP within nodes and the textbook's mesh are always among them. If none of them fits,
    as many more are recorded. The next round is chosen when all of one have ended, so that the answer
    does not depend on the machine. ``seconds`` caps the search once a candidate was recorded.
    """
    began, shape = time.monotonic(), shape_for(space)
    for axis in ("tp", "cp", "pp", "ep"):
        degree = getattr(space.config.parallel, axis)
        if axis not in shape.axes and f"parallel.{axis}" in space.fixed and degree > 1:
            name = space.config.model.name
            raise ConfigError(f"parallel.{axis}: {degree}: the plan of {name} cannot cut {axis}; use 1")
    every = all_by_estimates(space, shape)
    offloads = [c for c in every if c.config.parallel.offload != "none"]
    let_through = len(every)
    if not every:  # the least short ones tell by how much
        every, most = least_short(space, shape), min(most, _SHORT)
    if not every:  # a reason that has nothing to do with meshes is raised here
        one = {f"parallel.{axis}": 1 for axis in ("tp", "cp", "ep")}
        units_of_rank(shape, with_keys(space.config, one), space.cluster)
    for axis in ("tp", "cp", "pp"):
        if axis not in shape.axes:
            progress(f"the plan of {space.config.model.name} cannot cut {axis}: it is left out")
    progress(f"{let_through} candidates may fit; the best {most} are recorded")
    results, tried = list[Candidate](), list[Config]()
    refused: list[str] = []
    capped, limit = False, 2 * most if let_through else most
    turns, made = RecordQueue(space, every), dict[int, Candidate]()
    try:
        while not capped:
            room, finer = most - len(results), list[Candidate]()
            if room and len(results) >= max(_FIRST, most - _REFINED):
                known = [*tried, *(one.config for one in results)]  # a record has filled in layers
                finer = [c for c in refinements(space, shape, results) if c.config not in known][:room]
                let_through += len(finer)
            chosen = [*finer, *turns.next_round(results, room - len(finer))]
            tried += [one.config for one in chosen]
            if not chosen:
                if most == limit or any(fits(space, c) for c in results):
                    break
                most = limit
                if let_through and "parallel.offload" not in space.fixed and not offloads:
                    offloads = [*candidates(space, shape, offload=True)]
                    let_through += len(offloads)
                    turns.add(offloads)
                continue
            made = {}
            for place, result in _recorded(space, chosen):
                if isinstance(result, ConfigError):
                    refused += result.problems
                    let_through -= 1
                    continue
                made[place] = result
                progress(f"{len(results) + len(made)}: {describe(result)}")
                if time.monotonic() - began > seconds:
                    capped = True
                    break
            results += [made[place] for place in sorted(made)]
    except KeyboardInterrupt:
        results += [one for _, one in sorted(made.items()) if one not in results]
        if not results:
            raise
        capped = True
        progress("interrupted: these are the best so far")
    if every and not results:
        raise ConfigError(*dict.fromkeys(refused))
    return SearchResult(
        ranked(space, results), max(0, let_through), capped, len(results) >= let_through
    )


def ranked(space: Space, recorded: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates, the best first: the simplest of those within 2% of the fastest."""
    results = sorted(recorded, key=lambda c: order(space, c))
    if not results or space.objective == "memory" or not fits(space, results[0]):
        return results
    *same, step, _ = order(space, results[0])
    near = [c for c in results if order(space, c)[:-2] == tuple(same)]
    near = [c for c in near if order(space, c)[-2] <= step * _NEAR]
    best = min(near, key=lambda c: (complexity(c), order(space, c)))
    return [best, *(c for c in results if c is not best)]


def refinements(space: Space, shape: ModelShape, recorded: Sequence[Candidate]) -> list[Candidate]:
    """Return finer variants of the best recorded candidates that may be better, the best first.

    Their quick estimates are corrected by the record of the candidate that they are variants of.
    """
    results: list[tuple[tuple[Any, ...], int, Candidate]] = []
    bases = ranked(space, recorded)[:_BASES]
    for base in bases:
        size, step = base.reserved / base.rough.memory, base.recorded.step_seconds / base.rough.step
        for keys in _variants(space, shape, base):
            config = with_keys(base.config, keys)
            if micro_batches(config) < max(1, config.parallel.pp):
                continue
            one = Candidate(config, base.keys | keys, quick(shape, config, space.cluster))
            # A simpler one wins if it is nearly as fast.
            more = _NEAR if complexity(one) > complexity(bases[0]) else 1.0
            place = order(space, one, size, step * more)
            if place < order(space, bases[0]):
                results.append((place, len(results), one))
    return [candidate for *_, candidate in sorted(results, key=lambda row: row[:2])]


def _variants(space: Space, shape: ModelShape, base: Candidate) -> Iterator[dict[str, Any]]:
    config, free = base.config, {key for key in REFINED if key not in space.fixed}
    train, parallel = config.train, config.parallel
    micros = [train.micro_batch]
    if "train.micro_batch" not in space.fixed:
        micros = dividing(config, (train.micro_batch, train.micro_batch * 2, train.micro_batch // 2))
    layers = shape.count * min(3, micro_batches(config))
    mode, ways = "activation_checkpoint.mode", [dict[str, Any]()]
    # A pipeline would need a record of all layers of every rank.
    if parallel.pp == 1 and mode not in space.fixed and layers <= _MOST_LAYERS:
        for key, way in _WAYS.items():
            ways += [{**_UNREAD, mode: way, key: v} for v in REFINED[key] if key in free]
    chunks = [train.loss_chunk]
    if "train.loss_chunk" in free and train.micro_batch * train.seq_len // parallel.cp > 4096:
        chunks += REFINED["train.loss_chunk"]
    places = [config.optimizer.offload]
    if "optimizer.offload" in free and not fits(space, base) and parallel.offload == "none":
        places += REFINED["optimizer.offload"]
    for way, micro, chunk, place in itertools.product(ways, micros, chunks, places):
        if chunk != train.loss_chunk and way == {} and micro <= train.micro_batch:
            continue  # it costs time, and is for what needs the memory
        keys = {"train.micro_batch": micro, "train.loss_chunk": chunk}
        keys = way | keys | {"optimizer.offload": place}
        yield {key: value for key, value in keys.items() if value != value_of(config, key)}
    for key in sorted(space.freed):
        for value in FREED.get(key, ()):
            if key == "train.global_batch":
                value = int(value * train.global_batch)
            yield {key: value}


def fewest(
    space: Space, tokens: float, days: float, progress: Callable[[str], None] = lambda text: None
) -> tuple[Space, list[Candidate]]:
    """Find the fewest devices that hold the model and see enough tokens in time.

    The search tries 1, 2, 4 ... devices, and all of the space. A number is searched if a quick
    estimate says that it may do. The first number that does by its record is taken. Raises ConfigError
    if no number holds the model, or all are refused.
    """
    needed, most = tokens / (days * 86400), space.world_size
    shape, train = shape_for(space), space.config.train
    problem: ConfigError | None = ConfigError(
        f"{most} devices of {space.cluster.name} do not hold the model; give more of --world-size"
    )
    for ranks in dict.fromkeys([*(1 << n for n in range(most.bit_length())), most]):
        here = replace(space, world_size=ranks, objective="time")
        rough = [c for c in all_by_estimates(here, shape) if fits(here, c)]
        problem = None if rough else problem
        best = min((c.rough.step for c in rough), default=float("inf"))
        if here.islands * train.global_batch * train.seq_len / best >= needed / 2:
            try:
                searched = search(here, most=4, progress=progress)
            except ConfigError as error:  # of so many ranks; others may do
                problem = error
                continue
            if searched.capped:  # by Ctrl-C
                raise KeyboardInterrupt
            results = [c for c in searched.candidates if fits(here, c)]
            if results:
                rate = results[0].recorded.tokens_per_second_per_device * here.all_ranks
                progress(f"{ranks} devices: {rate:,.0f} tokens/s of {needed:,.0f}")
                if rate >= needed:
                    return here, results
    if problem:
        raise problem
    return space, []
