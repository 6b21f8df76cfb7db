"""The command `python -m compose tokenize`: it makes a token set of text, JSONL or Parquet files."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from compose.cli.command_line import read_flags
from compose.config.toml import COMMAND_LINE
from compose.data.chat_replies import Replies
from compose.data.token_files import as_table, open_token_set
from compose.data.token_set_writing import Counts, describe_job, make_token_set
from compose.data.tokenizer import open_tokenizer
from compose.errors import ConfigError, whole_number

_FLAGS = {
    "--tokenizer": "FILE",
    "--out": "DIR",
    "--field": "NAME",
    "--chat": "",
    "--end": "TOKEN",
    "--no-special-tokens": "",
    "--skip-bad": "",
    "--workers": "N",
}
USAGE = """\
python -m compose tokenize --tokenizer tokenizer.json --out DIR [--field NAME] [--chat]
    [--end TOKEN] [--no-special-tokens] [--skip-bad] FILES...

Makes DIR, which data.path and data.validation can name. A .jsonl file has a document on each line, a
.parquet file one in each row (pip install 'dtensor-compose[parquet]'); any other file is one document
of UTF-8 text. Started again, it goes on where it was.

  --tokenizer  a tokenizer.json, or a folder with one
  --out        folder to make
  --field      field or column with the text; default: text, and messages with --chat
  --chat       rows are chats, written by the tokenizer's chat template; replies alone are learnt
  --end        token that ends a document, and a reply after which the chat template writes nothing;
               default: the tokenizer's eos_token
  --no-special-tokens
               a text has only the end token; else what the tokenizer adds to a text too, such as a
               token at its start
  --skip-bad   leave out rows that cannot be used, and say how many; else the first one ends the command
  --workers    processes; default: one for each core
"""


def tokenize(arguments: Sequence[str]) -> int:
    """Turn text or chats into ids: python -m compose tokenize --tokenizer FILE --out DIR FILES."""
    if "--help" in arguments or "-h" in arguments:
        print(USAGE, end="")
        return 0
    files, flags = read_flags(arguments, _FLAGS)
    missing = [name for name in ("--tokenizer", "--out") if not flags.get(name)]
    if missing or not files:
        what = missing[0] if missing else "FILES"
        raise ConfigError(f"{COMMAND_LINE}: tokenize: needs {what}; see --help")
    workers = flags.get("--workers", str(os.cpu_count() or 1))
    if whole_number(workers) < 1:
        raise ConfigError(f"{COMMAND_LINE}: --workers: {workers} is not a number of processes")
    tokenizer = open_tokenizer(Path(flags["--tokenizer"]))
    chat, added = "--chat" in flags, "--no-special-tokens" not in flags
    if chat and not added:
        raise ConfigError(
            f"{COMMAND_LINE}: --no-special-tokens: is for text; a chat has the tokens that its template"
            " writes"
        )
    end = tokenizer.end
    if "--end" in flags:
        found = tokenizer.tokenizer.token_to_id(flags["--end"])
        if found is None:
            raise ConfigError(
                f"{COMMAND_LINE}: --end: {flags['--end']} is no token of {tokenizer.name}"
            )
        end = found
    if chat:
        Replies(tokenizer)  # raises if there is no template
    elif end < 0:
        raise ConfigError(
            f"{COMMAND_LINE}: --end: {tokenizer.name} does not say which token ends a document"
        )
    field = flags.get("--field", "messages" if chat else "text")
    kind = "chat" if chat else "text"
    job = describe_job(tokenizer, kind, field, end, [Path(name) for name in files])
    job = replace(job, added=job.added if added else False, skip_bad="--skip-bad" in flags)
    target = Path(flags["--out"])
    bar = ProgressBar(sum(size for _, size, _ in job.files))
    counts = make_token_set(job, target, whole_number(workers), bar)
    bar.end()
    left_out = f", {counts.empty:,} without a reply left out" if chat and counts.empty else ""
    what = "conversations" if chat else "documents"
    print(f"{target}: {counts.tokens:,} tokens, {counts.documents:,} {what}{left_out}", flush=True)
    if chat or counts.bad:
        lengths = np.diff(open_token_set(target).ends, prepend=0)
        print(_table(counts, lengths, chat), flush=True)
    return 0


def _table(counts: Counts, lengths: np.ndarray, chat: bool) -> str:
    """Return what became of the rows."""
    half, most = np.percentile(lengths, [50, 99]).astype(int) if len(lengths) else (0, 0)
    share = 100 * counts.learnt / max(1, counts.tokens)
    lines = [
        ("rows", counts.rows + counts.bad, ""),
        ("replies", counts.replies if chat else None, "to learn"),
        ("tokens learnt", counts.learnt if chat else None, f"{share:.1f} % of {counts.tokens:,}"),
        ("longest", int(lengths.max(initial=0)), f"tokens; half have at most {half:,}, 99 % {most:,}"),
        ("empty", counts.empty or None, "left out: " + ("no reply to learn" if chat else "no text")),
        *(("note", count, note) for note, count in counts.notes.items()),
        ("bad", counts.bad or None, "left out (--skip-bad), for example:"),
    ]
    return "\n".join([as_table(lines), *(f"    {reason}" for reason in counts.reasons)])


class ProgressBar:
    """The progress on standard error.

    On a terminal it is one line that changes; else it prints a line for each tenth.
    """

    def __init__(self, size: int) -> None:
        self.size, self.begun, self.shown = max(1, size), time.monotonic(), 0
        self.first: int | None = None  # bytes that an earlier attempt has finished
        self.terminal = sys.stderr.isatty()

    def __call__(self, done: int, counts: Counts) -> None:
        """Show how far the job is."""
        passed = time.monotonic() - self.begun
        if self.first is None:
            self.first = done
        rate = (done - self.first) / passed if passed else 0.0
        left = f"{(self.size - done) / rate:,.0f} s left" if rate else "..."
        part = done / self.size
        words = f"{part:4.0%}  {done / 1e6:,.1f} MB  {counts.tokens:,} tokens  {left}"
        if self.terminal:
            bar = "#" * int(30 * part)
            print(f"\r[{bar:<30}] {words:<60}", end="", file=sys.stderr, flush=True)
        elif int(10 * part) > self.shown:
            self.shown = int(10 * part)
            print(words, file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the line on a terminal."""
        if self.terminal:
            print(file=sys.stderr)
