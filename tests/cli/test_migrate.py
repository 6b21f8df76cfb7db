"""Public configs of five other trainers, read as people have them.

foreign_configs/ has their keys and values, and what the program's own parser makes of them.
"""

import json
import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from compose.cli import migrate as command
from compose.cli.foreign import FORMATS
from compose.config.tables import Config
from compose.config.toml import load
from compose.errors import toml_value
from compose.optim.lr_schedule import learning_rate

FOLDER = Path(__file__).parent / "foreign_configs"
FILES: dict[str, dict[str, Any]] = {
    kind: json.loads((FOLDER / f"{kind}.json").read_text())["files"] for kind in FORMATS
}
# The arguments that fill in "auto".
ARGUMENTS = {
    "output_dir": "out",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 2e-5,
    "weight_decay": 0.01,
    "adam_beta2": 0.98,
    "max_grad_norm": 0.7,
    "max_steps": 100,
    "warmup_steps": 5,
    "bf16": True,
}


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    """Keys with dots as dictionaries in one another."""
    result: dict[str, Any] = {}
    for key, value in leaves.items():
        *above, name = key.split(".")
        inner = result
        for part in above:
            inner = inner.setdefault(part, {})
        inner[name] = value
    return result


def tables(values: dict[str, Any], above: str = "") -> Iterator[str]:
    """A dictionary as TOML."""
    yield f"[{above}]" if above else ""
    yield from (f"{key} = {toml_value(v)}" for key, v in values.items() if not isinstance(v, dict))
    for key, value in values.items():
        if isinstance(value, dict):
            yield from tables(value, f"{above}.{key}".lstrip("."))


def write(folder: Path, kind: str, leaves: dict[str, Any]) -> Path:
    """A file of a format with such leaves."""
    if kind == "megatron" or next(iter(leaves)).startswith(("--", "launcher")):
        words = ["torchrun", "", "train.py"]
        for key, value in leaves.items():
            values = [] if value is True else value if isinstance(value, list) else [value]
            flag = [key.removeprefix("launcher."), *map(str, values)]
            at = 2 if key.startswith("launcher.") else len(words)
            words[at:at] = flag
        file = folder / "train.sh"
        file.write_text("#!/bin/bash\n" + shlex.join(word for word in words if word) + "\n")
    elif kind == "torchtitan":
        file = folder / "train.toml"
        file.write_text("\n".join(tables(nested(leaves))))
    else:
        file = folder / f"config.{'json' if kind == 'deepspeed' else 'yaml'}"
        file.write_text(json.dumps(nested(leaves)))  # JSON is YAML
    return file


def effective(config: Config, world: int) -> dict[str, Any]:
    """The values of a config that other programs have too."""
    train, optimizer, parallel = config.train, config.optimizer, config.parallel
    inner = parallel.tp * parallel.cp * parallel.pp * parallel.dp_replicate
    shards = parallel.dp_shard if parallel.dp_shard != -1 else max(1, world // inner)
    ranks = shards * parallel.dp_replicate
    names = ("tp", "cp", "pp", "dp_replicate", "zero", "offload")
    optim = ("beta1", "beta2", "eps", "weight_decay")
    return {
        **{name: getattr(train, name) for name in ("global_batch", "micro_batch", "seq_len", "steps")},
        **{name: getattr(train, name) for name in ("max_norm", "seed")},
        **{name: getattr(optimizer, name) for name in optim},
        **{name: getattr(parallel, name) for name in names},
        "dp_shard": shards,
        "accumulation": train.global_batch // (train.micro_batch * ranks),
        "param": config.precision.param,
        "offload_param": parallel.offload,
        "offload_optimizer": optimizer.offload if parallel.offload == "none" else "cpu",
        "activation_checkpoint": config.activation_checkpoint.mode,
        "lr": [learning_rate(step, train.steps, optimizer) for step in range(50)],
    }


def cases(*kinds: str) -> list[Any]:
    return [pytest.param(kind, name, id=f"{kind}-{name}") for kind in kinds for name in FILES[kind]]


def check(folder: Path, kind: str, name: str) -> None:
    row = FILES[kind][name]
    paths = [write(folder, kind, row["config"])]
    if row.get("with"):
        (folder / "arguments.json").write_text(json.dumps(ARGUMENTS))
        paths.append(folder / "arguments.json")
    text, entries = command.migrated(paths, row["world"], row["steps"])
    lines = [entry.line for entry in entries]
    for key in row["config"]:  # every key is accounted for
        assert [line for line in lines if key in line], key
    refused = [entry.line for entry in entries if entry.kind == "refused"]
    assert bool(refused) == bool(row["refused"]), refused
    for key in row["refused"]:
        assert [line for line in refused if key in line], (key, refused)
    if refused:
        return
    (folder / "migrated.toml").write_text(text)
    ours = effective(load(str(folder / "migrated.toml")), row["world"])
    for key, value in row["values"].items():
        if key == "lr":
            assert all(map(close, value, ours["lr"])), (key, value, ours["lr"])
        else:
            assert close(value, ours[key]) if isinstance(value, float) else value == ours[key], key


def close(one: float, two: float) -> bool:
    return math.isclose(one, two, rel_tol=1e-9, abs_tol=1e-15)


@pytest.mark.parametrize(("kind", "name"), cases(*FORMATS))
def test_a_public_file(tmp_path: Path, kind: str, name: str) -> None:
    """Every key accounted for, and values as those of the program's own parser."""
    with mock.patch.object(command.rules, "check"):  # the slow tier asks our rules too
        check(tmp_path, kind, name)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), cases("torchtitan", "megatron"))
def test_a_public_file_by_our_rules(tmp_path: Path, kind: str, name: str) -> None:
    """A model that is known passes the rules of a dry run, or a rule says what to change."""
    if "deepseek_v3_16b" in name:
        with pytest.raises(AssertionError, match=r'use activation_checkpoint.mode = "full"'):
            check(tmp_path, kind, name)
    else:
        check(tmp_path, kind, name)


def test_a_dozen_files_of_each_format() -> None:
    assert all(len(rows) >= 12 for rows in FILES.values())
    assert all(row["source"] for rows in FILES.values() for row in rows.values())
