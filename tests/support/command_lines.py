"""Command lines, as a person types them.

:func:`launch` starts new processes. It is the real thing, and slow, for each process imports torch.
:func:`execute` gives the same answer from forks. :func:`answered` stays in this process: it is for what
starts no ranks.
"""

import contextlib
import io
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import compose.__main__
import train
from compose.cli import command_line as cli
from tests.support.helpers import ROOT, SMALL
from tests.support.pool import forks

QUICK = [f"--{key}={value}" for key, value in SMALL.items()]
TIMEOUT = 300.0

# Files of other trainers; those of DeepSpeed and transformers are open where a test adds keys.
DEEPSPEED = '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {%s}}'
TITAN = "[training]\nlocal_batch_size = 2\nsteps = 10\n[lr_scheduler]\nwarmup_steps = 2\n"
MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 1 --lr 1e-4 --train-iters 100"
)
ARGUMENTS = '{"per_device_train_batch_size": 2, "learning_rate": 1e-4, "max_steps": 10'


def command(*arguments: str, ranks: int = 0) -> list[str]:
    """The words of a command line, from the interpreter on; of torchrun with ``ranks``."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks else []
    return [sys.executable, *torchrun, *arguments]


def launch(*arguments: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command line in processes of its own; torchrun starts them with ``ranks``."""
    return subprocess.run(
        command(*arguments, ranks=ranks),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def begin(
    words: Sequence[str], stdout: Any = subprocess.PIPE, stderr: Any = subprocess.PIPE, **variables: str
) -> "subprocess.Popen[str]":
    """Start a command line, in a session of its own; with further variables of the environment."""
    return subprocess.Popen(
        words,
        cwd=ROOT,
        stdout=stdout,
        stderr=stderr,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )


def of_rank(rank: int, ranks: int, port: int) -> dict[str, str]:
    """torchrun's variables of a rank."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(value) for name, value in place.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def kill_sessions(processes: Iterable["subprocess.Popen[str]"]) -> None:
    """Kill what :func:`begin` started, with all that it has started itself."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def execute(
    *arguments: str, ranks: int = 0, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command line in forks of a process that has torch imported, with torchrun's variables.

    When one rank fails, the others are ended and the code is 1, as with torchrun. What torchrun itself
    prints is not there. environment: further variables.
    """
    place, port = {"OMP_NUM_THREADS": "1", **(environment or {})}, free_port()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        for output in outputs:
            output.touch()
        processes = []
        for rank in range(max(1, ranks)):
            own = place | (of_rank(rank, ranks, port) if ranks else {})
            processes.append(forks().Process(target=_be, args=(arguments, own, *outputs)))
            processes[-1].start()
        try:
            codes = _codes(processes)
        finally:
            for process in processes:
                process.kill()
                process.join()
        code = 1 if ranks and any(codes) else codes[0]
        return subprocess.CompletedProcess(arguments, code, *(path.read_text() for path in outputs))


def _codes(processes: list[Any]) -> list[int]:
    """The exit codes of processes, which all end or are ended when one fails."""
    end = time.monotonic() + TIMEOUT
    left = list(processes)
    while left:
        ready = wait([process.sentinel for process in left], timeout=end - time.monotonic())
        if not ready:
            raise subprocess.TimeoutExpired("a command line", TIMEOUT)
        ended = [process for process in left if process.sentinel in ready]
        for process in ended:
            process.join()
            left.remove(process)
        if any(process.exitcode for process in ended):
            for process in left:
                process.terminate()
    return [process.exitcode for process in processes]


def _be(arguments: tuple[str, ...], environment: dict[str, str], out: Path, err: Path) -> None:
    """In a fork: run the program that a command line names, in its place."""
    for number, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(ROOT)
    os.environ.update(environment)
    tempfile.tempdir = None  # which has been read from the environment before
    torch.set_num_threads(1)
    first, *rest = arguments
    if first == "-m":
        name, *rest = rest
        sys.argv = [name, *rest]
        sys.modules.pop(f"{name}.__main__", None)  # it is now to be run
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


def answered(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run train.py or ``-m compose`` in this process, where it starts no ranks."""
    script = arguments[0] == "train.py"
    words = arguments[1:] if script else arguments[2:]
    with (
        mock.patch.object(sys, "argv", ["program", *words]),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code = cli._outcome(train.main if script else compose.__main__.main)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as result:
        result.bind(("127.0.0.1", 0))
        return int(result.getsockname()[1])
