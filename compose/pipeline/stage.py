"""The form of a stage for PyTorch's pipeline runtime, and what goes from one stage to the next."""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_weight
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.utils._pytree import tree_map_only

from compose.errors import ConfigError
from compose.ops.cross_entropy import logits_of
from compose.ops.tensors import arrived
from compose.ops.torch_versions import StageOverrides, begin_fsdp_backward_at
from compose.parallel.data_parallel import DataParallel
from compose.parallel.output_projection import StepLoss


def plain_stream(output: Any) -> Tensor:
    """Return what a stage hands on, from what its module returned.

    Raises ConfigError if that is not one plain tensor.
    """
    stream = arrived(logits_of(output))
    if type(stream) is not Tensor:
        raise ConfigError(
            f"plan.pipeline: a stage hands on a {type(stream).__name__}, and messages take one plain"
            " tensor; have the model return that between its layers, or use parallel.pp = 1"
        )
    return stream


class PlainStage(nn.Module):
    """A wrapper that hides a stage's FSDP from the runtime, which would gather it for a whole step.

    The last stage returns the loss of its module's output, since the runtime takes tensors alone.
    ``loss`` returns the loss of the current step.
    """

    def __init__(self, stage: nn.Module, loss: Callable[[], StepLoss], last: bool) -> None:
        super().__init__()
        self.stage, self.loss, self.last = stage, loss, last

    def forward(self, *args: Any, targets: Tensor, **kwargs: Any) -> Tensor:
        """Run the stage."""
        loss = self.loss()
        loss.expect(targets)
        output = self.stage(*args, **kwargs)
        if self.last:
            stream = loss(output, targets)
        else:
            stream = plain_stream(output).contiguous()  # a GRU's has gaps, and messages take none
            # A backward in two parts detaches the stream in place. A view, such as a slice of the
            # positions, cannot be detached in place.
            stream = stream.clone() if stream._is_view() else stream
        begin_fsdp_backward_at(stream, self.stage, output)
        return stream


class Runtime(_PipelineScheduleRuntime):
    """The runtime, which cuts all that has rows into micro-batches; PyTorch's cuts tensors alone."""

    micro_batch: int = 1
    stages: "Sequence[RuntimeStage]" = ()
    """This rank's own."""

    def _split_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        kwargs, size = kwargs or {}, self.micro_batch
        samples = len(next(iter((*args, *kwargs.values()))))
        cuts = [slice(start, start + size) for start in range(0, samples, size)]
        return (
            [tuple(value[cut] for value in args) for cut in cuts],
            [{name: value[cut] for name, value in kwargs.items()} for cut in cuts],
        )


class RuntimeStage(StageOverrides, PipelineStage):
    """A stage that reduces gradients, and gathers and frees parameters, as its ZeRO stage says."""

    data: DataParallel
    gives_gradient = False
    """Whether a backward has given the stage's input a gradient."""

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run a backward, or a half of it, with FSDP as its ZeRO stage says."""
        if backward_type == "full":
            self.data.prepare_micro_batch(last=last_backward)
            grads, rest = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            self.data.end_micro_batch()
            self.gives_gradient |= any(x is not None for x in grads or ())
            return tree_map_only(Tensor, Tensor.contiguous, grads), rest
        # The two halves look up the parameters themselves, and set gradients without FSDP's hooks.
        self.data.gather()
        if backward_type == "weight":
            groups = bwd_kwargs["param_groups"]
            # Where a weight enters the stream twice, other groups need a part of the same graph.
            again = any(len(group["intermediates"]) > 1 for group in groups)
            stage_backward_weight(self.submod.parameters(), groups, retain_graph=again)
            result = (), None
        else:
            ends = [get_gradient_edge(x) for x in bwd_kwargs["stage_output"] if x.requires_grad]
            grads, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            self.gives_gradient |= any(x is not None for x in grads or ())
            grads = tree_map_only(Tensor, Tensor.contiguous, grads)
            result = grads, _disjoint(groups or [], list(self.submod.parameters()))
            if ends and not groups:  # a detached stream: no group is behind the stage's input
                _weights_backward(self.submod, ends, bwd_kwargs["output_grads"])
        self.data.finish_backward(last=last_backward, of_inputs=backward_type == "input")
        return result


def check_detached(
    stages: Sequence[RuntimeStage], tied: Container[Tensor], group: dist.ProcessGroup
) -> None:
    """Raise ConfigError if a stage gives trained weights of stages before it no gradient; a collective.

    They would have gradients of 0, by which an optimizer decays them, where one process has none.
    ``tied`` are weights that have other gradients too. The host waits for the device.
    """
    flags = torch.zeros(2, stages[0].num_stages, device=stages[0].device)
    for stage in stages:
        trained = [p for p in stage.submod.parameters() if p.requires_grad and p not in tied]
        flags[0, stage.stage_index] = not (stage.is_first or stage.gives_gradient)
        flags[1, stage.stage_index] = bool(trained)
    dist.all_reduce(flags, group=group)
    detached, trained_at = flags.tolist()
    for number, is_detached in enumerate(detached):
        if is_detached and any(trained_at[:number]):
            raise ConfigError(
                f"plan.pipeline: stage {number} gives its input no gradient, as x.detach() does, and"
                " stages before it would get zeros, by which an optimizer decays weights; freeze their"
                " weights by requires_grad_(False), or use parallel.pp = 1"
            )


@torch.no_grad()
def _weights_backward(module: nn.Module, ends: Sequence[Any], given: Sequence[Tensor] | None) -> None:
    """Add to the gradients of weights those from the ends of a stage's graph."""
    weights = [p for p in module.parameters() if p.requires_grad]
    new = torch.autograd.grad(ends, weights, given, allow_unused=True) if weights else ()
    for weight, gradient in zip(weights, new, strict=True):
        if gradient is not None:
            weight.grad = gradient if weight.grad is None else weight.grad + gradient


def _disjoint(groups: Iterable[dict[str, Any]], weights: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Return groups of weights, with the places where they enter the stream, joined where they overlap.

    PyTorch adds a weight's gradient once for each group that has it. The groups are in the order of
    their first ``weights``: PyTorch's own goes by addresses, and what is recomputed for one group after
    another sends messages, which all ranks of tp, cp and ep must send in one order.
    """
    places = {id(weight): place for place, weight in enumerate(weights)}
    results: list[dict[str, Any]] = []
    for group in groups:
        params, grads = group["params"], dict(zip(group["intermediates"], group["grads"], strict=True))
        for other in [one for one in results if not params.isdisjoint(one["params"])]:
            results.remove(other)
            params |= other["params"]
            grads |= zip(other["intermediates"], other["grads"], strict=True)
        one = {"params": params, "intermediates": [*grads], "grads": [*grads.values()]}
        results.append(one)
    return sorted(results, key=lambda one: min(places[id(node.variable)] for node in one["params"]))
