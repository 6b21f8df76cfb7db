"""Muon: orthogonal steps, the same ones however a matrix is cut."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from compose.build import build_optimizer
from compose.composition import Composition
from compose.optim import adamw, muon
from compose.optim.adamw import AdamW
from compose.optim.muon import (
    MatrixLayout,
    Muon,
    Slab,
    assigned,
    flops,
    in_flight,
    layout_of,
    orthogonalized,
)
from compose.optim.rounding import lengths, random_bits, size
from compose.parallel.expert_parallel import expert_mesh
from compose.parallel.mesh import Parallel
from compose.pipeline.pipeline_parallel import PipelineRunner
from compose.proof.report import Report
from tests.support.checkpoints import goes_on_from_a_state_dict
from tests.support.faults import Fault, assert_named, replaces, with_fault
from tests.support.helpers import HALF, Keys, parallel, proofs, prove_case, proved
from tests.support.mutation import mutated
from tests.support.pool import Pool, make_mesh
from tests.support.small_models import QWEN


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (3, 16, 30), (1, 9)], ids=str)
def test_singular_values_go_to_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    result = orthogonalized(x)
    values = torch.linalg.svdvals(result)
    assert 0.65 < float(values.min()) <= float(values.max()) < 1.25
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    # The same directions: in their basis the result is diagonal.
    inside = u.mT @ result @ vh.mT
    off = inside - torch.diag_embed(inside.diagonal(dim1=-2, dim2=-1))
    assert float(off.abs().max()) < 1e-4
    if len(shape) == 3:
        assert torch.equal(result[1], orthogonalized(x[1:2])[0])


def test_nothing_stays_nothing() -> None:
    assert torch.equal(orthogonalized(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def test_close_to_torchs_muon() -> None:
    """Which takes its steps in bfloat16, and averages gradients where they are summed here."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((12, 20), (20, 12))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    before = [p.detach().clone() for p in ours]
    first = Muon([{"params": [(str(i), p) for i, p in enumerate(ours)]}], lr=0.02, weight_decay=0.3)
    second = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        first.step()
        second.step()
    for a, b, start in zip(ours, theirs, before, strict=True):
        assert float((a - b).detach().norm() / (b - start).detach().norm()) < 0.03


def test_on_a_gpu_matrices_are_in_bfloat16() -> None:
    """Which is meta here, where no unit is slow at it either."""
    for device, kind in (("cpu", torch.float32), ("meta", torch.bfloat16)):
        assert Muon([("w", nn.Parameter(torch.empty(2, 3, device=device)))]).dtype == kind


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
def test_goes_on_from_a_state_dict(state: torch.dtype) -> None:
    """With the learning rate that its groups get afterwards."""
    goes_on_from_a_state_dict(lambda named: Muon(named, state_dtype=state, seed=3), torch.float32)


def test_parameters_without_names_are_refused() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    for kind in (Muon, AdamW):
        with pytest.raises(ValueError, match=r"have no names; give model\.named_parameters\(\)"):
            kind([weight])


def test_what_is_no_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"w is no matrix or stack of matrices: \(3,\)"):
        Muon([("w", nn.Parameter(torch.ones(3)))])


def _refusals() -> list[str]:
    mesh = make_mesh(Parallel(dp_shard=2, tp=2))
    said = []
    for where, placements in (
        (mesh["tp"], [Shard(0)]),
        (mesh["dp_shard", "tp"], [Partial(), Shard(0)]),
    ):
        whole = distribute_tensor(torch.ones(4, 4), where, [Replicate()] * where.ndim)
        parameter = nn.Parameter(DTensor.from_local(whole.to_local(), where, placements))
        with pytest.raises(ValueError, match=r"a parameter is") as caught:
            Muon([("w", parameter)])
        said.append(str(caught.value).partition(":")[0].partition(" on ")[0])
    return said


@pytest.mark.slow
def test_other_ranks_and_partial_sums_are_refused(pool: Pool) -> None:
    assert pool.run(_refusals, 4)[0] == ["a parameter is", "a parameter is still to be summed"]


def _cut_and_whole() -> list[Any]:
    """Steps with matrices cut over a mesh, some of them in fewer parts than there are ranks."""
    mesh = make_mesh(Parallel(dp_replicate=2, dp_shard=2, tp=2))
    mesh = mesh["dp_replicate", "dp_shard", "tp"]
    torch.manual_seed(0)
    shapes = {"a": (7, 9), "b": (9, 5), "c": (1, 6), "d": (3, 4, 5)}
    cuts = {
        "a": [Replicate(), Shard(0), Shard(1)],
        "b": [Replicate(), Replicate(), Shard(0)],
        "c": [Replicate(), Shard(0), Replicate()],
        "d": [Replicate(), Shard(2), Shard(0)],
    }
    start = {name: torch.randn(shape) for name, shape in shapes.items()}
    plain = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    parts = {n: nn.Parameter(distribute_tensor(start[n], mesh, cuts[n])) for n in shapes}
    optimizers = [Muon(named.items(), lr=0.1, state_dtype=torch.bfloat16) for named in (plain, parts)]
    owners = {slab.owner for some in optimizers[1].rounds for slab in some}
    for _ in range(3):
        for name, shape in shapes.items():
            gradient = torch.randn(shape)
            plain[name].grad = gradient
            parts[name].grad = distribute_tensor(gradient, mesh, cuts[name])
        for optimizer in optimizers:
            optimizer.step()
    full = {name: p.full_tensor().detach() for name, p in parts.items()}  # type: ignore[attr-defined]
    return [{n: float((full[n] - plain[n]).detach().abs().max()) for n in shapes}, full, owners]


@pytest.mark.slow
def test_cut_in_any_way(pool: Pool) -> None:
    result = pool.run(_cut_and_whole, 8)
    for errors, full, owners in result:
        assert max(errors.values()) < 2e-6, errors
        assert all(torch.equal(full[name], result[0][1][name]) for name in full)
        assert len(owners) > 3


def _sent() -> int:
    """Elements that this rank sends in a step, of 2,400 in 4 matrices over 2 replicas of 2 shards."""
    mesh = make_mesh(Parallel(dp_replicate=2, dp_shard=2))["dp_replicate", "dp_shard"]
    cut = [Replicate(), Shard(0)]
    named = {str(i): nn.Parameter(distribute_tensor(torch.ones(20, 30), mesh, cut)) for i in range(4)}
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    real, counts = muon.begin_messages, []

    def count(group: Any, sent: list[tuple[Tensor, int]], *others: Any) -> Any:
        counts.extend(tensor.numel() for tensor, _ in sent)
        return real(group, sent, *others)

    with mock.patch.object(muon, "begin_messages", count):
        Muon(named.items()).step()
    return sum(counts)


def test_elements_sent(pool: Pool) -> None:
    """docs/optimizers.md has the formula; P = 2400, n = 4, r = s = 2."""
    assert pool.run(_sent, 4) == [2400 * (1 - 1 / 2) / 4 + 2400 * (2 - 1 / 2) / 4] * 4


def _layout_of_experts() -> MatrixLayout:
    mesh = make_mesh(Parallel(dp_replicate=4))
    experts = expert_mesh(mesh, 2)["expert_shard", "ep"]
    placed = [Replicate(), Shard(0)]
    parameter = DTensor.from_local(torch.zeros(3, 4, 5), experts, placed, run_check=False)
    return layout_of(parameter, dist.group.WORLD, mesh)


def test_copies_of_experts(pool: Pool) -> None:
    """Ranks 0 and 2 hold the same three of six experts, and 1 and 3 the others."""
    for layout in pool.run(_layout_of_experts, 4):
        assert [layout.regions[rank][0] for rank in range(4)] == [slice(0, 3), slice(3, 6)] * 2
        assert layout.replica == {0: 0, 1: 0, 2: 1, 3: 1}


def _layout_over_joined_axes() -> MatrixLayout:
    mesh = make_mesh(Parallel(dp_replicate=2, dp_shard=2, cp=2))
    joined = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    parameter = DTensor.from_local(torch.zeros(3, 5), joined, [Shard(0)], run_check=False)
    return layout_of(parameter, dist.group.WORLD, mesh)


def test_copies_over_joined_axes(pool: Pool) -> None:
    """Quantized gradients keep replicas out of FSDP's mesh: ranks 0 to 3 hold one copy here."""
    for layout in pool.run(_layout_over_joined_axes, 8):
        quarters = [slice(3 * place, 3 * place + 3) for place in range(4)]
        assert [layout.regions[rank][1] for rank in range(8)] == quarters * 2
        assert layout.replica == {rank: rank // 4 for rank in range(8)}


def layout(
    shape: tuple[int, ...], shards: int, replicas: int = 1, dim: int = 1, ep: int = 1
) -> MatrixLayout:
    """Ranks in the order (replica, shard, ep); ``dim`` is cut after experts are."""
    regions, replica = {}, {}
    for rank in range(replicas * shards * ep):
        copy, rest = divmod(rank, shards * ep)
        shard, owner = divmod(rest, ep)
        region = [range(n) for n in shape]
        for axis, count, place in ((0, ep, owner), (dim, shards, shard)):
            each = -(-len(region[axis]) // count)
            region[axis] = region[axis][place * each : (place + 1) * each]
        regions[rank] = tuple(slice(held.start, held.stop) for held in region)
        replica[rank] = copy
    return MatrixLayout(shape, regions, replica)


def loads(rounds: list[list[Slab]], layouts: dict[int, MatrixLayout]) -> Counter[int]:
    results: Counter[int] = Counter()
    for slab in (slab for some in rounds for slab in some):
        rows, columns = layouts[slab.parameter].shape[1:]
        results[slab.owner] += int(lengths(slab.region)[0] * flops(rows, columns))
    return results


SHARES: dict[str, tuple[int, dict[int, MatrixLayout]]] = {
    # number of ranks that hold a part; 7 x 32 matrices as of a 32-layer model
    "a model over 8": (
        8,
        {
            7 * layer + i: layout((1, *shape), 8)
            for layer in range(32)
            for i, shape in enumerate([(64, 64)] * 2 + [(16, 64)] * 2 + [(96, 64)] * 2 + [(64, 96)])
        },
    ),
    "replicas share": (8, {i: layout((1, 30, 20), 2, replicas=4, dim=2) for i in range(16)}),
    "more shards than rows": (3, {i: layout((1, 3, 20), 8) for i in range(6)}),
    "experts": (8, {i: layout((12, 10, 6), 2, replicas=2, ep=2) for i in range(3)}),
    "uneven experts": (3, {0: layout((5, 4, 4), 4, dim=0)}),
    # Which costs as much as the eight before it.
    "a large one last": (2, {i: layout((1, *((16, 16) if i == 8 else (8, 8))), 2) for i in range(9)}),
    "nothing": (0, {0: layout((0, 4, 4), 2, dim=0)}),
}


@pytest.mark.parametrize("case", SHARES)
def test_each_matrix_once_and_evenly(case: str) -> None:
    holders, layouts = SHARES[case]
    rounds = assigned(layouts)
    for slabs in rounds:
        assert len({slab.owner for slab in slabs}) == len(slabs)
        for slab in slabs:
            held = layouts[slab.parameter]
            assert held.part(slab.owner, slab.region)
            assert lengths(slab.region)[1:] == list(held.shape[1:])
            copy = [
                region
                for rank, region in held.parts(slab.region)
                if held.replica[rank] == held.replica[slab.owner]
            ]
            assert sum(map(size, copy)) == size(slab.region), "one copy of it, and no more, is gathered"
            assert slab.elements == max(map(size, copy))
    times = Counter(
        (slab.parameter, expert)
        for slabs in rounds
        for slab in slabs
        for expert in range(slab.region[0].start, slab.region[0].stop)
    )
    assert times == Counter((i, e) for i, one in layouts.items() for e in range(one.shape[0]))
    result = loads(rounds, layouts)
    assert len(result) == holders
    if holders:
        assert max(result.values()) <= 1.25 * sum(result.values()) / holders or case == "uneven experts"


def test_ranks_are_asked_once_for_layers_of_one_layout() -> None:
    """Else 60 layers of 256 experts over a thousand ranks would take minutes at a start."""
    one = layout((12, 10, 6), 2, replicas=2, ep=2)
    with mock.patch.object(MatrixLayout, "part", autospec=True, side_effect=MatrixLayout.part) as part:
        slabs = assigned(dict.fromkeys(range(50), one))
    assert sum(map(len, slabs)) == 50 * 2 * 4
    assert part.call_count == 2 * len(one.regions)


def test_memory_of_shares_is_bounded() -> None:
    whole = layout((64, 10, 6), 1)
    with mock.patch.object(muon, "SLAB", 300):
        slabs = [slab for some in assigned({0: whole}) for slab in some]
    assert len(slabs) == 13
    assert {size(slab.region) for slab in slabs} == {240, 300}
    with mock.patch.object(muon, "IN_FLIGHT", 600):
        assert [len(group) for group in in_flight(slabs)] == [2] * 6 + [1]
    with mock.patch.object(muon, "IN_FLIGHT", 1):
        assert [len(group) for group in in_flight(slabs)] == [1] * 13


def test_a_matrix_beyond_the_bound_is_one_share() -> None:
    with mock.patch.object(muon, "SLAB", 300):
        ((slab,),) = assigned({0: layout((1, 40, 30), 1)})
    assert size(slab.region) == 1200


def test_flops() -> None:
    """The larger Gram matrix would cost more; a 2 x 3 matrix is counted by hand."""
    by_hand = 5 * (2 * 2 * 2 * 3 + 2 * 2 * 2 * 2 + 2 * 2 * 2 * 3)
    assert flops(2, 3) == flops(3, 2) == by_hand
    assert math.isclose(flops(4096, 4096) / 4096**2, 30 * 4096)


MUON: Keys = {"optimizer__name": "muon", "train__global_batch": 8}
EXPERTS: Keys = QWEN | {"model__n_layers": 2, "train__seq_len": 16}
REPLICAS: Keys = {
    "optimizer__lr_scale": '["layers.*.attention=0.5", "output=2"]',
    "optimizer__weight_decay_scale": '["layers.*.*_norm=3", "layers.1.feed_forward=4"]',
    "optimizer__muon_except": '["layers.*.feed_forward.w2"]',
}
TIED = parallel(pp=2) | {"model__tie_embeddings": True}
MEANS: Keys = {"precision__optimizer_state": "bfloat16"}
ADAMW: Keys = {"optimizer__name": "adamw"}
PROOFS: dict[str, Keys] = {
    "one process": {"optimizer__momentum": 0.8},
    "zero 0": parallel(dp_shard=2, zero=0),
    "zero 3": parallel(dp_shard=2),
    "tp": parallel(tp=2) | MEANS,
    "replicas": parallel(dp_replicate=2, dp_shard=2) | REPLICAS,
    "a tied pipeline": TIED,
}
SLOW: dict[str, Keys] = {
    # 90 columns over tp 2 and then 4: 12, 12, 12 and 9.
    "uneven and strided": parallel(dp_shard=4, tp=2) | {"model__hidden_dim": 90},
    "experts": parallel(dp_shard=2, tp=2, ep=2) | EXPERTS,
    "experts and a pipeline": parallel(pp=2, dp_shard=4, ep=2) | EXPERTS,
    "copies of experts": parallel(dp_replicate=4, ep=2) | EXPERTS,
    "all in bfloat16": TIED | HALF,
    "AdamW in bfloat16": parallel(dp_shard=2, tp=2) | ADAMW | HALF,
    "AdamW with means in bfloat16": parallel(tp=2) | ADAMW | MEANS,
}
test_equals_one_process = proofs(PROOFS | SLOW, MUON, slow=SLOW)


def _proved_as_on_a_gpu() -> Report:
    """Products in bfloat16, in the composition and on one process."""
    keys = MUON | parallel(dp_shard=2) | {"precision__param": "bfloat16"}
    with mutated("compose.optim.muon:product_dtype", 'device_type == "cpu"', "False"):
        return prove_case(keys)


def test_products_in_bfloat16_equal_one_process_s(pool: Pool) -> None:
    proved(pool.run(_proved_as_on_a_gpu, 2))


@replaces(muon, "layout_of")
def each_shard_is_a_matrix(_: Any, parameter: Any, group: dist.ProcessGroup, mesh: Any) -> MatrixLayout:
    """Every rank orthogonalizes what it holds."""
    shape, me = (1, *parameter.to_local().shape), dist.get_rank(group)
    return MatrixLayout(shape, {me: tuple(slice(0, n) for n in shape)}, {me: 0})


WRONG_MATRICES: dict[str, Fault] = {
    # The owner orthogonalizes its own part alone, zeros for the rest.
    "nothing is gathered": partial(
        mutated, "compose.optim.muon:Muon._gather", "own[place] = piece", "own[place] = 0"
    ),
    "each shard is a matrix": each_shard_is_a_matrix,
    # The halves of an owner's result change places.
    "shards change places": partial(
        mutated,
        "compose.optim.muon:Muon.step",
        "orthogonalized(own)",
        "orthogonalized(own).roll(own.shape[-2] // 2, -2)",
    ),
}


@contextmanager
def a_stage_has_names_of_its_own() -> Iterator[None]:
    """Copies of a tied weight are rounded by different bits."""

    def fake(composition: Composition, *args: Any) -> torch.optim.Optimizer:
        with mock.patch.object(PipelineRunner, "aliases", new={}):
            return build_optimizer(composition, *args)

    with mock.patch("compose.proof.prove.build_optimizer", fake):
        yield


@contextmanager
def one_rank_rounds_otherwise() -> Iterator[None]:
    def fake(seed: int, *args: Any) -> Tensor:
        return random_bits(seed + dist.get_rank(), *args)

    with mock.patch.object(adamw, "random_bits", fake), mock.patch.object(muon, "random_bits", fake):
        yield


@pytest.mark.parametrize("fault", WRONG_MATRICES)
def test_a_wrong_matrix_is_named(pool: Pool, fault: str) -> None:
    report = pool.run(with_fault, 2, WRONG_MATRICES[fault], MUON | parallel(dp_shard=2))[0]
    errors = {row.name: row.error for row in report.rows if row.quantity == "update"}
    matrices = {name for name in errors if name.startswith("layers.") and "norm" not in name}
    assert len(matrices) == 14
    assert min(errors[name] for name in matrices) > 0.2, errors
    gradients = {row.name: row.ok for row in report.rows if row.quantity == "gradient"}
    assert matrices < gradients.keys()
    assert all(gradients.values()), gradients


def test_copies_rounded_otherwise_are_named(pool: Pool) -> None:
    keys = MUON | SLOW["all in bfloat16"]
    for fault in (a_stage_has_names_of_its_own, one_rank_rounds_otherwise):
        report = pool.run(with_fault, 2, fault, keys)[0]
        assert_named(report, "tied copies", {"tok_embeddings.weight"})


def test_other_bits_are_seen(pool: Pool) -> None:
    """Both ranks are as near to one process as rounding allows, and yet differ."""
    keys = {**MUON, **HALF, "parallel__dp_replicate": 2}
    report = pool.run(with_fault, 2, one_rank_rounds_otherwise, keys)[0]
    assert {(row.quantity, row.rank) for row in report.failed} == {("copies", 1)}
    assert {row.name for row in report.failed} >= {"norm.weight", "layers.0.ffn_norm.weight"}
