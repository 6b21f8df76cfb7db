"""Tensor parallel of a model's two ends: the rows of the vocabulary are cut, activations stay plain.

The split is Megatron's (Shoeybi et al. 2019, arXiv:1909.08053, section 3): each rank looks up the
tokens that are among its rows, and computes the logits of its rows. Only the logits are a DTensor, so
that a loss can tell that they are a part.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from compose.errors import ConfigError
from compose.ops.tensors import local_tensor
from compose.parallel.stream_messages import SendsActivations


class LocalEmbedding(SendsActivations, RowwiseParallel):
    """A style for an nn.Embedding (V, D): each rank has a part of the V rows.

    ``stream`` is the layout of the output (B, L, D): Shard(1) or Replicate(). The input is whole on
    every rank.
    """

    def __init__(self, stream: Placement) -> None:
        super().__init__(input_layouts=Replicate(), output_layouts=stream)
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Embedding):
            raise ConfigError(f"LocalEmbedding: {module} is no nn.Embedding")
        if module.max_norm is not None or module.scale_grad_by_freq:
            raise ConfigError(f"LocalEmbedding: {module} has options; use RowwiseParallel")
        kind = type(module)
        if kind is not nn.Embedding:  # what a subclass does with rows, it does with their sum
            kind = type(kind.__name__, (kind, _RowEmbedding), {})  # type: ignore[misc]
        module.__class__ = _RowEmbedding if kind is nn.Embedding else kind
        assert isinstance(module, _RowEmbedding)
        module.over = device_mesh
        messages = ("scatter", "gather") if self.stream.is_shard() else ("sum", "keep")
        module.send = partial(self.send, *messages, device_mesh.get_group().group_name)
        # Buffers stay plain, as what a subclass computes with: distribute_module would place them.
        self._partition_embedding_fn("", module, device_mesh)
        return module


class LocalOutput(SendsActivations, ColwiseParallel):
    """A style for the projection (nn.Linear without bias) onto a vocabulary V: each rank has some rows.

    ``stream`` is the layout of the input (B, L, D): Shard(1) or Replicate(). The output is a DTensor
    (B, L, V) sharded over V if ``sharded``, which a loss in parallel needs. Else it is a plain tensor,
    whole on every rank.
    """

    def __init__(self, stream: Placement, sharded: bool = True) -> None:
        layout = Shard(2) if sharded else Replicate()
        super().__init__(input_layouts=stream, output_layouts=layout, use_local_output=not sharded)
        self.stream, self.sharded = stream, sharded

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not nn.Linear or module.bias is not None:
            raise ConfigError(f"LocalOutput: {module} is no nn.Linear without bias")
        module.__class__ = _ColumnOutput
        assert isinstance(module, _ColumnOutput)
        module.over, module.stream, module.sharded = device_mesh, self.stream, self.sharded
        messages = ("gather", "scatter") if self.stream.is_shard() else ("keep", "sum")
        module.send = partial(self.send, *messages, device_mesh.get_group().group_name)
        return distribute_module(module, device_mesh, self._partition_linear_fn)


def placed_input(module: nn.Module, hidden: Tensor) -> Tensor:
    """Return the input of ``module`` as a DTensor if the module has the style LocalOutput."""
    if not isinstance(module, _ColumnOutput):
        return hidden
    return DTensor.from_local(hidden, module.over, [module.stream], run_check=False)


class _RowEmbedding(nn.Embedding):
    over: DeviceMesh
    send: Callable[[Tensor], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        weight = local_tensor(self.weight)
        each = -(-self.num_embeddings // self.over.size())  # the rule of Tensor.chunk
        rank, ranks = self.over.get_local_rank(), self.over.size()
        first = each * rank
        at = input - first
        padding = -1 if self.padding_idx is None else self.padding_idx - first
        padding = padding if 0 <= padding < len(weight) else None
        if ranks == 1:
            return F.embedding(at, weight, padding)
        # A token that is a row of no rank is left: its look-up fails, as on one process.
        elsewhere = at < 0 if rank else at >= len(weight)
        if 0 < rank < ranks - 1:
            elsewhere |= at >= len(weight)
        result = F.embedding(at.masked_fill(elsewhere, 0), weight, padding)
        result = result.masked_fill(elsewhere[..., None], 0.0)
        return self.send(result)


class _ColumnOutput(nn.Linear):
    over: DeviceMesh
    stream: Placement
    sharded: bool
    send: Callable[[Tensor], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        if self.over.size() > 1:
            input = self.send(input)
        local = F.linear(input, local_tensor(self.weight))
        shape = (*local.shape[:-1], self.out_features)
        stride = (shape[1] * shape[2], shape[2], 1)
        logits = DTensor.from_local(
            local, self.over, [Shard(2)], run_check=False, shape=torch.Size(shape), stride=stride
        )
        return logits if self.sharded else logits.full_tensor()
