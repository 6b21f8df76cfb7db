"""Messages between ranks as bytes, and the count of what this rank sends."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from compose.ops.torch_versions import ALL_GATHER


class OwnMemory:
    """The part that custom messages of FSDP have in common: the memory that they fill."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an empty tensor, as FSDP's own does."""
        return torch.empty(*size, dtype=dtype, device=device)


class Scratch:
    """Memory that one message after another is written to.

    A host zeroes each page of new memory at its first use, which takes longer than a message's codes.
    CUDA's allocator keeps memory, and a stream may still read the last message. So on a GPU each call
    returns memory of its own.
    """

    def __init__(self) -> None:
        self.kept: dict[torch.dtype, Tensor] = {}

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor (numel,), which is valid until the next call."""
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        if dtype not in self.kept or self.kept[dtype].numel() < numel:
            self.kept[dtype] = torch.empty(numel, dtype=dtype, device=device)
        return self.kept[dtype][:numel]


@dataclass(frozen=True)
class Traffic:
    """Bytes that this rank has sent, by purpose and distance.

    A group's neighbours are ``near`` consecutive ranks of it, as on one node. Bytes to them are
    "near", all others "far". A message to all ranks counts once for each.
    """

    near: int = 1
    sent: dict[tuple[str, str], int] = field(default_factory=dict)

    def among(self, near: int) -> "Traffic":
        """Return the same count, for groups of which so many ranks are neighbours."""
        return Traffic(near, self.sent)

    def count(self, purpose: str, each: int, ranks: int, near: int | None = None) -> None:
        """Count a message of ``each`` bytes to every other rank.

        Args:
            purpose: "weights" or "gradients".
            each: Bytes to one rank.
            ranks: Ranks of the group, with this one.
            near: How many of them are neighbours, with this one; None: as many as usual.
        """
        close = min(ranks, self.near if near is None else near)
        for level, others in (("near", close - 1), ("far", ranks - close)):
            if others:
                self.add(purpose, level, each * others)

    def add(self, purpose: str, level: str, bytes_: int) -> None:
        """Count bytes of any level.

        Args:
            purpose: What is sent.
            level: Where to: "near", "far" or the name of an axis; "plain" for those of plain messages.
            bytes_: How many.
        """
        self.sent[purpose, level] = self.sent.get((purpose, level), 0) + bytes_

    def instead(self, purpose: str, bytes_: int) -> None:
        """Count what plain messages would send in place of coded ones."""
        self.add(purpose, "plain", bytes_)

    def take(self) -> dict[tuple[str, str], int]:
        """Return the bytes since the last call; "plain" is what plain messages would send."""
        sent = dict(self.sent)
        self.sent.clear()
        return sent


def gathered(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' messages, (ranks, bytes).

    Args:
        row: This rank's, (bytes,).
        group: The ranks.
    """
    out = row.new_empty(group.size(), row.numel())
    # It is looked up at each call, as FSDP does: a measurement may have replaced it.
    getattr(dist, ALL_GATHER)(out.view(-1), row.contiguous(), group)
    return out


def exchanged(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send row i to rank i, and return what the ranks have sent here, (ranks, bytes).

    Args:
        rows: (ranks, bytes).
        group: The ranks.
    """
    out = torch.empty_like(rows)
    dist.all_to_all_single(out, rows.contiguous(), group=group)
    return out
