"""Optimizers of the table have options, a state without a step, and checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from compose.build import build, build_optimizer
from compose.ops.tensors import local_tensor
from compose.optim.adamw import AdamW
from compose.optim.muon import Muon
from compose.optim.offload import OffloadedAdamW
from compose.optim.optimizers import (
    OPTIMIZERS,
    CombinedOptimizer,
    Named,
    OptimizerEntry,
    OptimizerSettings,
    Rules,
    grouped,
    make_state,
)
from tests.support.checkpoints import (
    MESHES,
    SAVING,
    goes_on_bitwise,
    goes_on_from_a_state_dict,
    resume,
    train_on,
)
from tests.support.helpers import HALF, Keys, built, make_job, refused
from tests.support.pool import Pool, make_mesh
from tests.support.training import keys_for, lines, logged_steps

MESH: Keys = {"parallel__dp_shard": 2, "parallel__tp": 2, "model__n_layers": 3}
KINDS: dict[str, Keys] = {
    "fused": {"optimizer__implementation": "fused"},
    "foreach": {"optimizer__implementation": "foreach"},
    "for-loop": {"optimizer__implementation": "for-loop"},
    "bfloat16": HALF,
    "muon": {"optimizer__name": "muon"},
    "muon in bfloat16": HALF | {"optimizer__name": "muon"},
    "offload to memory": {"optimizer__offload": "cpu"},
    "offload to files": {"optimizer__offload": "nvme"},
}


def _described(tensor: Tensor) -> tuple[object, ...]:
    placed = (tensor.placements, tensor.to_local().shape) if isinstance(tensor, DTensor) else ()
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, placed


def _state(keys: Keys, folder: Path, stepped: bool) -> dict[str, tuple[object, ...]]:
    job, composition = built(MESH | keys)
    model = composition.model
    frozen = model.get_parameter("layers.0.attention.wq.weight").requires_grad_(False)
    optimizer = build_optimizer(composition, job, folder=folder)
    if stepped:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
    else:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        make_state(optimizer)
        for parameter, value in zip(model.parameters(), before, strict=True):
            assert parameter.grad is None
            assert torch.equal(parameter.detach(), value)
        assert {float(state["step"]) for state in optimizer.state.values()} == {0.0}
    assert frozen not in optimizer.state
    return {
        f"{name}.{key}": _described(value)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        for key, value in optimizer.state[parameter].items()
    }


@pytest.mark.parametrize("name", KINDS)
def test_as_by_a_step(pool: Pool, tmp_path: Path, name: str) -> None:
    keys = KINDS[name]
    assert pool.run(_state, 4, keys, tmp_path / "made", False) == pool.run(
        _state, 4, keys, tmp_path / "stepped", True
    )


def test_state_that_there_is_stays() -> None:
    for kind in (torch.optim.AdamW, AdamW):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = kind([("w", parameter)])
        parameter.grad = torch.ones(3)
        optimizer.step()
        before = {key: value.clone() for key, value in optimizer.state[parameter].items()}
        make_state(optimizer)
        for key, value in before.items():
            assert torch.equal(optimizer.state[parameter][key], value), key


def test_parameters_added_later_are_refused() -> None:
    one, other = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(3, 2))
    matrices = Muon([("one", one)])
    both = CombinedOptimizer([matrices, AdamW([("other", other)])])
    for optimizer in (matrices, both):
        before = list(optimizer.param_groups)
        with pytest.raises(ValueError, match=r"add_param_group: .* make a new one with all of them"):
            optimizer.add_param_group({"params": [("more", torch.nn.Parameter(torch.ones(2, 2)))]})
        assert optimizer.param_groups == before


def test_several_go_on_from_one_state_dict() -> None:
    """That of other groups is refused."""

    def make(named: Named) -> CombinedOptimizer:
        parts = [Muon(named[:1]), AdamW(named[1:2]), torch.optim.AdamW(named[2:], fused=True)]
        return CombinedOptimizer(parts)

    goes_on_from_a_state_dict(make, torch.float32)
    one, two = (AdamW([(str(i), torch.nn.Parameter(torch.ones(1))) for i in range(n)]) for n in (1, 2))
    with pytest.raises(ValueError, match=r"of groups of \[2\] parameters, the optimizer has \[1\]"):
        one.load_state_dict(two.state_dict())


@pytest.mark.parametrize("kind", [AdamW, Muon, OffloadedAdamW, "several"])
def test_a_closure_computes_the_gradients(kind: Any) -> None:
    """As torch's optimizers have it: it is called with gradients on, and its loss comes back."""
    named = [(f"w{i}", torch.nn.Parameter(torch.ones(2, 3))) for i in range(2)]
    made = CombinedOptimizer([Muon(named[:1]), AdamW(named[1:])]) if kind == "several" else kind(named)

    def closure() -> Tensor:
        made.zero_grad()
        loss = torch.stack([weight.square().sum() for _, weight in named]).sum()
        loss.backward()
        return loss

    assert float(made.step(closure).detach()) == 12
    assert all(bool((weight < 1).all()) for _, weight in named)


def _seeds_and_options(keys: Keys) -> tuple[list[int], list[dict[str, object]]]:
    job, composition = built(keys)
    optimizer = build_optimizer(composition, job)
    parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]
    seeds = [part.seed for part in parts if isinstance(part, (AdamW, Muon))]
    return seeds, [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


@pytest.mark.parametrize(
    ("name", "seeded"),
    [("fused", 0), ("bfloat16", 1), ("muon", 1), ("muon in bfloat16", 2), ("offload to memory", 0)],
)
def test_options_are_the_configs(pool: Pool, name: str, seeded: int) -> None:
    """So is the seed of rounding, in each optimizer that may round."""
    keys = KINDS[name] | {"model__n_layers": 1, "optimizer__beta1": 0.7, "optimizer__beta2": 0.8}
    keys |= {"optimizer__eps": 0.01, "optimizer__momentum": 0.6, "optimizer__lr": 0.25}
    keys |= {"optimizer__lr_scale": '["output=0.5"]', "optimizer__weight_decay": 0.5, "train__seed": 5}
    seeds, groups = pool.run(_seeds_and_options, 1, keys)[0]
    assert seeds == [5] * seeded
    assert {group["lr"] for group in groups} == {0.25, 0.125}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.5}
    for group in groups:
        assert group["lr"] == 0.25 * float(str(group["lr_scale"]))
        if "momentum" in group:
            assert group["momentum"] == 0.6
        else:
            assert (group["betas"], group["eps"]) == ((0.7, 0.8), 0.01)


def _sgd(named: Named, rules: Rules, settings: OptimizerSettings) -> torch.optim.SGD:
    return torch.optim.SGD(grouped(named, rules, by_mesh=True), lr=settings.options.lr)


def _step_of_sgd() -> list[bool]:
    job = make_job(2, parallel__dp_shard=2)
    options = replace(job.config.optimizer, name="sgd", lr=0.5, weight_decay=0.0)
    job = replace(job, config=replace(job.config, optimizer=options))
    with mock.patch.dict(OPTIMIZERS, {"sgd": OptimizerEntry(_sgd, ())}):
        composition = build(job, make_mesh(job.degrees), torch.device("cpu"))
        optimizer = build_optimizer(composition, job)
    named = dict(composition.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    taken = {name: local_tensor(before[name]) - local_tensor(p.detach()) for name, p in named.items()}
    return [torch.allclose(step, torch.tensor(0.5)) for step in taken.values()]


def test_an_optimizer_from_outside(pool: Pool) -> None:
    assert all(all(result) and result for result in pool.run(_step_of_sgd, 2))


@pytest.mark.slow
def test_goes_on_bitwise(pool: Pool, tmp_path: Path) -> None:
    """With weights and state that are rounded at random."""
    keys = HALF | {"optimizer__name": "muon"}
    result = goes_on_bitwise(pool, tmp_path, keys, MESH)
    kinds = {key.rpartition(".")[2] for key in result if key.startswith("optimizer.")}
    assert kinds == {"step", "momentum_buffer", "exp_avg", "exp_avg_sq"}


def test_goes_on_in_fewer_bits(pool: Pool, tmp_path: Path) -> None:
    """float32 state is rounded once, when it is read."""
    train_on(pool, tmp_path, {}, MESHES["one"], 2)
    keys: Keys = {"precision__optimizer_state": "bfloat16", "optimizer__implementation": "foreach"}
    result = train_on(pool, tmp_path, keys, MESHES["data"], 4)
    kinds = {value.dtype for key, value in result.items() if key.endswith("exp_avg")}
    assert kinds == {torch.bfloat16}
    assert {float(value) for key, value in result.items() if key.endswith(".step")} == {4.0}
    assert logged_steps(tmp_path) == [1, 2, 3, 4]


def test_another_optimizer_is_refused(pool: Pool, tmp_path: Path) -> None:
    train_on(pool, tmp_path, {}, MESHES["one"], 2)
    keys = keys_for(tmp_path, **SAVING, optimizer__name="muon")
    (line,) = pool.run(refused, 1, resume, keys)[0]
    assert line == (
        f"{tmp_path}/checkpoints/step-00000002: has no"
        " optimizer.layers.0.attention.wq.weight.momentum_buffer and 13 more; go on with the"
        " optimizer.name and muon_except that it was made with"
    )


@pytest.mark.slow
def test_goes_on_on_another_mesh(pool: Pool, tmp_path: Path) -> None:
    keys: Keys = {"optimizer__name": "muon", "model__n_layers": 3}
    expected = train_on(pool, tmp_path / "whole", keys, MESHES["one"], 4)
    train_on(pool, tmp_path / "parts", keys, MESHES["v-schedule"], 2)
    result = train_on(pool, tmp_path / "parts", keys, MESHES["one"], 4)
    for key, value in expected.items():
        torch.testing.assert_close(result[key], value, rtol=1e-3, atol=1e-4)
    for a, b in zip(lines(tmp_path / "whole"), lines(tmp_path / "parts"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
