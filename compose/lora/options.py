"""The table [model.lora]."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from compose.base.fields import NonNegative
from compose.base.paths import LocalPath

Alpha = Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class Lora:
    """The table [model.lora]: adapters of low rank, trained in place of the model's weights."""

    rank: NonNegative = 0
    """Rank of the adapters; the model's own weights are then frozen. 0: no adapters, all is trained."""
    alpha: Alpha = 0.0
    """An adapter's output is multiplied by alpha / rank; 0 is 2 x rank."""
    targets: tuple[str, ...] = ()
    """Patterns, as in a plan, of the linear layers with adapters: ["layers.*.attention.w*"]."""
    load: LocalPath = ""
    """Folder of peft with the adapters that a new run begins with; empty: drawn."""

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        return self.effective_alpha / self.rank

    @property
    def effective_alpha(self) -> float:
        """``alpha``, or what stands for 0."""
        return self.alpha or 2.0 * self.rank
