"""Checkpoints as folders: each exists whole or not at all.

A checkpoint is written under a name that nothing reads, flushed to the device, and published by
renaming, which is atomic. So a folder ``step-00000100`` was complete once, and its manifest, with the
size and checksum of every file, shows whether it still is.
"""

import contextlib
import json
import math
import os
import platform
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError

from compose.checkpoint.dcp_storage import METADATA, SUMS, read_metadata, shards
from compose.checkpoint.safetensors_files import opened
from compose.config.json_files import Count, read_json
from compose.errors import ConfigError, open_own, there, write_whole
from compose.memory.precision import LossScale
from compose.memory.quantized import Base
from compose.object_storage import Remote, StoreError
from compose.ops.tensors import checksums

T = TypeVar("T")
MANIFEST = "manifest.json"
STATE = "state.json"
MARK = ".saved"  # a file in run.dir: the run has had a checkpoint
_NAME = re.compile(r"step-(\d{8,})")
_BLOCK = 2**20  # bytes read at once: they stay in the core's cache until they are summed
_READERS = 4  # files read at once; reading and summing hold no lock of Python's


@dataclass(frozen=True)
class FileEntry:
    """A file in a manifest."""

    size: Count
    crc32: Annotated[int, Field(ge=0, lt=2**32)]


@dataclass(frozen=True)
class _Manifest:
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class Progress:
    """The optimizer steps, samples and tokens that a run has taken."""

    step: Count
    samples: Count
    tokens: Count
    scale: LossScale | None = None  # the loss scale, in float16
    validations: tuple[tuple[Count, float | None], ...] = ()
    """The step and loss of each validation so far; None for a loss that was not finite."""

    def validated(self, loss: float | None) -> "Progress":
        """Return the progress with a validation after its step; the same if there was none."""
        if loss is None:
            return self
        measured = (self.step, loss if math.isfinite(loss) else None)
        return replace(self, validations=(*self.validations, measured))

    def best(self, count: int) -> list[int]:
        """Return the steps of the ``count`` lowest losses so far."""
        return best_first(self.validations)[:count]


class ModelFields(BaseModel):
    """A model's name, and the fields of its config."""

    model_config = ConfigDict(extra="allow")
    name: str


class DataFields(BaseModel):
    """The fields that decide the tokens of a sample; a checkpoint without a run has none."""

    model_config = ConfigDict(extra="allow")
    tokenizer: str | None = None
    samples: list[Count] = []
    weights: list[float] = []
    seq_len: Count = 0
    seed: int = 0


@dataclass(frozen=True)
class Adapters:
    """The adapters that a checkpoint holds in place of the model's weights."""

    rank: Annotated[int, Field(ge=1)]
    alpha: Annotated[float, Field(gt=0)]
    targets: Literal["all-linear"] | tuple[str, ...]
    base: str  # the identity of the frozen weights, from ``compose.checkpoint.peft.base_identity``
    load_hf: str = ""  # the folder of the frozen weights; empty if they are drawn by ``State.seed``
    rslora: bool = False
    dora: bool = False
    dropout: float = 0.0
    kept: Base = "full"  # how the frozen weights were kept


@dataclass(frozen=True, kw_only=True)
class State(Progress):
    """The content of state.json: how far a run has come, and what it was a run of."""

    model: ModelFields
    lora: Adapters | None = None
    hugging_face: str | None = None
    data: DataFields = field(default_factory=DataFields)
    seed: int = 0
    ranks: Annotated[int, Field(ge=1)] = 1
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        return Progress(*(getattr(self, each.name) for each in fields(Progress)))


def read_state(folder: Path) -> State:
    """Return the content of a checkpoint's state.json."""
    return read_json(folder / STATE, State, own=True)


def name_of(step: int) -> str:
    """Return the name of the checkpoint's folder after ``step`` steps."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint's folder; -1 if there is none."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def begin(root: Path, step: int) -> Path:
    """Make an empty folder for writing a checkpoint, in place of that of a broken attempt."""
    folder = root / f".writing-{name_of(step)}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file's bytes."""
    value, block = 0, memoryview(bytearray(_BLOCK))
    with open_own(path) as file:
        while size := file.readinto(block):
            value = zlib.crc32(block[:size], value)
    return value


def manifest_entries(paths: Iterable[Path]) -> dict[str, dict[str, int]]:
    """Return the manifest's entries of files."""
    paths = sorted(paths)
    with ThreadPoolExecutor(_READERS) as readers:
        sums = zip(paths, readers.map(checksum, paths), strict=True)
        return {path.name: {"size": path.stat().st_size, "crc32": crc} for path, crc in sums}


def write_run_state(
    folder: Path, state: Mapping[str, Any], config: str, tensors: Mapping[str, Mapping[str, int]]
) -> dict[str, Mapping[str, int]]:
    """Write state.json and config.toml; return the manifest's entries, with those of tensor files."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    write_whole(folder / STATE, json.dumps({**state, "versions": versions}, indent=1))
    write_whole(folder / "config.toml", config)
    return {**manifest_entries(p for p in folder.iterdir() if p.name not in tensors), **tensors}


def publish(folder: Path, files: Mapping[str, Mapping[str, int]], elsewhere: bool = False) -> Path:
    """Write the manifest, flush all files to the device, and give the folder its final name.

    Some files may be ``elsewhere``: on other nodes, whose ranks send them.
    """
    for name, entry in files.items():
        if not (folder / name).exists() and elsewhere:
            continue
        if (folder / name).stat().st_size != entry["size"]:
            raise OSError(f"{name} was not written whole")
    write_whole(folder / MANIFEST, json.dumps({"files": files}, indent=1))
    for path in (*folder.iterdir(), folder):
        flush(path)
    final = folder.with_name(folder.name.removeprefix(".writing-"))
    if there(final):
        set_aside(final, "damaged")
    folder.rename(final)
    flush(final.parent)
    return final


def set_aside(folder: Path, why: str) -> Path:
    """Give a checkpoint's folder a name that nothing reads, with a word on why; return it."""
    names = (folder.with_name(f"{folder.name}.{why}-{i}") for i in range(1, 10**6))
    return folder.rename(next(name for name in names if not there(name)))


def mark(run: Path) -> None:
    """Note in a run's folder that the run has had a checkpoint, for a later start that finds none."""
    if not there(run / MARK):
        write_whole(run / MARK, "A checkpoint was saved in this folder.\n")


def newest_first(root: Path) -> list[Path]:
    """Return the checkpoints in ``root``, whole or damaged, newest first."""
    result = [p for p in root.glob("step-*") if _NAME.fullmatch(p.name)] if root.is_dir() else []
    return sorted(result, key=step_of, reverse=True)


def sent(root: Path) -> list[Path]:
    """Return the checkpoints in ``root``, newest first, without those that were not sent whole."""
    folders = newest_first(root)
    return [p for p in folders if not isinstance(p, Remote) or (p / MANIFEST).exists()]


def problems(folder: Path, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Return one line for each way in which a checkpoint differs from what was published."""
    try:
        path = folder / MANIFEST
        files = _readable(folder, MANIFEST, lambda: read_json(path, _Manifest, own=True)).files
        reserved = (MANIFEST, "", ".", "..")
        outside = [name for name in files if not name.isprintable() or name in reserved or "/" in name]
        if outside:
            return [f"{MANIFEST} names {outside[0]!a}, which is no file of the folder's own"]
        if share[0] == 0:
            _check_all_there(folder, files)
    except StoreError:  # the damage of a checkpoint that cannot be reached is not known
        raise
    except ConfigError as error:
        return error.problems
    mine = sorted(files)[share[0] :: share[1]]
    with ThreadPoolExecutor(_READERS) as readers:
        return [*filter(None, readers.map(lambda name: _problem(folder / name, files[name]), mine))]


def _check_all_there(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Raise ConfigError if the manifest lacks a file that belongs to a checkpoint."""
    missing = [name for name in (STATE, METADATA) if name not in files]
    if missing:
        raise ConfigError(*(f"{name} is not in {MANIFEST}" for name in missing))
    state = _readable(folder, STATE, lambda: read_state(folder))
    if step_of(folder) not in (-1, state.step):
        raise ConfigError(f"{STATE} is of step {state.step}, the folder of step {step_of(folder)}")
    for name, size in shards(_readable(folder, METADATA, lambda: read_metadata(folder))).items():
        if name not in files:
            raise ConfigError(f"{name} is not in {MANIFEST}")
        if files[name].size < size:
            raise ConfigError(f"{METADATA} has {size:,} bytes in {name}, of {files[name].size:,}")


def _readable(folder: Path, name: str, read: Callable[[], T]) -> T:
    """Return the result of ``read``. Raises ConfigError that begins with the file's name."""
    if not there(folder / name):
        raise ConfigError(f"{name} is missing")
    try:
        return read()
    except ConfigError as error:
        reason = str(error).removeprefix(f"{folder / name}: ").removeprefix("cannot be read: ")
        raise ConfigError(f"{name} cannot be read: {reason}") from None


def listed(folder: Path) -> dict[str, int]:
    """Return the size of each file that a checkpoint's manifest lists."""
    files = read_json(folder / MANIFEST, _Manifest, own=True).files
    return {name: entry.size for name, entry in files.items()}


def _problem(path: Path, entry: FileEntry) -> str:
    try:
        size = path.lstat().st_size
        if size != entry.size and not path.is_symlink():
            return f"{path.name} has {size:,} of {entry.size:,} bytes"
        if checksum(path) != entry.crc32:
            return f"{path.name} is not what was written (checksum){_damaged_tensor(path)}"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except StoreError:
        raise
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return ""


def _damaged_tensor(path: Path) -> str:
    """Return where a file is damaged, in words; empty if it is not in a tensor that can be read."""
    try:
        with opened(path) as file:
            for name, known in json.loads((file.metadata() or {})[SUMS]).items():
                if int(checksums([file.get_tensor(name)])) != known:
                    return f" in {name}"
    except (SafetensorError, ConfigError, OSError, ValueError, LookupError, AttributeError, TypeError):
        pass  # its header is damaged
    return ""


def best_first(validations: Iterable[tuple[int, float | None]]) -> list[int]:
    """Return the steps of (step, validation loss), the lowest loss first; of equal ones the earlier."""
    return [step for _, step in sorted((loss, step) for step, loss in validations if loss is not None)]


def with_best_first(folders: Sequence[Path]) -> list[Path]:
    """Return the checkpoints with a known validation loss, best first; ``folders`` are newest first."""
    for folder in folders:
        with contextlib.suppress(ConfigError):  # of a damaged one
            by_step = {step_of(each): each for each in folders}
            best = best_first(read_state(folder).validations)
            return [by_step[step] for step in best if step in by_step]
    return []


def prune(
    newest: Path,
    keep_last: int,
    keep_every: int,
    before: float = math.inf,
    best: Collection[int] = (),
    passed: Collection[int] = (),
) -> None:
    """Delete checkpoints up to ``newest``, but no folder without a manifest, and no step of ``best``.

    In object storage a folder without one is the rest of an upload, or of a deletion. Checkpoints after
    ``newest`` or of the steps ``passed`` were passed over: they stay, and are not counted.
    """
    known = [each for each in newest_first(newest.parent) if step_of(each) not in passed]
    older = [each for each in known if step_of(each) <= step_of(newest)]
    whole = [each for each in older if not each.is_symlink() and (each / MANIFEST).exists()]
    for folder in older:
        kept = folder in whole[:keep_last] or (keep_every and step_of(folder) % keep_every == 0)
        kept = kept or step_of(folder) >= before or step_of(folder) in best
        rest = isinstance(folder, Remote) and folder not in whole
        if rest or (folder in whole and not kept):
            remove(folder)


def remove(folder: Path) -> None:
    """Delete a checkpoint. An interrupted deletion leaves none that anything reads."""
    if isinstance(folder, Remote):
        folder.remove(first=MANIFEST)
        return
    gone = folder.with_name(f".deleting-{folder.name}")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def clean(root: Path) -> None:
    """Remove the folders of broken attempts to write or delete, by their names."""
    for start in (".writing-", ".deleting-"):
        for folder in root.glob(f"{start}*"):
            if _NAME.fullmatch(folder.name.removeprefix(start)) and not folder.is_symlink():
                shutil.rmtree(folder, ignore_errors=True)


class Peers:
    """Other runs that keep in step with this one, and save elsewhere; here there are none.

    Only first ranks call its other methods than :meth:`say`, and those of all peers at the same steps.
    """

    def say(self, text: str, own: bool = False) -> None:
        """Print a line, once for all peers; one about this run's ``own`` files also beside others'."""
        if dist.get_rank() == 0:
            print(text, flush=True)

    def candidates(self, root: Path) -> list[Path | str]:
        """Return the checkpoints from which this run may go on, the newest first, or why none is."""
        return [*sent(root)]

    def damage(self, own: list[str]) -> list[str]:
        """Return the damage of a checkpoint of all peers; ``own`` is this run's."""
        return own

    def others_lack(self, root: Path, folders: list[Path], step: int) -> list[Path]:
        """Return checkpoints after ``step`` that are not among ``folders``, those of all peers."""
        return []

    def oldest_to_keep(self, root: Path, count: int) -> float:
        """Return the oldest of the ``count`` newest steps of all peers. It and later ones stay."""
        return math.inf


def flush(path: Path) -> None:
    """Wait until a file, or a folder's names, are on the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
