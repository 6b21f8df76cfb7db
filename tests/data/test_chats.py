"""Chats: replies alone are learnt, as the template writes them; conversations in a sample are apart."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from compose.__main__ import main
from compose.config.tables import Data
from compose.data.chat_template import ChatTemplate
from compose.data.chats import Conversations, pack_into_bins
from compose.data.messages import read_chat
from compose.data.replies import Replies, encode
from compose.data.sources import open_samples
from compose.data.task import LanguageModelling
from compose.data.tokenizer import open_tokenizer
from compose.errors import ConfigError
from compose.ops.batch import IGNORE
from tests.support.data_made import chats
from tests.support.helpers import make_config
from tests.support.tokenizers_made import CHATML, THINKING, save_tokenizer

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "2 + 2? <|im_end|> "},
    {"role": "assistant", "content": "<think>count</think>4"},
    {"role": "user", "content": "naïve ½?"},
    {"role": "assistant", "content": "yes  "},
]
# CHATML with the marks by which transformers finds what is learnt; they write nothing.
MARKED = CHATML.replace(
    "{{ m.content }}<|im_end|>\n",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{{ '\\n' }}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}",
)


def learnt_text(folder: Path, messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(text, what is learnt of it, as tokens) of each text that a chat makes."""
    tokenizer = open_tokenizer(folder)
    found = []
    for rendered in Replies(tokenizer).render(read_chat({"messages": messages}, "messages")):
        ids, learnt = encode(tokenizer, rendered)
        kept = tokenizer.decode([i for i, yes in zip(ids, learnt, strict=True) if yes])
        found.append((tokenizer.decode(ids), kept))
    return found


def test_replies_alone_are_learnt(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    ((text, learnt),) = learnt_text(tmp_path, CHAT)
    assert text.startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n")
    assert learnt == "<think>count</think>4<|im_end|>yes  <|im_end|>"


@pytest.mark.parametrize("marked", [False, True])
def test_equals_transformers(tmp_path: Path, marked: bool) -> None:
    """Ids and mask, token by token, over random chats."""
    save_tokenizer(tmp_path / "ours", MARKED if marked else CHATML)
    save_tokenizer(tmp_path / "theirs", MARKED)
    tokenizer = open_tokenizer(tmp_path / "ours")
    replies = Replies(tokenizer)
    reference = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    chance = random.Random(0)
    for _ in range(50):
        turns = chance.randint(1, 5)
        messages = [
            {
                "role": role,
                "content": "".join(chance.choices(["a", " b", "\n", "é", "½ ", "return"], k=6)),
            }
            for _ in range(turns)
            for role in ("user", "assistant")
        ]
        (rendered,) = replies.render(read_chat({"messages": messages}, "messages"))
        ids, learnt = encode(tokenizer, rendered)
        expected = reference.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert ids == expected["input_ids"]
        assert [int(yes) for yes in learnt] == expected["assistant_masks"]


def test_a_template_that_drops_thoughts_makes_a_text_for_each_reply(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, THINKING)
    first, second = learnt_text(tmp_path, CHAT)
    assert first[1] == "<think>count</think>4<|im_end|>"
    assert second[1] == "yes  <|im_end|>"
    assert "count" not in second[0]
    assert second[0].startswith("<s><|im_start|>system\n")


def test_chats_that_cannot_be_used(tmp_path: Path) -> None:
    def refused(row: dict[str, Any], template: str = CHATML) -> str:
        save_tokenizer(tmp_path, template)
        try:
            Replies(open_tokenizer(tmp_path)).render(read_chat(row, "messages"))
        except ValueError as error:
            return str(error)
        raise AssertionError("it was taken")

    assert refused({"text": "a"}) == "has no list of messages in 'messages'"
    assert refused({"messages": []}) == "has no list of messages in 'messages'"
    assert refused({"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}) == (
        "message 2 has no role"
    )
    assert refused({"messages": [{"role": "user"}]}) == "message 1 has no content"
    assert refused({"messages": CHAT}, "{{ raise_exception('no system') }}") == (
        "the chat template, line 1: no system"
    )
    upside_down = "{% for m in messages|reverse %}{{ m.content }}{% endfor %}"
    assert refused({"messages": CHAT}, upside_down) == (
        "message 3: the chat template does not write a reply where it asks for one, after"
        " '2 + 2? <|im_end|> Be short.'"
    )
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no chat template, in chat_template\.jinja or "):
        ChatTemplate(open_tokenizer(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match="the chat template, line 1: Expected an expression"):
        ChatTemplate(open_tokenizer(tmp_path))


def token_set(folder: Path, count: int = 40) -> Path:
    tokenizer = save_tokenizer(folder / "tokenizer")
    words = ["tokenize", "--chat", "--workers=1", "--tokenizer", str(tokenizer), "--out"]
    assert main([*words, str(folder / "out"), str(chats(folder / "chats.jsonl", count))]) == 0
    return folder / "out"


@pytest.mark.parametrize("seq_len", [300, 64, 33])
def test_conversations_are_packed_whole(
    tmp_path: Path, seq_len: int, capsys: pytest.CaptureFixture[str]
) -> None:
    out = token_set(tmp_path)
    assert " 40 conversations, 1 without a reply left out\n" in capsys.readouterr().out
    samples = open_samples(str(out), Data(), seq_len, 300)
    assert isinstance(samples, Conversations)
    whole = samples.token_set
    assert whole is not None
    assert whole.trained is not None
    seen = []
    for index in range(len(samples)):
        sample = samples.read(index)
        assert {name: value.shape for name, value in sample.items()} == dict.fromkeys(
            sample, (seq_len,)
        )
        real = sample["positions"] >= 0
        assert (sample["targets"][~real] == IGNORE).all()
        documents = sample["document_ids"][real]
        assert (documents.diff() >= 0).all()
        for document in documents.unique():
            here = real & (sample["document_ids"] == document)
            assert torch.equal(sample["positions"][here], torch.arange(int(here.sum())))
            # Which conversation it is, by its tokens and masks in the token set.
            ids = sample["tokens"][here].numpy()
            (number,) = [
                n
                for n, (start, end) in enumerate(zip([0, *whole.ends[:-1]], whole.ends, strict=True))
                if np.array_equal(whole.tokens.read(int(start), int(end) - 1)[:seq_len], ids)
            ]
            start = int([0, *whole.ends][number])
            following = whole.tokens.read(start + 1, start + 1 + len(ids))
            learnt = whole.trained.read(start + 1, start + 1 + len(ids)) > 0
            targets = np.where(learnt, following, IGNORE)
            assert sample["targets"][here].tolist() == targets.tolist()
            assert learnt.any()
            seen.append(number)
    cut = [n for n in range(40) if samples.lengths[n] == 0]
    assert sorted(seen + cut) == list(range(40))
    assert bool(cut) == (seq_len == 33)  # of these the reply begins beyond it


def test_what_became_of_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table at the end of the command, and at the start of a run; bad rows are left out if asked."""
    tokenizer, file = save_tokenizer(tmp_path / "tokenizer"), tmp_path / "chats.jsonl"
    rows = [{"messages": CHAT}, {"messages": CHAT[:1]}, {"messages": 5}]
    rows += [{"messages": [*CHAT[:2], {"role": "assistant", "content": "4" * n}]} for n in (1, 90)]
    lines = [json.dumps(row) for row in rows]
    file.write_text("\ufeff" + "\n".join([*lines, "{"]), encoding="utf-8")
    words = ["tokenize", "--chat", "--workers=1", "--tokenizer", str(tokenizer), "--out"]
    with pytest.raises(ConfigError, match=r"chats\.jsonl:3: has no list of messages in 'messages'$"):
        main([*words, str(tmp_path / "1"), str(file)])
    out = tmp_path / "2"
    assert main([*words, str(out), "--skip-bad", str(file)]) == 0
    made = open_samples(str(out), Data(), 64, 300)
    assert isinstance(made, Conversations)
    assert made.token_set is not None
    lengths = np.diff(made.token_set.ends, prepend=0)
    learnt = int(made.trained.read(0, len(made.trained)).sum())
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == (
        f"{out}: {lengths.sum():,} tokens, 3 conversations, 1 without a reply left out"
    )
    assert [line.split()[:3] for line in printed[1:4]] == [
        ["rows", "6"],
        ["replies", "4", "to"],
        ["tokens", "learnt", str(learnt)],
    ]
    assert printed[4:7] == [
        f"  longest{max(lengths):>21,}  tokens; half have at most {int(np.median(lengths))}, 99 %"
        f" {int(np.percentile(lengths, 99))}",
        f"  empty{1:>23}  left out: no reply to learn",
        f"  bad{2:>25}  left out (--skip-bad), for example:",
    ]
    assert printed[7] == f"    {file}:3: has no list of messages in 'messages'"
    assert printed[8].startswith(f"    {file}:6: is not JSON: ")
    cut = lengths[lengths > 65]
    kept = int((np.concatenate([made.read(n)["targets"] for n in range(len(made))]) != IGNORE).sum())
    assert made.table().splitlines() == [
        f"  rows{4:>24}",
        f"  replies{4:>21}",
        f"  conversations{3:>15}",
        f"  cut{len(cut):>25}  at train.seq_len 64: {(cut - 65).sum()} tokens are lost",
        f"  left out{0:>20}  of these: nothing to learn remains",
        f"  tokens learnt{kept:>15}  in an epoch, of {made.lengths.sum()}",
        f"  samples{len(made):>21}  {100 * made.lengths.sum() / (64 * len(made)):.1f} % full",
    ]


def test_a_token_set_of_an_older_version(tmp_path: Path) -> None:
    out = token_set(tmp_path)
    new = open_samples(str(out), Data(), 33, 300)
    manifest = json.loads((out / "manifest.json").read_text())
    for name in ("rows", "replies", "learnt", "empty", "bad"):
        del manifest[name]
    (out / "manifest.json").write_text(json.dumps(manifest))
    old = open_samples(str(out), Data(), 33, 300)
    assert isinstance(old, Conversations)
    assert isinstance(new, Conversations)
    assert old.content == new.content
    lines = [
        line
        for line in new.table().splitlines()
        if line.split()[0] not in ("rows", "replies", "tokens")
    ]
    assert old.table().splitlines() == lines


def test_nothing_to_learn_is_refused(tmp_path: Path) -> None:
    out = token_set(tmp_path)
    with pytest.raises(ConfigError) as caught:
        open_samples(str(out), Data(), 5, 300)
    assert str(caught.value) == (
        f"{out} has no conversation with something to learn within train.seq_len 5"
    )


def test_chats_without_a_reply_are_refused(tmp_path: Path) -> None:
    """All marks of what is learnt are 0, as a template without a generation block leaves them."""
    out = token_set(tmp_path)
    for path in out.glob("trained-*.bin"):
        path.write_bytes(bytes(path.stat().st_size))
    config = make_config(1, train__seq_len=200, model__vocab_size=300)
    with pytest.raises(ConfigError, match="has nothing to learn: no token of its"):
        LanguageModelling().open(str(out), config)


def test_bins_are_nearly_full() -> None:
    chance = np.random.default_rng(0)
    for size in (7, 100, 1000):
        lengths = np.minimum(chance.geometric(4 / size, 3000), size)
        lengths[::50] = 0
        bins = pack_into_bins(lengths, size)
        assert sorted(n for each in bins for n in each) == np.flatnonzero(lengths).tolist()
        assert max(lengths[each].sum() for each in bins) <= size
        assert len(bins) <= 11 / 9 * np.ceil(lengths.sum() / size) + 1
        assert lengths.sum() / (size * len(bins)) > 0.98
    assert pack_into_bins(np.zeros(3, int), 5) == []
