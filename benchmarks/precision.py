"""Loss curves of one model in each precision, from the same weights on the same samples.

    python benchmarks/precision.py [--steps 500] [--only NAME ...] [--seeds 1] [--runs FOLDER]
                                   [--figure FILE.svg]

prints one JSON line for each: its loss at the end (mean of the last tenth of the steps) over float32's
of the same seed, less one; of several seeds the mean, and each. Draws the curves of seed 0 into FILE. A
run that is complete in FOLDER is read, not run again.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
# These overrides of train.toml give the curves.
PRECISIONS = {
    "float32": [],
    "bf16": ["precision.param=bfloat16"],
    "fp16": ["precision.param=float16"],
    "float8 tensorwise": ["precision.param=bfloat16", "precision.float8=tensorwise"],
    "float8 rowwise": ["precision.param=bfloat16", "precision.float8=rowwise"],
    "bf16 optimizer states": ["precision.param=bfloat16", "precision.optimizer_state=bfloat16"],
    "pure bf16, stochastic": [
        "precision.param=bfloat16",
        "precision.master=bfloat16",
        "precision.optimizer_state=bfloat16",
    ],
}
COLORS = ("#000000", "#1f77b4", "#2ca02c", "#d62728", "#ff7f0e", "#9467bd", "#8c564b")
WIDTH, HEIGHT, MARGIN = 720, 300, 50


def losses(folder: Path, steps: int, overrides: list[str]) -> list[float]:
    """The loss of each step of a run in ``folder``, which is run first if it is not there."""
    metrics = folder / "metrics.jsonl"
    count = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    if count > steps:  # of another schedule
        raise SystemExit(f"{folder}: holds {count} steps; give another --runs")
    if count < steps:
        keys = [f"--{key}" for key in overrides]
        command = [sys.executable, "train.py", f"--train.steps={steps}", f"--run.dir={folder}", *keys]
        command += ["--metrics.tensorboard=false", "--checkpoint.interval=100"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def smoothed(values: list[float], over: int) -> list[float]:
    """Means over the last ``over`` values, of fewer at the beginning."""
    return [sum(values[max(0, i + 1 - over) : i + 1]) / min(i + 1, over) for i in range(len(values))]


def panel(
    curves: dict[str, list[float]], first: int, low: float, high: float, top: int, title: str, unit: str
) -> list[str]:
    """SVG of curves over steps, from step ``first`` on; values between ``low`` and ``high``."""
    count = max(map(len, curves.values()))
    inner = HEIGHT - 2 * MARGIN

    def place(step: int, value: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * (step - first) / (count - first)
        y = top + MARGIN + inner * (1 - (min(max(value, low), high) - low) / (high - low))
        return f"{x:.1f},{y:.1f}"

    lines = [f'<text x="{MARGIN}" y="{top + MARGIN - 14}" font-weight="bold">{title}</text>']
    for part in range(5):
        value = low + (high - low) * part / 4
        x, y = place(first, value).split(",")
        lines.append(
            f'<line x1="{x}" x2="{WIDTH - MARGIN}" y1="{y}" y2="{y}" stroke="#dddddd"/>'
            f'<text x="{MARGIN - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{value:g}{unit}</text>'
        )
    for step in range(first, count + 1, max(1, (count - first) // 5)):
        x, y = place(step, low).split(",")
        lines.append(f'<text x="{x}" y="{float(y) + 16:.1f}" text-anchor="middle">{step}</text>')
    for color, curve in zip(COLORS, curves.values(), strict=False):
        points = " ".join(place(step, value) for step, value in enumerate(curve, 1) if step >= first)
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}"/>')
    return lines


def figure(found: dict[str, list[float]]) -> str:
    """An SVG: the losses, and below how far each is from float32's."""
    over = max(1, len(found["float32"]) // 10)
    smooth = {name: smoothed(curve, over) for name, curve in found.items()}
    apart = {
        name: [100 * (a / b - 1) for a, b in zip(curve, smooth["float32"], strict=True)]
        for name, curve in smooth.items()
    }
    reach = math.ceil(max(abs(value) for curve in apart.values() for value in curve[over:]) or 1)
    ends = [curve[-1] for curve in smooth.values()]
    high = round(max(curve[over] for curve in smooth.values()) + 0.5)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{2 * HEIGHT + 40}"'
        ' font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        *panel(smooth, over, int(min(ends)), high, 0, f"loss, mean of {over} steps", ""),
        *panel(apart, over, -reach, reach, HEIGHT, "the same, relative to float32", "%"),
    ]
    for number, (color, name) in enumerate(zip(COLORS, smooth, strict=False)):
        x, y = MARGIN + number % 4 * 165, 2 * HEIGHT + number // 4 * 18
        lines.append(
            f'<line x1="{x}" x2="{x + 20}" y1="{y}" y2="{y}" stroke="{color}" stroke-width="2"/>'
            f'<text x="{x + 26}" y="{y + 4}">{name}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--only", nargs="*", default=list(PRECISIONS), choices=list(PRECISIONS))
    parser.add_argument("--seeds", type=int, default=1, help="how many, from train.seed 0 on")
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs")
    parser.add_argument("--figure", type=Path, help="file for the curves, .svg")
    arguments = parser.parse_args()
    last = max(1, arguments.steps // 10)
    with tempfile.TemporaryDirectory() as scratch:
        runs = arguments.runs or Path(scratch)
        results: dict[str, list[list[float]]] = {}
        for name in dict.fromkeys(["float32", *arguments.only]):
            results[name] = [
                losses(
                    runs / f"{name.replace(' ', '-')}{f'-seed{seed}' if seed else ''}",
                    arguments.steps,
                    [*PRECISIONS[name], f"train.seed={seed}"],
                )
                for seed in range(arguments.seeds)
            ]
            ends = {key: [sum(curve[-last:]) / last for curve in results[key]] for key in results}
            apart = [end / plain - 1 for end, plain in zip(ends[name], ends["float32"], strict=True)]
            result = {
                "benchmark": "precision",
                "precision": name,
                "steps": arguments.steps,
                "loss": round(statistics.mean(ends[name]), 5),
                "over_float32": round(statistics.mean(apart), 5),
                "seeds": [round(each, 5) for each in apart],
            }
            print(json.dumps(result), flush=True)
    if arguments.figure:
        arguments.figure.write_text(
            figure({name: curves[0] for name, curves in results.items()}), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
