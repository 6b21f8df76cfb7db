"""Runs that save, on meshes of every axis."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compose.build import build, build_optimizer, parallelize
from compose.checkpoint import store
from compose.checkpoint.checkpointer import Checkpointer
from compose.checkpoint.local_shards import local_shard_of, named_tensors
from compose.checkpoint.safetensors_files import TensorFiles
from compose.checkpoint.store import Progress
from compose.composition import Composition
from compose.compression.compressor import CompressionHook
from compose.optim.lr_schedule import set_learning_rate
from compose.proof.comparison import whole
from tests.support.helpers import Keys, make_job, parallel, printed, ranks_in
from tests.support.pool import Pool, make_mesh
from tests.support.training import keys_for, trainer_of

SAVING: Keys = {"train__seq_len": 16, "train__global_batch": 8, "checkpoint__interval": 2}
MESHES: dict[str, Keys] = {
    "one": {},
    "data": parallel(dp_shard=2),
    "tensor, uneven": parallel(dp_shard=4, tp=2),
    "replicas": parallel(dp_replicate=2, dp_shard=2, zero=1),
    "context": parallel(cp=2, dp_shard=2, zero=2),
    "pipeline": parallel(pp=2, dp_shard=1) | {"train__micro_batch": 1},
    "v-schedule": parallel(pp=2, pp_schedule="ZBVZeroBubble", dp_shard=2, zero=1),
    "experts": parallel(dp_shard=2, tp=2, ep=4),
    "experts and pipeline": parallel(pp=2, dp_shard=2, tp=2, ep=2),
}


def shards(folder: Path) -> dict[str, int]:
    """Checksums of a checkpoint's shards, which is whole: equal ones are bitwise the same state."""
    assert store.problems(folder) == []
    files = json.loads((folder / store.MANIFEST).read_text())["files"]
    return {name: entry["crc32"] for name, entry in files.items() if name.startswith("__")}


@torch.no_grad()
def parallelize_without_weights(*args: Any) -> Composition:
    """Call ``parallelize`` and fill weights with NaN, of which nothing may stay."""
    composition = parallelize(*args)
    for parameter in composition.model.parameters():
        parameter.fill_(torch.nan)
    return composition


def trained_state(keys: Keys) -> dict[str, torch.Tensor]:
    """Train to ``stop_after``; on the first rank, the whole state that is left, by name."""
    with mock.patch("compose.train.trainer.parallelize", parallelize_without_weights):
        trainer = trainer_of(keys)
    trainer.run()
    named = named_tensors(trainer.composition, trainer.optimizer)
    mine = {name: whole(copies[0]) for name, copies in named.items()}
    if trainer.mesh["pp"].size() == 1:
        return mine if dist.get_rank() == 0 else {}
    everyone: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return {name: value for part in everyone for name, value in part.items()}


def train_on(pool: Pool, folder: Path, model: Keys, mesh: Keys, steps: int) -> dict[str, torch.Tensor]:
    """The state after so many steps on the mesh, which is saved in ``folder`` too."""
    keys = keys_for(folder, **(SAVING | model | mesh | {"train__stop_after": steps}))
    state = pool.run(trained_state, ranks_in(mesh), keys)[0]
    # Or what is trained next would begin anew, and be equal for it.
    assert store.problems(folder / "checkpoints" / store.name_of(steps)) == []
    return state


def goes_on_bitwise(
    pool: Pool, folder: Path, model: Keys, mesh: Keys, steps: int = 4
) -> dict[str, torch.Tensor]:
    """The state after so many steps, which a run that goes on after two of them ends with bitwise.

    The runs are in ``folder``: "whole", and "parts", which has what the first one saved after two.
    """
    whole, parts = folder / "whole", folder / "parts"
    expected = train_on(pool, whole, model | {"checkpoint__keep_last": 9}, mesh, steps)
    shutil.copytree(whole, parts)
    *later, second = store.newest_first(parts / "checkpoints")
    assert store.step_of(second) == 2
    for path in later:
        shutil.rmtree(path)
    assert_bitwise(train_on(pool, parts, model, mesh, steps), expected)
    return expected


def assert_bitwise(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def goes_on_from_a_state_dict(
    make: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    """An optimizer that another one's state_dict fills takes the other one's steps, bitwise.

    Its learning rate is another one at first, and both get a third one later.
    """
    torch.manual_seed(0)
    named = [(f"w{i}", nn.Parameter(torch.randn(i + 5, 7).to(dtype))) for i in range(3)]
    one = make(named)

    def step(*optimizers: torch.optim.Optimizer) -> None:
        for group in zip(*(each.param_groups for each in optimizers), strict=True):
            for copies in zip(*(each["params"] for each in group), strict=True):
                gradient = torch.randn(copies[0].shape).to(dtype)
                for parameter in copies:
                    parameter.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()

    step(one)
    step(one)
    other = make([(name, nn.Parameter(p.detach().clone())) for name, p in named])
    set_learning_rate(other, 0.5)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    step(one, other)
    for optimizer in (one, other):
        set_learning_rate(optimizer, 0.25)
    step(one, other)
    for a, b in zip(one.param_groups, other.param_groups, strict=True):
        for p, q in zip(a["params"], b["params"], strict=True):
            assert torch.equal(p, q)
            for key, value in one.state[p].items():
                assert other.state[q][key].dtype == value.dtype
                assert torch.equal(other.state[q][key], value), key


def resume(keys: Keys) -> tuple[Progress | None, list[str]]:
    """Resume; return the progress and the lines printed."""
    job = make_job(dist.get_world_size(), **keys)
    composition = build(job, make_mesh(job.degrees), torch.device("cpu"))
    optimizer = build_optimizer(composition, job)
    compression: Any = composition.compression
    beside = [CompressionHook(compression)] if compression else []
    folder = Path(job.config.run.dir)
    checkpointer = Checkpointer(job.config, composition, optimizer, folder, beside=beside)
    with printed() as said:
        progress = checkpointer.resume()
    return progress, said


def loaded(keys: Keys) -> tuple[dict[str, Tensor], int, int]:
    """On every rank: (the whole model's state, bytes that were read, bytes that this rank holds)."""
    job = make_job(dist.get_world_size(), **keys)
    mesh = make_mesh(job.degrees)
    read, count = TensorFiles.read, 0

    def counted(self: TensorFiles, name: str, box: Any) -> Tensor:
        nonlocal count
        value = read(self, name, box)
        count += value.nbytes
        return value

    with mock.patch.object(TensorFiles, "read", counted):
        composition = build(job, mesh, torch.device("cpu"))
    share = sum(local_shard_of(p).local.nbytes for p in composition.model.parameters())
    named = named_tensors(composition, None)
    mine: dict[str, Tensor] = {}
    for name, copies in named.items():
        mine[name], *others = [whole(copy) for copy in copies]
        assert all(torch.equal(other, mine[name]) for other in others)
    everyone: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return {name: value for part in everyone for name, value in part.items()}, count, share


def tensor_at(path: Path, place: int) -> str:
    """Return the name of the tensor that has a byte of a .safetensors file."""
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:size]).items():
        begin, end = entry.get("data_offsets", (0, 0))
        if size + begin <= place < size + end:
            return name
    return ""
