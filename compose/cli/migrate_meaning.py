"""Reads what several keys of another trainer mean together: batch, steps, schedule, precision, ZeRO.

Each function takes facts, as ``train.steps~samples``, and puts our keys in their place.
"""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from compose.cli.migrate_files import shown
from compose.cli.migrate_tables import KnownValue, KnownValues, TrainerTable
from compose.errors import toml_value

BATCH, MICRO = "train.global_batch", "train.micro_batch"
CURVES = ("cosine", "linear")
_AUTO = "from TrainingArguments, which were not given"
# Keys that are left out, by the key and its values with which they would be read.
_READ_WITH: Mapping[str, tuple[str, ...]] = {
    "parallel.pp_virtual_stages": ("parallel.pp",),
    "parallel.cp_method": ("parallel.cp",),
    "parallel.cp_balance": ("parallel.cp",),
    "parallel.sequence": ("parallel.tp",),
    "activation_checkpoint.every": ("activation_checkpoint.mode", "every_k"),
    "activation_checkpoint.segment": ("activation_checkpoint.mode", "full"),
}
# Keys that another program reads if something else is there too.
_SWITCHED = {"precision.float8": "its converter", "model.n_kv_heads": "--group-query-attention"}


def work_out(facts: KnownValues, tables: Mapping[str, TrainerTable], world: int, steps: int) -> int:
    """Put our keys in the place of facts; return the number of ranks, 0 if nobody says it."""
    filled = "training_arguments" in tables
    if filled:  # a schedule that DeepSpeed does not name is that of TrainingArguments
        facts.left |= {"optimizer.schedule", "optimizer.warmup~kind"}
    if facts.auto and not filled:
        named = " ".join([*facts.auto.values(), BATCH if MICRO in facts.auto.values() else ""])
        # Without a scheduler here, theirs is that of TrainingArguments too.
        named += "" if "optimizer.warmup~given" in facts else " optimizer.schedule"
        facts.waiting = dict.fromkeys(set(named.split()) - set(facts.values), f"auto: {_AUTO}")
    for key, other in _SWITCHED.items():
        if f"{key}~value" in facts and not facts.get(f"{key}~on"):
            facts.changed(f"is read with {other} alone", f"{key}~value")
    _switched_on(facts)
    for title, program in facts.programs.items():
        _defaults(facts, title, program["defaults"], set())
        for key, *others in map(str.split, program["set"]):
            if not {key, *others} & {*facts.values, *facts.waiting}:
                facts.waiting[key] = f"{title} has a default of its own"
                facts.note("to set", f"{key}: no file says it, and {facts.waiting[key]}")
    for name, table in tables.items():
        left = facts.left if name != "training_arguments" else set[str]()
        more = [rows for key, rows in table.defaults_with.items() if key in facts]
        for rows in (table.defaults, *more):
            _defaults(facts, table.title, rows, left, table.default_notes)
    _switched_on(facts)
    _options(facts)
    _model(facts, tables.values())
    world = _ranks(facts, world)
    _batch(facts, world)
    _steps(facts, steps)
    _schedule(facts)
    _precision(facts, world)
    _zero(facts)
    for key in [key for key in facts.values if "~" in key]:
        facts.pop(key)
    for where, keys in facts.auto.items():
        free = [key for key in keys.split() if key not in facts]
        if filled:
            facts.note("mapped", f"{where} = auto: by TrainingArguments")
        elif free:
            facts.note("to set", f"{where} = auto: {_AUTO}; set {', '.join(free)}")
        else:
            facts.note("not needed", f"{where} = auto: {_AUTO}, and nothing here waits for it")
    for key in sorted(set(facts.waiting) - set(facts.values)):
        facts.values[key] = KnownValue(None, facts.waiting[key])
    return world


def _switched_on(facts: KnownValues) -> None:
    """Set each KEY that KEY~on switches on to KEY~value, unless a file sets it."""
    for key in [name.removesuffix("~on") for name in facts.values if name.endswith("~on")]:
        if facts.get(f"{key}~on") and f"{key}~value" in facts and key not in facts:
            facts.put(key, facts.get(f"{key}~value"), f"{key}~on", f"{key}~value")


def _defaults(
    facts: KnownValues,
    title: str,
    rows: Mapping[str, Any],
    left: set[str],
    notes: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Set what no file says to a program's default; those in ``left`` are another program's."""
    for key, value in rows.items():
        both = ("train.steps", "train.epochs") if key in ("train.steps", "train.epochs") else (key,)
        if not any(name in facts for name in both) and key not in {*facts.waiting, *left}:
            facts.put(key, value, text=f"{title}'s default")
            if key in notes:
                facts.changed(notes[key], key)


def _options(facts: KnownValues) -> None:
    """Put keys in the place of facts of one table each."""
    given = {*facts.values, *facts.left}
    if facts.get("optimizer.warmup~given") == "WarmupLR" and "optimizer.lr~instead" not in given:
        text = "scheduler.params.warmup_max_lr is in no file; it is optimizer.params.lr in new"
        text += " DeepSpeed, and 0.001 in old, whatever optimizer.params.lr is: set optimizer.lr"
        facts.changed(text, "optimizer.warmup~given")
    for name in [name for name in facts.values if name.endswith("~instead")]:
        facts.put(name.removesuffix("~instead"), facts.get(name), name)
    if not facts.get("model.lora.rank"):
        for key in [key for key in facts.values if key.startswith("model.lora.")]:
            facts.pop(key)
    if facts.get("dpo.beta") and "train.seq_len" in facts:
        text = "a sample has both replies of a pair, each with its prompt"
        facts.put("train.seq_len", 2 * facts.get("train.seq_len"), text=text)
    if facts.get("data.packed~") is False and not facts.get("dpo.beta"):
        text = "without packing a sample is one chat, and here as many as fit into train.seq_len:"
        facts.changed(f"{text} of chats, train.global_batch has more")
    if facts.get("dpo.beta") and facts.get("model.lora.dropout"):
        text = "dpo.beta goes without dropout, here and in TRL; it is left out"
        facts.changed(text, "model.lora.dropout")
        facts.pop("model.lora.dropout")
    every = facts.get("metrics.console_every~steps", 0)
    if every >= 1:  # below it is a part of all steps
        facts.put("metrics.console_every", int(every), "metrics.console_every~steps")
    load = facts.get("checkpoint.load_hf~raw", True)  # a flag alone names nothing
    if load is not True and (
        "checkpoint.load_hf~finetune" in facts or load != facts.get("run.dir~raw")
    ):
        text = "weights are drawn until checkpoint.load_hf names these as a Hugging Face folder"
        facts.note("to set", f"{shown(load)}: {text}", "checkpoint.load_hf~raw")
    if facts.get("comm.timeout", 0) > 1800:
        facts.put("comm.start_timeout", facts.get("comm.timeout"), text="at least comm.timeout")
    stages, layers = facts.get("parallel.pp_virtual_stages~layers"), facts.get("model.n_layers")
    if stages and layers:
        each = max(1, layers // facts.get("parallel.pp", 1) // stages)
        facts.put("parallel.pp_virtual_stages", each, "parallel.pp_virtual_stages~layers")
    for key, (other, *values) in _READ_WITH.items():
        if facts.get(other, 1) == 1 or (values and facts.get(other) not in values):
            facts.pop(key)
    if facts.get("optimizer.warmup~given") and "optimizer.warmup~type" not in facts:
        text = "warm-up is along a logarithm, by default; nearest:"
        text += ' scheduler.params.warmup_type = "linear"'
        kind = "changed in meaning" if "optimizer.warmup" in facts.waiting else "refused"
        facts.note(kind, text, "optimizer.warmup~given")


def _model(facts: KnownValues, tables: Iterable[TrainerTable]) -> None:
    name, flavor = facts.get("model.name~name", ""), facts.get("model.preset~flavor", "")
    for table in (table for table in tables if name and table.models):
        known = {key.lower(): shape for key, shape in table.models.items()}
        shape = known.get(f"{name} {flavor}".lower().replace("-", "_"))
        if shape is None:
            names = ", ".join(dict.fromkeys(key.split()[0] for key in table.models))
            text = f"{name} {flavor} is no model here (known: {names})"
            text += "; docs/new-architecture.md says how to add one"
            facts.note("refused", text, "model.name~name")
        for key, value in (shape or {}).items():
            if f"model.{key}" not in facts:
                facts.put(f"model.{key}", value, "model.name~name", "model.preset~flavor")
    if all(f"model.{key}" in facts for key in ("n_layers", "dim", "n_heads")):
        _shape(facts)
    lost = any(key.startswith("model.n_") for key in facts.values) and "model.name" not in facts
    if lost or ("model.experts~" in facts and not name):
        facts.changed("the model's name and shape are not taken over; set model.name and its fields")
        for key in [key for key in facts.values if key.startswith("model.")]:
            facts.pop(key)


def _shape(facts: KnownValues) -> None:
    """Name the model that has the parts that the flags of Megatron-LM name."""
    parts = ("norm", "positions", "gated", "bias", "learnt", "exact")
    norm, positions, gated, bias, learnt, exact = (facts.pop(f"model.{part}~") for part in parts)
    gelu = "gelu" if bias or exact else "gelu_tanh"  # that which Megatron-LM fuses with a bias
    dim = facts.get("model.dim", 0)
    narrow = facts.get("model.head_dim") in (None, dim / facts.get("model.n_heads"))  # as in GPT-2
    if not gated:
        facts.values.setdefault("model.hidden_dim", facts.values["model.dim"]._replace(value=4 * dim))
    if positions == "rope":
        facts.put("model.name", "llama", "model.n_layers")
        facts.put("model.norm", "rms" if norm == "RMSNorm" else "layer", text="--normalization")
        facts.put("model.ffn_gated", bool(gated), text="--swiglu")
        facts.put("model.activation", "silu" if gated else gelu, text="--swiglu")
        for key in ("wo_bias", "ffn_bias") if bias else ("wo_bias", "ffn_bias", "qkv_bias"):
            facts.put(f"model.{key}", not bias, text="--disable-bias-linear")
        facts.values.setdefault("model.n_kv_heads", facts.values["model.n_heads"])
        if "model.tie_embeddings" not in facts:
            text = "Megatron-LM ties without --untie-embeddings-and-output-weights"
            facts.put("model.tie_embeddings", True, text=text)
        if "model.hidden_dim" not in facts:  # Megatron-LM's default with --swiglu
            facts.put("model.hidden_dim", int(4 * dim * 2 / 3 / 64) * 64, text="--swiglu")
    elif norm == "LayerNorm" and not gated and not bias and narrow:  # GPT-2's layers have biases
        facts.put("model.name", "gpt2", "model.n_layers")
        if exact:
            facts.put("model.activation", gelu, text="--no-bias-gelu-fusion")
        if length := learnt or facts.get("train.seq_len"):
            facts.put("model.max_seq_len", length, text="--max-position-embeddings")
        for key in ("model.rope_theta", "model.head_dim", "model.qkv_bias"):
            facts.pop(key)
    else:
        facts.put("model.experts~", True, "model.n_layers")
        return
    if "model.vocab_size" not in facts:
        size = 50304 if facts.get("model.name") == "gpt2" else 32000
        facts.put("model.vocab_size", size, text="assumed")
        facts.changed("--vocab-size is that of the tokenizer; model.vocab_size is assumed, set it")


def _product(facts: KnownValues, *axes: str) -> int:
    """Return the ranks along some axes of the mesh."""
    return math.prod(facts.get(f"parallel.{axis}", 1) for axis in axes)


def _ranks(facts: KnownValues, given: int) -> int:
    """Return the number of ranks, and set the degrees of data parallel."""
    one, machines = facts.pop("world~per_machine"), facts.pop("world~machines", 1)
    world = given or facts.pop("world~processes") or (one * machines if one else 0)
    inner = _product(facts, "tp", "cp", "pp")
    micro, times = facts.get(MICRO), facts.get(f"{BATCH}~accumulation")
    if not world and micro and times and facts.get(BATCH, 0) % (micro * times) == 0:
        world = facts.get(BATCH, 0) // (micro * times) * inner
    if world % inner:
        axes = " x ".join(f"{axis} {_product(facts, axis)}" for axis in ("tp", "cp", "pp"))
        near = max(1, round(world / inner)) * inner
        line = f"--world-size: {world} is not a multiple of {axes} = {inner}; nearest: {near}"
        facts.note("refused", line)
    if facts.pop("parallel.dp_replicate~hybrid") and "parallel.dp_replicate" not in facts:
        facts.put("parallel.dp_replicate", machines, text="one replica for each machine")
    if mics := facts.pop("parallel.dp_shard~group"):
        replicas = max(1, world // inner // mics)
        facts.put("parallel.dp_shard", mics, text="its shards")
        facts.put("parallel.dp_replicate", replicas, text="the rest of the ranks")
    return world


def _batch(facts: KnownValues, world: int) -> None:
    """Work out global_batch = micro_batch x accumulation x ranks of data parallel."""
    inner = _product(facts, "tp", "cp", "pp")
    if local := facts.get(f"{MICRO}~per_rank"):
        part = facts.get(f"{MICRO}~microbatch", 1)
        pipelined = facts.get("parallel.pp", 1) > 1
        facts.put(MICRO, min(part, local) if pipelined else local, f"{MICRO}~per_rank")
        if facts.get(BATCH, -1) == -1:
            facts.pop(BATCH)
            facts.put(f"{BATCH}~accumulation", local // facts.get(MICRO), MICRO)
    micro, given, whole = facts.get(MICRO), facts.get(f"{BATCH}~accumulation"), facts.get(BATCH)
    if not (micro or whole) or world % inner or facts.waiting.keys() & {MICRO, BATCH}:
        return
    ranks = world // inner
    if not ranks:
        if not whole or not micro:
            text = "train.global_batch follows from it, and the number of ranks is in no file;"
            facts.note("refused", f"{text} give --world-size N", MICRO if micro else BATCH)
        return
    if not whole:
        text = f"micro-batch {micro} x accumulation {given or 1} x {ranks} ranks"
        facts.put(BATCH, micro * (given or 1) * ranks, f"{BATCH}~accumulation", text=text)
        return
    unit = ranks * (given or 1)
    if not micro and whole % unit == 0:
        facts.put(MICRO, whole // unit, BATCH, text=f"over {ranks} ranks")
    elif not micro:
        near = max(1, round(whole / unit)) * unit
        line = f"{whole} is not a multiple of {ranks} ranks x accumulation {given or 1}"
        facts.note("refused", f"{line}; nearest: {near}", BATCH)
    elif whole % (micro * unit) or (given and whole != micro * unit):
        near = micro * ranks * (given or max(1, round(whole / (micro * ranks))))
        line = f"{whole} is not micro-batch {micro}{f' x accumulation {given}' if given else ''} x"
        text = f"{line} {ranks} ranks of data parallel; nearest: {near}"
        facts.note("refused", text, BATCH)


def _steps(facts: KnownValues, given: int) -> None:
    batch = facts.get(BATCH)
    whole = {"train.steps~schedule": "schedule", "optimizer.decay~schedule": "decay"}
    for key in ("train.steps", "optimizer.warmup~warmup", *whole):
        samples = facts.pop(f"{key}~samples" if "~" not in key else f"{key}_samples")
        if samples and batch:
            count = samples // batch if key == "train.steps" else samples / batch
            if key in whole and count != int(count):
                text = f"the {whole[key]} of {samples} samples has {count:g} steps, and ours are whole:"
                count = max(1, round(count))
                facts.changed(f"{text} {count}")
            facts.put(key, int(count) if count == int(count) else count, text=f"{samples} samples")
    if given:
        facts.pop("train.epochs")
        facts.put("train.steps", given, text="--steps")
    if facts.get("train.steps", 0) == -1:
        facts.pop("train.steps")
    if "train.steps" not in facts and "train.steps~schedule" in facts and "train.epochs" not in facts:
        facts.put("train.steps", facts.get("train.steps~schedule"), "train.steps~schedule")
    if "train.steps" in facts:
        facts.pop("train.epochs")


def _schedule(facts: KnownValues) -> None:
    """Work out the learning rate's schedule, which other trainers begin at other steps."""
    lr, kind = facts.get("optimizer.lr"), facts.get("optimizer.warmup~kind", "")
    lowest = facts.pop("optimizer.min_lr~absolute")
    if lowest is not None and lr:
        facts.put("optimizer.min_lr", lowest / lr, text=f"{lowest:g} of {lr:g}")
    elif lowest:
        facts.note("to set", f"optimizer.min_lr: {lowest:g} as a part of optimizer.lr")
    if "optimizer.warmup~off" in facts:
        facts.put("optimizer.warmup~warmup", 0, "optimizer.warmup~off")
        facts.pop("optimizer.warmup~ratio")
    wsd = facts.pop("optimizer.decay~wsd")
    if kind == "megatron" and not wsd and "optimizer.decay~schedule" in facts:
        facts.changed("is read with --lr-decay-style WSD alone", "optimizer.decay~schedule")
        facts.pop("optimizer.decay~schedule")
    if wsd and not facts.pop("optimizer.decay~linear"):
        text = "the decay at the end is exponential by default, and linear here; nearest:"
        facts.note("refused", f"{text} --lr-wsd-decay-style linear", "optimizer.schedule")
    if not kind or facts.waiting.keys() & {"optimizer.warmup", "optimizer.schedule", "train.steps"}:
        return
    steps = facts.get("train.steps~schedule") or facts.get("train.steps", 0)
    warmup, ratio = facts.get("optimizer.warmup~warmup", 0), facts.get("optimizer.warmup~ratio", 0)
    if 0 < warmup < 1 and kind != "megatron":
        warmup, ratio = 0, warmup
    if ratio and not warmup:
        if not steps:
            text = f"{ratio:g} of the steps, and the steps follow from the data; give --steps N"
            names = [f"optimizer.warmup~{each}" for each in ("ratio", "warmup")]
            facts.note("refused", text, next(name for name in names if name in facts))
            return
        warmup = math.ceil(ratio * steps) if kind == "zero" else round(ratio * steps, 6)
    whole = max(1, round(warmup)) if warmup else 0  # of a shorter one the first step has a rate of 0
    if warmup != whole:
        facts.changed(f"warm-up is {warmup:g} steps, and ours are whole: {whole}")
    warmup, curve = whole, facts.get("optimizer.schedule", "linear")
    decay, end = facts.get("optimizer.decay~schedule", 0), facts.get("train.steps~schedule", 0)
    share = facts.get("optimizer.decay~ratio")
    if share is not None:
        decay = round(steps * share)
    began = -1  # the rate that the first step has is not 0
    if kind in ("zero", "megatron"):
        began = 0 if warmup else -1
    elif kind == "torchtitan":
        whole = min(warmup, steps)
        warmup, decay = max(0, whole - 1), min(steps if share is None else decay, steps - whole)
        curve = curve if decay else "constant"
    elif kind == "deepspeed":
        warmup, began = max(2, warmup) + 1, 1
        if curve == "cosine":
            facts.changed("its cosine begins a step before the warm-up ends", "optimizer.schedule")
        end = steps + 1 if curve == "linear" else end
    facts.put("optimizer.schedule", curve)
    facts.put("optimizer.warmup", warmup, "optimizer.warmup~warmup", "optimizer.warmup~ratio")
    if began != -1:
        facts.put("optimizer.warmup_from", began, text="its first step has a rate of 0")
    if decay and curve in (*CURVES, "constant"):
        names = ("optimizer.decay~ratio", "optimizer.decay~schedule")
        text = "the steps after warmup" if share is None else ""
        facts.put("optimizer.decay", decay, *names, text=text)
    if end and end != facts.get("train.steps") and (curve in CURVES or decay):
        facts.put("optimizer.decay_end", end, "train.steps~schedule", text="the end of its schedule")


def _precision(facts: KnownValues, world: int) -> None:
    kind, param = facts.pop("precision.reduce~kind"), facts.get("precision.param", "float32")
    if param == "float32":
        return
    if kind == "torchtitan":
        shards = facts.get("parallel.dp_shard", -1) * facts.get("parallel.cp", 1)
        if shards < 0:
            shards = world // _product(facts, "tp", "pp", "dp_replicate") if world else 2
        if shards == 1 and _product(facts, "tp", "pp") > 1:
            facts.put("precision.param", "float32")
            text = "torchtitan has mixed precision with FSDP alone, so that this run is in float32"
            facts.changed(text, "precision.param")
    elif kind == "param" and facts.get("parallel.zero", 3) > 0 and "precision.reduce" not in facts:
        facts.put("precision.reduce", "float32" if param == "float16" else param, "precision.param")
        if param == "float16":
            facts.changed("gradients are reduced in float32, not in float16", "precision.param")


def _zero(facts: KnownValues) -> None:
    if facts.get("parallel.zero~distributed") and not facts.get("parallel.zero"):
        facts.put("parallel.zero", 1, "parallel.zero~distributed")
    elif "parallel.zero~distributed" in facts and "parallel.zero" not in facts:
        facts.put("parallel.zero", 0, text="without --use-distributed-optimizer")
    if facts.pop("parallel.zero~reshard") is False and facts.get("parallel.zero") == 3:
        facts.put("parallel.zero", 2, text="weights stay whole after forward")
    stage, offload = facts.get("parallel.zero"), facts.get("parallel.offload~param")
    if offload and stage == 3:
        facts.put("parallel.offload", offload, "parallel.offload~param")
        if not facts.pop("optimizer.offload"):
            facts.changed("gradients and the optimizer are in host memory too", "parallel.offload")
    elif offload:
        text = f"offloads parameters, which needs stage 3 here and there; at stage {toml_value(stage)}"
        facts.changed(f"{text} it is left out")
    if facts.get("optimizer.weight_decay", 0) == 0 and "optimizer.weight_decay" not in facts.waiting:
        facts.pop("optimizer.weight_decay_scale")
