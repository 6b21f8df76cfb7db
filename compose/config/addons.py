"""The add-ons, which the core does not import. To take one out, remove its folder and its entry here.

The ``__init__`` of the package ``compose.<name>`` may define these names:

    TABLES               its tables of train.toml, by name
    RUN_RULES            its rules of a run
    compress(options, mesh)  the messages that a composition sends in another way (composition.Messages)
    task(config)         what a model of the next token learns in its place, or None
    hooks(trainer)       what it does around a run's steps (compose/train/hooks.py)
    held(job, placed)    what a dry run says of the memory that it takes besides
    islands(config)      how many parts of the job train alone
    between_workers(job, table, workers, link, seconds)  lines on what islands send each other
"""

import importlib
from collections.abc import Iterator
from typing import Any

ADD_ONS = {"compression": "comm", "diloco": "comm", "preference": "train", "profiling": "metrics"}
"""The add-ons, each with the table that its own tables follow."""


def provided(name: str) -> Iterator[tuple[str, Any]]:
    """Yield what the add-ons bring under ``name``, with the name of each add-on that has it."""
    for add_on in ADD_ONS:
        result = getattr(importlib.import_module(f"compose.{add_on}"), name, None)
        if result is not None:
            yield add_on, result
