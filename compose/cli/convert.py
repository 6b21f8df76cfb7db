"""The command `python -m compose convert`: a Hugging Face folder to a checkpoint, and back."""

import sys
from collections.abc import Sequence
from pathlib import Path

from compose.checkpoint.hf_conversion import export, export_adapters, import_
from compose.checkpoint.hf_folder import checkpoints, is_hugging_face, model_in
from compose.checkpoint.safetensors_files import DTYPES
from compose.checkpoint.store import read_state
from compose.cli.command_line import read_flags
from compose.config.tables import Config
from compose.config.toml import COMMAND_LINE, load
from compose.errors import ConfigError, printable

_FLAGS = {
    "--config": "FILE.toml whose [model] it is; default: what SOURCE says",
    "--original": "Hugging Face's folder with the tokenizer, to be copied to one",
    "--dtype": "float32 (the default), bfloat16 or float16, of the weights in Hugging Face's folder",
    "--merged": "",
}
_HELP = _FLAGS | {"--merged": "write whole weights, with the adapters of a run added to them"}
USAGE = """\
python -m compose convert SOURCE TARGET [--config FILE.toml] [--original FOLDER] [--dtype TYPE]
    [--merged]

SOURCE is Hugging Face's folder (config.json and safetensors), and TARGET becomes the folder of a run
that begins with its weights; or SOURCE is a checkpoint, or the folder of a run, whose newest is taken,
and TARGET becomes a folder that transformers opens. Of a run with adapters (model.lora) it becomes one
that peft opens, or with --merged one of whole weights, with the adapters added to them.
"""


def _has_adapters(checkpoint: Path) -> bool:
    try:
        return read_state(checkpoint).lora is not None
    except ConfigError:  # the export says what is wrong
        return False


def convert(arguments: Sequence[str]) -> int:
    """Convert Hugging Face weights to a checkpoint or back: python -m compose convert SOURCE TARGET."""
    if {"--help", "-h"} & set(arguments):
        print(USAGE, *(f"  {name:<12}{words}" for name, words in _HELP.items()), sep="\n")
        return 0
    folders, flags = read_flags(arguments, _FLAGS)
    if len(folders) != 2:
        raise ConfigError(
            f"{COMMAND_LINE}: convert: needs SOURCE and TARGET, got {len(folders)} folders"
        )
    source, target = (Path(word) for word in folders)
    config = load(flags["--config"]) if "--config" in flags else None
    if is_hugging_face(source):
        for flag in ("--original", "--dtype", "--merged"):
            if flag in flags:
                raise ConfigError(f"{COMMAND_LINE}: {flag}: is for the way to Hugging Face")
        done = import_(source, target, config or Config(model=model_in(source)))
        then = f"a run with --run.dir={target} begins with it"
    else:
        name = flags.get("--dtype", "float32")
        kinds = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
        if name not in kinds:
            raise ConfigError(f"{COMMAND_LINE}: --dtype: {name} is none of {', '.join(kinds)}")
        original = Path(flags["--original"]) if "--original" in flags else None
        checkpoint = checkpoints(source)[0]
        adapters, merged = _has_adapters(checkpoint), "--merged" in flags
        if merged and not adapters:
            raise ConfigError(f"{COMMAND_LINE}: --merged: {checkpoint} holds no adapters")
        if adapters and not merged:
            for flag in ("--original", "--dtype"):
                if flag in flags:
                    raise ConfigError(
                        f"{COMMAND_LINE}: {flag}: is for whole weights; give --merged too"
                    )
            done, then = export_adapters(checkpoint, target, config), "peft opens it"
        else:
            done = export(checkpoint, target, config, original, kinds[name])
            then = "transformers opens it"
    if done.original:
        print(
            f"{source}: was made from {printable(done.original)}, of which its run kept nothing;"
            " to export the tokenizer too, give that folder as --original",
            file=sys.stderr,
        )
    files = f"{done.files} file{'s' * (done.files > 1)}"
    print(f"{done.path}: {done.tensors} tensors, {done.bytes:,} bytes, in {files}; {then}", flush=True)
    return 0
