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
