"""The keys of train.toml: one frozen dataclass per table, a default and a line of doc for each key.

The text under a key is what ``train.py --help`` prints. Reading files and the command line is in
toml.py; what holds between keys is in legality/
"""

import ast
import dataclasses
import datetime
import functools
import inspect
import itertools
import keyword
import textwrap
import types
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, Field


def _not_0_in_float32(value: float) -> float:
    if 0 < value < 2.0**-126:
        raise ValueError("is 0 in float32, which has nothing below 1.2e-38")
    return value


Positive = Annotated[int, Field(ge=1, lt=2**63)]
NonNegative = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(gt=0)]
Epsilon = Annotated[float, Field(ge=0), AfterValidator(_not_0_in_float32)]


@dataclass(frozen=True)
class Run:
    dir: str = ""
    """Folder that holds all a run leaves; empty is runs/<timestamp>."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto is cuda where there is one."""


@dataclass(frozen=True)
class Model:
    name: str = "llama"
    """Folder under models/."""
    preset: str = "debug"
    """Named shape of that model; any field of its config set here overrides the preset's."""
    config: Any = None  # the model's own config, with the fields set here


@dataclass(frozen=True)
class Data:
    path: str | tuple[str, ...] = "stdlib"
    """stdlib (the source text of Python's standard library), a text file or glob (read as bytes), a
    folder of compose tokenize, or a token file: .bin or .npy; several in a list are mixed."""
    weights: tuple[Weight, ...] = ()
    """Share of each of a list in what is trained on, in any unit; empty: by their sizes."""
    validation: str = ""
    """What the validation loss is measured on, all of it; named as path is."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Integer type of a .bin token file."""
    separator: int = -1
    """Token id that ends a document in a token file; -1: the file is one document. Text needs none."""


@dataclass(frozen=True)
class Train:
    steps: Positive = 250
    """Optimizer steps of the whole schedule."""
    stop_after: NonNegative = 0
    """End after this many steps, the learning-rate schedule unchanged; 0 runs all."""
    seq_len: Positive = 256
    """Tokens per sample."""
    global_batch: Positive = 16
    """Samples per optimizer step over all ranks."""
    micro_batch: Positive = 2
    """Samples per rank in one forward pass; the rest of the rank's share is accumulated."""
    validate_every: NonNegative = 0
    """Steps between measurements of the validation loss, one at the end besides; 0 is never."""
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


@dataclass(frozen=True)
class Optimizer:
    name: Literal["adamw", "muon"] = "adamw"
    """muon: orthogonalized momentum for the matrices in layers, AdamW for all else."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Which of torch's AdamWs, where weights and state are float32."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where AdamW keeps its state: none: on the device; cpu: in host memory; nvme: in files."""
    offload_dir: str = ""
    """With offload = nvme: folder for these files, on a fast local disk; empty is run.dir/offload."""
    lr: Annotated[float, Field(ge=0)] = 3e-3
    """Highest learning rate."""
    lr_scale: tuple[str, ...] = ()
    """Factors of it for modules or parameters, by patterns as in a plan: ["output=0.5"]."""
    beta1: Decay = 0.9
    """AdamW: decay of the gradient's running mean."""
    beta2: Decay = 0.95
    """AdamW: decay of the squared gradient's running mean."""
    eps: Epsilon = 1e-8
    """AdamW: added to the root of the squared gradient's mean."""
    momentum: Decay = 0.95
    """Muon: decay of the sum of gradients."""
    muon_except: tuple[str, ...] = ()
    """Muon: patterns of matrices in layers that AdamW trains all the same."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay, on parameters of two or more dims."""
    weight_decay_scale: tuple[str, ...] = ()
    """Factors of it, as for lr_scale, on parameters of any dims, as ["tok_embeddings=0"]."""
    warmup: NonNegative = 20
    """Steps of linear warmup."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after warmup."""
    decay: NonNegative = 0
    """With schedule = constant: linear decay over this many last steps."""
    min_lr: Fraction = 0.1
    """Learning rate at the end of the decay, as a fraction of lr."""


@dataclass(frozen=True)
class Parallel:
    dp_replicate: int = 1
    """Data-parallel replicas, each holding its own copy of the sharded state (HSDP's outer axis)."""
    dp_shard: int = -1
    """Data-parallel ranks that share one copy of the state. One degree may be -1: what is left."""
    zero: Literal[0, 1, 2, 3] = 3
    """What dp_shard shards: 0 nothing (DDP), 1 optimizer state, 2 and gradients, 3 and parameters."""
    zero3_reshard: NonNegative = 0
    """With zero 3: neighbours that keep a unit between them after its first gather of a step, so that
    the others stay near; 0: all that share it."""
    offload: Literal["none", "cpu"] = "none"
    """cpu: with zero 3, parameters, gradients and optimizer are in host memory between their uses."""
    cp: int = 1
    """Context-parallel degree: ranks that share each sequence."""
    cp_method: Literal["ring", "allgather", "ulysses"] = "ring"
    """How attention reaches the other ranks' keys."""
    cp_balance: Literal["headtail", "none"] = "headtail"
    """headtail: each rank holds a piece from the front and one from the back of a sequence."""
    tp: int = 1
    """Tensor-parallel degree."""
    pp: int = 1
    """Pipeline-parallel degree; a step's micro-batches are those of train.micro_batch."""
    pp_schedule: str = "1F1B"
    """GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV, or a
    .csv file of actions."""
    pp_virtual_stages: NonNegative = 0
    """Stages on each pipeline rank; 0: as many as the schedule is made for."""
    pp_layers: tuple[NonNegative, ...] = ()
    """Layers of each stage, in order; empty: balanced by FLOPs, the output projection counted."""
    ep: Positive = 1
    """Expert-parallel degree, laid over the innermost of the other axes but pp: no ranks of its own."""
    sequence: bool = True
    """With tp: shard the sequence between layers (norms, residuals) over tp."""
    loss: bool = True
    """With tp: keep the logits sharded over the vocabulary and compute the loss so."""


@dataclass(frozen=True)
class Precision:
    param: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of parameters and activations in forward and backward; with float16 the loss is scaled
    dynamically."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are accumulated and reduced."""
    float8: Literal["off", "tensorwise", "rowwise", "rowwise_gw_hp"] = "off"
    """How products of the plan's linear layers are scaled to 8 bits; needs torchao."""
    master: Literal["float32", "bfloat16"] = "float32"
    """Type in which weights are kept between steps; bfloat16 is rounded stochastically."""
    optimizer_state: Literal["float32", "bfloat16"] = "float32"
    """Type of the optimizer's running means; bfloat16 is rounded stochastically."""


@dataclass(frozen=True)
class ActivationCheckpoint:
    mode: Literal["none", "full", "every_k", "selective", "budget"] = "none"
    """What backward computes again: full: all but each unit's input; every_k: the same of every k-th
    unit; selective: all but the input and what keep names; budget: what does not fit in it."""
    every: Positive = 2
    """With every_k: k."""
    keep: tuple[str, ...] = ("matmul", "attention")
    """With selective: the operators whose results are kept: matmul, attention, or aten's by name."""
    budget: Fraction = 0.5
    """With budget: what may be kept as a fraction of what mode none keeps in the units."""
    offload: bool = False
    """Keep what units save for backward in host memory."""


@dataclass(frozen=True)
class Compile:
    mode: Literal["off", "block", "model"] = "off"
    """What torch.compile makes one graph of: each layer, or as much of the model as hooks leave."""
    async_tp: bool = False
    """With tp on CUDA: run products in pieces while their messages travel."""


@dataclass(frozen=True)
class Checkpoint:
    interval: NonNegative = 0
    """Steps between checkpoints in run.dir, one at the end besides; 0 is off."""
    resume: Literal["auto", "none"] = "auto"
    """auto: go on from the newest checkpoint in run.dir that is whole; none: run.dir must be new."""
    load_hf: str = ""
    """Hugging Face folder (config.json, safetensors) with the weights to begin with; empty: drawn."""
    async_: bool = True
    """Write while training goes on; the step waits for a copy of the state only."""
    keep_last: Positive = 2
    """Newest checkpoints to keep."""
    keep_every: NonNegative = 0
    """Keep those of every so many steps too; 0 is none."""
    fail_after: NonNegative = 0
    """Stop the run after so many failed saves; 0 trains on."""


@dataclass(frozen=True)
class Metrics:
    tensorboard: bool = True
    """Write TensorBoard events into run.dir."""
    console_every: Positive = 10
    """Steps between console lines; metrics.jsonl has one line for every step."""


@dataclass(frozen=True)
class Profile:
    steps: tuple[NonNegative, ...] = ()
    """First and last step to profile, as [11, 13]; empty is off. Files are in run.dir/traces."""
    ranks: tuple[NonNegative, ...] = (0,)
    """Ranks that are profiled; empty: all."""
    memory: bool = False
    """Write a memory snapshot beside each trace, for pytorch.org/memory_viz."""


@dataclass(frozen=True)
class Comm:
    timeout: Positive = 600
    """Seconds after which a collective that a rank has not joined is an error."""
    start_timeout: Positive = 1800
    """The same until the first step has ended, which loads, compiles and connects; at least timeout."""
    prefetch: NonNegative = 0
    """Units (layers) whose gather begins before the one ahead of them runs, in forward and backward; 0:
    the next one, in backward."""
    check_every: NonNegative = 0
    """Steps between comparisons of what ranks must hold bitwise alike; 0 is never."""


@dataclass(frozen=True)
class Config:
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
    profile: Profile = field(default_factory=Profile)
    comm: Comm = field(default_factory=Comm)
    source: str = "train.toml"  # the file's name, which begins every message about a key


TABLES: dict[str, type] = {
    f.name: f.default_factory  # type: ignore[misc]
    for f in dataclasses.fields(Config)
    if f.name != "source"
}


def attribute(key: str) -> str:
    """The field of a key: Python's own words, as async, have an underscore there."""
    return f"{key}_" if keyword.iskeyword(key) else key


@functools.cache
def docs(table: type) -> dict[str, str]:
    """The text under each field of a dataclass, by its key, in the fields' order."""
    inherited = [docs(base) for base in table.__bases__ if dataclasses.is_dataclass(base)]
    body = ast.parse(textwrap.dedent(inspect.getsource(table))).body[0].body  # type: ignore[attr-defined]
    return {name: text for base in inherited for name, text in base.items()} | {
        key.target.id.rstrip("_"): " ".join(text.value.value.split())
        for key, text in itertools.pairwise(body)
        if isinstance(key, ast.AnnAssign)
        and isinstance(key.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def type_name(kind: Any) -> str:
    """``int``, or ``"a" | "b"`` for a choice."""
    if get_origin(kind) is Annotated:
        return type_name(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return " | ".join(toml_value(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return f"list of {type_name(get_args(kind)[0])}"
    if get_origin(kind) is types.UnionType:
        return " or ".join(type_name(choice) for choice in get_args(kind))
    return getattr(kind, "__name__", str(kind))


def toml_value(value: Any) -> str:
    """One value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = "".join(
            {'"': '\\"', "\\": "\\\\"}.get(c, c if c.isprintable() else f"\\u{ord(c):04x}")
            for c in value
        )
        return f'"{escaped}"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, int) and value.bit_length() > 4096:  # Python writes no such number in decimal
        return hex(value)
    return repr(value)
