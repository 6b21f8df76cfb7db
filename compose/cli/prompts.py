"""The prompts of the command `generate`, and their tokens."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from compose.config.toml import COMMAND_LINE
from compose.data.chat_messages import Chat, read_chat
from compose.data.chat_replies import Replies
from compose.data.documents import JSON_LINES
from compose.data.tokenizer import JsonTokenizer, Tokenizer
from compose.errors import ConfigError

Prompt = str | Chat
"""A text, or the messages before a reply."""


def given_prompts(flags: Iterable[tuple[str, str]]) -> list[Prompt]:
    """Return the prompts of a command line, in their order.

    Raises:
        ConfigError: There is none, or a file of prompts cannot be used.
    """
    found: list[Prompt] = []
    for flag, value in flags:
        if flag == "--prompt":
            found.append(value)
        elif flag == "--prompts":
            found += _read_prompts(Path(value))
    if not all(found) or not found:
        raise ConfigError(f"{COMMAND_LINE}: --prompt: needs a text to continue")
    return found


def _read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts in a file; an empty line is none."""
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"is not UTF-8: {error.reason}"
        raise ConfigError(f"{COMMAND_LINE}: --prompts: {path}: {reason}") from None
    found: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            in_json = path.suffix in JSON_LINES
            found.append(_of_row(line) if in_json else line.removesuffix("\r"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
    if not found:
        raise ConfigError(f"{COMMAND_LINE}: --prompts: {path}: holds no prompt")
    return found


def _of_row(line: str) -> Prompt:
    """Return the prompt in a line of JSON. Raises ValueError if there is none."""
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if isinstance(row, dict) and "messages" in row:
        return read_chat(row, "messages")
    prompt = row.get("prompt") if isinstance(row, dict) else row
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("is neither a text nor an object with a prompt or messages")
    return prompt


def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], chat: bool, special: bool = True
) -> list[list[int]]:
    """Return the ids of prompts.

    Args:
        tokenizer: The tokenizer.
        prompts: The prompts.
        chat: Whether the tokenizer's chat template writes them. A text is the message of a user.
        special: Whether special tokens are added to a prompt and recognised in it.

    Returns:
        The ids of each.

    Raises:
        ConfigError: There is no chat template, or it fails; or messages are there without ``chat``.
    """
    if not chat:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if len(texts) < len(prompts):
            raise ConfigError(f"{COMMAND_LINE}: --prompts: holds messages; give --chat too")
        return [tokenizer.encode(text, added=special, markup=special) for text in texts]
    if not isinstance(tokenizer, JsonTokenizer):
        raise ConfigError(f"{COMMAND_LINE}: --chat: bytes have no chat template")
    replies, found = Replies(tokenizer), []
    for prompt in prompts:
        plain = isinstance(prompt, str)
        asked = Chat([{"role": "user", "content": prompt}], [], {}) if plain else prompt
        try:
            messages = asked.messages if plain else replies.form(asked)[0]
            written = replies.template.text(messages, asked.more, prompt=True)
        except ValueError as error:
            raise ConfigError(f"{tokenizer.path.parent}: {error}") from None
        found.append(tokenizer.encode_markup(written)[0])
    return found
