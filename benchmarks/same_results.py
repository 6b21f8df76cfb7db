"""Whether two checkouts train bitwise alike: losses, norms and weights of a fixed set of runs.

    python benchmarks/same_results.py BEFORE AFTER [NAME ...]

trains each run in both checkouts, and prints one JSON line for each: "same" tells whether every number
of every step and every byte of the last checkpoint's tensors is. Exit code 1 if one is not.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

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
}
COMMON = ["--train.steps=20", "--checkpoint.interval=20", "--metrics.tensorboard=false"]
# The others are of the clock and the machine.
NUMBERS = ("step", "loss", "grad_norm", "lr", "samples", "tokens", "loss_scale")


def trained(checkout: Path, ranks: int, keys: list[str], folder: Path) -> dict[str, Any]:
    """Train in ``checkout``; the numbers of each step, and a digest of each tensor that was saved."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    words = ["train.py", "train.toml", *COMMON, *keys, f"--run.dir={folder}"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*torchrun, *words], cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL
    )
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (saved,) = (folder / "checkpoints").glob("step-*")
    return {
        "steps": [[step.get(key) for key in NUMBERS] for step in steps],
        "tensors": {path.name: digest(path) for path in sorted(saved.glob("*.safetensors"))},
    }


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("names", nargs="*", help=f"of runs: {', '.join(RUNS)}; all")
    arguments = parser.parse_args()
    different = 0
    for name in arguments.names or RUNS:
        ranks, keys = RUNS[name]
        with tempfile.TemporaryDirectory() as folder:
            before, after = (
                trained(checkout.resolve(), ranks, keys, Path(folder) / side)
                for side, checkout in (("before", arguments.before), ("after", arguments.after))
            )
        same = before == after
        different += not same
        count = len(after["tensors"])
        print(
            json.dumps({"run": name, "same": same, "steps": len(after["steps"]), "files": count}),
            flush=True,
        )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
