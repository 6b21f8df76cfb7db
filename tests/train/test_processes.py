"""The device that a rank takes, where it sees several GPUs, one, or too few; and signals to it."""

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from compose.train import processes
from compose.train.processes import Signals, _agree, _claim, _rendezvous, pick_device
from compose.train.workers import Worker
from tests.support.helpers import keys_in, make_config, refusal


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """GPUs that this process sees, as ``device_count`` of the mock says."""
    cuda = mock.Mock()
    for name in ("is_available", "device_count", "set_device", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    # Kept as it is after the test, whatever is set in it.
    monkeypatch.setattr(os, "environ", {**os.environ})
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        os.environ.pop(name, None)
    return cuda


@pytest.mark.parametrize(
    ("local", "seen", "index"),
    [(0, 1, 0), (3, 4, 3), (3, 1, 0)],
    ids=["one process", "four of four", "four processes that see one each"],
)
def test_each_local_rank_takes_its_gpu(gpus: mock.Mock, local: int, seen: int, index: int) -> None:
    gpus.device_count.return_value = seen
    os.environ["LOCAL_RANK"] = str(local)
    assert pick_device("auto") == torch.device("cuda", index)
    gpus.set_device.assert_called_once_with(torch.device("cuda", index))


def test_more_ranks_than_gpus_are_refused(gpus: mock.Mock) -> None:
    gpus.device_count.return_value = 4
    os.environ["LOCAL_RANK"] = "5"
    assert refusal(pick_device, "cuda") == (
        "run.device: local rank 5 has no GPU, since this process sees 4: start at most 4 processes on a"
        " node (--nproc-per-node 4), or show each process its own GPU"
    )


def test_two_ranks_on_one_gpu_are_refused(gpus: mock.Mock) -> None:
    """Slurm shows each process its own GPU as number 0; so it is known by its own number."""
    store, device = dist.HashStore(), torch.device("cuda", 0)
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    for uuid in ("one", "other"):
        gpus.get_device_properties.return_value = properties(uuid)
        _claim(device, store)
    assert refusal(_claim, device, store) == (
        "run.device: two ranks have the same H100 (CUDA_VISIBLE_DEVICES = '0'): start one process for"
        " each GPU, or run with --run.device=cpu"
    )
    _claim(torch.device("cpu"), store)


def properties(uuid: str) -> Any:
    gpu = mock.Mock(uuid=uuid)
    gpu.name = "H100"
    return gpu


@pytest.mark.parametrize(
    "own", [{}, {"PYTORCH_ALLOC_CONF": "a:b"}, {"PYTORCH_CUDA_ALLOC_CONF": "a:b"}], ids=str
)
def test_the_allocator_grows_segments_unless_told_otherwise(
    gpus: mock.Mock, own: dict[str, str]
) -> None:
    gpus.device_count.return_value = 1
    os.environ |= own
    pick_device("cuda")
    set_now = {name: v for name, v in os.environ.items() if name.endswith("ALLOC_CONF")}
    assert set_now == (own or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert pick_device("cpu") == torch.device("cpu")


def test_signals_are_of_the_main_thread() -> None:
    """There they are caught, and given back; a thread, as Ray's workers train in, leaves them alone."""
    kept = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    signals, inside = Signals(torch.device("cpu"), Worker()), list[object]()

    def use() -> None:
        with mock.patch.object(dist, "get_rank", return_value=0), signals:
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert inside == kept[:1]
    use()
    assert inside[1] == signals._note
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == kept


@pytest.mark.parametrize(
    ("task", "tasks", "says"), [("0", "4", True), ("1", "4", False), ("0", "1", False)]
)
@pytest.mark.parametrize(("count", "place", "program"), processes._OF_TASKS)
def test_tasks_are_no_ranks(
    count: str,
    place: str,
    program: str,
    task: str,
    tasks: str,
    says: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One of them says so for all."""
    monkeypatch.setenv(place, task)
    monkeypatch.setenv(count, tasks)
    assert _rendezvous(make_config(1))[1:] == (0, 1)
    line = f"environment: {program} has 4 tasks, and RANK is not set: each task runs alone; torchrun"
    assert capsys.readouterr().err == f"{line} makes ranks of them\n" * says


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_wait_for_others_end(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The rank that has the store, and the one that looks for it; once torch has given up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    numbers = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    with pytest.raises(SystemExit) as raised:
        _rendezvous(make_config(2, comm__timeout=1, comm__start_timeout=1))
    assert raised.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(f"rank {rank} did not meet the others at 127.0.0.1:{port} (")
    end = "); all 2 ranks must start within 1 s (the longer of comm.start_timeout and comm.timeout)\n"
    assert said.endswith(end)
    assert said.count("\n") == 1


def test_nodes_that_choose_other_meshes_are_refused() -> None:
    """By run.elastic: each start chooses by the devices that it sees. Spare ranks ask too."""
    store, mesh = dist.HashStore(), keys_in("dp_shard=2 tp=2 run.elastic=true run.dir=x")
    saving = keys_in("checkpoint.interval=2")
    _agree(store, make_config(4, **mesh, **saving))
    _agree(store, make_config(4, **mesh, **saving))
    other = make_config(4, **(mesh | {"parallel__dp_shard": 4, "parallel__tp": 1}), **saving)
    node = os.uname().nodename
    cure = "all ranks need the same file, keys and code, or nodes of one kind, as run.elastic chooses"
    assert refusal(_agree, store, other) == (
        f"parallel.dp_shard: 4 on {node}, and 2 on {node}: {cure} by their devices\n"
        f"parallel.tp: 1 on {node}, and 2 on {node}: {cure} by their devices"
    )
    _agree(dist.HashStore(), other)


def test_nodes_with_another_config_or_code_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each rank updates its own part of the weights: with another rate it would train another model."""
    store, node = dist.HashStore(), os.uname().nodename
    _agree(store, make_config(2, data__path="stdlib", run__staging="here"))
    _agree(store, make_config(2, data__path="other.bin", run__staging="there"))
    cure = ": all ranks need the same file, keys and code"
    assert refusal(_agree, store, make_config(2, optimizer__lr=0.5, train__seed=7)) == (
        f"train.seed: 7 on {node}, and 0 on {node}{cure}\n"
        f"optimizer.lr: 0.5 on {node}, and 0.003 on {node}{cure}"
    )
    (tmp_path / "plan.py").touch()
    monkeypatch.setattr(processes, "source_files", lambda _: [tmp_path / "plan.py"])
    assert refusal(_agree, store, make_config(2)).startswith(f"the code: e3b0c44298fc on {node}, and ")
