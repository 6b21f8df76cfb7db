"""The second forward on meshes, and runs that learn from pairs."""

import shutil
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from compose.__main__ import main
from compose.build import build, fill_weights
from compose.cli.train import describe
from compose.memory.lora import is_adapter
from compose.object_storage import Remote, StoreError, as_path
from compose.ops.tensors import local_tensor
from compose.parallel.mesh import axis_size
from compose.preference.pairs import Preference
from compose.preference.reference import KEPT, Preferences, _read, reference_of
from compose.train.step import local_batch
from tests.preference.cases import BASE, LORA, MESHES, keys_of
from tests.support.data_made import token_set
from tests.support.helpers import ROOT, Keys, make_job, refusal, share_of, tiered
from tests.support.hugging_face import save_model
from tests.support.pool import Pool, make_mesh
from tests.support.training import keys_for, lines, train

CPU = torch.device("cpu")


def _filled(keys: Keys) -> tuple[Tensor, Tensor] | None:
    """A rank's local targets with the reference's log-probabilities, and those of one process.

    None on ranks without the last stage.
    """
    job = make_job(dist.get_world_size(), **keys)
    mesh = make_mesh(job.degrees)
    composition = build(job, mesh, CPU)
    if job.config.model.lora.rank:  # as after some steps
        for name, parameter in composition.named_parameters():
            if is_adapter(name):
                local_tensor(parameter).data.add_(0.1)
    whole = Preference().random_batch(job.config, job.global_batch, seed=0)
    model = job.model
    fill_weights(model, job, CPU)
    inputs = {name: value for name, value in whole.items() if name != "targets"}
    with torch.no_grad():
        logits = model.eval()(**inputs)
    learnt = whole["targets"][..., 0].isfinite()
    ids = whole["targets"][..., 0].nan_to_num().long()
    known = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0].where(learnt, torch.nan)
    right = {**whole, "targets": torch.cat([whole["targets"][..., :2], known[..., None]], -1)}
    mine, right = (local_batch(composition, share_of(batch, mesh)) for batch in (whole, right))
    reference = reference_of(job, mesh, CPU)
    assert (reference.copy is None) == bool(job.config.model.lora.rank)
    result = reference(composition, mine, job.config.train.micro_batch)
    last = mesh.get_local_rank("pp") == axis_size(mesh, "pp") - 1
    zero_bubble = job.degrees.pp_schedule.startswith("ZBV")
    return (result, right["targets"]) if last != zero_bubble or axis_size(mesh, "pp") == 1 else None


@pytest.mark.parametrize(
    "case",
    tiered(MESHES, slow=set(MESHES) - {"cp", "adapters"}, full={"zero 1", "ulysses x tp", "one pair"}),
)
def test_as_one_process_finds_it(pool: Pool, case: str) -> None:
    keys, ranks = keys_of(case)
    results = [result for result in pool.run(_filled, ranks, keys) if result]
    assert results
    for here, right in results:
        torch.testing.assert_close(here, right, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"precision__param": "bfloat16"}, "reference: a frozen copy, 181,120 bytes per rank"),
        (LORA, "reference: the model without its adapters"),
    ],
)
def test_a_dry_run_says_what_it_takes(
    keys: Keys, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    describe(make_job(1, **BASE | keys))
    assert f"\n{line}; a second forward in each step\n" in capsys.readouterr().out


def test_a_copy_of_quantized_weights_is_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """A row of an int8 weight has its scale and a byte for each input, whatever computes with it."""
    keys: Keys = BASE | {"model__lora__rank": 2, "model__lora__targets": "all-linear"}
    job = make_job(1, **keys, model__lora__base="int8", model__lora__load="adapters")
    size = sum(p.numel() * (4 if p.is_floating_point() else 1) for p in job.model.parameters())
    describe(job)
    assert f"reference: a frozen copy, {size:,} bytes per rank" in capsys.readouterr().out


def test_the_planner_refuses_it() -> None:
    words = ["plan", str(ROOT / "train.toml"), "--gpus", "8xh100", "--dpo.beta=0.1"]
    assert "dpo.beta: the second forward of DPO is not counted; plan with dpo.beta = 0" in refusal(
        main, words
    )


def _keys(folder: Path, **keys: object) -> Keys:
    """A run of eight steps on two pairs."""
    data = str(token_set(folder / "data", "pairs"))
    return keys_for(
        folder / "run",
        data__path=data,
        dpo__beta=0.5,
        train__steps=8,
        train__global_batch=2,
        train__micro_batch=1,
        optimizer__warmup=0,
        **keys,
    )


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, LORA, {"parallel__cp": 2}, {"parallel__pp": 2}], ids=str)
def test_the_margin_rises(pool: Pool, tmp_path: Path, keys: Keys) -> None:
    """Validation on the same pairs sees the same loss, before the next update."""
    keys = _keys(tmp_path, **keys, optimizer__lr=1e-2)
    keys |= {"data__validation": keys["data__path"], "train__validate_every": 1}
    pool.run(train, 2, keys)
    steps = lines(tmp_path / "run")
    assert steps[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert steps[0]["rewards"]["margin"] == pytest.approx(0.0, abs=1e-4)
    assert steps[-1]["loss"] < 0.5 < steps[0]["loss"]
    assert steps[-1]["rewards"]["margin"] > steps[3]["rewards"]["margin"] > 0
    assert steps[-1]["rewards"]["accuracy"] == 1
    for before, after in pairwise(steps):
        assert after["loss"] == pytest.approx(before["validation_loss"], rel=1e-4)


@pytest.mark.slow
def test_goes_on_on_another_mesh(pool: Pool, tmp_path: Path) -> None:
    """A run that stops and goes on has the reference that it began with."""
    pool.run(train, 1, _keys(tmp_path / "whole"))
    keys = _keys(tmp_path / "parts", checkpoint__interval=4)
    pool.run(train, 2, keys | {"train__stop_after": 4})
    pool.run(train, 2, keys | {"parallel__cp": 2})
    whole, parts = (lines(tmp_path / name / "run") for name in ("whole", "parts"))
    for one, other in zip(whole, parts, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["rewards"]["margin"] == pytest.approx(other["rewards"]["margin"], rel=1e-3, abs=1e-5)
    kept = tmp_path / "parts/run" / KEPT
    for text, line in (
        ("another", "its reference had other weights than weights drawn by train.seed = 0 now has"),
        ("", "its run was no DPO"),
    ):
        kept.write_text(text)
        assert line in pool.run(refusal, 1, train, keys)[0]


def _in_a_store(folder: str) -> None:
    """Two runs of a step each; the second is on a machine that has nothing of the first."""
    keys = _keys(Path(folder), checkpoint__interval=1) | {"run__dir": f"file://{folder}/store/run"}
    for steps in (1, 2):
        train(keys | {"run__staging": f"{folder}/{steps}", "train__stop_after": steps})


def test_goes_on_from_object_storage(pool: Pool, tmp_path: Path) -> None:
    pool.run(_in_a_store, 1, str(tmp_path))
    assert len(lines(tmp_path / "store/run")) == 2
    assert (tmp_path / "store/run" / KEPT).read_text() == "drawn by seed 0"


def test_a_run_that_was_imported_names_where_from(pool: Pool, tmp_path: Path) -> None:
    """Or its reference would have other weights than it began with."""
    folder = tmp_path / "hf"
    save_model(folder, {})
    assert main(["convert", str(folder), str(tmp_path / "run")]) == 0
    keys = _keys(tmp_path, train__stop_after=1)
    line = (
        f"{tmp_path / 'run/checkpoints/step-00000000'}: has the weights that the run begins with, and"
        " its reference would have others; set checkpoint.load_hf to the folder that they were imported"
        " from"
    )
    assert pool.run(refusal, 1, train, keys) == [line]
    pool.run(train, 1, keys | {"checkpoint__load_hf": folder})
    assert lines(tmp_path / "run")[0]["loss"] == pytest.approx(0.693147, abs=1e-5)


def test_adapters_that_were_loaded_are_the_references_too(pool: Pool, tmp_path: Path) -> None:
    """A run does not go on with others in their folder."""
    first = _keys(tmp_path / "first", **LORA, checkpoint__interval=1)
    pool.run(train, 1, first | {"train__stop_after": 1})
    adapters = tmp_path / "adapters"
    assert main(["convert", str(tmp_path / "first/run"), str(adapters)]) == 0
    keys = _keys(tmp_path / "second", **LORA, model__lora__load=adapters, checkpoint__interval=1)
    pool.run(train, 1, keys | {"train__stop_after": 1})
    pool.run(train, 1, keys | {"train__stop_after": 2})
    shutil.rmtree(adapters)
    pool.run(train, 1, first | {"train__stop_after": 2})
    assert main(["convert", str(tmp_path / "first/run"), str(adapters)]) == 0
    (line,) = pool.run(refusal, 1, train, keys | {"train__stop_after": 3})
    run, had = tmp_path / "second/run", "its reference had other"
    cure = "give it what the run began with"
    assert line == f'{run}: {had} adapters than model.lora.load = "{adapters}" now gives; {cure}'
    (run / KEPT).write_text("another" + (run / KEPT).read_text())
    (line,) = pool.run(refusal, 1, train, keys | {"train__stop_after": 3})
    assert (
        line
        == f"{run}: {had} weights than weights drawn by train.seed = 0 now has; give it those again"
    )


def test_a_note_that_cannot_be_read_is_not_gone(tmp_path: Path) -> None:
    """A store that is down, or a disk that fails, does not make another run of it."""
    place, down = as_path(f"file://{tmp_path}") / KEPT, StoreError(5, "down", KEPT)
    (tmp_path / KEPT).write_bytes(b"\xff")
    assert _read(place) == _read(tmp_path / KEPT) == _read(tmp_path / "gone") == ""
    with mock.patch.object(Remote, "read_bytes", side_effect=down):
        assert refusal(_read, place) == f"{place}: down"
    with mock.patch.object(Path, "read_text", side_effect=OSError(5, "a bad disk")):
        assert refusal(_read, tmp_path / KEPT) == f"{tmp_path / KEPT}: a bad disk"


def test_a_part_of_a_checkpoint_in_a_store_is_not_what_a_run_begins_with(tmp_path: Path) -> None:
    """The run was killed in its first upload, and begins again."""
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000002" / "config.toml").touch()
    hook = Preferences.__new__(Preferences)
    hook.path, hook.where = as_path(f"file://{tmp_path}") / KEPT, ("", 1)
    hook.adapters, hook.copied = "", True
    hook._note(0)
    assert (tmp_path / KEPT).exists()
