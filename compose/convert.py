"""python -m compose convert: Hugging Face's folder to a run's first checkpoint, and back."""

from collections.abc import Sequence
from pathlib import Path

from compose.checkpoint import store
from compose.checkpoint.exchange import export, import_
from compose.cli import read_flags
from compose.config import Config, Model
from compose.errors import ConfigError
from compose.hugging_face import find_hf, read_config
from compose.registry import model_names
from compose.safetensors_files import DTYPES, INDEX, WHOLE
from compose.toml import COMMAND_LINE, load

_FLAGS = {
    "--config": "FILE.toml whose [model] it is; default: what SOURCE says",
    "--original": "Hugging Face's folder with the tokenizer, to be copied to one",
    "--dtype": "float32 (the default), bfloat16 or float16, of the weights in Hugging Face's folder",
}
USAGE = """\
python -m compose convert SOURCE TARGET [--config FILE.toml] [--original FOLDER] [--dtype TYPE]

SOURCE is Hugging Face's folder (config.json and safetensors), and TARGET becomes the folder of a run
that begins with its weights; or SOURCE is a checkpoint, or the folder of a run, whose newest is taken,
and TARGET becomes a folder that transformers opens.
"""


def convert(arguments: Sequence[str]) -> int:
    """python -m compose convert SOURCE TARGET: Hugging Face's weights to a checkpoint, or back."""
    if "--help" in arguments or "-h" in arguments:
        print(USAGE, *(f"  {name:<12}{words}" for name, words in _FLAGS.items()), sep="\n")
        return 0
    folders, flags = read_flags(arguments, _FLAGS)
    if len(folders) != 2:
        raise ConfigError(
            f"{COMMAND_LINE}: convert: needs SOURCE and TARGET, got {len(folders)} folders"
        )
    source, target = (Path(word) for word in folders)
    config = load(flags["--config"]) if "--config" in flags else None
    if is_hugging_face(source):
        for flag in ("--original", "--dtype"):
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
        done = export(_checkpoint(source), target, config, original, kinds[name])
        then = "transformers opens it"
    files = f"{done.files} file{'s' * (done.files > 1)}"
    print(f"{done.path}: {done.tensors} tensors, {done.bytes:,} bytes, in {files}; {then}", flush=True)
    return 0


def is_checkpoint(folder: Path) -> bool:
    """Whether ``folder`` is a checkpoint of ours, be it damaged."""
    return (folder / store.MANIFEST).exists() or (folder / ".metadata").exists()


def is_hugging_face(folder: Path) -> bool:
    """Whether ``folder`` holds a model as transformers saves it."""
    weights = any((folder / name).exists() for name in (WHOLE, INDEX))
    return weights and (folder / "config.json").exists()


def _checkpoint(source: Path) -> Path:
    """``source``, or the newest checkpoint of the run whose folder it is."""
    if not source.is_dir():
        raise ConfigError(f"{COMMAND_LINE}: {source}: no such folder")
    found = [source] if is_checkpoint(source) else store.newest_first(source / "checkpoints")
    if not found:
        raise ConfigError(
            f"{COMMAND_LINE}: {source}: is neither a checkpoint ({store.MANIFEST}) nor Hugging Face's"
            f" folder (config.json, and {WHOLE} or {INDEX})"
        )
    return found[0]


def model_in(folder: Path) -> Model:
    """What config.json of ``folder`` describes. Raises ConfigError if that is no model of ours."""
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
