"""The command doctor: what on this machine would stop or slow a run, and the cure for each."""

import fcntl
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
import torch.cuda.nccl as torch_nccl
import torch.distributed as dist

from compose.cli import COMMANDS
from compose.cli.command_line import (
    ParsedWords,
    device_problems,
    is_first_rank,
    launched_ranks,
    read_arguments,
)
from compose.config.tables import Config
from compose.config.toml import COMMAND_LINE, load, without_file
from compose.errors import ConfigError, write_whole, written
from compose.parallel.comm import Comm
from compose.planner.cluster import Cluster, cluster_names, load_cluster
from compose.planner.sweep import Sweep, cores, link_of, measure_collectives
from compose.train.processes import process_group

_SECONDS = 40.0  # of collectives
_WAIT = 90  # seconds after which a collective that a rank has not joined is an error
_MIB, _GIB = 1 << 20, 1 << 30
_SHARED = _GIB  # what NCCL's guide asks of containers: --shm-size=1g
_USED = 1024  # MiB, assumed: more than the driver keeps or the context of one process takes
_SOCKETS, _FILES = 16, 512  # assumed: groups of a mesh, with a socket to each rank; other files
_SLOW_WRITE, _SLOW_FLUSH = 50e6, 0.1  # assumed: bytes per second, seconds
_SLOW, _LATE = 0.5, 4.0  # assumed: parts of the bandwidth and latency that are to be had
_INFINIBAND = Path("/sys/class/infiniband")
_LOCK = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
_WAYS = "NCCL_DEBUG=INFO says which interface is taken; NCCL_SOCKET_IFNAME, NCCL_IB_HCA choose one"
_NFS_LOCAL = {"nolock", "local_lock=flock", "local_lock=all"}
_ONE_NODE = "locks hold on one node alone there"
# Mounts on which a run needs care: the beginning of the type in /proc/mounts, which options, what then
# happens, the cure (nfs(5), mount.lustre(8), tmpfs(5)).
_TRAPS: Sequence[tuple[str, Callable[[set[str]], object], str, str]] = (
    ("nfs", _NFS_LOCAL.__and__, _ONE_NODE, "mount it without nolock and local_lock"),
    ("nfs", {"soft"}.__and__, "a slow server loses writes there", "mount it with hard"),
    ("lustre", lambda options: "flock" not in options, _ONE_NODE, "mount it with flock"),
    ("overlay", lambda options: True, "its files end with the container", "mount a volume there"),
    ("tmpfs", lambda options: True, "its files are in memory", "take a folder on a disk"),
    ("fuse.", lambda options: True, "it may copy where it should rename", "take a shared file system"),
)


State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Line:
    """One line of the result of a check."""

    state: State
    """warn: it may slow or harm a run; fail: it would stop one."""
    text: str
    cure: str = ""
    check: str = ""

    def __str__(self) -> str:
        return f"{self.state:<5} {self.check:<9} {self.text}{self.cure and '; ' + self.cure}"


def _node_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _built() -> str:
    of = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    parts = [f"{name} {version}" for name, version in of.items() if version] or ["no GPU"]
    if dist.is_nccl_available():
        parts.append(f"NCCL {'.'.join(map(str, torch_nccl.version()))}")
    return f"torch {torch.__version__} for {', '.join(parts)}"


def _versions(config: Config) -> Iterator[Line]:
    """Compare what is installed with what this package, and torch of NVIDIA's libraries, ask for."""
    from packaging.requirements import Requirement

    asked = [("dtensor-compose", text) for text in metadata.requires("dtensor-compose") or ()]
    asked += [("torch", text) for text in metadata.requires("torch") or () if text[:7] == "nvidia-"]
    read, right = [(package, Requirement(text)) for package, text in asked], 0
    # Several extras may ask for the same.
    for package, wanted in {(p, f"{r.name}{r.specifier}"): (p, r) for p, r in read}.values():
        needed = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        version = next((d.version for d in metadata.distributions(name=wanted.name)), "")
        stops = needed and package != "torch"
        if not stops and (not version or not (needed or "extra" in str(wanted.marker))):
            continue
        if version and wanted.specifier.contains(version, prereleases=True):
            right += 1
            continue
        ask = f"{wanted.name}{wanted.specifier}"
        text = f"{package} asks for {ask}, and {version or 'nothing'} is installed"
        yield Line("fail" if stops else "warn", text, f"pip install '{ask}'")
    yield Line("ok", f"{_built()}, Python {sys.version.split()[0]}; {right} libraries are in range")


def _devices(config: Config) -> Iterator[Line]:
    names = [torch.cuda.get_device_name(number) for number in range(_gpus())]
    state: State = "fail" if config.run.device == "cuda" else "warn"
    if names:
        yield Line("ok", ", ".join(f"{n} x {name}" for name, n in Counter(names).items()))
        if 1 < len(names) < _node_ranks():
            text = f"{_node_ranks()} ranks have {len(names)} GPUs"
            yield Line("fail", text, f"torchrun --nproc-per-node {len(names)}")
    elif shutil.which("nvidia-smi") or Path("/dev/kfd").exists():
        cure = "take the build that fits the driver (pytorch.org/get-started), or a newer driver"
        yield Line(state, f"this machine has GPUs, which {_built()} cannot use", cure)
    elif state == "fail":
        yield Line("fail", "no GPU, and run.device is cuda", "--run.device=auto")
    else:
        yield Line("ok", "no GPU: runs train on the CPU, with gloo")


def _nvidia_smi(query: str) -> list[list[str]]:
    words = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    return [line.split(", ") for line in done.stdout.splitlines()]


def _users(config: Config) -> Iterator[Line]:
    own = [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in range(_gpus())]
    rows = _nvidia_smi("gpu=uuid,index,memory.used,memory.total") if own else []
    rows = [row for row in rows if row[0] in own]
    for uuid, index, used, total in rows:
        if int(used) > _USED:
            pids = [pid for gpu, pid in _nvidia_smi("compute-apps=gpu_uuid,pid") if gpu == uuid]
            whose = f"processes {', '.join(pids)}" if pids else "processes not seen from here"
            text = f"GPU {index}: {used} of {total} MiB are in use by {whose}"
            yield Line("warn", text, "end them, or leave it out of CUDA_VISIBLE_DEVICES")
    yield Line("ok", f"looked for others on {len(rows)} of {len(own)} GPUs" if own else "no GPU")


def _shared_memory(config: Config) -> Iterator[Line]:
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    text, short = f"/dev/shm has {free / _GIB:.1f} GiB free", bool(_gpus()) and free < _SHARED
    cure = "docker run --shm-size=8g or --ipc=host; in a pod an emptyDir of medium Memory"
    yield Line("warn", f"{text}, and NCCL wants 1", cure) if short else Line("ok", text)


def _limits(config: Config) -> Iterator[Line]:
    infinity, ranks = resource.RLIM_INFINITY, launched_ranks()
    names = ("nofile", "memlock", "core")
    soft = {n: resource.getrlimit(getattr(resource, f"RLIMIT_{n.upper()}"))[0] for n in names}
    least = _FILES + _SOCKETS * ranks
    if infinity != soft["nofile"] < least:
        text = f"nofile is {soft['nofile']}; {ranks} ranks may need {least} files and sockets"
        yield Line("fail", text, f"ulimit -n {max(65536, least)}")
    if soft["memlock"] != infinity and _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()):
        text = f"memlock is {soft['memlock']} bytes, and InfiniBand pins more"
        yield Line("fail", text, "ulimit -l unlimited; docker run --ulimit memlock=-1")
    if soft["core"] == infinity:
        text = "core is unlimited: a crash may write all memory of a rank to disk"
        yield Line("warn", text, "ulimit -c 0")
    yield Line("ok", ", ".join(f"{n} {'unlimited' if v == infinity else v}" for n, v in soft.items()))


def _threads(config: Config) -> Iterator[Line]:
    ranks, threads, have = _node_ranks(), torch.get_num_threads(), cores()
    text = f"ranks x threads = {ranks} x {threads} on {have} cores"
    cure = f"OMP_NUM_THREADS={max(1, have // ranks)}" + " and fewer ranks" * (ranks > have)
    yield Line("warn", text, cure) if ranks * threads > have else Line("ok", text)


def _run_dir(config: Config) -> Iterator[Line]:
    """Write, flush, rename and lock in run.dir, or in the nearest folder above it that exists."""
    if "://" in config.run.dir:
        yield Line("ok", f"{config.run.dir} is in object storage, which was not looked at")
        return
    folder = Path(config.run.dir or "runs").absolute()
    while not folder.exists():
        folder = folder.parent
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    above = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    _, _, kind, options, *_ = max(reversed(above), key=lambda mount: len(mount[1]))
    for begin, chosen, text, cure in _TRAPS:
        if kind.startswith(begin) and chosen(set(options.split(","))):
            yield Line("warn", f"{folder} is on {kind}, and {text}", cure)
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-") as own:
            yield from _written(folder, Path(own))
    except OSError as error:
        why = f"cannot write and rename in {folder}: {error.strerror}"
        yield Line("fail", why, "take a folder that this user can write, with room")


def _written(folder: Path, own: Path) -> Iterator[Line]:
    times = list[float]()
    for count in (64, 1):  # MiB
        begun, block = time.perf_counter(), os.urandom(_MIB if count > 1 else 1)
        with open(own / "file", "wb") as file:
            for _ in range(count):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        times.append(time.perf_counter() - begun)
    (own / "new").mkdir()
    (own / "new").rename(own / "whole")  # as a checkpoint becomes whole
    rate, free = 64 * _MIB / times[0], shutil.disk_usage(folder).free / _GIB
    figures = f"{rate / 1e6:.0f} MB/s and {times[1] * 1e3:.0f} ms a flush, {free:.0f} GiB free"
    text = f"{folder} takes {figures}"
    slow = rate < _SLOW_WRITE or times[1] > _SLOW_FLUSH
    yield Line("warn", text, "take a faster disk, or save more rarely") if slow else Line("ok", text)
    with open(own / "file") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            words = [sys.executable, "-IS", "-c", _LOCK, str(own / "file")]
            holds = subprocess.run(words, capture_output=True, check=False).returncode != 0
        except OSError:
            holds = False
    if not holds:
        text = f"{folder} has no locks: a second run is not refused"
        yield Line("warn", text, "give each run a folder of its own")


CHECKS: Mapping[str, Callable[[Config], Iterator[Line]]] = {
    "versions": _versions,
    "devices": _devices,
    "users": _users,
    "shm": _shared_memory,
    "run.dir": _run_dir,
    "limits": _limits,
    "threads": _threads,
}


def _checked(config: Config) -> Iterator[Line]:
    for name, check in CHECKS.items():
        try:
            yield from (replace(line, check=name) for line in check(config))
        except (OSError, ImportError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
            yield Line("warn", f"could not be looked at: {error}", "", name)


def _links(cluster: Cluster | None, device: torch.device, seconds: float) -> Iterator[Line]:
    """Time collectives of all ranks, and compare them with a cluster's file or those of this GPU."""
    try:
        rows, node = list(measure_collectives(Sweep(device, seconds))), _node_ranks()
    except dist.DistError as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"links: the ranks do not reach each other ({why}); {_WAYS}") from None
    files = [cluster] if cluster else [load_cluster(name) for name in cluster_names() if _gpus()]
    files = [c for c in files if cluster or c.device.name == torch.cuda.get_device_name()]
    for inside, place in ((True, "within a node"), (False, "between nodes")):
        link = link_of([row for row in rows if inside == (row.ranks * row.stride <= node)], node)
        if not link:
            continue
        text = f"{link.bandwidth / 1e9:.3g} GB/s of a rank and {link.latency * 1e6:.3g} us {place}"
        # Clusters of one GPU have the same links within a node, and not between nodes.
        best = files[0].within if files and inside else cluster.between if cluster else None
        if best and (link.latency > _LATE * best.latency or link.bandwidth < _SLOW * best.usable):
            text += (
                f", not {best.usable / 1e9:.3g} GB/s and {best.latency * 1e6:.3g} us ({files[0].name})"
            )
            yield Line("warn", text, "nvidia-smi topo -m shows the ways" if inside else _WAYS, "links")
        else:
            yield Line("ok", text, "", "links")


def _others(lines: Sequence[Line]) -> Iterator[Line]:
    """Say what other nodes have installed that this one has not, and what is wrong there."""
    told: list[tuple[str, str, Sequence[Line]]] = [("", "", ())] * dist.get_world_size()
    dist.all_gather_object(told, (socket.gethostname(), _built(), lines))
    host, built, _ = told[0]
    for other, theirs, rows in told[1:]:
        if theirs != built and rows:
            text = f"{other} has {theirs}, and {host} has {built}"
            yield Line("fail", text, "install the same on every node", "versions")
        bad = (row for row in rows if row.state != "ok")
        yield from (replace(row, text=f"{other}: {row.text}") for row in bad)


def doctor(arguments: Sequence[str], seconds: float = _SECONDS) -> int:
    """Look for what would stop or slow a run on this machine; 2 if something would stop one."""
    given = read_arguments(arguments, "python -m compose doctor", COMMANDS["doctor"])
    own = given.plain or Path(given.file).exists()
    config = load(given.file, given.overrides) if own else without_file(given.overrides)
    cluster = load_cluster(given.flags["--cluster"]) if "--cluster" in given.flags else None
    ranks, lines = launched_ranks(), list[Line]()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        lines += _checked(config)
    _tell(given, lines, lines)  # links that fail end the command
    alone = bool(device_problems(config))  # ranks of this node cannot reach others
    if alone and lines and not is_first_rank():
        print(*lines, sep="\n", file=sys.stderr, flush=True)
    if ranks > 1 and not alone:
        with process_group(replace(config, comm=Comm(timeout=_WAIT, start_timeout=_WAIT))) as device:
            more = [*_others(lines), *_links(cluster, device, seconds)]
        lines += more
        _tell(given, more, lines)
    count = Counter(line.state for line in lines)
    if is_first_rank():
        print(f"{count['fail']} would stop a run, {count['warn']} may slow or harm one", flush=True)
    return 2 if count["fail"] and (alone or is_first_rank()) else 0


def _tell(given: ParsedWords, new: Sequence[Line], lines: Sequence[Line]) -> None:
    if is_first_rank():
        print(*new, sep="\n", flush=True)
    if is_first_rank() and (out := given.flags.get("--json")):
        with written(f"{COMMAND_LINE}: --json: cannot write", Path(out)):
            write_whole(Path(out), json.dumps({"lines": [*map(asdict, lines)]}, indent=1) + "\n")
