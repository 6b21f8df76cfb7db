"""The training loop: the same few lines for every model and every mesh."""

import gc
import math
import signal
import time
from datetime import datetime
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compose.config import Config
from compose.data import Batches, open_source
from compose.mesh import batch_share
from compose.metrics import MetricsWriter, StepMetrics, device_peak, peak_memory
from compose.optimizer import build_optimizer, learning_rate, set_learning_rate
from compose.registry import build_model
from compose.routing import routing_metrics
from compose.runtime import TrainingError
from compose.step import clip_grad_norm_, forward_backward
from compose.toml import dump

_COLLECT_EVERY = 100  # steps between collections of Python's garbage


class Trainer:
    """Trains ``model``, already cut over ``mesh`` and filled, as ``config`` says."""

    def __init__(
        self, config: Config, mesh: DeviceMesh, model: nn.Module, device: torch.device
    ) -> None:
        self.config, self.mesh, self.model, self.device = config, mesh, model, device
        train, shape = config.train, config.model.config
        self.optimizer = build_optimizer(model.parameters(), config.optimizer)
        self.batches = Batches(
            open_source(config.data),
            seq_len=train.seq_len,
            global_batch=train.global_batch,
            vocab_size=shape.vocab_size,
            seed=train.seed,
            share=batch_share(mesh),
        )
        self.last_step = min(train.stop_after or train.steps, train.steps)
        self.step_tokens = train.global_batch * train.seq_len
        peak = device_peak(device, config.precision)
        # Tokens per second at which every device would run at its peak.
        self.peak_rate = peak and peak * mesh.size() / shape.flops_per_token(train.seq_len)
        self.writer: MetricsWriter | None = None
        self.interrupted = 0.0  # when Ctrl-C was pressed, by time.monotonic()
        if dist.get_rank() == 0:
            folder = _new_folder(config.run.dir)
            with (folder / "config.toml").open("x", encoding="utf-8") as file:
                file.write(dump(config))
            self.writer = MetricsWriter(folder, config.metrics.tensorboard)
            whole, _ = build_model(config)  # of which this rank may hold a part
            count = sum(p.numel() for p in whole.parameters())
            print(f"{folder}: {count:,} parameters", flush=True)

    def run(self) -> None:
        """Train to the end, or to Ctrl-C, after which the step at hand is finished first.

        Raises TrainingError where a loss or gradient is not finite, before it reaches the weights.
        """
        gc.collect()
        gc.disable()  # or ranks stop at different moments, and each waits for all
        previous = signal.signal(signal.SIGINT, self._interrupt)
        try:
            for step in range(self.last_step):
                metrics = self.step(step)
                if self.writer:
                    self._write(self.writer, metrics)
                if self._anyone_interrupted():
                    self._say(f"stopped by Ctrl-C after step {step + 1}")
                    raise KeyboardInterrupt
                if (step + 1) % _COLLECT_EVERY == 0:
                    gc.collect()
        finally:
            signal.signal(signal.SIGINT, previous)
            gc.enable()
            if self.writer:
                self.writer.close()

    def step(self, step: int) -> StepMetrics:
        """One optimizer step, ``step`` counted from 0; the same metrics on every rank."""
        config, start = self.config, time.perf_counter()
        train = config.train
        batch = {k: v.to(self.device) for k, v in self.batches.batch(step).items()}
        loss = forward_backward(
            self.model,
            batch,
            self.mesh,
            micro_batch=train.micro_batch,
        ).item()
        norm = clip_grad_norm_(self.model.parameters(), train.max_norm, self.mesh).item()
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise TrainingError(
                    f"step {step + 1}: the {name} is {value}; the weights are still those of step"
                    f" {step} (a lower optimizer.lr or a longer optimizer.warmup may help)"
                )
        lr = learning_rate(step, train.steps, config.optimizer)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        rate = self.step_tokens / (time.perf_counter() - start)
        return StepMetrics(
            step=step + 1,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            tokens=(step + 1) * self.step_tokens,
            samples=(step + 1) * train.global_batch,
            tokens_per_second=rate,
            mfu=self.peak_rate and rate / self.peak_rate,
            memory=peak_memory(self.device),
            routing=routing_metrics(self.model, self.mesh),
        )

    def _write(self, writer: MetricsWriter, metrics: StepMetrics) -> None:
        writer.write(metrics)
        every, step = self.config.metrics.console_every, metrics.step
        if step == 1 or step == self.last_step or step % every == 0:
            left = (self.last_step - step) * self.step_tokens / metrics.tokens_per_second
            print(metrics.console(self.config.train.steps, left), flush=True)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        # A terminal and torchrun both pass one Ctrl-C on: what follows at once is the same one.
        now = time.monotonic()
        if self.interrupted and now > self.interrupted + 2:
            raise KeyboardInterrupt
        self.interrupted = self.interrupted or now

    def _anyone_interrupted(self) -> bool:
        """Whether any rank was: all must leave after the same step."""
        flag = torch.tensor(self.interrupted > 0, dtype=torch.int32, device=self.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(flag)
        return bool(flag.item())

    def _say(self, text: str) -> None:
        if self.writer:
            print(text, flush=True)


def _new_folder(name: str) -> Path:
    """``run.dir``, or a new folder named by the time, which another run may have taken already."""
    if name:
        Path(name).mkdir(parents=True, exist_ok=True)
        return Path(name)
    while True:
        folder = Path(f"runs/{datetime.now():%Y%m%d-%H%M%S}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            time.sleep(0.1)
        else:
            return folder
