"""Python's garbage collector, kept out of the steps."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY = 100  # steps between two collections


@contextmanager
def collected_between_steps() -> Iterator[Callable[[int], None]]:
    """Have garbage collected when it is said, and not within a step.

    Ranks would stop for it at different moments, and each waits for all.

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
