"""Reads the documents of input files, a unit at a time: lines of text, JSON lines, rows of Parquet.

A unit is a range of bytes of a file, cut at the ends of lines.
"""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from compose.errors import ConfigError

JSON_LINES = (".jsonl", ".ndjson", ".json")
PACKED = (".gz", ".zst", ".xz", ".bz2", ".zip")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_BLOCK = 1 << 20  # bytes of a text in one block
_AROUND = 1 << 14  # bytes before and after a block that are read with it
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
    """A byte of an input file, or a row of a Parquet file, that cannot be used, and the reason."""

    def __init__(self, path: str, place: int, words: str) -> None:
        super().__init__(path, place, words)  # so that it can be pickled
        self.path, self.place, self.words = path, place, words


def describe_bad_line(error: BadLine) -> str:
    """Return the error with its place as people count it: lines from 1."""
    if error.path.endswith(".parquet"):
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


def json_texts(unit: FilePart, field: str, bad: Callable[[BadLine], None] = stop_at) -> Iterator[str]:
    """Yield the text of each row of JSON lines."""
    for place, row in json_rows(unit, bad):
        text = row.get(field)
        if isinstance(text, str):
            yield text
        elif field in row and text is None:
            yield ""
        else:
            names = ", ".join(map(repr, row)) or "nothing"
            has = f"it holds {_KINDS[type(text)]}" if field in row else f"it has {names}"
            bad(BadLine(unit.path, place, f"has no text in {field!r} ({has}); see --field"))


def json_rows(
    unit: FilePart, bad: Callable[[BadLine], None] = stop_at
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (place, row) of each row of JSON lines; ``bad`` raises the others, or leaves them out."""
    for place, line in _lines(unit):
        try:
            row = _row(unit, place, line)
        except BadLine as error:
            bad(error)
            continue
        if row is not None:
            yield place, row


def _row(unit: FilePart, place: int, content: bytes) -> dict[str, Any] | None:
    """Return the row on a line of JSON lines, or None if the line is blank. Raises BadLine."""
    try:
        line = content.decode("utf-8")
        if not line.strip():
            return None
        row = json.loads(line)
        if _SURROGATE.search(line):  # a surrogate without a pair is half a character
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise BadLine(unit.path, place, f"is not UTF-8: {error.reason}") from None
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise BadLine(unit.path, place, f"holds half a character, {half[1:-1]}") from None
    except RecursionError:
        raise BadLine(unit.path, place, "is nested too deeply") from None
    except ValueError as error:
        raise BadLine(unit.path, place, f"is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadLine(unit.path, place, "is not an object")
    return row


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
    try:
        return open(unit.path, "rb")
    except OSError as error:
        raise ConfigError(f"{unit.path}: can no longer be read: {error.strerror}") from None


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


def parquet_texts(
    unit: FilePart, field: str, bad: Callable[[BadLine], None] = stop_at
) -> Iterator[str]:
    """Yield the text of each row of a Parquet file."""
    try:
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise BadLine(unit.path, 0, "needs pyarrow: pip install 'dtensor-compose[parquet]'") from None
    try:
        file = pyarrow.parquet.ParquetFile(unit.path)
        if field not in file.schema_arrow.names:
            has = ", ".join(map(repr, file.schema_arrow.names))
            raise BadLine(unit.path, 0, f"has no column {field!r} (it has {has}); see --field")
        row = 0
        for batch in file.iter_batches(batch_size=1024, columns=[field]):
            for text in batch.column(0).to_pylist():
                if text is None or isinstance(text, str):
                    yield text or ""
                else:
                    bad(BadLine(unit.path, row, f"has no text in {field!r}"))
                row += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise BadLine(unit.path, 0, f"cannot be read as Parquet: {error}") from None
