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
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MANIFEST = "manifest.json"
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_BLOCK = 2**20  # bytes read at once: they stay in the core's cache until they are summed
_READERS = 4  # files read at once; reading and summing hold no lock of Python's


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
    with path.open("rb", buffering=0) as file:
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
    if final.exists():  # one of this step that was found damaged: kept, under another name
        aside = next(
            p
            for i in range(1, 10**6)
            if not (p := final.with_name(f"{final.name}.damaged-{i}")).exists()
        )
        final.rename(aside)
    folder.rename(final)
    _flush(final.parent)
    return final


def newest_first(root: Path) -> list[Path]:
    """The checkpoints in ``root``, whole or damaged."""
    found = [p for p in root.glob("step-*") if _NAME.fullmatch(p.name)] if root.is_dir() else []
    return sorted(found, key=step_of, reverse=True)


def problems(folder: Path, share: tuple[int, int] = (0, 1)) -> list[str]:
    """One line for all that keeps a checkpoint from being what was published.

    share: (index, count): of the files, only every ``count``-th is read.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = {name: (entry["size"], entry["crc32"]) for name, entry in files.items()}
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [f"{MANIFEST} cannot be read"]
    mine = sorted(expected)[share[0] :: share[1]]
    with ThreadPoolExecutor(_READERS) as readers:
        return [*filter(None, readers.map(lambda name: _problem(folder / name, *expected[name]), mine))]


def _problem(path: Path, size: int, crc: int) -> str:
    try:
        if path.stat().st_size != size:
            return f"{path.name} has {path.stat().st_size:,} of {size:,} bytes"
        if checksum(path) != crc:
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
        if kept or folder == newest or not (folder / MANIFEST).exists():
            continue
        # Renamed first: a deletion that is cut short must not leave half a checkpoint.
        gone = folder.with_name(f".deleting-{folder.name}")
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def clean(root: Path) -> None:
    """Remove what broken attempts to write or delete have left."""
    for pattern in (".writing-*", ".deleting-*"):
        for folder in root.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that a reader finds the old one or the new one, never a part."""
    aside = path.with_name(f".{path.name}.new")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
