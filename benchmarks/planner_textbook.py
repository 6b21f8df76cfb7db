"""Ask the planner the questions of textbooks, and write its picks beside what a reader would expect.

    python benchmarks/planner_textbook.py [--table docs/planning.md] [--only 7b ...]

asks each question of QUESTIONS as a user does, in one line, and prints one row each: the pick, plain
FSDP, and tensor parallel over the node, each by its own record. With --table the rows replace those
between the marks of a file.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

QUESTIONS = (
    ("7b", "8xa100_80gb"),
    ("13b", "16xa100_40gb"),
    ("70b", "64xh100_sxm"),
    ("70b", "512xh100_sxm"),
    ("175b", "1024xa100_80gb"),
    ("deepseek_v3:671b", "2048xh100_sxm"),
    ("10b", "2xrtx4090"),
)
HEAD = (
    "| question | pick | step | MFU | GiB of | plain FSDP | tensor parallel in the node |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)
BEGIN, END = "<!-- textbook questions: begin -->", "<!-- textbook questions: end -->"
ROOT = Path(__file__).parent.parent


def ask(model: str, gpus: str, *words: str) -> dict[str, Any]:
    """Return what the planner's JSON file says of a question."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        line = [sys.executable, "-m", "compose", "plan", f"--model={model}", f"--gpus={gpus}"]
        subprocess.run([*line, f"--json={file}", *words], check=True, cwd=ROOT, capture_output=True)
        return json.loads(file.read_text())


def row_of(model: str, gpus: str, data: Mapping[str, Any]) -> str:
    """Return a row of the table."""
    best, room = data["candidates"][0], data["capacity"]
    held = f"{best['memory']['reserved'] / 2**30:.1f} of {room / 2**30:.1f}"
    step = best["step_seconds"]
    took = f"{step:.3g} s" if step < 1000 else f"{step:,.0f} s"
    others = [_beside(one, best, data) for one in data["expected"].values()]
    others += ["-"] * (2 - len(others))
    asked = f"{model} on {gpus.replace('x', ' ', 1)}"
    cells = [asked, data["composition"], took, f"{best['mfu']:.1%}", held, *others]
    return f"| {' | '.join(cells)} |"


def _beside(one: Mapping[str, Any], best: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    if one["step_seconds"] is None:
        return one["why"]
    if one["composition"] == data["composition"]:
        return "the pick"
    change = f"{one['step_seconds'] / best['step_seconds'] - 1:+.0%}"
    over = (one["reserved"] - data["capacity"]) / 2**30
    return f"{change}: {one['composition']}" if one["fits"] else f"lacks {over:.1f} GiB"


def written(text: str, rows: Sequence[str]) -> str:
    """Return a file's text with other rows between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"the marks {BEGIN} and {END} are not there")
    return "\n".join([f"{before}{BEGIN}", *HEAD, *rows, f"{END}{after}"])


def main() -> None:
    """Ask, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--table", type=Path, help="file whose table is written between its marks")
    parser.add_argument("--only", nargs="+", help="models to ask about")
    options = parser.parse_args()
    rows = []
    print(*HEAD, sep="\n", flush=True)
    for model, gpus in QUESTIONS:
        if options.only and model not in options.only:
            continue
        began = time.monotonic()
        rows.append(row_of(model, gpus, ask(model, gpus)))
        print(f"{rows[-1]} ({time.monotonic() - began:.0f} s)", flush=True)
        if options.table:  # after each, so that a run that is cut off loses nothing
            options.table.write_text(written(options.table.read_text(), rows))


if __name__ == "__main__":
    main()
