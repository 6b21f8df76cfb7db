"""Configs for tests: train.toml with a model and a batch small enough for a matrix of runs."""

import dataclasses
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from compose.build import build
from compose.composition import Composition
from compose.config import rules
from compose.config.job import Job
from compose.config.models import find_model
from compose.config.tables import Config
from compose.config.toml import load
from compose.errors import ConfigError
from compose.memory import activation_offload
from compose.parallel.mesh import batch_share
from compose.proof.comparison import whole
from compose.proof.prove import prove
from compose.proof.report import Report
from tests.support.pool import Pool, make_mesh

ROOT = Path(__file__).parents[2]
Keys = dict[str, object]
# Lines of long_cases.txt that name no test, if all tests were asked for.
UNKNOWN_CASES = pytest.StashKey[list[str]]()
SMALL = {
    "model.n_layers": 2,
    "model.dim": 64,
    "model.hidden_dim": 96,
    "train.seq_len": 32,
}
# Keys of the smallest model and batch.
TINY: Keys = {
    "model__n_layers": 1,
    "model__dim": 16,
    "model__hidden_dim": 16,
    "model__n_heads": 2,
    "model__n_kv_heads": 1,
    "train__seq_len": 16,
    "train__global_batch": 2,
}
# All sides of a tp rank's parts are multiples of 16.
FLOAT8_SHAPE: Keys = {
    "model__dim": 128,
    "model__hidden_dim": 192,
    "precision__float8": "tensorwise",
}

HALF: Keys = {f"precision__{key}": "bfloat16" for key in ("param", "master", "optimizer_state")}


def parallel(**keys: object) -> Keys:
    """Keys of ``[parallel]``: ``tp=2`` is ``parallel__tp=2``."""
    return {f"parallel__{key}": value for key, value in keys.items()}


def tier(slow: bool = False, full: bool = False) -> list[pytest.MarkDecorator]:
    """The mark of a case: none for the default tier, slow, or full, which comes before slow."""
    return [pytest.mark.full] if full else [pytest.mark.slow] if slow else []


def in_turn(cases: Sequence[Any], quick: Callable[..., bool]) -> list[Any]:
    """Every second case of a product runs, by default where ``quick(*case)``, else in the slow tier;
    ``-m full`` runs the others."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*case, marks=tier(slow=not quick(*case), full=i % 2 == 1))
        for i, case in enumerate(tuples)
    ]


def keys_in(line: str) -> Keys:
    """The keys of a line as ``tp=2 model.name=qwen3``; names without a table are of ``[parallel]``."""
    pairs = [word.split("=", 1) for word in line.split()]
    names = [name.replace(".", "__") if "." in name else f"parallel__{name}" for name, _ in pairs]
    return {name: value for name, (_, value) in zip(names, pairs, strict=True)}


def ranks_in(keys: Keys) -> int:
    """The number of ranks that the degrees of ``[parallel]`` ask for."""
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    return math.prod(int(str(keys.get(f"parallel__{axis}", 1))) for axis in axes)


def refusal(action: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """Return a call's refusal, its problems one a line; "" if there is none."""
    try:
        action(*arguments, **named)
    except ConfigError as error:
        return str(error)
    return ""


@contextmanager
def printed() -> Iterator[list[str]]:
    """The texts that are printed meanwhile, each as one print has it."""
    texts: list[str] = []

    def note(*words: object, sep: str = " ", **_: object) -> None:
        texts.append(sep.join(map(str, words)))

    with mock.patch("builtins.print", note):
        yield texts


def tiered(names: Iterable[str], slow: Container[str] = (), full: Container[str] = ()) -> list[Any]:
    """The names of cases, each with the mark of its tier."""
    return [pytest.param(name, marks=tier(name in slow, name in full)) for name in names]


def make_config(world_size: int, **keys: object) -> Config:
    """train.toml with SMALL and ``keys`` (``parallel__tp=2``) on top, checked."""
    return make_job(world_size, **keys).config


def make_job(world_size: int, **keys: object) -> Job:
    """The job of train.toml with SMALL, as far as the model has such sizes, and ``keys`` on top.

    A key is written as ``parallel__tp=2``. ``compile__backend``, which no file has, is torch.compile's:
    "aot_eager" traces graphs, and compiles no kernels, which takes many seconds.
    """
    backend = keys.pop("compile__backend", "inductor")
    job = rules.check(load(str(ROOT / "train.toml"), overrides(keys)), world_size)
    compile = dataclasses.replace(job.config.compile, backend=backend)
    return dataclasses.replace(job, config=dataclasses.replace(job.config, compile=compile))


def overrides(keys: Mapping[str, object]) -> list[tuple[str, str]]:
    """SMALL, as far as the model has such sizes, and ``keys`` on top, as a command line has them."""
    given = {name.replace("__", "."): value for name, value in keys.items()}
    kind = find_model(str(given.get("model.name", "llama"))).Config
    fields = {f"model.{field.name}" for field in dataclasses.fields(kind)}
    small = {
        key: value for key, value in SMALL.items() if key in fields or not key.startswith("model.")
    }
    return [
        (name, str(value).lower() if isinstance(value, bool) else str(value))
        for name, value in (small | given).items()
    ]


def built(keys: Keys) -> tuple[Job, Composition]:
    """On every rank of a pool: the job of train.toml with ``keys``, and its composition on the CPU."""
    job = make_job(dist.get_world_size(), **keys)
    return job, build(job, make_mesh(job.degrees), torch.device("cpu"))


def share_of(batch: Mapping[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    """This rank's share of a global batch."""
    index, count = batch_share(mesh)
    return {name: value.chunk(count)[index] for name, value in batch.items()}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The whole gradient of each parameter that has one, by name."""
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def small_ones_move() -> Iterator[None]:
    """Activations of any size are offloaded. In a model of this size none would be large enough."""
    least, activation_offload.LEAST = activation_offload.LEAST, 1
    try:
        yield
    finally:
        activation_offload.LEAST = least


def prove_case(keys: dict[str, object], steps: int | None = None) -> Report:
    """On every rank of a pool: the proof for train.toml with ``keys``.

    In float32 it is that of float32 alone, which takes half as long as :func:`prove_whole`.
    """
    job = make_job(dist.get_world_size(), **keys)
    logic = job.config.precision.reduced
    with small_ones_move():
        return prove(job, make_mesh(job.degrees), torch.device("cpu"), steps, logic)


def prove_whole(keys: dict[str, object]) -> Report:
    """On every rank of a pool: what ``verify`` proves for train.toml with ``keys``."""
    job = make_job(dist.get_world_size(), **keys)
    with small_ones_move():
        return prove(job, make_mesh(job.degrees), torch.device("cpu"))


def prove_step(keys: dict[str, object]) -> Report:
    """Prove a case over one step, for techniques that leave nothing behind for the next."""
    return prove_case(keys, steps=1)


def agreed(reports: list[Report]) -> Report:
    """The one report that all ranks have made."""
    assert all(report == reports[0] for report in reports), "ranks disagree on the report"
    return reports[0]


def proved(reports: list[Report], what: object = "") -> Report:
    """The one report that all ranks have made, and that holds."""
    report = agreed(reports)
    assert report.ok, f"{what}\n{report}"
    return report


def prove_on(pool: Pool, keys: Keys, prove: Callable[[Keys], Report] = prove_case) -> Report:
    """The proof for train.toml with ``keys``, which holds, on as many ranks as they ask for."""
    return proved(pool.run(prove, ranks_in(keys), keys), keys)


def refused(call: Callable[..., Any], *args: Any, **keys: Any) -> list[str]:
    """The lines of the ConfigError that ``call`` raises; none if it raises none."""
    return refusal(call, *args, **keys).splitlines()


def proofs(
    cases: Mapping[str, Keys],
    base: Keys | None = None,
    slow: Container[str] = (),
    full: Container[str] = (),
    prove: Callable[[Keys], Report] = prove_case,
) -> Callable[[Pool, str], None]:
    """A test: in each case a run with the keys of ``base`` and the case equals one process."""

    @pytest.mark.parametrize("case", tiered(cases, slow, full))
    def test(pool: Pool, case: str) -> None:
        prove_on(pool, (base or {}) | cases[case], prove)

    return test


def refusals(
    rows: Sequence[tuple[Keys, str]], base: Keys | None = None, names: Iterable[str] | None = None
) -> Callable[[Keys, str], None]:
    """A test: a run with the keys of each row is refused by the lines that go with them."""

    @pytest.mark.parametrize(("keys", "lines"), rows, ids=names)
    def test(keys: Keys, lines: str) -> None:
        keys = (base or {}) | keys
        assert refused(make_job, ranks_in(keys), **keys) == lines.split("\n")

    return test
