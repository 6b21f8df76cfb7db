"""The planner's result as one page: memory, timeline, the Pareto front and a table of all candidates.

The page is one file and asks no network for anything: style, script and SVG are in it. Places along x
are percentages, so that a chart has the width of its page and text keeps its size.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from compose.pipeline.pictures import XMLNS, Bar, Drawing, as_svg
from compose.planner.memory import CATEGORIES
from compose.planner.report import GIB, TIMES, digits, memory, mesh_of, seconds, shown_value, words_of

HELD = "reserved, not in use"
_WIDE = 1200  # pixels of a timeline that is not zoomed in
COLOURS = ("#2a6fd0", "#d0551b", "#6a4fcf", "#0e8f6b", "#b07600", "#cf3b3a", "#c44a8a", "#4d7d1f")
"""Colours on a light page; with text they have a contrast of 4.5 or more."""


@dataclass(frozen=True)
class Scale:
    """Maps values to percent of a chart's width or height, linearly or by their logarithm."""

    low: float
    high: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the place of a value in percent."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return 100 * (value - low) / (high - low)

    def ticks(self, most: int = 6) -> list[float]:
        """Return round values inside the scale, about ``most`` of them."""
        power = math.floor(math.log10(self.high - self.low))
        if self.log:
            results = [
                factor * 10.0**power
                for power in range(
                    math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1
                )
                for factor in (1, 2, 5)
                if self.low <= factor * 10.0**power <= self.high
            ]
            return results[:: -(-len(results) // most)] if results else []
        steps = (factor * 10.0**each for each in range(power - 3, power + 2) for factor in (1, 2, 5))
        step = next(step for step in steps if (self.high - self.low) / step < most)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        # Rounded, so that 3 steps of 0.2 are the same as 30 of 0.02.
        return [float(f"{i * step:.9g}") for i in range(first, last + 1)]


def scale_for(values: Sequence[float]) -> Scale:
    """Return a scale with room around the values, by logarithm if the largest is 8 times the least."""
    low, high = min(values), max(values)
    if low > 0 and high / low > 8:
        return Scale(low / 1.15, high * 1.15, log=True)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(max(0.0, low - room) if low >= 0 else low - room, high + room)


def place(value: float) -> str:
    """Return a percentage for an attribute."""
    return f"{value:.3f}".rstrip("0").rstrip(".") + "%"


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return a legend of pairs of a class and a name."""
    items = (f'<li><i class="key {kind}"></i>{escape(name)}</li>' for kind, name in entries)
    return f'<ul class="legend">{"".join(items)}</ul>'


def x_axis(scale: Scale, unit: str, title: str) -> str:
    """Return an axis under a chart, with ticks and a title."""
    parts = []
    for number, tick in enumerate(scale.ticks()):
        at = scale(tick)
        anchor = "start" if at < 4 else "end" if at > 96 else "middle"
        parts.append(
            f'<g class="{"odd" if number % 2 else "even"}">'
            f'<line class="tick" x1="{place(at)}" x2="{place(at)}" y1="0" y2="5"/>'
            f'<text x="{place(at)}" y="18" text-anchor="{anchor}">{tick:,.9g}</text></g>'
        )
    name = f'<p class="axis">{escape(title)} ({escape(unit)})</p>'
    return f'<svg width="100%" height="24" aria-hidden="true">{"".join(parts)}</svg>{name}'


def parts_of(use: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """Return the parts of a rank's memory in the order of a bar: class, name and bytes."""
    sizes = use["by_category"]
    results = [(f"c{i}", name, sizes[name]) for i, name in enumerate(CATEGORIES) if sizes.get(name)]
    held = use["reserved"] - sum(size for _, _, size in results)
    return [*results, ("held", HELD, held)] if held > 0 else results


def memory_chart(stages: Sequence[Mapping[str, Any]], capacity: float) -> str:
    """Return a bar for each pipeline rank, by category, against the capacity."""
    bars = [parts_of(stage) for stage in stages]
    totals = [sum(size for _, _, size in bar) for bar in bars]
    scale = Scale(0.0, 1.04 * max(*totals, capacity) / GIB)
    at = place(scale(capacity / GIB))
    line = f'<line class="capacity" x1="{at}" x2="{at}" y1="0" y2="28"/>'
    rows = []
    for i, (bar, total) in enumerate(zip(bars, totals, strict=True)):
        drawn, start = [], 0.0
        for kind, name, size in bar:
            drawn.append(
                f'<rect class="{kind}" x="{place(scale(start / GIB))}" y="4" height="20"'
                f' width="{place(scale(size / GIB))}">'
                f"<title>{escape(name)}: {memory(size)} of {memory(total)}</title></rect>"
            )
            start += size
        over = total - capacity
        note = f'<span class="over">over by {memory(over)}</span>' if over > 0 else ""
        label = f"Pipeline rank {i}" if len(stages) > 1 else "Each rank"
        said = ", ".join(f"{name} {memory(size)}" for _, name, size in bar)
        rows.append(
            f'<div class="row"><span class="name">{label}</span>'
            f'<svg width="100%" height="28" role="img" aria-label="{escape(f"{label}: {said}")}">'
            f'{"".join(drawn)}{line}</svg><span class="amount">{memory(total)}{note}</span></div>'
        )
    shown = {kind: name for bar in bars for kind, name, _ in bar}
    entries = [(f"c{i}", name) for i, name in enumerate(CATEGORIES) if f"c{i}" in shown]
    entries += [("held", HELD)] if "held" in shown else []
    entries += [("capacity", f"capacity {memory(capacity)}")]
    axis = f'<div class="row"><span></span><div>{x_axis(scale, "GiB", "Reserved memory")}</div></div>'
    return f'{legend(entries)}<div class="bars">{"".join(rows)}{axis}</div>'


def _kind_of(event: Mapping[str, Any]) -> str:
    """Return the kind of work that an event's name begins with: "forward" of "forward 3"."""
    return event["name"].partition(" ")[0]


def _merged(events: Iterable[Mapping[str, Any]], shortest: float) -> list[list[Any]]:
    """Return [kind, words, start, end, count] of the pieces of a row, in order.

    A piece that is too short to be seen becomes one with a piece of its kind just before it.
    """
    pieces: list[list[Any]] = []
    for event in sorted(events, key=lambda event: event["start"]):
        kind, start, end = _kind_of(event), event["start"], event["end"]
        last = pieces[-1] if pieces else ["", "", -math.inf, -math.inf, 0]
        short = min(end - start, last[3] - last[2]) < shortest
        if last[0] == kind and start - last[3] < shortest and short:
            last[3], last[4] = max(last[3], end), last[4] + 1
            last[1] = f"{last[4]} times {last[0]}"
        else:
            pieces.append([kind, event["name"], start, end, 1])
    return pieces


def time_unit(longest: float) -> tuple[str, float]:
    """Return the unit of a chart's times, and how many are in a second."""
    return ("s", 1.0) if longest >= 1 else ("ms", 1e3) if longest >= 1e-3 else ("µs", 1e6)


def timeline_chart(events: Sequence[Mapping[str, Any]]) -> str:
    """Return the step with a row for each stream of each rank, as ``schedule`` draws it.

    Each event has rank, stream, name, start and end; times are in seconds.
    """
    begin, end = (side(event[key] for event in events) for side, key in ((min, "start"), (max, "end")))
    length = end - begin or 1.0
    unit, factor = time_unit(length)
    spent: dict[str, float] = defaultdict(float)
    rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for event in events:
        spent[_kind_of(event)] += event["end"] - event["start"]
        rows.setdefault((event["rank"], event["stream"]), []).append(event)
    kinds = sorted(spent, key=lambda kind: -spent[kind])
    colour = dict(zip(kinds, COLOURS, strict=False))  # a schedule has four kinds at most
    bars = []
    names = sorted(rows, key=lambda row: row[0])
    for row, (rank, stream) in enumerate(names):
        for kind, words, *times, _ in _merged(rows[rank, stream], length / 8000):
            first, last = (factor * (time - begin) for time in times)
            words += f": {seconds(times[1] - times[0])}, {digits(first)} to {digits(last)} {unit}"
            words += f" (rank {rank}, {stream})"
            bars.append(Bar(row, first, last, colour[kind], "", words))
    shown = [([colour[kind]], kind) for kind in kinds]
    ticks = [(tick, f"{tick:,.9g}") for tick in Scale(0.0, length * factor).ticks(12)]
    title = f"Time in the step ({unit})"
    wide = _WIDE / (length * factor)
    picture = Drawing(title, [f"rank {rank}, {s}" for rank, s in names], bars, wide, ticks, shown)
    return (
        '<p class="zoom" hidden><button type="button" data-zoom="0.5">Zoom out</button>'
        ' <button type="button" data-zoom="2">Zoom in</button></p>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Timeline">'
        f"{as_svg(picture).replace(XMLNS, '')}</div>"
    )


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points that no other beats, in ascending order of the first value.

    A point beats another if neither of its two values is larger and one is smaller.
    """
    front: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if not front or points[i][1] < points[front[-1]][1] or points[i] == points[front[-1]]:
            front.append(i)
    return front


def front_chart(candidates: Sequence[Mapping[str, Any]], capacity: float) -> str:
    """Return a chart of time and memory of all candidates, with the line of those that none beats."""
    times = [each["step_seconds"] for each in candidates]
    sizes = [each["memory"]["reserved"] for each in candidates]
    unit, factor = time_unit(max(times))
    points = [(time * factor, size / GIB) for time, size in zip(times, sizes, strict=True)]
    x = scale_for([time for time, _ in points])
    y = scale_for([size for _, size in points] + [capacity / GIB])
    height = 320

    def at(point: tuple[float, float]) -> tuple[str, str]:
        return place(x(point[0])), f"{height * (1 - y(point[1]) / 100):.1f}"

    drawn, names = [], []
    for tick in y.ticks():
        up = f"{height * (1 - y(tick) / 100):.1f}"
        drawn.append(f'<line class="grid" x1="0" x2="100%" y1="{up}" y2="{up}"/>')
        names.append(f'<text x="50" y="{up}" dy="0.35em" text-anchor="end">{tick:,.9g}</text>')
    _, up = at((x.low, capacity / GIB))
    drawn.append(f'<line class="capacity" x1="0" x2="100%" y1="{up}" y2="{up}"/>')
    front = pareto_front(points)
    for one, two in pairwise(front):
        (x1, y1), (x2, y2) = at(points[one]), at(points[two])
        drawn.append(f'<line class="front" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y1}"/>')
        drawn.append(f'<line class="front" x1="{x2}" y1="{y1}" x2="{x2}" y2="{y2}"/>')
    unbeaten = set(front)
    # The best, which is the first, is drawn last, above the others.
    for i, candidate in reversed(list(enumerate(candidates))):
        across, up = at(points[i])
        kinds = "fits" if candidate["fits"] else "lacks"
        kinds += " on" * (i in unbeaten) + " best" * (i == 0)
        words = f"{words_of(candidate['keys'])}: {seconds(times[i])}, {memory(sizes[i])}"
        drawn.append(
            f'<circle class="dot {kinds}" cx="{across}" cy="{up}"'
            f' r="{4.5 if i else 7}"><title>{escape(words)}</title></circle>'
        )
    entries = [("dot best", "the best"), ("dot fits", "fits"), ("dot lacks", "does not fit")]
    entries += [("front", "Pareto front: none is faster with less memory")]
    entries += [("capacity", f"capacity {memory(capacity)}")]
    said = f"{len(candidates)} candidates by step time and reserved memory"
    return (
        f'{legend(entries)}<p class="axis">Reserved memory of the fullest rank (GiB)</p>'
        f'<div class="scatter"><svg width="56" height="{height}" aria-hidden="true">'
        f"{''.join(names)}</svg>"
        f'<svg class="plot" width="100%" height="{height}" role="img" aria-label="{said}">'
        f"{''.join(drawn)}</svg><span></span><div>{x_axis(x, unit, 'Step time')}</div></div>"
    )


STYLE, SCRIPT = ((Path(__file__).parent / name).read_text("utf-8") for name in ("page.css", "page.js"))

RATE = "tokens_per_second_per_device"


def headline(result: Mapping[str, Any]) -> str:
    """Return the head of the page: the best mesh, and its four figures."""
    ranks, capacity, best = result["world_size"], result["capacity"], result["candidates"][0]
    batch = best["keys"].get("train.global_batch", result["global_batch"])  # if it is free
    job = (
        f"{result['model']} on {ranks:,} {TIMES} {result['cluster']}, {batch:,}"
        f" samples of {result['seq_len']:,} tokens a step"
    )
    used, rate = best["memory"]["reserved"], best[RATE]
    title, note = f"Best: {mesh_of(best['keys'])}", ""
    if not best["fits"]:
        title = f"Nothing fits. The least short: {mesh_of(best['keys'])}"
        lacks = best["lacks"] or f"lacks {memory(used - capacity)}"
        note = f'<p class="over">It {escape(lacks)}.</p>'
    figures = [
        ("Step time", seconds(best["step_seconds"]), f"bubble {best['bubble']:.1%}"),
        ("Tokens per second and device", f"{rate:,.0f}", f"{rate * ranks:,.0f} in all"),
        ("MFU", f"{best['mfu']:.1%}", "of the peak FLOPs"),
        (
            "Reserved memory of the fullest rank",
            memory(used),
            f"of {memory(capacity)}, {used / capacity:.1%}",
        ),
    ]
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(amount)}<small>{escape(more)}</small></dd></div>"
        for name, amount, more in figures
    )
    note += "".join(f"<p>{escape(sentence)}</p>" for sentence in result.get("sentences", ()))
    return (
        f'<p class="quiet">{escape(job)}</p><h1>{escape(title)}</h1>{note}'
        f"<p>{escape(words_of(best['keys']))}.</p><p>{escape(best['why'])}</p>"
        f'<dl class="figures">{cells}</dl>'
    )


def table(candidates: Sequence[Mapping[str, Any]]) -> str:
    """Return all candidates as a table whose columns sort it, after the settings that all share."""
    keys = list(dict.fromkeys(key for candidate in candidates for key in candidate["keys"]))
    values = {key: {shown_value(each["keys"].get(key, "")) for each in candidates} for key in keys}
    differ = [key for key in keys if len(values[key]) > 1]
    same = [f"{key} = {next(iter(values[key]))}" for key in keys if key not in differ]
    last = [key.rsplit(".", 1)[-1] for key in differ]
    names = [n if last.count(n) == 1 else key for key, n in zip(differ, last, strict=True)]
    heads = [("#", "", "")] + [(name, key, "") for name, key in zip(names, differ, strict=True)]
    heads += [("fits", "", "words"), ("step time", "", ""), ("reserved", "fullest rank", "")]
    heads += [("tokens/s/device", "", ""), ("MFU", "", ""), ("bubble", "", "")]
    waits_for = "for messages, copies and the host, which nothing hides, and for the optimizer"
    heads += [("waits", waits_for, ""), ("waits for", "", "words")]
    heads += [("allocated", "fullest rank", ""), ("why", "", "words")]
    head = "".join(
        f'<th scope="col" class="{kind}" title="{escape(more)}">'
        f'<button type="button">{escape(name)}</button></th>'
        for name, more, kind in heads
    )
    rows = []
    for i, candidate in enumerate(candidates):
        waits = sorted(candidate["exposed"].items(), key=lambda pair: -pair[1])
        exposed, use = [(axis, time) for axis, time in waits if time > 0], candidate["memory"]
        fits, step, rate = candidate["fits"], candidate["step_seconds"], candidate[RATE]
        total = sum(time for _, time in exposed)
        cells: list[tuple[Any, str, str]] = [(i + 1, str(i + 1), "")]
        own = [shown_value(candidate["keys"].get(key, "")) for key in differ]
        cells += [(value, value, "") for value in own]
        cells += [
            (int(fits), shown_value(fits), "words"),
            (step, seconds(step), ""),
            (use["reserved"], memory(use["reserved"]), ""),
            (rate, f"{rate:,.0f}", ""),
            (candidate["mfu"], f"{candidate['mfu']:.1%}", ""),
            (candidate["bubble"], f"{candidate['bubble']:.1%}", ""),
            (total, seconds(total), ""),
            (total, ", ".join(f"{axis} {seconds(time)}" for axis, time in exposed), "words"),
            (use["allocated"], memory(use["allocated"]), ""),
            (candidate["why"], candidate["why"], "words why"),
        ]
        drawn = "".join(
            f'<td class="{kind}" data-v="{escape(str(sort))}">{escape(shown)}</td>'
            for sort, shown, kind in cells
        )
        rows.append(f'<tr class="{"" if i else "best"}">{drawn}</tr>')
    shared = f'<p class="quiet">The same in all: {escape("; ".join(same))}.</p>' if same else ""
    return (
        f'{shared}<div class="table" tabindex="0" role="region" aria-label="Candidates">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def page_of(result: Mapping[str, Any]) -> str:
    """Return the page of what :func:`compose.planner.report.as_data` returned."""
    candidates: Sequence[Mapping[str, Any]] = result["candidates"]
    capacity, best = result["capacity"], candidates[0]
    sections = [
        (
            "Memory of each pipeline rank",
            "Bytes at the peak of the best candidate, by what they hold.",
            memory_chart(best["memory"]["by_stage"], capacity),
        ),
        (
            "The step, stream by stream",
            "What each stream does in one step of the best candidate. Empty places are waits.",
            timeline_chart(best["timeline"]),
        ),
        (
            "Time and memory",
            "Each dot is a candidate. Further left is faster, further down needs less memory.",
            front_chart(candidates, capacity),
        ),
        ("All candidates", "Click the name of a column to sort by it.", table(candidates)),
    ]
    parts = [headline(result)] + [
        f'<section><h2>{title}</h2><p class="quiet">{lead}</p>{content}</section>'
        for title, lead, content in sections
    ]
    title = f"Plan: {mesh_of(best['keys'])}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f'<body><main>{"".join(parts)}</main><div id="tip" role="status" hidden></div>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )
