"""Commands and code in README and docs work as they stand."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from compose.cli import TRAIN
from compose.cli.command_line import read_arguments
from compose.config.rules import check
from compose.config.toml import load
from tests.support.command_lines import answered, execute
from tests.support.helpers import ROOT, tier

WITHOUT_RANKS = ("legal", "plan", "schedule")  # commands that start no process group
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (page.name, block)
        for page in PAGES
        for block in re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)
    ]


def run(command: list[str], folder: Path) -> str:
    """Return a command's output; python runs in a fork, or here if it starts no ranks."""
    variables = {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    if command[:3] == ["python", "-m", "compose"] and command[3] in WITHOUT_RANKS:
        done = answered(*command[1:])
    elif command[0] == "python":
        done = execute(*command[1:], environment=variables)
    else:
        scripts = Path(sys.executable).parent
        variables |= {"PATH": f"{scripts}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# A line is taken once, from its first page.
COMMANDS = [
    (page, line)
    for line, page in {
        line: page for page, block in reversed(blocks("bash")) for line in block.splitlines()
    }.items()
]
# To start ranks takes longer than what most of these do: the slow tier runs the README's proof and what
# takes some seconds, and of the others the keys are looked at. Dry runs of recipes are those of
# test_train.py.
LEFT = [
    line
    for page, line in COMMANDS
    if ("torchrun" in line and (page != "README.md" or "verify" not in line))
    or ("recipes/" in line and "--dry-run" in line)
]
LONG = ("torchrun", "profile", "--candidates", "--gpus")
CASES = [
    pytest.param(
        page, line, id=line, marks=tier(slow=any(word in line for word in LONG), full=line in LEFT)
    )
    for page, line in COMMANDS
]


@pytest.mark.parametrize("line", LEFT)
def test_command_is_legal(line: str) -> None:
    words = shlex.split(line)
    option = "--nproc-per-node" if "torchrun" in words else "--world-size"
    ranks = int(words[words.index(option) + 1])
    given = [
        word for word in words if (word.startswith("--") and "=" in word) or word.endswith(".toml")
    ]
    result = read_arguments(given, "", TRAIN)
    check(load(str(ROOT / result.file), result.overrides), ranks)


@pytest.mark.parametrize(("page", "line"), CASES)
def test_command(page: str, line: str, tmp_path: Path) -> None:
    words = shlex.split(line.replace("/tmp/", f"{tmp_path}/"))
    if "train.py" in words and "--dry-run" not in words:
        words += ["--train.stop_after=2", f"--run.dir={tmp_path / 'run'}"]
    output = run(words, tmp_path)
    if "verify" in words or any(word.startswith("examples/") for word in words):
        assert "\nequal to one process: " in output


@pytest.mark.parametrize(
    ("page", "block"), blocks("python"), ids=[page for page, _ in blocks("python")]
)
def test_python(page: str, block: str, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(block)
    run(["python", str(tmp_path / "block.py")], tmp_path)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\((?!https:)([^)#]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_readme_commands_are_the_ones_that_ci_runs() -> None:
    commands = [block.strip() for page, block in blocks("sh") if page == "README.md"]
    assert len(commands) == 2
    in_ci = (ROOT / ".ci" / "run").read_text().replace(" -q", "")
    assert commands[1] in in_ci


def test_the_picture_of_readme_is_what_the_command_draws(tmp_path: Path) -> None:
    keys = "--parallel.pp=4 --parallel.pp_schedule=Interleaved1F1B --parallel.pp_virtual_stages=2"
    words = ["schedule", "train.toml", *keys.split(), "--model.n_layers=8", "--train.micro_batch=4"]
    run(["python", "-m", "compose", *words, "--out", str(tmp_path / "timeline.svg")], tmp_path)
    assert (tmp_path / "timeline.svg").read_text() == (ROOT / "docs" / "timeline.svg").read_text()


def test_diffs_of_a_new_architecture_use_what_is_there() -> None:
    """docs/new-architecture.md: each class, function and style that its diffs call is in the code."""
    page = (ROOT / "docs" / "new-architecture.md").read_text()
    shown = re.findall(r"^```diff\n(.*?)^```$", page, re.M | re.S)
    lines = [line for block in shown for line in block.splitlines() if line.strip()]
    assert {"+", "-"} <= {line[0] for line in lines}
    places = [*(ROOT / "models").rglob("*.py"), *(ROOT / "compose").rglob("*.py")]
    code = "\n".join(path.read_text() for path in places)
    there = set(re.findall(r"\w+", code))
    for line in lines:
        assert set(re.findall(r"(\w+)\(", line)) <= there, line
