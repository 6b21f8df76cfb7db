"""Messages of weights, gradients and activations in fewer bytes, as [comm] asks for them.

codec.py rounds blocks of a unit's weights or gradients, packing.py puts them into a message, gather.py
sends weights so, and reduce.py sums gradients. compressor.py lets the units of a composition do so.
activations.py sends the activations of tensor and expert parallel. losses.py observes what is lost, if
it is asked to.
"""

from typing import Any


def compress(options: Any, mesh: Any) -> Any:
    """Return the compressed messages of what ``compose.apply`` makes with options; None without any."""
    if not options.comm.codes:
        return None
    from compose.compression.compressor import Compression

    return Compression(options.comm, mesh, options.parallel.zero, options.compile.mode != "off")


def hooks(trainer: Any) -> list[Any]:
    """Return what reports and saves compressed messages, if any are sent."""
    from compose.compression.compressor import CompressionHook
    from compose.train.hooks import skips_steps

    compression = trainer.composition.compression
    return [CompressionHook(compression, skips_steps(trainer.config))] if compression else []
