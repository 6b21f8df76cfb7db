"""The weights under the adapters: which they are, so that adapters meet the weights they were made for.

A checkpoint of a run with adapters holds the adapters alone. It names the folder of the frozen weights,
and has a digest of samples of them.
"""

import hashlib
from pathlib import Path

import torch

from compose.checkpoint.safetensors_files import TensorFiles

_SAMPLED = 1024  # elements of each tensor


def base_identity(load_hf: str, seed: int) -> str:
    """Return a text that tells the frozen weights from others.

    Of Hugging Face's weights it is a SHA-256 of each tensor's name, shape and first elements, as
    float32. So it is the same for equal values in other files or in a wider type.
    """
    if not load_hf:
        return f"drawn by seed {seed}"
    files, digest = TensorFiles(Path(load_hf)), hashlib.sha256()
    for name, entry in sorted(files.entries.items()):
        region = [slice(0, 1) for _ in entry.shape[1:]] + [slice(0, _SAMPLED) for _ in entry.shape[:1]]
        values = files.read(name, region).to(torch.float32).contiguous()
        digest.update(f"{name} {entry.shape}".encode())
        digest.update(values.view(-1).numpy().tobytes())
    return f"sha256 {digest.hexdigest()}"


def shown(load_hf: str, seed: int) -> str:
    """Return a name of the weights for a message."""
    return load_hf or f"weights drawn by train.seed = {seed}"
