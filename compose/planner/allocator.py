"""CUDA's caching allocator, replayed: the bytes that a process reserves for a list of allocations.

The rules are those of PyTorch's ``c10/cuda/CUDACachingAllocator.cpp`` with its default settings. The
sizes are constants of ``c10/core/AllocatorConfig.h``. A test compares them with those of PyTorch.

- A size is rounded up to a multiple of 512 bytes. Sizes up to 1 MiB use the small pool, others the
  large pool.
- A request takes the smallest free block of its pool that is large enough. Among equals it takes the
  one with the lowest address.
- If no block is large enough, a new segment comes from the device: 2 MiB in the small pool, 20 MiB for
  less than 10 MiB, and from 10 MiB on the size rounded up to a multiple of 2 MiB.
- The rest of a block becomes a free block of its own if it has 512 bytes or more (small pool), or more
  than 1 MiB (large pool). A smaller rest stays with the request.
- A block that becomes free joins its free neighbours in the same segment. No segment goes back to the
  device.

With ``expandable_segments:True`` each pool is one segment that grows at its end, by whole pages of
2 MiB (small pool) or 20 MiB (large pool). A rest of 512 bytes is split off in both pools. A free block
at the end, which can grow, is taken only if no other is large enough.

What the replay does not have: more than one stream, blocks that wait for another stream
(``record_stream``), private pools of CUDA graphs, and the retry after the device has no memory left.
Each new segment has a higher address than those before it. A driver may do otherwise, and then another
one of several equal blocks is taken.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

BLOCK = 512
"""Sizes are multiples of it."""
SMALL = 2**20
"""The largest size of the small pool, and the largest rest that is not split off in the large pool."""
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
LARGE = 10 * 2**20
"""The smallest size that has a segment of its own."""
LARGE_STEP = 2 * 2**20

# A free block is one number, its size above its address: numbers compare faster than tuples.
_ADDRESS_BITS = 52
_ADDRESS = (1 << _ADDRESS_BITS) - 1


class Peaks(NamedTuple):
    """The largest amounts of a replay, in bytes, as ``torch.cuda.memory_stats`` counts them."""

    allocated: int
    """Peak of the blocks in use: ``allocated_bytes.all.peak``."""
    reserved: int
    """Peak of what the device gave: ``reserved_bytes.all.peak``."""


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not less than ``size``."""
    return -(-size // multiple) * multiple


def segment_bytes(size: int) -> int:
    """Return the bytes of a new segment for a request.

    Args:
        size: The request in bytes, rounded up to 512.

    Returns:
        Bytes that the device gives.
    """
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE else round_up(size, LARGE_STEP)


class _Pool:
    """The free blocks of one pool, and the bytes that it has from the device.

    Args:
        small: The small pool, rather than the large one.
        expandable: One segment that grows, rather than many.
    """

    def __init__(self, small: bool, expandable: bool) -> None:
        self.reserved = 0
        self._expandable = expandable
        self._page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self._smallest_rest = BLOCK if small or expandable else SMALL + 1
        self._end = 0  # The address after the last segment.
        self._free: list[int] = []  # Sorted by size, then by address.
        self._size_at: dict[int, int] = {}  # The size of each free block by its first address.
        self._start_of: dict[int, int] = {}  # The first address of each by the one after its last.

    def take(self, size: int) -> tuple[int, int]:
        """Return address and size of a block for a request of ``size`` bytes, a multiple of 512."""
        place = bisect_left(self._free, size << _ADDRESS_BITS)
        if self._expandable and place < len(self._free) - 1 and self._ends_last(self._free[place]):
            place += 1
        if place < len(self._free):
            key = self._free.pop(place)
            address, found = key & _ADDRESS, key >> _ADDRESS_BITS
            self._forget(address, found)
        elif self._expandable:
            address, found = self._grow(size)
        else:
            address, found = self._new_segment(size)
        rest = found - size
        if rest >= self._smallest_rest:
            self._keep(address + size, rest)
            return address, size
        return address, found

    def give(self, address: int, size: int) -> None:
        """Take a block back, and join it with its free neighbours."""
        before = self._start_of.get(address)
        if before is not None:
            self._drop(before, address - before)
            size += address - before
            address = before
        after = self._size_at.get(address + size)
        if after is not None:
            self._drop(address + size, after)
            size += after
        self._keep(address, size)

    def _ends_last(self, key: int) -> bool:
        return (key & _ADDRESS) + (key >> _ADDRESS_BITS) == self._end

    def _new_segment(self, size: int) -> tuple[int, int]:
        found = segment_bytes(size)
        # Between two segments there is a gap, for blocks of different segments never join.
        address = self._end + BLOCK
        self._end = address + found
        self.reserved += found
        return address, found

    def _grow(self, size: int) -> tuple[int, int]:
        """Map pages after the free block at the end, which is a part of the new block."""
        address = self._start_of.get(self._end, self._end)
        if address < self._end:
            self._drop(address, self._end - address)
        mapped = round_up(size - (self._end - address), self._page)
        self._end += mapped
        self.reserved += mapped
        return address, self._end - address

    def _keep(self, address: int, size: int) -> None:
        insort(self._free, size << _ADDRESS_BITS | address)
        self._size_at[address] = size
        self._start_of[address + size] = address

    def _drop(self, address: int, size: int) -> None:
        self._free.pop(bisect_left(self._free, size << _ADDRESS_BITS | address))
        self._forget(address, size)

    def _forget(self, address: int, size: int) -> None:
        del self._size_at[address], self._start_of[address + size]


def replay(events: Iterable[tuple[int, int]], expandable: bool = False) -> Peaks:
    """Replay a list of allocations on one stream, from an empty allocator on.

    Args:
        events: Pairs of a block's id and its bytes, in order: bytes > 0 allocates the block, bytes < 0
            frees it. With 0 bytes nothing happens, for PyTorch asks for no memory then. An id can be
            used again after its block is free.
        expandable: With ``PYTORCH_ALLOC_CONF=expandable_segments:True``.

    Returns:
        The peaks in bytes.

    Raises:
        ValueError: An id is allocated that is in use, or freed that is not.
    """
    small, large = _Pool(True, expandable), _Pool(False, expandable)
    used: dict[int, tuple[_Pool, int, int]] = {}
    allocated = peak = 0
    for name, amount in events:
        if amount > 0:
            if name in used:
                raise ValueError(f"block {name} is allocated a second time")
            size = round_up(amount, BLOCK)
            pool = small if size <= SMALL else large
            address, size = pool.take(size)
            used[name] = (pool, address, size)
            allocated += size
            peak = max(peak, allocated)
        elif amount < 0:
            if name not in used:
                raise ValueError(f"block {name} is freed, and is not in use")
            pool, address, size = used.pop(name)
            allocated -= size
            pool.give(address, size)
    # No segment goes back to the device, so that what is reserved at the end is the most.
    return Peaks(peak, small.reserved + large.reserved)


def reserved_peak(events: Iterable[tuple[int, int]], expandable: bool = False) -> int:
    """Return the peak of the bytes that a process reserves; arguments are those of :func:`replay`."""
    return replay(events, expandable).reserved
