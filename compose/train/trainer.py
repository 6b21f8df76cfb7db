"""The training loop: the same few lines for every model and every mesh."""

import shlex
import signal
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from compose.build import build_optimizer, fill_weights, loss_function, parallelize
from compose.checkpoint.checkpointer import Checkpointer
from compose.checkpoint.store import Progress
from compose.config.job import Job
from compose.data.datasets import OpenData, described, open_data, training_batches, with_steps
from compose.memory.precision import first_scale
from compose.ops.dropout import DropoutKey
from compose.optim.lr_schedule import learning_rate, set_learning_rate
from compose.parallel.mesh import Share, batch_share
from compose.train.evaluate import Validation
from compose.train.heartbeat import report_phase
from compose.train.hooks import Hook, hooks_of
from compose.train.metrics import StepMetrics, device_peak, peak_memory
from compose.train.processes import LAUNCHER_DIED, Signals, TrainingError, name_of, set_timeout
from compose.train.readings import Reading, Readings, StepClock
from compose.train.run_folder import RunFolder, RunReport
from compose.train.step import clip_grad_norm_, forward_backward, on_device
from compose.train.workers import Worker, WorkerCheckpoints, this_worker


class Trainer:
    """One run: it is whole once it is made, and :meth:`run` trains it.

    The model is cut, and filled from the newest whole checkpoint in ``run.dir`` or with first weights.
    """

    def __init__(
        self, job: Job, mesh: DeviceMesh, device: torch.device, data: OpenData | None = None
    ) -> None:
        """Prepare a run; a collective.

        The job is of one DiLoCo worker; ``data`` are opened here if they are not given. Raises
        ConfigError if the data, the checkpoint, the first weights or the folder cannot be used.
        """
        data = data or open_data(job.config)
        epochs, job = job.config.train.epochs, replace(job, config=with_steps(job.config, data))
        config = job.config
        self.job, self.config, self.mesh, self.device = job, config, mesh, device
        self.worker = worker = this_worker() if job.islands > 1 else Worker()
        train, run, shape = config.train, config.run, config.model.config
        self.composition = parallelize(job, mesh, device)
        self.loss = loss_function(config)
        index, count = batch_share(mesh)
        share = worker.index * count + index, worker.count * count
        self.batches = training_batches(config, data, share, device)
        self.share: Share | None = None
        """This rank's part of the global batch, if it need not be equal to the others'."""
        if job.shares:
            self.deal(config.parallel.data_speeds)
        self.validation = Validation(job, data.validation, device, self.loss)
        self.step_tokens = train.global_batch * train.seq_len
        peak, devices = device_peak(device, config.precision), mesh.size() * worker.count
        # The tokens per second if every device ran at its peak.
        self.peak_rate = peak and peak * devices / shape.flops_per_token(train.seq_len)
        self.run_folder = RunFolder(run.dir, config.checkpoint.interval > 0, worker, run.staging)
        self.folder, part = self.run_folder.path, f"island-{worker.index}" if worker.count > 1 else ""
        self.optimizer = build_optimizer(self.composition, job, folder=self.folder, part=part)
        self.hooks: list[Hook] = hooks_of(self)
        self.checkpointer = Checkpointer(
            config,
            self.composition,
            self.optimizer,
            self.folder,
            described(self.batches, config, data.validation),
            self.hooks,
            WorkerCheckpoints(worker),
            self.run_folder.uploads,
            self.run_folder.copies(job, self.composition),
        )
        frozen = bool(config.model.lora.rank)
        if frozen:  # a checkpoint holds the adapters alone, and these whole
            fill_weights(self.composition, job, device, adapters=False)
        result = self.checkpointer.resume() if config.checkpoint.resume == "auto" else None
        if result is None:
            fill_weights(self.composition, job, device, base=not frozen)
        self.skipped, self.clock, self.signals = 0, StepClock(), Signals(device, worker)
        self.readings = Readings(self.composition)
        self.read: Reading | None = None
        self.flags = (0, 0, 0)  # the signal, failed saves and copies of all ranks, as read last
        begun, scale = result or Progress(0, 0, 0), first_scale(config.precision)
        self.progress = replace(begun, scale=scale and (begun.scale or scale))
        data.check_epochs(epochs, train, begun.step, begun.samples)
        for hook in self.hooks:
            hook.start(self.progress.step)
        self.report = RunReport(job, self.run_folder, self.batches, self.progress.step, worker)
        self.report.begin(job, self.composition, result)

    def deal(self, speeds: Sequence[float]) -> tuple[Share, ...]:
        """Deal each global batch from now on by the speeds of the data ranks; return their shares."""
        shares = self.job.dealt(speeds)
        self.share = shares[batch_share(self.mesh)[0]]
        self.batches.deal(range(self.share.rows.start, self.share.rows.stop))
        return shares

    def run(self) -> None:
        """Train to the end, or until a signal asks to stop; then finish the step and save.

        Raises TrainingError if a loss or gradient is not finite, before it reaches the weights, or if
        saving fails too often; and KeyboardInterrupt after Ctrl-C.
        """
        failed = True
        try:
            with self.signals:
                set_timeout(self.config.comm.first_step_timeout, but=self.checkpointer.groups)
                stopped = self._train()
                # A signal at the end of the run waits for the last save too.
                unsaved = self.checkpointer.end()
            failed = False
        except TrainingError:  # on every rank: the earlier save is whole, so it may be published
            self.checkpointer.wait()
            list(self.readings.rest())  # no rank leaves while others wait for its messages
            raise
        finally:
            for hook in self.hooks:
                hook.close(failed)
            self.report.close()
            unsent = self.run_folder.release()
        if lost := unsent or unsaved:
            raise TrainingError(lost)
        if stopped:
            raise stopped

    def _train(self) -> BaseException | None:
        """Take the steps that are left; return what to raise if a signal has stopped the run."""
        saving, last = self.config.checkpoint, self.config.train.last_step
        first, enough = self.progress.step + 1, self.validation.enough(self.progress.validations)
        if self.checkpointer.only_in_memory and self.checkpointer.due(self.progress, enough):
            self.checkpointer.save(self.progress)  # the run was killed before this save had ended
        while self.progress.step < last and not enough:
            number = self.progress.step + 1
            for hook in self.hooks:
                hook.before_step(number)
            metrics = self.step()
            for hook in self.hooks:
                hook.after_step(number)
            measured = self.validation.loss(self.composition, number)
            self.progress = self.progress.validated(measured)
            enough = self.validation.enough(self.progress.validations)
            if number == first:
                set_timeout(timedelta(seconds=self.config.comm.timeout), but=self.checkpointer.groups)
            more = {name: v for hook in self.hooks for name, v in hook.measure(number).items()}
            self.report.add(replace(metrics, validation_loss=measured, more={**metrics.more, **more}))
            if self.read:
                self.report.write(self.read)
            code, failed, copying = self.flags
            if asked := self.signals.asked(number, code):
                return self._stop(asked)
            if failed:
                raise TrainingError(f"step {number}: {self.checkpointer.failure(failed)}")
            if self.checkpointer.due(self.progress, enough):
                self._read_rest()
                self.checkpointer.save(self.progress)
            if saving.memory and number % saving.memory == 0:
                self.checkpointer.copy(self.progress, copying)
        self._read_rest()
        if enough:
            self.report.say(f"stopped after step {self.progress.step}: {enough}")
        for hook in self.hooks:
            hook.finish()
        return None

    def _stop(self, asked: signal.Signals) -> BaseException | None:
        """Save, and say how to resume; return KeyboardInterrupt after Ctrl-C.

        Return TrainingError if a torchrun has died, so that the others start their ranks again.
        """
        self._read_rest()
        for hook in self.hooks:
            hook.finish()
        saving, interrupted, saved = self.config.checkpoint, asked == signal.SIGINT, ""
        if not interrupted or saving.interval or saving.memory:
            self.checkpointer.save(self.progress, wait=True)
            if (report := self.checkpointer.finished()) and not report.problem:
                again = [f"--run.dir={self.run_folder.place}"]
                again += ["--checkpoint.resume=auto"] * (saving.resume == "none")
                saved = f"; saved: the same command with {shlex.join(again)} goes on"
        said = f"stopped by {name_of(asked)} after step {self.progress.step}{saved}"
        if asked == LAUNCHER_DIED:
            return TrainingError(said)
        self.report.say(said)
        return KeyboardInterrupt() if interrupted else None

    def _read_rest(self) -> None:
        """Read and write the steps that are not read, so that no checkpoint is of a step to refuse."""
        for reading in self.readings.rest():
            self.flags = reading.flags
            self._may_be_taken(self.report.unwritten[0].step - 1, reading)
            self.report.write(reading)

    def step(self) -> StepMetrics:
        """Take the next optimizer step, and return its metrics; numbers that are read later are None.

        Except for those of saving, the metrics are equal on all ranks.
        """
        self.clock.begin()
        config, before, worker = self.config, self.progress, self.worker
        step, train = before.step, config.train
        scale = before.scale.value if before.scale else 1.0
        loss = torch.zeros(())
        for ahead in self.composition.needed():
            report_phase(step + 1, "the data")
            with record_function("compose::data"):
                batch = self.batches.batch(before.samples + ahead * train.global_batch)
                batch = on_device(batch, self.device)
            report_phase(step + 1, "forward and backward")
            place = worker.index * train.global_batch // worker.count
            loss = forward_backward(
                self.composition,
                batch,
                micro_batch=self.share or train.micro_batch,
                loss_function=self.loss,
                loss_scale=scale,
                dropout=DropoutKey(step + ahead, train.seed, place),
            )
        with record_function("compose::optimizer"):
            norm = clip_grad_norm_(self.composition, train.max_norm, scale)
        for hook in self.hooks:
            hook.gradients_ready(step + 1)
        mean_square = getattr(self.loss, "mean_square", None)  # a model's own loss has none
        z_loss = mean_square(self.mesh) if train.z_loss and mean_square else None
        flags = (self.signals.code, self.checkpointer.failed, self.checkpointer.copying)
        self.read = read = self.readings.read(loss, norm, z_loss, flags)
        self.flags = read.flags if read else self.flags
        rate = self.step_tokens / self.clock.read()
        # The device has done all work before it, so nothing is waited for.
        routing = self.composition.routing()
        report_phase(step + 1, "the optimizer's part")
        finite = read is None or self._may_be_taken(step - self.composition.late, read)
        for hook in self.hooks:
            if read:
                hook.see(read, scale)
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
            before.scale and before.scale.after(finite, read.loss if read else 0.0),
            before.validations,
        )
        saved = self.checkpointer.finished()
        metrics = StepMetrics(
            step=self.progress.step,
            samples=self.progress.samples,
            tokens=self.progress.tokens,
            loss_scale=before.scale and before.scale.value,
            loss=None,
            grad_norm=None,
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
        return metrics.with_numbers(read) if read and not self.composition.late else metrics

    def _may_be_taken(self, step: int, read: Reading) -> bool:
        """Tell whether the step can be taken; raise TrainingError if not, unless it may be skipped."""
        scale = self.progress.scale
        if not read.problem:
            return True
        overflows = scale and scale.may_overflow(read.loss)
        if overflows or self.config.train.skip_nonfinite:
            self.skipped += 1
            if not overflows:
                text = f"step {step + 1}: {read.problem}; skipped, {self.skipped} in all"
                self.report.say(text, own=True)
            return False
        changed = "were changed by it, those of the last checkpoint were not"
        weights = changed if self.composition.late else f"are still those of step {step}"
        raise TrainingError(
            f"step {step + 1}: {read.problem}; the weights {weights} (a lower optimizer.lr or a longer"
            " optimizer.warmup may help)"
        )
