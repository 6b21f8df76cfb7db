"""The loss of train.toml's model with each kind of coded messages, over that with plain ones.

    python benchmarks/compression.py [--steps 250] [--seeds 3] [--ranks 4] [--only NAME ...]
                                     [--runs FOLDER] [--keys KEY=VALUE ...]

prints one JSON line for each: the loss at the end (mean of the last fifth of the steps) over that of
plain messages with the same seed, less one; the mean of the seeds, and each. No sample comes twice in
so few steps, so each is as unseen as in a validation. Two controls show what means nothing: "rounding"
are plain messages with AdamW's eps larger by 1e-5 of itself, and "bfloat16 weights" sends weights as
mixed precision does, which harms nobody. A third of train.toml's learning rate is used: at the whole
one, runs with the least difference end up to 1% apart. "int4, bare" is int4 without rotation and
without feedback. Activations are coded in runs with tp 2; "tp" is such a run with plain ones. A run
that is complete in FOLDER is read, not run again.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
WARM_UP, TP = "comm.start_step=25", "parallel.tp=2"
KINDS: dict[str, list[str]] = {
    "plain": [],
    "rounding": ["optimizer.eps=1.00001e-8"],
    "bfloat16 weights": ["comm.weights=int8"],
    "bfloat16 gradients": ["comm.gradients=bfloat16"],
    "int8": ["comm.weights=int8", "comm.gradients=int8"],
    "int4": ["comm.gradients=int4"],
    "int4, no feedback": ["comm.gradients=int4", "comm.error_feedback=false"],
    "int4, bare": ["comm.gradients=int4", "comm.error_feedback=false"],
    "int4 and int4_diff": ["comm.gradients=int4", "comm.weights=int4_diff"],
    "powersgd, rank 4": ["comm.gradients=powersgd", WARM_UP],
    "top_k, 1%": ["comm.gradients=top_k", WARM_UP],
    "tp": [TP],
    "tp, int8 activations": [TP, "comm.activations=int8"],
    "tp, float8 activations": [TP, "comm.activations=float8"],
}
# What no key does: without the rotation, and weights in bfloat16 where int8 is asked for.
CODE = {
    "int4, bare": "import compose.comm.units as u; u.ROTATED = False; ",
    "bfloat16 weights": (
        "import compose.comm.units as u; real = u.Blocks;"
        " u.Blocks = lambda bits, *a, **k: real(16, *a, **k); "
    ),
}
LR = "optimizer.lr=1e-3"


def losses(folder: Path, name: str, ranks: int, overrides: list[str]) -> list[float]:
    """The loss of each step of a run in ``folder``, which is run first if it is not there."""
    metrics = folder / "metrics.jsonl"
    steps = int(overrides[0].partition("=")[2])
    if not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        keys = [f"--{key}" for key in (*overrides, LR, *KINDS[name], f"run.dir={folder}")]
        code = CODE.get(name, "") + "import runpy; runpy.run_path('train.py', run_name='__main__')"
        command = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--no-python"]
        whole = [sys.executable, *command, sys.executable, "-c", code]
        whole += ["train.toml", *keys, "--metrics.tensorboard=false"]
        subprocess.run(whole, cwd=ROOT, check=True, stdout=sys.stderr)
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=3, help="how many, from train.seed 0 on")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs")
    parser.add_argument("--keys", nargs="*", default=[], help="more keys of all runs")
    arguments = parser.parse_args()
    last = max(1, arguments.steps // 5)
    with tempfile.TemporaryDirectory() as scratch:
        runs = arguments.runs or Path(scratch)
        plain: list[float] = []
        for name in dict.fromkeys(["plain", *arguments.only]):
            ends = []
            for seed in range(arguments.seeds):
                folder = (runs / f"{name.replace(' ', '-').replace(',', '')}-seed{seed}").resolve()
                keys = [f"train.steps={arguments.steps}", f"train.seed={seed}", *arguments.keys]
                curve = losses(folder, name, arguments.ranks, keys)
                ends.append(sum(curve[-last:]) / last)
            plain = plain or ends
            apart = [end / other - 1 for end, other in zip(ends, plain, strict=True)]
            result = {
                "benchmark": "compression",
                "messages": name,
                "steps": arguments.steps,
                "loss": round(statistics.mean(ends), 5),
                "over_plain": round(statistics.mean(apart), 5),
                "seeds": [round(each, 5) for each in apart],
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
