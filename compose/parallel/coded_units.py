"""FSDP's units with messages in fewer bytes: their parameters, and the ranks that hold them."""

from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from compose.compression.gathers import CodedGather
from compose.compression.reductions import Levels
from compose.compression.units import Cut, Place, Units
from compose.errors import ConfigError
from compose.ops.tensors import local_tensor


class CodedUnits:
    """The units of one stage. Make it before ``fully_shard``, which hides the shapes."""

    def __init__(
        self, units: Units, levels: Levels | None, model: nn.Module, names: Sequence[Sequence[str]]
    ) -> None:
        """Take the units' names, a unit within another before it; ``[""]`` is the rest of the model."""
        self.units, self.levels = units, levels
        units.module = model
        self.gathers: dict[nn.Module, CodedGather] = {}
        self.cuts: dict[nn.Module, Cut] = {}
        seen: set[nn.Parameter] = set()
        for unit in names:
            found: dict[str, nn.Parameter] = {}
            for name in unit:
                for leaf, parameter in _in_order(model.get_submodule(name)):
                    # A tied one counts once, and one without dims is not sent by FSDP.
                    if parameter not in seen and parameter.ndim:
                        seen.add(parameter)
                        found[f"{name}.{leaf}" if name else leaf] = parameter
            self.cuts[model.get_submodule(unit[0])] = Cut(
                tuple(found),
                [tuple(local_tensor(p).shape) for p in found.values()],
                [p.requires_grad for p in found.values()],
            )

    def attach(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        replicas: DeviceMesh | None,
        dim_of: Callable[[Sequence[int]], int] | None = None,
    ) -> None:
        """Let the unit that begins with ``module`` send so.

        Args:
            module: Its first module, which ``fully_shard`` has cut.
            mesh: The ranks that share it.
            replicas: The ranks that hold the same shard; None if there is no other.
            dim_of: Returns the dim along which a shape is cut; None is the first. Such units have no
                levels, as they are on other ranks than those.
        """
        cut = self.cuts[module]
        if not cut.names or not isinstance(module, FSDPModule):
            return
        if dim_of:
            cut.dims = [dim_of(shape) for shape in cut.shapes]
        group = replicas.get_group() if replicas else None
        gather = self.units.attach(
            module, cut, Place(mesh.size(), group, None if dim_of else self.levels)
        )
        if gather:
            self.gathers[module] = gather


def _in_order(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield names and parameters as FSDP orders them: those of children come first."""
    for name, child in module.named_children():
        yield from ((f"{name}.{leaf}", parameter) for leaf, parameter in _in_order(child))
    yield from module.named_parameters(recurse=False)


def levels_of(mesh: DeviceMesh, near: int, zero: int) -> Levels | None:
    """Return the groups of ``near`` neighbours among the ranks of data parallel, and across them.

    The call creates process groups, so every rank makes it.

    Args:
        mesh: The mesh of ``compose.init_mesh``.
        near: How many neighbours; 1 is none.
        zero: The ZeRO stage; in stage 0 the ranks are replicas.

    Returns:
        The groups; None if there is only one level.
    """
    ranks: Tensor = mesh.mesh.flatten(1, 3) if zero == 0 else mesh.mesh.flatten(2, 3)
    rows = ranks.movedim(1 if zero == 0 else 2, -1)
    count = rows.shape[-1]
    if near in (1, count):
        return None
    placed = rows.reshape(-1, count // near, near)
    groups = [
        dist.new_subgroups_by_enumeration(some.reshape(-1, some.shape[-1]).tolist())[0]
        for some in (placed, placed.transpose(1, 2))
    ]
    near_group, far_group = groups
    assert isinstance(near_group, dist.ProcessGroup)
    assert isinstance(far_group, dist.ProcessGroup)
    return Levels(near_group, far_group)


def check_near(near: int, zero: int, replicas: int, shards: int) -> None:
    """Raise ConfigError unless ``near`` neighbours divide the ranks of data parallel.

    Args:
        near: The value of comm.near.
        zero: The ZeRO stage.
        replicas: dp_replicate, times cp in stage 0.
        shards: dp_shard x cp.

    Raises:
        ConfigError: It does not divide them, or dp_replicate says who is near already.
    """
    if near == 1:
        return
    if zero > 0 and replicas > 1:
        raise ConfigError(
            f"comm.near: {near}, and with parallel.dp_replicate = {replicas} the ranks of dp_shard are"
            " the neighbours; use comm.near = 1"
        )
    ranks = replicas if zero == 0 else shards
    if ranks % near:
        allowed = [n for n in range(1, ranks + 1) if ranks % n == 0]
        nearest = min(allowed, key=lambda n: abs(n - near))
        what = "dp_replicate x cp" if zero == 0 else "dp_shard x cp"
        raise ConfigError(
            f"comm.near: {near} does not divide {what} = {ranks}, the ranks of data parallel; nearest:"
            f" {nearest}"
        )
