"""Faults that were planned for a run: each rank brings about its own, at the moment that was drawn.

The folder $FAULTS holds ``plan.json``. A fault happens after the one before it in the plan, in
whichever attempt of the run that is; ``fired-<n>.json`` then says when and where. train_with_ledger.py
calls :class:`Faults`; the command is benchmarks/faults.py. Nothing here imports torch before a rank
does, since some faults come first.
"""

import contextlib
import errno
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Moments of a start, in order: each attempt of a run has each of them once.
STARTING = ("start", "groups", "load", "first step")
# Moments of a run that has taken steps; a fault waits for its step.
RUNNING = ("step", "copy", "save", "publish", "prune", "memory")
IN_A_STEP = ("exception", "slow rank", "bit in memory")
TORN, FLIPPED, IN_COPY = "torn file", "bit in a file", "bit in a copy"


@dataclass(frozen=True)
class Planned:
    """One fault of a run."""

    kind: str
    how: str = ""
    """Which of the kind's ways."""
    rank: int = 0
    moment: str = "step"
    step: int = 0
    """The first step, from 1, in or after which it happens; for moments of RUNNING."""
    delay: float = 0.0
    """Seconds from the beginning of the moment."""
    seconds: float = 0.0
    """How long it lasts; 0: until somebody acts."""
    seed: int = 0
    """Chooses the file and the bit, or the tensor and the bit."""


def read_plan(folder: Path) -> list[Planned]:
    return [Planned(**entry) for entry in json.loads((folder / "plan.json").read_text())]


def write_plan(folder: Path, plan: list[Planned]) -> None:
    (folder / "plan.json").write_text(json.dumps([asdict(fault) for fault in plan]))


def fired(folder: Path, number: int) -> dict[str, Any] | None:
    """When and where a fault happened; None if it has not."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads((folder / f"fired-{number}.json").read_text())
    return None


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Faults:
    """The faults of this rank. Each method ``at_...`` is called when that moment begins."""

    def __init__(self, folder: str, doing: set[str]) -> None:
        self.folder, self.plan, self.doing = Path(folder), read_plan(Path(folder)), doing
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.agent = os.getppid()  # torchrun; another process may take its place when it dies
        self.next, self.armed = 0, -1
        self.steps = 0  # of the run, as this rank has counted them
        self.first = True  # no step of this attempt has ended
        self.slow = (0, 0.0)  # (steps that are still slow, seconds more of each)
        self.trainer: Any = None
        (self.folder / f"pid-{os.getpid()}").touch()

    def at(self, moment: str) -> None:
        """Begin to wait for the next fault, if it is this rank's and of this moment."""
        fault = self._due(moment)
        if fault is None or fault.kind in IN_A_STEP:
            return
        if fault.kind in (TORN, FLIPPED) and not self._two_are_whole():
            return
        if fault.kind == IN_COPY and not self._own_copies():
            return
        self.armed = self.next
        act = self._full_disk if fault.kind == "full disk" else self._die
        timer = threading.Timer(fault.delay, act, [self.next, fault])
        timer.daemon = True
        timer.start()

    def _due(self, moment: str) -> Planned | None:
        while fired(self.folder, self.next):
            self.next += 1
        if self.next >= len(self.plan) or self.armed == self.next:
            return None
        fault = self.plan[self.next]
        mine = fault.rank % self.world_size == self.rank and fault.moment == moment
        return fault if mine and (moment in STARTING or self.steps + 1 >= fault.step) else None

    def _fire(self, number: int, **more: Any) -> bool:
        """Note that a fault happens now; False if it has already."""
        what = {
            "time": time.time(),
            "pid": os.getpid(),
            "step": self.steps + 1,
            "world": self.world_size,
        }
        path = self.folder / f".fired-{number}-{os.getpid()}-{threading.get_ident()}"
        path.write_text(json.dumps({**what, "doing": sorted(self.doing), **more}))
        try:
            os.link(path, self.folder / f"fired-{number}.json")
        except FileExistsError:
            return False
        finally:
            path.unlink()
        return True

    def _die(self, number: int, fault: Planned) -> None:
        """Kill or stop this process, and perhaps its agent and the agent's other ranks."""
        more: dict[str, Any] = {}
        if fault.kind in (TORN, FLIPPED):
            more["file"] = self._damage(fault)
        if fault.kind == IN_COPY:
            more["file"] = self._damage_copy(fault)
        orphan = os.getppid() != self.agent
        children = [] if orphan else children_of(self.agent)
        if not self._fire(number, agent=self.agent, **more):
            return
        if fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        if fault.kind in ("lost agent", "lost node"):
            if not orphan:
                os.kill(self.agent, signal.SIGKILL)
            if fault.how == "alone":
                return
            for pid in children:
                if pid != os.getpid():
                    os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def _two_are_whole(self) -> bool:
        """Wait for the save that goes on; return whether the two newest checkpoints are whole."""
        from compose.checkpoint import store

        self.trainer.checkpointer.wait()
        root = self.trainer.checkpointer.root
        folders = store.newest_first(root)
        # Islands go on from a checkpoint that all have, and read no other.
        others = [path for path in root.parent.glob("*/*/checkpoints") if path != root]
        if not all((path / folder.name).exists() for path in others for folder in folders[:1]):
            return False
        return len(folders) > 1 and not any(map(store.problems, folders[:2]))

    def _damage(self, fault: Planned) -> str:
        """Cut a file of the newest checkpoint, or flip one of its bits; return which."""
        from compose.checkpoint import store

        chance = random.Random(fault.seed)
        newest = store.newest_first(self.trainer.checkpointer.root)[0]
        files = sorted(path for path in newest.iterdir() if path.stat().st_size)
        if fault.kind == TORN:
            files = [path for path in files if path.name.startswith("__")]
        path = chance.choice(files)
        if fault.kind == TORN:
            os.truncate(path, chance.randrange(path.stat().st_size))
        else:
            place = chance.randrange(path.stat().st_size)
            with path.open("r+b") as file:
                file.seek(place)
                byte = file.read(1)[0] ^ 1 << chance.randrange(8)
                file.seek(place)
                file.write(bytes([byte]))
        return path.name

    def _own_copies(self) -> list[tuple[int, Path, Any]]:
        """Return the step, the file and the text of this rank's copies in memory."""
        from compose.checkpoint import in_memory

        copies = self.trainer.checkpointer.copies
        texts = [(slot.path, in_memory._read_text(slot._text)) for slot in copies.slots]
        return [(text.step, path, text) for path, text in texts if text]

    def _damage_copy(self, fault: Planned) -> str:
        """Flip a bit of this rank's newest copy; return which file."""
        chance = random.Random(fault.seed)
        _, path, text = max(self._own_copies(), key=lambda one: one[0])
        chunk = chance.choice([chunk for one in text.tensors.values() for chunk in one.chunks])
        with path.open("r+b") as file:
            place = chunk.begin + chance.randrange(chunk.length)
            file.seek(place)
            byte = file.read(1)[0] ^ 1 << chance.randrange(8)
            file.seek(place)
            file.write(bytes([byte]))
        return path.name

    def _full_disk(self, number: int, fault: Planned) -> None:
        """Leave no room for shards, or for the log: for some seconds from the next write on."""
        from compose.train.metrics import JsonLines

        end = float("inf")

        def full(*unused: Any) -> int:
            nonlocal end
            if self._fire(number):
                end = time.monotonic() + fault.seconds
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        class Full:
            write = full

            def __init__(self, file: Any) -> None:
                self.fileno, self.close = file.fileno, file.close

        append, reserve = JsonLines._append, os.posix_fallocate

        def no_line(self: Any, line: bytes) -> None:
            real = self.file
            self.file = real if time.monotonic() > end else Full(real)
            try:
                append(self, line)
            finally:
                self.file = real

        def no_room(*where: int) -> None:
            reserve(*where) if time.monotonic() > end else full()

        if fault.how == "log":
            JsonLines._append = no_line
        else:
            os.posix_fallocate = no_room

    def put_in(self, enter: Callable[[dict[str, Any]], None]) -> None:
        """Watch for the moments of a run whose code is imported now."""
        import torch.distributed as dist

        from compose.checkpoint import checkpointer, in_memory, loading, store
        from compose.train.trainer import Trainer

        for owner, name, moment in (
            (dist, "init_process_group", "groups"),
            (loading, "load", "load"),
            (in_memory.Copies, "find", "load"),
            (in_memory.Copies, "take", "memory"),
            (checkpointer, "staged", "copy"),
            (checkpointer.Checkpointer, "_write", "save"),
            (store, "publish", "publish"),
            (checkpointer.Checkpointer, "_prune", "prune"),
        ):
            self._before(owner, name, moment)
        real = Trainer.step

        def step(trainer: Trainer) -> Any:
            self.trainer = trainer
            self.steps = trainer.progress.step
            self.at("first step" if self.first else "step")
            self._in_step("first step" if self.first else "step")
            if self.slow[0]:
                self.slow = (self.slow[0] - 1, self.slow[1])
                time.sleep(self.slow[1])
            result = real(trainer)
            self.first = False
            self.steps = trainer.progress.step
            enter({"done": self.steps, "time": time.time()})
            return result

        replaced: Any = Trainer
        replaced.step = step

    def _before(self, owner: Any, name: str, moment: str) -> None:
        real = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.at(moment)
            return real(*args, **kwargs)

        setattr(owner, name, wrapped)

    def _in_step(self, moment: str) -> None:
        """Prepare the next fault if it is one of IN_A_STEP and this step's."""
        fault = self._due(moment)
        if fault is None or fault.kind not in IN_A_STEP:
            return
        self.armed = self.next
        if fault.kind == "exception":
            self._fail_in(fault)
        elif fault.kind == "slow rank":
            self._fire(self.next)
            self.slow = (int(fault.seconds / fault.delay), fault.delay)
        else:
            self._flip(fault)

    def _fail_in(self, fault: Planned) -> None:
        """Let this step raise in the data, in forward, in backward or in the optimizer."""
        from torch import Tensor
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        number, calls = self.armed, random.Random(fault.seed).randrange(8)

        def fail(*unused: Any) -> None:
            self._fire(number)
            raise ArithmeticError("a planned fault")

        def before_module(module: Any, inputs: tuple[Any, ...]) -> None:
            nonlocal calls
            learnt = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
            calls -= fault.how == "forward" or bool(learnt)
            if calls < 0 and fault.how == "forward":
                fail()
            if calls == -1:
                learnt[0].register_hook(fail)

        if fault.how == "data":
            self.trainer.batches.batch = fail
        elif fault.how == "optimizer":
            register_optimizer_step_pre_hook(fail)
        else:
            register_module_forward_pre_hook(before_module)

    def _flip(self, fault: Planned) -> None:
        """Flip a bit of this rank's state, before the update of this step."""
        import torch

        from compose.ops.tensors import local_tensor
        from compose.train.hooks import Hook

        number, chance = self.armed, random.Random(fault.seed)
        trainer, fire = self.trainer, self._fire

        class Flip(Hook):
            def before_update(self, step: int) -> None:
                named = dict(trainer.composition.named_parameters())
                name = chance.choice(sorted(n for n, p in named.items() if p.grad is not None))
                tensor = named[name]
                if fault.how == "gradient":
                    tensor = named[name].grad
                elif fault.how == "moment":
                    tensor = trainer.optimizer.state[tensor]["exp_avg"]
                local = local_tensor(tensor.detach()).view(torch.int32).view(-1)
                if not len(local):
                    return  # this rank has no part of it; the next step will do
                local[chance.randrange(len(local))] ^= 1 << chance.randrange(31)
                fire(number, tensor=f"{fault.how} of {name}")
                trainer.hooks.remove(self)

        trainer.hooks.insert(0, Flip())
