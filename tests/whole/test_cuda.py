"""On a GPU: the same proof, and figures that only a GPU has."""

import json
import pickle
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compose import AttentionOptions, Documents
from compose.ops import attention as attention_operator
from compose.ops import gpu_attention, kernel_table
from compose.ops.attention import attention_forward, tensors_of
from compose.ops.kernel_table import TABLE, Kernel, Problem
from compose.ops.layers import wide_linear
from compose.proof.one_process import PlainAttention
from tests.support.command_lines import launch
from tests.support.training import lines

pytestmark = pytest.mark.gpu


def launched(*arguments: str) -> None:
    done = launch(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


EXPERTS = {"qwen3": "debug_moe", "deepseek_v3": "debug"}


@pytest.mark.parametrize(
    "words",
    [
        "--precision.param=float32",
        "--precision.param=bfloat16",
        *(
            f"--model.name={model} --model.preset={preset} --precision.param=bfloat16"
            f" --compile.mode={mode}"
            for model, preset in EXPERTS.items()
            for mode in ("off", "block")
        ),
        # In bfloat16 weights and state are kept in it too.
        *(
            f"--optimizer.name=muon --precision.param={kind} --precision.master={kind}"
            f" --precision.optimizer_state={kind}"
            for kind in ("float32", "bfloat16")
        ),
    ],
)
def test_equals_one_process(words: str) -> None:
    launched("-m", "compose", "verify", "train.toml", "--run.device=cuda", *words.split())


def test_a_router_s_product() -> None:
    """On tensor cores, and still as exact as sums in float32."""
    torch.manual_seed(0)
    given = [torch.randn(*shape, device="cuda").bfloat16() for shape in ((4096, 2048), (128, 2048))]
    inputs = [x.requires_grad_() for x in given]
    exact = [x.detach().double().requires_grad_() for x in given]
    result, expected = wide_linear(*inputs), wide_linear(*exact)
    assert result.dtype == torch.float32
    assert (result - expected).abs().max() < 1e-4 * expected.abs().max()
    weight = torch.randn_like(result)
    gradients = torch.autograd.grad((result * weight).sum(), inputs)
    for one, other in zip(
        gradients, torch.autograd.grad((expected * weight).sum(), exact), strict=True
    ):
        assert (one - other).norm() < 2**-8 * other.norm()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_trains(tmp_path: Path, precision: str) -> None:
    words = [f"--precision.param={precision}", f"--run.dir={tmp_path}", "--train.stop_after=50"]
    launched("train.py", "--run.device=cuda", *words)
    result = lines(tmp_path)
    assert result[-1]["loss"] < 3
    assert 2**20 < result[-1]["memory"] < 2**33


def test_ring_of_two_against_flash() -> None:
    done = launch("benchmarks/context.py", "--device", "cuda", "--length", "4096")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["error"] < 2 * result["error_of_flash"]


class OnGpu:
    """Drawn inputs of attention, (2, 512, heads, width), and how near a kernel comes to float64."""

    def __init__(
        self,
        kind: torch.dtype,
        widths: tuple[int, int],
        options: AttentionOptions,
        pieces: tuple[tuple[int, ...], tuple[int, ...]],
        documents: bool,
    ) -> None:
        torch.manual_seed(0)
        length, heads, groups = 512, 6, 2
        self.kind, self.options, self.pieces = kind, options, pieces
        sizes = ((heads, widths[0]), (groups, widths[0]), (groups, widths[1]), (heads, widths[1]))
        self.exact = [
            torch.randn(2, length, n, width, dtype=kind, device="cuda").double() for n, width in sizes
        ]
        self.sinks = torch.randn(heads, device="cuda")
        ids = (torch.rand(2, length) < 0.02).long().cumsum(1)
        self.documents = Documents(ids, torch.device("cuda")) if documents else None
        size = length // (4 if len(pieces[0]) > 1 else 1)
        self.places = torch.cat([torch.arange(a, a + size) for a in pieces[0]]).cuda()

    def run(self, kind: torch.dtype, plainly: bool) -> list[Tensor]:
        """Output, log-sum-exp, and the gradients of queries, keys and values."""
        q, k, v, grad = (x.to(kind).requires_grad_() for x in self.exact)
        rows, where = (q, ((0,), (0,))) if plainly else (q[:, self.places], self.pieces)
        given = (
            *tensors_of(self.documents),
            self.sinks.to(kind),
            *where,
            *self.options.given(q),
        )
        with PlainAttention() if plainly else nullcontext():
            out, lse = attention_forward(rows, k, v, *given)
        out, lse = (x[:, self.places] if plainly else x for x in (out, lse))
        return [out, lse, *torch.autograd.grad(out, (q, k, v), grad[:, self.places])]

    def check(self) -> None:
        """Raise AssertionError if the kernel errs more than plain products in its type do."""
        right, coarse = self.run(torch.float64, True), self.run(self.kind, True)
        for one, plain, exactly in zip(self.run(self.kind, False), coarse, right, strict=True):
            error, rounding = (one - exactly).norm(), (plain - exactly).norm()
            # Kernels add three products of TF32 in place of one of float32, and have an exponential
            # that is right to some 2 ** -22.
            floor = 1e-5 if one.dtype == torch.float32 else 1e-6
            assert error < 3 * rounding + floor * exactly.norm()


WHOLE = ((0,), (0,))
# The pieces of a rank of cp against all keys, and against the pieces that a ring brings.
PIECES = (WHOLE, ((128, 384), (0,)), ((128, 384), (0, 128, 256, 384)))


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("pieces", PIECES)
def test_attention_on_a_gpu(
    pieces: tuple[tuple[int, ...], tuple[int, ...]],
    kind: torch.dtype,
    documents: bool,
    window: int | None,
) -> None:
    """By the kernel that is chosen, with sinks and shared heads."""
    OnGpu(kind, (40, 40), AttentionOptions(window=window), pieces, documents).check()


def _takes(kernel: Kernel, kind: torch.dtype, widths: tuple[int, int]) -> bool:
    """Whether this GPU's table has a row by which the kernel takes a whole causal attention."""
    device = kernel_table.device_of(torch.empty(0, device="cuda"))
    asked = Problem(kind, *widths)
    return any(name == kernel and takes(device, asked) for name, takes in TABLE)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("cudnn", torch.bfloat16),
        ("cudnn", torch.float16),
        ("flash", torch.bfloat16),
        ("efficient", torch.bfloat16),
        ("efficient", torch.float16),
        ("efficient", torch.float32),
        ("plain", torch.bfloat16),
        ("plain", torch.float32),
    ],
)
def test_each_kernel_on_a_gpu(
    kernel: Kernel,
    kind: torch.dtype,
    widths: tuple[int, int],
    causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels run whole and in a ring's pieces, also where the table prefers another."""
    if not _takes(kernel, kind, widths):
        pytest.skip(f"{kernel} does not take {kind} with widths {widths} on this GPU")
    monkeypatch.setattr(attention_operator, "kernel_of", lambda device, problem: kernel)
    for pieces in (PIECES[0], PIECES[2]) if causal else (WHOLE,):
        OnGpu(kind, widths, AttentionOptions(causal=causal), pieces, documents=False).check()


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_masks_of_the_efficient_kernel(
    kind: torch.dtype,
    pieces: tuple[tuple[int, ...], tuple[int, ...]],
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Documents, windows and pieces, in many tiles, some of whose queries see no key."""
    monkeypatch.setattr(attention_operator, "kernel_of", lambda device, problem: "efficient")
    monkeypatch.setattr(gpu_attention, "_MASK", 2 * 100 * 512)
    OnGpu(kind, (64, 72), AttentionOptions(window=window), pieces, documents=True).check()


def test_a_step_waits_for_nothing() -> None:
    """With documents from host memory; PyTorch's own mode names each call that waits."""
    launched("-c", NO_WAIT)


NO_WAIT = """
import torch
from compose import Options, Parallel, Precision, apply, forward_backward, init_mesh, init_weights
from compose.data.samples import random_batch
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
    words = ["--precision.param=bfloat16", f"--run.dir={tmp_path}", "--train.stop_after=6"]
    words += ["--profile.steps=[4, 6]", "--profile.memory=true"]
    launched("train.py", "--run.device=cuda", *words)
    result = json.loads((tmp_path / "traces" / "step4-6_summary.json").read_text())["ranks"][0]
    assert sum(result["time"].values()) == pytest.approx(1)
    assert min(result["time"][kind] for kind in ("matmul", "attention", "optimizer", "other")) > 0
    memory = result["memory"]
    assert sum(memory["at_peak"].values()) == memory["peak"]
    assert memory["most"]["gradients"] >= memory["most"]["weights"]
    # The whole run's peak is that of the first step, as much or a little more.
    whole = lines(tmp_path)[-1]["memory"]
    assert 0.9 * whole < memory["peak"] <= whole
    snapshot = pickle.loads((tmp_path / "traces" / "step4-6_rank0_memory.pickle").read_bytes())
    assert snapshot["segments"]
    assert any(entry["frames"] for entry in snapshot["device_traces"][0])
