"""What any estimate must obey: no model above the rate of products, and more takes longer."""

from collections import defaultdict
from functools import cache

import pytest

from compose.config import rules
from compose.config.job import Job
from compose.config.toml import load
from compose.planner.cluster import load_cluster
from compose.planner.estimate import Estimate, estimate
from compose.planner.record import Operator
from compose.planner.step_time import operator_seconds
from compose.planner.trace import RankStep, trace
from tests.support.helpers import ROOT, tiered

MODELS = {
    "llama": "8b",
    "qwen3": "30b_a3b",
    "mixtral": "8x7b",
    "deepseek_v3": "16b",
    "gpt_oss": "20b",
}


def job_of(ranks: int, **keys: object) -> Job:
    """Three layers of a published model in bfloat16; its vocabulary is cut."""
    given = {"model__n_layers": 3, "model__vocab_size": 4096, "precision__param": "bfloat16"}
    given |= {"train__seq_len": 4096, "train__micro_batch": 1, "train__global_batch": ranks} | keys
    overrides = [(key.replace("__", "."), str(value)) for key, value in given.items()]
    return rules.check(load(str(ROOT / "train.toml"), overrides), ranks)


@pytest.mark.parametrize("name", tiered(MODELS, slow=("llama", "deepseek_v3", "gpt_oss")))
def test_no_model_is_faster_than_products_are(name: str) -> None:
    """Experts count as the products that they are: no share of the peak above that of products."""
    cluster, ranks = load_cluster("h100_sxm"), 8
    keys = {"model__name": name, "model__preset": MODELS[name]}
    job = job_of(ranks, **keys, parallel__ep=1 if name == "llama" else ranks)
    record = trace(RankStep(job, micro_batches=1, capability=cluster.device.capability)).record
    flops: dict[str, float] = defaultdict(float)
    took: dict[str, float] = defaultdict(float)
    for work in record.work:
        if isinstance(work, Operator):
            flops[work.kind] += work.flops
            took[work.kind] += operator_seconds(cluster, work)
    of_token = job.config.model.config.flops_per_token(job.config.train.seq_len)
    model = of_token * job.config.train.seq_len
    assert model <= 1.01 * sum(flops.values())  # nothing is left out
    rate = cluster.device.peak["bfloat16"] * cluster.efficiencies.products["bfloat16"]
    assert flops["product"] / took["product"] <= rate
    assert model / sum(took.values()) <= rate


@cache
def estimated(ranks: int, **keys: object) -> Estimate:
    """The estimate of a small Llama on H100."""
    sizes = {"model__dim": 1024, "model__n_heads": 8, "model__n_kv_heads": 8, "model__hidden_dim": 4096}
    small = sizes | {"model__name": "llama", "model__preset": "debug", "train__seq_len": 2048}
    return estimate(job_of(ranks, **{**small, **keys}), load_cluster("h100_sxm"))


def test_time_falls_with_devices() -> None:
    """The same batch on twice the devices is faster, and at most twice as fast."""
    keys = {"train__global_batch": 32, "model__n_layers": 2}
    one, two = (estimated(n, **keys, train__micro_batch=32 // n).step_seconds for n in (8, 16))
    assert one / 2 < two < one


@pytest.mark.slow
def test_more_devices_with_more_work_are_no_faster() -> None:
    """The same batch for each device takes longest where all wait for the slowest of many."""
    keys = {"train__micro_batch": 8}
    one, many = (estimated(n, train__global_batch=8 * n, **keys).step_seconds for n in (8, 512))
    assert one < many < 2 * one


@pytest.mark.parametrize("stages", [(0, 3), pytest.param((0, 1, 2, 3), marks=pytest.mark.slow)])
def test_memory_falls_with_zero(stages: tuple[int, ...]) -> None:
    keys = {"train__global_batch": 32, "train__micro_batch": 4, "model__n_layers": 2}
    peaks = [estimated(8, **keys, parallel__zero=zero).peaks[0].allocated for zero in stages]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > 1.2 * peaks[-1]
