"""The rows of chats that other tools write, read as those tools read them.

A row has ``messages``, as for transformers and OpenAI, or ``prompt`` and ``completion``, as for TRL.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

ChatMessage = Mapping[str, Any]
# Names of what a model thinks before it replies. Templates read the first or the second.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_ROLE = "assistant"
PROBE = "zqx"  # a word that no template writes by itself


@dataclass(frozen=True)
class Chat:
    """A chat of a row."""

    messages: Sequence[ChatMessage]
    learnt: Sequence[int]  # the indices of the messages to learn: replies, unless their weight is 0
    more: Mapping[str, Any]
    """Values for the template besides the messages: tools, documents, and what the row adds."""


def read_chat(row: Mapping[str, Any], field: str) -> Chat:
    """Return the chat in a row."""
    messages, first = row.get(field), 0
    prompt, completion = row.get("prompt"), row.get("completion")
    if messages is None and isinstance(prompt, list) and isinstance(completion, list):
        messages, first = [*prompt, *completion], len(prompt)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"has no list of messages in {field!r}")
    read = [_message(message, number) for number, message in enumerate(messages, start=1)]
    learnt = [i for i, m in enumerate(read) if i >= first and m["role"] == _ROLE and m.get("weight", 1)]
    more = _from_json(row.get("chat_template_kwargs"), "chat_template_kwargs") or {}
    if not isinstance(more, dict):
        raise ValueError("chat_template_kwargs: is not an object")
    tools, documents = (_objects(row.get(name), name) for name in ("tools", "documents"))
    return Chat(read, learnt, {**more, "tools": tools, "documents": documents})


def _message(message: Any, number: int) -> ChatMessage:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {number} has no role")
    # transformers drops a key without a value too.
    message = {name: value for name, value in message.items() if value is not None}
    content, weight = message.get("content"), message.get("weight", 1)
    thoughts = next((message[name] for name in _THOUGHTS if name in message), None)
    if thoughts is not None:
        message = {"thinking": thoughts, **message, "reasoning_content": thoughts}
    if calls := _objects(message.get("tool_calls"), f"message {number}: tool_calls"):
        message["tool_calls"] = calls
    if content is None and not calls and thoughts is None:
        raise ValueError(f"message {number} has no content")
    if weight not in (0, 1):
        raise ValueError(f"message {number}: weight: {weight!r} is neither 0 nor 1")
    if not isinstance(content, (str, list, type(None))):
        raise ValueError(f"message {number}: content: is neither a text nor a list of texts")
    for part in content if isinstance(content, list) and message["role"] != "tool" else ():
        if _part(part) is None:
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(
                f"message {number}: content: has a part that is no text: {str(kind)[:60]!r}"
            )
    return message


def _objects(value: Any, name: str) -> list[dict[str, Any]] | None:
    """Return a list of objects, each of which may be JSON text, or None if there are none."""
    value = _from_json(value, name)
    result = [_from_json(each, name) for each in value] if isinstance(value, list) else value
    if result and not (isinstance(result, list) and all(isinstance(each, dict) for each in result)):
        raise ValueError(f"{name}: is not a list of objects")
    return result or None


def _from_json(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: is not JSON: {error}") from None


def _part(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
    return text if isinstance(text, str) else None


def text_of(content: Any) -> Any:
    """Return the texts of a list of parts as one text; other content as it is."""
    texts = [_part(part) for part in content] if isinstance(content, list) else [None]
    return content if None in texts else "".join(filter(None, texts))


def calls_of(message: ChatMessage) -> list[dict[str, Any]]:
    """Return the functions that a message calls: their name and arguments."""
    results = [(call, call.get("function")) for call in message.get("tool_calls") or []]
    return [function if isinstance(function, dict) else call for call, function in results]


def forms(messages: Sequence[ChatMessage]) -> Iterator[Sequence[ChatMessage]]:
    """Yield the messages in each form that templates take, first as they are.

    Some templates take the arguments of a tool call as an object, others as JSON text. Some take
    content as a list of parts, others as one text alone.
    """
    seen: list[Sequence[ChatMessage]] = []
    for other_form, joined in product((False, True), (False, True)):
        form = [
            _with_arguments(message, _as_other_form) if other_form else message for message in messages
        ]
        if joined:
            form = [{**m, "content": text_of(m["content"])} if "content" in m else m for m in form]
        if form not in seen:
            seen.append(form)
            yield form


def _with_arguments(message: ChatMessage, change: Callable[[Any], Any]) -> ChatMessage:
    def changed(call: dict[str, Any]) -> dict[str, Any]:
        if isinstance(call.get("function"), dict):
            return {**call, "function": changed(call["function"])}
        return {**call, "arguments": change(call.get("arguments"))}

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [changed(call) for call in calls]} if calls else message


def _as_other_form(arguments: Any) -> Any:
    """Return an object in place of JSON text, or JSON text in place of an object."""
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    try:
        return _from_json(arguments, "arguments")
    except ValueError:
        return arguments


def probed(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Return messages of the same form, with words and arguments that no template writes by itself."""

    def arguments(given: Any) -> Any:
        return {PROBE: PROBE} if isinstance(given, dict) else json.dumps({PROBE: PROBE})

    result = list[ChatMessage]()
    for number, message in enumerate(messages):
        content, word = message.get("content"), f"{PROBE}{number}."
        if isinstance(content, list):
            parts = [(part, {"type": "text", "text": word}) for part in content]
            content = [part if _part(part) is None else other for part, other in parts]
        elif content:
            content = word
        changed = {"content": content} if "content" in message else {}
        result.append({**_with_arguments(message, arguments), **changed})
    return result


def count_faults(text: str, messages: Sequence[ChatMessage]) -> int:
    """Return how many contents and arguments of messages are not in their text, or written wrongly."""
    faults = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [part for part in map(_part, content) if part]
            faults += any(repr(part) in text for part in content if isinstance(part, dict))
            faults += any(part not in text for part in parts)
        elif content:
            faults += content not in text
        for call in calls_of(message):
            arguments = call["arguments"]
            if isinstance(arguments, str):  # not as a JSON text in JSON
                faults += arguments not in text or json.dumps(arguments) in text
            else:
                faults += repr(arguments) in text or arguments[PROBE] not in text
    return faults
