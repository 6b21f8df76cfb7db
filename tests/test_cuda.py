"""On a GPU: the same proof, and figures that only a GPU has."""

import json
import pickle
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compose import AttentionOptions, Documents
from compose.operators.attention import attention_forward, tensors_of
from compose.operators.wide_linear import wide_linear
from compose.proof.plain_attention import PlainAttention
from tests.command_lines import launch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_equals_one_process(precision: str) -> None:
    done = launch(
        "-m", "compose", "verify", "train.toml", "--run.device=cuda", f"--precision.param={precision}"
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("compiled", ["off", "block"])
@pytest.mark.parametrize("model", ["qwen3", "deepseek_v3"])
def test_experts_equal_one_process(model: str, compiled: str) -> None:
    preset = {"qwen3": "debug_moe", "deepseek_v3": "debug"}[model]
    words = ["--run.device=cuda", f"--model.name={model}", f"--model.preset={preset}"]
    words += ["--precision.param=bfloat16", f"--compile.mode={compiled}"]
    done = launch("-m", "compose", "verify", "train.toml", *words)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_router_s_product() -> None:
    """On tensor cores, and still as exact as sums in float32."""
    torch.manual_seed(0)
    given = [torch.randn(*shape, device="cuda").bfloat16() for shape in ((4096, 2048), (128, 2048))]
    inputs = [x.requires_grad_() for x in given]
    exact = [x.detach().double().requires_grad_() for x in given]
    found, expected = wide_linear(*inputs), wide_linear(*exact)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    weight = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weight).sum(), inputs)
    for one, other in zip(
        gradients, torch.autograd.grad((expected * weight).sum(), exact), strict=True
    ):
        assert (one - other).norm() < 2**-8 * other.norm()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_muon_and_kept_in_bfloat16(precision: str) -> None:
    """On one GPU; in bfloat16 weights and state are kept in it too."""
    words = [f"--precision.{key}={precision}" for key in ("param", "master", "optimizer_state")]
    words += ["--run.device=cuda", "--optimizer.name=muon"]
    done = launch("-m", "compose", "verify", "train.toml", *words)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_trains(tmp_path: Path, precision: str) -> None:
    done = launch(
        "train.py",
        "--run.device=cuda",
        f"--precision.param={precision}",
        f"--run.dir={tmp_path}",
        "--train.stop_after=50",
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < 3
    assert 2**20 < lines[-1]["memory"] < 2**33


NO_MASK = """
from models.layers.attention import Documents
from train import main

def refuse(self):
    raise AssertionError("a mask was built")

Documents.mask = property(refuse)
main({arguments!r})
"""


def test_no_mask_is_built(tmp_path: Path) -> None:
    arguments = ["--run.device=cuda", "--precision.param=bfloat16", f"--run.dir={tmp_path}"]
    done = launch("-c", NO_MASK.format(arguments=[*arguments, "--train.stop_after=2"]))
    assert done.returncode == 0, done.stderr


def test_ring_of_two_against_flash() -> None:
    done = launch("benchmarks/context.py", "--device", "cuda", "--length", "4096")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["error"] < 2 * result["error_of_flash"]


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("starts", [(0,), (128, 384)])
def test_attention_on_a_gpu(
    starts: tuple[int, ...], kind: torch.dtype, documents: bool, window: int | None
) -> None:
    """Output and gradients of the operator; pieces of queries as with cp, and the whole."""
    torch.manual_seed(0)
    length, heads, groups = 512, 6, 2
    exact = [
        torch.randn(2, length, n, 40, dtype=kind, device="cuda").double()
        for n in (heads, groups, groups, heads)
    ]
    ids = (torch.rand(2, length) < 0.02).long().cumsum(1) if documents else None
    options, sinks = AttentionOptions(window=window), torch.randn(heads, device="cuda")
    found = None if ids is None else Documents(ids, torch.device("cuda"))
    size = length // (4 if len(starts) > 1 else 1)
    places = torch.cat([torch.arange(a, a + size) for a in starts])

    def run(kind: torch.dtype, plainly: bool) -> list[Tensor]:
        q, k, v, grad = (x.to(kind).requires_grad_() for x in exact)
        rows, where = (q, (0,)) if plainly else (q[:, places], starts)
        given = (*tensors_of(found), sinks.to(kind), where, (0,), *options.given(q))
        with PlainAttention() if plainly else nullcontext():
            out, _ = attention_forward(rows, k, v, *given)
        out = out[:, places] if plainly else out
        return [out, *torch.autograd.grad(out, (q, k, v), grad[:, places])]

    right, coarse = run(torch.float64, True), run(kind, True)
    for one, plain, exactly in zip(run(kind, False), coarse, right, strict=True):
        error, rounding = (one - exactly).norm(), (plain - exactly).norm()
        assert error < 3 * rounding + 1e-6 * exactly.norm()


def test_a_step_waits_for_nothing() -> None:
    """With documents from host memory; PyTorch's own mode names each call that waits."""
    done = launch("-c", NO_WAIT)
    assert done.returncode == 0, done.stderr


NO_WAIT = """
import torch
from compose import Options, Parallel, Precision, apply, forward_backward, init_mesh, init_weights
from compose.data import random_batch
from compose.train.step import on_device
from models.llama import Config, Model, plan
torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
config, parallel = Config(window=50, sinks=True), Parallel(dp_shard=1)
with torch.device("meta"):
    model = Model(config)
mesh = init_mesh(parallel, "cuda")
options = Options(parallel, Precision("bfloat16"))
composition = apply(model, plan(config, parallel), mesh, options)
init_weights(composition, model.init_parameter, 0, torch.device("cuda"))
batch = on_device(random_batch(4, 256, 257, 0), torch.device("cuda"))
assert not batch["document_ids"].is_cuda
forward_backward(composition, batch, micro_batch=2)
torch.cuda.synchronize()
torch.cuda.set_sync_debug_mode("error")
forward_backward(composition, batch, micro_batch=2)
"""


def test_profile(tmp_path: Path) -> None:
    done = launch(
        "train.py",
        "--run.device=cuda",
        "--precision.param=bfloat16",
        f"--run.dir={tmp_path}",
        "--train.stop_after=6",
        "--profile.steps=[4, 6]",
        "--profile.memory=true",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "traces" / "step4-6_summary.json").read_text())["ranks"][0]
    assert sum(result["time"].values()) == pytest.approx(1)
    assert min(result["time"][kind] for kind in ("matmul", "attention", "optimizer", "other")) > 0
    memory = result["memory"]
    assert sum(memory["at_peak"].values()) == memory["peak"]
    assert memory["most"]["gradients"] >= memory["most"]["weights"]
    # That of the whole run is as much, or a little more, of the first step.
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert 0.9 * lines[-1]["memory"] < memory["peak"] <= lines[-1]["memory"]
    snapshot = pickle.loads((tmp_path / "traces" / "step4-6_rank0_memory.pickle").read_bytes())
    assert snapshot["segments"]
    assert any(entry["frames"] for entry in snapshot["device_traces"][0])
