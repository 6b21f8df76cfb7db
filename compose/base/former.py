"""Former names of modules, for code that still imports them under these names."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

FORMER = {
    "compose.activation_checkpointing": "compose.memory.activation_checkpointing",
    "compose.activation_offload": "compose.memory.activation_offload",
    "compose.chunked_loss": "compose.loss.chunked",
    "compose.cli": "compose.commands.cli",
    "compose.compilation": "compose.compiler.compilation",
    "compose.context_parallel": "compose.parallel.context_parallel",
    "compose.data_parallel": "compose.parallel.data_parallel",
    "compose.dry_run": "compose.commands.dry_run",
    "compose.evaluate": "compose.train.evaluate",
    "compose.expert_parallel": "compose.parallel.expert_parallel",
    "compose.float8": "compose.precision.float8",
    "compose.generate": "compose.commands.generate",
    "compose.hugging_face": "compose.huggingface.folder",
    "compose.local_parallel": "compose.parallel.local_parallel",
    "compose.loss_scale": "compose.precision.loss_scale",
    "compose.mesh": "compose.parallel.mesh",
    "compose.metrics": "compose.train.metrics",
    "compose.near_shards": "compose.parallel.secondary_shards",
    "compose.output": "compose.loss.output",
    "compose.pipeline_parallel": "compose.pipeline.pipeline_parallel",
    "compose.prove": "compose.proof.prove",
    "compose.replicas": "compose.train.replica_check",
    "compose.report": "compose.proof.report",
    "compose.routing": "compose.parallel.routing",
    "compose.schedules": "compose.pipeline.schedules",
    "compose.step": "compose.train.step",
    "compose.tensor_parallel": "compose.parallel.tensor_parallel",
    "compose.tokenizer": "compose.data.tokenizer",
    "compose.trainer": "compose.train.trainer",
    "compose.verify": "compose.proof.verify",
}


class _Moved(MetaPathFinder, Loader):
    """Finds a module under its former name; it is the same module object."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in FORMER else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(FORMER[spec.name])
        self.own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module has run under its new name, and keeps that name.
        module.__spec__ = self.own


def keep_former_names() -> None:
    """Let Python find modules by their former names too."""
    sys.meta_path.insert(0, _Moved())  # before the finders that look for files
