"""Tells what a named folder holds: a checkpoint, a run, or a Hugging Face model."""

from collections.abc import Sequence
from pathlib import Path

from compose.checkpoint import store
from compose.checkpoint.hf_folder import find_hf, read_config
from compose.checkpoint.metadata import METADATA, PICKLED
from compose.checkpoint.safetensors_files import INDEX, WHOLE
from compose.config.models import model_names
from compose.config.tables import Model
from compose.config.toml import COMMAND_LINE
from compose.data.tokenizer import TOKENIZER
from compose.errors import LEADS_OUT, ConfigError, leads_out


def is_checkpoint(folder: Path) -> bool:
    """Return whether ``folder`` is one of our checkpoints; it may be damaged."""
    return any((folder / name).exists() for name in (store.MANIFEST, METADATA, PICKLED))


def kept_tokenizer(checkpoint: Path) -> Path:
    """Return the folder in which the run of a checkpoint keeps its tokenizer."""
    run = checkpoint.resolve().parent.parent  # a checkpoint is in checkpoints/
    kept = run / TOKENIZER
    if leads_out(kept, run):
        raise ConfigError(f"{kept}: {LEADS_OUT}")
    return kept


def is_hugging_face(folder: Path) -> bool:
    """Return whether ``folder`` holds a model as transformers saves it."""
    weights = any((folder / name).exists() for name in (WHOLE, INDEX))
    return weights and (folder / "config.json").exists()


def checkpoints(folder: Path) -> list[Path]:
    """Return ``folder`` if it is a checkpoint, or else all checkpoints of the run in it, newest first.

    The checkpoints may be damaged.
    """
    if not folder.is_dir():
        raise ConfigError(f"{COMMAND_LINE}: {folder}: no such folder")
    if is_checkpoint(folder):
        return [folder]
    found, root = store.newest_first(folder / "checkpoints"), folder / "checkpoints"
    outside = [path for path in (root, *found) if leads_out(path, folder)]
    if outside:
        raise ConfigError(*(f"{path}: {LEADS_OUT}" for path in outside))
    if not found:
        raise ConfigError(
            f"{COMMAND_LINE}: {folder}: is neither a checkpoint ({store.MANIFEST}) nor Hugging Face's"
            f" folder (config.json, and {WHOLE} or {INDEX})"
        )
    return found


def model_in(folder: Path) -> Model:
    """Return the model that config.json in ``folder`` describes."""
    values, names = read_config(folder), model_names()
    kind = values.get("model_type")
    known = {name: _model_types(name) for name in names}
    fitting = [name for name in names if kind in known[name]]
    path = folder / "config.json"
    if not fitting:
        every = ", ".join(sorted({one for types in known.values() for one in types}))
        raise ConfigError(f"{path}: model_type: {kind!r} is no model here (known: {every})")
    if len(fitting) > 1:
        raise ConfigError(
            f"{path}: model_type: {kind!r} is {' and '.join(fitting)} of models/; choose by --config"
        )
    try:
        return Model(name=fitting[0], config=find_hf(fitting[0]).config_from_hf(values))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _model_types(name: str) -> Sequence[str]:
    try:
        return find_hf(name).MODEL_TYPES
    except ConfigError:
        return ()
