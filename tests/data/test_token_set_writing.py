"""Text to token ids: what is written is what the tokenizer says, by any number of workers, after any
interruption."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from compose.__main__ import main
from compose.config.tables import Config, Data
from compose.data import documents as documents_module
from compose.data import token_set_writing as writing
from compose.data.datasets import open_data
from compose.data.samples import open_samples
from compose.data.token_files import MANIFEST, open_token_set
from compose.data.token_set_writing import (
    TokenCounts,
    describe_job,
    make_shard,
    make_token_set,
    units_of,
)
from compose.data.tokenizer import open_tokenizer
from compose.errors import ConfigError
from compose.ops.batch import IGNORE
from tests.support.data_made import sets_of
from tests.support.helpers import refusal
from tests.support.tokenizer_kinds import KINDS, save_kind, text_of
from tests.support.tokenizers_made import SPECIAL, TEXT, save_tokenizer

END = SPECIAL.index("<|end|>")


def problems_of(config: Config) -> list[str]:
    return refusal(open_data, config).splitlines()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def documents(count: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    parts = [*TEXT, "<|end|>", "\n\n", " ", "é", "\u2028", "0"]
    return ["".join(chance.choices(parts, k=chance.randint(1, 30))) for _ in range(count)]


def json_lines(path: Path, texts: list[str], field: str = "text") -> Path:
    rows = [json.dumps({"id": i, field: text}, ensure_ascii=False) for i, text in enumerate(texts)]
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def expected(tokenizer: Path, texts: list[str]) -> list[int]:
    """One document after another, each with the end token; what spells a special token is text."""
    loaded = Tokenizer.from_file(str(tokenizer))
    loaded.encode_special_tokens = True
    return [i for text in texts if text for i in [*loaded.encode(text).ids, END]]


def make(
    tokenizer: Path, out: Path, *files: Path, workers: int = 1, unit: int = 1 << 20
) -> TokenCounts:
    job = describe_job(open_tokenizer(tokenizer), "text", "text", END, files, unit)
    return make_token_set(job, out, workers, lambda done, counts: None)


def row_of(folder: Path) -> list[int]:
    tokens = open_token_set(folder).tokens
    return tokens.read(0, len(tokens)).tolist()


@pytest.mark.parametrize(("unit", "workers"), [(1 << 20, 1), (997, 2), (50, 1)])
def test_units_make_no_difference(tmp_path: Path, tokenizer: Path, unit: int, workers: int) -> None:
    texts = [*documents(60), "", "last"]
    file = json_lines(tmp_path / "a.jsonl", texts)
    counts = make(tokenizer, tmp_path / "out", file, unit=unit, workers=workers)
    assert row_of(tmp_path / "out") == expected(tokenizer, texts)
    made = open_token_set(tmp_path / "out")
    assert counts.documents == len(made.ends) == 61
    assert counts.tokens == len(made.tokens) == made.ends[-1]
    # The index says where documents end.
    assert [made.tokens.read(int(end) - 1, int(end))[0] for end in made.ends] == [END] * 61


def test_text_files_are_documents_that_may_span_units(tmp_path: Path, tokenizer: Path) -> None:
    one = tmp_path / "one.txt"
    one.write_text("".join(f"{i}: {text}\n" for i, text in enumerate(documents(40))))
    (tmp_path / "two.md").write_text("no newline at the end")
    (tmp_path / "none.txt").touch()
    files = [one, tmp_path / "none.txt", tmp_path / "two.md"]
    make(tokenizer, tmp_path / "out", *files, unit=300)
    made, loaded = open_token_set(tmp_path / "out"), Tokenizer.from_file(str(tokenizer))
    first, second = (
        made.tokens.read(start, stop - 1).tolist()
        for start, stop in zip([0, made.ends[0]], made.ends, strict=True)
    )
    assert loaded.decode(first, skip_special_tokens=False) == one.read_text()
    assert loaded.decode(second) == "no newline at the end"
    assert len(units_of(describe_job(open_tokenizer(tokenizer), "text", "text", END, files, 300))) > 5


def test_parquet(tmp_path: Path, tokenizer: Path) -> None:
    texts = documents(30)
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"n": list(range(31)), "text": [*texts, None]}), path, row_group_size=7
    )
    make(tokenizer, tmp_path / "out", path)
    assert row_of(tmp_path / "out") == expected(tokenizer, texts)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "JSONL", "Parquet"])
def test_a_link_s_own_name_says_what_it_holds(tmp_path: Path, tokenizer: Path, kind: str) -> None:
    """In Hugging Face's cache a file is a link to one whose name is a hash."""
    texts, link, blob = documents(5), tmp_path / f"a.{kind}", tmp_path / "0a1b"
    if kind.lower() == "jsonl":
        json_lines(blob, texts)
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), blob)
    link.symlink_to(blob)
    make(tokenizer, tmp_path / "out", link)
    assert row_of(tmp_path / "out") == expected(tokenizer, texts)
    other = tmp_path / f"b.{kind}"
    other.symlink_to(link)
    assert refusal(make, tokenizer, tmp_path / "no", link, other) == f"{blob}: is named twice"


def test_files_that_could_not_be_a_source(tmp_path: Path, tokenizer: Path) -> None:
    """A table of no bytes is no table, and a manifest holds names in UTF-8."""
    odd, empty = tmp_path / "odd \udcff.jsonl", tmp_path / "b.parquet"
    json_lines(odd, ["a"])
    empty.touch()
    assert refusal(make, tokenizer, tmp_path / "out", odd, empty).splitlines() == [
        f"{tmp_path}/odd \\udcff.jsonl: has a name that is not UTF-8, which no set can keep; rename it",
        f"{empty}: is empty, and no table",
    ]


@pytest.mark.parametrize("moment", ["before a shard", "between shards", "before the manifest"])
def test_goes_on_where_it_was(
    tmp_path: Path, tokenizer: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at any moment, the same command ends with the same folder, and does no shard twice."""
    texts = documents(60)
    file = json_lines(tmp_path / "a.jsonl", texts)
    job = describe_job(open_tokenizer(tokenizer), "text", "text", END, [file], 500)
    out = tmp_path / "out"
    writing._claim(job, out)
    units = units_of(job)
    assert len(units) > 6
    done = {"before a shard": units[:2], "between shards": units[3:], "before the manifest": units}
    for unit in done[moment]:
        make_shard(job, out, unit)
    if moment == "before a shard":  # one was being written
        (out / f".tokens-{units[2].name}.bin").write_bytes(b"half")
        (out / f"ends-{units[2].name}.bin").write_bytes(b"whole, but not its tokens")
    with pytest.raises(
        ConfigError, match=r"is not whole yet; run the same `python -m compose tokenize`"
    ):
        open_samples(str(out), Data(), 8, 300)
    kept = {path: path.stat().st_mtime_ns for path in out.glob("tokens-*.bin")}
    make_token_set(job, out, 1, lambda done, counts: None)
    assert row_of(out) == expected(tokenizer, texts)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert len(kept) == len(done[moment])


def test_windows_of_a_token_set(tmp_path: Path, tokenizer: Path) -> None:
    texts = documents(40)
    make(tokenizer, tmp_path / "out", json_lines(tmp_path / "a.jsonl", texts), unit=300)
    samples, row = open_samples(str(tmp_path / "out"), Data(), 16, 300), expected(tokenizer, texts)
    assert len(samples) == (len(row) - 1) // 16
    for index in range(len(samples)):
        batch = samples.read(index)
        window = torch.tensor(row[16 * index : 16 * index + 17])
        assert torch.equal(batch["tokens"], window[:-1])
        assert torch.equal(batch["targets"], window[1:].masked_fill(window[:-1] == END, IGNORE))


def test_a_vocabulary_that_the_model_lacks_is_named(tmp_path: Path, tokenizer: Path) -> None:
    out = tmp_path / "out"
    make(tokenizer, out, json_lines(tmp_path / "a.jsonl", documents(20)), unit=500)
    size = open_tokenizer(tokenizer).vocab_size
    assert problems_of(sets_of(path=str(out))) == [
        f"data.path: {out} has ids up to {size - 1}; set model.vocab_size to at least {size}"
        " (it is 257)"
    ]


def test_a_special_token_that_no_document_holds_needs_no_row(tmp_path: Path) -> None:
    """Gemma 3's 1B has a token for images, and no row for it."""
    file = save_tokenizer(tmp_path / "tokenizer")
    size, beside = open_tokenizer(file).vocab_size, file.parent / "tokenizer_config.json"
    config = json.loads(beside.read_text()) | {"additional_special_tokens": ["<image>"]}
    beside.write_text(json.dumps(config))
    texts, chats = tmp_path / "texts", tmp_path / "chats"
    make(file, texts, json_lines(tmp_path / "a.jsonl", documents(20)))
    assert open_tokenizer(file).vocab_size == size + 1
    assert len(open_samples(str(texts), Data(), 16, size))
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps({"prompt": "a", "completion": "<image>"}))
    job = describe_job(open_tokenizer(file), "chat", "messages", END, [source])
    make_token_set(job, chats, 1, lambda done, counts: None)
    assert refusal(open_samples, str(chats), Data(), 16, size) == (
        f"{chats} has ids up to {size}; set model.vocab_size to at least {size + 1} (it is {size})"
    )


def test_tokenizers_must_agree(tmp_path: Path) -> None:
    file = json_lines(tmp_path / "a.jsonl", documents(5))
    first, second = (save_tokenizer(tmp_path / f"t{n}", vocab_size=n) for n in (262, 263))
    make(first, tmp_path / "one", file)
    make(second, tmp_path / "two", file)
    (tmp_path / "text.txt").write_text("a text of bytes")
    config = sets_of(
        path=(str(tmp_path / "one"), str(tmp_path / "two")), validation=str(tmp_path / "text.txt")
    )
    object.__setattr__(config.model.config, "vocab_size", 300)
    hashes = [open_tokenizer(path).sha256[:12] for path in (first, second)]
    assert problems_of(config) == [
        f"data: {tmp_path}/two is of another tokenizer (sha256 {hashes[1]}) than {tmp_path}/one"
        f" (sha256 {hashes[0]}); tokenize both with the same tokenizer.json",
        f"data: {tmp_path}/text.txt is of another tokenizer (bytes) than {tmp_path}/one"
        f" (sha256 {hashes[0]}); tokenize both with the same tokenizer.json",
    ]


def test_command(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = documents(9)
    file, out = json_lines(tmp_path / "a.jsonl", texts, "body"), tmp_path / "out"
    words = ["tokenize", "--tokenizer", str(tokenizer.parent), "--out", str(out), "--workers=1"]
    assert main([*words, "--field=body", str(file)]) == 0
    count = len(expected(tokenizer, texts))
    output = capsys.readouterr()
    assert output.out == f"{out}: {count:,} tokens, 9 documents\n"
    assert output.err.startswith("100%  ")
    before = (out / "tokens-00000.bin").stat().st_mtime_ns
    assert main([*words, "--field=body", str(file)]) == 0
    assert (out / "tokens-00000.bin").stat().st_mtime_ns == before
    assert (out / "tokenizer_config.json").exists()
    template = tokenizer.parent / "chat_template.jinja"
    template.write_text("{{ messages }}")
    assert refusal(main, [*words, "--field=body", str(file)]).startswith(f"{out}: holds another job (")
    template.unlink()

    def refused(*more: str) -> str:
        return refusal(main, list(more))

    assert refused(*words, str(file)) == (
        f"{out}: holds another job (files, tokenizer or options differ); choose another --out, or"
        " delete it"
    )
    assert (
        refused("tokenize", "--out=x", "f") == "command line: tokenize: needs --tokenizer; see --help"
    )
    assert refused(*words) == "command line: tokenize: needs FILES; see --help"
    assert refused(*words, "--wokers=2", "f") == (
        "command line: --wokers: unknown option; did you mean --workers?"
    )
    assert refused(*words, "--workers=0", str(file)) == (
        "command line: --workers: 0 is not a number of processes"
    )
    assert refused(*words, "--end=no", str(file)).startswith("command line: --end: no is no token of ")
    other = [*words[:3], "--out", str(tmp_path / "other"), "--workers=1"]
    assert refused(*other, "none.txt", "b.gz", str(file)) == (
        "none.txt: cannot be read: No such file or directory\nb.gz: is compressed; unpack it first"
    )
    assert refused(*words[:3], "--out", str(file), str(file)) == (
        f"{file}: cannot be used: Not a directory"
    )
    assert refused(*other, str(file)) == (
        f"{file}:1: has no text in 'text' (it has 'id', 'body'); see --field"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "a \\ud800 b"}', "holds half a character, \\ud800"),
        (b'{"text": "a", "\\uDFFF": 1}', "holds half a character, \\udfff"),
        (b'{"a": ' * 60_000, "is nested too deeply"),
        (b'{"text": ["a"]}', "has no text in 'text' (it holds a list); see --field"),
        (b"1" * 5000, "is not JSON: Exceeds the limit"),
        (b'{"text": "b}', "is not JSON: "),
        (
            b'{\n  "text": "b"\n}',
            "is not JSON: Expecting property name enclosed in double quotes: line 2 column 1 (char 2);"
            " a row stands on one line, or the file is one list",
        ),
        (b'["b"]', "is not an object"),
        (b"\xff", "is not UTF-8: invalid start byte"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(
    tmp_path: Path, tokenizer: Path, line: bytes, words: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "\\ud83d\\ude00 a pair"}\n\n' + line)
    (problem,) = refusal(make, tokenizer, tmp_path / "out", file).splitlines()
    assert problem.startswith(f"{file}:3: {words}")


def test_no_more_workers_than_cores_that_this_process_may_use(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job on a shared machine often has few of its cores."""
    asked = list[int]()
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5}, raising=False)

    def make_none(job: object, target: Path, workers: int, progress: object) -> TokenCounts:
        asked.append(workers)
        return TokenCounts()

    monkeypatch.setattr(writing, "make_token_set", make_none)
    file = json_lines(tmp_path / "a.jsonl", ["a"])
    out = str(tmp_path / "out")
    assert main(["tokenize", "--tokenizer", str(tokenizer), "--out", out, str(file)]) == 0
    assert asked == [2]


def test_rows_that_are_left_out(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --skip-bad, those of JSON lines and of Parquet; without it null is an empty text."""
    lines, table = tmp_path / "a.jsonl", tmp_path / "b.parquet"
    lines.write_bytes(
        b'\xef\xbb\xbf{"text": "a"}\n{"text": 5}\n\xff\n{"text": null}\n{"text": "b"}\n{"a": 1}'
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": [["c"], ["d"]]}), table)
    words = ["tokenize", "--workers=1", "--tokenizer", str(tokenizer), "--out", str(tmp_path / "out")]
    assert main([*words, "--skip-bad", str(lines), str(table)]) == 0
    assert row_of(tmp_path / "out") == expected(tokenizer, ["a", "b"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith(" 2 documents")
    assert printed[-6:] == [
        f"  bad{5:>25}  left out (--skip-bad), for example:",
        f"    {lines}:2: has no text in 'text' (it holds a number); see --field",
        f"    {lines}:3: is not UTF-8: invalid start byte",
        f"    {lines}:6: has no text in 'text' (it has 'a'); see --field",
        f"    {table}: row 1: has no text in 'text' (it holds a list); see --field",
        f"    {table}: row 2: has no text in 'text' (it holds a list); see --field",
    ]
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert [manifest[name] for name in ("rows", "empty", "bad", "documents")] == [3, 1, 5, 2]


def test_text_of_parquet_that_is_not_utf_8_is_named(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "a.parquet"
    bad = pyarrow.array([b"a", b"\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": bad}), path)
    (problem,) = refusal(make, tokenizer, tmp_path / "out", path).splitlines()
    assert problem.startswith(f"{path}: row 1: cannot be read as Parquet: ")


def test_nothing_is_written_through_a_link(tmp_path: Path, tokenizer: Path) -> None:
    """Whatever stands in the folder of a job that was begun: it is replaced, or done again."""
    texts = documents(8)
    file, out, mine = json_lines(tmp_path / "a.jsonl", texts), tmp_path / "out", tmp_path / "mine"
    make(tokenizer, out, file)
    size = (out / "tokens-00000.bin").stat().st_size
    mine.write_bytes(b"m" * size)
    names = [path.name for path in out.iterdir() if path.name != writing.JOB]
    for name in [*names, *(f".{name}" for name in names), *(f".{name}.new" for name in names)]:
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(mine)
    make(tokenizer, out, file)
    assert mine.read_bytes() == b"m" * size
    assert row_of(out) == expected(tokenizer, texts)
    assert not [name for name in names if (out / name).is_symlink()]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON: Expecting property name"),
        (b"[]", "is a list, not an object"),
        (b'{"tokenizer": 5}', "tokenizer: expected a string, got 5"),
        (None, "is a link that leads out of its folder"),
    ],
)
def test_a_job_that_cannot_be_read_is_named(
    tmp_path: Path, tokenizer: Path, content: bytes | None, words: str
) -> None:
    out = tmp_path / "out"
    file = json_lines(tmp_path / "a.jsonl", ["a"])
    out.mkdir()
    if content is None:
        (out / writing.JOB).symlink_to(tmp_path / "none")
    else:
        (out / writing.JOB).write_bytes(content)
    (problem,) = refusal(make, tokenizer, out, file).splitlines()
    assert problem.startswith(f"{out}/{writing.JOB}: {words}")


def test_a_shard_that_is_not_whole_is_done_again(tmp_path: Path, tokenizer: Path) -> None:
    texts = documents(8)
    file, out = json_lines(tmp_path / "a.jsonl", texts), tmp_path / "out"
    make(tokenizer, out, file)
    for damage in ("[]", '{"tokens": -1}', '{"tokens": 7, "documents": 8, "empty": 0}'):
        (out / ".00000.json").write_text(damage)
        make(tokenizer, out, file)
        assert row_of(out) == expected(tokenizer, texts)


def test_ids_are_as_wide_as_the_vocabulary_needs(tmp_path: Path, tokenizer: Path) -> None:
    make(tokenizer, tmp_path / "out", json_lines(tmp_path / "a.jsonl", ["some", "text"]))
    assert json.loads((tmp_path / "out" / MANIFEST).read_text())["dtype"] == "<u2"
    loaded = open_tokenizer(tokenizer)
    loaded.vocab_size = (1 << 16) + 1
    assert np.dtype(writing._dtype(loaded)).itemsize == 4


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_what_transformers_makes_of_them(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each kind of tokenizer: rows, and a file that is read in small parts, of several units."""
    folder, out = save_kind(tmp_path / "tokenizer", kind), tmp_path / "out"
    rows = [text_of(20, seed) for seed in range(5)] + [" x", "x ", "\n"]
    text = text_of(600, 9)
    (tmp_path / "b.txt").write_text(text, newline="")
    files = [json_lines(tmp_path / "a.jsonl", rows), tmp_path / "b.txt"]
    monkeypatch.setattr(documents_module, "_BLOCK", 60)
    monkeypatch.setattr(documents_module, "_AROUND", 256)
    tokenizer, reference = open_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.special.get("eos_token") == reference.eos_token
    job = describe_job(tokenizer, "text", "text", tokenizer.end, files, 700)
    make_token_set(job, out, 1, lambda done, counts: None)
    made, result = open_token_set(out), []
    for start, stop in zip([0, *made.ends[:-1]], made.ends, strict=True):
        result.append(made.tokens.read(int(start), int(stop)).tolist())
    for ids, each in zip(result, [*rows, text], strict=True):
        expected = reference(each, split_special_tokens=True)["input_ids"]
        assert ids == expected + ([] if expected[-1:] == [tokenizer.end] else [tokenizer.end])
    assert len(units_of(job)) > 6
    assert json.loads((out / MANIFEST).read_text())["added"] is True


def test_a_flag_turns_added_tokens_off(tmp_path: Path) -> None:
    folder, file = save_kind(tmp_path / "t", "llama3"), json_lines(tmp_path / "a.jsonl", ["x", "x y"])
    words = ["tokenize", "--tokenizer", str(folder), "--workers=1", str(file)]
    assert main([*words, "--out", str(tmp_path / "with")]) == 0
    assert main([*words, "--out", str(tmp_path / "without"), "--no-special-tokens"]) == 0
    start, row = [0], row_of(tmp_path / "without")
    place = row.index(open_tokenizer(folder).end) + 1
    assert row_of(tmp_path / "with") == [*start, *row[:place], *start, *row[place:]]
    manifests = [json.loads((tmp_path / out / MANIFEST).read_text()) for out in ("with", "without")]
    assert [manifest["added"] for manifest in manifests] == [True, False]
    assert refusal(main, [*words, "--out", "x", "--chat", "--no-special-tokens"]) == (
        "command line: --no-special-tokens: is for text; a chat has the tokens that its template writes"
    )
