"""Faults to put in on purpose: each breaks one thing while it lasts."""

import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

import compose.train.step
import compose.weights
from compose.composition import Composition
from compose.ops import attention_kernels
from compose.ops.attention_layout import Block, Pieces
from compose.ops.tensors import local_tensor
from compose.ops.torch_versions import REDUCE_SCATTER
from compose.parallel import gradient_sum, local_parallel, stream_messages
from compose.parallel.data_parallel import DataParallel
from compose.parallel.mesh import sum_over
from compose.pipeline.pipeline_parallel import PipelineRunner
from compose.pipeline.stage import Runtime, RuntimeStage
from compose.proof.report import Report
from models.llama import Model
from tests.support.helpers import prove_step

Fault = Callable[[], AbstractContextManager[None]]
EVERYTHING = {"*"}


def replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], Fault]:
    """Make a fault of a function, which runs in place of ``owner.name`` and gets that as its first."""

    def made(fake: Callable[..., Any]) -> Fault:
        @contextmanager
        def fault() -> Iterator[None]:
            real = getattr(owner, name)

            def instead(*args: Any, **kwargs: Any) -> Any:
                return fake(real, *args, **kwargs)

            static = isinstance(inspect.getattr_static(owner, name), staticmethod)
            with mock.patch.object(owner, name, staticmethod(instead) if static else instead):
                yield

        return wraps(fake)(fault)

    return made


@replaces(dist, REDUCE_SCATTER)
def reduce_scatter_keeps_own_part(_: Any, group: dist.ProcessGroup, **named: Any) -> None:
    """dp_shard's gradient is not summed: each rank keeps its part of its own."""
    tensors = [value for value in named.values() if isinstance(value, Tensor)]
    output, whole = sorted(tensors, key=Tensor.numel)
    output.copy_(whole.chunk(group.size())[group.rank()])


@replaces(dist, "all_reduce")
def all_reduce_of_gradients_is_skipped(real: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """dp_replicate's gradient is not summed. (Up to three numbers, as metrics, still are.)"""
    return real(tensor, *args, **kwargs) if tensor.numel() <= 3 else None


@contextmanager
def partial_gradients_are_taken_as_whole() -> Iterator[None]:
    """The tp ranks' parts of a replicated weight's gradient are not summed."""
    real, of_fsdp = gradient_sum._complete, FSDPParam._get_grad_inner_tensor

    def fake_of_fsdp(self: FSDPParam, gradient: Tensor) -> Tensor:
        if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
            return gradient.to_local()
        return of_fsdp(self, gradient)

    def fake(parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            gradient, here = cast(DTensor, parameter.grad), cast(DTensor, parameter)
            if any(p.is_partial() for p in gradient.placements):
                parameter.grad = DTensor.from_local(
                    gradient.to_local(), here.device_mesh, here.placements, run_check=False
                )
        real(parameters)

    with (
        mock.patch.object(gradient_sum, "_complete", fake),
        mock.patch.object(FSDPParam, "_get_grad_inner_tensor", fake_of_fsdp),
    ):
        yield


@replaces(local_parallel._HeadLinear, "forward")
def shared_heads_are_taken_as_whole(_: Any, self: Any, x: Tensor) -> Tensor:
    """LocalHeads forgets that the ranks of a shared head each hold a part of its gradient."""
    heads = F.linear(x, self.weight.to_local()).unflatten(-1, (self.n_heads, -1))
    return heads[..., self.head, :]


@replaces(stream_messages._PlainMessage, "backward")
def inputs_gradients_stay_parts(real: Any, ctx: Any, gradient: Tensor) -> Any:
    """LocalInput does not sum the gradients of what the ranks' parts of a layer have read."""
    if ctx.kind != "scatter":
        return real(ctx, gradient)
    return gradient.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].clone(), None, None, None


@replaces(compose.train.step, "sum_over")
def norm_is_not_summed_over_tp(_: Any, tensor: Tensor, mesh: Any, axes: Any) -> Tensor:
    return sum_over(tensor, mesh, [axis for axis in axes if axis != "tp"])


@replaces(compose.train.step, "sum_over")
def loss_is_averaged_per_rank(_: Any, tensor: Tensor, mesh: Any, axes: Any) -> Tensor:
    """Ranks divide by their own number of targets, and the mean of means is taken."""
    if tensor.dtype == torch.int64:
        return tensor * mesh["dp_shard"].size() * mesh["dp_replicate"].size()
    return sum_over(tensor, mesh, axes)


@contextmanager
def gradients_are_reduced_on_the_first_micro_batch() -> Iterator[None]:
    """The others' gradients stay behind, unreduced."""
    first = iter([True])

    real = DataParallel.prepare_micro_batch

    def fake(self: DataParallel, last: bool) -> None:
        real(self, next(first, False))

    with mock.patch.object(DataParallel, "prepare_micro_batch", fake):
        yield


@replaces(FSDPModule, "set_gradient_divide_factor")
def gradients_are_averaged_over_ranks(real: Any, self: FSDPModule, factor: float) -> None:
    """FSDP's default: a second division, after that by the number of targets."""
    real(self, 2.0)


@replaces(compose.weights, "local_shard")
def wo_shards_are_in_reverse_order(real: Any, whole: Tensor, like: Tensor) -> Tensor:
    cut = isinstance(like, DTensor) and like.placements[-1].is_shard(1)
    if cut and whole.shape == (64, 64):
        whole = torch.cat(whole.chunk(2, dim=1)[::-1], dim=1)
    return real(whole, like)


@replaces(Model, "init_parameter")
def one_replica_starts_elsewhere(
    real: Any, self: Any, name: str, tensor: Tensor, generator: torch.Generator
) -> None:
    """The last rank draws norms other than ones."""
    real(self, name, tensor, generator)
    if tensor.ndim == 1 and dist.get_rank() == 1:
        tensor += 1e-3


@replaces(attention_kernels, "blocks")
def a_block_is_skipped(real: Any, pieces: Pieces, lengths: tuple[int, int], starts: Any) -> list[Block]:
    """Ring attention leaves out the last rectangle between two ranks."""
    result = real(pieces, lengths, starts)
    return result if pieces.q_starts == pieces.k_starts else result[:-1]


@replaces(attention_kernels, "blocks")
def an_edge_between_ranks_is_off_by_one(
    real: Any, pieces: Pieces, lengths: tuple[int, int], starts: Any
) -> list[Block]:
    """A document that spans ranks loses its first key on the earlier one."""
    return [
        b if b.causal or b.k.stop - b.k.start < 2 else replace(b, k=slice(b.k.start + 1, b.k.stop))
        for b in real(pieces, lengths, starts)
    ]


@replaces(torch, "logaddexp")
def blocks_are_merged_without_rescaling(_: Any, before: Tensor, new: Tensor) -> Tensor:
    """Outputs are added up with equal weights, whatever their log-sum-exp."""
    first = before.isinf()
    return torch.where(first, new, torch.maximum(before, new) + 0.5)


@replaces(compose.train.step, "shard_sequence")
def positions_are_counted_anew_on_each_rank(
    real: Any, batch: Any, mesh: Any, balance: Any
) -> dict[str, Tensor]:
    """Rotary positions of the second piece of a sequence begin at 0 again."""
    result = real(batch, mesh, balance)
    size = result["positions"].shape[1]
    return {**result, "positions": torch.arange(size).expand_as(result["positions"])}


@replaces(RuntimeStage, "perform_reduce_grad")
def a_stage_averages_over_micro_batches(_: Any, self: RuntimeStage, grad_scale_factor: int) -> None:
    """The last stage divides its gradients by the number of micro-batches: PyTorch's default."""
    if self.is_last:
        self.scale_grads(8)


@replaces(PipelineRunner, "_sum_tied_gradients")
def a_tied_weight_is_summed_once_too_often(real: Any, self: PipelineRunner, earlier: Any) -> None:
    real(self, earlier)
    real(self, earlier)


@replaces(PipelineRunner, "_sum_tied_gradients")
def a_tied_weight_is_not_summed(_: Any, self: PipelineRunner, earlier: Any) -> None:
    pass


@replaces(PipelineRunner, "_sum_tied_gradients")
def copies_of_a_tied_weight_are_rounded_differently(
    real: Any, self: PipelineRunner, earlier: Any
) -> None:
    """The last stage's copy of the summed gradient passes through bfloat16's eight bits."""
    real(self, earlier)
    if self.rank == 1:
        gradient = self.stages[0].module.get_parameter("output.weight").grad
        assert gradient is not None
        gradient.copy_(gradient.bfloat16())


@replaces(Runtime, "_split_inputs")
def a_later_stage_sees_another_micro_batch(real: Any, self: Any, args: Any, kwargs: Any = None) -> Any:
    """Positions and documents come to the second stage one micro-batch too early."""
    first, rest = real(self, args, kwargs)
    return first, rest[1:] + rest[:1] if self.rank == 1 else rest


@replaces(compose.train.step, "sum_over")
def norm_is_not_summed_over_pp(_: Any, tensor: Tensor, mesh: Any, axes: Any) -> Tensor:
    norm = tensor.dtype == torch.float64
    return sum_over(tensor, mesh, [axis for axis in axes if axis != "pp" or not norm])


@replaces(Composition, "holders")
def a_tied_weight_counts_twice_in_the_norm(*_: Any) -> int:
    return 1


# The package has a function of this name.
@replaces(importlib.import_module("compose.proof.verify"), "parameters_of")
def a_parameter_is_on_no_rank(real: Any, composition: Composition) -> dict[str, list[nn.Parameter]]:
    return {name: held for name, held in real(composition).items() if name != "norm.weight"}


@replaces(compose.train.step, "finish_step")
def a_gradient_is_not_a_number_on_the_last_rank(real: Any, model: nn.Module, mesh: Any) -> None:
    real(model, mesh)
    if dist.get_rank() == dist.get_world_size() - 1:
        gradient = model.get_parameter("norm.weight").grad
        assert gradient is not None
        local_tensor(gradient)[0] = math.nan


def with_fault(fault: Fault, keys: dict[str, object]) -> Report:
    """On every rank of a pool: the proof while the fault lasts."""
    with fault():
        return prove_step(keys)


def assert_named(report: Report, quantity: str, names: set[str]) -> None:
    """Exactly those rows of ``quantity`` fail whose names match one of ``names``."""
    assert not report.ok
    rows = [row for row in report.rows if row.quantity == quantity]
    failed = {row.name for row in rows if not row.ok}
    expected = {row.name for row in rows if any(fnmatchcase(row.name, p) for p in names)}
    assert expected
    assert failed == expected, str(report)
