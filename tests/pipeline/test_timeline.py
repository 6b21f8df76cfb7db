"""Tables cost what hand and textbook say; pictures show the table."""

import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image, ImageColor

from compose.parallel.mesh import Parallel
from compose.pipeline.pictures import IDLE, SHADES, as_svg, as_text, drawing, write_png
from compose.pipeline.schedules import SCHEDULES, Action, Table, build_table, stages_per_rank
from compose.pipeline.timeline import (
    TimedAction,
    bubble_fraction,
    of_run,
    peak_in_flight,
    report,
    simulate,
    steady_bubble,
    textbook,
    versions,
)

SVG = "{http://www.w3.org/2000/svg}"
DRAWN = [("1F1B", 4, 12), ("Interleaved1F1B", 2, 4), ("ZBVZeroBubble", 3, 5), ("LoopedBFS", 11, 11)]


def parse(*rows: str) -> Table:
    cells = [re.findall(r"(\d+)([FBIW])(\d+)", row) for row in rows]
    return [[Action(int(stage), kind, int(n)) for stage, kind, n in row] for row in cells]


def idle(name: str, pp: int, virtual_stages: int, micro_batches: int) -> tuple[float, float]:
    """Bubble fractions of the simulated table and of the textbook."""
    expected = textbook(name, pp, virtual_stages, micro_batches)
    assert expected is not None
    return bubble_fraction(simulate(build_table(name, pp, virtual_stages, micro_batches))), expected[1]


def rounds(name: str, pp: int, micro_batches: int) -> bool:
    """Whether PyTorch takes this number for schedules in rounds of about ``pp``."""
    in_rounds = name in ("Interleaved1F1B", "InterleavedZeroBubble")
    return not in_rounds or micro_batches % max(1, micro_batches // pp) == 0


def test_simulation_by_hand() -> None:
    # time    0    1    2    3    4    5    6
    # rank 0  0F0  0F1  .    0B0  ---  0B1  ---
    # rank 1  .    1F0  1I0  1F1  1I1  1W0  1W1
    table = parse("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1I1 1W0 1W1")
    slots = simulate(table)
    by_rank = sorted(slots, key=lambda slot: (slot.rank, slot.start))
    assert [(str(s.action), s.rank, s.start, s.end) for s in by_rank] == [
        ("0F0", 0, 0, 1),
        ("0F1", 0, 1, 2),
        ("0B0", 0, 3, 5),
        ("0B1", 0, 5, 7),
        ("1F0", 1, 1, 2),
        ("1I0", 1, 2, 3),
        ("1F1", 1, 3, 4),
        ("1I1", 1, 4, 5),
        ("1W0", 1, 5, 6),
        ("1W1", 1, 6, 7),
    ]
    assert bubble_fraction(slots) == pytest.approx(2 / 14, abs=1e-12)
    assert peak_in_flight(table) == [2, 2]


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5, 8])
def test_textbook_of_one_stage_a_rank(name: str, pp: int) -> None:
    for micro_batches in (*range(1, 14), 32):
        result, expected = idle(name, pp, 0, micro_batches)
        assert expected == pytest.approx((pp - 1) / (micro_batches + pp - 1), abs=1e-12)
        assert result == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"])
@pytest.mark.parametrize("virtual_stages", [1, 2, 3])
@pytest.mark.parametrize("pp", [2, 3, 4, 6])
def test_textbook_of_several_stages_a_rank(name: str, virtual_stages: int, pp: int) -> None:
    work = 3 if name == "InterleavedZeroBubble" else 1
    for micro_batches in (n for n in range(1, 4 * pp + 1) if rounds(name, pp, n)):
        result, expected = idle(name, pp, virtual_stages, micro_batches)
        ramp = pp - 1
        assert expected == pytest.approx(
            ramp / (work * virtual_stages * micro_batches + ramp), abs=1e-12
        )
        if micro_batches >= pp:
            assert result == pytest.approx(expected, abs=1e-12)
        elif virtual_stages > 1:
            assert result > expected + 1e-3
        else:
            assert result >= expected - 1e-12


@pytest.mark.parametrize("pp", range(2, 9))
def test_textbook_of_zbv(pp: int) -> None:
    for micro_batches in range(1, 3 * pp):
        result, expected = idle("ZBVZeroBubble", pp, 0, micro_batches)
        assert expected == pytest.approx((pp - 1) / (6 * micro_batches + pp - 1), abs=1e-12)
        slots = simulate(build_table("ZBVZeroBubble", pp, 0, micro_batches))
        spans = [[s for s in slots if s.rank == rank] for rank in range(pp)]
        own_idle = [own[-1].end - own[0].start - sum(s.end - s.start for s in own) for own in spans]
        if micro_batches >= 3 * pp // 2:
            assert result == pytest.approx(expected, abs=1e-12)
        else:
            assert result > expected + 1e-3
        assert any(own_idle) == (micro_batches < 2 * pp - 1)  # none is the paper's zero bubble


@pytest.mark.parametrize("pp", range(2, 7))
def test_textbook_of_dualpipev_is_an_upper_bound(pp: int) -> None:
    for micro_batches in range(2 * pp, 6 * pp):
        result, expected = idle("DualPipeV", pp, 0, micro_batches)
        assert expected == pytest.approx(2 * (pp - 1) / (6 * micro_batches + 2 * (pp - 1)), abs=1e-12)
        assert result == pytest.approx((pp - 1) / (6 * micro_batches + pp - 1), abs=1e-12)


def test_textbook_knows_names_only() -> None:
    assert textbook("table.csv", 2, 1, 4) is None
    assert textbook("1F1B", 4, 0, 8) == ("(p-1)/(m+p-1)", 3 / 11)
    assert textbook("Interleaved1F1B", 4, 0, 8) == ("(p-1)/(v*m+p-1)", 3 / 19)
    for name in SCHEDULES:
        assert textbook(name, 4, 0, 8)
        assert textbook(name, 4, 0, 8) == textbook(name, 4, stages_per_rank(name), 8)


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 8])
def test_peak_in_flight(pp: int, micro_batches: int) -> None:
    peaks = peak_in_flight(build_table("1F1B", pp, 0, micro_batches))
    assert peaks == [min(micro_batches, pp - rank) for rank in range(pp)]
    assert peak_in_flight(build_table("GPipe", pp, 0, micro_batches)) == [micro_batches] * pp


def test_activations_are_held_until_the_weights_backward() -> None:
    assert peak_in_flight(parse("0F0 0I0 0F1 0I1 0W0 0W1")) == [2]
    assert peak_in_flight(parse("0F0 0I0 0W0 0F1 0I1 0W1")) == [1]
    assert peak_in_flight(parse("0F0 1F0 1B0 0B0")) == [2]


def slots_of(
    schedule: str, pp: int, per_rank: int, micro_batches: int, message: float = 0.0
) -> list[TimedAction]:
    """The slots of a schedule whose forwards take 1 s and backwards 2 s on each rank."""
    rows = build_table(schedule, pp, per_rank, micro_batches)
    took = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    return simulate(rows, lambda action: took[action.kind] / per_rank, lambda *ranks: message)


def length_of(slots: list[TimedAction]) -> float:
    """The end of the last slot."""
    return max(slot.end for slot in slots)


def test_messages_between_stages_delay_the_next_one() -> None:
    """Two ranks and two micro-batches by hand; a message takes c = 0.5 s.

    Rank 1: F0 from 1 + c to 2 + c, B0 to 4 + c, F1 to 5 + c, B1 to 7 + c. Rank 0: B0 from 4 + 2c, B1
    from 7 + 2c to 9 + 2c.
    """
    slots = {(s.rank, s.action.kind, s.action.micro_batch): s for s in slots_of("1F1B", 2, 1, 2, 0.5)}
    assert slots[1, "B", 0].end == 4.5
    assert slots[0, "B", 0].start == 5.0
    assert slots[0, "B", 1].start == 8.0
    assert slots[0, "B", 1].end == 10.0


def test_gradients_are_reduced_after_the_result() -> None:
    """Actions take 3 s, of a backward 1 s after its result; by hand, one micro-batch on two ranks."""
    rows = build_table("1F1B", 2, 1, 1)
    slots = simulate(rows, lambda a: 3.0, after_result=lambda a: float(a.kind == "B"))
    starts = {(slot.rank, slot.action.kind): slot.start for slot in slots}
    assert starts == {(0, "F"): 0.0, (1, "F"): 3.0, (1, "B"): 6.0, (0, "B"): 8.0}


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_ranks_on_one_processor_leave_no_bubble(schedule: str) -> None:
    """The processor works while any rank does."""
    per_rank = 1 if schedule in ("GPipe", "1F1B") else 2
    rows = build_table(schedule, 4, per_rank, 8)
    took = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    slots = simulate(rows, lambda action: took[action.kind], sharing=4.0)
    whole = sum(took[action.kind] for row in rows for action in row)
    assert length_of(slots) == pytest.approx(whole / 4)
    assert sorted(slot.action for slot in slots) == sorted(action for row in rows for action in row)


def test_two_ranks_for_each_processor_by_hand() -> None:
    """Four ranks, two processors, one micro-batch: one rank at a time works, twice as fast."""
    rows = build_table("1F1B", 4, 1, 1)
    slots = simulate(rows, lambda action: 3.0, lambda *ranks: 0.5, sharing=2.0)
    assert length_of(slots) == pytest.approx(8 * 1.5 + 6 * 0.5)


def test_few_ranks_for_their_processors_are_as_fast_as_alone() -> None:
    """At most all processors work, so that a rank is never faster than by ``sharing``."""
    rows, took = build_table("1F1B", 4, 1, 16), {"F": 1.0, "B": 2.0}
    lengths = [
        length_of(simulate(rows, lambda a: took[a.kind], sharing=sharing))
        for sharing in (1.0, 1.0 + 1e-9, 1.5, 4.0)
    ]
    assert lengths[1] == pytest.approx(lengths[0])
    assert lengths[0] > lengths[2] > lengths[3]
    assert lengths[3] == pytest.approx(16 * 3)


def test_a_rank_runs_one_action_at_a_time_and_after_its_input() -> None:
    slots = slots_of("Interleaved1F1B", 4, 2, 8, 0.25)
    ends = {(s.action.stage, s.action.kind, s.action.micro_batch): s.end for s in slots}
    for rank in range(4):
        own = sorted((s for s in slots if s.rank == rank), key=lambda s: s.start)
        assert all(a.end <= b.start for a, b in pairwise(own))
    for slot in slots:
        before = (slot.action.stage - 1, "F", slot.action.micro_batch)
        if slot.action.kind == "F" and before in ends:
            assert slot.start >= ends[before] + 0.25


def test_a_table_that_waits_for_itself_is_refused() -> None:
    rows = [[Action(0, "B", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]]
    with pytest.raises(ValueError, match="waits for itself"):
        simulate(rows, lambda action: 1.0)


def test_report() -> None:
    assert report(build_table("1F1B", 4, 0, 8), "1F1B", 0).splitlines() == [
        "bubble fraction 27.3% (of the table, with F 1, I 1, W 1, B 2)",
        "textbook: (p-1)/(m+p-1) = 27.3%",
        "peak micro-batches in flight: rank 0: 4, rank 1: 3, rank 2: 2, rank 3: 1",
    ]
    assert report(build_table("DualPipeV", 2, 0, 4), "DualPipeV", 0).splitlines() == [
        "bubble fraction 4.0% (of the table, with F 1, I 1, W 1, B 2)",
        "textbook: (p-1)/(3*m+p-1) = 7.7%, if the forward and backward of a pair end together",
        "peak micro-batches in flight: rank 0: 5, rank 1: 5 (one for each stage that holds it)",
    ]
    assert "textbook" not in report(build_table("GPipe", 2, 0, 2), "table.csv", 0)


def test_text_by_hand() -> None:
    table = parse("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1I1 1W0 1W1")
    assert as_text(simulate(table), colour=False, width=80).splitlines() == [
        "time    0              5",
        "rank 0  F0 F1 .  B0 -- B1 --",
        "rank 1  .  F0 I0 F1 I1 W0 W1",
    ]
    assert as_text(simulate(table), colour=False, width=23).splitlines() == [
        "time    0",
        "rank 0  F0 F1 .  B0 --",
        "rank 1  .  F0 I0 F1 I1",
        "",
        "time    5",
        "rank 0  B1 --",
        "rank 1  W0 W1",
    ]


@pytest.mark.parametrize(("name", "pp", "micro_batches"), DRAWN)
@pytest.mark.parametrize("width", [1, 50, 120, 10_000])
def test_text_holds_the_table(name: str, pp: int, micro_batches: int, width: int) -> None:
    table = build_table(name, pp, 0, micro_batches)
    text = as_text(simulate(table), colour=False, width=width)
    assert "\x1b" not in text
    rows: Table = [[] for _ in table]
    for rank, line in re.findall(r"^rank +(\d+)  (.*)$", text, re.M):
        for stage, kind, n in re.findall(r"(\d*)([FBIW])(\d+)", line):
            rows[int(rank)].append(Action(int(stage or rank), kind, int(n)))
    assert rows == table
    if width >= 50:
        assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize(("name", "pp", "micro_batches"), DRAWN)
def test_colours_of_text(name: str, pp: int, micro_batches: int) -> None:
    table = build_table(name, pp, 0, micro_batches)
    text = as_text(simulate(table), colour=True, width=10_000)
    levels = (0, 95, 135, 175, 215, 255)
    kinds: dict[str, str] = {}
    for kind, shades in SHADES.items():
        for shade in shades:
            red, green, blue = (levels.index(part) for part in ImageColor.getrgb(shade)[:3])
            kinds[str(16 + 36 * red + 6 * green + blue)] = kind
    assert len(kinds) == sum(map(len, SHADES.values()))
    for rank, line in enumerate(text.splitlines()[1 : pp + 1]):
        cells = re.findall(r"48;5;(\d+)m *(\d+) *\x1b\[0m", line)
        assert [(kinds[colour], int(n)) for colour, n in cells] == [
            (a.kind, a.micro_batch) for a in table[rank]
        ]


def boxes(svg: str) -> dict[tuple[str, int], tuple[int, int, int, int, str]]:
    """Return x, y, width, height and colour by action, rank."""
    rects = [r for r in ET.fromstring(svg).iter(f"{SVG}rect") if "data-action" in r.attrib]
    results = {}
    for rect in rects:
        x, y, width, height = (int(rect.attrib[key]) for key in ("x", "y", "width", "height"))
        key = rect.attrib["data-action"], int(rect.attrib["data-rank"])
        results[key] = x, y, width, height, rect.attrib["fill"]
    assert len(results) == len(rects)
    return results


@pytest.mark.parametrize(("name", "pp", "micro_batches"), [*DRAWN, ("InterleavedZeroBubble", 8, 64)])
def test_svg_holds_the_slots(name: str, pp: int, micro_batches: int) -> None:
    table = build_table(name, pp, 0, micro_batches)
    slots = simulate(table)
    svg = as_svg(drawing(slots, "a <title> & 'more'"))
    result = boxes(svg)
    assert result.keys() == {(str(a), rank) for rank, row in enumerate(table) for a in row}
    left = min(x for x, *_ in result.values())
    last_end = max(slot.end for slot in slots)
    unit = (max(x + width for x, _, width, _, _ in result.values()) - left) / last_end
    tops = [result[str(row[0]), rank][1] for rank, row in enumerate(table)]
    assert tops == sorted(set(tops))
    for slot in slots:
        x, y, width, _, colour = result[str(slot.action), slot.rank]
        assert (x - left, width) == (unit * slot.start, unit * (slot.end - slot.start))
        assert y == tops[slot.rank]
        assert colour in SHADES[slot.action.kind]
    root = ET.fromstring(svg)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == "a <title> & 'more'"
    assert texts[1 : pp + 1] == [f"rank {rank}" for rank in range(pp)]
    if len(slots) < 1000:  # else they would not fit
        numbers = texts[pp + 1 : pp + 1 + len(slots)]
        assert numbers == [str(a.micro_batch) for row in table for a in row]
    assert max(x + width for x, _, width, _, _ in result.values()) <= int(root.attrib["width"]) <= 2000


def test_stages_of_a_rank_differ_in_shade() -> None:
    result = boxes(as_svg(drawing(simulate(build_table("Interleaved1F1B", 2, 3, 4)), "three")))
    assert {result[f"{stage}F0", 0][-1] for stage in (0, 2, 4)} == set(SHADES["F"])


@pytest.mark.parametrize(("name", "pp", "micro_batches"), [*DRAWN, ("InterleavedZeroBubble", 8, 64)])
def test_png_shows_the_slots(name: str, pp: int, micro_batches: int, tmp_path: Path) -> None:
    slots = simulate(build_table(name, pp, 0, micro_batches))
    write_png(drawing(slots, name), str(tmp_path / "table.png"))
    places = boxes(as_svg(drawing(slots, name)))
    left = min(x for x, *_ in places.values())
    unit = min(width for _, _, width, _, _ in places.values())
    busy: dict[int, set[int]] = {slot.rank: set() for slot in slots}
    with Image.open(tmp_path / "table.png") as image:
        pixels = image.convert("RGB")
    for slot in slots:
        x, y, width, _, _ = places[str(slot.action), slot.rank]
        # Above the number, which stands in the middle.
        colour = pixels.getpixel((x + width // 2, y + 3))
        assert colour in [ImageColor.getrgb(shade) for shade in SHADES[slot.action.kind]], slot
        busy[slot.rank] |= set(range(int(slot.start), int(slot.end)))
    idle_units = 0
    for rank, units in busy.items():
        y = next(places[key][1] for key in places if key[1] == rank)
        for time in set(range(int(max(slot.end for slot in slots)))) - units:
            assert pixels.getpixel((left + unit * time + unit // 2, y + 12)) == ImageColor.getrgb(IDLE)
            idle_units += 1
    assert idle_units == sum(row_idle(slots, rank) for rank in range(pp))


def row_idle(slots: list[TimedAction], rank: int) -> float:
    return max(s.end for s in slots) - sum(s.end - s.start for s in slots if s.rank == rank)


def test_without_a_flush() -> None:
    """The table is of several steps; PipeDream has as many versions as micro-batches in flight."""
    table, title = of_run(Parallel(pp=4, dp_shard=1, pp_schedule="PipeDream"), 1)
    assert title == "PipeDream: 4 ranks, 8 steps of 1 micro-batches, layers []"
    assert peak_in_flight(table) == versions("PipeDream", 4) == [4, 3, 2, 1]
    assert report(table, "PipeDream", 0).splitlines() == [
        "bubble fraction 0.0% of a long run, 27.3% of the table (with F 1, B 2): no step waits for the"
        " one before",
        "versions of the weights: rank 0: 4, rank 1: 3, rank 2: 2, rank 3: 1; gradients are of older"
        " weights than those of 1F1B",
        "peak micro-batches in flight: rank 0: 4, rank 1: 3, rank 2: 2, rank 3: 1",
    ]
    table, title = of_run(Parallel(pp=4, dp_shard=1, pp_schedule="PipeDream2BW"), 5)
    assert title == "PipeDream2BW: 4 ranks, 3 steps of 5 micro-batches, layers []"
    assert {action.micro_batch for action in table[0]} == set(range(15))
    assert versions("PipeDream2BW", 4) == [2] * 4
    assert all(steady_bubble(pp) == pytest.approx(0) for pp in (2, 3, 8))
