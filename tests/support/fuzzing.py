"""Odd input for tests: files and command lines changed at random, and a watch over what is touched."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import stat
import struct
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

# These replace values. TOML and JSON share some; a case may put either into either.
ODD = [
    *("null", "true", "false", "0", "-1", "1", "7", "2.5", "-0.0", "1e-400", "1e999", "-1e308"),
    *("9" * 5000, "1e-300", "1e300", "5e-324", "9" * 500, "NaN", "nan", "inf", "-Infinity"),
    *(str(2**31), str(2**63), str(-(2**63) - 1)),
    *('""', '" "', '"x"', '"1"', '".."', '"../x"', '"/"', '"~"', '"a\\u0000b"', '"\\u001b[2J"'),
    *('"\\ud800"', '"*"', '"["', '"[0-9"', '"{}"', '"%s"', '"ß日本"', '"' + "y" * 5000 + '"'),
    *("[]", "{}", "[[]]", '[""]', "[1, 2, 3]", "[-1]", "[null]", '{"a": 1}', "{ a = 1 }", "[0.5]"),
    *("[" * 3000 + "]" * 3000, '{"a":' * 500 + "1" + "}" * 500, "1979-05-27", "0x10", "1_0", "'''"),
    *("", "cpu", "bfloat16", '"bfloat16"', '"muon"', '"none"', '"gone"', "16", "300", "1.0", "[0, 1]"),
]
_TOML_LINES = ["[x]", "[[model]]", "[run.dir]", "x.y = 1", "= 3", "'' = 1", "[", "\x07", '"\x1b" = 1']
_TOML_LINES += ["extends = 3", 'extends = "gone.toml"']
_CELLS = [*ODD, " " * 140_000, f"{'9' * 5000}F0", "0F99999999999999999", '"', "1F0\n\n", "0F0" * 60_000]
_MARK = "@odd value@"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Events that change a file system have the places of paths among their arguments, and of the
# descriptors of the folders that those are relative to.
_CHANGES = {
    "os.remove": [(0, 1)],
    "os.rename": [(0, 2), (1, 3)],
    "os.rmdir": [(0, 1)],
    "os.mkdir": [(0, 2)],
    "os.symlink": [(1, 2)],
    "os.link": [(1, 3)],
    "os.truncate": [(0, -1)],
    "os.utime": [(0, 3)],
    "os.chmod": [(0, 2)],
    "os.chown": [(0, 3)],
    "shutil.rmtree": [(0, 1)],
}


class TooSlow(BaseException):
    """A case took longer than it may."""


class Watch:
    """Sees what this process writes, removes or reads while it is on: an audit hook stays for good.

    outside: folder of which nothing may be read either.
    """

    def __init__(self, outside: Path) -> None:
        self.outside, self.allowed, self.on = os.path.realpath(outside), list[str](), False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    @contextlib.contextmanager
    def over(self, *allowed: Path) -> Iterator[list[str]]:
        """While within: what was touched besides ``allowed``. Such writes are refused."""
        self.allowed, self.seen = [os.path.realpath(each) for each in allowed], []
        before = _snapshot(Path(self.outside))
        self.on = True
        try:
            yield self.seen
        finally:
            self.on = False
            if _snapshot(Path(self.outside)) != before:
                self.seen.append(f"{self.outside}: is not as it was")

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on or (event != "open" and event not in _CHANGES):
            return
        self.on = False  # what is asked for here is no case's
        try:
            if event == "open":
                path, _, flags = arguments
                # Python tells of a file before the opener is asked, which follows no link.
                own = sys._getframe(1).f_code.co_name == "open_own"
                follows = not own and not flags & os.O_NOFOLLOW
                self._check(event, path, -1, bool(flags & _WRITES), follows)
                return
            for place, folder in _CHANGES[event]:
                base = arguments[folder] if 0 <= folder < len(arguments) else -1
                self._check(event, arguments[place], -1 if base is None else base, True, False)
        finally:
            self.on = True

    def _check(self, event: str, path: Any, base: int, writes: bool, follows: bool) -> None:
        if isinstance(path, int):
            return
        name = os.fsdecode(path)
        if "\0" in name:
            return  # which no system call takes
        if base >= 0:
            name = os.path.join(os.readlink(f"/proc/self/fd/{base}"), name)
        parent, last = os.path.split(os.path.abspath(name))
        place = os.path.realpath(name if follows else parent)
        place = place if follows else os.path.join(place, last)
        if _within(place, self.outside):
            self._refuse(event, place)
        # Python's own files of what it imports, and the device that is none.
        fine = place == os.devnull or "__pycache__" in place
        if writes and not fine and not any(_within(place, each) for each in self.allowed):
            self._refuse(event, place)

    def _refuse(self, event: str, place: str) -> None:
        self.seen.append(f"{event}: {place}, by\n{''.join(traceback.format_stack(limit=12)[:-3])}")
        raise PermissionError(1, "watched", place)


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


def _snapshot(folder: Path) -> list[tuple[Any, ...]]:
    """Names, kinds, sizes, times and contents of what a folder holds."""
    results = []
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(state.st_mode) else b""
        results.append((str(path), state.st_mode, state.st_size, state.st_mtime_ns, content))
    return results


@contextlib.contextmanager
def limits(seconds: float, wait: float, memory: int) -> Iterator[None]:
    """Raises TooSlow, or MemoryError, where more is taken than this.

    ``seconds`` are of this process's work, so that a busy machine changes nothing; ``wait`` is of the
    clock, for what hangs and does no work.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, wait))
    before = [signal.signal(number, stop) for _, number, _ in timers]
    bounds = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, bounds[1]))
    for timer, _, limit in timers:
        signal.setitimer(timer, limit, 1.0)  # again, if it came within a finalizer
    try:
        yield
    finally:
        for timer, _, _ in timers:
            signal.setitimer(timer, 0)
        for (_, number, _), handler in zip(timers, before, strict=True):
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, bounds)


def odd_file(random: Random, path: Path, outside: Path | None = None) -> None:
    """Change a file's content in some way, or put something else in its place: links into ``outside``
    among others."""
    if random.random() < 0.2 or not path.is_file():
        _replace(random, path, outside)
        return
    change = odd_bytes if random.random() < 0.25 else _BY_SUFFIX.get(path.suffix, odd_bytes)
    path.write_bytes(change(random, path.read_bytes()))


def _replace(random: Random, path: Path, outside: Path | None) -> None:
    """Put into the place of a file, or a folder, what is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    ways: list[Callable[[], object]] = [
        path.mkdir,
        lambda: path.symlink_to(path),
        lambda: path.symlink_to("gone"),
        lambda: os.mkfifo(path),
        lambda: path.write_bytes(b""),
        lambda: None,
    ]
    if outside:
        twin = next((p for p in outside.iterdir() if p.name == path.name), outside / "secret.txt")
        ways += [
            lambda: path.symlink_to(twin),
            lambda: path.symlink_to(os.path.relpath(twin, path.parent)),
            lambda: path.symlink_to(outside),
        ]
    random.choice(ways)()


def odd_bytes(random: Random, content: bytes) -> bytes:
    """``content`` with bytes changed, lost, doubled or put before it."""
    data, size = bytearray(content), len(content)
    at = random.randrange(size + 1)
    # The first bytes decide about the rest.
    at = random.randrange(min(size, 64) + 1) if random.random() < 0.4 else at
    way = random.randrange(7)
    if way == 0:
        for _ in range(random.randint(1, 8)):
            if size:
                data[min(size - 1, at + random.randrange(8))] = random.randrange(256)
    elif way == 1:
        del data[at:]
    elif way == 2:
        data[at : at + 16] = bytes(16)
    elif way == 3:
        data[at:at] = random.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"\x1b[2J", b"\xed\xa0\x80"])
    elif way == 4:
        data += data[at:]
    elif way == 5:
        del data[at : at + random.randint(1, 9)]
    else:
        data[:0] = random.choice([b"\xef\xbb\xbf", b"PK\x03\x04", b"\x93NUMPY", b"{", b"\n" * 9])
    return bytes(data)


def _odd_safetensors(random: Random, content: bytes) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header = odd_json(random, content[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def _odd_npy(random: Random, content: bytes) -> bytes:
    return content[:10] + _odd_text(random, content[10:128]) + content[128:]


def _odd_text(random: Random, content: bytes) -> bytes:
    """``content``, of the same length, with one of its words another."""
    words = b"(0,) (-1,) (9999999999999,) '|O' '<f8' '<i8' () None '<u9'".split(b" ")
    result = list(re.finditer(rb"\([^)]*\)|'<u2'|False|\{", content))
    if not result:
        return odd_bytes(random, content)
    one = random.choice(result)
    changed = content[: one.start()] + random.choice(words) + content[one.end() :]
    return changed.rstrip(b" \n")[: len(content) - 1].ljust(len(content) - 1) + b"\n"


def odd_json(random: Random, content: bytes) -> bytes:
    """JSON with some of its values, or names, odd."""
    try:
        tree = json.loads(content)
    except ValueError:
        return odd_bytes(random, content)
    raw = []
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        holder, key = _somewhere(random, tree)
        if holder is None:
            return random.choice(ODD).encode(errors="replace")
        way = random.randrange(6)
        if way == 0:
            del holder[key]
        elif way == 1 and isinstance(holder, dict):
            holder[f"{key}{random.choice(['_', 'x', ''])}"[1:]] = holder.pop(key)
        elif way == 2 and isinstance(holder, dict):
            holder[random.choice(["x", "", "a.b", "../x", "\x1b[2J", "__metadata__"])] = holder[key]
        elif way == 3 and isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
            holder[key] += random.choice([1, -1, 0.5, 1000, -(10**6), 2**40])
        else:
            holder[key] = f"{_MARK}{len(raw)}@"
            raw.append(random.choice(ODD) or '"z')
    text = json.dumps(tree)
    for place, words in enumerate(raw):
        text = text.replace(f'"{_MARK}{place}@"', words)
    if random.random() < 0.05:  # a name twice
        text = re.sub(r'("[a-z_0-9]+": [0-9]+)', r"\1, \1", text, count=1)
    return text.encode(errors="replace")


def _somewhere(random: Random, tree: Any) -> tuple[Any, Any]:
    """A list or an object in a tree, and the place of something in it."""
    at: tuple[Any, Any] = (None, None)
    while isinstance(tree, (dict, list)) and tree:
        key = random.choice(list(tree)) if isinstance(tree, dict) else random.randrange(len(tree))
        at, tree = (tree, key), tree[key]
        if random.random() < 0.3:
            break
    return at


def odd_toml(random: Random, content: bytes) -> bytes:
    """TOML with some of its lines odd."""
    lines = content.decode(errors="replace").split("\n")
    for _ in range(random.choice([1, 1, 2, 3])):
        keys = [i for i, line in enumerate(lines) if re.match(r"\w+ *=", line)]
        # A person chooses where runs write, and not this test.
        keys = [i for i in keys if not lines[i].startswith(("dir ", "offload_dir "))]
        if not keys:
            break
        at = random.choice(keys)
        key, _, value = lines[at].partition("=")
        way = random.randrange(8)
        if way == 0:
            del lines[at]
        elif way == 1:
            lines.insert(at, lines[at])
        elif way == 2:
            lines[at] = f"{key[1:]}= {value}"
        elif way == 3:
            lines.insert(at, random.choice(_TOML_LINES))
        else:
            lines[at] = f"{key}= {random.choice(ODD)}"
    return "\n".join(lines).encode(errors="replace")


def odd_image(random: Random, content: bytes) -> bytes:
    """A PNG with an odd chunk, or odd bytes, or what other decoders of Pillow would take for theirs."""
    way = random.randrange(4)
    if way == 0:
        return odd_bytes(random, content)
    if way == 1:
        start = random.choice([b"%!PS-Adobe-3.0 EPSF-3.0\n", b"DDS |", b"GIF89a"])
        return start + random.randbytes(200)
    kinds = ["iCCP", "cHRM", "tRNS", "PLTE", "tEXt", "zTXt", "iTXt", "eXIf", "acTL", "fcTL", "fdAT"]
    name = random.choice(kinds).encode()
    data = random.randbytes(random.choice([0, 1, 4, 8, 12, 26, 40]))
    chunk = struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    at = random.choice([8, 33, len(content) - 12])
    return content[:at] + chunk + content[at:]


def odd_table(random: Random, content: bytes) -> bytes:
    """A schedule's .csv with an odd cell, or odd bytes."""
    if random.random() < 0.3:
        return odd_bytes(random, content)
    cells = content.split(b",")
    cells[random.randrange(len(cells))] = random.choice(_CELLS).encode(errors="replace")
    return b",".join(cells)


def odd_lines(random: Random, content: bytes) -> bytes:
    """Lines of JSON, one of them odd."""
    lines = content.splitlines()
    at = random.randrange(len(lines))
    lines[at] = odd_json(random, lines[at]) if random.random() < 0.8 else b"\xff" + lines[at]
    return b"\n".join(lines) + b"\n"


def odd_words(random: Random, words: Sequence[str], keys: Sequence[str]) -> list[str]:
    """A command line with some of its words odd, or others among them."""
    result = list(words)
    for _ in range(random.choice([1, 1, 2, 3])):
        at, value = random.randrange(len(result) + 1), random.choice(ODD).replace("\0", "")
        key = random.choice(keys)
        new = [
            f"--{key}={value}",
            f"--{key}",
            f"--{key}=",
            f"--{key[1:]}={value}",
            f"--{key.partition('.')[0]}={value}",
            random.choice(["--x", "--x.y", "-", "--", "-q", "--=", "--.=1", "-h=1", "--dry-run=1", ""]),
            value,
            f"--{random.choice(['seed', 'top-p', 'temperature', 'max-tokens'])}={value}",
        ]
        way = random.randrange(3)
        if way == 0 and at < len(result):
            del result[at]
        elif way == 1 and at < len(result):
            result[at] = random.choice(new)
        else:
            result.insert(at, random.choice(new))
    return result


_BY_SUFFIX: dict[str, Callable[[Random, bytes], bytes]] = {
    ".json": odd_json,
    ".toml": odd_toml,
    ".safetensors": _odd_safetensors,
    ".png": odd_image,
    ".jsonl": odd_lines,
    ".csv": odd_table,
    ".npy": _odd_npy,
}
