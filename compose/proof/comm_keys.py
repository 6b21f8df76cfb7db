"""The keys of [comm] in a proof: whether each took part, and whether training takes the same steps."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compose.composition import Composition
from compose.compression.compression import Compression
from compose.compression.gathers import CodedGather
from compose.compression.low_rank import LowRank
from compose.compression.reductions import InBlocks
from compose.compression.sparse import Largest
from compose.compression.units import LOSSY
from compose.ops.local_tensor import local_tensor
from compose.parallel.comm import Comm
from compose.proof.comparison import Comparison

SILENT = {"timeout", "start_timeout", "prefetch", "check_every", "measure_every"}
"""The keys that change no number."""
_ADDED = 0.2
"""The part of a remainder that int4 adds to a gradient."""
# Kernels of a GPU add in any order, and a code may make one of its steps of such rounding.
_ON_GPU = 1e-2


def compare_keys(compression: Compression, coded: list[bool], comparison: Comparison) -> None:
    """Note a row for each key that took part, and the names of the others; a collective."""
    comm, activations = compression.comm, compression.activations
    parts: list[Any] = [p for s in compression.stages for u in s.units for p in u.parts.values()]
    blocks = [p for p in parts if isinstance(p, InBlocks | CodedGather)]
    low = [p for p in parts if isinstance(p, LowRank)]
    largest = [p for p in parts if isinstance(p, Largest)]
    lossy: list[Any] = [*low, *largest] + [
        p for p in blocks if isinstance(p, InBlocks) and p.packing.code.bits == 4
    ]
    counts = [pair for p in largest for pair in zip(p.counts, p.layout.parts, strict=True)]
    right: dict[str, list[bool]] = {
        "weights": [
            True for p in blocks if isinstance(p, CodedGather) and bool(p.account.squares.any())
        ],
        "activations": [True] * bool(activations and activations.account),
        "block": [p.packing.code.size == comm.block for p in blocks],
        "near": [p.levels.near.size() == comm.near for p in parts if getattr(p, "levels", None)],
        "rank": [q.shape[1] == comm.rank for p in low for q in p.factors.values()],
        "density": [n == math.ceil(comm.density * part.numel) for n, part in counts if part.coded],
        "error_feedback": [(p.feedback is not None) == comm.error_feedback for p in lossy],
    }
    right["block"] += [activations.code.block == comm.block] if activations else []
    given = [p.account.given for p in blocks if p.account.added]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (right, coded, sum(given, torch.zeros(2))))
    right = {key: [ok for one, _, _ in everyone for ok in one[key]] for key in right}
    steps = [any(step) for step in zip(*(one for _, one, _ in everyone), strict=True)]
    begun = [step >= comm.start_step for step in range(len(steps))]
    right["gradients"] = right["start_step"] = [steps == begun] if any(steps) else []
    if comm.error_feedback and sum(steps) < 2:  # the first message has nothing to add
        right["error_feedback"] = []
    asked = {f.name for f in fields(Comm) if getattr(comm, f.name) != f.default} - SILENT
    for key in sorted(asked | ({"error_feedback"} if comm.gradients in LOSSY else set())):
        if right[key]:
            error = 0.0 if all(right[key]) else math.inf
            comparison.value("form of messages", f"comm.{key}", error, 0.0)
        else:
            comparison.unused.append(f"comm.{key}")
    added, square = sum((one for _, _, one in everyone), torch.zeros(2)).tolist()
    if square:
        comparison.value("added", "comm.error_feedback", abs(added / square - _ADDED), _ADDED / 2)


def locals_of(composition: Composition) -> list[Tensor]:
    """Return copies of what this rank holds of all parameters."""
    return [local_tensor(p).detach().clone() for _, p in composition.named_parameters()]


def compare_unwatched(
    comparison: Comparison,
    begin: list[Tensor],
    watched: Composition,
    compose: Callable[[], Composition],
    train: Callable[[Composition], None],
) -> None:
    """Compare the weights after a proof's steps with those after the same steps without accounts.

    An account may only note, so they are the same bit by bit. A collective.
    """

    def trained(noting: bool) -> list[Tensor]:
        again = compose()
        for (_, parameter), value in zip(again.named_parameters(), begin, strict=True):
            local_tensor(parameter).detach().copy_(value)
        assert again.compression is not None
        again.compression.comm = replace(again.compression.comm, measure_every=0)
        if noting and again.compression.activations:
            again.compression.activations.open_account(exact=False)
        train(again)
        return locals_of(again)

    assert watched.compression is not None
    exact = watched.compression.activations is not None  # then results were not those of codes
    found, error = trained(noting=True) if exact else locals_of(watched), 0.0
    for one, other, before in zip(found, trained(noting=False), begin, strict=True):
        if not torch.equal(one, other):
            apart, moved = (float((x - other).double().norm()) for x in (one, before))
            error = max(error, apart / moved if moved else math.inf)
    tolerance = 0.0 if comparison.device.type == "cpu" else _ON_GPU
    comparison.value("unwatched update", "all parameters", error, tolerance)
