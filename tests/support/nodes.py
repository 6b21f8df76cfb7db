"""Nodes of one run: agents of torchrun on this machine, each in a session of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from compose.checkpoint import store
from tests.support.command_lines import begin, free_port, kill_sessions
from tests.support.helpers import ROOT
from tests.support.ledger import world_at_work
from tests.support.training import logged_steps

PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def children_of(process: int) -> list[int]:
    """The processes that a process started, in order: torchrun's are its ranks."""
    path = Path(f"/proc/{process}/task/{process}/children")
    return sorted(int(pid) for pid in path.read_text().split())


class Nodes:
    """Agents that meet at the first one; they train with a ledger, and do not end before :meth:`end`.

    A context: it kills at its end what is left.
    """

    def __init__(self, folder: Path, *run: str, nodes: str = "1:2", ranks: int = 2) -> None:
        """``run`` are words of train.py; ``nodes`` are torchrun's least and most."""
        self.folder, self.ledger, self.run = folder, folder / "ledger", folder / "run"
        self.gate, self.ranks = folder / "gate", ranks
        self.gate.unlink(missing_ok=True)
        self.ledger.mkdir(parents=True, exist_ok=True)
        self.processes: list[subprocess.Popen[str]] = []
        self.words = [f"--nnodes={nodes}", "--max-restarts=9", "--rdzv-backend=c10d"]
        self.words += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=mine"]
        self.words += ["--local-addr=127.0.0.1"]
        self.script = ["tests/support/train_with_ledger.py", *run, f"--run.dir={self.run}"]

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *unused: object) -> None:
        kill_sessions(self.processes)

    def join(self, ranks: int = 0) -> "subprocess.Popen[str]":
        """Start a node by examples/launch.sh; the first one hosts the rendezvous."""
        place = len(self.processes)
        quick = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=4"
        conf = ["--rdzv-conf", f"is_host={not place},{quick}"]
        own = [f"--nproc-per-node={ranks or self.ranks}"]
        variables = {"LEDGER": str(self.ledger), "GATE": str(self.gate), "PATH": PATH}
        words = ["examples/launch.sh", *self.words, *own, *conf, *self.script]
        with (self.folder / f"node-{place}").open("w") as output:
            self.processes.append(begin(words, output, output, PYTHONPATH=str(ROOT), **variables))
        return self.processes[-1]

    def said(self) -> str:
        """All that the nodes have printed."""
        paths = [self.folder / f"node-{place}" for place in range(len(self.processes))]
        return "".join(path.read_text() for path in paths)

    def wait_for_ranks(self, count: int, saved: bool = True) -> None:
        """Wait until ``count`` ranks train, and with ``saved`` until there is a checkpoint too."""

        def there() -> bool:
            assert 0 not in [process.poll() for process in self.processes], self.said()[-5000:]
            assert any(process.poll() is None for process in self.processes), self.said()[-5000:]
            return world_at_work(self.ledger) == {count}

        wait_for(there, 300)
        if saved:
            wait_for(lambda: bool(store.newest_first(self.run / "checkpoints")), 300)

    def kill(self, *nodes: "subprocess.Popen[str]", ranks: bool = True) -> None:
        """Kill agents, all at once, with their ``ranks`` or alone."""
        agents = [agent for node in nodes for agent in children_of(node.pid)]
        victims = [*agents, *(rank for agent in agents for rank in children_of(agent) if ranks)]
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)

    def end(self) -> list[int]:
        """Let the run come to its last step; the codes of all nodes. A step may take 300 s."""
        self.gate.touch()
        for node in self.processes:
            while node.poll() is None:
                before = self.steps()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    node.wait(300)
                assert node.poll() is not None or self.steps() != before, self.said()[-5000:]
        return [node.wait() for node in self.processes]

    def steps(self) -> list[int]:
        """The steps that the log of the run has."""
        return logged_steps(self.run)
