"""The one error that a person's input can cause, and the nearest right word for a wrong one."""

import difflib
from collections.abc import Iterable


class ConfigError(Exception):
    """Input that cannot work. ``problems``: one line each, naming the key, the reason and a cure.

    The command lines print the problems once, whatever the number of ranks, and exit with 2. What a
    terminal would not print but obey, in a name or a value, is written as an escape.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = [printable(problem) for problem in problems]
        super().__init__("\n".join(self.problems))


def printable(text: str) -> str:
    """``text`` on one line, with escapes for what is no visible character."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def did_you_mean(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """``; did you mean X?`` for the nearest known word, else an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f"; did you mean {near[0]}?" if near else ""
