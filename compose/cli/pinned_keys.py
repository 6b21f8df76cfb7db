"""The keys that a plan keeps, and who pins them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compose.cli.command_line import Words, flag_error
from compose.cli.question import Question
from compose.config.tables import Config
from compose.config.toml import COMMAND_LINE, nearest_key, values_of, without_file
from compose.errors import did_you_mean, toml_value
from compose.planner.candidates import DEGREES, FREED, REFINED, TRIED, with_keys

_FOLLOW = ("parallel.pp_virtual_stages", "parallel.pp_layers", "parallel.zero3_reshard")
"""Keys of a mesh of the file's, which another mesh does without."""
KNOWN = (*DEGREES, *TRIED, "parallel.offload", *REFINED, *FREED, *_FOLLOW)
"""Keys that a search may change."""
_PRECISION = "precision.param"


def pinned(given: Words, question: Question) -> dict[str, str]:
    """Return the keys that the search must not change, each with what pins it.

    The command line and --keep pin a key. A file pins it by another value than the default, but for
    degrees, which a plan looks for. --free releases one.
    """
    free = _names(given, "--free", KNOWN)
    kept = _names(given, "--keep", [f"{t}.{key}" for t, key, _ in values_of(question.config)])
    values, defaults = _values(question.config), _values(without_file(()))
    result: dict[str, str] = {}
    for key in (*(key for key in KNOWN if key not in FREED), *kept):
        origin = question.given.get(key, "")
        if key in kept:
            result[key] = "--keep"
        elif origin == COMMAND_LINE:
            result[key] = COMMAND_LINE
        elif origin and key not in DEGREES and values[key] != defaults[key]:
            result[key] = origin
    return {key: by for key, by in result.items() if key not in free}


def freed(given: Words) -> frozenset[str]:
    """Return the keys of FREED that --free names."""
    return frozenset(_names(given, "--free", KNOWN)) & set(FREED)


def pinned_words(config: Config, pins: Mapping[str, str]) -> str:
    """Return one line on what is pinned and by what; empty if nothing is."""
    values = _values(config)
    parts = [f"{key} = {toml_value(values[key])} ({by})" for key, by in pins.items()]
    return f"pinned: {', '.join(parts)}; --free KEY releases one" if parts else ""


def for_devices(given: Words, question: Question) -> Question:
    """Return the question in bfloat16 on a GPU, if it leaves the type at its default."""
    of_key = question.given.get(_PRECISION, "")
    kept = of_key == COMMAND_LINE or _PRECISION in given.flags.get("--keep", "").split(",")
    default = question.config.precision.param == Config().precision.param
    cluster = question.cluster
    if question.keys or kept or not default or cluster.backend != "nccl":
        return question
    if "bfloat16" not in cluster.device.peak:
        return question
    config = with_keys(question.config, {_PRECISION: "bfloat16"})
    words = f"{_PRECISION} is bfloat16 on these devices; --keep {_PRECISION} keeps float32"
    return replace(question, config=config, changed=(_PRECISION,), words=words)


def _values(config: Config) -> dict[str, Any]:
    return {f"{table}.{key}": value for table, key, value in values_of(config)}


def _names(given: Words, flag: str, known: Any) -> list[str]:
    names = [name for name in given.flags.get(flag, "").split(",") if name]
    for name in names:
        if name not in known:
            near = did_you_mean(name, known)
            if flag == "--keep":
                raise flag_error(flag, f"{name} is no key{near or nearest_key(name)}")
            raise flag_error(flag, f"{name} is no key that is tried{near} (known: {', '.join(known)})")
    return names
