"""The planner's result as one page: memory, timeline, the Pareto front and a table of all candidates.

The page is one file and asks no network for anything: style, script and SVG are in it.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from compose.errors import write_whole
from compose.planner.amounts import TIMES, count, memory, number, percent, seconds
from compose.planner.charts import Dot, front_chart, memory_chart, timeline_chart
from compose.planner.page import SCRIPT, STYLE

RATE = "tokens_per_second_per_device"
AXES = {
    "pp": "pipeline stages",
    "dp_replicate": "replicas",
    "dp_shard": "data-parallel shards",
    "cp": "parts of each sequence",
    "tp": "tensor-parallel ranks",
    "ep": "expert-parallel ranks",
}
"""What a degree counts, in the order of a mesh's words."""
PHRASES = {
    "parallel.zero": "ZeRO-{}",
    "parallel.pp_schedule": "schedule {}",
    "parallel.pp_virtual_stages": "{} virtual stages a rank",
    "train.micro_batch": "micro-batches of {}",
    "activation_checkpoint.mode": "recomputation: {}",
}
"""Settings that have words of their own; others are shown as they are written."""


def value_of(value: Any) -> str:
    """Return a setting's value as a person writes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(value_of(each) for each in value) or "none"
    return str(value)


def mesh_of(keys: Mapping[str, Any]) -> str:
    """Return a mesh in short: the axes that have more than one rank, with their sizes."""
    found = [f"{axis} {keys[f'parallel.{axis}']}" for axis in AXES if degree(keys, axis) > 1]
    return f" {TIMES} ".join(found) or "one rank"


def degree(keys: Mapping[str, Any], axis: str) -> float:
    """Return the ranks on an axis; 1 if the result does not say."""
    return number(keys.get(f"parallel.{axis}")) or 1.0


def words_of(keys: Mapping[str, Any]) -> str:
    """Return a candidate's mesh in words, and its other settings."""
    degrees = [
        f"{degree(keys, axis):.0f} {what}" for axis, what in AXES.items() if degree(keys, axis) > 1
    ]
    others = [
        PHRASES[key].format(value_of(value)) if key in PHRASES else f"{key} = {value_of(value)}"
        for key, value in keys.items()
        if key.removeprefix("parallel.") not in AXES
    ]
    return "; ".join([", ".join(degrees) or "One rank", *others])


def reserved_of(candidate: Mapping[str, Any]) -> float | None:
    """Return the reserved bytes of a candidate's fullest rank."""
    use = candidate.get("memory", {})
    stages = [number(stage.get("reserved")) for stage in use.get("by_stage") or []]
    found = [size for size in [number(use.get("reserved")), *stages] if size is not None]
    return max(found, default=None)


def headline(result: Mapping[str, Any], best: Mapping[str, Any] | None) -> str:
    """Return the head of the page: the best mesh, and its four figures."""
    ranks, capacity = number(result.get("world_size")), number(result.get("capacity"))
    job = (
        f"{value_of(result.get('model', 'A model'))} on {count(ranks)} {TIMES} "
        f"{value_of(result.get('cluster', 'unknown'))}, {count(result.get('global_batch'))} samples of "
        f"{count(result.get('seq_len'))} tokens a step"
    )
    if best is None:
        return f'<p class="quiet">{escape(job)}</p><h1>No candidate</h1>'
    used = reserved_of(best)
    over = used - capacity if used is not None and capacity is not None else None
    title, note = f"Best: {mesh_of(best['keys'])}", ""
    if not best.get("fits", True):
        title = f"Nothing fits. The least short: {mesh_of(best['keys'])}"
        short = f"It lacks {memory(over)}." if over is not None and over > 0 else "It does not fit."
        note = f'<p class="over">{escape(short)}</p>'
    each = number(best.get(RATE))
    total = f"{count(each * ranks)} in all" if each is not None and ranks is not None else ""
    share = f"of {memory(capacity)}"
    share += f", {percent(used / capacity)}" if used is not None and capacity else ""
    figures = [
        ("Step time", seconds(best.get("step_seconds")), f"bubble {percent(best.get('bubble'))}"),
        ("Tokens per second and device", count(each), total),
        ("MFU", percent(best.get("mfu")), "of the peak FLOPs"),
        ("Reserved memory of the fullest rank", memory(used), share),
    ]
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(amount)}<small>{escape(more)}</small></dd></div>"
        for name, amount, more in figures
    )
    return (
        f'<p class="quiet">{escape(job)}</p><h1>{escape(title)}</h1>{note}'
        f"<p>{escape(words_of(best['keys']))}.</p><p>{escape(value_of(best.get('why') or ''))}</p>"
        f'<dl class="figures">{cells}</dl>'
    )


def exposed_of(candidate: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the exposed seconds of each axis that has any, the longest first."""
    found = [(str(axis), number(time) or 0.0) for axis, time in candidate.get("exposed", {}).items()]
    return sorted([(axis, time) for axis, time in found if time > 0], key=lambda pair: -pair[1])


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last word of each key, or the whole key where two have the same."""
    last = [key.rsplit(".", 1)[-1] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


def table(candidates: Sequence[Mapping[str, Any]]) -> str:
    """Return all candidates as a table whose columns sort it, after the settings that all share."""
    keys = list(dict.fromkeys(key for candidate in candidates for key in candidate["keys"]))
    values = {key: {value_of(each["keys"].get(key, "")) for each in candidates} for key in keys}
    differ = [key for key in keys if len(values[key]) > 1]
    same = [f"{key} = {next(iter(values[key]))}" for key in keys if key not in differ]
    names = short_names(differ)
    heads = [("#", "", "")] + [(names[key], key, "") for key in differ]
    heads += [("fits", "", "words"), ("step time", "", ""), ("reserved", "fullest rank", "")]
    heads += [("tokens/s/device", "", ""), ("MFU", "", ""), ("bubble", "", "")]
    heads += [("exposed", "communication that nothing hides", ""), ("exposed by axis", "", "words")]
    heads += [("allocated", "fullest rank", ""), ("why", "", "words")]
    head = "".join(
        f'<th scope="col" class="{kind}" title="{escape(more)}">'
        f'<button type="button">{escape(name)}</button></th>'
        for name, more, kind in heads
    )
    rows = []
    for i, candidate in enumerate(candidates):
        exposed, use = exposed_of(candidate), candidate.get("memory", {})
        total = sum(time for _, time in exposed)
        cells: list[tuple[Any, str, str]] = [(i + 1, str(i + 1), "")]
        for key in differ:
            value = candidate["keys"].get(key, "")
            cells.append((value if number(value) is not None else value_of(value), value_of(value), ""))
        cells += [
            (int(bool(candidate.get("fits"))), "yes" if candidate.get("fits") else "no", "words"),
            (candidate.get("step_seconds"), seconds(candidate.get("step_seconds")), ""),
            (reserved_of(candidate), memory(reserved_of(candidate)), ""),
            (candidate.get(RATE), count(candidate.get(RATE)), ""),
            (candidate.get("mfu"), percent(candidate.get("mfu")), ""),
            (candidate.get("bubble"), percent(candidate.get("bubble")), ""),
            (total, seconds(total), ""),
            (total, ", ".join(f"{axis} {seconds(time)}" for axis, time in exposed), "words"),
            (use.get("allocated"), memory(use.get("allocated")), ""),
            (value_of(candidate.get("why") or ""), value_of(candidate.get("why") or ""), "words why"),
        ]
        drawn = "".join(
            f'<td class="{kind}" data-v="{escape("" if sort is None else str(sort))}">'
            f"{escape(shown)}</td>"
            for sort, shown, kind in cells
        )
        rows.append(f'<tr class="{"" if i else "best"}">{drawn}</tr>')
    shared = f'<p class="quiet">The same in all: {escape("; ".join(same))}.</p>' if same else ""
    return (
        f'{shared}<div class="table" tabindex="0" role="region" aria-label="Candidates">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def page_of(result: Mapping[str, Any]) -> str:
    """Return the page of a result.

    Args:
        result: The planner's result, as in its JSON file. The best candidate is first.

    Returns:
        HTML of the whole page.
    """
    candidates: Sequence[Mapping[str, Any]] = result.get("candidates", [])
    capacity = number(result.get("capacity"))
    best = candidates[0] if candidates else None
    parts = [headline(result, best)]
    if best is not None:
        shown = []
        for candidate in candidates:
            time, size = number(candidate.get("step_seconds")), reserved_of(candidate)
            if time is not None and size is not None and time > 0:
                words = words_of(candidate["keys"])
                fits = bool(candidate.get("fits"))
                shown.append(Dot(time, size, fits, candidate is best, words))
        sections = [
            (
                "Memory of each pipeline rank",
                "Bytes at the peak of the best candidate, by what they hold.",
                memory_chart(best.get("memory", {}), capacity),
            ),
            (
                "The step, stream by stream",
                "What each stream does in one step of the best candidate. Empty places are waits.",
                timeline_chart(best.get("timeline") or []),
            ),
            (
                "Time and memory",
                "Each dot is a candidate. Further left is faster, further down needs less memory.",
                front_chart(shown, capacity),
            ),
            ("All candidates", "Click the name of a column to sort by it.", table(candidates)),
        ]
        parts += [
            f'<section><h2>{title}</h2><p class="quiet">{lead}</p>{content}</section>'
            for title, lead, content in sections
        ]
    title = "Plan" if best is None else f"Plan: {mesh_of(best['keys'])}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f'<body><main>{"".join(parts)}</main><div id="tip" role="status" hidden></div>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def write_html(result: Mapping[str, Any], path: Path | str) -> None:
    """Write a result as one page that needs no network.

    Args:
        result: The planner's result, as in its JSON file. The best candidate is first.
        path: The file; what was there is replaced.

    Raises:
        OSError: The file cannot be written.
    """
    write_whole(Path(path), page_of(result))
