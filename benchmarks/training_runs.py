"""Runs of a small model on the standard library's text, whose validation losses are compared.

``benchmarks/compression.py`` and ``benchmarks/islands.py`` use this file. Each run's folder is kept if
``--runs`` names one, and a run that is complete there is read, not run again.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
VALIDATION = 400_000  # bytes
# 0.3 million parameters. A run of 600 steps takes about a minute on two cores.
SMALL = (
    "model.dim=96",
    "model.n_layers=3",
    "model.n_heads=4",
    "model.hidden_dim=256",
    "train.seq_len=128",
    "train.micro_batch=4",
)


@dataclass(frozen=True)
class Study:
    """Kinds of runs that are compared with the first, which is plain."""

    benchmark: str
    kinds: Mapping[str, Sequence[str]]
    """Keys of each kind. "{fifth}" in one is a fifth of the steps."""
    code: Mapping[str, str] = field(default_factory=dict)
    """A line of Python that some kinds run first, for what no key does."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """The ranks of some kinds; the others have ``--ranks``."""
    lr: float = 1e-3
    begins_together: bool = False
    """Whether all kinds begin with the checkpoint of a plain run of half of the steps."""


def parser(study: Study) -> argparse.ArgumentParser:
    """Return a parser with the arguments of :func:`losses`."""
    result = argparse.ArgumentParser(description=f"{study.benchmark}: loss over that of plain runs")
    result.add_argument("--steps", type=int, default=600)
    result.add_argument("--seeds", type=int, default=3, help="how many, from train.seed 0 on")
    result.add_argument("--ranks", type=int, default=4)
    result.add_argument("--only", nargs="*", default=list(study.kinds), choices=list(study.kinds))
    result.add_argument("--runs", type=Path, help="folder that keeps the runs")
    result.add_argument("--keys", nargs="*", default=[], help="more keys of all runs")
    return result


def run(folder: Path, ranks: int, keys: Sequence[str], code: str = "") -> list[dict[str, Any]]:
    """Return the metrics of a run in ``folder``, which is run first if it is not there.

    Args:
        folder: The folder of the run.
        ranks: How many ranks.
        keys: Its keys, besides train.toml's.
        code: A line of Python that each rank runs first.

    Returns:
        A dict for each step.
    """
    done, metrics = folder / "done", folder / "metrics.jsonl"
    asked = json.dumps([ranks, *keys, code])
    if done.exists() and done.read_text() != asked:
        raise SystemExit(
            f"{folder}: holds a run of other keys, {done.read_text()}; give another --runs"
        )
    if not done.exists():
        flags = [f"--{key}" for key in (*keys, f"run.dir={folder}", "metrics.tensorboard=false")]
        code += "\nimport runpy; runpy.run_path('train.py', run_name='__main__')"
        command = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--no-python"]
        whole = [sys.executable, *command, sys.executable, "-c", code, "train.toml", *flags]
        subprocess.run(whole, cwd=ROOT, check=True, stdout=sys.stderr)
        done.write_text(asked)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def _begin(folder: Path, plain: Path, ranks: int, keys: Sequence[str], steps: int) -> None:
    """Make ``folder`` a copy of the first half of a plain run, unless it is there."""
    half = steps // 2
    seed = plain.name.partition("seed")[2]
    whole = [*keys, f"train.seed={seed}", f"train.stop_after={half}", f"checkpoint.interval={half}"]
    run(plain, ranks, whole)
    if not folder.exists():
        shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("done"))


def texts(folder: Path) -> tuple[Path, Path]:
    """Return two files of the standard library's text: one to train on, one for the validation."""
    train, validation = folder / "train.txt", folder / "validation.txt"
    if not validation.exists():
        library = Path(sysconfig.get_paths()["stdlib"])
        text = b"\n".join(file.read_bytes() for file in sorted(library.glob("*.py")))
        train.write_bytes(text[VALIDATION:])
        validation.write_bytes(text[:VALIDATION])
    return train, validation


def losses(study: Study, runs: Path, given: argparse.Namespace) -> None:
    """Run each kind with each seed, and print a JSON line for each kind.

    A line has the validation loss at the end, and what it is over that of plain runs with the same
    seed, less one: the mean over seeds, and each.
    """
    train, validation = texts(runs)
    steps = given.steps
    common = [f"train.steps={steps}", f"train.validate_every={steps}", f"optimizer.lr={study.lr}"]
    common += [*SMALL, f"data.path={train}", f"data.validation={validation}", *given.keys]
    first = next(iter(study.kinds))
    ends: dict[str, list[float]] = {name: [] for name in dict.fromkeys([first, *given.only])}
    for seed in range(given.seeds):
        for name, results in ends.items():
            folder = runs / f"{name.replace(' ', '-').replace(',', '')}-seed{seed}"
            own = [key.format(fifth=steps // 5) for key in study.kinds[name]]
            keys = [*common, f"train.seed={seed}", *own]
            ranks = study.ranks.get(name, given.ranks)
            if study.begins_together:
                _begin(folder, runs / f"begin-seed{seed}", ranks=given.ranks, keys=common, steps=steps)
            last = run(folder, ranks, keys, study.code.get(name, ""))[-1]
            results.append(last["validation_loss"])
    for name, results in ends.items():
        apart = [end / other - 1 for end, other in zip(results, ends[first], strict=True)]
        result = {
            "benchmark": study.benchmark,
            "run": name,
            "steps": steps,
            "validation_loss": round(statistics.mean(results), 5),
            "over_plain": round(statistics.mean(apart), 5),
            "seeds": [round(each, 5) for each in apart],
        }
        print(json.dumps(result), flush=True)


def in_folder(given: argparse.Namespace, work: Any) -> None:
    """Call ``work`` with the folder of the runs; without ``--runs`` it is a temporary one."""
    with tempfile.TemporaryDirectory() as scratch:
        runs = (given.runs or Path(scratch)).resolve()
        runs.mkdir(parents=True, exist_ok=True)
        work(runs)
