"""Text to token ids and back: bytes, or a tokenizer.json of Hugging Face's ``tokenizers``."""

import functools
import hashlib
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compose.config.hugging_face import unfetched
from compose.data.special_tokens import (
    CONFIG,
    LLAMA,
    MODEL,
    class_of_copy,
    model_ends,
    read_beside,
    read_special_tokens,
)
from compose.errors import LEADS_OUT, ConfigError, leads_out, read_file, refuse_link_out, write_whole

SEPARATOR = 256
"""The byte tokenizer's one special token. It ends each document. The vocabulary has 257 ids."""
FILE = "tokenizer.json"
TOKENIZER = "tokenizer"
"""The tokenizer's folder in ``run.dir``."""
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
)
"""The files beside a tokenizer.json that belong to it."""
# Candidates for the end of a document, if no file names it.
_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")  # noqa: RUF001


class ByteTokenizer:
    """The tokenizer whose ids are the bytes of UTF-8; the id 256 ends a document."""

    name, sha256, vocab_size, ordinary, end = "bytes", "", SEPARATOR + 1, SEPARATOR + 1, SEPARATOR

    def encode(self, text: str, added: bool = True, markup: bool = False) -> list[int]:
        """Return the bytes of ``text`` in UTF-8; nothing is added, and no text is special."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; separators are left out."""
        return bytes(i for i in ids if i < SEPARATOR).decode(errors="replace")


class JsonTokenizer:
    """A tokenizer.json, with the end of a document from the tokenizer_config.json beside it."""

    def __init__(self, path: Path) -> None:
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Loaded

        tokenizer_files(path.parent, path)  # raises for a link out of the folder
        try:
            content = read_file(path)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        try:
            self.tokenizer = Loaded.from_str(content.decode("utf-8"))
        except BaseException as error:
            # tokenizers raises plain Exception. A panic of its Rust code is a BaseException.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ConfigError(f"{path}: is no tokenizer.json: {_line(error)}") from None
        self.path, self.name = path, str(path)
        self.sha256 = hashlib.sha256(content).hexdigest()
        # Some files hold the length to which texts are cut or filled up, for another use.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        result = read_special_tokens(path.parent, self.tokenizer.get_vocab(), b'"ByteLevel"' in content)
        self.config, self.special, self.split = result.config, result.names, result.split
        if result.kind == LLAMA:
            _split_as_llama(self.tokenizer, self.config)
        self.tokenizer.add_tokens([AddedToken(token, **options) for token, options in result.added])
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        # Ids may have gaps: the model needs a row for the highest id.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        added = self.tokenizer.get_added_tokens_decoder()
        plain = (i for i in vocabulary.values() if i not in added or not added[i].special)
        self.ordinary = max(plain, default=-1) + 1
        """The size without special tokens at the end; a model may lack rows for them (Gemma 3's 1B)."""
        named = self.special.get("eos_token")
        ends = [vocabulary[named]] if named in vocabulary else []
        if not named:
            ends += [each for each in model_ends(path.parent) if each < self.vocab_size]
            ends += [vocabulary[token] for token in _ENDS if token in vocabulary]
        self.end = next(iter(ends), -1)

    def encode(self, text: str, added: bool = True, markup: bool = False) -> list[int]:
        """Return the ids of a text; with ``added`` also the tokens that the tokenizer puts around it.

        With ``markup`` special tokens in the text count as such. With both, it is transformers'
        ``tokenizer(text)``.
        """
        return self._encoded(text, added, markup).ids

    def encode_part(self, text: str, start: int, stop: int) -> list[int]:
        """Return the ids that begin between two places of a text, as ordinary text."""
        encoding = self._encoded(text, added=False, markup=False)
        starts = [place for place, _ in encoding.offsets]
        first = bisect_left(starts, start) if start else 0
        last = bisect_left(starts, stop) if stop < len(text) else len(starts)
        return encoding.ids[first:last]

    @functools.cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer adds before and after a text."""
        encoding = self._encoded("a", added=True, markup=False)
        own = [sequence is not None for sequence in encoding.sequence_ids]
        first, last = (own.index(True), len(own) - own[::-1].index(True)) if any(own) else (0, 0)
        return encoding.ids[:first], encoding.ids[last:]

    def encode_markup(self, text: str, added: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text that may hold special tokens, and the span (start, stop) of each.

        With ``added`` the tokens that the tokenizer puts around a text are there too; their spans are
        empty.
        """
        encoding = self._encoded(text, added, markup=True)
        return encoding.ids, encoding.offsets

    def _encoded(self, text: str, added: bool, markup: bool) -> Any:
        self.tokenizer.encode_special_tokens = self.split or not markup
        try:
            return self.tokenizer.encode(text, add_special_tokens=added)
        except Exception as error:  # tokenizers raises plain Exception
            raise ConfigError(f"{self.path}: cannot encode a text: {_line(error)}") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens included."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


Tokenizer = ByteTokenizer | JsonTokenizer


def _split_as_llama(tokenizer: Any, config: Mapping[str, Any]) -> None:
    """Split texts as transformers' class for Llama 2 does, whatever tokenizer.json says.

    Older files put a space before each part of a text that is between special tokens.
    """
    from tokenizers import decoders, models, pre_tokenizers

    space = config.get("add_prefix_space") in (None, True)
    scheme = "always" if config.get("legacy") else "first"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme=scheme if space else "never", split=False
    )
    strip = [decoders.Strip(" ", 1, 0)] if space else []
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.fuse_unk = tokenizer.model.byte_fallback = True


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def open_tokenizer(path: Path) -> JsonTokenizer:
    """Open the tokenizer at ``path``: a tokenizer.json, or a folder that holds one."""
    file = path / FILE if path.is_dir() else path
    if path.is_dir():
        tokenizer_files(path)  # raises for a link out of the folder
    if not file.exists():
        raise ConfigError(unfetched(path) or f"{file}: no such file")
    return JsonTokenizer(file)


def tokenizer_files(folder: Path, named: Path | None = None) -> list[Path]:
    """List the files of a folder that belong to a tokenizer; only ``named`` may be a link out of it."""
    results = [p for pattern in _TOKENIZER_FILES for p in sorted(folder.glob(pattern)) if p.is_file()]
    problems = [
        f"{p}: {LEADS_OUT}"
        for p in results
        if p != named and (leads_out(p, folder) or (p.parent != folder and leads_out(p.parent, folder)))
    ]
    if problems:
        raise ConfigError(*problems)
    return results


def copy_tokenizer(source: Path, target: Path, named: Path | None = None) -> None:
    """Copy the files of a tokenizer from a folder into another one, which is made."""
    target.mkdir(parents=True, exist_ok=True)
    for path in tokenizer_files(source, named):
        copy = target / path.relative_to(source)
        if copy.parent != target and copy.parent.is_symlink():
            raise ConfigError(f"{copy.parent}: is a link; remove it, as files are written there")
        copy.parent.mkdir(exist_ok=True)
        write_whole(copy, path.read_bytes())
    if named and named.name != FILE:
        write_whole(target / FILE, named.read_bytes())
    kind = "" if (target / MODEL).exists() else class_of_copy(source)
    if kind:
        values = read_beside(target, CONFIG)
        write_whole(target / CONFIG, json.dumps(values | {"tokenizer_class": kind}, indent=2))


def copy_with_config(source: Path, folder: Path) -> None:
    """Copy the files of a Hugging Face folder that describe tokens; an export reads only the copy."""
    config = source / MODEL
    refuse_link_out(config, source)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / MODEL, read_file(config))
    copy_tokenizer(source, folder)
