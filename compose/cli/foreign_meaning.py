"""Reads what several keys of another trainer mean together: batch, steps, schedule, precision, ZeRO.

Each function takes facts, as ``train.steps~samples``, and puts our keys in their place.
"""

import math
from collections.abc import Mapping
from typing import Any

from compose.cli.foreign import Fact, Facts
from compose.errors import toml_value

BATCH, MICRO = "train.global_batch", "train.micro_batch"
CURVES = ("cosine", "linear")
_AUTO = "from TrainingArguments, which were not given"
_BETAS = {"optimizer.betas": "optimizer.beta1 optimizer.beta2"}


def work_out(facts: Facts, tables: Mapping[str, Mapping[str, Any]], world: int, steps: int) -> int:
    """Put our keys in the place of facts; return the number of ranks, 0 if nobody says it."""
    filled = "training_arguments" in tables
    facts.auto = {where: _BETAS.get(key, key) for where, key in facts.auto.items()}
    if facts.auto and not filled:
        named = " ".join([*facts.auto.values(), BATCH if MICRO in facts.auto.values() else ""])
        # Without a scheduler here, theirs is that of TrainingArguments too.
        named += "" if "optimizer.warmup~given" in facts else " optimizer.schedule"
        facts.waiting = set(named.split()) - set(facts.values)
    for table in tables.values():
        more = [rows for key, rows in table.get("defaults_with", {}).items() if key in facts]
        for key, value in [
            pair for rows in (table.get("defaults", {}), *more) for pair in rows.items()
        ]:
            both = ("train.steps", "train.epochs") if key in ("train.steps", "train.epochs") else (key,)
            if not any(name in facts for name in both) and key not in facts.waiting:
                facts.put(key, value, text=f"{table['title']}'s default")
                if key in table.get("default_notes", {}):
                    facts.note("changed in meaning", table["default_notes"][key], key)
    _options(facts)
    _model(facts, [table for table in tables.values() if "models" in table])
    world = _ranks(facts, world)
    _batch(facts, world)
    _steps(facts, steps)
    _schedule(facts)
    _precision(facts, world)
    _zero(facts)
    for key in [key for key in facts.values if "~" in key]:
        facts.values.pop(key)
    for where, keys in facts.auto.items():
        free = [key for key in keys.split() if key not in facts]
        if filled:
            facts.note("mapped", f"{where} = auto: by TrainingArguments")
        elif free:
            facts.note("to set", f"{where} = auto: {_AUTO}; set {', '.join(free)}")
        else:
            facts.note("not needed", f"{where} = auto: {_AUTO}, and nothing here waits for it")
    for key in sorted(facts.waiting - set(facts.values)):
        facts.values[key] = Fact(None, f"auto: {_AUTO}")
    return world


def _options(facts: Facts) -> None:
    """Put keys in the place of facts of one table each."""
    pair = facts.pop("optimizer.betas~pair") or ()
    for key, beta in zip(("optimizer.beta1", "optimizer.beta2"), pair, strict=False):
        facts.put(key, beta, text="betas")
    if "optimizer.lr~peak" in facts:
        facts.put("optimizer.lr", facts.get("optimizer.lr~peak"), "optimizer.lr~peak")
    for key, on in (
        ("checkpoint.interval", "every"),
        ("model.lora.rank", "rank"),
        ("dpo.beta", "beta"),
    ):
        if key not in facts and facts.get(f"{key}~on"):
            value = facts.get(f"{key}~{on}", 0.1)
            value = int(value) if isinstance(value, float) and value >= 1 else value
            facts.put(key, value, f"{key}~{on}" if f"{key}~{on}" in facts else f"{key}~on")
    if not facts.get("model.lora.rank"):
        for key in [key for key in facts.values if key.startswith("model.lora.")]:
            facts.pop(key)
    if facts.get("precision.float8~on") or "precision.float8~recipe" in facts:
        recipe = facts.get("precision.float8~recipe", "tensorwise")
        if facts.get("precision.float8~on"):
            facts.put("precision.float8", recipe, "precision.float8~on", "precision.float8~recipe")
        else:
            facts.note(
                "changed in meaning", "is read with its converter alone", "precision.float8~recipe"
            )
    if facts.get("activation_checkpoint.mode~selective") and "activation_checkpoint.mode" not in facts:
        every = str(facts.get("activation_checkpoint.every~option", 2))
        names = ("activation_checkpoint.mode~selective", "activation_checkpoint.every~option")
        if every == "op":
            facts.put("activation_checkpoint.mode", "selective", *names)
        else:
            facts.put("activation_checkpoint.mode", "full" if every == "1" else "every_k", *names)
            facts.put("activation_checkpoint.every", int(every) if every.isdigit() else 2, names[1])
    layers = facts.get("activation_checkpoint.segment~layers", 1)
    if layers != 1 and facts.get("activation_checkpoint.mode") == "full":
        facts.put("activation_checkpoint.segment", layers, "activation_checkpoint.segment~layers")
    every = facts.get("metrics.console_every~steps", 0)
    if every >= 1:
        facts.put("metrics.console_every", int(every), "metrics.console_every~steps")
    if "comm.timeout~minutes" in facts:
        seconds = 60 * facts.get("comm.timeout~minutes")
        facts.put("comm.timeout", seconds, "comm.timeout~minutes", text="in seconds")
    if facts.get("comm.timeout", 0) > 1800:
        facts.put("comm.start_timeout", facts.get("comm.timeout"), text="at least comm.timeout")
    if facts.get("compile.mode~on") and "compile.mode" not in facts:
        facts.put("compile.mode", "model", "compile.mode~on")
    stages, layers = facts.get("parallel.pp_virtual_stages~layers"), facts.get("model.n_layers")
    if stages and layers:
        each = max(1, layers // facts.get("parallel.pp", 1) // stages)
        facts.put("parallel.pp_virtual_stages", each, "parallel.pp_virtual_stages~layers")
    if facts.get("parallel.pp", 1) == 1:
        facts.pop("parallel.pp_virtual_stages")
    for key, given in (
        ("parallel.cp_method", "cp"),
        ("parallel.cp_balance", "cp"),
        ("parallel.sequence", "tp"),
    ):
        if facts.get(f"parallel.{given}", 1) == 1:
            facts.pop(key)
    if facts.get("optimizer.warmup~given") and "optimizer.warmup~type" not in facts:
        text = (
            'warm-up is along a logarithm, by default; nearest: scheduler.params.warmup_type = "linear"'
        )
        kind = "changed in meaning" if "optimizer.warmup" in facts.waiting else "refused"
        facts.note(kind, text, "optimizer.warmup~given")


def _model(facts: Facts, tables: list[Mapping[str, Any]]) -> None:
    name, flavor = facts.get("model.name~name", ""), facts.get("model.preset~flavor", "")
    for table in tables if name else ():
        known = {key.lower(): shape for key, shape in table["models"].items()}
        shape = known.get(f"{name} {flavor}".lower().replace("-", "_"))
        if shape is None:
            names = ", ".join(dict.fromkeys(key.split()[0] for key in table["models"]))
            text = f"{name} {flavor} is no model here (known: {names})"
            facts.note(
                "refused", f"{text}; docs/new-architecture.md says how to add one", "model.name~name"
            )
        for key, value in (shape or {}).items():
            if key == "note":
                facts.note("changed in meaning", value, "model.name~name")
            elif f"model.{key}" not in facts:
                facts.put(f"model.{key}", value, "model.name~name", "model.preset~flavor")
    if all(f"model.{key}" in facts for key in ("n_layers", "dim", "n_heads")):
        _shape(facts)
    lost = any(key.startswith("model.n_") for key in facts.values) and "model.name" not in facts
    if lost or ("model.experts~" in facts and not name):
        text = "the model's name and shape are not taken over; set model.name and its fields"
        facts.note("changed in meaning", text)
        for key in [key for key in facts.values if key.startswith("model.")]:
            facts.pop(key)


def _shape(facts: Facts) -> None:
    """Name the model that has the parts that the flags of Megatron-LM name."""
    parts = {part: facts.pop(f"model.{part}~") for part in ("norm", "positions", "gated", "bias")}
    parts |= {"learnt": facts.pop("model.learnt~")}
    dim, heads = facts.get("model.dim", 0), facts.get("model.n_heads", 1)
    if not parts["gated"]:
        facts.values.setdefault("model.hidden_dim", facts.values["model.dim"]._replace(value=4 * dim))
    if parts["positions"] == "rope":
        facts.put("model.name", "llama", "model.n_layers")
        facts.put("model.norm", {"RMSNorm": "rms"}.get(parts["norm"], "layer"), text="--normalization")
        facts.put("model.ffn_gated", bool(parts["gated"]), text="--swiglu")
        facts.put("model.activation", "silu" if parts["gated"] else "gelu", text="--swiglu")
        for key in ("wo_bias", "ffn_bias"):
            facts.put(f"model.{key}", not parts["bias"], text="--disable-bias-linear")
        if not parts["bias"]:
            facts.put("model.qkv_bias", True, text="--disable-bias-linear")
        facts.values.setdefault("model.n_kv_heads", facts.values["model.n_heads"]._replace(value=heads))
        if "model.hidden_dim" not in facts:  # Megatron-LM's default with --swiglu
            facts.put("model.hidden_dim", int(4 * dim * 2 / 3 / 64) * 64, text="--swiglu")
    elif parts["norm"] == "LayerNorm" and not parts["gated"]:
        facts.put("model.name", "gpt2", "model.n_layers")
        length = parts["learnt"] or facts.get("train.seq_len")
        if length:
            facts.put("model.max_seq_len", length, text="--max-position-embeddings")
        for key in ("model.rope_theta", "model.head_dim", "model.qkv_bias"):
            facts.pop(key)
    else:
        facts.put("model.experts~", True, "model.n_layers")
        return
    if "model.vocab_size" not in facts:
        facts.put(
            "model.vocab_size", 50304 if facts.get("model.name") == "gpt2" else 32000, text="assumed"
        )
        text = "--vocab-size is that of the tokenizer; model.vocab_size is assumed, set it"
        facts.note("changed in meaning", text)


def _ranks(facts: Facts, given: int) -> int:
    """Return the number of ranks, and set the degrees of data parallel."""
    one, machines = facts.pop("world~per_machine"), facts.pop("world~machines", 1)
    world = given or facts.pop("world~processes") or (one * machines if one else 0)
    inner = math.prod(facts.get(f"parallel.{axis}", 1) for axis in ("tp", "cp", "pp"))
    micro, times = facts.get(MICRO), facts.get(f"{BATCH}~accumulation")
    if not world and micro and times and facts.get(BATCH, 0) % (micro * times) == 0:
        world = facts.get(BATCH, 0) // (micro * times) * inner
    if world % inner:
        axes = " x ".join(f"{a} {facts.get(f'parallel.{a}', 1)}" for a in ("tp", "cp", "pp"))
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


def _batch(facts: Facts, world: int) -> None:
    """Work out global_batch = micro_batch x accumulation x ranks of data parallel."""
    inner = math.prod(facts.get(f"parallel.{axis}", 1) for axis in ("tp", "cp", "pp"))
    ranks = world // inner if world else 0
    local, part = facts.get(f"{MICRO}~per_rank"), facts.get(f"{MICRO}~microbatch", 1)
    if local:
        pipelined = facts.get("parallel.pp", 1) > 1
        facts.put(MICRO, min(part, local) if pipelined else local, f"{MICRO}~per_rank")
        if facts.get(BATCH, -1) == -1:
            facts.pop(BATCH)
            facts.put(f"{BATCH}~accumulation", local // facts.get(MICRO), MICRO)
    micro, times, whole = facts.get(MICRO), facts.get(f"{BATCH}~accumulation"), facts.get(BATCH)
    if not (micro or whole) or world % inner or facts.waiting & {MICRO, BATCH}:
        return
    if not ranks and (not whole or not micro):
        missing = "the number of ranks is in no file; give --world-size N"
        facts.note(
            "refused", f"train.global_batch follows from it, and {missing}", MICRO if micro else BATCH
        )
        return
    if whole and not micro:
        micro, rest = divmod(whole, ranks * (times or 1))
        if rest or not micro:
            unit = ranks * (times or 1)
            near = max(1, round(whole / unit)) * unit
            line = f"{whole} is not a multiple of {ranks} ranks x accumulation {times or 1}"
            facts.note("refused", f"{line}; nearest: {near}", BATCH)
            return
        facts.put(MICRO, micro, BATCH, text=f"over {ranks} ranks")
    if whole and ranks and whole != micro * (times or max(1, whole // (micro * ranks))) * ranks:
        product = micro * (times or max(1, round(whole / (micro * ranks)))) * ranks
        line = f"{whole} is not micro-batch {micro}{f' x accumulation {times}' if times else ''} x"
        facts.note("refused", f"{line} {ranks} ranks of data parallel; nearest: {product}", BATCH)
        return
    if not whole:
        text = f"micro-batch {micro} x accumulation {times or 1} x {ranks} ranks"
        facts.put(BATCH, micro * (times or 1) * ranks, f"{BATCH}~accumulation", text=text)


def _steps(facts: Facts, given: int) -> None:
    samples, batch = facts.pop("train.steps~samples"), facts.get(BATCH)
    if samples and batch:
        facts.put("train.steps", samples // batch, text=f"{samples} samples")
    for fact in ("optimizer.warmup", "train.steps"):
        name = f"{fact}~schedule_samples"
        if fact == "optimizer.warmup":
            name = "optimizer.warmup~samples"
        if (count := facts.pop(name)) and batch:
            key = "optimizer.warmup~warmup" if fact == "optimizer.warmup" else "train.steps~schedule"
            facts.put(key, count / batch if count % batch else count // batch, text=f"{count} samples")
    if given:
        facts.pop("train.epochs")
        facts.put("train.steps", given, text="--steps")
    if facts.get("train.steps", 0) == -1:
        facts.pop("train.steps")
    if "train.steps" not in facts and "train.steps~schedule" in facts and "train.epochs" not in facts:
        facts.put("train.steps", facts.get("train.steps~schedule"), "train.steps~schedule")
    if "train.steps" in facts:
        facts.pop("train.epochs")


def _schedule(facts: Facts) -> None:
    """Work out the learning rate's schedule, which other trainers begin at other steps."""
    lr, kind = facts.get("optimizer.lr"), facts.get("optimizer.warmup~kind", "")
    lowest = facts.pop("optimizer.min_lr~absolute")
    if lowest is not None and lr:
        facts.put("optimizer.min_lr", lowest / lr, text=f"{lowest:g} of {lr:g}")
    if "optimizer.warmup~off" in facts:
        facts.put("optimizer.warmup~warmup", 0, "optimizer.warmup~off")
        facts.pop("optimizer.warmup~ratio")
    if not kind or facts.waiting & {"optimizer.warmup", "optimizer.schedule", "train.steps"}:
        return
    steps = facts.get("train.steps~schedule") or facts.get("train.steps", 0)
    warmup, ratio = facts.get("optimizer.warmup~warmup", 0), facts.get("optimizer.warmup~ratio", 0)
    if 0 < warmup < 1:
        warmup, ratio = 0, warmup
    if ratio and not warmup and not steps:
        where = (
            "optimizer.warmup~ratio" if "optimizer.warmup~ratio" in facts else "optimizer.warmup~warmup"
        )
        text = f"{ratio:g} of the steps, and the steps follow from the data; give --steps N"
        facts.note("refused", text, where)
        return
    if ratio and not warmup:
        warmup = math.ceil(ratio * steps) if kind == "zero" else ratio * steps
    if warmup != int(warmup):
        text = f"warm-up is {warmup:g} steps, and ours are whole: {round(warmup)}"
        facts.note("changed in meaning", text, "optimizer.warmup~samples")
    warmup, curve = round(warmup), facts.get("optimizer.schedule", "linear")
    sources = ("optimizer.warmup~warmup", "optimizer.warmup~ratio")
    decay, end = facts.get("optimizer.decay~schedule", 0), facts.get("train.steps~schedule", 0)
    share = facts.get("optimizer.decay~ratio")
    if share is not None:
        decay = round(steps * share)
    began = -1
    if kind == "zero":
        began = 0 if warmup else -1
    elif kind == "torchtitan":
        whole = min(warmup, steps)
        warmup, decay = max(0, whole - 1), min(decay or steps, steps - whole)
        if not decay:
            curve = "constant"
    elif kind == "deepspeed":
        warmup = max(2, warmup)
        decay = steps - warmup if curve == "cosine" else 0
        end = steps + 1 if curve == "linear" else end
        warmup, began = warmup + 1, 1
    facts.put("optimizer.schedule", curve)
    facts.put("optimizer.warmup", warmup, *sources)
    if began != -1:
        facts.put("optimizer.warmup_from", began, text="its first step has a rate of 0")
    if decay and curve in (*CURVES, "constant"):
        names = ("optimizer.decay~ratio", "optimizer.decay~schedule")
        facts.put(
            "optimizer.decay", decay, *names, text="the steps after warmup" if share is None else ""
        )
    if end and end != facts.get("train.steps") and (curve in CURVES or decay):
        facts.put("optimizer.decay_end", end, "train.steps~schedule", text="the end of its schedule")


def _precision(facts: Facts, world: int) -> None:
    kind, param = facts.pop("precision.reduce~kind"), facts.get("precision.param", "float32")
    sharded = facts.get("parallel.zero", 3) > 0
    if kind == "torchtitan":
        shards = facts.get("parallel.dp_shard", -1)
        inner = math.prod(facts.get(f"parallel.{axis}", 1) for axis in ("tp", "pp", "dp_replicate"))
        shards = (
            (world // inner if world else 2) if shards == -1 else shards * facts.get("parallel.cp", 1)
        )
        plain = facts.get("parallel.tp", 1) > 1 or facts.get("parallel.pp", 1) > 1
        if shards == 1 and plain and param != "float32":
            facts.put("precision.param", "float32")
            text = "torchtitan has mixed precision with FSDP alone, so that this run is in float32"
            facts.note("changed in meaning", text, "precision.param")
    elif kind == "param" and sharded and "precision.reduce" not in facts and param != "float32":
        facts.put("precision.reduce", "float32" if param == "float16" else param, "precision.param")
        if param == "float16":
            facts.note(
                "changed in meaning",
                "gradients are reduced in float32, not in float16",
                "precision.param",
            )


def _zero(facts: Facts) -> None:
    for fact, zero in (("fsdp", 3), ("distributed", 1)):
        if facts.get(f"parallel.zero~{fact}") and facts.get("parallel.zero", 0) == 0:
            facts.put("parallel.zero", zero, f"parallel.zero~{fact}")
    if "parallel.zero~distributed" in facts and "parallel.zero" not in facts:
        facts.put("parallel.zero", 0, text="without --use-distributed-optimizer")
    stage, offload = facts.get("parallel.zero"), facts.get("parallel.offload~param")
    if facts.pop("parallel.zero~reshard") is False and stage == 3:
        facts.put("parallel.zero", 2, text="weights stay whole after forward")
        stage = 2
    if offload and stage == 3:
        facts.put("parallel.offload", offload, "parallel.offload~param")
        if not facts.pop("optimizer.offload"):
            text = "gradients and the optimizer are in host memory too"
            facts.note("changed in meaning", text, "parallel.offload")
    elif offload:
        text = f"offloads parameters, which needs stage 3 here and there; at stage {toml_value(stage)}"
        facts.note("changed in meaning", f"{text} it is left out")
    if facts.get("optimizer.weight_decay", 0) == 0 and "optimizer.weight_decay" not in facts.waiting:
        facts.pop("optimizer.weight_decay_scale")
