"""The whole configuration of a run: train.toml as one value.

Each table is a frozen dataclass next to the code that uses it. The tables are put together here. The
code that reads files and the command line is in toml.py. The rules between keys are in legality/.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from compose.checkpoint.options import Checkpoint
from compose.composition import Options
from compose.data.options import Data
from compose.diloco.options import Outer
from compose.memory.activation_checkpointing import ActivationCheckpoint
from compose.memory.compilation import Compile
from compose.memory.lora import Lora
from compose.memory.precision import Precision
from compose.optim.options import Optimizer
from compose.parallel.comm import Comm
from compose.parallel.mesh import Parallel
from compose.profiling.options import Profile
from compose.train.options import Metrics, Run, Train

__all__ = [
    "TABLES",
    "ActivationCheckpoint",
    "Checkpoint",
    "Comm",
    "Compile",
    "Config",
    "Data",
    "Lora",
    "Metrics",
    "Model",
    "Optimizer",
    "Outer",
    "Parallel",
    "Precision",
    "Profile",
    "Run",
    "Train",
]


@dataclass(frozen=True)
class Model:
    """The table [model]: which model, and its shape."""

    name: str = "llama"
    """Folder under models/."""
    preset: str = "debug"
    """Named shape of that model; any field of its config set here overrides the preset's."""
    config: Any = None  # the model's own config, with the fields set here
    lora: Lora = field(default_factory=Lora)  # the table [model.lora]


@dataclass(frozen=True)
class Config:
    """All tables of a run."""

    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    optimizer: Optimizer = field(default_factory=Optimizer)
    parallel: Parallel = field(default_factory=Parallel)
    precision: Precision = field(default_factory=Precision)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    profile: Profile = field(default_factory=Profile)
    comm: Comm = field(default_factory=Comm)
    outer: Outer = field(default_factory=Outer)
    source: str = "train.toml"  # the file's name; every message about a key begins with it

    @property
    def options(self) -> Options:
        """The options for ``compose.apply``."""
        return Options(
            self.parallel,
            self.precision,
            self.activation_checkpoint,
            self.compile,
            self.comm,
            self.train.seq_len,
        )


TABLES: dict[str, type] = {
    name: kind
    for f in dataclasses.fields(Config)
    if f.name != "source"
    for name, kind in (
        (f.name, f.default_factory),  # type: ignore[misc]
        *([("model.lora", Lora)] if f.name == "model" else []),
    )
}


def table_of(config: Config, name: str) -> Any:
    """Return a table of ``config`` by its name in TABLES, as "train" or "model.lora"."""
    found: Any = config
    for part in name.split("."):
        found = getattr(found, part)
    return found
