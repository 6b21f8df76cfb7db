"""Reads input files, a unit at a time: text, and rows of JSON lines, a JSON array, Parquet or Arrow.

A unit is a range of bytes of a file, cut at the ends of lines; a file of another kind is one unit.
"""

import contextlib
import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from compose.config.json_files import read_json
from compose.errors import ConfigError, or_say

JSON_LINES = (".jsonl", ".ndjson", ".json")
ARROW = (".parquet", ".arrow")
ROWS = (*JSON_LINES, *ARROW)
PACKED = (".gz", ".tgz", ".zst", ".xz", ".bz2", ".lz4", ".zip", ".7z", ".tar")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_BLOCK = 1 << 20  # bytes of a text in one block
_BATCH = 1024  # rows of Parquet or Arrow that are in memory as Python's objects
_AROUND = 1 << 14  # bytes before and after a block that are read with it
_STATE = "state.json"  # of a folder that datasets saved
_BLANK = object()  # the value of a line without one
_KINDS = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}


@dataclass(frozen=True)
class FilePart:
    """The lines that begin at the bytes ``start`` to ``stop`` of a file."""

    name: str
    path: str
    start: int
    stop: int
    size: int  # bytes of the file


class BadLine(Exception):
    """The byte where a line that cannot be used begins, or the row's number, and the reason."""

    def __init__(self, path: str, place: int, words: str) -> None:
        super().__init__(path, place, words)  # so that it can be pickled
        self.path, self.place, self.words = path, place, words


def describe_bad_line(error: BadLine) -> str:
    """Return the error with its place as people count it: lines from 1."""
    if is_one_unit(error.path):
        return f"{error.path}: row {error.place + 1}: {error.words}"
    with open(error.path, "rb") as file:
        line = 1 + sum(block.count(b"\n") for block in _blocks(file.read, error.place))
    return f"{error.path}:{line}: {error.words}"


def _blocks(read: Callable[[int], bytes], size: int) -> Iterator[bytes]:
    while size > 0 and (block := read(min(size, _BLOCK))):
        size -= len(block)
        yield block


def stop_at(error: BadLine) -> None:
    """Raise the error: no bad line is left out."""
    raise error


def files_of(path: Path) -> list[Path]:
    """Return the files of a dataset that ``datasets`` saved to a folder; another path as it is."""
    if not path.is_dir():
        return [path]
    if (path / "dataset_dict.json").exists():
        splits = read_json(path / "dataset_dict.json", dict[str, Any]).get("splits")
        names = ", ".join(map(str, splits)) if isinstance(splits, list) and splits else "none"
        raise ConfigError(
            f"{path}: holds splits ({names}); name the folder of one, such as {path}/train"
        )
    if not (path / _STATE).exists():
        raise ConfigError(f"{path}: is a folder, and no dataset that was saved to one ({_STATE})")
    state = read_json(path / _STATE, dict[str, Any])
    try:
        names = [Path(each["filename"]).name for each in state["_data_files"]]
    except (KeyError, TypeError):
        raise ConfigError(f"{path / _STATE}: names no files in _data_files") from None
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ConfigError(
            f"{path}: has its rows in another order; save it again after flatten_indices()"
        )
    return [path / name for name in names]


def is_one_unit(path: str) -> bool:
    """Return whether a file is not cut into units, as it is not lines; a place in it is a row."""
    kind = Path(path).suffix.lower()
    if kind not in JSON_LINES:
        return kind in ARROW
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(_AROUND).removeprefix(BOM_UTF8).lstrip().startswith(b"[")
    return False


def texts(unit: FilePart, field: str, bad: Callable[[BadLine], None] = stop_at) -> Iterator[str]:
    """Yield the text of each row of a file of rows."""
    for place, row in rows(unit, bad, field):
        text = row.get(field)
        if isinstance(text, str):
            yield text
        elif field in row and text is None:
            yield ""
        else:
            names = ", ".join(map(repr, row)) or "nothing"
            has = f"it has {names}"
            if field in row:
                has = f"it holds {_KINDS.get(type(text), type(text).__name__)}"
            bad(BadLine(unit.path, place, f"has no text in {field!r} ({has}); see --field"))


def rows(
    unit: FilePart, bad: Callable[[BadLine], None] = stop_at, field: str = ""
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (place, row) of each row of a file; ``bad`` raises the others, or leaves them out.

    ``field``: the only one that is needed, where a file is stored by columns.
    """
    if unit.path.lower().endswith(ARROW):
        yield from _arrow_rows(unit, field)
        return
    if is_one_unit(unit.path):
        try:
            with _opened(unit) as file:
                values: list[Any] = parsed_json(file.read().removeprefix(BOM_UTF8))
        except ValueError as error:
            raise ConfigError(f"{unit.path}: {error}") from None
        parsed: Iterator[tuple[int, Any]] = enumerate(values)
    else:
        parsed = _lines(unit)
    for place, content in parsed:
        try:
            row = parsed_json(content) if isinstance(content, bytes) else content
            if not isinstance(row, dict) and row is not _BLANK:
                raise ValueError("is not an object")
        except ValueError as error:
            bad(BadLine(unit.path, place, str(error)))
            continue
        if row is not _BLANK:
            yield place, row


def parsed_json(content: bytes) -> Any:
    """Return the value of a JSON text, or _BLANK. Raises ValueError."""
    line = ""
    try:
        line = content.decode("utf-8")
        if not line.strip():
            return _BLANK
        value = json.loads(line)
        if _SURROGATE.search(line):  # a surrogate without a pair is half a character
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: {error.reason}") from None
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ValueError(f"holds half a character, {half[1:-1]}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        one = "; a row stands on one line, or the file is one list" if line.strip() == "{" else ""
        raise ValueError(f"is not JSON: {error}{one}") from None
    return value


def _lines(unit: FilePart) -> Iterator[tuple[int, bytes]]:
    """Yield (place, content) of the lines that begin in the unit."""
    with _opened(unit) as file:
        if unit.start:
            # If a line begins exactly here, the byte before is its newline.
            file.seek(unit.start - 1)
            file.readline()
        while (place := file.tell()) < unit.stop and (line := file.readline()):
            # Some editors begin a file with a byte order mark, which has no meaning.
            yield place, line if place else line.removeprefix(BOM_UTF8)


def _opened(unit: FilePart) -> IO[bytes]:
    with or_say(f"{unit.path}: can no longer be read"):
        return open(unit.path, "rb")


def text_blocks(unit: FilePart) -> Iterator[tuple[str, int, int]]:
    """Yield (text, start, stop) for the parts of a text file that belong to a unit. Raises BadLine.

    A tokenizer may treat the start and the end of its input in a special way. So the text around a part
    comes with it.
    """
    with _opened(unit) as file:
        place, end = _seam(file, unit.start, unit.size), _seam(file, unit.stop, unit.size)
        while place < end:
            stop = min(_seam(file, place + _BLOCK, unit.size), end)
            before = min(place, _AROUND)
            file.seek(place - before)
            left, own, right = (file.read(size) for size in (before, stop - place, _AROUND))
            # A character may be cut at the far ends.
            left, right = (each.decode("utf-8", "ignore") for each in (left, right))
            try:
                text = own.decode("utf-8-sig" if place == 0 else "utf-8")
            except UnicodeDecodeError as error:
                words = f"is not UTF-8: {error.reason}"
                raise BadLine(unit.path, place + error.start, words) from None
            yield left + text + right, len(left), len(left) + len(text)
            place = stop


def _seam(file: IO[bytes], place: int, size: int) -> int:
    """Return where to cut a text file, at ``place`` or soon after.

    It is between two lines without white space at the cut, as tokenizers take a run of white space
    together. If no such place comes for long, it is between any two lines.
    """
    if not 0 < place < size:
        return min(place, size)
    file.seek(place - 1)
    nearest = 0
    while line := file.readline():
        here = file.tell()
        nearest = nearest or here
        following = file.read(1)
        file.seek(here)
        if not following:
            return size
        if here - nearest > _BLOCK:
            return nearest
        if line.removesuffix(b"\n").removesuffix(b"\r")[-1:].strip() and following.strip():
            return here
    return size


def _arrow_rows(unit: FilePart, field: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (place, row) of each row of a Parquet or an Arrow file, a batch at a time."""
    try:
        import pyarrow.ipc  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            f"{unit.path}: needs pyarrow: pip install 'dtensor-compose[parquet]'"
        ) from None
    place, parquet = 0, unit.path.lower().endswith(".parquet")
    try:
        with pyarrow.memory_map(unit.path) as source:
            if parquet:
                file = pyarrow.parquet.ParquetFile(source)
                columns = [field] if field else None
                names, batches = file.schema_arrow.names, file.iter_batches(_BATCH, columns=columns)
            elif source.read(6) == b"ARROW1":  # a file that is read from its end
                file = pyarrow.ipc.open_file(source)
                names, batches = file.schema.names, map(file.get_batch, range(file.num_record_batches))
            else:  # datasets writes streams
                source.seek(0)
                batches = pyarrow.ipc.open_stream(source)
                names = batches.schema.names
            if field and field not in names:
                has = ", ".join(map(repr, names))
                raise BadLine(unit.path, 0, f"has no column {field!r} (it has {has}); see --field")
            for batch in batches:
                for start in range(0, len(batch), _BATCH):
                    for row in (
                        batch.select([field] if field else names).slice(start, _BATCH).to_pylist()
                    ):
                        yield place, row if field else _without_nulls(row)
                        place += 1
    except (pyarrow.ArrowException, ArithmeticError, LookupError, OSError, ValueError) as error:
        kind = "Parquet" if parquet else "Arrow"
        raise BadLine(unit.path, place, f"cannot be read as {kind}: {error}") from None


def _without_nulls(value: Any) -> Any:
    """Leave keys without a value out of objects: Arrow gives each object the keys of all."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
