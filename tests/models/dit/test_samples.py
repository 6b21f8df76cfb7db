"""Runs of a diffusion transformer: resumed bitwise, and the picture that is made of one."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from compose.build import build
from models.dit.model import DiTConfig
from models.dit.sampler import Grid, _grid, sample, velocity
from tests.support.checkpoints import train_on
from tests.support.command_lines import answered, execute
from tests.support.helpers import Keys, make_job, ranks_in, refusal, tier
from tests.support.pool import Pool, make_mesh
from tests.support.small_models import DIT
from tests.support.training import keys_for, lines, train

RUN: Keys = DIT | {"model__label_dropout": 0.5, "data__path": "shapes", "optimizer__warmup": 1}


@pytest.fixture(scope="module")
def run(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps."""
    folder = tmp_path_factory.mktemp("dit")
    keys = RUN | {"train__steps": 2, "checkpoint__interval": 2, "train__global_batch": 4}
    pool.run(train, 1, keys_for(folder, **keys))
    return folder


def _generate(run: Path, out: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return answered("-m", "compose", "generate", str(run), "--out", str(out), *words)


def test_resumes_bitwise(pool: Pool, tmp_path: Path) -> None:
    straight = train_on(pool, tmp_path / "straight", RUN, {}, 4)
    train_on(pool, tmp_path / "halves", RUN, {}, 2)
    again = train_on(pool, tmp_path / "halves", RUN, {}, 4)
    assert straight.keys() == again.keys()
    for name, value in straight.items():
        assert torch.equal(value, again[name]), name
    losses = [[line["loss"] for line in lines(tmp_path / name)] for name in ("straight", "halves")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


@pytest.mark.slow
def test_metrics_agree_on_one_rank_and_on_four(pool: Pool, tmp_path: Path) -> None:
    """The run with validation, on one rank and where every axis but tp is 2."""
    keys = RUN | {"train__steps": 3, "train__global_batch": 4, "train__validate_every": 3}
    meshes: dict[str, Keys] = {
        "one": {},
        "four": {"parallel__dp_shard": 2, "parallel__cp": 2},
        "pipeline": {"parallel__pp": 2, "parallel__dp_shard": 2},
    }
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(5):  # of which the last batch holds one
        pixels = np.full((6, 6, 3), 50 * number, np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    for name, mesh in meshes.items():
        more = keys_for(tmp_path / name, **(keys | mesh), data__validation=folder)
        pool.run(train, ranks_in(mesh), more)
    one = lines(tmp_path / "one")
    for name in ("four", "pipeline"):
        result = lines(tmp_path / name)
        for a, b in zip(one, result, strict=True):
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert result[-1]["validation_loss"] == pytest.approx(one[-1]["validation_loss"], rel=1e-5)
    assert one[-1]["tokens"] == 3 * 4 * 9


def test_a_picture(run: Path, tmp_path: Path) -> None:
    """Its size is that of the grid with its lines; the seed decides it."""
    words = ["--steps", "2", "--per-class", "3", "--classes", "4,1"]
    outputs = [tmp_path / f"{name}.png" for name in "abc"]
    for out, seed in zip(outputs, (0, 0, 1), strict=True):
        command = ["-m", "compose", "generate", str(run), "--out", str(out), *words]
        result = execute(*command, "--seed", str(seed))
        said = f"{out}: 3 images of each of the classes 4, 1\n"
        assert (result.returncode, result.stdout, result.stderr) == (0, said, "")
    first, same, other = (out.read_bytes() for out in outputs)
    assert first == same != other
    with Image.open(tmp_path / "a.png") as picture:
        assert (picture.size, picture.mode) == ((3 * 8, 2 * 8), "RGB")


def _samples(keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of a model that is not trained, and the velocity of a batch."""
    ranks = torch.distributed.get_world_size()
    job = make_job(ranks, **(DIT | {"train__global_batch": 4} | keys))
    composition = build(job, make_mesh(job.degrees), torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in composition.named_parameters():
            parameter.add_(0.02 * (1 + len(name) % 3))
    grid = Grid(Path("unused.png"), (0, 3), per_class=2, steps=3)
    model = job.config.model.config
    batch = {
        "patches": torch.ones(2, 9, 12).cumsum(1),
        "times": torch.tensor([7, 1 << 19]),
        "labels": torch.tensor([5, 2]),
    }
    return sample(composition, model, grid), velocity(composition, batch)


MESHES: dict[str, Keys] = {
    "cp": {"parallel__cp": 2, "parallel__dp_shard": 1},
    "pp and dp": {"parallel__pp": 2, "parallel__dp_shard": 2},
    "tp": {"parallel__tp": 2, "parallel__dp_shard": 1, "parallel__sequence": False},
    "all": {"parallel__tp": 2, "parallel__pp": 2, "parallel__cp": 2, "parallel__dp_shard": 1},
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=tier(slow=n != "cp", full=n == "all")) for n in MESHES]
)
def test_images_do_not_depend_on_the_mesh(pool: Pool, name: str) -> None:
    expected = pool.run(_samples, 1, {})[0]
    assert expected[0].shape == (4, 3, 6, 6)
    for result in pool.run(_samples, ranks_in(MESHES[name]), MESHES[name]):
        for value, right in zip(result, expected, strict=True):
            torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-4)


def test_what_is_refused(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.png"
    cases: dict[str, list[str]] = {
        "command line: --steps: 0 should be a whole number from 1 to 1048576": ["--steps", "0"],
        "command line: --per-class: many should be a whole number from 1 to 1048576": [
            "--per-class=many"
        ],
        "command line: --guidance: nan should be a number from 0 to 1048576": ["--guidance=nan"],
        "command line: --classes: 0,5 should be numbers from 0 to 4 with commas between them": [
            "--classes=0,5"
        ],
        f"command line: --classes: {'9' * 200}... should be numbers from 0 to 4 with commas between"
        " them": [f"--classes={'9' * 5000}"],
        "command line: --out: x.jpg is no .png file": ["--out=x.jpg"],
        "command line: --out: cannot write no/x.png: there is no such folder": ["--out=no/x.png"],
        "command line: --top-p: unknown option; see --help": ["--top-p=1"],
    }
    for message, words in cases.items():
        result = _generate(run, out, *words)
        assert (result.returncode, result.stderr) == (2, message + "\n")
    result = _generate(run, out, "--help")
    assert result.returncode == 0
    assert "--guidance" in result.stdout
    assert "--prompt" not in result.stdout
    result = answered("-m", "compose", "generate", str(run))
    assert result.stderr == "command line: --out: nothing is no .png file\n"


def test_guidance_needs_what_label_dropout_learns(tmp_path: Path) -> None:
    """Its embedding of no class has its first value still."""
    flags, model = {"--out": str(tmp_path / "x.png")}, DiTConfig(label_dropout=0.0)
    assert [_grid(each, flags).guidance for each in (model, DiTConfig())] == [1, Grid.guidance]
    assert _grid(model, flags | {"--guidance": "1"}).guidance == 1
    assert refusal(_grid, model, flags | {"--guidance": "2"}) == (
        "command line: --guidance: 2 needs images without class, and model.label_dropout = 0 learnt"
        " none; nearest: 1"
    )


def test_convert_is_refused(run: Path, tmp_path: Path) -> None:
    result = answered("-m", "compose", "convert", str(run), str(tmp_path / "hf"))
    line = "models/dit: has no hf.py, with Hugging Face's names of its weights\n"
    assert (result.returncode, result.stderr) == (2, line)
