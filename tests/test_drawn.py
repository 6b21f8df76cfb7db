"""Drawn meshes, models and keys: every composition is equal to one process, or refused in a line."""

import math
import random
import shlex
from collections import Counter
from typing import Any

import pytest

from compose.errors import ConfigError
from compose.pipeline.schedules import SCHEDULES
from tests.helpers import SMALL, agreed, make_config, prove_case, tier
from tests.pool import Pool

# The slow tier runs the first, on at most 4 ranks; the others are in the full tier.
IN_THE_SUITE, NUMBERS = 12, range(200)
Keys = dict[str, Any]

# Patterns that every model has.
LR_SCALES = (["tok_embeddings=0.5"], ["layers.*.attention=2", "norm=0.3"], ["layers.0=0"])


def draw(number: int) -> tuple[int, Keys]:
    """Ranks, and keys of train.toml for them as ``make_config`` takes them; most of them legal."""
    rng = random.Random(number)
    in_full = number >= IN_THE_SUITE
    small, large = [1, 2, 2, 3, 4, 4], [4, 6, 8, 8]
    ranks = rng.choice(small + large if in_full else small)
    mesh = _mesh(rng, ranks)
    float8 = rng.random() < 0.25
    model = _model(rng, mesh, float8)
    compiled = in_full and number % 20 == 7  # each takes half a minute
    keys = mesh | model | _step(rng, mesh) | _precision(rng, float8)
    keys |= _memory(rng, mesh, model, compiled)
    keys |= _optimizer(rng, keys)
    return ranks, keys


def _mesh(rng: random.Random, ranks: int) -> Keys:
    degrees = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp"), 1)
    left = ranks
    for prime in (2, 2, 2, 3):
        if left % prime == 0:
            degrees[rng.choice(list(degrees))] *= prime
            left //= prime
    keys: Keys = {f"parallel__{axis}": degree for axis, degree in degrees.items()}
    others = ranks // degrees["pp"]
    keys["parallel__ep"] = rng.choice([d for d in range(1, others + 1) if others % d == 0])
    keys["parallel__zero"] = rng.choice([0, 1, 2, 3, 3, 3])
    if degrees["cp"] > 1:
        keys["parallel__cp_method"] = rng.choice(["ring", "ring", "allgather", "ulysses"])
        keys["parallel__cp_balance"] = rng.choice(["headtail", "none"])
    if degrees["tp"] > 1:
        keys["parallel__sequence"] = rng.random() < 0.6
        keys["parallel__loss"] = rng.random() < 0.6
    if degrees["pp"] > 1:
        names = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"]
        schedule = rng.choice([*names, "ZBVZeroBubble", "DualPipeV"])
        keys["parallel__pp_schedule"] = schedule
        if schedule in names[2:]:
            keys["parallel__pp_virtual_stages"] = rng.choice([0, 1, 2, 3])
    shared = degrees["dp_shard"] * degrees["cp"]
    if keys["parallel__zero"] == 3:
        if shared > 1 and rng.random() < 0.2:
            near = [n for n in range(2, shared + 1) if shared % n == 0]
            keys["parallel__zero3_reshard"] = rng.choice(near)
        if rng.random() < 0.15:
            keys["parallel__offload"] = "cpu"
    if rng.random() < 0.25:
        keys["comm__prefetch"] = rng.choice([1, 2])
    return keys


def _stages(mesh: Keys) -> int:
    schedule = mesh.get("parallel__pp_schedule", "1F1B")
    usual = 1 if schedule in ("GPipe", "1F1B") else 2
    return mesh["parallel__pp"] * (mesh.get("parallel__pp_virtual_stages") or usual)


def _model(rng: random.Random, mesh: Keys, float8: bool) -> Keys:
    """Sizes that no degree need divide; with float8, multiples of 16 on a tp rank."""
    tp, ep = mesh["parallel__tp"], mesh["parallel__ep"]
    stages = _stages(mesh) if mesh["parallel__pp"] > 1 else 1
    unit = 16 * tp if float8 else 1
    # Where there are experts to share, a model that has some.
    name = rng.choice(["llama", "qwen3", "moe", "deepseek_v3"] if ep == 1 else ["moe", "deepseek_v3"])
    keys: Keys = {
        "model__name": "qwen3" if name == "moe" else name,
        # Of few layers float8 leaves all as they are.
        "model__n_layers": max(stages - 2 + rng.randrange(3), 4 if float8 else 1),
        "model__hidden_dim": unit * rng.randint(2, 5) if float8 else rng.randint(20, 70),
        "model__vocab_size": rng.randint(40, 130),
        "model__tie_embeddings": rng.random() < 0.4,
    }
    if stages > 1 and rng.random() < 0.2:
        keys["parallel__pp_layers"] = _cut(rng, keys["model__n_layers"], stages)
    if name == "deepseek_v3":
        heads = tp * rng.choice([1, 2, 3])
        width = 16 if float8 else 4
        keys |= {
            "model__dim": unit * rng.choice([1, 2]) if float8 else rng.choice([17, 24, 36]),
            "model__n_heads": heads,
            "model__q_rank": rng.choice([0, width, 3 * width]),
            "model__kv_rank": width * rng.choice([1, 3]),
            "model__nope_dim": width,
            "model__rope_dim": width,
            "model__v_dim": width * rng.choice([1, 2]),
            "model__n_dense_layers": rng.randrange(keys["model__n_layers"] + (ep == 1)),
            "model__n_shared_experts": rng.randrange(3),
        }
    else:
        kv_heads = rng.choice([1, tp, 2 * tp])
        heads = math.lcm(kv_heads, tp) * rng.choice([1, 2, 3])
        head_dim = 16 if float8 else rng.choice([4, 6, 10])
        keys |= {"model__n_heads": heads, "model__n_kv_heads": kv_heads}
        if name == "llama":
            keys["model__dim"] = heads * head_dim
        else:
            keys["model__head_dim"] = head_dim
            keys["model__dim"] = unit * rng.choice([1, 2]) if float8 else rng.choice([17, 24, 36])
    if name in ("moe", "deepseek_v3"):
        groups = rng.choice([1, 1, 2])
        keys |= {
            "model__n_experts": groups * ep * rng.choice([2, 3]),
            "model__n_groups": groups,
            "model__top_groups": groups,
            "model__top_k": rng.choice([1, 2]),
            "model__expert_dim": unit * 2 if float8 else rng.randint(10, 30),
            "model__scoring": rng.choice(["softmax", "sigmoid"]),
            "model__normalize_weights": rng.random() < 0.5,
            "model__balance_loss": rng.choice(["batch", "sequence"]),
            "model__balance_weight": rng.choice([0.0, 0.1]),
            "model__z_weight": rng.choice([0.0, 0.01]),
            "model__bias_rate": rng.choice([0.0, 0.01]),
            "model__capacity_factor": rng.choice([0.0, 0.0, 0.0, 1.0]),
        }
    return keys


def _cut(rng: random.Random, layers: int, stages: int) -> list[int]:
    """One for each stage between the ends, and the others anywhere."""
    cut = [0, *[1] * (stages - 2), 0]
    for _ in range(layers - sum(cut)):
        cut[rng.randrange(stages)] += 1
    return cut


def _step(rng: random.Random, mesh: Keys) -> Keys:
    pp, tp = mesh["parallel__pp"], mesh["parallel__tp"]
    micro_batch = rng.choice([1, 1, 2, 3])
    count = rng.choice([1, 2, 3]) if pp == 1 else pp * rng.choice([1, 2])
    if mesh.get("parallel__pp_schedule") == "DualPipeV":
        count = 2 * pp
    seq_len = rng.randint(9, 40)
    if tp > 1 and rng.random() < 0.9:  # else what does not divide is refused, or goes
        seq_len = (seq_len // tp + 1) * tp
    return {
        "train__seq_len": seq_len,
        "train__micro_batch": micro_batch,
        "train__global_batch": (
            mesh["parallel__dp_replicate"] * mesh["parallel__dp_shard"] * micro_batch * count
        ),
        "train__seed": rng.randrange(1000),
        "train__max_norm": rng.choice([0.0, 1.0, 1.0, 1.0]),
        "train__loss_chunk": rng.choice([0, 0, 0, rng.randint(1, 50)]),
        "train__z_loss": rng.choice([0.0, 0.0, 0.0, 1e-3]),
    }


def _precision(rng: random.Random, float8: bool) -> Keys:
    param = rng.choice(["float32", "float32", "float32", "bfloat16", "bfloat16", "float16"])
    keys: Keys = {"precision__param": param}
    if float8:
        keys["precision__float8"] = rng.choice(["tensorwise", "rowwise", "rowwise_gw_hp"])
    if param != "float32":
        keys["precision__reduce"] = rng.choice(["float32", "float32", "bfloat16"])
    if param == "bfloat16" and rng.random() < 0.4:
        keys["precision__master"] = "bfloat16"
    if rng.random() < 0.2:
        keys["precision__optimizer_state"] = "bfloat16"
    return keys


def _memory(rng: random.Random, mesh: Keys, model: Keys, compiled: bool) -> Keys:
    mode = rng.choice(["none", "none", "full", "every_k", "selective", "budget"])
    twice = mesh.get("parallel__pp_schedule") in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    if (twice or compiled) and mode in ("selective", "budget") and rng.random() < 0.8:
        mode = "full"
    keys: Keys = {"activation_checkpoint__mode": mode}
    if mode == "every_k":
        keys["activation_checkpoint__every"] = rng.randint(1, model["model__n_layers"])
    if mode == "selective":
        keep = rng.choice([["matmul", "attention"], ["attention"], ["matmul"]])
        keys["activation_checkpoint__keep"] = keep
    if mode == "budget":
        keys["activation_checkpoint__budget"] = rng.choice([0.2, 0.5, 0.8])
    if compiled:
        keys["compile__mode"] = "block"
    elif rng.random() < 0.2:
        keys["activation_checkpoint__offload"] = True
    return keys


def _optimizer(rng: random.Random, keys: Keys) -> Keys:
    reduced = {"precision__master", "precision__optimizer_state"} & keys.keys()
    kinds = ["adamw", "adamw", "muon"]
    if "parallel__offload" in keys:
        kinds = kinds[:2]
    chosen: Keys = {"optimizer__name": rng.choice(kinds)}
    if chosen["optimizer__name"] == "adamw":
        chosen["optimizer__implementation"] = rng.choice(["fused", "foreach", "for-loop"])
        if not reduced and rng.random() < 0.25:
            chosen["optimizer__implementation"] = "fused"
            chosen["optimizer__offload"] = rng.choice(["cpu", "nvme"])
    elif rng.random() < 0.3:
        chosen["optimizer__muon_except"] = ["layers.*.attention.wo"]
    if rng.random() < 0.3:
        chosen["optimizer__lr_scale"] = rng.choice(LR_SCALES)
    if rng.random() < 0.2:
        chosen["optimizer__weight_decay_scale"] = ["norm=1"]
    return chosen


def command(ranks: int, keys: Keys) -> str:
    """What anybody can type to repeat a draw."""
    values = SMALL | {name.replace("__", "."): value for name, value in keys.items()}
    given = [
        f"--{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in values.items()
    ]
    return shlex.join(
        ["torchrun", "--nproc-per-node", str(ranks), "-m", "compose", "verify", "train.toml", *given]
    )


def problems_of(ranks: int, keys: Keys) -> list[str]:
    """The lines that refuse a draw; none where it is legal."""
    try:
        make_config(ranks, **keys)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=tier(slow=True, full=n >= IN_THE_SUITE)) for n in NUMBERS],
)
def test_equal_or_refused(pool: Pool, number: int) -> None:
    ranks, keys = draw(number)
    problems = problems_of(ranks, keys)
    if problems:
        assert all(problem and "\n" not in problem for problem in problems), problems
        return
    try:
        report = agreed(pool.run(prove_case, ranks, keys))
    except (AssertionError, TimeoutError) as error:
        raise AssertionError(f"{command(ranks, keys)}\n{error}") from None
    assert report.ok, f"{command(ranks, keys)}\n{report}"


def features(keys: Keys) -> set[str]:
    """What a draw has of what the draws should cover."""
    found = {f"{name}={value}" for name, value in keys.items() if name in _CHOICES}
    found |= {name for name, value in keys.items() if name in _SWITCHES and value}
    found |= {name for name in _DEGREES if keys[name] > 1}
    model = keys["model__name"]
    return found | {f"{model} with experts"} if keys.get("model__n_experts") else found | {model}


_DEGREES = [f"parallel__{axis}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")]
_SWITCHES = [
    "activation_checkpoint__offload",
    "comm__prefetch",
    "model__capacity_factor",
    "model__tie_embeddings",
    "optimizer__lr_scale",
    "optimizer__weight_decay_scale",
    "parallel__pp_layers",
    "parallel__zero3_reshard",
    "train__loss_chunk",
    "train__z_loss",
]
# Each with values that enough draws must have.
_CHOICES: dict[str, list[Any]] = {
    "activation_checkpoint__mode": ["none", "full", "every_k", "selective", "budget"],
    "compile__mode": ["block"],
    "optimizer__name": ["adamw", "muon"],
    "optimizer__offload": ["cpu", "nvme"],
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
_MODELS = ["llama", "qwen3", "qwen3 with experts", "deepseek_v3 with experts"]
AT_LEAST = 4


@pytest.mark.full
def test_draws_cover_what_there_is() -> None:
    drawn = [draw(number) for number in NUMBERS]
    legal = [(ranks, keys) for ranks, keys in drawn if not problems_of(ranks, keys)]
    assert len(drawn) == 200
    assert len(legal) >= 0.6 * len(drawn)
    assert {ranks for ranks, _ in legal} == {1, 2, 3, 4, 6, 8}
    assert all(ranks <= 4 for ranks, _ in drawn[:IN_THE_SUITE])
    count = Counter(feature for _, keys in legal for feature in features(keys))
    wanted = [f"{name}={value}" for name, values in _CHOICES.items() for value in values]
    wanted += [*_DEGREES, *_SWITCHES, *_MODELS]
    assert {name: count[name] for name in wanted if count[name] < AT_LEAST} == {}
