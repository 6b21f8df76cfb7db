"""The rows of chats that other tools write, read as those tools read them.

A row has ``messages``, as for transformers and OpenAI; ``conversations``, as ShareGPT; ``instruction``,
``input`` and ``output``, as Alpaca; or ``prompt`` with ``completion``, or with ``chosen`` and
``rejected``, as for TRL.
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
SHAPES = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt": ("prompt", "completion"),
    "chosen": ("chosen", "rejected"),
}
"""The shapes of rows, and the fields that each needs."""
PLAIN = "plain"
"""The shape of a prompt and a completion whose texts stand one after the other, without a template."""
_MESSAGE = {"role": ("role", "from"), "content": ("content", "value")}
_MORE = ("system", "tools", "input", "history")
FIELDS = [*dict.fromkeys(name for needs in SHAPES.values() for name in needs), *_MORE, *_MESSAGE]
"""The contents that fields may have, by their most common names."""
_CALL = "function_call"
# The names that ShareGPT's ``from`` has for roles, here and in LlamaFactory, FastChat and axolotl.
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", _ROLE), _ROLE),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
    _CALL: _CALL,
}


@dataclass(frozen=True)
class ChatNames:
    """How rows name what they hold, where this differs from the common names."""

    shape: str = ""
    """One of SHAPES, or PLAIN; "": the keys of a row say it."""
    fields: tuple[tuple[str, str], ...] = ()
    """(one of FIELDS, its name in the rows)."""
    roles: tuple[tuple[str, str], ...] = ()
    """(name of a role in the rows, name of the role for the template)."""


@dataclass(frozen=True)
class Chat:
    """A chat of a row."""

    messages: Sequence[ChatMessage]
    learnt: Sequence[int]  # the indices of the messages to learn: replies, unless their weight is 0
    more: Mapping[str, Any]
    """Values for the template besides the messages: tools, documents, and what the row adds."""
    texts: bool = False
    """Whether the row had a text and its continuation, not of a pair, in place of the two messages."""


class _RowFields:
    """The content of a row or a message, by the common names of fields."""

    def __init__(self, values: Mapping[str, Any], names: ChatNames) -> None:
        self.values, self.names = values, names

    def field(self, name: str) -> str:
        """Return the field that holds what ``name`` says, or would hold it."""
        given = dict(self.names.fields).get(name)
        known = (given,) if given else _MESSAGE.get(name, (name,))
        return next((each for each in known if self.values.get(each) is not None), known[0])

    def get(self, name: str) -> Any:
        return self.values.get(self.field(name))

    def needed(self, name: str) -> Any:
        value = self.get(name)
        if not (isinstance(value, (str, dict)) or _is_list(value)):
            raise ValueError(f"has neither a text nor messages in {self.field(name)!r}")
        return value

    def text(self, name: str) -> str:
        if not isinstance(value := self.get(name), str):
            raise ValueError(f"has no text in {self.field(name)!r}")
        return value

    def messages(self, name: str) -> list[Any]:
        if not isinstance(value := self.get(name), list) or not value:
            raise ValueError(f"has no list of messages in {self.field(name)!r}")
        return value


def read_chat(row: Mapping[str, Any], names: ChatNames = ChatNames()) -> Chat:
    """Return the chat in a row. Raises ValueError if its shape is not clear, or something is wrong."""
    shape, given, first, texts = shape_of(row, names), _RowFields(row, names), 0, False
    if shape == "chosen":
        return pairs_of(row, names)[0]
    if shape == "alpaca":
        messages = [*_instruction(given), *_turns(given.text("output"), _ROLE)]
    elif shape in ("messages", "sharegpt"):
        messages = given.messages(SHAPES[shape][0])
    else:
        read = given.text if shape == PLAIN else given.needed
        prompt, completion = map(read, SHAPES["prompt"])
        messages = _turns(prompt, "user")
        texts = isinstance(prompt, str) and isinstance(completion, str)
        first, messages = len(messages), [*messages, *_turns(completion, _ROLE)]
    return _chat(given, _messages(messages, names), first, texts)


def shape_of(row: Mapping[str, Any], names: ChatNames = ChatNames()) -> str:
    """Return the shape of a row, by its keys. Raises ValueError if it has none, or several."""
    if names.shape:
        return names.shape
    get = _RowFields(row, names).get
    shapes = [s for s, needs in SHAPES.items() if all(get(each) is not None for each in needs)]
    named = [shape for shape in shapes if dict(names.fields).keys() & set(SHAPES[shape])]
    if len(named or shapes) == 1 and (named or shapes) != ["chosen"]:
        return (named or shapes)[0]
    if "chosen" in shapes:
        others = "".join(f"; --shape {each} learns its {SHAPES[each][-1]}" for each in shapes[:-1])
        raise ValueError(
            "holds a preference pair; --pairs is for dpo.beta; --shape chosen learns its chosen chat"
            f"{others}"
        )
    has = ", ".join(map(repr, row)) or "nothing"
    if shapes:
        raise ValueError(
            f"may be {' or '.join(shapes)} (it has {has}); name one by --shape {shapes[0]}"
        )
    lists = [key for key, value in row.items() if _is_list(value)]
    texts = [key for key, value in row.items() if isinstance(value, str)]
    cure = "name its fields, for example by --fields prompt=NAME,completion=NAME"
    if lists:
        cure = f"is its list of messages --field {lists[0]}?"
    elif len(texts) > 1:
        cure = f"is it --fields prompt={texts[0]},completion={texts[1]}?"
    elif texts:
        cure = f"text without a chat is read without --chat, with --field {texts[0]}"
    raise ValueError(f"has no chat (it has {has}); {cure}")


def pairs_of(row: Mapping[str, Any], names: ChatNames = ChatNames()) -> tuple[Chat, Chat]:
    """Return the chosen and the rejected chat of a preference pair.

    Replies after the messages that both begin with are learnt: after ``prompt``, ``conversations`` or
    ``instruction``, or, where both are whole chats, after what is the same in both. Raises ValueError.
    """
    given = _RowFields(row, names)
    values = list(map(given.needed, SHAPES["chosen"]))
    prompt = given.get("prompt")
    if prompt is not None:
        before = _turns(prompt if isinstance(prompt, list) else given.needed("prompt"), "user")
    elif given.get("instruction") is not None:
        before = _instruction(given)
    else:
        fields = ("messages", "conversations")
        before = next((given.messages(f) for f in fields if given.get(f) is not None), [])
    before = _messages(before, names)
    sides = [_messages(_turns(value, _ROLE), names) for value in values]
    replies = all(side[0]["role"] == _ROLE for side in sides)
    if replies or (isinstance(prompt, list) and any(side[: len(before)] != before for side in sides)):
        first = len(before)
        sides = [[*before, *side] for side in sides]
    else:  # whole chats
        equal = [one == other for one, other in zip(*sides, strict=False)]
        first = min([*(n for n, same in enumerate(equal) if not same), len(equal) - 1])
    for name, side in zip(SHAPES["chosen"], sides, strict=True):
        if all(message["role"] == _ROLE for message in side):
            raise ValueError(
                f"{given.field(name)!r} has a reply alone; put what it replies to in 'prompt'"
            )
    return _chat(given, sides[0], first), _chat(given, sides[1], first)


def _chat(row: _RowFields, messages: list[ChatMessage], first: int, texts: bool = False) -> Chat:
    """Return the chat of messages, of which replies from ``first`` on are learnt."""
    system = row.names.shape != PLAIN and row.get("system")
    if system and all(message["role"] != "system" for message in messages):
        messages = [{"role": "system", "content": row.text("system")}, *messages]
        first, texts = first + 1, False
    learnt = [
        i for i, m in enumerate(messages) if i >= first and m["role"] == _ROLE and m.get("weight", 1)
    ]
    more = _from_json(row.values.get("chat_template_kwargs"), "chat_template_kwargs") or {}
    if not isinstance(more, dict):
        raise ValueError("chat_template_kwargs: is not an object")
    tools, documents = (_objects(row.get(name), name) for name in ("tools", "documents"))
    if tools and row.get("conversations"):  # LlamaFactory's are bare functions
        tools = [t if "function" in t else {"type": "function", "function": t} for t in tools]
    return Chat(messages, learnt, {**more, "tools": tools, "documents": documents}, texts)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _turns(value: Any, role: str) -> list[Any]:
    """Return messages as a list; a text is a message of ``role``."""
    value = {"role": role, "content": value} if isinstance(value, str) else value
    return [value] if isinstance(value, dict) else [*value]


def _instruction(row: _RowFields) -> list[Any]:
    """Return what Alpaca's row asks, after its history; the input stands below the instruction.

    LlamaFactory joins them so too (its data/converter.py).
    """
    parts = [row.text(name) for name in ("instruction", "input") if row.get(name)]
    parts = parts or [row.text("instruction")]
    history = row.get("history") or []
    pairs = [each for each in history if isinstance(each, list)] if isinstance(history, list) else None
    if pairs is None or len(pairs) < len(history) or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"has no list of [question, reply] in {row.field('history')!r}")
    turns = [turn for pair in pairs for turn in zip(("user", _ROLE), pair, strict=True)]
    return [{"role": role, "content": text} for role, text in [*turns, ("user", "\n".join(parts))]]


def _messages(messages: Sequence[Any], names: ChatNames) -> list[ChatMessage]:
    return [_message(message, number, names) for number, message in enumerate(messages, start=1)]


def _message(message: Any, number: int, names: ChatNames) -> ChatMessage:
    if not isinstance(message, dict) or not isinstance(_RowFields(message, names).get("role"), str):
        raise ValueError(f"message {number} has no role")
    message = _with_role(message, number, names)
    # transformers drops a key without a value too.
    message = {name: value for name, value in message.items() if value is not None}
    content, weight = message.get("content"), message.get("weight", 1)
    thoughts = next((message[name] for name in _THOUGHTS if name in message), None)
    if thoughts is not None:
        message = {"thinking": thoughts, **message, "reasoning_content": thoughts}
    if calls := _objects(message.get("tool_calls"), f"message {number}: tool_calls"):
        message["tool_calls"] = calls
    if message.get(_CALL):
        raise ValueError(f"message {number}: {_CALL}: is OpenAI's older form; write it as tool_calls")
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


def _with_role(message: ChatMessage, number: int, names: ChatNames) -> ChatMessage:
    """Return a message with role and content by these names, and a call of ShareGPT as OpenAI's."""
    fields = list(map(_RowFields(message, names).field, _MESSAGE))
    given: str = message[fields[0]]
    content = message.get(fields[1])
    role = dict(names.roles).get(given, given)
    if fields[0] == "from":
        if role == given and role not in _ROLES:
            known = f"is none of {', '.join(_ROLES)}; say what it is by --roles {given}=user"
            raise ValueError(f"message {number}: the role {given!r} {known}")
        role = _ROLES.get(role, role)
    if (*fields, role) == (*_MESSAGE, given):
        return message
    rest = {name: value for name, value in message.items() if name not in fields}
    if role != _CALL:
        return {"role": role, "content": content, **rest}
    calls = _from_json(content, name := f"message {number}: {_CALL}")
    calls = _objects([calls] if isinstance(calls, dict) else calls, name) or []
    calls = [{"type": "function", "function": call} for call in calls]
    return {"role": _ROLE, "tool_calls": calls, **rest}


def _objects(value: Any, name: str) -> list[dict[str, Any]] | None:
    """Return a list of objects, each of which may be JSON text, or None if there are none."""
    value = _from_json(value or None, name)
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
        form = [_with_arguments(one, _as_other_form) if other_form else one for one in messages]
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
