"""The task of a run: its model's folder names one, or the model learns the next token of a text."""

from torch import Tensor

from compose.config.models import Sampler, Task, find_model
from compose.config.tables import Config
from compose.data.packing import random_batch
from compose.data.sources import Samples, open_samples
from compose.errors import ConfigError
from compose.ops.batch import count_targets
from compose.parallel.output import CrossEntropy


class LanguageModelling:
    """To predict the next token; the task of a model whose folder names no other."""

    sampler: Sampler | None = None

    def check(self, config: Config) -> list[str]:
        """Return nothing: the keys of train.toml are those of a language model."""
        return []

    def open(self, path: str, config: Config) -> Samples:
        """Open tokens; see ``compose.config.models.Task.open``."""
        seq_len = config.train.seq_len
        found = open_samples(path, config.data, seq_len, config.model.config.vocab_size)
        # Most often the first sample has a target.
        if not any(count_targets(found.read(i)["targets"]) for i in range(len(found))):
            raise ConfigError(
                f"{path} has nothing to learn: no token of its {len(found)} samples of train.seq_len"
                f" {seq_len} is a target"
            )
        return found

    def random_batch(self, config: Config, samples: int, seed: int) -> dict[str, Tensor]:
        """Return random documents; see ``compose.data.packing.random_batch``."""
        return random_batch(samples, config.train.seq_len, config.model.config.vocab_size, seed)

    def loss(self, config: Config) -> CrossEntropy:
        """Return the cross-entropy that ``train.loss_chunk`` and ``train.z_loss`` ask for."""
        return CrossEntropy(config.train.loss_chunk, config.train.z_loss)


def task_of(config: Config) -> Task:
    """Return what the model of ``config`` learns."""
    return find_model(config.model.name).task or LanguageModelling()
