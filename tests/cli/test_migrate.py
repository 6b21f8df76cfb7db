"""Public configs of five other trainers, read as people have them.

migrate_configs/ has their keys and values, and what the program's own parser makes of them.
"""

import json
import math
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from compose.cli import migrate as command
from compose.cli.migrate_tables import FORMATS, KnownValues, load_formats
from compose.config.tables import Config
from compose.config.toml import load
from compose.errors import toml_value
from compose.optim.lr_schedule import learning_rate

FOLDER = Path(__file__).parent / "migrate_configs"
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
        file.write_text("\n".join(f"{key} = {toml_value(value)}" for key, value in leaves.items()))
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
    named = row["config"].get("deepspeed") or row["config"].get("--deepspeed")
    if named and kind == "training_arguments":  # it names a file, which is in the same folder
        (folder / Path(named).name).write_text('{"gradient_clipping": "auto"}')
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


@pytest.mark.parametrize("kind", FORMATS)
def test_every_name_that_the_program_knows(kind: str) -> None:
    """Names of its own sources, of several versions; a name of nobody stays unknown."""
    table, names = load_formats()[kind], json.loads((FOLDER / "names.json").read_text())[kind]["names"]
    facts = KnownValues()
    facts.read("file", table, [(name, None) for name in " ".join(names).split()])
    assert not [entry.line for entry in facts.entries if "has no such key" in entry.line]
    facts.read("file", table, [("zebra_colour", None)])
    assert "zebra_colour = null" in facts.entries[-1].line


AUTO = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": 0.1}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "gradient_clipping": 0.5,
    "train_micro_batch_size_per_gpu": "auto",
}
WAITS = "auto: from TrainingArguments, which were not given"
AUTO_TOML = f"""\
# Made by compose migrate from a.json.
# to set: a.json: bf16.enabled = {WAITS}; set precision.param
# to set: a.json: optimizer.params.lr = {WAITS}; set optimizer.lr
# to set: a.json: optimizer.params.betas = {WAITS}; set optimizer.beta1, optimizer.beta2
# to set: a.json: train_micro_batch_size_per_gpu = {WAITS}; set train.micro_batch
# to set: model.name, and its preset or its fields: no file says it
# to set: data.path, what is trained on: no file says it
# to set: train.seq_len, tokens of a sample: no file says it
# to set: train.steps, or train.epochs: no file says it
# run: torchrun --nproc-per-node 8 train.py FILE.toml

[train]
max_norm = 0.5  # a.json: gradient_clipping
# global_batch = ?  # {WAITS}
# micro_batch = ?  # {WAITS}

[optimizer]
name = "adamw"  # a.json: optimizer.type
weight_decay_scale = ["*=1"]  # a.json: optimizer.type
weight_decay = 0.1  # a.json: optimizer.params.weight_decay
eps = 1e-08  # DeepSpeed's default
# beta1 = ?  # {WAITS}
# beta2 = ?  # {WAITS}
# lr = ?  # {WAITS}
# schedule = ?  # {WAITS}

[parallel]
zero = 2  # a.json: zero_optimization.stage

[precision]
# param = ?  # {WAITS}
"""


def test_auto_alone_is_to_be_set(tmp_path: Path) -> None:
    """What is stated is mapped; what TrainingArguments would fill in is a comment, never a default."""
    (tmp_path / "a.json").write_text(json.dumps(AUTO))
    text, entries = command.migrated([tmp_path / "a.json"], 8)
    assert text == AUTO_TOML
    assert not [entry for entry in entries if entry.kind in ("refused", "unknown")]
    (tmp_path / "b.json").write_text(
        json.dumps(ARGUMENTS | {"weight_decay": 0.1, "max_grad_norm": 0.5})
    )
    text, entries = command.migrated([tmp_path / "a.json", tmp_path / "b.json"], 8)
    assert "?" not in text
    assert "auto: by TrainingArguments" in "".join(e.line for e in entries if e.kind == "mapped")


def test_epochs_in_place_of_steps(tmp_path: Path) -> None:
    """Without --steps a ratio of 0 passes, and 0 steps are none; a ratio above 0 needs the steps."""
    given = {
        "output_dir": "a/{b}",
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "max_steps": 0,
    }
    for ratio, kinds in ((0.0, 0), (0.1, 1)):
        (tmp_path / "a.json").write_text(json.dumps(given | {"warmup_ratio": ratio}))
        text, entries = command.migrated([tmp_path / "a.json"], 8)
        assert "epochs = 2.0" in text
        assert 'dir = "a/{b}"' in text
        assert "\nsteps = " not in text
        assert len([entry for entry in entries if entry.kind == "refused"]) == kinds


def test_a_part_that_is_off_is_not_refused(tmp_path: Path) -> None:
    part = {"enabled": False, "schedule_offset": 50}
    groups = {"wq1": {"params": {"start_bits": 8}, "modules": ["attention"]}}
    both = {"weight_quantization": {"shared_parameters": part, "different_groups": groups}}
    config = {"train_batch_size": 8, "compression_training": both}
    for enabled, count in ((False, 0), (True, 2)):
        part["enabled"] = enabled
        (tmp_path / "a.json").write_text(json.dumps(config))
        _, entries = command.migrated([tmp_path / "a.json"], 8)
        assert len([entry for entry in entries if entry.kind == "refused"]) == count


def test_a_dozen_files_of_each_format() -> None:
    assert all(len(rows) >= 12 for rows in FILES.values())
    assert all(row["source"] for rows in FILES.values() for row in rows.values())
