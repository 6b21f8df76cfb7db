"""The prompts of `generate`, and the tokens that end its texts: those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, RepetitionPenaltyLogitsProcessor

from compose.cli.generate import encode_prompts, given_prompts
from compose.data.generation_config import (
    KEYS,
    end_ids,
    generation_values,
    repetition_penalty,
    turn_ends,
)
from compose.data.tokenizer import ByteTokenizer, open_tokenizer
from compose.train.sampling import penalized
from tests.support.helpers import refusal
from tests.support.tokenizer_kinds import KINDS, save_kind
from tests.support.tokenizers_made import CHATML

PROMPTS = ["def foo.bar()", " the <|im_start|>user", "x<s> y</s> [SEP]<bos>"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_what_transformers_makes_of_it(tmp_path: Path, kind: str) -> None:
    tokenizer = open_tokenizer(save_kind(tmp_path, kind, chat_template=CHATML))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    result = encode_prompts(tokenizer, PROMPTS, chat=False)
    assert result == [reference(text)["input_ids"] for text in PROMPTS]
    assert encode_prompts(tokenizer, PROMPTS, chat=False, special=False) == [
        reference(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        for text in PROMPTS
    ]
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    assert encode_prompts(tokenizer, PROMPTS, chat=True) == [
        reference.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats
    ]


@pytest.mark.parametrize(
    "config",
    [{}, {"legacy": True}, {"legacy": False}, {"add_prefix_space": False}, {"model_type": "mixtral"}],
)
def test_llama_2s_kind_is_split_as_its_class_does(tmp_path: Path, config: dict[str, Any]) -> None:
    """transformers' class splits texts in its own way, whatever tokenizer.json says."""
    save_kind(tmp_path, "llama2", tokenizer_class="LlamaTokenizerFast", **config)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    tokenizer, reference = open_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in (" a", "the user", "<s>[INST] a [/INST] b </s> <s>def", "\n  x", "日本語 🙂"):
        ids = reference(text)["input_ids"]
        assert tokenizer.encode(text, markup=True) == ids
        assert tokenizer.decode(ids) == reference.decode(ids)


def test_chats_that_cannot_be_asked(tmp_path: Path) -> None:
    assert encode_prompts(ByteTokenizer(), ["a<s>"], chat=False) == [list(b"a<s>")]
    assert refusal(encode_prompts, ByteTokenizer(), ["a"], chat=True) == (
        "command line: --chat: bytes have no chat template"
    )
    assert refusal(encode_prompts, ByteTokenizer(), ["a"], chat=True, special=False) == (
        "command line: --no-special-tokens: is for text; a chat has the tokens that its template writes"
    )
    tokenizer = open_tokenizer(save_kind(tmp_path, "qwen"))
    assert "has no chat template" in refusal(encode_prompts, tokenizer, ["a"], chat=True)
    tokenizer = open_tokenizer(save_kind(tmp_path, "qwen", chat_template="{{ raise_exception('no') }}"))
    assert refusal(encode_prompts, tokenizer, ["a"], chat=True) == (
        f"{tmp_path}: the chat template, line 1: no"
    )


def test_prompts_come_from_flags_and_files(tmp_path: Path) -> None:
    text, rows = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_bytes(b"\xef\xbb\xbfone\r\n\n two ")
    rows.write_text('"three\\nlines"\n{"prompt": "four"}\n')
    flags = [("--prompts", str(rows)), ("--prompt", "five"), ("--prompts", str(text))]
    assert given_prompts(flags) == ["three\nlines", "four", "five", "one", " two "]
    needs = "command line: --prompt: needs a text to continue"
    assert refusal(given_prompts, []) == needs
    assert refusal(given_prompts, [("--prompt", "a"), ("--prompt", "")]) == needs
    for content, line in {
        "": f"command line: --prompts: {rows}: holds no prompt",
        '"a"\n{"text": 1}': f"{rows}:2: is neither a text nor an object with a prompt or messages",
        "[": f"{rows}:1: is not JSON: Expecting value: line 1 column 2 (char 1)",
    }.items():
        rows.write_text(content)
        assert refusal(given_prompts, [("--prompts", str(rows))]) == line
    rows.write_bytes(b"\xff")
    assert refusal(given_prompts, [("--prompts", str(rows))]) == (
        f"command line: --prompts: {rows}: is not UTF-8: invalid start byte"
    )
    assert refusal(given_prompts, [("--prompts", "gone")]) == (
        "command line: --prompts: gone: No such file or directory"
    )


def test_messages_and_tools_come_from_a_file(tmp_path: Path) -> None:
    """Tools are written as transformers has them, or as text in data sets."""
    template = "{{ tools | tojson }}" + CHATML
    tokenizer = open_tokenizer(save_kind(tmp_path, "qwen", chat_template=template))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    messages = [{"role": "system", "content": "def"}, {"role": "user", "content": "the user"}]
    rows = [{"messages": messages, "tools": tools}, {"messages": messages, "tools": json.dumps(tools)}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    prompts = given_prompts([("--prompts", str(path))])
    expected = reference.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
    assert encode_prompts(tokenizer, prompts, chat=True) == [expected["input_ids"]] * 2
    assert refusal(encode_prompts, tokenizer, prompts, chat=False) == (
        "command line: --prompts: holds messages; give --chat too"
    )
    path.write_text('{"messages": [{"content": "a"}]}')
    assert refusal(given_prompts, [("--prompts", str(path))]) == (f"{path}:1: message 1 has no role")


def test_every_field_of_generation_config_is_looked_at(tmp_path: Path) -> None:
    """A new version's new field fails here until somebody has said what it is."""
    fields = set(vars(GenerationConfig()))
    assert not fields - KEYS.read - set(KEYS.only) - KEYS.besides
    assert KEYS.problems(GenerationConfig().to_dict()) == []
    path = tmp_path / "generation_config.json"
    for key in KEYS.only:
        path.write_text(json.dumps({key: 17}))
        assert refusal(repetition_penalty, [tmp_path]) == (f"{path}: {key}: 17 is not supported here")
    for key in KEYS.besides:
        path.write_text(json.dumps({key: 17}))
        assert repetition_penalty([tmp_path]) == 1
    path.write_text('{"repetition_penalty": -1}')
    assert refusal(repetition_penalty, [tmp_path]) == (
        f"{path}: repetition_penalty: -1 is no number above 0"
    )


def test_repeated_tokens_are_penalized_as_in_transformers(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.3}')
    penalty = repetition_penalty([tmp_path])
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    known = [3, 7, 3, 49, 0]
    theirs: Any = RepetitionPenaltyLogitsProcessor(1.3)
    expected = theirs(torch.tensor([known]), logits[None].clone())[0]
    assert torch.equal(penalized(logits, known, penalty), expected)
    assert torch.equal(penalized(logits, known, 1.0), logits)
    # In bfloat16 the quotient, 9.762, would be rounded to the other token's logit.
    assert penalized(torch.tensor([9.75, 10.25], dtype=torch.bfloat16), [1], 1.05).argmax() == 1


def test_a_text_ends_at_every_token_that_a_file_names(tmp_path: Path) -> None:
    save_kind(tmp_path, "qwen", eos_token="<|endoftext|>")
    assert end_ids(open_tokenizer(tmp_path)) == [0]
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert end_ids(open_tokenizer(tmp_path)) == [0, 2]
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 0, -1]}')
    assert end_ids(open_tokenizer(tmp_path)) == [0, 2, 7, 9]
    other = save_kind(tmp_path / "other", "gemma")
    assert end_ids(open_tokenizer(other), tmp_path) == [1, 7, 0, 9]
    assert end_ids(ByteTokenizer()) == [256]
    (tmp_path / "config.json").write_text('{"eos_token_id": "</s>"}')
    assert refusal(end_ids, open_tokenizer(tmp_path)) == (
        f"{tmp_path}/config.json: eos_token_id: is neither an id nor a list of ids"
    )


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", []),
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", ["<|im_end|>"]),
        (
            "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}<|im_start|>{% else %}"
            "<|im_end|>{% endif %}\n{% endfor %}",
            ["<|im_end|>", "<|im_start|>"],
        ),
        ("{{ raise_exception('no') }}", []),
    ],
)
def test_how_a_template_ends_a_reply(tmp_path: Path, template: str, ends: list[str]) -> None:
    tokenizer = open_tokenizer(save_kind(tmp_path, "qwen", chat_template=template))
    results = [tokenizer.tokenizer.id_to_token(each) for each in turn_ends(tokenizer)]
    assert list(dict.fromkeys(results)) == ends


def test_an_end_that_no_tokenizer_names_is_the_models(tmp_path: Path) -> None:
    save_kind(tmp_path, "qwen", eos_token=None)
    assert open_tokenizer(tmp_path).end == 0  # by its name
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert open_tokenizer(tmp_path).end == 5


def test_ids_for_an_export(tmp_path: Path) -> None:
    assert generation_values(None, 400) == dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id")
    )
    assert generation_values(None, 257)["eos_token_id"] == 256
    (tmp_path / "config.json").write_text('{"bos_token_id": 4, "eos_token_id": 5}')
    assert generation_values(tmp_path, 400) == {
        "bos_token_id": 4,
        "eos_token_id": 5,
        "pad_token_id": None,
    }
    save_kind(tmp_path, "qwen", chat_template=CHATML)
    assert generation_values(tmp_path, 400) == {
        "bos_token_id": 4,
        "eos_token_id": [2, 5],
        "pad_token_id": 0,
    }
