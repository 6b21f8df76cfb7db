"""The options for carrying out a plan: the tables of train.toml that ``compose.apply`` takes.

The result of ``compose.apply``: the cut model, and what was done to it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from compose.memory.activation_checkpointing import ActivationCheckpoint
from compose.memory.activation_offload import ActivationOffload
from compose.memory.compilation import Compile
from compose.memory.float8 import NOTHING, Choice
from compose.memory.precision import Precision
from compose.ops.batch import Sample
from compose.ops.dropout import Masks
from compose.parallel.comm import Comm
from compose.parallel.context_parallel import Balance
from compose.parallel.data_parallel import DataParallel, UnitMessages
from compose.parallel.expert_parallel import RoutingMetrics
from compose.parallel.mesh import Parallel
from compose.parallel.output_projection import Output

if TYPE_CHECKING:  # it imports PyTorch's pipelines, and these the compiler
    from compose.pipeline.pipeline_parallel import PipelineRunner


@dataclass(frozen=True)
class Options:
    """The options of ``compose.apply`` besides the plan. Each field is a table of train.toml."""

    parallel: Parallel = field(default_factory=Parallel)
    """The degrees, which are those of the mesh; ZeRO, the pipeline's schedule and the like."""
    precision: Precision = field(default_factory=Precision)
    """Types of forward, backward, reduction and master weights."""
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    """The results that backward computes again, and those that wait for it in host memory."""
    compile: Compile = field(default_factory=Compile)
    """The parts that torch.compile makes graphs of."""
    comm: Comm = field(default_factory=Comm)
    """When FSDP begins its gathers, and in how many bits it sends; the limits of time are the
    trainer's."""
    seq_len: int = 2048
    """Tokens of a sample. FLOPs and bytes, by which layers are shared out, depend on it."""
    inputs: Callable[[], Mapping[str, Tensor]] | None = None
    """Makes a model's inputs of one sample, on meta; None is token ids of seq_len tokens."""

    @property
    def sample(self) -> Sample:
        """The sample for which FLOPs and bytes are counted."""
        return self.inputs or self.seq_len


class Messages(Protocol):
    """Messages that an add-on sends in place of those of data, tensor and expert parallel."""

    def styles(
        self, styles: Iterable[tuple[str, ParallelStyle]], axis: str
    ) -> list[tuple[str, ParallelStyle]]:
        """Return styles by modules' names, with copies of those whose messages it sends on an axis."""
        ...

    def stage(self) -> UnitMessages | None:
        """Return the messages of a new stage's units, if it sends those."""
        ...

    def optimizer_step(self, scale: float) -> AbstractContextManager[None]:
        """Let gradients be those of one optimizer step, of a loss scale."""
        ...


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
    causal: bool = True
    """Whether attention to sequences that ranks share is causal, so that it sees no padding."""
    sequence_ranks: int = 1
    """Ranks of tp that share a sequence between layers; each holds an equal part of it."""
    pipeline: "PipelineRunner | None" = None
    """The runner of the stages; None if the model is not cut into stages."""
    output: Output | None = None
    """The projection that Plan.output names, if any."""
    offload: bool = False
    """Whether parameters stay in host memory between their uses."""
    activations: ActivationOffload | None = None
    """The object that moves saved activations to host memory, if any."""
    float8: Choice = NOTHING
    """The layers that compute in float8."""
    data: Sequence[DataParallel] = ()
    """The work of data parallel around forward and backward, for each stage of this rank."""
    compression: Messages | None = None
    """The messages that an add-on sends in fewer bytes, if any are."""
    dropout: Masks | None = None
    """The masks of dropout, if the model has any."""

    @cached_property
    def routing(self) -> RoutingMetrics:
        """The routers' report of a step."""
        return RoutingMetrics(self.model, self.mesh)

    @property
    def late(self) -> int:
        """Steps after which all ranks can know the numbers of a step; 0: at its end."""
        return self.pipeline.late if self.pipeline else 0

    def needed(self) -> range:
        """Return which batches the next step needs, counted from its own; most need that one alone.

        A pipeline without a flush runs forwards of later ones. Call ``forward_backward`` for each.
        """
        return self.pipeline.needed() if self.pipeline else range(1)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters, each with its name in the whole model.

        If stages of a pipeline share a parameter, a rank may hold several copies with one name.
        """
        aliases = self.pipeline.aliases if self.pipeline else {}
        for name, parameter in self.model.named_parameters():
            yield aliases.get(name, name), parameter

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
