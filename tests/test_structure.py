"""How the project is built: what a start makes, who imports whom, and how much a function takes."""

import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.util import resolve_name
from pathlib import Path, PurePosixPath
from typing import Any
from unittest import mock

import pytest
import torch

import train
from compose import Composition, apply, plan
from compose.composition import Options
from compose.config import models as registry
from compose.config import rules
from tests.support.helpers import ROOT
from tests.support.pool import Pool

SOURCES = sorted((ROOT / "compose").rglob("*.py"))
# Packages, and files at the top, from the ground up. Each imports those before it and no others.
PACKAGES = (
    "errors",
    "object_storage",
    "ops",
    "parallel",
    "plan",
    "plan_of",
    "pipeline",
    "memory",
    "optim",
    "composition",
    "weights",
    "config",
    "apply",
    "data",
    "checkpoint",
    "build",
    "train",
)
# They hang on hooks: nothing above imports them.
ADD_ONS = ("proof", "planner", "compression", "diloco", "preference", "profiling", "cli", "__main__")
MAX = {"folders": 17, "files at the top": 10, "modules": 200, "floors": 12}
# Values at the top of a module that are filled later, and why none of them is the state of a run.
FILLED_LATER = {
    "compose.compression.activations._BY_KEY": "weak: an operator takes strings alone",
    "compose.config.tables.TABLES": "the tables, as the module is imported",
    "compose.ops.operators.BODIES": "the operators' bodies, as their modules are imported",
    "compose.ops.torch_versions.async_tp_groups": "a process enables a group once",
}
EMPTY = ("{}", "[]", "set()", "dict()", "list()")
# Packages and files that say how a model is cut and computed: they know tables, and no run's config.
WITHOUT_CONFIG = (
    "parallel",
    "pipeline",
    "memory",
    "optim",
    "composition",
    "plan",
    "apply",
    "weights",
)


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


@cache
def import_graph() -> dict[str, set[str]]:
    """Every module of compose, with those that it imports."""
    return {module_of(path): set(imports(path)) for path in SOURCES}


def test_no_import_cycles() -> None:
    """No module leads back to itself."""
    of = import_graph()
    done: set[str] = set()

    def follow(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"cycle: {' -> '.join([*way[way.index(name) :], name])}"
        if name not in done:
            for other in of.get(name, ()):
                follow(other, (*way, name))
            done.add(name)

    for name in of:
        follow(name, ())


def package_of(module: str) -> str:
    """The package of a module, or the file at the top that it is."""
    return [*module.split("."), "compose"][1]


def test_packages_import_in_one_direction() -> None:
    order = [*PACKAGES, *ADD_ONS]
    back = {
        f"{own} {other}"
        for name, others in import_graph().items()
        for own, other in ((package_of(name), package_of(module)) for module in others)
        if own in order and other not in (own, "compose")  # the package itself imports nothing
        if order.index(other) > order.index(own) or (other in ADD_ONS and own in PACKAGES)
    }
    assert not back
    page = (ROOT / "docs/architecture.md").read_text().partition("## Where")[0]
    shown = re.findall(r"^\| \[\S+\]\(\.\./compose/(\w+)", page, re.M)
    assert shown == [package for package in order if package != "__main__"], "the page has this order"


@cache
def floor_of(package: str) -> int:
    """One more than the highest package that a package imports."""
    below = {
        package_of(other)
        for name, others in import_graph().items()
        for other in others
        if package_of(name) == package != package_of(other)
    }
    return 1 + max(map(floor_of, below), default=0)


def test_there_are_few_modules_and_folders() -> None:
    counts = {
        "folders": len({path.parent for path in SOURCES}) - 1,
        "files at the top": len(list((ROOT / "compose").glob("*.py"))),
        "modules": len(SOURCES),
        "floors": max(floor_of(package) for package in (*PACKAGES, *ADD_ONS)),
    }
    assert {what: n for what, n in counts.items() if n > MAX[what]} == {}


def test_no_module_holds_the_state_of_a_run() -> None:
    """State belongs to a composition, a job or a run, which several of a process may have."""
    held = set()
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)], path
        for node in tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                value = ast.unparse(node.value)
                if value in EMPTY or re.match(r"Weak\w+\(|ContextVar\(|local\(|defaultdict\(", value):
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    held.add(f"{module_of(path)}.{ast.unparse(target)}")
    assert held == set(FILLED_LATER)


@pytest.mark.parametrize(
    ("heading", "most"), [("## Follow `tp = 2`", 14), ("## Follow an int8 gradient", 5)]
)
def test_few_files_to_follow(heading: str, most: int) -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(
        r"^\| \[[^]]*\]\(\.\./(.*?)\) \|", page.partition(heading)[2].partition("\n## ")[0], re.M
    )
    assert 0 < len(rows) == len(set(rows)) <= most
    assert all((ROOT / row).is_file() for row in rows)


@pytest.mark.parametrize("model", sorted(path.parent.name for path in ROOT.glob("models/*/model.py")))
def test_a_model_imports_nothing_distributed(model: str) -> None:
    """Neither model.py nor what it imports, of the project, names torch.distributed."""
    paths = [*SOURCES, *(ROOT / "models").rglob("*.py")]
    of = {module_of(path): path for path in paths}
    seen, left = set[str](), {f"models.{model}.model"}
    while left:
        name = left.pop()
        seen.add(name)
        package = name if of[name].stem == "__init__" else name.rpartition(".")[0]
        for node in ast.parse(of[name].read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                place = resolve_name("." * node.level + (node.module or ""), package)
                names = [place, *(f"{place}.{alias.name}" for alias in node.names)]
            assert not [other for other in names if other.startswith("torch.distributed")], name
            left |= {other for other in names if other in of} - seen


def test_trainer_and_checkpointer_know_no_feature_by_name() -> None:
    features = r"outer|diloco|compress|profil|replica|straggl|offload|muon"
    for name in ("train/trainer.py", "checkpoint/checkpointer.py"):
        tree = ast.parse((ROOT / "compose" / name).read_text())
        tested = [
            ast.unparse(node.test if isinstance(node, (ast.If, ast.IfExp)) else node)
            for node in ast.walk(tree)
            if isinstance(node, (ast.If, ast.IfExp))
            or (isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance")
        ]
        assert not [text for text in tested if re.search(features, text, re.IGNORECASE)]


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(module_of(path))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def reach(name: str) -> set[str]:
    """All modules of compose that importing one imports."""
    results = {name}
    while more := {other for one in results for other in import_graph().get(one, ())} - results:
        results |= more
    return results


def test_techniques_know_no_config() -> None:
    """Neither what cuts and computes a model nor what it imports knows of a run's config."""
    for path in SOURCES:
        name = module_of(path)
        if package_of(name) in WITHOUT_CONFIG or name == "compose.proof.verify":
            result = reach(name) & {
                "compose.config.tables",
                "compose.config.job",
                "compose.config.toml",
            }
            assert not result, (name, result)


def test_one_technique_imports_no_other() -> None:
    axes = {f"compose.parallel.{axis}_parallel" for axis in ("data", "tensor", "context", "expert")}
    for axis in axes:
        assert reach(axis) & axes == {axis}


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every public function and method of compose, by the name of its module and its own."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield f"{module_of(path)}.{node.name}", node


def test_public_functions_take_at_most_six_parameters() -> None:
    """Further arguments belong into a value that has a name."""
    many = []
    for name, node in functions():
        if any(ast.unparse(by).startswith("operator(") for by in node.decorator_list):
            continue  # an operator of PyTorch takes tensors and numbers, and no values with names
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
    """The composition alone keeps what was done to it."""
    for result in pool.run(_state_of_a_model, 2):
        assert not {name for name in result if "compose" in name}


def _start(words: list[str]) -> Counter[str]:
    """How often a start builds the model, resolves the plan and opens a set of data."""

    from compose.data import datasets as task

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
    samples = counted("sets", task.open_samples)
    with (
        mock.patch("compose.config.job.find_model", find),
        mock.patch("compose.config.job.resolve", resolve),
        mock.patch.dict(vars(sys.modules["compose.apply"]), {"resolve": resolve}),
        mock.patch.object(task, "open_samples", samples),
    ):
        train.main(words)
    return counts


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_a_start_makes_everything_once(tmp_path: Path, flags: list[str]) -> None:
    """The model is built on meta once, the plan resolved once, and each set of data opened once."""
    words = ["--model.dim=64", "--model.hidden_dim=96", "--train.seq_len=32", "--train.steps=1"]
    result = _start([str(ROOT / "train.toml"), *words, f"--run.dir={tmp_path}", *flags])
    assert result == {"builds": 1, "resolutions": 1, **({} if flags else {"sets": 1})}


def test_every_option_is_a_field_of_the_config() -> None:
    """Options are tables of train.toml, so that the library and the file say the same."""
    from compose.config.tables import TABLES

    for field in dataclasses.fields(Options):
        if field.name not in ("seq_len", "inputs"):
            assert TABLES[field.name] is field.default_factory
    assert rules.RULES


# Functions that raise ConfigError for what is no composition, by what they look at.
OTHER_INPUT = {
    "the model": (
        "apply._check_types apply._check_same weights.materialize"
        " pipeline.stand_ins.try_first_stage pipeline.stand_ins._compare"
        " pipeline.stand_ins._not_by_number"
        " pipeline.stage.plain_stream pipeline.stage.check_detached pipeline.split._twin"
        " memory.segments._run parallel.gradient_sum._ready"
        " parallel.gradient_sum._send parallel.tensor_parallel._replicated_input"
        " parallel.step_rules.free_gathered parallel.output_projection.compare"
        " parallel.step_rules._refuse_optimizers parallel.step_rules.kept_gathered"
        " parallel.step_rules.said_plainly"
        " memory.activation_checkpointing.__torch_dispatch__"
    ),
    "the plan's styles": (
        "plan.resolve apply._tensor parallel.tensor_parallel.apply_tensor_parallel"
        " parallel.tensor_parallel._check parallel.local_parallel._apply"
        " pipeline.pipeline_parallel.check_ties"
        " parallel.local_parallel._become parallel.local_parallel.sent"
        " parallel.output_projection.step_loss parallel.vocabulary_parallel._apply"
    ),
    "a loss of a caller's": "parallel.output_projection.__call__ parallel.step_rules.check_loss",
    "the mesh that a caller made": "parallel.mesh.check_same_degrees",
    "the batch": (
        "pipeline.pipeline_parallel._first pipeline.pipeline_parallel.check_whole parallel.mesh.rows_of"
        " parallel.step_rules.same_rows parallel.step_rules.check_micro_batches"
        " parallel.step_rules.check_gradients parallel.step_rules.lost"
    ),
    "a schedule's file": "pipeline.schedules.refuse",
    "a rank's file of a checkpoint": "pipeline.pipedream.restore",
    "folders and room on a disk": ("optim.offload_files._refused"),
    "adapters of a model": "memory.lora.adapt memory.lora.find_targets memory.lora._style_of"
    " memory.quantized.quantize",
}


def _functions_of(path: Path) -> dict[str, tuple[set[str], bool]]:
    """By the name of each function of a file: the functions that it names, by module, and whether it
    makes a ConfigError."""
    tree, own = ast.parse(path.read_text()), module_of(path)
    known = {node.name: own for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            known |= {alias.asname or alias.name: node.module for alias in node.names}
    results = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
            calls = {f"{known[name]}.{name}" for name in names if name in known}
            makes = any(
                isinstance(inner, ast.Call)
                and isinstance(inner.func, ast.Name)
                and inner.func.id == "ConfigError"
                for inner in ast.walk(node)
            )
            before, made = results.get(node.name, (set(), False))
            results[node.name] = before | calls, made or makes
    return results


def test_nothing_but_a_rule_refuses_a_composition() -> None:
    """Every ConfigError of what cuts and computes a model is raised by a rule of the table; the others
    look at something else, which is listed."""
    functions = {
        f"{module_of(path)}.{name}": result
        for path in SOURCES
        for name, result in _functions_of(path).items()
    }
    checks = {rule.check for rule in rules.RULES}
    reached = {f"{check.__module__}.{check.__name__}" for check in checks}
    while more := {c for name in reached for c in functions.get(name, ((), 0))[0]} - reached:
        reached |= more
    others = {
        name.removeprefix("compose.")
        for name, (_, makes) in functions.items()
        if makes and name not in reached and package_of(name.rpartition(".")[0]) in WITHOUT_CONFIG
    }
    assert others == {name for names in OTHER_INPUT.values() for name in names.split()}


def test_the_table_of_an_add_on_is_read_where_it_is_in() -> None:
    """Without its folder and its line in config/addons.py an add-on is out."""
    reads = [
        line
        for path in SOURCES
        if path.parent.name != "preference"
        for line in path.read_text().splitlines()
        if re.search(r"\bconfig\.dpo\b", line)
    ]
    assert len(reads) > 1
    assert [line for line in reads if '"dpo" in TABLES' not in line] == []


# A start must not load commands, add-ons and libraries that it may never use.
HEAVY = (
    "compose.cli.commands",
    "compose.cli.generate",
    "compose.cli.plan",
    "compose.diloco.loop",
    "compose.models",
    "compose.pipeline.pipeline_parallel",
    "compose.planner",
    "compose.profiling.profiler",
    "compose.proof",
    "jinja2",
    "tensorboard",
    "tokenizers",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.pipelining",
    "torch.utils.tensorboard",
    "transformers",
)


# One after the other: what an earlier line must not load, no later one may either, but for torch.
START = f"""
import sys

def loaded(*names):
    return [name for name in names if name in sys.modules]

import compose
assert not loaded("torch"), "import compose loads torch"
import compose.__main__
assert not (result := loaded(*{HEAVY})), f"python -m compose loads {{result}}"
import train
assert not (result := loaded(*{HEAVY})), f"train.py loads {{result}}"

from compose.config.models import find_model, model_names
# PyTorch imports Dynamo for normal numbers on meta, which nobody needs.
for name in model_names():
    folder = find_model(name)
    folder.on_meta(folder.presets["debug"])
    assert not loaded("torch._dynamo"), f"{{name}} on meta loads a compiler"
"""


def test_a_start_loads_nothing_that_it_may_not_use() -> None:
    """Nor do models on meta."""
    done = subprocess.run(
        [sys.executable, "-c", START], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_buffer_beside_a_model_on_meta_has_its_numbers() -> None:
    """A model may fill a buffer on the CPU as it is made (docs/plan.md)."""

    class Own(torch.nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.nn.init.normal_(torch.empty(3)))
            self.register_buffer("table", torch.nn.init.normal_(torch.full((3,), 9.0, device="cpu")))

    model: Any = dataclasses.replace(registry.find_model("llama"), Model=Own).on_meta(None)
    assert model.weight.is_meta
    assert (model.table != 9).all()


# Modules without a test module of their name, and the test module that tests each.
NO_TEST_MODULE = {
    "planner/operator_figures": "planner/test_record",
    "pipeline/pictures": "pipeline/test_timeline",
    "planner/recorder": "planner/test_record",
    "planner/candidates": "planner/test_search",
    "planner/rank_costs": "planner/test_estimate",
    "__main__": "cli/test_commands",
    "build": "test_apply",
    "checkpoint/loading": "train/test_run_folder",
    "checkpoint/local_shards": "checkpoint/test_dcp_storage",
    "checkpoint/safetensors_files": "checkpoint/test_hf_folder",
    "cli/migrate_tables": "cli/test_migrate",
    "train/readings": "train/test_trainer",
    "composition": "test_structure",
    "compression/gather": "compression/test_reduce",
    "compression/losses": "compression/test_proof",
    "config/addons": "diloco/test_options",
    "config/composition_rules": "config/test_rules",
    "config/job": "test_structure",
    "config/mesh_rules": "config/test_rules",
    "config/setup": "config/test_rules",
    "config/tables": "config/test_toml",
    "data/generation_config": "cli/test_prompts",
    "data/special_tokens": "data/test_tokenizer",
    "ops/attention_kernels": "ops/test_attention",
    "ops/batch": "ops/test_cross_entropy",
    "ops/operators": "ops/test_layers",
    "ops/tensors": "optim/test_adamw",
    "parallel/comm": "compression/test_compressor",
    "parallel/lora_parallel": "memory/test_lora",
    "parallel/mesh": "test_plan",
    "parallel/name_patterns": "test_plan",
    "parallel/output_projection": "ops/test_cross_entropy",
    "pipeline/stage": "pipeline/test_pipeline_parallel",
    "planner/costs": "planner/test_cluster",
    "planner/fake_host": "planner/test_node",
    "planner/fake_world": "planner/test_memory",
    "planner/few_layers": "planner/test_memory",
    "planner/layer_probe": "planner/test_quick_estimate",
    "planner/probe_scaling": "planner/test_quick_estimate",
    "planner/quick_memory": "planner/test_quick_estimate",
    "planner/quick_units": "planner/test_quick_estimate",
    "planner/sweep": "planner/test_measure",
    "planner/trace": "planner/test_step_time",
    "profiling/trace": "profiling/test_summary",
    "proof/optimizers": "optim/test_muon",
    "proof/report": "proof/test_verify",
    "train/heartbeat": "whole/test_survival",
    "train/held_state": "cli/test_train",
}
# Test modules in the folder of a package that bear the name of no module, and why.
NAMED_OTHERWISE = {
    "diloco/test_options": "the table [outer] and its rules, which the package itself holds",
    "cli/test_prompts": "prompts come from several modules: generate and the data's",
    "cli/test_pinned_keys": "the keys that a plan keeps, in question.py",
    "config/test_paths": "every key and flag that names a path, of all commands",
    "planner/test_node": "what a node's ranks take together: host memory, links and energy",
    "planner/test_refine": "finer choices of the search, and the choice between equally fast ones",
    "planner/test_textbook": "questions of textbooks, as the table of docs/planning.md has them",
    "planner/test_sense": "what every estimate must obey: rates, devices, ZeRO stages",
    "planner/test_allocator": "the replay of the allocator in planner/memory.py, against a slow one",
    "proof/test_faults": "the table of faults of a user's own model",
    "proof/test_sensitivity": "the table of single faults over every technique",
    "proof/test_sensitivity_keys": "every key has a row in that table",
}


def test_tests_mirror_the_sources() -> None:
    tests = {
        path.relative_to(ROOT / "tests").with_suffix("").as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    modules = {
        path.relative_to(ROOT / "compose").with_suffix("").as_posix()
        for path in SOURCES
        if path.name != "__init__.py"
    }
    own = {
        name: str(PurePosixPath(name).with_name(f"test_{PurePosixPath(name).name}")) for name in modules
    }
    assert {name for name in modules if own[name] not in tests} == set(NO_TEST_MODULE)
    assert set(NO_TEST_MODULE.values()) <= tests
    packages = {path.parent.name for path in SOURCES} - {"compose", "models"}
    others = {name for name in tests - set(own.values()) if name.partition("/")[0] in packages}
    assert others == set(NAMED_OTHERWISE)


def _patched(path: Path) -> Iterator[tuple[str, str]]:
    """Yield module or class, and name, of each ``patch.object(value, "name")`` and each ``setattr``."""
    tree = ast.parse(path.read_text())
    from_where = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("compose", "models"))
        for alias in node.names
    }
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="object" | "setattr"),
                args=[ast.Name(id=value), ast.Constant(value=str(name)), *_],
            ) if value in from_where:
                yield from_where[value], name


def test_what_tests_replace_is_there() -> None:
    """A test of the slow tier that replaces a name of before is seen here, and not hours later."""
    missing = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        for place, name in _patched(path):
            module, _, attribute = place.rpartition(".")
            value = getattr(importlib.import_module(module), attribute, None)
            if not hasattr(value or importlib.import_module(place), name):
                missing.append(f"{path.relative_to(ROOT)}: {place} has no {name}")
    assert not missing
