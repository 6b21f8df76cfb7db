"""Tensor parallel: the styles that PyTorch does not have, and applying styles to a model.

Megatron's column/row split (Shoeybi et al. 2019, arXiv:1909.08053) with sequence-parallel norms
(Korthikanti et al. 2022, arXiv:2205.05198) is made of the styles in
``torch.distributed.tensor.parallel``. The styles here fit beside them in a dict for
``parallelize_module``.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
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
from torch.utils._pytree import tree_map_only

from compose.errors import ConfigError
from compose.ops.layers import RMSNorm
from compose.ops.tensors import local_tensor, place_parameters, tie, tied_names
from compose.parallel.lora_parallel import without_adapter
from compose.parallel.mesh import divisors
from compose.parallel.name_patterns import parent
from compose.parallel.stream_messages import Style


class Replicated(Style):
    """A style for a module that is whole on every rank: its parameters, first input and output.

    It gives such parameters the same mesh as sharded ones, so that an optimizer or a norm may take them
    in one list. It communicates nothing: identical inputs give identical gradients.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        place = partial(place_parameters, Replicate(), self.src_data_rank)
        norm = _WHOLE_NORMS.get(type(module))
        if norm:
            module.__class__ = norm  # without a DTensor's work for each operator
            return distribute_module(module, device_mesh, place)
        return distribute_module(
            module,
            device_mesh,
            place,
            _replicated_input,  # type: ignore[arg-type]
            _local_output,  # type: ignore[arg-type]
        )


class HeadParallel(Style):
    """A style for a projection (nn.Linear) onto ``n_heads`` heads: each rank outputs its own heads.

    If the axis' size divides the heads, this is ColwiseParallel. If the heads divide the axis' size, a
    group of neighbouring ranks shares each head. Then the weight is whole on every rank, and every rank
    computes all heads and keeps one. The gradients of weight and input are summed over the axis: an
    all-reduce of each, (D, n_heads * head_dim) and (B, L, D).

    The input is (B, L, D), replicated. The output is local, (B, L, heads per rank * head_dim). Applying
    it raises ConfigError if neither number divides the other.
    """

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        size = device_mesh.size()
        if self.n_heads % size == 0:
            # PyTorch takes its default, Shard(-1), for another layout, and would redistribute to it.
            colwise = ColwiseParallel(output_layouts=Shard(2))
            colwise.src_data_rank = self.src_data_rank
            return parallelize_module(module, device_mesh, colwise, src_data_rank=self.src_data_rank)
        self._check(size)
        return distribute_module(
            module,
            device_mesh,
            partial(place_parameters, Replicate(), self.src_data_rank),
            _replicated_input,  # type: ignore[arg-type]
            self._own_head,  # type: ignore[arg-type]
        )

    def _check(self, size: int) -> None:
        if size % self.n_heads:
            kind = type(self).__name__
            raise ConfigError(f"{kind}: {self.n_heads} heads cannot be split over {size} ranks")

    def _own_head(self, module: nn.Module, output: DTensor, device_mesh: DeviceMesh) -> Tensor:
        head = device_mesh.get_local_rank() * self.n_heads // device_mesh.size()
        # A rank's gradient is zero outside its head, so the sum over ranks is the whole gradient.
        heads = output.to_local(grad_placements=[Partial()]).unflatten(-1, (self.n_heads, -1))
        return heads[..., head, :]


class SharedByHeads(Style):
    """A style for a tensor that all heads read: it is whole on every rank, which has some heads.

    It is for a module without parameters (nn.Identity) whose output is that tensor. Each rank has the
    gradient of its own heads, so the gradient is summed over the axis (an all-reduce).
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(partial(_summed_gradient, device_mesh))
        return module


class SharedHeads(Style):
    """A style for an attention of transformers with HeadParallel on its ``n_kv_heads`` heads.

    Where ranks share a key/value head, a rank has fewer query heads for each of its key/value heads.
    """

    def __init__(self, n_kv_heads: int) -> None:
        super().__init__()
        self.n_kv_heads = n_kv_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        attention: Any = module
        attention.num_key_value_groups //= max(1, device_mesh.size() // self.n_kv_heads)
        return module


class Conv1DColwise(ColwiseParallel):
    """ColwiseParallel for a Conv1D of transformers, whose weight is (inputs, outputs)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _distribute_conv1d(self, module, device_mesh, {"weight": Shard(1), "bias": Shard(0)})


class Conv1DRowwise(RowwiseParallel):
    """RowwiseParallel for a Conv1D of transformers, whose weight is (inputs, outputs)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.desired_input_layouts = (Shard(-1),)
        width = cast(int, module.nx)
        if self.input_layouts == (Shard(-1),) and width % device_mesh.size():
            module.register_forward_pre_hook(partial(_uneven_input, device_mesh, width))
        placed = {"weight": Shard(0), "bias": Replicate()}
        return _distribute_conv1d(self, module, device_mesh, placed)


def _distribute_conv1d(
    style: Any, module: nn.Module, mesh: DeviceMesh, placed: Mapping[str, Placement]
) -> nn.Module:
    for leaf, parameter in list(module.named_parameters(recurse=False)):
        part = distribute_tensor(parameter, mesh, [placed[leaf]], src_data_rank=style.src_data_rank)
        module.register_parameter(leaf, nn.Parameter(part, requires_grad=parameter.requires_grad))
    taken = partial(style._prepare_input_fn, style.input_layouts, style.desired_input_layouts)
    given = partial(style._prepare_output_fn, style.output_layouts, style.use_local_output)
    return distribute_module(module, mesh, None, taken, given)  # type: ignore[arg-type]


def check_heads(n_heads: int, n_kv_heads: int, tp: int) -> None:
    """Raise ConfigError unless ``tp`` ranks can each hold whole query and key/value heads."""
    allowed = [
        degree for degree in divisors(n_heads) if n_kv_heads % degree == 0 or degree % n_kv_heads == 0
    ]
    if tp not in allowed:
        raise ConfigError(
            f"parallel.tp: {tp} does not divide {n_heads} query heads with {n_kv_heads} key/value"
            f" heads (allowed: {', '.join(map(str, allowed))})"
        )


def check_columns(
    model: nn.Module, styles: Iterable[tuple[str, ParallelStyle]], tp: int, output: str = ""
) -> None:
    """Raise ConfigError unless every rank gets a part of every weight that RowwiseParallel cuts.

    Columns, or rows of an embedding, are cut as Tensor.chunk cuts them, so the last ranks may get none:
    10 columns over 8 ranks are 2 for each of 5. FSDP then takes the rank's shard for one without rows
    and columns, and a DTensor collective that asks for all columns never ends (torch 2.11 to 2.15).
    If ``output``, the projection onto the vocabulary, returns sharded logits, each rank needs some.
    """
    for name, style in styles:
        module, rowwise = model.get_submodule(name), isinstance(style, RowwiseParallel)
        shards = isinstance(style, ColwiseParallel) and style.output_layouts[0].is_shard()
        columns, kind = tp, "row"
        if isinstance(module, nn.Linear) and rowwise:
            columns, kind = module.in_features, "column"
        elif isinstance(module, nn.Embedding) and rowwise:
            columns = module.num_embeddings
        elif isinstance(module, nn.Linear) and name == output and shards:
            columns = module.out_features
        served = -(-columns // -(-columns // tp))
        if served < tp:
            nearest = next(t for t in range(tp, 0, -1) if -(-columns // -(-columns // t)) == t)
            raise ConfigError(
                f"parallel.tp: {tp} leaves {tp - served} of the ranks without a {kind} of"
                f" {name}.weight, which has {columns}; nearest: {nearest}"
            )


def sequence_ranks(model: nn.Module, styles: Iterable[tuple[str, ParallelStyle]], tp: int) -> int:
    """Return how many of ``tp`` ranks share a sequence between layers: those of SequenceParallel.

    In a norm of each head, (B, L, heads, width), that style cuts heads and not the sequence. In a
    dropout of attention's weights, (B, heads, L, L), the heads are dim 1.
    """
    cuts = [
        style.sequence_sharding
        for name, style in styles
        if isinstance(style, SequenceParallel) and not isinstance(model.get_submodule(name), nn.Dropout)
    ]
    return tp if (Shard(1),) in cuts else 1


def apply_tensor_parallel(
    model: nn.Module, styles: Iterable[tuple[str, ParallelStyle]], mesh: DeviceMesh
) -> None:
    """Apply each style to the module of that name; tied parameters stay tied.

    Nothing is broadcast, so parameters must be on meta or equal on all ranks.
    """
    ties = tied_names(model)
    for name, style in styles:
        module = model.get_submodule(name)
        frozen = [leaf for leaf, p in module.named_parameters() if not p.requires_grad]
        if (
            isinstance(style, RowwiseParallel)
            and type(style)._apply is RowwiseParallel._apply
            and style.input_layouts == (Shard(-1),)
            and isinstance(module, nn.Linear)
            and module.in_features % mesh.size()
        ):
            module.register_forward_pre_hook(partial(_uneven_input, mesh, module.in_features))
        with without_adapter(module):
            parallelize_module(module, mesh, style, src_data_rank=None)
        for leaf in frozen:  # some of PyTorch's styles make every weight one that is trained
            module.get_parameter(leaf).requires_grad_(False)
    for names in ties:
        # BERT's output has its bias' name too: a module without a style may hold what another uses.
        first, *others = sorted(names, key=lambda name: not _placed(model, name))
        for other in others:
            tied = (model.get_parameter(name) for name in (first, other))
            placements = [getattr(parameter, "placements", "not at all") for parameter in tied]
            holder = model.get_submodule(parent(other))
            used = _placed(model, other) or isinstance(holder, (nn.Linear, nn.Embedding))
            if used and placements[0] != placements[1]:
                raise ConfigError(
                    f"plan.tensor: {first} and {other} are one tied parameter but are placed"
                    f" differently: {placements[0]} and {placements[1]}"
                )
        tie(model, [first, *others])


def _placed(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_parameter(name), DTensor)


def _uneven_input(mesh: DeviceMesh, columns: int, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Make a plain input a DTensor cut from ``columns``: PyTorch assumes parts of equal size."""
    if isinstance(inputs[0], DTensor):
        return inputs
    whole = torch.empty((*inputs[0].shape[:-1], columns), device="meta")
    how: Any = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(inputs[0], mesh, [Shard(-1)], **how), *inputs[1:]


class _WholeRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else local_tensor(self.weight)
        return self.normalized(_whole_input(x), weight)


class _WholeLayerNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        weight, bias = (None if p is None else local_tensor(p) for p in (self.weight, self.bias))
        return F.layer_norm(_whole_input(input), self.normalized_shape, weight, bias, self.eps)


_WHOLE_NORMS: dict[type[nn.Module], type[nn.Module]] = {
    nn.RMSNorm: _WholeRMSNorm,
    RMSNorm: _WholeRMSNorm,
    nn.LayerNorm: _WholeLayerNorm,
}


def _whole_input(x: Tensor) -> Tensor:
    return local_tensor(x.redistribute(placements=[Replicate()]) if isinstance(x, DTensor) else x)


def _summed_gradient(mesh: DeviceMesh, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    whole = DTensor.from_local(output, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def _local_output(module: nn.Module, output: Any, device_mesh: DeviceMesh) -> Any:
    return tree_map_only(DTensor, DTensor.to_local, output)


def _replicated_input(module: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh) -> Any:
    if not inputs:
        raise ConfigError(
            f"plan.replicate: {type(module).__name__} is called by keyword; pass its input by position"
        )
    first = inputs[0]
    if not isinstance(first, DTensor):
        first = DTensor.from_local(first, device_mesh, [Replicate()], run_check=False)
    if first.placements != (Replicate(),):
        first = first.redistribute(placements=[Replicate()])
    return first, *inputs[1:]
