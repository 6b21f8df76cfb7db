"""A composition's compressed messages: their bytes, numbers and state, and what is refused."""

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from compose import evaluate, forward_backward
from compose.compression.codec import Blocks
from compose.compression.compressor import CompressedUnit, Compression, CompressionHook
from compose.compression.gather import GATHERS, Traffic, check, levels_of
from compose.compression.packing import Residual, UnitLayout
from compose.compression.reduce import GRADIENT_CODES, GradientCode, SumSettings, exchanged
from compose.data.samples import random_batch
from compose.errors import ConfigError
from compose.ops.torch_versions import ALL_GATHER
from compose.parallel.comm import Comm
from compose.parallel.mesh import Parallel
from compose.planner.trace import sent_bytes
from compose.train.readings import Reading
from tests.compression.cases import EXPERTS, INT4, INT8, Keys, comm, drawn, given, take_steps
from tests.support.checkpoints import SAVING, goes_on_bitwise, resume, train_on
from tests.support.helpers import (
    built,
    gradients_of,
    make_job,
    parallel,
    ranks_in,
    refusals,
    share_of,
    tiered,
)
from tests.support.pool import Pool, make_mesh
from tests.support.training import keys_for, lines, logged_steps

LARGE: Keys = {
    "train__global_batch": 4,
    "train__micro_batch": 1,
    "train__seq_len": 16,
    "model__vocab_size": 1024,
    "model__dim": 256,
    "model__hidden_dim": 768,
    "model__n_layers": 2,
}


def _counted(keys: Keys) -> tuple[list[dict[tuple[str, str], int]], int, int]:
    """Return two steps' counts, and what collectives sent."""
    seen = {"to_all": 0, "all_gather": 0}
    to_all, gather = dist.all_to_all_single, getattr(dist, ALL_GATHER)

    def all_to_all(out: Any, x: Any, *args: Any, **more: Any) -> Any:
        ranks = more["group"].size()
        seen["to_all"] += x.nbytes // ranks * (ranks - 1)
        return to_all(out, x, *args, **more)

    def all_gather(out: Any, x: Any, group: Any = None, async_op: bool = False) -> Any:
        seen["all_gather"] += x.nbytes * (out.nbytes // x.nbytes - 1)
        return gather(out, x, group, async_op)

    with (
        mock.patch.object(dist, "all_to_all_single", all_to_all),
        mock.patch.object(dist, ALL_GATHER, all_gather),
    ):
        return take_steps(keys, 2).sent, seen["to_all"], seen["all_gather"]


def ratio(sent: dict[tuple[str, str], int], purpose: str) -> float:
    return (
        sum(n for (what, level), n in sent.items() if what == purpose and level != "plain")
        / sent[purpose, "plain"]
    )


@pytest.mark.parametrize(
    ("kinds", "ideal"),
    [(INT8, (8 * 256 + 16) / 256 / 32), (INT4, (4 * 256 + 16) / 256 / 32)],
    ids=["int8", "int4"],
)
def test_bytes_are_ideal_and_counted(pool: Pool, kinds: Keys, ideal: float) -> None:
    keys = LARGE | kinds | {"parallel__dp_shard": 4, "parallel__zero": 2}
    for result, to_all, gathered in pool.run(_counted, 4, keys):
        for purpose in ("weights", "gradients"):
            assert 1 <= ratio(result[-1], purpose) / ideal <= 1.03
        assert sum(sent["gradients", "far"] for sent in result) == to_all
        assert sum(sent["weights", "far"] for sent in result) == gathered


def test_bytes_between_nodes(pool: Pool) -> None:
    """Nodes of two ranks: against plain bfloat16 ZeRO-3, 3.9 and 5.7 times fewer."""
    mesh = {"parallel__dp_shard": 4, "precision__param": "bfloat16", "precision__reduce": "bfloat16"}
    ranks_far = 2
    plain: int = 0
    for kinds, times in (
        ({**comm("int4", "int8"), "parallel__zero3_reshard": 2}, 3.9),
        (comm("int4", "int4_diff"), 5.7),
    ):
        near: Keys = {"comm__near": 2}
        result = pool.run(take_steps, 4, LARGE | mesh | kinds | near, 2)[0].sent[-1]
        far = result["weights", "far"] + result["gradients", "far"]
        if not plain:
            # Two gathers and a reduction of each unit, but for the last unit's second gather.
            rows = pool.run(_rows, 4, LARGE | mesh)[0]
            plain = ranks_far * (2 * sum(rows) + sum(rows) - rows[-1])
        assert plain / far >= times


def _rows(keys: Keys) -> list[int]:
    """Bytes of each unit's row on a rank."""
    job, composition = built(keys)
    sizes = []
    for unit in job.plan.shard:
        names = [unit] if isinstance(unit, str) else list(unit)
        for layer in range(job.config.model.config.n_layers if "*" in names[0] else 1):
            modules = [composition.model.get_submodule(n.replace("*", str(layer))) for n in names]
            parameters = [p for module in modules for p in module.parameters()]
            sizes.append(sum(2 * -(-p.shape[0] // 4) * p[0].numel() for p in parameters))
    return sizes


def _gathered_differences(near: int) -> list[float]:
    """The errors of three gathers, between which weights change by a hundredth."""
    mesh, (kind, bits) = make_mesh(Parallel(dp_shard=4)), GATHERS["int4_diff"]
    group, layout = mesh.get_group("dp_shard"), UnitLayout.of([(96, 64), (6,)], 4)
    code, levels, errors = Blocks(bits, 64, rotate=True), levels_of(mesh, near, 3), list[float]()
    gather = kind(layout, code, Traffic(), levels)
    right = torch.zeros(4, layout.numel)
    for step in range(3):
        size = 0.01 if step else 1.0
        right += size * drawn("normal", right.numel(), step).view_as(right)
        gather.in_step, gather.sent = True, False
        gather.fill(rows := torch.empty_like(right), right[dist.get_rank()], group)
        assert torch.equal(layout.plain(rows)[0], layout.plain(right)[0])
        errors.append(float((rows - right).norm() / right.norm()))
    check(gather.kept, gather.forms)
    return errors


@pytest.mark.parametrize("near", [1, 2])
def test_a_gather_of_differences_loses_a_part_of_them(pool: Pool, near: int) -> None:
    for first, *others in pool.run(_gathered_differences, 4, near):
        assert first == 0
        assert 1e-5 < min(others) <= max(others) < 0.002


def test_off_is_what_it_was(pool: Pool) -> None:
    """No part of it is attached, and until start_step gradients are bitwise those of plain messages."""
    mesh = {"parallel__dp_shard": 2}
    plain = pool.run(take_steps, 2, LARGE | mesh, 1)[0]
    later = pool.run(take_steps, 2, LARGE | mesh | comm("int4", start_step=5), 1)[0]
    assert not plain.compressed
    for name, gradient in plain.gradients.items():
        assert torch.equal(gradient, later.gradients[name])


def _measured(keys: Keys) -> list[bool]:
    """Whether each of two steps has a cosine."""
    _, composition = built(given({"parallel__dp_shard": 2, "comm__measure_every": 1} | keys))
    result = []
    for step in range(2):
        forward_backward(composition, random_batch(1, 8, 256, seed=step))
        result.append("cosine" in composition.compression.metrics())  # type: ignore[union-attr]
    return result


def test_only_gradients_that_are_compressed_are_measured(pool: Pool) -> None:
    """They are not where comm.gradients is off, nor before comm.start_step."""
    assert pool.run(_measured, 2, comm("off", "int8")) == [[False, False]] * 2
    assert pool.run(_measured, 2, comm("int8", start_step=1)) == [[False, True]] * 2


def _cosines() -> tuple[float, float]:
    """The measured cosine of a step's gradients with those of plain messages, and that by hand."""
    batch, gradients, measured = random_batch(2, 16, 256, seed=0), list[Tensor](), 0.0
    for codes in ({}, comm("int4", measure_every=1)):
        _, composition = built(given(parallel(dp_shard=2) | codes))
        forward_backward(composition, share_of(batch, composition.mesh), micro_batch=1)
        if composition.compression:
            measured = composition.compression.metrics()["cosine"]  # type: ignore[attr-defined]
        flat = [gradient.double().flatten() for gradient in gradients_of(composition.model).values()]
        gradients.append(torch.cat(flat))
    return measured, float(torch.cosine_similarity(gradients[0], gradients[1], 0))


def test_what_is_measured_is_the_cosine_with_plain_gradients(pool: Pool) -> None:
    for measured, by_hand in pool.run(_cosines, 2):
        assert 0.9 < by_hand < 0.9999
        assert measured == pytest.approx(by_hand, abs=1e-6)


def _kept_after_evaluation() -> bool:
    _, composition = built(given(parallel(dp_shard=2) | INT4))
    share = share_of(random_batch(2, 16, 256, seed=0), composition.mesh)
    forward_backward(composition, share, micro_batch=1)
    assert isinstance(composition.compression, Compression)
    before = {name: value.clone() for name, value in composition.compression.state().items()}
    with torch.no_grad():  # as a step does, so the weights differ from the base of the next message
        for parameter in composition.model.parameters():
            parameter.mul_(1.1)
    evaluate(composition, share, micro_batch=1)
    after = composition.compression.state()
    return before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)


def test_an_evaluation_changes_nothing_that_the_next_message_depends_on(pool: Pool) -> None:
    assert pool.run(_kept_after_evaluation, 2) == [True] * 2


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.04), ("float8", 0.12)])
def test_a_step_computes_with_codes(pool: Pool, kind: str, most: float) -> None:
    """Not with the plain results, as a proof does; and every rank has the same gradients."""
    keys = given({"parallel__tp": 2, "parallel__sequence": False})
    plain = pool.run(take_steps, 2, keys, 2)[0]
    one, other = pool.run(take_steps, 2, keys | {"comm__activations": kind}, 2)
    assert not plain.sent, "nothing is counted, as nothing is coded"
    for name, right in plain.gradients.items():
        assert torch.equal(one.gradients[name], other.gradients[name]), name
        error = float((one.gradients[name] - right).norm() / right.norm())
        assert 1e-4 < error < most, (name, error)
    assert one.loss == other.loss != plain.loss
    assert one.loss == pytest.approx(plain.loss, rel=1e-2)


RUNS: dict[str, Keys] = {
    "zero 3, differences": parallel(dp_shard=2) | INT4,
    "zero 1, powersgd": parallel(dp_shard=2, zero=1) | comm("powersgd", "int8"),
    "ddp, top_k": parallel(dp_replicate=2, zero=0) | comm("top_k"),
    "hsdp near": parallel(dp_replicate=2, dp_shard=2) | comm("int4", "int8"),
    "hpz": parallel(dp_shard=4, zero3_reshard=2) | INT8,
    "pipeline": parallel(dp_shard=2, pp=2) | INT8,
    "tp": parallel(tp=2, sequence=False) | {"comm__activations": "int8"},
    "tp x pp": parallel(tp=2, pp=2, dp_shard=1) | {"comm__activations": "int8"},
}
LONG: dict[str, Keys] = {
    "experts": parallel(dp_shard=4, ep=2) | EXPERTS | INT8,
    "two levels": parallel(dp_shard=4) | comm("int4", "int4_diff", near=2),
    "tp x zero 3, recomputed": parallel(tp=2, dp_shard=2)
    | {"activation_checkpoint__mode": "full", "comm__activations": "float8"}
    | INT8,
}


@pytest.mark.parametrize("name", tiered(RUNS | LONG, {*RUNS, "experts"}, {*LONG} - {"experts"}))
def test_bytes_are_foretold(pool: Pool, name: str) -> None:
    """The bytes that a dry run foretells are those that a run counts."""
    keys = given((RUNS | LONG)[name])
    ranks = ranks_in(keys)
    if "activations" in str(keys):
        keys["model__vocab_size"] = 256
    else:
        # Six micro-batches: more than the dry run runs.
        keys |= {"train__global_batch": 24, "train__micro_batch": 24 // 6 // ranks or 1}
    counted = [steps.sent[-1] for steps in pool.run(take_steps, ranks, keys, 2)]
    assert [sent_bytes(make_job(ranks, **keys), rank) for rank in range(ranks)] == counted
    for sent in counted:
        if ("activations", "tp") in sent:
            # Rows of 64 elements: 66 bytes in place of 256.
            assert sent["activations", "tp"] * 256 <= 66 * sent["activations", "plain"]


class Signs(GradientCode):
    """A code from elsewhere: this rank's signs, times their mean size."""

    def __init__(self, settings: SumSettings, layout: UnitLayout, among: int = 0) -> None:
        super().__init__(settings.traffic)
        self.layout = layout

    def reduce_scatter(self, rows: Any, group: Any, scale: float, out: Any) -> None:
        signs = (rows.sign() * rows.abs().mean(1, keepdim=True)).bfloat16().contiguous()
        out.copy_(exchanged(signs.view(torch.uint8), group).view(torch.bfloat16).sum(0))


def _signs() -> tuple[int, float]:
    """How many signs the gradient of a matrix has, and the cosine with its plain gradient."""
    keys = LARGE | {"train__micro_batch": 2, "parallel__dp_shard": 2}  # one reduction of a step
    plain = take_steps(keys, 1).gradients["layers.0.attention.wq.weight"]
    with mock.patch.dict(GRADIENT_CODES, {"int8": Signs}):
        result = take_steps(keys | comm("int8"), 1).gradients["layers.0.attention.wq.weight"]
    return len(result[0].unique()), float(torch.cosine_similarity(result.flatten(), plain.flatten(), 0))


def test_a_code_of_gradients_is_a_class_and_an_entry(pool: Pool) -> None:
    levels, cosine = pool.run(_signs, 2)[0]
    assert levels <= 9
    assert 0.5 < cosine < 0.95


WIDE: Keys = {"model__dim": 64, "model__hidden_dim": 192}
KEPT: dict[str, tuple[Keys, Keys]] = {
    "zero 3": (INT4, parallel(dp_shard=2)),
    "hsdp": (INT4, parallel(dp_replicate=2, dp_shard=2)),
    "ddp": (comm("powersgd"), parallel(dp_replicate=2, zero=0)),
    "two levels": (INT4 | comm("int4", "int4_diff", near=2), parallel(dp_shard=4)),
    "low rank": (comm("powersgd", rank=2), parallel(dp_shard=2)),
    "warm-up": (
        comm("top_k", start_step=3),
        parallel(dp_shard=2, zero=1),
    ),
}


@pytest.mark.parametrize("name", tiered(KEPT, KEPT.keys() - {"zero 3"}))
def test_goes_on_bitwise(pool: Pool, tmp_path: Path, name: str) -> None:
    keys, mesh = KEPT[name]
    goes_on_bitwise(pool, tmp_path, WIDE | keys, mesh)
    one, other = (lines(tmp_path / run)[-1]["comm"] for run in ("whole", "parts"))
    assert one == other


def _skipped_and_restored(keys: Keys) -> None:
    """Steps of which every second is skipped; then what a run that goes on has before its first."""
    job, composition = built(keys)
    compression, train = composition.compression, job.config.train
    assert isinstance(compression, Compression)
    vocabulary = job.config.model.config.vocab_size
    hook = CompressionHook(compression, skips=True)

    def copied() -> dict[str, Tensor]:
        return {name: value.clone() for name, value in compression.state().items()}

    def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
        return one.keys() == other.keys() and all(map(torch.equal, one.values(), other.values()))

    batch: dict[str, Tensor] = {}
    for step in range(4):
        for parameter in composition.model.parameters():
            parameter.grad = None
        before = copied()
        batch = random_batch(train.global_batch, train.seq_len, vocabulary, step)
        hook.before_step(step + 1)
        forward_backward(composition, share_of(batch, composition.mesh), micro_batch=1)
        assert not same(copied(), before)
        skipped = step % 2 == 0
        hook.see(Reading(math.nan if skipped else 1.0, 1.0, None, ()), 1.0)
        of_gradients = [{n: v for n, v in s.items() if ".gather." not in n} for s in (copied(), before)]
        assert same(*of_gradients) == skipped, step
    kept = copied()
    _, again = built(keys)
    assert isinstance(again.compression, Compression)
    again.compression.restore({name: value.clone() for name, value in kept.items()})
    assert same(again.compression.state(), kept)  # a save before the first step has all of it
    forward_backward(again, share_of(batch, again.mesh), micro_batch=1)
    assert again.compression.state().keys() == kept.keys()
    assert [stage.restored for stage in again.compression.stages] == [{}]


@pytest.mark.parametrize("name", tiered(KEPT, KEPT.keys() - {"zero 3", "ddp"}))
def test_a_skipped_step_leaves_what_was_not_sent(pool: Pool, name: str) -> None:
    keys = (
        WIDE | dict(KEPT[name][0]) | KEPT[name][1] | {"train__global_batch": 4, "train__micro_batch": 1}
    )
    keys = {key: value for key, value in keys.items() if key != "comm__start_step"}
    pool.run(_skipped_and_restored, ranks_in(keys), keys)


def test_a_skipped_step_leaves_those_of_a_module_named_gather() -> None:
    mesh: Any = SimpleNamespace(device_type="cpu", mesh=torch.zeros(1, 1, 1, 1, 1))
    compression = Compression(Comm(gradients="int8"), mesh, 3, compiled=False)
    stage, model = compression.stage(), nn.ModuleDict({"gather": nn.Linear(2, 2)})
    assert stage is not None
    unit = CompressedUnit.of(model, dict(model.named_parameters()))
    unit.senders["shards"] = Signs(stage.settings, unit.layout(trained=True))
    unit.senders["shards"].kept["feedback"] = kept = torch.ones(6)
    stage.units.append(unit)
    before = compression.of_gradients()
    kept.zero_()
    compression.undo(before)
    assert unit.senders["shards"].kept["feedback"].tolist() == [1.0] * 6


def test_the_norm_of_residuals_is_of_units_that_have_sent() -> None:
    """A frozen unit's residual, of no elements, is not on the GPU that has the others."""
    mesh: Any = SimpleNamespace(device_type="cpu", mesh=torch.zeros(1, 1, 1, 1, 1))
    compression = Compression(Comm(gradients="int4", error_feedback=True), mesh, 3, compiled=False)
    stage = compression.stage()
    assert stage is not None
    for trained in (True, False):
        model = nn.ModuleDict({"layer": nn.Linear(64, 64)}).requires_grad_(trained)
        unit = CompressedUnit.of(model, dict(model.named_parameters()))
        code = GRADIENT_CODES["int4"](stage.settings, unit.layout(trained=True), 0)
        unit.senders["shards"] = code
        stage.units.append(unit)
        if trained:
            code.feedback.codes(torch.zeros(1))
    real = Residual.blocks
    with mock.patch.object(
        Residual, "blocks", lambda self: real(self) if self.kept else torch.zeros(0, device="meta")
    ):
        assert compression.metrics() == {"feedback_norm": 0.0}


@pytest.mark.slow
def test_another_mesh_drops_it_and_says_so(pool: Pool, tmp_path: Path) -> None:
    train_on(pool, tmp_path, WIDE | INT4, parallel(dp_shard=2), 2)
    mesh = parallel(dp_shard=2, tp=2)
    keys: dict[str, Any] = keys_for(tmp_path, **(SAVING | WIDE | INT4 | mesh))
    progress, said = pool.run(resume, 4, keys)[0]
    assert progress is not None
    assert progress.step == 2
    folder = tmp_path / "checkpoints" / "step-00000002"
    assert said[1] == (
        f"{folder}: what messages kept is of another mesh, of other codes, or of an earlier version,"
        " and is dropped"
    )
    train_on(pool, tmp_path, WIDE | INT4, mesh, 4)
    assert logged_steps(tmp_path) == [1, 2, 3, 4]


# On four ranks.
SHARDS, TENSOR = parallel(dp_shard=4), parallel(tp=4)
REFUSED: dict[str, tuple[Keys, str]] = {
    "near": (
        SHARDS | comm("int4", near=3),
        "comm.near: 3 does not divide dp_shard x cp = 4, the ranks of data parallel; nearest: 2",
    ),
    "near with replicas": (
        parallel(dp_replicate=2, dp_shard=2) | comm("int8", near=2),
        "comm.near: 2, and with parallel.dp_replicate = 2 the ranks of dp_shard are the neighbours;"
        " use comm.near = 1",
    ),
    "offload": (
        SHARDS | parallel(offload="cpu") | comm("off", "int4_diff"),
        'comm.weights: "int4_diff" keeps what it sent last on the device, and parallel.offload = "cpu"'
        ' is to keep weights off it; use comm.weights = "int8"',
    ),
    "kept twice": (
        SHARDS | parallel(zero3_reshard=2) | comm("off", "int4_diff"),
        'comm.weights: "int4_diff" keeps weights near by comm.near, and parallel.zero3_reshard = 2'
        " would keep them twice; use parallel.zero3_reshard = 0",
    ),
    "bytes": (
        SHARDS | {"precision__float8": "tensorwise"} | comm("off", "int8"),
        'comm.weights: "int8" codes numbers, and precision.float8 = "tensorwise" sends weights as'
        ' bytes; use comm.weights = "off", or precision.float8 = "rowwise"',
    ),
    "block": (
        SHARDS | comm("int8", block=100),
        "comm.block: 100 is no power of two from 16; nearest: 128",
    ),
    "block above a power": (
        SHARDS | comm("int8", block=257),
        "comm.block: 257 is no power of two from 16; nearest: 256",
    ),
    "no weights are sent": (
        SHARDS | parallel(zero=0) | INT8,
        'comm.weights: "int8", and parallel.zero = 0 sends no weights; use comm.weights = "off"',
    ),
    "one rank": (
        TENSOR | parallel(dp_shard=1) | INT8,
        'comm.weights: "int8", and dp_shard x cp is 1, and no weights are sent; use comm.weights ='
        ' "off"\n'
        'comm.gradients: "int8", and dp_replicate x dp_shard x cp is 1, so that no gradients are sent;'
        ' use comm.gradients = "off"',
    ),
    "read by others": (
        SHARDS | comm("int8", rank=2, density=0.5),
        'comm.rank: 2 is read with other messages; set comm.gradients = "powersgd"\n'
        'comm.density: 0.5 is read with other messages; set comm.gradients = "top_k"',
    ),
    "no gradients": (
        SHARDS | comm("off", "int8", start_step=3),
        "comm.start_step: 3 is for compressed gradients; set comm.gradients",
    ),
    "no activations are sent": (
        SHARDS | {"comm__activations": "int8"},
        'comm.activations: "int8", and parallel.tp and parallel.ep are 1, so that no activations are'
        ' sent; use comm.activations = "off"',
    ),
    "activations in float8": (
        TENSOR | {"precision__float8": "rowwise", "comm__activations": "int8"},
        'comm.activations: "int8", and with parallel.tp = 4 precision.float8 = "rowwise" has messages'
        ' of its own; use comm.activations = "off"',
    ),
    "styles of PyTorch": (
        parallel(dp_shard=2, tp=2) | EXPERTS | {"comm__activations": "float8"},
        'comm.activations: "float8", and plan.tensor gives layers.0.attention a style of PyTorch, whose'
        ' messages have no code; use LocalInput or LocalRowwise, or use comm.activations = "off"',
    ),
    "no such code": (
        TENSOR | {"comm__activations": "int4"},
        'command line: comm.activations: expected "off" | "int8" | "float8", got "int4"',
    ),
}
test_what_cannot_work_is_refused = refusals([*REFUSED.values()], names=REFUSED)


def test_a_parameter_without_gradient_is_named(pool: Pool) -> None:
    own = "comm.gradients needs them all; let each forward use every parameter"
    assert own in pool.run(_unused, 2)[0]


def _unused() -> str:
    _, composition = built(given(parallel(dp_shard=2) | comm("int8")))
    batch = random_batch(1, 16, 256, seed=0)
    norm = composition.model.get_submodule("layers.0.ffn_norm")
    norm.forward = lambda x: x * 1.0  # type: ignore[method-assign]
    try:
        forward_backward(composition, batch)
    except ConfigError as error:
        return str(error)
    return ""


def _sent_around_a_validation(keys: Keys) -> list[dict[str, Any]]:
    job, composition = built(keys)
    compression, train = composition.compression, job.config.train
    assert isinstance(compression, Compression)
    hook, sent = CompressionHook(compression), list[dict[str, Any]]()
    batch = random_batch(train.global_batch, train.seq_len, job.config.model.config.vocab_size, 0)
    share = share_of(batch, composition.mesh)
    for step in (1, 2):
        hook.before_step(step)
        forward_backward(composition, share, micro_batch=1)
        hook.before_update(step)
        sent.append(hook.metrics())
        evaluate(composition, share)
    return sent


def test_bytes_of_a_step_are_without_a_validation_s(pool: Pool) -> None:
    one, other = pool.run(_sent_around_a_validation, 2, LARGE | INT8 | parallel(dp_shard=2))[0]
    assert one["comm"]["weights_far"] > 0
    assert other == one
