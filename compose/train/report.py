"""What a run writes and prints: on the first rank of each island, and in the name of the job on one."""

import torch.distributed as dist

from compose.checkpoint.checkpointer import Progress
from compose.composition import Composition
from compose.config.job import Job
from compose.config.tables import Config
from compose.config.toml import dump
from compose.data.batches import Batches
from compose.data.datasets import keep_tokenizer
from compose.data.samples import Conversations
from compose.data.tokenizer import TOKENIZER
from compose.errors import ConfigError, write_whole
from compose.optim.lr_schedule import short_of_warmup
from compose.parallel.islands import speaks
from compose.parallel.mesh import crosses_nodes
from compose.train.folder import RunFolder
from compose.train.metrics import MetricsWriter, StepMetrics


class Report:
    """The files and the console of a run; other ranks' reports do nothing."""

    def __init__(self, config: Config, held: RunFolder, batches: Batches, progress: Progress) -> None:
        """Open the files.

        Raises:
            ConfigError: A file cannot be written.
        """
        self.config, self.folder, train = config, held.path, config.train
        self.last_step = min(train.stop_after or train.steps, train.steps)
        self.sets = batches.sets
        self.writer: MetricsWriter | None = None
        if dist.get_rank() != 0:
            return
        try:
            write_whole(self.folder / "config.toml", dump(config))
        except OSError as error:
            reason = f"config.toml: {error.strerror}"
            raise ConfigError(f"run.dir: cannot write to {self.folder}: {reason}") from None
        keep_tokenizer(config, batches, self.folder / TOKENIZER)
        self.writer = MetricsWriter(self.folder, config.metrics.tensorboard, progress.step)

    def begin(self, job: Job, composition: Composition, resumed: Progress | None) -> None:
        """Say what is run.

        Args:
            job: The job.
            composition: Its model, composed.
            resumed: The progress of the checkpoint that it goes on from, if any.
        """
        train = self.config.train
        if resumed and resumed.step >= self.last_step:
            key = "stop_after" if self.last_step == train.stop_after else "steps"
            self.say(
                f"{self.folder}: {resumed.step} steps are done, and train.{key} ="
                f" {self.last_step}: nothing is left to train"
            )
        for each in self.sets if speaks() else ():
            if isinstance(each, Conversations):
                self.say(f"{each.name}:\n{each.table()}")
        count = sum(p.numel() for p in job.model.parameters())
        self.say(f"{self.folder}: {count:,} parameters")
        if job.islands > 1:
            self.say(f"{job.islands} islands of {job.world_size} ranks, which train alone")
        if composition.float8.recipe != "off":
            self.say(str(composition.float8))
        if short := short_of_warmup(train.steps, self.config.optimizer):
            self.say(short)
        slow = self.config.precision.param == "float32" and self.config.compile.mode == "off"
        if slow and composition.mesh.device_type == "cuda":
            self.say(
                'this GPU is faster with precision.param = "bfloat16" and compile.mode = "block"'
                " (recipes/llama_one_gpu.toml)"
            )
        if crossing := crosses_nodes(job.degrees):
            self.say(f"{crossing}, whose links are slow; docs/planning.md")

    def write(self, metrics: StepMetrics) -> None:
        """Write a step, and print it if it is one of those that are printed."""
        if not self.writer:
            return
        self.writer.write(metrics)
        every, step = self.config.metrics.console_every, metrics.step
        if step in (1, self.last_step) or step % every == 0 or metrics.validation_loss is not None:
            tokens = self.config.train.global_batch * self.config.train.seq_len
            left = (self.last_step - step) * tokens / metrics.tokens_per_second
            self.say(metrics.console(self.config.train.steps, left))

    def say(self, text: str) -> None:
        """Print a line, once for the job."""
        if speaks():
            print(text, flush=True)

    def close(self) -> None:
        """Close the files."""
        if self.writer:
            self.writer.close()
