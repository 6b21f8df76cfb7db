"""The command `python -m compose generate`: it continues a text with a model, on the launch's mesh."""

import itertools
import os
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compose import legality
from compose.base.fields import NonNegative, Positive
from compose.build import fill_weights, parallelize
from compose.checkpoint.loading import damage, load
from compose.commands.cli import device_problems, launched_ranks, read_words
from compose.composition.state import Composition
from compose.config import Checkpoint, Comm, Compile, Config, Outer, Parallel
from compose.data.tokenizer import FILE, Bytes, Tokenizer, open_tokenizer
from compose.errors import ConfigError
from compose.huggingface.sources import checkpoints, is_hugging_face, kept_tokenizer, model_in
from compose.legality.job import Job
from compose.parallel.mesh import axis_size, init_mesh
from compose.runtime.processes import process_group
from compose.toml import COMMAND_LINE, override
from compose.toml import load as load_toml
from compose.train.evaluate import forward
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


_FLAGS = {
    "--prompt": "TEXT to continue",
    "--max-tokens": f"tokens after it, unless the text ends before; default {Sampling.max_tokens}",
    "--temperature": f"divides the logits; default {Sampling.temperature}; 0: the likeliest token",
    "--top-p": f"sample from the likeliest tokens, this much together; default {Sampling.top_p}",
    "--seed": f"the same gives the same text, on every mesh; default {Sampling.seed}",
    "--tokenizer": "tokenizer.json or bytes; default: the run's, or Hugging Face's folder's, or bytes",
}
USAGE = """\
python -m compose generate CHECKPOINT --prompt TEXT [--max-tokens N] [--temperature T] [--top-p P]
    [--seed S] [--tokenizer FILE] [--table.key=value ...]

CHECKPOINT is a checkpoint, the folder of a run, whose newest whole one is taken, or Hugging Face's
folder. Under torchrun all ranks hold the model together: parallel.dp_shard = -1 and zero = 3, if keys
say nothing else. Every token runs the whole text again.
"""


def generate(arguments: Sequence[str]) -> int:
    """Continue a text with a trained model: python -m compose generate CHECKPOINT --prompt TEXT."""
    if {"--help", "-h"} & set(arguments):
        print(USAGE, *(f"  {name:<15}{words}" for name, words in _FLAGS.items()), sep="\n")
        return 0
    words = read_words(arguments, _FLAGS)
    if len(words.plain) != 1:
        raise ConfigError(f"{COMMAND_LINE}: generate: needs one CHECKPOINT, got {len(words.plain)}")
    prompt, source = words.flags.get("--prompt", ""), Path(words.plain[0])
    if not prompt:
        raise ConfigError(f"{COMMAND_LINE}: --prompt: needs a text to continue")
    sampling = _sampling(words.flags)
    folders = [] if is_hugging_face(source) else checkpoints(source)
    job = _job(source, folders, words.overrides)
    tokenizer = _tokenizer(words.flags.get("--tokenizer", ""), source, folders, job.config)
    with process_group(job.config) as device:
        mesh = init_mesh(job.degrees, device.type)
        composition = open_model(job, folders, mesh, device)
        ids = tokenizer.encode(prompt)
        found = sample(composition, ids, sampling, tokenizer.end)
        for piece in text_of(tokenizer, ids, found):
            if dist.get_rank() == 0:
                print(piece, end="", flush=True)
        if dist.get_rank() == 0:
            print(flush=True)
    return 0


def _sampling(flags: Mapping[str, str]) -> Sampling:
    types, given, problems = typing.get_type_hints(Sampling, include_extras=True), {}, []
    for name in types:
        flag = f"--{name.replace('_', '-')}"
        if flag not in flags:
            continue
        checked = TypeAdapter(types[name], config=ConfigDict(allow_inf_nan=False))
        try:
            given[name] = checked.validate_python(flags[flag])
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Input should be ").partition(",")[0]
            problems.append(f"{COMMAND_LINE}: {flag}: {flags[flag]} should be {reason}")
    if problems:
        raise ConfigError(*problems)
    return Sampling(**given)


def _job(source: Path, folders: Sequence[Path], overrides: Sequence[tuple[str, str]]) -> Job:
    """Return the job of the model in ``source``, for this launch's ranks."""
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
    config = replace(config, parallel=Parallel(), compile=Compile(), comm=Comm(), outer=Outer())
    config = override(config, overrides)
    ranks = launched_ranks()
    # There are no batches here, so choose sizes that are legal on every mesh.
    length = -(-config.train.seq_len // ranks) * ranks
    train = replace(config.train, seq_len=length, global_batch=2 * ranks, micro_batch=1)
    config, problems, job = replace(config, train=train), device_problems(config), None
    try:
        job = legality.check(config, ranks)
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

    Args:
        job: The job of the model.
        folders: Checkpoints, newest first.
        mesh: The mesh of ``compose.init_mesh``.
        device: The device of this rank.

    Returns:
        The composition with its weights.

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
    composition: Composition, tokens: Sequence[int], sampling: Sampling, end: int = -1
) -> Iterator[int]:
    """Yield the tokens with which the model continues ``tokens``, up to the token ``end``.

    This is a collective: every rank must take all tokens, and gets the same ones.
    Every token runs the whole sequence again: the models have no cache of keys and values.

    Args:
        composition: The model.
        tokens: The ids of the prompt.
        sampling: How to continue.
        end: The id that ends the text; it is not yielded. -1 is no id.

    Returns:
        An iterator over ids.

    Raises:
        ConfigError: The logits are not finite.
    """
    known = list(tokens)
    for _ in range(sampling.max_tokens):
        logits = _next_logits(composition, known)
        found = -1 if logits is None else sample_token(logits, len(known), sampling)
        # Ranks with logits have the same ones, except for rounding. The other ranks send -1.
        chosen = torch.tensor(found, device=composition.mesh.device_type)
        dist.all_reduce(chosen, op=dist.ReduceOp.MAX)
        token = int(chosen)
        if token == end:
            return
        known.append(token)
        yield token


def _next_logits(composition: Composition, tokens: Sequence[int]) -> Tensor | None:
    """Return logits (V,) of the next token on the CPU, or None on ranks without the last token."""
    mesh = composition.mesh
    length, missing = len(tokens), -len(tokens) % axis_size(mesh, "tp")
    # The padding changes nothing: attention is causal, and experts do not count it.
    batch = {
        "tokens": torch.tensor([[*tokens, *[tokens[-1]] * missing]], device=mesh.device_type),
        "positions": torch.tensor([[*range(length), *[-1] * missing]], device=mesh.device_type),
    }
    found: list[Tensor] = []

    def keep(output: Tensor, part: Mapping[str, Tensor]) -> None:
        for place in (part["positions"][0] == length - 1).nonzero().flatten().tolist():
            row = output[0, place]
            found.append(row.full_tensor() if isinstance(row, DTensor) else row)

    forward(composition, batch, each=keep)
    return found[0].cpu() if found else None


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

    Args:
        tokenizer: The tokenizer.
        prompt: The ids of the prompt.
        found: The ids that follow.

    Returns:
        An iterator over pieces of text.
    """
    known, shown = list(prompt), 0
    for more in itertools.chain([[]], ([token] for token in found)):
        known += more
        whole = tokenizer.decode(known).rstrip("\ufffd")
        yield whole[shown:]
        shown = max(shown, len(whole))
    yield tokenizer.decode(known)[shown:]
