"""What every refusal has in common: lines that a person can read."""

from compose.errors import ConfigError


def test_a_long_word_is_cut() -> None:
    """A name or a value in a line may be of any length; the words around it stay."""
    (line,) = ConfigError(f"train.toml: model.name: {'y' * 5000!r} is unknown").problems
    assert line == f"train.toml: model.name: '{'y' * 199}... is unknown"


def test_words_of_a_path_stay_whole() -> None:
    path = "/".join(["folder"] * 50)
    assert ConfigError(f"{path}: no such file").problems == [f"{path}: no such file"]


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert ConfigError("name \x1b[2J\n").problems == ["name \\x1b[2J\\n"]
