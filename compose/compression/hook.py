"""The hook of compressed messages: their metrics, and their residuals in checkpoints."""

from collections.abc import Collection
from typing import Any

from torch import Tensor

from compose.compression.compressor import Compression
from compose.train.hooks import Hook


class CompressionHook(Hook):
    """Reports what messages send, and keeps what they have not sent."""

    def __init__(self, compression: Compression) -> None:
        self.compression = compression
        self.sent: dict[str, float] = {}

    def before_update(self, step: int) -> None:
        """Note what the step has sent."""
        self.sent = self.compression.metrics()

    def metrics(self) -> dict[str, Any]:
        """Return what the step has sent."""
        return {"comm": self.sent}

    def state(self) -> dict[str, Tensor] | None:
        """Return residuals, factors and what was sent last."""
        return self.compression.state()

    def load(self, state: dict[str, Tensor], read: Collection[str], step: int) -> None:
        """Go on with what was kept; the names of all begin with the number of a stage."""
        self.compression.begin_at(step)
        own = [name for name in state if name.partition(".")[0].isdecimal()]
        device = self.compression.device
        self.compression.restore({name: state.pop(name).to(device) for name in own})
