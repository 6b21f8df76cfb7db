"""Chats are read as transformers reads them: token for token and mask for mask, for families of
templates and kinds of tokenizers."""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from compose.data.chat_messages import read_chat
from compose.data.chat_replies import Rendered, Replies, encode
from compose.data.tokenizer import JsonTokenizer, copy_tokenizer, open_tokenizer
from compose.errors import ConfigError
from tests.support.chat_families import FAMILIES, KINDS, OPEN, plain, save_family, tagged
from tests.support.data_made import CHAT
from tests.support.helpers import tier
from tests.support.tokenizers_made import CHATML, THINKING

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Get ½ of it",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("get_weather", "add_up")
]
ARGUMENTS = [{"city": "Paris"}, {"a": 1, "b": 2.5}, {}, {"city": 'Zür "q"', "n": [1, None, True]}]
PARTS = ["hello", " world", "\n", "\n\n", "é", "½ ", " return", "日本", "a + b", "  ", "e\u0301", "."]
# Some templates refuse chats in these words.
REFUSES = ("alternate", "no system role", "one call alone", "tool call", "the role 'tool'")


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def reply(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(arguments: Any, name: str = "get_weather") -> dict[str, Any]:
    return {"id": "123456789", "type": "function", "function": {"name": name, "arguments": arguments}}


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def with_texts(message: dict[str, Any]) -> dict[str, Any]:
    """A message as OpenAI writes it: the arguments of its tool calls are JSON text."""
    functions = [each["function"] for each in message.get("tool_calls") or []]
    calls = [call(as_json(each["arguments"]), each["name"]) for each in functions]
    return {**message, "tool_calls": calls} if calls else message


def draw(chance: random.Random) -> dict[str, Any]:
    """A row of a chat: with tools, thoughts, keys without a value, empty replies, any white space."""

    def words() -> str:
        return "".join(chance.choices(PARTS, k=chance.randint(1, 7)))

    tools, messages = chance.random() < 0.4, list[dict[str, Any]]()
    if chance.random() < 0.4:
        messages.append({"role": "system", "content": words()})
    if chance.random() < 0.1:
        messages.append(reply(words()))
    for _ in range(chance.randint(1, 3)):
        messages.append(user(words()))
        if tools and chance.random() < 0.6:
            calls = [call(chance.choice(ARGUMENTS), chance.choice(["get_weather", "add_up"]))]
            messages.append(reply(chance.choice(["", words()]), tool_calls=calls))
            messages.append({"role": "tool", "name": "get_weather", "content": words()})
        thoughts = {chance.choice(["reasoning_content", "thinking", "reasoning"]): words()}
        content = chance.choice(
            [words(), "\n" + words(), "", f"<think>\n{words()}\n</think>\n\n{words()}"]
        )
        nothing = chance.choice([{}, {"tool_calls": None}, {"name": None}])
        messages.append(reply(content, **(thoughts if chance.random() < 0.3 else {}), **nothing))
    if chance.random() < 0.15:
        messages.append(user(words()))
    return {"messages": messages, **({"tools": TOOLS} if tools else {})}


@cache
def tokenizers(folder: Path, kind: str) -> tuple[JsonTokenizer, Any]:
    """The tokenizer of a kind here, and in transformers."""
    made = save_family(folder / kind, kind)
    named = json.loads((folder / kind / "tokenizer_config.json").read_text())
    return open_tokenizer(folder / kind), PreTrainedTokenizerFast(tokenizer_object=made, **named)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture
def ours(folder: Path) -> JsonTokenizer:
    return tokenizers(folder, "llama 3")[0]


def replies_of(ours: JsonTokenizer, source: str) -> Replies:
    (ours.path.parent / "chat_template.jinja").write_text(source)
    return Replies(ours, ours.end)


known = cache(replies_of)  # to compile a template takes longer than to write a chat by it


def written(ours: JsonTokenizer, source: str, row: dict[str, Any]) -> list[Rendered]:
    return replies_of(ours, source).render(read_chat(row))


def expected(
    both: tuple[JsonTokenizer, Any],
    source: str,
    messages: list[dict[str, Any]],
    row: dict[str, Any],
) -> tuple[list[int], list[bool] | None]:
    """Ids and marks in transformers; no marks where it stops, at a character that no token has."""
    ours, theirs = both
    given = {"tools": row.get("tools"), "chat_template": source, "return_dict": True}
    try:
        result = theirs.apply_chat_template(messages, **given, return_assistant_tokens_mask=True)
    except TypeError:  # the template takes JSON text alone
        messages = [with_texts(message) for message in messages]
        result = theirs.apply_chat_template(messages, **given, return_assistant_tokens_mask=True)
    texts = known(ours, source).render(read_chat({**row, "messages": messages}))
    spans = [span for each in texts for span in each.replies]
    text = theirs.apply_chat_template(messages, **{**given, "return_dict": False}, tokenize=False)
    places = theirs(text, add_special_tokens=False)
    if any(places.char_to_token(i) is None for start, stop in spans for i in (start, stop - 1)):
        return result["input_ids"], None
    return result["input_ids"], [bool(each) for each in result["assistant_masks"]]


def check_row(both: tuple[JsonTokenizer, Any], name: str, row: dict[str, Any]) -> int:
    """Compare what is learnt of a row. Return the number of texts, or 0 if it is refused."""
    ours, source, messages = both[0], FAMILIES[name], row["messages"]
    try:
        texts = known(ours, plain(source)).render(read_chat(row))
    except ValueError as error:
        if any(each in str(error) for each in REFUSES):
            return 0
        raise
    ends = [i for i, message in enumerate(messages, start=1) if message["role"] == "assistant"]
    wanted, _ = expected(both, tagged(source), messages, row)
    whole = len(texts) == 1 and encode(ours, texts[0])[0] == wanted
    for text, end in zip(texts, [len(messages)] if whole else ends, strict=True):
        ids, learnt = encode(ours, text)
        wanted, marks = expected(both, tagged(source), messages[:end], row)
        assert ids == wanted
        if marks is not None:  # in a text for one reply, the others are not learnt again
            first = 0 if whole else learnt.index(True)
            assert learnt == [False] * first + marks[first:], (name, ours.decode(ids), row)
    return len(texts)


CASES = [("llama 3", 5), *(pytest.param(kind, 1, marks=tier(slow=True)) for kind in KINDS)]


@pytest.mark.parametrize(("kind", "step"), CASES)
def test_as_transformers(folder: Path, kind: str, step: int) -> None:
    both, chance = tokenizers(folder, kind), random.Random(kind)
    for name in [each for each in FAMILIES if each not in OPEN][::step]:
        taken, wanted = 0, 1 if step > 1 else 5
        for _ in range(8 * wanted):
            taken += check_row(both, name, draw(chance)) > 0
            if taken == wanted:
                break
        assert taken == wanted, name


def learnt(ours: JsonTokenizer, text: Rendered) -> str:
    ids, marks = encode(ours, text)
    return ours.decode([i for i, yes in zip(ids, marks, strict=True) if yes])


@pytest.mark.parametrize(
    ("name", "replies"),
    [
        ("alpaca", ["b", "d"]),
        ("falcon", [" b", " d"]),
        ("glm", ["\nb", "\nd"]),
    ],
)
def test_a_reply_that_the_template_does_not_end(
    ours: JsonTokenizer, name: str, replies: list[str]
) -> None:
    """It is learnt with the end token, which is not in the text of a later reply."""
    row = {"messages": [user("a"), reply("b"), user("c"), reply("d\n\n")]}
    texts = written(ours, plain(FAMILIES[name]), row)
    assert [learnt(ours, text) for text in texts] == [f"{each}</s>" for each in replies]
    assert [ours.decode(encode(ours, text)[0]).count("</s>") for text in texts] == [1, 1]
    (text,) = written(ours, plain(FAMILIES[name]), {"messages": [user("a"), reply("日")]})
    assert learnt(ours, text).strip() == "日</s>", "all tokens of the last character"
    named, ours.end = ours.end, -1
    with pytest.raises(ValueError, match="message 2: the chat template writes nothing after a reply"):
        written(ours, plain(FAMILIES[name]), row)
    ours.end = named


def test_a_reply_ends_with_the_token_of_the_next_turn(folder: Path) -> None:
    """Where generation_config.json says that the model stops there, as for GLM 4.5."""
    ours, _ = tokenizers(folder, "qwen 2")
    stops = [ours.tokenizer.token_to_id(each) for each in ("</s>", "<|user|>", "<|system|>")]
    path = ours.path.with_name("generation_config.json")
    path.write_text(json.dumps({"eos_token_id": stops}))
    row = {"messages": [user("a"), reply("b"), user("c"), reply("d")]}
    (text,) = written(ours, plain(FAMILIES["glm"]), row)
    path.unlink()
    assert learnt(ours, text) == "\nb<|user|>\nd<|user|>"
    assert ours.decode(encode(ours, text)[0]).endswith("<|assistant|>\nd<|user|>")


CALLED = [user("a"), reply(None, tool_calls=[call({"city": "½"})]), {"role": "tool", "content": "c"}]
AS_TEXT = [CALLED[0], with_texts(CALLED[1]), CALLED[2]]


@pytest.mark.parametrize(
    "name", ["qwen_2.5", "qwen_3", "qwen_3_coder", "deepseek_v3", "harmony", "hermes"]
)
def test_forms_of_one_chat_are_one(ours: JsonTokenizer, name: str) -> None:
    """Arguments and tools as JSON text, content as parts, keys without a value."""
    parts = [
        {**m, "content": m["content"] and [{"type": "text", "text": m["content"]}]} for m in AS_TEXT
    ]
    nothing = [{"name": None, "tool_calls": None, "weight": None, **m} for m in CALLED]
    rows: list[dict[str, Any]] = [
        {"messages": CALLED, "tools": TOOLS},
        {"messages": AS_TEXT, "tools": json.dumps(TOOLS)},
        {"messages": parts, "tools": [json.dumps(each) for each in TOOLS]},
        {"messages": nothing, "tools": TOOLS, "documents": None, "chat_template_kwargs": None},
    ]
    first, *others = (written(ours, plain(FAMILIES[name]), row) for row in rows)
    assert all(each == first for each in others)
    ((text,),) = (first,)
    assert "½" in learnt(ours, text)
    assert '\\"' not in text.text
    assert "None" not in text.text
    assert "'type'" not in text.text


def test_a_text_is_kept_as_it_is_where_the_template_takes_texts(ours: JsonTokenizer) -> None:
    row = {"messages": [user("a"), reply("", tool_calls=[call('{"city":"x"}')])]}
    for name in ("qwen_3", "deepseek_v3"):
        (text,) = written(ours, plain(FAMILIES[name]), row)
        assert '{"city":"x"}' in learnt(ours, text)
    (text,) = written(ours, plain(FAMILIES["qwen_2.5"]), row)
    assert '{"city": "x"}' in learnt(ours, text)


def test_values_that_a_template_finds(ours: JsonTokenizer) -> None:
    source = (
        "{{ tools is none }}{{ documents is none }}{{ 'content' in messages[0] }}"
        "{% for m in messages %}{{ '|' ~ m.role ~ m.reasoning_content ~ m.thinking ~ m.content }}"
        "{% endfor %}"
        "{{ {'b': '½', 'a': 1}|tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}"
        "{{ {'a': 1}|tojson(indent=2) }}{{ extra }}</s>"
    )
    (ours.path.parent / "chat_template.jinja").write_text(source)
    assert Replies(ours).template.text([user("a")], {}).startswith("TrueTrueTrue|user")
    for name in ("reasoning_content", "thinking", "reasoning"):
        row = {
            "messages": [user("a"), reply("b", **{name: "t"})],
            "chat_template_kwargs": {"extra": "!"},
        }
        with pytest.raises(ValueError, match="does not write a reply where it asks for one"):
            written(ours, source, row)
        chat = read_chat(row)
        text = Replies(ours).template.text(chat.messages, chat.more)
        assert text == 'TrueTrueTrue|usera|assistantttb{"a":1,"b":"\\u00bd"}{\n  "a": 1\n}!</s>'


def test_a_reply_that_merges_with_the_prompt(folder: Path) -> None:
    """The token that holds the end of the prompt and the beginning of the reply is learnt."""
    both = tokenizers(folder, "qwen 2")
    row = {"messages": [user("a"), reply("\n\n new")]}
    assert check_row(both, "chatml", row) == 1
    (text,) = written(both[0], plain(FAMILIES["chatml"]), row)
    assert learnt(both[0], text) == "\n\n\n new<|im_end|>"


def test_what_the_tags_of_a_template_mark_is_learnt(folder: Path) -> None:
    both = tokenizers(folder, "llama 3")
    source = tagged(FAMILIES["chatml"]).replace("~ '<|im_end|>' }}{% endg", "}}{% endg")
    row = {"messages": [user("a"), reply("b"), user("c"), reply("d", weight=0), user("e"), reply("f")]}
    (text,) = written(both[0], source, {"messages": row["messages"][:2]})
    ids, marks = encode(both[0], text)
    assert (ids, marks) == expected(both, source, row["messages"][:2], row)
    (text,) = written(both[0], source, row)
    assert learnt(both[0], text) == "bf"
    replies = Replies(both[0])
    replies.render(read_chat(row))
    (note,) = replies.notes
    assert note == "replies have no end token within {% generation %}"
    twice = source.replace("{% generation %}", "{% generation %}.{% endgeneration %}{% generation %}")
    with pytest.raises(ValueError, match=r"some of its 3 replies are not to be learnt, and .* 6 parts"):
        written(both[0], twice, row)
    kept = "{% macro f(m) %}" + source + "{% endmacro %}{{ 'a' }}{{ f(messages) }}"
    with pytest.raises(ValueError, match="in a macro, or in a block whose text is kept for later"):
        written(both[0], kept, row)


def test_an_empty_reply_that_ends_otherwise_within_a_chat(folder: Path) -> None:
    ours, _ = both = tokenizers(folder, "llama 3")
    row = {"messages": [user("a"), reply(""), user("b")]}
    assert check_row(both, "harmony", row) == 1
    (text,) = written(ours, plain(FAMILIES["harmony"]), row)
    assert learnt(ours, text) == "<|channel|>final<|message|><|return|>"


@pytest.mark.parametrize("name", ["chatml", "qwen_3", "mistral_1"])
def test_replies_that_are_not_learnt(ours: JsonTokenizer, name: str) -> None:
    """Those of weight 0, and those of a prompt."""
    source = plain(FAMILIES[name])
    messages = [user("a"), reply("b"), user("c"), reply("d")]
    whole = {"messages": [messages[0], reply("b", weight=0), messages[2], reply("d", weight=1)]}
    (text,) = written(ours, source, whole)
    assert "b" in text.text
    assert "d" in learnt(ours, text)
    assert "b" not in learnt(ours, text)
    assert written(ours, source, {"prompt": messages[:3], "completion": messages[3:]}) == [text]
    assert written(ours, source, {"messages": [user("a"), reply("b", weight=0)]}) == []


def test_a_chat_that_begins_with_a_reply(folder: Path) -> None:
    both = tokenizers(folder, "llama 3")
    for name in ("chatml", "deepseek_r1", "phi_3", "vicuna", "no_prompt", "qwen_2.5"):
        assert check_row(both, name, {"messages": [reply("hello"), user("a"), reply("b")]}), name


def test_a_prompt_that_opens_a_thought(ours: JsonTokenizer) -> None:
    (ours.path.parent / "chat_template.jinja").write_text(plain(FAMILIES["qwq"]))
    replies = Replies(ours)
    (text,) = replies.render(read_chat({"messages": [user("a"), reply("<t>")]}))
    assert learnt(ours, text) == "<t><|im_end|>"
    assert replies.notes == {"replies do not begin with the '<think>' of the template's prompt": 1}


def test_a_reply_begins_after_the_messages_before_it(ours: JsonTokenizer) -> None:
    """An earlier reply has more of what the prompt ends with than the last one has."""
    source = CHATML.replace("{{ m.content }}", "{{ m.reasoning_content or '' }}{{ m.content }}")
    source = source.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")
    thoughts = {"reasoning_content": "<think>\nt\n</think>\n\n"}
    row = {"messages": [user("a"), reply("b", **thoughts), user("c"), reply("d", **thoughts)]}
    (text,) = written(ours, source, row)
    assert "c" in text.text
    assert "c" not in learnt(ours, text)


def test_a_system_message_that_stands_in_the_prompt_alone(ours: JsonTokenizer) -> None:
    """Mistral's templates write it before the last message, if this is the user's."""
    row = {"messages": [{"role": "system", "content": "s"}, user("a"), reply("b")]}
    (ours.path.parent / "chat_template.jinja").write_text(plain(FAMILIES["mistral_3"]))
    replies = Replies(ours)
    (text,) = replies.render(read_chat(row))
    assert text.text == "<s>[INST] a[/INST] b</s>"
    assert learnt(ours, text) == " b</s>"
    assert replies.notes == {"replies stand after other text than the template's prompt": 1}


def test_templates_by_name(folder: Path, tmp_path: Path) -> None:
    ours, _ = tokenizers(folder, "gpt2")
    sources = {"default": "{% for m in messages %}D{{ m.content }}</s>{% endfor %}", "rag": "{% if %}"}
    sources["tool_use"] = sources["default"].replace("D", "T")
    named = [{"name": name, "template": source} for name, source in sources.items()]
    rows = [
        {"messages": [user("a"), reply("b")]},
        {"messages": [user("a"), reply("b")], "tools": TOOLS},
    ]
    config: dict[str, Any] = {"chat_template": named}
    ours.config = config
    (ours.path.parent / "chat_template.jinja").unlink(missing_ok=True)

    def texts(row: dict[str, Any]) -> str:
        chat = read_chat(row)
        return Replies(ours, ours.end).template.text(chat.messages, chat.more)

    assert [texts(row) for row in rows] == ["Da</s>Db</s>", "Ta</s>Tb</s>"]
    config["chat_template"] = named[2:]
    with pytest.raises(ValueError, match="needs a chat template named 'default'"):
        texts(rows[0])
    more = ours.path.parent / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("F" + sources["default"])
    (ours.path.parent / "chat_template.jinja").write_text("G" + sources["default"])
    assert [texts(row) for row in rows] == ["GDa</s>Db</s>", "FDa</s>Db</s>"]
    copy_tokenizer(ours.path.parent, tmp_path / "copy")
    assert (tmp_path / "copy" / more.name / "tool_use.jinja").read_text().startswith("F")
    more.rename(tmp_path / "elsewhere")
    more.symlink_to(tmp_path / "elsewhere")
    for refused in (lambda: copy_tokenizer(ours.path.parent, tmp_path / "copy"), lambda: Replies(ours)):
        with pytest.raises(ConfigError, match=r"additional_chat_templates.*: is a link that leads out"):
            refused()
    more.unlink()


def test_replies_alone_are_learnt(ours: JsonTokenizer) -> None:
    (text,) = written(ours, CHATML, {"messages": CHAT})
    assert text.text.startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n")
    assert learnt(ours, text) == "<think>count</think>4<|im_end|>yes  <|im_end|>"


def test_a_template_that_drops_thoughts_makes_a_text_for_each_reply(ours: JsonTokenizer) -> None:
    first, second = written(ours, THINKING, {"messages": CHAT})
    assert learnt(ours, first) == "<think>count</think>4<|im_end|>"
    assert learnt(ours, second) == "yes  <|im_end|>"
    assert "count" not in second.text
    assert second.text.startswith("<s><|im_start|>system\n")


def test_a_template_that_writes_no_reply_where_it_asks_for_one(ours: JsonTokenizer) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        written(ours, "{% for m in messages|reverse %}{{ m.content }}{% endfor %}", {"messages": CHAT})
    assert str(caught.value) == (
        "message 3: the chat template does not write a reply where it asks for one, after"
        " '2 + 2? <|im_end|> Be short.'"
    )


def test_a_reply_that_is_not_written(ours: JsonTokenizer) -> None:
    source = "{% for m in messages %}{{ m.role ~ ':</s>' }}{% endfor %}"
    source += "{% if add_generation_prompt %}assistant:{% endif %}"
    with pytest.raises(ValueError, match=r"^message 2: the chat template does not write its content$"):
        written(ours, source, {"messages": [user("a"), reply("b")]})
    row = {"messages": [user("a"), reply("", tool_calls=[call({})])]}
    with pytest.raises(ValueError, match=r"^message 2: .* does not write its tool call 'get_weather'$"):
        written(ours, plain(FAMILIES["chatml"]), row)
    with pytest.raises(ValueError, match=r"^message 2: .* does not write its tool call 'get_weather'$"):
        written(ours, tagged(FAMILIES["chatml"]), row)


@pytest.mark.parametrize("write", [plain, tagged])
def test_a_message_that_is_not_written(ours: JsonTokenizer, write: Callable[[str], str]) -> None:
    source = write(FAMILIES["zephyr"])
    with pytest.raises(ValueError, match=r".") as caught:
        written(ours, source, {"messages": [{"role": "human", "content": "ask"}, reply("b")]})
    assert str(caught.value) == (
        "message 1: the chat template does not write the role 'human'; name another, as in --roles"
        " human=user"
    )


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("chatml", {"reasoning_content": "thought"}),
        ("deepseek_r1", {"content": "<think>thought</think>b"}),
        ("llama_3.1", {"content": "words", "tool_calls": [call({})]}),
    ],
)
def test_what_a_template_leaves_out_of_a_reply_is_said(
    ours: JsonTokenizer, name: str, more: dict[str, Any]
) -> None:
    for write in (plain, tagged):
        (ours.path.parent / "chat_template.jinja").write_text(write(FAMILIES[name]))
        replies = Replies(ours, ours.end)
        replies.render(read_chat({"messages": [user("a"), reply("b") | more], "tools": TOOLS}))
        assert replies.notes["replies have words or thoughts that the chat template leaves out"] == 1


class Spans(list[tuple[int, int]]):
    """Spans that count how often one is looked at."""

    looks = 0

    def __getitem__(self, place: Any) -> Any:
        self.looks += 1
        return super().__getitem__(place)

    def __iter__(self) -> Any:
        for each in super().__iter__():
            self.looks += 1
            yield each


def test_a_chat_of_many_replies_is_marked_in_one_pass() -> None:
    """Each token is looked at a few times, however many replies there are."""
    count = 1000
    spans = Spans((n, n + 1) for n in range(count))
    tokenizer: Any = SimpleNamespace(encode_markup=lambda text, added: ([*range(count)], spans))
    replies = [(start, start + 2) for start in range(1, count, 4)]
    _, learnt = encode(tokenizer, Rendered("", replies))
    assert [n for n, each in enumerate(learnt) if each] == [n for n in range(count) if n % 4 in (1, 2)]
    assert spans.looks < 10 * count
