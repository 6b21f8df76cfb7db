"""run.elastic: which mesh is chosen for how many ranks, and what is said of it."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from compose.cli import elastic
from compose.config.job import Job
from compose.config.toml import load
from compose.planner.candidates import Space, candidate_of, shape_for
from compose.planner.cluster import load_cluster
from tests.support.command_lines import QUICK, answered
from tests.support.helpers import ROOT, overrides, parallel, refusal

RUN = {"run__elastic": True, "run__dir": "runs/mine", "checkpoint__interval": 5}
SIZES = {"train__global_batch": 12, "train__micro_batch": 1}


def config(**keys: object) -> Any:
    return load(str(ROOT / "train.toml"), overrides(RUN | SIZES | keys))


def chosen(ranks: int, **keys: object) -> tuple[dict[str, int], int, str]:
    """The degrees above 1, micro_batch, and the line."""
    job, line = elastic.choose(config(**keys), ranks)
    degrees = {axis: getattr(job.degrees, axis) for axis in (*elastic.AXES, "ep")}
    return {a: d for a, d in degrees.items() if d > 1}, job.config.train.micro_batch, line


@pytest.mark.parametrize(
    ("ranks", "keys", "wanted"),
    [
        (4, parallel(tp=2), {"dp_shard": 2, "tp": 2}),
        (6, parallel(tp=2, dp_shard=2), {"dp_shard": 3, "tp": 2}),
        (8, parallel(tp=2, dp_replicate=2, dp_shard=3), {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
        (6, parallel(dp_replicate=-1, dp_shard=2), {"dp_replicate": 3, "dp_shard": 2}),
        (3, parallel(tp=2, dp_shard=2), {"dp_shard": 3}),
        (2, parallel(tp=2, dp_shard=2), {"tp": 2}),
        (2, parallel(tp=4), {"tp": 2}),
        (6, parallel(tp=4), {"dp_shard": 3, "tp": 2}),
        (1, parallel(tp=2, pp=2, cp=2), {}),
    ],
)
def test_model_axes_are_kept_if_they_can_be(
    ranks: int, keys: dict[str, object], wanted: dict[str, int]
) -> None:
    assert chosen(ranks, **keys)[0] == wanted


def test_experts_keep_their_axis() -> None:
    """ep is laid over the others, so it needs as many ranks."""
    keys = {"model__name": "qwen3", "model__n_experts": 4, **parallel(ep=4)}
    assert chosen(4, **keys)[0] == {"dp_shard": 4, "ep": 4}
    assert chosen(2, **keys)[0] == {"dp_shard": 2, "ep": 2}
    assert chosen(3, **keys)[0] == {"dp_shard": 3}


def test_layers_of_stages_go_with_their_pipeline() -> None:
    keys = parallel(pp=2, pp_layers=[1, 1], dp_shard=2)
    assert elastic.choose(config(**keys), 2)[0].degrees.pp_layers == (1, 1)
    degrees = elastic.choose(config(**keys), 3)[0].degrees
    assert (degrees.pp, degrees.pp_layers) == (1, ())


def test_a_micro_batch_is_cut_if_there_are_many_ranks() -> None:
    """The batch is what it was: a rank has fewer samples at a time."""
    keys = parallel(dp_shard=2) | {"metrics__noise_scale": True}  # which needs equal shares, two each
    keys["train__global_batch"] = 24
    assert chosen(2, train__micro_batch=6, **keys)[1] == 6
    assert chosen(4, train__micro_batch=6, **keys)[:2] == ({"dp_shard": 4}, 3)
    job, _ = elastic.choose(config(train__micro_batch=6, **keys), 4)
    assert job.config.train.global_batch == 24


def test_ranks_that_do_not_divide_the_batch_have_unequal_shares() -> None:
    """Each has a sample at least; a mesh that has more ranks than samples is not legal."""
    job, line = elastic.choose(config(**parallel(dp_shard=-1)), 5)
    assert [share.samples for share in job.shares] == [2, 3, 2, 3, 2]
    assert line == "run.elastic: 5 ranks: dp_shard 5, micro_batch 1, as the config says"
    keys = {"train__global_batch": 2, "model__n_layers": 2}
    _, _, line = chosen(5, **keys, **parallel(dp_shard=-1, cp_method="ulysses"))
    assert line.endswith(
        "; rank 4 waits, since no mesh of 5 ranks is legal (train.global_batch: 2 leaves 3 of 5 data"
        " ranks without a sample)"
    )


def test_what_is_said() -> None:
    assert chosen(4, **parallel(tp=2))[2] == (
        "run.elastic: 4 ranks: dp_shard 2, tp 2, micro_batch 1, as the config says"
    )
    assert chosen(3, **parallel(tp=2))[2] == (
        "run.elastic: 3 ranks: dp_shard 3, micro_batch 1, the nearest (parallel: the degrees' product"
        " tp 2 does not divide the world size 3)"
    )


def test_among_equals_the_planner_decides() -> None:
    """Two ranks for tp 2 and pp 2: either can stay."""
    keys = parallel(tp=2, pp=2, dp_shard=1)
    result, _, line = chosen(2, **keys)
    assert "the quickest of 2 meshes as near, by the planner" in line
    with mock.patch("compose.planner.candidates.order", lambda space, one: -_order(space, one)):
        other, _, _ = chosen(2, **keys)
    assert [result, other] in ([{"tp": 2}, {"pp": 2}], [{"pp": 2}, {"tp": 2}])


def _order(space: Any, candidate: Any) -> float:
    return candidate.rough.step


def test_a_mesh_that_gpus_have_no_memory_for_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """On five ranks each would hold all of what tp 4 cuts. Four ranks have room, and one waits."""
    monkeypatch.setattr(Job, "on_cuda", True)
    keys = {"train__global_batch": 15, **parallel(tp=4, dp_shard=1, zero=0)}
    cluster = load_cluster("h100_sxm")

    def needed(ranks: int, **keys: object) -> float:
        wanted = elastic.rules.check(config(**keys), ranks).config
        space = Space(wanted, cluster, ranks)
        return candidate_of(space, shape_for(space), wanted).rough.memory

    room = (needed(4, **keys) + needed(5, **keys | parallel(tp=1, dp_shard=5))) / 2
    memory = round(room) + cluster.device.context + cluster.nccl_bytes
    small = replace(cluster, device=replace(cluster.device, memory=memory))
    monkeypatch.setattr(elastic, "_cluster", lambda on_cuda: cluster)
    assert chosen(5, **keys)[0] == {"dp_shard": 5}
    monkeypatch.setattr(elastic, "_cluster", lambda on_cuda: small)
    result, _, line = chosen(5, **keys)
    assert result == {"tp": 4}
    assert line.endswith(
        "; rank 4 waits, since no mesh of 5 ranks is legal (5 ranks: dp_shard 5, micro_batch 1 would"
        " not fit into the memory of its GPUs)"
    )


def test_what_no_start_can_go_on_from_is_refused() -> None:
    def problem(**keys: object) -> str:
        return refusal(elastic.choose, config(**keys), 2)

    assert problem(run__dir="", checkpoint__interval=0) == (
        "run.elastic: true goes on from the newest checkpoint of its folder; set run.dir ="
        ' "runs/mine" and checkpoint.interval = 100, or run.elastic = false'
    )
    assert problem(checkpoint__resume="none") == (
        "run.elastic: true goes on from the newest checkpoint of its folder; set"
        ' checkpoint.resume = "auto", or run.elastic = false'
    )
    assert problem(**parallel(pp=2, pp_schedule="PipeDream")) == (
        "run.elastic: true changes how old the weights of gradients are with parallel.pp_schedule ="
        ' "PipeDream", and so what is learned; use "1F1B", or run.elastic = false'
    )
    assert problem(**parallel(dp_shard=2, speeds=[1, 2])) == (
        "run.elastic: true may go on with other ranks than those of the list parallel.speeds; use"
        ' parallel.speeds = "measure", or run.elastic = false'
    )
    assert problem(**parallel(dp_shard=2, speeds="measure")) == ""
    assert problem(outer__every=4, **parallel(dp_replicate=2)) == (
        "run.elastic: true changes the number of islands, and so with outer.every = 4 what is learned;"
        " use run.elastic = false"
    )


def test_a_minimum_that_no_mesh_reaches_is_refused() -> None:
    keys = {"comm__gradients": "int8"}  # which one rank does not send
    assert chosen(4, run__min_ranks=2, **keys)[0] == {"dp_shard": 4}
    assert refusal(elastic.choose, config(run__min_ranks=1, **keys), 4) == (
        'run.min_ranks: 1 ranks have no legal mesh (comm.gradients: "int8", and dp_replicate x dp_shard'
        " x cp is 1, so that no gradients are sent); nearest: 2"
    )
    assert refusal(elastic.choose, config(run__min_ranks=3), 2) == (
        "run.min_ranks: 3, and there are 2 ranks; start 3, or use run.min_ranks = 2"
    )


def test_a_config_that_no_mesh_helps_is_refused_as_without() -> None:
    keys = {"train__validate_every": 5}
    plain = refusal(elastic.rules.check, config(**keys), 2)
    assert refusal(elastic.choose, config(**keys), 2) == plain


def test_a_dry_run_shows_the_mesh() -> None:
    words = ["--run.elastic=true", "--run.dir=runs/mine", "--checkpoint.interval=5", "--dry-run"]
    words += ["--parallel.tp=2", "--train.global_batch=12", "--train.micro_batch=1"]
    done = answered("train.py", *QUICK, *words, "--world-size=3")
    assert done.returncode == 0, done.stderr
    assert "mesh: 3 ranks: pp 1, dp_replicate 1, dp_shard 3, cp 1, tp 1; zero 3" in done.stdout
    assert done.stderr.startswith("train.toml: run.elastic: 3 ranks: dp_shard 3, micro_batch 1, the")
    alone = answered("train.py", "--run.min_ranks=2", "--dry-run")
    assert alone.stderr == "train.toml: run.min_ranks: 2 is read with elastic; set run.elastic\n"
