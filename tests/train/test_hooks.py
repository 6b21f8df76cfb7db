"""Copies that must be bitwise equal: one flipped bit is named, clean steps give no alarm. Graphs."""

import itertools
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
from compose.ops import tensors
from compose.ops.tensors import checksums, local_tensor
from compose.train import held_state, hooks
from compose.train.held_state import replica_mismatches
from compose.train.hooks import Graphs, Hook, ReplicaCheck, StateCheck, hooks_of
from compose.train.processes import TrainingError
from compose.train.step import clip_grad_norm_, forward_backward
from compose.train.trainer import Trainer
from tests.support.checkpoints import shards
from tests.support.helpers import Keys, keys_in, make_job, share_of
from tests.support.pool import Pool, make_mesh
from tests.support.small_models import DEEPSEEK
from tests.support.training import keys_for, lines, logged_steps, train_until_error, trainer_of

REPLICAS = keys_in("dp_replicate=4 train.global_batch=8")
PRODUCT = keys_in("dp_replicate=2 dp_shard=2 tp=2 train.global_batch=8")
EXPERTS: Keys = DEEPSEEK | PRODUCT | {"parallel__ep": 2, "train__seq_len": 16, "model__n_layers": 2}


def _sum(tensor: torch.Tensor) -> int:
    return int(checksums([tensor])[0])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(1009).bfloat16(),
        torch.randn(()).double(),
        torch.arange(7, dtype=torch.uint8),
        torch.arange(40, dtype=torch.uint8)[3:],
    ],
    ids=["words", "several rows and a rest", "one number", "less than a word", "a part of a word on"],
)
def test_checksum_sees_every_bit(tensor: torch.Tensor) -> None:
    before = _sum(tensor)
    held = tensor.reshape(-1).view(torch.uint8).clone()
    assert _sum(held) == before
    step = 1 + len(held) // 200
    for byte in {*range(0, len(held), step), *range(max(0, len(held) - 9), len(held))}:
        for bit in range(8):
            held[byte] ^= 1 << bit
            assert _sum(held) != before
            held[byte] ^= 1 << bit


def test_checksum_sees_what_changes_places() -> None:
    assert _sum(torch.tensor([1.0, 2.0])) != _sum(torch.tensor([2.0, 1.0]))
    matrix = torch.randn(300, 64)
    swapped = matrix.clone()
    swapped[[10, 200]] = matrix[[200, 10]]
    assert _sum(swapped) != _sum(matrix)


def test_checksum_sees_two_flips_of_one_place() -> None:
    """Twice the sign of an odd element: a sum of words would be the same."""
    tensor = torch.randn(1000)
    changed = tensor.clone()
    changed[[101, 403]] *= -1
    assert _sum(changed) != _sum(tensor)


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


def test_sums_of_host_memory_are_those_of_a_device() -> None:
    """Numpy adds up what is in host memory, torch what is elsewhere; a file has the sums of either."""
    torch.manual_seed(0)
    for size, parts, first in itertools.product((0, 5, 8, 2007, 2008, 2019, 20000), (1, 3), (0, 3, 8)):
        bits = torch.randint(256, (first + size * parts,), dtype=torch.uint8)[first:]
        of_device = tensors._sums_by_torch(bits, parts)
        assert torch.equal(tensors.column_sums(bits, parts), of_device), (size, parts, first)
    columns = torch.randn(33, 70, dtype=torch.bfloat16).t()
    same = columns.contiguous().view(-1).view(torch.uint8)
    assert torch.equal(tensors.column_sums(columns), tensors._sums_by_torch(same, 1))


def _before_a_save(differs: bool) -> str:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, dist.get_rank() * differs)
    torch.nn.init.zeros_(model.bias)
    composition = Composition(model.requires_grad_(False), make_mesh(Parallel(dp_replicate=2)))
    trainer = mock.Mock(composition=composition, optimizer=None)
    trainer.config.comm.check_every = 2
    try:
        ReplicaCheck(trainer).before_save(3)
    except TrainingError as error:
        return str(error)
    return ""


def test_copies_are_compared_before_a_save(pool: Pool) -> None:
    """Also between the steps of comm.check_every."""
    said = "step 3: ranks 0, 1 differ in weight weight: silent corruption; "
    assert [result[: len(said)] for result in pool.run(_before_a_save, 2, True)] == [said] * 2
    assert pool.run(_before_a_save, 2, False) == ["", ""]


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


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"parallel__dp_shard": 2}, id="hsdp"),
        pytest.param({"parallel__zero": 0, "precision__param": "bfloat16"}, id="ddp in bfloat16"),
        pytest.param(
            EXPERTS | {"parallel__dp_shard": 2, "parallel__tp": 1},
            id="experts",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_one_bit_in_a_replica_whose_gradients_are_quantized(pool: Pool, keys: Keys) -> None:
    """The replicas' axis is not in the mesh of FSDP then."""
    keys = {"parallel__dp_replicate": 2, "comm__gradients": "int8"} | keys
    shards = int(str(keys.get("parallel__dp_shard", 1)))
    name = "layers.1.feed_forward.w1.weight"
    if "parallel__ep" in keys:
        name = "layers.1.moe.experts.w1"
    result = pool.run(_steps, 2 * shards, keys, 2, shards, "weight", name)
    assert result == [[f"ranks 0, {shards} differ in weight {name}"]] * 2 * shards


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


_ROUTERS: Keys = {"model__name": "qwen3", "model__preset": "debug_moe", "model__bias_rate": 0.05}


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, _ROUTERS], ids=["dense", "experts"])
def test_a_step_that_is_not_finite_is_skipped(pool: Pool, tmp_path: Path, model: Keys) -> None:
    """Weights and optimizer stay as they are, and routers' loads and biases."""
    keys = keys_for(tmp_path, train__skip_nonfinite=True, train__stop_after=5) | model
    keys |= {"checkpoint__interval": 1, "checkpoint__keep_last": 5}
    result = pool.run(train_until_error, 2, keys, float("nan"), "clip_grad_norm_")
    assert result == ["", ""]
    there = lines(tmp_path)
    assert [line["grad_norm"] is None for line in there] == [False, False, True, False, False]
    assert [line.get("skipped", 0) for line in there] == [0, 0, 1, 1, 1]
    two, three, four = (shards(tmp_path / "checkpoints" / store.name_of(step)) for step in (2, 3, 4))
    assert two == three != four


class _Flip(Hook):
    """Flips a bit of the first weight at one moment of the third step, on one rank."""

    def __init__(self, trainer: Trainer, moment: str, rank: int) -> None:
        self.parameter = next(trainer.composition.model.parameters())
        self.moment, self.rank, self.optimizer = moment, rank, trainer.optimizer

    def flip(self, moment: str, step: int, what: str) -> None:
        if (moment, step, self.rank) == (self.moment, 3, dist.get_rank()):
            tensors = {"weight": self.parameter, "gradient": self.parameter.grad}
            tensor = tensors.get(what, self.optimizer.state[self.parameter].get(what))
            assert tensor is not None
            local_tensor(tensor).detach().view(-1).view(torch.int32)[-1] ^= 1

    def before_step(self, step: int) -> None:
        self.flip("before the step", step, "weight")

    def before_update(self, step: int) -> None:
        self.flip("before the update", step, "gradient")

    def after_step(self, step: int) -> None:
        self.flip("before the save", step, "exp_avg_sq")


def _run_with_flip(keys: Keys, moment: str, rank: int) -> str:
    """Train with one flipped bit; return the error."""
    trainer = trainer_of(keys)
    trainer.hooks.insert(0, _Flip(trainer, moment, rank))
    try:
        trainer.run()
    except TrainingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("moment", "shown", "steps"),
    [
        ("before the step", "weight", [1, 2]),
        ("before the update", "gradient of", [1, 2]),
        ("before the save", "exp_avg_sq of", [1, 2, 3]),
        ("", "", [1, 2, 3, 4]),
    ],
)
def test_one_bit_without_a_copy_stops_a_run_before_it_spreads(
    pool: Pool, tmp_path: Path, moment: str, shown: str, steps: list[int]
) -> None:
    """No weight and no checkpoint gets anything of it."""
    keys = keys_for(tmp_path, train__stop_after=4, comm__check_state=True, checkpoint__interval=1)
    keys |= keys_in("dp_shard=2 zero=3") | {"model__n_layers": 1, "train__seq_len": 16}
    name = f"{shown} tok_embeddings.weight"
    said = f"step 3: rank 1: {name} is not what was written: silent corruption; " if moment else ""
    results = pool.run(_run_with_flip, 2, keys, moment, 1)
    assert [result[: len(said)] if said else result for result in results] == [said] * 2
    assert logged_steps(tmp_path) == steps
    saved = store.newest_first(tmp_path / "checkpoints")
    assert saved[0].name == store.name_of(4 if not moment else 2)


NO_COPIES = {
    "alone": (1, keys_in("dp_shard=1")),
    "dp": (2, keys_in("dp_replicate=2")),
    "zero3": (4, keys_in("dp_shard=4 zero=3")),
    "tp": (2, keys_in("tp=2")),
    "pp": (2, keys_in("pp=2")),
}


def _flips(keys: Keys, count: int) -> list[tuple[str, str]]:
    """Flip bits, one after another, and return what was flipped and what was said."""
    job = make_job(dist.get_world_size(), **keys)
    mesh = make_mesh(job.degrees)
    composition = build(job, mesh, torch.device("cpu"))
    optimizer = build_optimizer(composition, job)
    check = StateCheck(mock.Mock(composition=composition, optimizer=optimizer))
    check.start(0)
    vocabulary = job.config.model.config.vocab_size
    for step in (1, 2):
        check.before_step(step)
        batch = random_batch(8, job.config.train.seq_len, vocabulary, step)
        forward_backward(composition, share_of(batch, mesh), micro_batch=1)
        clip_grad_norm_(composition, 1.0)
        check.gradients_ready(step)
        check.before_update(step)
        if step == 1:
            optimizer.step()
            optimizer.zero_grad()
            check.after_update(step)
    draw, results = torch.Generator().manual_seed(7), []

    def drawn(below: int) -> int:
        return int(torch.randint(below, (), generator=draw))

    for _ in range(count):
        rank, which, place, bit = drawn(dist.get_world_size()), drawn(2**31), drawn(2**31), drawn(8)
        named = [
            *held_state.weights_and_state(composition.named_parameters(), optimizer, steps=True),
            *held_state.gradients_of(composition.named_parameters()),
            *held_state.buffers_of(composition.model),
        ]
        shown, _, tensor = named[which % len(named)]
        held = local_tensor(tensor).detach().view(-1).view(torch.uint8)
        mine = rank == dist.get_rank() and len(held) > 0
        if mine:
            held[place % len(held)] ^= 1 << bit
        wanted = f"step 2: rank {rank}: {shown} is not what was written: silent corruption; "
        said = ""
        try:
            check.before_update(2)
        except TrainingError as error:
            said = str(error)
        if mine:
            held[place % len(held)] ^= 1 << bit
            results.append((wanted, said[: len(wanted)]))
    check.before_update(2)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("mesh", NO_COPIES)
def test_of_forty_flipped_bits_each_is_named(pool: Pool, mesh: str) -> None:
    """Bits of weights, gradients and moments, drawn at random; on five meshes they are 200."""
    ranks, keys = NO_COPIES[mesh]
    small: Keys = {"train__seq_len": 16, "train__global_batch": 8, "model__n_layers": 2}
    everyone = pool.run(_flips, ranks, keys | small, 40)
    results = [each for of_rank in everyone for each in of_rank]
    assert len(results) == 40
    assert [said for _, said in results] == [wanted for wanted, _ in results]


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
    with mock.patch.object(hooks, "provided", return_value=()):
        graphs = [hook for hook in hooks_of(trainer) if isinstance(hook, Graphs)]
    assert len(graphs) == (mode == "block")
