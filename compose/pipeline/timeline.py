"""The cost and the picture of a pipeline table: bubbles, activations held, timelines.

Time is counted in forwards of one stage: F is 1, B is 2, its halves I and W are 1 each, and
communication is 0. Tables must pass :func:`compose.pipeline.schedules.check_table`.
"""

import re
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from compose.pipeline.schedules import Action, Table, execution_order, needs, stages_per_rank

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
    start: int
    """Its start, in forwards of one stage."""
    end: int
    """Its end, in forwards of one stage."""


def simulate(table: Table) -> list[Slot]:
    """Return when each action runs, sorted by rank and then by time.

    A rank runs its row in order. An action starts once the rank is free and all that it needs has
    ended.
    """
    rank_of = {action: rank for rank, row in enumerate(table) for action in row}
    last = max(action.stage for action in rank_of)
    free = [0] * len(table)
    end: dict[Action, int] = {}
    slots = []
    for action in execution_order(table):
        rank = rank_of[action]
        ready = [min(end[a] for a in options if a in end) for options in needs(action, last)]
        start = max([free[rank], *ready])
        free[rank] = end[action] = start + DURATIONS[action.kind]
        slots.append(Slot(rank, action, start, end[action]))
    return sorted(slots, key=lambda slot: (slot.rank, slot.start))


def bubble_fraction(slots: list[Slot]) -> float:
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
    """Return lines for a person: bubble fraction, the textbook's formula, micro-batches in flight.

    Args:
        table: The table.
        schedule_name: The name of the schedule.
        virtual_stages: Stages on each rank; 0: as many as the schedule is made for.

    Returns:
        The lines.
    """
    micro_batches = len({action.micro_batch for row in table for action in row})
    bubble = bubble_fraction(simulate(table))
    lines = [f"bubble fraction {bubble:.1%} (of the table, with F 1, I 1, W 1, B 2)"]
    if found := textbook(schedule_name, len(table), virtual_stages, micro_batches):
        lines.append(f"textbook: {found[0]} = {found[1]:.1%}{_REMARKS.get(schedule_name, '')}")
    peaks = ", ".join(f"rank {rank}: {peak}" for rank, peak in enumerate(peak_in_flight(table)))
    several = len({action.stage for row in table for action in row}) > len(table)
    each = " (one for each stage that holds it)" if several else ""
    return "\n".join([*lines, f"peak micro-batches in flight: {peaks}{each}"])


def _places(slots: list[Slot]) -> dict[int, int]:
    """Return for each stage its place, from 0, among the stages of its rank."""
    stages: dict[int, set[int]] = {}
    for slot in slots:
        stages.setdefault(slot.rank, set()).add(slot.action.stage)
    return {stage: place for own in stages.values() for place, stage in enumerate(sorted(own))}


def _shade(kind: str, place: int) -> str:
    return SHADES[kind][place % len(SHADES[kind])]


def _painted(text: str, colour: str) -> str:
    """Return ``text`` in black on one of the 6 x 6 x 6 colours of a terminal."""
    levels = ("00", "5f", "87", "af", "d7", "ff")
    red, green, blue = (levels.index(part) for part in re.findall("[0-9a-f]{2}", colour))
    return f"\x1b[38;5;16;48;5;{16 + 36 * red + 6 * green + blue}m{text}\x1b[0m"


def as_text(slots: list[Slot], colour: bool, width: int) -> str:
    """Return a line for each rank, with time to the right, in blocks.

    In colour an action is its micro-batch's number. Without colour it is a letter and the number, after
    the stage's number if ranks hold several stages. A dot is one idle unit. A dash is one more unit of
    an action.
    """
    places = _places(slots)
    several = any(places.values())
    labels: dict[Slot, str] = {}
    for slot in slots:
        stage, kind, micro_batch = slot.action
        labels[slot] = (f"{stage}" * several + kind) * (not colour) + f"{micro_batch}"
    unit = max(map(len, labels.values())) + 1
    span = max(slot.end for slot in slots)
    ranks = 1 + max(slot.rank for slot in slots)
    rows = [[".".ljust(unit)] * span for _ in range(ranks)]
    for slot in slots:
        texts = [labels[slot].rjust(unit - 1)] if colour else [labels[slot]]
        texts += ["" if colour else "-" * (unit - 1)] * (slot.end - slot.start - 1)
        cells = [text.ljust(unit) for text in texts]
        if colour:
            shade = _shade(slot.action.kind, places[slot.action.stage])
            cells = [_painted(cell, shade) for cell in cells]
        rows[slot.rank][slot.start : slot.end] = cells
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
        legend = [_painted(f" {kind} {KINDS[kind]} ", _shade(kind, 0)) for kind in used]
        blocks.append("  ".join(legend + [_STAGES] * several))
    return "\n\n".join(blocks)


class _Box(NamedTuple):
    x: int
    y: int
    width: int
    height: int
    colour: str
    slot: Slot | None = None


class _Text(NamedTuple):
    """A text of the picture; ``x`` is its middle, or its left edge if ``left``; ``y`` is its middle."""

    x: float
    y: float
    text: str
    left: bool = False


_ROW, _LEFT, _TOP, _FONT = 24, 64, 32, 11
_WIDEST, _MOST_TEXTS = 1600, 4000


def _picture(slots: list[Slot], title: str) -> tuple[int, int, list[_Box], list[_Text]]:
    """Return width and height in pixels, boxes in drawing order, and texts, for SVG and PNG alike.

    Long tables use fewer pixels for a unit of time, and leave out numbers that do not fit.
    """
    places = _places(slots)
    ranks = 1 + max(slot.rank for slot in slots)
    span = max(slot.end for slot in slots)
    unit = max(4, min(28, _WIDEST // span))
    digits = len(str(max(slot.action.micro_batch for slot in slots)))
    numbers = len(slots) <= _MOST_TEXTS and unit >= 7 * digits
    boxes = [_Box(_LEFT, _TOP + _ROW * rank, unit * span, _ROW, IDLE) for rank in range(ranks)]
    texts = [_Text(8, _TOP / 2, title, left=True)]
    texts += [_Text(8, _TOP + _ROW * (rank + 0.5), f"rank {rank}", left=True) for rank in range(ranks)]
    for slot in slots:
        colour = _shade(slot.action.kind, places[slot.action.stage])
        x, y, width = _LEFT + unit * slot.start, _TOP + _ROW * slot.rank, unit * (slot.end - slot.start)
        boxes.append(_Box(x, y, width, _ROW, colour, slot))
        if numbers:
            texts.append(_Text(x + width / 2, y + _ROW / 2, str(slot.action.micro_batch)))
    axis = _TOP + _ROW * ranks
    step = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if n * unit >= 40)
    for time in range(0, span + 1, step):
        boxes.append(_Box(_LEFT + unit * time, axis, 1, 5, INK))
        texts.append(_Text(_LEFT + unit * time, axis + 13, str(time)))
    x, y = 8, axis + 28
    for kind in KINDS:
        shades = sorted({places[s.action.stage] % 3 for s in slots if s.action.kind == kind})
        for place in shades:
            boxes.append(_Box(x, y, 14, 14, _shade(kind, place)))
            x += 14
        if shades:
            texts.append(_Text(x + 6, y + 7, f"{kind} {KINDS[kind]}", left=True))
            x += 20 + 7 * len(f"{kind} {KINDS[kind]}")
    if any(places.values()):
        texts.append(_Text(x, y + 7, _STAGES, left=True))
        x += 7 * len(_STAGES)
    return max(_LEFT + unit * span + 24, x + 8, 16 + 7 * len(title)), y + 24, boxes, texts


def as_svg(slots: list[Slot], title: str) -> str:
    """Return the timeline as an SVG picture, with each action's times as a tooltip."""
    width, height, boxes, texts = _picture(slots, title)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="{_FONT}">',
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
    ]
    for box in boxes:
        rect = f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}"'
        rect += f' fill="{box.colour}"'
        if box.slot:
            rank, action, start, end = box.slot.rank, box.slot.action, box.slot.start, box.slot.end
            rect += f' stroke="{PAPER}" data-action="{action}" data-rank="{rank}"><title>{action}:'
            rect += f" {KINDS[action.kind]}, stage {action.stage}, micro-batch {action.micro_batch},"
            rect += f" rank {rank}, time {start} to {end}</title></rect>"
        else:
            rect += "/>"
        lines.append(rect)
    for text in texts:
        anchor = "start" if text.left else "middle"
        lines.append(
            f'<text x="{text.x:g}" y="{text.y:g}" fill="{INK}" text-anchor="{anchor}"'
            f' dominant-baseline="central">{escape(text.text)}</text>'
        )
    return "\n".join([*lines, "</svg>\n"])


def write_png(slots: list[Slot], title: str, path: str) -> None:
    """Write the picture of :func:`as_svg` as a PNG file."""
    from PIL import Image, ImageDraw, ImageFont  # only pictures need it

    width, height, boxes, texts = _picture(slots, title)
    image = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(image)
    font: Any = ImageFont.load_default(_FONT)
    for box in boxes:
        corners = (box.x, box.y, box.x + box.width - 1, box.y + box.height - 1)
        draw.rectangle(corners, box.colour, PAPER if box.slot else None)
    for text in texts:
        draw.text((text.x, text.y), text.text, INK, font, anchor="lm" if text.left else "mm")
    image.save(path)
