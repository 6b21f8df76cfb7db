"""Text to token ids and back: bytes, or a tokenizer.json of Hugging Face's ``tokenizers``."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from compose.errors import ConfigError

SEPARATOR = 256
"""The byte tokenizer's one special token: it ends each document. Its vocabulary is 257."""
FILE = "tokenizer.json"
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

        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        try:
            self.tokenizer = Loaded.from_str(content.decode("utf-8"))
        except Exception as error:  # tokenizers raises this class itself
            raise ConfigError(f"{path}: is no tokenizer.json: {error}") from None
        self.path, self.name = path, str(path)
        self.sha256 = hashlib.sha256(content).hexdigest()
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        # Ids may have gaps: the model needs a row for the highest.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.config = self._config()
        named = self.config.get("eos_token")
        named = named.get("content") if isinstance(named, dict) else named
        candidates = (named,) if named else _ENDS
        self.end = next((vocabulary[token] for token in candidates if token in vocabulary), -1)

    def _config(self) -> dict[str, Any]:
        path = self.path.with_name("tokenizer_config.json")
        if not path.exists():
            return {}
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None

    def encode(self, text: str) -> list[int]:
        self.tokenizer.encode_special_tokens = True
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_markup(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of a text whose special tokens are meant, and where in it each of them begins."""
        self.tokenizer.encode_special_tokens = False
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, [start for start, _ in encoding.offsets]

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


def open_tokenizer(path: Path) -> JsonTokenizer:
    """The tokenizer at ``path``: a tokenizer.json, or a folder that holds one.

    Raises ConfigError where there is none.
    """
    file = path / FILE if path.is_dir() else path
    if not file.exists():
        raise ConfigError(f"{file}: no such file")
    return JsonTokenizer(file)


def carry(source: Path, target: Path) -> None:
    """Copy what a folder holds of a tokenizer into the folder ``target``, which is made."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in CARRIED:
        for path in sorted(source.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, target / path.name)
