"""The figures of docs/what-is-said.md that are marked with * are those that the code computes."""

import re

import pytest
import torch

import models.llama
from compose.parallel.context_parallel import Balance, chunk_starts
from compose.pipeline.schedules import build_table
from compose.pipeline.timeline import bubble_fraction, peak_in_flight, simulate
from compose.planner.record import RecordedMessage
from compose.planner.trace import RankStep, trace
from tests.support.helpers import ROOT, Keys, make_job, parallel

PAGE = " ".join((ROOT / "docs" / "what-is-said.md").read_text().split())
LLAMA_8B = models.llama.PRESETS["8b"]


def entry(title: str) -> str:
    """The text of an entry, whose title begins so."""
    start = PAGE.index(f'**"{title}')
    return re.split(r' \*\*"| ## ', PAGE[start + 3 :])[0]


def schedule(name: str, p: int, m: int, v: int = 0) -> tuple[str, int]:
    """The bubble of a schedule in percent, and the most that a first rank holds."""
    table = build_table(name, p, v, m)
    return f"{100 * bubble_fraction(simulate(table)):.1f} %", peak_in_flight(table)[0]


def test_pipelines() -> None:
    one, gpipe = schedule("1F1B", 4, 16), schedule("GPipe", 4, 16)
    said = f"{one[0]} and {gpipe[0]}*. What 1F1B saves is memory: its first stage holds {one[1]}"
    assert f"{said} micro-batches, and GPipe's holds {gpipe[1]}*" in entry("1F1B")
    two, four = (schedule("Interleaved1F1B", 4, 16, v) for v in (2, 4))
    text = entry("Interleaving")
    assert f"which is {two[0]} for v = 2 and {four[0]} for v = 4 in the same setting*" in text
    assert f"holds {two[1]} pieces of half a size, and {four[1]} of a quarter*" in text
    assert f"{schedule('1F1B', 8, 32)[0]} for 8 stages and 32 micro-batches*" in entry("The bubble")
    names = ("ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV")
    (bubble,) = {schedule(name, 4, 16, 2)[0] for name in names}
    assert f"{bubble} in the setting of 4 stages and 16 micro-batches" in entry("Zero-bubble")


def test_flops_of_a_token() -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in models.llama.Model(LLAMA_8B).parameters())
    flops = {length: LLAMA_8B.flops_per_token(length) for length in (8192, 131_072)}
    short, long = (f"{flops[length] / (6 * count):.2f}" for length in flops)
    assert f"{short} times as many at 8,192 tokens and {long} times as many at 131,072*" in entry(
        "A run"
    )
    layers, dim = LLAMA_8B.n_layers, LLAMA_8B.dim
    # Two products in three passes, of the pairs that a causal kernel leaves out.
    more = [1 + 12 * layers * dim * (length - 1) / 2 / flops[length] for length in flops]
    said = f"{more[0]:.2f} times the MFU at 8,192 tokens, and {more[1]:.2f} times at 131,072"
    assert said in entry("Our MFU")


def test_bytes_of_a_layer() -> None:
    c = LLAMA_8B
    scores = 5 * c.n_heads * 8192 / c.dim
    text = entry("A layer")
    assert f"{scores:.0f} of {34 + scores:.0f} for the 8B at 8,192 tokens*" in text
    kept = 2 * (6 + 2 * c.n_kv_heads * c.head_width / c.dim + 4 * c.hidden_dim / c.dim)
    assert f"{kept:.0f} for the 8B*" in text


def _most_work(ranks: int, balance: Balance) -> float:
    """The causal pairs of the rank with most, over their mean."""
    length, pairs = 16 * ranks, []
    for rank in range(ranks):
        starts = chunk_starts(rank, ranks, balance, length // ranks)
        size = length // ranks // len(starts)
        pairs.append(sum(place + 1 for start in starts for place in range(start, start + size)))
    return max(pairs) / (sum(pairs) / ranks)


def test_ring_attention() -> None:
    text = entry("Ring attention")
    # Of long sequences: short ones have their diagonals besides.
    assert f"{(2 * 8 - 1) / 8:.2f} times with 8 ranks*" in text
    assert _most_work(8, "none") == pytest.approx(15 / 8, rel=0.01)
    assert f"make it {_most_work(8, 'headtail'):.2f}*" in text


def _sent(micro_batches: int, **degrees: object) -> str:
    """The bytes that one of 4 ranks sends in a step for each parameter, times n / (n - 1)."""
    keys: Keys = {"precision__param": "bfloat16", "train__micro_batch": 1}
    job = make_job(4, **parallel(**degrees), **keys, train__global_batch=4 * micro_batches)
    work = trace(RankStep(job, micro_batches=micro_batches)).record.work
    factor = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
    sizes = [factor[each.kind] * each.bytes for each in work if isinstance(each, RecordedMessage)]
    return f"{sum(sizes) / sum(p.numel() for p in job.model.parameters()):.1f} P"


@pytest.mark.slow
def test_messages_of_data_parallel() -> None:
    stages = [{"dp_replicate": 4, "dp_shard": 1, "zero": 0}]
    stages += [{"dp_shard": 4, "zero": stage} for stage in (1, 2, 3)]
    one, three = ([_sent(count, **keys) for keys in stages] for count in (1, 3))
    assert one[1] == one[2]
    said = f"{one[0]} for ZeRO-0, {one[1]} for ZeRO-1 and 2, {one[3]} for ZeRO-3"
    assert said in entry("FSDP sends")
    assert f"{three[0]}, {three[1]}, {three[2]} and {three[3]}*" in entry("Gradient accumulation")
