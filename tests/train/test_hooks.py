"""Copies that must be bitwise equal: one flipped bit is named, clean steps give no alarm. Graphs."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from compose import Composition, Parallel
from compose.build import build, build_optimizer
from compose.checkpoint import store
from compose.data.samples import random_batch
from compose.train import hooks as replica_check
from compose.train.hooks import Graphs, checksum, hooks_of, replica_mismatches
from compose.train.step import clip_grad_norm_, forward_backward
from tests.support.checkpoints import shards
from tests.support.helpers import Keys, keys_in, make_job, share_of
from tests.support.pool import Pool, make_mesh
from tests.support.small_models import DEEPSEEK
from tests.support.training import keys_for, lines, train_until_error

REPLICAS = keys_in("dp_replicate=4 train.global_batch=8")
PRODUCT = keys_in("dp_replicate=2 dp_shard=2 tp=2 train.global_batch=8")
EXPERTS: Keys = DEEPSEEK | PRODUCT | {"parallel__ep": 2, "train__seq_len": 16, "model__n_layers": 2}


@pytest.mark.parametrize("piece", [2**24, 7])
def test_checksum_sees_every_bit(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(replica_check, "_PIECE", piece)
    tensor = torch.randn(3, 5)
    before = int(checksum(tensor))
    for byte in range(60):
        for bit in range(8):
            changed = tensor.clone()
            changed.view(-1).view(torch.uint8)[byte] ^= 1 << bit
            assert int(checksum(changed)) != before
    assert int(checksum(tensor.flip(0))) != before
    assert int(checksum(tensor[0, 0])) == int(checksum(tensor[0, 0].clone()))


def test_checksum_sees_what_changes_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_check, "_PIECE", 4)
    assert int(checksum(torch.tensor([1.0, 2.0]))) != int(checksum(torch.tensor([2.0, 1.0])))


def _of_plain_tensors(kind: str) -> list[str]:
    """Compare a model without a plan; on rank 1 the tensor ``kind`` differs."""
    model = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    model.register_buffer("table", torch.ones(3))
    model.register_buffer("scratch", torch.ones(3), persistent=False)
    model.bias.grad = torch.ones(2)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), "grad": model.bias.grad}
    if dist.get_rank() == 1 and kind:
        tensors[kind].data[0] = 2.0
    return replica_mismatches(Composition(model, make_mesh(Parallel(dp_replicate=2))), None)


def test_buffers_that_are_saved_are_compared(pool: Pool) -> None:
    results = {
        kind: pool.run(_of_plain_tensors, 2, kind)[0] for kind in ("", "table", "scratch", "grad")
    }
    assert results == {
        "": [],
        "table": ["ranks 0, 1 differ in buffer table"],
        "scratch": [],
        "grad": ["ranks 0, 1 differ in gradient of bias"],
    }


def _steps(keys: Keys, steps: int, rank: int, what: str, name: str) -> list[str]:
    """Train; then, on ``rank``, flip one bit of a weight, a gradient or the optimizer's state."""
    job = make_job(dist.get_world_size(), **keys)
    config, mesh = job.config, make_mesh(job.degrees)
    composition = build(job, mesh, torch.device("cpu"))
    optimizer = build_optimizer(composition, job)
    for step in range(steps):
        batch = random_batch(8, config.train.seq_len, config.model.config.vocab_size, step)
        forward_backward(composition, share_of(batch, mesh), micro_batch=1)
        clip_grad_norm_(composition, 1.0)
        result = replica_mismatches(composition, optimizer)
        assert result == [], f"step {step}: {result}"
        if step < steps - 1:
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == rank:
        parameter = composition.model.get_parameter(name)
        tensors = {"weight": parameter, "gradient": parameter.grad}
        tensor = tensors.get(what, optimizer.state[parameter].get(what))
        assert tensor is not None
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local.detach().view(-1).view(torch.int32)[-1] ^= 1
    return replica_mismatches(composition, optimizer)


@pytest.mark.parametrize("what", ["weight", "gradient", "exp_avg", "exp_avg_sq"])
def test_one_bit_in_one_of_four_replicas(pool: Pool, what: str) -> None:
    name = "layers.1.attention.wo.weight"
    result = pool.run(_steps, 4, REPLICAS, 3, 2, what, name)
    shown = {"weight": "weight", "gradient": "gradient of"}.get(what, f"{what} of")
    assert result == [[f"rank 2 differs in {shown} {name}"]] * 4


@pytest.mark.slow
def test_a_norm_on_the_tp_axis_and_one_of_two_replicas(pool: Pool) -> None:
    """Either of two copies may be wrong; over two axes the one in both lines is."""
    result = pool.run(_steps, 8, PRODUCT, 2, 5, "weight", "norm.weight")[0]
    assert sorted(result) == [
        "ranks 1, 5 differ in weight norm.weight",
        "ranks 4, 5 differ in weight norm.weight",
    ]


TIED: Keys = {"parallel__pp": 2, "model__tie_embeddings": True, "train__global_batch": 8}
HELD = "tok_embeddings.weight"


@pytest.mark.parametrize(
    ("keys", "what", "rank", "line"),
    [
        # Both stages are on two ranks, which have a shard each.
        ({"parallel__dp_shard": 2}, "weight", 1, "ranks 1, 3 differ in weight"),
        ({"parallel__dp_shard": 2}, "exp_avg", 0, "ranks 0, 2 differ in exp_avg of"),
        # Both ends are on the first rank.
        ({"parallel__pp_schedule": "ZBVZeroBubble"}, "gradient", 0, "rank 0 differs in gradient of"),
    ],
)
def test_one_bit_in_one_stages_copy_of_a_tied_weight(
    pool: Pool, keys: Keys, what: str, rank: int, line: str
) -> None:
    ranks = 2 * int(str(keys.get("parallel__dp_shard", 1)))
    result = pool.run(_steps, ranks, TIED | keys, 2, rank, what, HELD)
    assert result == [[f"{line} {HELD}"]] * ranks


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(PRODUCT, id="product", marks=pytest.mark.slow),
        pytest.param(EXPERTS, id="experts", marks=pytest.mark.full),
    ],
)
def test_clean_steps_give_no_alarm(pool: Pool, keys: Keys) -> None:
    assert pool.run(_steps, 8, keys, 6, -1, "", "")[0] == []


@pytest.mark.full
@pytest.mark.parametrize("keys", [PRODUCT, EXPERTS], ids=["product", "experts"])
def test_a_thousand_clean_steps_give_no_alarm(pool: Pool, keys: Keys) -> None:
    for seed in range(20):
        assert pool.run(_steps, 8, keys | {"train__seed": seed}, 50, -1, "", "")[0] == []


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_skipped(pool: Pool, tmp_path: Path) -> None:
    keys = keys_for(tmp_path, train__skip_nonfinite=True, train__stop_after=5)
    keys |= {"checkpoint__interval": 1, "checkpoint__keep_last": 5}
    result = pool.run(train_until_error, 2, keys, float("nan"), "clip_grad_norm_")
    assert result == ["", ""]
    there = lines(tmp_path)
    assert [line["grad_norm"] is None for line in there] == [False, False, True, False, False]
    assert [line.get("skipped", 0) for line in there] == [0, 0, 1, 1, 1]
    two, three, four = (shards(tmp_path / "checkpoints" / store.name_of(step)) for step in (2, 3, 4))
    assert two == three != four


def test_graphs_compiled_late_are_told() -> None:
    said: list[str] = []
    hook = Graphs(mock.Mock(worker=mock.Mock(say=said.append)))
    counters["stats"]["unique_graphs"] = 3
    assert [hook.metrics() for _ in range(3)] == [{"recompiles": 3}] * 3
    counters["stats"]["unique_graphs"] = 5
    assert hook.metrics() == {"recompiles": 5}
    assert said == ["torch.compile compiled 2 more graphs, 5 in all: TORCH_LOGS=recompiles tells why"]
    counters.clear()


@pytest.mark.parametrize("mode", ["off", "block"])
def test_only_a_compiler_has_graphs(mode: str) -> None:
    trainer = mock.Mock(config=make_job(1, compile__mode=mode).config)
    with mock.patch.object(replica_check, "brought", return_value=()):
        graphs = [hook for hook in hooks_of(trainer) if isinstance(hook, Graphs)]
    assert len(graphs) == (mode == "block")
