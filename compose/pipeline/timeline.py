"""The pipeline simulator: when each action of a table runs, what ranks wait and keep, and pictures.

``python -m compose schedule`` counts time in forwards of one stage: F is 1, B is 2, its halves I and W
are 1 each, and communication is 0. The planner gives durations in seconds. Tables must pass
:func:`compose.pipeline.schedules.check_table`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from compose.parallel.mesh import Parallel
from compose.pipeline.schedules import (
    Action,
    Table,
    build_table,
    execution_order,
    needs,
    stages_per_rank,
)

DURATIONS = {"F": 1, "I": 1, "W": 1, "B": 2}
KINDS = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}

# Colours among a terminal's 256, so that it shows what the pictures show. Each stage of a rank has a
# shade; after the last shade the first is used again.
SHADES = {
    "F": ("#5f87ff", "#87afff", "#afd7ff"),
    "B": ("#00af5f", "#5fd787", "#afffaf"),
    "I": ("#00afaf", "#5fd7d7", "#afffff"),
    "W": ("#d7af00", "#ffd75f", "#ffffaf"),
}
IDLE = "#eeeeee"
_STAGES = "a shade for each stage of a rank"
PAPER = "#ffffff"
INK = "#222222"
XMLNS = ' xmlns="http://www.w3.org/2000/svg"'
_ROUNDING = 1e-12  # of the clock, at which an action's work is done

# For each schedule a formula, and its busy time in units of (p-1), as a multiple of v m.
_TEXTBOOK = {
    "GPipe": ("(p-1)/(m+p-1)", 1.0),
    "1F1B": ("(p-1)/(m+p-1)", 1.0),
    "Interleaved1F1B": ("(p-1)/(v*m+p-1)", 1.0),
    "LoopedBFS": ("(p-1)/(v*m+p-1)", 1.0),
    "InterleavedZeroBubble": ("(p-1)/(3*v*m+p-1)", 3.0),
    "ZBVZeroBubble": ("(p-1)/(6*m+p-1)", 3.0),
    "DualPipeV": ("(p-1)/(3*m+p-1)", 1.5),
}
_REMARKS = {
    "ZBVZeroBubble": ", and from m = 2p-1 on 0% of each rank's own span",
    "DualPipeV": ", if the forward and backward of a pair end together",
}


@dataclass(frozen=True)
class Slot:
    """One action on the clock."""

    rank: int
    action: Action
    start: float
    end: float


def of_run(parallel: Parallel, micro_batches: int) -> tuple[Table, str]:
    """Return the table of actions of a run with these degrees, and a title for its picture."""
    name, ranks = parallel.pp_schedule, parallel.pp
    title = f"{name}: {ranks} ranks, {micro_batches} micro-batches, layers {list(parallel.pp_layers)}"
    return build_table(name, ranks, parallel.pp_virtual_stages, micro_batches), title


def simulate(
    table: Sequence[Sequence[Action]],
    duration: Callable[[Action], float] = lambda action: DURATIONS[action.kind],
    message: float = 0,
    no_wait: Callable[[Action], tuple[float, float]] = lambda action: (0, 0),
    sharing: float = 1,
) -> list[Slot]:
    """Return when each action runs, in an order in which they can run.

    A rank runs its row in order. An action starts once the rank is free and its inputs have come. A
    ``message`` takes a time, but does not hold up the rank that sends it. ``no_wait`` returns the parts
    of an action's time in which it needs no input yet, and in which its result is sent already: weights
    are gathered before, and gradients reduced after it. Ranks that share processors, ``sharing`` of
    them each, cannot use these parts, and durations hold while all ranks work.
    """
    order = execution_order(table)
    if len(order) < sum(map(len, table)):
        raise ValueError("the schedule waits for itself")
    if sharing > 1:
        return _simulate_shared(table, duration, message, sharing)
    rank_of, last = {a: rank for rank, row in enumerate(table) for a in row}, _last_stage(table)
    free: list[float] = [0] * len(table)
    ends: dict[Action, float] = {}
    slots = []
    for action in order:
        rank, (before, after) = rank_of[action], no_wait(action)
        ready = _ready(needs(action, last), rank, rank_of, ends, message)
        assert ready is not None
        start = max(free[rank], ready - before)
        free[rank] = start + duration(action)
        ends[action] = free[rank] - after
        slots.append(Slot(rank, action, start, free[rank]))
    return slots


def _simulate_shared(
    table: Sequence[Sequence[Action]],
    duration: Callable[[Action], float],
    message: float,
    sharing: float,
) -> list[Slot]:
    """Return when each action runs, if ranks that wait leave their processors to the others.

    While k of n ranks work, each is min(sharing, n / k) times as fast as while all do (generalized
    processor sharing: Parekh and Gallager 1993).
    """
    rank_of, last = {a: rank for rank, row in enumerate(table) for a in row}, _last_stage(table)
    ends: dict[Action, float] = {}
    left: dict[int, float] = {}  # work of the running action, by rank
    now, started, next_of = 0.0, [0.0] * len(table), [0] * len(table)
    slots: list[Slot] = []
    while len(slots) < len(rank_of):
        awaited = []
        for rank, row in enumerate(table):
            if rank in left or next_of[rank] == len(row):
                continue
            ready = _ready(needs(row[next_of[rank]], last), rank, rank_of, ends, message)
            if ready is not None and ready <= now:
                left[rank], started[rank] = duration(row[next_of[rank]]), now
            elif ready is not None:
                awaited.append(ready)
        speed = min(sharing, len(table) / max(1, len(left)))
        until = min([*awaited, *(now + work / speed for work in left.values())])
        left = {rank: work - (until - now) * speed for rank, work in left.items()}
        now = until
        for rank in [rank for rank, work in left.items() if work <= _ROUNDING * now]:
            action = table[rank][next_of[rank]]
            ends[action] = now
            slots.append(Slot(rank, action, started[rank], now))
            next_of[rank] += 1
            del left[rank]
    return slots


def _last_stage(table: Sequence[Sequence[Action]]) -> int:
    return max(action.stage for row in table for action in row)


def _ready(
    inputs: Sequence[set[Action]],
    rank: int,
    rank_of: dict[Action, int],
    ends: dict[Action, float],
    message: float,
) -> float | None:
    """Return when all inputs of an action of ``rank`` have come; None if one was not sent yet."""
    ready = 0
    for options in inputs:
        sent = [ends[a] + (message if rank_of[a] != rank else 0) for a in options if a in ends]
        if not sent:
            return None
        ready = max(ready, *sent)
    return ready


def bubble_fraction(slots: Sequence[Slot]) -> float:
    """Return the idle share, 0 to 1, of all ranks' time from 0 to the last end."""
    ranks = 1 + max(slot.rank for slot in slots)
    busy = sum(slot.end - slot.start for slot in slots)
    return 1 - busy / (ranks * max(slot.end for slot in slots))


def peak_in_flight(table: Table) -> list[int]:
    """Return for each rank the most pairs of stage and micro-batch whose activations it holds at once.

    A pair is held from its F until its B or W, in the order of the rank's own row.
    """
    peaks = []
    for row in table:
        held: set[tuple[int, int]] = set()
        peak = 0
        for stage, kind, micro_batch in row:
            if kind == "F":
                held.add((stage, micro_batch))
            elif kind in "BW":
                held.discard((stage, micro_batch))
            peak = max(peak, len(held))
        peaks.append(peak)
    return peaks


def textbook(
    schedule: str, pp: int, virtual_stages_per_rank: int, micro_batches: int
) -> tuple[str, float] | None:
    """Return the bubble fraction in closed form as text and value, or None for a CSV file.

    p is the number of ranks, v of stages on each, m of micro-batches. The simulated tables compare so:

    - GPipe (Huang et al. 2018, arXiv:1811.06965) and 1F1B (Narayanan et al. 2021, arXiv:2104.04473):
      equal for every m.
    - Interleaved1F1B (Narayanan et al. 2021), LoopedBFS (Lamy-Poirier 2022, arXiv:2211.05953) and
      InterleavedZeroBubble (ZB-H1 of Qi et al. 2023, arXiv:2401.10241, with v stages a rank: idle for
      (p-1)(F+I-W)): equal from m = p on, above it for fewer.
    - ZBVZeroBubble (Qi et al. 2023, section 6): the paper's 0 is that of each rank's own span, from its
      first start to its last end. Ranks start one forward after another, which leaves p-1 of the whole
      span. It is equal from m = 3p/2, rounded down, on, and above it for fewer. Own spans are full from
      2p-1 on.
    - DualPipeV (DeepSeek-V3, arXiv:2412.19437; github.com/deepseek-ai/DualPipe gives (PP/2-1)(F&B+B-3W)
      for PP = 2p stages): idle for 2(p-1), where the overlapped pair F&B takes F+B and ends as one. A
      table runs the pair's forward first and hands its output on at once. This halves the idle time:
      (p-1)/(6m+p-1).
    """
    if schedule not in _TEXTBOOK:
        return None
    formula, work = _TEXTBOOK[schedule]
    at_work = work * stages_per_rank(schedule, virtual_stages_per_rank) * micro_batches
    return formula, (pp - 1) / (at_work + pp - 1)


def report(table: Table, schedule_name: str, virtual_stages: int) -> str:
    """Return lines for a person: bubble fraction, the textbook's formula, micro-batches in flight."""
    micro_batches = len({action.micro_batch for row in table for action in row})
    bubble = bubble_fraction(simulate(table))
    lines = [f"bubble fraction {bubble:.1%} (of the table, with F 1, I 1, W 1, B 2)"]
    if result := textbook(schedule_name, len(table), virtual_stages, micro_batches):
        lines.append(f"textbook: {result[0]} = {result[1]:.1%}{_REMARKS.get(schedule_name, '')}")
    peaks = ", ".join(f"rank {rank}: {peak}" for rank, peak in enumerate(peak_in_flight(table)))
    several = len({action.stage for row in table for action in row}) > len(table)
    each = " (one for each stage that holds it)" if several else ""
    return "\n".join([*lines, f"peak micro-batches in flight: {peaks}{each}"])


def _shades(slots: Sequence[Slot]) -> dict[int, int]:
    """Return for each stage the number of its shade: its place among the stages of its rank."""
    stages: dict[int, set[int]] = {}
    for slot in slots:
        stages.setdefault(slot.rank, set()).add(slot.action.stage)
    return {stage: place % 3 for own in stages.values() for place, stage in enumerate(sorted(own))}


def _painted(text: str, colour: str) -> str:
    """Return ``text`` in black on one of the 6 x 6 x 6 colours of a terminal."""
    levels = ("00", "5f", "87", "af", "d7", "ff")
    red, green, blue = (levels.index(part) for part in re.findall("[0-9a-f]{2}", colour))
    return f"\x1b[38;5;16;48;5;{16 + 36 * red + 6 * green + blue}m{text}\x1b[0m"


def as_text(slots: Sequence[Slot], colour: bool, width: int) -> str:
    """Return a line for each rank, with time to the right, in blocks; times are whole numbers.

    In colour an action is its micro-batch's number. Without colour it is a letter and the number, after
    the stage's number if ranks hold several stages. A dot is one idle unit. A dash is one more unit of
    an action.
    """
    shades = _shades(slots)
    several = any(shades.values())
    labels = [
        (f"{slot.action.stage}" * several + slot.action.kind) * (not colour)
        + f"{slot.action.micro_batch}"
        for slot in slots
    ]
    unit = max(map(len, labels)) + 1
    span = int(max(slot.end for slot in slots))
    ranks = 1 + max(slot.rank for slot in slots)
    rows = [[".".ljust(unit)] * span for _ in range(ranks)]
    for slot, label in zip(slots, labels, strict=True):
        start, end = int(slot.start), int(slot.end)
        texts = [label.rjust(unit - 1)] if colour else [label]
        texts += ["" if colour else "-" * (unit - 1)] * (end - start - 1)
        cells = [text.ljust(unit) for text in texts]
        if colour:
            shade = SHADES[slot.action.kind][shades[slot.action.stage]]
            cells = [_painted(cell, shade) for cell in cells]
        rows[slot.rank][start:end] = cells
    heads = [f"rank {rank:>{len(str(ranks - 1))}}  " for rank in range(ranks)]
    columns = max(1, (width - len(heads[0])) // unit)
    if span > columns >= 5:
        columns -= columns % 5  # blocks start at multiples of 5
    blocks = []
    for start in range(0, span, columns):
        end = min(start + columns, span)
        ticks = "".join(str(t).ljust(5 * unit) for t in range(start, end, 5))
        lines = ["time".ljust(len(heads[0])) + ticks.rstrip()]
        for head, row in zip(heads, rows, strict=True):
            lines.append((head + "".join(row[start:end])).rstrip())
        blocks.append("\n".join(lines))
    if colour:
        used = [kind for kind in KINDS if any(slot.action.kind == kind for slot in slots)]
        legend = [_painted(f" {kind} {KINDS[kind]} ", SHADES[kind][0]) for kind in used]
        blocks.append("  ".join(legend + [_STAGES] * several))
    return "\n\n".join(blocks)


class Bar(NamedTuple):
    """One piece of work in the picture of a timeline."""

    row: int
    start: float
    end: float
    colour: str
    label: str
    """A short text inside, where there is room."""
    words: str
    """The tooltip."""
    attributes: str = ""
    """More attributes of its SVG element."""


@dataclass(frozen=True)
class Drawing:
    """A timeline to be drawn: a row for each rank or stream, with time to the right."""

    title: str
    rows: Sequence[str]
    bars: Sequence[Bar]
    unit: float
    """Pixels of one unit of time."""
    ticks: Sequence[tuple[float, str]]
    """Places on the axis, in time, and their texts."""
    legend: Sequence[tuple[Sequence[str], str]]
    """Colours and what they mean."""
    note: str = ""
    """The end of the legend."""


def drawing(slots: Sequence[Slot], title: str) -> Drawing:
    """Return the drawing of a schedule whose times are in forwards of one stage.

    Long tables use fewer pixels for a unit of time, and leave out numbers that do not fit.
    """
    shades, span = _shades(slots), int(max(slot.end for slot in slots))
    unit = max(4, min(28, _WIDEST // span))
    step = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if n * unit >= 40)
    digits = len(str(max(slot.action.micro_batch for slot in slots)))
    numbers = len(slots) <= _MOST_TEXTS and unit >= 7 * digits
    bars = []
    for slot in sorted(slots, key=lambda slot: (slot.rank, slot.start)):
        rank, action, start, end = slot.rank, slot.action, slot.start, slot.end
        words = f"{action}: {KINDS[action.kind]}, stage {action.stage}, micro-batch"
        words += f" {action.micro_batch}, rank {rank}, time {start} to {end}"
        bars.append(
            Bar(
                rank,
                start,
                end,
                SHADES[action.kind][shades[action.stage]],
                str(action.micro_batch) if numbers else "",
                words,
                f' data-action="{action}" data-rank="{rank}"',
            )
        )
    legend = []
    for kind in KINDS:
        used = sorted({shades[s.action.stage] for s in slots if s.action.kind == kind})
        if used:
            legend.append(([SHADES[kind][shade] for shade in used], f"{kind} {KINDS[kind]}"))
    rows = [f"rank {rank}" for rank in range(1 + max(slot.rank for slot in slots))]
    ticks = [(time, str(time)) for time in range(0, span + 1, step)]
    return Drawing(title, rows, bars, unit, ticks, legend, _STAGES if any(shades.values()) else "")


class _Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    colour: str
    bar: Bar | None = None


class _Text(NamedTuple):
    """A text of the picture; ``x`` is its middle, or its left edge if ``left``; ``y`` is its middle."""

    x: float
    y: float
    text: str
    left: bool = False


_ROW, _LEFT, _TOP, _FONT = 24, 64, 32, 11
_WIDEST, _MOST_TEXTS = 1600, 4000


def _layout(given: Drawing) -> tuple[float, float, list[_Box], list[_Text]]:
    """Return width and height in pixels, boxes in drawing order, and texts, for SVG and PNG alike."""
    unit, axis = given.unit, _TOP + _ROW * len(given.rows)
    left = max(_LEFT, 16 + 6 * max(map(len, given.rows)))
    span = max(bar.end for bar in given.bars)
    boxes, texts = [], [_Text(8, _TOP / 2, given.title, left=True)]
    for number, name in enumerate(given.rows):
        boxes.append(_Box(left, _TOP + _ROW * number, unit * span, _ROW, IDLE))
        texts.append(_Text(8, _TOP + _ROW * (number + 0.5), name, left=True))
    for bar in given.bars:
        x, y, width = left + unit * bar.start, _TOP + _ROW * bar.row, unit * (bar.end - bar.start)
        boxes.append(_Box(x, y, width, _ROW, bar.colour, bar))
        if bar.label:
            texts.append(_Text(x + width / 2, y + _ROW / 2, bar.label))
    for time, text in given.ticks:
        boxes.append(_Box(left + unit * time, axis, 1, 5, INK))
        texts.append(_Text(left + unit * time, axis + 13, text))
    x, y = 8, axis + 28
    for colours, words in given.legend:
        for colour in colours:
            boxes.append(_Box(x, y, 14, 14, colour))
            x += 14
        texts.append(_Text(x + 6, y + 7, words, left=True))
        x += 20 + 7 * len(words)
    if given.note:
        texts.append(_Text(x, y + 7, given.note, left=True))
        x += 7 * len(given.note)
    return max(left + unit * span + 24, x + 8, 16 + 7 * len(given.title)), y + 24, boxes, texts


def as_svg(given: Drawing) -> str:
    """Return a timeline as an SVG picture, with the words of each bar as a tooltip."""
    width, height, boxes, texts = _layout(given)
    lines = [
        f'<svg{XMLNS} width="{width:.10g}" height="{height}"'
        f' viewBox="0 0 {width:.10g} {height}" font-family="sans-serif" font-size="{_FONT}">',
        f'<rect width="{width:.10g}" height="{height}" fill="{PAPER}"/>',
    ]
    for box in boxes:
        rect = f'<rect x="{_pixels(box.x)}" y="{box.y}" width="{_pixels(box.width)}"'
        rect += f' height="{box.height}" fill="{box.colour}"'
        if box.bar:
            rect += (
                f' stroke="{PAPER}"{box.bar.attributes}><title>{escape(box.bar.words)}</title></rect>'
            )
        else:
            rect += "/>"
        lines.append(rect)
    for text in texts:
        anchor = "start" if text.left else "middle"
        lines.append(
            f'<text x="{_pixels(text.x)}" y="{text.y:g}" fill="{INK}" text-anchor="{anchor}"'
            f' dominant-baseline="central">{escape(text.text)}</text>'
        )
    return "\n".join([*lines, "</svg>\n"])


def _pixels(value: float) -> str:
    return f"{round(value, 2):.10g}"


def write_png(given: Drawing, path: str) -> None:
    """Write the picture of :func:`as_svg` as a PNG file."""
    from PIL import Image, ImageDraw, ImageFont  # only pictures need it

    width, height, boxes, texts = _layout(given)
    image = Image.new("RGB", (int(width), int(height)), PAPER)
    draw = ImageDraw.Draw(image)
    font: Any = ImageFont.load_default(_FONT)
    for box in boxes:
        corners = (box.x, box.y, box.x + box.width - 1, box.y + box.height - 1)
        draw.rectangle(corners, box.colour, PAPER if box.bar else None)
    for text in texts:
        draw.text((text.x, text.y), text.text, INK, font, anchor="lm" if text.left else "mm")
    image.save(path)
