"""What a rank does in a step, in order: operators, messages, waits of streams, and memory."""

from dataclasses import dataclass, field

FORWARD, BACKWARD, RECOMPUTED, OPTIMIZER = "forward", "backward", "recomputed", "optimizer"


@dataclass(frozen=True, slots=True)
class Segment:
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
    """The segment's place in the record."""
    stream: int
    """The stream; 0 computes."""
    name: str
    """The name, such as aten.mm."""
    kind: str
    """product, attention or memory."""
    flops: float
    bytes: int
    """Bytes read and written."""
    dtype: str
    """The dtype of its first tensor."""
    shape: tuple[int, ...]
    """Of a product (batch, m, n, k), of attention the shape of the queries, else of the result."""
    reads: tuple[int, ...] = ()
    """The allocations that it reads."""
    writes: tuple[int, ...] = ()
    """The allocations that it writes."""


@dataclass(slots=True)
class Message:
    """One message to other ranks, as this rank issues it."""

    segment: int
    """The segment's place in the record."""
    stream: int
    """The stream that waits for it."""
    kind: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, broadcast or p2p."""
    group: str
    """The name of the process group."""
    ranks: tuple[int, ...]
    """The ranks of the group."""
    bytes: int
    """Of the whole result of an all_gather; of the whole input of others; of the tensor of a p2p."""
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
    """Memory between two events of the record."""

    bytes: int
    start: int
    """The place of its allocation among the memory's events."""
    segment: int
    """The segment in which it was allocated."""
    within: str
    """What allocated it: gather, reduce, message, or empty for an operator."""
    category: str = ""
    """Its category, once it is known."""
    end: int | None = None
    """The place of its end; None if it outlives the record."""
    freed: int | None = None
    """The segment in which it ended."""
    freed_within: str = ""
    """What ended it, as in ``within``."""


@dataclass
class Record:
    """All that a rank did, in order."""

    segments: list[Segment] = field(default_factory=list)
    work: list[Operator | Message | Wait] = field(default_factory=list)
    events: dict[int, int] = field(default_factory=dict)
    """The place in ``work`` of each event of a stream, by its number."""
    event_streams: dict[int, int] = field(default_factory=dict)
    """The stream of each event."""
    allocations: list[Allocation] = field(default_factory=list)
    changes: list[tuple[int, int, int]] = field(default_factory=list)
    """Changes of memory in order: (segment, place in ``allocations``, bytes; below 0 if freed)."""
