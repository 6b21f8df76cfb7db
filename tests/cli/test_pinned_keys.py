"""What pins a key of a plan, and what is said of it."""

from pathlib import Path

from compose.cli import COMMANDS
from compose.cli.command_line import ParsedWords, read_words
from compose.cli.question import Question, for_devices, freed, pinned, pinned_words, read_question
from tests.support.helpers import ROOT, refusal

ON_8 = ["--cluster=h100_sxm", "--world-size=8"]
TRAIN = str(ROOT / "train.toml")


def asked(*words: str, file: str = TRAIN) -> tuple[ParsedWords, Question]:
    given = read_words([file, *ON_8, *words], COMMANDS["plan"].flags)
    return given, read_question(given)


def test_a_default_pins_nothing() -> None:
    """train.toml sets every key to its default."""
    assert pinned(*asked()) == {}


def test_another_value_the_command_line_and_keep_pin(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[parallel]\nzero = 1\ntp = 4\n[train]\nmicro_batch = 2\n")
    words = ["--parallel.pp=1", "--keep=train.micro_batch,parallel.cp", "--train.loss_chunk=0"]
    given, question = asked(*words, file=str(file))
    pins = pinned(given, question)
    assert pins == {
        "parallel.zero": str(file),
        "parallel.pp": "command line",
        "train.loss_chunk": "command line",
        "train.micro_batch": "--keep",
        "parallel.cp": "--keep",
    }
    assert pinned_words(question.config, {"parallel.zero": "mine.toml", "parallel.cp": "--keep"}) == (
        "pinned: parallel.zero = 1 (mine.toml), parallel.cp = 1 (--keep); --free KEY releases one"
    )
    assert pinned_words(question.config, {}) == ""
    given, question = asked(*words, "--free=parallel.zero,parallel.pp", file=str(file))
    assert set(pinned(given, question)) == set(pins) - {"parallel.zero", "parallel.pp"}


def test_a_key_is_kept_or_freed() -> None:
    words = ["--keep=parallel.cp,parallel.tp", "--free=parallel.zero,parallel.tp"]
    assert refusal(pinned, *asked(*words)) == (
        "command line: --keep: --free names parallel.tp too; remove one of them"
    )


def test_a_file_pins_nothing_of_its_own_mesh(tmp_path: Path) -> None:
    """The plan looks for degrees, and another mesh has other layers in its stages."""
    file = tmp_path / "mine.toml"
    file.write_text("[parallel]\npp = 2\npp_layers = [3, 2]\ndp_shard = 4\nzero3_reshard = 2\n")
    assert pinned(*asked(file=str(file))) == {}
    kept = pinned(*asked("--keep=parallel.pp_layers", file=str(file)))
    assert kept == {"parallel.pp_layers": "--keep"}


def test_what_changes_learning_is_freed_alone() -> None:
    assert freed(asked()[0]) == frozenset()
    given, question = asked("--free=train.global_batch,parallel.offload,comm.gradients")
    assert freed(given) == {"train.global_batch", "comm.gradients"}
    assert pinned(given, question) == {}


def test_a_gpu_is_planned_in_bfloat16() -> None:
    question = for_devices(*asked())
    assert question.config.precision.param == "bfloat16"
    assert question.changed == ("precision.param",)
    assert question.words == (
        "precision.param is bfloat16 on these devices; --keep precision.param keeps float32"
    )
    for words in (["--keep=precision.param"], ["--precision.param=float32"], ["--cluster=cpu"]):
        given, question = asked(*words)
        assert for_devices(given, question) is question


def test_an_unknown_key_is_named() -> None:
    for word, line in {
        "--keep=train.micro_batches": "train.micro_batches is no key; did you mean train.micro_batch?",
        "--free=comm.gradient": "comm.gradient is no key that is tried; did you mean comm.gradients?",
        "--free=parallel.zeros": "parallel.zeros is no key that is tried; did you mean parallel.zero?",
    }.items():
        flag = word.partition("=")[0]
        assert refusal(pinned, *asked(word)).startswith(f"command line: {flag}: {line}")
