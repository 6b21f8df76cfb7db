"""The one error that a person's input can cause, and the nearest right word for a wrong one."""

import difflib
import re
from collections.abc import Iterable

_SHOWN = 200  # characters of a word
_LONG = re.compile(rf"\S{{{2 * _SHOWN},}}")


class ConfigError(Exception):
    """Input that cannot work. ``problems``: one line each, naming the key, the reason and a cure.

    The command lines print the problems once, whatever the number of ranks, and exit with 2. What a
    terminal would not print but obey, in a name or a value, is written as an escape.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = [shortened(printable(problem)) for problem in problems]
        super().__init__("\n".join(self.problems))


def printable(text: str) -> str:
    """``text`` on one line, with escapes for what is no visible character."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str) -> str:
    """``text`` with the end of each long word left out: names and values in it have any length."""
    return _LONG.sub(lambda word: f"{word[0][:_SHOWN]}...", text)


def did_you_mean(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """``; did you mean X?`` for the nearest known word, else an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f"; did you mean {near[0]}?" if near else ""
