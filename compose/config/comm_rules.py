"""Rules of compressed messages: what [comm] may ask for on a mesh."""

from torch.distributed.tensor.parallel import PrepareModuleInput, RowwiseParallel

from compose.config.addons import brought
from compose.config.rule import Rule, Setup, all_keys_read
from compose.errors import ConfigError
from compose.parallel.stream_messages import SendsActivations


def _ranks(setup: Setup) -> tuple[int, int]:
    """Return the replicas of each shard, and the ranks that share parameters."""
    degrees = setup.degrees
    copies, parts = degrees.dp_replicate, degrees.dp_shard * degrees.cp
    return (copies * parts, 1) if degrees.zero == 0 else (copies, parts)


def _add_on(setup: Setup) -> None:
    if setup.options.comm.codes and not any(brought("compress")):
        raise ConfigError(
            "comm: no add-on compresses messages, since compose/config/addons.py names none; use"
            ' comm.weights = "off", comm.gradients = "off" and comm.activations = "off"'
        )


def _receivers(setup: Setup) -> None:
    comm, (replicas, shards) = setup.options.comm, _ranks(setup)
    problems = []
    if comm.weights != "off" and shards == 1:
        why = (
            "parallel.zero = 0 sends no weights"
            if setup.degrees.zero == 0
            else "dp_shard x cp is 1, and no weights are sent"
        )
        problems.append(f'comm.weights: "{comm.weights}", and {why}; use comm.weights = "off"')
    if comm.gradients != "off" and replicas * shards == 1:
        problems.append(
            f'comm.gradients: "{comm.gradients}", and dp_replicate x dp_shard x cp is 1, so that no'
            ' gradients are sent; use comm.gradients = "off"'
        )
    if problems:
        raise ConfigError(*problems)


def _activations(setup: Setup) -> None:
    kind, degrees = setup.options.comm.activations, setup.degrees
    if kind == "off":
        return
    cure = 'use comm.activations = "off"'
    if degrees.tp == 1 and degrees.ep == 1:
        raise ConfigError(
            f'comm.activations: "{kind}", and parallel.tp and parallel.ep are 1, so that no activations'
            f" are sent; {cure}"
        )
    if degrees.tp == 1:
        return
    if setup.options.precision.float8 != "off":
        raise ConfigError(
            f'comm.activations: "{kind}", and with parallel.tp = {degrees.tp} precision.float8 ='
            f' "{setup.options.precision.float8}" has messages of its own; {cure}'
        )
    plain = [
        name
        for name, style in setup.resolved.tensor
        if isinstance(style, PrepareModuleInput | RowwiseParallel)
        and not isinstance(style, SendsActivations)
    ]
    if plain:
        raise ConfigError(
            f'comm.activations: "{kind}", and plan.tensor gives {plain[0]} a style of PyTorch, whose'
            f" messages have no code; use LocalInput or LocalRowwise, or {cure}"
        )


def _block(setup: Setup) -> None:
    block = setup.options.comm.block
    if block < 16 or block & (block - 1):
        nearest = max(16, 1 << round(block - 1).bit_length())
        raise ConfigError(f"comm.block: {block} is no power of two from 16; nearest: {nearest}")


def _near(setup: Setup) -> None:
    near, zero, (replicas, shards) = setup.options.comm.near, setup.degrees.zero, _ranks(setup)
    if near == 1:
        return
    if zero > 0 and replicas > 1:
        raise ConfigError(
            f"comm.near: {near}, and with parallel.dp_replicate = {replicas} the ranks of dp_shard are"
            " the neighbours; use comm.near = 1"
        )
    ranks = replicas if zero == 0 else shards
    if ranks % near:
        allowed = [n for n in range(1, ranks + 1) if ranks % n == 0]
        nearest = min(allowed, key=lambda n: abs(n - near))
        what = "dp_replicate x cp" if zero == 0 else "dp_shard x cp"
        raise ConfigError(
            f"comm.near: {near} does not divide {what} = {ranks}, the ranks of data parallel; nearest:"
            f" {nearest}"
        )


def _kept(setup: Setup) -> None:
    if setup.options.comm.weights != "int4_diff":
        return
    degrees = setup.degrees
    if degrees.offload != "none":
        raise ConfigError(
            'comm.weights: "int4_diff" keeps what it sent last on the device, and parallel.offload ='
            f' "{degrees.offload}" is to keep weights off it; use comm.weights = "int8"'
        )
    if degrees.zero3_reshard:
        raise ConfigError(
            f'comm.weights: "int4_diff" keeps weights near by comm.near, and parallel.zero3_reshard ='
            f" {degrees.zero3_reshard} would keep them twice; use parallel.zero3_reshard = 0"
        )


def _types(setup: Setup) -> None:
    comm, precision = setup.options.comm, setup.options.precision
    if comm.weights != "off" and precision.float8 == "tensorwise":
        raise ConfigError(
            f'comm.weights: "{comm.weights}" codes numbers, and precision.float8 = "tensorwise" sends'
            ' weights as bytes; use comm.weights = "off", or precision.float8 = "rowwise"'
        )
    odd = [name for name, p in setup.model.named_parameters() if not p.is_floating_point()]
    if comm.compresses and odd:
        kind = str(setup.model.get_parameter(odd[0]).dtype).removeprefix("torch.")
        raise ConfigError(
            f"comm: the unit of {odd[0]} has parameters of several types, of which {kind} has no code;"
            ' use comm.weights = "off" and comm.gradients = "off"'
        )


COMM: list[Rule[Setup]] = [
    Rule(
        "compressed messages of comm go with the add-on that sends them",
        "compose/compression/ can be taken out, with its line in compose/config/addons.py",
        _add_on,
    ),
    Rule(
        "with comm.weights or comm.gradients, there are ranks that such messages go to",
        "a key that changes nothing would look like one that works",
        _receivers,
    ),
    Rule(
        "comm.activations goes with tp or ep, with the styles of compose.parallel.local_parallel, and"
        " without float8 over tp",
        "PyTorch's styles and torchao's send by themselves",
        _activations,
    ),
    Rule("comm.block is a power of two, 16 or more", "a Hadamard matrix has such a size", _block),
    Rule(
        "comm.near divides dp_shard x cp (dp_replicate x cp with zero 0), and is 1 with several"
        " replicas of shards",
        "ranks are cut into equal groups of neighbours; replicas are such groups already",
        _near,
    ),
    Rule(
        "comm.rank goes with powersgd, density with top_k, near with what is sent in blocks",
        "other messages would not read it",
        all_keys_read("comm", lambda setup: setup.options.comm),
    ),
    Rule(
        "comm.weights int4_diff goes without parallel.offload and zero3_reshard",
        "it keeps what it sent last on the device, and shares it among comm.near ranks itself",
        _kept,
    ),
    Rule(
        "what is compressed is a unit of numbers of one type",
        "float8 with one scale for a tensor sends bytes, which have no blocks",
        _types,
        upstream="torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py,"
        " _get_all_gather_input_metadatas",
    ),
]
