"""The options for carrying out a plan: the tables of train.toml that ``compose.apply`` takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from compose.base.batch import Sample
from compose.comm.options import Comm
from compose.compiler.compilation import Compile
from compose.memory.activation_checkpointing import ActivationCheckpoint
from compose.parallel.mesh import Parallel
from compose.precision.options import Precision


@dataclass(frozen=True)
class Options:
    """The options of ``compose.apply`` besides the plan. Each field is a table of train.toml."""

    parallel: Parallel = field(default_factory=Parallel)
    """The degrees, which are those of the mesh; ZeRO, the pipeline's schedule and the like."""
    precision: Precision = field(default_factory=Precision)
    """Types of forward, backward, reduction and master weights."""
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    """What backward computes again, and what waits for it in host memory."""
    compile: Compile = field(default_factory=Compile)
    """What torch.compile makes graphs of."""
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
