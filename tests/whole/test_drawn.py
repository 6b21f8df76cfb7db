"""Drawn compositions: each equals one process, in a proof and in training, or is refused in a line."""

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from compose import ActivationCheckpoint, Options, Parallel, Pipeline, Plan, Precision, Trial, verify
from compose.checkpoint import store
from compose.diloco.proof import prove_outer_loop
from compose.pipeline.schedules import SCHEDULES
from compose.proof.prove import prove
from compose.proof.report import Report, joined, tolerance_of
from compose.train.workers import this_worker
from tests.support.draws import MODELS, WITH_EXPERTS, Draw, Keys, draw, one_process, other_mesh
from tests.support.helpers import agreed, make_config, make_job, small_ones_move, tier
from tests.support.pool import Pool, make_mesh
from tests.support.training import keys_for, lines, train

NUMBERS, SMALL = range(300), 40  # the first have at most 4 ranks, and no compiler
# The slow tier runs these: they are short, and have something of everything. The others are "full".
# fmt: off
IN_THE_SUITE = {
    0, 6, 13, 16, 29, 38, 57, 73, 88, 140, 174, 180, 185, 221, 222, 231, 232, 233, 238, 242, 267, 269,
    277, 280, 299,
}
# fmt: on
STEPS, SAVED = 5, 3


def drawn(number: int) -> Draw:
    return draw(number, large=number >= SMALL)


def prove_draw(keys: Keys) -> Report:
    """On every rank of a pool: what ``verify`` does, with islands too."""
    job = make_job(dist.get_world_size() * this_worker().count, **keys)
    mesh, device = make_mesh(job.degrees), torch.device("cpu")
    with small_ones_move():
        reports = [prove(job, mesh, device)]
    if job.islands > 1:
        reports.append(prove_outer_loop(job, mesh, device))
    return joined(reports)


def assert_not_accused(report: Report) -> None:
    """No row differs, and all is proved but keys that have no part in so small a run."""
    lacking = [row for row in report.rows if row.state in ("unused", "loose")]
    assert not report.failed, str(report)
    assert all(row.quantity == "option" for row in lacking), str(report)


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=tier(slow=True, full=n not in IN_THE_SUITE)) for n in NUMBERS],
)
def test_equal_or_refused(pool: Pool, tmp_path: Path, number: int) -> None:
    one = drawn(number)
    if number in IN_THE_SUITE:
        one.keys["compile__backend"] = "aot_eager"
    _equal_or_refused(pool, tmp_path, number, one)


@pytest.mark.full
def test_compiled_by_inductor(pool: Pool, tmp_path: Path) -> None:
    """Graphs that the slow tier only traces."""
    for number in IN_THE_SUITE:
        if "compile__mode" in (one := drawn(number)).keys:
            _equal_or_refused(pool, tmp_path, number, one)


def _equal_or_refused(pool: Pool, tmp_path: Path, number: int, one: Draw) -> None:
    problems = one.problems
    if problems:
        assert all(problem and "\n" not in problem for problem in problems), problems
        return
    try:
        reports = pool.run(prove_draw, one.ranks, one.keys, islands=one.islands)
        report = agreed(reports) if one.islands == 1 else joined(reports)
        assert_not_accused(report)
        if one.trained:
            _trains_as_one_process(pool, tmp_path, number, one)
    except (AssertionError, TimeoutError) as error:
        raise AssertionError(f"{one.command}\n{error}") from None


def _trains_as_one_process(pool: Pool, folder: Path, number: int, one: Draw) -> None:
    """Train for some steps, and once more from a checkpoint: on another mesh, or on the same where
    messages or islands make a run another one than that of one process."""
    np.save(folder / "tokens.npy", np.random.default_rng(number).integers(0, 40, 4000, np.uint16))
    more: Keys = {"train__steps": STEPS, "checkpoint__interval": SAVED}
    if one.keys["model__name"] == "dit":
        more["data__path"] = "shapes"
    else:
        more |= {"data__path": folder / "tokens.npy", "data__separator": 0}

    def trained(what: Draw, name: str) -> list[tuple[float, float]]:
        keys = keys_for(folder / name, **(what.keys | more))
        pool.run(train, what.ranks, keys, islands=what.islands)
        results = [(line["loss"], line["grad_norm"]) for line in lines(folder / name)]
        assert len(results) == STEPS
        return results

    first = trained(one, "run")
    for saved in (folder / "run").rglob(store.name_of(STEPS)):
        shutil.rmtree(saved)
    if one.coded or one.islands > 1:
        assert trained(one, "run") == first, "resumed on the same mesh"
        return
    other = other_mesh(number, one)
    resumed = trained(other, "run")
    assert resumed[:SAVED] == first[:SAVED], "the steps before the checkpoint"
    right = trained(one_process(one), "one")
    precision = make_config(one.ranks, **one.keys).precision
    tolerance = tolerance_of(precision)
    exact = right
    if precision.reduced:
        plain = {name: value for name, value in one.keys.items() if not name.startswith("precision__")}
        exact = trained(one_process(Draw(one.ranks, plain)), "exact")
    for what, results in (("trained", first), (f"resumed on\n{other.command}\n", resumed)):
        for i, base in enumerate((tolerance.loss, tolerance.gradient)):
            own = [_error(a[i], b[i]) for a, b in zip(right, exact, strict=True)]
            mean = sum(own) / len(own)
            errors = [_error(a[i], b[i]) for a, b in zip(results, right, strict=True)]
            allowed = [tolerance.allowed(base, each, mean) for each in own]
            wrong = [error > limit for error, limit in zip(errors, allowed, strict=True)]
            name = ("loss", "grad_norm")[i]
            assert not any(wrong), f"{what}: {name} {errors}, allowed {allowed}"


def _error(value: float, right: float) -> float:
    return abs(value - right) / max(abs(right), 1e-30)


def features(keys: Keys) -> set[str]:
    """Return the draw's part of what draws cover."""
    results = {f"{name}={value}" for name, value in keys.items() if name in _CHOICES}
    results |= {name for name, value in keys.items() if name in _SWITCHES and value}
    results |= {name for name in _DEGREES if keys[name] > 1}
    model = keys["model__name"]
    return results | ({f"{model} with experts"} if keys.get("model__n_experts") else {model})


_DEGREES = [f"parallel__{axis}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")]
_SWITCHES = [
    "activation_checkpoint__offload",
    "comm__measure_every",
    "comm__prefetch",
    "comm__start_step",
    "model__capacity_factor",
    "model__lora__rank",
    "model__tie_embeddings",
    "optimizer__lr_scale",
    "optimizer__weight_decay_scale",
    "outer__delay",
    "outer__every",
    "outer__fragments",
    "outer__mix",
    "parallel__pp_layers",
    "parallel__zero3_reshard",
    "train__loss_chunk",
    "train__z_loss",
]
# Enough draws must have all these values.
_CHOICES: dict[str, list[Any]] = {
    "activation_checkpoint__mode": ["none", "full", "every_k", "selective", "budget"],
    "comm__activations": ["int8", "float8"],
    "comm__error_feedback": [True, False],
    "comm__gradients": ["bfloat16", "int8", "int4", "powersgd", "top_k"],
    "comm__weights": ["int8", "int4_diff"],
    "compile__mode": ["block"],
    "optimizer__name": ["adamw", "muon"],
    "optimizer__offload": ["cpu", "nvme"],
    "outer__dtype": ["float32", "bfloat16", "int8", "e3m0", "top_k"],
    "parallel__cp_balance": ["headtail", "none"],
    "parallel__cp_method": ["ring", "allgather", "ulysses"],
    "parallel__loss": [True, False],
    "parallel__offload": ["cpu"],
    "parallel__pp_schedule": [*SCHEDULES],
    "parallel__sequence": [True, False],
    "parallel__zero": [0, 1, 2, 3],
    "precision__float8": ["tensorwise", "rowwise", "rowwise_gw_hp"],
    "precision__master": ["bfloat16"],
    "precision__optimizer_state": ["bfloat16"],
    "precision__param": ["float32", "bfloat16", "float16"],
    "precision__reduce": ["bfloat16"],
    "train__max_norm": [0.0],
    "train__micro_batch": [1, 2, 3],
}
AT_LEAST = 3


@pytest.mark.full
def test_draws_cover_what_there_is() -> None:
    everything = [drawn(number) for number in NUMBERS]
    legal = [one for one in everything if not one.problems]
    assert len(everything) == 300
    assert len(legal) >= 0.8 * len(everything)
    assert {one.ranks for one in legal} == {1, 2, 3, 4, 6, 8}
    assert all(everything[number].ranks <= 4 for number in IN_THE_SUITE)
    assert sum(one.trained for one in legal) >= len(legal) / 4
    count = Counter(feature for one in legal for feature in features(one.keys))
    assert {name: count[name] for name in _wanted() if count[name] < AT_LEAST} == {}


@pytest.mark.slow
def test_the_slow_tier_has_at_least_one_of_each() -> None:
    suite = [drawn(number) for number in sorted(IN_THE_SUITE)]
    legal = [one for one in suite if not one.problems]
    assert (len(suite), len(legal)) == (25, 20)
    assert sum(one.trained for one in legal) >= 6
    assert set(_wanted()) - {feature for one in legal for feature in features(one.keys)} == set()


def _wanted() -> list[str]:
    results = [f"{name}={value}" for name, values in _CHOICES.items() for value in values]
    experts = [f"{name} with experts".replace("moe", "qwen3") for name in WITH_EXPERTS]
    return [*results, *_DEGREES, *_SWITCHES, *(set(MODELS) - {*WITH_EXPERTS}), *experts]


class _Layer(nn.Module):
    """A mixture of tokens and a network, each with dropout behind it."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.first, self.inner, self.last = (nn.Dropout(rate) for _ in range(3))

    def forward(self, x_BLD: Tensor) -> Tensor:
        mean = self.norm(x_BLD).cumsum(1) / x_BLD.shape[1]
        x_BLD = x_BLD + self.first(self.mix(mean))
        return x_BLD + self.last(self.down(self.inner(F.gelu(self.up(x_BLD)))))


class _Model(nn.Module):
    def __init__(self, layers: int, width: int, rate: float) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(37, width), nn.Dropout(rate)
        self.layers = nn.ModuleList(_Layer(width, rate) for _ in range(layers))
        self.head = nn.Linear(width, 37)

    def forward(self, tokens: Tensor) -> Tensor:
        x_BLD = self.drop(self.embed(tokens))
        for layer in self.layers:
            x_BLD = layer(x_BLD)
        return self.head(x_BLD)


DROPPING = Plan(
    shard=["embed", "layers.*", "head"],
    checkpoint=["layers.*"],
    pipeline=Pipeline(["embed", "drop"], "layers", ["head"]),
)


def prove_drop(number: int) -> Report:
    """On every rank: the proof of the composition of a number, over two steps."""
    rng = random.Random(number)
    degrees: dict[str, Any] = {"dp_shard": 1, "dp_replicate": 1, "pp": 1}
    for _ in range(dist.get_world_size().bit_length() - 1):
        degrees[rng.choice(list(degrees))] *= 2
    mode: Any = rng.choice(["none", "full", "selective"])
    zero: Any = rng.choice([0, 1, 2, 3])
    param: Any = rng.choice(["float32", "float32", "bfloat16"])
    parallel = Parallel(**degrees, zero=zero)
    options = Options(
        parallel,
        activation_checkpoint=ActivationCheckpoint(mode, offload=rng.random() < 0.3),
        precision=Precision(param=param),
        seq_len=9,
    )
    torch.manual_seed(number)
    model = _Model(max(2, degrees["pp"]), rng.choice([6, 10]), rng.choice([0.1, 0.5]))
    batches = []
    for _ in range(2):
        tokens = torch.randint(37, (8, 10))
        batches.append({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
    with small_ones_move():
        return verify(model, DROPPING, make_mesh(parallel), batches, options, Trial(micro_batch=1))


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=tier(slow=True, full=n > 2)) for n in range(12)]
)
def test_dropout_is_equal(pool: Pool, number: int) -> None:
    """Models of the library that drop; those of the folders have none."""
    for report in pool.run(prove_drop, (1, 2, 4)[number % 3], number):
        assert_not_accused(report)
