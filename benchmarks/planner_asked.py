"""The planner's time of a step against published times, as a user of the command line asks for it.

    python benchmarks/planner_asked.py [--sets NAME ...] --results asked.jsonl

runs `python -m compose plan --as-is` for the rows of benchmarks/planner_asked.toml, with the settings
that their sources state, and adds one JSON line for each to a file. benchmarks/planner_page.py makes a
page of that file and of those of planner_published.py.
"""

import argparse
import functools
import io
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from planner_published import changed, failure

from compose.cli.plan import plan
from compose.config.toml import tomllib
from compose.planner.cluster import Cluster, load_cluster
from compose.planner.measure import as_toml

HERE = Path(__file__).parent
TRAIN = HERE.parent / "train.toml"
SHORT = {
    "batch": "train.global_batch",
    "micro": "train.micro_batch",
    "seq": "train.seq_len",
    "dp": "parallel.dp_shard",
    **{axis: f"parallel.{axis}" for axis in ("tp", "pp", "cp", "ep")},
}
Row = Mapping[str, Any]


@functools.cache
def content() -> Mapping[str, Any]:
    """The tables of planner_asked.toml."""
    return tomllib.loads((HERE / "planner_asked.toml").read_text())


@functools.cache
def cluster_of(name: str) -> Cluster:
    """A cluster of planner_asked.toml, or one of clusters/."""
    own = content()["clusters"].get(name)
    return changed(load_cluster(own["base"]), own["changes"]) if own else load_cluster(name)


def rows_of(of: Mapping[str, Any]) -> list[Row]:
    """The rows of a set: its own, or those of a set of planner_rows.toml."""
    source = of
    if "rows_of" in of:
        every = tomllib.loads((HERE / "planner_rows.toml").read_text())["sets"]
        source = next(each for each in every if each["name"] == of["rows_of"])
    columns = [of.get("names", {}).get(name, name) for name in source["columns"]]
    rows = [of["common"] | dict(zip(columns, row, strict=True)) for row in source["rows"]]
    return rows[:: of.get("every", 1)]


def keys_of(row: Row) -> dict[str, str]:
    """The keys of the command line: the stated ones, and what Megatron and GPT imply."""
    keys = {
        SHORT.get(name, name): value for name, value in row.items() if name not in ("gpus", "value")
    }
    if keys.get("model.name") == "gpt2":
        keys |= {"model.max_seq_len": row["seq"], "model.hidden_dim": 4 * row["model.dim"]}
        share = 128 * row.get("tp", 1)
        keys["model.vocab_size"] = math.ceil(keys["model.vocab_size"] / share) * share
    stages = row.get("pp", 1) * (row.get("parallel.pp_virtual_stages", 0) or 1)
    layers = row.get("model.n_layers", 0)
    if stages > 1 and layers and "gpt2" in keys.values():  # Megatron's stages have as many layers each
        keys["parallel.pp_layers"] = [layers // stages + (i < layers % stages) for i in range(stages)]
    return {key: str(value) for key, value in keys.items()}


def arguments(of: Mapping[str, Any], row: Row, cluster: str) -> list[str]:
    """The words after `python -m compose plan`."""
    keys = [f"--{key}={value}" for key, value in keys_of(row).items()]
    return [str(TRAIN), "--as-is", "--cluster", cluster, "--world-size", str(row["gpus"]), *keys]


def published(of: Mapping[str, Any], row: Row) -> float:
    """The published seconds of a row's step."""
    value, tokens = row["value"], row["batch"] * row["seq"]
    if of["measure"] in ("s", "ms"):
        return value / (1000 if of["measure"] == "ms" else 1)
    if of["measure"] == "tokens/s of all":
        return tokens / value
    if of["measure"] == "tokens/s":
        return tokens / row["gpus"] / value
    peak = cluster_of(of["cluster"]).device.peak["bfloat16"] / 1e12
    rate = value if of["measure"] == "TFLOP/s" else value / 100 * peak
    return tokens * _flops_per_token(row) / (rate * 1e12 * row["gpus"])


def _flops_per_token(row: Row) -> float:
    """The FLOPs that a source counts: of all scores, as Megatron-LM and nanotron do."""
    h, layers, wide = row["model.dim"], row["model.n_layers"], row.get("model.hidden_dim", 0)
    inner = 3 * h * wide if wide else 8 * h**2
    return 6 * (layers * (4 * h**2 + inner) + row["model.vocab_size"] * h + 2 * layers * h * row["seq"])


def predicted(of: Mapping[str, Any], row: Row, folder: Path) -> dict[str, Any]:
    """What the command says of a row: the candidate of its JSON file."""
    file, out = folder / f"{of['cluster']}.toml", folder / "plan.json"
    file.write_text(as_toml(cluster_of(of["cluster"])))
    with redirect_stdout(io.StringIO()):
        plan([*arguments(of, row, str(file)), "--json", str(out)])
    return json.loads(out.read_text())["candidates"][0]


def estimated(names: Sequence[str], results: Path) -> None:
    """Estimate rows, and add them to a file."""
    for of in content()["sets"]:
        if names and of["name"] not in names:
            continue
        for number, row in enumerate(rows_of(of)):
            line: dict[str, Any] = {"set": of["name"], "row": number, "published": published(of, row)}
            with tempfile.TemporaryDirectory() as folder:
                try:
                    best = predicted(of, row, Path(folder))
                    line |= {"predicted": best["step_seconds"], "mfu": best["mfu"]}
                    line |= {"bubble": best["bubble"], "exposed": best["exposed"]}
                except Exception as error:  # any failure of a row is a line of the page
                    line["failed"] = failure(error)
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sets", nargs="*", default=[])
    parser.add_argument("--results", type=Path, required=True)
    given = parser.parse_args()
    estimated(given.sets, given.results)


if __name__ == "__main__":
    main()
