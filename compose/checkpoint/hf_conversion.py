"""Converts a Hugging Face folder to a checkpoint and back, in one process.

One tensor at a time is in memory.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from compose.checkpoint import loading, local_shards, peft, store
from compose.checkpoint.dcp_storage import PartsReader, load_parts, save_parts
from compose.checkpoint.hf_folder import differences, fill_shard, kept_tokenizer, name_of, published
from compose.checkpoint.hf_stored import grouped
from compose.checkpoint.loading import cause_of
from compose.checkpoint.safetensors_files import PlannedTensor, TensorFiles, write_files
from compose.checkpoint.uploads import put_folder
from compose.config.hugging_face import HuggingFace, config_problems, find_hf
from compose.config.json_files import parse_json
from compose.config.models import find_model, model_names, short_name, training_fields
from compose.config.tables import Config, Model
from compose.config.toml import dump
from compose.data.generation_config import generation_values
from compose.data.special_tokens import GENERATION, MODEL, read_beside
from compose.data.tokenizer import FILE, TOKENIZER, copy_tokenizer, copy_with_config
from compose.errors import ConfigError, read_file, there, write_whole
from compose.object_storage import Remote
from compose.ops.tensors import persistent_buffers
from compose.parallel.expert_parallel import routers
from compose.parallel.mesh import Parallel
from compose.plan import Plan

_LENGTH = "max_position_embeddings"


@dataclass(frozen=True)
class Converted:
    """The folder that a conversion has written, with the number and bytes of tensors, and of files."""

    path: Path
    tensors: int
    bytes: int
    files: int
    original: str = ""
    """The folder that the model came from, if the run kept nothing of it; else empty."""
    doubtful: str = ""
    """A layer whose adapter peft may lose; empty if there is none."""


def import_(source: Path, target: Path, config: Config) -> Converted:
    """Make a run's folder with a checkpoint of step 0 from a Hugging Face folder.

    The checkpoint holds only the model, in float32. A run begins with it.
    """
    name, shape = config.model.name, config.model.config
    if problems := config_problems(source, name, shape):
        raise ConfigError(*problems)
    whole, files, hf_name = _on_meta(config.model), TensorFiles(source), name_of(name, shape)
    if problems := differences(files, whole, hf_name):
        raise ConfigError(*problems)
    places = {f"model.{ours}": place for ours, place, _ in published(whole, hf_name)}
    tensors = {ours: copies[0] for ours, copies in local_shards.named_tensors(whole, None).items()}

    def read(key: str) -> Tensor:
        if key not in places:  # a buffer that is not published keeps its value in a new model
            return tensors[key].clone()
        part = _whole(tensors[key], "cpu")
        fill_shard(files, places[key], part)
        return part.local

    state = {
        **dataclasses.asdict(store.Progress(0, 0, 0)),
        "model": {"name": short_name(name), **dataclasses.asdict(shape)},
        "seed": config.train.seed,
        "ranks": 1,
        "hugging_face": str(source.resolve()),
    }
    if (source / FILE).exists():
        state["data"] = {"tokenizer": hashlib.sha256(read_file(source / FILE)).hexdigest()}
    with _new_folder(target) as aside:
        folder = store.begin(aside / "checkpoints", 0)
        parts = {key: _whole(tensor, "meta") for key, tensor in tensors.items()}
        entries = save_parts(folder, parts, planner=_Streamed(read))
        everything = store.write_run_state(folder, state, dump(config), entries)
        written = store.publish(folder, everything).relative_to(aside)
        store.mark(aside)
        copy_with_config(source, aside / TOKENIZER)
    size = sum(tensor.nbytes for tensor in tensors.values())
    return Converted(target / written, len(tensors), size, len(entries))


def export(
    source: Path,
    target: Path,
    config: Config | None = None,
    original: Path | None = None,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = 5 * 10**9,
) -> Converted:
    """Make a folder that transformers opens from a checkpoint.

    Adapters in it are merged into the weights that they were trained with. ConfigError if a weight is
    infinite in ``dtype``.
    """
    known = _whole_state(source)
    model = config.model if config else _model_of(source, known)
    hf = find_hf(model.name)
    try:
        values = hf.hf_config(model.config)
    except ValueError as error:
        raise ConfigError(f"{source}: model.{error}") from None
    whole, reader, hf_name = _on_meta(model), PartsReader(source), name_of(model.name, model.config)
    groups = grouped(published(whole, hf_name))
    read = functools.partial(_read, reader)
    expected = {ours: tensor for group in groups for ours, _, tensor in group}
    if known.lora:
        buffers = {name: b for name, b in expected.items() if not isinstance(b, nn.Parameter)}
        expected = peft.adapted(_on_meta(model), _ends_of(model), known.lora) | buffers
    _check_tensors(source, reader, expected)
    _check_choice(source, reader, whole, expected, (values.get("architectures") or [model.name])[0])
    value_of = read
    if known.lora:
        value_of = peft.merged_weights(source, known, _on_meta(model), _ends_of(model), hf_name, read)

    plan: list[list[PlannedTensor]] = []
    for group in groups:
        _, place, tensor = group[0]
        kind = dtype if isinstance(tensor, nn.Parameter) else torch.float32
        shape = place.shape(tensor.shape)
        plan.append([PlannedTensor(name, shape, kind) for name in place.names(tensor.shape)])

    def tensors() -> Iterator[Tensor]:
        for group, planned in zip(groups, plan, strict=True):
            values = [
                (value_of if isinstance(tensor, nn.Parameter) else read)(ours, tensor)
                for ours, _, tensor in group
            ]
            for part, one in zip(group[0][1].theirs(values), planned, strict=True):
                result = part.to(one.dtype)
                if result.isinf().any() and not part.isinf().any():
                    raise ConfigError(
                        f"{source}: {one.name} holds {float(part.abs().max()):g}, which is infinite in"
                        f" {str(one.dtype).removeprefix('torch.')}; use --dtype bfloat16"
                    )
                yield result

    kept = kept_tokenizer(source)
    unknown = "" if original or (kept / MODEL).exists() else known.hugging_face or ""
    original = original or (kept if kept.is_dir() else None)
    values |= dict.fromkeys(("dtype", "torch_dtype"), str(dtype).removeprefix("torch."))
    if original and not original.is_dir():
        raise ConfigError(f"{original}: no such folder")
    known_config = read_beside(original, MODEL) if original else {}
    special = generation_values(original, model.config.vocab_size)
    theirs = {key: value for key, value in known_config.items() if value is not None}
    values |= special | {key: theirs[key] for key in ("bos_token_id", "pad_token_id") if key in theirs}
    values |= _length(hf, values, theirs.get(_LENGTH))
    length = values.get(_LENGTH)
    if isinstance(length, int) and length < known.data.seq_len:  # servers refuse longer texts
        values |= _length(hf, values, known.data.seq_len)
    flat = [one for part in plan for one in part]
    with _new_folder(target) as aside:
        written = write_files(aside, flat, tensors(), shard_bytes)
        (aside / "config.json").write_text(json.dumps(values, indent=2), encoding="utf-8")
        if original:
            copy_tokenizer(original, aside)
        special = read_beside(aside, GENERATION) | special
        write_whole(aside / GENERATION, json.dumps(special, indent=2))
    return Converted(target, len(flat), sum(one.nbytes for one in flat), len(written), unknown)


def _length(hf: HuggingFace, values: Mapping[str, Any], longest: object) -> dict[str, Any]:
    """Return the key of the longest text with a value, if a config.json with it is of the same model.

    The rule of RoPE, or the number of positions, may follow from this length.
    """
    key = {} if longest is None else {_LENGTH: longest}
    with contextlib.suppress(ValueError, ArithmeticError):
        if hf.config_from_hf({**values, **key}) == hf.config_from_hf(values):
            return key
    return {}


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to write into, which becomes ``target`` if nothing fails."""
    if there(target):
        raise ConfigError(f"{target}: exists already; choose another target")
    aside: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # The name is new, so a failure removes nobody else's files.
        place = None if isinstance(target, Remote) else target.parent
        aside = Path(tempfile.mkdtemp(prefix=f".writing-{target.name}-", dir=place))
        mask = os.umask(0o022)  # it can be read only by setting it
        os.umask(mask)
        aside.chmod(0o777 & ~mask)
        yield aside
        if isinstance(target, Remote):
            put_folder(aside, target)
            shutil.rmtree(aside)
        else:
            aside.rename(target)
    except BaseException as error:
        if aside:
            shutil.rmtree(aside, ignore_errors=True)
        if not isinstance(error, (OSError, CheckpointException)):
            raise
        raise ConfigError(f"{target}: cannot be written: {cause_of(error)}") from None


def export_adapters(source: Path, target: Path, config: Config | None = None) -> Converted:
    """Make a folder that peft opens from a checkpoint of adapters."""
    known = _whole_state(source)
    if known.lora is None:
        raise ConfigError(f"{source}: holds the whole model, and no adapters")
    shape = config.model if config else _model_of(source, known)
    model, reader, hf_name = _on_meta(shape), PartsReader(source), name_of(shape.name, shape.config)
    parameters = peft.adapted(model, _ends_of(shape), known.lora)
    _check_tensors(source, reader, parameters)
    tensors = {peft.peft_name(name, hf_name): _read(reader, name, p) for name, p in parameters.items()}
    with _new_folder(target) as aside:
        words = peft.target_modules(model, hf_name)
        peft.write_adapters(aside, peft.table_of(known.lora), known.lora.load_hf, words, tensors)
    size = sum(tensor.nbytes for tensor in tensors.values())
    doubtful = peft.taken_for_experts(words, model, hf_name)
    return Converted(target, len(tensors), size, 1, doubtful=doubtful)


def _whole_state(source: Path) -> store.State:
    """Return a checkpoint's state.json; raise ConfigError if the checkpoint is damaged."""
    if damage := store.problems(source):
        raise ConfigError(*(f"{source}: damaged: {problem}" for problem in damage))
    return store.read_state(source)


def _check_tensors(source: Path, reader: PartsReader, expected: Mapping[str, Tensor]) -> None:
    parts = {f"model.{ours}": _whole(tensor, "meta") for ours, tensor in expected.items()}
    if problems := local_shards.mismatches(parts, reader.read_metadata()):
        raise ConfigError(*(f"{source}: {problem}" for problem in problems))


def _check_choice(
    source: Path, reader: PartsReader, whole: nn.Module, published: Container[str], kind: str
) -> None:
    """Raise ConfigError if a router's bias, which decides the choice of experts, would be lost."""
    stored, buffers = reader.read_metadata().state_dict_metadata, persistent_buffers(whole)
    for name in (f"{router}.bias" for router in routers(whole)):
        lost = name in buffers and name not in published and f"model.{name}" in stored
        if lost and _read(reader, name, buffers[name]).any():
            raise ConfigError(
                f"{source}: model.{name} is not 0, so that it decides which experts are chosen, and"
                f" {kind} has no such bias; train with model.bias_rate = 0"
            )


class _Streamed(local_shards.ShardSavePlanner):
    """Plans the writing of parts on meta; ``read`` makes each tensor when it is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.read = read

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.read(index.fqn)


def _read(reader: PartsReader, name: str, like: Tensor) -> Tensor:
    part = _whole(like, "cpu")
    load_parts(reader, {f"model.{name}": part})
    return part.local


def _whole(like: Tensor, device: str) -> local_shards.LocalShard:
    """Return an empty LocalShard for a whole tensor with the shape and dtype of ``like``."""
    return local_shards.local_shard_of(torch.empty(like.shape, dtype=like.dtype, device=device))


def _on_meta(model: Model) -> nn.Module:
    return find_model(model.name).on_meta(model.config)


def _ends_of(model: Model) -> Plan:
    """Return the part of a model's plan that says which modules are no targets of adapters."""
    plan = find_model(model.name).plan(model.config, Parallel())
    return Plan(output=plan.output, pipeline=plan.pipeline)


def _model_of(folder: Path, known: store.State) -> Model:
    place, name = f"{folder / store.STATE}: model", known.model.name
    fields = known.model.model_extra or {}
    kind = find_model(name).Config if name in model_names() else None
    if not kind:
        cure = "; give --config RUN_DIR/config.toml, which has model.path" if name.endswith("/") else ""
        raise ConfigError(f"{place}.name: {name!r} is none of {', '.join(model_names())}{cure}")
    unknown = sorted(set(fields) - {field.name for field in dataclasses.fields(kind)})
    if unknown:
        raise ConfigError(f"{place}: {name} has no {', '.join(unknown)}")
    try:
        config = parse_json(json.dumps(fields).encode(), kind)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None
    # state.json lacks the fields that only training needs. Their class may have keys for some.
    given = loading.tables_of(folder).get("model")
    given = given if isinstance(given, dict) else {}
    trained = {key: given[key] for key in training_fields(config) if key in given}
    with contextlib.suppress(ValueError, TypeError):  # the file is not what the run has written
        config = parse_json(json.dumps(fields | trained).encode(), kind)
    return Model(name=name, config=config)
