"""float16: one loss scale, whatever overflows where; gradients as one process finds them."""

from pathlib import Path
from unittest import mock

import pytest

import compose.memory.precision as loss_scale
from compose.memory.precision import LossScale, Precision, first_scale
from tests.support.helpers import Keys, parallel, proofs
from tests.support.pool import Pool
from tests.support.training import keys_for, lines, train, train_until_error

HALF: Keys = {"precision__param": "float16"}
ROUTED: Keys = {"model__balance_weight": 0.1, "model__z_weight": 0.01}
CASES: dict[str, Keys] = {
    "zero 3": parallel(dp_shard=2) | {"train__micro_batch": 4},
    "tp": parallel(tp=2) | {"train__micro_batch": 4, "model__tie_embeddings": True},
    "zero-bubble": parallel(pp=2, dp_shard=1, pp_schedule="ZBVZeroBubble") | {"model__n_layers": 4},
    "in chunks": parallel(cp=2) | {"train__loss_chunk": 13, "train__z_loss": 0.01},
    "experts": parallel(dp_shard=2, ep=2)
    | {"model__name": "qwen3", "model__preset": "debug_moe"}
    | ROUTED,
    "alone": {"train__global_batch": 4},  # one process casts too, as a run on one device does
}
test_equals_one_process = proofs(
    CASES, HALF | {"train__global_batch": 8}, slow=("tp", "in chunks", "experts")
)


def test_halves_after_an_overflow_and_grows_after_many_steps() -> None:
    scale = LossScale(1024.0)
    assert scale.after(finite=False) == LossScale(512.0)
    for step in range(loss_scale.GROW_AFTER - 1):
        scale = scale.after(finite=True)
        assert scale == LossScale(1024.0, step + 1)
    assert scale.after(finite=False) == LossScale(512.0)
    assert scale.after(finite=True) == LossScale(2048.0)
    assert LossScale(2.0**-14).after(finite=False) == LossScale(2.0**-14)
    assert not LossScale(2.0**-14).may_overflow(loss=1.0)
    assert not LossScale(1.0).may_overflow(loss=float("inf"))
    assert first_scale(Precision()) is None
    assert first_scale(Precision("float16")) == LossScale(2.0**16)


def test_a_loss_that_is_not_finite_stops_the_run(pool: Pool, tmp_path: Path) -> None:
    """No scale of gradients is to blame for it."""
    keys = keys_for(tmp_path, **HALF, model__n_layers=1)
    said = pool.run(train_until_error, 1, keys, float("inf"), "forward_backward")[0]
    assert said.startswith("step 3: the loss is inf; ")


def _skips_a_loss(keys: dict[str, object]) -> str:
    with mock.patch.object(loss_scale, "_FIRST", 256.0):
        return train_until_error(keys, float("nan"), "forward_backward")


def test_a_skipped_loss_leaves_the_scale_as_it_is(pool: Pool, tmp_path: Path) -> None:
    """Else bad samples would halve it again and again, until all gradients are zero."""
    keys = keys_for(tmp_path, **HALF, model__n_layers=1, train__skip_nonfinite=True)
    keys |= {"train__stop_after": 4, "train__global_batch": 2}
    assert pool.run(_skips_a_loss, 1, keys) == [""]
    assert [line["loss"] is None for line in lines(tmp_path)] == [False, False, True, False]
    assert [line["loss_scale"] for line in lines(tmp_path)] == [256.0] * 4


def _train_from(keys: dict[str, object], first: float) -> None:
    with mock.patch.object(loss_scale, "_FIRST", first):
        train(keys)


@pytest.mark.slow
def test_overflow_is_seen_by_all_ranks_and_stages(pool: Pool, tmp_path: Path) -> None:
    """From a scale that overflows: every mesh skips the same steps, the scale goes down, and is
    the checkpoint's."""
    meshes: dict[str, dict[str, object]] = {
        "one": {},
        "stages": {"parallel__pp": 2, "parallel__dp_shard": 2},
        "shards": {"parallel__dp_shard": 2, "parallel__tp": 2},
    }
    for name, mesh in meshes.items():
        keys = keys_for(tmp_path / name, train__stop_after=12, checkpoint__interval=6, **HALF, **mesh)
        keys |= {"train__global_batch": 8, "train__micro_batch": 2}
        pool.run(_train_from, 4 if mesh else 1, keys, 2.0**24)
    one = lines(tmp_path / "one")
    scales = [line["loss_scale"] for line in one]
    skipped = [line.get("skipped", 0) for line in one]
    assert scales[0] == 2.0**24
    assert 2 < skipped[-1] < 10
    for before, after, a, b in zip(scales, scales[1:], [0, *skipped], skipped, strict=False):
        assert after == (before / 2 if b > a else before)
        # A step that is skipped has no gradient norm to show.
    assert [line["grad_norm"] is None for line in one] == [
        b > a for a, b in zip([0, *skipped], skipped, strict=False)
    ]
    for name in ("stages", "shards"):
        other = lines(tmp_path / name)
        assert [line["loss_scale"] for line in other] == scales
        assert [line["loss"] for line in other] == pytest.approx(
            [line["loss"] for line in one], rel=3e-3
        )
    # Started again, on another mesh, it goes on with the scale it had.
    keys = keys_for(tmp_path / "one", train__stop_after=13, checkpoint__interval=6, **HALF)
    keys |= {"train__global_batch": 8, "parallel__tp": 2}
    pool.run(_train_from, 2, keys, 2.0**30)
    assert lines(tmp_path / "one")[-1]["loss_scale"] == scales[-1]
