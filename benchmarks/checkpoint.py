"""Measure saving and resuming, as ratios of two figures of one run.

    python benchmarks/checkpoint.py [--small]
    torchrun --nproc-per-node 4 benchmarks/checkpoint.py --copies
    python benchmarks/checkpoint.py --restart [--memory]

Prints one JSON line: stall of an asynchronous save (the second: the first makes the memory that later
ones copy into) over a step's time, over one copy of the state into such memory, and over the time until
it is published; bytes per second until then over those of copying the published files and flushing
them; seconds from a process' start to the end of its first step, resumed over fresh. The last two are
medians of pairs, one right after the other; the first pair of saves does not count, since pages that
the file cache has not had before can cost ten times the writing. A Llama of about 300 million
parameters on one process, AdamW's state included; ``--small`` is a few thousand, and says nothing about
speed.

``--copies``: a step of four million parameters with a copy in memory after it, over one without;
medians of blocks of steps, one right after the other. A copy that would have to wait is left out, so
the number of copies is told. ``--restart``: four ranks, of which one is killed after some steps;
seconds from there to the end of the first step, by part, and over those of the run's first start.
"""

import importlib
import json
import os
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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
COPIED = {"model.dim": 256, "model.n_layers": 4, "model.hidden_dim": 896}
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
        trainer.run_folder.release()
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


def copying() -> None:
    """Print the ratio of a step with a copy in memory to one without."""
    folder = Path(tempfile.gettempdir()) / f"copies-{os.getppid()}"
    keys = COPIED | {"run.dir": folder, "checkpoint.memory": 1, "metrics.tensorboard": "false"}
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    job = check(load(str(ROOT / "train.toml"), [(name, str(v)) for name, v in keys.items()]), ranks)
    with process_group(job.config) as device:
        trainer = Trainer(job, init_mesh(job.degrees, device.type), device)
        copies, taken = trainer.checkpointer.copies, 0
        assert copies

        def block(copied: bool) -> float:
            nonlocal taken
            start = time.perf_counter()
            for _ in range(STEPS):
                trainer.step()
                if copied:
                    before = copies.thread
                    assert trainer.read
                    trainer.checkpointer.copy(trainer.progress, trainer.read.flags[-1])
                    taken += copies.thread is not before
            if copies.thread:
                copies.thread.join()
            dist.barrier()
            return time.perf_counter() - start

        block(True)
        taken, ratios, plain = 0, list[float](), list[float]()
        for pair in range(2 * PAIRS):
            times = {copied: block(copied) for copied in ((True, False) if pair % 2 else (False, True))}
            ratios.append(times[True] / times[False])
            plain.append(times[False] / STEPS)
        result = {
            "benchmark": "copies in memory",
            "parameters": sum(p.numel() for p in job.model.parameters()),
            "ranks": ranks,
            "step": round(statistics.median(plain), 4),
            "step_with_copy_over_step": round(statistics.median(ratios), 4),
            "copies": f"{taken} of {2 * PAIRS * STEPS}",
        }
        copies.remove()
        if dist.get_rank() == 0:
            print(json.dumps(result))
            trainer.run_folder.release()
            shutil.rmtree(folder, ignore_errors=True)


PARTS = {  # the function at whose end a part ends, by the part's name
    "rendezvous": ("compose.train.processes", "_rendezvous"),
    "groups": ("compose.cli.train", "init_mesh"),
    "data": ("compose.train.trainer", "training_batches"),
    "folder": ("compose.train.trainer", "build_optimizer"),
    "load": ("compose.checkpoint.checkpointer", "Checkpointer.resume"),
    "first step": ("compose.train.trainer", "Trainer.step"),
}


def timed_child() -> None:
    """Train, and write the times at which the parts of the start end, once each, into a file."""
    began = started(os.getpid())
    imported = [importlib.import_module(place) for place, _ in PARTS.values()]
    path = Path(os.environ["TIMES"]) / f"{began}-{os.environ['RANK']}-{os.getpid()}"
    times = {"process": began, "import": time.time()}

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            if name not in times:
                times[name] = time.time()
                path.write_text(json.dumps(times))
            return result

        return call

    for module, (name, (_, where)) in zip(imported, PARTS.items(), strict=True):
        *owners, leaf = where.split(".")
        owner = getattr(module, owners[0]) if owners else module
        setattr(owner, leaf, noted(name, getattr(owner, leaf)))
    sys.argv = [sys.argv[0], *sys.argv[2:]]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def started(process: int) -> float:
    """The time at which a process has begun."""
    ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    now, up = time.time(), float(Path("/proc/uptime").read_text().split()[0])
    return now - up + ticks / os.sysconf("SC_CLK_TCK")


def restarting(memory: bool) -> None:
    """Print the parts of a restart, and its ratio to a fresh start."""
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        (here / "times").mkdir()
        saved = "checkpoint.memory=1" if memory else "checkpoint.interval=2"
        words = ["--metrics.tensorboard=false", f"--run.dir={here / 'run'}", f"--{saved}"]
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--max-restarts", "1"]
        begun = time.time()
        run = subprocess.Popen(
            [sys.executable, *launch, __file__, "--child", *words, "--train.steps=1000"],
            cwd=ROOT,
            env={**os.environ, "TIMES": str(here / "times")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        lines = here / "run" / "metrics.jsonl"
        fresh = _starts(here / "times", 4, begun)
        while not lines.exists() or lines.read_text().count("\n") < STEPS:
            time.sleep(0.05)
        killed = time.time()
        os.kill(int(fresh["last"]), signal.SIGKILL)
        again = _starts(here / "times", 4, killed)
        run.terminate()
        run.wait()
    parts = {
        kind: {
            f"to {part}": round(times[part] - (times[before] if before else times["asked"]), 2)
            for before, part in zip(("", *times), times, strict=False)
            if part in ("process", "import", *PARTS)
        }
        for kind, times in (("fresh", fresh), ("again", again))
    }
    total = {kind: t["first step"] - t["asked"] for kind, t in (("fresh", fresh), ("again", again))}
    ratio = round(total["again"] / total["fresh"], 3)
    seconds = {kind: round(value, 2) for kind, value in total.items()}
    result = {"from": saved, **parts, "seconds": seconds, "restart_over_fresh_start": ratio}
    print(json.dumps({"benchmark": "restart", **result}))


def _starts(folder: Path, ranks: int, asked: float) -> dict[str, float]:
    """Wait until all ranks that began after ``asked`` have taken a step; the times of the slowest."""
    while True:
        files = [p for p in folder.iterdir() if float(p.name.split("-")[0]) > asked - 1]
        known = [(json.loads(p.read_text() or "{}"), p) for p in files]
        done = [(times, p) for times, p in known if "first step" in times]
        if len(done) == ranks:
            times, _ = max(done, key=lambda one: one[0]["first step"])
            last = max(p.name for _, p in done if p.name.split("-")[1] == str(ranks - 1))
            return {"asked": asked, **times, "last": float(last.split("-")[2])}
        time.sleep(0.05)


def main() -> None:
    if "--copies" in sys.argv:
        copying()
    elif "--child" in sys.argv:
        timed_child()
    elif "--restart" in sys.argv:
        restarting("--memory" in sys.argv)
    else:
        of_saving()


def of_saving() -> None:
    """Print the ratios of saving and resuming."""
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
