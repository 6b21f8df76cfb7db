"""Bad input, each with its exact message; and what good input means."""

import re
import typing
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from compose.config import rules
from compose.config.tables import TABLES, Config
from compose.config.toml import dump, load, override, tomllib
from compose.errors import ConfigError, attribute, docs, toml_value, type_name
from tests.support.helpers import ROOT, refusal

Write = Callable[[str], str]


def problems_of(config: Config, world_size: int) -> list[str]:
    return refusal(rules.check, config, world_size).splitlines()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write train.toml into an empty folder, and go there."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str) -> str:
        Path("train.toml").write_text(text)
        return "train.toml"

    return write_file


def problems(*arguments: object) -> list[str]:
    return refusal(load, *arguments).splitlines()


MESSAGES = {
    "[parallel]\ntpp = 2": "parallel.tpp: unknown key; did you mean parallel.tp?",
    "[train]\nlr = 1.0": "train.lr: unknown key; did you mean optimizer.lr?",
    "[train]\nkwyjibo = 1": "train.kwyjibo: unknown key",
    "[paralel]\ntp = 2": "paralel: unknown table; did you mean parallel?",
    "seq_len = 2": "seq_len: unknown key; did you mean train.seq_len?",
    '[train]\nsteps = "many"': 'train.steps: expected int, got "many"',
    "[train]\nsteps = 2.5": "train.steps: expected int, got 2.5",
    "[train]\nsteps = true": "train.steps: expected int, got true",
    "[train]\nsteps = 0": "train.steps: 0 should be greater than or equal to 1",
    "[optimizer]\nlr = false": "optimizer.lr: expected float, got false",
    "[parallel]\nzero = 4": "parallel.zero: expected 0 | 1 | 2 | 3, got 4",
    "[parallel]\nsequence = 1": "parallel.sequence: expected bool, got 1; did you mean true?",
    '[parallel]\nsequence = "off"': 'parallel.sequence: expected bool, got "off"; did you mean false?',
    "[train]\nsteps = 1e3": "train.steps: expected int, got 1000.0; did you mean 1000?",
    '[data]\nweights = "1, 2"': 'data.weights: expected list of float, got "1, 2"; did you mean'
    " [1.0, 2.0]?",
    "[profile]\nranks = [0.0]": "profile.ranks: expected list of int, got [0.0]; did you mean [0]?",
    "[comm]\ntimeout = 2147483648": "comm.timeout: 2147483648 should be less than 2147483648",
    "[model.lora]\nranks = 4": "model.lora.ranks: unknown key; did you mean model.lora.rank?",
    "[train]\nbatch_size = 4": "train.batch_size: unknown key",
    "[model]\nlora = 4": "model.lora: unknown key; it is a table: --model.lora.key=value, or"
    " [model.lora] in a file",
    "[lora]\nrank = 4": "lora: unknown table; did you mean model.lora?",
    '[run]\nextends = "a"': "run.extends: unknown key; it belongs before the first table of a file",
    '[model.lora]\ntargets = "all_linear"': 'model.lora.targets: expected "all-linear" or list of str,'
    ' got "all_linear"; did you mean all-linear?',
    "[data]\nseparator = -2": "data.separator: -2 should be greater than or equal to -1",
    "[run]\ndir = 2024": "run.dir: expected str, got 2024",
    '[optimizer]\nschedule = "cosin"': 'optimizer.schedule: expected "cosine" | "linear" |'
    ' "constant", got "cosin"',
    '[model]\nname = "lama"': "model.name: unknown model 'lama'; did you mean llama? (known:"
    " deepseek_v3, dit, gemma3, gpt2, gpt_oss, llama, mixtral, qwen3)",
    '[model]\npreset = "9b"': "model.preset: unknown preset '9b' of llama (known: debug, 1b, 3b, 8b,"
    " 70b, 405b)",
    "[model]\nn_head = 4": "model.n_head: unknown key; did you mean model.n_heads?",
    '[model]\ndim = "wide"': 'model.dim: expected int, got "wide"',
    "[model]\ndim = 100": "model.dim: 100 is not a multiple of 2 * n_heads = 16",
    "[model]\nn_kv_heads = 3": "model.n_kv_heads: 3 does not divide n_heads 8",
    "[model]\nn_layers = 0": "model.n_layers: 0 should be at least 1, below 2^12",
    "[model]\nrope_scaling = 0": "model.rope_scaling: 0.0 should be above 0",
    "[model]\npreset = [1]": "model.preset: expected str, got [1]",
    "[model]\nname = 5": "model.name: expected str, got 5",
    "[optimizer]\nlr = inf": "optimizer.lr: inf should be a finite number",
    "[optimizer]\nbeta1 = 1.0": "optimizer.beta1: 1.0 should be less than 1",
    f"[train]\nseed = {2**63}": f"train.seed: {2**63} should be less than {2**63}",
    "[oops]": "oops: unknown table",
    "extends = 3": 'extends: expected a file name in quotes, as "base.toml"',
    'extends = "train.toml"': "extends itself",
    'extends = ""': 'extends: expected a file name in quotes, as "base.toml"',
    "train = 5": "train: unknown key; it is a table: --train.key=value, or [train] in a file",
    "[[train]]": "train: unknown key; it is a table: --train.key=value, or [train] in a file",
    "steps = 5": "steps: unknown key; did you mean train.steps?",
    "[optimizer]\neps = 1e-400": "optimizer.eps: 1e-400 is too near 0 for a float, which would be 0",
    "[data]\nweights = [1.0, 1e-999]": "data.weights: 1e-999 is too near 0 for a float, which would"
    " be 0",
    "[optimizer]\neps = 0.0": "optimizer.eps: 0.0 should be greater than 0",
    "[optimizer]\neps = 1e-50": "optimizer.eps: 1e-50 is 0 in float32, which has nothing below 1.2e-38",
    "[model]\nnorm_eps = 1e-50": "model.norm_eps: 1e-50 is 0 in float32, which has nothing below"
    " 1.2e-38",
    "[train]\nsteps = 2020-01-01": "train.steps: expected int, got 2020-01-01",
    "[train]\nsteps = {a = 1}": "train.steps: expected int, got {a = 1}",
    '[train]\n"xyzzy\\u001b[2J" = 3': "train.xyzzy\\x1b[2J: unknown key",
    "[train]\nsteps = 3\u2028": "line 2: TOML syntax: Expected newline or end of document after a"
    " statement: steps = 3",
}


@pytest.mark.parametrize(("text", "message"), MESSAGES.items())
def test_message(write: Write, text: str, message: str) -> None:
    assert problems(write(text)) == [f"train.toml: {message}"]


def test_model_folder_that_lacks_parts(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    import compose.config.models

    monkeypatch.setattr(compose.config.models, "model_names", lambda: ["mine"])
    half = types.SimpleNamespace(Config=Config, Model=dict, plan=None)
    monkeypatch.setitem(sys.modules, "compose.models.mine", half)
    assert problems(write('[model]\nname = "mine"')) == [
        "train.toml: models/mine/__init__.py: exports no PRESETS",
        "train.toml: models/mine: Model has no init_parameter(name, tensor, generator)",
    ]


def test_unreadable_files(write: Write) -> None:
    assert problems(write('extends = "a\\u0000b"')) == [
        'train.toml: extends: "a\\u0000b" cannot be a path: it has a null character'
    ]
    assert problems("a\0b") == ["a\\x00b: cannot read it: embedded null byte"]
    Path("latin.toml").write_bytes(b"# \xff")
    assert problems("latin.toml") == ["latin.toml: is not UTF-8 (byte 2); save it as UTF-8"]
    assert problems(write("a = " + "[" * 5000))[0].startswith("train.toml: ")


def test_a_number_of_any_length_is_one_short_line(write: Write) -> None:
    for number in ("0x" + "f" * 5000, "9" * 5000, "1" * 400):
        for key in ("[train]\nsteps", "[run]\ndir", "[profile]\nranks"):
            (line,) = problems(write(f"{key} = {number}"))
            assert line.startswith("train.toml: ")
            assert len(line) < 600, key


def test_loops_and_chains_of_files(write: Write) -> None:
    Path("one.toml").symlink_to("two.toml")
    Path("two.toml").symlink_to("one.toml")
    for result in (problems("one.toml"), problems(write('extends = "one.toml"'))):
        assert result == ["one.toml: cannot read it: Too many levels of symbolic links"]
    Path("self.toml").symlink_to("train.toml")
    assert problems(write('extends = "self.toml"')) == ["self.toml: extends itself"]
    for i in range(1100):
        Path(f"{i}.toml").write_text(f'extends = "{i + 1}.toml"')
    assert problems("0.toml") == [
        "101.toml: is the last of more than 100 files that extend one another"
    ]


def test_a_byte_order_mark_says_nothing(write: Write) -> None:
    assert load(write("\ufeff[train]\nsteps = 3")).train.steps == 3
    assert problems(write("\ufeff[train]\nsteps = = 3")) == [
        "train.toml: line 2: TOML syntax: Invalid value: steps = = 3"
    ]


def test_what_a_terminal_would_obey_is_escaped() -> None:
    """In one place, for whoever raises it."""
    error = ConfigError("a\x1b[2J\x07\rb\nc", "d\u202e\ud800\x7f", "é 漢")
    assert error.problems == ["a\\x1b[2J\\x07\\rb\\nc", "d\\u202e\\ud800\\x7f", "é 漢"]
    assert str(error) == "\n".join(error.problems)


def test_a_value_of_several_lines_is_none(write: Write) -> None:
    """Its other lines must not be ignored."""
    assert problems(write(""), [("train.steps", "1\ntrain.seed=2")]) == [
        'command line: train.steps: expected int, got "1\\u000atrain.seed=2"'
    ]


def test_model_error_names_where_the_field_was_set(write: Write) -> None:
    file = write("[model]\ndim = 100")
    assert problems(file, [("train.steps", "4")])[0].startswith("train.toml: model.dim: ")
    assert problems(file, [("model.n_heads", "7")])[0].startswith("train.toml: model.dim: ")
    assert problems(write(""), [("model.n_heads", "7")])[0].startswith("command line: model.dim: ")


def test_syntax_error_shows_the_line(write: Write) -> None:
    assert problems(write("[train]\nsteps = 3\nseed = = 4\n")) == [
        "train.toml: line 3: TOML syntax: Invalid value: seed = = 4"
    ]


def test_missing_file(write: Write) -> None:
    assert problems("nowhere.toml") == ["nowhere.toml: no such file"]
    assert problems(write('extends = "base.toml"')) == ["train.toml: extends: base.toml: no such file"]
    Path("folder").mkdir()
    assert problems("folder") == ["folder: cannot read it: Is a directory"]
    Path("folder/train.toml").touch()
    assert problems("folder") == [
        "folder: cannot read it: Is a directory; did you mean folder/train.toml?"
    ]
    Path("train.toml").unlink()
    assert problems("train.toml") == [
        "train.toml: no such file; name another, or make a folder with one: compose init DIR"
    ]


def test_all_problems_together(write: Write) -> None:
    file = write("[train]\nsteps = 'x'\nsed = 1\n[model]\npreset = 'big'\n[oops]\na = 1\nb = 2\n")
    assert problems(file, [("parallel.tpp", "2")]) == [
        'train.toml: train.steps: expected int, got "x"',
        "train.toml: train.sed: unknown key; did you mean train.seed?",
        "command line: parallel.tpp: unknown key; did you mean parallel.tp?",
        "train.toml: model.preset: unknown preset 'big' of llama (known: debug, 1b, 3b, 8b, 70b, 405b)",
        "train.toml: oops: unknown table",
    ]


def test_overrides_are_toml_or_bare_words(write: Write) -> None:
    overrides = [
        ("train.steps", "7"),
        ("optimizer.lr", "1e-4"),
        ("run.dir", "runs/a b"),
        ("data.path", "7"),
        ("data.validation", '"8"'),
        ("checkpoint.load_hf", "2026-11-29"),
        ("parallel.sequence", "false"),
        ("model.tie_embeddings", "true"),
        ("optimizer.weight_decay", "0"),
    ]
    config = load(write("[train]\nsteps = 3\nseed = 4"), overrides)
    assert (config.train.steps, config.train.seed, config.optimizer.lr) == (7, 4, 1e-4)
    assert (config.run.dir, config.data.path, config.data.validation) == ("runs/a b", "7", "8")
    assert config.checkpoint.load_hf == "2026-11-29"
    assert problems("train.toml", [("model.lora.targets", "[a,b]")]) == [
        'command line: model.lora.targets: expected "all-linear" or list of str, got "[a,b]"; in a'
        """ shell: '["a", "b"]'"""
    ]
    assert config.parallel.sequence is False
    assert config.model.config.tie_embeddings is True


def test_extends_is_relative_and_overridden(write: Write) -> None:
    Path("base").mkdir()
    Path("base/root.toml").write_text("[train]\nsteps = 1\nseed = 1\nseq_len = 64\n")
    Path("base/mid.toml").write_text('extends = "root.toml"\n[train]\nseed = 2\nsteps = 2\n')
    train = load(write('extends = "base/mid.toml"\n[train]\nsteps = 3\n')).train
    assert (train.steps, train.seed, train.seq_len) == (3, 2, 64)
    Path("base/root.toml").write_text("[train]\nstep = 1\n")
    assert problems("train.toml") == [
        "base/root.toml: train.step: unknown key; did you mean train.steps?"
    ]


def test_a_file_that_stands_alone_has_no_copies_in_memory(write: Write) -> None:
    """They need run.dir, which is not taken over either."""
    file = write('[run]\ndir = "run"\n[checkpoint]\nmemory = 5\ninterval = 7')
    assert load(file).checkpoint.memory == 5
    config = load(file, alone=True)
    assert (config.checkpoint.memory, config.checkpoint.interval) == (0, 7)
    assert problems_of(config, 1) == []


def test_epochs_take_the_place_of_steps(write: Write) -> None:
    """What is nearer counts: a file before the one that it extends, and the command line before all."""

    def said(text: str, *given: tuple[str, str]) -> tuple[int, float]:
        train = load(write(text), given).train
        return train.steps, train.epochs

    Path("base.toml").write_text("[train]\nsteps = 40\nepochs = 0\n")
    base = 'extends = "base.toml"\n'
    assert said(base) == (40, 0.0)
    assert said(f"{base}[train]\nepochs = 0.5") == (250, 0.5)
    assert said(f"{base}[train]\nepochs = 2", ("train.steps", "7")) == (7, 0.0)
    assert said(base, ("train.epochs", "3")) == (250, 3.0)
    assert said(base, ("train.epochs", "0")) == (40, 0.0)
    again = write(dump(load(write("[train]\nepochs = 3"))))
    assert load(again).train.epochs == 3.0
    assert override(load(again), [("train.seed", "1")]).train.epochs == 3.0
    for value, problem in (
        ("2", "2 and train.steps = 40 both say how long the run is; remove one of them"),
        ("-1", "-1 should be greater than or equal to 0"),
        ("1e300", "1e+300 should be less than or equal to 1000000"),
        ('"all"', 'expected float, got "all"'),
    ):
        file = write(f"[train]\nsteps = 40\nepochs = {value}")
        assert problems(file) == [f"train.toml: train.epochs: {problem}"]


def test_default_file_states_every_default() -> None:
    """train.toml and the dataclasses say the same, key for key: defaults, and what --help prints."""
    from compose.config.toml import tomllib

    text = (ROOT / "train.toml").read_text()
    content = tomllib.loads(text)
    content["model.lora"] = content["model"].pop("lora")
    assert content.keys() == TABLES.keys()
    for table, kind in TABLES.items():
        assert list(content[table]) == list(docs(kind)), table
        for key, value in content[table].items():
            assert toml_value(value) == toml_value(getattr(kind(), attribute(key))), f"{table}.{key}"
    comments = comments_of(text)
    for table, kind in TABLES.items():
        types = typing.get_type_hints(kind, include_extras=True)
        for key, doc in docs(kind).items():
            choices = type_name(types[attribute(key)])
            expected = f"{doc} ({choices})" if " | " in choices else doc
            assert comments[f"{table}.{key}"] == expected


def comments_of(text: str) -> dict[str, str]:
    """The comment of each key of a TOML file, whose lines are joined."""
    table, name, result = "", "", dict[str, str]()
    for line in text.splitlines():
        if head := re.match(r"\[(.+?)\]", line):
            table, name = head[1], ""
        elif key := re.match(r"(\w+) = [^#]*# (.*)", line):
            name = f"{table}.{key[1]}"
            result[name] = key[2]
        elif name and (more := re.match(r" +# (.*)", line)):
            result[name] += f" {more[1]}"
    return result


# Fields that no file can set.
NO_KEYS = {"model": {"config", "lora"}, "compile": {"backend"}}


def test_every_field_has_a_doc() -> None:
    for table, kind in TABLES.items():
        undocumented = {f.name.rstrip("_") for f in fields(kind)} - docs(kind).keys()
        assert undocumented <= NO_KEYS.get(table, set())


def test_dump_is_read_back_as_the_same(write: Write) -> None:
    config = load(
        write(
            '[run]\ndir = "a \\"b\\" \\\\ \\u00e9"\n[model]\npreset = "8b"\nn_layers = 3\n'
            "[optimizer]\nlr = 3e-5\n"
        )
    )
    again = load(write(dump(config)))
    assert again == config
    assert isinstance(again, Config)
    assert again.model.config.n_layers == 3


@pytest.mark.parametrize("text", ["\U0001fae9", "\U000e0001 \x7f", '"\\'])
def test_a_text_is_read_back_as_the_same(text: str) -> None:
    assert tomllib.loads(f"a = {toml_value(text)}") == {"a": text}


def test_a_value_that_no_file_can_hold(write: Write) -> None:
    """The config.toml of its run could not be read again."""
    assert problems(write(""), [("run.dir", "a\udcff"), ("train.steps", "0")]) == [
        'command line: run.dir: "a\\udcff" is not UTF-8, which config.toml has to be; give another',
        "command line: train.steps: 0 should be greater than or equal to 1",
    ]


# Ranks and keys, and what is said of them.
TOGETHER = {
    "8 parallel.tp=3": "parallel: the degrees' product tp 3 does not divide the world size 8;"
    " nearest: parallel.tp = 2",
    "8 parallel.dp_shard=2 parallel.tp=2": "parallel: the degrees' product dp_shard 2 x tp 2 = 4 is not"
    " the world size 8; nearest: parallel.dp_shard = 4",
    "1 parallel.dp_shard=2": "parallel: the degrees' product dp_shard 2 is not the world size 1;"
    " nearest: parallel.dp_shard = 1",
    "8 parallel.dp_shard=1": "parallel: the degrees' product 1 is not the world size 8; nearest:"
    " parallel.dp_shard = 8",
    "8 parallel.tp=0": "parallel.tp: 0 is not a degree (1 or more, or -1 for what is left)",
    "8 parallel.tp=-1": "parallel.dp_shard and parallel.tp: only one degree may be -1",
    "16 parallel.cp=16 parallel.cp_method=ulysses": "parallel.cp_method: ulysses cannot divide 8 query"
    " heads with 2 key/value heads over cp 16 x tp 1; ring and allgather can",
    "2 parallel.pp=2 parallel.pp_layers=[2,2]": "parallel.pp_layers: [2, 2] adds up to 4 layers; the"
    " model has 5; nearest: [3, 2]",
    "4 train.global_batch=30": "train.global_batch: 30 is not a multiple of dp_replicate x dp_shard x"
    " train.micro_batch = 4 x 2 = 8; nearest: 32",
    "4 train.global_batch=12": "train.global_batch: 12 is not a multiple of dp_replicate x dp_shard x"
    " train.micro_batch = 4 x 2 = 8; nearest: 16, or train.micro_batch = 1",
    f"1 train.global_batch=3 train.micro_batch={9 * 10**18}": "train.global_batch: 3 is not a multiple"
    f" of dp_replicate x dp_shard x train.micro_batch = 1 x {9 * 10**18} = {9 * 10**18}; nearest:"
    f" {9 * 10**18}, or train.micro_batch = 3",
    "2 parallel.tp=2 train.seq_len=255": "train.seq_len: 255 is not a multiple of parallel.tp 2, which"
    " parallel.sequence needs; nearest: 256, or parallel.sequence = false",
    "3 parallel.tp=3 parallel.sequence=false": "parallel.tp: 3 does not divide 8 query heads with 2"
    " key/value heads (allowed: 1, 2, 4, 8)",
    "8 parallel.tp=8 model.hidden_dim=20": "parallel.tp: 8 leaves 1 of the ranks without a column of"
    " layers.0.feed_forward.w2.weight, which has 20; nearest: 7",
}


def together(line: str) -> list[str]:
    """Check a line of ranks and keys."""
    ranks, *words = line.split()
    overrides = [(key, value) for key, _, value in (word.partition("=") for word in words)]
    return problems_of(load(str(ROOT / "train.toml"), overrides), int(ranks))


@pytest.mark.parametrize("line", TOGETHER)
def test_what_cannot_work_together(line: str) -> None:
    assert together(line) == [TOGETHER[line]]


def test_several_rules_at_once() -> None:
    result = together("6 parallel.tp=3 train.global_batch=3")
    keys = ["parallel.tp", "train.global_batch", "train.seq_len"]
    assert [problem.split(":")[0] for problem in result] == keys


@pytest.mark.parametrize("world_size", [1, 2, 3, 6, 8, 12, 64])
def test_suggested_degrees_work(world_size: int) -> None:
    """Whatever single degree is wrong, doing what the message says makes the product right."""
    cures = 0
    for axis in ("dp_replicate", "dp_shard", "tp"):
        for degree in (2, 3, 5, 7, 16):
            line = f"{world_size} parallel.{axis}={degree} parallel.sequence=false"
            for problem in together(line):
                if problem.startswith("parallel: "):
                    cure = problem.rpartition("nearest: ")[2].replace(" = ", "=")
                    again = together(f"{line} {cure}")
                    assert not any(p.startswith("parallel: ") for p in again), problem
                    cures += 1
    assert cures >= 10  # of 15 degrees
