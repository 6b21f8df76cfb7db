"""train.py, of which each rank keeps two files in the folder $LEDGER.

``<rank>.jsonl``: a line for every batch that it took: the number of its first sample, those of all of
this rank's samples, a hash of what is in them. ``<rank>.now``: its process, and what it is doing:
start, load, step, save.
"""

import os
from typing import Any

RANK = os.environ["RANK"]
_now = os.open(f"{os.environ['LEDGER']}/{RANK}.now", os.O_RDWR | os.O_CREAT)
_doing = {"start"}


def say() -> None:
    os.pwrite(_now, f"{os.getpid()} {' '.join(sorted(_doing))}".ljust(60).encode(), 0)


def during(owner: Any, name: str, what: str) -> None:
    """Say that it does ``what`` while ``owner.name`` runs."""
    real = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _doing.add(what)
        say()
        try:
            return real(*args, **kwargs)
        finally:
            _doing.discard(what)
            say()

    setattr(owner, name, wrapped)


def main() -> None:
    import hashlib
    import json
    import runpy

    from compose.checkpoint import checkpointer
    from compose.data import Batches
    from compose.trainer import Trainer

    batch_of, run = Batches.batch, Trainer.run

    def batch(self: Batches, first: int) -> Any:
        found = batch_of(self, first)
        content = hashlib.sha256(found["tokens"].numpy().tobytes()).hexdigest()
        line = json.dumps([first, [first + row for row in self.rows], content])
        with open(f"{os.environ['LEDGER']}/{RANK}.jsonl", "a") as file:
            file.write(line + "\n")
        return found

    def started(self: Trainer) -> None:
        _doing.discard("start")
        run(self)

    Batches.batch, Trainer.run = batch, started
    during(checkpointer, "damage", "load")
    during(checkpointer, "load", "load")
    during(checkpointer.Checkpointer, "_write", "save")
    during(Trainer, "step", "step")
    runpy.run_path("train.py", run_name="__main__")


if __name__ == "__main__":
    say()
    main()
