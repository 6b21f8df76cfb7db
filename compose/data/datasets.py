"""The data of a run: its task, the sets that [data] names, and the tokenizer that it keeps."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compose.config.addons import provided
from compose.config.models import Sampler, Task, find_model
from compose.config.tables import Config, Train
from compose.data import tokenizer
from compose.data.batches import Batches
from compose.data.chat_template import template_texts
from compose.data.generation_config import end_ids
from compose.data.samples import Samples, open_samples, random_batch
from compose.data.special_tokens import CONFIG, GENERATION, MODEL, read_beside
from compose.errors import ConfigError, noted, or_say, refused_in, write_whole
from compose.object_storage import as_path
from compose.ops.batch import count_targets
from compose.parallel.output_projection import CrossEntropy


class LanguageModelling:
    """To predict the next token; the task of a model whose folder names no other."""

    sampler: Sampler | None = None

    def check(self, config: Config) -> list[str]:
        """Return no problems: the keys of train.toml are those of a language model."""
        return []

    def open(self, path: str, config: Config) -> Samples:
        """Open tokens; see ``compose.config.models.Task.open``."""
        seq_len = config.train.seq_len
        samples = open_samples(path, config.data, seq_len, config.model.config.vocab_size)
        # Most often the first sample has a target.
        if not any(count_targets(samples.read(i)["targets"]) for i in range(len(samples))):
            raise ConfigError(
                f"{path} has nothing to learn: no token of its {len(samples)} samples of train.seq_len"
                f" {seq_len} is a target"
            )
        return samples

    def random_batch(self, config: Config, samples: int, seed: int) -> dict[str, Tensor]:
        """Return random documents; see ``compose.data.samples.random_batch``."""
        return random_batch(samples, config.train.seq_len, config.model.config.vocab_size, seed)

    def loss(self, config: Config) -> CrossEntropy:
        """Return the cross-entropy that ``train.loss_chunk`` and ``train.z_loss`` ask for."""
        return CrossEntropy(config.train.loss_chunk, config.train.z_loss)


def task_of(config: Config) -> Task:
    """Return the task that the model of ``config`` learns: its folder's own, or an add-on's."""
    own = find_model(config.model.name).task
    others = (task(config) for _, task in provided("task"))
    return own or next(filter(None, others), None) or LanguageModelling()


class OpenData(NamedTuple):
    """The opened data of a run."""

    sets: Sequence[Samples]
    weights: Sequence[Fraction] | None
    """The numbers of ``data.weights``; None means weights by size."""
    validation: Samples | None

    def check_epochs(self, epochs: float, train: Train, step: int, samples: int) -> None:
        """Raise ConfigError if ``step`` steps had other batches than :func:`with_steps` counts."""
        if not epochs or samples == step * train.global_batch:
            return
        left = Fraction(repr(epochs)) * sum(map(len, self.sets)) - samples
        raise ConfigError(
            f"train.epochs: {epochs:g} is not {train.steps} steps: the {step} before had {samples:,}"
            f" samples, with another train.global_batch than {train.global_batch}; use that again, or"
            f" train.steps = {step + max(0, math.ceil(left / train.global_batch))}"
        )


def open_data(config: Config) -> OpenData:
    """Open the sets of ``[data]``, and check them against the model and ``checkpoint.load_hf``."""
    data, task, problems = config.data, task_of(config), list[str]()

    def opened(key: str, path: str) -> list[Samples]:
        with noted(problems), refused_in(f"data.{key}"):
            return [task.open(path, config)]
        return []

    paths = (data.path,) if isinstance(data.path, str) else data.path
    paths = paths if any(paths) else ()
    problems += [f"data.path: {path} is named twice" for path in set(paths) if paths.count(path) > 1]
    if not paths:
        problems.append("data.path: names nothing")
    if data.weights and len(data.weights) != len(paths):
        problems.append(
            f"data.weights: has {len(data.weights)} numbers for the {len(paths)} of data.path"
        )
    sets = [samples for path in paths for samples in opened("path", path)]
    compared = [] if problems else list(sets)
    validation = opened("validation", data.validation) if data.validation else []
    compared += validation
    known = [(each.name, each.tokenizer) for each in compared if each.tokenizer is not None]
    folder = as_path(config.checkpoint.load_hf)
    if config.checkpoint.load_hf and (folder / tokenizer.FILE).exists():
        with noted(problems):
            known.insert(0, (str(folder), tokenizer.open_tokenizer(folder).sha256))
    shown = [f"sha256 {sha256[:12]}" if sha256 else "bytes" for _, sha256 in known]
    problems += [
        f"data: {name} is of another tokenizer ({its}) than {known[0][0]} ({shown[0]}); tokenize both"
        " with the same tokenizer.json"
        for (name, sha256), its in zip(known[1:], shown[1:], strict=True)
        if sha256 != known[0][1]
    ]
    chats = [each for each in compared if each.token_set and each.token_set.manifest.kind != "text"]
    with noted(problems):
        problems += _template_problems(chats if len(chats) > 1 else [])
    if problems:
        raise ConfigError(*problems)
    # The exact decimal number: 0.1 has no exact binary fraction.
    weights = [Fraction(str(weight)) for weight in data.weights] or None
    return OpenData(sets, weights, next(iter(validation), None))


def _template_problems(chats: Sequence[Samples]) -> Iterator[str]:
    """Yield why sets of chats do not go together: a run learns, and keeps, one chat template."""
    texts = {each.name: template_texts(each.token_set.path) for each in chats if each.token_set}
    (first, wanted), *others = [pair for pair in texts.items() if pair[1]] or [("", {})]
    for name, text in others:
        if text != wanted:
            why = f"{name} was written by another chat template than {first}"
            yield f"data: {why}; tokenize both with the same one"


def training_batches(
    config: Config, data: OpenData, share: tuple[int, int] = (0, 1), device: torch.device | None = None
) -> Batches:
    """Return the batches of a run, cut for one rank."""
    size, seed = config.train.global_batch, config.train.seed
    return Batches(
        data.sets, global_batch=size, seed=seed, weights=data.weights, share=share, device=device
    )


def with_steps(config: Config, data: OpenData) -> Config:
    """Return the config with the ``train.steps`` that ``train.epochs`` comes to, if it is set.

    An epoch has as many samples as all sets together. Batches go on over its end, so nothing is
    dropped: the last batch is filled up with samples of the next epoch.
    """
    train = config.train
    if not train.epochs:
        return config
    samples = Fraction(repr(train.epochs)) * sum(map(len, data.sets))
    return replace(
        config, train=replace(train, steps=math.ceil(samples / train.global_batch), epochs=0.0)
    )


def described(batches: Batches, config: Config, validation: Samples | None = None) -> dict[str, Any]:
    """Return everything that decides the tokens of sample n of a run, for a checkpoint."""
    tokenizers = (each.tokenizer for each in batches.sets if each.tokenizer is not None)
    return {
        "tokenizer": next(tokenizers, None),
        "samples": [len(each) for each in batches.sets],
        "content": [each.content for each in batches.sets],
        **({"validation": validation.content} if validation else {}),
        "separators": [getattr(each, "separator", None) for each in batches.sets],
        "weights": list(config.data.weights),
        "seq_len": config.train.seq_len,
        "seed": config.train.seed,
    }


def tokenizer_of(config: Config, sets: Sequence[Samples]) -> tokenizer.Tokenizer:
    """Return the tokenizer of the data, or else that of ``checkpoint.load_hf``."""
    folders = [each.token_set.path for each in sets if each.token_set]
    original = config.checkpoint.load_hf
    folders += [as_path(original)] if original else []
    for folder in folders:
        if (folder / tokenizer.FILE).exists():
            return tokenizer.open_tokenizer(folder)
    if all(each.tokenizer == "" for each in sets):
        return tokenizer.ByteTokenizer()
    raise ConfigError(
        f"metrics.prompts: {sets[0].name} has no tokenizer to encode them; use a folder of compose"
        " tokenize, or metrics.samples_every = 0"
    )


def keep_tokenizer(config: Config, batches: Batches, folder: Path) -> None:
    """Copy the token files of ``checkpoint.load_hf`` and the tokenizer of the data into a folder."""
    original, sets = as_path(config.checkpoint.load_hf), [each.token_set for each in batches.sets]
    sources = [each.path for each in sets if each and (each.path / tokenizer.FILE).exists()]
    # A resumed run may be older than its first folder, which may be gone.
    begun = bool(config.checkpoint.load_hf) and (original / MODEL).exists()
    if (begun or sources) and folder.is_symlink():
        raise ConfigError(f"run.dir: {folder}: is a link; remove it, as a run writes there")
    with or_say(f"run.dir: {folder}: cannot be written"):
        if begun:
            tokenizer.copy_with_config(original, folder)
        if sources:  # with the chat template that the run learns
            tokenizer.copy_tokenizer(sources[0], folder)
            _drop_others(folder, sources[0])
            _note_ends(folder, [each.manifest.tokenizer.end for each in sets if each])


def _drop_others(folder: Path, source: Path) -> None:
    """Remove files from a folder that would contradict a tokenizer_config.json in it."""
    own = {path.name for path in tokenizer.tokenizer_files(source)}
    for path in tokenizer.tokenizer_files(folder) if CONFIG in own else ():
        if path.name not in own and path.name.startswith(("added_", "chat_", "special_")):
            path.unlink()


def _note_ends(folder: Path, ends: Sequence[int]) -> None:
    """Add the tokens that end the documents to generation_config.json, unless a file names them."""
    path, known = folder / GENERATION, end_ids(tokenizer.open_tokenizer(folder))
    more = [each for each in dict.fromkeys(ends) if each >= 0 and each not in known]
    if more:
        values = read_beside(folder, GENERATION)
        write_whole(path, json.dumps(values | {"eos_token_id": [*known, *more]}, indent=2))
