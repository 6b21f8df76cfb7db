"""Which part of each sequence a rank of cp holds.

Causal attention costs more for later queries. ``headtail`` levels the cost: it cuts the sequence in
2 cp chunks and gives rank r the r-th chunk from the front and the r-th from the back. ``none`` gives
each rank one piece.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from compose.ops.batch import ignore_all

Balance = Literal["headtail", "none"]


def chunks_of(rank: int, cp: int, balance: Balance) -> list[int]:
    """Return the chunks of the sequence that a rank holds, in order."""
    return [rank, 2 * cp - 1 - rank] if balance == "headtail" else [rank]


def chunk_count(cp: int, balance: Balance) -> int:
    """Return how many chunks the sequence is cut into."""
    return 2 * cp if balance == "headtail" else cp


def chunk_starts(rank: int, cp: int, balance: Balance, length: int) -> tuple[int, ...]:
    """Return the first tokens of a rank's chunks."""
    chunks = chunks_of(rank, cp, balance)
    return tuple(chunk * (length // len(chunks)) for chunk in chunks)


def pad_sequence(batch: Mapping[str, Tensor], unit: int) -> dict[str, Tensor]:
    """Pad every sequence of a batch at the end, where no causal attention sees it.

    Nothing is learnt from the targets of padding. ``document_ids`` are padded with a document of its
    own, and ``positions`` with -1. A tensor (B,) is of whole samples, and stays as it is.
    """
    result = {}
    for name, value in batch.items():
        missing = -value.shape[1] % unit if value.ndim > 1 else 0
        if missing:
            filler = value[:, -1:].expand(-1, missing, *value.shape[2:]).clone()
            if name == "targets":
                ignore_all(filler)
            elif name == "document_ids":
                filler += 1
            elif name == "positions":
                filler.fill_(-1)
            value = torch.cat([value, filler], 1)
        result[name] = value
    return result


def shard_sequence(
    batch: Mapping[str, Tensor], mesh: DeviceMesh, balance: Balance, multiple: int = 1
) -> dict[str, Tensor]:
    """Cut this rank's part of the sequence out of every tensor of a batch.

    A length that cannot be cut evenly is padded, as :func:`pad_sequence` does it.
    """
    cp, rank = mesh.size(), mesh.get_local_rank()
    count = chunk_count(cp, balance)
    # Every rank holds equally many chunks, so this makes its part divisible too.
    result = {}
    for name, value in pad_sequence(batch, count * multiple).items():
        if value.ndim == 1:
            result[name] = value
            continue
        pieces = value.chunk(count, 1)
        result[name] = torch.cat([pieces[i] for i in chunks_of(rank, cp, balance)], 1)
    return result
