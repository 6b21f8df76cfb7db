"""Object storage: a URL that fsspec knows (s3://, gs://, hf://, ...) is a path like any other.

Whatever reads a ``Path`` reads a :class:`Remote`, by ranges where it reads a part. A file is written
whole or not at all, and nothing is renamed in one piece: what belongs together needs a file that is
written last. The packages that reach a store, such as s3fs, are the user's to install.
"""

import errno
import glob
import io
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PosixPath
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator

from compose.errors import URL, ConfigError, did_you_mean, local_path

T = TypeVar("T")
_LOCAL = ("file", "local")
_WAITS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # seconds between the tries of what cannot be reached
_AHEAD = 2**24  # bytes read at once of a file that is read from its beginning
_MOST = 2**26  # bytes of one answer
# Another try would not help.
_FINAL = {errno.EACCES, errno.EEXIST, errno.EINVAL, errno.ENOSPC, errno.ENOSYS, errno.EPERM}


class StoreError(ConfigError, OSError):
    """An OSError of a store that refuses or cannot be reached; one line where nobody handles it."""

    def __init__(self, code: int, why: str, url: str) -> None:
        ConfigError.__init__(self, f"{url}: {why}")
        OSError.__init__(self, code, why, url)

    def __str__(self) -> str:
        return self.problems[0]


class Remote(PosixPath):
    """A file or folder in object storage. Raises FileNotFoundError, or StoreError after all tries."""

    def __str__(self) -> str:
        scheme, colon, rest = super().__str__().partition(":/")
        return f"{scheme}://{'/' * (scheme in _LOCAL)}{rest}" if colon else scheme

    @property
    def suffix(self) -> str:
        """The suffix of the name; a query after it, such as ?download=true, is no part of it."""
        return PosixPath(self.name.partition("?")[0]).suffix

    def with_suffix(self, suffix: str) -> "Remote":
        """Return the path with another suffix; a query stays behind it."""
        name, mark, query = self.name.partition("?")
        return self.with_name(f"{PosixPath(name).with_suffix(suffix)}{mark}{query}")

    def _ask(self, question: Callable[[Any, str], T]) -> T:
        """Return what a store answers about its own name of this path, asked again for a while."""
        import fsspec

        url = str(self)
        options = {"auto_mkdir": True} if url.startswith(_LOCAL) else {}
        for wait in (*_WAITS, None):
            try:
                # A listing that is kept would hide what other processes write.
                store, name = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
                return question(store, name)
            except FileNotFoundError as error:
                words = error.strerror or str(error)
                words = words if " " in words else "no such file"
                raise FileNotFoundError(errno.ENOENT, words, url) from None
            except Exception as error:
                kind, code = type(error).__name__, getattr(error, "errno", None)
                words = getattr(error, "strerror", None) or " ".join(str(error).split()) or kind
                refused = code in _FINAL or re.search("Credential|Permission|Validation", kind)
                refused = refused or words.startswith("Forbidden")  # gcsfs has no class of it
                if wait is None or refused or isinstance(error, (ImportError, TypeError, ValueError)):
                    raise StoreError(code or errno.EIO, words, url) from None
                if wait == _WAITS[1]:
                    line = f"{url}: cannot be reached, and is tried again for a while: {words}"
                    print(line, file=sys.stderr, flush=True)
            time.sleep(wait)
        raise AssertionError("the last try returns or raises")

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the kind and the size. A store has no links."""
        info = self._ask(lambda store, name: store.info(name))
        # A server of HTTP sends a page for a folder, from an address that ends with a slash.
        folder = info["type"] == "directory" or str(info.get("url", "")).endswith("/")
        kind = stat.S_IFDIR if folder else stat.S_IFREG
        return os.stat_result((kind | 0o644, 0, 0, 1, 0, 0, info["size"] or 0, 0, 0, 0))

    def _mode(self) -> int:
        try:
            return self.stat().st_mode
        except FileNotFoundError:
            return 0

    def exists(self, **_: Any) -> bool:
        """Return whether there is a file or folder."""
        return bool(self._mode())

    def is_file(self, **_: Any) -> bool:
        """Return whether it is a file."""
        return stat.S_ISREG(self._mode())

    def is_dir(self, **_: Any) -> bool:
        """Return whether it is a folder: whether there is a file within it."""
        return stat.S_ISDIR(self._mode())

    def is_symlink(self) -> bool:
        """Return False."""
        return False

    def resolve(self, strict: bool = False) -> "Remote":
        """Return the path, which is whole already."""
        return self

    def absolute(self) -> "Remote":
        """Return the path, which is whole already."""
        return self

    def glob(self, pattern: str, **_: Any) -> "Iterator[Remote]":  # type: ignore[override]
        """Yield what lies within the folder and has names like ``pattern``."""

        def names(store: Any, name: str) -> list[str]:
            start = len(store._strip_protocol(name).rstrip("/")) + 1
            return [each[start:] for each in store.glob(f"{name.rstrip('/')}/{pattern}")]

        yield from (self / name for name in sorted(self._ask(names)))

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Do nothing: a folder is there as soon as a file is."""

    def open(self, mode: str = "r", buffering: int = -1, *_: Any, **__: Any) -> Any:
        """Open the file to be read; without ``buffering`` a read asks for its own range alone."""
        raw = _Ranges(self._ask, self.stat().st_size if buffering else sys.maxsize)
        if buffering == 0:
            return raw
        file = io.BufferedReader(raw, _AHEAD)
        return file if "b" in mode else io.TextIOWrapper(file, encoding="utf-8")

    def read_bytes(self) -> bytes:
        """Return the content of the file."""
        return self._ask(lambda store, name: store.cat_file(name))

    def read_text(self, *_: Any, **__: Any) -> str:
        """Return the content of a file of UTF-8; one request, where ``open`` would make two."""
        return self.read_bytes().decode()

    def write_bytes(self, data: Any) -> int:
        """Write a small file whole."""
        self._ask(lambda store, name: store.pipe_file(name, bytes(data)))
        return len(data)

    def put(self, source: Path) -> None:
        """Write the content of a local file."""
        self._ask(lambda store, name: store.put_file(str(source), name))

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the file."""
        try:
            self._ask(lambda store, name: store.rm_file(name))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self, first: str) -> None:
        """Delete a folder with all that is in it, one file before the others."""
        (self / first).unlink(missing_ok=True)
        self._ask(lambda store, name: store.rm(name, recursive=True) if store.exists(name) else None)

    def rename(self, target: Any) -> "Remote":
        """Copy a folder and delete the old one; what stops in between leaves both in part."""
        other = self._ask(lambda store, _: store._strip_protocol(str(target)))
        self._ask(lambda store, name: store.mv(name, other, recursive=True))
        return target

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in the folder, by its name there."""

        def listed(store: Any, name: str) -> dict[str, int]:
            try:
                files = store.find(name, detail=True)
            except FileNotFoundError:
                return {}
            names = {path.rpartition("/")[2]: info["size"] for path, info in files.items()}
            # A page of HTTP lists no sizes.
            return {n: (self / n).stat().st_size if s is None else s for n, s in names.items()}

        return self._ask(listed)


class _Ranges(io.RawIOBase):
    """A file that is read by ranges."""

    def __init__(self, ask: Callable[..., Any], size: int) -> None:
        self.ask, self.size, self.place = ask, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.place = offset + (0, self.place, self.size)[whence]
        return self.place

    def readinto(self, room: Any) -> int:
        start, stop = self.place, min(self.place + min(len(room), _MOST), self.size)
        if start >= stop:
            return 0

        def part(store: Any, name: str) -> bytes:
            data = store.cat_file(name, start=start, end=stop)
            if len(data) > stop - start:
                raise ValueError("its server sends the whole file in place of a part; copy it here")
            return data

        data = self.ask(part)
        room[: len(data)] = data
        self.place += len(data)
        return len(data)


def as_path(text: str | Path) -> Path:
    """Return the path that a text names: a :class:`Remote` for a URL."""
    return Remote(text) if URL.match(str(text)) else Path(text)


def any_path(text: str) -> str:
    """Return a URL as it is, and ``local_path`` of any other text.

    ValueError for a store that fsspec does not know, or whose package is not installed.
    """
    if not (match := URL.match(text)):
        return local_path(text)
    from fsspec.registry import available_protocols, get_filesystem_class, known_implementations

    scheme = match[1]
    if scheme not in (known := available_protocols()):
        hint = did_you_mean(scheme, known)
        raise ValueError(f"is in a store that fsspec does not know{hint}")
    try:
        get_filesystem_class(scheme)
    except ImportError:
        package = known_implementations[scheme]["class"].partition(".")[0]
        package = package if package != "fsspec" else f"fsspec[{scheme}]"
        raise ValueError(f"needs a package that is not installed here: pip install {package}") from None
    return text


def files_at(text: str) -> list[Path]:
    """Return the file that a text names, or those that match it, by their names."""
    path = as_path(text)
    if path.is_file():
        return [path]
    if isinstance(path, Remote):
        depth = next((i for i, part in enumerate(path.parts) if glob.has_magic(part)), 0)
        if not depth:
            return []
        names = Remote(*path.parts[:depth]).glob("/".join(path.parts[depth:]))
    else:
        names = map(Path, glob.glob(text, recursive=True))
    return sorted(each for each in names if each.is_file())


def _each(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    return any_path(value) if isinstance(value, str) else tuple(map(any_path, value))


# Types of keys that name a file or a folder, here or in object storage.
AnyPath = Annotated[str, AfterValidator(any_path)]
AnyPaths = Annotated[str | tuple[str, ...], AfterValidator(_each)]
