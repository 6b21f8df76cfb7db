"""Quick estimates: they rank as records do, and their memory is near that of records."""

import pytest

from compose.config.rules import check
from compose.config.toml import load
from compose.planner.candidates import Space, shape_for
from compose.planner.cluster import load_cluster
from compose.planner.estimate import estimate
from compose.planner.quick_estimate import quick
from tests.support.helpers import ROOT

TRAIN = str(ROOT / "train.toml")


@pytest.mark.slow
def test_an_8b_has_the_recorded_memory() -> None:
    keys = {"model.preset": "8b", "precision.param": "bfloat16"}
    keys |= {"train.seq_len": 4096, "train.global_batch": 64, "train.micro_batch": 2}
    keys |= {"parallel.tp": 2, "parallel.dp_shard": 8, "activation_checkpoint.mode": "selective"}
    config = load(TRAIN, [(name, str(value)) for name, value in keys.items()])
    cluster = load_cluster("h100_sxm")
    job = check(config, 16, cluster.target)
    rough = quick(shape_for(Space(config, cluster, 16)), job.config, cluster)
    recorded = estimate(job, cluster)
    assert rough.memory == pytest.approx(recorded.peaks[0].allocated, rel=0.05)
    assert rough.step == pytest.approx(recorded.step_seconds, rel=0.1)
