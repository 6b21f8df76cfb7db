"""Measure saving and resuming, as ratios of two figures of one run.

    python benchmarks/checkpoint.py [--small]

Prints one JSON line: stall of an asynchronous save (the second: the first makes the memory that later
ones copy into) over a step's time, over one copy of the state into such memory, and over the time until
it is published; bytes per second until then over those of copying the published files and flushing
them; seconds from a process' start to the end of its first step, resumed over fresh. The last two are
medians of pairs, one right after the other; the first pair of saves does not count, since pages that
the file cache has not had before can cost ten times the writing. A Llama of about 300 million
parameters on one process, AdamW's state included; ``--small`` is a few thousand, and says nothing about
speed.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from compose.checkpoint import store
from compose.checkpoint.local_shards import named_tensors, parts, staged
from compose.config.rules import check
from compose.config.toml import load
from compose.parallel.mesh import init_mesh
from compose.train.processes import process_group
from compose.train.trainer import Trainer

ROOT = Path(__file__).parent.parent
LARGE = {
    "model.dim": 1024,
    "model.n_layers": 20,
    "model.n_heads": 16,
    "model.hidden_dim": 3584,
    "model.vocab_size": 16384,
}
SMALL = {"model.dim": 32, "model.n_layers": 2, "model.hidden_dim": 48}
SHAPE = {"train.seq_len": 64, "train.global_batch": 1, "train.micro_batch": 1}
STEPS = 6
PAIRS = 5


def overrides(small: bool, folder: Path) -> dict[str, object]:
    """Keys of the run."""
    model = SMALL if small else LARGE
    return {
        **model,
        **SHAPE,
        "run.dir": folder,
        "metrics.tensorboard": "false",
        "checkpoint.keep_last": 1,
    }


def saving(keys: dict[str, object]) -> tuple[dict[str, float], Path]:
    """Ratios of saving; the checkpoint that was made."""
    values = [(name, str(value)) for name, value in keys.items()]
    job = check(load(str(ROOT / "train.toml"), values), 1)
    with process_group(job.config) as device:
        trainer = Trainer(job, init_mesh(job.degrees, device.type), device)

        def step() -> float:
            start = time.perf_counter()
            trainer.step()
            return time.perf_counter() - start

        step()
        steps = [step() for _ in range(STEPS)]
        state = parts(named_tensors(trainer.composition, trainer.optimizer))
        copies, kept = [], staged(state)
        for _ in range(3):
            start = time.perf_counter()
            staged(state, kept)
            copies.append(time.perf_counter() - start)
        del kept
        # The first save makes the memory that the later ones copy into.
        trainer.checkpointer.save(trainer.progress, wait=True)
        trainer.step()
        trainer.checkpointer.save(trainer.progress)
        while trainer.checkpointer.thread and trainer.checkpointer.thread.is_alive():
            trainer.step()
        trainer.checkpointer.wait()
        report = trainer.checkpointer.report
        assert report
        assert not report.problem, report.problem
        ratios, folder = [], trainer.folder

        def settled() -> None:
            """Separate a save from a copy: neither is given memory that the other has just let go of,
            or waits until the device has written its files."""
            trainer.step()
            os.sync()

        for _ in range(PAIRS + 1):
            settled()
            # With nothing beside it, as the copy has nothing.
            trainer.checkpointer.save(trainer.progress, wait=True)
            alone = trainer.checkpointer.report
            assert alone
            folder = store.newest_first(trainer.checkpointer.root)[0]
            settled()
            ratios.append(copied(folder) / alone.seconds)
        trainer.held.release()
        parameters = sum(p.numel() for p in trainer.composition.model.parameters())
    return {
        "parameters": parameters,
        "bytes": report.bytes,
        "stall_over_step": report.stall / statistics.median(steps),
        "stall_over_memory_copy": report.stall / statistics.median(copies),
        "stall_over_save": report.stall / report.seconds,
        "throughput_over_file_copy": statistics.median(ratios[1:]),
    }, folder


def copied(folder: Path) -> float:
    """Seconds of copying a folder's files and flushing them to the device."""
    target = folder.parent / "copy"
    start = time.perf_counter()
    shutil.copytree(folder, target)
    for path in target.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def first_step(keys: dict[str, object], stop_after: int) -> float:
    """Seconds of a process that trains one step, to its end."""
    words = [f"--{name}={value}" for name, value in keys.items()]
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "train.py", *words, f"--train.stop_after={stop_after}"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


def main() -> None:
    small = "--small" in sys.argv
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        result, folder = saving(overrides(small, here / "run"))
        step = store.step_of(folder)
        starts = [
            first_step(overrides(small, here / "run"), step + 1)
            / first_step(overrides(small, here / f"fresh{pair}"), 1)
            for pair in range(PAIRS)
        ]
    result["resume_over_fresh_start"] = statistics.median(starts)
    shown = {
        key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()
    }
    print(json.dumps({"benchmark": "checkpoint", **shown, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
