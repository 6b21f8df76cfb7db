"""The report of benchmarks/first_gpu.py: lines, one JSON file, and the table of docs/speed.md."""

import datetime
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compose.errors import write_whole

BEGIN, END = "<!-- first_gpu: begin -->", "<!-- first_gpu: end -->"
SHOWN = ("tokens_per_second", "mfu", "of_limit", "over_bare", "over_compiled", "allocated_gib", "error")
SHOWN += ("kernel", "graphs", "breaks", "recompiled", "waits", "passed")


class Report:
    """All results so far; the file is written after each."""

    def __init__(
        self, file: Path, about: Mapping[str, Any], names: Sequence[str], start: float
    ) -> None:
        self.file, self.about, self.names, self.start = file, about, list(names), start
        self.begun = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.rows: dict[str, dict[str, Any]] = {}
        file.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    @property
    def failed(self) -> list[str]:
        """The names of the paths that fail."""
        return [name for name, row in self.rows.items() if row["outcome"] == "fail"]

    def figures(self) -> dict[str, Any]:
        """Return the figures of the paths that have passed, by name; and the versions."""
        passed = {n: row["figures"] for n, row in self.rows.items() if row["outcome"] == "pass"}
        return {**passed, "versions": self.about}

    def add(self, name: str, found: Mapping[str, Any]) -> None:
        """Add a result, print its line, and write the file."""
        self.rows[name] = {"name": name, **found}
        said = found.get("reason") or short(found.get("figures", {}))
        print(f"{found['outcome']:<8}{found['seconds']:6.1f} s  {name:<42} {said}".rstrip(), flush=True)
        self.write()

    def write(self) -> None:
        """Write the file anew, in the order of the list."""
        rows = [self.rows[name] for name in self.names if name in self.rows]
        content = {
            "command": shlex.join(["python", *sys.argv]),
            "begun": self.begun,
            "seconds": round(time.monotonic() - self.start, 1),
            "versions": dict(self.about),
            "counts": self.counts(),
            "rows": rows,
        }
        write_whole(self.file, json.dumps(content, indent=1, default=str) + "\n")

    def counts(self) -> dict[str, int]:
        """Return how many paths have which outcome."""
        results = [row["outcome"] for row in self.rows.values()]
        return {outcome: results.count(outcome) for outcome in ("pass", "fail", "skipped")}

    def end(self, table: Path | None) -> None:
        """Print the table, or write it into a file, and say what the run comes to."""
        self.write()
        text = f"{BEGIN}\n{self.table()}{END}\n"
        if table is None:
            print(f"\n{text}")
        elif table.exists() and BEGIN in table.read_text():
            whole = table.read_text()
            before, after = whole.partition(BEGIN)[0], whole.partition(END)[2].removeprefix("\n")
            write_whole(table, before + text + after)
        else:
            write_whole(table, text)
        count = ", ".join(f"{number} {outcome}" for outcome, number in self.counts().items())
        print(f"{count}, in {time.monotonic() - self.start:.0f} s: {self.file}", flush=True)

    def table(self) -> str:
        """Return the tables in Markdown: what holds, by group, and the figures."""
        about = self.about
        where = f"{about.get('device', 'CPU')}, torch {about['torch']}, {self.begun[:10]}"
        lines = [
            f"{where}.",
            "",
            "| paths | pass | fail | skipped | first reason |",
            "|---|---|---|---|---|",
        ]
        groups: dict[str, list[Mapping[str, Any]]] = {}
        for name in self.names:
            if name in self.rows and not name.startswith("figure:"):
                groups.setdefault(name.partition(":")[0], []).append(self.rows[name])
        for group, rows in groups.items():
            results = [row["outcome"] for row in rows]
            bad = sorted((row for row in rows if "reason" in row), key=lambda row: row["outcome"])
            why = f"{bad[0]['name']}: {bad[0]['reason']}".replace("|", "\\|") if bad else ""
            counts = " | ".join(str(results.count(outcome)) for outcome in ("pass", "fail", "skipped"))
            lines.append(f"| {group} | {counts} | {why} |")
        figures = [self.rows[n] for n in self.names if n in self.rows and n.startswith("figure:")]
        if figures:
            head = "| row | tokens/s | MFU | of the limit | GiB | ratio | planner: tokens/s | GiB |"
            lines += ["", head, "|---|---|---|---|---|---|---|---|"]
        lines += map(self._figures, figures)
        lines += self._published()
        return "\n".join([*lines, ""])

    def _figures(self, row: Mapping[str, Any]) -> str:
        name = row["name"].partition(": ")[2]
        if row["outcome"] != "pass":
            return f"| {name} | {row['outcome']}: {row['reason']} | | | | | | |".replace("\n", " ")
        result = row["figures"]
        ratio = next((f"{w.split('_')[1]} {result[w]:.3f}" for w in RATIOS if w in result), "")
        beside = result.get("predicted", {})
        cells = [result.get(key) for key in ("tokens_per_second", "mfu", "of_limit", "allocated_gib")]
        cells += [ratio, beside.get("tokens_per_second"), beside.get("allocated_gib")]
        return f"| {name} | {' | '.join(map(digits, cells))} |"

    def _published(self) -> list[str]:
        row = self.rows.get("published: torchtitan", {})
        return [
            f"| {name} ({result['source']}) | {digits(result['tokens_per_second'])} |"
            f" {digits(result['mfu'])} | | | | | |"
            for name, result in row.get("figures", {}).items()
        ]


RATIOS = ("over_bare", "over_compiled")


def digits(value: object) -> str:
    """Return a figure in four digits at most."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)


def short(figures: Mapping[str, Any]) -> str:
    """Return the figures that fit into a line."""
    shown = [name for name in SHOWN if figures.get(name) is not None]
    return "  ".join(f"{name} {digits(figures[name])}" for name in shown)
