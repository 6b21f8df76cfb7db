"""Chats as text, by the template of a tokenizer, and what of it is learnt: the replies."""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from compose.base.own_files import read_file
from compose.data.limits import TooLong, limited
from compose.data.tokenizer import CONFIG, JsonTokenizer
from compose.errors import ConfigError

# What writing a chat may take, far beyond what one is: templates are code, and come with a download.
_SECONDS = 10.0
_MEMORY = 1 << 30  # bytes
_CHARACTERS = 1 << 26

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Rendered:
    """replies: (start, stop) in ``text`` of what is learnt."""

    text: str
    replies: Sequence[tuple[int, int]]


class ChatTemplate:
    """The chat template of ``tokenizer``, from chat_template.jinja or tokenizer_config.json beside it.

    Raises ConfigError where there is none.
    """

    def __init__(self, tokenizer: JsonTokenizer) -> None:
        from jinja2.ext import Extension, loopcontrols
        from jinja2.nodes import Node
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """{% generation %} marks replies for transformers, and writes nothing itself."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Parser) -> list[Node]:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        self.path, source = _source(tokenizer)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        # As transformers has it: JSON for a model is not escaped for HTML.
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            with limited(_SECONDS, _MEMORY):
                self.template = environment.from_string(source)
        except (Exception, TooLong) as error:  # it is compiled to Python, whose own limits it may meet
            raise ConfigError(f"{self.path}: the chat template{_reason(error)}") from None
        self.special = tokenizer.special

    def _text(self, messages: Sequence[Message], more: Mapping[str, Any], prompt: bool = False) -> str:
        """Raises ValueError, with the template's line, for whatever goes wrong in it."""
        given = {**self.special, **more, "messages": messages, "add_generation_prompt": prompt}
        try:
            with limited(_SECONDS, _MEMORY):
                pieces, size = [], 0
                # Not its render(), which would have all of the text before its size is known.
                for piece in self.template.root_render_func(self.template.new_context(given)):
                    pieces.append(piece)
                    size += len(piece)
                    if size > _CHARACTERS:
                        raise ValueError(f"writes more than {_CHARACTERS:,} characters")
                text = "".join(pieces)
                text.encode()  # which half a character, a lone surrogate, has no bytes for
        except (Exception, TooLong) as error:
            raise ValueError(f"the chat template{_reason(error)}") from None
        return text

    def render(self, messages: Sequence[Message], **more: Any) -> list[Rendered]:
        """The texts that teach the replies in ``messages``, those of role "assistant".

        One text, where the template writes an earlier reply as it writes the last one; else (as where
        thoughts of earlier turns are left out) one for each reply, with what came before it. What is
        learnt of a reply reaches from where the model would begin to write to the end of the turn.
        ``more``: for the template, as ``tools``. Raises ValueError for a chat it refuses.
        """
        whole = self._text(messages, more)
        replies: list[tuple[int, int]] = []
        texts: list[Rendered] = []
        joined = True
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            prompt = self._text(messages[:i], more, prompt=True)
            text = self._text(messages[: i + 1], more)
            if not text.startswith(prompt):
                raise ValueError(
                    f"message {i + 1}: the chat template does not write a reply where it asks for one"
                )
            # White space after the token that ends the turn belongs to no reply.
            reply = len(prompt), len(text.rstrip())
            replies.append(reply)
            texts.append(Rendered(text, [reply]))
            joined = joined and whole.startswith(text)
        return [Rendered(whole, replies)] if joined and replies else texts


def _refuse(words: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(words)


def _reason(error: BaseException) -> str:
    """What went wrong in a template, and in which line of it."""
    from jinja2 import TemplateError, TemplateSyntaxError

    line = error.lineno if isinstance(error, TemplateSyntaxError) else 0
    trace = error.__traceback__
    while trace:
        # The frames of a template are Python's, which it knows the lines of.
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
    """The template, and the file that it is in. Raises ConfigError where there is none."""
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
    if isinstance(found, list):  # several, by name
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
    """The messages of a chat, and what else its row has for the template. Raises ValueError, with what
    is wrong, where these are no messages with a role."""
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
    """Ids, and which of them are learnt: those that begin within a reply."""
    ids, starts = tokenizer.encode_markup(rendered.text)
    learnt = [any(first <= start < stop for first, stop in rendered.replies) for start in starts]
    return ids, learnt
