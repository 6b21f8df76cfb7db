"""The options and the result of ``compose.apply``.

``Options`` holds tables of train.toml. ``Composition`` holds the parallelized model and its parts.
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
    """The degrees, which must be those of the mesh; the ZeRO stage, the schedule and other keys."""
    precision: Precision = field(default_factory=Precision)
    """Types of forward, backward, reduction and master weights."""
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    """The activations that backward computes again, and those that are offloaded to host memory."""
    compile: Compile = field(default_factory=Compile)
    """The parts that torch.compile makes graphs of."""
    comm: Comm = field(default_factory=Comm)
    """When FSDP begins its gathers, and how messages are compressed. Its timeouts are not read."""
    seq_len: int = 2048
    """Tokens of a sample. FLOPs and bytes of layers depend on it, and they balance the stages."""
    inputs: Callable[[], Mapping[str, Tensor]] | None = None
    """Makes the model's inputs for one sample, on meta; None means token ids of seq_len tokens."""

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
    """A model that was parallelized over a mesh, with everything that is needed to run it.

    It does not wrap the model: ``model`` is the module that ``compose.apply`` was given.
    """

    model: nn.Module
    """The module, of which this rank keeps only its part."""
    mesh: DeviceMesh
    """The mesh of ``compose.init_mesh``."""
    zero: int = 3
    """The ZeRO stage."""
    balance: Balance = "headtail"
    """How context parallel expects sequences to be cut."""
    causal: bool = True
    """With cp: whether attention is causal, so that it does not see padding at the end."""
    sequence_ranks: int = 1
    """Number of tp ranks over which the sequence is sharded between layers, in equal parts."""
    pipeline: "PipelineRunner | None" = None
    """The runner of this rank's stages; None without pipeline parallel."""
    output: Output | None = None
    """The output projection that Plan.output names, if any."""
    offload: bool = False
    """Whether parameters stay in host memory between their uses."""
    activations: ActivationOffload | None = None
    """The object that moves saved activations to host memory, if any."""
    float8: Choice = NOTHING
    """The layers that compute in float8."""
    data: Sequence[DataParallel] = ()
    """The state of data parallel (ZeRO), one for each stage of this rank."""
    compression: Messages | None = None
    """The compressed messages of an add-on, if any."""
    dropout: Masks | None = None
    """The masks of dropout, if the model has any."""

    @cached_property
    def routing(self) -> RoutingMetrics:
        """The routers' report of a step: loads, losses and dropped rows."""
        return RoutingMetrics(self.model, self.mesh)

    @property
    def late(self) -> int:
        """The number of steps after which all ranks know a step's loss and norm; 0: at its end.

        It is above 0 only in a pipeline without a flush (PipeDream).
        """
        return self.pipeline.late if self.pipeline else 0

    def needed(self) -> range:
        """Return the batches that the next step needs, counted from its own; most steps need only that.

        A pipeline without a flush also runs forwards of later batches. Call ``forward_backward``
        for each of these batches.
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
        """Return how many ranks of pp hold the parameter ``name``; a rank may have several stages."""
        if self.pipeline is None or self.holders(name) == 1:
            return 1
        stages = next(tied.holders for tied in self.pipeline.ties if tied.name == name)
        return len({self.pipeline.placement[stage] for stage, _ in stages})


def module_of(whole: nn.Module | Composition) -> nn.Module:
    """Return the module of a Composition, or the module itself."""
    return whole.model if isinstance(whole, Composition) else whole
