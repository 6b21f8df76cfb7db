"""A record of a rank's step: operators, messages, waits and memory, in the order of issue."""

from dataclasses import dataclass, field
from typing import Any

FORWARD, BACKWARD, RECOMPUTED, OPTIMIZER = "forward", "backward", "recomputed", "optimizer"


@dataclass(frozen=True, slots=True)
class StepSegment:
    """A piece of the step between two boundaries of units; nothing else runs within it."""

    action: tuple[int, str, int]
    """Stage, kind and micro-batch of the action: F, B, I, W; (-1, "step", 0) for what follows them."""
    phase: str
    """forward, backward, recomputed or optimizer."""
    unit: str
    """The layer, or the module of the model's ends; empty for what lies between."""


@dataclass(slots=True)
class Operator:
    """One operator on the device."""

    segment: int
    stream: int
    """The stream; 0 computes."""
    name: str
    kind: str
    """product, attention or memory; processor: the host computes it, in its own memory."""
    flops: float
    bytes: int
    dtype: str
    """The dtype of its first tensor."""
    shape: tuple[int, ...]
    """(batch or experts, m, n, k) of a product, the shape of attention's queries, else the result's."""
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    linked: int = 0
    """Bytes that pass between host and device, in the direction that has more."""


@dataclass(slots=True)
class RecordedMessage:
    """One message to other ranks, as this rank issues it."""

    segment: int
    stream: int
    """The stream that waits for it."""
    kind: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, broadcast or p2p."""
    group: str
    """The name of the process group."""
    ranks: tuple[int, ...]
    bytes: int
    """Bytes of the whole result of an all_gather, the whole input of others, the tensor of a p2p."""
    received: bool = False
    """Whether it is the receiving half of a p2p."""


@dataclass(slots=True)
class Wait:
    """A stream waits for what another was given before an event."""

    segment: int
    stream: int
    event: int


@dataclass(slots=True)
class Allocation:
    """Memory between two events of the record, which ended in the segment ``freed``."""

    bytes: int
    start: int
    """The place of its allocation among the memory's events."""
    segment: int
    within: str
    """Where it was allocated: gather, reduce, message, or empty for an operator."""
    category: str = ""
    """Its category, once it is known."""
    end: int | None = None
    """The place of its end; None if it outlives the record."""
    freed: int | None = None
    freed_within: str = ""
    """Where it ended, as in ``within``."""


@dataclass
class Record:
    """All that a rank did, in order; a ``segment`` is a place in ``segments``."""

    segments: list[StepSegment] = field(default_factory=list)
    work: list[Operator | RecordedMessage | Wait] = field(default_factory=list)
    events: dict[int, int] = field(default_factory=dict)
    """The place in ``work`` of each event of a stream, by its number."""
    event_streams: dict[int, int] = field(default_factory=dict)
    allocations: list[Allocation] = field(default_factory=list)
    changes: list[tuple[int, int, int]] = field(default_factory=list)
    """Changes of memory in order: (segment, place in ``allocations``, bytes; below 0 if freed)."""
    host_allocations: list[Allocation] = field(default_factory=list)
    """Memory of the host, in place of a GPU's; its categories are known."""
    host_changes: list[tuple[int, int, int]] = field(default_factory=list)
    """Its changes, as in ``changes``."""

    @property
    def of_host(self) -> "Record":
        """Return the record of the host's memory."""
        return Record(self.segments, allocations=self.host_allocations, changes=self.host_changes)


@dataclass(frozen=True)
class TracedStep:
    """The record of one rank's step."""

    record: Record
    broadcast: list[Any]
    """The objects that the rank broadcast, for the other ranks of its pipeline."""
