"""The command doctor: each check is broken once, and says so in one line with its cure."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from compose.cli import doctor
from compose.config.tables import Config
from compose.config.toml import without_file
from compose.errors import ConfigError
from compose.planner.cluster import MeasuredCollective
from tests.support.command_lines import answered, execute

Patch = pytest.MonkeyPatch
# What this package asks for, as its metadata writes it.
ASKED = {
    each.name: f"{each.name}{each.specifier}"
    for each in map(Requirement, metadata.requires("dtensor-compose") or ())
}
GPU = "NVIDIA H100 80GB HBM3"
WAYS = "NCCL_DEBUG=INFO says which interface is taken; NCCL_SOCKET_IFNAME, NCCL_IB_HCA choose one"


def with_gpus(patch: Patch, count: int = 2) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: count)
    patch.setattr(torch.cuda, "get_device_name", lambda *number: GPU)
    patch.setattr(torch.cuda, "get_device_properties", lambda n: SimpleNamespace(uuid=f"{n}-f"))


def with_driver(patch: Patch, rows: str = "", processes: str = "") -> None:
    """nvidia-smi, which prints what is given."""

    def run(words: list[str], **unused: Any) -> SimpleNamespace:
        return SimpleNamespace(stdout=processes if "compute-apps" in words[1] else rows)

    patch.setattr(subprocess, "run", run)
    patch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


def with_limit(patch: Patch, name: int, soft: int) -> None:
    real = resource.getrlimit
    patch.setattr(resource, "getrlimit", lambda kind: (soft, soft) if kind == name else real(kind))


def with_mount(patch: Patch, kind: str, options: str = "rw") -> None:
    real = Path.read_text
    mounts = f"disk / ext4 rw 0 0\nserver:/x {Path.cwd()} {kind} {options} 0 0\n"
    patch.setattr(
        Path,
        "read_text",
        lambda self, *more, **named: (
            mounts if str(self) == "/proc/mounts" else real(self, *more, **named)
        ),
    )


def with_versions(patch: Patch, **versions: str) -> None:
    """Installed versions of some packages; "" for one that is not installed."""
    real = metadata.distributions

    def distributions(name: str) -> Iterable[Any]:
        if name not in versions:
            return real(name=name)
        return [SimpleNamespace(version=versions[name])] if versions[name] else []

    patch.setattr(metadata, "distributions", distributions)


def with_infiniband(patch: Patch, folder: Path) -> None:
    (folder / "infiniband" / "mlx5_0").mkdir(parents=True)
    patch.setattr(doctor, "_INFINIBAND", folder / "infiniband")


def no_locks(patch: Patch) -> None:
    def flock(file: object, kind: int) -> None:
        raise OSError

    patch.setattr(doctor.fcntl, "flock", flock)


def slow_disk(patch: Patch) -> None:
    clock = iter((0.0, 64.0, 64.0, 64.2))
    patch.setattr(doctor.time, "perf_counter", lambda: next(clock))
    patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 << 30))


def odd_torch(patch: Patch) -> None:
    asked = ["nvidia-nccl-cu12==2.27.5; python_version > '3'", "numpy>=1"]
    real = metadata.requires
    patch.setattr(metadata, "requires", lambda name: asked if name == "torch" else real(name))
    with_versions(patch, **{"nvidia-nccl-cu12": "2.30.1"})


# What is broken, how, and the line that says so; FOLDER is where the test is.
CASES: dict[str, tuple[Callable[[Patch, Path], object], str]] = {
    "torch is too old": (
        lambda patch, folder: with_versions(patch, torch="2.9.1"),
        "fail  versions  dtensor-compose asks for ASKED[torch], and 2.9.1 is installed; pip install"
        " 'ASKED[torch]'",
    ),
    "a library is missing": (
        lambda patch, folder: with_versions(patch, pillow=""),
        "fail  versions  dtensor-compose asks for ASKED[pillow], and nothing is installed; pip"
        " install 'ASKED[pillow]'",
    ),
    "an extra is too old": (
        lambda patch, folder: with_versions(patch, torchao="0.3"),
        "warn  versions  dtensor-compose asks for ASKED[torchao], and 0.3 is installed; pip install"
        " 'ASKED[torchao]'",
    ),
    "another NCCL": (
        lambda patch, folder: odd_torch(patch),
        "warn  versions  torch asks for nvidia-nccl-cu12==2.27.5, and 2.30.1 is installed; pip"
        " install 'nvidia-nccl-cu12==2.27.5'",
    ),
    "not installed": (
        lambda patch, folder: patch.setattr(metadata, "requires", missing),
        "warn  versions  could not be looked at: No package metadata was found for dtensor-compose",
    ),
    "more ranks than GPUs": (
        lambda patch, folder: (with_gpus(patch), patch.setenv("LOCAL_WORLD_SIZE", "8")),
        "fail  devices   8 ranks have 2 GPUs; torchrun --nproc-per-node 2",
    ),
    "a torch without CUDA": (
        lambda patch, folder: (
            with_driver(patch),
            patch.setattr(doctor, "_built", lambda: "torch 2.13"),
        ),
        "warn  devices   this machine has GPUs, which torch 2.13 cannot use; take the build that fits"
        " the driver (pytorch.org/get-started), or a newer driver",
    ),
    "another user": (
        lambda patch, folder: (
            with_gpus(patch),
            with_driver(
                patch,
                "GPU-0-f, 0, 12, 81559\nGPU-1-f, 1, 40000, 81559\nGPU-9-f, 2, 40000, 81559\n",
                "GPU-1-f, 4711\nGPU-9-f, 4712\n",
            ),
        ),
        "warn  users     GPU 1: 40000 of 81559 MiB are in use by processes 4711; end them, or leave"
        " it out of CUDA_VISIBLE_DEVICES",
    ),
    "another container": (
        lambda patch, folder: (with_gpus(patch, 1), with_driver(patch, "GPU-0-f, 0, 2000, 81559\n")),
        "warn  users     GPU 0: 2000 of 81559 MiB are in use by processes not seen from here; end"
        " them, or leave it out of CUDA_VISIBLE_DEVICES",
    ),
    "shared memory of a container": (
        lambda patch, folder: (
            with_gpus(patch),
            patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20)),
        ),
        "warn  shm       /dev/shm has 0.1 GiB free, and NCCL wants 1; docker run --shm-size=8g or"
        " --ipc=host; in a pod an emptyDir of medium Memory",
    ),
    "a slow disk": (
        lambda patch, folder: slow_disk(patch),
        "warn  run.dir   FOLDER takes 1 MB/s and 200 ms a flush, 3 GiB free; take a faster disk, or"
        " save more rarely",
    ),
    "no locks": (
        lambda patch, folder: no_locks(patch),
        "warn  run.dir   FOLDER has no locks: a second run is not refused; give each run a folder of"
        " its own",
    ),
    "locks of nothing": (
        lambda patch, folder: patch.setattr(doctor, "_LOCK", "pass"),
        "warn  run.dir   FOLDER has no locks: a second run is not refused; give each run a folder of"
        " its own",
    ),
    "a full disk": (
        lambda patch, folder: patch.setattr(os, "fsync", full),
        "fail  run.dir   cannot write and rename in FOLDER: No space left on device; take a folder"
        " that this user can write, with room",
    ),
    "no rename": (
        lambda patch, folder: patch.setattr(Path, "rename", no_rename),
        "fail  run.dir   cannot write and rename in FOLDER: Function not implemented; take a folder"
        " that this user can write, with room",
    ),
    "few files": (
        lambda patch, folder: with_limit(patch, resource.RLIMIT_NOFILE, 256),
        "fail  limits    nofile is 256; 1 ranks may need 528 files and sockets; ulimit -n 65536",
    ),
    "InfiniBand without memory": (
        lambda patch, folder: (
            with_infiniband(patch, folder),
            with_limit(patch, resource.RLIMIT_MEMLOCK, 65536),
        ),
        "fail  limits    memlock is 65536 bytes, and InfiniBand pins more; ulimit -l unlimited;"
        " docker run --ulimit memlock=-1",
    ),
    "core files": (
        lambda patch, folder: with_limit(patch, resource.RLIMIT_CORE, resource.RLIM_INFINITY),
        "warn  limits    core is unlimited: a crash may write all memory of a rank to disk; ulimit -c"
        " 0",
    ),
    "too many threads": (
        lambda patch, folder: (
            patch.setenv("LOCAL_WORLD_SIZE", "4"),
            patch.setattr(doctor, "cores", lambda: 16),
            patch.setattr(torch, "get_num_threads", lambda: 16),
        ),
        "warn  threads   ranks x threads = 4 x 16 on 16 cores; OMP_NUM_THREADS=4",
    ),
    "too few cores": (
        lambda patch, folder: (
            patch.setenv("LOCAL_WORLD_SIZE", "4"),
            patch.setattr(doctor, "cores", lambda: 2),
        ),
        "warn  threads   ranks x threads = 4 x 1 on 2 cores; OMP_NUM_THREADS=1 and fewer ranks",
    ),
}
# Mounts on which a run needs care: their type, their options, and what is said.
MOUNTS = {
    "NFS without locks": (
        "nfs4",
        "rw,hard,local_lock=all",
        "locks hold on one node alone there; mount it without nolock and local_lock",
    ),
    "soft NFS": ("nfs", "rw,soft", "a slow server loses writes there; mount it with hard"),
    "Lustre": ("lustre", "rw,localflock", "locks hold on one node alone there; mount it with flock"),
    "a container's layer": ("overlay", "rw", "its files end with the container; mount a volume there"),
    "memory": ("tmpfs", "rw", "its files are in memory; take a folder on a disk"),
    "a bucket": ("fuse.s3fs", "rw", "it may copy where it should rename; take a shared file system"),
}


def missing(package: str) -> list[str]:
    raise metadata.PackageNotFoundError(package)


def full(file: int) -> None:
    raise OSError(28, "No space left on device")


def no_rename(path: Path, target: Path) -> None:
    raise OSError(38, "Function not implemented")


def lines_of(check: str, config: Config) -> list[str]:
    return [str(line) for line in doctor._checked(config) if line.check == check]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: Patch) -> Path:
    """An empty folder to be in, on a disk; a machine without the limits and devices of this one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "_INFINIBAND", tmp_path / "none")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for name in ("NOFILE", "MEMLOCK"):
        with_limit(monkeypatch, getattr(resource, f"RLIMIT_{name}"), resource.RLIM_INFINITY)
    with_limit(monkeypatch, resource.RLIMIT_CORE, 0)
    with_mount(monkeypatch, "ext4")
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong(case: str, here: Path, monkeypatch: Patch) -> None:
    breaks, line = CASES[case]
    check = line.split()[1]
    alone = {check: doctor.CHECKS[check]}
    monkeypatch.setattr(doctor, "CHECKS", alone)
    before = [text for text in lines_of(check, Config()) if "ms a flush" not in text]
    assert all(text.startswith("ok ") for text in before)
    breaks(monkeypatch, here)
    shown = [text for text in lines_of(check, Config()) if text[:2] != "ok"]
    shown = [text for text in shown if " ms a flush" not in text or case == "a slow disk"]
    line = re.sub(r"ASKED\[(\w+)\]", lambda match: ASKED[match[1]], line)
    assert shown == [line.replace("FOLDER", str(here))]
    assert [path.name for path in here.iterdir() if path.name.startswith(".doctor")] == []


@pytest.mark.parametrize(("kind", "options", "text"), MOUNTS.values(), ids=MOUNTS)
def test_a_mount_that_needs_care(
    kind: str, options: str, text: str, here: Path, monkeypatch: Patch
) -> None:
    with_mount(monkeypatch, kind, options)
    shown = [line for line in lines_of("run.dir", Config()) if " ms a flush" not in line]
    assert shown == [f"warn  run.dir   {here} is on {kind}, and {text}"]


def test_every_check_is_broken() -> None:
    assert {line.split()[1] for _, line in CASES.values()} == set(doctor.CHECKS)


def test_a_gpu_that_is_wanted() -> None:
    config = without_file([("run.device", "cuda")])
    assert lines_of("devices", config) == [
        "fail  devices   no GPU, and run.device is cuda; --run.device=auto"
    ]


def test_no_links_of_gpus_that_are_missing(
    here: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks could not take a GPU each, which is said already."""
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "launched_ranks", lambda: 2)
    monkeypatch.setattr(doctor, "CHECKS", {"devices": doctor.CHECKS["devices"]})
    assert doctor.doctor(["--run.device=cuda"]) == 2
    assert capsys.readouterr().out.splitlines() == [
        "fail  devices   no GPU, and run.device is cuda; --run.device=auto",
        "1 would stop a run, 0 may slow or harm one",
    ]


def test_a_run_in_object_storage(here: Path) -> None:
    """No folder of that name is made or measured."""
    config = replace(Config(), run=replace(Config().run, dir="s3://bucket/run"))
    assert lines_of("run.dir", config) == [
        "ok    run.dir   s3://bucket/run is in object storage, which was not looked at"
    ]
    assert [*here.iterdir()] == []


def test_a_machine_without_a_gpu(here: Path, monkeypatch: Patch) -> None:
    """It says so and goes on; the lines are in the file, and the code is that of the worst one."""
    done = answered("-m", "compose", "doctor", "--json", "lines.json", "--run.dir=a/b")
    assert (done.returncode, done.stderr) == (0, "")
    assert "ok    devices   no GPU: runs train on the CPU, with gloo\n" in done.stdout
    assert not (here / "a").exists()
    rows = json.loads((here / "lines.json").read_text())["lines"]
    assert {row["check"] for row in rows} == set(doctor.CHECKS)
    shown = [f"{row['state']:<5} {row['check']:<9} {row['text']}" for row in rows]
    assert [line.split(";")[0] for line in done.stdout.splitlines()[:-1]] == [
        line.split(";")[0] for line in shown
    ]
    with_limit(monkeypatch, resource.RLIMIT_NOFILE, 4)
    monkeypatch.setattr(doctor, "CHECKS", {"limits": doctor.CHECKS["limits"]})
    done = answered("-m", "compose", "doctor")
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == "1 would stop a run, 0 may slow or harm one"


BAD = {
    "doctor nowhere.toml": "nowhere.toml: no such file",
    "doctor --cluster=h10": "--cluster: unknown cluster 'h10'",
    "doctor --jsn=x": "command line: --jsn: unknown option; did you mean --json?",
    "doctor --json=no/x.json": "command line: --json: cannot write no/x.json: No such file"
    " or directory",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input(line: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"threads": doctor.CHECKS["threads"]})
    done = answered("-m", "compose", *line.split())
    assert done.returncode == 2
    assert done.stderr.startswith(BAD[line])


def links(patch: Patch, rate: float, latency: float, cluster: str = "", stride: int = 1) -> list[str]:
    """What is said of two ranks that reach so many bytes per second, after so many seconds."""
    inverse = 1 / rate / 2  # an all-gather of two ranks sends half of its bytes
    row = MeasuredCollective("all_gather", 2, stride, latency, inverse, 0.0, (1.0,), (1.0,))
    patch.setattr(doctor, "measure_collectives", lambda sweep: [row])
    patch.setenv("LOCAL_WORLD_SIZE", "2")
    given = doctor.load_cluster(cluster) if cluster else None
    return [str(line) for line in doctor._links(given, torch.device("cpu"), 1.0)]


def test_links(monkeypatch: Patch) -> None:
    assert links(monkeypatch, 2e6, 1.0) == [
        "ok    links     0.002 GB/s of a rank and 1e+06 us within a node"
    ]
    good = "ok    links     1.5 GB/s of a rank and 60 us within a node"
    assert links(monkeypatch, 1.5e9, 60e-6, "cpu") == [good]
    slow = "not 2 GB/s and 50 us (cpu); nvidia-smi topo -m shows the ways"
    assert links(monkeypatch, 0.9e9, 60e-6, "cpu") == [
        f"warn  links     0.9 GB/s of a rank and 60 us within a node, {slow}"
    ]
    assert links(monkeypatch, 1.5e9, 300e-6, "cpu") == [
        f"warn  links     1.5 GB/s of a rank and 300 us within a node, {slow}"
    ]
    assert links(monkeypatch, 0.1e9, 60e-6, "cpu", stride=2)[0].endswith(
        f" between nodes, not 1.25 GB/s and 100 us (cpu); {WAYS}"
    )


def test_links_of_a_known_gpu(monkeypatch: Patch) -> None:
    """Within a node those of its file; between nodes no file is asked, for they differ."""
    with_gpus(monkeypatch)
    known = map(doctor.load_cluster, doctor.cluster_names())
    first = next(cluster for cluster in known if cluster.device.name == GPU)
    (line,) = links(monkeypatch, 1e9, 1e-5)
    assert f"not {first.within.usable / 1e9:.3g} GB/s" in line
    assert links(monkeypatch, 1e9, 1e-5, stride=2)[0].startswith("ok ")


def test_links_that_fail(monkeypatch: Patch) -> None:
    def fail(sweep: object) -> list[MeasuredCollective]:
        raise dist.DistNetworkError("Connection refused\nmore")

    monkeypatch.setattr(doctor, "measure_collectives", fail)
    with pytest.raises(ConfigError) as error:
        list(doctor._links(None, torch.device("cpu"), 1.0))
    assert str(error.value) == (
        f"links: the ranks do not reach each other (Connection refused); {WAYS}"
    )


def test_other_nodes(monkeypatch: Patch) -> None:
    """Of another node only what is wrong, with its name; and another build of torch."""
    rows = [doctor.Line("ok", "x"), doctor.Line("warn", "slow", "wait", "run.dir")]
    told = [("node0", "torch 2.13", [rows[0]]), ("node0", "torch 2.13", [])]
    told += [("node1", "torch 2.12", rows), ("node1", "torch 2.12", [])]

    def gather(into: list[object], own: object) -> None:
        into[:] = told

    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert [str(line) for line in doctor._others([])] == [
        "fail  versions  node1 has torch 2.12, and node0 has torch 2.13; install the same on"
        " every node",
        "warn  run.dir   node1: slow; wait",
    ]


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    """Two ranks measure their link in a minute at most; the first alone speaks and writes."""
    script = tmp_path / "short.py"
    script.write_text(
        "from compose.cli.command_line import run\n"
        "from compose.cli.doctor import doctor\n"
        "run(lambda words: doctor(words, seconds=2.0))\n"
    )
    out = tmp_path / "lines.json"
    done = execute(str(script), "--json", str(out), "--cluster=cpu", ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ranks x threads") == done.stdout.count(" would stop a run") == 1
    rows = json.loads(out.read_text())["lines"]
    assert {row["check"] for row in rows} == {*doctor.CHECKS, "links"}
    assert sys.version.split()[0] in rows[0]["text"]
