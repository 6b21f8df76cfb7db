"""The state of a run between two steps, by names that do not depend on the mesh.

A rank's part of a tensor is a region of the whole one, by the cut that filled it (ops/tensors.py).

Some state each rank has alone, such as residuals of compressed messages. It is in a file for each rank,
and means something only on the same mesh with the same messages.
"""

import json
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from compose.checkpoint import store
from compose.composition import Composition, module_of
from compose.config.tables import Config
from compose.errors import ConfigError, open_own, write_whole
from compose.ops.tensors import local_region, local_tensor


@dataclass(frozen=True)
class LocalShard:
    """The part of a tensor that one rank holds: a region."""

    shape: torch.Size
    """Shape of the whole tensor."""
    offsets: torch.Size
    """Where the region begins in the whole tensor."""
    local: Tensor
    """The values of the region."""

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The region as DCP describes it."""
        return ChunkStorageMetadata(self.offsets, self.local.shape)


def local_shard_of(tensor: Tensor) -> LocalShard:
    """Return this rank's part of a DTensor, or all of a plain tensor; ``local`` shares its memory."""
    if not isinstance(tensor, DTensor):
        return LocalShard(tensor.shape, torch.Size([0] * tensor.ndim), local_tensor(tensor).detach())
    local = local_tensor(tensor).detach()
    if local.numel() == 0:
        return LocalShard(tensor.shape, torch.Size([0] * tensor.ndim), local)
    return LocalShard(tensor.shape, torch.Size(held.start for held in local_region(tensor)), local)


class HasState:
    """Has state that checkpoints save beside the model and its optimizer; here it is nothing."""

    fingerprint: tuple[Any, ...] = ()
    """Values that must be the same, beside the mesh and the messages, for :meth:`state` to be used."""

    def tensors(self) -> dict[str, LocalShard]:
        """Return this rank's parts of tensors that do not depend on the mesh, by name."""
        return {}

    def state(self) -> dict[str, Tensor] | None:
        """Return tensors of this rank alone by name; None if there never are any."""
        return None

    def load(self, state: dict[str, Tensor], read: Collection[str], step: int) -> None:
        """Take out of ``state`` what is its own, all of it; there may be nothing.

        ``read`` are the names of :meth:`tensors` that are filled now; ``step`` steps were taken. Raises
        ConfigError for what :meth:`state` cannot have returned.
        """


def named_tensors(
    whole: nn.Module | Composition, optimizer: torch.optim.Optimizer | None
) -> dict[str, list[Tensor]]:
    """Return every tensor that training changes, by its name in the whole model.

    ``model.<name>`` are parameters that are not frozen, and persistent buffers.
    ``optimizer.<name>.<key>`` is the optimizer's state of a parameter. A rank may hold several copies
    of a tensor that stages share. Then all copies are listed.
    """
    model = module_of(whole)
    found: dict[str, list[Tensor]] = {}
    persistent = model.state_dict(keep_vars=True)
    for name, parameter in whole.named_parameters():
        if not parameter.requires_grad:
            continue
        found.setdefault(f"model.{name}", []).append(parameter)
        for key, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
            if isinstance(value, Tensor):
                found.setdefault(f"optimizer.{name}.{key}", []).append(value)
    for name, buffer in model.named_buffers():
        if name in persistent:
            found.setdefault(f"model.{name}", []).append(buffer)
    return found


def parts(tensors: dict[str, list[Tensor]]) -> dict[str, LocalShard]:
    """Return this rank's part of each tensor, taken from the first copy."""
    return {name: local_shard_of(copies[0]) for name, copies in tensors.items()}


def staged(
    state: dict[str, LocalShard], into: dict[str, LocalShard] | None = None
) -> dict[str, LocalShard]:
    """Return a copy in host memory, which training cannot change.

    What comes from a GPU is copied to pinned memory, all parts at once: a blocking copy to other memory
    reaches a fraction of the bus's rate. The memory of an earlier copy is used again: new pages cost
    more than the copying.
    """
    copies = {}
    for name, part in state.items():
        # An optimizer has no state before its first step.
        kept = into[name].local if into and name in into else _host_memory(part.local)
        copies[name] = replace(part, local=kept.copy_(part.local, non_blocking=True))
    if any(part.local.is_cuda for part in state.values()):
        torch.cuda.current_stream().synchronize()
    return copies


def _host_memory(like: Tensor) -> Tensor:
    """Return memory of the host for a copy; pinned if it is for a copy of a GPU's."""
    memory = torch.empty_like(like, device="cpu")
    if like.is_cuda and memory.numel():
        # The pinned memory of PyTorch's allocator may be nearly twice as large, a power of two.
        address, cuda = memory.data_ptr(), cast(Any, torch.cuda.cudart())
        torch.cuda.check_error(cuda.cudaHostRegister(address, memory.nbytes, 0))
        weakref.finalize(memory, cuda.cudaHostUnregister, address).atexit = False
    return memory


@torch.no_grad()
def spread(tensors: dict[str, list[Tensor]]) -> None:
    """Copy the value of each first copy to the other copies."""
    for first, *others in tensors.values():
        for other in others:
            local_tensor(other).copy_(local_tensor(first))


PREFIX = "comm-"
_MESSAGES = ("weights", "gradients", "block", "near", "error_feedback", "rank", "density")


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
    path = _file(folder, rank)
    write_whole(path, save(dict(state), {"of": label}))
    return store.described([path])


def read(folder: Path, label: str, group: dist.ProcessGroup) -> dict[str, Tensor] | None:
    """Return this rank's file, in host memory; None if a rank has none with the label; a collective."""
    state: dict[str, Tensor] | None = None
    path = _file(folder, group.rank())
    try:
        with open_own(path), safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("of") == label:
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        state = None
    found = [False] * group.size()
    dist.all_gather_object(found, state is not None, group=group)
    return state if all(found) else None


def load(
    folder: Path,
    label: str,
    others: Sequence[HasState],
    group: dist.ProcessGroup,
    filled: Collection[str],
    step: int,
) -> str:
    """Give each what it kept, ``step`` steps into a run; its tensors that are ``filled`` it has.

    This is a collective.
    """
    state, lost = {}, ""
    if any(other.state() is not None for other in others):
        found = read(folder, label, group)
        if found is None:
            lost = (
                f"{folder}: what messages kept is of another mesh, of other codes, or of an earlier"
                " version, and is dropped"
            )
        state = found or {}
    try:
        for other in others:
            other.load(state, filled, step)
        if state:
            raise ConfigError(f"{next(iter(state))} is no name of what messages keep")
    except ConfigError as error:
        raise ConfigError(f"{_file(folder, group.rank())}: {error}") from None
    return lost


def label_of(config: Config, others: Sequence[HasState]) -> str:
    """Return what must be the same for a file to be of use."""
    messages = {key: getattr(config.comm, key) for key in _MESSAGES}
    common = [asdict(config.parallel), messages, config.precision.param]
    return json.dumps(common + [one for other in others for one in other.fingerprint], sort_keys=True)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"{PREFIX}{rank:05d}.safetensors"
