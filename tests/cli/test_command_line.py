"""Command lines of train.py and python -m compose: their help, and what is wrong in one line."""

import errno
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest

from compose.cli import COMMANDS
from compose.cli.command_line import _outcome, run
from compose.config.tables import TABLES
from compose.errors import docs
from compose.train.sampling import Sampling
from tests.support.command_lines import answered, of_rank


def test_help_lists_every_key() -> None:
    done = answered("train.py", "--help")
    assert done.returncode == 0
    for table_name, kind in TABLES.items():
        assert f"[{table_name}]" in done.stdout
        for key, doc in docs(kind).items():
            assert re.search(rf"^  {key} .*, default .*\n      {re.escape(doc)}$", done.stdout, re.M), (
                key
            )
    assert re.search(r"^    rope_theta +float, default 10000.0$", done.stdout, re.M)


def test_help_for_one_table() -> None:
    whole = answered("train.py", "--help").stdout
    some = answered("train.py", "--help", "optimizer", "model", "--model.name=gpt2").stdout
    assert re.findall(r"^\[(.*)\]$", some, re.M) == ["optimizer", "model"]
    assert some.startswith("[optimizer]\n  name  ")
    assert "presets of gpt2: " in some
    assert some.partition("\n\n")[0] in whole
    done = answered("train.py", "-h", "optimzer")
    assert (done.returncode, done.stderr) == (
        2,
        "command line: --help: unknown table optimzer; did you mean optimizer?\n",
    )


@pytest.mark.parametrize("command", ["verify", "schedule", "legal", "plan"])
def test_help_says_what_a_command_and_its_flags_do(command: str) -> None:
    shown = answered("-m", "compose", command, "--help").stdout
    usage, _, rest = shown.partition("\n\n")
    about = rest.partition("FILE defaults to")[0]
    assert re.match(r"[A-Z][a-z ].*", about)
    for flag in re.findall(r"--[a-z-]+(?![a-z.-])", usage):
        assert re.search(rf"^  {flag} +[a-zA-Z\"]", rest, re.M), flag


def test_unknown_command() -> None:
    done = answered("-m", "compose", "verfy")
    assert (done.returncode, done.stderr) == (
        2,
        f"compose: verfy: unknown command; did you mean verify? (known: {', '.join(COMMANDS)})\n",
    )
    assert "verify" in answered("-m", "compose").stdout


def test_help_of_generate_has_the_defaults() -> None:
    shown = answered("-m", "compose", "generate", "--help").stdout
    for flag, value in (
        ("max-tokens", Sampling.max_tokens),
        ("temperature", Sampling.temperature),
        ("top-p", Sampling.top_p),
        ("seed", Sampling.seed),
        ("cache", Sampling.cache),
    ):
        assert re.search(rf"^  --{flag} .*default {value}\b", shown, re.M), flag


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world-size=8"], "--world-size: goes with --dry-run; else torchrun sets it"),
        (["--dry-run", "--world-size=x"], "--world-size: x is not a number of ranks"),
        (["--dry-run", "--world-size="], "--world-size: an empty one is not a number of ranks"),
        (["--dry-rn=1"], "--dry-rn: unknown option; did you mean --dry-run?"),
        (["--dry-rn"], "--dry-rn: unknown option; did you mean --dry-run?"),
        (["--seed=3"], "--seed: unknown option; did you mean train.seed?"),
        (["-v"], "-v: unknown option; see --help"),
        (["a.toml", "b.toml"], "one TOML file at a time, got a.toml and b.toml"),
        (["train.steps=4"], "train.steps=4: no such file; did you mean --train.steps=4?"),
        (["\u2014dry-run"], "\u2014dry-run: no such file; did you mean --dry-run?"),
        (["--dry-run", ""], "a word is empty; a variable of the shell may be unset"),
        (["--train.steps"], "--train.steps: needs a value: --train.steps=value"),
        (["--dry-run=1"], "--dry-run: takes no value, got 1"),
        (["--dry-run="], "--dry-run: takes no value, got an empty one"),
        (["--help=false"], "--help: takes no value, got false"),
        (
            ["--train=5"],
            "--train: unknown option; it is a table: --train.key=value, or [train] in a file",
        ),
        (["--steps=5"], "--steps: unknown option; did you mean train.steps?"),
        (["--out=x"], "--out: unknown option; see --help"),
        (["--\x1b[31m"], "--\\x1b[31m: unknown option; see --help"),
        (
            ["--dry-run", "--train.seed=\ud800"],
            'train.seed: "\\ud800" is not UTF-8, which config.toml has to be; give another',
        ),
    ],
)
def test_bad_command_line(words: list[str], message: str) -> None:
    done = answered("train.py", *words)
    assert (done.returncode, done.stderr.splitlines()) == (2, [f"command line: {message}"])


@pytest.mark.parametrize(("rank", "local", "seconds"), [(0, 0, []), (2, 0, [20]), (3, 1, [30])])
def test_one_rank_of_a_node_speaks(rank: int, local: int, seconds: list[int]) -> None:
    """When it exits, torchrun ends the others of its node before they print the same."""
    place = of_rank(rank, 4, 29500) | {"LOCAL_RANK": str(local)}
    with mock.patch.dict("os.environ", place), mock.patch("time.sleep") as sleep:
        assert answered("train.py", "--train.sed=1").returncode == 2
    assert [call.args[0] for call in sleep.call_args_list] == seconds


def test_a_rank_beyond_the_world_size() -> None:
    """It would wait, as ranks do that no mesh uses."""
    with mock.patch.dict("os.environ", of_rank(2, 2, 29500)), mock.patch("time.sleep"):
        done = answered("train.py", "--dry-run")
    assert (done.returncode, done.stderr) == (
        2,
        "environment: RANK is 2 of 2 ranks; start them with torchrun\n",
    )


def test_a_folder_without_the_right_to_look_into_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Path.is_dir raises there, whichever key has named the path."""

    def main(words: Sequence[str]) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/home/other/data")

    assert _outcome(main) == 2
    assert capsys.readouterr().err == "/home/other/data: Permission denied\n"


def test_code_of_a_model_that_ends_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    """sys.exit with a text is a failure, as it is of Python."""
    for given, code, said in (("no such shape", 1, "no such shape\n"), (3, 3, ""), (None, 0, "")):
        assert _outcome(lambda words, given=given: sys.exit(given)) == code
        assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("place", "code", "kept", "said"),
    [
        ("", 0, "", ""),
        ("file", 0, "caf\\xe9\n", ""),
        ("/dev/full", 2, "", "standard output: No space left on device\n"),
    ],
    ids=["closed", "an encoding without the letter", "a full disk"],
)
def test_what_standard_output_cannot_take(
    place: str, code: int, kept: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A closed stream and a letter end no command; output that is lost is no success."""
    path = tmp_path / place
    output = open(path, "w", encoding="ascii") if place else None  # noqa: SIM115
    with (
        mock.patch.object(sys, "stdout", output),
        mock.patch.object(os, "_exit", side_effect=SystemExit) as end,
        pytest.raises(SystemExit),
    ):
        run(lambda words: print("caf\xe9"))
    assert end.call_args.args == (code,)
    assert capsys.readouterr().err == said
    assert not kept or path.read_text() == kept
