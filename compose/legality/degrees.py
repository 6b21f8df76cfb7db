"""Rules of the mesh: which degrees, and of what sizes, go together."""

from typing import Any

from compose.errors import ConfigError
from compose.legality.job import Job
from compose.legality.rule import Rule, micro_batches
from compose.parallel.context_parallel import check_ulysses
from compose.parallel.expert_parallel import check_experts
from compose.parallel.mesh import resolve_degrees
from compose.parallel.secondary_shards import check_near
from compose.parallel.tensor_parallel import check_columns, check_heads
from compose.pipeline.schedules import build_table, placement, stages_per_rank
from compose.pipeline.split import check_layers, check_stages, layer_names

_TRIED = 1_000_000  # sizes, of which a cure is the largest that divides


def _degrees(job: Job) -> None:
    resolve_degrees(job.degrees, job.world_size)


def _expert_ranks(job: Job) -> None:
    degrees = job.degrees
    ranks = degrees.dp_replicate * degrees.dp_shard * degrees.cp * degrees.tp
    if ranks % degrees.ep:
        nearest = min(
            (d for d in range(1, ranks + 1) if ranks % d == 0), key=lambda d: abs(d - degrees.ep)
        )
        raise ConfigError(
            f"parallel.ep: {degrees.ep} does not divide dp_replicate x dp_shard x cp x tp = {ranks},"
            f" the ranks it is taken from; nearest: {nearest}"
        )


def _experts(job: Job) -> None:
    for name, _ in job.resolved.expert:
        check_experts(len(next(job.model.get_submodule(name).parameters())), job.degrees.ep)


def _global_batch(job: Job) -> None:
    train, ranks = job.config.train, job.degrees.dp_replicate * job.degrees.dp_shard
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
    most = min(micro_batch, share)
    if most > _TRIED:
        return ""
    best = max(size for size in range(1, most + 1) if share % size == 0)
    return f", or train.micro_batch = {best}"


def _heads(job: Job) -> None:
    if job.plan.heads:
        check_heads(*job.plan.heads, job.degrees.tp)


def _columns(job: Job) -> None:
    check_columns(job.model, job.resolved.tensor, job.degrees.tp)


def _sequence(job: Job) -> None:
    seq_len, tp = job.config.train.seq_len, job.degrees.tp
    # With cp a sequence is padded to what both divide.
    if seq_len % tp == 0 or job.degrees.cp > 1:
        return
    if not job.degrees.sequence and not job.plan.expert:
        return
    nearest = max(1, round(seq_len / tp)) * tp
    cure = "" if job.plan.expert else ", or parallel.sequence = false"
    raise ConfigError(
        f"train.seq_len: {seq_len} is not a multiple of parallel.tp {tp}, which"
        f" {'a mixture of experts' if job.plan.expert else 'parallel.sequence'} needs;"
        f" nearest: {nearest}{cure}"
    )


def _ulysses(job: Job) -> None:
    degrees = job.degrees
    if job.plan.heads and degrees.cp_method == "ulysses":
        check_ulysses(*job.plan.heads, degrees.cp, degrees.tp)


def _flash(job: Job) -> None:
    if job.degrees.cp > 1 and job.config.precision.param == "float32" and job.on_cuda:
        raise ConfigError(
            "precision.param: float32 has no flash attention on CUDA, which parallel.cp needs;"
            " use bfloat16"
        )


def _zero3_reshard(job: Job) -> None:
    degrees = job.degrees
    check_near(degrees.zero3_reshard, degrees.zero, degrees.dp_shard * degrees.cp)


def _schedule(job: Job) -> None:
    if job.degrees.pp > 1:
        stages_per_rank(job.degrees.pp_schedule, job.degrees.pp_virtual_stages)


def _micro_batches(job: Job) -> None:
    degrees, count = job.degrees, micro_batches(job.config)
    if degrees.pp == 1 or not count:
        return
    try:
        build_table(degrees.pp_schedule, degrees.pp, degrees.pp_virtual_stages, count)
    except ConfigError as error:
        ranks = degrees.dp_replicate * degrees.dp_shard
        unit = f" (train.global_batch is {ranks * job.config.train.micro_batch} times that)"
        raise ConfigError(
            *(f"{p}{unit if '; nearest: ' in p else ''}" for p in error.problems)
        ) from None


def _layers(job: Job) -> None:
    degrees, pipeline = job.degrees, job.plan.pipeline
    if degrees.pp == 1 or pipeline is None:
        return
    try:
        stages = len(placement(degrees.pp_schedule, degrees.pp, degrees.pp_virtual_stages))
    except ConfigError:
        return  # another rule's affair
    n_layers = len(layer_names(job.model, pipeline))
    if degrees.pp_layers:
        check_layers(degrees.pp_layers, stages, n_layers)
    else:
        check_stages(stages, degrees.pp, n_layers)


def _plan_names(job: Job) -> None:
    name = job.config.model.name
    wants: dict[str, tuple[bool, Any, str]] = {
        "tensor": (job.degrees.tp > 1, job.plan.tensor, "parallel.tp = 1"),
        "context": (job.degrees.cp > 1, job.plan.context, "parallel.cp = 1"),
        "pipeline": (job.degrees.pp > 1, job.plan.pipeline, "parallel.pp = 1"),
        "expert": (job.degrees.ep > 1, job.plan.expert, "parallel.ep = 1"),
        "compile": (
            job.config.compile.mode == "block",
            job.plan.compile,
            'compile.mode = "off"',
        ),
        "checkpoint": (
            job.config.activation_checkpoint.mode != "none",
            job.plan.checkpoint,
            'activation_checkpoint.mode = "none"',
        ),
        "float8": (
            job.config.precision.float8 != "off",
            job.plan.float8,
            'precision.float8 = "off"',
        ),
        "output": (job.config.train.loss_chunk > 0, job.plan.output, "train.loss_chunk = 0"),
        "checkpoint, for offload": (
            job.config.activation_checkpoint.offload,
            job.plan.checkpoint,
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


DEGREES = [
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
        "tp divides the query heads, and divides or is divided by the key/value heads",
        "a rank computes whole heads; fewer key/value heads than ranks are shared by neighbours",
        _heads,
    ),
    Rule(
        "every tp rank gets a column of each weight that is cut by columns",
        "a rank without one has an empty shard, whose shape FSDP gets wrong",
        _columns,
        upstream="torch/distributed/fsdp/_fully_shard/_fsdp_common.py, _get_dim_chunked_size",
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
        "zero3_reshard, where it is not 0, goes with zero 3 and divides dp_shard x cp; it is not 1",
        "the ranks that share parameters are cut into equal groups; other stages free nothing between"
        " forward and backward, and nor would groups of one",
        _zero3_reshard,
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
        "pp_layers has a number for each stage and adds up to the layers; no stage between the ends has"
        " none",
        "each layer runs once, and an idle stage only costs",
        _layers,
    ),
]
