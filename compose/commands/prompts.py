"""The prompts of the command `generate`, and their tokens."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from compose.data.chat_template import ChatTemplate
from compose.data.documents import JSON_LINES
from compose.data.tokenizer import JsonTokenizer, Tokenizer
from compose.errors import ConfigError
from compose.toml import COMMAND_LINE


def given_prompts(flags: Iterable[tuple[str, str]]) -> list[str]:
    """Return the prompts of a command line, in their order.

    Args:
        flags: The flags with their values.

    Raises:
        ConfigError: There is none, or a file of prompts cannot be used.
    """
    found: list[str] = []
    for flag, value in flags:
        if flag == "--prompt":
            found.append(value)
        elif flag == "--prompts":
            found += _read_prompts(Path(value))
    if not all(found) or not found:
        raise ConfigError(f"{COMMAND_LINE}: --prompt: needs a text to continue")
    return found


def _read_prompts(path: Path) -> list[str]:
    """Return the prompts in a file; an empty line is none."""
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"is not UTF-8: {error.reason}"
        raise ConfigError(f"{COMMAND_LINE}: --prompts: {path}: {reason}") from None
    found: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt: Any = line.removesuffix("\r")
        if path.suffix in JSON_LINES:
            try:
                prompt = json.loads(line)
                prompt = prompt.get("prompt") if isinstance(prompt, dict) else prompt
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}:{number}: is not JSON: {error}") from None
            if not isinstance(prompt, str) or not prompt:
                raise ConfigError(f"{path}:{number}: is neither a text nor an object with a prompt")
        found.append(prompt)
    if not found:
        raise ConfigError(f"{COMMAND_LINE}: --prompts: {path}: holds no prompt")
    return found


def encode_prompts(
    tokenizer: Tokenizer, texts: Sequence[str], chat: bool, special: bool = True
) -> list[list[int]]:
    """Return the ids of prompts.

    Args:
        tokenizer: The tokenizer.
        texts: The prompts.
        chat: Whether each is a message of a user, which the tokenizer's chat template wraps.
        special: Whether special tokens are added to a prompt and recognised in it.

    Returns:
        The ids of each.

    Raises:
        ConfigError: There is no chat template, or it fails.
    """
    if not chat:
        return [tokenizer.encode(text, added=special, markup=special) for text in texts]
    if not isinstance(tokenizer, JsonTokenizer):
        raise ConfigError(f"{COMMAND_LINE}: --chat: bytes have no chat template")
    template, found = ChatTemplate(tokenizer), []
    for text in texts:
        try:
            written = template.text([{"role": "user", "content": text}], {}, prompt=True)
        except ValueError as error:
            raise ConfigError(f"{tokenizer.path.parent}: {error}") from None
        found.append(tokenizer.encode_markup(written)[0])
    return found
