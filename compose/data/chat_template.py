"""Chats as text, by the template of a tokenizer, and what of it is learnt: the replies."""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from compose.errors import ConfigError
from compose.tokenizer import JsonTokenizer

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
        from jinja2 import TemplateError
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

        source = _source(tokenizer)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        # As transformers has it: JSON for a model is not escaped for HTML.
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self.error = TemplateError
        try:
            self.template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"{tokenizer.path.parent}: the chat template: {error}") from None
        self.special = tokenizer.special

    def _text(self, messages: Sequence[Message], more: Mapping[str, Any], prompt: bool = False) -> str:
        given = {**self.special, **more}
        return self.template.render(messages=messages, add_generation_prompt=prompt, **given)

    def render(self, messages: Sequence[Message], **more: Any) -> list[Rendered]:
        """The texts that teach the replies in ``messages``, those of role "assistant".

        One text, where the template writes an earlier reply as it writes the last one; else (as where
        thoughts of earlier turns are left out) one for each reply, with what came before it. What is
        learnt of a reply reaches from where the model would begin to write to the end of the turn.
        ``more``: for the template, as ``tools``. Raises ValueError for a chat it refuses.
        """
        try:
            return self._render(messages, more)
        except self.error as error:
            raise ValueError(f"the chat template refuses it: {error}") from None

    def _render(self, messages: Sequence[Message], more: Mapping[str, Any]) -> list[Rendered]:
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


def _source(tokenizer: JsonTokenizer) -> str:
    folder = tokenizer.path.parent
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    found = tokenizer.config.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = next((each["template"] for each in found if each.get("name") == "default"), None)
    if not isinstance(found, str):
        raise ConfigError(
            f"{folder}: has no chat template, in chat_template.jinja or tokenizer_config.json"
        )
    return found


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
