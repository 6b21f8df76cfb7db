"""Makes token sets: each input file is cut into units, and each unit becomes a shard of the set.

Several processes can work on units, in any order. A shard is renamed into place when it is whole, and
is not written again by a later attempt. The manifest is written last.
"""

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from compose.config.json_files import Count, read_json
from compose.data.chat_messages import PLAIN, ChatNames, pairs_of, read_chat, shape_of
from compose.data.chat_replies import Replies, encode
from compose.data.chat_template import has_template
from compose.data.documents import (
    ARROW,
    PACKED,
    ROWS,
    BadLine,
    FilePart,
    describe_bad_line,
    files_of,
    is_one_unit,
    rows,
    stop_at,
    text_blocks,
    texts,
)
from compose.data.special_tokens import MODEL, read_beside
from compose.data.token_files import FORMAT, MANIFEST
from compose.data.tokenizer import JsonTokenizer, copy_tokenizer, tokenizer_files
from compose.errors import ConfigError, noted, refuse_link_out, state_of, write_whole
from compose.object_storage import as_path

JOB = ".job.json"
UNIT = 64 << 20  # bytes of a file in one unit
_NAMES = ChatNames()
_REASONS = 5  # bad rows that are shown


@dataclass(frozen=True)
class TokenizeJob:
    """The input and the options of one token set."""

    tokenizer: str
    sha256: str
    kind: str  # "text", "chat" or "pairs"
    field: str  # of a row of JSON or Parquet that holds the document
    end: int
    """The id that is put after a document of text, and after a reply that the template does not end."""
    unit: int  # bytes of a file in one unit
    files: tuple[tuple[str, int, int], ...]  # path, bytes, time of the last change
    added: bool | None = None
    """Whether a document of text has the tokens that the tokenizer adds to a text; None for chats."""
    skip_bad: bool = False  # leave out rows that cannot be used
    names: ChatNames = _NAMES
    """How the rows of chats name what they hold."""
    beside: str = ""
    """SHA-256 of what else decides tokens: chat templates, special tokens, and the model's config."""


@dataclass
class TokenCounts:
    """The counts of one shard, or of all shards."""

    tokens: Count = 0
    highest: Count = 0  # of the ids
    documents: Count = 0
    empty: Count = 0  # documents that are left out, since nothing in them is learnt
    rows: Count = 0  # rows of JSON or Parquet, or files of text, without the bad ones
    replies: Count = 0
    learnt: Count = 0  # tokens of chats that are learnt; the first of a chat is no target
    bad: Count = 0
    reasons: list[str] = field(default_factory=list)
    """The first bad rows, and why they are left out."""
    notes: dict[str, Count] = field(default_factory=dict)
    """Notes on the template, with the number of replies that each is about."""


def describe_job(
    tokenizer: JsonTokenizer, kind: str, field: str, end: int, files: Iterable[Path], unit: int = UNIT
) -> TokenizeJob:
    """Return the job of tokenizing ``files``, which stops at the first bad row."""
    problems, result, paths = list[str](), [], list[Path]()
    for path in files:
        with noted(problems):
            paths += files_of(path)
    for path in paths:
        if path.suffix.lower() in PACKED:
            problems.append(f"{path}: is compressed; unpack it first")
            continue
        if kind != "text" and path.suffix.lower() not in ROWS:
            kinds = ", ".join(ROWS)
            problems.append(f"{path}: is no file of chats: {kinds}, or the folder of a saved dataset")
            continue
        try:
            state = state_of(path)
            with path.open("rb"):
                pass
        except OSError as error:
            problems.append(f"{path}: cannot be read: {error.strerror}")
            continue
        # In Hugging Face's cache a file is a link, and only the link's name says what it holds.
        name = str(path.parent.resolve() / path.name)
        if name.encode(errors="ignore") != os.fsencode(name):
            problems.append(f"{name}: has a name that is not UTF-8, which no set can keep; rename it")
        if path.suffix.lower() in ARROW and not state.st_size:
            problems.append(f"{path}: is empty, and no table")
        result.append((name, state.st_size, state.st_mtime_ns))
    meant = Counter(Path(name).resolve() for name, _, _ in result)
    problems += [f"{name}: is named twice" for name, count in meant.items() if count > 1]
    if problems:
        raise ConfigError(*problems)
    added, path = (True if kind == "text" else None), str(tokenizer.path)
    folder = tokenizer.path.parent
    model = read_beside(folder, MODEL)
    known = {key: model.get(key) for key in ("model_type", "tokenizer_class", "eos_token_id")}
    digest = hashlib.sha256(json.dumps(known).encode())
    for file in tokenizer_files(folder, tokenizer.path):
        if file != tokenizer.path:
            digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    about = (path, tokenizer.sha256, kind, field, end, unit, tuple(result), added)
    return TokenizeJob(*about, beside=digest.hexdigest())


def units_of(job: TokenizeJob) -> list[FilePart]:
    """Return the units of a job, in the order of their shards."""
    results: list[FilePart] = []
    for path, size, _ in job.files:
        whole = is_one_unit(path)
        for start in range(0, size, max(1, size) if whole else job.unit):
            stop = size if whole else min(start + job.unit, size)
            results.append(FilePart(f"{len(results):05}", path, start, stop, size))
    return results


def make_token_set(
    job: TokenizeJob, target: Path, workers: int, progress: Callable[[int, TokenCounts], None]
) -> TokenCounts:
    """Do the rest of ``job`` in a folder."""
    _claim(job, target)
    units, total, done = units_of(job), TokenCounts(), 0
    shards: dict[str, TokenCounts] = {}

    def finished(unit: FilePart, counts: TokenCounts) -> None:
        nonlocal done
        shards[unit.name] = counts
        done += unit.stop - unit.start
        _add(total, counts)
        progress(done, total)

    for unit in units:
        if counts := _shard_there(job, target, unit):
            finished(unit, counts)
    waiting = [unit for unit in units if unit.name not in shards]
    try:
        for unit, counts in _work(job, target, waiting, min(workers, len(waiting))):
            finished(unit, counts)
        _publish(job, target, [(unit.name, shards[unit.name]) for unit in units], total)
    except BadLine as error:
        raise ConfigError(describe_bad_line(error)) from None
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror or error}") from None
    except BrokenProcessPool:
        raise ConfigError(
            f"{target}: a worker died (out of memory?); the same command goes on, with fewer --workers"
        ) from None
    return total


def _work(
    job: TokenizeJob, target: Path, units: Sequence[FilePart], workers: int
) -> Iterator[tuple[FilePart, TokenCounts]]:
    """Yield each unit and its counts when its shard is finished."""
    if workers < 2:
        for unit in units:
            yield unit, make_shard(job, target, unit)
        return
    # Spawned, not forked: a forked copy of this process would lack torch's threads.
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        running = {pool.submit(make_shard, job, target, unit): unit for unit in units}
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _add(total: TokenCounts, more: TokenCounts) -> None:
    for name in ("tokens", "documents", "empty", "rows", "replies", "learnt", "bad"):
        setattr(total, name, getattr(total, name) + getattr(more, name))
    total.highest = max(total.highest, more.highest)
    total.reasons = [*total.reasons, *more.reasons][:_REASONS]
    total.notes = dict(Counter(total.notes) + Counter(more.notes))


def _claim(job: TokenizeJob, target: Path) -> None:
    """Make ``target`` the folder of ``job``. Raises ConfigError if it is another job's."""
    path = target / JOB
    try:
        if path.is_symlink() or path.exists():
            refuse_link_out(path, target)
            # The tokenizer may have moved: its hash is enough.
            if replace(read_json(path, TokenizeJob), tokenizer="") != replace(job, tokenizer=""):
                raise ConfigError(
                    f"{target}: holds another job (files, tokenizer or options differ); choose another"
                    " --out, or delete it"
                )
            return
        if target.exists() and any(target.iterdir()):
            raise ConfigError(f"{target}: is not empty; choose another --out")
        target.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(job), indent=1))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{target}: cannot be used: {reason}") from None


def _shard_there(job: TokenizeJob, target: Path, unit: FilePart) -> TokenCounts | None:
    """Return the counts of a finished shard, else None. The counts are written last."""
    path = target / f".{unit.name}.json"
    try:
        counts = read_json(path, TokenCounts)
    except ConfigError:
        return None
    sizes = {
        "tokens": counts.tokens * np.dtype(_dtype(_tokenizer(job))).itemsize,
        "ends": counts.documents * 8,
        **({"trained": counts.tokens} if job.kind != "text" else {}),
    }
    results = [(target / f"{name}-{unit.name}.bin", size) for name, size in sizes.items()]
    if any(p.is_symlink() or not p.is_file() or p.stat().st_size != size for p, size in results):
        return None
    return counts


def _publish(
    job: TokenizeJob, target: Path, shards: list[tuple[str, TokenCounts]], total: TokenCounts
) -> None:
    tokenizer = _tokenizer(job)
    copy_tokenizer(tokenizer.path.parent, target, tokenizer.path)
    size = max(tokenizer.ordinary, total.highest + 1, job.end + 1)  # of the vocabulary that it needs
    manifest = {
        "format": FORMAT,
        "kind": job.kind,
        "dtype": _dtype(tokenizer),
        "tokenizer": {"sha256": job.sha256, "vocab_size": size, "end": job.end},
        "tokens": total.tokens,
        "documents": total.documents,
        "added": job.added,
        "rows": total.rows,
        "empty": total.empty,
        "bad": total.bad,
        **({"replies": total.replies, "learnt": total.learnt} if job.kind != "text" else {}),
        "sources": [{"path": path, "bytes": size} for path, size, _ in job.files],
        "shards": [
            {"name": name, "tokens": counts.tokens, "documents": counts.documents}
            for name, counts in shards
        ],
    }
    write_whole(target / MANIFEST, json.dumps(manifest, indent=1))


def _dtype(tokenizer: JsonTokenizer) -> str:
    return "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"


@cache
def _tokenizer(job: TokenizeJob) -> JsonTokenizer:
    result = JsonTokenizer(as_path(job.tokenizer))
    if result.sha256 != job.sha256:
        raise ConfigError(f"{job.tokenizer}: has changed since this was started")
    return result


def make_shard(job: TokenizeJob, target: Path, unit: FilePart) -> TokenCounts:
    """Write the shard of one unit, whole or not at all."""
    tokenizer = _tokenizer(job)
    counts, chat = TokenCounts(), job.kind != "text"
    names = ["tokens", "ends", *(["trained"] if chat else [])]
    aside = [target / f".{name}-{unit.name}.bin" for name in names]
    for path in aside:  # left by a killed attempt, or a link
        path.unlink(missing_ok=True)
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(path.open("xb")) for path in aside]
        make = _chats if chat else _texts
        for ids, learnt, ends in make(job, unit, tokenizer, counts):
            files[0].write(np.asarray(ids, _dtype(tokenizer)).tobytes())
            counts.tokens += len(ids)
            counts.highest = max(counts.highest, *ids, 0)
            if ends:
                counts.documents += 1
                files[1].write(np.asarray([counts.tokens], "<i8").tobytes())
            if chat:
                counts.learnt += sum(learnt[1:])
                files[2].write(np.asarray(learnt, np.uint8).tobytes())
        for file in files:
            file.flush()
            os.fsync(file.fileno())
    for path in aside:
        path.replace(path.with_name(path.name[1:]))
    write_whole(target / f".{unit.name}.json", json.dumps(asdict(counts), indent=1))
    return counts


Piece = tuple[list[int], list[bool], bool]
"""Ids, which of them are learnt, and whether a document ends here."""


def _bad(job: TokenizeJob, counts: TokenCounts) -> Callable[[BadLine], None]:
    def left_out(error: BadLine) -> None:
        counts.bad += 1
        if len(counts.reasons) < _REASONS:
            counts.reasons.append(describe_bad_line(error))

    return left_out if job.skip_bad else stop_at


def _texts(
    job: TokenizeJob, unit: FilePart, tokenizer: JsonTokenizer, counts: TokenCounts
) -> Iterator[Piece]:
    before, after = tokenizer.around if job.added else ([], [])
    ending = [] if after[-1:] == [job.end] else [job.end]
    if not unit.path.lower().endswith(ROWS):  # the file is one document, and this unit a part of it
        if unit.start == 0:
            yield before, [], False
        for text, start, stop in text_blocks(unit):
            yield tokenizer.encode_part(text, start, stop), [], False
        if unit.stop == unit.size:
            counts.rows += 1
            yield [*after, *ending], [], True
        return
    for text in texts(unit, job.field, _bad(job, counts)):
        counts.rows += 1
        counts.empty += not text
        if text:
            yield [*tokenizer.encode(text, added=bool(job.added)), *ending], [], True


def replies_for(job: TokenizeJob, tokenizer: JsonTokenizer) -> Replies:
    """Return what writes the chats of a job: prompts that are texts need no template."""
    plain = job.names.shape == PLAIN or not has_template(tokenizer)
    return Replies(tokenizer, job.end, plain)


def _first_shape(job: TokenizeJob, unit: FilePart) -> str:
    """Return the shape of the first row of a file that has one."""
    for _, row in rows(replace(unit, start=0, stop=unit.size), lambda error: None):
        with contextlib.suppress(ValueError):
            return shape_of(row, job.names)
    return ""


def _chats(
    job: TokenizeJob, unit: FilePart, tokenizer: JsonTokenizer, counts: TokenCounts
) -> Iterator[Piece]:
    replies, bad = replies_for(job, tokenizer), _bad(job, counts)
    shape = _first_shape(job, unit) if unit.start else ""
    for place, row in rows(unit, bad):
        try:
            own = shape_of(row, job.names)
            shape = shape or own
            if own != shape:
                has = ", ".join(map(repr, row))
                raise ValueError(
                    f"is of the shape {own} (it has {has}), and the first row of {shape}; put them into"
                    " two files"
                )
            pair = job.kind == "pairs"
            chats = pairs_of(row, job.names) if pair else (read_chat(row, job.names),)
            asked = [[m for m in chat.messages if m["role"] != "system"][:1] for chat in chats]
            if asked[0] != asked[-1]:
                raise ValueError("is no pair: the two chats ask for different things")
            rendered = [text for chat in chats for text in replies.render(chat)]
            encoded = [encode(tokenizer, text) for text in rendered]
            if pair and [any(learnt[1:]) for _, learnt in encoded] != [True, True]:
                raise ValueError("is no pair of a chosen and a rejected reply that can be learnt")
        except (ValueError, ConfigError) as error:
            bad(BadLine(unit.path, place, str(error)))
            continue
        counts.rows += 1
        counts.empty += not rendered
        for text, (ids, learnt) in zip(rendered, encoded, strict=True):
            if any(learnt[1:]):
                counts.replies += len(text.replies)
                yield ids, learnt, True
            else:
                counts.empty += 1
    counts.notes = dict(replies.notes)
