"""Whether two checkouts give the same results: bitwise in a fixed set of runs, and to the last printed
digit in what the commands say of each recipe.

    python benchmarks/same_results.py BEFORE AFTER [NAME ...]

trains each run in both checkouts, and prints one JSON line for each: "same" tells whether every number
of every step and every byte of the last checkpoint's tensors is. Run "resumed" begins in BEFORE; both
checkouts go on from its checkpoint. Then it asks both what a dry run, ``legal``, ``schedule`` and
``plan`` say of each recipe: all numbers are compared, and no words. Exit code 1 if one is not the same.
"""

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from compose.config.toml import tomllib
from compose.parallel.mesh import AXES

SMALL = ["--model.dim=128", "--model.hidden_dim=192", "--train.seq_len=64"]
RUNS: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "tp 2 x dp_shard 2": (4, ["--parallel.tp=2", "--parallel.dp_shard=2", *SMALL]),
    "pp 2 x cp 2": (4, ["--parallel.pp=2", "--parallel.cp=2", *SMALL]),
    "experts": (
        2,
        ["--model.name=qwen3", "--model.preset=debug_moe", "--parallel.ep=2", "--train.seq_len=64"],
    ),
    "bfloat16": (2, ["--precision.param=bfloat16", *SMALL]),
    "float16": (2, ["--precision.param=float16", *SMALL]),
    "float8": (2, ["--precision.float8=tensorwise", "--precision.param=bfloat16", *SMALL]),
    "muon": (2, ["--optimizer.name=muon", *SMALL]),
    "nvme": (2, ["--optimizer.offload=nvme", *SMALL]),
    "islands 2 x 2": (
        4,
        ["--outer.every=5", "--parallel.dp_replicate=2", "--parallel.dp_shard=2", *SMALL],
    ),
    "int8": (2, ["--comm.weights=int8", "--comm.gradients=int8", *SMALL]),
    "LoRA": (2, ["--model.lora.rank=4", '--model.lora.targets=["layers.*.attention.w*"]', *SMALL]),
    "dit": (2, ["recipes/dit_shapes_cpu.toml", "--train.micro_batch=8"]),
    "resumed": (4, ["--parallel.tp=2", "--parallel.dp_shard=2", "--optimizer.name=muon", *SMALL]),
}
COMMON = ["--train.steps=20", "--checkpoint.interval=20", "--metrics.tensorboard=false"]
# The others are of the clock and the machine.
NUMBERS = ("step", "loss", "grad_norm", "lr", "samples", "tokens", "loss_scale")


def trained(checkout: Path, ranks: int, keys: list[str], folder: Path) -> dict[str, Any]:
    """Train in ``checkout``; the numbers of each step, and a digest of each tensor that was saved."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    file = [] if keys and keys[0].endswith(".toml") else ["train.toml"]
    words = ["train.py", *file, *keys, *COMMON, f"--run.dir={folder}"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*torchrun, *words], cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL
    )
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    saved = max((folder / "checkpoints").glob("step-*"))
    return {
        "steps": [[step.get(key) for key in NUMBERS] for step in steps],
        "tensors": {path.name: digests(path) for path in sorted(saved.glob("*.safetensors"))},
    }


def digests(path: Path) -> dict[str, str]:
    """SHA-256 of each tensor of a file with its type and shape, by name: their order does not count."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8:start])
    tensors.pop("__metadata__", None)
    return {
        name: hashlib.sha256(
            f"{entry['dtype']} {entry['shape']}".encode()
            + data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
        ).hexdigest()
        for name, entry in tensors.items()
    }


def resumed(
    before: Path, after: Path, ranks: int, keys: list[str], folder: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train 10 steps in ``before``, and go on from there in each checkout."""
    half = [*keys, "--train.stop_after=10", "--checkpoint.interval=10"]
    trained(before, ranks, half, folder / "before")
    shutil.copytree(folder / "before", folder / "after")
    both = [trained(checkout, ranks, keys, folder / checkout.name) for checkout in (before, after)]
    return both[0], both[1]


def commands(recipe: Path) -> dict[str, list[str]]:
    """The commands that are asked of a recipe, by name."""
    degrees = tomllib.loads(recipe.read_text()).get("parallel", {})
    ranks = math.prod(degrees.get(axis, 1) for axis in AXES)
    file, size, compose = f"recipes/{recipe.name}", f"--world-size={ranks}", ["-m", "compose"]
    asked = {
        "dry run": ["train.py", file, "--dry-run", size],
        "legal": [*compose, "legal", file, "--world-size=16"],
        "plan": [*compose, "plan", file, "--as-is", "--cluster=h100_sxm", size, "--json=OUT/plan.json"],
    }
    if degrees.get("pp", 1) > 1:
        asked["schedule"] = [*compose, "schedule", file]
    return asked


def numbers(checkout: Path, words: list[str], folder: Path) -> list[str]:
    """Every number that a command prints, or writes into a file of ``folder``, in order."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    words = [word.replace("OUT", str(folder)) for word in words]
    done = subprocess.run(
        [sys.executable, *words], cwd=checkout, env=environment, capture_output=True, text=True
    )
    text = done.stdout + done.stderr + "".join(path.read_text() for path in folder.iterdir())
    text = text.replace(str(folder), "OUT")
    return [str(done.returncode), *re.findall(r"-?\d[\d.]*(?:e[+-]?\d+)?", text)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("names", nargs="*", help=f"of runs: {', '.join(RUNS)}; all")
    arguments = parser.parse_args()
    different = 0
    checkouts = arguments.before.resolve(), arguments.after.resolve()
    for name in arguments.names or RUNS:
        ranks, keys = RUNS[name]
        with tempfile.TemporaryDirectory() as folder:
            if name == "resumed":
                before, after = resumed(*checkouts, ranks, keys, Path(folder))
            else:
                before, after = (
                    trained(checkout, ranks, keys, Path(folder) / str(side))
                    for side, checkout in enumerate(checkouts)
                )
        same = before == after
        different += not same
        count = len(after["tensors"])
        print(
            json.dumps({"run": name, "same": same, "steps": len(after["steps"]), "files": count}),
            flush=True,
        )
    for recipe in [] if arguments.names else sorted((checkouts[1] / "recipes").glob("*.toml")):
        if 'preset = "hf"' in recipe.read_text():
            continue  # its model is in a folder that is not here
        for name, words in commands(recipe).items():
            with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
                before = numbers(checkouts[0], words, Path(one))
                after = numbers(checkouts[1], words, Path(two))
            different += before != after
            line = {"recipe": recipe.stem, "asked": name, "same": before == after}
            print(json.dumps({**line, "numbers": len(after)}), flush=True)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
