"""The keys of another library's JSON file: each is read, or may have some values, or says nothing."""

import json
from collections.abc import Mapping
from typing import Any

_SHOWN = 60  # characters of a value in a message
_OFF = (None, False, [], {}, "")


class KnownKeys:
    """Every known key of one kind of file."""

    def __init__(
        self,
        read: str,
        only: Mapping[str, tuple[Any, ...]],
        besides: str,
        cures: Mapping[str, str] | None = None,
    ) -> None:
        """Make the list; names are separated by spaces.

        Args:
            read: Keys that are read.
            only: Keys that would change something, with the values that change nothing.
            besides: Keys that change nothing here, whatever their value is.
            cures: What to do about a key of ``only``, for its message.
        """
        self.read, self.besides = frozenset(read.split()), frozenset(besides.split())
        self.only = {key: values for names, values in only.items() for key in names.split()}
        self.cures = cures or {}

    def problems(self, values: Mapping[str, Any]) -> list[str]:
        """Return a line for each key that may change something and is not supported here.

        A key that nobody knows is off if its value is empty.

        Args:
            values: The parsed file.

        Returns:
            The lines.
        """
        return [
            f"{key if key.isidentifier() else _shown(key)}: {_shown(value)} is not supported here"
            f"{self.cures.get(key, '')}"
            for key, value in values.items()
            if key not in self.read
            and key not in self.besides
            and value not in self.only.get(key, _OFF)
        ]


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
