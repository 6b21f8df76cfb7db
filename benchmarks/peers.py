"""A step of compose's over that of the shortest PyTorch that one would write for the same mathematics.

    torchrun --nproc-per-node 2 -m benchmarks.peers [--steps N] [--axes dp tp] [--lengths 256]

prints a JSON line for each axis and length. Peers: DistributedDataParallel; column and row parallel
layers with all-reduce; 1F1B by send and recv; ring attention on the kernel of SDPA.

    python -m benchmarks.peers [--steps N]

prints for one process: transformers' Trainer over a step of compose's, and what documents cost.

All have weights of the same shapes (12 million parameters), the same batch, optimizer and clipping, and
take turns, a step each. Ratios are medians over pairs of neighbouring steps; above 1 compose is faster.
"documents" is a step with several documents in a sample over one without.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from operator import truediv
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peer_ring import RingCore
from compose import Options, Parallel, apply, clip_grad_norm_, forward_backward, init_mesh, init_weights
from compose.composition import Composition
from compose.data.samples import random_batch
from models.llama import Config, Model, plan

SHAPE = Config(vocab_size=2048, dim=384, n_layers=6, n_heads=6, n_kv_heads=6, hidden_dim=1024)
SAMPLES = {256: (16, 4), 2048: (4, 1)}  # samples of a step, and of a micro-batch, by length
WARM_UP = 3  # memory that the first steps take is used again
Step = Callable[[], object]
Batch = dict[str, Tensor]


class SdpaCore(nn.Module):
    """Causal attention by PyTorch's function."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Copy(torch.autograd.Function):
    """The input of column parallel layers: its gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].contiguous()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    """The output of row parallel layers: it is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def copied(x: Tensor, ranks: int) -> Tensor:
    return Copy.apply(x) if ranks > 1 else x


def reduced(x: Tensor, ranks: int) -> Tensor:
    return Reduce.apply(x) if ranks > 1 else x


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of the pairs (i, i + K / 2)."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


class PeerBlock(nn.Module):
    """A layer, or with ``ranks`` the part of its heads and of its inner width that a rank has."""

    def __init__(self, core: Callable[[], nn.Module], ranks: int) -> None:
        super().__init__()
        c = SHAPE
        part, inner = c.dim // ranks, c.hidden_dim // ranks
        self.norms = nn.ModuleList(nn.RMSNorm(c.dim, eps=c.norm_eps) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(c.dim, part, bias=False) for _ in range(3))
        self.wo = nn.Linear(part, c.dim, bias=False)
        self.w1, self.w3 = (nn.Linear(c.dim, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, c.dim, bias=False)
        self.core, self.ranks = core(), ranks

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        y = copied(self.norms[0](x), self.ranks)
        q, k, v = (w(y).unflatten(-1, (-1, SHAPE.head_width)) for w in self.qkv)
        y = self.core(rotated(q, cosine, sine), rotated(k, cosine, sine), v).flatten(2)
        x = x + reduced(self.wo(y), self.ranks)
        y = copied(self.norms[1](x), self.ranks)
        return x + reduced(self.w2(F.silu(self.w1(y)) * self.w3(y)), self.ranks)


class PeerModel(nn.Module):
    """A plain model of the same shape; with ``ranks`` its ends are whole on each."""

    def __init__(self, core: Callable[[], nn.Module] = SdpaCore, ranks: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(SHAPE.vocab_size, SHAPE.dim)
        self.layers = nn.ModuleList(PeerBlock(core, ranks) for _ in range(SHAPE.n_layers))
        self.norm = nn.RMSNorm(SHAPE.dim, eps=SHAPE.norm_eps)
        self.output = nn.Linear(SHAPE.dim, SHAPE.vocab_size, bias=False)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        x, angles = self.embed(tokens), angles_of(tokens.shape[1], start)
        for layer in self.layers:
            x = layer(x, *angles)
        return self.output(self.norm(x))


def angles_of(length: int, start: int = 0) -> tuple[Tensor, Tensor]:
    """Cosine and sine (L, 1, K) of the positions from ``start``."""
    frequency = SHAPE.rope_theta ** -(torch.arange(0, SHAPE.head_width, 2) / SHAPE.head_width)
    angles = (torch.arange(start, start + length)[:, None, None] * frequency).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


def loss_of(logits: Tensor, targets: Tensor, count: int) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)


def loop(model: nn.Module, batch: Batch, size: int, **inputs: int) -> Step:
    """The step of a hand-written loop with accumulation; replicas sum their gradients once."""
    optimizer = adamw(model)
    count = batch["targets"].numel() * dist.get_world_size() if dist.is_initialized() else 1
    replicas = model if isinstance(model, DistributedDataParallel) else None

    def step() -> None:
        parts = list(zip(batch["tokens"].split(size), batch["targets"].split(size), strict=True))
        for i, (tokens, targets) in enumerate(parts):
            if replicas:
                replicas.require_backward_grad_sync = i == len(parts) - 1
            loss_of(model(tokens, **inputs), targets, count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def composed(parallel: Parallel, batch: Mapping[str, Tensor], size: int) -> Step:
    """The step of compose's."""
    mesh = init_mesh(parallel)
    with torch.device("meta"):
        model = Model(SHAPE)
    composition: Composition = apply(model, plan(SHAPE, parallel), mesh, Options(parallel))
    init_weights(composition, model.init_parameter, 0, torch.device("cpu"))
    optimizer = adamw(composition.model)

    def step() -> None:
        forward_backward(composition, batch, micro_batch=size)
        clip_grad_norm_(composition, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def made(length: int, share: int = 1, documents: bool = False) -> tuple[Batch, int]:
    """This rank's batch, one of ``share`` parts, and the samples of a micro-batch."""
    samples, size = SAMPLES[length]
    batch = random_batch(samples // share, length, SHAPE.vocab_size, seed=0)
    batch["targets"] = batch["tokens"].roll(-1, 1)
    kept = ("tokens", "targets", "positions", "document_ids") if documents else ("tokens", "targets")
    return {name: batch[name] for name in kept}, size


def dp(length: int) -> tuple[Step, Step]:
    batch, size = made(length, share=2)
    ours = composed(Parallel(dp_replicate=2, zero=0), batch, size)
    return ours, loop(DistributedDataParallel(PeerModel()), batch, size)


def tp(length: int) -> tuple[Step, Step]:
    return against_all_reduce(length, sequence=False)


def tp_sequence(length: int) -> tuple[Step, Step]:
    """The residual stream is cut along L, which the peer's is not."""
    return against_all_reduce(length, sequence=True)


def against_all_reduce(length: int, sequence: bool) -> tuple[Step, Step]:
    batch, size = made(length)
    ours = composed(Parallel(tp=2, dp_shard=1, sequence=sequence), batch, size)
    # The hand-written clipping takes each rank's own norm: one message less than a right one has.
    return ours, loop(PeerModel(ranks=2), batch, size)


def pp(length: int) -> tuple[Step, Step]:
    batch, size = made(length)
    ours = composed(Parallel(pp=2, dp_shard=1, pp_schedule="1F1B", pp_layers=(3, 3)), batch, size)
    return ours, one_f_one_b(batch, size, length)


def one_f_one_b(batch: Batch, size: int, length: int) -> Step:
    """Two stages of half the layers each; the first is one forward ahead."""
    rank, model = dist.get_rank(), PeerModel()
    half = model.layers[3 * rank : 3 * rank + 3]
    ends: list[nn.Module] = [model.norm, model.output] if rank else [model.embed]
    optimizer = adamw(nn.ModuleList([*half, *ends]))
    tokens, targets = batch["tokens"].split(size), batch["targets"].split(size)
    count = batch["targets"].numel()
    angles = angles_of(length)

    def forward(i: int) -> tuple[Tensor, Tensor]:
        if rank:
            x = torch.empty(size, length, SHAPE.dim)
            dist.recv(x, 0)
            x.requires_grad_()
        else:
            x = model.embed(tokens[i])
        y = x
        for layer in half:
            y = layer(y, *angles)
        if rank:
            return x, loss_of(model.output(model.norm(y)), targets[i], count)
        sent.append(dist.isend(y.detach(), 1))
        return x, y

    def backward(x: Tensor, y: Tensor) -> None:
        if rank:
            y.backward()
            assert x.grad is not None
            sent.append(dist.isend(x.grad, 0))
        else:
            grad = torch.empty_like(y)
            dist.recv(grad, 1)
            y.backward(grad)

    sent: list[Any] = []

    def step() -> None:
        waiting = []
        for i in range(len(tokens)):
            waiting.append(forward(i))
            if rank or i:
                backward(*waiting.pop(0))
        for x, y in waiting:
            backward(x, y)
        for work in sent:
            work.wait()
        sent.clear()
        nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def cp(length: int) -> tuple[Step, Step]:
    batch, size = made(length)
    ours = composed(Parallel(cp=2, dp_shard=1, zero=0), batch, size)
    here = {name: value.chunk(2, 1)[dist.get_rank()].contiguous() for name, value in batch.items()}
    model = DistributedDataParallel(PeerModel(RingCore))
    return ours, loop(model, here, size, start=length // 2 * dist.get_rank())


AXES = {"dp": dp, "tp": tp, "tp_sequence": tp_sequence, "pp": pp, "cp": cp}


def against_trainer(length: int, steps: int) -> Iterator[dict[str, object]]:
    """Compose's step within the Trainer's, after each of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    batch, size = made(length)
    works = {"plain": composed(Parallel(dp_shard=1), batch, size)}
    with_documents, _ = made(length, documents=True)
    works["documents"] = composed(Parallel(dp_shard=1), with_documents, size)
    spent: dict[str, list[float]] = {name: [] for name in ("trainer", *works)}

    class Turns(TrainerCallback):
        start = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            spent["trainer"].append(time.perf_counter() - self.start)
            for name, work in works.items():
                start = time.perf_counter()
                work()
                spent[name].append(time.perf_counter() - start)

    samples = len(batch["tokens"])
    config = LlamaConfig(
        vocab_size=SHAPE.vocab_size,
        hidden_size=SHAPE.dim,
        num_hidden_layers=SHAPE.n_layers,
        num_attention_heads=SHAPE.n_heads,
        num_key_value_heads=SHAPE.n_kv_heads,
        intermediate_size=SHAPE.hidden_dim,
        max_position_embeddings=length,
        use_cache=False,
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )
    rows = [{"input_ids": row, "labels": row} for row in batch["tokens"]] * (steps + WARM_UP)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=samples // size,
            max_steps=steps + WARM_UP,
            optim="adamw_torch_fused",
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        model = LlamaForCausalLM(config)
        Trainer(model, arguments, train_dataset=rows, callbacks=[Turns()]).train()  # type: ignore[arg-type]
    timed = {name: took[WARM_UP:] for name, took in spent.items()}
    yield {"axis": "one process", "ratio": ratio(timed["trainer"], timed["plain"])}
    yield {"axis": "documents", "ratio": ratio(timed["documents"], timed["plain"])}


def ratio(above: list[float], below: list[float]) -> float:
    return round(statistics.median(map(truediv, above, below)), 3)


def pairs(ours: Step, peer: Step, steps: int) -> float:
    """The peer's time over ours."""
    spent: dict[str, list[float]] = {"ours": [], "peer": []}
    works = {"ours": ours, "peer": peer}
    for turn in range(-WARM_UP, steps):
        for name in sorted(works, reverse=turn % 2 == 1):
            dist.barrier()
            start = time.perf_counter()
            works[name]()
            dist.barrier()
            if turn >= 0:
                spent[name].append(time.perf_counter() - start)
    return ratio(spent["peer"], spent["ours"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--axes", nargs="+", default=list(AXES))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(SAMPLES))
    options = parser.parse_args()
    several = "RANK" in os.environ
    made_by = {"machine": platform.machine(), "torch": torch.__version__}

    def show(result: dict[str, object], length: int) -> None:
        line = {"benchmark": "peers", **result, "length": length, "threads": torch.get_num_threads()}
        if dist.get_rank() == 0:
            print(json.dumps({**line, **made_by}), flush=True)

    if not several:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    for length in options.lengths:
        if not several:
            for result in against_trainer(length, options.steps):
                show(result, length)
            continue
        for axis in options.axes:
            ours, peer = AXES[axis](length)
            show({"axis": axis, "ratio": pairs(ours, peer, options.steps)}, length)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
