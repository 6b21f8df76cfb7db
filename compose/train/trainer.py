"""The training loop: the same few lines for every model and every mesh."""

import math
import signal
from dataclasses import replace
from datetime import timedelta

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from compose.build import build_optimizer, fill_weights, loss_function, parallelize
from compose.checkpoint.checkpointer import Checkpointer, Progress
from compose.config.job import Job
from compose.data.datasets import OpenData, described, open_data, training_batches
from compose.memory.precision import first_scale
from compose.ops.dropout import DropoutKey
from compose.optim.lr_schedule import learning_rate, set_learning_rate
from compose.parallel.islands import current
from compose.parallel.mesh import batch_share
from compose.parallel.output import CrossEntropy
from compose.parallel.processes import TrainingError, set_timeout, start_timeout
from compose.parallel.stragglers import report_phase
from compose.train.folder import RunFolder
from compose.train.hooks import Hook, hooks_of
from compose.train.metrics import StepMetrics, device_peak, peak_memory
from compose.train.reading import Reading, StepClock, read_step
from compose.train.report import Report
from compose.train.signals import LAUNCHER_DIED, Signals
from compose.train.step import clip_grad_norm_, forward_backward, on_device
from compose.train.validation import Validation


class Trainer:
    """One run: it is whole once it is made, and :meth:`run` trains it.

    The model is cut, and filled from the newest whole checkpoint in ``run.dir`` or with first weights.
    """

    def __init__(
        self, job: Job, mesh: DeviceMesh, device: torch.device, data: OpenData | None = None
    ) -> None:
        """Prepare a run; a collective.

        Args:
            job: What to train.
            mesh: The mesh of ``compose.init_mesh``.
            device: This rank's device.
            data: The opened data of the job; None: it is opened here.

        Raises:
            ConfigError: The data, the checkpoint, the first weights or the folder cannot be used.
        """
        config, islands = job.config, current()
        self.job, self.config, self.mesh, self.device = job, config, mesh, device
        train, shape = config.train, config.model.config
        self.composition = parallelize(job, mesh, device)
        self.loss = loss_function(config)
        data = data or open_data(config)
        index, count = batch_share(mesh)
        share = islands.index * count + index, islands.count * count
        self.batches = training_batches(config, data, share, device)
        self.last_step = min(train.stop_after or train.steps, train.steps)
        self.validation = Validation(job, data.validation, device, self.last_step)
        self.step_tokens = train.global_batch * train.seq_len
        peak, devices = device_peak(device, config.precision), mesh.size() * islands.count
        # The tokens per second if every device ran at its peak.
        self.peak_rate = peak and peak * devices / shape.flops_per_token(train.seq_len)
        self.held = RunFolder(config.run.dir, saves=config.checkpoint.interval > 0)
        self.folder = self.held.path
        self.optimizer = build_optimizer(self.composition, job, folder=self.folder)
        self.hooks: list[Hook] = hooks_of(self)
        self.checkpointer = Checkpointer(
            config,
            self.composition,
            self.optimizer,
            self.folder,
            described(self.batches, config),
            self.hooks,
        )
        frozen = bool(config.model.lora.rank)
        if frozen:  # a checkpoint holds the adapters alone
            fill_weights(self.composition, job, device)
        found = self.checkpointer.resume() if config.checkpoint.resume == "auto" else None
        if found is None and not frozen:
            fill_weights(self.composition, job, device)
        self.skipped, self.clock, self.signals = 0, StepClock(), Signals(device)
        begun, scale = found or Progress(), first_scale(config.precision)
        self.progress = replace(begun, scale=scale and (begun.scale or scale))
        for hook in self.hooks:
            hook.start(self.progress.step)
        self.report = Report(config, self.held, self.batches, self.progress)
        self.report.begin(job, self.composition, found)

    def run(self) -> None:
        """Train to the end, or until a signal asks to stop; then finish the step and save.

        Raises TrainingError if a loss or gradient is not finite, before it reaches the weights, or if
        saving fails too often; and KeyboardInterrupt after Ctrl-C.
        """
        failed = True
        try:
            with self.signals:
                set_timeout(start_timeout(self.config.comm), but=self.checkpointer.group)
                stopped = self._train()
                # A signal at the end of the run waits for the last save too.
                self.checkpointer.wait()
                self.checkpointer.finished()
            failed = False
        except TrainingError:  # on every rank: the earlier save is whole, so it may be published
            self.checkpointer.wait()
            raise
        finally:
            for hook in self.hooks:
                hook.close(failed)
            self.report.close()
            self.held.release()
        if stopped:
            raise stopped

    def _train(self) -> BaseException | None:
        """Take the steps that are left; return what to raise if a signal has stopped the run."""
        comm, first = self.config.comm, self.progress.step + 1
        while (number := self.progress.step + 1) <= self.last_step:
            for hook in self.hooks:
                hook.before_step(number)
            metrics = self.step()
            for hook in self.hooks:
                hook.after_step(number)
            measured = self.validation.loss(self.composition, number)
            if number == first:
                set_timeout(timedelta(seconds=comm.timeout), but=self.checkpointer.group)
            self.report.write(replace(metrics, validation_loss=measured))
            code, failed = self.read.said
            if asked := self.signals.asked(number, code):
                return self._stop(asked)
            self._save(number, bool(failed))
        for hook in self.hooks:
            hook.finish()
        return None

    def _save(self, done: int, failed: bool) -> None:
        """Save the checkpoint that is due after ``done`` steps, unless saves have ``failed``."""
        every = self.config.checkpoint.interval
        if failed:
            raise TrainingError(
                f"step {done}: {self.config.checkpoint.fail_after} checkpoints could not be saved"
                " (checkpoint.fail_after)"
            )
        if every and (done % every == 0 or done == self.last_step):
            self.checkpointer.save(self.progress)

    def _stop(self, asked: signal.Signals) -> BaseException | None:
        """Save, and say how to resume; return KeyboardInterrupt after Ctrl-C.

        Return TrainingError if a torchrun has died, so that the others start their ranks again.
        """
        for hook in self.hooks:
            hook.finish()
        interrupted = asked == signal.SIGINT
        saved = ""
        if not interrupted or self.config.checkpoint.interval:
            self.checkpointer.save(self.progress, wait=True)
            report = self.checkpointer.finished()
            if report and not report.problem:
                saved = f"; saved: the same command with --run.dir={self.folder} goes on"
        names = {signal.SIGINT: "Ctrl-C", LAUNCHER_DIED: "the death of a torchrun"}
        said = f"stopped by {names.get(asked, asked.name)} after step {self.progress.step}{saved}"
        if asked == LAUNCHER_DIED:
            return TrainingError(said)
        self.report.say(said)
        return KeyboardInterrupt() if interrupted else None

    def step(self) -> StepMetrics:
        """Take the next optimizer step; except those of saving, metrics are equal on all ranks."""
        self.clock.begin()
        config, before, z_loss = self.config, self.progress, None
        step, train, islands = before.step, config.train, current()
        scale = before.scale.value if before.scale else 1.0
        report_phase(step + 1, "the data")
        with record_function("compose::data"):
            batch = on_device(self.batches.batch(before.samples), self.device)
        report_phase(step + 1, "forward and backward")
        loss = forward_backward(
            self.composition,
            batch,
            micro_batch=train.micro_batch,
            loss_function=self.loss,
            loss_scale=scale,
            dropout=DropoutKey(step, train.seed, islands.index * train.global_batch // islands.count),
        )
        with record_function("compose::optimizer"):
            norm = clip_grad_norm_(self.composition, train.max_norm, scale)
        if train.z_loss and isinstance(self.loss, CrossEntropy):
            z_loss = self.loss.mean_square(self.mesh)
        said = (self.signals.code, self.checkpointer.failed_too_often)
        self.read = read = read_step(loss, norm, z_loss, said)
        rate = self.step_tokens / self.clock.read()
        # What else is read is there too: nothing is waited for.
        routing = self.composition.routing()
        report_phase(step + 1, "the optimizer's part")
        finite = self._may_be_taken(step, read)
        for hook in self.hooks:
            hook.before_update(step + 1)
        lr = learning_rate(step, train.steps, config.optimizer)
        set_learning_rate(self.optimizer, lr)
        with record_function("compose::optimizer"):
            if finite:
                self.optimizer.step()
            self.optimizer.zero_grad()
        for hook in self.hooks:
            hook.after_update(step + 1)
        self.progress = Progress(
            step + 1,
            before.samples + train.global_batch,
            before.tokens + self.step_tokens,
            before.scale and before.scale.after(finite),
        )
        saved = self.checkpointer.finished()
        metrics = StepMetrics(
            step=self.progress.step,
            samples=self.progress.samples,
            tokens=self.progress.tokens,
            loss_scale=before.scale and before.scale.value,
            loss=_finite(read.loss),
            grad_norm=_finite(read.norm),
            z_loss=_finite(read.z_loss),
            skipped=self.skipped,
            lr=lr,
            tokens_per_second=rate,
            mfu=self.peak_rate and rate / self.peak_rate,
            memory=peak_memory(self.device),
            epochs=self.batches.epochs(self.progress.samples),
            more={
                "routing": routing,
                "checkpoint": saved.metrics() if saved else {},
                **{name: value for hook in self.hooks for name, value in hook.metrics().items()},
            },
        )
        self.clock.end()
        return metrics

    def _may_be_taken(self, step: int, read: Reading) -> bool:
        """Tell whether the step can be taken; raise TrainingError if not, unless it may be skipped."""
        scale = self.progress.scale
        for name, value in (("loss", read.loss), ("gradient norm", read.norm)):
            if math.isfinite(value):
                continue
            if scale and scale.may_overflow(read.loss):
                self.skipped += 1
                return False
            if self.config.train.skip_nonfinite:
                self.skipped += 1
                self.report.say(
                    f"step {step + 1}: the {name} is {value}; skipped, {self.skipped} in all"
                )
                return False
            raise TrainingError(
                f"step {step + 1}: the {name} is {value}; the weights are still those of step"
                f" {step} (a lower optimizer.lr or a longer optimizer.warmup may help)"
            )
        return True


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
