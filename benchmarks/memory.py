"""Peak memory of a rank with each technique off and on, against what docs/memory.md says it saves.

    python benchmarks/memory.py [--small] [TECHNIQUE ...]

prints one JSON line for each technique, and then one with the ratio that is farthest from 1. The model
is a Llama, run as train.py would with the keys that a row names; ranks are processes that it starts:
four on CPUs, or one for each of up to four GPUs. Bytes are those of the rank with most.

A peak is that of a step's second micro-batch, forward and backward, after a first optimizer step:
weights, gradients, optimizer state and activations are then all there. How bytes are found, and those
of a GPU told from those of the host where there is but a CPU, is in benchmarks/allocations.py.

Pieces of an optimizer's state are of 16,384 elements and not of 4 million, as the model is small.
"""

import argparse
import gc
import json
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from allocations import Allocations
from torch import Tensor, nn

from compose import forward_backward, init_mesh
from compose.build import build, build_optimizer, loss_function
from compose.config import rules
from compose.config.job import Job
from compose.config.tables import Config
from compose.config.toml import load
from compose.data.samples import random_batch
from compose.memory.activation_checkpointing import unit_costs, within
from compose.ops.cross_entropy import AT_ONCE, MANY
from compose.ops.tensors import local_tensor
from compose.optim import offload

TRAIN = str(Path(__file__).parent.parent / "train.toml")
PIECE = 2**14
CHUNK = 64
BUDGET = 0.5
Keys = dict[str, object]
SHAPE: Keys = {
    "model.vocab_size": 8192,
    "model.dim": 256,
    "model.n_layers": 6,
    "model.n_heads": 8,
    "model.n_kv_heads": 4,
    "model.hidden_dim": 768,
    "train.seq_len": 1024,
}
SMALL: Keys = {
    "train.seq_len": 512,
    "model.vocab_size": 2048,
    "model.dim": 64,
    "model.n_layers": 4,
    "model.hidden_dim": 192,
}


@dataclass(frozen=True)
class Sizes:
    """Formulas use these sizes, with the letters of docs/memory.md. n: ranks. P, U: parameters of the
    model and of the output projection. A: elements that a layer keeps for a token. N: what it keeps of
    its two norms on a CPU in bfloat16, in float32. M: bytes of a piece of the loss in float32."""

    n: int
    P: int
    U: int
    V: int
    D: int
    F: int
    GK: int
    H: int
    T: int
    layers: int
    N: int
    M: int

    @property
    def A(self) -> int:
        return 6 * self.D + 2 * self.GK + 4 * self.F + self.H

    def per_token(self, elements: float) -> float:
        """Bytes in float32 of so many elements for each layer and token."""
        return 4 * self.T * self.layers * elements

    @classmethod
    def of(cls, job: Job, n: int, device: str) -> "Sizes":
        config, model = job.config, job.model
        shape = config.model.config
        P, D, V = sum(p.numel() for p in model.parameters()), shape.dim, shape.vocab_size
        T = config.train.seq_len * config.train.micro_batch
        # Two norms, each with its input and with that over its root.
        N = 4 * D if device == "cpu" else 0
        M = 4 * min(T * V, AT_ONCE.get(device, MANY))
        GK, H = shape.n_kv_heads * shape.head_width, shape.n_heads
        return cls(n, P, V * D, V, D, shape.hidden_dim, GK, H, T, shape.n_layers, N, M)


@dataclass(frozen=True)
class Technique:
    """on, off: keys of the two runs. saves: bytes by formula. alone: which of the two runs, ``off on``,
    are of one rank; the others are of n."""

    name: str
    on: Keys
    saves: Callable[[Sizes], float]
    off: Keys
    alone: str = "off on"


def _budget(s: Sizes, job: Job) -> float:
    """Return the bytes that layers need not keep, with the mode's choice."""
    units = [f"layers.{i}" for i in range(s.layers)]
    costs = unit_costs(job.model, units, job.config.train.seq_len)
    return sum(
        4 * s.T * (s.A - s.D) - sum(costs[name].bytes[group] for group in groups)
        for name, groups in within(costs, BUDGET).items()
        if groups is not None
    )


def techniques(job: Job) -> list[Technique]:
    """Every row; formulas say on what they differ from docs/memory.md, if they do."""
    zero_0: Keys = {"parallel.zero": 0}
    half: Keys = {"precision.param": "bfloat16"}

    def recompute(mode: str, saves: Callable[[Sizes], float], **more: object) -> Technique:
        keys = {f"activation_checkpoint.{key}": value for key, value in more.items()}
        return Technique(mode, {"activation_checkpoint.mode": mode, **keys}, saves, {})

    def zero(stage: int, saves: Callable[[Sizes], float]) -> Technique:
        return Technique(f"zero {stage}", {"parallel.zero": stage}, saves, zero_0, alone="")

    def tensor(s: Sizes) -> float:
        divided = 16 * s.P + 8 * s.T * s.V + s.per_token(s.A - 2 * s.D)
        return divided * (1 - 1 / s.n)

    def nvme(s: Sizes) -> float:
        return 8 * s.P - 32 * PIECE

    def half_param(s: Sizes) -> float:
        # The output, gathered, is a copy beside the float32 weights. Attention's H stay float32. In
        # float32 a norm keeps its input alone: here that is not halved, and as much is kept besides.
        layers = s.per_token(s.A - s.H - 1.5 * s.N) / 2
        last_norm = s.T * s.N / 2
        return layers - last_norm + 4 * s.T * s.V - s.M - 2 * s.U

    return [
        zero(1, lambda s: 8 * s.P - 12 * s.P / s.n),
        zero(2, lambda s: 12 * s.P - 16 * s.P / s.n),
        # And what stages 1 and 2 gather, but for the output, which is whole at the peak.
        zero(3, lambda s: 16 * s.P * (1 - 1 / s.n) - 4 * s.U),
        Technique(
            "zero3_reshard", {"parallel.zero3_reshard": 2}, lambda s: -4 * (s.P - s.U) / 2, {}, alone=""
        ),
        Technique(
            "parallel.offload", {"parallel.offload": "cpu"}, lambda s: 16 * s.P / s.n, {}, alone=""
        ),
        Technique("tp", {"parallel.tp": -1, "parallel.dp_shard": 1}, tensor, {}, alone="off"),
        Technique(
            "loss_chunk",
            {"train.loss_chunk": CHUNK},
            lambda s: 8 * s.T * s.V + s.M - 4 * s.U - 4 * max(CHUNK * s.V + s.T * s.D, s.U),
            {},
        ),
        recompute("full", lambda s: s.per_token(s.A - s.D)),
        Technique(
            "segments of 2",
            {"activation_checkpoint.mode": "full", "activation_checkpoint.segment": 2},
            lambda s: s.per_token(s.A - s.D / 2),
            {},
        ),
        recompute("every_k", lambda s: s.per_token(s.A - s.D) / 2, every=2),
        recompute("selective", lambda s: s.per_token(s.A - (5 * s.D + 2 * s.GK + 2 * s.F + s.H))),
        recompute("budget", lambda s: _budget(s, job), budget=BUDGET),
        Technique(
            "activation offload",
            {"activation_checkpoint.offload": "true"},
            lambda s: s.per_token(s.A),
            {},
        ),
        # On a GPU pieces come to the device in both, on a CPU in the second alone.
        Technique(
            "optimizer.offload cpu",
            {"optimizer.offload": "cpu"},
            lambda s: 8 * s.P if s.N else nvme(s),
            {},
        ),
        Technique("optimizer.offload nvme", {"optimizer.offload": "nvme"}, nvme, {}),
        Technique("bfloat16 param", half, half_param, {}),
        Technique("bfloat16 master", {**half, "precision.master": "bfloat16"}, lambda s: 4 * s.P, half),
        Technique(
            "bfloat16 optimizer_state", {"precision.optimizer_state": "bfloat16"}, lambda s: 4 * s.P, {}
        ),
    ]


def held(config: Config, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return tensors that keys keep in host memory or files between steps."""
    parameters = list(model.parameters())
    results: list[Tensor] = []
    if config.parallel.offload == "cpu":
        results += [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    if config.parallel.offload != "none" or config.optimizer.offload != "none":
        states = optimizer.state.values()
        results += [value for state in states for value in state.values() if value.ndim]
    return [local_tensor(t) for t in results]


def measure(job: Job, device: torch.device) -> int:
    """Bytes at the peak, of the rank with most; every rank calls it."""
    gc.collect()
    config = job.config
    seen, train = Allocations(device), config.train
    mesh = init_mesh(config.parallel, device.type)
    pieces = mock.patch.object(offload, "CHUNK", PIECE)
    with tempfile.TemporaryDirectory() as scratch, pieces, seen.watched():
        composition = build(job, mesh, device)
        model = composition.model
        optimizer = build_optimizer(composition, job, folder=Path(scratch))
        shape = 2 * train.micro_batch, train.seq_len, config.model.config.vocab_size
        # One document each: of several, attention in float32 would keep a mask.
        batch = {
            name: value.to(device)
            for name, value in random_batch(*shape, 0).items()
            if name in ("tokens", "targets")
        }
        forwards: list[int] = []

        def before_forward(*_: Any) -> None:
            forwards.append(1)
            if len(forwards) == 4:
                seen.begin(held(config, model, optimizer))

        model.register_forward_pre_hook(before_forward)
        options: Any = {"micro_batch": train.micro_batch, "loss_function": loss_function(config)}
        forward_backward(composition, batch, **options)
        optimizer.step()
        optimizer.zero_grad()
        forward_backward(composition, batch, **options)
    most = torch.tensor(seen.peak(), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def job_of(shape: Keys, keys: Keys, ranks: int) -> Job:
    """train.toml with the shape and the keys of a row."""
    more: Keys = {"train.micro_batch": 1, "train.global_batch": 2 * ranks}
    overrides = [(key, str(value)) for key, value in {**shape, **more, **keys}.items()]
    return rules.check(load(TRAIN, overrides), ranks)


def peaks(rank: int, ranks: int, port: int, shape: Keys, runs: list[Keys], out: str) -> None:
    """One rank of several that measure ``runs`` one after another; the first writes them to ``out``."""
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=ranks)
    results = [measure(job_of(shape, keys, ranks), device) for keys in runs]
    if rank == 0:
        Path(out).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def in_ranks(ranks: int, shape: Keys, runs: list[Keys]) -> list[int]:
    """The peaks of ``runs``, in new processes."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        out = Path(folder) / "peaks.json"
        mp.spawn(peaks, (ranks, port, shape, runs, str(out)), nprocs=ranks)
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--small", action="store_true", help="a model for a test of this program")
    parser.add_argument("techniques", nargs="*", help="names of rows; all")
    arguments = parser.parse_args()
    shape = SHAPE | (SMALL if arguments.small else {})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    n = min(4, torch.cuda.device_count()) if device == "cuda" else 4
    job = job_of(shape, {}, 1)
    wanted = arguments.techniques or [row.name for row in techniques(job)]
    # With one GPU, those that need no other.
    rows = [t for t in techniques(job) if t.name in wanted and (n > 1 or t.alone == "off on")]
    runs: dict[int, list[Keys]] = {1: [], n: []}
    for row in rows:
        for which, keys in (("off", row.off), ("on", row.on)):
            of = runs[1 if which in row.alone.split() else n]
            of += [keys] if keys not in of else []
    results = {ranks: in_ranks(ranks, shape, of) for ranks, of in runs.items() if of}
    sizes, worst = Sizes.of(job, n, device), ("", 1.0)
    for row in rows:
        bytes_of = {}
        for which, keys in (("off", row.off), ("on", row.on)):
            ranks = 1 if which in row.alone.split() else n
            bytes_of[which] = results[ranks][runs[ranks].index(keys)]
        saved, formula = bytes_of["off"] - bytes_of["on"], round(row.saves(sizes))
        ratio = round(saved / formula, 3)
        worst = max(worst, (row.name, ratio), key=lambda pair: abs(pair[1] - 1))
        result = {
            "benchmark": "memory",
            "technique": row.name,
            "off_bytes": bytes_of["off"],
            "on_bytes": bytes_of["on"],
            "saved_bytes": saved,
            "formula_bytes": formula,
            "ratio": ratio,
        }
        print(json.dumps(result), flush=True)
    print(json.dumps({"benchmark": "memory", "worst": worst[0], "ratio": worst[1]}))


if __name__ == "__main__":
    main()
