"""The parts of a chat to learn: replies, from where a model would begin to write, to the turn's end."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compose.data.chat_messages import (
    PROBE,
    Chat,
    ChatMessage,
    calls_of,
    count_faults,
    forms,
    probed,
    text_of,
)
from compose.data.chat_template import ChatTemplate, has_template
from compose.data.special_tokens import model_ends
from compose.data.tokenizer import JsonTokenizer

_WINDOW = 200  # characters that a template may write between its prompt and the words of a reply
_CERTAIN = 4  # characters of the prompt that must stand before a reply
_PLACE = re.compile(r"[>\]\n:▷]")  # a prompt may be shortened after one of these


@dataclass(frozen=True)
class Rendered:
    """The text of a chat."""

    text: str
    replies: Sequence[tuple[int, int]]  # the spans (start, stop) in ``text`` to learn from
    end: int = -1  # an id that ends the last reply, after the text; -1: the template ends it
    added: bool = False  # whether the tokens that the tokenizer adds to a text are around it


class Replies:
    """Writes chats by a template, and finds the replies in their text.

    ``plain``: a text and its continuation stand one after the other, and then ``end``, as in TRL; a
    template need not be there. Without ``plain``, raises ConfigError if there is none.
    """

    def __init__(self, tokenizer: JsonTokenizer, end: int = -1, plain: bool = False) -> None:
        self._template = ChatTemplate(tokenizer) if has_template(tokenizer) or not plain else None
        self.end, self.plain = end, plain
        self.notes: Counter[str] = Counter()
        """Notes for the user, with the number of replies that each is about."""
        added = tokenizer.tokenizer.get_added_tokens_decoder()
        self.ids = {token.content: i for i, token in added.items()}
        ends = {token.content for token in added.values() if token.special}
        self.ends = tuple(token for token in ends | set(tokenizer.special.values()) if token)
        stops = model_ends(tokenizer.path.parent)
        self.stops = [token for token, i in self.ids.items() if i in stops]
        self.name = tokenizer.name

    @property
    def template(self) -> ChatTemplate:
        """The chat template. Raises ValueError if there is none."""
        if self._template is None:
            raise ValueError(
                f"needs a chat template, and none is beside {self.name}; put chat_template.jinja there"
            )
        return self._template

    def render(self, chat: Chat) -> list[Rendered]:
        """Return the texts that teach the replies of a chat; none without replies to learn.

        A template with {% generation %} says itself what is learnt. With another one, each reply is
        learnt from the place where the model would begin to write to the end of the turn. Templates
        that write an earlier reply in another way than the last one get a text for each reply.
        """
        if chat.texts and self.plain:
            prompt, completion = (message["content"] for message in chat.messages)
            span = len(prompt), len(prompt) + len(completion)
            return [Rendered(prompt + completion, [span], self.end, added=True)]
        if chat.texts:
            self.notes["prompts are texts, written by the chat template (without: --shape plain)"] += 1
        messages, whole = self.form(chat)
        if (marks := self.template.marked(messages, chat.more)) is not None:
            return self._tagged(chat, messages, whole, marks)
        texts = [self._reply(messages, i, chat.more) for i in chat.learnt]
        stops = list[int]()
        for i, each in zip(chat.learnt, texts, strict=True):
            stops.append(self._stop_within(whole, each, messages[:i], chat.more))
            if stops[-1] < 0:
                break
        if not texts or stops[-1] < 0:
            return texts
        spans = [(each.replies[0][0], stop) for each, stop in zip(texts, stops, strict=True)]
        if texts[-1].end >= 0 and not whole[stops[-1] :].strip():
            return [Rendered(whole[: stops[-1]], spans, texts[-1].end)]
        return [Rendered(whole, spans)]

    def form(self, chat: Chat) -> tuple[Sequence[ChatMessage], str]:
        """Return the messages in the form that the template takes, and their text."""
        best: tuple[int, Sequence[ChatMessage], str] | None = None
        problem: ValueError | None = None
        choices = list(forms(chat.messages))
        for messages in choices:
            try:
                text, faults = self.template.text(messages, chat.more), 0
                if len(choices) > 1:
                    probe = probed(messages)
                    faults = count_faults(self.template.text(probe, chat.more), probe)
            except ValueError as error:
                # Where content is a list, the last form is the most common one.
                first = not any(isinstance(m.get("content"), list) for m in chat.messages)
                problem = problem if first and problem else error
                continue
            if best is None or faults < best[0]:
                best = faults, messages, text
            if not faults:
                break
        if best is None:
            raise problem or ValueError
        _, messages, text = best
        for i, message in enumerate(messages):
            role, content = message["role"], text_of(message.get("content"))
            # Mistral's templates leave a system message out on purpose.
            written = role in ("assistant", "system") or str(content or "").strip() in text
            if not written and self._ignored(messages, i, text, chat.more):
                words = f"does not write the role {role!r}; name another, as in --roles {role}=user"
                raise ValueError(f"message {i + 1}: the chat template {words}")
        return messages, text

    def _tagged(
        self, chat: Chat, messages: Sequence[ChatMessage], whole: str, marks: list[tuple[int, int]]
    ) -> list[Rendered]:
        replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if list(chat.learnt) != replies:
            if len(marks) != len(replies):
                raise ValueError(
                    f"some of its {len(replies)} replies are not to be learnt, and {{% generation %}}"
                    f" marks {len(marks)} parts: it is not known which"
                )
            marks = [mark for i, mark in zip(replies, marks, strict=True) if i in chat.learnt]
        if len(marks) == len(chat.learnt):
            for i, (start, stop) in zip(chat.learnt, marks, strict=True):
                self._check(messages, i, whole[start:stop], whole, chat.more)
        for _, stop in marks:
            if not whole[:stop].rstrip().endswith(self.ends):
                self.notes["replies have no end token within {% generation %}"] += 1
        return [Rendered(whole, marks)] if marks else []

    def _reply(self, messages: Sequence[ChatMessage], i: int, more: Mapping[str, Any]) -> Rendered:
        """Return the text of a chat up to the reply at index i."""
        text = self.template.text(messages[: i + 1], more)
        start = self._start(messages, i, text, more)
        # White space after the token that ends the turn is not part of the reply.
        stop = max(start, len(text.rstrip()))
        body = text[start:stop]
        self._check(messages[: i + 1], i, body, text, more)
        if body.endswith(self.ends) or self._closing(messages[:i], more) != "":
            return Rendered(text, [(start, stop)])
        return Rendered(text[:stop], [(start, stop)], self._end(messages, i, text[:stop], more))

    def _check(
        self, messages: Sequence[ChatMessage], i: int, body: str, text: str, more: Mapping[str, Any]
    ) -> None:
        """Raise ValueError if ``body``, what is learnt of a text, lacks the reply's call or content."""
        message, content = messages[i], text_of(messages[i].get("content"))
        calls = calls_of(message)
        if absent := [f for call in calls if (f := str(call.get("name"))) not in body]:
            raise ValueError(
                f"message {i + 1}: the chat template does not write its tool call {absent[0]!r}"
            )
        inner, _, words = content.rpartition("</think>") if isinstance(content, str) else ("",) * 3
        lost = words.strip() not in body
        if lost and not calls and self._ignored(messages, i, text, more):
            raise ValueError(f"message {i + 1}: the chat template does not write its content")
        thoughts = str(message.get("reasoning_content", "")), inner.rpartition("<think>")[2]
        if (lost and calls) or any(one.strip() not in body for one in thoughts):
            self.notes["replies have words or thoughts that the chat template leaves out"] += 1

    def _ignored(self, said: Sequence[ChatMessage], i: int, text: str, more: Mapping[str, Any]) -> bool:
        """Return whether messages have the same text with another content at index i."""
        other = [*said[:i], {**said[i], "content": PROBE}, *said[i + 1 :]]
        return self.template.text(other, more) == text

    def _start(
        self, messages: Sequence[ChatMessage], i: int, text: str, more: Mapping[str, Any]
    ) -> int:
        """Return where the reply at index i begins in the text that ends with it."""
        # A template cannot write no messages: what asks for a first reply is seen after it.
        asked = self.template.text(messages[: max(i, 1)], more, prompt=True)
        if i and text.startswith(asked):
            return len(asked)
        before = self.template.text(messages[: max(i, 1)], more)
        # Another reply to the same messages tells where the reply itself has begun at the latest.
        latest = _common(text, self.template.text([*messages[:i], _other()], more))
        # It begins after what the messages before it have written.
        first = max(min(_common(text, before), latest) if i else 0, latest - _WINDOW)
        # The prompt may open a thought that this reply does not have.
        header = _common(before, asked)
        stops = [header + m.end() for m in _PLACE.finditer(asked[header:])]
        for stop in dict.fromkeys((len(asked), *reversed(stops))):
            end = asked[max(0, stop - _WINDOW) : stop][::-1]
            places = range(first, latest + 1)
            same, start = max((_common(text[max(0, n - _WINDOW) : n][::-1], end), n) for n in places)
            if same >= _CERTAIN:
                if extra := asked[stop:].strip():
                    self.notes[f"replies do not begin with the {extra!r} of the template's prompt"] += 1
                elif i and text[:start] != asked[:stop]:
                    self.notes["replies stand after other text than the template's prompt"] += 1
                return start
        if i:
            raise ValueError(
                f"message {i + 1}: the chat template does not write a reply where it asks for one,"
                f" after {asked[-40:]!r}"
            )
        return latest

    def _closing(self, messages: Sequence[ChatMessage], more: Mapping[str, Any]) -> str | None:
        """Return what the template writes after a reply to these messages; None if it is not known."""
        try:
            text = self.template.text([*messages, _other()], more)
        except ValueError:
            return None
        return text.rpartition(PROBE)[2].rstrip() if PROBE in text else None

    def _end(self, messages: Sequence[ChatMessage], i: int, text: str, more: Mapping[str, Any]) -> int:
        """Return the id that ends an open reply, which may be the token that begins the next turn."""
        role = "tool" if messages[i].get("tool_calls") else "user"
        following = messages[i + 1 : i + 2] or [{"role": role, "content": PROBE}]
        try:
            after = self.template.text([*messages[: i + 1], *following], more)
        except ValueError:
            after = ""
        after = after[len(text) :].lstrip() if after.startswith(text) else ""
        end = next((self.ids[token] for token in self.stops if after.startswith(token)), self.end)
        if end < 0:
            raise ValueError(
                f"message {i + 1}: the chat template writes nothing after a reply, and {self.name}"
                " names no token to end it with; name one by --end, or eos_token in its config"
            )
        return end

    def _stop_within(
        self, whole: str, rendered: Rendered, before: Sequence[ChatMessage], more: Mapping[str, Any]
    ) -> int:
        """Return where a reply stops in the text of the whole chat; -1 if it is written otherwise."""
        if rendered.end < 0:
            text = rendered.text[: rendered.replies[0][1]]
            closing = "" if whole.startswith(text) else self._closing(before, more) or ""
            # At the end of a chat, some templates write one more token after the one that ends a reply.
            while not whole.startswith(text):
                last = next((each for each in self.ends if closing.endswith(each)), "")
                closing, text = closing.removesuffix(last).rstrip(), text.removesuffix(last).rstrip()
                if not last or not closing or not text.endswith(closing):
                    return -1
            return len(text)
        if not whole.startswith(rendered.text):
            return -1
        after = whole[len(rendered.text) :]
        token = next((token for token in self.stops if self.ids[token] == rendered.end), "")
        if token and after.lstrip().startswith(token):
            return whole.index(token, len(rendered.text)) + len(token)
        return -1 if after.strip() else len(rendered.text)


def _other() -> ChatMessage:
    return {"role": "assistant", "content": PROBE}


def _common(one: str, other: str) -> int:
    """Return how many characters two texts begin with that are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def encode(tokenizer: JsonTokenizer, rendered: Rendered) -> tuple[list[int], list[bool]]:
    """Encode a text, and mark the tokens to learn, as transformers does.

    A reply reaches from the token with its first character to the first token with its last one; to the
    last such token if the template does not end it. In a text without a template it reaches to the
    end, as in TRL.
    """
    ids, offsets = tokenizer.encode_markup(rendered.text, rendered.added)
    learnt, count, first = [False] * len(ids), len(ids), 0
    for start, stop in sorted(rendered.replies):  # the next one begins no earlier
        first = next((n for n in range(first, count) if offsets[n][1] > start), count)
        n = next((n for n in range(first, count) if offsets[n][1] >= stop), count - 1)
        while rendered.end >= 0 and n + 1 < count and offsets[n + 1][0] < stop:
            n += 1  # a character of several tokens, which all have its place
        for place in range(first, n + (offsets[n][0] < stop) if n >= 0 else 0):
            learnt[place] = True
    if rendered.end >= 0 and not (rendered.added and ids[-1:] == [rendered.end]):
        ids, learnt = [*ids, rendered.end], [*learnt, True]
    if rendered.added:
        start = next((n for n, (_, last) in enumerate(offsets) if last > rendered.replies[0][0]), count)
        learnt = [n >= min(start, len(ids) - 1) for n in range(len(ids))]
    return ids, learnt
