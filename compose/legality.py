"""What must hold between keys: one table of rules, each with its condition, its reason and a cure.

Checks run before any process group is started, and nothing else refuses a composition.
``docs/composition.md`` is printed from this table by ``python -m compose.legality``.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from compose.activation_checkpointing import operators
from compose.config import ActivationCheckpoint, Config, Parallel, toml_value
from compose.context_parallel import check_ulysses
from compose.errors import ConfigError
from compose.expert_parallel import check_experts
from compose.mesh import AXES, resolve_degrees
from compose.optimizer.rules import parameter_rules
from compose.pipeline_split import balanced, check_layers, check_stages, layer_names
from compose.plan import Plan, resolve
from compose.registry import build_model, find_model
from compose.schedules import build_table, placement, stages_per_rank
from compose.tensor_parallel import check_heads


@dataclass(frozen=True)
class Case:
    """What rules look at: a config whose degrees are known, the model on meta, its plan for them."""

    config: Config
    model: nn.Module
    plan: Plan
    world_size: int

    @property
    def degrees(self) -> Parallel:
        return self.config.parallel

    @property
    def on_cuda(self) -> bool:
        return self.config.run.device != "cpu" and torch.cuda.is_available()


def micro_batches(config: Config) -> int:
    """Micro-batches of one rank in a step, the degrees being known; 0 where they are not whole."""
    train, ranks = config.train, config.parallel.dp_replicate * config.parallel.dp_shard
    whole, rest = divmod(train.global_batch, ranks * train.micro_batch)
    return 0 if rest else whole


@dataclass(frozen=True)
class Rule:
    """condition: what must hold. reason: why. check: raises ConfigError, with the nearest legal change,
    where it does not. upstream: where PyTorch and not arithmetic asks for it, the place."""

    condition: str
    reason: str
    check: Callable[[Case], None]
    upstream: str = ""


def _degrees(case: Case) -> None:
    resolve_degrees(case.degrees, case.world_size)


def _expert_ranks(case: Case) -> None:
    degrees = case.degrees
    ranks = degrees.dp_replicate * degrees.dp_shard * degrees.cp * degrees.tp
    if ranks % degrees.ep:
        nearest = min(
            (d for d in range(1, ranks + 1) if ranks % d == 0), key=lambda d: abs(d - degrees.ep)
        )
        raise ConfigError(
            f"parallel.ep: {degrees.ep} does not divide dp_replicate x dp_shard x cp x tp = {ranks},"
            f" the ranks it is taken from; nearest: {nearest}"
        )


def _experts(case: Case) -> None:
    for name, _ in resolve(case.plan, case.model).expert:
        check_experts(len(next(case.model.get_submodule(name).parameters())), case.degrees.ep)


def _global_batch(case: Case) -> None:
    train, ranks = case.config.train, case.degrees.dp_replicate * case.degrees.dp_shard
    unit = ranks * train.micro_batch
    if train.global_batch % unit == 0:
        return
    nearest = max(1, round(train.global_batch / unit)) * unit
    raise ConfigError(
        f"train.global_batch: {train.global_batch} is not a multiple of dp_replicate x dp_shard x"
        f" train.micro_batch = {ranks} x {train.micro_batch} = {unit}; nearest: {nearest}"
        + _smaller_micro_batch(train.global_batch, ranks, train.micro_batch)
    )


def _smaller_micro_batch(global_batch: int, ranks: int, micro_batch: int) -> str:
    if global_batch % ranks:
        return ""
    share = global_batch // ranks
    best = max(size for size in range(1, micro_batch + 1) if share % size == 0)
    return f", or train.micro_batch = {best}"


def _heads(case: Case) -> None:
    if case.plan.heads:
        check_heads(*case.plan.heads, case.degrees.tp)


def _sequence(case: Case) -> None:
    seq_len, tp = case.config.train.seq_len, case.degrees.tp
    # With cp a sequence is padded to what both divide.
    if seq_len % tp == 0 or case.degrees.cp > 1:
        return
    if not case.degrees.sequence and not case.plan.expert:
        return
    nearest = max(1, round(seq_len / tp)) * tp
    cure = "" if case.plan.expert else ", or parallel.sequence = false"
    raise ConfigError(
        f"train.seq_len: {seq_len} is not a multiple of parallel.tp {tp}, which"
        f" {'a mixture of experts' if case.plan.expert else 'parallel.sequence'} needs;"
        f" nearest: {nearest}{cure}"
    )


def _ulysses(case: Case) -> None:
    degrees = case.degrees
    if case.plan.heads and degrees.cp_method == "ulysses":
        check_ulysses(*case.plan.heads, degrees.cp, degrees.tp)


def _flash(case: Case) -> None:
    if case.degrees.cp > 1 and case.config.precision.param == "float32" and case.on_cuda:
        raise ConfigError(
            "precision.param: float32 has no flash attention on CUDA, which parallel.cp needs;"
            " use bfloat16"
        )


def _schedule(case: Case) -> None:
    if case.degrees.pp > 1:
        stages_per_rank(case.degrees.pp_schedule, case.degrees.pp_virtual_stages)


def _micro_batches(case: Case) -> None:
    degrees, count = case.degrees, micro_batches(case.config)
    if degrees.pp == 1 or not count:
        return
    try:
        build_table(degrees.pp_schedule, degrees.pp, degrees.pp_virtual_stages, count)
    except ConfigError as error:
        ranks = degrees.dp_replicate * degrees.dp_shard
        unit = f" (train.global_batch is {ranks * case.config.train.micro_batch} times that)"
        raise ConfigError(
            *(f"{p}{unit if '; nearest: ' in p else ''}" for p in error.problems)
        ) from None


def _layers(case: Case) -> None:
    degrees, pipeline = case.degrees, case.plan.pipeline
    if degrees.pp == 1 or pipeline is None:
        return
    try:
        stages = len(placement(degrees.pp_schedule, degrees.pp, degrees.pp_virtual_stages))
    except ConfigError:
        return  # another rule's affair
    n_layers = len(layer_names(case.model, pipeline))
    if degrees.pp_layers:
        check_layers(degrees.pp_layers, stages, n_layers)
    else:
        check_stages(stages, degrees.pp, n_layers)


def _plan_names(case: Case) -> None:
    name = case.config.model.name
    wants: dict[str, tuple[bool, Any, str]] = {
        "tensor": (case.degrees.tp > 1, case.plan.tensor, "parallel.tp = 1"),
        "context": (case.degrees.cp > 1, case.plan.context, "parallel.cp = 1"),
        "pipeline": (case.degrees.pp > 1, case.plan.pipeline, "parallel.pp = 1"),
        "expert": (case.degrees.ep > 1, case.plan.expert, "parallel.ep = 1"),
        "compile": (
            case.config.compile.mode == "block",
            case.plan.compile,
            'compile.mode = "off"',
        ),
        "checkpoint": (
            case.config.activation_checkpoint.mode != "none",
            case.plan.checkpoint,
            'activation_checkpoint.mode = "none"',
        ),
        "output": (case.config.train.loss_chunk > 0, case.plan.output, "train.loss_chunk = 0"),
        "checkpoint, for offload": (
            case.config.activation_checkpoint.offload,
            case.plan.checkpoint,
            "activation_checkpoint.offload = false",
        ),
    }
    problems = [
        f"model.name: the plan of {name} has nothing under {part}; add it, or use {cure}"
        for part, (wanted, given, cure) in wants.items()
        if wanted and not given
    ]
    if problems:
        raise ConfigError(*problems)


_READ_BY = {"every": "every_k", "keep": "selective", "budget": "budget"}


def _recompute_keys(case: Case) -> None:
    chosen, default = case.config.activation_checkpoint, ActivationCheckpoint()
    problems = [
        f"activation_checkpoint.{key}: {toml_value(getattr(chosen, key))} is read in another mode;"
        f' set activation_checkpoint.mode = "{mode}"'
        for key, mode in _READ_BY.items()
        if getattr(chosen, key) != getattr(default, key) and chosen.mode != mode
    ]
    if problems:
        raise ConfigError(*problems)


def _recompute_units(case: Case) -> None:
    chosen = case.config.activation_checkpoint
    operators(chosen.keep)
    units = len(resolve(case.plan, case.model).checkpoint)
    if chosen.mode == "every_k" and chosen.every > units > 0:
        raise ConfigError(
            f"activation_checkpoint.every: {chosen.every} is more than the {units} units, so none would"
            f" be recomputed; nearest: {units}"
        )


def _recompute_split(case: Case) -> None:
    degrees, mode = case.degrees, case.config.activation_checkpoint.mode
    count = micro_batches(case.config)
    if degrees.pp == 1 or not count or mode not in ("selective", "budget"):
        return
    try:
        table = build_table(degrees.pp_schedule, degrees.pp, degrees.pp_virtual_stages, count)
    except ConfigError:
        return  # another rule's affair
    if any(action.kind in "IW" for row in table for action in row):
        raise ConfigError(
            f'activation_checkpoint.mode: "{mode}" gives what it kept out once, and'
            f" {degrees.pp_schedule} runs backward in two parts; use"
            ' activation_checkpoint.mode = "full" or "every_k"'
        )


def _recompute_compiled(case: Case) -> None:
    config, cuda = case.config, case.on_cuda and case.config.precision.param != "float32"
    mode = config.activation_checkpoint.mode
    if config.compile.mode == "off" or mode not in ("selective", "budget"):
        return
    parts = {"parallel.cp": case.degrees.cp > 1, "experts": case.plan.expert, "flash attention": cuda}
    found = [name for name, there in parts.items() if there]
    if found:
        raise ConfigError(
            f'activation_checkpoint.mode: "{mode}" does not see into the parts of a layer that are'
            f" compiled alone, as with {found[0]}; use activation_checkpoint.mode ="
            ' "full" or "every_k", or compile.mode = "off"'
        )


def _offload_compiled(case: Case) -> None:
    if case.config.activation_checkpoint.offload and case.config.compile.mode != "off":
        raise ConfigError(
            "activation_checkpoint.offload: true and a compiled layer, which keeps what it saves to"
            ' itself, do not go together; use compile.mode = "off"'
        )


def _async_tp(case: Case) -> None:
    chosen = case.config.compile
    if chosen.async_tp and (not case.on_cuda or chosen.mode == "off" or case.degrees.tp == 1):
        lack = "CUDA" if not case.on_cuda else "compile.mode" if chosen.mode == "off" else "parallel.tp"
        raise ConfigError(f"compile.async_tp: true needs {lack}; use compile.async_tp = false")


def _validation(case: Case) -> None:
    every, path = case.config.train.validate_every, case.config.data.validation
    if every and not path:
        raise ConfigError(f"train.validate_every: {every} has nothing to measure; set data.validation")
    if path and not every:
        raise ConfigError(f"data.validation: {path} is never read; set train.validate_every too")


def _optimizer(case: Case) -> None:
    parameter_rules(case.model, case.plan, case.config.optimizer)


def _master(case: Case) -> None:
    if case.config.precision.master == "bfloat16" != case.config.precision.param:
        raise ConfigError(
            "precision.master: bfloat16 keeps less than precision.param = "
            f'{case.config.precision.param} uses; use precision.param = "bfloat16"'
        )


def _optimizer_offload(case: Case) -> None:
    options, precision = case.config.optimizer, case.config.precision
    if options.offload == "none":
        return
    needs = {
        "optimizer.name": (options.name, "adamw"),
        "optimizer.implementation": (options.implementation, "fused"),
        "precision.optimizer_state": (precision.optimizer_state, "float32"),
        "precision.master": (precision.master, "float32"),
    }
    problems = [
        f'{key}: {value} with optimizer.offload = "{options.offload}"; use "{needed}", or'
        ' optimizer.offload = "none"'
        for key, (value, needed) in needs.items()
        if value != needed
    ]
    if problems:
        raise ConfigError(*problems)


def _offload(case: Case) -> None:
    if case.degrees.offload == "none":
        return
    cure = 'or parallel.offload = "none"'
    problems = []
    if case.degrees.zero != 3:
        problems.append(
            f"parallel.zero: {case.degrees.zero} keeps whole parameters on the device, and"
            f' parallel.offload = "cpu" none; use parallel.zero = 3, {cure}'
        )
    if case.config.optimizer.name != "adamw":
        problems.append(
            f"optimizer.name: {case.config.optimizer.name} sends matrices from device to device, and"
            f' parallel.offload = "cpu" has them in host memory; use "adamw", {cure}'
        )
    if problems:
        raise ConfigError(*problems)


RULES = [
    Rule(
        "dp_replicate x dp_shard x cp x tp x pp is the number of ranks; one may be -1",
        "every rank has one place in the mesh",
        _degrees,
    ),
    Rule(
        "ep divides dp_replicate x dp_shard x cp x tp",
        "expert parallel is laid over these ranks, which hold different tokens anyway",
        _expert_ranks,
    ),
    Rule("ep divides the experts", "every rank holds as many", _experts),
    Rule(
        "the plan says how to do what the degrees ask for",
        "a plan without styles for an axis would leave its ranks doing the same work",
        _plan_names,
    ),
    Rule(
        "global_batch is a multiple of dp_replicate x dp_shard x micro_batch",
        "every rank runs the same number of equal micro-batches, since collectives must match",
        _global_batch,
    ),
    Rule(
        "activation_checkpoint.offload goes without torch.compile",
        "hooks on saved tensors cannot be traced",
        _offload_compiled,
    ),
    Rule(
        "data.validation and train.validate_every go together",
        "one says on what the loss is measured, the other when",
        _validation,
    ),
    Rule(
        "tp divides the query heads, and divides or is divided by the key/value heads",
        "a rank computes whole heads; fewer key/value heads than ranks are shared by neighbours",
        _heads,
    ),
    Rule(
        "with sequence, or with experts, and without cp, seq_len is a multiple of tp",
        "a local tensor carries no global shape, so every rank must hold an equal part",
        _sequence,
    ),
    Rule(
        "with cp_method ulysses, cp divides the query heads that tp leaves, and divides or is divided"
        " by the key/value heads",
        "ranks trade sequence for whole heads; ring and allgather do not",
        _ulysses,
    ),
    Rule(
        "cp on CUDA runs in bfloat16",
        "the flash kernels, whose log-sum-exp merges the parts, take half precision only",
        _flash,
        upstream="aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_tensor_dtype of"
        " can_use_flash_attention",
    ),
    Rule(
        "pp_schedule is known, and pp_virtual_stages what it is defined for",
        "GPipe and 1F1B run one stage on each rank, V-schedules two; the others any number",
        _schedule,
    ),
    Rule(
        "the schedule can run as many micro-batches as global_batch and micro_batch make",
        "interleaved schedules go in rounds of equal length; DualPipeV fills every stage first",
        _micro_batches,
        upstream="torch/distributed/pipelining/schedules.py, ScheduleInterleaved1F1B,"
        " ScheduleInterleavedZeroBubble and ScheduleDualPipeV, __init__",
    ),
    Rule(
        "activation_checkpoint.every, keep and budget go with the mode of that name (keep: selective)",
        "the other modes would not read it",
        _recompute_keys,
    ),
    Rule(
        "activation_checkpoint.keep names operators, and every is at most the plan's units",
        "anything else would quietly keep or recompute nothing",
        _recompute_units,
    ),
    Rule(
        "with modes selective and budget, the schedule runs backward in one piece (not the zero-bubble"
        " schedules and DualPipeV)",
        "its second part would ask again for what was kept for the first",
        _recompute_split,
        upstream="torch/utils/checkpoint.py, _CachedTorchDispatchMode, which hands each kept result out"
        " once",
    ),
    Rule(
        "with selective or budget and torch.compile, every layer is one graph: no cp, no experts,"
        " no flash attention on CUDA",
        "what a part compiled alone computes is not seen operator by operator",
        _recompute_compiled,
    ),
    Rule(
        "compile.async_tp has CUDA, tp and torch.compile",
        "Inductor splits products for tp's messages by symmetric memory",
        _async_tp,
        upstream="torch/distributed/_symmetric_memory, enable_symm_mem_for_group",
    ),
    Rule(
        "pp_layers has a number for each stage and adds up to the layers; no stage between the ends has"
        " none",
        "each layer runs once, and an idle stage only costs",
        _layers,
    ),
    Rule(
        "the patterns of lr_scale, weight_decay_scale and muon_except name parameters; with muon,"
        " layers hold matrices",
        "a mistyped pattern would leave what it means as it is, and muon without matrices is AdamW",
        _optimizer,
    ),
    Rule(
        "precision.master is float32 or precision.param",
        "what is kept in fewer bits than it is used in gains nothing from more",
        _master,
    ),
    Rule(
        "with optimizer.offload, the optimizer is the fused AdamW, its state and the weights float32",
        "its step is taken piece by piece: Muon needs matrices whole, and pieces in bfloat16 are not"
        " written",
        _optimizer_offload,
    ),
    Rule(
        "with parallel.offload, zero is 3 and the optimizer AdamW",
        "other stages hold whole parameters on the device, and Muon's messages are the device's",
        _offload,
    ),
]


def problems_of(case: Case) -> list[tuple[Rule, str]]:
    """All that is wrong with a case, by the rule that says so."""
    found = []
    for rule in RULES:
        try:
            rule.check(case)
        except ConfigError as error:
            found += [(rule, problem) for problem in error.problems]
    return found


def check(config: Config, world_size: int) -> tuple[Config, list[str]]:
    """``config`` with its degrees and the layers of its stages resolved, and all the problems."""
    try:
        degrees = resolve_degrees(config.parallel, world_size)
    except ConfigError as error:
        return config, error.problems
    config = replace(config, parallel=degrees)
    try:
        model, plan = build_model(config)
        resolve(plan, model)
    except ConfigError as error:
        return config, error.problems
    case = Case(config, model, plan, world_size)
    problems = list(dict.fromkeys(problem for _, problem in problems_of(case)))
    if not problems and degrees.pp > 1 and not degrees.pp_layers:
        config, problems = _with_layers(case)
    return config, problems


def _with_layers(case: Case) -> tuple[Config, list[str]]:
    config, degrees = case.config, case.degrees
    stages = len(placement(degrees.pp_schedule, degrees.pp, degrees.pp_virtual_stages))
    assert case.plan.pipeline is not None
    try:
        layers = balanced(case.model, case.plan.pipeline, stages, config.train.seq_len)
    except ConfigError as error:
        return config, error.problems
    return replace(config, parallel=replace(degrees, pp_layers=layers)), []


def meshes(world_size: int) -> Iterator[dict[str, int]]:
    """Every assignment of degrees to the axes whose product is ``world_size``."""
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    for degrees in itertools.product(divisors, repeat=len(AXES)):
        if math.prod(degrees) == world_size:
            yield dict(zip(AXES, degrees, strict=True))


def survey(config: Config, world_size: int) -> Iterator[tuple[dict[str, int], list[str]]]:
    """Each mesh of so many ranks, with what the table has against ``config`` on it."""
    folder = find_model(config.model.name)
    model, _ = build_model(config)
    for degrees in meshes(world_size):
        parallel = replace(config.parallel, **degrees)
        here = replace(config, parallel=parallel)
        try:
            plan = folder.plan(config.model.config, parallel)
        except ConfigError as error:
            yield degrees, error.problems
            continue
        yield degrees, [problem for _, problem in problems_of(Case(here, model, plan, world_size))]


def markdown() -> str:
    """The table as ``docs/composition.md``."""
    rows = [
        f"| {rule.condition} | {rule.reason} | {rule.upstream and 'PyTorch: ' + rule.upstream} |"
        for rule in RULES
    ]
    return "\n".join([_HEAD, *rows, _TAIL])


_HEAD = """\
# What composes

Any product of `dp_replicate`, `dp_shard`, `cp`, `tp` and `pp` composes, with any `ep` over it, every
ZeRO stage, schedule and `cp_method`, tied and untied embeddings, and documents packed into a sequence,
unless a rule below says no. The configuration checks read the same table (`compose/legality.py`, of
which this page is printed by `python -m compose.legality`), and the tests prove that every mesh of 8
ranks is either refused by it or equal to one process. Which meshes a config allows:

```bash
python -m compose legal train.toml --world-size 8
```

| what must hold | why | forced by |
| --- | --- | --- |"""
_TAIL = """
Where the last column is empty, arithmetic asks for it. A refusal names the key, the reason and the
nearest change that helps."""


if __name__ == "__main__":
    print(markdown())
