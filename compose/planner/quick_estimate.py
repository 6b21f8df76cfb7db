"""A quick estimate of a candidate, without a record: it tells which candidates are worth one.

Its figures are rough. They rank candidates and are never shown as the estimate; the parts of its time
say what one candidate has over another.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from compose.config.job import Job
from compose.config.tables import Config
from compose.pipeline.schedules import stages_per_rank
from compose.planner import costs
from compose.planner.cluster import Cluster

MEMORY_ERROR = 4 / 3
"""How often a recorded rank's reserved bytes may stand in the quick estimate, at most; assumed."""
_STREAM = 12.0  # elements of the stream that a layer's norms, sums and casts move, for each element
_KEPT = {"none": 1.0, "selective": 0.55, "full": 0.0}  # of a layer's results that wait for backward
_AGAIN = {"none": 0.0, "selective": 0.35, "full": 1.0}  # of a forward that is computed again


@dataclass(frozen=True)
class Layers:
    """Equal layers of a model."""

    count: int
    products: tuple[tuple[int, int], ...]
    """(outputs, inputs) of each weight that every token meets."""
    experts: tuple[tuple[int, int, int], ...]
    """(experts, outputs, inputs) of each stack of experts."""

    @property
    def dense(self) -> int:
        """Parameters of one layer without experts."""
        return sum(n * k for n, k in self.products)

    @property
    def routed(self) -> int:
        """Parameters of all experts of one layer."""
        return sum(e * n * k for e, n, k in self.experts)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that a quick estimate takes."""

    layers: tuple[Layers, ...]
    ends: int
    """Parameters before and after the layers."""
    vocabulary: int
    width: int
    """Elements of the stream for each token."""
    top_k: int
    attention: float
    """FLOPs of attention for each token and layer, forward and backward."""
    axes: frozenset[str]
    """The axes of tp, cp, pp and ep that the model's plan can cut."""
    trained: float = 1.0
    """The part of the parameters that is trained."""

    @property
    def count(self) -> int:
        """The number of layers."""
        return sum(x.count for x in self.layers)


def shape_of(job: Job) -> ModelShape:
    """Return what a quick estimate takes of a job's model."""
    config, model = job.config.model.config, job.model
    inside = job.resolved.pipeline.layers if job.resolved.pipeline else ""
    routed = {id(p) for name, _ in job.resolved.expert for p in model.get_submodule(name).parameters()}
    results: dict[tuple[object, ...], int] = {}
    layers = model.get_submodule(inside).children() if inside else [model]
    held: set[int] = set()
    for layer in layers:
        weights = list(layer.parameters())
        held.update(id(p) for p in weights)
        products = tuple(tuple(p.shape) for p in weights if p.ndim == 2 and id(p) not in routed)
        experts = tuple(tuple(p.shape) for p in weights if p.ndim == 3 and id(p) in routed)
        results[products, experts] = results.get((products, experts), 0) + 1
    kinds = tuple(Layers(count, *key) for key, count in results.items())  # type: ignore[arg-type]
    top_k = getattr(config, "top_k", 1)
    ends = sum(p.numel() for p in model.parameters() if id(p) not in held)
    output = model.get_submodule(job.resolved.output) if job.resolved.output else None
    shape = next(output.parameters()).shape if output is not None else torch.Size((0, 1))
    active = shape.numel() + sum(
        kind.count * (kind.dense + sum(top_k * n * k for _, n, k in kind.experts)) for kind in kinds
    )
    rest = config.flops_per_token(job.config.train.seq_len) - 6 * active
    count = sum(kind.count for kind in kinds)
    cuts = {
        "tp": job.resolved.tensor,
        "cp": job.resolved.context,
        "pp": job.resolved.pipeline,
        "ep": job.resolved.expert,
    }
    return ModelShape(
        kinds,
        ends,
        shape[0],
        shape[1],
        top_k,
        max(0.0, rest) / max(1, count),
        frozenset(axis for axis, cut in cuts.items() if cut),
        sum(p.numel() for p in model.parameters() if p.requires_grad)
        / sum(p.numel() for p in model.parameters()),
    )


@dataclass(frozen=True)
class QuickEstimate:
    """A rough estimate."""

    seconds: Mapping[str, float]
    """Seconds of a step by what takes them: compute, tp, cp, ep, dp, bubble, optimizer."""
    bytes: Mapping[str, float]
    """Bytes of the fullest rank: weights, optimizer, gradients, gathered, activations, logits."""
    host: float = 0.0
    """Bytes of its host memory."""

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def memory(self) -> float:
        """Bytes of the fullest rank."""
        return sum(self.bytes.values())


def quick(shape: ModelShape, config: Config, cluster: Cluster) -> QuickEstimate:
    """Return the rough estimate of a config whose degrees are known."""
    seconds, size = _seconds(shape, config, cluster), _bytes(shape, config)
    return QuickEstimate(seconds, size, _host_bytes(shape, config))


def micro_batches(config: Config) -> int:
    """Return the micro-batches of a step, or 0 if the division has a remainder."""
    ranks = config.parallel.dp_replicate * config.parallel.dp_shard
    whole, rest = divmod(config.train.global_batch, ranks * config.train.micro_batch)
    return 0 if rest else whole


def _seconds(shape: ModelShape, config: Config, cluster: Cluster) -> dict[str, float]:
    parallel, train = config.parallel, config.train
    pp, cp, tp, ep = parallel.pp, parallel.cp, parallel.tp, parallel.ep
    count, tokens = micro_batches(config), train.micro_batch * train.seq_len // cp
    dtype, mode = config.precision.param, config.activation_checkpoint.mode
    width = config.precision.param_dtype.itemsize
    again = _AGAIN.get(mode, 0.5)
    forward = sent_tp = sent_ep = 0.0
    sequence = tokens * shape.width * width
    attended = costs.attention_seconds(
        cluster, shape.attention / 3 * tokens / tp, 4 * sequence / tp, dtype, 128, False
    )
    for kind in shape.layers:
        one = sum(
            costs.product_seconds(cluster, tokens, -(-n // tp), k, 1, dtype) for n, k in kind.products
        )
        rows = tokens * shape.top_k // tp
        for experts, n, k in kind.experts:
            local = max(1, experts // ep)
            one += costs.product_seconds(cluster, max(1, rows // local), n, k, local, dtype)
        one += attended
        moved = _STREAM * sequence / (tp if parallel.sequence else 1)
        moved += 3 * sum(n for n, _ in kind.products) * tokens * width / tp
        one += costs.memory_seconds(cluster, moved, 12)
        forward += kind.count * one
        if tp > 1:
            each = costs.collective_seconds(cluster, "all_gather", sequence, tp, 1)
            sent_tp += kind.count * each * (8 + 4 * again)
        if kind.experts and ep > 1:
            each = costs.collective_seconds(cluster, "all_to_all", rows * shape.width * width, ep, 1)
            sent_ep += kind.count * each * (4 + 2 * again)
    sent_cp = 0.0
    if cp > 1:
        passed = costs.collective_seconds(cluster, "p2p", sequence / tp, 2, tp) * (cp - 1)
        sent_cp = shape.count * 3 * max(0.0, passed - attended)
    virtual = stages_per_rank(parallel.pp_schedule, parallel.pp_virtual_stages) if pp > 1 else 1
    head = 3 * costs.product_seconds(cluster, tokens, -(-shape.vocabulary // tp), shape.width, 1, dtype)
    # The slowest rank: layers are whole, and the last stage has the output projection too.
    layer = (3 + again) * forward / shape.count
    slowest = -(-(shape.count + head / layer) // (pp * virtual)) * virtual if pp > 1 else shape.count
    share = slowest / shape.count
    compute = slowest * layer + (head if pp == 1 else 0.0)
    stage = compute + (sent_tp + sent_ep + sent_cp) * share
    zero_bubble = parallel.pp_schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    bubble = stage * (pp - 1) / virtual * (1 / 3 if zero_bubble else 1)
    if cluster.device.sharing > 1:  # ranks that wait leave their processors to the others
        bubble *= max(0.0, 1 - cluster.device.sharing / pp)
    held = sum(_held(shape, config))
    return {
        "compute": compute * count,
        "tp": sent_tp * share * count,
        "ep": sent_ep * share * count,
        "cp": sent_cp * share * count,
        "bubble": bubble,
        "dp": _data(shape, config, cluster, compute, count),
        "optimizer": costs.memory_seconds(cluster, 28 * shape.trained * held / _state_ranks(config)),
        **(_offload(config, cluster, held, count) if parallel.offload == "cpu" else {}),
    }


def _offload(config: Config, cluster: Cluster, held: float, count: int) -> dict[str, float]:
    """Return the seconds of shards that are copied to the device and back, and of the host's optimizer.

    Each micro-batch copies its shards for forward and for backward, and its gradients back.
    """
    own = held / _state_ranks(config)
    copied = 3 * count * costs.host_seconds(cluster, own * config.precision.master_dtype.itemsize)
    return {"offload": copied, "optimizer": costs.processor_seconds(cluster, 28 * own)}


def _host_bytes(shape: ModelShape, config: Config) -> float:
    """Return the bytes of host memory of a rank. Pinned tensors are larger by a third on average.

    Their sizes are rounded up to a power of two.
    """
    own, precision = sum(_held(shape, config)) / _state_ranks(config), config.precision
    trained, pinned = own * shape.trained, 4 / 3
    state = 2 * trained * precision.state_dtype.itemsize
    if config.parallel.offload == "cpu":
        return pinned * (own + trained) * precision.master_dtype.itemsize + state
    return pinned * state if config.optimizer.offload == "cpu" else 0.0


def _data(shape: ModelShape, config: Config, cluster: Cluster, compute: float, count: int) -> float:
    """Return the seconds that data parallel's messages do not hide behind ``compute``."""
    parallel = config.parallel
    width = config.precision.param_dtype.itemsize
    wide = config.precision.reduce_dtype.itemsize
    dense, routed = _held(shape, config)
    over, shared = parallel.dp_shard * parallel.cp, parallel.dp_shard * parallel.cp * parallel.tp
    gather = reduce = 0.0
    # Experts are sharded over the ranks that hold the same ones, which lie ep apart.
    for held, ranks, stride in (
        (dense, over, parallel.tp),
        (routed, max(1, shared // parallel.ep), parallel.ep),
    ):
        if ranks > 1 and held:
            gather += costs.collective_seconds(cluster, "all_gather", held * width, ranks, stride)
            reduce += costs.collective_seconds(
                cluster, "reduce_scatter", shape.trained * held * wide, ranks, stride
            )
    forward, backward = compute / 3, compute * 2 / 3
    if parallel.zero == 3:
        exposed = (max(0.0, gather - forward) + max(0.0, gather + reduce - backward)) * count
    else:
        reductions = count if parallel.zero == 2 else 1
        exposed = max(0.0, gather - forward) + max(0.0, reduce - backward) * reductions
    exposed += (gather + reduce) / 40  # the first unit's gather and the last one's reduction
    if parallel.dp_replicate > 1:
        own = (dense + routed) * wide / (over if parallel.zero else 1)
        replicas, stride = parallel.dp_replicate, over * parallel.tp
        exposed += costs.collective_seconds(cluster, "all_reduce", own, replicas, stride) / 2
    return exposed


def _held(shape: ModelShape, config: Config) -> tuple[float, float]:
    """Return the parameters of the fullest stage on one rank without data parallel: dense, experts."""
    parallel = config.parallel
    dense = sum(x.count * x.dense for x in shape.layers) / parallel.tp
    routed = sum(x.count * x.routed for x in shape.layers) / parallel.ep
    ends = shape.ends / parallel.tp / (2 if parallel.pp > 1 else 1)
    return dense / parallel.pp + ends, routed / parallel.pp


def _state_ranks(config: Config) -> int:
    return config.parallel.dp_shard * config.parallel.cp if config.parallel.zero else 1


def _bytes(shape: ModelShape, config: Config) -> dict[str, float]:
    parallel, train, precision = config.parallel, config.train, config.precision
    held, ranks = sum(_held(shape, config)), _state_ranks(config)
    param, reduce = precision.param_dtype.itemsize, precision.reduce_dtype.itemsize
    master, state = precision.master_dtype.itemsize, precision.state_dtype.itemsize
    layer = max(x.dense / parallel.tp + x.routed / parallel.ep for x in shape.layers)
    whole = 2 * max(layer, shape.ends / 2 / parallel.tp)
    zero = parallel.zero
    grads = held * reduce if zero < 2 else 0.0
    tokens = train.micro_batch * train.seq_len / parallel.cp
    most = max(
        sum(n for n, _ in x.products) + sum(n for _, n, _ in x.experts) * shape.top_k
        for x in shape.layers
    )
    share = parallel.tp if parallel.sequence else 1
    kept = _KEPT.get(config.activation_checkpoint.mode, 0.5)
    one = tokens * param
    each = one * (shape.width / share + kept * (6 * shape.width / share + 1.7 * most / parallel.tp))
    count = micro_batches(config)
    flight = min(count, parallel.pp)
    buffers = 0.0
    if parallel.pp > 1:
        stages = stages_per_rank(parallel.pp_schedule, parallel.pp_virtual_stages)
        if stages > 1:
            flight = min(count, flight + (parallel.pp - 1) / 2)
        # PipelineStage has a buffer for what each micro-batch receives, forward and backward.
        buffers = 2 * stages * count * one * shape.width / share
    working = one * (8 * shape.width / share + 4 * most / parallel.tp)
    shown = min(tokens, train.loss_chunk) if train.loss_chunk else tokens
    logits = shown * shape.vocabulary / (parallel.tp if parallel.loss else 1) * 2 * param
    part, frozen = shape.trained, param
    if parallel.offload == "cpu":
        master = state = frozen = 0
    return {
        "weights": held * (part * master + (1 - part) * frozen) / ranks,
        "optimizer": part * held * 2 * state / ranks,
        "gradients": part * (held * master / (ranks if zero >= 1 else 1) + (grads if zero == 1 else 0)),
        "gathered": whole * (param + reduce) if zero == 3 else held * param * (ranks > 1 or param < 4),
        "activations": each * shape.count / parallel.pp * flight + working + buffers,
        # A layer's backward begins after the loss's own memory was freed.
        "logits": max(0.0, logits - working),
    }
