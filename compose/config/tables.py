"""The whole configuration of a run: train.toml as one value.

A technique's table is a frozen dataclass next to its code. The others are here. toml.py reads files and
the command line. The rules between keys are in rules.py.
"""

import dataclasses
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from compose.composition import Options
from compose.config.addons import ADD_ONS, provided
from compose.config.hugging_face import ModelFolderPath
from compose.errors import LocalPath, NonNegative, Positive, ReadWith, Weight
from compose.memory.activation_checkpointing import ActivationCheckpoint
from compose.memory.compilation import Compile
from compose.memory.lora import Lora
from compose.memory.precision import Precision
from compose.object_storage import AnyPath, AnyPaths
from compose.optim.optimizers import Optimizer
from compose.parallel.comm import Comm
from compose.parallel.mesh import Parallel

_ELASTIC = ReadWith("is read with elastic; set {}", elastic=())
_SAMPLES = ReadWith("is read with samples; set {}", samples_every=())
_SLOW = ReadWith("is read with slow_rank; set {}", slow_rank=())
_SINKS = ReadWith("is read with sinks; set {}", sinks=())
_PATIENCE = ReadWith("is read with patience; set {}", patience=())


@dataclass(frozen=True)
class Run:
    """The table [run]."""

    dir: AnyPath = ""
    """Folder for all files of a run, local or in object storage (s3://, gs://, hf://); empty is
    runs/<timestamp>."""
    staging: LocalPath = ""
    """Local folder for files that are to be uploaded to object storage; empty is
    ~/.cache/dtensor-compose."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto is cuda where there is one."""
    elastic: bool = False
    """At each start choose a mesh for the ranks that have started, as close to [parallel] as possible;
    ranks without a place in it wait."""
    min_ranks: Annotated[NonNegative, _ELASTIC] = 0
    """With elastic: the number of ranks with torchrun's fewest nodes. A run is refused at its start if
    so few ranks have no legal mesh. 0: no check."""


@dataclass(frozen=True)
class Train:
    """The table [train]."""

    steps: Positive = 250
    """Optimizer steps of the whole schedule."""
    epochs: Annotated[float, Field(ge=0, le=1_000_000)] = 0.0
    """In place of steps: how often all samples of data.path are used, such as 3 or 0.5; 0: steps
    is used."""
    stop_after: NonNegative = 0
    """End after this many steps, the learning-rate schedule unchanged; 0 runs all."""
    seq_len: Positive = 256
    """Tokens per sample."""
    global_batch: Positive = 16
    """Samples per optimizer step over all ranks."""
    micro_batch: Positive = 2
    """Samples per rank in one forward pass; the rest of the rank's share is accumulated."""
    validate_every: NonNegative = 0
    """Steps between measurements of the validation loss, and one at the end; 0 is never."""
    patience: NonNegative = 0
    """End the run after so many validations in a row without an improvement; 0: all steps are taken."""
    min_delta: Annotated[float, Field(ge=0), _PATIENCE] = 0.0
    """Nats by which a validation loss must be below the best one to be an improvement."""
    seed: NonNegative = 0
    """Seed of the initial weights and of the order of the samples."""
    max_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this global norm; 0 turns clipping off."""
    loss_chunk: NonNegative = 0
    """Tokens of a micro-batch whose logits a rank holds at a time, in forward and backward; 0: all."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the square of each target's log-sum-exp of logits, beside its cross-entropy."""
    skip_nonfinite: bool = False
    """Leave the weights as they are after a step whose loss or gradient is not finite, and count it;
    false stops the run."""

    @property
    def last_step(self) -> int:
        """The step at which a run ends."""
        return min(self.stop_after or self.steps, self.steps)


@dataclass(frozen=True)
class Metrics:
    """The table [metrics]."""

    tensorboard: bool = True
    """Write TensorBoard events into run.dir."""
    sinks: tuple[Literal["wandb", "mlflow", "comet"], ...] = ()
    """Services that take the metrics too, each by its own library; needs dtensor-compose[NAME]."""
    project: Annotated[str, _SINKS] = ""
    """The services' project (MLflow: experiment) for the run; empty: the one in a service's own
    settings."""
    console_every: Positive = 10
    """Steps between console lines; metrics.jsonl has one line for every step."""
    noise_scale: bool = False
    """Measure the gradient noise scale, which estimates up to which batch size a larger batch pays."""
    slow_rank: Annotated[float, Field(ge=0)] = 0.0
    """Write each rank's seconds in its layers, and name a rank that takes this many times the median;
    0: no layer is timed."""
    slow_steps: Annotated[Positive, _SLOW] = 10
    """Number of steps in a row after which a slow rank is named."""
    samples_every: NonNegative = 0
    """Steps between continuations of prompts, and one at the end; 0 is never."""
    prompts: Annotated[tuple[str, ...], _SAMPLES] = ()
    """The texts to continue; with chats, messages to reply to."""
    sample_tokens: Annotated[Positive, _SAMPLES] = 64
    """Maximum number of tokens of a continuation."""
    sample_temperature: Annotated[float, Field(ge=0), _SAMPLES] = 0.0
    """Divides the logits, and a token is drawn by train.seed; 0 takes the likeliest token."""


@dataclass(frozen=True)
class Data:
    """The table [data]: what is trained on."""

    path: AnyPaths = "stdlib"
    """stdlib (the source text of Python's standard library), a text file or glob (read as bytes), a
    folder of compose tokenize, or a token file: .bin or .npy; several in a list are mixed."""
    weights: tuple[Weight, ...] = ()
    """Share of each data set of a list in the samples of training, in any unit; empty: by their
    sizes."""
    validation: AnyPath = ""
    """Data of the validation loss, all of which is used; named as path is."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Integer type of a .bin token file."""
    separator: Annotated[int, Field(ge=-1)] = -1
    """Token id that ends a document in a token file; -1: the file is one document. Text needs none."""
    skip_unreadable: bool = False
    """Name and count an image that cannot be read, and take the next one; else the run stops."""


@dataclass(frozen=True)
class Checkpoint:
    """The table [checkpoint]: when a run is saved, and what it begins with."""

    interval: NonNegative = 0
    """Steps between checkpoints in run.dir, and one at the end; 0 is off."""
    resume: Literal["auto", "none"] = "auto"
    """auto: resume from the newest whole checkpoint in run.dir; none: run.dir must be new."""
    load_hf: ModelFolderPath = ""
    """Hugging Face folder (config.json, safetensors) with the weights to begin with, or the name of a
    model in the hub's local cache; empty: drawn."""
    async_: bool = True
    """Write while training goes on; the step waits for a copy of the state only."""
    keep_last: Positive = 2
    """Newest checkpoints to keep."""
    keep_every: NonNegative = 0
    """Keep those of every so many steps too; 0 is none."""
    keep_best: NonNegative = 0
    """Save after a validation whose loss is among this many lowest, and keep these too; 0 is none."""
    fail_after: NonNegative = 0
    """Stop the run after so many failed saves; 0 trains on."""
    memory: NonNegative = 0
    """Steps between copies of the state in shared memory (/dev/shm), from which a restart resumes
    without the disk; with several nodes, each node also keeps the copies of another one; 0 is off."""


@dataclass(frozen=True)
class Model:
    """The table [model]: which model, and its shape."""

    name: str = "llama"
    """Folder under models/."""
    path: LocalPath = ""
    """Folder of your own model, in place of name: Config, Model, PRESETS and plan, in an __init__.py or
    in model.py and plan.py; empty: none."""
    preset: str = "debug"
    """Named shape of that model; any field of its config set here overrides the preset's. hf: model and
    shape are those of checkpoint.load_hf, and name may be left out."""
    config: Any = None  # the model's own config, with the fields set here
    lora: Lora = field(default_factory=Lora)  # the table [model.lora]


@dataclass(frozen=True)
class _CoreTables:
    """The tables that are no add-on's."""

    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    optimizer: Optimizer = field(default_factory=Optimizer)
    parallel: Parallel = field(default_factory=Parallel)
    precision: Precision = field(default_factory=Precision)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    comm: Comm = field(default_factory=Comm)
    source: str = "train.toml"  # the file's name; every message about a key begins with it

    @property
    def options(self) -> Options:
        """The options for ``compose.apply``."""
        tables = self.parallel, self.precision, self.activation_checkpoint, self.compile, self.comm
        return Options(*tables, self.train.seq_len)


OF_ADD_ONS = {
    name: (kind, ADD_ONS[add_on])
    for add_on, tables in provided("TABLES")
    for name, kind in tables.items()
}
"""The tables of add-ons by name, each with the table that it follows."""

if TYPE_CHECKING:

    class Config(_CoreTables):
        """All tables of a run."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Config = dataclasses.make_dataclass(
        "Config",
        [(name, kind, field(default_factory=kind)) for name, (kind, _) in OF_ADD_ONS.items()],
        bases=(_CoreTables,),
        namespace={"__module__": __name__, "__doc__": "All tables of a run."},
        frozen=True,
    )

TABLES: dict[str, type] = {}
for _field in dataclasses.fields(_CoreTables):
    if _field.name != "source":
        TABLES[_field.name] = _field.default_factory  # type: ignore[assignment]
        TABLES |= {"model.lora": Lora} if _field.name == "model" else {}
        TABLES |= {name: kind for name, (kind, after) in OF_ADD_ONS.items() if after == _field.name}


def value_of(config: Config, name: str) -> Any:
    """Return a table or a key of ``config`` by its name, as "model.lora" or "train.steps"."""
    return attrgetter(name)(config)


def without_add_ons(config: Config) -> Config:
    """Return the same tables, with those of add-ons by default."""
    return dataclasses.replace(config, **{name: kind() for name, (kind, _) in OF_ADD_ONS.items()})
