"""Messages in fewer bytes: quantized, low-rank and sparse weights and gradients."""

from typing import Any


def hooks(trainer: Any) -> list[Any]:
    """Return what reports and saves compressed messages, if any are sent."""
    from compose.compression.hook import CompressionHook

    compression = trainer.composition.compression
    return [CompressionHook(compression)] if compression else []
