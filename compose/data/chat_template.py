"""Chats written as text by a tokenizer's template, and the parts of the text to learn: the replies."""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from compose.base.own_files import read_file
from compose.data.limits import TooLong, limited
from compose.data.special_tokens import CONFIG
from compose.data.tokenizer import JsonTokenizer
from compose.errors import ConfigError

# Limits for writing one chat, far above normal use: a template is code that comes with a download.
_SECONDS = 10.0
_MEMORY = 1 << 30  # bytes
_CHARACTERS = 1 << 26

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Rendered:
    """The text of a chat."""

    text: str
    replies: Sequence[tuple[int, int]]
    """The spans (start, stop) in ``text`` to learn from."""


class ChatTemplate:
    """The chat template of a tokenizer.

    It comes from chat_template.jinja or tokenizer_config.json beside the tokenizer.
    """

    def __init__(self, tokenizer: JsonTokenizer) -> None:
        """Read and compile the template.

        Raises:
            ConfigError: The tokenizer has no template, or it cannot be compiled.
        """
        from jinja2.ext import Extension, loopcontrols
        from jinja2.nodes import Node
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """The tag {% generation %}: it marks replies for transformers, and writes nothing."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Parser) -> list[Node]:
                """Return the nodes inside the tag."""
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        self.path, source = _source(tokenizer)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        # As in transformers: JSON for a model is not escaped for HTML.
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            with limited(_SECONDS, _MEMORY):
                self.template = environment.from_string(source)
        except (Exception, TooLong) as error:  # compiling to Python may fail in many ways
            raise ConfigError(f"{self.path}: the chat template{_reason(error)}") from None
        self.special = tokenizer.special

    def text(self, messages: Sequence[Message], more: Mapping[str, Any], prompt: bool = False) -> str:
        """Write a chat. Every error in the template raises ValueError with its line."""
        given = {**self.special, **more, "messages": messages, "add_generation_prompt": prompt}
        try:
            with limited(_SECONDS, _MEMORY):
                pieces, size = [], 0
                # Not render(): it would build the whole text before its size is known.
                for piece in self.template.root_render_func(self.template.new_context(given)):
                    pieces.append(piece)
                    size += len(piece)
                    if size > _CHARACTERS:
                        raise ValueError(f"writes more than {_CHARACTERS:,} characters")
                text = "".join(pieces)
                text.encode()  # fails for half a character (a lone surrogate)
        except (Exception, TooLong) as error:
            raise ValueError(f"the chat template{_reason(error)}") from None
        return text

    def render(self, messages: Sequence[Message], **more: Any) -> list[Rendered]:
        """Return the texts that teach the replies in ``messages``, which have the role "assistant".

        Usually this is one text. Some templates write an earlier reply in another way than the last one
        (for example, they leave out the thoughts of earlier turns). Then there is one text for each
        reply, with the messages before it. The span to learn of a reply begins where the model would
        begin to write, and ends with the turn.

        Args:
            messages: The messages of the chat.
            **more: More values for the template, such as ``tools``.

        Returns:
            The texts and their spans to learn. The list is empty if there are no replies.

        Raises:
            ValueError: The template refuses the chat or fails.
        """
        whole = self.text(messages, more)
        replies: list[tuple[int, int]] = []
        texts: list[Rendered] = []
        joined = True
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            prompt = self.text(messages[:i], more, prompt=True)
            text = self.text(messages[: i + 1], more)
            if not text.startswith(prompt):
                raise ValueError(
                    f"message {i + 1}: the chat template does not write a reply where it asks for one"
                )
            # White space after the token that ends the turn is not part of the reply.
            reply = len(prompt), len(text.rstrip())
            replies.append(reply)
            texts.append(Rendered(text, [reply]))
            joined = joined and whole.startswith(text)
        return [Rendered(whole, replies)] if joined and replies else texts


def _refuse(words: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(words)


def _reason(error: BaseException) -> str:
    """Return what went wrong in a template, and in which line."""
    from jinja2 import TemplateError, TemplateSyntaxError

    line = error.lineno if isinstance(error, TemplateSyntaxError) else 0
    trace = error.__traceback__
    while trace:
        # A template runs in Python frames, and jinja2 maps their lines to the template's.
        template = trace.tb_frame.f_globals.get("__jinja_template__")
        line = template.get_corresponding_lineno(trace.tb_lineno) if template else line
        trace = trace.tb_next
    words = " ".join(str(error).split())[:200]
    if isinstance(error, TooLong):
        words = f"takes longer than {_SECONDS:g} seconds"
    elif isinstance(error, MemoryError):
        words = f"takes more than {_MEMORY >> 20:,} MiB of memory"
    elif not isinstance(error, (TemplateError, ValueError)) or not words:
        words = f"{type(error).__name__}: {words}"
    return f", line {line}: {words}" if line else f": {words}"


def _source(tokenizer: JsonTokenizer) -> tuple[Path, str]:
    """Return the template and its file. Raises ConfigError if there is none."""
    folder = tokenizer.path.parent
    file, config = folder / "chat_template.jinja", folder / CONFIG
    if file.exists():
        try:
            return file, read_file(file).decode("utf-8")
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: is not UTF-8: byte {error.start}: {error.reason}") from None
    found = tokenizer.config.get("chat_template")
    if isinstance(found, list):  # several templates, by name
        named = [each for each in found if isinstance(each, dict) and each.get("name") == "default"]
        found = named[0].get("template") if named else None
    if found is not None and not isinstance(found, str):
        raise ConfigError(f"{config}: chat_template: is neither a template nor a list of them by name")
    if found is None:
        raise ConfigError(
            f"{folder}: has no chat template, in chat_template.jinja or tokenizer_config.json"
        )
    return config, found


def read_messages(row: Mapping[str, Any], field: str) -> tuple[list[Message], dict[str, Any]]:
    """Return the messages of a chat, and the other values in its row for the template.

    Raises:
        ValueError: The field is not a list of messages with a role and content.
    """
    messages = row.get(field)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"has no list of messages in {field!r}")
    for i, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} has no role")
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError(f"message {i} has no content")
    return messages, {"tools": row["tools"]} if row.get("tools") else {}


def encode(tokenizer: JsonTokenizer, rendered: Rendered) -> tuple[list[int], list[bool]]:
    """Encode a text, and mark the tokens to learn: those that begin inside a reply."""
    ids, starts = tokenizer.encode_markup(rendered.text)
    learnt = [any(first <= start < stop for first, stop in rendered.replies) for start in starts]
    return ids, learnt
