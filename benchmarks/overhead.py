"""Compare compose with a bare PyTorch loop on one process.

All train the same model from the same weights on the same batches with the same optimizer. They take
turns, a step each, first one ahead and then the other, so that a machine whose speed drifts slows all
alike. Ratios are medians over pairs of neighbouring steps.

    python benchmarks/overhead.py [--steps N]

prints two JSON lines. "overhead": tokens per second of the trainer over those of the bare loop.
"tp_dispatch": what DTensor costs where there is nothing to communicate, the time of the bare loop's
step with the plan's tensor-parallel styles applied over one rank, over its time without.

    torchrun --nproc-per-node 2 benchmarks/overhead.py [--steps N]

prints one, "tp": time of a step of compose's with tp over all ranks, over that of the bare loop on one
of them, with as many threads, while the others wait.

    [torchrun --nproc-per-node N] benchmarks/overhead.py --checks [--steps N] [--section.key=value ...]

prints a line for each check of [comm] against silent corruption: time of a step of the trainer's with
it, over that of its step without. Several ranks share weights by ZeRO-3, if no key says otherwise.
"""

import argparse
import copy
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from operator import truediv
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from compose import clip_grad_norm_, forward_backward, init_mesh
from compose.build import build, build_optimizer, fill_weights
from compose.cli.command_line import parse
from compose.composition import Composition
from compose.config.job import Job
from compose.config.models import find_model
from compose.config.tables import Config
from compose.data.datasets import open_data, training_batches
from compose.parallel.tensor_parallel import Replicated, apply_tensor_parallel
from compose.train.hooks import MessageCheck
from compose.train.processes import process_group
from compose.train.trainer import Trainer

WARM_UP = 1  # steps of each before any is timed
TRAIN_TOML = str(Path(__file__).parent.parent / "train.toml")


class BareLoop:
    """The loop that one would write by hand; it shares nothing with compose but model and data."""

    def __init__(self, config: Config, model: nn.Module, device: torch.device) -> None:
        self.device, self.model, train = device, model, config.train
        self.micro_batch, self.global_batch = train.micro_batch, train.global_batch
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.samples = 0
        self.batches = training_batches(config, open_data(config))

    def step(self) -> float:
        batch = self.batches.batch(self.samples)
        batch = {name: value.to(self.device) for name, value in batch.items()}
        self.samples += self.global_batch
        count = (batch["targets"] != -100).sum()
        total = torch.zeros((), device=self.device)
        for part in zip(*(value.split(self.micro_batch) for value in batch.values()), strict=True):
            micro = dict(zip(batch, part, strict=True))
            targets = micro.pop("targets")
            logits = self.model(**micro).flatten(0, 1).float()
            loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
            loss = (loss.to_local() if isinstance(loss, DTensor) else loss) / count
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total.item()


def bare_model(config: Config, weights: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """A model of its own that begins with ``weights``."""
    model = find_model(config.model.name).Model(config.model.config).to(device)
    model.load_state_dict(weights)
    return model


def styled_model(job: Job, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """The model under the plan's styles on the tp axis, also where that has one rank; nothing else."""
    model = copy.deepcopy(job.model)
    replicated = [(name, Replicated()) for name in job.resolved.replicate]
    apply_tensor_parallel(model, job.resolved.tensor + replicated, mesh["tp"])
    # Weights are drawn by name, and this copy has the names of the job's.
    fill_weights(Composition(model, mesh), job, device)
    return model


def in_turn(works: Mapping[str, Callable[[], object]], steps: int) -> dict[str, list[float]]:
    """Seconds of each step of each of ``works``; ranks wait for each other around steps."""
    spent: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(-WARM_UP, steps):
        for name, work in sorted(works.items(), reverse=turn % 2 == 1):
            dist.barrier()
            start = time.perf_counter()
            work()
            dist.barrier()
            if turn >= 0:
                spent[name].append(time.perf_counter() - start)
    return spent


def ratio(above: list[float], below: list[float]) -> float:
    return round(statistics.median(map(truediv, above, below)), 4)


def show(benchmark: str, device: torch.device, **result: object) -> None:
    made_by = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps({"benchmark": benchmark, **result, **made_by}), flush=True)


def of_one_process(job: Job, mesh: DeviceMesh, device: torch.device, steps: int) -> None:
    config, trainer = job.config, Trainer(job, mesh, device)
    weights = trainer.composition.model.state_dict()
    bare = BareLoop(config, bare_model(config, weights, device), device)
    spent = in_turn({"trainer": trainer.step, "bare": bare.step}, steps)
    tokens = config.train.global_batch * config.train.seq_len
    show(
        "overhead",
        device,
        ratio=ratio(spent["bare"], spent["trainer"]),
        tokens_per_second=round(tokens / statistics.mean(spent["trainer"])),
        bare_tokens_per_second=round(tokens / statistics.mean(spent["bare"])),
    )
    styled = BareLoop(config, styled_model(job, mesh, device), device)
    with loss_parallel():
        spent = in_turn({"styled": styled.step, "bare": bare.step}, steps)
    show("tp_dispatch", device, time=ratio(spent["styled"], spent["bare"]))


def of_several(job: Job, mesh: DeviceMesh, device: torch.device, steps: int) -> None:
    config, composition = job.config, build(job, mesh, device)
    optimizer = build_optimizer(composition, job)
    batches, train = training_batches(config, open_data(config)), config.train
    samples = 0

    def step() -> None:
        nonlocal samples
        batch = {name: value.to(device) for name, value in batches.batch(samples).items()}
        samples += train.global_batch
        forward_backward(composition, batch, micro_batch=train.micro_batch).item()
        clip_grad_norm_(composition, train.max_norm).item()
        optimizer.step()
        optimizer.zero_grad()

    state = composition.model.state_dict()
    weights = {name: value.full_tensor() for name, value in state.items()}
    bare = BareLoop(config, bare_model(config, weights, device), device)
    first = dist.get_rank() == 0
    spent = in_turn({"tp": step, "bare": bare.step if first else lambda: None}, steps)
    if first:
        show("tp", device, tp=mesh["tp"].size(), time=ratio(spent["tp"], spent["bare"]))


CHECKS = ("check_state", "check_messages", "check_every")


def of_checks(folder: str, keys: list[str], steps: int) -> None:
    """Each check's trainer and one without take turns."""
    several = "RANK" in os.environ
    common = [TRAIN_TOML, "--metrics.tensorboard=false", *(["--parallel.zero=3"] if several else [])]
    checks = [name for name in CHECKS if several or name != "check_messages"]

    def job_of(name: str) -> Job:
        value = "1" if name == "check_every" else "true"
        own = [f"--run.dir={folder}/{name}", *([f"--comm.{name}={value}"] if name in checks else [])]
        return parse([*common, *own, *keys], program="overhead.py", trains=True).job

    jobs = {name: job_of(name) for name in ("plain", *checks)}
    with process_group(jobs["plain"].config) as device:
        mesh = init_mesh(jobs["plain"].degrees, device.type)
        trainers = {name: Trainer(job, mesh, device) for name, job in jobs.items()}
        messages = [
            hook.messages
            for t in trainers.values()
            for hook in t.hooks
            if isinstance(hook, MessageCheck)
        ]

        def step(name: str) -> None:
            for each in messages:
                each.paused = name != "check_messages"
            trainer = trainers[name]
            for hook in trainer.hooks:
                hook.before_step(trainer.progress.step + 1)
            trainer.step()

        spent = in_turn({name: partial(step, name) for name in jobs}, steps)
        parameters = sum(p.numel() for p in jobs["plain"].model.parameters())
        if dist.get_rank() == 0:
            for name in checks:
                show(
                    name,
                    device,
                    time=ratio(spent[name], spent["plain"]),
                    seconds=round(statistics.median(spent["plain"]), 4),
                    parameters=parameters,
                    ranks=mesh.size(),
                )
        for each in messages:
            each.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=96, help="steps of each loop")
    parser.add_argument("--checks", action="store_true", help="what checks of [comm] cost")
    given, keys = parser.parse_known_args()
    steps = given.steps
    if given.checks:
        # All ranks have one folder.
        folder = f"{tempfile.gettempdir()}/overhead-{os.getppid()}"
        try:
            of_checks(folder, keys, steps)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    several = "RANK" in os.environ
    with tempfile.TemporaryDirectory() as folder:
        keys += ["--metrics.tensorboard=false"]
        keys += ["--parallel.tp=-1", "--parallel.dp_shard=1"] if several else [f"--run.dir={folder}"]
        job = parse([TRAIN_TOML, *keys], program="overhead.py", trains=not several).job
        with process_group(job.config) as device:
            mesh = init_mesh(job.degrees, device.type)
            (of_several if several else of_one_process)(job, mesh, device, steps)


if __name__ == "__main__":
    main()
