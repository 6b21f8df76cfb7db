"""Expert parallel over every source axis and with every other technique, equal to one process."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from compose import Options, Parallel, Plan, forward_backward, init_mesh, verify
from compose.data.samples import random_batch
from compose.ops.tensors import local_tensor
from compose.parallel.data_parallel import cuts_stacks
from compose.parallel.expert_parallel import ExpertParallel, _transposed, expert_mesh
from compose.parallel.mesh import meshes
from compose.proof.report import Report
from models.layers.moe import Experts
from tests.support.helpers import Keys, built, make_job, prove_case, proved, refused, tier
from tests.support.pool import Pool, make_mesh
from tests.support.small_models import AXES, DEEPSEEK, QWEN, Tiny, keys_of

MODELS = {"qwen3": QWEN, "deepseek_v3": DEEPSEEK}


CASES = [
    *(
        "ds 1",
        "ds 2",
        "tp 2",
        "ds 2 ep 2",
        "dr 2 ep 2",
        "cp 2 ep 2",
        "tp 2 ep 2",
        "tp 2 ep 2 sequence false",
    ),
    # The shards left over: of the experts, of their inner dims, of replicas.
    *("ds 4 ep 2 zero 0", "ds 4 ep 2 zero 1", "ds 4 ep 2 zero 2", "ds 4 ep 2", "ds 4 ep 4"),
    *("dr 2 ds 2 ep 2", "dr 2 ds 2 ep 4", "ds 2 tp 2 ep 2", "ds 2 cp 2 ep 4", "cp 2 tp 2 ep 4"),
    *(f"cp 2 ep 2 cp_method {method} train__seq_len 13" for method in ("ring", "allgather", "ulysses")),
    # Neighbours by threes where tp goes by twos; more ranks than experts divide evenly.
    "ds 3 tp 2 ep 3 model__n_experts 6",
    "ds 3 model__n_experts 4",
    *(
        f"pp 2 ds 2 ep 2 pp_schedule {schedule} model__n_layers 4"
        for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")
    ),
    "pp 2 ds 2 ep 2 zero 1 pp_schedule ZBVZeroBubble model__n_layers 4"
    " activation_checkpoint__mode full",
    "ds 2 tp 2 pp 2 ep 4",
    "ds 2 cp 2 tp 2 ep 8",
    "cp 2 tp 2 ep 4 model__capacity_factor 1.0 train__seq_len 13",
    "ds 2 ep 2 activation_checkpoint__mode full model__tie_embeddings true",
    "ds 2 tp 2 ep 2 model__expert_dim 23 train__micro_batch 1",
    "ds 2 tp 2 ep 4 precision__param bfloat16",
]


LARGE = ("float", "full", "ds 3", "ep 4", "capacity", "ds 2 tp 2", "zero 1", "Interleaved")


def _in_turn() -> list[Any]:
    """One case of three runs by default, one in the slow tier, with one of the models each; ``-m full``
    runs the others."""
    return [
        pytest.param(
            model,
            case,
            marks=tier(
                slow=i % 3 == 1 or any(word in case for word in LARGE),
                full=i % 3 == 2 or (i + j) % 2 == 1,
            ),
        )
        for i, case in enumerate(CASES)
        for j, model in enumerate(MODELS)
    ]


@pytest.mark.parametrize(("model", "case"), _in_turn())
def test_equals_one_process(pool: Pool, model: str, case: str) -> None:
    ranks, keys = keys_of(MODELS[model], case)
    if model == "deepseek_v3" and "model__n_experts" in case:
        keys |= {"model__n_groups": 1, "model__top_groups": 1}
    report = proved(pool.run(prove_case, ranks, keys))
    routers = {row.name for row in report.rows if row.quantity == "routing"}
    assert len(routers) == 2 * (int(str(keys["model__n_layers"])) - (model == "deepseek_v3"))
    assert {"buffer after", "gradient", "update"} <= {row.quantity for row in report.rows}


def _in_layers_units(keys: Keys) -> tuple[Report, set[float], bool]:
    """The proof, this rank's parts of the experts' weights, and whether state by rank has a mark."""
    report, (_, composition) = prove_case(keys), built(keys)
    weights = [p for name, p in composition.model.named_parameters() if ".experts." in name]
    parts = {local_tensor(p).numel() / p.numel() for p in weights}
    return report, parts, cuts_stacks(composition.model)


@pytest.mark.parametrize(
    "words",
    [
        "",
        pytest.param("comm__gradients int8 comm__weights int8", marks=pytest.mark.slow),
        pytest.param("zero 1 comm__gradients powersgd", marks=pytest.mark.slow),
        pytest.param("zero3_reshard 2 comm__weights int8", marks=pytest.mark.slow),
    ],
)
def test_experts_without_a_mesh_of_their_own_are_not_padded(pool: Pool, words: str) -> None:
    """Six experts on four ranks: each rank holds a quarter of each matrix."""
    ranks, keys = keys_of(QWEN, f"ds 4 model__n_experts 6 {words}")
    results = pool.run(_in_layers_units, ranks, keys)
    proved([report for report, *_ in results])
    assert [rest for _, *rest in results] == [[{0.25}, True]] * 4


SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
def test_every_mesh_of_eight_ranks(pool: Pool, model: str) -> None:
    """Every ep on every mesh; ZeRO stages, schedules and cp methods in turn."""
    turn = 0
    for degrees in meshes(8):
        if degrees["pp"] == 8:
            continue  # needs more layers than the models here have
        ranks = 8 // degrees["pp"]
        for ep in (2, 4, 8):
            if ranks % ep:
                continue
            case = " ".join(f"{short} {degrees[axis]}" for short, axis in AXES.items())
            case += f" ep {ep} zero {turn % 4} cp_method {('ring', 'allgather', 'ulysses')[turn % 3]}"
            case += f" pp_schedule {'1F1B' if degrees['pp'] > 2 else SCHEDULES[turn % 4]}"
            count, keys = keys_of(MODELS[model], f"{case} model__n_layers 4 model__n_heads 8")
            keys |= {"model__n_kv_heads": 8} if model == "qwen3" else {}
            proved(pool.run(prove_case, count, keys), case)
            turn += 1
    assert turn == 84


def _groups() -> dict[str, Any]:
    results = {}
    for name, parallel, ep in (
        ("tp first", Parallel(dp_shard=2, tp=2), 2),
        ("then data", Parallel(dp_shard=2, tp=2), 4),
        ("replicas stay", Parallel(dp_replicate=2, dp_shard=2), 2),
        ("replicas too", Parallel(dp_replicate=2, dp_shard=2), 4),
        ("half the replicas", Parallel(dp_replicate=4, dp_shard=1), 2),
        ("alone", Parallel(dp_shard=2, tp=2), 1),
    ):
        mesh = expert_mesh(make_mesh(parallel), ep)
        results[name] = (mesh.shape[1:], mesh.mesh[0].tolist())
    return results


def test_which_ranks_hold_the_same_experts(pool: Pool) -> None:
    """(expert_replicate, expert_shard, ep), and the ranks in that order."""
    assert pool.run(_groups, 4)[0] == {
        "tp first": ((1, 2, 2), [[[0, 1], [2, 3]]]),
        "then data": ((1, 1, 4), [[[0, 1, 2, 3]]]),
        "replicas stay": ((2, 1, 2), [[[0, 1]], [[2, 3]]]),
        "replicas too": ((1, 1, 4), [[[0, 1, 2, 3]]]),
        "half the replicas": ((2, 1, 2), [[[0, 1]], [[2, 3]]]),
        "alone": ((1, 4, 1), [[[0], [1], [2], [3]]]),
    }


def test_ep_takes_replicas_where_shards_do_not_divide_it() -> None:
    """With 2 replicas of 3 shards, ep 2 goes over the replicas, and an expert is cut in three."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=6)
    try:
        mesh = expert_mesh(init_mesh(Parallel(dp_replicate=2, dp_shard=3)), 2)
    finally:
        dist.destroy_process_group()
    assert (mesh.shape, mesh.mesh.tolist()) == ((1, 1, 3, 2), [[[[0, 1], [2, 3], [4, 5]]]])


def _style_alone(counts_of: list[list[int]]) -> float:
    """The style in plain ``parallelize_module``, on given loads of each rank: largest error."""
    mesh = make_mesh(Parallel(tp=len(counts_of)))["tp"]
    rank, n_experts = mesh.get_local_rank(), len(counts_of[0])
    torch.manual_seed(0)
    whole, experts = Experts(n_experts, 6, 5).double(), Experts(n_experts, 6, 5).double()
    experts.load_state_dict(whole.state_dict())
    parallelize_module(experts, mesh, ExpertParallel())
    rows = [torch.randn(sum(counts), 6, dtype=torch.float64) for counts in counts_of]
    mine = rows[rank].clone().requires_grad_()
    result = experts(mine, torch.tensor(counts_of[rank]))
    weight = [torch.randn_like(part) for part in rows]
    (result * weight[rank]).sum().backward()
    everyone = [part.requires_grad_() for part in rows]
    expected = [whole(x, torch.tensor(c)) for x, c in zip(everyone, counts_of, strict=True)]
    sum((y * w).sum() for y, w in zip(expected, weight, strict=True)).backward()  # type: ignore[union-attr]
    errors = [torch.zeros(())]
    if len(mine):
        gradient, wanted = mine.grad, rows[rank].grad
        assert gradient is not None
        assert wanted is not None
        errors += [(result - expected[rank]).abs().max(), (gradient - wanted).abs().max()]
    for name, parameter in experts.named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.to_local().shape[0] == n_experts // mesh.size()
        assert isinstance(parameter.grad, DTensor)
        want = whole.get_parameter(name).grad
        assert want is not None
        errors.append((parameter.grad.full_tensor() - want).abs().max())
    return max(float(error) for error in errors)


@pytest.mark.parametrize(
    "counts",
    [
        [[2, 1, 3, 1], [1, 1, 1, 1]],
        [[7, 0, 0, 0], [0, 0, 0, 5]],  # experts without a row
        [[0, 0, 4, 3], [0, 0, 2, 2]],  # a rank whose experts get none
        [[0, 0, 0, 0], [3, 0, 0, 2]],  # a rank that has none
        [[0, 0, 0, 0], [0, 0, 0, 0]],
        [[300, 0, 30, 1], [270, 1, 0, 90]],  # more than any small limit
    ],
    ids=["uneven", "idle experts", "idle rank", "silent rank", "nothing at all", "many"],
)
def test_style_alone(pool: Pool, counts: list[list[int]]) -> None:
    assert max(pool.run(_style_alone, 2, counts)) < 1e-12


def test_rows_by_rank_become_rows_by_expert_and_back() -> None:
    counts = torch.tensor([[2, 0, 1], [0, 0, 3], [1, 2, 0]])
    experts = torch.arange(3).repeat(3).repeat_interleave(counts.flatten())
    order, places = _transposed(counts, 9)
    assert torch.equal(order, experts.argsort(stable=True))
    assert torch.equal(order[places], torch.arange(9))
    assert [len(result) for result in _transposed(torch.zeros(2, 2, dtype=torch.long), 0)] == [0, 0]


def _gathers() -> list[str]:
    """List when units are gathered and experts compute, in a step with three layers."""
    _, keys = keys_of(QWEN, "ds 2 ep 2 model__n_layers 3")
    (job, composition), result = built(keys), list[str]()
    real = FSDPParamGroup.unshard

    def unshard(group: Any, *args: Any) -> None:
        if not group.is_unsharded and group._all_gather_result is None:
            result.append(f"gather {group._module_fqn.removeprefix('layers.')}")
        real(group, *args)

    def ran(module: nn.Module, inputs: Any, output: Tensor, layer: str) -> None:
        result.append(f"run {layer}")
        output.register_hook(lambda _: result.append(f"back {layer}"))

    for layer in "012":
        experts = composition.model.get_submodule(f"layers.{layer}.moe.experts")
        experts.register_forward_hook(partial(ran, layer=layer))
    batch = random_batch(1, 16, job.config.model.config.vocab_size, seed=dist.get_rank())
    with mock.patch.object(FSDPParamGroup, "unshard", unshard):
        forward_backward(composition, batch)
    return [event for event in result if event[-1].isdigit() or event.endswith("experts")]


def test_experts_are_gathered_before_the_layer_ahead_of_them_runs(pool: Pool) -> None:
    """g is a gather of a layer, e of its experts; r, their forward; b, their backward."""
    short = {"gather ": "g", "run ": "r", "back ": "b", ".moe.experts": "e"}
    for result in pool.run(_gathers, 2):
        text = " ".join(result)
        for word, letter in short.items():
            text = text.replace(word, letter)
        assert text == "g0 g0e g1 g1e r0 g2 g2e r1 r2 g2 g2e g1 g1e b2 g0 g0e b1 b0"


def _own_model() -> Any:
    torch.manual_seed(3)
    batch = {"input": torch.randn(4, 6, 5), "targets": torch.randint(7, (4, 6))}
    parallel = Parallel(dp_shard=4, ep=2)
    plan = Plan(expert={"moe.experts": ExpertParallel()})
    return verify(Tiny(), plan, make_mesh(parallel), batch, Options(parallel))


def test_a_plan_of_experts_alone(pool: Pool) -> None:
    proved(pool.run(_own_model, 4))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "ds 4 ep 3",
            "parallel.ep: 3 does not divide dp_replicate x dp_shard x cp x tp = 4, the ranks it is"
            " taken from; nearest: 2",
        ),
        (
            "pp 2 ds 2 ep 4",
            "parallel.ep: 4 does not divide dp_replicate x dp_shard x cp x tp = 2, the ranks it is"
            " taken from; nearest: 2",
        ),
        ("ds 6 ep 6", "parallel.ep: 6 does not divide 8 experts (allowed: 1, 2, 4, 8)"),
        (
            "tp 2 sequence false train__seq_len 15",
            "train.seq_len: 15 is not a multiple of parallel.tp 2, which a mixture of experts needs;"
            " nearest: 16",
        ),
    ],
)
def test_refused(case: str, message: str) -> None:
    ranks, keys = keys_of(QWEN, case)
    assert message in refused(make_job, ranks, **keys)


def test_dense_model_has_no_experts_to_spread() -> None:
    assert refused(make_job, 2, parallel__ep=2) == [
        "plan.expert: the model's plan has nothing under it; add it, or use parallel.ep = 1"
    ]
