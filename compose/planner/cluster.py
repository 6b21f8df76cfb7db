"""Clusters as data: what devices, nodes and links can do, read from ``clusters/NAME.toml``.

Units are bytes, seconds and FLOP/s. A file states the source of each figure in a comment. Figures of
one kind stand in one table: ``[device]`` and ``[device.peak]`` are the maker's, ``[efficiencies]`` says
which part of them programs reach, and ``[measured]`` is written by ``python -m compose measure``.
"""

import dataclasses
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from compose.errors import ConfigError, NonNegative, Positive, did_you_mean, toml_value, type_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

FOLDER = Path(__file__).parents[2] / "clusters"
DTYPES = ("bfloat16", "float16", "float32", "float64", "float8")
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "p2p")
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
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
Tile = Annotated[tuple[Positive, ...], Field(min_length=2, max_length=2)]
Pair = Annotated[tuple[Amount, ...], Field(min_length=2, max_length=2)]
# Forward: 430, 517, 566, 590, 614 and 621 TFLOP/s at 512 to 16,384 tokens on an H100 (pytorch/benchmark
# #2391) are 630 s / (s + 215), and its FLOPs per byte are s / 2. Backward: 52.9, 62.5, 70.1, 74.8 and
# 77.4 TFLOP/s at 512 to 8,192 tokens on an RTX A5000 (gpu-mode/ring-attention #10) are 80 s / (s +
# 280), and its FLOPs per byte are 0.625 s.
GPU_ATTENTION_HALF = (107.0, 175.0)


@dataclass(frozen=True)
class Link:
    """One level of the network, seen by one device."""

    bandwidth: Rate
    """Bytes per second of one device in one direction, as the maker states it."""
    latency: Amount
    """Seconds that a small message takes from one device to the next."""
    share: Share = 1.0
    """Part of the bandwidth that large messages reach."""
    in_switch: Amount = 0.0
    """Bytes per second at which switches of a node sum tensors; 0: they cannot."""

    @property
    def usable(self) -> float:
        """Bytes per second that large messages reach."""
        return self.bandwidth * self.share


@dataclass(frozen=True)
class Device:
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
    peak: Mapping[str, Rate]
    """FLOP/s by type, dense, at the maker's clock."""
    message_units: NonNegative = 0
    """Units that a message keeps while it runs, so that they do not compute."""
    exponentials: Amount = 0.0
    """Exponentials per second, for attention's softmax; 0: they are not counted."""
    sharing: Annotated[float, Field(ge=1)] = 1.0
    """Ranks that share one processor. The times hold while all of them work; if some wait, the others
    are faster."""
    dispatch: Amount = 0.0
    """Seconds that the host takes to issue one operator; 0: its times include it."""
    power: Rate = 1.0
    """Watts at which the efficiencies were measured."""
    power_limit: Rate = 1.0
    """Watts that this cluster allows."""
    power_idle: Amount = 0.0
    """Watts of an idle device."""


@dataclass(frozen=True)
class Efficiencies:
    """The parts of a device's figures that programs reach."""

    memory: Share
    """Part of the memory's bandwidth that elementwise kernels reach."""
    fill: Amount
    """Seconds of a tile of a product before its first and after its last multiplication."""
    products: Mapping[str, Share]
    """Part of the peak that large products reach for hours, by type."""
    attention_forward: Share
    """Part of the peak that attention's forward reaches for long sequences and heads of 128."""
    attention_backward: Share
    """The same for its backward."""
    attention_half: Pair = GPU_ATTENTION_HALF
    """FLOPs per byte at which attention's forward and backward have half of that."""


@dataclass(frozen=True)
class Product:
    """A measured product of matrices (batch, m, k) and (batch, k, n)."""

    dtype: Dtype
    m: Positive
    n: Positive
    k: Positive
    batch: Positive
    seconds: Rate


@dataclass(frozen=True)
class Attention:
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
class Copy:
    """A measured elementwise kernel, by the bytes that it reads and writes."""

    bytes: Rate
    seconds: Rate


@dataclass(frozen=True)
class Collective:
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
class Measured:
    """The results of ``python -m compose measure``; files of published figures have none."""

    ranks: NonNegative = 0
    """Ranks that measured at the same time; 0: nothing was measured."""
    seconds: Amount = 0.0
    """Seconds that the measurement took."""
    products: tuple[Product, ...] = ()
    attention: tuple[Attention, ...] = ()
    copies: tuple[Copy, ...] = ()
    collectives: tuple[Collective, ...] = ()


@dataclass(frozen=True, eq=False)  # compared by identity, so that costs can be cached by it
class Cluster:
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
    measured: Measured = field(default_factory=Measured)


def cluster_names() -> list[str]:
    """Return the names of the clusters that come with compose."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_cluster(name_or_path: str) -> Cluster:
    """Read a cluster.

    Args:
        name_or_path: A name of ``clusters/NAME.toml``, or the path of a .toml file.

    Returns:
        The cluster.

    Raises:
        ConfigError: There is no such cluster, or its file has problems; one line for each.
    """
    file = Path(name_or_path)
    if file.suffix != ".toml" and len(file.parts) <= 1:
        file = FOLDER / f"{name_or_path}.toml"
        if name_or_path not in cluster_names():
            known = cluster_names()
            begun = [name for name in known if name_or_path and name.startswith(name_or_path)]
            near = f"; did you mean {begun[0]}?" if begun else did_you_mean(name_or_path, known)
            raise ConfigError(
                f"--cluster: unknown cluster {name_or_path!r}{near} (known: {', '.join(known)}; or the"
                " path of a .toml file)"
            )
        shown = f"clusters/{file.name}"
    else:
        shown = name_or_path
    return read_cluster(_content(file, shown), file.stem, shown)


def _content(file: Path, shown: str) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{shown}: no such file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{shown}: TOML syntax: {error}") from None
    except OSError as error:
        raise ConfigError(f"{shown}: cannot read it: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{shown}: cannot read it: {error}") from None


def read_cluster(content: Mapping[str, Any], name: str, shown: str) -> Cluster:
    """Return the cluster that the tables of a file describe.

    Raises:
        ConfigError: Every problem found.
    """
    problems: list[str] = []
    given = dict(content)
    if "name" in given:
        problems.append("name: unknown key; the name of a cluster is that of its file")
        del given["name"]
    found = _read(Cluster, given | {"name": name}, "", problems)
    if not problems:
        problems += _contradictions(found)
    if problems:
        raise ConfigError(*(f"{shown}: {problem}" for problem in problems))
    return found


def _contradictions(cluster: Cluster) -> list[str]:
    """Return what is wrong between the keys of a cluster."""
    device, problems = cluster.device, []
    missing = [dtype for dtype in device.peak if dtype not in cluster.efficiencies.products]
    if not device.peak:
        problems.append("device.peak: needs the rate of one type at least")
    problems += [f"efficiencies.products.{dtype}: missing; device.peak has it" for dtype in missing]
    for key in ("power", "power_limit"):
        if getattr(device, key) <= device.power_idle:
            problems.append(f"device.{key}: {getattr(device, key)} is not above power_idle")
    if device.message_units >= device.units:
        problems.append(f"device.message_units: {device.message_units} leaves none of {device.units}")
    for number, row in enumerate(cluster.measured.collectives):
        sizes = row.bytes
        if len(sizes) != len(row.seconds) or not sizes or list(sizes) != sorted({*sizes}):
            problems.append(f"measured.collectives[{number}]: needs ascending bytes, a time for each")
    return problems


def _read(kind: type, given: Mapping[str, Any], place: str, problems: list[str]) -> Any:
    """Return ``given`` as the dataclass ``kind``; note each problem with the key's whole name."""
    types = typing.get_type_hints(kind, include_extras=True)
    fields = {each.name: each for each in dataclasses.fields(kind)}
    before, values = len(problems), {}
    for key, value in given.items():
        if key not in fields:
            near = did_you_mean(f"{place}{key}", [f"{place}{name}" for name in fields])
            near = _elsewhere(key) or near
            problems.append(f"{place}{key}: unknown key{near}")
            continue
        values[key] = _value(types[key], value, f"{place}{key}", problems)
    for key, each in fields.items():
        needed = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        if needed and key not in given:
            what = "table" if dataclasses.is_dataclass(types[key]) else "key"
            problems.append(f"{place}{key}: missing {what}")
    return kind(**values) if len(problems) == before else None


def _elsewhere(key: str) -> str:
    """Return a hint at the table that has ``key``, or an empty string."""
    tables = {"": Cluster, "device.": Device, "within.": Link, "efficiencies.": Efficiencies}
    for table, kind in tables.items():
        if key in {each.name for each in dataclasses.fields(kind)}:
            return f"; did you mean {table}{key}?"
    return ""


def _value(kind: Any, value: Any, place: str, problems: list[str]) -> Any:
    """Return ``value`` as a field of type ``kind``, or None with a problem noted."""
    if dataclasses.is_dataclass(kind):
        if isinstance(value, Mapping):
            return _read(typing.cast(type, kind), value, f"{place}.", problems)
        problems.append(f"{place}: expected a table, got {_shown(value)}")
        return None
    if get_origin(kind) is tuple and dataclasses.is_dataclass(get_args(kind)[0]):
        if isinstance(value, list):
            rows = enumerate(value)
            return tuple(_value(get_args(kind)[0], row, f"{place}[{i}]", problems) for i, row in rows)
        problems.append(f"{place}: expected a list of tables, got {_shown(value)}")
        return None
    if get_origin(kind) is typing.get_origin(Mapping[str, float]):
        if not isinstance(value, Mapping):
            problems.append(f"{place}: expected a table of types, got {_shown(value)}")
            return None
        return {
            dtype: _value(get_args(kind)[1], rate, f"{place}.{dtype}", problems)
            for dtype, rate in value.items()
            if _known_dtype(dtype, place, problems)
        }
    try:
        given = tuple(value) if isinstance(value, list) else value
        return TypeAdapter(kind, config=_STRICT).validate_python(given)
    except ValidationError as error:
        detail = error.errors()[0]
        if detail["type"].endswith(("_type", "literal_error")):
            problems.append(f"{place}: expected {type_name(kind)}, got {_shown(value)}")
        elif detail["type"] in ("too_short", "too_long"):
            problems.append(f"{place}: expected two numbers, got {_shown(value)}")
        else:
            reason = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
            problems.append(f"{place}: {_shown(value)} {reason}")
        return None


def _known_dtype(dtype: str, place: str, problems: list[str]) -> bool:
    if dtype in DTYPES:
        return True
    near = did_you_mean(dtype, DTYPES)
    problems.append(f"{place}.{dtype}: unknown type{near} (known: {', '.join(DTYPES)})")
    return False


def _shown(value: Any) -> str:
    text = toml_value(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
