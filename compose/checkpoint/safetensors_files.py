"""Folders of safetensors files: read by slices, written one tensor at a time.

A file (https://github.com/huggingface/safetensors) has 8 bytes with the header's length; the header,
JSON with each tensor's type, shape and place; the tensors' bytes. All numbers are little-endian.
Several files have an index beside them with the file of each tensor.
"""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from compose.config.json_files import parse_json, read_json
from compose.errors import LEADS_OUT, ConfigError, Positive, fill, leads_out, open_own, refuse_link_out
from compose.object_storage import Remote

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_HEADER = 100 * 10**6  # bytes of the longest header that safetensors reads
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# The types of the format that our checkpoints may hold.
NAMES = {
    **{dtype: name for name, dtype in DTYPES.items()},
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: str  # its name in the format, such as "F32"
    path: Path
    name: str  # in the file


@dataclass(frozen=True)
class _Quantization:
    """The used part of ``quantization_config`` in config.json."""

    weight_block_size: tuple[Positive, Positive]


@dataclass(frozen=True)
class _Quantized:
    """The used part of config.json."""

    quantization_config: _Quantization


@dataclass(frozen=True)
class _Index:
    """The used part of the index: the file of each tensor."""

    weight_map: dict[str, str]


class _RemoteFile:
    """A file in object storage, as ``safe_open`` gives a file here: a read asks for whole rows.

    So each rank reads about what it keeps, and no node needs room for the files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = int.from_bytes(self.bytes(0, 8), "little")
        if size > _HEADER:
            raise SafetensorError("is no safetensors file")
        try:
            values = parse_json(bytes(self.bytes(8, size)), dict[str, dict[str, Any]])
            self.words, self.begin = values.pop("__metadata__", {}), 8 + size
            self.stored = {name: _RemoteTensor(self, **entry) for name, entry in values.items()}
        except (TypeError, ValueError) as error:
            raise SafetensorError(str(error)) from None

    def __enter__(self) -> "_RemoteFile":
        return self

    def __exit__(self, *_: object) -> None: ...

    def keys(self) -> Iterable[str]:
        return self.stored

    def metadata(self) -> dict[str, str]:
        return self.words

    def get_slice(self, name: str) -> "_RemoteTensor":
        return self.stored[name]

    def get_tensor(self, name: str) -> Tensor:
        return self.stored[name][...]

    def bytes(self, begin: int, size: int) -> bytearray:
        data = bytearray(size)
        with open_own(self.path, buffering=0) as file:
            file.seek(begin)
            if fill(file, memoryview(data)) < size:
                raise SafetensorError("ends too early")
        return data


@dataclass(frozen=True)
class _RemoteTensor:
    """A tensor in the header of a :class:`_RemoteFile`, which reads it."""

    file: _RemoteFile
    dtype: str
    shape: list[int]
    data_offsets: list[int]

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, region: Any) -> Tensor:
        (begin, end), shape, cut = self.data_offsets, self.shape, ()
        if region is not ... and 0 not in shape:
            (start, stop, _), cut = region[0].indices(shape[0]), (slice(None), *region[1:])
            row = (end - begin) // shape[0]
            begin, end = begin + start * row, begin + max(start, stop) * row
            shape = [max(0, stop - start), *shape[1:]]
        data = self.file.bytes(self.file.begin + begin, end - begin)
        words = {"": {"dtype": self.dtype, "shape": shape, "data_offsets": [0, end - begin]}}
        text = json.dumps(words).encode()
        return load(bytes(len(text).to_bytes(8, "little") + text + data))[""][cut or ...]


def opened(path: Path) -> Any:
    """Open a file as ``safe_open`` does, wherever it is."""
    return _RemoteFile(path) if isinstance(path, Remote) else safe_open(path, "pt")


class TensorFiles:
    """The tensors of a folder; ``entries`` lists them by name, and ``read`` reads parts of them."""

    def __init__(self, folder: Path, only: str = "") -> None:
        """Read the headers of the files in ``folder``, or of the one file ``only``."""
        self.folder = folder
        self.remote: dict[Path, Any] = {}  # open files of object storage, which map no memory
        self.entries: dict[str, TensorEntry] = {}
        problems = []
        for path in [folder / only] if only else self._paths():
            if leads_out(path, folder):
                problems.append(f"{path}: {LEADS_OUT}")
                continue
            if path.exists() and not path.is_file():  # a pipe, for example, might never end
                problems.append(f"{path}: is no file")
                continue
            try:
                with self._opened(path) as file:
                    for name in file.keys():  # noqa: SIM118 (it has no iterator)
                        part = file.get_slice(name)
                        entry = TensorEntry(tuple(part.get_shape()), part.get_dtype(), path, name)
                        if self.entries.setdefault(name, entry) is not entry:
                            other = self.entries[name].path.name
                            problems.append(f"{path}: holds {name}, which {other} holds too")
            except FileNotFoundError:
                problems.append(f"{path}: is missing")
            except (OSError, SafetensorError) as error:
                problems.append(f"{path}: cannot be read: {error}")
        if problems:
            raise ConfigError(*problems)

    def _opened(self, path: Path) -> Any:
        if isinstance(path, Remote) and path not in self.remote:
            self.remote[path] = opened(path)
        return self.remote.get(path) or opened(path)

    def _paths(self) -> list[Path]:
        index = self.folder / INDEX
        if (self.folder / WHOLE).exists():  # transformers takes it before shards
            return [self.folder / WHOLE]
        if index.exists():
            refuse_link_out(index, self.folder)
            names = sorted(set(read_json(index, _Index).weight_map.values()))
            # The index may name only files in its own folder.
            wrong = [name for name in names if name in ("", ".", "..") or set(name) & set("/\\\0")]
            if wrong:
                raise ConfigError(
                    *(f"{index}: weight_map: {json.dumps(name)} is no file's name" for name in wrong)
                )
            return [self.folder / name for name in names]
        if not self.folder.is_dir():
            raise ConfigError(f"{self.folder}: no such folder")
        raise ConfigError(f"{self.folder}: has neither {WHOLE} nor {INDEX}")

    @functools.cached_property
    def blocks(self) -> tuple[int, int]:
        """Rows and columns of a matrix of 8 bits that share a scale, as config.json says."""
        path = self.folder / "config.json"
        refuse_link_out(path, self.folder)
        return read_json(path, _Quantized).quantization_config.weight_block_size

    def read(self, name: str, region: Sequence[slice]) -> Tensor:
        """Read a part of a tensor."""
        # Open the file each time: while a file stays mapped, all pages read from it stay in memory.
        entry = self.entries[name]
        with self._opened(entry.path) as file:
            return file.get_slice(entry.name)[tuple(region) or ...]


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_files(
    folder: Path, planned: Sequence[PlannedTensor], tensors: Iterable[Tensor], limit: int
) -> list[Path]:
    """Write tensors into files, holding only one tensor at a time."""
    shards: list[list[PlannedTensor]] = [[]]
    filled = 0
    for one in planned:
        if shards[-1] and filled + one.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(one)
        filled += one.nbytes
    count, source = len(shards), iter(tensors)
    names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    names = names if count > 1 else [WHOLE]
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            file.write(header(shard))
            for one in shard:
                tensor = next(source)
                assert (tuple(tensor.shape), tensor.dtype) == (one.shape, one.dtype), one.name
                file.write(bytes_of(tensor))
                del tensor  # free it before the next one is made
    if count > 1:
        places = {one.name: name for name, shard in zip(names, shards, strict=True) for one in shard}
        total = sum(one.nbytes for one in planned)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    return [folder / name for name in names]


def header(planned: Sequence[PlannedTensor], more: Mapping[str, str] | None = None) -> bytes:
    """Return the beginning of a file whose tensors lie one after another."""
    # transformers requires "pt"
    words: dict[str, Any] = {"__metadata__": {"format": "pt", **(more or {})}}
    end = 0
    for one in planned:
        begin, end = end, end + one.nbytes
        entry = {"dtype": NAMES[one.dtype], "shape": list(one.shape), "data_offsets": [begin, end]}
        words[one.name] = entry
    text = json.dumps(words, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors' bytes
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor on the CPU; if it is not contiguous, that of a copy."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
