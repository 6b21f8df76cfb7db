"""State that each rank has alone, such as residuals of compressed messages: a file for each rank.

It means something only on the same mesh with the same messages.
"""

import errno
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from compose.checkpoint import store
from compose.checkpoint.dcp_storage import PartsReader, load_parts
from compose.checkpoint.local_shards import LocalShard, local_shard_of
from compose.checkpoint.safetensors_files import bytes_of, opened
from compose.config.tables import Config
from compose.errors import ConfigError, open_own, refused_in, write_whole
from compose.object_storage import StoreError
from compose.ops.tensors import gathered_objects

PREFIX = "comm-"
_NONE = (errno.ENOENT, errno.ELOOP, errno.EINVAL)  # no file, a link, a pipe
_MESSAGES = ("weights", "gradients", "block", "near", "error_feedback", "rank", "density")


class HasState:
    """State that checkpoints save beside the model and its optimizer; here it is empty."""

    fingerprint: tuple[Any, ...] = ()
    """Values that must be the same, beside the mesh and the messages, for :meth:`state` to be used."""

    def before_save(self, step: int) -> None:
        """Act before a save, or a copy into memory, of what was trained; raise if it must not be."""

    def tensors(self) -> dict[str, LocalShard]:
        """Return this rank's parts of tensors that do not depend on the mesh, by name."""
        return {}

    def state(self) -> dict[str, Tensor] | None:
        """Return tensors of this rank alone by name; None if there never are any."""
        return None

    def load(self, state: dict[str, Tensor], read: Collection[str], step: int) -> None:
        """Take everything that is its own out of ``state``; it may be absent.

        ``read`` are the names of :meth:`tensors` that are filled now; ``step`` steps were taken. Raises
        ConfigError for tensors that :meth:`state` cannot have returned.
        """


def copied(others: Sequence[HasState]) -> dict[str, Tensor] | None:
    """Return copies in host memory of all that this rank keeps; None if nothing ever is kept."""
    states = [state for other in others if (state := other.state()) is not None]
    if not states:
        return None
    return {name: value.detach().cpu().clone() for one in states for name, value in one.items()}


def write(folder: Path, rank: int, label: str, state: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """Write the file of a rank, if there is a state; return the manifest's entry."""
    if state is None:
        return {}
    path = file_of(folder, rank)
    write_whole(path, packed(label, state))
    return store.manifest_entries([path])


def packed(label: str, state: Mapping[str, Tensor]) -> bytes:
    """Return the content of a rank's file."""
    return save(dict(state), {"of": label})


def as_part(rank: int, label: str, state: Mapping[str, Tensor] | None) -> dict[str, LocalShard]:
    """Return the content of a rank's file, if there is a state, as a part by the file's name."""
    if state is None:
        return {}
    content = torch.frombuffer(bytearray(packed(label, state)), dtype=torch.uint8)
    return {file_of(Path(), rank).name: local_shard_of(content)}


def write_from_part(reader: PartsReader, folder: Path, group: dist.ProcessGroup) -> None:
    """Write the file of this rank from such a part, if ``reader`` has one; a collective."""
    known, path = reader.read_metadata().state_dict_metadata, file_of(folder, group.rank())
    wanted: dict[str, LocalShard] = {}
    if isinstance(stored := known.get(path.name), TensorStorageMetadata):
        wanted[path.name] = local_shard_of(torch.empty(stored.size, dtype=torch.uint8))
    if any(name.startswith(PREFIX) for name in known):
        load_parts(reader, wanted, group)
    for part in wanted.values():
        write_whole(path, bytes(bytes_of(part.local)))


def read(folder: Path, label: str, group: dist.ProcessGroup) -> dict[str, Tensor] | None:
    """Return this rank's file, in host memory; None if a rank has none with the label; a collective."""
    state: dict[str, Tensor] | None = None
    path = file_of(folder, group.rank())
    try:
        with open_own(path), opened(path) as file:
            if (file.metadata() or {}).get("of") == label:
                # Copies: sums of products depend on where memory begins, and a file's tensors anywhere.
                state = {n: file.get_tensor(n).clone() for n in file.keys()}  # noqa: SIM118
    except StoreError:
        raise
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno not in _NONE:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return state if all(gathered_objects(state is not None, group)) else None


def load(
    folder: Path,
    label: str,
    others: Sequence[HasState],
    group: dist.ProcessGroup,
    filled: Collection[str],
    step: int,
) -> str:
    """Give each what it kept, ``step`` steps into a run; return a line if that is dropped.

    The tensors ``filled`` are read already. It is a collective.
    """
    keeps = any(other.state() is not None for other in others)
    kept = read(folder, label, group) if keeps else {}
    state, path = kept or {}, file_of(folder, group.rank())
    with refused_in(str(path)):
        for other in others:
            other.load(state, filled, step)
        state.pop("noise_scale", None)  # of a run that measured it; this one does not
        if state:
            raise ConfigError(f"{next(iter(state))} is no name of what messages keep")
    if kept is not None or not any(gathered_objects(path.exists(), group)):
        return ""
    return (
        f"{folder}: what messages kept is of another mesh, of other codes, or of an earlier"
        " version, and is dropped"
    )


def label_of(config: Config, others: Sequence[HasState]) -> str:
    """Return what must be the same for a file to be of use."""
    messages = {key: getattr(config.comm, key) for key in _MESSAGES}
    common = [asdict(config.parallel), messages, config.precision.param]
    return json.dumps(common + [one for other in others for one in other.fingerprint], sort_keys=True)


def file_of(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file in a checkpoint."""
    return folder / f"{PREFIX}{rank:05d}.safetensors"
