"""Models of one's own, in a folder and of an installed package; two names of the packaged ones."""

import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from compose.models.llama.model import Llama  # pyright: ignore[reportMissingImports]

import compose.models
import models.llama
import models.llama.plan
from compose.config import models as registry
from compose.config.hugging_face import find_hf
from compose.config.models import find_model, model_names, shipped, short_name
from compose.config.tables import Config
from compose.config.toml import dump, load
from tests.support.helpers import ROOT, refusal
from tests.support.pool import Pool

SMALL = "dim = 64\nhidden_dim = 96\nn_layers = 2"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of models/llama in a folder with an odd name, and the folder around it to be in."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "models/llama", "my-model.v2")
    Path("train.toml").write_text(f'[model]\npath = "my-model.v2"\n{SMALL}')
    return tmp_path / "my-model.v2"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an installed package that brings two models."""
    shutil.copytree(ROOT / "models/llama", tmp_path / "their_models/nice")
    for file in (tmp_path / "their_models/nice").glob("*.py"):
        file.write_text(file.read_text().replace("from ..layers", "from compose.models.layers"))
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[compose.models]\nnice = their_models.nice\nllama = their_models.nice\nlost = no_such_module\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._entry_points.cache_clear()
    yield tmp_path
    registry._entry_points.cache_clear()


def test_two_names_of_a_module() -> None:
    """A class is there once, by whatever name it was imported."""
    assert sys.modules["models.llama"] is sys.modules["compose.models.llama"]
    assert Llama is models.llama.Model is find_model("llama").Model
    assert callable(find_model("llama").plan)
    assert importlib.import_module("models.gpt2.hf") is find_hf("gpt2")
    assert Llama.__module__ == "compose.models.llama.model"
    assert models.llama.__spec__.name == "compose.models.llama"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("models.no_such_model")


def test_what_comes_with_compose() -> None:
    assert shipped("clusters") == ROOT / "clusters"
    assert shipped("train.toml") == ROOT / "train.toml"


def test_a_folder(mine: Path) -> None:
    config = load("train.toml")
    folder = find_model(config.model.name)
    assert config.model.name == config.model.path == str(mine)
    assert short_name(config.model.name) == "my-model.v2/"
    assert config.model.config.n_layers == 2
    assert type(config.model.config) is folder.Config is not models.llama.Config
    assert find_hf(config.model.name).hf_name is not find_hf("llama").hf_name
    Path("again.toml").write_text(dump(config))
    os.chdir("/")
    assert load(str(mine.parent / "again.toml")).model == config.model


def test_a_field_without_a_line_of_text(mine: Path) -> None:
    file, first = mine / "config.py", "    n_layers: int"
    file.write_text(file.read_text().replace(first, f"    width: int = 1\n{first}"))
    assert refusal(load, "train.toml", [("model.width", "2")]) == (
        "command line: model.width: is no key, since LlamaConfig has no line of text under it"
    )


def test_a_folder_without_an_init_file(mine: Path) -> None:
    (mine / "__init__.py").unlink()
    named = [f"{mine}/model.py: exports no {name}" for name in ("Config", "Model", "PRESETS")]
    assert refusal(load, "train.toml").splitlines() == [f"train.toml: {line}" for line in named]
    named = "\nfrom .config import PRESETS, LlamaConfig as Config\nModel = Llama\n"
    # The name of a module is that of its folder, so that this one needs another.
    other = mine.rename(mine.with_name("other"))
    (other / "model.py").write_text((other / "model.py").read_text() + named)
    folder = find_model(load("train.toml", [("model.path", "other")]).model.name)
    assert folder.Config().flops_per_token(8) > 0
    assert folder.plan.__name__ == "plan"


def _shape(config: Config) -> tuple[int, str]:
    return config.model.config.n_layers, type(config.model.config).__module__


def test_another_process_finds_it(mine: Path, pool: Pool) -> None:
    """A process that has not seen the folder gets its config by its module's name."""
    config = load("train.toml")
    ((layers, module),) = pool.run(_shape, 1, config)
    assert (layers, module) == (2, f"{compose.models.module_name(str(mine))}.config")


MESSAGES = {
    'path = "nowhere"': 'model.path: "nowhere": no such folder',
    'path = "my-model.v2"\nname = "llama"': 'model.path: "my-model.v2" stands beside model.name ='
    ' "llama"; remove one of them',
    'name = "/a/b"': 'model.name: "/a/b" is a folder; set model.path to it',
    'path = "empty"': "{0}/empty/model.py: no such file\ntrain.toml: {0}/empty/plan.py: no such file",
    'path = "wrong"': "{0}/wrong: cannot be imported: SyntaxError: invalid syntax (model.py, line 1)",
}


@pytest.mark.parametrize(("text", "line"), MESSAGES.items())
def test_message(mine: Path, text: str, line: str) -> None:
    Path("empty").mkdir()
    Path("wrong").mkdir()
    Path("wrong/model.py").write_text("x =")
    Path("wrong/plan.py").touch()
    Path("train.toml").write_text(f"[model]\n{text}")
    assert refusal(load, "train.toml") == f"train.toml: {line.format(mine.parent)}"


def test_a_folder_beside_the_file(mine: Path) -> None:
    os.chdir("/")
    file = mine.parent / "train.toml"
    line = f'{file}: model.path: "my-model.v2": no such folder; did you mean {mine}?'
    assert refusal(load, str(file)) == line


def test_a_nearer_name_or_path_takes_the_others_place(mine: Path) -> None:
    assert load("train.toml", [("model.name", "gpt2")]).model.path == ""
    Path("near.toml").write_text('extends = "base.toml"\n[model]\npath = "my-model.v2"')
    Path("base.toml").write_text('[model]\nname = "gpt2"')
    assert load("near.toml").model.name == str(mine)


def test_a_folder_beside_a_run_of_another_model(mine: Path) -> None:
    """Of which load_hf is gone."""
    kept = Path("run/checkpoints/step-00000001/config.toml")
    kept.parent.mkdir(parents=True)
    kept.write_text(dump(load("train.toml", [("model.name", "llama")])))
    Path("train.toml").write_text(
        '[model]\npath = "my-model.v2"\npreset = "hf"\n[checkpoint]\nload_hf = "gone"\n'
        '[run]\ndir = "run"'
    )
    assert refusal(load, "train.toml") == (
        f"train.toml: model.path: {str(mine)!r} is not what gone holds; leave it out"
    )


def test_a_checkpoint_does_not_choose_what_code_runs(mine: Path) -> None:
    config = Path("train.toml")
    config.write_text(f'[model]\nname = "{mine}"\npath = "{mine}"')
    line = f"train.toml: model.path: its code runs if the command names it: --model.path={mine}"
    assert refusal(load, "train.toml", (), True) == line
    assert load("train.toml", [("model.path", "my-model.v2")], True).model.name == str(mine)
    config.write_text(f'[model]\nname = "{mine}"')
    assert "is a folder; set model.path" in refusal(load, "train.toml", (), True)


def test_a_model_of_an_installed_package(installed: Path) -> None:
    assert {"nice", "gpt2"} < set(model_names())
    assert find_model("nice").Config.__module__ == "their_models.nice.config"
    assert find_hf("nice").MODEL_TYPES == find_hf("llama").MODEL_TYPES
    why = "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"
    assert refusal(find_model, "lost") == f"lost (no_such_module): {why}"
    assert refusal(find_model, "llama") == (
        "model.name: llama is models/llama and the entry point of their_models.nice; rename that one"
    )
