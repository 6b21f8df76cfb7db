"""Rules of the mesh: which degrees fit together, and fit a plan."""

from torch.nn.utils.parametrize import is_parametrized

from compose.config.rule import Rule, Setup
from compose.errors import ConfigError
from compose.ops.dropout import dropouts
from compose.parallel.context_parallel import check_ulysses
from compose.parallel.expert_parallel import check_expert_ranks, check_experts
from compose.parallel.hpz import check_hpz
from compose.parallel.mesh import resolve_degrees
from compose.parallel.name_patterns import inside
from compose.parallel.tensor_parallel import check_columns, check_heads
from compose.pipeline.schedules import placement, stages_per_rank
from compose.pipeline.split import check_layers, check_stages, layer_names


def _degrees(setup: Setup) -> None:
    resolve_degrees(setup.degrees, setup.world_size)


def _expert_ranks(setup: Setup) -> None:
    degrees = setup.degrees
    ranks = degrees.dp_replicate * degrees.dp_shard * degrees.cp * degrees.tp
    check_expert_ranks(degrees.ep, ranks)


def _experts(setup: Setup) -> None:
    for name, _ in setup.resolved.expert:
        check_experts(len(next(setup.model.get_submodule(name).parameters())), setup.degrees.ep)


def _plan_names(setup: Setup) -> None:
    degrees, plan, recompute = setup.degrees, setup.resolved, setup.options.activation_checkpoint
    compiled, float8 = setup.options.compile.mode, setup.options.precision.float8
    wants = (
        (degrees.tp > 1, plan.tensor, "tensor", "parallel.tp = 1"),
        (degrees.cp > 1, plan.context, "context", "parallel.cp = 1"),
        (degrees.pp > 1, plan.pipeline, "pipeline", "parallel.pp = 1"),
        (degrees.ep > 1, plan.expert, "expert", "parallel.ep = 1"),
        (compiled == "block", plan.compile, "compile", 'compile.mode = "off"'),
        (
            recompute.mode != "none",
            plan.checkpoint,
            "checkpoint",
            'activation_checkpoint.mode = "none"',
        ),
        (recompute.offload, plan.checkpoint, "checkpoint", "activation_checkpoint.offload = false"),
        (float8 != "off", plan.float8, "float8", 'precision.float8 = "off"'),
    )
    problems = [
        f"plan.{part}: the model's plan has nothing under it; add it, or use {cure}"
        for wanted, given, part, cure in wants
        if wanted and not given
    ]
    if problems:
        raise ConfigError(*problems)


def _heads(setup: Setup) -> None:
    if setup.resolved.heads:
        check_heads(*setup.resolved.heads, setup.degrees.tp)


def _columns(setup: Setup) -> None:
    check_columns(setup.model, setup.resolved.tensor, setup.degrees.tp)


def _parametrized(setup: Setup) -> None:
    model, placed = setup.model, {*dict(setup.resolved.tensor), *setup.resolved.replicate}
    computed = [name for name, module in model.named_modules() if is_parametrized(module)]
    found = [name for name in computed if name in placed or inside(name, placed)]
    if setup.degrees.tp > 1 and found:
        raise ConfigError(
            f"plan.tensor: {found[0]} computes its weight from others (weight_norm or the like), and"
            " PyTorch has no DTensor form of that; use parallel.tp = 1, or remove_parametrizations"
        )


def _dropouts(setup: Setup) -> None:
    placed = {*dict(setup.resolved.tensor), *setup.resolved.replicate}
    unplaced = [name for name in dropouts(setup.model) if name not in placed]
    if setup.degrees.tp > 1 and unplaced:
        raise ConfigError(
            f"plan.tensor: no style says which part of its input the dropout {unplaced[0]} has on a"
            " rank; list it in replicate if all, or give it SequenceParallel(sequence_dim=n,"
            " use_local_output=True) if a part of dim n"
        )


def _ulysses(setup: Setup) -> None:
    degrees = setup.degrees
    if setup.resolved.heads and degrees.cp_method == "ulysses":
        check_ulysses(*setup.resolved.heads, degrees.cp, degrees.tp)


def _zero3_reshard(setup: Setup) -> None:
    degrees = setup.degrees
    check_hpz(degrees.zero3_reshard, degrees.zero, degrees.dp_shard * degrees.cp)


def _schedule(setup: Setup) -> None:
    if setup.degrees.pp > 1:
        stages_per_rank(setup.degrees.pp_schedule, setup.degrees.pp_virtual_stages)


def _layers(setup: Setup) -> None:
    degrees, pipeline = setup.degrees, setup.resolved.pipeline
    if degrees.pp == 1 or pipeline is None:
        return
    try:
        stages = len(placement(degrees.pp_schedule, degrees.pp, degrees.pp_virtual_stages))
    except ConfigError:
        return  # another rule reports this
    n_layers = len(layer_names(setup.model, pipeline))
    if degrees.pp_layers:
        check_layers(degrees.pp_layers, stages, n_layers)
    else:
        check_stages(stages, degrees.pp, n_layers)


MESH: list[Rule[Setup]] = [
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
        "with tp, no weight is computed from others, as weight_norm does",
        "styles cut a module's own parameters, and DTensor does not know such functions",
        _parametrized,
    ),
    Rule(
        "with tp, the plan places each dropout",
        "a mask belongs to the whole tensor, and a plain tensor does not tell which part of it it is",
        _dropouts,
    ),
    Rule(
        "with cp_method ulysses, cp divides the query heads that tp leaves, and divides or is divided"
        " by the key/value heads",
        "ranks trade sequence for whole heads; ring and allgather do not",
        _ulysses,
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
        "pp_layers has a number for each stage and adds up to the layers; no stage between the ends has"
        " none",
        "each layer runs once, and an idle stage only costs",
        _layers,
    ),
]
