"""All rules of a composition, with those of a step, and the check that ``compose.apply`` makes.

A step's rules say what it may keep, recompute, compile and move, and in which dtypes.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from compose.config.addons import provided
from compose.config.mesh_rules import COMM, MESH
from compose.config.models import find_model
from compose.config.setup import Rule, Rules, Setup, all_keys_read, problems_of
from compose.errors import ConfigError, toml_value
from compose.memory.activation_checkpointing import operators
from compose.memory.float8 import EXCEPTED, select_layers
from compose.ops.dropout import dropouts
from compose.ops.tensors import tied_names
from compose.ops.torch_versions import splits_functions
from compose.parallel.expert_parallel import routers
from compose.parallel.gradient_sum import has_shards
from compose.pipeline.schedules import ASYNCHRONOUS

if TYPE_CHECKING:  # a job holds a setup
    from compose.config.job import Job

STEP = Rules[Setup]()
RUN_OF_STEP = Rules["Job"]()
"""Rules of a run that follow from the schedule."""


@STEP.add(
    "activation_checkpoint.offload goes without torch.compile",
    "hooks on saved tensors cannot be traced",
)
def _offload_compiled(setup: Setup) -> Iterator[str]:
    if setup.options.activation_checkpoint.offload and setup.options.compile.mode != "off":
        yield (
            "activation_checkpoint.offload: true and a compiled layer, which keeps what it saves to"
            ' itself, do not go together; use compile.mode = "off"'
        )


@STEP.add(
    "activation_checkpoint.offload with float8 = tensorwise goes without shards and tp",
    "gathered weights in 8 bits are wrappers of their memory, and are taken for activations",
)
def _offload_float8(setup: Setup) -> Iterator[str]:
    options, parallel = setup.options, setup.options.parallel
    tensorwise = options.activation_checkpoint.offload and options.precision.float8 == "tensorwise"
    if tensorwise and parallel.dp_shard * parallel.cp * parallel.tp > 1:
        yield (
            "activation_checkpoint.offload: true would move weights too, which precision.float8 ="
            ' "tensorwise" has gathered; use "rowwise", or activation_checkpoint.offload = false'
        )


STEP.add(
    "activation_checkpoint.every, keep and budget go with the mode of that name (keep: selective), and"
    " segment with full",
    "the other modes would not read it",
)(all_keys_read("activation_checkpoint", lambda setup: setup.options.activation_checkpoint))


@STEP.add(
    "activation_checkpoint.keep names operators, and every is at most the plan's units",
    "anything else would quietly keep or recompute nothing",
)
def _recompute_units(setup: Setup) -> Iterator[str]:
    chosen = setup.options.activation_checkpoint
    operators(chosen.keep)
    units = len(setup.resolved.checkpoint)
    if chosen.mode == "every_k" and chosen.every > units > 0:
        yield (
            f"activation_checkpoint.every: {chosen.every} is more than the {units} units, so none would"
            f" be recomputed; nearest: {units}"
        )


@STEP.add(
    "with modes selective and budget, the schedule runs backward in one piece (not the zero-bubble"
    " schedules and DualPipeV)",
    "its second part would ask again for what was kept for the first",
    upstream="torch/utils/checkpoint.py, _CachedTorchDispatchMode, which hands each kept result out"
    " once",
)
def _recompute_split(setup: Setup) -> Iterator[str]:
    degrees, mode = setup.degrees, setup.options.activation_checkpoint.mode
    if mode in ("selective", "budget") and setup.splits_backward:
        yield (
            f'activation_checkpoint.mode: "{mode}" gives what it kept out once, and'
            f" {degrees.pp_schedule} runs backward in two parts; use"
            ' activation_checkpoint.mode = "none", or another parallel.pp_schedule, as "1F1B"'
        )


@STEP.add(
    "activation_checkpoint.segment is at most the units of the longest stage",
    "a segment does not cross stages, so a longer one would be cut without a word",
)
def segment_is_short(setup: Setup) -> Iterator[str]:
    """Yield a problem if a segment is longer than every stage, whose layers are known."""
    length, units = setup.options.activation_checkpoint.segment, len(setup.resolved.checkpoint)
    layers = setup.degrees.pp_layers if setup.degrees.pp > 1 else ()
    most, where = (max(layers), "longest stage") if layers else (units, "model")
    if length > most > 0:
        yield (
            f"activation_checkpoint.segment: {length} is more than the {most} units of the {where};"
            f" nearest: {most}"
        )


@STEP.add(
    "with activation_checkpoint.segment, the schedule runs backward in one piece (not the zero-bubble"
    " schedules and DualPipeV)",
    "each part, and each weight of the second, would compute the layers of a segment again",
    upstream="torch/utils/checkpoint.py, _checkpoint_hook, which recomputes once for each backward",
)
def _segment_split(setup: Setup) -> Iterator[str]:
    length, schedule = setup.options.activation_checkpoint.segment, setup.degrees.pp_schedule
    if length > 1 and setup.splits_backward:
        yield (
            f"activation_checkpoint.segment: {length} would be computed again for each part of a"
            f" backward, and {schedule} runs it in two; use activation_checkpoint.segment = 1, or"
            ' parallel.pp_schedule = "Interleaved1F1B"'
        )


@STEP.add(
    'activation_checkpoint.segment goes without compile.mode "model"',
    "a segment is computed again between graphs, so a graph has one layer at most",
)
def _segment_compiled(setup: Setup) -> Iterator[str]:
    length = setup.options.activation_checkpoint.segment
    if length > 1 and setup.options.compile.mode == "model":
        yield (
            f'activation_checkpoint.segment: {length} and compile.mode = "model", which makes one graph'
            ' of all layers, do not go together; use compile.mode = "block"'
        )


@STEP.add(
    "where the plan's pipeline says two_parts=False, the schedule runs backward in one piece (not"
    " the zero-bubble schedules and DualPipeV)",
    "the part of weights would run through what an earlier part has freed",
    upstream="torch/distributed/pipelining/_backward.py, stage_backward_weight",
)
def _split(setup: Setup) -> Iterator[str]:
    pipeline = setup.resolved.pipeline
    if pipeline and not pipeline.two_parts and setup.splits_backward:
        yield (
            f"parallel.pp_schedule: {setup.degrees.pp_schedule} runs backward in two parts, which"
            " PyTorch cannot do where a weight enters the stream at several places, as plan.pipeline"
            ' says; use "Interleaved1F1B"'
        )


@STEP.add(
    "with selective or budget and torch.compile, every layer is one graph: no experts",
    "what a part compiled alone computes is not seen operator by operator",
)
def _recompute_compiled(setup: Setup) -> Iterator[str]:
    mode, compiled = setup.options.activation_checkpoint.mode, setup.options.compile.mode != "off"
    if compiled and mode in ("selective", "budget") and setup.resolved.expert:
        yield (
            f'activation_checkpoint.mode: "{mode}" does not see into the parts of a layer that are'
            " compiled alone, as with experts; use activation_checkpoint.mode ="
            ' "full" or "every_k", or compile.mode = "off"'
        )


@STEP.add(
    'compile.mode "model" goes without tp',
    "Dynamo cannot trace the hooks by which styles change tensors between modules; block compiles"
    " what is between them",
    upstream="torch/_dynamo, of hooks that torch.distributed.tensor.distribute_module adds",
)
def _compiled_whole(setup: Setup) -> Iterator[str]:
    tp = setup.degrees.tp
    if setup.options.compile.mode == "model" and tp > 1:
        yield (
            f'compile.mode: "model" with parallel.tp = {tp}: Dynamo cannot trace the hooks by which'
            ' styles change tensors between modules; use compile.mode = "block"'
        )


@STEP.add(
    "with torch.compile, the schedule runs backward in one piece",
    "a graph's backward overwrites what it reads, and gives wrong gradients where it may not",
    upstream="torch/_functorch/config.py, donated_buffer",
)
def _compiled_in_two_parts(setup: Setup) -> Iterator[str]:
    mode = setup.options.compile.mode
    if mode != "off" and setup.splits_backward:
        yield (
            f'compile.mode: "{mode}" makes graphs whose backward cannot run in two parts, as'
            f' {setup.degrees.pp_schedule} does; use parallel.pp_schedule = "Interleaved1F1B", or'
            ' compile.mode = "off"'
        )


@STEP.add(
    "compile.async_tp has CUDA, tp and torch.compile",
    "Inductor splits products for tp's messages by symmetric memory",
    upstream="torch/distributed/_symmetric_memory, enable_symm_mem_for_group",
)
def _async_tp(setup: Setup) -> Iterator[str]:
    chosen, tp = setup.options.compile, setup.degrees.tp
    needs = {"CUDA": setup.on_cuda, "compile.mode": chosen.mode != "off", "parallel.tp": tp > 1}
    lacks = [name for name, is_there in needs.items() if not is_there]
    if chosen.async_tp and lacks:
        yield f"compile.async_tp: true needs {lacks[0]}; use compile.async_tp = false"


@STEP.add(
    "precision.master is float32 or precision.param",
    "a weight that is kept in fewer bits gains nothing from more bits where it is used",
)
def _master(setup: Setup) -> Iterator[str]:
    precision = setup.options.precision
    if precision.master not in ("float32", precision.param):
        yield (
            f"precision.master: {precision.master} keeps less than precision.param = {precision.param}"
            f' uses; use precision.param = "{precision.master}"'
        )


@STEP.add(
    "with precision.float8, torchao is installed, and some layer's sides on a tp rank are multiples"
    " of 16 and large enough to gain",
    "the kernels take rows of 16 bytes, and small products lose more by the scaling than they gain;"
    " where float8 is emulated, small ones are taken too",
    upstream="aten/src/ATen/native/cuda/ScaledBlas.cpp, _scaled_mm_cuda",
)
def _float8(setup: Setup) -> Iterator[str]:
    recipe = setup.options.precision.float8
    if recipe == "off" or not setup.resolved.float8:
        return
    degrees, device = setup.degrees, setup.device_type
    choice = select_layers(setup.model, setup.resolved, degrees.tp, recipe, device, setup.float8)
    if not choice.converted:
        reasons = list(choice.left.values())
        shape = next((reason for reason in reasons if reason != EXCEPTED), "")
        why = f"the first's part of {shape}" if shape else f"they are {EXCEPTED}"
        yield (
            f"precision.float8: {recipe} would change none of {len(reasons)} linear layers: {why}; use"
            ' precision.float8 = "off"'
        )


@STEP.add(
    "on CUDA, precision.float8 tensorwise keeps sharded weights on the device",
    "one collective finds the scales of all of them, and NCCL sends nothing from host memory",
    upstream="torchao/float8/fsdp_utils.py, precompute_float8_dynamic_scale_for_fsdp",
)
def _float8_offloaded(setup: Setup) -> Iterator[str]:
    degrees, recipe = setup.degrees, setup.options.precision.float8
    shared = degrees.dp_shard * degrees.cp > 1
    if setup.on_cuda and recipe == "tensorwise" and degrees.offload == "cpu" and shared:
        yield (
            'precision.float8: tensorwise with parallel.offload = "cpu" would find the scales of'
            ' weights in host memory, where NCCL reaches none; use precision.float8 = "rowwise"'
        )


@STEP.add(
    "with precision.float8 and torch before 2.13, the schedule runs backward in one piece",
    "a float8 layer is one function of its input and weight, which the split cannot enter",
    upstream="torch/distributed/pipelining/_backward.py, stage_backward_input",
)
def _float8_split(setup: Setup) -> Iterator[str]:
    recipe = setup.options.precision.float8
    if recipe != "off" and not splits_functions() and setup.splits_backward:
        yield (
            f"precision.float8: {recipe} makes a layer one function of input and weight, whose backward"
            f" torch {torch.__version__} cannot run in two parts, as {setup.degrees.pp_schedule} does;"
            ' use torch 2.13, or parallel.pp_schedule = "Interleaved1F1B"'
        )


@STEP.add(
    "with parallel.offload, zero is 3, and every parameter has dims and elements",
    "other stages hold whole parameters on the device, and a parameter without these has no shards",
)
def _offload(setup: Setup) -> Iterator[str]:
    zero, offload = setup.degrees.zero, setup.degrees.offload
    if offload == "none":
        return
    whole = [(name, p.ndim) for name, p in setup.model.named_parameters() if not has_shards(p)]
    for name, dims in whole[:1]:
        lacks = "elements: leave it out" if dims else "dims to be cut along; give it the shape (1,)"
        line = f'parallel.offload: "{offload}" moves shards, and parameter {name} has no {lacks}'
        yield f'{line}, or use parallel.offload = "none"'
    if zero != 3:
        yield (
            f"parallel.zero: {zero} keeps whole parameters on the device, and parallel.offload ="
            f' "{offload}" none; use parallel.zero = 3, or parallel.offload = "none"'
        )


def _unproved(schedule: str, given: Iterable[tuple[str, Any, Any]]) -> Iterator[str]:
    """Yield a line for each (key, value, the only one that is proved without a flush)."""
    for key, value, only in given:
        if value != only:
            yield (
                f"{key}: {toml_value(value)} is not proved with parallel.pp_schedule = {schedule}; use"
                f' {toml_value(only)}, or parallel.pp_schedule = "1F1B"'
            )


@STEP.add(
    "with PipeDream and PipeDream2BW, only pp and dp_replicate are above 1; float32, no compile, no"
    " compression; recomputation none or full; weights are not shared, frozen, routed or dropped out",
    "each stage steps by itself with weights of several steps, and nothing else is proved",
)
def _without_flush(setup: Setup) -> Iterator[str]:
    degrees, options, name = setup.degrees, setup.options, setup.degrees.pp_schedule
    if degrees.pp == 1 or name not in ASYNCHRONOUS:
        return
    only: dict[str, dict[str, Any]] = {
        "parallel": {"dp_shard": 1, "cp": 1, "tp": 1, "ep": 1, "offload": "none"},
        "precision": {"float8": "off"},
        "compile": {"mode": "off"},
        "activation_checkpoint": {"offload": False, "segment": 1},
        "comm": {"weights": "off", "gradients": "off", "check_state": False, "check_messages": False},
    }
    for key in ("param", "reduce", "master", "optimizer_state"):
        if getattr(options.precision, key) != "float64":  # the proof's own, which no file may name
            only["precision"][key] = "float32"
    if options.activation_checkpoint.mode != "none":
        only["activation_checkpoint"]["mode"] = "full"
    given = (
        (f"{table}.{key}", getattr(getattr(options, table), key), value)
        for table, keys in only.items()
        for key, value in keys.items()
    )
    yield from _unproved(name, given)
    model, saved = setup.model, setup.model.state_dict(keep_vars=True)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    pipeline = setup.resolved.pipeline
    reasons = {
        "stages share a weight": [names[0] for names in tied_names(model)],
        "a weight is frozen": [n for n, p in parameters.items() if not p.requires_grad],
        "training changes a buffer": [n for n in saved if n not in parameters],
        "a router counts over a step": [*routers(model)],
        "masks are of one step at a time": [*dropouts(model)],
        "stages run the whole forward": ["whole_forward"] * bool(pipeline and pipeline.whole_forward),
    }
    for why, names in reasons.items():
        if names:
            yield (
                f"parallel.pp_schedule: {name} is not proved where {why}, as {names[0]}; use"
                ' parallel.pp_schedule = "1F1B", or another model'
            )


@RUN_OF_STEP.add(
    "with PipeDream and PipeDream2BW, no key needs numbers of all stages before a step: max_norm is 0,"
    " no z_loss, no skip_nonfinite; the optimizer is AdamW on the device, and no islands, no LoRA",
    "no stage waits for the others' steps",
)
def _run_without_flush(job: "Job") -> Iterator[str]:
    config, name = job.config, job.degrees.pp_schedule
    if job.degrees.pp == 1 or name not in ASYNCHRONOUS:
        return
    train, optimizer = config.train, config.optimizer
    if train.max_norm:
        yield (
            f"train.max_norm: {train.max_norm:g} needs the norm of all stages before any of them takes"
            f" its step, and {name} waits for none; use train.max_norm = 0.0"
        )
    given = [
        ("train.z_loss", train.z_loss, 0.0),
        ("train.skip_nonfinite", train.skip_nonfinite, False),
        ("metrics.noise_scale", config.metrics.noise_scale, False),
        ("metrics.slow_rank", config.metrics.slow_rank, 0.0),
        ("optimizer.name", optimizer.name, "adamw"),
        ("optimizer.offload", optimizer.offload, "none"),
        ("model.lora.rank", config.model.lora.rank, 0),
        ("checkpoint.memory", config.checkpoint.memory, 0),
        ("parallel.speeds", config.parallel.speeds, ()),
    ]
    yield from _unproved(name, given)
    others = any(task(config) for _, task in provided("task"))
    if job.islands > 1 or others or find_model(config.model.name).task:
        yield (
            f"parallel.pp_schedule: {name} is proved for the next token alone, and without islands; use"
            ' parallel.pp_schedule = "1F1B"'
        )


COMPOSITION: list[Rule[Setup]] = MESH + STEP + COMM


def check_setup(setup: Setup) -> None:
    """Raise ConfigError, with all problems, if ``compose.apply`` cannot carry out ``setup``."""
    if problems := problems_of(COMPOSITION, setup):
        raise ConfigError(*problems)
