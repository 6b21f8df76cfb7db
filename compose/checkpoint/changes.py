"""Tells which keys of a config have changed since a checkpoint was saved."""

from pathlib import Path
from typing import Any

from compose.config.tables import Config
from compose.config.toml import dump, tomllib
from compose.errors import open_own, toml_value

# Keys that do not change what is trained, or that the message about the data covers.
_SAME_TRAINING = {
    "model.preset",
    "train.stop_after",
    "train.seq_len",
    "train.seed",
    "train.micro_batch",
    "train.validate_every",
    "train.loss_chunk",
    "optimizer.implementation",
    "optimizer.offload",
    "optimizer.offload_dir",
    "outer.offload",
}


def _config(folder: Path) -> dict[str, Any]:
    """Return the tables of a checkpoint's config.toml; none if it lacks the file or has another."""
    try:
        with open_own(folder / "config.toml") as file:
            return tomllib.load(file)
    except (OSError, ValueError, RecursionError):
        return {}


def islands_of(folder: Path) -> int:
    """Return how many islands the run of a checkpoint had; 0 if it does not say."""
    was = _config(folder)
    try:
        return int(was["parallel"]["dp_replicate"]) if was["outer"]["every"] else 1
    except (KeyError, TypeError, ValueError):
        return 0


def changes(folder: Path, config: Config) -> list[str]:
    """List the keys that decide how a run trains on, and that have changed since a checkpoint.

    Data are compared elsewhere. The mesh is left out, since it changes nothing.
    """
    was, now, found = _config(folder), tomllib.loads(dump(config)), []
    for table in ("model", "train", "optimizer", "precision", "outer"):
        before: Any = was.get(table)
        for key, value in now[table].items() if isinstance(before, dict) else ():
            same = key not in before or before[key] == value
            if not same and f"{table}.{key}" not in _SAME_TRAINING:
                shown = toml_value(value), toml_value(before[key])
                found.append(f"{table}.{key} = {shown[0]} (was {shown[1]})")
    return found
