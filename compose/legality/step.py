"""Rules of a step: what it keeps, computes again, compiles, moves, and in which types."""

import math

import torch

from compose.base.fields import toml_value
from compose.base.torch_versions import splits_functions
from compose.compiler.compilation import check_whole
from compose.errors import ConfigError
from compose.legality.job import Job
from compose.legality.rule import Rule, micro_batches
from compose.memory.activation_checkpointing import ActivationCheckpoint, operators
from compose.optimizer.rules import parameter_rules
from compose.pipeline.schedules import build_table
from compose.precision.float8 import EXCEPTED, choose

_READ_BY = {"every": "every_k", "keep": "selective", "budget": "budget"}


def _recompute_keys(job: Job) -> None:
    chosen, default = job.config.activation_checkpoint, ActivationCheckpoint()
    problems = [
        f"activation_checkpoint.{key}: {toml_value(getattr(chosen, key))} is read in another mode;"
        f' set activation_checkpoint.mode = "{mode}"'
        for key, mode in _READ_BY.items()
        if getattr(chosen, key) != getattr(default, key) and chosen.mode != mode
    ]
    if problems:
        raise ConfigError(*problems)


def _recompute_units(job: Job) -> None:
    chosen = job.config.activation_checkpoint
    operators(chosen.keep)
    units = len(job.resolved.checkpoint)
    if chosen.mode == "every_k" and chosen.every > units > 0:
        raise ConfigError(
            f"activation_checkpoint.every: {chosen.every} is more than the {units} units, so none would"
            f" be recomputed; nearest: {units}"
        )


def _backward_in_two_parts(job: Job) -> bool:
    """Whether the schedule runs backward of inputs and of weights apart."""
    degrees, count = job.degrees, micro_batches(job.config)
    if degrees.pp == 1 or not count:
        return False
    try:
        table = build_table(degrees.pp_schedule, degrees.pp, degrees.pp_virtual_stages, count)
    except ConfigError:
        return False  # another rule's affair
    return any(action.kind in "IW" for row in table for action in row)


def _recompute_split(job: Job) -> None:
    degrees, mode = job.degrees, job.config.activation_checkpoint.mode
    if mode in ("selective", "budget") and _backward_in_two_parts(job):
        raise ConfigError(
            f'activation_checkpoint.mode: "{mode}" gives what it kept out once, and'
            f" {degrees.pp_schedule} runs backward in two parts; use"
            ' activation_checkpoint.mode = "full" or "every_k"'
        )


def _recompute_compiled(job: Job) -> None:
    config, cuda = job.config, job.on_cuda and job.config.precision.param != "float32"
    mode = config.activation_checkpoint.mode
    if config.compile.mode == "off" or mode not in ("selective", "budget"):
        return
    parts = {"parallel.cp": job.degrees.cp > 1, "experts": job.plan.expert, "flash attention": cuda}
    found = [name for name, there in parts.items() if there]
    if found:
        raise ConfigError(
            f'activation_checkpoint.mode: "{mode}" does not see into the parts of a layer that are'
            f" compiled alone, as with {found[0]}; use activation_checkpoint.mode ="
            ' "full" or "every_k", or compile.mode = "off"'
        )


def _compiled_whole(job: Job) -> None:
    check_whole(job.config.compile.mode, job.degrees.tp)


def _offload_compiled(job: Job) -> None:
    if job.config.activation_checkpoint.offload and job.config.compile.mode != "off":
        raise ConfigError(
            "activation_checkpoint.offload: true and a compiled layer, which keeps what it saves to"
            ' itself, do not go together; use compile.mode = "off"'
        )


def _async_tp(job: Job) -> None:
    chosen = job.config.compile
    if chosen.async_tp and (not job.on_cuda or chosen.mode == "off" or job.degrees.tp == 1):
        lack = "CUDA" if not job.on_cuda else "compile.mode" if chosen.mode == "off" else "parallel.tp"
        raise ConfigError(f"compile.async_tp: true needs {lack}; use compile.async_tp = false")


def _float8(job: Job) -> None:
    config, degrees = job.config, job.degrees
    recipe = config.precision.float8
    if recipe == "off" or not job.plan.float8:
        return
    choice = choose(job.model, job.resolved, degrees.tp, recipe, job.device_type)
    if not choice.converted:
        reasons = list(choice.left.values())
        shape = next((reason for reason in reasons if reason != EXCEPTED), "")
        why = f"the first's part of {shape}" if shape else f"they are {EXCEPTED}"
        raise ConfigError(
            f"precision.float8: {recipe} would change none of {len(reasons)} linear layers: {why}; use"
            ' precision.float8 = "off"'
        )
    rows, train = config.train.micro_batch * config.train.seq_len, config.train
    unit = 16 * degrees.cp
    if not choice.emulated and recipe != "rowwise_gw_hp" and rows % unit:
        part = unit // math.gcd(unit, train.micro_batch)
        nearest = max(1, round(train.seq_len / part)) * part
        raise ConfigError(
            f"precision.float8: {recipe} sums gradients over train.micro_batch x seq_len / cp ="
            f" {rows / degrees.cp:g} tokens, which is no multiple of 16; nearest: train.seq_len ="
            f' {nearest}, or use precision.float8 = "rowwise_gw_hp"'
        )


def _float8_offloaded(job: Job) -> None:
    degrees, recipe = job.degrees, job.config.precision.float8
    shared = degrees.dp_shard * degrees.cp > 1
    if job.on_cuda and recipe == "tensorwise" and degrees.offload == "cpu" and shared:
        raise ConfigError(
            'precision.float8: tensorwise with parallel.offload = "cpu" would find the scales of'
            ' weights in host memory, where NCCL reaches none; use precision.float8 = "rowwise"'
        )


def _float8_split(job: Job) -> None:
    recipe = job.config.precision.float8
    if recipe != "off" and not splits_functions() and _backward_in_two_parts(job):
        raise ConfigError(
            f"precision.float8: {recipe} makes a layer one function of input and weight, whose backward"
            f" torch {torch.__version__} cannot run in two parts, as {job.degrees.pp_schedule} does;"
            ' use torch 2.13, or parallel.pp_schedule = "Interleaved1F1B"'
        )


def _validation(job: Job) -> None:
    every, path = job.config.train.validate_every, job.config.data.validation
    if every and not path:
        raise ConfigError(f"train.validate_every: {every} has nothing to measure; set data.validation")
    if path and not every:
        raise ConfigError(f"data.validation: {path} is never read; set train.validate_every too")


def _optimizer(job: Job) -> None:
    parameter_rules(job.model, job.plan, job.config.optimizer)


def _master(job: Job) -> None:
    if job.config.precision.master == "bfloat16" != job.config.precision.param:
        raise ConfigError(
            "precision.master: bfloat16 keeps less than precision.param = "
            f'{job.config.precision.param} uses; use precision.param = "bfloat16"'
        )


def _optimizer_offload(job: Job) -> None:
    options, precision = job.config.optimizer, job.config.precision
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


def _offload(job: Job) -> None:
    if job.degrees.offload == "none":
        return
    cure = 'or parallel.offload = "none"'
    problems = []
    if job.degrees.zero != 3:
        problems.append(
            f"parallel.zero: {job.degrees.zero} keeps whole parameters on the device, and"
            f' parallel.offload = "cpu" none; use parallel.zero = 3, {cure}'
        )
    if job.config.optimizer.name != "adamw":
        problems.append(
            f"optimizer.name: {job.config.optimizer.name} sends matrices from device to device, and"
            f' parallel.offload = "cpu" has them in host memory; use "adamw", {cure}'
        )
    if problems:
        raise ConfigError(*problems)


STEP = [
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
        'compile.mode "model" goes without tp',
        "Dynamo cannot trace the hooks by which styles change tensors between modules; block compiles"
        " what is between them",
        _compiled_whole,
        upstream="torch/_dynamo, of hooks that torch.distributed.tensor.distribute_module adds",
    ),
    Rule(
        "compile.async_tp has CUDA, tp and torch.compile",
        "Inductor splits products for tp's messages by symmetric memory",
        _async_tp,
        upstream="torch/distributed/_symmetric_memory, enable_symm_mem_for_group",
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
        "with precision.float8, torchao is installed, some layer's sides on a tp rank are multiples of"
        " 16 and large enough to gain, and a rank's tokens in a micro-batch are such a multiple too"
        " (rowwise_gw_hp: any)",
        "the kernels take rows of 16 bytes, and small products lose more by the scaling than they gain;"
        " where float8 is emulated, only the first two hold",
        _float8,
        upstream="aten/src/ATen/native/cuda/ScaledBlas.cpp, _scaled_mm_cuda",
    ),
    Rule(
        "on CUDA, precision.float8 tensorwise keeps sharded weights on the device",
        "one collective finds the scales of all of them, and NCCL sends nothing from host memory",
        _float8_offloaded,
        upstream="torchao/float8/fsdp_utils.py, precompute_float8_dynamic_scale_for_fsdp",
    ),
    Rule(
        "with precision.float8 and torch before 2.13, the schedule runs backward in one piece",
        "a float8 layer is one function of its input and weight, which the split cannot enter",
        _float8_split,
        upstream="torch/distributed/pipelining/_backward.py, stage_backward_input",
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
