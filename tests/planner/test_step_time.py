"""The time that the planner predicts: schedules against hand-made sums, and what hides what."""

from dataclasses import replace

import pytest

from compose.config.job import Job
from compose.ops.kernel_table import kernel_that_runs
from compose.parallel.mesh import Parallel
from compose.planner import costs
from compose.planner.cluster import Cluster, load_cluster
from compose.planner.few_layers import busiest_rank
from compose.planner.memory import STEP
from compose.planner.record import (
    BACKWARD,
    Allocation,
    Operator,
    Record,
    RecordedMessage,
    StepSegment,
    Wait,
)
from compose.planner.step_time import (
    Seconds,
    action_seconds,
    after_result,
    axis_of,
    grown,
    in_pieces,
    operator_seconds,
)
from compose.planner.trace import RankStep, trace
from tests.support.helpers import make_job

NODE = range(8)


def test_what_is_exposed_does_not_fall_below_nothing() -> None:
    base = {"all": 5.0, "product": 3.0, "exposed dp_shard": 2.0, "sent dp_shard": 4.0}
    longer = {"all": 5.5, "product": 4.0, "exposed dp_shard": 1.5, "sent dp_shard": 5.0}
    result = grown(base, [(10, longer)])
    assert result == {"all": 13.0, "product": 13.0, "exposed dp_shard": 0.0, "sent dp_shard": 14.0}


# A record by hand: a gather on stream 1 while stream 0 computes, and then waits.


def cluster_of(dispatch: float = 0.0, message_units: int = 0) -> Cluster:
    """An H100 node."""
    cluster = load_cluster("h100_sxm")
    device = replace(cluster.device, dispatch=dispatch, message_units=message_units, spread=0.0)
    plain = replace(cluster.efficiencies, kernels=1.0)
    return replace(cluster, device=device, efficiencies=plain)


def product(size: int) -> Operator:
    """A product of square matrices."""
    shape = (1, size, size, size)
    return Operator(1, 0, "aten.mm", "product", 2.0 * size**3, 6 * size**2, "bfloat16", shape)


def elementwise(size: int) -> Operator:
    """A kernel that reads and writes ``size`` bytes in all."""
    return Operator(1, 0, "aten.add", "memory", 0.0, size, "bfloat16", (size,))


def gather(stream: int) -> RecordedMessage:
    """An all-gather of 1 GiB in a node."""
    return RecordedMessage(1, stream, "all_gather", "dp", tuple(NODE), 2**30)


def seconds_of(
    work: list[Operator | RecordedMessage | Wait],
    cluster: Cluster,
    at: int | None = None,
    phase: str = "forward",
    unit: str = "layers.0",
) -> Seconds:
    """The seconds of an action of some work; event 0 is on stream 1 before the place ``at``."""
    record = Record(
        [StepSegment((-1, "setup", 0), "forward", ""), StepSegment((0, "F", 0), phase, unit)]
    )
    record.allocations = [Allocation(2**20, 0, 0, "", end=end) for end in (None, 1, 2, None)]
    record.work = work
    if at is not None:
        record.events, record.event_streams = {0: at}, {0: 1}
    return action_seconds(record, cluster, Parallel(dp_shard=8), 1, False)[0, "F", "last"]


def test_micro_batches_between_are_one_on_average() -> None:
    """A pipeline's record may have several, where a table splits the backward of some."""
    forwards = [StepSegment((0, "F", number), "forward", "layers.0") for number in range(5)]
    record = Record([StepSegment((-1, "setup", 0), "forward", ""), *forwards])
    record.work = [replace(product(4096), segment=segment) for segment in (1, 2, 2, 3, 4, 5)]
    seconds = action_seconds(record, cluster_of(), Parallel(dp_shard=8), 5, False)
    once, between, last = (seconds[0, "F", place] for place in ("first", "middle", "last"))
    assert once["product"] == last["product"] > 0
    assert between["product"] == pytest.approx(4 / 3 * once["product"])
    assert between["all"] == pytest.approx(4 / 3 * once["all"])


def product_and_gather(cluster: Cluster, size: int) -> tuple[float, float]:
    """The seconds of a product, and of the all-gather beside it."""
    compute = costs.product_seconds(cluster, size, size, size, 1, "bfloat16")
    return compute, costs.collective_seconds(cluster, "all_gather", 2**30, 8, 1)


def test_a_gather_behind_enough_compute_costs_nothing() -> None:
    cluster = cluster_of()
    compute, sent = product_and_gather(cluster, 16384)
    assert sent < compute
    result = seconds_of([gather(1), product(16384), Wait(1, 0, 0)], cluster, at=1)
    assert result["all"] == pytest.approx(compute)
    assert result.get("exposed dp_shard", 0.0) == 0.0
    assert result["sent dp_shard"] == pytest.approx(sent)


def test_of_a_gather_behind_little_compute_the_rest_is_exposed() -> None:
    cluster = cluster_of()
    compute, sent = product_and_gather(cluster, 2048)
    result = seconds_of([gather(1), product(2048), Wait(1, 0, 0)], cluster, at=1)
    assert result["all"] == pytest.approx(sent)
    assert result["exposed dp_shard"] == pytest.approx(sent - compute)


def test_a_gather_that_is_waited_for_at_once_is_exposed() -> None:
    cluster = cluster_of()
    compute, sent = product_and_gather(cluster, 16384)
    for work, at in (
        ([gather(1), Wait(1, 0, 0), product(16384)], 1),
        ([gather(0), product(16384)], None),  # it was issued on the stream that computes
    ):
        result = seconds_of([*work], cluster, at)
        assert result["all"] == pytest.approx(sent + compute)
        assert result["exposed dp_shard"] == pytest.approx(sent)


def test_messages_of_one_communicator_take_turns() -> None:
    cluster = cluster_of()
    _, sent = product_and_gather(cluster, 16384)
    for group, all_messages in (("dp", 2 * sent), ("another", sent)):
        beside = replace(gather(2), group=group)
        result = seconds_of([gather(1), beside, Wait(1, 0, 0)], cluster, at=2)
        assert result["all"] == pytest.approx(sent)  # of the first one alone
        result = seconds_of([beside, gather(1), Wait(1, 0, 0)], cluster, at=2)
        assert result["all"] == pytest.approx(all_messages)
        assert result["exposed dp_shard"] == pytest.approx(all_messages)


def test_only_sums_of_gradients_come_after_a_result() -> None:
    parts = {"all": 9.0, "exposed dp_shard": 2.0, "exposed dp_replicate": 1.0, "exposed tp": 4.0}
    assert [after_result(parts, kind) for kind in "FBW"] == [0.0, 3.0, 3.0]


@pytest.mark.parametrize("name", ["complex", "fsdp.chunk_cat", "aten.index_select"])
def test_what_no_graph_holds_is_not_fused(name: str) -> None:
    """The three would be one kernel; one of them stays alone, and parts the others.

    It computes with complex numbers, is a copy of FSDP's, or gathers rows for experts.
    """
    cluster, add = load_cluster("h100_sxm"), replace(elementwise(2**21), segment=0)
    record = Record([StepSegment((0, "F", 0), "forward", "layers.0")])
    record.allocations = [Allocation(2**20, 0, 0, "", end=end) for end in (None, 1, 2, None)]
    other = {"dtype": "complex64"} if name == "complex" else {"name": name}
    slowest, fused = costs.slowest(cluster, 8), replace(add, name="fused")  # of one input and result
    for change, others in (({}, 1), (other, 2)):
        record.work = [replace(add, reads=(place,), writes=(place + 1,)) for place in range(3)]
        record.work[1] = middle = replace(add, reads=(1,), writes=(2,), **change)
        result = action_seconds(record, cluster, Parallel(dp_shard=8), 1, fused=True)[0, "F", "last"]
        expected = others * operator_seconds(cluster, fused)
        if change:
            expected += operator_seconds(cluster, middle)
        assert result["memory"] == pytest.approx(slowest * expected)


def test_the_loss_is_one_kernel_without_compile_mode() -> None:
    """On a GPU it is compiled in any case, and layers are not."""
    for name, unit, kernels, moved in (
        ("h100_sxm", "", 1, 2**21 / 0.53),
        ("h100_sxm", "norm", 3, 2**21),
        ("cpu", "", 3, 2**21),
    ):
        cluster = replace(load_cluster(name), efficiencies=cluster_of().efficiencies)
        work = [replace(elementwise(2**21), reads=(place,), writes=(place + 1,)) for place in range(3)]
        result = seconds_of([*work], cluster, unit=unit)["memory"]
        slowest = costs.slowest(cluster, 8)
        assert result == pytest.approx(slowest * kernels * costs.memory_seconds(cluster, moved))


def test_kernels_of_other_streams_share_the_device() -> None:
    """Beside computation they take its time; while it waits for a message, none."""
    cluster, other = cluster_of(), replace(elementwise(2**30), stream=2)
    alone = costs.memory_seconds(cluster, 2**30)
    compute, sent = product_and_gather(cluster, 2048)
    result = seconds_of([other, product(2048), product(2048)], cluster)
    assert result["all"] == pytest.approx(2 * compute + alone)
    result = seconds_of([gather(1), other, Wait(1, 0, 0), product(2048)], cluster, at=1)
    assert alone < sent
    assert result["all"] == pytest.approx(sent + compute)


def test_hooks_of_fsdp_keep_the_host() -> None:
    """A unit's forward and backward take the host longer, if FSDP has it."""
    device = replace(cluster_of(1e-6).device, hooks=(1e-3, 3e-3))
    cluster = replace(cluster_of(), device=device)
    own = replace(elementwise(4096), name="fsdp.chunk_cat")
    for phase, hooks in (("forward", 1e-3), ("backward", 3e-3)):
        without = seconds_of([elementwise(4096)] * 2, cluster, phase=phase)["all"]
        result = seconds_of([own, elementwise(4096)], cluster, phase=phase)["all"]
        assert result - without == pytest.approx(hooks, rel=0.01)


def test_pieces_of_products_hide_all_but_one_piece() -> None:
    """A long product leaves an eighth of a gather in a node; a short one leaves what it cannot hide."""
    cluster = cluster_of()
    (long, sent), (short, _) = (product_and_gather(cluster, size) for size in (16384, 2048))
    assert short < sent < long
    for size, left in ((16384, 1 / 8), (2048, 1 - 7 / 8 * short / sent)):
        record = Record([StepSegment((0, "F", 0), "forward", "")], [gather(0), product(size)])
        record.work = [replace(work, segment=0) for work in record.work]
        in_pieces(record, cluster, Parallel(tp=8))
        first = record.work[0]
        assert isinstance(first, RecordedMessage)
        assert first.bytes == pytest.approx(2**30 * left)


def test_all_wait_for_the_slowest_of_many() -> None:
    """Of 8 and of 512 normal numbers the largest is 1.42 and 3.04 deviations above the mean."""
    cluster = load_cluster("h100_sxm")
    assert costs.slowest(cluster, 1) == 1
    for ranks, deviations in ((8, 1.42), (512, 3.04)):
        assert costs.slowest(cluster, ranks) == pytest.approx(1 + 0.015 * deviations, abs=5e-4)
    slow = replace(cluster_of(), device=replace(cluster_of().device, spread=0.1))
    work = [product(4096)]
    times = [seconds_of([*work], c)["all"] for c in (cluster_of(), slow)]
    assert times[1] / times[0] == pytest.approx(1.142, abs=2e-3)


def test_kernels_that_do_more_than_copy_take_longer() -> None:
    cluster, size = load_cluster("h100_sxm"), 2**30
    add, copy = (
        replace(elementwise(size), name=name) for name in ("aten.native_layer_norm", "aten.copy_")
    )
    launch = cluster.device.launch
    norm, copied = (operator_seconds(cluster, work) - launch for work in (add, copy))
    assert norm / copied == pytest.approx(1 / 0.75)


def test_a_message_keeps_units_while_it_runs() -> None:
    """A quarter of the units: three quarters of the work are done meanwhile."""
    cluster = cluster_of(message_units=33)
    (long, sent), (short, _) = (product_and_gather(cluster, size) for size in (16384, 2048))
    result = seconds_of([gather(1), product(16384), product(2048), Wait(1, 0, 0)], cluster, at=1)
    assert result["product"] == pytest.approx(long + sent / 4 + short)
    result = seconds_of([gather(1), product(2048), Wait(1, 0, 0)], cluster, at=1)
    assert result["product"] == pytest.approx(short * 4 / 3)
    assert result["all"] == pytest.approx(sent)
    assert result["exposed dp_shard"] == pytest.approx(sent - short * 4 / 3)
    result = seconds_of([gather(0), product(2048)], cluster)
    assert result["product"] == pytest.approx(short)


def test_the_host_is_hidden_by_long_kernels_and_not_by_short_ones() -> None:
    cluster = cluster_of(20e-6)
    short, long = elementwise(4096), elementwise(2**30)
    took = costs.memory_seconds(cluster, 4096)
    result = seconds_of([short] * 10, cluster)
    assert result["all"] == pytest.approx(10 * 20e-6 * 1.73 + took)
    result = seconds_of([long, *[short] * 10], cluster)  # the host is ahead while the long one runs
    first = 20e-6 * 1.73 + costs.memory_seconds(cluster, 2**30)
    assert result["all"] == pytest.approx(first + 10 * took)
    result = seconds_of([short] * 10, cluster, phase="backward")  # autograd's engine issues it
    assert result["all"] == pytest.approx(10 * 20e-6 * 0.63 + took)


# A record of the composition.


def job_of(ranks: int, **keys: object) -> Job:
    """A small Llama in bfloat16."""
    given = {"model__dim": 64, "model__n_heads": 8, "model__n_kv_heads": 8, "model__n_layers": 2}
    given |= {"model__hidden_dim": 128, "train__seq_len": 32, "train__micro_batch": 2}
    return make_job(ranks, **given | {"precision__param": "bfloat16"} | keys)


def recorded(job: Job) -> Record:
    """The record of one micro-batch."""
    return trace(RankStep(job, micro_batches=1, documents=False)).record


@pytest.mark.parametrize(("balance", "squares"), [("none", 3), ("headtail", 2)])
def test_the_rank_with_most_work_is_recorded(balance: str, squares: int) -> None:
    """Of two ranks of cp without balance the last one computes three of the four causal squares."""
    whole = recorded(job_of(1))
    job = job_of(2, parallel__cp=2, parallel__dp_shard=1, parallel__cp_balance=balance)
    step = RankStep(job, rank=busiest_rank(job), micro_batches=1, documents=False)

    def of_attention(record: Record) -> float:
        operators = [work for work in record.work if isinstance(work, Operator)]
        return sum(work.flops for work in operators if work.kind == "attention")

    share = of_attention(trace(step).record) / of_attention(whole)
    assert share == pytest.approx(squares / 4, rel=0.1)  # half squares have a diagonal


KERNELS = {
    "documents in a row, on Hopper": ((9, 0), {}, "flash2"),
    "one document, on Hopper": ((9, 0), {"data__path": "tokens.bin"}, "cudnn"),
    "a token file with documents": (
        (9, 0),
        {"data__path": "tokens.bin", "data__separator": 2},
        "flash2",
    ),
    "one document, on Ampere": ((8, 0), {"data__path": "tokens.bin"}, "flash2"),
    "float32": ((9, 0), {"precision__param": "float32"}, "efficient"),
}


@pytest.mark.parametrize("case", KERNELS)
def test_the_kernel_that_runs_is_recorded(case: str) -> None:
    """Attention of a run's own data on its own device, and the time of that kernel."""
    capability, keys, kernel = KERNELS[case]
    job = job_of(1, **{"model__n_layers": 1, "train__seq_len": 128} | keys)
    record = trace(RankStep(job, micro_batches=1, capability=capability)).record
    work = [w for w in record.work if isinstance(w, Operator) and w.kind == "attention"]
    assert {kernel_that_runs(w.name) for w in work} == {kernel}


def test_recomputed_attention_costs_what_a_forward_does() -> None:
    """The operator runs without gradients, as a backward does, and is a forward all the same."""
    cluster = cluster_of()
    shape = (1, 32, 8192, 128)
    names = ("aten._flash_attention_forward", "aten._flash_attention_backward")
    works = [Operator(1, 0, name, "attention", 1e12, 1, "bfloat16", shape) for name in names]
    forward, backward = (operator_seconds(cluster, work) for work in works)
    assert forward / backward == pytest.approx(0.325 / 0.345, rel=0.01)
    took = seconds_of([works[0]], cluster, phase=BACKWARD)
    assert took["attention"] == pytest.approx(forward)


def test_attention_costs_what_its_kernel_takes() -> None:
    """The same work by cuDNN, by FlashAttention-2, and by the kernel of float32."""
    cluster, shape = load_cluster("h100_sxm"), (1, 32, 8192, 128)
    names = ("_scaled_dot_product_cudnn", "_flash", "_scaled_dot_product_efficient")
    took = [
        operator_seconds(
            cluster,
            Operator(1, 0, f"aten.{name}_attention", "attention", 1e12, 1, "bfloat16", shape),
        )
        for name in names
    ]
    assert took[1] / took[0] == pytest.approx(0.60 / 0.345, rel=0.01)
    assert took[2] / took[0] == pytest.approx(0.60 / 0.20, rel=0.01)


@pytest.fixture(scope="module")
def two_by_two() -> tuple[Job, Record]:
    job = job_of(4, parallel__tp=2, parallel__dp_shard=2)
    return job, recorded(job)


def messages(record: Record, degrees: Parallel, axis: str, kind: str, action: str) -> list[int]:
    """The bytes of the messages of one kind."""
    return [
        work.bytes
        for work in record.work
        if isinstance(work, RecordedMessage)
        and record.segments[work.segment].action[1] == action
        and (axis_of(work, degrees), work.kind) == (axis, kind)
    ]


def test_messages_go_over_their_axis(two_by_two: tuple[Job, Record]) -> None:
    job, record = two_by_two
    stream = 2 * 32 * 64 * 2  # samples, tokens, width, bytes of bfloat16
    gathered = messages(record, job.degrees, "tp", "all_gather", "F")
    assert (
        gathered.count(stream) >= 2 * 2
    )  # before attention and the feed-forward network of each layer
    scattered = messages(record, job.degrees, "tp", "reduce_scatter", "F")
    assert scattered.count(stream) == 2 * 2 + 1  # after them, and the embedding's
    layer = (4 * 64 * 64 + 3 * 64 * 128) // 2 + 2 * 64  # of a tp rank; norms are whole
    weights = messages(record, job.degrees, "dp_shard", "all_gather", "F")
    assert sum(abs(size / (2 * layer) - 1) < 0.01 for size in weights) == 2
    assert not messages(record, job.degrees, "cp", "all_gather", "F")


def test_each_axis_has_its_own_ranks() -> None:
    degrees = Parallel(pp=2, dp_shard=2, tp=2)
    for ranks, axis in (
        ((0, 1), "tp"),
        ((0, 2), "dp_shard"),
        ((0, 4), "pp"),
        ((0, 1, 2, 3), "dp_shard+tp"),
    ):
        assert axis_of(RecordedMessage(0, 0, "all_reduce", "", ranks, 8), degrees) == axis
    experts = Parallel(dp_shard=4, ep=4)  # gradients in few bytes go to all on FSDP's stream
    for stream, axis in ((0, "ep"), (3, "dp_shard")):
        message = RecordedMessage(0, stream, "all_to_all", "", (0, 1, 2, 3), 8)
        assert axis_of(message, experts) == axis


def test_an_axis_across_nodes_costs_more() -> None:
    cluster = cluster_of()
    record = Record(
        [StepSegment((-1, "setup", 0), "forward", ""), StepSegment((0, "F", 0), "forward", "")]
    )
    results = []
    for stride in (1, 8):
        ranks = tuple(range(0, 8 * stride, stride))
        record.work = [RecordedMessage(1, 0, "all_gather", "", ranks, 2**30)]
        degrees = Parallel(dp_shard=8, tp=stride) if stride > 1 else Parallel(dp_shard=8)
        results.append(
            action_seconds(record, cluster, degrees, 1, False)[0, "F", "last"]["exposed dp_shard"]
        )
    assert results[1] > 5 * results[0]


def test_products_and_bytes_are_those_of_the_model() -> None:
    job = job_of(1)
    record = recorded(job)
    operators = [work for work in record.work if isinstance(work, Operator)]
    products = [work for work in operators if work.kind in ("product", "attention")]
    pairs = 32 / (32 + 1)  # the model counts (L + 1) / 2 keys, a kernel half of all
    counted = job.config.model.config.flops_per_token(32) * 2 * 32
    assert sum(work.flops for work in products) == pytest.approx(counted, rel=0.05 + 1 - pairs)
    for work in operators:
        if work.name == "aten.mm":
            batch, m, n, k = work.shape
            size = 2 if work.dtype == "bfloat16" else 4
            assert work.flops == 2 * batch * m * n * k
            assert work.bytes >= size * (m * k + k * n + m * n)
    adds = [
        w for w in operators if w.name == "aten.add" and record.segments[w.segment].action[1] == "F"
    ]
    stream = 2 * 32 * 64 * 2
    assert [work.bytes for work in adds if work.shape == (2, 32, 64)] == [3 * stream] * 4


def test_more_of_anything_takes_longer(two_by_two: tuple[Job, Record]) -> None:
    """Bytes, FLOPs, messages and the host are terms of the sum."""
    job, record = two_by_two
    cluster = cluster_of()
    usual = action_seconds(record, cluster, job.degrees, 1, False)

    def total(changed: Cluster) -> float:
        result = action_seconds(record, changed, job.degrees, 1, False)
        assert set(result) == set(usual)
        assert STEP in result
        return sum(one["all"] for one in result.values())

    device, before = cluster.device, sum(one["all"] for one in usual.values())
    assert total(replace(cluster, device=replace(device, bandwidth=device.bandwidth / 1000))) > before
    slow = {dtype: rate / 1e6 for dtype, rate in device.peak.items()}
    assert total(replace(cluster, device=replace(device, peak=slow))) > before
    assert total(replace(cluster, within=replace(cluster.within, bandwidth=1e6))) > before
    assert total(replace(cluster, device=replace(device, dispatch=1e-3))) > before
