"""The command `python -m compose measure`: it makes a cluster's file for the machine at hand."""

import datetime
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from compose.cli.command_line import launched_ranks, read_flags
from compose.config.tables import Config
from compose.config.toml import COMMAND_LINE
from compose.errors import ConfigError, write_whole
from compose.parallel.processes import process_group
from compose.planner.cluster import Cluster, as_toml, load_cluster
from compose.planner.measure import SECONDS
from compose.planner.measure import measure as measure_machine
from compose.train.metrics import peak_flops

_FLAGS = {"--out": "FILE.toml"}
USAGE = """\
python -m compose measure --out FILE.toml
torchrun --nproc-per-node N -m compose measure --out FILE.toml

Times matrix products, attention and copies, and with several ranks each collective on each axis that a
mesh can have, in under 2 minutes. Nothing else should run on the machine. The first rank writes the
file, which `--cluster` takes.
"""


def measure(arguments: Sequence[str], seconds: float = SECONDS) -> int:
    """Measure this machine for the planner: [torchrun] -m compose measure --out FILE.toml."""
    if {"--help", "-h"} & set(arguments):
        print(USAGE, end="")
        return 0
    plain, flags = read_flags(arguments, _FLAGS)
    if plain:
        raise ConfigError(f"{COMMAND_LINE}: measure: takes no {plain[0]}; --out names the file")
    if not flags.get("--out"):
        raise ConfigError(f"{COMMAND_LINE}: measure: needs --out FILE.toml, the file to write")
    out = Path(flags["--out"])
    launched_ranks()
    if os.environ.get("RANK", "0") == "0":
        _check(out)
    with process_group(Config()) as device:
        cluster = measure_machine(device, _peaks(device), seconds)
        if dist.get_rank() == 0:
            write_whole(out, as_toml(cluster, _notes(cluster)))
            print(f"{out}: {_summary(load_cluster(str(out)))}", flush=True)
    return 0


def _check(out: Path) -> None:
    """Raise ConfigError if ``out`` cannot be written, before anything is measured."""
    if out.suffix != ".toml":
        raise ConfigError(f"{COMMAND_LINE}: --out: {out} is no .toml file")
    try:
        if out.is_dir():
            raise ConfigError(f"{COMMAND_LINE}: --out: {out} is a folder")
        with tempfile.TemporaryFile(dir=out.parent):  # its name is new
            pass
    except OSError as error:
        raise ConfigError(f"{COMMAND_LINE}: --out: cannot write {out}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{COMMAND_LINE}: --out: cannot write {str(out)!r}: {error}") from None


def _peaks(device: torch.device) -> Mapping[str, float]:
    """Return the maker's FLOP/s by type, for the types that are known."""
    if device.type != "cuda":
        return {}
    name = torch.cuda.get_device_name(device)
    found = {dtype: peak_flops(name, dtype) for dtype in ("bfloat16", "float8")}
    found["float16"] = found["bfloat16"]
    return {dtype: rate for dtype, rate in found.items() if rate}


def _notes(cluster: Cluster) -> list[str]:
    measured = cluster.measured
    day = datetime.datetime.now(datetime.timezone.utc).date()
    notes = [
        f"Measured on {day} by python -m compose measure, with torch {torch.__version__}:",
        f"{measured.ranks} ranks at the same time, {cluster.node} a node, {measured.seconds:.0f} s.",
    ]
    rows = measured.collectives
    if rows:
        worst = max(rows, key=lambda row: row.error)
        middle = sorted(row.error for row in rows)[len(rows) // 2]
        notes.append(
            f"Lines fitted to {len(rows)} collectives: median error {middle:.0%}, largest"
            f" {worst.error:.0%} ({worst.kind}, {worst.ranks} ranks, stride {worst.stride})."
        )
    if measured.ranks == 1:
        notes.append(
            "[within] and [between] were not measured: there was one rank. [host] stands there."
        )
    elif measured.ranks <= cluster.node:
        notes.append("[between] was not measured: there was one node. [within] stands there.")
    if cluster.nccl_bytes:
        notes.append(
            "nccl_bytes, message_units and fill were not measured: they are those of"
            " clusters/h100_sxm.toml."
        )
    return notes


def _summary(cluster: Cluster) -> str:
    measured = cluster.measured
    rates = ", ".join(
        f"{cluster.device.peak[dtype] * share / 1e12:.3g} TFLOP/s of {dtype}"
        for dtype, share in cluster.efficiencies.products.items()
    )
    return (
        f"{rates}; {cluster.device.bandwidth / 1e9:.3g} GB/s of memory; {len(measured.products)}"
        f" products, {len(measured.attention)} attentions and {len(measured.collectives)} collectives"
        f" in {measured.seconds:.0f} s"
    )
