"""The table of rules: every mesh is proved or refused by it; pages and commands say the same."""

from dataclasses import replace
from pathlib import Path

import pytest

from compose import ConfigError, Options, Parallel, Precision, apply
from compose.config import rules
from compose.config.tables import Config
from compose.config.toml import load
from compose.memory.activation_checkpointing import ActivationCheckpoint
from compose.memory.compilation import Compile
from models.llama import Config as ShapeOfLlama
from models.llama import Model, plan
from tests.support.command_lines import answered
from tests.support.helpers import ROOT, SMALL, agreed, prove_step
from tests.support.pool import Pool, make_mesh

RANKS = 8
KEYS: dict[str, object] = {
    "model__n_layers": 5,
    "model__tie_embeddings": True,
    "train__micro_batch": 1,
    "train__global_batch": 8,
}


def config() -> Config:
    overrides = SMALL | {name.replace("__", "."): value for name, value in KEYS.items()}
    return load(str(ROOT / "train.toml"), [(k, str(v).lower()) for k, v in overrides.items()])


def prove(pool: Pool, degrees: dict[str, int]) -> None:
    keys = KEYS | {f"parallel__{axis}": degree for axis, degree in degrees.items()}
    report = agreed(pool.run(prove_step, RANKS, keys))
    assert report.ok, f"{degrees}\n{report}"


# With those of three axes, every two axes meet at degree 2 at least once.
COVERING = [
    {"pp": 2, "dp_replicate": 2, "cp": 2},
    {"pp": 2, "dp_replicate": 2, "dp_shard": 2},
    {"pp": 4, "tp": 2},
]
# These the suite runs in test_verify.py, with experts (test_expert_parallel.py), and in training
# (test_trainer.py).
ELSEWHERE = [
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
    found = list(rules.survey(config(), RANKS))
    refused = [(degrees["pp"], problems) for degrees, problems in found if problems]
    assert len(found) == 35
    problem = "parallel.pp: 8 ranks of 1 stage need 6 layers between the ends; the model has 5;"
    assert refused == [(8, [f"{problem} use at most 7"])]


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
    assert page == rules.markdown() + "\n", "python -m compose.config.rules > docs/composition.md"


def test_what_pytorch_forces_names_the_place() -> None:
    for rule in rules.RULES:
        assert not rule.upstream or "/" in rule.upstream.partition(",")[0], rule.condition


def test_legal() -> None:
    done = answered("-m", "compose", "legal", "--world-size=6", "--model.n_layers=1")
    assert done.returncode == 0, done.stderr
    shown = [line.split() for line in done.stdout.splitlines()]
    assert shown[0] == ["pp", "dp_replicate", "dp_shard", "cp", "tp"]
    end = next(i for i, row in enumerate(shown) if "meshes" in row)
    legal = [tuple(map(int, row)) for row in shown[1:end]]
    # Batch 16 in twos is not a multiple of 3 ranks, nor do 8 heads divide by 3; one layer is enough for
    # three stages, not for six.
    by_hand = {
        degrees
        for degrees in (tuple(d.values()) for d in rules.meshes(6))
        if degrees[0] <= 3 and degrees[1] * degrees[2] in (1, 2) and degrees[4] in (1, 2)
    }
    assert set(legal) == by_hand
    assert len(legal) == len(by_hand)
    assert done.stdout.splitlines()[end] == (
        f"{len(legal)} meshes of 6 ranks are legal, {25 - len(legal)} are not:"
    )
    alone = answered("-m", "compose", "legal", "train.toml", "--world-size=1").stdout
    assert alone.splitlines()[-1] == "1 meshes of 1 ranks are legal, 0 are not"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["legal"], "command line: legal: needs --world-size N, the number of ranks"),
        (["legal", "--world-size=x"], "command line: --world-size: x is not a number of ranks"),
        (["schedule"], "train.toml: parallel.pp: 1 has no schedule; set --parallel.pp=2 or more"),
        (
            ["schedule", "--parallel.pp=2", "--out=timeline.pdf"],
            "command line: --out: timeline.pdf is neither .svg nor .png",
        ),
        (
            ["schedule", "--parallel.pp=2", "--out=nowhere/timeline.png"],
            "command line: --out: cannot write nowhere/timeline.png: No such file or directory",
        ),
        (
            ["schedule", "--parallel.pp=2", "--parallel.pp_schedule=1F2B"],
            "train.toml: parallel.pp_schedule: unknown schedule '1F2B'; did you mean 1F1B? (known:"
            " GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble,"
            " DualPipeV, or a .csv file)",
        ),
        (
            ["schedule", "--parallel.pp=2", "--parallel.pp_schedule=own.csv"],
            "train.toml: parallel.pp_schedule: cannot read own.csv: No such file or directory",
        ),
        (
            ["schedule", "--parallel.pp=2", "--parallel.pp_virtual_stages=2"],
            "train.toml: parallel.pp_virtual_stages: 1F1B has 1 on each rank, not 2; use 1, or another"
            " parallel.pp_schedule",
        ),
        (
            [
                "schedule",
                "--parallel.pp=2",
                "--parallel.pp_schedule=Interleaved1F1B",
                "--train.global_batch=10",
            ],
            "train.toml: parallel.pp_schedule: Interleaved1F1B with parallel.pp 2 cannot run 5"
            " micro-batches (PyTorch: Interleaved 1F1B requires the number of microbatches to be a"
            " multiple of the number of rounds (2), but got 5); nearest: 4 or 6 (train.global_batch is"
            " 2 times that)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_input(arguments: list[str], problem: str) -> None:
    done = answered("-m", "compose", *arguments)
    assert done.stderr.splitlines()[0] == problem
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_schedule_draws(tmp_path: Path) -> None:
    for suffix, start in ((".svg", b"<svg"), (".png", b"\x89PNG")):
        out = tmp_path / f"timeline{suffix}"
        done = answered("-m", "compose", "schedule", "--parallel.pp=4", f"--out={out}")
        assert done.returncode == 0, done.stderr
        assert out.read_bytes().startswith(start)
        assert "1F1B: 4 ranks, 8 micro-batches, layers [1, 1, 2, 1]" in done.stdout
        assert "bubble fraction 27.3%" in done.stdout
        assert "textbook: (p-1)/(m+p-1) = 27.3%" in done.stdout
        assert "rank 0: 4, rank 1: 3, rank 2: 2, rank 3: 1" in done.stdout


def _library_refusals() -> list[str]:
    config, parallel = ShapeOfLlama(dim=32, n_heads=4, n_kv_heads=2, n_layers=1), Parallel(tp=2, zero=2)
    options = Options(
        replace(parallel, offload="cpu"),
        Precision(param="float16", master="bfloat16"),
        ActivationCheckpoint(every=3),
        Compile("model", async_tp=True),
    )
    with pytest.raises(ConfigError) as caught:
        apply(Model(config), plan(config, parallel), make_mesh(parallel), options)
    return caught.value.problems


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
