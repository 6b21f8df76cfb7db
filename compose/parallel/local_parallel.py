"""Tensor parallel with plain activations: PyTorch's styles, at a fraction of what they cost the host.

PyTorch's styles make DTensors of activations. Each operator then works out the layout of its result,
forward and backward; for a small model this is most of a step. Here only weights are DTensors.
Activations are local tensors, and the messages are Megatron's (Shoeybi et al. 2019, arXiv:1909.08053).
With a sequence-parallel stream they are those of Korthikanti et al. 2022 (arXiv:2205.05198).

A plain tensor does not tell whether its gradient still has to be summed over the axis. Inside a
LocalInput it has to be. So every module with weights in there must have a style of this file, and each
of these styles takes part in that sum.
"""

import inspect
import re
from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from compose.errors import ConfigError
from compose.ops.layers import RMSNorm
from compose.ops.tensors import local_weight, place_parameters
from compose.parallel.lora_parallel import AdapterParallel
from compose.parallel.name_patterns import inside
from compose.parallel.stream_messages import SendsActivations, Style, send_stream
from compose.parallel.tensor_parallel import HeadParallel

M = TypeVar("M", bound=nn.Module)


class PlainActivations:
    """A style of this file: its module takes and returns plain tensors."""

    def _by_dtensors(self) -> ParallelStyle:
        """Return PyTorch's style that does the same; this style if its output is plain in any case."""
        return cast(ParallelStyle, self)


class LocalInput(PlainActivations, SendsActivations, PrepareModuleInput):
    """A style that gathers a module's first input, for the LocalColwise and LocalHeads inside it.

    ``stream`` is the layout of that input (B, L, D): Shard(1) or Replicate(). The module gets the whole
    input as a plain tensor. Each rank has a part of its gradient, and the parts are summed.
    """

    def __init__(self, stream: Placement, inputs: int = 1) -> None:
        """Take the layout of the first input, and how many inputs the module takes by position."""
        others = (None,) * (inputs - 1)
        super().__init__(input_layouts=(stream, *others), desired_input_layouts=(Replicate(), *others))
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        forward, backward = ("gather", "scatter") if self.stream.is_shard() else ("keep", "sum")
        if device_mesh.size() > 1:
            group = device_mesh.get_group().group_name
            send = partial(self.send, forward, backward, group)
            name = next(iter(inspect.signature(module.forward).parameters), "")

            def sent(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
                if args:
                    return (send(args[0]), *args[1:]), kwargs
                if name not in kwargs:
                    raise ConfigError(
                        f"LocalInput: {type(module).__name__} was called without its input {name}"
                    )
                return args, {**kwargs, name: send(kwargs[name])}

            module.register_forward_pre_hook(sent, with_kwargs=True)
        return module

    def _by_dtensors(self) -> ParallelStyle:
        return PrepareModuleInput(
            input_layouts=self.input_layouts, desired_input_layouts=self.desired_input_layouts
        )


class LocalColwise(PlainActivations, ColwiseParallel):
    """A style for an nn.Linear (D, N) inside a LocalInput: each rank has a part of the N outputs.

    ``even`` says whether the axis' size divides N; PyTorch's style has to know it.
    """

    def __init__(self, even: bool = True) -> None:
        # PyTorch takes its default, Shard(-1), for another layout, and would redistribute to it.
        super().__init__(output_layouts=Shard(2), use_local_output=even)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _become(module, (nn.Linear,), _ColumnLinear, self)
        return distribute_module(module, device_mesh, self._partition_linear_fn)

    def _by_dtensors(self) -> ParallelStyle:
        return ColwiseParallel(output_layouts=Shard(2), use_local_output=self.use_local_output)


class LocalRowwise(PlainActivations, SendsActivations, RowwiseParallel):
    """A style for an nn.Linear (N, D): each rank has a part of the N inputs.

    ``stream`` is the layout of the output (B, L, D): Shard(1) or Replicate(). A bias (D,) is whole on
    every rank. It is added after the ranks' outputs are summed: each rank adds it to its own part of
    the stream. With Shard(1) these are different tokens, so the bias' gradient is summed over the axis.
    """

    def __init__(self, stream: Placement) -> None:
        super().__init__(output_layouts=stream)
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _become(module, (nn.Linear,), _RowLinear, self)
        sharded = self.stream.is_shard()
        forward, backward = ("scatter", "gather") if sharded else ("sum", "keep")
        send = None
        if device_mesh.size() > 1:
            group = device_mesh.get_group().group_name
            send = partial(self.send, forward, backward, group)

        def sent(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            output = output if send is None else send(output)
            bias = cast(Tensor | None, module.bias)
            return output if bias is None else output + local_weight(bias, partial=sharded)

        module.register_forward_hook(sent)
        return distribute_module(module, device_mesh, self._partition_linear_fn)

    def _by_dtensors(self) -> ParallelStyle:
        return RowwiseParallel(output_layouts=self.stream)


class LocalHeads(PlainActivations, HeadParallel):
    """HeadParallel inside a LocalInput.

    Where ranks share a head, each rank has its own head's part of two gradients: the weight's and the
    input's. The sum for the weight is made here, and the LocalInput makes the one for the input.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        size = device_mesh.size()
        if self.n_heads % size == 0:
            colwise = LocalColwise()
            colwise.src_data_rank = self.src_data_rank
            return colwise._apply(module, device_mesh)
        self._check(size)
        linear = _become(module, (nn.Linear,), _HeadLinear, self)
        linear.n_heads, linear.head = self.n_heads, device_mesh.get_local_rank() * self.n_heads // size
        place = partial(place_parameters, Replicate(), self.src_data_rank)
        return distribute_module(linear, device_mesh, place)

    def _by_dtensors(self) -> ParallelStyle:
        return HeadParallel(self.n_heads)


class _WholeWeights(PlainActivations, SequenceParallel):
    def __init__(self, sequence_dim: int = 1) -> None:
        super().__init__(sequence_dim=sequence_dim, use_local_output=True)


class LocalNorm(_WholeWeights):
    """A style for an nn.RMSNorm or nn.LayerNorm that is whole on every rank and takes local tensors.

    The local tensors are a part of the tokens or heads, so the gradients of weight and bias are summed
    over the axis.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        kind = _LocalLayerNorm if type(module) is nn.LayerNorm else _LocalRMSNorm
        _become(module, (nn.RMSNorm, RMSNorm, nn.LayerNorm), kind, self)
        return distribute_module(module, device_mesh, self._replicate_module_fn)


class LocalWideNorm(_WholeWeights):
    """A style for an RMSNorm over the whole width of ``n_heads`` heads, of which each rank has a part.

    The weight is whole on every rank, and its gradient is summed over the axis. The squares of a token
    are summed too, forward and backward: two messages (B, L, 1). If n ranks share a head (LocalHeads),
    its squares are in the sum n times.
    """

    def __init__(self, n_heads: int) -> None:
        super().__init__(sequence_dim=2)
        self.n_heads = n_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        norm = _become(module, (RMSNorm,), _WideRMSNorm, self)
        norm.copies = max(1, device_mesh.size() // self.n_heads)
        norm.part = device_mesh.get_local_rank() // norm.copies
        norm.group = device_mesh.get_group().group_name
        return distribute_module(module, device_mesh, self._replicate_module_fn)


class LocalPositions(_WholeWeights):
    """A style for a table of positions, an nn.Embedding (P, D), before a stream of layout Shard(1).

    The table is whole on every rank. Its input (B, L) is too, and each rank looks up its own part of
    the L: (B, L / ranks, D). Each rank has a part of the table's gradient, so it is summed over the
    axis. Before a stream that is whole on every rank, the table belongs into ``replicate``.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.Embedding) and (
            module.padding_idx is not None or module.max_norm is not None or module.scale_grad_by_freq
        ):
            raise ConfigError(f"LocalPositions: {module} has options; put it into replicate")
        table = _become(module, (nn.Embedding,), _PositionTable, self)
        table.ranks, table.rank = device_mesh.size(), device_mesh.get_local_rank()
        return distribute_module(module, device_mesh, self._replicate_module_fn)


class LocalLinear(_WholeWeights):
    """A style for an nn.Linear that is whole on every rank and takes a part of the tokens.

    The gradients of its weight and bias are summed over the axis. A linear layer of another class has
    a ``product`` of input, weight and bias.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.Linear) and hasattr(module, "product"):
            module.forward = partial(_TokenLinear.forward, cast(_TokenLinear, module))
        else:
            _become(module, (nn.Linear,), _TokenLinear, self)
        return distribute_module(module, device_mesh, self._replicate_module_fn)


class LocalVector(PlainActivations, Style):
    """A style for a module that returns its only parameter (N,): each rank gets its part of the N."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda *given: local_weight(given[-1]))
        place = partial(place_parameters, Shard(0), self.src_data_rank)
        return distribute_module(module, device_mesh, place)


def unfit(model: nn.Module, styles: Iterable[tuple[str, ParallelStyle]]) -> list[str]:
    """Return one line for each module whose input's gradient would be summed twice, or never."""
    placed = dict(styles)
    inputs = {name for name, style in placed.items() if isinstance(style, LocalInput)}
    problems = []
    for name, module in model.named_modules():
        style, around = placed.get(name), inside(name, inputs)
        has_weights = any(True for _ in module.parameters(recurse=False))
        if around and has_weights and not isinstance(style, (PlainActivations, AdapterParallel)):
            problems.append(
                f"plan.tensor: {name} is in a module with LocalInput, and has no style of"
                " compose.parallel.local_parallel; give it one, or that module PrepareModuleInput"
            )
        if isinstance(style, (LocalColwise, LocalHeads)) and not around:
            problems.append(
                f"plan.tensor: {name} has {type(style).__name__}, and is in no module with LocalInput,"
                " which sums the gradient of its input"
            )
    # Problems that differ in the layer's number alone become one line.
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", problem) for problem in problems))


def by_dtensors(styles: Iterable[tuple[str, ParallelStyle]]) -> list[tuple[str, ParallelStyle]]:
    """Return ``styles`` with PyTorch's styles in place of those of this file."""
    return [(name, s._by_dtensors() if isinstance(s, PlainActivations) else s) for name, s in styles]


class _ColumnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, local_weight(self.weight), local_weight(self.bias))


class _RowLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        # The bias is added after the sum over ranks.
        return F.linear(input, local_weight(self.weight))


class _TokenLinear(nn.Linear):
    product = staticmethod(F.linear)

    def forward(self, input: Tensor) -> Tensor:
        bias = local_weight(self.bias, partial=True)
        return self.product(input, local_weight(self.weight, partial=True), bias)


class _HeadLinear(_TokenLinear):
    n_heads: int
    head: int

    def forward(self, input: Tensor) -> Tensor:
        heads = super().forward(input)
        return heads.unflatten(-1, (self.n_heads, -1))[..., self.head, :]


class _LocalRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.normalized(x, local_weight(self.weight, partial=True))


class _WideRMSNorm(RMSNorm):
    copies: int
    part: int
    group: str

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        weight = local_weight(self.weight, partial=True).narrow(0, self.part * width, width)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum(-1, keepdim=True)
        total = send_stream("sum", "sum", self.group, squares) / self.copies
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        scale = torch.rsqrt(total / self.normalized_shape[0] + eps)
        return (wide * scale * (self.offset + weight)).to(x.dtype)


class _LocalLayerNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        weight, bias = (local_weight(p, partial=True) for p in (self.weight, self.bias))
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class _PositionTable(nn.Embedding):
    ranks: int
    rank: int

    def forward(self, input: Tensor) -> Tensor:
        length = input.shape[1] // self.ranks
        mine = input.narrow(1, self.rank * length, length)
        return F.embedding(mine, local_weight(self.weight, partial=True))


def _become(
    module: nn.Module, kinds: tuple[type[nn.Module], ...], local: type[M], style: ParallelStyle
) -> M:
    """Give ``module``, which must be exactly of one of the classes, the forward of ``local``."""
    if type(module) not in kinds:
        names = " or ".join(dict.fromkeys(f"nn.{kind.__name__}" for kind in kinds))
        raise ConfigError(f"{type(style).__name__}: {module} is no {names}")
    module.__class__ = local
    return cast(M, module)
