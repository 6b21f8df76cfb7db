"""Every refusal has lines that a person can read."""

import pytest

from compose.__main__ import main
from compose.cli.command_line import launched_ranks
from compose.errors import ConfigError
from tests.support.helpers import ROOT, refusal


def test_a_long_word_is_cut() -> None:
    """A name or a value in a line may be of any length; the words around it stay."""
    (line,) = ConfigError(f"train.toml: model.name: {'y' * 5000!r} is unknown").problems
    assert line == f"train.toml: model.name: '{'y' * 199}... is unknown"


def test_words_of_a_path_stay_whole() -> None:
    path = "/".join(["folder"] * 50)
    assert ConfigError(f"{path}: no such file").problems == [f"{path}: no such file"]


DIGITS = "9" * 5000  # Python refuses to read a number with more than 4,300
SHOWN = f"{'9' * 200}..."
NUMBERS: dict[str, list[str]] = {
    f"--world-size: {SHOWN} is not a number of ranks": ["legal", f"--world-size={DIGITS}"],
    f"--candidates: {SHOWN} is not a number of candidates": [
        *("plan", str(ROOT / "train.toml"), "--cluster=cpu", "--world-size=2"),
        f"--candidates={DIGITS}",
    ],
    f"--workers: {SHOWN} is not a number of processes": [
        *("tokenize", "--tokenizer=x", "--out=y", f"--workers={DIGITS}", "z")
    ],
}


@pytest.mark.parametrize("problem", NUMBERS, ids=lambda problem: problem.partition(":")[0])
def test_a_number_of_many_digits(problem: str) -> None:
    assert refusal(main, NUMBERS[problem]) == f"command line: {problem}"


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("WORLD_SIZE", DIGITS, f"'{'9' * 199}..."),
        ("MASTER_PORT", "65536", "'65536';"),
        ("LOCAL_WORLD_SIZE", "abc", "'abc';"),
        ("GROUP_WORLD_SIZE", "", "'';"),
    ],
    ids=["many digits", "no port", "no number", "empty"],
)
@pytest.mark.parametrize("launched", [True, False])
def test_a_wrong_variable_of_a_rank(
    name: str, value: str, shown: str, launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the launcher need not set is read by a run alone too."""
    of_rank = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for each in of_rank:
        monkeypatch.setenv(each, "0") if launched else monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    if launched or name not in of_rank:
        assert refusal(launched_ranks) == f"environment: {name} is {shown} start ranks with torchrun"
    else:
        assert launched_ranks() == 1
