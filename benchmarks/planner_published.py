"""The planner's time of a step against published times of real clusters.

    python benchmarks/planner_published.py [--sets NAME ...] [--every N] --results rows.jsonl
    python benchmarks/planner_page.py rows.jsonl docs/planning_rows.md

estimates rows of benchmarks/planner_rows.toml (every N-th of a set of many) and adds one JSON line for
each to a file; the second command makes the page of that file. What each program did otherwise than the
composition is in PROGRAMS.
"""

import argparse
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import compose.memory.activation_checkpointing as recomputation
from compose.config import rules
from compose.config.job import Job
from compose.config.toml import load, tomllib
from compose.errors import ConfigError
from compose.ops.layers import RMSNorm
from compose.planner.cluster import Cluster, load_cluster
from compose.planner.estimate import OtherProgram, estimate
from compose.planner.record import Operator, Record, RecordedMessage
from compose.planner.step_time import PART, axis_of

sys.path.insert(0, str(Path(__file__).parents[1]))  # models/ is of the checkout

import models
from models.layers.attention import AttentionCore
from models.llama import model as llama

NOT_STATED = ("vtrain_single", "vtrain_multi", "trainy")  # the sources leave settings open
HERE = Path(__file__).parent
TRAIN = str(HERE.parent / "train.toml")
Keys = dict[str, object]
Row = Mapping[str, Any]
_OF_WEIGHTS = (
    *(f"aten.{name}" for name in ("_to_copy", "empty", "copy_", "div", "linalg_vector_norm", "mul_")),
    "fsdp.chunk_cat",
)
_DATA = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class Program:
    """This describes a program where its published settings are silent or differ from ours."""

    keys: Callable[[Row], Keys]
    """The keys of a row's config."""
    change: Callable[[Record, Job], None]
    fused: Callable[[Row], bool]
    assumed: str
    """Settings that the sources do not state."""
    stated: bool
    """Whether all settings that change the time are stated."""
    exchange: float = 0.0
    """Seconds of each action of a pipeline in which the host waits for its neighbours."""


def same(record: Record, job: Job) -> None:
    """Leave the record as it is."""


def before_flash_attention(record: Record, job: Job) -> None:
    """Do as Megatron-LM did until 2022.

    Messages of data parallel come after the backward, and nothing hides them. Softmax and the dropout
    of scores are one kernel each, not fused with one another. The mask has a byte for each score.
    What is done with every weight and gradient once a step is done by kernels for many tensors.
    """
    length = job.config.train.seq_len
    for work in record.work:
        if isinstance(work, RecordedMessage) and axis_of(work, job.degrees) in _DATA:
            work.stream = 0
        elif isinstance(work, Operator) and work.shape[-2:] == (length, length):
            scores = math.prod(work.shape)
            if work.name in ("aten.bernoulli_", "aten.div_"):
                work.bytes = 0
            elif work.name == "aten.mul":
                work.kind, work.bytes = "dropout", 5 * scores
            elif "softmax" in work.name:
                work.kind = "softmax"
        elif isinstance(work, Operator) and work.name in _OF_WEIGHTS:
            of_step = record.segments[work.segment].action[1] == "step"
            work.kind = PART if of_step or len(work.shape) == 1 else work.kind


def pieces_of_products(record: Record, job: Job) -> None:
    """Messages of tensor parallel go in as many pieces as ranks, while products compute; one cannot."""
    for work in record.work:
        if isinstance(work, RecordedMessage) and axis_of(work, job.degrees) == "tp":
            work.bytes //= job.degrees.tp


def _gpt(row: Row, vocab: int) -> Keys:
    if str(HERE) not in models.__path__:
        models.__path__.append(str(HERE))  # gpt, which is no model of the toolkit
    share = 128 * row["tp"]
    return _common(row) | {
        "model.name": "gpt",
        "model.vocab_size": math.ceil(vocab / share) * share,
        **{f"model.{key}": row[key] for key in ("dim", "n_layers", "n_heads")},
    }


def _common(row: Row) -> Keys:
    keys: Keys = {
        "train.seq_len": row["seq_len"],
        "train.global_batch": row["global_batch"],
        "train.micro_batch": row["micro_batch"],
        "parallel.tp": row["tp"],
        "parallel.dp_shard": row["dp"],
        "parallel.pp": row["pp"],
        "precision.param": "bfloat16",
    }
    stages = row["pp"] * row.get("virtual", 1)
    if row["pp"] > 1 and "n_layers" in row:
        each, more = divmod(row["n_layers"], stages)
        keys["parallel.pp_layers"] = [each + (i < more) for i in range(stages)]
    if row.get("virtual", 1) > 1:
        keys |= {
            "parallel.pp_schedule": "Interleaved1F1B",
            "parallel.pp_virtual_stages": row["virtual"],
        }
    return keys


def _megatron_2022(row: Row) -> Keys:
    core = row.get("recompute") == "core"
    return _gpt(row, 50257) | {
        "model.flash": "false",
        "model.dropout": 0.1,
        "model.recompute_core": str(core).lower(),
        "parallel.sequence": str(core).lower(),
        "parallel.zero": 0,
        "precision.reduce": "bfloat16",
        "activation_checkpoint.mode": "full",
    }


def _llama(row: Row) -> Keys:
    return _common(row) | {"model.preset": row["preset"]}


def _torchtitan(row: Row) -> Keys:
    return _llama(row) | {
        "precision.float8": row["float8"],
        "activation_checkpoint.mode": "selective",
        "comm.prefetch": 1,
    }


def _nanotron(row: Row) -> Keys:
    shape = {
        **{f"model.{key}": row[key] for key in ("dim", "n_layers", "n_heads")},
        "model.n_kv_heads": row["n_heads"],
        "model.hidden_dim": 8192,
        "model.vocab_size": 131072,
    }
    return _common(row) | shape | {"parallel.zero": 1}


PROGRAMS = {
    "megatron-2022": Program(
        _megatron_2022,
        before_flash_attention,
        lambda row: True,
        "fused kernels as Megatron-LM has them; dropout 0.1; gradients of 16 bits, reduced after the"
        " last backward; a millisecond of each action of a pipeline, for its host waits for its"
        " neighbours",
        True,
        1e-3,
    ),
    "megatron-2024": Program(
        lambda row: _gpt(row, 131072) | {"parallel.zero": 1},
        pieces_of_products,
        lambda row: True,
        "micro-batches of one sample and 1F1B without virtual stages, which the source does not state;"
        " no recomputation; of the messages of tensor parallel all but one piece of tp is hidden",
        False,
    ),
    "torchtitan": Program(
        _torchtitan,
        same,
        lambda row: row["compile"],
        "FlashAttention-2; the rest as in its source of 2024",
        True,
    ),
    "composition": Program(
        lambda row: _llama(row) | {"activation_checkpoint.mode": row["recompute"]},
        same,
        lambda row: False,
        "micro-batches of 4 samples; eager",
        False,
    ),
    "nanotron": Program(
        _nanotron,
        same,
        lambda row: False,
        "sequences of 4,096 tokens; 131,072 rows of the vocabulary, which the parameters tell",
        False,
    ),
}


@contextmanager
def as_torchtitan() -> Iterator[None]:
    """Do as torchtitan did in 2024 (torchtitan/models/llama/model.py, torchtitan/parallelisms).

    Selective recomputation leaves out every second product of a layer. Queries and keys are rotated as
    complex numbers. Key/value heads are repeated for the query heads that share them. PyTorch had no
    kernel of its own for RMSNorm then.
    """
    attend = AttentionCore.forward

    def rotate(x: Tensor, cosine: Tensor, sine: Tensor, *layout: bool) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * torch.complex(cosine, sine)).flatten(3).type_as(x)

    def repeated(core: AttentionCore, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        shared = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(shared, 2) for x in (k, v))
        return attend(core, q, k, v, *others)

    def normalized(norm: nn.RMSNorm, x: Tensor) -> Tensor:
        wide = x.float()
        mean = (wide * wide).mean(-1, keepdim=True)
        return (wide * torch.rsqrt(mean + (norm.eps or 0.0))).type_as(x) * norm.weight

    with (
        every_second_product(),
        mock.patch.object(RMSNorm, "forward", normalized),
        mock.patch.object(llama, "rotate", rotate),
        mock.patch.object(AttentionCore, "forward", repeated),
    ):
        yield


@contextmanager
def every_second_product() -> Iterator[None]:
    """Recompute every second product of a layer."""

    def contexts(kept: recomputation.Operators) -> Any:
        seen = {False: 0, True: 0}

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if operator not in kept:
                return CheckpointPolicy.PREFER_RECOMPUTE
            if "mm" in str(operator):
                seen[context.is_recompute] += 1
                if seen[context.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE

        keeping, finding = create_selective_checkpoint_contexts(policy)
        return recomputation._KeptOperatorsOnly(kept, keeping), recomputation._KeptOperatorsOnly(
            kept, finding
        )

    with mock.patch.object(recomputation, "_contexts", contexts):
        yield


def changed(cluster: Cluster, changes: Mapping[str, Any]) -> Cluster:
    """The cluster with other figures, by their dotted names."""
    for name, value in changes.items():
        owner, _, key = name.rpartition(".")
        if owner:
            key, value = owner, dataclasses.replace(getattr(cluster, owner), **{key: value})
        cluster = dataclasses.replace(cluster, **{key: value})
    return cluster


@functools.cache
def content() -> Mapping[str, Any]:
    """The tables of planner_rows.toml."""
    return tomllib.loads((HERE / "planner_rows.toml").read_text())


@functools.cache
def cluster_of(name: str) -> Cluster:
    """A cluster of planner_rows.toml, or one of clusters/."""
    own = content()["clusters"].get(name)
    return changed(load_cluster(own["base"]), own["changes"]) if own else load_cluster(name)


def job_of(program: Program, row: Row) -> Job:
    """The job of a row."""
    keys = [(key, str(value)) for key, value in program.keys(row).items()]
    return rules.check(load(TRAIN, keys), row["gpus"])


def predicted(of: Mapping[str, Any], row: Row) -> float:
    """The predicted seconds of a row's step."""
    program = PROGRAMS[of["program"]]
    job = job_of(program, row)
    other = OtherProgram(program.change, program.fused(row), exchange=program.exchange)
    # Other programs drop by functions, whose masks nothing ties to samples.
    drops = mock.patch.object(import_module("compose.apply"), "refuse_functions")
    with drops, as_torchtitan() if of["program"] == "torchtitan" else nullcontext():
        return estimate(job, cluster_of(of["cluster"]), other=other).step_seconds


def published(of: Mapping[str, Any], row: Row) -> float:
    """The published seconds of a row's step."""
    value, tokens = row["value"], row["global_batch"] * row["seq_len"]
    if of["measure"] in ("s", "ms"):
        return value / (1000 if of["measure"] == "ms" else 1)
    if of["measure"] == "tokens/s":
        return tokens / row["gpus"] / value
    peak = cluster_of(of["cluster"]).device.peak["bfloat16"] / 1e12
    rate = value if of["measure"] == "TFLOP/s" else value / 100 * peak
    return tokens * flops_per_token(of, row) / (rate * 1e12 * row["gpus"])


def flops_per_token(of: Mapping[str, Any], row: Row) -> float:
    """The FLOPs that a source counts: of all scores, as Megatron-LM and nanotron do."""
    h, layers = row["dim"], row["n_layers"]
    inner = 3 * h * 8192 if of["program"] == "nanotron" else 8 * h**2
    return 6 * (layers * (4 * h**2 + inner) + 131072 * h + 2 * layers * h * row["seq_len"])


def rows_of(of: Mapping[str, Any]) -> list[Row]:
    """The rows of a set."""
    return [dict(zip(of["columns"], row, strict=True)) for row in of["rows"]]


def failure(error: Exception) -> str:
    """An error in one line, without the folder of this checkout."""
    text = str(error).strip().splitlines()[0].replace(f"{HERE.parent}/", "")
    return f"{type(error).__name__}: {text}"


def estimated(names: Sequence[str], every: int, results: Path) -> None:
    """Estimate rows, and add them to a file."""
    for of in content()["sets"]:
        if names and of["name"] not in names:
            continue
        rows = rows_of(of)
        for number in range(0, len(rows), every if len(rows) > 20 else 1):
            row = rows[number]
            line: dict[str, Any] = {"set": of["name"], "row": number}
            try:
                line |= {"predicted": predicted(of, row), "published": published(of, row)}
            except (RuntimeError, ConfigError) as error:
                line["failed"] = failure(error)
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sets", nargs="*", default=[])
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--results", type=Path, required=True)
    given = parser.parse_args()
    estimated(given.sets, given.every, given.results)


if __name__ == "__main__":
    main()
