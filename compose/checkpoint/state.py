"""What a run is made of between two steps, by names that no mesh changes."""

import torch
from torch import Tensor, nn

from compose.base.local_tensor import local_tensor
from compose.checkpoint.parts import Part, part_of
from compose.composition.state import Composition, module_of


def named_tensors(
    whole: nn.Module | Composition, optimizer: torch.optim.Optimizer | None
) -> dict[str, list[Tensor]]:
    """Return every tensor that training changes, by its name in the whole model.

    ``model.<name>`` are parameters and persistent buffers. ``optimizer.<name>.<key>`` is the
    optimizer's state of a parameter. Of what stages share, this rank may hold several copies, all
    listed.

    Args:
        whole: A model that was not cut, or what ``compose.apply`` returned.
        optimizer: Of its parameters; None for the model alone.
    """
    model = module_of(whole)
    found: dict[str, list[Tensor]] = {}
    persistent = model.state_dict(keep_vars=True)
    for name, parameter in whole.named_parameters():
        found.setdefault(f"model.{name}", []).append(parameter)
        for key, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
            if isinstance(value, Tensor):
                found.setdefault(f"optimizer.{name}.{key}", []).append(value)
    for name, buffer in model.named_buffers():
        if name in persistent:
            found.setdefault(f"model.{name}", []).append(buffer)
    return found


def parts(tensors: dict[str, list[Tensor]]) -> dict[str, Part]:
    """This rank's part of each; of copies, of the first."""
    return {name: part_of(copies[0]) for name, copies in tensors.items()}


def staged(state: dict[str, Part], into: dict[str, Part] | None = None) -> dict[str, Part]:
    """A copy in host memory, which training cannot change; in the memory of ``into``, an earlier copy,
    as far as that has the same parts: new pages cost more than the copying."""
    copies = {}
    for name, part in state.items():
        # An optimizer has no state before its first step.
        kept = into[name].local if into and name in into else torch.empty_like(part.local, device="cpu")
        copies[name] = Part(part.shape, part.offsets, kept.copy_(part.local))
    return copies


@torch.no_grad()
def spread(tensors: dict[str, list[Tensor]]) -> None:
    """Give every copy what the first one holds."""
    for first, *others in tensors.values():
        for other in others:
            local_tensor(other).copy_(local_tensor(first))
