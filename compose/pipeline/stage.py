"""What PyTorch's pipeline runtime is given of a stage, and what goes from one to the next."""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from compose.base.local_tensor import arrived
from compose.base.torch_versions import StageOverrides
from compose.errors import ConfigError
from compose.loss.cross_entropy import logits_of
from compose.loss.output import StepLoss
from compose.parallel.data_parallel import finish_backward, gather, prepare_micro_batch


def plain_stream(output: Any) -> Tensor:
    """What a stage hands on, by what its module returned.

    Raises ConfigError where that is not one plain tensor.
    """
    stream = arrived(logits_of(output))
    if type(stream) is not Tensor:
        raise ConfigError(
            f"plan.pipeline: a stage hands on a {type(stream).__name__}, and messages take one plain"
            " tensor; have the model return that between its layers, or use parallel.pp = 1"
        )
    return stream


class PlainStage(nn.Module):
    """Keeps a stage's FSDP from the runtime, which would gather it for a whole step. The last returns
    the loss of what its module returned, for the runtime takes tensors alone.

    loss: of the step at hand."""

    def __init__(self, stage: nn.Module, loss: Callable[[], StepLoss], last: bool) -> None:
        super().__init__()
        self.stage, self.loss, self.last = stage, loss, last

    def forward(self, *args: Any, targets: Tensor, **kwargs: Any) -> Tensor:
        loss = self.loss()
        loss.expect(targets)
        output = self.stage(*args, **kwargs)
        if self.last:
            return loss(output, targets)
        stream = plain_stream(output)
        # A view, as a slice of the positions is, cannot be detached in place, which a backward in two
        # parts does with it.
        return stream.clone() if stream._is_view() else stream


class RuntimeStage(StageOverrides, PipelineStage):
    """A stage that reduces gradients, and gathers and frees parameters, as its ZeRO stage says."""

    zero: int = 3

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        module = cast(PlainStage, self.submod).stage
        if backward_type == "full":
            prepare_micro_batch(module, self.zero, last=last_backward)
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        # The two halves look for the parameters themselves, and set gradients past FSDP's hooks.
        gather(module)
        result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        finish_backward(module, self.zero, last=last_backward)
        return result
