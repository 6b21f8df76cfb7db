"""The result of ``compose.apply``: the cut model, and what was done to it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compose.comm.compression import Compression
from compose.loss.output import Output
from compose.memory.activation_offload import ActivationOffload
from compose.operators.dropout import Masks
from compose.parallel.secondary_shards import SecondaryGather
from compose.parallel.sequence import Balance
from compose.pipeline.pipeline_parallel import PipelineRunner
from compose.precision.float8 import NOTHING, Choice


@dataclass(frozen=True)
class Composition:
    """A model that was cut over a mesh, with everything that running it needs.

    It holds the model and does not wrap it: ``model`` is the module that ``compose.apply`` was given.
    """

    model: nn.Module
    """The module; this rank keeps only its part of it."""
    mesh: DeviceMesh
    """The mesh of ``compose.init_mesh``."""
    zero: int = 3
    """The ZeRO stage."""
    balance: Balance = "headtail"
    """How context parallel expects sequences to be cut."""
    sequence_ranks: int = 1
    """Ranks of tp that share a sequence between layers; each holds an equal part of it."""
    pipeline: PipelineRunner | None = None
    """The runner of the stages; None if the model is not cut into stages."""
    output: Output | None = None
    """The projection that Plan.output names, if any."""
    offload: bool = False
    """Whether parameters stay in host memory between their uses."""
    activations: ActivationOffload | None = None
    """The object that moves saved activations to host memory, if any."""
    float8: Choice = NOTHING
    """The layers that compute in float8."""
    gathers: Sequence[SecondaryGather] = ()
    """Gathers of units whose shards neighbours keep for a step."""
    compression: Compression | None = None
    """The messages that are sent in fewer bytes, if any are."""
    dropout: Masks | None = None
    """The masks of dropout, if the model has any."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names in the whole model of parameters that have another name here, by the name here."""
        return self.pipeline.aliases if self.pipeline else {}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters, each with its name in the whole model.

        If stages of a pipeline share a parameter, a rank may hold several copies with one name.
        """
        for name, parameter in self.model.named_parameters():
            yield self.aliases.get(name, name), parameter

    def holders(self, name: str) -> int:
        """Return how many stages of the pipeline hold the parameter ``name`` of the whole model."""
        ties = self.pipeline.ties if self.pipeline else ()
        return next((len(tied.holders) for tied in ties if tied.name == name), 1)

    def holding_ranks(self, name: str) -> int:
        """Return how many ranks of pp hold the parameter ``name``; one may have several stages."""
        if self.pipeline is None or self.holders(name) == 1:
            return 1
        stages = next(tied.holders for tied in self.pipeline.ties if tied.name == name)
        return len({self.pipeline.placement[stage] for stage, _ in stages})


def module_of(whole: nn.Module | Composition) -> nn.Module:
    """Return the module of a model that was not cut, or of what ``compose.apply`` returned."""
    return whole.model if isinstance(whole, Composition) else whole
