"""The remainders and bases that coded messages keep, in a file of a checkpoint for each rank.

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

from compose.checkpoint import store
from compose.composition import Composition
from compose.config.tables import Config
from compose.diloco.loop import OuterLoop
from compose.errors import ConfigError, open_own, write_whole

PREFIX = "comm-"
_OUTER = "outer."


class Kept:
    """What the messages of a composition and of its outer loop keep on this rank."""

    def __init__(
        self, config: Config, composition: Composition, outer: OuterLoop | None = None
    ) -> None:
        """Take the config of the run, the model, composed, and the outer loop of islands, if any."""
        self.config, self.compression, self.device = (
            config,
            composition.compression,
            composition.mesh.device_type,
        )
        self.outer = outer if outer and outer.keeps else None

    def copied(self) -> dict[str, Tensor] | None:
        """Return copies in host memory; None if nothing is kept."""
        if self.compression is None and self.outer is None:
            return None
        state = self.compression.state() if self.compression else {}
        outer = self.outer.state() if self.outer else {}
        state |= {f"{_OUTER}{name}": value for name, value in outer.items()}
        return {name: value.detach().cpu().clone() for name, value in state.items()}

    def restore(self, folder: Path, group: dist.ProcessGroup, step: int) -> str:
        """Give back what was kept; a collective.

        Args:
            folder: The checkpoint.
            group: All ranks.
            step: Optimizer steps that the run has taken.

        Returns:
            Empty; or one line, if it cannot be carried over and is dropped.

        Raises:
            ConfigError: The file holds what no messages keep.
        """
        if self.compression is None and self.outer is None:
            return ""
        if self.compression:
            self.compression.begin_at(step)
        path = folder / f"{PREFIX}{group.rank():05d}.safetensors"
        state: dict[str, Tensor] | None = None
        try:
            with open_own(path), safe_open(path, "pt") as file:
                if (file.metadata() or {}).get("of") == _label(self.config):
                    state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            state = None
        found = [False] * group.size()
        dist.all_gather_object(found, state is not None, group=group)
        if state is None or not all(found):
            return (
                f"{folder}: what messages kept is of another mesh, of other codes, or of an earlier"
                " version, and is dropped"
            )
        outer = {n.removeprefix(_OUTER): v for n, v in state.items() if n.startswith(_OUTER)}
        others = {n: v.to(self.device) for n, v in state.items() if not n.startswith(_OUTER)}
        try:
            if self.outer:
                self.outer.restore(outer, step)
            if self.compression:
                self.compression.restore(others)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        unknown = [*(() if self.outer else outer), *(() if self.compression else others)]
        if unknown:
            raise ConfigError(f"{path}: {unknown[0]} is no name of what messages keep")
        return ""


def write(
    folder: Path, rank: int, config: Config, state: Mapping[str, Tensor] | None
) -> dict[str, Any]:
    """Write a rank's file.

    Args:
        folder: The folder of the checkpoint.
        rank: The rank.
        config: The config of the run.
        state: What :meth:`Kept.copied` returned; None writes nothing.

    Returns:
        The manifest's entry of the file.
    """
    if state is None:
        return {}
    path = folder / f"{PREFIX}{rank:05d}.safetensors"
    write_whole(path, save(dict(state), {"of": _label(config)}))
    return store.described([path])


def _label(config: Config) -> str:
    """Return what must be the same for a file to be of use."""
    own = ("weights", "gradients", "block", "near", "error_feedback", "rank", "density")
    comm = {key: getattr(config.comm, key) for key in own}
    of = [asdict(config.parallel), comm, config.precision.param]
    outer = [asdict(config.outer)] if config.outer.every else []
    # Messages of an earlier version had other parts of parameters than the rows that fragments have.
    rows = ["rows"] if config.outer.fragments else []
    return json.dumps(of + outer + rows, sort_keys=True)
