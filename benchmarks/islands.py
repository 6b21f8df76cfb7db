"""Islands against data parallel: the loss that a run ends with, and the speed over a slow link.

    python benchmarks/islands.py [--steps 600] [--seeds 3] [--only NAME ...] [--runs FOLDER]
                                 [--ranks 2] [--keys KEY=VALUE ...]
    python benchmarks/islands.py --speed [--mbit 100] [--every 30] [--rounds 3] [--turns 2]

The first prints one JSON line for each kind of run of a small model, all with the same samples in a
step: the validation loss at the end over that of data parallel with the same seed, less one. All begin
with the same half of a data-parallel run. In "2 islands, half missed" the second island misses every
other exchange.

The second trains two islands of one rank, whose link lets so many bits pass in a second, and the same
without exchanges in turn. It prints the speed with exchanges over the speed without, for exchanges that
training waits for and for those of one fragment at a time, which it does not wait for. A link is slowed
down by waiting: an exchange ends when its bytes would have left this rank at that rate. A link of 0
Mbit/s is not slowed down.
"""

import argparse
import json
from functools import partial
from pathlib import Path

from training_runs import Study, in_folder, losses, parser, run

EVERY = 30


def islands(count: int, *keys: str) -> list[str]:
    shared = "parallel.dp_shard=-1"  # by the ranks of an island
    return [f"parallel.dp_replicate={count}", shared, f"outer.every={EVERY}", *keys]


STREAMING = ("outer.fragments=1", "outer.delay=2")
STUDY = Study(
    "islands",
    {
        "plain": [],
        "rounding": ["optimizer.eps=1.00001e-8"],
        "2 islands": islands(2),
        "4 islands": islands(4),
        "2 islands, int8": islands(2, "outer.dtype=int8"),
        "2 islands, e3m0": islands(2, "outer.dtype=e3m0"),
        "2 islands, top_k": islands(
            2, "outer.dtype=top_k", "outer.density=0.0625", "outer.lr=1", "outer.momentum=0"
        ),
        "2 islands, streaming": islands(2, *STREAMING),
        "2 islands, half missed": islands(2),
        "2 islands, mean": islands(2, "outer.lr=1", "outer.momentum=0"),
        "4 islands, mean": islands(4, "outer.lr=1", "outer.momentum=0"),
    },
    code={
        "2 islands, half missed": (
            "import compose.diloco.messages as e; e.WorkerExchange._present = lambda self, name, grace:"
            f" {{0}} if int(name.split('.')[0]) % {2 * EVERY} == 0 else {{0, 1}}"
        )
    },
    # Islands begin with a model that was trained for a while, as in the published runs.
    begins_together=True,
    # Islands of one rank; data parallel may be cut in any way.
    ranks={"4 islands": 4, "4 islands, mean": 4},
)
PACED = """
import time, compose.diloco.messages as e
real = e.WorkerExchange._run
def run(self, name, message, grace):
    begun, before = time.perf_counter(), self.sent
    found = real(self, name, message, grace)
    time.sleep(max(0.0, begun + (self.sent - before) * 8 / {rate} - time.perf_counter()))
    return found
e.WorkerExchange._run = run
"""


def speeds(runs: Path, given: argparse.Namespace) -> None:
    every, steps = given.every, given.every * given.rounds
    code = PACED.format(rate=given.mbit * 1e6 or 1e30)
    base = [f"train.steps={steps + 1}", "train.global_batch=4"]
    base += ["parallel.dp_replicate=2", "parallel.dp_shard=1"]
    kinds = {
        "waits": [f"outer.every={every}"],
        "streaming": [f"outer.every={every}", *STREAMING],
        "streaming, int8": [f"outer.every={every}", *STREAMING, "outer.dtype=int8"],
    }
    for name, keys in kinds.items():
        seconds, sent = [], 0.0
        for turn in range(given.turns):
            for which, extra in (("with", keys), ("without", [f"outer.every={10 * steps}"])):
                lines = run(runs / f"{name}-{which}-{turn}", 2, [*base, *extra], code)
                # The first round is the warm-up, and the last step is the end of all exchanges.
                timed = lines[every:steps]
                seconds.append(sum(1 / line["tokens_per_second"] for line in timed))
                sent = sum(line["outer"]["bytes"] for line in lines[:every]) if extra is keys else sent
        result = {
            "benchmark": "islands, speed",
            "run": name,
            "mbit": given.mbit,
            "every": every,
            "bytes_of_a_round": sent,
            "speed_over_none": round(sum(seconds[1::2]) / sum(seconds[::2]), 3),
        }
        print(json.dumps(result), flush=True)


def main() -> None:
    words = parser(STUDY)
    words.set_defaults(ranks=2)
    words.add_argument("--speed", action="store_true", help="measure the speed, not the loss")
    words.add_argument("--mbit", type=float, default=100, help="of the slow link, a second")
    words.add_argument("--every", type=int, default=EVERY, help="steps of a round, with --speed")
    words.add_argument("--rounds", type=int, default=3, help="with --speed")
    words.add_argument("--turns", type=int, default=2, help="runs of each kind, with --speed")
    given = words.parse_args()
    in_folder(given, partial(speeds if given.speed else partial(losses, STUDY), given=given))


if __name__ == "__main__":
    main()
