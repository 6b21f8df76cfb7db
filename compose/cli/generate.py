"""The command generate: a text that a model continues, or the samples that its task makes."""

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from compose.build import fill_weights, parallelize
from compose.checkpoint.hf_folder import checkpoints, is_hugging_face, kept_tokenizer, model_in
from compose.checkpoint.loading import damage, load
from compose.cli import COMMANDS
from compose.cli.command_line import (
    ParsedWords,
    device_problems,
    flag_error,
    launched_ranks,
    model_path,
    named_path,
    read_words,
)
from compose.composition import Composition
from compose.config import rules
from compose.config.hugging_face import model_folder
from compose.config.job import Job
from compose.config.json_files import typed, types_of
from compose.config.models import Sampler, find_model, folder_name, max_seq_len
from compose.config.tables import TABLES, Checkpoint, Config, without_add_ons
from compose.config.toml import load as load_toml
from compose.config.toml import override
from compose.data.chat_messages import Chat, read_chat
from compose.data.documents import JSON_LINES, parsed_json
from compose.data.generation_config import end_ids, repetition_penalty
from compose.data.tokenizer import FILE, ByteTokenizer, JsonTokenizer, Tokenizer, open_tokenizer
from compose.errors import ConfigError, noted, or_say, there
from compose.object_storage import as_path
from compose.parallel.mesh import init_mesh
from compose.train.processes import process_group
from compose.train.sampling import Sampling, chat_ids, sample, text_of

Prompt = str | Chat
"""A text, or the messages before a reply."""
_SAMPLES_USAGE = """\
python -m compose generate CHECKPOINT {flags} [--best]
    [--table.key=value ...]

CHECKPOINT is a checkpoint, or the folder of a run. Of a run the newest whole checkpoint is taken, or
with --best the one with the lowest validation loss. Under torchrun the model is sharded over all ranks.
"""


def generate(arguments: Sequence[str]) -> int:
    """Continue a text with a trained model, or make the samples of its task."""
    first = _source(arguments)
    pairs = itertools.pairwise([*arguments, ""])
    joined = (word if "=" in word else f"{word}={after}" for word, after in pairs)
    own = [word.partition("=")[2] for word in joined if word.startswith("--model.path=")]
    sampler = _sampler(first, own) if first else None
    if {"--help", "-h"} & set(arguments):
        if sampler is None:
            print(COMMANDS["generate"].text, end="")
            return 0
        flags = " ".join(f"[{flag} ...]" for flag in sampler.flags)
        print(_SAMPLES_USAGE.format(flags=flags))
        print(*(f"  {name:<13}{words}" for name, words in sampler.flags.items()), sep="\n")
        return 0
    flags = {**sampler.flags, "--best": ""} if sampler else COMMANDS["generate"].flags
    words = read_words(arguments, flags, stores=True)
    if len(words.plain) != 1:
        raise flag_error("generate", f"needs one CHECKPOINT, got {len(words.plain)}")
    source = model_path(words.plain[0])
    if sampler is None:
        _generate_text(source, words)
        return 0
    folders = checkpoints(source, words.flags.pop("--best", None) is not None)
    job = job_of(source, folders, words.overrides, grows=False)
    make = sampler.prepare(job.config, words.flags)
    with process_group(job.config) as device:
        make(open_model(job, folders, init_mesh(job.degrees, device.type), device))
    return 0


def _source(arguments: Sequence[str]) -> Path | None:
    """Return the first word that is neither an option nor the value of one; None if there is none."""
    rest, flags = list(arguments), COMMANDS["generate"].flags
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            return as_path(model_folder(named_path(word, here=False)))
        # Flags without a value have "" for its name.
        if "=" not in word and word not in ("-h", "--help") and flags.get(word) != "" and rest:
            rest.pop(0)
    return None


def _sampler(source: Path, own: Sequence[str]) -> Sampler | None:
    """Return how the model of a folder makes samples; None: it continues a text, or is not known."""
    try:
        folders = [] if is_hugging_face(source) else checkpoints(source)
        task = find_model(_stored_config(source, folders, own).model.name).task
    except ConfigError:
        return None  # the command for text says what is wrong
    return task.sampler if task else None


def _stored_config(source: Path, folders: Sequence[Path], own: Sequence[str]) -> Config:
    """Return the config of the newest checkpoint that has one; Hugging Face's folder has none.

    ``own``: the last is the folder that the command line names as ``model.path``.
    """
    if folders:
        files = [folder / "config.toml" for folder in folders]
        paths = [("model.path", path) for path in own]
        return load_toml(str(next(filter(there, files), files[0])), paths, alone=True)
    return Config(
        model=model_in(source, folder_name(own[-1]) if own else ""),
        checkpoint=Checkpoint(load_hf=str(source)),
        source=str(source / "config.json"),
    )


def _generate_text(source: Path, words: ParsedWords) -> None:
    prompts = given_prompts(words.given)
    sampling = _sampling(words.flags)
    best = "--best" in words.flags
    if best and is_hugging_face(source):
        raise flag_error("--best", f"{source} is Hugging Face's folder, and has no checkpoints")
    folders = [] if is_hugging_face(source) else checkpoints(source, best)
    job = job_of(source, folders, words.overrides)
    tokenizer = _tokenizer(words.flags.get("--tokenizer", ""), source, folders, job.config)
    beside = kept_tokenizer(folders[0]) if folders else source
    sampling = replace(sampling, repetition_penalty=repetition_penalty([beside]))
    ends, chat = end_ids(tokenizer, beside), "--chat" in words.flags
    encoded = encode_prompts(tokenizer, prompts, chat, "--no-special-tokens" not in words.flags)
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise flag_error("--prompt", f"{prompt!r} has no token of {tokenizer.name}")
        if max(ids) >= job.config.model.config.vocab_size:
            raise flag_error("--prompt", f"{prompt!r} has the id {max(ids)}, beyond model.vocab_size")
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
            for piece in itertools.chain([] if chat else [str(prompt)], pieces, ["\n"]):
                if speaks:
                    with or_say("standard output"):
                        print(piece, end="", flush=True)


def _sampling(flags: Mapping[str, str]) -> Sampling:
    types, given, problems = types_of(Sampling), {}, []
    for name in types:
        flag = f"--{name.replace('_', '-')}"
        if flag not in flags:
            continue
        try:
            given[name] = typed(types[name], flags[flag], text=True)
        except ValueError as error:
            problems += flag_error(flag, str(error)).problems
    if problems:
        raise ConfigError(*problems)
    return Sampling(**given)


def _check_length(prompt: int, more: int, most: int | None) -> None:
    """Raise ConfigError if a model of ``most`` positions cannot take the prompt and ``more`` tokens."""
    if most is None or prompt + more <= most:
        return
    if prompt >= most:
        has = f"has {prompt} tokens, and the model has {most} positions; give at most {most - 1}"
        raise flag_error("--prompt", has)
    raise flag_error(
        "--max-tokens",
        f"{more} after a prompt of {prompt} are more than the {most} positions that the model has;"
        f" nearest: {most - prompt}",
    )


def job_of(
    source: Path, folders: Sequence[Path], overrides: Sequence[tuple[str, str]], grows: bool = True
) -> Job:
    """Return the checked job of the model in ``source``, for this launch's ranks.

    ``folders`` are its checkpoints, newest first. Sequences that do not grow are of train.seq_len.
    """
    own = [value for key, value in overrides if key == "model.path"]
    config = without_add_ons(_stored_config(source, folders, own))
    # The length grows with each token, and each length would need a new graph. Nothing is trained, so
    # the rules of metrics, optimizer and activation_checkpoint do not matter.
    usual = ("parallel", "compile", "comm", "metrics", "optimizer", "activation_checkpoint")
    config = replace(config, **{name: TABLES[name]() for name in usual})
    config = override(config, overrides)
    ranks = launched_ranks()
    # There are no batches here, so choose sizes that are legal on every mesh.
    length = min(config.train.seq_len, max_seq_len(config.model.config) or config.train.seq_len)
    length = max(length // ranks, 1) * ranks if grows else config.train.seq_len
    train = replace(config.train, seq_len=length, global_batch=2 * ranks, micro_batch=1)
    config, problems, job = replace(config, train=train), list[str](), None
    with noted(problems):
        job = rules.check(config, ranks)
    problems += device_problems(config)
    if problems or job is None:
        raise ConfigError(*(f"{config.source}: {problem}" for problem in problems))
    return job


def _tokenizer(given: str, source: Path, folders: Sequence[Path], config: Config) -> Tokenizer:
    """Return the tokenizer. Raises ConfigError if there is none, or if the model lacks some ids."""
    size = config.model.config.vocab_size
    beside = kept_tokenizer(folders[0]) if folders else source
    there = (beside / FILE).exists()
    if given == ByteTokenizer.name or (not given and not there and size == ByteTokenizer.vocab_size):
        tokenizer: Tokenizer = ByteTokenizer()
    elif given or there:
        tokenizer = open_tokenizer(model_path(given, "--tokenizer: ") if given else beside)
    else:
        raise ConfigError(
            f"{beside / FILE}: no such file, and model.vocab_size {size} is not that of bytes; give"
            " --tokenizer FILE, a tokenizer.json, or --tokenizer bytes"
        )
    if tokenizer.ordinary > size:
        raise ConfigError(
            f"{tokenizer.name}: has {tokenizer.vocab_size} ids, the model's vocabulary {size}; give the"
            " --tokenizer that it was trained with"
        )
    return tokenizer


def open_model(
    job: Job, folders: Sequence[Path], mesh: DeviceMesh, device: torch.device
) -> Composition:
    """Cut the job's model over ``mesh``, with the weights of the first whole checkpoint in ``folders``.

    Without folders the weights come from ``checkpoint.load_hf``.
    """
    composition = parallelize(job, mesh, device)
    if not folders or job.config.model.lora.rank:  # a checkpoint of adapters has no other weights
        fill_weights(composition, job, device, adapters=not folders)
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


def given_prompts(flags: Iterable[tuple[str, str]]) -> list[Prompt]:
    """Return the prompts of a command line, in their order."""
    results: list[Prompt] = []
    for flag, value in flags:
        if flag in ("--prompt", "--prompts"):
            results += [value] if flag == "--prompt" else _read_prompts(Path(value))
    if not all(results) or not results:
        raise flag_error("--prompt", "needs a text to continue")
    return results


def _read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts in a file; an empty line is none."""
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"is not UTF-8: {error.reason}"
        raise flag_error("--prompts", f"{path}: {reason}") from None
    results: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                in_json = path.suffix.lower() in JSON_LINES
                results.append(_of_row(line) if in_json else line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
    if not results:
        raise flag_error("--prompts", f"{path}: holds no prompt")
    return results


def _of_row(line: str) -> Prompt:
    """Return the prompt in a line of JSON. Raises ValueError if there is none."""
    row = parsed_json(line.encode())
    if isinstance(row, dict) and "messages" in row:
        return read_chat(row)
    prompt = row.get("prompt") if isinstance(row, dict) else row
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("is neither a text nor an object with a prompt or messages")
    return prompt


def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], chat: bool, special: bool = True
) -> list[list[int]]:
    """Return the ids of each prompt.

    With ``chat`` the tokenizer's chat template writes them, and a text is the message of a user.
    ``special``: special tokens are added to a prompt, and recognised in it.
    """
    if chat and not special:
        template = "is for text; a chat has the tokens that its template writes"
        raise flag_error("--no-special-tokens", template)
    if not chat:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if len(texts) < len(prompts):
            raise flag_error("--prompts", "holds messages; give --chat too")
        try:
            return [tokenizer.encode(text, added=special, markup=special) for text in texts]
        except UnicodeEncodeError:
            raise flag_error("--prompt", "holds half a character") from None
    if not isinstance(tokenizer, JsonTokenizer):
        raise flag_error("--chat", "bytes have no chat template")
    return chat_ids(tokenizer, prompts)
