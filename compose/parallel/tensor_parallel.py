"""Tensor parallel: the styles that PyTorch's own lack, and applying styles to a model.

Megatron's column/row split (Shoeybi et al. 2019, arXiv:1909.08053) with sequence-parallel norms
(Korthikanti et al. 2022, arXiv:2205.05198) is made of ``torch.distributed.tensor.parallel``'s
styles. What is here fits beside them in a dict handed to ``parallelize_module``.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from compose.base.tied import tie, tied_names
from compose.errors import ConfigError


class Replicated(ParallelStyle):
    """Parameters whole on every rank of the axis, as are the module's first input and its output.

    Gives such parameters the same mesh as sharded ones, so that an optimizer or a norm may take them
    in one list. No communication: identical inputs give identical gradients.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            partial(_replicate_parameters, self.src_data_rank),
            _replicated_input,  # type: ignore[arg-type]
            lambda module, output, mesh: output.to_local(),  # type: ignore[arg-type]
        )

    def __repr__(self) -> str:
        return "Replicated()"


class HeadParallel(ParallelStyle):
    """A projection (nn.Linear) onto ``n_heads`` heads, of which each rank outputs its own.

    Where the axis' size divides the heads this is ColwiseParallel. Where the heads divide the axis,
    a group of neighbouring ranks shares each head: the weight is whole on every rank, every rank
    computes all the heads and keeps one, and the gradients of weight and input are summed over the
    axis (an all-reduce of each, (D, n_heads * head_dim) and (B, L, D)).

    Input: (B, L, D), replicated. Output: local, (B, L, heads per rank * head_dim).
    Raises ConfigError where neither number divides the other.
    """

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        size = device_mesh.size()
        if self.n_heads % size == 0:
            # Not by default, Shard(-1), which PyTorch takes for another layout, and redistributes to.
            colwise = ColwiseParallel(output_layouts=Shard(2))
            colwise.src_data_rank = self.src_data_rank
            return parallelize_module(module, device_mesh, colwise, src_data_rank=self.src_data_rank)
        self._check(size)
        return distribute_module(
            module,
            device_mesh,
            self._replicate,
            _replicated_input,  # type: ignore[arg-type]
            self._own_head,  # type: ignore[arg-type]
        )

    def _check(self, size: int) -> None:
        if size % self.n_heads:
            kind = type(self).__name__
            raise ConfigError(f"{kind}: {self.n_heads} heads cannot be split over {size} ranks")

    def _replicate(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _replicate_parameters(self.src_data_rank, name, module, device_mesh)

    def _own_head(self, module: nn.Module, output: DTensor, device_mesh: DeviceMesh) -> Tensor:
        head = device_mesh.get_local_rank() * self.n_heads // device_mesh.size()
        # Each rank's gradient is zero outside its head, so the whole is their sum.
        heads = output.to_local(grad_placements=[Partial()]).unflatten(-1, (self.n_heads, -1))
        return heads[..., head, :]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n_heads={self.n_heads})"


class SharedByHeads(ParallelStyle):
    """What all heads read, whole on every rank of the axis, each of which has some of the heads.

    For a module without parameters (nn.Identity) whose output it is. Its gradient is summed over the
    axis (an all-reduce), as each rank finds that of its own heads.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(partial(_summed_gradient, device_mesh))
        return module

    def __repr__(self) -> str:
        return "SharedByHeads()"


def check_heads(n_heads: int, n_kv_heads: int, tp: int) -> None:
    """Raise ConfigError unless ``tp`` ranks can each hold whole query and key/value heads."""
    allowed = [
        degree
        for degree in range(1, n_heads + 1)
        if n_heads % degree == 0 and (n_kv_heads % degree == 0 or degree % n_kv_heads == 0)
    ]
    if tp not in allowed:
        raise ConfigError(
            f"parallel.tp: {tp} does not divide {n_heads} query heads with {n_kv_heads} key/value"
            f" heads (allowed: {', '.join(map(str, allowed))})"
        )


def check_columns(model: nn.Module, styles: Iterable[tuple[str, ParallelStyle]], tp: int) -> None:
    """Raise ConfigError unless ``tp`` ranks each get a column of every weight that is cut by columns.

    Columns are cut as Tensor.chunk cuts them, so the last ranks may get none: 10 over 8 are 2 for each
    of 5. FSDP then takes the rank's shard for one without rows and without columns, and a collective of
    DTensor's that asks for all columns never ends (torch 2.11 to 2.15).
    """
    for name, style in styles:
        module = model.get_submodule(name)
        if isinstance(style, RowwiseParallel) and isinstance(module, nn.Linear):
            columns = module.in_features
            served = -(-columns // -(-columns // tp))
            if served < tp:
                raise ConfigError(
                    f"parallel.tp: {tp} leaves {tp - served} of the ranks without a column of"
                    f" {name}.weight, which has {columns}; nearest: {_most_served(columns, tp)}"
                )


def sequence_ranks(styles: Iterable[tuple[str, ParallelStyle]], tp: int) -> int:
    """Of ``tp`` ranks, those that share a sequence between layers: all of them or, without a
    SequenceParallel among ``styles``, one."""
    return tp if any(isinstance(style, SequenceParallel) for _, style in styles) else 1


def _most_served(columns: int, tp: int) -> int:
    return next(t for t in range(tp, 0, -1) if -(-columns // -(-columns // t)) == t)


def apply_tensor_parallel(
    model: nn.Module,
    styles: Iterable[tuple[str, ParallelStyle]],
    mesh: DeviceMesh,
) -> None:
    """Apply each style to the module of that name on the 1-D ``mesh``; tied parameters stay tied.

    Parameters must hold the same values on every rank, or be on meta: nothing is broadcast. Raises
    ConfigError where two names of one tied parameter are given different placements.
    """
    ties = tied_names(model)
    for name, style in styles:
        parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
    for first, *others in ties:
        for other in others:
            placements = [_placements(model.get_parameter(name)) for name in (first, other)]
            if placements[0] != placements[1]:
                raise ConfigError(
                    f"plan.tensor: {first} and {other} are one tied parameter but are placed"
                    f" differently: {placements[0]} and {placements[1]}"
                )
        tie(model, [first, *others])


def _placements(parameter: nn.Parameter) -> Any:
    return getattr(parameter, "placements", "not at all")


def _replicate_parameters(
    src_data_rank: int | None, name: str, module: nn.Module, device_mesh: DeviceMesh
) -> None:
    for leaf, parameter in module.named_parameters(recurse=False):
        whole = distribute_tensor(parameter, device_mesh, [Replicate()], src_data_rank=src_data_rank)
        module.register_parameter(leaf, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def _summed_gradient(mesh: DeviceMesh, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    whole = DTensor.from_local(output, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def _replicated_input(module: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh) -> Any:
    first = inputs[0]
    if not isinstance(first, DTensor):
        first = DTensor.from_local(first, device_mesh, [Replicate()], run_check=False)
    if first.placements != (Replicate(),):
        first = first.redistribute(placements=[Replicate()])
    return first, *inputs[1:]


__all__ = [
    "HeadParallel",
    "Replicated",
    "SharedByHeads",
    "apply_tensor_parallel",
    "check_columns",
    "check_heads",
    "sequence_ranks",
]
