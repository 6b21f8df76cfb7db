"""Anyone may have made the files of a rank's state: another shape, type or name is one line."""

from collections.abc import Collection
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from compose.checkpoint import rank_state
from compose.checkpoint.checkpointer import Checkpointer
from compose.checkpoint.rank_state import HasState
from compose.diloco.loop import OuterLoop
from compose.errors import ConfigError
from compose.object_storage import Remote, StoreError, as_path
from tests.diloco.cases import outer
from tests.support.helpers import Keys, refusal, tier
from tests.support.pool import Pool
from tests.support.training import keys_for, trainer_of

State = dict[str, Tensor]
SMALL: Keys = {"model__hidden_dim": 192, "train__seq_len": 16, "train__global_batch": 8}
STEPS = 2
NONE = "is no name of what messages keep"
DROPPED = (
    "what messages kept is of another mesh, of other codes, or of an earlier version, and is dropped"
)


def _faults(checkpointer: Checkpointer) -> list[tuple[State, str]]:
    """States of which one tensor is wrong, and the line for each."""
    right = rank_state.copied(checkpointer.beside)
    assert right
    results: list[tuple[State, str]] = [(right, "")]
    for name in (min(right), max(right)):
        value, short = right[name], name.removeprefix("outer.").removeprefix("0.")
        own = f"{'floats' if name.endswith('.base') else value.dtype} {list(value.shape)}"
        for wrong in (torch.cat([value, value]), value.to(torch.int32), value[None]):
            shown = f"{wrong.dtype} {list(wrong.shape)}"
            results.append((right | {name: wrong}, f"{short} is {shown}, not {own}"))
        results.append((right | {f"{name}x": value.clone()}, f"{short}x {NONE}"))
    strange = "7.output.weight.shards.feedback"
    results.append((right | {strange: torch.zeros(1)}, f"{strange} {NONE}"))
    loops = [hook for hook in checkpointer.beside if isinstance(hook, OuterLoop)]
    if not loops:
        return [*results, ({**right, "outer.lost.0": torch.zeros(1)}, f"outer.lost.0 {NONE}")]
    for name in ("lost.x", "lost.00", "pending.0.3.7", "pending.0.9.0", "pending.9.3.0", "pending"):
        results.append((right | {f"outer.{name}": torch.zeros(1)}, f"{name} {NONE}"))
    other = "pending.1.3.0"  # an exchange of another fragment at the same time
    (size,), _ = loops[0]._forms(STEPS)[other]
    second = right | {f"outer.{other}": torch.zeros(size, dtype=torch.uint8)}
    return [*results, (second, f"{other} {NONE}")]


def _load(checkpointer: Checkpointer, folder: Path) -> str:
    """Return the problem of ranks' files in a folder."""
    beside, group = checkpointer.beside, checkpointer.group
    filled = [name for other in beside for name in other.tensors()]
    return rank_state.load(folder, checkpointer.label, beside, group, filled, STEPS)


def _differences(keys: Keys, folder: Path) -> list[tuple[str, str]]:
    """Give back what was kept, each time with a fault: the lines that are not the expected ones."""
    trainer = trainer_of(SMALL | keys)
    for _ in range(STEPS):
        trainer.step()
    checkpointer = trainer.checkpointer
    name, own = f"comm-{dist.get_rank():05d}.safetensors", folder / checkpointer.root.parent.name
    results = []
    faults = _faults(checkpointer)
    for number, (state, expected) in enumerate(faults):
        there = own / str(number)
        there.mkdir(parents=True, exist_ok=True)
        rank_state.write(there, dist.get_rank(), checkpointer.label, state)
        try:
            said = _load(checkpointer, there)
        except ConfigError as error:
            (said,) = error.problems
            said = said.removeprefix(f"{there / name}: ")
        results.append((said, expected))
    (own / "link").mkdir(exist_ok=True)
    (own / "link" / name).symlink_to(own / "0" / name)
    results.append((_load(checkpointer, own / "link"), f"{own / 'link'}: {DROPPED}"))
    assert len(results) > 10
    return [(said, expected) for said, expected in results if said != expected]


CODES: dict[str, Keys] = {
    "powersgd": {"comm__gradients": "powersgd", "comm__rank": 2},
    "int4": {"comm__gradients": "int4", "comm__weights": "int4_diff"},
    "top_k": {"comm__gradients": "top_k"},
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=tier(slow=n != "int4")) for n in CODES])
def test_what_codes_keep(pool: Pool, tmp_path: Path, name: str) -> None:
    keys = keys_for(tmp_path / "run", **CODES[name], parallel__dp_shard=2)
    assert pool.run(_differences, 2, keys, tmp_path) == [[], []]


def test_what_islands_keep(pool: Pool, tmp_path: Path) -> None:
    keys = outer(every=4, fragments=1, dtype="top_k", delay=1) | {"parallel__dp_replicate": 2}
    result = pool.run(_differences, 2, keys_for(tmp_path / "run", **keys), tmp_path, islands=2)
    assert result == [[], []]


class _Keeps(HasState):
    def state(self) -> State:
        return {"kept": torch.ones(2)}

    def load(self, state: State, read: Collection[str], step: int) -> None:
        state.pop("kept", None)


def test_a_copy_stays_what_it_is() -> None:
    """It is written while training goes on, which changes what it was made of."""
    kept = torch.ones(2)
    with mock.patch.object(_Keeps, "state", return_value={"kept": kept}):
        copies = rank_state.copied([_Keeps()])
    kept.zero_()
    assert copies is not None
    assert copies["kept"].tolist() == [1.0, 1.0]


def test_a_metric_that_is_switched_on_or_off(alone: None, tmp_path: Path) -> None:
    """State of metrics.noise_scale is dropped without a word; a first state is not missed."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    assert rank_state.load(tmp_path, "", [_Keeps()], group, [], STEPS) == ""
    rank_state.write(tmp_path, 0, "", _Keeps().state() | {"noise_scale": torch.ones(3)})
    assert rank_state.load(tmp_path, "", [_Keeps()], group, [], STEPS) == ""
    line = rank_state.load(tmp_path, "another", [_Keeps()], group, [], STEPS)
    assert line == f"{tmp_path}: {DROPPED}"


def test_tensors_begin_where_torch_lets_them_begin(alone: None, tmp_path: Path) -> None:
    """At multiples of 64 bytes, as before the save: elsewhere a product is rounded otherwise."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    rank_state.write(tmp_path, 0, "", {str(n): torch.ones(n) for n in range(1, 9)})
    state = rank_state.read(tmp_path, "", group)
    assert state
    assert [value.data_ptr() % 64 for value in state.values()] == [0] * 8


def test_a_file_that_cannot_be_reached_is_no_other_state(tmp_path: Path) -> None:
    """What is kept is not dropped for a store that is down, or a disk that fails."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    file = "comm-00000.safetensors"
    try:
        given = ("", [_Keeps()], dist.group.WORLD, [], STEPS)
        rank_state.write(tmp_path, 0, "", _Keeps().state())
        down = StoreError(5, "down", file)
        with mock.patch.object(Remote, "open", side_effect=down):
            assert refusal(rank_state.load, as_path(f"file://{tmp_path}"), *given) == f"{file}: down"
        with mock.patch.object(rank_state, "open_own", side_effect=OSError(5, "a bad disk")):
            line = refusal(rank_state.load, tmp_path, *given)
        assert line == f"{tmp_path / file}: cannot be read: a bad disk"
    finally:
        dist.destroy_process_group()
