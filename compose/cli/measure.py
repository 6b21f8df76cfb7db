"""The command measure: the rates of this machine, in a cluster's file for the planner."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from compose.cli.command_line import check_out, flag_error, is_first_rank, launched_ranks, read_flags
from compose.config.tables import Config
from compose.errors import write_whole
from compose.planner.cluster import Cluster, load_cluster
from compose.planner.measure import SECONDS, as_toml
from compose.planner.measure import measure as measure_machine
from compose.train.metrics import peak_flops
from compose.train.processes import process_group


def measure(arguments: Sequence[str], seconds: float = SECONDS) -> int:
    """Measure this machine for the planner."""
    given = read_flags("measure", arguments)
    if given.plain:
        raise flag_error("measure", f"takes no {given.plain[0]}; --out names the file")
    if not given.flags.get("--out"):
        raise flag_error("measure", "needs --out FILE.toml, the file to write")
    out = Path(given.flags["--out"])
    launched_ranks()
    if is_first_rank():
        if out.suffix != ".toml":
            raise flag_error("--out", f"{out} is no .toml file")
        check_out("--out", out)
    with process_group(Config()) as device:
        cluster = measure_machine(device, _peaks(device), seconds)
        if dist.get_rank() == 0:
            write_whole(out, as_toml(cluster, _measured_notes(cluster)))
            print(f"{out}: {_measured_rates(load_cluster(str(out)))}", flush=True)
    return 0


def _peaks(device: torch.device) -> Mapping[str, float]:
    """Return the maker's FLOP/s by type, for the types that are known."""
    if device.type != "cuda":
        return {}
    name = torch.cuda.get_device_name(device)
    results = {dtype: peak_flops(name, dtype) for dtype in ("bfloat16", "float8")}
    results["float16"] = results["bfloat16"]
    return {dtype: rate for dtype, rate in results.items() if rate}


def _measured_notes(cluster: Cluster) -> list[str]:
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


def _measured_rates(cluster: Cluster) -> str:
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
