"""The question of a plan: which model on which devices, in a file or one line, and what may change."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from compose.checkpoint.hf_folder import model_in
from compose.cli.command_line import ParsedWords, flag_error, model_path, named_path, number_of
from compose.config.models import ModelFolder, find_model, max_seq_len, model_names
from compose.config.tables import Config
from compose.config.toml import COMMAND_LINE, given_keys, load, nearest_key, values_of, without_file
from compose.errors import did_you_mean, toml_value, whole_number
from compose.parallel.mesh import divisors
from compose.planner.candidates import DEGREES, FREED, REFINED, TRIED, with_keys
from compose.planner.cluster import Cluster, cluster_names, load_cluster
from compose.planner.estimate import weakest

SEQ_LEN = 4096
"""Tokens of a sample, if a question names no other number."""


def _llama(dim: int, n_layers: int, n_heads: int, hidden_dim: int) -> tuple[str, dict[str, Any]]:
    """Return a shape of Llama 1, which Llama 2's 7B and 13B share (arXiv:2302.13971, table 2)."""
    sizes = {"dim": dim, "n_layers": n_layers, "n_heads": n_heads, "hidden_dim": hidden_dim}
    return "llama", sizes | {"n_kv_heads": n_heads, "vocab_size": 32_000, "rope_theta": 10_000.0}


# GPT-3's sizes (arXiv:2005.14165, table 2.1), with the padded vocabulary of Narayanan et al. 2021
# (arXiv:2104.04473, section 5).
_GPT3 = {"dim": 12_288, "n_layers": 96, "n_heads": 96, "hidden_dim": 49_152, "vocab_size": 51_200}
# Dense shapes by the size that people name, from small to large. A preset's sizes are Llama 3's
# (arXiv:2407.21783, table 3).
STANDARD: Mapping[str, tuple[str, dict[str, Any]]] = {
    "1b": ("llama", {"preset": "1b"}),
    "3b": ("llama", {"preset": "3b"}),
    "7b": _llama(4096, 32, 32, 11_008),
    "8b": ("llama", {"preset": "8b"}),
    # No published model: Llama 3's 8B with ten layers more, as in
    # recipes/llama_10b_2x24gb_offload_fp16.toml.
    "10b": ("llama", {"preset": "8b", "n_layers": 42}),
    "13b": _llama(5120, 40, 40, 13_824),
    "30b": _llama(6656, 60, 52, 17_920),
    "33b": _llama(6656, 60, 52, 17_920),
    "65b": _llama(8192, 80, 64, 22_016),
    "70b": ("llama", {"preset": "70b"}),
    "175b": ("gpt2", {**_GPT3, "max_seq_len": 2048}),
    "405b": ("llama", {"preset": "405b"}),
}
# Tokens of a step by the least number of parameters: GPT-3's 125M to 760M took 0.5M, its 1.3B and 2.7B
# took 1M (arXiv:2005.14165, table 2.1), Llama 1 and 2 took 4M from 7B on (arXiv:2302.13971, table 2;
# arXiv:2307.09288, section 2.2), Llama 3's 405B took 16M (arXiv:2407.21783, section 3.4.1).
_BATCHES = ((400e9, 2**24), (6e9, 2**22), (1e9, 2**20), (0.0, 2**19))
_NICKNAMES = {"a100": "a100_80gb", "h100": "h100_sxm"}
_SUFFIXES = {"M": 1e6, "B": 1e9, "T": 1e12}

_FOLLOW = ("parallel.pp_virtual_stages", "parallel.pp_layers", "parallel.zero3_reshard")
"""Keys of a mesh of the file's, which another mesh does without."""
KNOWN = (*DEGREES, *TRIED, "parallel.offload", *REFINED, *FREED, *_FOLLOW)
"""Keys that a search may change."""
_PRECISION = "precision.param"


@dataclass(frozen=True)
class Question:
    """The model and the devices of a plan, from a file or from one line."""

    config: Config
    cluster: Cluster
    world_size: int
    where: str
    """The file, or the command line: messages about the config begin with it."""
    given: Mapping[str, str]
    """The file that sets each key, or the command line."""
    keys: tuple[tuple[str, str], ...] = ()
    """Keys that the question sets in place of a file, with the text of their values."""
    batches: tuple[int, ...] = ()
    """Samples of a step by --batch."""
    words: str = ""
    """The question, with what it left open."""
    changed: tuple[str, ...] = ()
    """Keys of a file that have another value here, for the devices."""
    kinds: tuple[tuple[Cluster, int], ...] = ()
    """The kinds of device, if there are several, of which ``cluster`` is the weakest."""


def read_question(given: ParsedWords) -> Question:
    """Return the model and the devices of a command line of plan."""
    kinds, batches = _devices(given), _batches(given)
    (first, _), *others = kinds
    world_size = sum(ranks for _, ranks in kinds)
    cluster, kinds = (weakest(kinds), kinds) if others else (first, ())
    if "--model" not in given.flags:
        # These take the place of a file's keys.
        if seq_len := number_of(given, "--seq-len", "tokens"):
            given.overrides.append(("train.seq_len", str(seq_len)))
        if batches:
            given.overrides.append(("train.global_batch", str(batches[0])))
        config, where = load(given.file, given.overrides), given.file
        origins = given_keys(where, given.overrides)
        return Question(config, cluster, world_size, where, origins, batches=batches, kinds=kinds)
    if given.plain:
        raise flag_error("--model", f"takes the place of {given.plain[0]}; give one of them")
    model = given.flags["--model"]
    keys = model_keys(model)
    if "bfloat16" in cluster.device.peak:
        keys.append(("precision.param", "bfloat16"))
    shaped = without_file([*keys, *(pair for pair in given.overrides if pair[0].startswith("model."))])
    most = max_seq_len(shaped.model.config)
    seq_len = number_of(given, "--seq-len", "tokens", min(SEQ_LEN, most or SEQ_LEN))
    if most and seq_len > most and model.lower() in STANDARD:
        keys.append(("model.max_seq_len", str(seq_len)))
    count = parameters(shaped)
    batch = batches[0] if batches else default_batch(count, seq_len, world_size)
    keys += [("train.seq_len", str(seq_len)), ("train.global_batch", str(batch))]
    config = without_file([*keys, *given.overrides])
    words = question_words(model, count, config, bool(batches))
    origins = {key: COMMAND_LINE for key, _ in (*keys, *given.overrides)}
    named = COMMAND_LINE, origins, tuple(keys), batches, words
    return Question(config, cluster, world_size, *named, kinds=kinds)


def question_words(model: str, count: float, config: Config, batch_given: bool) -> str:
    """Return a question, with what it left open, for a model of ``count`` parameters."""
    train = config.train
    size = f"{count / 1e9:,.3g}B" if count < 999.5e9 else amount_in_words(count)
    rule = "" if batch_given else ", by the rule for its size; --batch sets another"
    return (
        f"{model}: {size} parameters in {config.precision.param}, {train.seq_len:,} tokens"
        f" a sample, {train.global_batch:,} samples a step"
        f" ({amount_in_words(train.global_batch * train.seq_len)} tokens{rule})"
    )


def _devices(given: ParsedWords) -> tuple[tuple[Cluster, int], ...]:
    if "--gpus" not in given.flags:
        if not given.flags.get("--cluster") or not given.flags.get("--world-size"):
            raise flag_error("plan", "needs --gpus, as 16xa100_40gb, or --cluster and --world-size")
        ranks = number_of(given, "--world-size", "ranks")
        return ((load_cluster(given.flags["--cluster"]), ranks),)
    for flag in ("--cluster", "--world-size"):
        if flag in given.flags:
            raise flag_error("--gpus", f"takes the place of {flag}; give one of them")
    named = [gpus(text) for text in given.flags["--gpus"].split("+")]
    kinds = tuple((load_cluster(name), count) for name, count in named)
    if len(kinds) > 1:
        _check_kinds(kinds)
    return kinds


def _check_kinds(kinds: tuple[tuple[Cluster, int], ...]) -> None:
    """Raise ConfigError unless nodes of several kinds of device can be one cluster."""
    first, common = kinds[0][0], {*kinds[0][0].device.peak}
    for cluster, ranks in kinds:
        if (cluster.node, cluster.backend) != (first.node, first.backend):
            raise flag_error(
                "--gpus",
                f"{cluster.name} has nodes of {cluster.node} devices for {cluster.backend}, and"
                f" {first.name} of {first.node} for {first.backend}; they should be equal",
            )
        if ranks % cluster.node:
            raise flag_error(
                "--gpus",
                f"{ranks}x{cluster.name} is no whole number of nodes of {cluster.node}, as kinds of"
                " devices side by side need",
            )
        common &= cluster.device.peak.keys()
        if not common:
            raise flag_error("--gpus", f"{cluster.name} and {first.name} have no type in common")


def gpus(text: str) -> tuple[str, int]:
    """Return the cluster and the number of devices of a text as ``16xa100_40gb``."""
    number, _, name = text.partition("x")
    count = whole_number(number)
    if not 1 <= count < 2**31 or not name:
        raise flag_error("--gpus", f"{text} is no number of devices of a cluster, as 16xa100_40gb")
    if name.endswith(".toml"):
        return named_path(name, "--gpus: "), count
    known, plain = cluster_names(), name.lower()
    if plain in known or plain in _NICKNAMES:
        return _NICKNAMES.get(plain, plain), count
    near = [one for one in known if one.startswith(plain)] or [one for one in known if plain in one]
    if len(near) != 1:
        hint = (
            f"; it may be {' or '.join(near)}" if near else did_you_mean(plain, [*known, *_NICKNAMES])
        )
        raise flag_error(
            "--gpus",
            f"{name} is no cluster{hint} (known: {', '.join(known)}; or the path of a .toml file)",
        )
    return near[0], count


def model_keys(text: str) -> list[tuple[str, str]]:
    """Return the keys of [model] for a standard size, a preset, or a folder of Hugging Face."""
    path = model_path(text, "--model: ")
    if path.is_dir() or path.suffix == ".json" or len(path.parts) > 1:
        if path.suffix == ".json" and path.name != "config.json":
            raise flag_error("--model", f"{text} should be a config.json, or a folder with one")
        model = model_in(path.parent if path.suffix == ".json" else path)
        values = {f.name: getattr(model.config, f.name) for f in fields(model.config)}
        return [("model.name", model.name), *_as_keys(values)]
    plain = text.lower()
    if plain in STANDARD:
        name, values = STANDARD[plain]
        return [("model.name", name), *_as_keys(values)]
    folders = {name: find_model(name) for name in model_names()}
    name, colon, preset = plain.replace("-", "_").partition(":")
    named = [one for one in folders if one == name] or [one for one in folders if one.startswith(name)]
    if len(named) == 1 and name:
        return _of_preset(folders[named[0]], preset, text)
    owners = [one for one in folders if not colon and name in folders[one].presets]
    if len(owners) == 1:
        return _of_preset(folders[owners[0]], name, text)
    presets = [f"{one}:{preset}" for one in folders for preset in folders[one].presets]
    if owners:
        every = " or ".join(f"{one}:{name}" for one in owners)
        raise flag_error("--model", f"{text} is a preset of several models; say {every}")
    near = did_you_mean(plain, [*STANDARD, *presets])
    if plain.endswith("b") and (size := whole_number(plain[:-1])) > 0:
        near = f"; did you mean {min(STANDARD, key=lambda one: abs(int(one[:-1]) - size))}?"
    raise flag_error(
        "--model",
        f"{text} is no model{near} (known: {', '.join(STANDARD)}; a preset, as mixtral:8x7b; or a"
        " folder with Hugging Face's config.json)",
    )


def _of_preset(folder: ModelFolder, preset: str, text: str) -> list[tuple[str, str]]:
    if preset not in folder.presets:
        near = did_you_mean(preset, folder.presets) if preset else ""
        what = f"{text} names no preset of {folder.name}{near}"
        known = ", ".join(f"{folder.name}:{one}" for one in folder.presets if one != "debug")
        raise flag_error("--model", f"{what} (known: {known})")
    return [("model.name", folder.name), ("model.preset", preset)]


def _as_keys(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (f"model.{key}", value if isinstance(value, str) else toml_value(value))
        for key, value in values.items()
    ]


def parameters(config: Config) -> int:
    """Return the number of a model's parameters."""
    model = find_model(config.model.name).on_meta(config.model.config)
    return sum(p.numel() for p in model.parameters())


def default_batch(count: float, seq_len: int, world_size: int) -> int:
    """Return the samples of a step for a model of ``count`` parameters.

    They are as many tokens as published models of its size took, rounded so that the devices share
    them: to a multiple of the devices, of up to 8 samples each so that micro-batches of 8 are possible,
    or to the nearest number that divides the devices.
    """
    tokens = next(tokens for least, tokens in _BATCHES if count >= least)
    samples = max(1, tokens // seq_len)
    if samples >= world_size:
        unit = world_size * max(n for n in (1, 2, 4, 8) if n * world_size <= samples)
        return round(samples / unit) * unit
    return min(divisors(world_size), key=lambda n: abs(math.log(n / samples)))


def _batches(given: ParsedWords) -> tuple[int, ...]:
    text = given.flags.get("--batch")
    if text is None:
        return ()
    values = [whole_number(one) for one in text.split(",")]
    if not all(1 <= value < 2**31 for value in values):
        raise flag_error("--batch", f"{text} is no number of samples a step, as 512 or 256,512,1024")
    return tuple(dict.fromkeys(values))


def amount(given: ParsedWords, flag: str, default: float = 0.0) -> float:
    """Return the number after a flag: 15e12, or with a suffix as 300B or 1T; or ``default``, if any."""
    text = given.flags.get(flag, "")
    if default and flag not in given.flags:
        return default
    unit = _SUFFIXES.get(text[-1:].upper(), 1.0)
    try:
        value = unit * float(text[:-1] if unit > 1 else text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        what = f"{text} is not" if text else "--objective devices needs"
        example = "15e12 or 1T" if flag == "--tokens" else "30"
        raise flag_error(flag, f"{what} a number above 0, as {example}")
    return value


def amount_in_words(tokens: float) -> str:
    """Return a number of tokens with a suffix, as 4.19M or 1T."""
    for suffix, size in reversed(_SUFFIXES.items()):
        if tokens >= size:
            return f"{tokens / size:.4g}{suffix}"
    return f"{tokens:,.0f}"


def pinned(given: ParsedWords, question: Question) -> dict[str, str]:
    """Return the keys that the search must not change, each with what pins it.

    The command line and --keep pin a key. A file pins it by another value than the default, but for
    degrees and what belongs to them, which a plan looks for. --free releases one.
    """
    free = _names(given, "--free", KNOWN)
    values, defaults = values_of(question.config), values_of(without_file(()))
    kept = _names(given, "--keep", values)
    if both := [key for key in kept if key in free]:
        raise flag_error("--keep", f"--free names {both[0]} too; remove one of them")
    result: dict[str, str] = {}
    for key in (*(key for key in KNOWN if key not in FREED), *kept):
        origin = "--keep" if key in kept else question.given.get(key, "")
        asked = origin == COMMAND_LINE or origin.startswith("--")
        own = key not in (*DEGREES, *_FOLLOW) and values[key] != defaults[key]
        if asked or (origin and own):
            result[key] = origin
    return {key: by for key, by in result.items() if key not in free}


def freed(given: ParsedWords) -> frozenset[str]:
    """Return the keys of FREED that --free names."""
    return frozenset(_names(given, "--free", KNOWN)) & set(FREED)


def pinned_words(config: Config, pins: Mapping[str, str]) -> str:
    """Return one line on what is pinned and by what; empty if nothing is."""
    values = values_of(config)
    parts = [f"{key} = {toml_value(values[key])} ({by})" for key, by in pins.items()]
    return f"pinned: {', '.join(parts)}; --free KEY releases one" if parts else ""


def for_devices(given: ParsedWords, question: Question) -> Question:
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


def _names(given: ParsedWords, flag: str, known: Any) -> list[str]:
    names = [name for name in given.flags.get(flag, "").split(",") if name]
    for name in names:
        if name not in known:
            near = did_you_mean(name, known)
            if flag == "--keep":
                raise flag_error(flag, f"{name} is no key{near or nearest_key(name)}")
            raise flag_error(flag, f"{name} is no key that is tried{near} (known: {', '.join(known)})")
    return names
