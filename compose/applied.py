"""What was applied to a model, for the functions that later run it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from compose.activation_offload import ActivationOffload
from compose.context_parallel import Balance
from compose.float8 import NOTHING, Choice
from compose.near_shards import NearGather
from compose.output import Output
from compose.pipeline_parallel import PipelineRunner


@dataclass(frozen=True)
class Applied:
    """zero: the ZeRO stage. balance: how ContextParallel expects sequences to be cut. pipeline: what
    runs the model if it is cut into stages. aliases: of parameters that had another name in the whole
    model, that name. output: what Plan.output names. offload: parameters are in host memory.
    activations: so is what units save for backward. float8: the layers that compute in it. gathers: of
    units that neighbours keep between them for a step."""

    zero: int = 3
    balance: Balance = "headtail"
    pipeline: PipelineRunner | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    output: Output | None = None
    offload: bool = False
    activations: ActivationOffload | None = None
    float8: Choice = NOTHING
    gathers: Sequence[NearGather] = ()


_KEY = "_compose_applied"


def remember(model: nn.Module, applied: Applied) -> None:
    """Note what ``compose.apply`` did to ``model``, on the model itself.

    It holds parts of it, and FSDP's state leads from any part to the whole: a table of models would
    keep them all, with their process groups.
    """
    vars(model)[_KEY] = applied


def applied_to(model: nn.Module) -> Applied:
    """What was noted of ``model``; the defaults, which then mean nothing, if nothing was."""
    return vars(model).get(_KEY, Applied())
