"""The wheel in an environment and a folder of their own, where no checkout can be imported."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from compose import __version__
from tests.support.helpers import ROOT

SMALL = ("--model.n_layers=2", "--train.seq_len=32", "--train.global_batch=4")
SEEN = """\
import compose, sysconfig
from importlib.util import find_spec
print(sysconfig.get_path("purelib"), compose.__file__, find_spec("models"), compose.__version__)
"""


def run(folder: Path, *words: str | Path) -> str:
    """Return what a command prints, in a folder, without this checkout on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installed(folder: Path) -> Path:
    """Return the scripts of a new environment with the wheel, and with the libraries of the tests."""
    left = shutil.ignore_patterns(
        ".git", ".venv", "__pycache__", "tests", "build", "runs", "*.egg-info"
    )
    shutil.copytree(ROOT, folder / "source", ignore=left)
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    build = ("wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder / "dist")
    run(folder, *pip, *build, folder / "source")
    shutil.rmtree(folder / "source")
    venv.create(folder / "environment")
    python = folder / "environment" / "bin" / "python"
    wheels = (folder / "dist").glob("*.whl")
    run(folder, *pip, "--python", python, "install", "--no-deps", "--no-index", *wheels)
    (place,) = (folder / "environment").glob("lib/python*/site-packages")
    # This brings the packages of that folder, and not what its own .pth files name, as that of an
    # editable install does.
    (place / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return python.parent


@pytest.mark.slow
def test_a_user_of_the_wheel(tmp_path: Path) -> None:
    """Install, init, train, plan, and the proof of a copied model on two ranks, as README says."""
    scripts = installed(tmp_path)
    place, file, models, version = run(tmp_path, scripts / "python", "-c", SEEN).split()
    assert (Path(file).parent, models, version) == (Path(place) / "compose", "None", __version__)

    run(tmp_path, scripts / "compose", "init", "x")
    project = tmp_path / "x"
    trained = run(project, scripts / "compose", "train", "--train.stop_after=1")
    assert "\nstep   1/250  loss 5." in trained
    words = ("train.toml", "--cluster", "h100_sxm", "--world-size", "8", "--candidates", "1")
    planned = run(project, scripts / "compose", "plan", *words)
    assert "\ntorchrun --nproc-per-node 8 train.py train.toml" in planned
    torchrun = (scripts / "python", "-m", "torch.distributed.run", "--nproc-per-node", "2")
    proof = run(project, *torchrun, "-m", "compose", "verify", "train.toml", *SMALL)
    assert "\nequal to one process: " in proof
