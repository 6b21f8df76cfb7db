"""The gradient noise scale: the batch size up to which a larger batch saves steps.

McCandlish et al. 2018, arXiv:1812.06162, appendix A.1. The gradient of B samples has the expected
squared norm |G|^2 + tr(S) / B, with G the true gradient and S the covariance of one sample's. Two sizes
of batch give both, without bias:

    |G|^2 = (B1 |G1|^2 - B0 |G0|^2) / (B1 - B0)
    tr(S) = (|G0|^2 - |G1|^2) / (1 / B0 - 1 / B1)

G1 is the gradient of the global batch. G0 is that of a step's first micro-batch on all ranks: it is
summed over ranks at once, and not at the end of the step. So the result is the same on every mesh that
has as many micro-batches. Both estimates are noisy, and a ratio of noisy numbers is biased. So each has
an exponential moving average, and the noise scale is tr(S) / |G|^2 of these.
"""

import math
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compose.composition import Composition
from compose.parallel.mesh import AXES, sum_over
from compose.train.hooks import Hook
from compose.train.readings import Reading
from compose.train.step import squared_norm_share

if TYPE_CHECKING:
    from compose.train.trainer import Trainer

DECAY = 0.99
"""Of the moving averages: they look back over some 100 steps."""


@dataclass
class NoiseAverages:
    """The moving averages of both estimates."""

    square: float = 0.0
    """|G|^2, times ``weight``."""
    variance: float = 0.0
    """tr(S), times ``weight``."""
    weight: float = 0.0
    """The weight of all steps so far, which nears 1."""

    def add(self, small: float, large: float, few: int, many: int) -> None:
        """Take the squared norms of gradients of ``few`` and of ``many`` samples."""
        square = (many * large - few * small) / (many - few)
        variance = (small - large) / (1 / few - 1 / many)
        self.square = DECAY * self.square + (1 - DECAY) * square
        self.variance = DECAY * self.variance + (1 - DECAY) * variance
        self.weight = DECAY * self.weight + (1 - DECAY)

    def report(self, seq_len: int) -> dict[str, float] | None:
        """Return what metrics.jsonl gets; None as long as an average is not positive."""
        if self.square <= 0 or self.variance <= 0:
            return None
        samples = self.variance / self.square
        means = {"square": self.square / self.weight, "variance": self.variance / self.weight}
        return {"samples": samples, "tokens": samples * seq_len, **means}


class NoiseScale(Hook):
    """Measures the noise scale of a run, if ``metrics.noise_scale`` asks for it."""

    def __init__(self, trainer: "Trainer") -> None:
        train, job = trainer.config.train, trainer.job
        self.mesh, self.seq_len = trainer.mesh, train.seq_len
        self.many = job.global_batch
        self.few = self.many // job.micro_batches
        self.averages, self.shares = NoiseAverages(), list[Tensor]()
        # The composition is not held: it would hold itself.
        note = partial(_note, weakref.ref(trainer.composition), self.shares)
        for data in trainer.composition.data:
            data.on_first = note

    def see(self, reading: Reading, scale: float) -> None:
        """Add the step, if it is finite; a collective."""
        share = torch.stack([share.to(self.mesh.device_type) for share in self.shares]).sum()
        self.shares.clear()
        # The gradient of the first of m micro-batches was divided by the targets of all m.
        small = float(sum_over(share, self.mesh, AXES)) * (self.many / self.few / scale) ** 2
        if all(map(math.isfinite, (small, reading.norm, reading.loss))):
            self.averages.add(small, reading.norm**2, self.few, self.many)

    def metrics(self) -> dict[str, Any]:
        """Return ``noise_scale``."""
        return {"noise_scale": self.averages.report(self.seq_len)}

    def state(self) -> dict[str, Tensor]:
        """Return the averages."""
        a = self.averages
        return {"noise_scale": torch.tensor([a.square, a.variance, a.weight], dtype=torch.float64)}

    def load(self, state: dict[str, Tensor], read: Collection[str], step: int) -> None:
        """Take the averages, if they are there."""
        if (saved := state.pop("noise_scale", None)) is not None:
            self.averages = NoiseAverages(*saved.tolist())


def _note(composition: "weakref.ref[Composition]", shares: list[Tensor], part: nn.Module) -> None:
    held = composition()
    assert held is not None, "its own backward is running"
    shares.append(squared_norm_share(held, part))
