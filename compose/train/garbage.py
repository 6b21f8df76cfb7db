"""Python's garbage collector, which runs between steps only."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY = 100  # steps between two collections


@contextmanager
def collected_between_steps() -> Iterator[Callable[[int], None]]:
    """Collect garbage when the caller says so, and not within a step.

    Ranks would otherwise stop for it at different moments, and each one waits for all.

    Yields:
        ``after_step(number)``, which collects after some steps.
    """
    gc.collect()
    gc.disable()

    def after_step(number: int) -> None:
        if number % _EVERY == 0:
            gc.collect()

    try:
        yield after_step
    finally:
        gc.enable()
