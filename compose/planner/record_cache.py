"""Files of what the planner has worked out: records, what they cost, probes, and parts of estimates.

A file's name is a hash of all that decides its content. That of a record has shapes and options of the
layers, degrees, keys of the config, versions, and the sources of the code. Neither the depth of the
model nor a cluster's speeds decide it, so that a composition of equal layers is recorded once. A file
is JSON, compressed, with its own hash before it; one that is broken is made anew.
"""

import contextlib
import functools
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from compose.config.job import Job
from compose.config.models import source_files
from compose.config.tables import Config, Data
from compose.errors import write_whole
from compose.pipeline.split import layer_names
from compose.planner.few_layers import LayerRuns, few_micro_batches, few_rows, kind_of, runs_of
from compose.planner.record import (
    Allocation,
    Operator,
    Record,
    RecordedMessage,
    StepSegment,
    TracedStep,
    Wait,
)

_LIMIT = 512 * 2**20  # bytes of all files; the oldest go first
_LENGTH = 32  # of the hash before the content
# Files of this folder that make a record; the others read one.
_OF_RECORDS = ("trace", "fake_world", "fake_host", "record", "record_cache", "recorder")
_OF_RECORDS += ("operator_figures", "few_layers", "memory")
BROKEN = (OSError, ValueError, TypeError, LookupError, AttributeError, zlib.error)
"""The errors of a file that is not there, or that holds something else."""
# Tables and keys that do not decide what a step does on meta.
_TABLES = ("run", "data", "checkpoint", "metrics", "profile", "source", "model", "parallel")
_KEYS = {
    "train": "steps epochs stop_after global_batch validate_every patience min_delta seed",
    "optimizer": "lr beta1 beta2 eps warmup warmup_from schedule decay decay_end min_lr offload_dir",
    "compile": "mode",
}
_DEPTH = "n_layers"


def default_folder() -> Path | None:
    """Return the folder of this user's files, made if need be; None if it cannot be written."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(home) / "dtensor-compose" / "records"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError):
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


class CacheFile:
    """One file; ``path`` is None if its content is another in each process, so that none is kept."""

    def __init__(self, folder: Path, ending: str, *decides: str) -> None:
        """``decides`` are texts of all that decides the content."""
        whole = "\n".join(decides)
        # The address of an object in a text is another in each process.
        self.path = None if " at 0x" in whole else folder / f"{_digest(whole)}.{ending}"

    def read(self) -> Any:
        """Return the content; None if there is no file, or if it is not whole."""
        if self.path is None:
            return None
        try:
            content = self.path.read_bytes()
            data = content[_LENGTH:]
            if hashlib.sha256(data).digest() != content[:_LENGTH]:
                return None
            os.utime(self.path)
            return json.loads(zlib.decompress(data))
        except BROKEN:
            return None

    def write(self, content: Any) -> None:
        """Keep the content. If the file cannot be written, nothing happens."""
        if self.path is None:
            return
        data = zlib.compress(json.dumps(content, separators=(",", ":")).encode(), 1)
        with contextlib.suppress(OSError):
            write_whole(self.path, hashlib.sha256(data).digest() + data)
            _remove_oldest(self.path.parent)


def remembered(
    folder: Path | None, ending: str, model: str, decides: str, make: Callable[[], Any]
) -> Any:
    """Return what a file holds, or what ``make`` returns: data for JSON, which the file then keeps."""
    if folder is None:
        return make()
    file = CacheFile(folder, ending, sources(model, planner=True), decides)
    if (known := file.read()) is None:
        file.write(known := make())
    return known


def _remove_oldest(folder: Path) -> None:
    """Remove the files that were not used for the longest time, if all are too large together."""
    files = [(entry.stat(), entry.path) for entry in os.scandir(folder) if entry.is_file()]
    size = sum(stat.st_size for stat, _ in files)
    for stat, path in sorted(files, key=lambda each: each[0].st_mtime):
        if size <= _LIMIT:
            break
        size -= stat.st_size
        with contextlib.suppress(OSError):
            os.unlink(path)


@functools.cache
def sources(name: str, planner: bool = False) -> str:
    """Return a hash of the versions of PyTorch and torchao, and of the sources of a model's records.

    With ``planner`` those that read records are among them.
    """
    files = [path for path in source_files(name) if path.parent.name != "cli"]
    if not planner:
        files = [p for p in files if p.parent.name != "planner" or p.stem in _OF_RECORDS]
    versions = torch.__version__ + (version("torchao") if find_spec("torchao") else "")
    return _digest(versions + "".join(_digest(path.read_bytes()) for path in files))


def _digest(content: bytes | str) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


class RecordFile:
    """The file of one record, and how the layers of its job are named in it."""

    def __init__(
        self, folder: Path, job: Job, kept: LayerRuns | None, rank: int, *others: object
    ) -> None:
        """Name the file of a pipeline rank's record with ``kept`` layers of each stage; None: all.

        ``others`` tell the rest of what decides the record.
        """
        row = few_rows(job)[rank] if job.degrees.pp > 1 else []
        layers = _layers(job, kept, sorted({action.stage for action in row} or {0}))
        self._names = {name: number for number, name in enumerate(chain.from_iterable(layers))}
        self.decides = *_texts(job, self._names), repr(([*map(len, layers)], (rank, *others)))
        """Texts of all that decides the record."""
        self.file = CacheFile(folder, "record", *self.decides)

    def read(self) -> TracedStep | None:
        """Return the record; None if there is none, or if its file is not whole."""
        try:
            return _traced(self.file.read(), list(self._names))
        except BROKEN:
            return None

    def write(self, traced: TracedStep) -> None:
        """Keep a record. If the file cannot be written, nothing happens."""
        if self.file.path:
            self.file.write(_data(traced, self._names))


def _layers(job: Job, kept: LayerRuns | None, stages: Sequence[int]) -> list[list[str]]:
    """Return the names in the model of the layers of each stage that are recorded."""
    pipeline, result = job.resolved.pipeline, list[list[str]]()
    if pipeline is None:
        return result
    every = layer_names(job.model, pipeline)
    counts = job.degrees.pp_layers if job.degrees.pp > 1 else (len(every),)
    if job.config.activation_checkpoint.mode in ("every_k", "budget"):
        stages = range(len(counts))  # which layers are recomputed is chosen from the whole model
    runs = runs_of(job)
    for stage in stages:
        start, names = sum(counts[:stage]), list[str]()
        if kept is None or runs is None:
            names = every[start : start + counts[stage]]
        else:
            for length, few in zip(runs.lengths[stage], kept.lengths[stage], strict=True):
                names += every[start : start + few]
                start += length
        result.append([f"{pipeline.layers}.{name}" for name in names])
    return result


def packed_rows(data: Data) -> bool:
    """Return whether rows of the data hold several documents: those of a text, or with a separator."""
    paths = [data.path] if isinstance(data.path, str) else data.path
    return data.separator >= 0 or any(not path.endswith((".bin", ".npy")) for path in paths)


def tables_of(config: Config) -> dict[str, Any]:
    """Return the tables, but for those of the model and the mesh, without what decides no step."""
    tables = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _TABLES}
    for table, keys in _KEYS.items():
        tables[table] = {k: v for k, v in asdict(tables[table]).items() if k not in keys.split()}
    return tables


def _texts(job: Job, names: Mapping[str, int]) -> list[str]:
    """Return all that decides the record of a rank, as texts."""
    config, pipeline, resolved = job.config, job.resolved.pipeline, job.resolved
    shape = config.model.config
    depth = (_DEPTH,) if pipeline else ()
    shape = {f.name: getattr(shape, f.name) for f in fields(shape) if f.name not in depth}
    degrees = {k: v for k, v in asdict(job.degrees).items() if k != "pp_layers"}
    inside = f"{pipeline.layers}." if pipeline else ""
    modules = [kind_of(job.model.get_submodule(name)) for name in names]
    ends = [
        (name, type(module).__name__)
        for name, module in job.model.named_modules()
        if not (inside and name.startswith(inside))
    ]

    def number(name: str) -> str | None:
        """Return a module's name with its layer's number; None for one in a layer that is not here."""
        if not inside or not name.startswith(inside):
            return name
        layer, _, rest = name.removeprefix(inside).partition(".")
        place = names.get(inside + layer)
        return None if place is None else f"{place}.{rest}"

    parts = []
    for part in fields(resolved):
        value = getattr(resolved, part.name)
        if isinstance(value, list):
            value = [[each] if isinstance(each, str) else each for each in value]
            value = [[number(n) for n in each if isinstance(n, str)] for each in value]
            value = [each for each in value if any(n is not None for n in each)]
        parts.append((part.name, value))
    rows = few_rows(job) if job.degrees.pp > 1 else len(few_micro_batches(job))
    return [
        sources(config.model.name),
        config.model.name,
        repr((job.world_size, degrees, tables_of(config), shape, asdict(config.model.lora))),
        repr(packed_rows(config.data)),  # it decides the kernel of attention
        repr((modules, ends, parts, rows)),
    ]


def _data(traced: TracedStep, names: Mapping[str, int]) -> dict[str, Any]:
    """Return a record as data for JSON, in columns."""
    record, groups = traced.record, dict[tuple[int, ...], int]()

    def unit(name: str) -> str:
        return f"#{names[name]}" if name in names else name

    def work(one: Operator | RecordedMessage | Wait) -> list[Any]:
        row = _row(one)
        if isinstance(one, RecordedMessage):
            row[_RANKS] = groups.setdefault(one.ranks, len(groups))
        return [_KINDS.index(type(one)), *row]

    rows = [work(one) for one in record.work]
    return {
        "segments": [(s.action, s.phase, unit(s.unit)) for s in record.segments],
        "work": rows,
        "groups": list(groups),
        "events": list(record.events.items()),
        "event_streams": list(record.event_streams.items()),
        "allocations": [_row(one) for one in record.allocations],
        "changes": record.changes,
        "host_allocations": [_row(one) for one in record.host_allocations],
        "host_changes": record.host_changes,
        "sent": sent_as_data(traced.broadcast),
    }


def sent_as_data(sent: Sequence[Any]) -> list[Any]:
    """Return what the first rank of a pipeline broadcast as data for JSON."""
    return [(list(shape), str(kind).removeprefix("torch."), more) for shape, kind, more in sent[:1]]


def sent_from_data(data: Any) -> list[Any]:
    """Return what :func:`sent_as_data` made data of."""
    return [(torch.Size(shape), getattr(torch, dtype), outputs) for shape, dtype, outputs in data]


def _row(one: Operator | RecordedMessage | Wait | Allocation) -> list[Any]:
    return [getattr(one, name) for name in one.__slots__]


_KINDS: tuple[Callable[..., Operator | RecordedMessage | Wait], ...] = (Operator, RecordedMessage, Wait)
_RANKS = list(RecordedMessage.__slots__).index("ranks")


def _traced(data: Any, names: Sequence[str]) -> TracedStep:
    """Return the record that :func:`_data` made; the errors of a foreign file are Python's own."""

    def unit(name: str) -> str:
        return names[int(name[1:])] if name.startswith("#") else name

    groups = [tuple(ranks) for ranks in data["groups"]]

    def work(kind: int, *row: Any) -> Operator | RecordedMessage | Wait:
        values: list[Any] = [tuple(value) if isinstance(value, list) else value for value in row]
        if kind == 1:
            values[_RANKS] = groups[values[_RANKS]]
        return _KINDS[kind](*values)

    record = Record(
        [StepSegment((s, k, m), phase, unit(name)) for (s, k, m), phase, name in data["segments"]],
        [work(*row) for row in data["work"]],
        dict(data["events"]),
        dict(data["event_streams"]),
        [Allocation(*row) for row in data["allocations"]],
        [(segment, place, change) for segment, place, change in data["changes"]],
        [Allocation(*row) for row in data["host_allocations"]],
        [(segment, place, change) for segment, place, change in data["host_changes"]],
    )
    return TracedStep(record, sent_from_data(data["sent"]))
