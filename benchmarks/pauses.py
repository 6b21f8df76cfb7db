"""Train for many steps while the whole job is paused now and then, and look for false alarms.

    python benchmarks/pauses.py [--steps N] [--ranks N] [--pauses N] [--seconds S]

Further arguments are keys of the run. Each pause is a SIGSTOP to torchrun and all its ranks at once,
at a random moment, and a SIGCONT after about S seconds. All checks of [comm] are on. It prints one JSON
line: the steps taken, the exit code, and what torchrun and the run have written to stderr, which is
nothing in an undisturbed run. It exits with 1 unless all steps were taken without such a line.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
KEYS = [
    *("--model.n_layers=1", "--model.dim=32", "--model.hidden_dim=64", "--train.seq_len=16"),
    *("--train.global_batch=8", "--optimizer.warmup=0", "--parallel.zero=3", "--comm.timeout=30"),
    *("--comm.check_every=1", "--comm.check_state=true", "--comm.check_messages=true"),
    *("--checkpoint.interval=1000", "--metrics.console_every=1000", "--metrics.tensorboard=false"),
]
IGNORED = ("OMP_NUM_THREADS", "*****", "warn")


def steps_taken(metrics: Path) -> int:
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def family(process: int) -> list[int]:
    """A process and all that it has started, as they have; torchrun's ranks have their own sessions."""
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return [process, *(each for child in children for each in family(child))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pauses", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=5.0, help="mean length of a pause")
    given, keys = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        metrics, errors = Path(folder) / "run" / "metrics.jsonl", Path(folder) / "errors"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(given.ranks), "train.py", *KEYS]
        command += [f"--run.dir={metrics.parent}", f"--train.steps={given.steps}", *keys]
        begun, draw = time.monotonic(), random.Random(0)
        moments = sorted(draw.randrange(1, given.steps) for _ in range(given.pauses))
        with errors.open("w") as file:
            job = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=file)
            while job.poll() is None:
                if moments and steps_taken(metrics) >= moments[0]:
                    moments.pop(0)
                    everyone = family(job.pid)
                    for which in (signal.SIGSTOP, signal.SIGCONT):
                        for process in everyone:
                            os.kill(process, which)
                        if which == signal.SIGSTOP:
                            time.sleep(draw.uniform(0.5, 1.5) * given.seconds)
                time.sleep(0.2)
        said = [line for line in errors.read_text().splitlines() if line.strip()]
        alarms = [line for line in said if not any(word in line for word in IGNORED)]
        taken = steps_taken(metrics)
    result = {
        "benchmark": "pauses",
        "steps": taken,
        "ranks": given.ranks,
        "pauses": given.pauses - len(moments),
        "exit_code": job.returncode,
        "alarms": alarms,
        "seconds": round(time.monotonic() - begun, 1),
    }
    print(json.dumps(result), flush=True)
    sys.exit(int(bool(job.returncode or alarms or moments or taken != given.steps)))


if __name__ == "__main__":
    main()
