"""What a rank of the pipeline costs, action by action: with all layers, and as data for a file."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from compose.planner.few_layers import LayerRuns, linear
from compose.planner.memory import ActionMemory, Key, RankMemory
from compose.planner.step_time import Seconds, grown


@dataclass
class RankCosts:
    """The memory and the time of a pipeline rank, action by action."""

    memory: RankMemory
    surplus: int = 0
    """Bytes that the allocator has beyond the tensors, at the peaks of the record."""
    seconds: dict[Key, Seconds] = field(default_factory=dict)
    host: RankMemory = field(default_factory=RankMemory)
    """Its bytes in host memory, in place of a GPU's."""


def renamed(rank: RankCosts, stage: Mapping[int, int]) -> RankCosts:
    """Return the costs of a rank with other numbers of its stages."""

    def key(of: Key) -> Key:
        return stage.get(of[0], of[0]), of[1], of[2]

    memory, host = (
        replace(one, actions={key(k): of_one for k, of_one in one.actions.items()})
        for one in (rank.memory, rank.host)
    )
    seconds = {key(k): of_one for k, of_one in rank.seconds.items()}
    return replace(rank, memory=memory, seconds=seconds, host=host)


def with_all_layers(
    base: RankCosts, runs: LayerRuns, longer: Sequence[tuple[int, RankCosts]]
) -> RankCosts:
    """Return the costs with all layers of all runs."""
    stages = sorted({key[0] for key in base.seconds if key[0] >= 0})

    def more(place: int, stage: int) -> float:
        if stage >= 0:
            return runs.more(stage, place)
        # Work of no stage grows with all of the rank's. Each of them is one layer longer in the second
        # record.
        added = [runs.more(s, place) for s in stages]
        return sum(added) / max(1, sum(n > 0 for n in added))

    def whole(old: RankMemory, others: Sequence[tuple[int, RankMemory]]) -> RankMemory:
        memory = RankMemory(buffers=Counter(old.buffers))
        memory.start = _grow(old.start, [(more(p, -1), one.start) for p, one in others])
        for key, action in old.actions.items():
            steps = [(more(p, key[0]), one.actions[key]) for p, one in others]
            larger = ActionMemory(_grow(action.delta, [(n, m.delta) for n, m in steps]))
            for segment, above in action.peaks.items():
                if all(segment in m.peaks for _, m in steps):
                    larger.peaks[segment] = _grow(above, [(n, m.peaks[segment]) for n, m in steps])
            memory.actions[key] = larger
        return memory

    seconds = {
        key: grown(one, [(more(p, key[0]), rank.seconds[key]) for p, rank in longer])
        for key, one in base.seconds.items()
    }
    # The gaps between tensors serve the next layer too. What differs between two records is chance, the
    # sizes that fit into gaps, and no growth: the mean stands for all layers.
    surplus = (base.surplus + sum(rank.surplus for _, rank in longer)) // (1 + len(longer))
    memory = whole(base.memory, [(p, rank.memory) for p, rank in longer])
    host = whole(base.host, [(p, rank.host) for p, rank in longer])
    return RankCosts(memory, surplus, seconds, host)


def _grow(base: Counter[str], steps: Sequence[tuple[float, Counter[str]]]) -> Counter[str]:
    return Counter({key: round(value) for key, value in linear(base, steps).items()})


def as_data(costs: RankCosts) -> list[Any]:
    """Return the costs as data for JSON."""

    def memory(one: RankMemory) -> list[Any]:
        actions = [(key, action.delta, [*action.peaks.items()]) for key, action in one.actions.items()]
        return [one.start, one.buffers, actions]

    return [memory(costs.memory), costs.surplus, [*costs.seconds.items()], memory(costs.host)]


def from_data(data: Any) -> RankCosts:
    """Return the costs that :func:`as_data` made; the errors of a foreign file are Python's own."""

    def memory(start: Any, buffers: Any, actions: Any) -> RankMemory:
        return RankMemory(
            Counter(start),
            Counter(buffers),
            {
                (stage, kind, place): ActionMemory(
                    Counter(delta), {tuple(k): Counter(b) for k, b in peaks}
                )
                for (stage, kind, place), delta, peaks in actions
            },
        )

    device, surplus, seconds, host = data
    times: dict[Key, Seconds] = {
        (stage, kind, place): defaultdict(float, values) for (stage, kind, place), values in seconds
    }
    return RankCosts(memory(*device), surplus, times, memory(*host))
