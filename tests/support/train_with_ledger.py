"""train.py, of which each rank keeps two files in the folder $LEDGER.

``<rank>.jsonl``: for every attempt its number, the same on every rank, the time, and the step of the
checkpoint that it began with; for every batch the number of its first sample, those of all of this
rank's samples, and a hash of what is in them.
``<rank>.now``: its process, and what that is doing: start, load, step, save.

With a folder $FAULTS (planned_faults.py) it brings about faults. Each process then has a ledger of its
own, ``<rank>-<process>.jsonl``, which also has a line at the end of each step. Until there is a file
$GATE, if this is set, each step takes two seconds.
"""

import os
import time
from pathlib import Path
from typing import Any


class Now:
    """The file that says what this process is doing."""

    def __init__(self, path: str) -> None:
        self.file, self.doing = os.open(path, os.O_RDWR | os.O_CREAT), {"start"}
        self.say()

    def say(self) -> None:
        os.pwrite(self.file, f"{os.getpid()} {' '.join(sorted(self.doing))}".ljust(60).encode(), 0)

    def during(self, owner: Any, name: str, what: str) -> None:
        """Say that it does ``what`` while ``owner.name`` runs."""
        real = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.doing.add(what)
            self.say()
            try:
                return real(*args, **kwargs)
            finally:
                self.doing.discard(what)
                self.say()

        setattr(owner, name, wrapped)


def main() -> None:
    path = f"{os.environ['LEDGER']}/{os.environ['RANK']}"
    now = Now(f"{path}.now")  # before the imports, which take seconds

    faults, ledger = None, path
    if folder := os.environ.get("FAULTS"):
        from tests.support.planned_faults import Faults

        faults = Faults(folder, now.doing)
        faults.at("start")
        ledger = f"{path}-{os.getpid()}"

    import hashlib
    import json
    import runpy

    from compose.checkpoint import checkpointer, loading, store
    from compose.data.batches import Batches
    from compose.train.trainer import Trainer

    batch_of, run, load, step = Batches.batch, Trainer.run, loading.load, Trainer.step
    loaded = [0]

    def enter(entry: dict[str, Any]) -> None:
        with open(f"{ledger}.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")

    def batch(self: Batches, first: int) -> Any:
        result = batch_of(self, first)
        content = hashlib.sha256(result["tokens"].numpy().tobytes()).hexdigest()
        enter({"batch": [first, [first + row for row in self.rows], content]})
        return result

    def load_noted(folder: Path, *args: Any) -> Any:
        loaded[0] = store.step_of(folder)
        return load(folder, *args)

    def slowly(self: Trainer) -> Any:
        gate, until = os.environ.get("GATE"), time.monotonic() + 2.0
        while gate and time.monotonic() < until and not os.path.exists(gate):
            time.sleep(0.02)
        return step(self)

    def started(self: Trainer) -> None:
        enter({"from": loaded[0], "attempt": attempt(), "time": time.time()})
        now.doing.discard("start")
        run(self)

    Batches.batch, Trainer.run, loading.load, Trainer.step = batch, started, load_noted, slowly
    if faults:
        faults.put_in(enter)
    now.during(loading, "damage", "load")
    now.during(loading, "load", "load")
    now.during(checkpointer.Checkpointer, "_write", "save")
    now.during(Trainer, "step", "step")
    runpy.run_path("train.py", run_name="__main__")


def attempt() -> str:
    """The number of this attempt, the same on every rank; several torchruns do not count together."""
    import torch.distributed as dist

    if launch := os.environ.get("LAUNCH"):
        return f"{launch}, {os.environ['TORCHELASTIC_RESTART_COUNT']}"
    shared = [str(time.time())]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


if __name__ == "__main__":
    main()
