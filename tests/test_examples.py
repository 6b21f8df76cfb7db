"""The files of examples/: they parse, and each flag and key in them is one that its program takes."""

import importlib
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from compose.cli import TRAIN
from compose.cli.command_line import read_arguments
from compose.config.rules import check
from compose.config.toml import load
from tests.support.command_lines import execute
from tests.support.helpers import ROOT

EXAMPLES = ROOT / "examples"
SHELL = ["launch.sh", "slurm.sbatch"]
YAML = ["kubernetes.yaml", "kubeflow_trainjob.yaml", "skypilot.yaml"]
NODES, GPUS = 4, 8


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def scripts(name: str) -> list[str]:
    """The shell scripts in a file."""
    if name in SHELL:
        return [(EXAMPLES / name).read_text()]
    if name == "kubernetes.yaml":
        return documents(name)[1]["spec"]["template"]["spec"]["containers"][0]["args"]
    if name == "kubeflow_trainjob.yaml":
        return documents(name)[0]["spec"]["trainer"]["args"]
    return [documents(name)[0][key] for key in ("setup", "run")]


def command_lines(name: str) -> Iterator[list[str]]:
    """What scripts give to launch.sh, with a 4 in the place of each variable."""
    for script in scripts(name):
        whole = re.sub(r"#.*", "", script).replace("\\\n", " ")
        for line in whole.splitlines():
            if "launch.sh " in line:
                line = line.replace('"$@"', "").split("||")[0].rstrip(" &")
                words = shlex.split(re.sub(r"\$\w+", "4", line))
                yield words[words.index("examples/launch.sh") + 1 :]


@pytest.mark.parametrize("name", [*SHELL, *YAML])
def test_scripts_are_bash(name: str) -> None:
    for script in scripts(name):
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["slurm.sbatch", *YAML])
def test_flags_and_keys_are_known(name: str) -> None:
    """torchrun takes its part, and train.py can run on so many ranks what it is told."""
    (words,) = command_lines(name)
    given = get_args_parser().parse_args(words)
    assert given.training_script == "train.py"
    assert given.rdzv_backend == "c10d"
    assert int(given.max_restarts) > 0
    result = read_arguments(given.training_script_args, "train.py", TRAIN)
    ranks = NODES * GPUS if "recipes/" in result.file else 2
    config = load(str(ROOT / result.file), result.overrides)
    check(config, ranks)
    assert config.run.dir
    assert config.checkpoint.interval


def test_sizes_agree() -> None:
    """As many nodes and ranks as the file asks machines for; the last step is that of the check."""
    job = documents("kubernetes.yaml")[1]["spec"]
    (words,) = command_lines("kubernetes.yaml")
    given = get_args_parser().parse_args(words)
    container = job["template"]["spec"]["containers"][0]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert (job["completions"], job["parallelism"], gpus) == (NODES, NODES, GPUS)
    assert (given.nnodes, given.nproc_per_node) == (str(NODES), str(GPUS))
    for name in ("kubernetes.yaml", "kubeflow_trainjob.yaml"):
        (script,) = scripts(name)
        steps = re.findall(r"--train.steps=(\d+)", script)
        assert steps == re.findall(r'"step": (\d+),', script)
        assert len(steps) == 1
    trainer = documents("kubeflow_trainjob.yaml")[0]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (NODES, GPUS)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": GPUS}}
    sky = documents("skypilot.yaml")[0]
    assert (sky["num_nodes"], sky["resources"]["accelerators"]) == (NODES, f"H100:{GPUS}")


@pytest.mark.slow
def test_kubernetes_takes_the_files() -> None:
    """The models of Kubernetes' own types keep all that is in the files, and drop unknown keys."""
    kinds = {"Service": "io_k8s_api_core_v1_service.IoK8sApiCoreV1Service"}
    kinds |= {"Job": "io_k8s_api_batch_v1_job.IoK8sApiBatchV1Job"}
    kinds |= {"TrainJob": "trainer_v1alpha1_train_job.TrainerV1alpha1TrainJob"}
    for each in (*documents("kubernetes.yaml"), *documents("kubeflow_trainjob.yaml")):
        module, name = kinds[each["kind"]].split(".")
        kind = getattr(importlib.import_module(f"kubeflow_trainer_api.models.{module}"), name)
        assert kind.from_dict(each).to_dict() == each
        spec = {**each["spec"], "no_such_key": 1}
        assert kind.from_dict({**each, "spec": spec}).to_dict() == each


def test_the_slurm_script_says_what_it_does() -> None:
    """The signal goes to the script alone; the job may be requeued, and its output goes on."""
    text = (EXAMPLES / "slurm.sbatch").read_text()
    options = re.findall(r"^#SBATCH --(.*)$", text, re.M)
    assert {"signal=B:USR1@600", "requeue", "open-mode=append", "ntasks-per-node=1"} <= {*options}


def test_the_image_copies_what_is_there() -> None:
    text = (EXAMPLES / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and line[0] != "#"]
    assert {word for word, _ in lines} == {"FROM", "RUN", "WORKDIR", "COPY", "CMD"}
    for word, rest in lines:
        for source in rest.split()[:-1] if word == "COPY" else ():
            assert (ROOT / source).exists()
    extras = re.findall(r"\.\[(.*)\]", text)[0].split(",")
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.M) for extra in extras)


# Ray's part, in one process for each rank: a process group of its own, and a thread for the function.
RAY = """
import sys, threading, types
import torch.distributed as dist

class TorchTrainer:
    def __init__(self, function, train_loop_config, torch_config, scaling_config, run_config):
        self.given = function, train_loop_config
        assert vars(scaling_config) == {"num_workers": 2, "use_gpu": False}
        assert vars(run_config.failure_config) == {"max_failures": 5}
        self.backend = torch_config.backend

    def fit(self):
        function, config = self.given
        def work():
            dist.init_process_group(self.backend)
            function(config)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

names = {name: types.SimpleNamespace for name in ("FailureConfig", "RunConfig", "ScalingConfig")}
sys.modules["ray"] = types.ModuleType("ray")
sys.modules["ray.train"] = types.ModuleType("ray.train")
vars(sys.modules["ray.train"]).update(names)
sys.modules["ray.train.torch"] = types.ModuleType("ray.train.torch")
vars(sys.modules["ray.train.torch"]).update(
    TorchTrainer=TorchTrainer, TorchConfig=types.SimpleNamespace
)
import runpy
runpy.run_path("examples/ray_train.py", run_name="__main__")
"""


@pytest.mark.slow
def test_ray_around_the_trainer(tmp_path: Path) -> None:
    """The function that Ray calls trains in a thread of each rank, after Ray's own process group."""
    (tmp_path / "with_ray.py").write_text(RAY)
    words = ["--workers", "2", "--failures", "5", "train.toml", f"--run.dir={tmp_path / 'run'}"]
    words += ["--train.stop_after=2", "--train.seq_len=32", "--model.n_layers=1"]
    done = execute(str(tmp_path / "with_ray.py"), *words, "--run.device=cpu", ranks=2)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [re.findall(r'"step": (\d+)', line)[0] for line in lines] == ["1", "2"]
