"""The style and the script of the planner's page: constants, without anything of a result."""

LIGHT = {
    "page": "#fcfcfa",
    "card": "#ffffff",
    "text": "#1b1b19",
    "quiet": "#5c5b57",
    "line": "#d9d8d3",
    "lane": "#f1f0ec",
    "bad": "#b3261e",
    "c0": "#2a6fd0",
    "c1": "#d0551b",
    "c2": "#6a4fcf",
    "c3": "#0e8f6b",
    "c4": "#b07600",
    "c5": "#cf3b3a",
    "c6": "#c44a8a",
    "c7": "#4d7d1f",
    "other": "#7d7c77",
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
.lane{fill:var(--lane)}
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
.timeline{display:grid;grid-template-columns:minmax(72px,auto) 1fr;column-gap:12px}
.labels{font-size:12px;line-height:18px;max-width:180px}
.labels div{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.rank{height:20px;padding-top:2px;font-weight:600}
.stream{height:18px;color:var(--quiet)}
.scroll{overflow-x:auto;min-width:0}
.wide{min-width:100%}
.wide .axis{position:sticky;left:0;width:max-content}
.fine{display:none}
.close .fine{display:inline}
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
 .close .odd text{display:inline}
 .labels{max-width:96px}
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
  const scroll = place.parentElement.querySelector(".scroll"), wide = scroll.firstElementChild;
  for (const button of place.children) button.onclick = () => {
    const middle = (scroll.scrollLeft + scroll.clientWidth / 2) / wide.clientWidth;
    zoom = Math.min(64, Math.max(1, zoom * button.dataset.zoom));
    wide.style.width = 100 * zoom + "%";
    wide.classList.toggle("close", zoom >= 8);
    scroll.scrollLeft = middle * wide.clientWidth - scroll.clientWidth / 2;
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
