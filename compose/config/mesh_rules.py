"""Rules of the mesh: which degrees fit together, and fit a plan; and what [comm] may send on it."""

from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor.parallel import PrepareModuleInput, RowwiseParallel
from torch.nn.utils.parametrize import is_parametrized

from compose.config.addons import provided
from compose.config.setup import Rules, Setup, all_keys_read
from compose.errors import ConfigError
from compose.ops.dropout import dropouts
from compose.parallel.context_parallel import check_ulysses
from compose.parallel.expert_parallel import check_experts
from compose.parallel.hpz import check_hpz
from compose.parallel.lora_parallel import AdapterParallel
from compose.parallel.mesh import divisors, resolve_degrees
from compose.parallel.name_patterns import inside
from compose.parallel.stream_messages import SendsActivations
from compose.parallel.tensor_parallel import check_columns, check_heads
from compose.pipeline.schedules import placement, stages_per_rank
from compose.pipeline.split import check_layers, check_stages, layer_names, stages_of

MESH = Rules[Setup]()


@MESH.add(
    "dp_replicate x dp_shard x cp x tp x pp is the number of ranks; one may be -1",
    "every rank has one place in the mesh",
)
def _degrees(setup: Setup) -> None:
    resolve_degrees(setup.degrees, setup.world_size)


@MESH.add(
    "ep divides dp_replicate x dp_shard x cp x tp",
    "expert parallel is laid over these ranks, which hold different tokens anyway",
)
def _expert_ranks(setup: Setup) -> Iterator[str]:
    degrees, ep = setup.degrees, setup.degrees.ep
    ranks = degrees.dp_replicate * degrees.dp_shard * degrees.cp * degrees.tp
    if ranks % ep:
        nearest = min(divisors(ranks), key=lambda d: abs(d - ep))
        yield (
            f"parallel.ep: {ep} does not divide dp_replicate x dp_shard x cp x tp = {ranks}, the ranks"
            f" it is taken from; nearest: {nearest}"
        )


@MESH.add("ep divides the experts", "every rank holds as many")
def _experts(setup: Setup) -> None:
    for name, _ in setup.resolved.expert:
        check_experts(len(next(setup.model.get_submodule(name).parameters())), setup.degrees.ep)


@MESH.add(
    "the plan says how to do what the degrees ask for",
    "a plan without styles for an axis would leave its ranks doing the same work",
)
def _plan_names(setup: Setup) -> Iterator[str]:
    degrees, plan, recompute = setup.degrees, setup.resolved, setup.options.activation_checkpoint
    compiled, float8 = setup.options.compile.mode, setup.options.precision.float8
    recomputed = "activation_checkpoint"
    wants = (
        (degrees.tp > 1, plan.tensor, "tensor", "parallel.tp = 1"),
        (degrees.cp > 1, plan.context, "context", "parallel.cp = 1"),
        (degrees.pp > 1, plan.pipeline, "pipeline", "parallel.pp = 1"),
        (degrees.ep > 1, plan.expert, "expert", "parallel.ep = 1"),
        (compiled == "block", plan.compile, "compile", 'compile.mode = "off"'),
        (recompute.mode != "none", plan.checkpoint, "checkpoint", f'{recomputed}.mode = "none"'),
        (recompute.offload, plan.checkpoint, "checkpoint", f"{recomputed}.offload = false"),
        (float8 != "off", plan.float8, "float8", 'precision.float8 = "off"'),
    )
    for wanted, given, part, cure in wants:
        if wanted and not given:
            yield f"plan.{part}: the model's plan has nothing under it; add it, or use {cure}"


@MESH.add(
    "tp divides the query heads, and divides or is divided by the key/value heads",
    "a rank computes whole heads; fewer key/value heads than ranks are shared by neighbours",
)
def _heads(setup: Setup) -> None:
    if setup.resolved.heads:
        check_heads(*setup.resolved.heads, setup.degrees.tp)


@MESH.add(
    "every tp rank gets a column of each weight that is cut by columns, and some of sharded logits",
    "a rank without one has an empty shard, whose shape FSDP gets wrong, and no part of a loss",
    upstream="torch/distributed/fsdp/_fully_shard/_fsdp_common.py, _get_dim_chunked_size",
)
def _columns(setup: Setup) -> None:
    check_columns(setup.model, setup.resolved.tensor, setup.degrees.tp, setup.resolved.output)


@MESH.add(
    "with tp, no weight is computed from others, as weight_norm does",
    "styles cut a module's own parameters, and DTensor does not know such functions",
)
def _parametrized(setup: Setup) -> Iterator[str]:
    model, placed = setup.model, {*dict(setup.resolved.tensor), *setup.resolved.replicate}
    computed = [name for name, module in model.named_modules() if is_parametrized(module)]
    results = [name for name in computed if name in placed or inside(name, placed)]
    if setup.degrees.tp > 1 and results:
        yield (
            f"plan.tensor: {results[0]} computes its weight from others (weight_norm or the like), and"
            " PyTorch has no DTensor form of that; use parallel.tp = 1, or remove_parametrizations"
        )


@MESH.add(
    "with tp, the plan places each dropout",
    "a mask belongs to the whole tensor, and a plain tensor does not tell which part of it it is",
)
def _dropouts(setup: Setup) -> Iterator[str]:
    placed = {*dict(setup.resolved.tensor), *setup.resolved.replicate}
    adapters = {name for name, style in setup.resolved.tensor if isinstance(style, AdapterParallel)}
    unplaced = [n for n in dropouts(setup.model) if n not in placed and not inside(n, adapters)]
    if setup.degrees.tp > 1 and unplaced:
        yield (
            f"plan.tensor: no style says which part of its input the dropout {unplaced[0]} has on a"
            " rank; list it in replicate if all, or give it SequenceParallel(sequence_dim=n,"
            " use_local_output=True) if a part of dim n"
        )


@MESH.add(
    "with pp, no nn.Dropout is in two layers",
    "its masks depend on how often it has run, and a stage does not see the others",
)
def _shared_dropouts(setup: Setup) -> Iterator[str]:
    model, pipeline, first = setup.model, setup.resolved.pipeline, dict[int, tuple[str, str]]()
    if setup.degrees.pp == 1 or pipeline is None:
        return
    for part in stages_of(model, pipeline, [1] * len(layer_names(model, pipeline))):
        inner = model.get_submodule(part).named_modules(prefix=part, remove_duplicate=False)
        for name, module in inner:
            place, other = first.setdefault(id(module), (part, name))
            if type(module) is nn.Dropout and module.p > 0 and place != part:
                yield (
                    f"plan.pipeline: {other} and {name} are one nn.Dropout, whose masks depend on how"
                    " often it has run; give each layer its own, or use parallel.pp = 1"
                )
                return


@MESH.add(
    "with cp_method ulysses, cp divides the query heads that tp leaves, and divides or is divided"
    " by the key/value heads",
    "ranks trade sequence for whole heads; ring and allgather do not",
)
def _ulysses(setup: Setup) -> None:
    degrees = setup.degrees
    if setup.resolved.heads and degrees.cp_method == "ulysses":
        check_ulysses(*setup.resolved.heads, degrees.cp, degrees.tp)


@MESH.add(
    "with cp, modules of PyTorch that mix tokens (RNNs, nn.MultiheadAttention, nn.Conv1d) have a style"
    " of plan.context",
    "a rank has a part of each sequence, and they would take it for the whole",
)
def _mixing(setup: Setup) -> Iterator[str]:
    placed = {*dict(setup.resolved.context)}
    for name, module in setup.model.named_modules() if setup.degrees.cp > 1 else ():
        wide = isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1
        mixes = wide or isinstance(module, (nn.RNNBase, nn.MultiheadAttention))
        if mixes and name not in placed and not inside(name, placed):
            yield (
                f"plan.context: {name} is {type(module).__name__}, which mixes tokens, and a rank of cp"
                " has a part of them; give it a style that exchanges them, or use parallel.cp = 1"
            )
            return


@MESH.add(
    "with several ranks of data or cp, no nn.Embedding has scale_grad_by_freq",
    "it counts how often a token is in one forward, and each rank has other tokens",
)
def _own_tokens(setup: Setup) -> Iterator[str]:
    degrees = setup.degrees
    several = degrees.dp_replicate * degrees.dp_shard * degrees.cp > 1
    for name, module in setup.model.named_modules() if several else ():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.scale_grad_by_freq:
            yield (
                f"model: {name} has scale_grad_by_freq, which counts how often a token is in one"
                " forward, and each rank has others; leave it out, or use one rank of data and of cp"
            )


@MESH.add(
    "zero3_reshard, where it is not 0, goes with zero 3 and divides dp_shard x cp; it is not 1",
    "the ranks that share parameters are cut into equal groups; other stages free nothing between"
    " forward and backward, and nor would groups of one",
)
def _zero3_reshard(setup: Setup) -> None:
    degrees = setup.degrees
    check_hpz(degrees.zero3_reshard, degrees.zero, degrees.dp_shard * degrees.cp)


@MESH.add(
    "pp_schedule is known, and pp_virtual_stages what it is defined for",
    "GPipe and 1F1B run one stage on each rank, V-schedules two; the others any number",
)
def _schedule(setup: Setup) -> None:
    if setup.degrees.pp > 1:
        stages_per_rank(setup.degrees.pp_schedule, setup.degrees.pp_virtual_stages)


@MESH.add(
    "pp_layers has a number for each stage and adds up to the layers; no stage between the ends has"
    " none",
    "each layer runs once, and an idle stage only costs",
)
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


COMM = Rules[Setup]()


@COMM.add(
    "comm.check_messages is for gloo, and so for a CPU",
    "it looks at messages in host memory, when they were waited for; NCCL's are on the device",
)
def _check_messages(setup: Setup) -> Iterator[str]:
    if setup.options.comm.check_messages and setup.on_cuda:
        yield (
            "comm.check_messages: true looks at gloo's messages, and those of a GPU are NCCL's; use"
            " comm.check_every = 100 and comm.check_state = true, which look at what messages leave"
        )


def _ranks(setup: Setup) -> tuple[int, int]:
    """Return the replicas of each shard, and the ranks that share parameters."""
    degrees = setup.degrees
    copies, parts = degrees.dp_replicate, degrees.dp_shard * degrees.cp
    return (copies * parts, 1) if degrees.zero == 0 else (copies, parts)


@COMM.add(
    "compressed messages of comm go with the add-on that sends them",
    "compose/compression/ can be taken out, with its entry in compose/config/addons.py",
)
def _add_on(setup: Setup) -> Iterator[str]:
    if setup.options.comm.codes and not any(provided("compress")):
        yield (
            "comm: no add-on compresses messages, since compose/config/addons.py names none; use"
            ' comm.weights = "off", comm.gradients = "off" and comm.activations = "off"'
        )


@COMM.add(
    "with comm.weights or comm.gradients, there are ranks that such messages go to",
    "a key that changes nothing would look like one that works",
)
def _receivers(setup: Setup) -> Iterator[str]:
    comm, (replicas, shards) = setup.options.comm, _ranks(setup)
    if comm.weights != "off" and shards == 1:
        why = "dp_shard x cp is 1, and no weights are sent"
        why = why if setup.degrees.zero else "parallel.zero = 0 sends no weights"
        yield f'comm.weights: "{comm.weights}", and {why}; use comm.weights = "off"'
    if comm.gradients != "off" and replicas * shards == 1:
        yield (
            f'comm.gradients: "{comm.gradients}", and dp_replicate x dp_shard x cp is 1, so that no'
            ' gradients are sent; use comm.gradients = "off"'
        )


@COMM.add(
    "comm.activations goes with tp or ep, with the styles of compose.parallel.local_parallel, and"
    " without float8 over tp",
    "PyTorch's styles and torchao's send by themselves",
)
def _activations(setup: Setup) -> Iterator[str]:
    kind, float8 = setup.options.comm.activations, setup.options.precision.float8
    degrees = setup.degrees
    if kind == "off":
        return
    cure = 'use comm.activations = "off"'
    if degrees.tp == 1 and degrees.ep == 1:
        yield (
            f'comm.activations: "{kind}", and parallel.tp and parallel.ep are 1, so that no activations'
            f" are sent; {cure}"
        )
    elif degrees.tp > 1 and float8 != "off":
        yield (
            f'comm.activations: "{kind}", and with parallel.tp = {degrees.tp} precision.float8 ='
            f' "{float8}" has messages of its own; {cure}'
        )
    elif degrees.tp > 1:
        plain = (PrepareModuleInput, RowwiseParallel)
        styles = [one for one in setup.resolved.tensor if isinstance(one[1], plain)]
        for name in [name for name, style in styles if not isinstance(style, SendsActivations)][:1]:
            yield (
                f'comm.activations: "{kind}", and plan.tensor gives {name} a style of PyTorch, whose'
                f" messages have no code; use LocalInput or LocalRowwise, or {cure}"
            )


@COMM.add("comm.block is a power of two, 16 or more", "a Hadamard matrix has such a size")
def _block(setup: Setup) -> Iterator[str]:
    block = setup.options.comm.block
    if block < 16 or block & (block - 1):
        low = 1 << max(1, block).bit_length() - 1
        nearest = max(16, low if block - low <= 2 * low - block else 2 * low)
        yield f"comm.block: {block} is no power of two from 16; nearest: {nearest}"


@COMM.add(
    "comm.near divides dp_shard x cp (dp_replicate x cp with zero 0), and is 1 with several"
    " replicas of shards",
    "ranks are cut into equal groups of neighbours; replicas are such groups already",
)
def _near(setup: Setup) -> Iterator[str]:
    near, zero, (replicas, shards) = setup.options.comm.near, setup.degrees.zero, _ranks(setup)
    if near == 1:
        return
    if zero > 0 and replicas > 1:
        yield (
            f"comm.near: {near}, and with parallel.dp_replicate = {replicas} the ranks of dp_shard are"
            " the neighbours; use comm.near = 1"
        )
        return
    ranks = replicas if zero == 0 else shards
    if ranks % near:
        nearest = min(divisors(ranks), key=lambda n: abs(n - near))
        what = "dp_replicate x cp" if zero == 0 else "dp_shard x cp"
        yield (
            f"comm.near: {near} does not divide {what} = {ranks}, the ranks of data parallel; nearest:"
            f" {nearest}"
        )


COMM.add(
    "comm.rank goes with powersgd, density with top_k, near with what is sent in blocks",
    "other messages would not read it",
)(all_keys_read("comm", lambda setup: setup.options.comm))


@COMM.add(
    "comm.weights int4_diff goes without parallel.offload and zero3_reshard",
    "it keeps what it sent last on the device, and shares it among comm.near ranks itself",
)
def _kept(setup: Setup) -> Iterator[str]:
    degrees = setup.degrees
    if setup.options.comm.weights != "int4_diff":
        return
    if degrees.offload != "none":
        yield (
            'comm.weights: "int4_diff" keeps what it sent last on the device, and parallel.offload ='
            f' "{degrees.offload}" is to keep weights off it; use comm.weights = "int8"'
        )
    elif degrees.zero3_reshard:
        yield (
            f'comm.weights: "int4_diff" keeps weights near by comm.near, and parallel.zero3_reshard ='
            f" {degrees.zero3_reshard} would keep them twice; use parallel.zero3_reshard = 0"
        )


@COMM.add(
    "what is compressed is a unit of numbers of one type",
    "float8 with one scale for a tensor sends bytes, which have no blocks",
    upstream="torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py,"
    " _get_all_gather_input_metadatas",
)
def _types(setup: Setup) -> Iterator[str]:
    comm, precision = setup.options.comm, setup.options.precision
    if comm.weights != "off" and precision.float8 == "tensorwise":
        yield (
            f'comm.weights: "{comm.weights}" codes numbers, and precision.float8 = "tensorwise" sends'
            ' weights as bytes; use comm.weights = "off", or precision.float8 = "rowwise"'
        )
        return
    odd = [name for name, p in setup.model.named_parameters() if not p.is_floating_point()]
    if comm.compresses and odd:
        kind = str(setup.model.get_parameter(odd[0]).dtype).removeprefix("torch.")
        yield (
            f"comm: the unit of {odd[0]} has parameters of several types, of which {kind} has no code;"
            ' use comm.weights = "off" and comm.gradients = "off"'
        )
