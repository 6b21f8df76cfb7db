"""Token sets and chats, made for tests."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from compose.config.tables import Config, Data
from tests.support.helpers import make_config

TOKENS = np.arange(40, dtype=np.uint16)
ENDS = [np.array([9, 20]), np.array([5, 20])]


CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "2 + 2? <|im_end|> "},
    {"role": "assistant", "content": "<think>count</think>4"},
    {"role": "user", "content": "naïve ½?"},
    {"role": "assistant", "content": "yes  "},
]


def token_set(folder: Path, kind: str = "text", **changes: Any) -> Path:
    """A token set of two shards. changes: of its manifest; ``shards__0__name="x"`` reaches inside."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(2):
        TOKENS[20 * number : 20 * number + 20].tofile(folder / f"tokens-0000{number}.bin")
        ENDS[number].astype("<i8").tofile(folder / f"ends-0000{number}.bin")
        np.ones(20, np.uint8).tofile(folder / f"trained-0000{number}.bin")
    manifest: dict[str, Any] = {
        "format": 1,
        "kind": kind,
        "dtype": "<u2",
        "tokenizer": {"sha256": "0a" * 32, "vocab_size": 50, "end": 49},
        "tokens": 40,
        "documents": 4,
        "sources": [],
        "added": True,
        "rows": 4,
        "shards": [{"name": f"0000{n}", "tokens": 20, "documents": 2} for n in range(2)],
    }
    for place, value in changes.items():
        *above, last = [int(word) if word.isdigit() else word for word in place.split("__")]
        inner: Any = manifest
        for word in above:
            inner = inner[word]
        if value is None:
            del inner[last]
        else:
            inner[last] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def sets_of(**keys: Any) -> Config:
    """A config whose ``[data]`` is this alone."""
    data = Data(**keys)
    return dataclasses.replace(make_config(1, train__seq_len=4), data=data)


def chats(path: Path, count: int, seed: int = 0) -> Path:
    """Chats of random lengths, the text of each its own number again and again."""
    chance = random.Random(seed)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{n} " * chance.randint(1, 9)},
                {"role": "assistant", "content": f"{n}." * chance.randint(1, 9)},
            ]
        }
        for n in range(count)
    ]
    rows += [{"messages": [{"role": "user", "content": "no reply"}]}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path
