"""Compositions drawn at random: meshes, models and keys of train.toml."""

import math
import random
import shlex
from dataclasses import dataclass
from typing import Any

from compose.compression.packing import FEWEST
from compose.errors import ConfigError
from tests.support.helpers import make_config, overrides

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_CODED = ("weights", "gradients", "activations")
Keys = dict[str, Any]

# Patterns that every model has.
LR_SCALES = (["layers.*.attention.wo=0.5"], ["layers.*.attention=2"], ["layers.0=0"])
WITH_EXPERTS = ["moe", "deepseek_v3", "mixtral", "gpt_oss"]
MODELS = ["llama", "qwen3", "gemma3", "gpt2", "dit", *WITH_EXPERTS]


@dataclass(frozen=True)
class Draw:
    """One composition."""

    ranks: int
    """Ranks of all islands."""
    keys: Keys
    """Keys of train.toml, as ``make_config`` takes them; most are legal."""
    trained: bool = False
    """Whether it is also trained for some steps."""

    @property
    def islands(self) -> int:
        return self.keys["parallel__dp_replicate"] if self.keys.get("outer__every") else 1

    @property
    def coded(self) -> bool:
        """Whether messages lose something, so that training is not that of one process."""
        return any(self.keys.get(f"comm__{key}", "off") != "off" for key in _CODED)

    @property
    def problems(self) -> list[str]:
        """The lines that refuse it; none where it is legal."""
        try:
            make_config(self.ranks, **self.keys)
        except ConfigError as error:
            return error.problems
        return []

    @property
    def command(self) -> str:
        """Anybody can type this to repeat it."""
        given = [f"--{name}={value}" for name, value in overrides(self.keys)]
        words = ["torchrun", "--nproc-per-node", str(self.ranks), "-m", "compose", "verify"]
        return shlex.join([*words, "train.toml", *given])


def draw(number: int, large: bool) -> Draw:
    """The composition of a number. Only ``large`` ones have more than 4 ranks, or compile.

    Every third is also trained. Every eighth has islands.
    """
    rng = random.Random(number)
    compiled = large and number % 20 == 7
    ranks = rng.choice([1, 2, 2, 3, 4, 4, 4, 6, 8, 8] if large else [1, 2, 2, 3, 4, 4])
    if compiled:  # each rank compiles for half a minute
        ranks = rng.choice([2, 2, 4])
    islands = 2 if number % 8 == 5 else 1
    inside = max(1, ranks // islands)
    mesh = _mesh(rng, inside, but="dp_replicate" if islands > 1 else "")  # islands are the replicas
    float8 = rng.random() < 0.2
    model = _model(rng, mesh, float8)
    keys = mesh | model | _step(rng, mesh, model, trained=number % 3 == 0) | _precision(rng, float8)
    keys |= _memory(rng, mesh, model, compiled)
    keys |= _optimizer(rng, keys)
    keys |= _comm(rng, keys)
    if rng.random() < 0.12:
        keys |= _lora(rng, keys)
    if islands > 1:
        keys |= _outer(rng, keys) | {"parallel__dp_replicate": islands}
        keys["train__global_batch"] *= islands
    return Draw(inside * islands, keys, number % 3 == 0)


def other_mesh(number: int, one: Draw) -> Draw:
    """The same training on another mesh, if a legal one is found, or on one process."""
    rng, most = random.Random(f"other {number}"), max(2, one.ranks)
    rest = {name: value for name, value in one.keys.items() if not _of_mesh(name)}
    for _ in range(50):
        ranks = rng.choice([n for n in (1, 2, 3, 4, 6, 8) if n <= most])
        result = Draw(ranks, rest | _mesh(rng, ranks))
        same = all(result.keys[f"parallel__{axis}"] == one.keys[f"parallel__{axis}"] for axis in AXES)
        if not same and not result.problems:
            return result
    return one_process(one)


def one_process(one: Draw) -> Draw:
    """The same training on one rank."""
    rest = {name: value for name, value in one.keys.items() if not _of_mesh(name)}
    return Draw(1, rest | {f"parallel__{axis}": 1 for axis in AXES})


def _of_mesh(name: str) -> bool:
    return name.startswith(("parallel__", "comm__", "compile__"))


def _mesh(rng: random.Random, ranks: int, but: str = "") -> Keys:
    degrees: dict[str, int] = dict.fromkeys(AXES, 1)
    left = ranks
    for prime in (2, 2, 2, 3):
        if left % prime == 0:
            degrees[rng.choice([axis for axis in AXES if axis != but])] *= prime
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
    name = rng.choice(MODELS if ep == 1 else WITH_EXPERTS)
    keys: Keys = {
        "model__name": "qwen3" if name == "moe" else name,
        # With few layers float8 converts none.
        "model__n_layers": max(stages - 2 + rng.randrange(3), 4 if float8 else 1),
    }
    if name not in ("mixtral", "gpt_oss"):
        keys["model__hidden_dim"] = unit * rng.randint(2, 5) if float8 else rng.randint(20, 70)
    if name != "dit":
        keys["model__vocab_size"] = rng.randint(40, 130)
        keys["model__tie_embeddings"] = rng.random() < 0.4
    if stages > 1 and rng.random() < 0.2:
        keys["parallel__pp_layers"] = _cut(rng, keys["model__n_layers"], stages)
    keys |= _attention(rng, name, tp, unit, float8)
    if name == "deepseek_v3":
        keys["model__n_dense_layers"] = rng.randrange(keys["model__n_layers"] + (ep == 1))
        keys["model__n_shared_experts"] = rng.randrange(3)
    if name in WITH_EXPERTS:
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
        if keys["model__top_k"] == 1 and keys["model__normalize_weights"]:
            # The weight is always 1. Without a loss of its own the router would not be trained.
            keys["model__balance_weight"] = 0.1
    return keys


def _attention(rng: random.Random, name: str, tp: int, unit: int, float8: bool) -> Keys:
    """The model's width, its heads, and what else its attention has."""
    width = unit * rng.choice([1, 2]) if float8 else rng.choice([17, 24, 36])
    kv_heads = rng.choice([1, tp, 2 * tp])
    heads = math.lcm(kv_heads, tp) * rng.choice([1, 2, 3])
    head_dim = 16 if float8 else rng.choice([4, 6, 10])
    window = rng.choice([0, 5, 16])
    if name == "deepseek_v3":
        width_of_head = 16 if float8 else 4
        return {
            "model__dim": width,
            "model__n_heads": tp * rng.choice([1, 2, 3]),
            "model__q_rank": rng.choice([0, width_of_head, 3 * width_of_head]),
            "model__kv_rank": width_of_head * rng.choice([1, 3]),
            "model__nope_dim": width_of_head,
            "model__rope_dim": width_of_head,
            "model__v_dim": width_of_head * rng.choice([1, 2]),
        }
    if name == "gpt2":
        return {
            "model__n_heads": heads,
            "model__dim": heads * head_dim,
            "model__max_seq_len": rng.choice([44, 64]),
        }
    if name == "dit":
        return {
            "model__n_heads": heads,
            "model__dim": heads * (16 if float8 else rng.choice([4, 8])),
            "model__image_size": 2 * rng.choice([3, 4, 4, 5]),
            "model__channels": rng.choice([1, 3]),
        }
    keys: Keys = {"model__n_heads": heads, "model__n_kv_heads": kv_heads}
    if name in ("llama", "mixtral"):
        keys["model__dim"] = heads * head_dim
    else:
        keys |= {"model__head_dim": head_dim, "model__dim": width}
    if name in ("mixtral", "gpt_oss", "gemma3"):
        keys["model__window"] = window or (0 if name == "mixtral" else 64)
    if name == "gpt_oss":
        keys["model__layer_pattern"] = rng.choice(["wf", "w", "f"])
        keys["model__swiglu_limit"] = rng.choice([7.0, 1.0])
    if name == "gemma3":
        keys["model__global_every"] = rng.choice([1, 2, 3])
        keys["model__attention_softcap"] = rng.choice([0.0, 0.0, 20.0])
        keys["model__final_softcap"] = rng.choice([0.0, 0.0, 10.0])
    return keys


def _cut(rng: random.Random, layers: int, stages: int) -> list[int]:
    """One for each stage between the ends, and the others anywhere."""
    cut = [0, *[1] * (stages - 2), 0]
    for _ in range(layers - sum(cut)):
        cut[rng.randrange(stages)] += 1
    return cut


def _step(rng: random.Random, mesh: Keys, model: Keys, trained: bool) -> Keys:
    pp, tp = mesh["parallel__pp"], mesh["parallel__tp"]
    micro_batch = 1 if trained else rng.choice([1, 1, 2, 3])
    count = rng.choice([1, 2, 3]) if pp == 1 else pp * rng.choice([1, 2])
    if mesh.get("parallel__pp_schedule") == "DualPipeV":
        count = 2 * pp
    seq_len = rng.randint(9, 40)
    if tp > 1 and rng.random() < 0.9:  # else what does not divide is refused, or goes
        seq_len = (seq_len // tp + 1) * tp
    if "model__image_size" in model:
        seq_len = (model["model__image_size"] // 2) ** 2
    data_ranks = mesh["parallel__dp_replicate"] * mesh["parallel__dp_shard"]
    samples = data_ranks * micro_batch * count
    keys: Keys = {
        "train__seq_len": seq_len,
        "train__micro_batch": micro_batch,
        # Another mesh should be able to share them.
        "train__global_batch": math.lcm(samples, 4) if trained else samples,
        "train__seed": rng.randrange(1000),
        "train__max_norm": rng.choice([0.0, 1.0, 1.0, 1.0]),
    }
    if "model__image_size" not in model:
        keys["train__loss_chunk"] = rng.choice([0, 0, 0, rng.randint(1, 50)])
        keys["train__z_loss"] = rng.choice([0.0, 0.0, 0.0, 1e-3])
    return keys


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
        keep = rng.choice([["matmul", "attention", "messages"], ["attention"], ["matmul"]])
        keys["activation_checkpoint__keep"] = keep
    if mode == "full":
        # A generator of its own, so that what is drawn after it stays as it was.
        keys["activation_checkpoint__segment"] = random.Random(str(mesh)).choice([1, 1, 2])
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
        chosen["optimizer__weight_decay_scale"] = ["layers.0=1"]
    return chosen


def _comm(rng: random.Random, keys: Keys) -> Keys:
    """Messages in fewer bits, on 2 of 5 meshes that send any."""
    if rng.random() < 0.6:
        return {}
    copies, parts = keys["parallel__dp_replicate"], keys["parallel__dp_shard"] * keys["parallel__cp"]
    if keys["parallel__zero"] == 0:
        copies, parts = copies * parts, 1
    results: Keys = {}
    if copies * parts > 1:
        kinds = ["off", "bfloat16", "int8", "int4", "powersgd", "top_k"]
        results["comm__gradients"] = rng.choice(kinds)
    if parts > 1 and keys.get("precision__float8") != "tensorwise":
        alone = "parallel__offload" in keys or "parallel__zero3_reshard" in keys
        results["comm__weights"] = rng.choice(
            ["off", "int8"] if alone else ["off", "int8", "int4_diff"]
        )
    tp, ep = keys["parallel__tp"], keys["parallel__ep"]
    if max(tp, ep) > 1 and (tp == 1 or "precision__float8" not in keys):
        results["comm__activations"] = rng.choice(["off", "int8", "float8"])
    if set(results.values()) <= {"off"}:
        return {}
    gradients, weights = results.get("comm__gradients", "off"), results.get("comm__weights", "off")
    results["comm__block"] = rng.choice([16, 64, 256])
    if "model__vocab_size" in keys and {gradients, weights} != {"off"}:
        # Small parameters travel plain: in a tiny model no key of [comm] would take part.
        enough = math.ceil(FEWEST * tp / keys["model__dim"])
        results["model__vocab_size"] = max(keys["model__vocab_size"], enough)
    if gradients in ("int4", "powersgd", "top_k"):
        results["comm__error_feedback"] = rng.random() < 0.7
    if gradients == "powersgd":
        results["comm__rank"] = rng.choice([1, 2, 4])
    if gradients == "top_k":
        results["comm__density"] = rng.choice([0.05, 0.3])
    if gradients != "off":
        results["comm__start_step"] = rng.choice([0, 0, 1])
        results["comm__measure_every"] = rng.choice([0, 0, 1])
    level = copies == 1 or keys["parallel__zero"] == 0
    if level and (gradients in ("bfloat16", "int8", "int4") or weights == "int4_diff"):
        ranks = copies * parts
        near = rng.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
        if near < ranks:  # else there is one level
            results["comm__near"] = near
    # Shards send int8 where replicas send less; else these have no blocks.
    plain = weights == results.get("comm__activations", "off") == "off" and min(copies, parts) == 1
    if plain and gradients in ("powersgd", "top_k"):
        del results["comm__block"]
    return results


def _lora(rng: random.Random, keys: Keys) -> Keys:
    targets = ["layers.*.attention.w*"]
    if "model__hidden_dim" in keys and "model__n_experts" not in keys and rng.random() < 0.5:
        targets.append("layers.*.feed_forward.w*")
    results: Keys = {"model__lora__rank": rng.choice([1, 2, 3]), "model__lora__targets": targets}
    return results | ({"model__bias_rate": 0.0} if "model__bias_rate" in keys else {})


def _outer(rng: random.Random, keys: Keys) -> Keys:
    """Islands, of ranks that ``keys`` have."""
    layers = keys["model__n_layers"]
    fragments = rng.choice([0, 1, 2])
    count = math.ceil(layers / fragments) if fragments else 1
    between = rng.choice([1, 2])
    results: Keys = {
        "outer__every": count * between,
        "outer__fragments": fragments,
        "outer__delay": rng.randrange(between),
        "outer__mix": rng.choice([0.0, 0.5]),
        "outer__momentum": rng.choice([0.0, 0.9]),
        "outer__lr": rng.choice([0.0, 0.7]),
        "outer__dtype": rng.choice(["float32", "bfloat16", "int8", "e3m0", "top_k"]),
        "outer__offload": rng.random() < 0.5,
    }
    if results["outer__dtype"] == "top_k":
        results["outer__density"] = rng.choice([0.0625, 0.25])
    return results
