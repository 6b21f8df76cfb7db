"""The costs of one pipeline rank: for other stages that are alike, and with more layers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from compose.planner.memory import ActionMemory, Key, RankMemory
from compose.planner.reduction import Runs, linear
from compose.planner.seconds import Seconds, grown


@dataclass
class RankCosts:
    """The memory and the time of a pipeline rank, action by action."""

    memory: RankMemory
    overhead: float = 1.0
    """Reserved over allocated bytes at the peaks of the record."""
    seconds: dict[Key, Seconds] = field(default_factory=dict)


def renamed(rank: RankCosts, stage: Mapping[int, int]) -> RankCosts:
    """Return the costs of a rank with other numbers of its stages."""

    def key(of: Key) -> Key:
        return stage.get(of[0], of[0]), of[1], of[2]

    memory = RankMemory(
        rank.memory.start,
        rank.memory.buffers,
        {key(k): action for k, action in rank.memory.actions.items()},
    )
    seconds = {key(k): of_one for k, of_one in rank.seconds.items()}
    return RankCosts(memory, rank.overhead, seconds)


def with_all_layers(base: RankCosts, runs: Runs, longer: Sequence[tuple[int, RankCosts]]) -> RankCosts:
    """Return the costs with all layers of all runs.

    Args:
        base: The costs with the fewest layers.
        runs: The runs of all stages.
        longer: For each place of a run, the costs with one layer more there.

    Returns:
        The costs.
    """
    stages = sorted({key[0] for key in base.seconds if key[0] >= 0})

    def more(place: int, stage: int) -> float:
        if stage >= 0:
            return runs.more(stage, place)
        # What belongs to no stage grows with all of the rank's. Each of them is one layer longer in the
        # second record.
        added = [runs.more(s, place) for s in stages]
        return sum(added) / max(1, sum(n > 0 for n in added))

    memory, old = RankMemory(buffers=Counter(base.memory.buffers)), base.memory
    memory.start = _grow(old.start, [(more(p, -1), rank.memory.start) for p, rank in longer])
    for key, action in old.actions.items():
        steps = [(more(p, key[0]), rank.memory.actions[key]) for p, rank in longer]
        larger = ActionMemory(_grow(action.delta, [(n, m.delta) for n, m in steps]))
        for segment, above in action.peaks.items():
            if all(segment in m.peaks for _, m in steps):
                larger.peaks[segment] = _grow(above, [(n, m.peaks[segment]) for n, m in steps])
        memory.actions[key] = larger
    seconds: dict[Key, Seconds] = {}
    for key, one in base.seconds.items():
        seconds[key] = grown(one, [(more(p, key[0]), rank.seconds[key]) for p, rank in longer])
    return RankCosts(memory, base.overhead, seconds)


def _grow(base: Counter[str], steps: Sequence[tuple[float, Counter[str]]]) -> Counter[str]:
    return Counter({key: round(value) for key, value in linear(base, steps).items()})
