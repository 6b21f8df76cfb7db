"""Hugging Face folders as a config names them: [model] from config.json, and the hub's local cache.

The hub's client keeps a model ORG/NAME in the folder models--ORG--NAME. The file refs/main there has
the name of a folder in snapshots/, whose files are links to blobs/. Nothing is downloaded here.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast

from pydantic import AfterValidator

from compose.config.json_files import read_json
from compose.config.models import model_names, module_of, training_fields
from compose.errors import ConfigError, read_own, refuse_link_out
from compose.object_storage import AnyPath

if TYPE_CHECKING:
    from compose.checkpoint.hf_stored import Stored

HF = "hf"
"""The preset that takes every field of the model from the folder ``checkpoint.load_hf``."""
# Names as the hub has them: up to 96 letters, digits and any of -_. with none of -. at an end.
_HUB = re.compile(r"(?=.{,96}$)(?:\w[\w.-]*(?<=\w)/)?\w[\w.-]*(?<=\w)", re.ASCII)
_REVISION = re.compile(r"[0-9a-f]{40}")


class HuggingFace(Protocol):
    """The interface of ``models/<name>/hf.py``."""

    MODEL_TYPES: Sequence[str]  # the values of model_type in config.json that the model can express
    hf_name: "Callable[..., str | Stored]"
    """It returns Hugging Face's name of a tensor, or a Stored where theirs is not as ours."""
    hf_config: Callable[[Any], dict[str, Any]]
    """It returns the content of config.json for our config."""
    config_from_hf: Callable[[Mapping[str, Any]], Any]
    """It returns our config for the content of config.json."""


def find_hf(name: str) -> HuggingFace:
    """Return the hf.py of a model, by its name as in ``find_model``."""
    try:
        if importlib.util.find_spec(module := f"{module_of(name)}.hf"):
            return cast(HuggingFace, importlib.import_module(module))
    except ImportError as error:
        raise ConfigError(f"{name}: hf.py cannot be imported: {error}") from None
    where = name if os.path.isabs(name) else f"models/{name}"
    raise ConfigError(f"{where}: has no hf.py, with Hugging Face's names of its weights")


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json in ``folder``."""
    path = folder / "config.json"
    refuse_link_out(path, folder)
    return read_json(path, dict[str, Any])


def described_model(folder: Path, own: str = "", chosen: str = "") -> tuple[str, Any]:
    """Return the name and the config of the model that config.json in ``folder`` describes.

    ``own``: the name of the one model that it may be; "": any packaged or installed one.
    ``chosen``: the name that decides if several models fit.
    """
    if not folder.is_dir():
        raise ConfigError(no_folder(folder))
    values, names = read_config(folder), [own] if own else model_names()
    kind = values.get("model_type")
    known = {name: _model_types(name) for name in names}
    fitting = [name for name in names if kind in known[name]]
    fitting = [chosen] if chosen in fitting else fitting
    path = folder / "config.json"
    if not fitting:
        every = ", ".join(sorted({one for types in known.values() for one in types}))
        raise ConfigError(
            f"{path}: model_type: {kind!r} is no model here (known: {every}); docs/new-architecture.md"
            " says how to add one"
        )
    if len(fitting) > 1:
        raise ConfigError(
            f"{path}: model_type: {kind!r} is {' and '.join(fitting)} of models/; set model.name (for"
            " convert in the file of --config)"
        )
    try:
        return fitting[0], find_hf(fitting[0]).config_from_hf(values)
    except (ValueError, ArithmeticError) as error:
        raise ConfigError(f"{path}: {error}") from None


def left_out(folder: Path) -> str:
    """Return a line on layers that a folder has and no model here; "" if there are none."""
    with contextlib.suppress(ConfigError):  # whoever reads the model says what is wrong
        values = read_config(folder)
        for key in ("num_nextn_predict_layers", "num_mtp_layers"):
            if isinstance(values.get(key), int) and values[key] > 0:
                return (
                    f"{folder}: {key} = {values[key]}: layers of multi-token prediction are left out,"
                    " neither trained nor exported"
                )
    return ""


def _model_types(name: str) -> Sequence[str]:
    try:
        return find_hf(name).MODEL_TYPES
    except ConfigError:
        return ()


def config_problems(folder: Path, name: str, config: Any) -> list[str]:
    """Return one line for each field that changes results and differs from the folder's config.json."""
    try:
        hf = find_hf(name)
        theirs = hf.config_from_hf(read_config(folder))
    except (ValueError, ArithmeticError) as error:
        return [f"{folder}/config.json: {error}"]
    except ConfigError as error:
        return error.problems
    # Convert forward and backward, so that fields without use in such a model become equal.
    its, ours = (_round_trip(hf, one) for one in (theirs, config))
    fields = [f.name for f in dataclasses.fields(config) if f.name not in training_fields(config)]
    other = [field for field in fields if getattr(its, field) != getattr(ours, field)]
    # Show the given values if they differ; else the converted ones.
    for one, two in ((theirs, config), (its, ours)):
        problems = [
            f"{folder}: is a model with {field} = {getattr(one, field)}, not {getattr(two, field)}"
            for field in other
            if getattr(one, field) != getattr(two, field)
        ]
        if problems:
            return problems
    return []


def _round_trip(hf: HuggingFace, config: Any) -> Any:
    with contextlib.suppress(ValueError, ArithmeticError):
        return hf.config_from_hf(hf.hf_config(config))
    return config


def model_folder(text: str) -> str:
    """Return the folder of a name of the hub, if the hub's local cache has it; else ``text``."""
    if not _HUB.fullmatch(text) or "--" in text or ".." in text or Path(text).exists():
        return text
    place = _cache() / f"models--{text.replace('/', '--')}"
    try:
        revision = read_own(place / "refs/main").decode("ascii").strip()
    except (OSError, ValueError):
        return text
    folder = place / "snapshots" / revision
    return str(folder) if _REVISION.fullmatch(revision) and folder.is_dir() else text


def _cache() -> Path:
    """Return the hub's cache, by the variables of its client."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{home}/huggingface"
    place = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(place)).expanduser()


def hub_name(folder: str | Path) -> str:
    """Return the hub's name of a model whose snapshot ``folder`` is; "" for any other folder."""
    snapshots, place = Path(folder).parent, Path(folder).parent.parent
    if snapshots.name != "snapshots" or not place.name.startswith("models--"):
        return ""
    return place.name.removeprefix("models--").replace("--", "/")


def no_folder(text: str | Path) -> str:
    """Return the line for a model's folder that is not there."""
    return unfetched(text) or f"{text}: no such folder"


def unfetched(text: str | Path) -> str:
    """Return the line for a name of the hub that is not in its cache; "" for any other text."""
    text = str(text)
    named = "/" in text and _HUB.fullmatch(text) and not text.endswith(".json")
    if not named or Path(text).parent.exists():
        return ""
    return (
        f"{text}: is no folder; as a name of Hugging Face's hub it is not in the local cache"
        f" ({_cache()}), and nothing is downloaded here; fetch it with: hf download {text} --local-dir"
        f" {text.rpartition('/')[2]}"
    )


ModelFolderPath = Annotated[AnyPath, AfterValidator(model_folder)]
"""The type of a key with a model's folder, or a name of the hub."""
