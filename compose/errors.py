"""The error for all mistakes in a user's input, and hints at the nearest known word."""

import difflib
import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_SHOWN = 200  # characters of a word
_LONG = re.compile(rf"\S{{{2 * _SHOWN},}}")


class ConfigError(Exception):
    """Input that cannot work.

    ``problems`` has one line for each problem: the key, the reason and a cure. The command lines print
    the problems once for all ranks, and exit with 2. Characters in a name or a value that a terminal
    would obey are written as escapes.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = [shortened(printable(problem)) for problem in problems]
        super().__init__("\n".join(self.problems))


@contextmanager
def refused_if(line: str) -> Iterator[None]:
    """Turn what a model raises into a ConfigError: ``line``, with the cause and its place for {}."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigError) or "OutOfMemory" in type(error).__name__:
            raise
        lines = str(error).strip().splitlines() or [""]
        cause = f"{type(error).__name__}: {lines[-1 if lines[0].endswith(':') else 0]}"
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        forwards = [f for f in frames if f.f_code.co_name == "forward" and "self" in f.f_locals]
        if forwards:
            cause += f" (in forward of {type(forwards[-1].f_locals['self']).__name__})"
        raise ConfigError(line.replace("{}", cause)) from error


def printable(text: str) -> str:
    """Return ``text`` on one line; invisible characters become escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str) -> str:
    """Return ``text`` with every long word cut: names and values in it may have any length."""
    return _LONG.sub(lambda word: f"{word[0][:_SHOWN]}...", text)


def did_you_mean(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return ``; did you mean X?`` for the nearest known word, or an empty string.

    Args:
        word: The unknown word.
        known: The known words.
        likeness: How like the words must be, from 0 to 1.

    Returns:
        The hint.
    """
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f"; did you mean {near[0]}?" if near else ""
