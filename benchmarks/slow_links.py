"""The time of a step over slow links, with coded messages and with plain ones, in turn.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/slow_links.py [--gbit 1] [--tokens 16]
                                             [--micro-batches 1] [--steps 5] [--eager] [--small]

prints one JSON line for each kind of messages: the median over steps of its time over that of plain
messages, ZeRO-3; the share of a plain step that messages take; and the same on links that are not
slowed down, where a step computes as much as it does in train.toml ("fast"). A link is slowed down
by waiting: a collective ends when its bytes would have left this rank at that rate. gloo is faster.
The steps of the codes are compiled, as with compile.mode, unless ``--eager`` is given.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import truediv
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from compose import (
    Comm,
    Composition,
    Options,
    Parallel,
    apply,
    forward_backward,
    init_mesh,
    init_weights,
)
from compose.compression.compressor import Compression
from compose.config.models import find_model
from compose.data.samples import random_batch
from compose.ops.torch_versions import ALL_GATHER, REDUCE_SCATTER

KINDS: dict[str, Comm] = {
    "int8, int8": Comm(weights="int8", gradients="int8"),
    "int4_diff, int4": Comm(weights="int4_diff", gradients="int4"),
    "int8, powersgd": Comm(weights="int8", gradients="powersgd"),
}
SLOW = {
    "vocab_size": 2048,
    "dim": 512,
    "n_layers": 4,
    "hidden_dim": 1408,
    "n_heads": 8,
    "n_kv_heads": 8,
}
FAST = {"vocab_size": 256, "dim": 128, "n_layers": 5, "hidden_dim": 336, "n_heads": 8, "n_kv_heads": 4}
SMALL = {"vocab_size": 512, "dim": 128, "n_layers": 2, "hidden_dim": 320, "n_heads": 4, "n_kv_heads": 4}


class Pace:
    """Waits as slow links would; ``seconds`` is what collectives took."""

    def __init__(self) -> None:
        self.rate, self.seconds = float("inf"), 0.0

    def wrap(self, call: Callable[..., Any], times: int, *args: Any, **more: Any) -> Any:
        """Call a collective, and return when its bytes would have left, so many times."""
        begun = time.perf_counter()
        result = call(*args, **more)
        whole = max(x.nbytes for x in (*args, *more.values()) if isinstance(x, torch.Tensor))
        ranks = dist.get_world_size()
        ends = begun + times * whole * (ranks - 1) / ranks / self.rate
        time.sleep(max(0.0, ends - time.perf_counter()))
        self.seconds += time.perf_counter() - begun
        return result


@contextmanager
def paced(pace: Pace) -> Iterator[None]:
    """Let collectives of data parallel take their time; an all-reduce sends all of it twice."""
    times = {ALL_GATHER: 1, REDUCE_SCATTER: 1, "all_to_all_single": 1, "all_reduce": 2}
    with ExitStack() as stack:
        for name, count in times.items():
            slowed = partial(pace.wrap, getattr(dist, name), count)
            stack.enter_context(mock.patch.object(dist, name, slowed))
        yield


def compressed(options: Options, mesh: DeviceMesh, compiled: bool) -> Compression | None:
    """Replace compose.compression.compress, which compiles only where the model is."""
    zero = options.parallel.zero
    return Compression(options.comm, mesh, zero, compiled) if options.comm.codes else None


def made(shape: dict[str, int], comm: Comm) -> Composition:
    """A Llama of this shape over all ranks."""
    folder = find_model("llama")
    config = folder.Config(**shape)
    ranks = dist.get_world_size()
    parallel = Parallel(dp_shard=ranks)
    mesh = init_mesh(parallel)
    with torch.device("meta"):
        model: Any = folder.Model(config)
    composition = apply(model, folder.plan(config, parallel), mesh, Options(parallel, comm=comm))
    init_weights(composition, model.init_parameter, 0, torch.device("cpu"))
    return composition


def stepper(shape: dict[str, int], comm: Comm, tokens: int, count: int) -> Callable[[], None]:
    """A step of that model on so many micro-batches of so many tokens of each rank."""
    composition = made(shape, comm)
    optimizer = torch.optim.AdamW(composition.model.parameters(), lr=1e-3, fused=True)
    batch = random_batch(count, tokens, shape["vocab_size"], seed=dist.get_rank())

    def step() -> None:
        forward_backward(composition, batch, micro_batch=1)
        optimizer.step()
        optimizer.zero_grad()

    return step


def turns(
    pace: Pace, one: Callable[[], None], other: Callable[[], None], steps: int
) -> tuple[float, float]:
    """Median of one's time over the other's, and the share of messages in the other's."""
    ratios, shares = [], []
    for number in range(steps + 2):
        times = []
        for run in (one, other):
            dist.barrier()
            pace.seconds, begun = 0.0, time.perf_counter()
            run()
            times.append(time.perf_counter() - begun)
        if number >= 2:
            ratios.append(truediv(*times))
            shares.append(pace.seconds / times[1])
    return statistics.median(ratios), statistics.median(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gbit", type=float, default=1.0, help="of the slow link, a second")
    parser.add_argument("--tokens", type=int, default=16, help="of a rank's step on the slow link")
    parser.add_argument("--micro-batches", type=int, default=1, help="of such a step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="do not compile the codes")
    parser.add_argument("--small", action="store_true", help="a model for a test of this program")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    pace = Pace()
    tokens = {"slow": arguments.tokens, "fast": 2048}
    shapes = {"slow": SLOW, "fast": FAST}
    if arguments.small:
        tokens, shapes = dict.fromkeys(tokens, 32), dict.fromkeys(shapes, SMALL)
    compress = partial(compressed, compiled=not arguments.eager)
    with paced(pace), mock.patch("compose.compression.compress", compress):
        for name, comm in KINDS.items():
            results = {}
            for link, rate in (("slow", arguments.gbit * 1e9 / 8), ("fast", float("inf"))):
                pace.rate = rate
                count = arguments.micro_batches if link == "slow" else 1
                plain = stepper(shapes[link], Comm(), tokens[link], count)
                coded = stepper(shapes[link], comm, tokens[link], count)
                results[link] = turns(pace, coded, plain, arguments.steps)
            result = {
                "benchmark": "slow_links",
                "messages": name,
                "gbit": arguments.gbit,
                "tokens": tokens["slow"],
                "micro_batches": arguments.micro_batches,
                "compiled": not arguments.eager,
                "over_plain": round(results["slow"][0], 3),
                "share_of_messages": round(results["slow"][1], 3),
                "fast_over_plain": round(results["fast"][0], 3),
            }
            if dist.get_rank() == 0:
                print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
