"""Processes forked from one that has imported torch and compose, and has done nothing else.

A process that starts anew imports torch and compose for about 4 seconds of one core, and more with
torchao and transformers. A fork of a process that has them starts within milliseconds. A fork copies no
threads, so the process that forks must have none: it computes no gradient and runs no test.
"""

import multiprocessing as mp
from multiprocessing.context import ForkServerContext


def forks() -> ForkServerContext:
    """The context whose ``Process`` is such a fork. The first one starts the process that forks."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    return context
