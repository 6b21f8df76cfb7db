"""Clusters as data: what devices, nodes and links can do, read from ``clusters/NAME.toml``.

Units are bytes, seconds and FLOP/s. A file states the source of each figure in a comment. Figures of
one kind stand in one table: ``[device]`` and ``[device.peak]`` are the maker's, ``[efficiencies]`` says
which part of them programs reach, and ``[measured]`` is written by ``python -m compose measure``.
"""

import dataclasses
import json
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from compose.config.json_files import field_name, unreadable
from compose.config.models import shipped
from compose.config.setup import Target
from compose.config.toml import tomllib
from compose.errors import ConfigError, NonNegative, Positive, cut, did_you_mean, toml_value
from compose.ops.kernel_table import KERNELS

FOLDER = shipped("clusters")
_SHOWN = 200  # characters of a value in a message

# Figures beyond these are of no machine. With them all that is computed stays a finite number above 0.
LEAST, MOST = 1e-18, 1e24


def _real(value: float) -> float:
    if value and not LEAST <= value <= MOST:
        raise ValueError(f"should be from {LEAST:g} to {MOST:g}")
    return value


Rate = Annotated[float, Field(gt=0), AfterValidator(_real)]
Amount = Annotated[float, Field(ge=0), AfterValidator(_real)]
Share = Annotated[float, Field(gt=0, le=1), AfterValidator(_real)]
Dtype = Literal["bfloat16", "float16", "float32", "float64", "float8"]
Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "p2p"]
DTYPES, KINDS = get_args(Dtype), get_args(Kind)


def _known(dtype: str) -> str:
    if dtype not in DTYPES:
        raise ValueError("is no type")
    return dtype


DtypeName = Annotated[str, AfterValidator(_known)]
Tile = Annotated[tuple[Positive, ...], Field(min_length=2, max_length=2)]
Capability = Annotated[tuple[NonNegative, ...], Field(min_length=2, max_length=2)]
Shares = Annotated[tuple[Share, ...], Field(min_length=2, max_length=2)]
Pair = Annotated[tuple[Amount, ...], Field(min_length=2, max_length=2)]
# Forward: 430, 517, 566, 590, 614 and 621 TFLOP/s at 512 to 16,384 tokens on an H100 (pytorch/benchmark
# #2391) are 630 s / (s + 215), and its FLOPs per byte are s / 2. Backward: 52.9, 62.5, 70.1, 74.8 and
# 77.4 TFLOP/s at 512 to 8,192 tokens on an RTX A5000 (gpu-mode/ring-attention #10) are 80 s / (s +
# 280), and its FLOPs per byte are 0.625 s.
GPU_ATTENTION_HALF = (107.0, 175.0)


class _Table:
    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class Link(_Table):
    """One level of the network, seen by one device."""

    bandwidth: Rate
    """Bytes per second of one device in one direction, as the maker states it."""
    latency: Amount
    """Seconds that a small message takes from one device to the next."""
    share: Share = 1.0
    """Part of the bandwidth that large messages reach."""
    in_switch: Amount = 0.0
    """Bytes per second at which switches of a node sum tensors; 0: they cannot."""
    direct: bool = False
    """Whether a device has an equal link to each other one of its node, and no switch joins them."""

    @property
    def usable(self) -> float:
        """Bytes per second that large messages reach."""
        return self.bandwidth * self.share


@dataclass(frozen=True)
class Device(_Table):
    """One device, which belongs to one rank."""

    name: str
    """Name as the maker writes it."""
    memory: Positive
    """Bytes that the device reports."""
    context: NonNegative
    """Bytes that a process loses to its context and libraries."""
    bandwidth: Rate
    """Bytes per second of device memory."""
    launch: Amount
    """Seconds of the shortest kernel."""
    units: Positive
    """Streaming multiprocessors of a GPU; 1 for a CPU."""
    tile: Tile
    """Rows and columns of the largest tile of a product that one unit computes."""
    peak: Mapping[DtypeName, Rate]
    """FLOP/s by type, dense, at the maker's clock."""
    capability: Capability = (8, 0)
    """CUDA's compute capability, which decides what kernel of attention runs."""
    message_units: NonNegative = 0
    """Units that a message keeps while it runs, so that they do not compute."""
    exponentials: Amount = 0.0
    """Exponentials per second, for attention's softmax; 0: they are not counted."""
    sharing: Annotated[float, Field(ge=1)] = 1.0
    """Ranks that share one processor. The times hold while all of them work; if some wait, the others
    are faster."""
    dispatch: Amount = 0.0
    """Seconds that the host takes to issue one operator; 0: its times include it."""
    hooks: Pair = (0.0, 0.0)
    """Seconds of FSDP2's hooks on the host around a unit's forward, and its backward."""
    hooks_compiled: Pair = (0.0, 0.0)
    """These seconds with ``compile.mode``, where the compiled code is called anew for each unit."""
    spread: Amount = 0.0
    """Standard deviation of the speeds of equal devices, over their mean. All wait for the slowest."""
    power: Rate = 1.0
    """Watts at which the efficiencies were measured."""
    power_limit: Rate = 1.0
    """Watts that this cluster allows."""
    power_idle: Amount = 0.0
    """Watts of an idle device."""


@dataclass(frozen=True)
class Efficiencies(_Table):
    """The parts of a device's figures that programs reach."""

    memory: Share
    """Part of the memory's bandwidth that elementwise kernels reach."""
    fill: Amount
    """Seconds of a tile of a product before its first and after its last multiplication."""
    products: Mapping[DtypeName, Share]
    """Part of the peak that large products reach for hours, by type."""
    attention_forward: Share
    """Part of the peak that attention's forward reaches for long sequences and heads of 128, by the
    kernel that ``attention`` does not name: FlashAttention-2, which takes documents in a row."""
    attention_backward: Share
    """The same for its backward."""
    attention: Mapping[str, Shares] = field(default_factory=dict)
    """The parts that forward and backward of other kernels reach."""
    attention_half: Pair = GPU_ATTENTION_HALF
    """FLOPs per byte at which attention's forward and backward have half of that."""
    kernels: Share = 1.0
    """Part of ``memory`` that kernels reach which do more than copy: norms, losses, fused ones."""


@dataclass(frozen=True)
class MeasuredProduct(_Table):
    """A measured product of matrices (batch, m, k) and (batch, k, n)."""

    dtype: Dtype
    m: Positive
    n: Positive
    k: Positive
    batch: Positive
    seconds: Rate


@dataclass(frozen=True)
class MeasuredAttention(_Table):
    """A measured attention."""

    dtype: Dtype
    head_dim: Positive
    backward: bool
    flops: Rate
    """FLOPs of the scores that the mask leaves."""
    bytes: Rate
    """Bytes that it reads and writes."""
    seconds: Rate


@dataclass(frozen=True)
class MeasuredCopy(_Table):
    """A measured elementwise kernel, by the bytes that it reads and writes."""

    bytes: Rate
    seconds: Rate


@dataclass(frozen=True)
class MeasuredCollective(_Table):
    """A collective that was measured over message size, and the line fitted to it."""

    kind: Kind
    ranks: Positive
    """Ranks in the group."""
    stride: Positive
    """Distance of neighbours of the group in ranks of the job."""
    latency: Amount
    """Seconds of an empty message, fitted."""
    inverse_bandwidth: Amount
    """Seconds per byte, fitted."""
    error: Annotated[float, Field(ge=0)]
    """Root of the mean square of the fit's relative error."""
    bytes: tuple[Rate, ...]
    """Sizes of messages that were measured, ascending."""
    seconds: tuple[Rate, ...]
    """Time of each."""


@dataclass(frozen=True)
class Measurements(_Table):
    """The results of ``python -m compose measure``; files of published figures have none."""

    ranks: NonNegative = 0
    """Ranks that measured at the same time; 0: nothing was measured."""
    seconds: Amount = 0.0
    """Seconds that the measurement took."""
    products: tuple[MeasuredProduct, ...] = ()
    attention: tuple[MeasuredAttention, ...] = ()
    copies: tuple[MeasuredCopy, ...] = ()
    collectives: tuple[MeasuredCollective, ...] = ()


@dataclass(frozen=True, eq=False)  # compared by identity, so that costs can be cached by it
class Cluster(_Table):
    """Nodes of equal devices and the links between them."""

    name: str
    """Name of the file, without .toml."""
    node: Positive
    """Devices of a node."""
    backend: Literal["nccl", "gloo"]
    """Library of the collectives."""
    nccl_bytes: NonNegative
    """Bytes of device memory that one communicator takes for its buffers."""
    device: Device
    within: Link
    """Between devices of a node."""
    between: Link
    """Between nodes; each device has its own share of the network."""
    host: Link
    """Between a device and host memory."""
    efficiencies: Efficiencies
    measured: Measurements = field(default_factory=Measurements)
    machines: Positive = 1
    """Machines of a node, each with an equal part of its devices and of what follows."""
    host_memory: NonNegative = 0
    """Bytes of host memory of a node; 0: unknown."""
    host_cores: NonNegative = 0
    """Cores of a node's processors; 0: unknown."""
    host_bandwidth: Amount = 0.0
    """Bytes per second of a node's host memory; 0: unknown."""
    host_power: Amount = 0.0
    """Watts of a node at work beside its devices; 0: unknown."""

    @property
    def target(self) -> Target:
        """The devices, as rules ask for them."""
        on_gpu = self.backend == "nccl"
        return Target("cuda" if on_gpu else "cpu", on_gpu and "float8" in self.device.peak)


def cluster_names() -> list[str]:
    """Return the names of the clusters that come with compose."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_cluster(name_or_path: str) -> Cluster:
    """Return the cluster of ``clusters/NAME.toml`` or of a .toml file; or raise ConfigError."""
    file, shown = Path(name_or_path), name_or_path
    if file.suffix != ".toml" and len(file.parts) <= 1:
        file = FOLDER / f"{name_or_path}.toml"
        known = cluster_names()
        if name_or_path not in known:
            begun = [name for name in known if name_or_path and name.startswith(name_or_path)]
            near = f"; did you mean {begun[0]}?" if begun else did_you_mean(name_or_path, known)
            raise ConfigError(
                f"--cluster: unknown cluster {name_or_path!r}{near} (known: {', '.join(known)}; or the"
                " path of a .toml file)"
            )
        shown = f"clusters/{file.name}"
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{shown}: TOML syntax: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{shown}: {unreadable(error)}") from None
    return read_cluster(content, file.stem, shown)


def read_cluster(content: Mapping[str, Any], name: str, shown: str) -> Cluster:
    """Return the cluster that the tables of a file describe; or raise ConfigError."""
    problems = []
    if "name" in content:
        problems.append("name: unknown key; the name of a cluster is that of its file")
    try:
        # In JSON pydantic takes arrays for tuples, and it is strict.
        text = json.dumps({**content, "name": name}, default=str)
        cluster = TypeAdapter(Cluster).validate_json(text, strict=True)
        problems += _contradictions(cluster)
    except RecursionError:
        raise ConfigError(f"{shown}: is nested too deeply") from None
    except ValidationError as error:
        cluster = None
        missing_last = sorted(error.errors(), key=lambda each: each["type"] == "missing")
        problems += [_problem(each["loc"], each) for each in missing_last]
    except ValueError as error:  # a whole number of thousands of digits
        raise ConfigError(f"{shown}: cannot read it: {error}") from None
    if problems or cluster is None:
        raise ConfigError(*(f"{shown}: {problem}" for problem in problems))
    return cluster


def _contradictions(cluster: Cluster) -> list[str]:
    device, problems = cluster.device, []
    missing = [dtype for dtype in device.peak if dtype not in cluster.efficiencies.products]
    if not device.peak:
        problems.append("device.peak: needs the rate of one type at least")
    problems += [f"efficiencies.products.{dtype}: missing; device.peak has it" for dtype in missing]
    problems += [
        f"efficiencies.attention.{kernel}: is no kernel{did_you_mean(kernel, KERNELS)} (known:"
        f" {', '.join(KERNELS)})"
        for kernel in cluster.efficiencies.attention
        if kernel not in KERNELS
    ]
    taken = device.context + cluster.nccl_bytes
    if device.memory <= taken:
        problems.append(f"device.memory: {device.memory} is not above context + nccl_bytes, {taken}")
    for key in ("power", "power_limit"):
        if getattr(device, key) <= device.power_idle:
            problems.append(f"device.{key}: {getattr(device, key)} is not above power_idle")
    if cluster.node % cluster.machines:
        problems.append(f"machines: {cluster.machines} do not divide {cluster.node} devices of a node")
    if device.message_units >= device.units:
        problems.append(f"device.message_units: {device.message_units} leaves none of {device.units}")
    for number, row in enumerate(cluster.measured.collectives):
        sizes = row.bytes
        if len(sizes) != len(row.seconds) or not sizes or list(sizes) != sorted({*sizes}):
            problems.append(f"measured.collectives[{number}]: needs ascending bytes, a time for each")
    sizes = [row.bytes for row in cluster.measured.copies]
    if sizes != sorted({*sizes}):
        problems.append("measured.copies: needs rows with ascending bytes")
    return problems


# The values that a field of a table takes, by the type of pydantic's error.
_WANTED = {
    "bool_type": "bool",
    "dataclass_type": "a table",
    "float_type": "float",
    "string_type": "str",
    "tuple_type": "a list",
    **dict.fromkeys(("dict_type", "mapping_type"), "a table of types"),
    **dict.fromkeys(("int_from_float", "int_type"), "int"),
    **dict.fromkeys(("too_long", "too_short"), "two numbers"),
}


def _problem(place: tuple[int | str, ...], error: Any) -> str:
    """Return one of pydantic's errors as a line with the key's whole name."""
    name = field_name(place)
    kind, got = error["type"], cut(toml_value(error["input"]), _SHOWN)
    if kind == "unexpected_keyword_argument":
        return f"{name}: unknown key{_nearest(place)}"
    if kind == "missing":
        is_table = dataclasses.is_dataclass(_types(place[:-1])[str(place[-1])])
        return f"{name}: missing {'table' if is_table else 'key'}"
    if kind == "json_invalid":
        return "is nested too deeply"
    if place[-1] == "[key]":
        near = did_you_mean(str(place[-2]), DTYPES)
        return f"{field_name(place[:-1])}: unknown type{near} (known: {', '.join(DTYPES)})"
    if kind == "literal_error":
        choices = re.findall("'(.*?)'", error["ctx"]["expected"])
        return f"{name}: expected {' | '.join(map(toml_value, choices))}, got {got}"
    if kind in _WANTED:
        of_rows = kind == "tuple_type" and place[0] == "measured" and len(place) == 2
        return f"{name}: expected {_WANTED[kind]}{' of tables' * of_rows}, got {got}"
    return f"{name}: {got} {error['msg'].removeprefix('Input ').removeprefix('Value error, ')}"


def _types(place: Sequence[int | str]) -> dict[str, Any]:
    kind: Any = Cluster
    for part in place:
        kind = get_args(kind)[0] if isinstance(part, int) else typing.get_type_hints(kind)[part]
    return typing.get_type_hints(kind)


def _nearest(place: tuple[int | str, ...]) -> str:
    """Return a hint at the table that has an unknown key, or at a key of the same table."""
    tables = {"": Cluster, "device.": Device, "within.": Link, "efficiencies.": Efficiencies}
    for table, kind in tables.items():
        if place[-1] in {each.name for each in dataclasses.fields(kind)}:
            return f"; did you mean {table}{place[-1]}?"
    known = [field_name((*place[:-1], key)) for key in _types(place[:-1])]
    return did_you_mean(field_name(place), known)
