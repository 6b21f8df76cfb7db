"""Islands against data parallel: the loss that a run ends with, and the speed over a slow link.

    python benchmarks/islands.py [--steps 300] [--seeds 3] [--only NAME ...] [--runs FOLDER]
                                 [--ranks 4] [--keys KEY=VALUE ...]
    python benchmarks/islands.py --speed [--mbit 100] [--every 30] [--rounds 3] [--turns 2]

The first prints one JSON line for each kind of run of train.toml's model, all with the
same samples in a step: the validation loss at the end over that of data parallel with the same seed,
less one. The validation text is a part of the standard library that is not trained on. In "2 islands,
half missed" the second island misses every other exchange.

The second trains two islands of one rank, whose link lets so many bits pass in a second, and the same
without exchanges in turn. It prints the speed with exchanges over the speed without, for exchanges that
training waits for and for those of one fragment at a time, which it does not wait for. A link is slowed
down by waiting: an exchange ends when its bytes would have left this rank at that rate. A link of 0
Mbit/s is not slowed down.
"""

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
EVERY = 30
LR = "optimizer.lr=1e-3"  # at train.toml's 3e-3, runs with the least difference end up to 1% apart
VALIDATION = 400_000  # bytes


def islands(count: int, *keys: str) -> list[str]:
    shared = "parallel.dp_shard=-1"  # by the ranks of an island
    return [f"parallel.dp_replicate={count}", shared, f"outer.every={EVERY}", *keys]


STREAMING = ("outer.fragments=1", "outer.delay=2")
KINDS: dict[str, list[str]] = {
    "plain": [],
    "rounding": ["optimizer.eps=1.00001e-8"],
    "2 islands": islands(2),
    "4 islands": islands(4),
    "2 islands, int8": islands(2, "outer.dtype=int8"),
    "2 islands, e3m0": islands(2, "outer.dtype=e3m0"),
    "2 islands, top_k": islands(
        2, "outer.dtype=top_k", "outer.density=0.0625", "outer.lr=1", "outer.momentum=0"
    ),
    "2 islands, streaming": islands(2, *STREAMING),
    "2 islands, half missed": islands(2),
    "2 islands, mean": islands(2, "outer.lr=1", "outer.momentum=0"),
}
CODE = {
    "2 islands, half missed": (
        "import compose.outer.exchange as e;"
        f" e.nobody = lambda name, island: island == 1 and int(name.split('.')[0]) % {2 * EVERY} == 0; "
    )
}
PACED = """
import time, compose.outer.exchange as e
real = e.Exchange._run
def run(self, name, message, grace):
    begun, before = time.perf_counter(), self.sent
    found = real(self, name, message, grace)
    time.sleep(max(0.0, begun + (self.sent - before) * 8 / {rate} - time.perf_counter()))
    return found
e.Exchange._run = run
"""


def run(folder: Path, ranks: int, keys: list[str], code: str = "") -> list[dict[str, Any]]:
    """The metrics of a run in ``folder``, which is run first if it is not there."""
    done, metrics = folder / "done", folder / "metrics.jsonl"
    if not done.exists():
        flags = [f"--{key}" for key in (*keys, f"run.dir={folder}", "metrics.tensorboard=false")]
        code += "\nimport runpy; runpy.run_path('train.py', run_name='__main__')"
        command = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--no-python"]
        whole = [sys.executable, *command, sys.executable, "-c", code, "train.toml", *flags]
        subprocess.run(whole, cwd=ROOT, check=True, stdout=sys.stderr)
        done.touch()
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def texts(folder: Path) -> tuple[Path, Path]:
    """Two files of the standard library's text: one to train on, one for the validation."""
    train, validation = folder / "train.txt", folder / "validation.txt"
    if not validation.exists():
        library = Path(sysconfig.get_paths()["stdlib"])
        text = b"\n".join(file.read_bytes() for file in sorted(library.glob("*.py")))
        train.write_bytes(text[VALIDATION:])
        validation.write_bytes(text[:VALIDATION])
    return train, validation


def losses(runs: Path, given: argparse.Namespace) -> None:
    steps, names = given.steps, given.only
    train, validation = texts(runs)
    common = [f"train.steps={steps}", f"train.validate_every={steps}", LR]
    common += [f"data.path={train}", f"data.validation={validation}", *given.keys]
    ends: dict[str, list[float]] = {name: [] for name in dict.fromkeys(["plain", *names])}
    for seed in range(given.seeds):
        for name, found in ends.items():
            folder = runs / f"{name.replace(' ', '-').replace(',', '')}-seed{seed}"
            keys = [*common, f"train.seed={seed}", *KINDS[name]]
            found.append(run(folder, given.ranks, keys, CODE.get(name, ""))[-1]["validation_loss"])
    for name, found in ends.items():
        apart = [end / other - 1 for end, other in zip(found, ends["plain"], strict=True)]
        result = {
            "benchmark": "islands",
            "run": name,
            "steps": steps,
            "validation_loss": round(statistics.mean(found), 5),
            "over_plain": round(statistics.mean(apart), 5),
            "seeds": [round(each, 5) for each in apart],
        }
        print(json.dumps(result), flush=True)


def speeds(runs: Path, given: argparse.Namespace) -> None:
    every, steps = given.every, given.every * given.rounds
    code = PACED.format(rate=given.mbit * 1e6 or 1e30)
    base = [f"train.steps={steps + 1}", "train.global_batch=4"]
    base += ["parallel.dp_replicate=2", "parallel.dp_shard=1"]
    kinds = {
        "waits": [f"outer.every={every}"],
        "streaming": [f"outer.every={every}", *STREAMING],
        "streaming, int8": [f"outer.every={every}", *STREAMING, "outer.dtype=int8"],
    }
    for name, keys in kinds.items():
        seconds, sent = [], 0.0
        for turn in range(given.turns):
            for which, extra in (("with", keys), ("without", [f"outer.every={10 * steps}"])):
                lines = run(runs / f"{name}-{which}-{turn}", 2, [*base, *extra], code)
                # The first round is the warm-up, and the last step is the end of all exchanges.
                timed = lines[every:steps]
                seconds.append(sum(1 / line["tokens_per_second"] for line in timed))
                sent = sum(line["outer"]["bytes"] for line in lines[:every]) if extra is keys else sent
        result = {
            "benchmark": "islands, speed",
            "run": name,
            "mbit": given.mbit,
            "every": every,
            "bytes_of_a_round": sent,
            "speed_over_none": round(sum(seconds[1::2]) / sum(seconds[::2]), 3),
        }
        print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3, help="how many, from train.seed 0 on")
    parser.add_argument("--only", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--keys", nargs="*", default=[], help="more keys of all runs")
    parser.add_argument("--speed", action="store_true", help="measure the speed, not the loss")
    parser.add_argument("--mbit", type=float, default=100, help="of the slow link, a second")
    parser.add_argument("--every", type=int, default=EVERY, help="steps of a round, with --speed")
    parser.add_argument("--rounds", type=int, default=3, help="with --speed")
    parser.add_argument("--turns", type=int, default=2, help="runs of each kind, with --speed")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = (given.runs or Path(scratch)).resolve()
        runs.mkdir(parents=True, exist_ok=True)
        if given.speed:
            speeds(runs, given)
        else:
            losses(runs, given)


if __name__ == "__main__":
    main()
