"""The command `python -m compose generate`: it continues a text with a model, on the launch's mesh."""

import itertools
import os
import sys
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from compose.build import fill_weights, parallelize
from compose.checkpoint.hf_folder import checkpoints, is_hugging_face, kept_tokenizer, model_in
from compose.checkpoint.loading import damage, load
from compose.cli.cache import Wanted, next_logits, open_cache
from compose.cli.command_line import device_problems, launched_ranks, read_words
from compose.cli.prompts import encode_prompts, given_prompts
from compose.composition import Composition
from compose.config import rules
from compose.config.job import Job
from compose.config.models import max_seq_len
from compose.config.tables import Checkpoint, Comm, Compile, Config, Parallel, without_add_ons
from compose.config.toml import COMMAND_LINE, override, typed
from compose.config.toml import load as load_toml
from compose.data.generation_config import end_ids, repetition_penalty
from compose.data.tokenizer import FILE, Bytes, Tokenizer, open_tokenizer
from compose.errors import ConfigError, NonNegative, Positive
from compose.parallel.mesh import init_mesh
from compose.parallel.processes import process_group
from compose.weights import named_generator


@dataclass(frozen=True)
class Sampling:
    """The options for continuing a text."""

    max_tokens: Positive = 128
    """Most tokens after the prompt; the text may end before."""
    temperature: Annotated[float, Field(ge=0)] = 0.8
    """Divides the logits; 0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Sample from the fewest tokens that together have this probability."""
    seed: NonNegative = 0
    """The same seed gives the same text, on every mesh."""
    cache: Wanted = "auto"
    """Keep keys and values, so that a token runs once; "auto": where the model can have it."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits of tokens that are in the text already, from generation_config.json."""


_FLAGS = {
    "--prompt": "TEXT to continue; may be given several times",
    "--prompts": "FILE with one on each line; in .jsonl: a text, or an object with prompt or messages",
    "--chat": "",
    "--max-tokens": f"tokens after it, unless the text ends before; default {Sampling.max_tokens}",
    "--temperature": f"divides the logits; default {Sampling.temperature}; 0: the likeliest token",
    "--top-p": f"sample from the likeliest tokens, this much together; default {Sampling.top_p}",
    "--seed": f"the same gives the same text, on every mesh; default {Sampling.seed}",
    "--cache": "on, or off: every token runs the whole text again; default auto: on, where it can be",
    "--no-special-tokens": "",
    "--tokenizer": "tokenizer.json or bytes; default: the run's, or Hugging Face's folder's, or bytes",
}
_HELP = _FLAGS | {
    "--chat": "the prompt is a user's message, in the model's chat template; the reply alone is shown",
    "--no-special-tokens": "encode the prompt as ordinary text, with nothing added or recognised in it",
}
USAGE = """\
python -m compose generate CHECKPOINT --prompt TEXT [--prompts FILE] [--chat] [--max-tokens N]
    [--temperature T] [--top-p P] [--seed S] [--cache auto|on|off] [--no-special-tokens]
    [--tokenizer FILE] [--table.key=value ...]

CHECKPOINT is a checkpoint, the folder of a run, whose newest whole one is taken, or Hugging Face's
folder. Under torchrun all ranks hold the model together: parallel.dp_shard = -1 and zero = 3, if keys
say nothing else. A text ends at any end token of the tokenizer, of generation_config.json, of
config.json and of the chat template. Standard output has the texts alone; standard error says how many
tokens a prompt has. Keys and values are kept, so that each token runs once. Where that cannot be, as
with pp or cp above 1 and experts with a capacity, every token runs the whole text again.
"""


def generate(arguments: Sequence[str]) -> int:
    """Continue a text with a trained model: python -m compose generate CHECKPOINT --prompt TEXT."""
    if {"--help", "-h"} & set(arguments):
        print(USAGE, *(f"  {name:<20}{words}" for name, words in _HELP.items()), sep="\n")
        return 0
    words = read_words(arguments, _FLAGS)
    if len(words.plain) != 1:
        raise ConfigError(f"{COMMAND_LINE}: generate: needs one CHECKPOINT, got {len(words.plain)}")
    prompts, source = given_prompts(words.given), Path(words.plain[0])
    sampling = _sampling(words.flags)
    folders = [] if is_hugging_face(source) else checkpoints(source)
    job = job_of(source, folders, words.overrides)
    tokenizer = _tokenizer(words.flags.get("--tokenizer", ""), source, folders, job.config)
    beside = kept_tokenizer(folders[0]) if folders else source
    sampling = replace(sampling, repetition_penalty=repetition_penalty([beside]))
    ends, chat = end_ids(tokenizer, beside), "--chat" in words.flags
    encoded = encode_prompts(tokenizer, prompts, chat, "--no-special-tokens" not in words.flags)
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise ConfigError(f"{COMMAND_LINE}: --prompt: {prompt!r} has no token of {tokenizer.name}")
        _check_length(len(ids), sampling.max_tokens, max_seq_len(job.config.model.config))
    with process_group(job.config) as device:
        mesh = init_mesh(job.degrees, device.type)
        composition = open_model(job, folders, mesh, device)
        speaks = dist.get_rank() == 0
        for prompt, ids in zip(prompts, encoded, strict=True):
            if speaks:
                print(f"generate: a prompt of {len(ids):,} tokens", file=sys.stderr, flush=True)
            pieces = text_of(tokenizer, ids, sample(composition, ids, sampling, ends))
            next(pieces)  # the prompt, with what the tokenizer has added
            for piece in itertools.chain([] if chat else [str(prompt)], pieces):
                if speaks:
                    print(piece, end="", flush=True)
            if speaks:
                print(flush=True)
    return 0


def _sampling(flags: Mapping[str, str]) -> Sampling:
    types, given, problems = typing.get_type_hints(Sampling, include_extras=True), {}, []
    for name in types:
        flag = f"--{name.replace('_', '-')}"
        if flag not in flags:
            continue
        try:
            given[name] = typed(types[name], flags[flag], text=True)
        except ValueError as error:
            problems.append(f"{COMMAND_LINE}: {flag}: {error}")
    if problems:
        raise ConfigError(*problems)
    return Sampling(**given)


def _check_length(prompt: int, more: int, most: int | None) -> None:
    """Raise ConfigError if a model of ``most`` positions cannot take the prompt and ``more`` tokens."""
    if most is None or prompt + more <= most:
        return
    if prompt >= most:
        raise ConfigError(
            f"{COMMAND_LINE}: --prompt: has {prompt} tokens, and the model has {most} positions; give"
            f" at most {most - 1}"
        )
    raise ConfigError(
        f"{COMMAND_LINE}: --max-tokens: {more} after a prompt of {prompt} are more than the {most}"
        f" positions that the model has; nearest: {most - prompt}"
    )


def job_of(
    source: Path,
    folders: Sequence[Path],
    overrides: Sequence[tuple[str, str]],
    grows: bool = True,
) -> Job:
    """Return the job of the model in ``source``, for this launch's ranks.

    Args:
        source: A checkpoint, the folder of a run, or Hugging Face's folder.
        folders: The checkpoints, newest first; none for Hugging Face's folder.
        overrides: Keys with the text of their values.
        grows: Whether sequences are of any length; else they are of train.seq_len.

    Returns:
        The checked job.

    Raises:
        ConfigError: The model cannot run on these ranks.
    """
    if folders:
        files = [folder / "config.toml" for folder in folders]
        config = load_toml(str(next(filter(os.path.lexists, files), files[0])), alone=True)
    else:
        config = Config(
            model=model_in(source),
            checkpoint=Checkpoint(load_hf=str(source)),
            source=str(source / "config.json"),
        )
    # The length grows with each token, and each length would need a new graph.
    config = replace(without_add_ons(config), parallel=Parallel(), compile=Compile(), comm=Comm())
    config = override(config, overrides)
    ranks = launched_ranks()
    # There are no batches here, so choose sizes that are legal on every mesh.
    length = min(config.train.seq_len, max_seq_len(config.model.config) or config.train.seq_len)
    length = max(length // ranks, 1) * ranks if grows else config.train.seq_len
    train = replace(config.train, seq_len=length, global_batch=2 * ranks, micro_batch=1)
    config, problems, job = replace(config, train=train), device_problems(config), None
    try:
        job = rules.check(config, ranks)
    except ConfigError as error:
        problems = [*error.problems, *problems]
    if problems or job is None:
        raise ConfigError(*(f"{config.source}: {problem}" for problem in problems))
    return job


def _tokenizer(given: str, source: Path, folders: Sequence[Path], config: Config) -> Tokenizer:
    """Return the tokenizer. Raises ConfigError if there is none, or if the model lacks some ids."""
    size = config.model.config.vocab_size
    beside = kept_tokenizer(folders[0]) if folders else source
    there = (beside / FILE).exists()
    if given == Bytes.name or (not given and not there and size == Bytes.vocab_size):
        tokenizer: Tokenizer = Bytes()
    elif given or there:
        tokenizer = open_tokenizer(Path(given) if given else beside)
    else:
        raise ConfigError(
            f"{beside / FILE}: no such file, and model.vocab_size {size} is not that of bytes; give"
            " --tokenizer FILE, a tokenizer.json, or --tokenizer bytes"
        )
    if tokenizer.vocab_size > size:
        raise ConfigError(
            f"{tokenizer.name}: has {tokenizer.vocab_size} ids, the model's vocabulary {size}; give the"
            " --tokenizer that it was trained with"
        )
    return tokenizer


def open_model(
    job: Job, folders: Sequence[Path], mesh: DeviceMesh, device: torch.device
) -> Composition:
    """Cut the job's model over ``mesh``, and load its weights.

    The weights come from the first whole checkpoint in ``folders``. Damaged checkpoints before it are
    named on standard error. Without folders the weights come from ``checkpoint.load_hf``.

    Raises:
        ConfigError: No checkpoint is whole.
    """
    composition = parallelize(job, mesh, device)
    if not folders or job.config.model.lora.rank:  # a checkpoint of adapters has no other weights
        fill_weights(composition, job, device)
    if not folders:
        return composition
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    load(_newest_whole(folders, group), job.config, composition, group)
    return composition


def _newest_whole(folders: Sequence[Path], group: dist.ProcessGroup) -> Path:
    damaged = []
    for folder in folders:
        problems = damage(folder, group)
        if not problems:
            if damaged and group.rank() == 0:
                print(*damaged, f"{folder}: taken instead", sep="\n", file=sys.stderr)
            return folder
        damaged.append(f"{folder}: damaged: {'; '.join(problems)}")
    raise ConfigError(*damaged)


def sample(
    composition: Composition, tokens: Sequence[int], sampling: Sampling, ends: Collection[int] = ()
) -> Iterator[int]:
    """Yield the tokens with which the model continues ``tokens``, up to one of ``ends``.

    This is a collective: every rank must take all tokens, and gets the same ones. With a cache of keys
    and values (``Sampling.cache``) the prompt runs once, and then each token once. Without one, every
    token runs the whole sequence again.

    Args:
        composition: The model.
        tokens: The ids of the prompt.
        sampling: How to continue.
        ends: The ids that end the text; they are not yielded.

    Returns:
        An iterator over ids.

    Raises:
        ConfigError: The logits are not finite, or the model cannot have the cache that was asked for.
    """
    known, cache = list(tokens), open_cache(composition, sampling.cache)
    for _ in range(sampling.max_tokens):
        logits = next_logits(composition, known, cache)
        found = -1
        if logits is not None:
            logits = penalized(logits, known, sampling.repetition_penalty)
            found = sample_token(logits, len(known), sampling)
        # Ranks with logits have the same ones, except for rounding. The other ranks send -1.
        chosen = torch.tensor(found, device=composition.mesh.device_type)
        dist.all_reduce(chosen, op=dist.ReduceOp.MAX)
        token = int(chosen)
        if token in ends:
            return
        known.append(token)
        yield token


def penalized(logits: Tensor, known: Sequence[int], penalty: float) -> Tensor:
    """Make tokens less likely that are in the text already (Keskar et al. 2019, arXiv:1909.05858).

    Args:
        logits: The model's logits (V,).
        known: The text so far.
        penalty: Divides a positive logit, and multiplies a negative one.

    Returns:
        Logits (V,).
    """
    if penalty == 1:
        return logits
    seen = torch.tensor(sorted(set(known)))
    there = logits[seen]
    return logits.index_copy(0, seen, torch.where(there < 0, there * penalty, there / penalty))


def sample_token(logits: Tensor, position: int, sampling: Sampling) -> int:
    """Return a token: the likeliest one, or one drawn by the seed and ``position``.

    Args:
        logits: The model's logits (V,).
        position: Place of the new token in the sequence.
        sampling: How to sample_token.

    Returns:
        The id of the token.

    Raises:
        ConfigError: The logits are not finite.
    """
    if not bool(logits.max().isfinite()):  # NaN is the greatest; -inf forbids a token
        raise ConfigError(
            f"token {position}: the model's logits are not finite: its weights are damaged, or too"
            " large for precision.param"
        )
    if sampling.temperature == 0:
        return int(logits.argmax())
    # Subtract the greatest logit: a temperature near 0 would make others infinite.
    below = logits.double() - logits.max()
    probabilities = nucleus((below / sampling.temperature).softmax(-1), sampling.top_p)
    generator = named_generator(sampling.seed, str(position))
    return int(torch.multinomial(probabilities, 1, generator=generator))


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Keep the most likely tokens, and set the probability of all others to 0.

    The kept tokens are the fewest whose probabilities add up to ``top_p`` (Holtzman et al. 2019,
    arXiv:1904.09751).

    Args:
        probabilities: Probabilities (V,).
        top_p: The sum to reach.

    Returns:
        Probabilities (V,), not normalised again.
    """
    ordered, places = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    return probabilities.index_fill(0, places[before >= top_p], 0.0)


def text_of(tokenizer: Tokenizer, prompt: Sequence[int], found: Iterable[int]) -> Iterator[str]:
    """Yield the text of ``prompt``, and then the text that each token adds.

    The bytes of an unfinished character wait for the rest of it.
    """
    known, shown = list(prompt), 0
    for more in itertools.chain([[]], ([token] for token in found)):
        known += more
        whole = tokenizer.decode(known).rstrip("\ufffd")
        yield whole[shown:]
        shown = max(shown, len(whole))
    yield tokenizer.decode(known)[shown:]
