"""Copies of a run's state in shared memory, which outlives the run's processes.

Each rank copies its parts, by the names of a checkpoint, into one of two files. A text beside the file
has the step, the place of each part and its checksum. It is removed first and written last, and a file
without it is not read. A rank on another node gets the same bytes, unless a replica there has them.
After a restart ranks of any mesh read the newest step of which all parts are left, as they would read a
checkpoint.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import threading
import uuid
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from compose import PARENT
from compose.checkpoint import rank_state, store
from compose.checkpoint.dcp_storage import DescribedTensor, placed
from compose.checkpoint.loading import SentPartsReader, cause_of
from compose.checkpoint.local_shards import LocalShard, pinned, staged
from compose.checkpoint.safetensors_files import bytes_of
from compose.checkpoint.store import Progress
from compose.config.json_files import Count, parse_json
from compose.errors import ConfigError, open_own, read_own, write_whole
from compose.ops.tensors import gathered, gathered_objects, on_first_rank
from compose.parallel.mesh import begin_messages, wait_for

ROOT = Path("/dev/shm")
PREFIX = "dtensor-compose-"
WHOLE, FAILED, GOING = range(3)  # states of the last copy; the greatest of all ranks counts
_TEXT, _PEER = ".json", ".peer"  # ends of the names of texts, and of copies of another rank


@dataclass(frozen=True)
class _CopyHeader:
    """The text beside a file: a copy of the parts of one rank."""

    step: Count
    attempt: str
    """The start of the run that has made it."""
    layout: int
    """A number made of the names and places of the parts. Replicas have the same number and parts."""
    layouts: list[int]
    """The layouts of all ranks."""
    tensors: dict[str, DescribedTensor]
    sums: dict[str, Count]
    state: dict[str, Any]
    config: str


class _SharedFile:
    """A file in shared memory, mapped, with the text beside it."""

    def __init__(self, path: Path) -> None:
        self.path, self.memory = path, torch.empty(0, dtype=torch.uint8)
        self._text = path.with_name(path.name + _TEXT)
        self.tensors: dict[str, DescribedTensor] = {}
        self.into: dict[str, LocalShard] = {}  # views of the memory
        self.places, self.layout = "", 0

    def reserve(self, size: int, pin: bool = False) -> None:
        """Let the text go, and make the file so large. Raises OSError if there is no room."""
        self._text.unlink(missing_ok=True)
        if len(self.memory) == size:
            return
        self.path.unlink(missing_ok=True)
        self.memory, self.tensors = self.memory[:0], {}
        with open_own(self.path, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # or a later write would end the process
        self.memory = torch.from_file(str(self.path), shared=True, size=size, dtype=torch.uint8)
        self.memory = pinned(self.memory) if pin else self.memory

    def fill(self, state: dict[str, LocalShard]) -> None:
        """Copy the parts. Raises OSError if there is no room."""
        tensors, size = placed(state)
        self.reserve(max(size, 1), any(part.local.is_cuda for part in state.values()))
        if tensors != self.tensors:
            self.tensors, self.into = tensors, {}
            self.places = json.dumps({name: asdict(stored) for name, stored in tensors.items()})
            # One message of a group carries a number of 7 bytes.
            self.layout = int.from_bytes(hashlib.sha256(self.places.encode()).digest()[:7], "big")
            for name, stored in tensors.items():
                for chunk in stored.chunks:
                    place = self.memory[chunk.begin : chunk.begin + chunk.length]
                    local = state[name].local
                    local = place.view(local.dtype).view(local.shape)
                    self.into[name] = replace(state[name], local=local)
        staged(state, self.into)

    def sums(self) -> dict[str, int]:
        """Return the checksum of each part."""
        return {name: zlib.crc32(bytes_of(part.local)) for name, part in self.into.items()}

    def publish(self, text: bytes) -> None:
        """Write the text, from which on the file is a copy."""
        write_whole(self._text, b"%08x\n%b" % (zlib.crc32(text), text))


def process_space() -> int:
    """Return the number of this process's PID namespace: containers may share memory, but not PIDs."""
    return os.stat("/proc/self/ns/pid").st_ino


def _read_text(path: Path) -> _CopyHeader | None:
    """Return what is beside a file; None if it is not what was written."""
    try:
        head, _, text = read_own(path).partition(b"\n")
        return parse_json(text, _CopyHeader) if int(head, 16) == zlib.crc32(text) else None
    except (OSError, ValueError):
        return None


def _damage(path: Path, copy: _CopyHeader) -> str:
    """Return the first tensor of a copy that is not what was written; empty if there is none."""
    try:
        with open_own(path) as file:
            for name, stored in copy.tensors.items():
                for chunk in stored.chunks:
                    file.seek(chunk.begin)
                    if zlib.crc32(file.read(chunk.length)) != copy.sums[name]:
                        return name
    except OSError as error:
        return cause_of(error)
    return ""


@dataclass(frozen=True)
class CopiedStep:
    """The newest step of which all parts are left in memory."""

    step: int
    folder: Path
    """A folder as of a checkpoint, without its tensors, for this rank alone."""
    reader: SentPartsReader
    names: list[str]
    """The copies of that step on all nodes."""

    def __str__(self) -> str:
        peers = {name.removesuffix(_PEER).split("-", 1)[1] for name in self.names if _PEER in name}
        own = {name.split("-", 1)[1] for name in self.names if _PEER not in name}
        from_peers = f", {len(peers - own)} of them by peers" if peers - own else ""
        return f"copies in memory of {len(own | peers)} ranks, kept{from_peers or ' by themselves'}"


class Copies:
    """The copies of one run. Every rank makes one, and calls its methods after the same steps."""

    def __init__(
        self, folder: Path, size: int, about: Mapping[str, Any], config: str, timeout: timedelta
    ) -> None:
        """Prepare for copies of ``size`` bytes of this rank in ``folder``; a collective.

        The first rank gives ``about``, what state.json has besides the progress; ``config`` is the
        text of config.toml. Raises ConfigError if shared memory has no room.
        """
        self.rank, self.ranks, self.config = dist.get_rank(), dist.get_world_size(), config
        self.attempt, self.about = on_first_rank(lambda: (uuid.uuid4().hex[:12], dict(about)))
        # No step waits for the messages of this group.
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        self.group, self.folder = group, folder
        place = f"{os.uname().nodename} {os.environ.get('GROUP_RANK', '')}"
        self.places = gathered_objects(place, group)
        nodes = defaultdict[str, list[int]](list)
        for rank, where in enumerate(self.places):
            nodes[where].append(rank)
        self.nodes, self.near = list(nodes.values()), nodes[place]
        # A ring over nodes: the rank of the next node that gets the copies of a rank.
        self.peers = {
            rank: there[index % len(there)]
            for ranks, there in zip(self.nodes, self.nodes[1:] + self.nodes[:1], strict=True)
            for index, rank in enumerate(ranks)
            if len(self.nodes) > 1
        }
        process = PARENT if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
        self.launcher = f"{process}.{process_space()}"
        self._make(size)
        self.slots = [_SharedFile(self.folder / self._name(self.rank, slot)) for slot in (0, 1)]
        self.received: dict[int, list[_SharedFile]] = {}
        self.slot, self.state, self.settled = 0, WHOLE, True
        self.thread: threading.Thread | None = None

    def _make(self, size: int) -> None:
        """Make the folder, and check the room."""
        problem, free = "", 0
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            # The lock lasts as long as this process.
            self.lock = os.open(self.folder, os.O_RDONLY | os.O_NOFOLLOW)
            fcntl.flock(self.lock, fcntl.LOCK_SH)
            # The last copy of the run before stays until the first one of this run is whole.
            free = shutil.disk_usage(ROOT).free + sum(p.stat().st_size for p in self.folder.iterdir())
        except OSError as error:
            problem = f"checkpoint.memory: {self.folder}: {cause_of(error)}"
        everyone = gathered_objects((size, free, problem), self.group)
        if problem := next((words for *_, words in everyone if words), ""):
            raise ConfigError(problem)
        for ranks in self.nodes:
            others = [rank for rank, peer in self.peers.items() if peer in ranks]
            needed = 2 * sum(everyone[rank][0] for rank in (*ranks, *others))
            room = everyone[ranks[0]][1]
            if needed > room:
                raise ConfigError(
                    f"checkpoint.memory: two copies of {len(ranks)} ranks"
                    f"{f' and of {len(others)} peers' if others else ''} take {needed:,} bytes of"
                    f" {ROOT}, and {room:,} are free on {self.places[ranks[0]].split()[0]}: make it"
                    " larger (docker run --shm-size), or use checkpoint.memory = 0"
                )

    def _name(self, rank: int, slot: int) -> str:
        return f"{self.launcher}-{self.attempt}-{rank:05d}-{slot}"

    def find(self, say: Callable[[str], None]) -> CopiedStep | None:
        """Return the newest step of which all parts are left, in memory of any node; a collective."""
        held: dict[str, _CopyHeader] = {}
        wrong = []
        for path in sorted(self.folder.glob(f"*{_TEXT}")):
            name, copy = path.name.removesuffix(_TEXT), _read_text(path)
            if copy:
                held[name] = copy
            else:
                wrong.append(f"the description of {name} is not what was written (checksum)")
        first = self.rank == self.near[0]  # it speaks for its node
        heads = {name: replace(copy, tensors={}, sums={}) for name, copy in held.items()}
        everyone = gathered_objects((heads, wrong) if first else ({}, []), self.group)
        for words in (words for _, lines in everyone for words in lines):
            say(f"copies in memory: {words}")
        steps = {(c.step, c.attempt) for copies, _ in everyone for c in copies.values()}
        for step, attempt in sorted(steps, reverse=True):
            mine = {n: c for n, c in held.items() if (c.step, c.attempt) == (step, attempt)}
            damaged = self._damaged(mine)
            for name, tensor in damaged.items():
                say(f"copies in memory: {name} of step {step} is damaged in {tensor}")
            tensors = {n: c.tensors for n, c in mine.items() if first and n not in damaged}
            files: dict[str, dict[str, DescribedTensor]] = {}
            owners: dict[str, int] = {}
            for rank, some in enumerate(gathered_objects(tensors, self.group)):
                files |= some
                owners = dict.fromkeys(some, rank) | owners
            known = {n: c for copies, _ in everyone for n, c in copies.items() if n in files}
            copy = next(iter(known.values()), None)
            if copy is None or {c.layout for c in known.values()} < set(copy.layouts):
                say(f"copies in memory: step {step} lacks parts, and is passed over")
                continue
            # Those that are here come first, and of these the ranks' own.
            names = sorted(files, key=lambda n: (n not in mine, n.endswith(_PEER), n))
            reader = SentPartsReader(self.folder, names, owners, self.group)
            if problem := reader.describe(files):
                say(f"copies in memory: step {step} is passed over: {problem}")
                continue
            # Shared memory may be full.
            folder = Path(tempfile.mkdtemp(prefix=PREFIX)) / store.name_of(step)
            folder.mkdir()
            store.write_run_state(folder, copy.state, copy.config, {})
            rank_state.write_from_part(reader, folder, self.group)
            return CopiedStep(step, folder, reader, sorted(files))
        return None

    def _damaged(self, mine: Mapping[str, _CopyHeader]) -> dict[str, str]:
        """Return the copies that are damaged, and where; ranks of a node share the reading."""
        share = sorted(mine)[self.near.index(self.rank) :: len(self.near)]
        own = {name: _damage(self.folder / name, mine[name]) for name in share}
        everyone = gathered_objects([(n, tensor) for n, tensor in own.items() if tensor], self.group)
        return dict(pair for pairs in everyone for pair in pairs)

    def settle(self, copied: CopiedStep | None, read: bool = False) -> None:
        """Remove what was left of earlier starts, but what was ``copied`` and all have ``read``."""
        dist.barrier(self.group)
        kept = [*copied.names, *(f"{name}{_TEXT}" for name in copied.names)] if copied and read else []
        if copied:
            shutil.rmtree(copied.folder.parent, ignore_errors=True)
        if self.rank == self.near[0]:
            self._remove_earlier(kept)
        self.settled = not kept

    def _remove_earlier(self, kept: Sequence[str] = ()) -> None:
        for path in self.folder.iterdir():
            if f"-{self.attempt}-" not in path.name and path.name not in kept:
                path.unlink(missing_ok=True)  # another agent of this host may be first

    def take(self, state: dict[str, LocalShard], progress: Progress, last: int) -> None:
        """Copy the state after a step; a thread does the rest.

        ``last`` is the state of the last copy, the greatest of all ranks. If it is still going on, this
        copy is left out. If it has failed, its file is written again: the other one is whole.
        """
        if last == GOING:
            return
        if last == WHOLE and self.thread:
            self.slot = 1 - self.slot
            if not self.settled and self.rank == self.near[0]:
                self._remove_earlier()
            self.settled = True
        slot, self.state, filled = self.slots[self.slot], GOING, True
        try:
            slot.fill(state)
        except OSError as error:
            filled = False
            self._say_failed(progress.step, error)
        given = (slot, filled, progress)
        self.thread = threading.Thread(target=self._complete, args=given, daemon=True)
        self.thread.start()

    def _complete(self, slot: _SharedFile, filled: bool, progress: Progress) -> None:
        """Sum and publish the copy, and exchange it with peers. This runs in the thread."""
        state = FAILED
        try:
            rows = self._of_all(slot.layout if filled else -1, len(slot.memory))
            layouts = [layout for layout, _ in rows]
            if min(layouts) >= 0:  # or the copy would have parts of some ranks alone
                to, sources = self._exchanges(layouts)
                # No rank may wait for one that has no room.
                ready = self._make_room({rank: rows[rank][1] for rank in sources}, progress.step)
                if not self.peers or all(flag for (flag,) in self._of_all(int(ready))):
                    rest = {
                        "step": progress.step,
                        "attempt": self.attempt,
                        "layout": slot.layout,
                        "layouts": layouts,
                        "sums": slot.sums(),
                        "state": {**asdict(progress), **self.about},
                        "config": self.config,
                    }
                    text = f'{json.dumps(rest)[:-1]}, "tensors": {slot.places}}}'.encode()
                    texts = self._exchange(slot, text, to, sources)
                    slot.publish(text)
                    for rank, theirs in texts.items():
                        self.received[rank][self.slot].publish(theirs)
                    state = WHOLE
        except Exception as error:
            self._say_failed(progress.step, error)
        self.state = state

    def _of_all(self, *own: int) -> list[list[int]]:
        """Return the numbers of every rank."""
        mine = torch.tensor(own)
        return [row.tolist() for row in (gathered(mine, self.group) if self.ranks > 1 else [mine])]

    def _exchanges(self, layouts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the rank to which this one's copy goes, if any, and those whose copies it gets.

        A copy stays where it is if another node has a replica.
        """
        nodes = Counter(layout for layout, _ in {*zip(layouts, self.places, strict=True)})
        sent = {rank: peer for rank, peer in self.peers.items() if nodes[layouts[rank]] == 1}
        to = [sent[self.rank]] if self.rank in sent else []
        return to, [rank for rank, peer in sent.items() if peer == self.rank]

    def _make_room(self, sizes: Mapping[int, int], step: int) -> bool:
        """Make files for the copies of other ranks; say if there is no room."""
        try:
            for rank, size in sizes.items():
                names = [self.folder / f"{self._name(rank, number)}{_PEER}" for number in (0, 1)]
                self.received.setdefault(rank, [*map(_SharedFile, names)])[self.slot].reserve(size)
        except OSError as error:
            self._say_failed(step, error)
            return False
        return True

    def _exchange(
        self, slot: _SharedFile, text: bytes, to: Sequence[int], sources: Sequence[int]
    ) -> dict[int, bytes]:
        """Send the copy to a peer, and receive those of others; return their texts."""
        words, texts = torch.frombuffer(bytearray(text), dtype=torch.uint8), dict[int, bytes]()
        message = (torch.tensor([len(text)]), words, slot.memory)
        works = begin_messages(self.group, [(data, peer) for peer in to for data in message])
        for source in sources:
            length = torch.empty(1, dtype=torch.int64)
            dist.recv(length, group=self.group, group_src=source)
            theirs = torch.empty(int(length), dtype=torch.uint8)
            for data in (theirs, self.received[source][self.slot].memory):
                dist.recv(data, group=self.group, group_src=source)
            texts[source] = bytes(bytes_of(theirs))
        wait_for(works)
        return texts

    def _say_failed(self, step: int, error: Exception) -> None:
        words = f"the copy in memory of step {step} failed: {cause_of(error)}; training goes on"
        print(f"rank {self.rank}: {words}", flush=True)

    def remove(self) -> None:
        """Remove all copies, since the run has ended well, and no rank's thread goes on."""
        if self.rank == self.near[0]:
            shutil.rmtree(self.folder, ignore_errors=True)
