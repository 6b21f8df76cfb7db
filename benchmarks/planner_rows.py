"""Configurations drawn by a seed, for benchmarks/planner_memory.py: any mesh, model and technique."""

import math
import random
from pathlib import Path
from typing import Any

from compose.config import rules
from compose.config.job import Job
from compose.config.toml import load
from compose.errors import ConfigError

TRAIN = str(Path(__file__).parent.parent / "train.toml")
Keys = dict[str, Any]
_SCHEDULES = [
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]
_BY_HALVES = _SCHEDULES[4:]


def job_of(keys: Keys, ranks: int) -> Job:
    """Return the job of train.toml with the keys of a row. Raises ConfigError if it is refused."""
    return rules.check(load(TRAIN, [(key, _toml(value)) for key, value in keys.items()]), ranks)


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def draw(number: int) -> tuple[int, Keys, Job]:
    """Return the ranks, the keys and the job of a row; what is refused is drawn again."""
    rng = random.Random(number)
    while True:
        ranks = rng.choice([1, 2, 2, 2, 2, 3, 4, 4, 4, 6, 8])
        keys = _keys(rng, ranks)
        try:
            return ranks, keys, job_of(keys, ranks)
        except ConfigError:
            continue


def _keys(rng: random.Random, ranks: int) -> Keys:
    mesh = _mesh(rng, ranks)
    float8 = rng.random() < 0.1
    model = _model(rng, mesh, float8)
    return mesh | model | _step(rng, mesh) | _precision(rng, float8) | _memory(rng, mesh)


def _mesh(rng: random.Random, ranks: int) -> Keys:
    degrees: dict[str, int] = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}
    left = ranks
    for prime in (2, 2, 2, 3):
        if left % prime == 0:
            degrees[rng.choice(["pp", "pp", "dp_replicate", "dp_shard", "dp_shard", "cp", "tp"])] *= (
                prime
            )
            left //= prime
    keys: Keys = {f"parallel.{axis}": degree for axis, degree in degrees.items()}
    others = ranks // degrees["pp"]
    keys["parallel.ep"] = rng.choice([1, *(d for d in range(1, others + 1) if others % d == 0)])
    keys["parallel.zero"] = rng.choice([0, 1, 2, 3, 3, 3])
    if degrees["cp"] > 1:
        keys["parallel.cp_method"] = rng.choice(["ring", "allgather", "ulysses"])
        keys["parallel.cp_balance"] = rng.choice(["headtail", "none"])
    if degrees["tp"] > 1:
        keys["parallel.sequence"] = rng.random() < 0.6
        keys["parallel.loss"] = rng.random() < 0.6
    if degrees["pp"] > 1:
        keys["parallel.pp_schedule"] = rng.choice(_SCHEDULES)
        if keys["parallel.pp_schedule"] in _SCHEDULES[2:5]:
            keys["parallel.pp_virtual_stages"] = rng.choice([0, 2, 3])
    shared = degrees["dp_shard"] * degrees["cp"]
    if keys["parallel.zero"] == 3:
        near = [n for n in range(2, shared) if shared % n == 0]
        if near and rng.random() < 0.5:
            keys["parallel.zero3_reshard"] = rng.choice(near)
        if rng.random() < 0.15:
            keys["parallel.offload"] = "cpu"
    if rng.random() < 0.15:
        keys["comm.prefetch"] = rng.choice([1, 2])
    return keys


def _stages(mesh: Keys) -> int:
    if mesh["parallel.pp"] == 1:
        return 1
    usual = 1 if mesh["parallel.pp_schedule"] in ("GPipe", "1F1B") else 2
    return mesh["parallel.pp"] * (mesh.get("parallel.pp_virtual_stages") or usual)


def _model(rng: random.Random, mesh: Keys, float8: bool) -> Keys:
    """Sizes that no degree need divide; with float8, multiples of 16 on a tp rank."""
    tp, ep, stages = mesh["parallel.tp"], mesh["parallel.ep"], _stages(mesh)
    unit = 16 * tp if float8 else 1
    # Where there are experts to share, a model that has some.
    name = rng.choice(["llama", "llama", "qwen3", "moe", "deepseek_v3"][3 * (ep > 1) :])
    keys: Keys = {
        "model.name": "qwen3" if name == "moe" else name,
        # The planner's records leave out some of 10 equal layers.
        "model.n_layers": max(stages, 2) + rng.choice([0, 0, 1, 1, 2, 8 * (stages == 1)]),
        "model.hidden_dim": unit * rng.randint(8, 16) if float8 else rng.randint(150, 400),
        "model.vocab_size": rng.randint(400, 2500),
        "model.tie_embeddings": rng.random() < 0.3,
    }
    if name == "deepseek_v3":
        keys |= {
            "model.dim": unit * 4 if float8 else rng.choice([64, 90, 128]),
            "model.n_heads": tp * rng.choice([2, 3, 4]),
            "model.q_rank": rng.choice([0, 48]),
            "model.kv_rank": rng.choice([32, 48]),
            "model.nope_dim": 16,
            "model.rope_dim": 16,
            "model.v_dim": rng.choice([16, 32]),
            "model.n_dense_layers": rng.choice([0, 1, keys["model.n_layers"] // 2]),
            "model.n_shared_experts": rng.randrange(3),
        }
    else:
        kv_heads = rng.choice([1, tp, 2 * tp])
        heads = math.lcm(kv_heads, tp) * rng.choice([1, 2, 3])
        keys |= {"model.n_heads": heads, "model.n_kv_heads": kv_heads}
        if name == "llama":
            keys["model.dim"] = heads * max(16, -(-64 // heads // 16) * 16)
        else:
            keys["model.head_dim"] = 16
            keys["model.dim"] = unit * 4 if float8 else rng.choice([64, 90, 128])
    if name in ("moe", "deepseek_v3"):
        groups = rng.choice([1, 2])
        keys |= {
            "model.n_experts": groups * ep * rng.choice([2, 4]),
            "model.n_groups": groups,
            "model.top_groups": rng.randint(1, groups),
            "model.top_k": rng.choice([1, 2]),
            "model.expert_dim": unit * 4 if float8 else rng.choice([48, 64, 72, 100]),
            "model.scoring": rng.choice(["softmax", "sigmoid"]),
            "model.balance_loss": rng.choice(["batch", "sequence"]),
            "model.balance_weight": rng.choice([0.0, 0.1]),
            "model.z_weight": rng.choice([0.0, 0.01]),
            "model.bias_rate": rng.choice([0.0, 0.01]),
        }
    return keys


def _step(rng: random.Random, mesh: Keys) -> Keys:
    pp, cp, tp = (mesh[f"parallel.{axis}"] for axis in ("pp", "cp", "tp"))
    micro_batch, unit = rng.choice([1, 1, 2]), 2 * cp * tp
    count = rng.choice([1, 2, 3, 4]) if pp == 1 else pp * rng.choice([1, 2, 3])
    if mesh.get("parallel.pp_schedule") == "DualPipeV":
        count = 2 * pp
    return {
        "train.seq_len": unit * math.ceil(rng.randint(64, 160) * cp / unit),
        "train.micro_batch": micro_batch,
        "train.global_batch": (
            mesh["parallel.dp_replicate"] * mesh["parallel.dp_shard"] * micro_batch * count
        ),
        "train.loss_chunk": rng.choice([0, 0, 0, rng.randint(8, 40)]),
        "train.z_loss": rng.choice([0.0, 0.0, 1e-3]),
    }


def _precision(rng: random.Random, float8: bool) -> Keys:
    param = rng.choice(["float32", "float32", "bfloat16", "bfloat16"])
    keys: Keys = {"precision.param": param}
    if float8:
        keys["precision.float8"] = rng.choice(["tensorwise", "rowwise", "rowwise_gw_hp"])
    if param == "bfloat16":
        keys["precision.reduce"] = rng.choice(["float32", "float32", "bfloat16"])
        if rng.random() < 0.3:
            keys["precision.master"] = "bfloat16"
    if rng.random() < 0.2:
        keys["precision.optimizer_state"] = "bfloat16"
    return keys


def _memory(rng: random.Random, mesh: Keys) -> Keys:
    mode = rng.choice(["none", "none", "full", "every_k", "selective", "budget"])
    if mesh.get("parallel.pp_schedule") in _BY_HALVES and mode in ("selective", "budget"):
        mode = "full"
    keys: Keys = {"activation_checkpoint.mode": mode}
    if mode == "selective":
        keep = rng.choice(['["matmul", "attention"]', '["attention"]', '["matmul"]'])
        keys["activation_checkpoint.keep"] = keep
    if mode == "budget":
        keys["activation_checkpoint.budget"] = rng.choice([0.2, 0.5, 0.8])
    if rng.random() < 0.15:
        keys["activation_checkpoint.offload"] = True
    keys["optimizer.name"] = rng.choice(["adamw", "adamw", "adamw", "muon"])
    if keys["optimizer.name"] == "adamw":
        keys["optimizer.implementation"] = rng.choice(["fused", "fused", "foreach", "for-loop"])
        if rng.random() < 0.25:
            keys["optimizer.offload"] = rng.choice(["cpu", "nvme"])
    return keys
