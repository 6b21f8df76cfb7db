"""Loads a checkpoint into a model, on any mesh, and tells what has changed since it was saved."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future as TorchFuture

from compose.checkpoint import store
from compose.checkpoint.dcp_storage import (
    Chunk,
    DescribedTensor,
    PartsReader,
    flaw,
    load_parts,
    metadata_of,
)
from compose.checkpoint.local_shards import LocalShard, mismatches, named_tensors, parts, spread
from compose.checkpoint.peft import base_identity, name_of_base
from compose.checkpoint.rank_state import HasState
from compose.checkpoint.safetensors_files import bytes_of
from compose.composition import Composition
from compose.config.models import short_name, training_fields
from compose.config.tables import Config
from compose.config.toml import dump, tomllib
from compose.errors import ConfigError, open_own, toml_value
from compose.object_storage import StoreError, as_path
from compose.ops.tensors import gathered_objects
from compose.optim.optimizers import make_state
from compose.pipeline.schedules import ASYNCHRONOUS

# Keys that do not change what is trained, or that the message about the data covers. A model's name is
# compared with its shape, in its short form.
_SAME_TRAINING = {
    "model": "name path preset",
    "train": "stop_after seq_len seed micro_batch validate_every loss_chunk",
    "optimizer": "implementation offload offload_dir",
    "outer": "offload",
    "comm": "timeout start_timeout prefetch check_every check_state check_messages measure_every",
}


class SentPartsReader(PartsReader):
    """Reads parts from files in a folder of this node; those on other nodes are sent by ranks there."""

    def __init__(
        self, folder: Path, names: Sequence[str], owners: Mapping[str, int], group: dist.ProcessGroup
    ) -> None:
        """``names`` are those of the files on all nodes; a rank of ``owners`` sends a file's parts."""
        super().__init__(folder)
        self.owners, self.group = owners, group
        self.names = {f"__{number}_0.safetensors": name for number, name in enumerate(names)}
        self.here = {name for name in names if (folder / name).exists()}
        self.asked: list[tuple[str, int, int]] | None = None
        self.received: dict[tuple[str, int, int], Tensor] = {}

    def describe(self, files: Mapping[str, Mapping[str, DescribedTensor]]) -> str:
        """Take the parts of all files, each from the first that has it; return a flaw of the whole."""
        regions: dict[str, dict[Any, Chunk]] = {}
        whole: dict[str, DescribedTensor] = {}
        for number, real in self.names.items():
            for name, stored in files[real].items():
                whole[name] = stored
                for chunk in stored.chunks:
                    held = regions.setdefault(name, {})
                    held.setdefault(chunk.offsets, chunk._replace(file=number))
        whole = {n: replace(t, chunks=tuple(regions.get(n, {}).values())) for n, t in whole.items()}
        problem = next(filter(None, map(flaw, whole.values())), "")
        self.known = None if problem else metadata_of(whole)
        return problem

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        """Fill the planner's tensors, with what other nodes send too; a collective."""
        self.asked = []
        if len(self.here) < len(self.names):
            super().read_data(plan, planner)  # notes what is to be asked for
        asked, self.asked = self.asked, None
        for rank, wanted in enumerate(gathered_objects(asked, self.group)):
            for name, begin, size in wanted:
                if self.owners[name] == self.group.rank():
                    with open_own(self.folder / name) as file:
                        file.seek(begin)
                        data = torch.frombuffer(bytearray(file.read(size)), dtype=torch.uint8)
                    dist.send(data, group=self.group, group_dst=rank)
                elif rank == self.group.rank():
                    data = torch.empty(size, dtype=torch.uint8)
                    dist.recv(data, group=self.group, group_src=self.owners[name])
                    self.received[name, begin, size] = data
        result = super().read_data(plan, planner)
        self.received = {}
        return result

    def _fill(self, tensor: Tensor, name: str, begin: int) -> None:
        real = self.names[name]
        if real in self.here and self.asked is None:
            super()._fill(tensor, real, begin)
        elif real not in self.here and self.asked is not None:
            self.asked.append((real, begin, tensor.nbytes))
        elif self.asked is None:
            bytes_of(tensor)[:] = bytes_of(self.received[real, begin, tensor.nbytes])


def damage(folder: Path, group: dist.ProcessGroup) -> list[str]:
    """Return one line for each damage of a checkpoint; ranks share the reading. A collective."""
    own = store.problems(folder, (group.rank(), group.size()))
    everyone = gathered_objects(own, group)
    return list(dict.fromkeys(problem for problems in everyone for problem in problems))


def load(
    folder: Path,
    config: Config,
    composition: Composition,
    group: dist.ProcessGroup,
    optimizer: torch.optim.Optimizer | None = None,
    reader: PartsReader | None = None,
) -> store.State:
    """Fill the model, and the optimizer if given, from a checkpoint; a collective of ``group``.

    With [model.lora] it fills the adapters alone. A checkpoint made from published weights has no
    optimizer state; then the optimizer stays as it is. ``reader`` reads tensors that are elsewhere.
    """
    known = store.read_state(folder)
    wanted, saved = model_fields(config), known.model.model_dump()
    other = [
        f"{folder}: was made with model.{key} = {saved.get(key)}, not {wanted[key]}"
        for key in wanted
        if saved.get(key) != wanted[key]
    ]
    if problems := other or lora_problems(folder, known, config):
        raise ConfigError(*problems)
    reader = reader or PartsReader(folder)
    stored = reader.read_metadata()
    kept = {n.rpartition(".")[0] for n in stored.state_dict_metadata if n.startswith("optimizer.")}
    if not kept:
        optimizer = None
    if optimizer:  # a parameter that had no gradient before the save has no state
        named = composition.named_parameters()
        make_state(optimizer, {p for name, p in named if f"optimizer.{name}" in kept})
    tensors = named_tensors(composition, optimizer, adapters=config.model.lora.rank > 0)
    state = parts(tensors)
    problems = mismatches(state, stored)
    for name, parameter in composition.named_parameters():
        if not parameter.requires_grad and (lacks := f"has no model.{name}") in problems:
            why = ", a frozen weight, which older versions did not save; begin anew in another run.dir"
            problems[problems.index(lacks)] += why
    missing = [problem for problem in problems if problem.startswith("has no optimizer.")]
    if missing and missing == problems:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        cure = "go on with the optimizer.name and muon_except that it was made with"
        problems = [f"{missing[0]}{more}; {cure}"]
    if problems:
        raise ConfigError(*(f"{folder}: {problem}" for problem in problems))
    _read(folder, state, reader, group)
    spread(tensors)
    return known


def lora_problems(folder: Path, known: store.State, config: Config) -> list[str]:
    """Return one line for each way in which a checkpoint's adapters are not those of a config."""
    wanted, saved = lora_fields(config), known.lora
    if wanted is None or saved is None:
        if wanted == saved:
            return []
        what = "adapters alone" if saved else "the whole model"
        cure = (
            "set model.lora as its run had it" if saved else "use model.lora.rank = 0, or a new run.dir"
        )
        return [f"{folder}: holds {what}; {cure}"]
    problems = [
        f"{folder}: was made with model.lora.{'base' if key == 'kept' else key} ="
        f" {toml_value(getattr(saved, key))}, not {toml_value(getattr(wanted, key))}"
        for key in ("rank", "alpha", "rslora", "dora", "targets", "kept")
        if getattr(saved, key) != getattr(wanted, key)
    ]
    if saved.base != wanted.base and not problems:
        was = name_of_base(saved.load_hf, known.seed)
        now = name_of_base(wanted.load_hf, config.train.seed)
        named = f": of {was}, not of {now}" if was != now else f" than {was} now has"
        problems = [f"{folder}: holds adapters of other weights{named}"]
    return problems


def lora_fields(config: Config) -> store.Adapters | None:
    """Return the adapters of a config as state.json describes them; None if it has none."""
    lora, folder = config.model.lora, config.checkpoint.load_hf
    if not lora.rank:
        return None
    base = base_identity(folder, config.train.seed)
    where = str(as_path(folder).resolve()) if folder else ""
    more = {"rslora": lora.rslora, "dora": lora.dora, "dropout": lora.dropout, "kept": lora.base}
    return store.Adapters(lora.rank, lora.effective_alpha, lora.targets, base, where, **more)


def load_beside(
    folder: Path,
    others: Sequence[HasState],
    group: dist.ProcessGroup,
    reader: PartsReader | None = None,
) -> list[str]:
    """Fill the tensors that others than the model have, and return the names of the stored ones."""
    reader = reader or PartsReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    state = {n: part for other in others for n, part in other.tensors().items() if n in stored}
    if state:
        _read(folder, state, reader, group)
    return list(state)


def _read(
    folder: Path, state: Mapping[str, LocalShard], reader: PartsReader, group: dist.ProcessGroup
) -> None:
    try:
        load_parts(reader, state, group)
    except CheckpointException as error:
        raise ConfigError(f"{folder}: cannot be read: {cause_of(error)}") from None


def saved_fields(config: Config) -> dict[str, Any]:
    """Return the fields of state.json that the config decides."""
    original, lora = config.checkpoint.load_hf, lora_fields(config)
    return {
        **({"hugging_face": str(as_path(original).resolve())} if original else {}),
        "model": model_fields(config),
        **({"lora": asdict(lora)} if lora else {}),
        "seed": config.train.seed,
    }


def model_fields(config: Config) -> dict[str, Any]:
    """Return the model's name and the fields of its config that decide what its weights mean."""
    shape = config.model.config
    kept = {k: v for k, v in asdict(shape).items() if k not in training_fields(shape)}
    return {"name": short_name(config.model.name), **json.loads(json.dumps(kept))}


def cause_of(error: BaseException) -> str:
    """Return one line for the first error. DCP wraps that in the tracebacks of every rank."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, Mapping) and failures:
        inner = next(iter(failures.values()))
        error = inner[0] if isinstance(inner, tuple) else inner
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return next(iter(words.strip().splitlines()), type(error).__name__)


def data_changes(folder: Path, known: store.State, now: Mapping[str, Any]) -> str:
    """Return a line if the data are other than before. Raises ConfigError for another tokenizer."""
    was = known.data.model_dump(exclude_unset=True)
    changed = [key for key in was if key in now and was[key] != now[key]]
    if "tokenizer" in changed and None not in (was["tokenizer"], now["tokenizer"]):
        raise ConfigError(f"{folder}: was trained on ids of another tokenizer than data.path is of")
    if not changed or "samples" not in was:  # what was imported has a tokenizer alone
        return ""
    pairs = ", ".join(f"{key} {was[key]}, now {now[key]}" for key in changed)
    return f"{folder}: the data are not what they were ({pairs}); samples are counted on"


def tables_of(folder: Path) -> dict[str, Any]:
    """Return the tables of a checkpoint's config.toml; none if it lacks the file or has another."""
    try:
        with open_own(folder / "config.toml") as file:
            return tomllib.load(file)
    except StoreError:
        raise
    except (OSError, ValueError, RecursionError):
        return {}


def workers_of(folder: Path) -> int:
    """Return the number of workers of a checkpoint's run; 0 if it does not say."""
    was = tables_of(folder)
    try:
        return int(was["parallel"]["dp_replicate"]) if was["outer"]["every"] else 1
    except (KeyError, TypeError, ValueError):
        return 0


def changes(folder: Path, config: Config) -> list[str]:
    """List the keys that decide how a run trains on, and have changed; data are compared elsewhere."""
    was, now, result = tables_of(folder), tomllib.loads(dump(config)), []
    for table in ("model", "train", "optimizer", "precision", "comm", "outer", "dpo", "parallel"):
        before: Any = was.get(table)
        for key, value in now[table].items() if isinstance(before, dict) else ():
            same = key not in before or before[key] == value
            if table == "parallel":  # of the mesh only what trains with older weights is looked at
                same = same or key != "pp_schedule" or not {value, before[key]} & {*ASYNCHRONOUS}
            if not same and key not in _SAME_TRAINING.get(table, "").split():
                shown = toml_value(value), toml_value(before[key])
                result.append(f"{table}.{key} = {shown[0]} (was {shown[1]})")
    return result
