"""The replay of CUDA's caching allocator: against a slow one, by hand, and on a GPU."""

import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compose.planner import memory
from compose.planner.memory import Peaks, replay
from tests.support.command_lines import launch

KB, MB = 2**10, 2**20
Events = list[tuple[int, int]]


class Slow:
    """The rules once more: lists of segments, each a list of [bytes, id or None], scanned whole."""

    def __init__(self, expandable: bool) -> None:
        self.expandable = expandable
        self.segments: dict[bool, list[list[list]]] = {True: [], False: []}

    def reserved(self) -> int:
        return sum(b[0] for pool in self.segments.values() for segment in pool for b in segment)

    def allocated(self) -> int:
        blocks = [b for pool in self.segments.values() for segment in pool for b in segment]
        return sum(b[0] for b in blocks if b[1] is not None)

    def make_room(self, small: bool, size: int) -> None:
        pool = self.segments[small]
        if self.expandable:
            if not pool:
                pool.append([])
            segment = pool[0]
            page = 2 * MB if small else 20 * MB
            if not segment or segment[-1][1] is not None:
                segment.append([0, None])
            while segment[-1][0] < size:
                segment[-1][0] += page
        elif small:
            pool.append([[2 * MB, None]])
        elif size < 10 * MB:
            pool.append([[20 * MB, None]])
        else:
            pool.append([[(size + 2 * MB - 1) // (2 * MB) * (2 * MB), None]])

    def find(self, small: bool, size: int) -> tuple[list[list], int] | None:
        best: tuple[list[list], int] | None = None
        fallback: tuple[list[list], int] | None = None
        for segment in self.segments[small]:
            for i, (length, owner) in enumerate(segment):
                if owner is None and length >= size:
                    if self.expandable and i == len(segment) - 1:
                        fallback = segment, i
                    elif best is None or length < best[0][best[1]][0]:
                        best = segment, i
        if best and fallback and fallback[0][fallback[1]][0] < best[0][best[1]][0]:
            return best
        if best and fallback:
            return min(best, fallback, key=lambda result: result[0][result[1]][0])
        return best or fallback

    def allocate(self, name: int, requested: int) -> None:
        size = max(512, (requested + 511) // 512 * 512)
        small = size <= MB
        result = self.find(small, size)
        if result is None:
            self.make_room(small, size)
            result = self.find(small, size)
        assert result is not None
        segment, i = result
        rest = segment[i][0] - size
        if rest >= 512 and (small or self.expandable or rest > MB):
            segment[i : i + 1] = [[size, name], [rest, None]]
        else:
            segment[i][1] = name

    def free(self, name: int) -> None:
        for pool in self.segments.values():
            for segment in pool:
                for block in segment:
                    if block[1] == name:
                        block[1] = None
                i = 0
                while i + 1 < len(segment):
                    if segment[i][1] is None and segment[i + 1][1] is None:
                        segment[i][0] += segment.pop(i + 1)[0]
                    else:
                        i += 1


def slow_replay(events: Events, expandable: bool) -> Peaks:
    memory = Slow(expandable)
    allocated = reserved = 0
    for name, amount in events:
        if amount > 0:
            memory.allocate(name, amount)
            # Neither rises when a block is freed.
            allocated = max(allocated, memory.allocated())
            reserved = max(reserved, memory.reserved())
        else:
            memory.free(name)
    return Peaks(allocated, reserved)


EDGES = [1, 511, 512, 513, MB - 1, MB, MB + 1, 2 * MB, 10 * MB - 513, 10 * MB - 1, 10 * MB, 10 * MB + 1]
SIZES: dict[str, Callable[[random.Random], int]] = {
    "any": lambda draw: draw.randrange(1, 48 * MB),
    "small": lambda draw: draw.randrange(1, MB + 1),
    "middle": lambda draw: draw.randrange(MB, 11 * MB),
    "powers": lambda draw: int(2 ** draw.uniform(0, 26)),
    "few": lambda draw: draw.choice([4 * KB, 64 * KB, 700 * KB, 3 * MB, 9 * MB, 12 * MB, 30 * MB]),
    "edges": lambda draw: draw.choice(EDGES),
}


def drawn(seed: int, sizes: str, count: int, live: int) -> Events:
    """Random allocations and frees in turn, as in a step: up to ``live`` blocks, and down to none."""
    draw = random.Random(seed)
    used: Events = []
    events: Events = []
    grow = True
    for name in range(count):
        if len(used) >= live or not used:
            grow = not used or (len(used) < live)
        if draw.random() < (0.75 if grow else 0.3) or not used:
            used.append((name, SIZES[sizes](draw)))
            events.append(used[-1])
        else:
            block, size = used.pop(draw.randrange(len(used)) if draw.random() < 0.6 else -1)
            events.append((block, -size))
    return events


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", range(12))
def test_equals_the_slow_one(seed: int, sizes: str, expandable: bool) -> None:
    events = drawn(seed, sizes, 1000, 10 + 15 * seed)
    assert replay(events, expandable) == slow_replay(events, expandable)


def given(words: str, expandable: bool) -> Peaks:
    """The peaks for words such as "a=3M" (allocate block a) and "-a" (free it)."""
    events: Events = []
    sizes: dict[str, int] = {}
    for word in words.split():
        name, _, amount = word.strip("-").partition("=")
        if amount:
            unit = {"K": KB, "M": MB}.get(amount[-1], 1)
            sizes[name] = int(float(amount.rstrip("KM")) * unit)
        events.append((ord(name), sizes[name] if amount else -sizes[name]))
    assert replay(events, expandable) == slow_replay(events, expandable)
    return replay(events, expandable)


# (allocate and free, allocated and reserved at the peak in MiB; None: not of interest), by the rule.
BY_HAND: dict[str, list[tuple[str, float | None, float]]] = {
    "sizes are multiples of 512": [("a=1", 512 / MB, 2), ("a=512 b=513", 1536 / MB, 2)],
    # The size that counts is the rounded one: one byte less than 10 MiB is 10 MiB.
    "segments": [
        ("a=1M", None, 2),
        ("a=1048577", None, 20),
        ("a=9.9M", None, 20),
        ("a=10485759", None, 10),
        ("a=10M", None, 10),
        ("a=10485761", None, 12),
    ],
    "the rest of a pool is of no use to the other": [
        ("a=2M b=1M", None, 22),
        ("a=1K -a b=1.5M", None, 22),
    ],
    "512 bytes are split off in the small pool": [("a=1M b=1048064 c=512", 2, 2)],
    # 20 MiB less 9.5 and 9.5 leaves 1 MiB, which the second block has; 1.25 MiB are split off.
    "in the large pool 1 MiB stays with the request, and more is split off": [
        ("a=11M", 12, 12),
        ("a=10M b=9M", 19, 30),
        ("a=9.5M b=9.5M", 20, 20),
        ("a=9.5M b=9.25M", 18.75, 20),
        ("a=9.5M b=9.25M c=1.2M", None, 20),
    ],
    "the 14 MiB block is taken for 13 MiB, and not that of 30 before it": [
        ("a=30M b=14M -a -b c=13M d=29M", 44, 44)
    ],
    "of two equal holes the lower one is taken": [
        ("a=4M b=2M c=4M d=2M -a -c e=4M -d f=14M", None, 20)
    ],
    "free neighbours join, but not those of two segments": [
        ("a=5M b=5M c=5M -a -c -b d=20M", None, 20),
        ("a=12M b=12M -a -b c=24M", None, 48),
    ],
    "nothing goes back": [("a=30M -a b=40M -b c=2M", None, 70)],
    # The free 10 MiB behind a are a part of b; 1 MiB and less is split off too.
    "expandable: whole pages, and a block that grows from what is free at the end": [
        ("a=1", 512 / MB, 2),
        ("a=1.5M", 1.5, 20),
        ("a=30M", 30, 40),
        ("a=30M -a b=45M", 45, 60),
        ("a=30M b=30M", 60, 60),
        ("a=19.5M b=20.5M", 40, 40),
    ],
    # Page: [8 free, 5, 7 free at the end]; c takes the hole, and the end stays whole for d.
    "expandable: a larger hole is taken before the end, although that fits better": [
        ("a=8M b=5M -a c=6M d=7M", 18, 20),
        ("a=8M b=5M -a c=6M d=27M", None, 40),
    ],
    "without the option the better fit is taken, and 8 MiB are left for d": [
        ("a=8M b=5M -a c=6M d=8M", None, 20)
    ],
}


@pytest.mark.parametrize("rule", BY_HAND)
def test_by_hand(rule: str) -> None:
    for words, allocated, reserved in BY_HAND[rule]:
        result = given(words, rule.startswith("expandable"))
        assert result.reserved == reserved * MB, words
        assert allocated in (None, result.allocated / MB), words


def test_no_bytes() -> None:
    assert replay([]) == Peaks(0, 0)
    assert replay([(1, 0), (1, 0), (1, 5)]) == Peaks(512, 2 * MB)
    assert replay([(1, 5), (1, -5), (1, 7)]) == Peaks(512, 2 * MB)


def test_refused() -> None:
    with pytest.raises(ValueError, match="block 7 is allocated a second time"):
        replay([(7, 5), (7, 5)])
    with pytest.raises(ValueError, match="block 7 is freed, and is not in use"):
        replay([(7, 5), (7, -5), (7, -5)])


def test_fast() -> None:
    """200,000 events with thousands of blocks: about 3 times as long as two million stores in a dict,
    on whatever processor."""
    events = drawn(0, "powers", 200_000, 5000)
    start = time.process_time()
    known: dict[int, int] = {}
    for _ in range(10):
        for block, size in events:
            known[block] = size
    between = time.process_time()
    replay(events)
    replay(events, expandable=True)
    assert time.process_time() - between < 20 * (between - start)


def test_constants_are_pytorch_s() -> None:
    """The sizes are those in the headers of the installed PyTorch."""
    header = Path(str(torch.__file__)).parent / "include" / "c10" / "core" / "AllocatorConfig.h"
    text = header.read_text()
    result = dict(re.findall(r"constexpr size_t (k\w+) = (\d+);", text))
    result.update(re.findall(r"(large_segment_size_)\{(\d+)\}", text))
    ours = {
        "kMinBlockSize": memory.BLOCK,
        "kSmallSize": memory.SMALL,
        "kSmallBuffer": memory.SMALL_SEGMENT,
        "kMinLargeAlloc": memory.LARGE,
        "kRoundLarge": memory.LARGE_STEP,
        "large_segment_size_" if "large_segment_size_" in result else "kLargeBuffer": (
            memory.LARGE_SEGMENT
        ),
    }
    assert {name: int(result[name]) for name in ours} == ours


ON_GPU = """
import json, os, sys
os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:" + sys.argv[1]
import torch
held = {}
for name, amount in json.load(open(sys.argv[2])):
    if amount > 0:
        held[name] = torch.empty(amount, dtype=torch.uint8, device="cuda")
    else:
        del held[name]
found = torch.cuda.memory_stats()
print(json.dumps([found["allocated_bytes.all.peak"], found["reserved_bytes.all.peak"]]))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_the_gpu_s(tmp_path: Path, sizes: str, expandable: bool) -> None:
    """Within 1%: where the driver puts a segment decides which of two equal blocks is taken."""
    events = drawn(1, sizes, 3000, 150)
    file = tmp_path / "events.json"
    file.write_text(json.dumps(events))
    done = launch("-c", ON_GPU, str(expandable), str(file))
    assert done.returncode == 0, done.stderr
    assert list(replay(events, expandable)) == pytest.approx(json.loads(done.stdout), rel=0.01)
