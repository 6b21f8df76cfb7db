"""The planner's result as one page: memory, timeline, the Pareto front and a table of all candidates.

The page is one file and asks no network for anything: style, script and SVG are in it.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from compose.errors import write_whole
from compose.planner.charts import (
    COLOURS,
    OTHER,
    TIMES,
    Dot,
    front_chart,
    memory,
    memory_chart,
    seconds,
    timeline_chart,
)

LIGHT = {
    "page": "#fcfcfa",
    "card": "#ffffff",
    "text": "#1b1b19",
    "quiet": "#5c5b57",
    "line": "#d9d8d3",
    "lane": "#f1f0ec",
    "bad": "#b3261e",
    **{f"c{i}": colour for i, colour in enumerate(COLOURS)},
    "other": OTHER,
    "held": "#82817b",
}
"""Colours on a light page. Text has a contrast of 4.5 or more, and what is drawn 3 or more."""
DARK = {
    "page": "#161615",
    "card": "#1f1f1d",
    "text": "#f2f1ec",
    "quiet": "#b9b8b1",
    "line": "#3d3c39",
    "lane": "#2a2a27",
    "bad": "#ff9a92",
    "c0": "#6aa5f5",
    "c1": "#f08c5a",
    "c2": "#aa9df8",
    "c3": "#35c49b",
    "c4": "#dba327",
    "c5": "#f27f7c",
    "c6": "#e887b6",
    "c7": "#88c459",
    "other": "#a09f98",
    "held": "#86857e",
}


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())


_FILLS = "".join(
    f".{name}{{fill:var(--{name});background:var(--{name})}}"
    for name in (*(f"c{i}" for i in range(8)), "other")
)

STYLE = f"""
:root{{color-scheme:light dark;{_variables(LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}
""" + (
    """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1320px;margin:0 auto;padding:24px 24px 64px}
h1{font-size:clamp(1.3rem,3.2vw,2rem);line-height:1.25;margin:4px 0 8px;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:0 0 4px}
p{margin:4px 0 12px;max-width:80ch;overflow-wrap:anywhere}
.quiet,.axis{color:var(--quiet)}
.axis{margin:2px 0 0;font-size:13px}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px;
 margin:20px 0 0}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px;margin:20px 0 0;
 padding:0}
.figures div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 16px}
.figures dt{color:var(--quiet);font-size:13px}
.figures dd{margin:0;font-size:1.5rem;font-weight:600;line-height:1.3}
.figures dd small{display:block;font-size:13px;font-weight:400;color:var(--quiet)}
.over{color:var(--bad);font-weight:600}
svg{display:block;overflow:visible}
svg text{font-size:12px;fill:var(--quiet);font-variant-numeric:tabular-nums}
.tick,.grid{stroke:var(--line)}
.bars rect{stroke:var(--card)}
.held{fill:var(--card);background:var(--card)}
.bars .held,i.held{stroke:var(--held);stroke-dasharray:3 2;border:1px dashed var(--held)}
line.capacity{stroke:var(--text);stroke-width:2;stroke-dasharray:5 3}
line.front{stroke:var(--c0);stroke-width:2}
.dot.fits{fill:var(--c0);stroke:var(--card)}
.dot.lacks{fill:var(--card);stroke:var(--other);stroke-width:1.5}
.dot.best{fill:var(--c1);stroke:var(--text);stroke-width:2}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;list-style:none;margin:8px 0 12px;padding:0;
 font-size:13px}
.legend li{display:flex;align-items:center;gap:6px}
.key{width:12px;height:12px;border-radius:3px;flex:none}
i.dot{border-radius:50%}
i.dot.fits{background:var(--c0)}
i.dot.lacks{background:none;border:2px solid var(--other)}
i.dot.best{background:var(--c1);border:2px solid var(--text)}
i.capacity{height:0;width:20px;border-top:2px dashed var(--text);border-radius:0;background:none}
i.front{height:0;width:20px;border-top:2px solid var(--c0);border-radius:0;background:none}
.row{display:grid;grid-template-columns:118px 1fr 132px;column-gap:12px;align-items:center}
.row .name,.row .amount{font-size:13px;font-variant-numeric:tabular-nums;line-height:1.2}
.amount .over{display:block}
.scroll{overflow:auto;max-height:90vh}
.scroll svg{width:100%;min-width:720px;height:auto}
.scroll svg text{font-size:11px;fill:#222}
.zoom{margin:0 0 8px}
button{font:inherit;color:inherit}
.zoom button{background:none;border:1px solid var(--line);border-radius:6px;padding:2px 10px;
 cursor:pointer}
:focus-visible{outline:2px solid var(--c0);outline-offset:2px}
.scatter{display:grid;grid-template-columns:56px 1fr;margin-top:12px}
.table{overflow:auto;margin-top:8px;max-height:min(80vh,720px)}
table{border-collapse:separate;border-spacing:0;font-size:13px;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:5px 10px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th.words,td.words{text-align:left}
td.why{white-space:normal;min-width:380px}
th{position:sticky;top:0;background:var(--card);vertical-align:bottom;color:var(--quiet);font-weight:600}
th button{all:unset;cursor:pointer}
th button:focus-visible{outline:2px solid var(--c0)}
th button::after{content:" \\2195";opacity:.45}
th[aria-sort=ascending] button::after{content:" \\2191";opacity:1}
th[aria-sort=descending] button::after{content:" \\2193";opacity:1}
th:first-child,td:first-child{position:sticky;left:0;z-index:1;background:var(--card)}
tr.best td{font-weight:600}
tbody tr:hover{background:var(--lane)}
#tip{position:fixed;z-index:2;max-width:min(340px,90vw);padding:6px 10px;border-radius:6px;
 font-size:13px; background:var(--text);color:var(--page);pointer-events:none;overflow-wrap:anywhere}
@media (max-width:640px){
 main{padding:16px 12px 48px}
 section{padding:14px 12px}
 .row{grid-template-columns:1fr auto}
 .row>svg,.row>div{grid-column:1/-1;grid-row:2}
 .row .amount{text-align:right}
 .amount .over{display:inline;margin-left:6px}
 .odd text{display:none}
 .scatter{grid-template-columns:44px 1fr}
 .scatter>svg:first-child{margin-left:-12px}
}
"""
    + _FILLS
)

SCRIPT = """
for (const head of document.querySelectorAll("th button")) head.onclick = () => {
  const cell = head.parentElement, body = cell.closest("table").tBodies[0];
  const up = cell.ariaSort !== "ascending", at = cell.cellIndex;
  for (const other of cell.parentElement.cells) other.ariaSort = null;
  cell.ariaSort = up ? "ascending" : "descending";
  const value = row => row.cells[at].dataset.v;
  const order = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === "" || y === "") return (x === "") - (y === "");
    const found = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
    return up ? found : -found;
  };
  body.append(...[...body.rows].sort(order));
};
let zoom = 1;
for (const place of document.querySelectorAll(".zoom")) {
  place.hidden = false;
  const scroll = place.parentElement.querySelector(".scroll"), picture = scroll.firstElementChild;
  for (const button of place.children) button.onclick = () => {
    const before = picture.clientWidth;
    zoom = Math.min(64, Math.max(1, zoom * button.dataset.zoom));
    picture.style.width = 100 * zoom + "%";
    const factor = picture.clientWidth / before;
    scroll.scrollLeft = factor * (scroll.scrollLeft + scroll.clientWidth / 2) - scroll.clientWidth / 2;
    scroll.scrollTop = factor * (scroll.scrollTop + scroll.clientHeight / 2) - scroll.clientHeight / 2;
  };
}
const tip = document.getElementById("tip");
document.onpointerover = document.onpointermove = event => {
  const mark = event.target.closest("rect, circle"), title = mark && mark.querySelector("title");
  if (title) { mark.dataset.tip = title.textContent; title.remove(); }
  tip.hidden = !(mark && mark.dataset.tip);
  if (tip.hidden) return;
  tip.textContent = mark.dataset.tip;
  const beside = event.clientX + 14 + tip.offsetWidth < innerWidth ? event.clientX + 14
    : Math.max(4, event.clientX - tip.offsetWidth - 10);
  const below = event.clientY + 18 + tip.offsetHeight < innerHeight ? event.clientY + 18
    : event.clientY - tip.offsetHeight - 10;
  tip.style.left = beside + "px";
  tip.style.top = below + "px";
};
"""


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
    degrees = _degrees(keys)
    return f" {TIMES} ".join(f"{axis} {degree}" for axis, degree in degrees.items()) or "one rank"


def _degrees(keys: Mapping[str, Any]) -> dict[str, int]:
    degrees = {axis: keys.get(f"parallel.{axis}", 1) for axis in AXES}
    return {axis: degree for axis, degree in degrees.items() if degree > 1}


def words_of(keys: Mapping[str, Any]) -> str:
    """Return a candidate's mesh in words, and its other settings."""
    degrees = [f"{degree} {AXES[axis]}" for axis, degree in _degrees(keys).items()]
    others = [
        PHRASES[key].format(value_of(value)) if key in PHRASES else f"{key} = {value_of(value)}"
        for key, value in keys.items()
        if key.removeprefix("parallel.") not in AXES
    ]
    return "; ".join([", ".join(degrees) or "One rank", *others])


def headline(result: Mapping[str, Any]) -> str:
    """Return the head of the page: the best mesh, and its four figures."""
    ranks, capacity, best = result["world_size"], result["capacity"], result["candidates"][0]
    job = (
        f"{result['model']} on {ranks:,} {TIMES} {result['cluster']}, {result['global_batch']:,}"
        f" samples of {result['seq_len']:,} tokens a step"
    )
    used, rate = best["memory"]["reserved"], best[RATE]
    title, note = f"Best: {mesh_of(best['keys'])}", ""
    if not best["fits"]:
        title = f"Nothing fits. The least short: {mesh_of(best['keys'])}"
        note = f'<p class="over">It lacks {memory(used - capacity)}.</p>'
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
    return (
        f'<p class="quiet">{escape(job)}</p><h1>{escape(title)}</h1>{note}'
        f"<p>{escape(words_of(best['keys']))}.</p><p>{escape(best['why'])}</p>"
        f'<dl class="figures">{cells}</dl>'
    )


def exposed_of(candidate: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the exposed seconds of each axis that has any, the longest first."""
    found = [(axis, time) for axis, time in candidate["exposed"].items() if time > 0]
    return sorted(found, key=lambda pair: -pair[1])


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
        exposed, use = exposed_of(candidate), candidate["memory"]
        fits, step, rate = candidate["fits"], candidate["step_seconds"], candidate[RATE]
        total = sum(time for _, time in exposed)
        cells: list[tuple[Any, str, str]] = [(i + 1, str(i + 1), "")]
        for key in differ:
            value = candidate["keys"].get(key, "")
            cells.append((value_of(value), value_of(value), ""))
        cells += [
            (int(fits), value_of(fits), "words"),
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
    dots = [
        Dot(each["step_seconds"], each["memory"]["reserved"], each["fits"], each is best, words)
        for each, words in ((each, words_of(each["keys"])) for each in candidates)
    ]
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
            front_chart(dots, capacity),
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


def write_html(result: Mapping[str, Any], path: Path | str) -> None:
    """Write a result as one page that needs no network."""
    write_whole(Path(path), page_of(result))
