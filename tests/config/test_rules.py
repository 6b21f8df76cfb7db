"""The table of rules: every mesh is proved or refused by it; pages and commands say the same."""

from dataclasses import replace

import pytest
import torch

from compose import Options, Parallel, Precision, apply
from compose.config import rules, setup
from compose.config.setup import Target
from compose.config.tables import Config
from compose.config.toml import load
from compose.memory.activation_checkpointing import ActivationCheckpoint
from compose.memory.compilation import Compile
from models.llama import Config as ShapeOfLlama
from models.llama import Model, plan
from tests.support.helpers import (
    ROOT,
    make_job,
    overrides,
    parallel,
    prove_on,
    prove_step,
    refusal,
    refused,
)
from tests.support.pool import Pool, make_mesh

RANKS = 8
KEYS: dict[str, object] = {
    "model__n_layers": 5,
    "model__tie_embeddings": True,
    "train__micro_batch": 1,
    "train__global_batch": 8,
}


def config() -> Config:
    return load(str(ROOT / "train.toml"), overrides(KEYS))


def prove(pool: Pool, degrees: dict[str, int]) -> None:
    prove_on(pool, KEYS | parallel(**degrees), prove_step)


# With those of other files, every two axes meet at degree 2 at least once.
COVERING = [{"pp": 2, "dp_replicate": 2, "cp": 2}]
# These the suite runs in test_verify.py, with experts (test_expert_parallel.py), in training
# (test_trainer.py), and in pairs (test_pipeline_parallel.py).
ELSEWHERE = [
    {"pp": 2, "dp_replicate": 2, "dp_shard": 2},
    {"pp": 4, "tp": 2},
    {"dp_replicate": 2, "cp": 2, "tp": 2},
    {"pp": 2, "dp_shard": 2, "tp": 2},
    {"pp": 2, "cp": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2, "tp": 2},
]


@pytest.mark.parametrize(
    "degrees",
    [*COVERING, *(pytest.param(degrees, marks=pytest.mark.full) for degrees in ELSEWHERE)],
    ids=lambda d: " ".join(f"{k} {v}" for k, v in d.items()),
)
def test_covering_part_of_the_product(pool: Pool, degrees: dict[str, int]) -> None:
    prove(pool, {"dp_shard": 1, **degrees})


def test_whole_product_is_legal_or_refused() -> None:
    result = list(rules.survey(config(), RANKS))
    refused = [(degrees["pp"], problems) for degrees, problems in result if problems]
    assert len(result) == 35
    problem = "parallel.pp: 8 ranks of 1 stage need 6 layers between the ends; the model has 5;"
    assert refused == [(8, [f"{problem} use at most 7"])]


def test_stages_far_too_many_to_list_are_refused() -> None:
    keys = parallel(pp=2, dp_shard=1, pp_schedule="Interleaved1F1B", pp_virtual_stages=10**13)
    (line,) = set(refused(make_job, 2, **keys))
    assert line == "parallel.pp_virtual_stages: 10000000000000 on each rank; use at most 1000"


def test_a_stage_that_trains_nothing_is_refused() -> None:
    given = replace(config(), parallel=Parallel(pp=2, pp_layers=(0, 5)))
    model = Model(replace(given.model.config, tie_embeddings=False))
    assert rules.check(given, 2, model=model)
    model.tok_embeddings.requires_grad_(False)
    assert refused(rules.check, given, 2, None, model) == [
        "parallel.pp_layers: stage 0 of the pipeline, with no layers, has no trained weight and so no"
        " gradient; give it one, or use parallel.pp = 1"
    ]


def test_a_segment_longer_than_every_stage_is_refused_in_the_survey() -> None:
    """The layers of stages are known only when all else is legal."""
    keys = {"activation_checkpoint__mode": "full", "activation_checkpoint__segment": 4}
    given = load(str(ROOT / "train.toml"), overrides(KEYS | keys))
    line = (
        "activation_checkpoint.segment: 4 is more than the {0} units of the longest stage; nearest: {0}"
    )
    assert {degrees["pp"]: problems for degrees, problems in rules.survey(given, 4)} == {
        1: [],
        2: [line.format(3)],
        4: [line.format(2)],
    }


@pytest.mark.full
def test_whole_product(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    """Every assignment of degrees from {1, 2, 4, 8} to five axes whose product is 8."""
    proved = refused = 0
    for degrees, problems in rules.survey(config(), RANKS):
        if problems:
            refused += 1
        else:
            prove(pool, degrees)
            proved += 1
    with capsys.disabled():
        print(f"\nof {proved + refused} meshes of {RANKS} ranks {proved} proved, {refused} refused")
    assert (proved, refused) == (34, 1)


def test_page_is_the_table() -> None:
    page = (ROOT / "docs/composition.md").read_text()
    command = "python -m compose.config.rules > docs/composition.md"
    assert page == setup.markdown(rules.RULES) + "\n", command


def test_what_pytorch_forces_names_the_place() -> None:
    for rule in rules.RULES:
        assert not rule.upstream or "/" in rule.upstream.partition(",")[0], rule.condition


def _library_refusals() -> list[str]:
    config, parallel = ShapeOfLlama(dim=32, n_heads=4, n_kv_heads=2, n_layers=1), Parallel(tp=2, zero=2)
    options = Options(
        replace(parallel, offload="cpu"),
        Precision(param="float16", master="bfloat16"),
        ActivationCheckpoint(every=3),
        Compile("model", async_tp=True),
    )
    mesh = make_mesh(parallel)
    return refusal(apply, Model(config), plan(config, parallel), mesh, options).splitlines()


def test_a_caller_of_the_library_meets_the_same_rules(pool: Pool) -> None:
    """All at once, in the words of Options' fields."""
    assert pool.run(_library_refusals, 2)[0] == [
        "activation_checkpoint.every: 3 is read in another mode; set activation_checkpoint.mode ="
        ' "every_k"',
        'compile.mode: "model" with parallel.tp = 2: Dynamo cannot trace the hooks by which styles'
        ' change tensors between modules; use compile.mode = "block"',
        "compile.async_tp: true needs CUDA; use compile.async_tp = false",
        "precision.master: bfloat16 keeps less than precision.param = float16 uses; use"
        ' precision.param = "bfloat16"',
        "parallel.zero: 2 keeps whole parameters on the device, and parallel.offload ="
        ' "cpu" none; use parallel.zero = 3, or parallel.offload = "none"',
    ]


def _for(target: Target | None, ranks: int, **keys: object) -> list[str]:
    given = load(str(ROOT / "train.toml"), overrides(keys))
    return refusal(rules.check, given, ranks, target).splitlines()


H100, A100, CPU = Target("cuda", float8=True), Target("cuda", float8=False), Target("cpu", float8=False)


def test_rules_ask_the_devices_that_a_run_is_planned_for() -> None:
    fused = {"parallel__tp": 2, "compile__mode": "block", "compile__async_tp": True}
    assert _for(H100, 2, **fused) == _for(A100, 2, **fused) == []
    for target in (CPU, None):  # this machine may have GPUs
        if target or not torch.cuda.is_available():
            assert _for(target, 2, **fused) == [
                "compile.async_tp: true needs CUDA; use compile.async_tp = false"
            ]
    # A file for a CPU may be planned for a GPU.
    assert _for(H100, 2, run__device="cpu", **fused) == []


def test_float8_is_refused_by_the_devices_that_a_run_is_planned_for() -> None:
    small = {"precision__float8": "rowwise", "parallel__dp_shard": 2}
    assert _for(H100, 2, **small) == [
        "precision.float8: rowwise would change none of 14 linear layers: the first's part of 64 x 64"
        ' is too small to gain; use precision.float8 = "off"'
    ]
    assert _for(A100, 2, **small) == _for(CPU, 2, **small) == []  # it is emulated there
    moved = small | {"precision__float8": "tensorwise", "parallel__offload": "cpu"}
    sides = {"model__dim": 2048, "model__hidden_dim": 8192}
    assert _for(CPU, 2, **moved, **sides) == []
    for target in (H100, A100):
        assert _for(target, 2, **moved, **sides) == [
            'precision.float8: tensorwise with parallel.offload = "cpu" would find the scales of'
            ' weights in host memory, where NCCL reaches none; use precision.float8 = "rowwise"'
        ]
        assert _for(target, 2, **moved | {"precision__float8": "rowwise"}, **sides) == []
