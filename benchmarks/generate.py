"""Compare the cost of a late token of a text with an early one's, with a cache and without.

    python benchmarks/generate.py [--turns N] [--table.key=value ...]

prints one JSON line for the model of train.toml, 512 wide, on one process. "cache": time of the 200th
token over that of the 20th, each with the keys and values of all tokens before it. "whole_text": the
same where every token runs the whole text again. "window_..." are for a window of 64 tokens. Each of
the two tokens stands for its N neighbours: texts of both lengths grow by a token in turns, so that a
machine whose speed drifts slows both alike, and a ratio is the median over pairs.
"cache_over_whole_text": time of the 200th token with a cache over that without.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from compose import init_mesh
from compose.build import build
from compose.cli.command_line import parse
from compose.composition import Composition
from compose.train.processes import process_group
from compose.train.sampling import Cache, next_logits, open_cache

TRAIN_TOML = str(Path(__file__).parent.parent / "train.toml")
EARLY, LATE = 20, 200
WINDOW = 64
KEYS = ["--model.dim=512", "--model.hidden_dim=1536"]


def seconds(composition: Composition, cached: bool, turns: int) -> list[tuple[float, float]]:
    """The times of the next token of a short text and of a long one, for each of their neighbours."""
    text = [i * i % 250 for i in range(LATE + turns)]
    starts = [length - turns // 2 for length in (EARLY, LATE)]
    caches: list[Cache | None] = [None, None]
    if cached:
        caches = [open_cache(composition, "on") for _ in starts]
        for start, cache in zip(starts, caches, strict=True):
            next_logits(composition, text[: start - 1], cache)
    results = []
    for turn in range(turns):
        pair = []
        for start, cache in zip(starts, caches, strict=True):
            begin = time.perf_counter()
            next_logits(composition, text[: start + turn], cache)  # the result is on the CPU
            pair.append(time.perf_counter() - begin)
        results.append((pair[0], pair[1]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--turns", type=int, default=20, help="neighbours of each token")
    arguments, keys = parser.parse_known_args()
    result: dict[str, object] = {"benchmark": "generate"}
    late: dict[str, float] = {}
    jobs = {
        prefix: parse([TRAIN_TOML, *KEYS, f"--model.window={window}", *keys], "generate.py").job
        for prefix, window in (("", 0), ("window_", WINDOW))
    }
    with process_group(jobs[""].config) as device:
        for prefix, job in jobs.items():
            composition = build(job, init_mesh(job.degrees, device.type), device)
            for name, cached in (("cache", True), ("whole_text", False)):
                seconds(composition, cached, 2)  # warm up
                pairs = seconds(composition, cached, arguments.turns)
                result[prefix + name] = round(statistics.median(b / a for a, b in pairs), 3)
                late[prefix + name] = statistics.median(b for _, b in pairs)
            ratio = late[f"{prefix}cache"] / late[f"{prefix}whole_text"]
            result[f"{prefix}cache_over_whole_text"] = round(ratio, 3)
        result |= {
            "ms": round(1e3 * late["cache"], 2),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
