"""Rows are the same in every kind of file: each shape of chats gives the same ids and marks in each."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from compose.__main__ import main
from compose.data import documents
from compose.data.documents import FilePart, rows
from compose.data.token_files import open_token_set
from tests.support.helpers import refusal, tier
from tests.support.tokenizers_made import save_tokenizer

Rows = list[dict[str, Any]]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = [
    {"name": name, "parameters": {"type": "object", "properties": {each: {"type": "string"}}}}
    for name, each in (("f", "a"), ("g", "b"))
]
CALLS = [{"name": "f", "arguments": {"a": "½"}}, {"name": "g", "arguments": {"b": "x"}}]


def chat(*texts: str, system: str = "", **more: Any) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(texts)
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"messages": [*([{"role": "system", "content": system}] if system else []), *turns], **more}


def share(*texts: str, system: str = "", **more: Any) -> dict[str, Any]:
    turns = chat(*texts, system=system)["messages"]
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return {
        "conversations": [{"from": names[t["role"]], "value": t["content"]} for t in turns],
        **more,
    }


def with_call(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A chat that calls a tool, as OpenAI's and as ShareGPT's."""
    call = {"type": "function", "function": CALLS[number]}
    row, other = chat("a", "yes"), share("a", "yes")
    row["messages"][1:1] = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "日"},
    ]
    other["conversations"][1:1] = [
        {"from": "function_call", "value": json.dumps(CALLS[number])},
        {"from": "observation", "value": "日"},
    ]
    tool = [TOOLS[number]]
    return (
        {**row, "tools": [{"type": "function", "function": each} for each in tool]},
        {**other, "tools": json.dumps(tool)},
    )


TEXTS = [("naïve ½?", "日本"), ("user and", "a + b\n"), ("  x", "")]
OPENAI = [chat(*each) for each in TEXTS]
PROMPTS = [{"prompt": asked, "completion": reply} for asked, reply in TEXTS]
SHAPES: dict[str, tuple[Rows, Rows]] = {
    "messages": (OPENAI, OPENAI),
    "several turns": (
        [chat("a", "b", "½", "d", system="Be short."), *OPENAI],
        [share("a", "b", "½", "d", system="Be short."), *(share(*each) for each in TEXTS)],
    ),
    "tool calls": ([with_call(0)[0], with_call(1)[0]], [with_call(0)[1], with_call(1)[1]]),
    "tools of OpenAI": ([with_call(n)[0] for n in (0, 1)], [with_call(n)[0] for n in (0, 1)]),
    "alpaca": (
        [*OPENAI, chat("Add.\n1 + 1", "2"), chat("hi", "yes", "a", "b", system="s")],
        [
            *({"instruction": asked, "input": "", "output": reply} for asked, reply in TEXTS),
            {"instruction": "Add.", "input": "1 + 1", "output": "2"},
            {"instruction": "a", "output": "b", "history": [["hi", "yes"]], "system": "s"},
        ],
    ),
    "prompt": (OPENAI, PROMPTS),
    "prompt of messages": (
        OPENAI,
        [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in OPENAI],
    ),
    "chosen": (OPENAI, [{"prompt": asked, "chosen": one, "rejected": "no"} for asked, one in TEXTS]),
    "chosen of messages": (
        OPENAI,
        [
            {"chosen": r["messages"], "rejected": chat(r["messages"][0]["content"], "n")["messages"]}
            for r in OPENAI
        ],
    ),
}


def as_lines(path: Path, content: Rows) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_text("\n".join(json.dumps(row) for row in content), encoding="utf-8")
    return path


def as_array(path: Path, content: Rows) -> Path:
    path = path.with_suffix(".json")
    path.write_text("\ufeff\n " + json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    return path


def table_of(content: Rows) -> pyarrow.Table:
    names = dict.fromkeys(name for row in content for name in row)
    return pyarrow.table({name: [row.get(name) for row in content] for name in names})


def as_parquet(path: Path, content: Rows) -> Path:
    path = path.with_suffix(".parquet")
    pyarrow.parquet.write_table(table_of(content), path, row_group_size=2)
    return path


def as_arrow(path: Path, content: Rows, make: Callable[..., Any] = pyarrow.ipc.new_stream) -> Path:
    table, path = table_of(content), path.with_suffix(".arrow")
    with make(path, table.schema) as writer:
        writer.write_table(table)
    return path


def as_saved(path: Path, content: Rows) -> Path:
    """A folder as save_to_disk of datasets 5.2 writes it: streams in two files, and their names."""
    path.mkdir(exist_ok=True)
    table, names = table_of(content), [f"data-{n:05}-of-00002.arrow" for n in (0, 1)]
    for name, part in zip(names, (table.slice(0, 1), table.slice(1)), strict=True):
        with pyarrow.ipc.new_stream(path / name, table.schema) as writer:
            writer.write_table(part)
    (path / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": None}
    (path / "state.json").write_text(json.dumps(state))
    return path


FILES: dict[str, Callable[[Path, Rows], Path]] = {
    "jsonl": as_lines,
    "array": as_array,
    "parquet": as_parquet,
    "arrow": as_arrow,
    "arrow file": lambda path, content: as_arrow(path, content, pyarrow.ipc.new_file),
    "saved": as_saved,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


def made(tokenizer: Path, file: Path, *flags: str) -> tuple[list[int], list[bool], list[int]]:
    """Ids, what is learnt and the ends of a token set of chats."""
    out = file.parent / f"{file.name}.set"
    words = ["--chat", "--workers=1", "--tokenizer", str(tokenizer), "--out", str(out)]
    assert main(["tokenize", *words, *flags, str(file)]) == 0
    tokens = open_token_set(out)
    assert tokens.trained
    size = len(tokens.tokens)
    learnt = tokens.trained.read(0, size) > 0
    return tokens.tokens.read(0, size).tolist(), learnt.tolist(), tokens.ends.tolist()


LATER = ("messages", "chosen of messages", "prompt of messages")


@pytest.mark.parametrize("shape", [pytest.param(s, marks=tier(slow=s in LATER)) for s in SHAPES])
def test_every_shape_in_every_file(tmp_path: Path, tokenizer: Path, shape: str) -> None:
    """The ids are also those of apply_chat_template of transformers, for OpenAI's form."""
    same, content = SHAPES[shape]
    wanted = made(tokenizer, as_lines(tmp_path / "same", same))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), chat_template=TEMPLATE)
    each = [
        theirs.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=False)
        for row in same
    ]
    assert wanted[0] == [i for ids in each for i in ids]
    assert len(wanted[2]) == len(same)
    assert any(wanted[1])
    flags = ["--shape=chosen"] if shape.startswith("chosen") else []
    for name, write in FILES.items():
        assert made(tokenizer, write(tmp_path / name.replace(" ", "_"), content), *flags) == wanted, (
            name
        )


def problem_of(tokenizer: Path, file: Path, *flags: str) -> str:
    out = file.parent / f"set {len(list(file.parent.iterdir()))}"
    words = ["tokenize", "--workers=1", "--tokenizer", str(tokenizer), "--out", str(out)]
    return refusal(main, [*words, "--chat", *flags, str(file)])


MIXED = [*OPENAI[:1], share("a", "b", id=7)]
WORDS = (
    "is of the shape sharegpt (it has 'conversations', 'id'), and the first row of messages; put them"
    " into two files"
)


def test_mixed_files_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    lines = as_lines(tmp_path / "a", MIXED)
    assert problem_of(tokenizer, lines) == f"{lines}:2: {WORDS}"
    for name in ("array", "parquet", "arrow"):
        file = FILES[name](tmp_path / name, MIXED)
        assert problem_of(tokenizer, file) == f"{file}: row 2: {WORDS}"


def test_the_first_row_decides_in_every_unit(tmp_path: Path, tokenizer: Path, monkeypatch: Any) -> None:
    """A unit that begins later in the file knows the shape of its first row."""
    from compose.data import token_set_writing as writing

    monkeypatch.setattr(writing.describe_job, "__defaults__", (60,))
    lines = as_lines(tmp_path / "a", [OPENAI[0], *(MIXED[1:] * 2)])
    assert problem_of(tokenizer, lines) == f"{lines}:2: {WORDS}"
    assert made(tokenizer, lines, "--skip-bad")[2] == [
        made(tokenizer, as_lines(tmp_path / "b", OPENAI))[2][0]
    ]


def test_prompts_without_a_template(tmp_path: Path) -> None:
    """As TRL writes them: prompt, completion, end token, after what the tokenizer adds."""
    from tokenizers import Tokenizer, processors

    path = save_tokenizer(tmp_path)
    loaded = Tokenizer.from_file(str(path))
    begin, end = (loaded.token_to_id(each) for each in ("<s>", "<|end|>"))
    loaded.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", begin)]
    )
    loaded.save(str(path))
    lines = as_lines(tmp_path / "a", [*PROMPTS, {"prompt": "x", "completion": "y<|end|>"}])
    plain = made(path, lines, "--shape=plain")
    ids, learnt, ends = [], [], []
    for asked, reply in [*TEXTS, ("x", "y")]:
        whole = [*loaded.encode(asked + reply).ids, end]
        ids += whole
        learnt += [n >= len(loaded.encode(asked).ids) for n in range(len(whole))]
        ends.append(len(ids))
    assert plain == (ids, learnt, ends)
    assert made(path, as_lines(tmp_path / "b", PROMPTS))[0] != ids  # by the template
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert made(path, as_lines(tmp_path / "c", PROMPTS)) == made(
        path, as_lines(tmp_path / "d", PROMPTS), "--shape=plain"
    )
    messages = as_lines(tmp_path / "e", OPENAI)
    assert problem_of(path, messages) == (
        f"{messages}:1: needs a chat template, and none is beside {path}; put chat_template.jinja there"
    )
    assert problem_of(path, messages, "--shape=plain") == f"{messages}:1: has no text in 'prompt'"


def test_named_fields_and_roles(tmp_path: Path, tokenizer: Path) -> None:
    wanted = made(tokenizer, as_lines(tmp_path / "same", OPENAI))
    other = [{"q": row["prompt"], "a": row["completion"]} for row in PROMPTS]
    assert made(tokenizer, as_array(tmp_path / "a", other), "--fields=prompt=q,completion=a") == wanted
    turns = [
        {
            "dialog": [
                {"who": "x" if t["role"] == "user" else "y", "says": t["content"]}
                for t in row["messages"]
            ]
        }
        for row in OPENAI
    ]
    flags = ["--field=dialog", "--fields", "role=who,content=says", "--roles", "x=user,y=assistant"]
    assert made(tokenizer, as_parquet(tmp_path / "b", turns), *flags) == wanted


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--shape=sharegtp"],
            "--shape: sharegtp is none of messages, sharegpt, alpaca, prompt, chosen, plain",
        ),
        (
            ["--fields=prmpt=a"],
            "--fields: prmpt is none of messages, conversations, instruction, output, prompt,"
            " completion, chosen, rejected, system, tools, input, history, role, content",
        ),
        (["--roles=human"], "--roles: 'human' is not NAME=NAME"),
    ],
)
def test_flags_are_checked(tmp_path: Path, tokenizer: Path, flags: list[str], words: str) -> None:
    lines = as_lines(tmp_path / "a", OPENAI)
    assert problem_of(tokenizer, lines, *flags) == f"command line: {words}"


def test_an_end_that_is_half_a_character(tmp_path: Path, tokenizer: Path) -> None:
    said = problem_of(tokenizer, as_lines(tmp_path / "a", OPENAI), "--end=\udcff")
    assert said == f"command line: --end: \\udcff is no token of {tokenizer}"


def test_files_that_cannot_be_read(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert problem_of(tokenizer, folder) == (
        f"{folder}: is a folder, and no dataset that was saved to one (state.json)"
    )
    (folder / "state.json").write_text("{}")
    assert problem_of(tokenizer, folder) == f"{folder}/state.json: names no files in _data_files"
    state = {
        "_data_files": [{"filename": "../x.arrow"}],
        "_indices_data_files": [{"filename": "i.arrow"}],
    }
    (folder / "state.json").write_text(json.dumps(state))
    assert problem_of(tokenizer, folder) == (
        f"{folder}: has its rows in another order; save it again after flatten_indices()"
    )
    (folder / "state.json").write_text(json.dumps({**state, "_indices_data_files": []}))
    assert (
        problem_of(tokenizer, folder) == f"{folder}/x.arrow: cannot be read: No such file or directory"
    )
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert problem_of(tokenizer, folder) == (
        f"{folder}: holds splits (train, test); name the folder of one, such as {folder}/train"
    )
    text = tmp_path / "a.txt"
    text.write_text("a")
    assert problem_of(tokenizer, text) == (
        f"{text}: is no file of chats: .jsonl, .ndjson, .json, .parquet, .arrow, or the folder of a"
        " saved dataset"
    )
    array = tmp_path / "a.json"
    array.write_text('[{"messages": []}, 5]')
    assert problem_of(tokenizer, array) == f"{array}: row 1: has no list of messages in 'messages'"
    array.write_text("[5, null]")
    assert problem_of(tokenizer, array) == f"{array}: row 1: is not an object"
    array.write_text('[{"a": 1},')
    assert problem_of(tokenizer, array).startswith(f"{array}: is not JSON: ")
    arrow = tmp_path / "b.arrow"
    arrow.write_text("no arrow")
    assert problem_of(tokenizer, arrow).startswith(f"{arrow}: row 1: cannot be read as Arrow: ")
    twice = pyarrow.Table.from_arrays([["a"], ["b"]], names=["messages", "messages"])
    pyarrow.parquet.write_table(twice, tmp_path / "c.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "c.arrow", twice.schema) as writer:
        writer.write_table(twice)
    for file, kind in ((tmp_path / "c.parquet", "Parquet"), (tmp_path / "c.arrow", "Arrow")):
        assert problem_of(tokenizer, file).startswith(f"{file}: row 1: cannot be read as {kind}: ")
    monkeypatch.setitem(sys.modules, "pyarrow.ipc", None)
    assert problem_of(tokenizer, arrow) == (
        f"{arrow}: needs pyarrow: pip install 'dtensor-compose[parquet]'"
    )


def test_tables_are_read_a_batch_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_BATCH", 3)
    content = [{"text": str(n)} for n in range(20)]
    for name in ("parquet", "arrow", "arrow file"):
        path = FILES[name](tmp_path / name.replace(" ", "_"), content)
        unit = FilePart("0", str(path), 0, 1, 1)
        assert list(rows(unit)) == list(enumerate(content))
