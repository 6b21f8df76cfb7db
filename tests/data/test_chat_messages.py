"""Every shape of a row gives the chat that OpenAI's form of it gives, or is refused in one line."""

import json
from typing import Any

import pytest

from compose.data.chat_messages import ChatNames, pairs_of, read_chat, shape_of

Row = dict[str, Any]
ASKED, REPLY = {"role": "user", "content": "2 + ½?"}, {"role": "assistant", "content": "2½"}
EARLIER = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "日本"}]
SYSTEM = {"role": "system", "content": "Be short."}
OTHER = {"role": "assistant", "content": "3"}
CALL = {"name": "f", "arguments": {"a": 1}}
TOOL = {"name": "f", "description": "½", "parameters": {}}


def share(*turns: tuple[str, str], **more: Any) -> Row:
    return {"conversations": [{"from": name, "value": text} for name, text in turns], **more}


HUMAN, GPT = ("human", ASKED["content"]), ("gpt", REPLY["content"])
FIRST = [("human", "hi"), ("gpt", "日本")]
AS_CALLS = {"tool_calls": [{"type": "function", "function": CALL}]}
ONE, LONG = [ASKED, REPLY], [SYSTEM, *EARLIER, ASKED, REPLY]
IN_PROMPT = [SYSTEM, EARLIER[0], {**EARLIER[1], "weight": 0}, ASKED, REPLY]
NAMED = ChatNames(
    fields=(("prompt", "q"), ("completion", "a"), ("role", "who"), ("content", "text")),
    roles=(("visitor", "user"), ("helper", "assistant")),
)
SAME: dict[str, tuple[Row, list[Row], Row]] = {
    "ShareGPT": (share(HUMAN, GPT), ONE, {}),
    "ShareGPT, system turn": (share(("system", "Be short."), *FIRST, HUMAN, GPT), LONG, {}),
    "ShareGPT, system field": (share(*FIRST, HUMAN, GPT, system="Be short.", tools=None), LONG, {}),
    "ShareGPT, empty system": (
        share(("user", ASKED["content"]), ("assistant", "2½"), system=""),
        ONE,
        {},
    ),
    "ShareGPT, tools": (
        share(
            HUMAN,
            ("function_call", json.dumps(CALL)),
            ("observation", "1"),
            GPT,
            tools=json.dumps([TOOL]),
        ),
        [ASKED, {"role": "assistant", **AS_CALLS}, {"role": "tool", "content": "1"}, REPLY],
        {"tools": [{"type": "function", "function": TOOL}]},
    ),
    "ShareGPT's keys in messages": ({"messages": share(HUMAN, GPT)["conversations"]}, ONE, {}),
    "OpenAI's keys in conversations": ({"conversations": LONG}, LONG, {}),
    "Alpaca": ({"instruction": "2 + ½?", "output": "2½"}, ONE, {}),
    "Alpaca, empty input": ({"instruction": "2 + ½?", "input": "", "output": "2½"}, ONE, {}),
    "Alpaca, input": (
        {"instruction": "Add.", "input": "2 + ½", "output": "2½", "text": "all of it"},
        [{"role": "user", "content": "Add.\n2 + ½"}, REPLY],
        {},
    ),
    "Alpaca, history": (
        {"instruction": "2 + ½?", "output": "2½", "system": "Be short.", "history": [["hi", "日本"]]},
        LONG,
        {},
    ),
    "texts": ({"prompt": "2 + ½?", "completion": "2½"}, ONE, {}),
    "texts and system": (
        {"prompt": "2 + ½?", "completion": "2½", "system": "Be short."},
        [SYSTEM, *ONE],
        {},
    ),
    "a prompt of messages": ({"prompt": LONG[:-1], "completion": [REPLY]}, IN_PROMPT, {}),
    "a prompt of messages, a text": ({"prompt": [ASKED], "completion": "2½"}, ONE, {}),
}


@pytest.mark.parametrize("name", SAME)
def test_one_chat(name: str) -> None:
    row, messages, more = SAME[name]
    chat, same = read_chat(row), read_chat({"messages": messages, **more})
    without = [{k: v for k, v in message.items() if k != "weight"} for message in same.messages]
    assert [{k: v for k, v in m.items() if k != "weight"} for m in chat.messages] == without
    assert (chat.learnt, chat.more) == (same.learnt, same.more)
    assert chat.texts == (name == "texts")


def test_names_are_given() -> None:
    row = {"q": [{"who": "visitor", "text": "2 + ½?"}], "a": [{"who": "helper", "text": "2½"}]}
    assert read_chat(row, NAMED) == read_chat({"messages": ONE})
    orca = {"system_prompt": "Be short.", "question": "2 + ½?", "response": "2½", "id": 1}
    names = (("system", "system_prompt"), ("prompt", "question"), ("completion", "response"))
    assert read_chat(orca, ChatNames(fields=names)) == read_chat({"messages": [SYSTEM, *ONE]})


PAIRS: dict[str, Row] = {
    "texts": {"prompt": "2 + ½?", "chosen": "2½", "rejected": "3"},
    "messages after a prompt": {"prompt": [ASKED], "chosen": [REPLY], "rejected": [OTHER]},
    "a text before messages": {"prompt": "2 + ½?", "chosen": [REPLY], "rejected": [OTHER]},
    "whole chats": {"chosen": ONE, "rejected": [ASKED, OTHER]},
    "whole chats beside their prompt": {
        "prompt": "2 + ½?",
        "chosen": ONE,
        "rejected": [ASKED, OTHER],
        "messages": ONE,
    },
    "ShareGPT": {
        **share(HUMAN),
        "chosen": dict(zip(("from", "value"), GPT, strict=True)),
        "rejected": OTHER,
    },
    "Alpaca": {"instruction": "2 + ½?", "input": "", "chosen": "2½", "rejected": "3"},
}


@pytest.mark.parametrize("name", PAIRS)
def test_preference_pairs(name: str) -> None:
    chosen, rejected = pairs_of(PAIRS[name])
    assert (chosen.messages, chosen.learnt) == (ONE, [1])
    assert (rejected.messages, rejected.learnt) == ([ASKED, OTHER], [1])
    assert {chosen.texts, rejected.texts} == {False}  # --shape plain, which a note names, is not theirs
    assert read_chat(PAIRS[name], ChatNames("chosen")) == chosen


def test_what_both_of_a_pair_begin_with_is_not_learnt() -> None:
    chats = [[*EARLIER, ASKED, REPLY], [*EARLIER, ASKED, OTHER]]
    for replies, row in (
        ([4], {"chosen": chats[0], "rejected": chats[1], "system": "Be short."}),
        ([4], {"prompt": [SYSTEM, *EARLIER, ASKED], "chosen": [REPLY], "rejected": [OTHER]}),
        ([2, 4], {"prompt": [SYSTEM], "chosen": chats[0], "rejected": chats[1]}),
    ):
        chosen, rejected = pairs_of(row)
        assert (chosen.messages, rejected.messages) == ([SYSTEM, *chats[0]], [SYSTEM, *chats[1]])
        assert chosen.learnt == rejected.learnt == replies
    longer = [*ONE, {"role": "user", "content": "and?"}, OTHER]
    assert [one.learnt for one in pairs_of({"chosen": ONE, "rejected": longer})] == [[1], [1, 3]]
    assert [one.learnt for one in pairs_of({"chosen": ONE, "rejected": ONE})] == [[1], [1]]


def said(*content: Any, **more: Any) -> Row:
    """A row of messages: one of the user with each content, or a reply with ``more``."""
    return {"messages": [*(user(each) for each in content), *([reply(**more)] if more else [])]}


def user(content: Any) -> Row:
    return {"role": "user", "content": content}


def reply(content: Any = "b", **more: Any) -> Row:
    return {"role": "assistant", "content": content, **more}


JSON = "is not JSON: Expecting"
REFUSED: dict[str, Row] = {
    "has no chat (it has 'question', 'answer'); is it --fields prompt=question,completion=answer?": {
        "question": "a",
        "answer": "b",
    },
    "has no chat (it has 'id', 'dialog'); is its list of messages --field dialog?": {
        "id": "1",
        "dialog": ONE,
    },
    "has no chat (it has 'text', 'n'); text without a chat is read without --chat, with --field text": {
        "text": "a",
        "n": 1,
    },
    "has no chat (it has 'messages'); name its fields, for example by --fields"
    " prompt=NAME,completion=NAME": {"messages": None},
    "has no list of messages in 'messages'": {"messages": []},
    "may be messages or sharegpt (it has 'messages', 'conversations', 'id'); name one by --shape"
    " messages": {"messages": ONE, "conversations": ONE, "id": 1},
    "holds a preference pair; --pairs is for dpo.beta; --shape chosen learns its chosen chat"
    "; --shape messages learns its messages": PAIRS["whole chats beside their prompt"],
    "holds a preference pair; --pairs is for dpo.beta; --shape chosen learns its chosen chat": PAIRS[
        "texts"
    ],
    "has neither a text nor messages in 'prompt'": {"prompt": 5, "completion": "a"},
    "has no list of [question, reply] in 'history'": {
        "instruction": "a",
        "output": "b",
        "history": [["c"]],
    },
    "message 1: the role 'narrator' is none of human, user, gpt, chatgpt, model, assistant, tool,"
    " observation, function_response, system, function_call; say what it is by --roles"
    " narrator=user": share(("narrator", "a")),
    f"message 2: function_call: {JSON} value: line 1 column 1 (char 0)": share(
        HUMAN, ("function_call", "f(1)")
    ),
    "message 2: function_call: is not a list of objects": share(HUMAN, ("function_call", "[5]")),
    "message 2: function_call: is OpenAI's older form; write it as tool_calls": said(
        "a", content="", function_call={"name": "f", "arguments": "{}"}
    ),
    "message 1 has no role": {"conversations": ["a"]},
    "message 2 has no role": {"messages": [ASKED, {"content": "b"}]},
    "message 1 has no content": {"messages": [{"role": "user"}]},
    "message 2 has no content": said("a", content=None),
    "message 2: weight: 0.5 is neither 0 nor 1": said("a", weight=0.5),
    "message 1: content: is neither a text nor a list of texts": said(5),
    "message 1: content: has a part that is no text: 'image_url'": said(
        [{"type": "image_url", "image_url": "x"}]
    ),
    f"tools: {JSON} property name enclosed in double quotes: line 1 column 3 (char 2)": {
        **said("a"),
        "tools": "[{",
    },
    "tools: is not a list of objects": {**said("a"), "tools": [5]},
    "documents: is not a list of objects": {**said("a"), "documents": {"a": "b"}},
    f"message 2: tool_calls: {JSON} value: line 1 column 2 (char 1)": said("a", tool_calls="["),
}
REFUSED_SHAPES = {
    "has no text in 'instruction'": ("alpaca", PAIRS["texts"]),
    "'chosen' has a reply alone; put what it replies to in 'prompt'": (
        "chosen",
        {"chosen": "a", "rejected": "b"},
    ),
    "has neither a text nor messages in 'prompt'": ("chosen", PAIRS["texts"] | {"prompt": 5}),
}


@pytest.mark.parametrize(
    ("words", "shape", "row"),
    [
        *((words, "", row) for words, row in REFUSED.items()),
        *((words, *given) for words, given in REFUSED_SHAPES.items()),
    ],
)
def test_rows_that_are_refused(words: str, shape: str, row: Row) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the words follow)
        read_chat(row, ChatNames(shape))
    assert str(caught.value) == words


def test_a_named_field_decides_between_shapes() -> None:
    row = {"messages": ONE, "turns": LONG, "conversations": ONE}
    names = ChatNames(fields=(("messages", "turns"),))
    assert shape_of(row, names) == "messages"
    assert read_chat(row, names).messages == LONG
    assert read_chat(row, ChatNames("sharegpt")).messages == ONE
