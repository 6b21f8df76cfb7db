"""The command `python -m compose generate`, for any model: a text, or what the model's task makes."""

import os
from collections.abc import Sequence
from pathlib import Path

from compose.checkpoint.hf_folder import checkpoints, is_hugging_face, model_in
from compose.cli.command_line import named_path, read_words
from compose.cli.generate import generate as generate_text
from compose.cli.generate import job_of, open_model
from compose.config.models import Sampler, find_model
from compose.config.toml import load
from compose.errors import ConfigError
from compose.parallel.mesh import init_mesh
from compose.parallel.processes import process_group

_USAGE = """\
python -m compose generate CHECKPOINT {flags}
    [--table.key=value ...]

CHECKPOINT is a checkpoint, or the folder of a run, whose newest whole one is taken. Under torchrun all
ranks hold the model together.
"""


def generate(arguments: Sequence[str]) -> int:
    """Continue a text with a trained model, or make images: python -m compose generate CHECKPOINT."""
    source = _source(arguments)
    sampler = _sampler(source) if source else None
    if sampler is None:
        return generate_text(arguments)
    assert source is not None
    if {"--help", "-h"} & set(arguments):
        flags = " ".join(f"[{flag} ...]" for flag in sampler.flags)
        print(_USAGE.format(flags=flags))
        print(*(f"  {name:<13}{words}" for name, words in sampler.flags.items()), sep="\n")
        return 0
    words = read_words(arguments, sampler.flags)
    if len(words.plain) != 1:
        raise ConfigError(f"command line: generate: needs one CHECKPOINT, got {len(words.plain)}")
    folders = checkpoints(source)
    job = job_of(source, folders, words.overrides, grows=False)
    make = sampler.prepare(job.config, words.flags)
    with process_group(job.config) as device:
        make(open_model(job, folders, init_mesh(job.degrees, device.type), device))
    return 0


def _source(arguments: Sequence[str]) -> Path | None:
    """Return the first word that is neither an option nor the value of one; None if there is none."""
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            return Path(named_path(word))
        if "=" not in word and word not in ("-h", "--help") and rest:
            rest.pop(0)
    return None


def _sampler(source: Path) -> Sampler | None:
    """Return how the model of a folder makes samples; None: it continues a text, or is not known."""
    try:
        if is_hugging_face(source):
            name = model_in(source).name
        else:
            files = [folder / "config.toml" for folder in checkpoints(source)]
            found = next(filter(os.path.lexists, files), None)
            name = load(str(found), alone=True).model.name if found else ""
        task = find_model(name).task if name else None
    except ConfigError:
        return None  # the command for text says what is wrong
    return task.sampler if task else None
