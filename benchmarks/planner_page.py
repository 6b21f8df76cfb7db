"""The page of what benchmarks/planner_published.py has estimated.

python benchmarks/planner_page.py rows.jsonl docs/planning_rows.md
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner_published import NOT_STATED, PROGRAMS, content, published, rows_of


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """The rank correlation of predicted and published times."""
    ranks = [{v: i for i, v in enumerate(sorted(side))} for side in zip(*pairs, strict=True)]
    n = len(pairs)
    apart = sum((ranks[0][a] - ranks[1][b]) ** 2 for a, b in pairs)
    return 1 - 6 * apart / (n * (n * n - 1)) if n > 1 else 1.0


def summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """Cells of a table: rows, errors, and the lowest rank correlation within a model."""
    if not lines:
        return "0 | | | |"
    errors = [abs(line["predicted"] / line["published"] - 1) for line in lines]
    models: dict[Any, list[tuple[float, float]]] = {}
    sets = {of["name"]: rows_of(of) for of in content()["sets"]}
    for line in lines:
        row = sets[line["set"]][line["row"]]
        shape = line["set"], row.get("preset"), row.get("dim"), row.get("n_layers")
        models.setdefault(shape, []).append((line["predicted"], line["published"]))
    results = [spearman(pairs) for pairs in models.values() if len(pairs) >= 3]
    mean, most = 100 * statistics.mean(errors), 100 * max(errors)
    ranks = f"{min(results):.2f} of {len(results)} models" if results else ""
    median = 100 * statistics.median(errors)
    return f"{len(lines)} | {mean:.1f}% | {median:.1f}% | {most:.1f}% | {ranks}"


HEAD = """# Predicted and published times of a step

`benchmarks/planner_published.py` made this page. It predicts steps of real clusters, whose times others
have published (`benchmarks/planner_rows.toml` has the rows with their sources), by the same trace and
the same costs as `python -m compose plan`. The published programs are not this one. So their model, and
what they do otherwise, are described to the estimate. What a source does not state is assumed, and the
set is marked: its errors say less about the planner. Of a set of many rows, some are shown.

What was fitted, and to what:

- on vTrain's nodes, the host's time for an operator (40 us), to rows 36, 192 and 210 of
  `vtrain_single`, whose kernels are shorter than that, and for an exchange between stages (1 ms), to
  every sixth row (0, 6, 12 ...); all other rows are held out;
- what Megatron-LM of 2022 does otherwise was described while looking at the errors of rows 0, 6, 12 ...
  of `vtrain_single` and of `vtrain_multi`; those of `korthikanti` played no part;
- what torchtitan of 2024 does otherwise is in its own source (rotation by complex numbers, repeated
  key/value heads, RMSNorm in several kernels, which products are recomputed). It was looked up because
  its errors were large (13 to 16%). The 500 W card's 2.41 TB/s are of arXiv:2604.11391;
- the rates of FlashAttention-2 on an H100 and the widths of `korthikanti`'s models are no part of the
  data and were not checked against a source;
- nothing else. All other constants are those of the files in `clusters/`, from data sheets and
  published measurements of single kernels and messages, or marked there as assumed.

The aim is a mean error of 6%, a largest of 15%, and a rank correlation of 0.95 within a model's rows.
Where a set is above it, the aim is not reached.
"""


def page(results: Path) -> str:
    """The page of a file of results."""
    read = [json.loads(text) for text in results.read_text().splitlines()]
    lines = list({(line["set"], line["row"]): line for line in read}.values())
    out = [
        HEAD,
        "| Set | all settings stated | rows | mean | median | largest | rank correlation, lowest |",
    ]
    out.append("|---|---|---|---|---|---|---|")
    by_name = {of["name"]: of for of in content()["sets"]}
    groups: list[tuple[str, str, list[Any]]] = []
    for name, of in by_name.items():
        own = sorted((x for x in lines if x["set"] == name), key=lambda x: x["row"])
        stated = "yes" if PROGRAMS[of["program"]].stated and name not in NOT_STATED else "no"
        good = [x for x in own if "failed" not in x]
        if name == "vtrain_single":
            groups.append((f"{name}, fitted", stated, [x for x in good if x["row"] % 6 == 0]))
            groups.append((f"{name}, held out", stated, [x for x in good if x["row"] % 6]))
        else:
            groups.append((name, stated, good))
    out += [f"| {name} | {stated} | {summary(result)} |" for name, stated, result in groups if result]
    for name, of in by_name.items():
        own = sorted((x for x in lines if x["set"] == name), key=lambda x: x["row"])
        if not own:
            continue
        out += ["", f"## {of['title']}", "", f"Source: {of['source']}.", ""]
        out += [f"Assumed: {PROGRAMS[of['program']].assumed}.", ""]
        shown = [column for column in of["columns"] if column != "value"]
        out.append(f"| row | {' | '.join(shown)} | published, s | predicted, s | error |")
        out.append("|---" * (len(shown) + 4) + "|")
        for line in own:
            row = rows_of(of)[line["row"]]
            cells = [str(line["row"]), *(str(row[column]) for column in shown)]
            if "failed" in line:
                cells += [f"{published(of, row):.4g}", "none", line["failed"]]
            else:
                error = 100 * (line["predicted"] / line["published"] - 1)
                cells += [f"{line['published']:.4g}", f"{line['predicted']:.4g}", f"{error:+.1f}%"]
            out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(page(Path(sys.argv[1])))
