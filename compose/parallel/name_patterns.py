"""Names of modules, and the patterns of a plan that match them: ``*`` is any one part of a name."""

from collections.abc import Iterable, Sequence, Set
from fnmatch import fnmatchcase
from functools import lru_cache

from compose.errors import did_you_mean


def matching(pattern: str, names: Sequence[str]) -> tuple[list[str], str]:
    """Return the names that ``pattern`` matches, and if there are none a hint at the nearest one."""
    results = [name for name in names if _matches(name, pattern)]
    return results, "" if results else did_you_mean(pattern, _as_patterns(names, pattern))


@lru_cache(maxsize=1 << 17)  # the planner resolves plans of one model many times
def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _as_patterns(names: Iterable[str], pattern: str) -> list[str]:
    """Return ``names`` with ``*`` where ``pattern`` has it, so that the nearest can be suggested."""
    stars = [part == "*" for part in pattern.split(".")]
    starred = {
        ".".join("*" if star else part for star, part in zip(stars, name.split("."), strict=False))
        for name in names
        if name.count(".") + 1 == len(stars)
    }
    return sorted(starred | set(names))


def inside(name: str, modules: Set[str]) -> bool:
    """Return whether a module or parameter is inside one of several modules, at any depth."""
    return any(outer in modules for outer in around(name))


def around(name: str) -> list[str]:
    """Return the names of the modules that hold ``name``, without the root."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def parent(name: str) -> str:
    """Return the name of the module that holds ``name`` itself; the root's is empty."""
    return name.rpartition(".")[0]
