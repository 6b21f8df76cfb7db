"""What coded messages keep between steps, in a file of a checkpoint for each rank.

Remainders and bases are of a rank's own messages. They mean something on the same mesh only, with the
same codes.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from compose.base.own_files import write_whole
from compose.checkpoint import store
from compose.composition.state import Composition
from compose.config import Config

PREFIX = "comm-"


def kept(composition: Composition) -> dict[str, Tensor] | None:
    """Return copies in host memory of what coded messages keep; None if none are coded."""
    if composition.compression is None:
        return None
    state = composition.compression.state()
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def write(
    folder: Path, rank: int, config: Config, state: Mapping[str, Tensor] | None
) -> dict[str, Any]:
    """Write a rank's file.

    Args:
        folder: The folder of the checkpoint.
        rank: The rank.
        config: The config of the run.
        state: What :func:`kept` returned; None writes nothing.

    Returns:
        The manifest's entry of the file.
    """
    if state is None:
        return {}
    path = folder / f"{PREFIX}{rank:05d}.safetensors"
    write_whole(path, save(dict(state), {"of": _label(config)}))
    return store.described([path])


def restore(
    folder: Path, config: Config, composition: Composition, group: dist.ProcessGroup, step: int
) -> str:
    """Give coded messages what they kept; a collective.

    Args:
        folder: The checkpoint.
        config: The config of the run.
        composition: The model, composed.
        group: All ranks.
        step: Optimizer steps that the run has taken.

    Returns:
        Empty; or one line, if it cannot be carried over and is dropped.
    """
    if composition.compression is None:
        return ""
    composition.compression.begin_at(step)
    path = folder / f"{PREFIX}{group.rank():05d}.safetensors"
    state: dict[str, Tensor] | None = None
    try:
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("of") == _label(config):
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        state = None
    found = [False] * group.size()
    dist.all_gather_object(found, state is not None, group=group)
    if state is None or not all(found):
        return (
            f"{folder}: what coded messages kept is of another mesh, or of other codes, and is dropped"
        )
    device = composition.mesh.device_type
    composition.compression.restore({name: value.to(device) for name, value in state.items()})
    return ""


def _label(config: Config) -> str:
    """Return what must be the same for a file to be of use."""
    own = ("weights", "gradients", "block", "near", "error_feedback", "rank", "density")
    comm = {key: getattr(config.comm, key) for key in own}
    return json.dumps([asdict(config.parallel), comm, config.precision.param], sort_keys=True)
