"""How the project is built: what a start makes, who imports whom, and how much a function takes."""

import ast
import dataclasses
import inspect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import train
from compose import Composition, apply, legality, plan, registry
from compose.options import Options
from tests.helpers import ROOT
from tests.pool import Pool

SOURCES = sorted((ROOT / "compose").rglob("*.py"))
# What says how a model is cut and computed. It knows its own tables, and no run's whole config.
TECHNIQUES = [
    "activation_bytes",
    "activation_checkpointing",
    "activation_offload",
    "apply",
    "attention_blocks",
    "chunked_loss",
    "compilation",
    "composition",
    "context_parallel",
    "data_parallel",
    "evaluate",
    "expert_parallel",
    "float8",
    "local",
    "local_parallel",
    "loss",
    "loss_scale",
    "mesh",
    "near_shards",
    "one_process",
    "options",
    "output",
    "pipeline_parallel",
    "pipeline_split",
    "pipeline_stage",
    "plan",
    "precision",
    "replicas",
    "report",
    "routing",
    "schedules",
    "step",
    "tensor_parallel",
    "ties",
    "verify",
    "weights",
    "witness",
]


def module_of(path: Path) -> str:
    """The name of a file's module."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Modules of compose that a file imports when it is imported; those for types alone are not."""
    modules = {module_of(source) for source in SOURCES}
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from [name for name in (inner, node.module) if name in modules][:1]


def test_no_import_cycles() -> None:
    """No module leads back to itself."""
    of = {module_of(path): set(imports(path)) for path in SOURCES}
    done: set[str] = set()

    def follow(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"cycle: {' -> '.join([*way[way.index(name) :], name])}"
        if name not in done:
            for other in of.get(name, ()):
                follow(other, (*way, name))
            done.add(name)

    for name in of:
        follow(name, ())


def test_techniques_know_no_config() -> None:
    """Neither a technique nor what it imports knows of compose.config, job or toml."""
    of = {module_of(path): set(imports(path)) for path in SOURCES}
    optimizer = [name for name in of if name.startswith("compose.optimizer.")]
    reached = {f"compose.{name}" for name in TECHNIQUES} | set(optimizer)
    assert reached <= of.keys()
    while more := {other for name in reached for other in of.get(name, ())} - reached:
        reached |= more
    assert not reached & {"compose.config", "compose.job", "compose.toml", "compose.registry"}


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every public function and method of compose, by the name of its module and its own."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield f"{module_of(path)}.{node.name}", node


def test_public_functions_take_at_most_six_parameters() -> None:
    """What a function takes more belongs into a value that has a name."""
    many = []
    for name, node in functions():
        taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = len([argument for argument in taken if argument.arg not in ("self", "cls")])
        many += [f"{name} takes {count}"] if count > 6 else []
    assert not many


def test_apply_takes_four() -> None:
    assert list(inspect.signature(apply).parameters) == ["model", "plan", "mesh", "options"]


def _state_of_a_model() -> set[str]:
    """The names that apply adds to a module, beside PyTorch's own."""
    from compose import Parallel, Plan, init_mesh

    parallel = Parallel(dp_shard=-1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    before = set(vars(model))
    composition = apply(model, Plan(shard=["0", "1"]), init_mesh(parallel), Options(parallel))
    assert isinstance(composition, Composition)
    assert composition.model is model
    return set(vars(model)) - before


def test_no_registry_on_a_model(pool: Pool) -> None:
    """What was done to it stands in the composition alone."""
    for found in pool.run(_state_of_a_model, 2):
        assert not {name for name in found if "compose" in name}


def _start(words: list[str]) -> Counter[str]:
    """How often a start builds the model, resolves the plan and opens a set of data."""
    from compose.data import opening

    counts: Counter[str] = Counter()

    def counted(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return real(*args, **kwargs)

        return call

    real_find = registry.find_model

    def find(name: str) -> registry.ModelFolder:
        folder = real_find(name)
        return dataclasses.replace(folder, Model=counted("builds", folder.Model))

    resolve = counted("resolutions", plan.resolve)
    samples = counted("sets", opening.open_samples)
    with (
        mock.patch("compose.job.find_model", find),
        mock.patch("compose.job.resolve", resolve),
        mock.patch("compose.legality.resolve", resolve),
        mock.patch.dict(vars(__import__("sys").modules["compose.apply"]), {"resolve": resolve}),
        mock.patch.object(opening, "open_samples", samples),
    ):
        train.main(words)
    return counts


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_a_start_makes_everything_once(tmp_path: Path, flags: list[str]) -> None:
    """The model is built on meta once, the plan resolved once, and each set of data opened once."""
    words = ["--model.dim=64", "--model.hidden_dim=96", "--train.seq_len=32", "--train.steps=1"]
    found = _start([str(ROOT / "train.toml"), *words, f"--run.dir={tmp_path}", *flags])
    assert found == {"builds": 1, "resolutions": 1, **({} if flags else {"sets": 1})}


def test_every_option_is_a_field_of_the_config() -> None:
    """Options are tables of train.toml, so that the library and the file say the same."""
    from compose.config import TABLES

    for field in dataclasses.fields(Options):
        if field.name != "seq_len":
            assert TABLES[field.name] is field.default_factory
    assert legality.RULES
