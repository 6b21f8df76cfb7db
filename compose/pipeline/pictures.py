"""Pictures of a pipeline's timeline: as text in a terminal, as SVG and as PNG."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from compose.pipeline.timeline import TimedAction

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


def _shades(slots: Sequence[TimedAction]) -> dict[int, int]:
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


def as_text(slots: Sequence[TimedAction], colour: bool, width: int) -> str:
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


def drawing(slots: Sequence[TimedAction], title: str) -> Drawing:
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
    """Return width and height in pixels, boxes in drawing order, and texts, for both SVG and PNG."""
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
        end = "/>"
        if bar := box.bar:
            end = f' stroke="{PAPER}"{bar.attributes}><title>{escape(bar.words)}</title></rect>'
        lines.append(
            f'<rect x="{_pixels(box.x)}" y="{box.y}" width="{_pixels(box.width)}"'
            f' height="{box.height}" fill="{box.colour}"{end}'
        )
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
