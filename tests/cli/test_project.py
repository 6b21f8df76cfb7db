"""A new project, and what an editor and a shell get."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from compose.cli import COMMANDS
from compose.cli.project import completion, init, schema, schema_of_files
from compose.config.rules import check
from compose.config.tables import TABLES
from compose.config.toml import load, tomllib
from compose.errors import docs
from tests.support.command_lines import answered
from tests.support.helpers import ROOT, refusal

FILES = [ROOT / "train.toml", *sorted((ROOT / "recipes").glob("*.toml"))]
VALIDATOR = Draft7Validator(schema_of_files())


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new project, and its folder to be in."""
    assert init([str(tmp_path / "new")]) == 0
    monkeypatch.chdir(tmp_path / "new")
    return tmp_path / "new"


def test_init(project: Path) -> None:
    """Its train.toml is the default run with a copy of the model, which runs by itself."""
    own, default = load("train.toml"), load(str(ROOT / "train.toml"))
    assert own.model.path == str(project / "model")
    assert (own.train, own.optimizer, own.data) == (default.train, default.optimizer, default.data)
    assert check(own, 2).plan.tensor.keys() == check(default, 2).plan.tensor.keys()
    assert json.loads(Path("train.schema.json").read_text()) == schema_of_files()
    recipe = "recipes/llama_one_gpu.toml"
    assert load(recipe).model.config.dim == load(str(ROOT / recipe)).model.config.dim
    for name, up in (("train.toml", "./"), (recipe, "../")):
        assert Path(name).read_text().startswith(f"#:schema {up}train.schema.json\n")
    assert "from .." not in "".join(file.read_text() for file in Path("model").glob("*.py"))
    compile(Path("train.py").read_text(), "train.py", "exec")


def test_init_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init([str(tmp_path / "my run")])
    assert f"\n  cd '{tmp_path}/my run' && compose train\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["train.toml", "model/plan.py", "train.schema.json"])
def test_init_writes_over_nothing(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    line = f"command line: init: {file} is there already; choose another folder"
    assert refusal(init, [str(tmp_path)]) == line
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["init"], "command line: init: needs one folder, got 0"),
        (["init", "a", "b"], "command line: init: needs one folder, got 2"),
        (["init", "train.toml/x"], "command line: init: cannot write train.toml/x: Not a directory"),
        (["completion"], "command line: completion: needs one of bash, zsh, fish"),
        (["completion", "csh"], "command line: completion: needs one of bash, zsh, fish"),
        (
            ["schema", "a.json"],
            "command line: schema: takes no a.json; compose schema > FILE writes a file",
        ),
        (["schema", "--out"], "command line: --out: unknown option; see --help"),
    ],
)
def test_message(project: Path, words: list[str], line: str) -> None:
    done = answered("-m", "compose", *words)
    assert (done.returncode, done.stderr) == (2, f"{line}\n")


def test_schema(capsys: pytest.CaptureFixture[str]) -> None:
    schema([])
    assert json.loads(capsys.readouterr().out) == schema_of_files()


def _bash(script: str, *given: str) -> set[str]:
    """What bash completes after some words."""
    line = " ".join(f"'{word}'" for word in given)
    ask = f"{script}\ncompopt() {{ :; }}\nCOMP_WORDS=({line}); COMP_CWORD={len(given) - 1}; _compose"
    done = subprocess.run(
        ["bash", "-c", f'{ask}; echo "${{COMPREPLY[@]}}"'], capture_output=True, text=True
    )
    assert not done.stderr
    return set(done.stdout.split())


def test_completion_of_bash(capsys: pytest.CaptureFixture[str]) -> None:
    completion(["bash"])
    script = capsys.readouterr().out
    assert _bash(script, "compose", "") == set(COMMANDS)
    assert _bash(script, "compose", "ver") == {"verify"}
    assert _bash(script, "compose", "train", "--parallel.pp_s") == {"--parallel.pp_schedule="}
    assert _bash(script, "compose", "train", "--dry") == {"--dry-run"}
    assert _bash(script, "compose", "convert", "--parallel.t") == set()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_of_other_shells(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    completion([shell])
    script = capsys.readouterr().out
    assert all(f" {name}" in script for name in COMMANDS)
    assert "pp_schedule" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n", "-c", script], check=True)


def problems(text: str) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(tomllib.loads(text))]


def test_it_is_a_schema_of_files() -> None:
    Draft7Validator.check_schema(schema_of_files())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files(file: Path) -> None:
    assert problems(file.read_text()) == []


def test_every_key_is_described() -> None:
    for name, kind in TABLES.items():
        part: Any = schema_of_files()
        for word in name.split("."):
            part = part["properties"][word]
        for key, doc in docs(kind).items():
            assert part["properties"][key]["description"] == doc


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nstep = 3", "Additional properties are not allowed ('step' was unexpected)"),
        ("[trian]\nsteps = 3", "Additional properties are not allowed ('trian' was unexpected)"),
        ('[train]\nsteps = "3"', "'3' is not of type 'integer'"),
        ("[parallel]\nzero = 4", "4 is not one of [0, 1, 2, 3]"),
        ("[optimizer]\nbeta1 = 1.5", "1.5 is greater than or equal to the maximum of 1"),
        ('extends = ["a.toml"]', "['a.toml'] is not of type 'string'"),
    ],
)
def test_mistakes(text: str, message: str) -> None:
    assert problems(text) == [message]


def test_keys_of_models() -> None:
    """A key of any packaged model is checked, and one of a model of one's own is let through."""
    assert problems('[model]\nn_layers = 2\nmy_key = "a"') == []
    assert problems('[model]\nn_layers = "two"') != []
