"""Checkpoints as folders: each exists whole or not at all.

One is written under a name that nothing reads, flushed to the device, described by a manifest of every
file's size and checksum, and published by renaming it, which is atomic. So a folder ``step-00000100``
was complete once; whether it still is, its manifest tells.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from compose.base.json_files import Count, read_json
from compose.base.own_files import open_own, write_whole
from compose.checkpoint.metadata import METADATA, PICKLED, read_metadata, shards
from compose.errors import ConfigError

T = TypeVar("T")
MANIFEST = "manifest.json"
STATE = "state.json"
MARK = ".saved"  # in run.dir, which has had a checkpoint
_NAME = re.compile(r"step-(\d{8,})")
_BLOCK = 2**20  # bytes read at once: they stay in the core's cache until they are summed
_READERS = 4  # files read at once; reading and summing hold no lock of Python's


@dataclass(frozen=True)
class Entry:
    """A file, as a manifest has it."""

    size: Count
    crc32: Annotated[int, Field(ge=0, lt=2**32)]


@dataclass(frozen=True)
class _Manifest:
    files: dict[str, Entry]


@dataclass(frozen=True)
class Scale:
    """Of the loss, in float16."""

    value: Annotated[float, Field(gt=0)]
    clean: Count = 0


class ModelFields(BaseModel):
    """A model's name, and what its config holds beside it."""

    model_config = ConfigDict(extra="allow")
    name: str

    def fields(self) -> dict[str, Any]:
        """The config's."""
        return dict(self.model_extra or {})


class DataFields(BaseModel):
    """What decides which tokens a sample holds; of an older checkpoint, as much as it knew."""

    model_config = ConfigDict(extra="allow")
    tokenizer: str | None = None
    samples: list[Count] = []
    weights: list[float] = []
    seq_len: Count = 0
    seed: int = 0


@dataclass(frozen=True)
class State:
    """What state.json says of a run: how far it has come, and what it was of."""

    step: Count
    samples: Count
    tokens: Count
    model: ModelFields
    scale: Scale | None = None
    hugging_face: str | None = None
    data: DataFields = field(default_factory=DataFields)
    seed: int = 0
    ranks: Annotated[int, Field(ge=1)] = 1
    versions: dict[str, str] = field(default_factory=dict)


def read_state(folder: Path) -> State:
    """What a checkpoint says of its run. Raises ConfigError, with file and field, for what is none."""
    return read_json(folder / STATE, State)


def name_of(step: int) -> str:
    """The folder's name of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The steps that went before the checkpoint in ``folder``."""
    found = _NAME.fullmatch(folder.name)
    return int(found[1]) if found else -1


def begin(root: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of ``step`` into, without what a broken attempt left."""
    folder = root / f".writing-{name_of(step)}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def checksum(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    value, block = 0, memoryview(bytearray(_BLOCK))
    with open_own(path, buffering=0) as file:
        while size := file.readinto(block):
            value = zlib.crc32(block[:size], value)
    return value


def described(paths: Iterable[Path]) -> dict[str, dict[str, int]]:
    """The manifest's entries of files."""
    found = sorted(paths)
    with ThreadPoolExecutor(_READERS) as readers:
        sums = list(readers.map(checksum, found))
    return {
        path.name: {"size": path.stat().st_size, "crc32": crc}
        for path, crc in zip(found, sums, strict=True)
    }


def publish(folder: Path, files: Mapping[str, Mapping[str, int]]) -> Path:
    """Write the manifest, flush all there is to the device, and give the folder its name.

    Raises OSError where a file is not as long as ``files`` says, or anything cannot be written.
    """
    for name, entry in files.items():
        if (folder / name).stat().st_size != entry["size"]:
            raise OSError(f"{name} was not written whole")
    write_whole(folder / MANIFEST, json.dumps({"files": files}, indent=1))
    for path in (*folder.iterdir(), folder):
        _flush(path)
    final = folder.with_name(folder.name.removeprefix(".writing-"))
    if os.path.lexists(final):  # one of this step that was found damaged: kept, under another name
        aside = next(
            p
            for i in range(1, 10**6)
            if not os.path.lexists(p := final.with_name(f"{final.name}.damaged-{i}"))
        )
        final.rename(aside)
    folder.rename(final)
    _flush(final.parent)
    return final


def mark(run: Path) -> None:
    """Note in a run's folder that it has had a checkpoint, which a run that finds none is to know."""
    if not os.path.lexists(run / MARK):
        write_whole(run / MARK, "A checkpoint was saved in this folder.\n")


def has_saved(run: Path) -> bool:
    """Whether a run's folder has had a checkpoint: by its mark, or by the metrics of a run that was
    before there were marks."""
    if os.path.lexists(run / MARK):
        return True
    try:
        with open_own(run / "metrics.jsonl") as file:
            return any(b'"checkpoint": {' in line and b'"failed": 0.0' in line for line in file)
    except OSError:
        return False


def newest_first(root: Path) -> list[Path]:
    """The checkpoints in ``root``, whole or damaged."""
    found = [p for p in root.glob("step-*") if _NAME.fullmatch(p.name)] if root.is_dir() else []
    return sorted(found, key=step_of, reverse=True)


def problems(folder: Path, share: tuple[int, int] = (0, 1)) -> list[str]:
    """One line for all that keeps a checkpoint from being what was published.

    share: (index, count): of the files, only every ``count``-th is read.
    """
    if not os.path.lexists(folder / MANIFEST):
        return [f"{MANIFEST} is missing"]
    try:
        files = _readable(folder, MANIFEST, lambda: read_json(folder / MANIFEST, _Manifest)).files
        outside = [name for name in files if not _is_plain(name)]
        if outside:
            return [f"{MANIFEST} names {outside[0]!a}, which is no file of the folder's own"]
        if share[0] == 0:
            _check_all_there(folder, files)
    except ConfigError as error:
        return error.problems
    mine = sorted(files)[share[0] :: share[1]]
    with ThreadPoolExecutor(_READERS) as readers:
        return [*filter(None, readers.map(lambda name: _problem(folder / name, files[name]), mine))]


def _check_all_there(folder: Path, files: Mapping[str, Entry]) -> None:
    """Raise ConfigError where the manifest leaves out what belongs to a checkpoint."""
    described = METADATA if METADATA in files else PICKLED
    missing = [name for name in (STATE, described) if name not in files]
    if missing:
        wanted = [METADATA if name == PICKLED else name for name in missing]
        raise ConfigError(*(f"{name} is not in {MANIFEST}" for name in wanted))
    state = _readable(folder, STATE, lambda: read_state(folder))
    if step_of(folder) not in (-1, state.step):
        raise ConfigError(f"{STATE} is of step {state.step}, the folder of step {step_of(folder)}")
    for name, size in shards(_readable(folder, described, lambda: read_metadata(folder))).items():
        if name not in files:
            raise ConfigError(f"{name} is not in {MANIFEST}")
        if files[name].size < size:
            raise ConfigError(f"{described} has {size:,} bytes in {name}, of {files[name].size:,}")


def _readable(folder: Path, name: str, read: Callable[[], T]) -> T:
    """What ``read`` finds in a file of the folder's own. Raises ConfigError in words that begin with
    the file's name."""
    try:
        with open_own(folder / name):
            return read()
    except FileNotFoundError:
        raise ConfigError(f"{name} is missing") from None
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from None
    except ConfigError as error:
        reason = str(error).removeprefix(f"{folder / name}: ")
        raise ConfigError(f"{name} cannot be read: {reason}") from None


def _is_plain(name: str) -> bool:
    return name.isprintable() and name not in ("", ".", "..", MANIFEST) and "/" not in name


def _problem(path: Path, entry: Entry) -> str:
    try:
        size = path.lstat().st_size
        if size != entry.size and not path.is_symlink():
            return f"{path.name} has {size:,} of {entry.size:,} bytes"
        if checksum(path) != entry.crc32:
            return f"{path.name} is not what was written (checksum)"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return ""


def prune(root: Path, keep_last: int, keep_every: int, newest: Path) -> None:
    """Delete checkpoints but the ``keep_last`` newest and every ``keep_every``-th step's (0: none).

    ``newest``, just published, stays in any case, and so does what has no manifest to be told by.
    """
    for place, folder in enumerate(newest_first(root)):
        kept = place < keep_last or (keep_every and step_of(folder) % keep_every == 0)
        others = folder.is_symlink() or not (folder / MANIFEST).exists()
        if kept or folder == newest or others:
            continue
        # Renamed first: a deletion that is cut short must not leave half a checkpoint.
        gone = folder.with_name(f".deleting-{folder.name}")
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def clean(root: Path) -> None:
    """Remove what broken attempts to write or delete have left, by the names that these have."""
    for start in (".writing-", ".deleting-"):
        for folder in root.glob(f"{start}*"):
            if _NAME.fullmatch(folder.name.removeprefix(start)) and not folder.is_symlink():
                shutil.rmtree(folder, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
