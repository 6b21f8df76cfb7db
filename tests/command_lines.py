"""Command lines, as a person types them."""

import contextlib
import io
import os
import socket
import subprocess
import sys
from unittest import mock

import compose.__main__
import train
from compose import cli
from tests.helpers import ROOT, SMALL

QUICK = [f"--{key}={value}" for key, value in SMALL.items()]


def command(*arguments: str, ranks: int = 0) -> list[str]:
    """The words of a command line, from the interpreter on; of torchrun with ``ranks``."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks else []
    return [sys.executable, *torchrun, *arguments]


def execute(*arguments: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    """What a command line said, in a process of its own."""
    return subprocess.run(
        command(*arguments, ranks=ranks),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def answered(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As :func:`execute`, in this process: of train.py and ``-m compose``, what starts no ranks."""
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
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
