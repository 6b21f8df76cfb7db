"""The matrix of compositions, each proved equal to one process."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from compose import Plan, Trial, verify
from compose.data.samples import random_batch
from compose.parallel.mesh import Parallel
from compose.proof import one_process
from compose.proof.report import ComparisonRow, Report, unused
from models.llama import Config as LlamaConfig
from models.llama import Model as Llama
from models.llama import plan as llama_plan
from tests.support.helpers import Keys, keys_in, parallel, prove_step, proved, ranks_in, tier
from tests.support.meshes import MESHES, name_of
from tests.support.pool import Pool, make_mesh


def _tier_of_mesh(
    number: int, mesh: dict[str, int | bool], tied: bool, accumulation: int
) -> list[pytest.MarkDecorator]:
    """Below the full tier each mesh comes once, in turn untied at once and tied accumulating. In the
    default tier degrees are 2, and meshes with replicas have ZeRO 3 and no tp."""
    small = 4 not in (mesh.get("tp"), mesh.get("dp_shard"))
    seldom = "dp_replicate" in mesh and (mesh["zero"] != 3 or "tp" in mesh)
    once = (tied, accumulation) == [(False, 1), (True, 3)][number % 2]
    return tier(slow=not small or seldom, full=not once)


@pytest.mark.parametrize(
    ("mesh", "tied", "accumulation"),
    [
        pytest.param(
            mesh,
            tied,
            accumulation,
            id=f"{name_of(mesh)}-{'tied' if tied else 'untied'}-{accumulation}",
            marks=_tier_of_mesh(i, mesh, tied, accumulation),
        )
        for i, mesh in enumerate(MESHES)
        for tied in (False, True)
        for accumulation in (1, 3)
    ],
)
def test_equals_one_process(
    pool: Pool, mesh: dict[str, int | bool], tied: bool, accumulation: int
) -> None:
    keys = parallel(**mesh)
    ranks = ranks_in(keys)
    keys |= {
        "model__tie_embeddings": tied,
        "train__micro_batch": 2,
        "train__global_batch": 2 * ranks // mesh.get("tp", 1) * accumulation,
    }
    report = proved(pool.run(prove_step, ranks, keys))
    quantities = {row.quantity for row in report.rows}
    expected = {"initial weight", "gradient", "loss", "grad_norm", "update", "copies", "trained"}
    assert quantities == expected
    parameters = 2 + 2 * 9 + (not tied)
    assert sum(row.quantity == "gradient" for row in report.rows) == parameters


CONTEXT = [
    *(
        f"cp={cp} cp_method={method} cp_balance={balance}"
        for cp in (2, 4)
        for method in ("ring", "allgather", "ulysses")
        for balance in ("headtail", "none")
    ),
    # One key/value head, as many as query heads; lengths that the chunks do not divide.
    *(
        f"cp=4 cp_method={method} model.n_kv_heads={heads} train.seq_len=37"
        for method in ("ring", "allgather", "ulysses")
        for heads in (1, 8)
    ),
    "cp=2 dp_shard=2 zero=0",
    "cp=2 dp_shard=2 zero=1 train.global_batch=12",
    "cp=2 dp_shard=2 zero=2 train.global_batch=12",
    "cp=2 tp=2 cp_method=ulysses",
    "cp=2 tp=2 train.seq_len=30",
    "cp=2 activation_checkpoint.mode=full",
    "cp=2 dp_replicate=2 dp_shard=2",
    "cp=2 dp_shard=2 tp=2",
    "cp=8",
]


def _context_case(line: str) -> Any:
    """Seen elsewhere with other degrees, heads or lengths: full. Larger, or with ZeRO: slow."""
    uncut = "cp=4" in line and "cp_balance=none" in line
    many_heads = "n_kv_heads=8" in line and "ulysses" not in line
    axes = sum(f" {axis}=" in line for axis in ("tp", "dp_replicate", "dp_shard"))
    large = "cp=2" not in line or axes > 1
    marks = tier(slow=large or "zero" in line, full=uncut or many_heads)
    words = (word.rpartition(".")[2].replace("=", " ") for word in line.split())
    return pytest.param(keys_in(line), id=" ".join(words), marks=marks)


@pytest.mark.parametrize("keys", [_context_case(line) for line in CONTEXT])
def test_context_parallel(pool: Pool, keys: Keys) -> None:
    """On random documents of 8 tokens in the mean, many of which span ranks."""
    proved(pool.run(prove_step, ranks_in(keys), {"train__global_batch": 8, **keys}))


# Ranks and keys.
ODD = {
    # 257 rows over 3 ranks; batch 1 per rank.
    "three ranks": (3, "dp_shard=3 train.micro_batch=1 train.global_batch=3"),
    "uneven feed-forward": (4, "tp=4 model.hidden_dim=90"),
    "three heads each": (4, "tp=4 model.n_heads=12 model.n_kv_heads=4 model.dim=96"),
    "odd length": (4, "tp=2 sequence=false train.seq_len=31"),
    "one key/value head": (4, "tp=2 model.n_kv_heads=1"),
    "a layer smaller than the ranks": (
        4,
        "model.vocab_size=257 model.dim=16 model.n_heads=2 model.n_kv_heads=1 model.hidden_dim=3",
    ),
    "no clipping": (2, "train.max_norm=0.0"),
    "checkpointing": (4, "tp=2 activation_checkpoint.mode=full"),
    "one head each": (8, "tp=8"),
    # 257 rows over dp_shard 4 x tp 2: shards that distribute_tensor would cut elsewhere.
    "strided and uneven": (8, "dp_shard=4 tp=2"),
    "alone": (1, ""),
}
# They run eight ranks, or repeat another case's sizes.
SLOW = (
    "checkpointing",
    "three heads each",
    "odd length",
    "one key/value head",
    "one head each",
    "strided and uneven",
)


@pytest.mark.parametrize("case", [pytest.param(case, marks=tier(slow=case in SLOW)) for case in ODD])
def test_odd_sizes(pool: Pool, case: str) -> None:
    ranks, line = ODD[case]
    proved(pool.run(prove_step, ranks, {"train__global_batch": 8, **keys_in(line)}))


BFLOAT16: list[dict[str, int | bool]] = [
    {},
    {"dp_shard": 2},
    {"dp_shard": 2, "zero": 1},
    {"tp": 2},
    {"dp_shard": 2, "tp": 2},
]


def _by_the_operators(keys: dict[str, Any]) -> Report:
    """The proof whose one process computes attention and the loss by the operators too."""
    attention = mock.patch.object(one_process, "PlainAttention", nullcontext)
    with attention, mock.patch.object(one_process, "plain_loss", lambda loss: loss):
        return prove_step(keys)


@pytest.mark.parametrize(
    ("mesh", "reduce"),
    [
        pytest.param(
            mesh,
            reduce,
            id=f"{reduce}-{name_of(mesh) or 'alone'}",
            marks=tier(slow=reduce != chosen or mesh.get("tp", 1) > 1),
        )
        for mesh, chosen in zip(BFLOAT16, ("float32", "bfloat16", "", "", "float32"), strict=True)
        for reduce in ("float32", "bfloat16")
    ],
)
def test_bfloat16(pool: Pool, mesh: dict[str, int | bool], reduce: str) -> None:
    keys = parallel(**mesh) | {"precision__param": "bfloat16", "precision__reduce": reduce}
    report = proved(pool.run(prove_step, ranks_in(keys), keys))
    if not mesh and reduce == "float32":
        report = pool.run(_by_the_operators, 1, keys)[0]
        # Alone, the same operations round alike: only parameters are cast. Since 2.15 FSDP keeps a
        # gradient in float32 where backward computes it so, as for norms; the other side rounds it.
        kept = TorchVersion(torch.__version__) >= "2.15"
        gradients = [row for row in report.rows if row.quantity == "gradient"]
        assert all(row.error == 0 for row in gradients if not (kept and "norm" in row.name))


def _different_weights() -> Report:
    """Weights made without a seed: those of rank 0 count, as in DistributedDataParallel."""
    torch.manual_seed(dist.get_rank())
    config = LlamaConfig(n_layers=1, dim=32, n_heads=4, hidden_dim=48)
    parallel = Parallel(dp_shard=2, tp=2)
    batch = random_batch(4, 16, config.vocab_size, seed=1)
    model = Llama(config)
    before = [p.clone() for p in model.parameters()]
    report = verify(model, llama_plan(config, parallel), make_mesh(parallel), batch)
    assert all(map(torch.equal, model.parameters(), before)), "verify changed the model"
    return report


def test_function_on_a_model_with_weights(pool: Pool) -> None:
    proved(pool.run(_different_weights, 4))


def _whole_model_is_one_unit() -> Report:
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    batch = {"input": torch.randn(6, 7, generator=torch.Generator().manual_seed(0))}
    batch["targets"] = torch.arange(6) % 3
    mesh = make_mesh(Parallel(dp_shard=-1))
    loss = torch.nn.CrossEntropyLoss(reduction="sum")
    return verify(model, Plan(), mesh, batch, trial=Trial(loss_function=loss))


def test_empty_plan_shards_the_whole_model(pool: Pool) -> None:
    report = proved(pool.run(_whole_model_is_one_unit, 3))
    assert sum(row.quantity == "gradient" for row in report.rows) == 4


def test_report_names_the_worst_first() -> None:
    rows = [
        ComparisonRow("gradient", "good", 1e-6, 1e-4, 0),
        ComparisonRow("gradient", "bad", 1e-3, 1e-4, 1),
        ComparisonRow("gradient", "worse", float("nan"), 1e-4, 2),
        ComparisonRow("initial weight", "exact", 0.0, 0.0, 0),
    ]
    report = Report(rows)
    assert not report.ok
    assert [row.name for row in report.failed] == ["bad", "worse"]
    lines = str(report).splitlines()
    assert [line.removesuffix("   FAILED").split()[-1] for line in lines[1:-1]] == [
        "worse",
        "bad",
        "good",
        "exact",
    ]
    assert lines[1].endswith("worse   FAILED")
    assert lines[-1] == "NOT equal to one process: 2 of 4 quantities differ"
    assert str(Report(rows[:1])).endswith("equal to one process: 1 quantities")


def test_an_option_that_took_no_part_is_named() -> None:
    rows = [
        ComparisonRow("gradient", "good", 1e-6, 1e-4, 0),
        unused("comm.near"),
        unused("comm.activations"),
    ]
    report = Report(rows)
    assert not report.ok
    assert not report.failed
    lines = str(report).splitlines()
    assert "comm.near   not proved: unused" in str(report)
    assert lines[-1] == "NOT PROVED: comm.activations took no part, and comm.near took no part"
    lacks = ComparisonRow("gradient", "cancels", 1e-6, 1e-4, 0, "zero")
    assert Report([*rows[:2], lacks]).verdict == (
        "NOT PROVED: 1 parameters whose gradient is zero on one process (cancels), and comm.near took"
        " no part"
    )
