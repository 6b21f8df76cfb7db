"""Text to token ids and back: bytes, or a tokenizer.json of Hugging Face's ``tokenizers``."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from compose.base.json_files import read_json
from compose.base.own_files import LEADS_OUT, leads_out, read_file, write_whole
from compose.errors import ConfigError

SEPARATOR = 256
"""The byte tokenizer's one special token: it ends each document. Its vocabulary is 257."""
FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
MODEL = "config.json"
"""Of Hugging Face's model, which has the ids of special tokens too."""
TOKENIZER = "tokenizer"
"""The folder of it in ``run.dir``."""
CARRIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)
"""What stands beside a tokenizer.json and belongs to it."""
# Where no tokenizer_config.json says which token ends a document.
_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")  # noqa: RUF001


class Tokenizer(Protocol):
    """name: for messages. sha256: of the file; empty for bytes. end: the id that ends a document, -1 if
    there is none."""

    name: str
    sha256: str
    vocab_size: int
    end: int

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without special tokens around it; what it spells of them stays text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
        ...


class Bytes:
    """Each byte of UTF-8 is an id, and 256 ends a document."""

    name, sha256, vocab_size, end = "bytes", "", SEPARATOR + 1, SEPARATOR

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < SEPARATOR).decode(errors="replace")


class JsonTokenizer:
    """A tokenizer.json, and of the tokenizer_config.json beside it what ends a document.

    Raises ConfigError where it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Loaded

        carried(path.parent, path)  # which names what leads out of it
        try:
            content = read_file(path)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        try:
            self.tokenizer = Loaded.from_str(content.decode("utf-8"))
        except BaseException as error:
            # tokenizers raises Exception itself, and where its Rust code panics, what is none.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ConfigError(f"{path}: is no tokenizer.json: {_line(error)}") from None
        self.path, self.name = path, str(path)
        self.sha256 = hashlib.sha256(content).hexdigest()
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        # Ids may have gaps: the model needs a row for the highest.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        beside = path.with_name(CONFIG)
        self.config = read_json(beside, dict[str, Any]) if beside.exists() else {}
        self.special = self._special(beside)
        named = self.special.get("eos_token")
        candidates = (named,) if named else _ENDS
        self.end = next((vocabulary[token] for token in candidates if token in vocabulary), -1)

    def _special(self, path: Path) -> dict[str, str]:
        """The special tokens that tokenizer_config.json names, as "eos_token"."""
        found = {}
        for name, value in self.config.items():
            # "add_eos_token" and its like say whether, not which.
            if not name.endswith("_token") or value is None or isinstance(value, bool):
                continue
            content = value.get("content") if isinstance(value, dict) else value
            if not isinstance(content, str):
                raise ConfigError(f"{path}: {name}: is no token: neither a string nor has it content")
            found[name] = content
        return found

    def encode(self, text: str) -> list[int]:
        return self._encoded(text, markup=False).ids

    def encode_markup(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of a text whose special tokens are meant, and where in it each of them begins."""
        encoding = self._encoded(text, markup=True)
        return encoding.ids, [start for start, _ in encoding.offsets]

    def _encoded(self, text: str, markup: bool) -> Any:
        self.tokenizer.encode_special_tokens = not markup
        try:
            return self.tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # as above
            raise ConfigError(f"{self.path}: cannot encode a text: {_line(error)}") from None

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def open_tokenizer(path: Path) -> JsonTokenizer:
    """The tokenizer at ``path``: a tokenizer.json, or a folder that holds one.

    Raises ConfigError where there is none.
    """
    file = path / FILE if path.is_dir() else path
    if path.is_dir():
        carried(path)  # which names what leads out of it
    if not file.exists():
        raise ConfigError(f"{file}: no such file")
    return JsonTokenizer(file)


def carried(folder: Path, named: Path | None = None) -> list[Path]:
    """The files of a folder that belong to a tokenizer. named: one that a person named, wherever it is.

    Raises ConfigError, with a line for each that is a link out of the folder.
    """
    found = [p for pattern in CARRIED for p in sorted(folder.glob(pattern)) if p.is_file()]
    problems = [f"{p}: {LEADS_OUT}" for p in found if p != named and leads_out(p, folder)]
    if problems:
        raise ConfigError(*problems)
    return found


def carry(source: Path, target: Path, named: Path | None = None) -> None:
    """Copy what a folder holds of a tokenizer into the folder ``target``, which is made.

    named: a tokenizer.json that a person named, by another name perhaps, or outside. Raises ConfigError
    as :func:`carried` does, and OSError.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in carried(source, named):
        write_whole(target / path.name, path.read_bytes())
    if named and named.name != FILE:
        write_whole(target / FILE, named.read_bytes())


def keep(source: Path, folder: Path) -> None:
    """Copy into ``folder``, which is made, what Hugging Face's folder ``source`` says of tokens: an
    export reads of no other place. Raises ConfigError and OSError, as :func:`carry` does."""
    config = source / MODEL
    if leads_out(config, source):
        raise ConfigError(f"{config}: {LEADS_OUT}")
    carry(source, folder)
    write_whole(folder / MODEL, read_file(config))
