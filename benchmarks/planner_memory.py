"""The planner's peak of memory against what ranks on CPUs really allocate, for drawn configurations.

    python benchmarks/planner_memory.py [--rows N] [--seed S] [--only ROW ...]

prints one JSON line for each configuration and rank, and then one with the largest errors. A row is the
second optimizer step: forward, backward, clipping and the optimizer, after a first one has made all
that stays. Measured bytes are those of benchmarks/allocations.py. Two predictions stand beside them:

    table    one record of the rank with all layers and micro-batches, in the schedule's own order; of
             the first rank of each pipeline rank, and of the last of all
    replay   what `python -m compose plan` does: few layers and micro-batches are recorded, and the
             schedule's table puts them in order (compose/planner/estimate.py); of each pipeline rank,
             beside the measured bytes of its first rank

Categories are those of compose/profiling/memory.py at the measured peak, and the planner's at its own:

    weights, gradients, optimizer    the same in both
    activations                      activations and other | activations, temporaries and logits
    communication                    communication | gathered and communication

The error of a category is its difference over the bytes of the category, or over 5% of the peak if the
category has less than that. Two moments of a step may hold nearly as much, and then either may be the
peak. So categories are compared at the moment, among those within 1.5% of the predicted peak, that is
nearest to the measured one.

What is assumed: each sample is one document, and the load of experts is even (a router's choice is
replaced by one in turn); torch.compile is off.
"""

import argparse
import gc
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from allocations import Allocations, mark
from memory import PIECE, held
from planner_rows import Keys, draw, job_of
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from compose import clip_grad_norm_, forward_backward, init_mesh
from compose.build import build, build_optimizer, loss_function
from compose.config.job import Job
from compose.data.samples import random_batch
from compose.memory.activation_offload import ActivationOffload
from compose.ops.tensors import local_tensor
from compose.optim import offload
from compose.optim.offload import OffloadedAdamW
from compose.planner import estimate, memory
from compose.planner.cluster import Cluster, load_cluster
from compose.planner.few_layers import runs_of
from compose.planner.memory import categorize
from compose.planner.record_pool import RecordPool, RecordRequest, step_of
from compose.planner.trace import RankStep, trace
from compose.profiling.summary import allocations
from compose.profiling.trace import NOTED, Trace, step_span

sys.path.insert(0, str(Path(__file__).parents[1]))  # models/ is of the checkout

from models.layers.router import Router

GROUPS = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "other", "temporaries", "logits"),
    "communication": ("communication", "gathered"),
}
HOST = "host"
Peaks = list[tuple[int, dict[str, int]]]
"""Bytes in all and by category at the peak, and at other moments that hold nearly as much."""
NEAR = 0.015


def even(router: Router, real: Callable[..., tuple[Tensor, Tensor]], scores: Tensor) -> Any:
    """Return a router's choice, replaced by experts in turn."""
    experts, margin = real(router, scores)
    numbers = torch.arange(experts.numel()) % router.config.n_experts
    experts.copy_(numbers.view(experts.shape))
    return experts, margin


class Noted:
    """The categories of addresses at some times, and the marks of these times in the trace."""

    def __init__(self) -> None:
        self.estimate: list[dict[int, str]] = []

    def note(self, tensors: Any, category: str) -> None:
        """Note a category of what tensors hold."""
        plain = [local_tensor(getattr(t, "_local_tensor", t)) for t in tensors]
        self.estimate.append({t.untyped_storage().data_ptr(): category for t in plain})
        with torch.profiler.record_function(NOTED):
            pass


def measure(keys: Keys, ranks: int) -> Peaks:
    """Return the peak of a second step, of this rank; every rank calls it."""
    job = job_of(keys, ranks)
    device, config, noted = torch.device("cpu"), job.config, Noted()
    seen, train = Allocations(device), config.train
    mesh = init_mesh(config.parallel, device.type)
    choose = Router.choose
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(mock.patch.object(offload, "CHUNK", PIECE))
        stack.enter_context(mock.patch.object(Router, "choose", lambda r, s: even(r, choose, s)))
        stack.enter_context(seen.watched())
        stack.enter_context(copies_noted(noted))
        composition = build(job, mesh, device)
        optimizer = build_optimizer(composition, job, folder=scratch)
        count = job.micro_batches * train.micro_batch
        batch = random_batch(count, train.seq_len, config.model.config.vocab_size, 0)
        batch["document_ids"].zero_()
        batch["positions"].copy_(torch.arange(train.seq_len).expand(count, -1))
        loss = loss_function(config)
        for number in (1, 2):
            if number == 2:
                gc.collect()
                state = [v for s in optimizer.state.values() for v in s.values()]
                noted.note(composition.model.buffers(), "other")
                noted.note((p for _, p in composition.named_parameters()), "weights")
                parts = getattr(optimizer, "parts", [optimizer])
                offloaded = [part for part in parts if isinstance(part, OffloadedAdamW)]
                slots = [t for part in offloaded for s in part.slots for t in s.host]
                noted.note([*(v for v in state if isinstance(v, Tensor)), *slots], "optimizer")
                host = held(config, composition.model, optimizer)
                noted.note(host, HOST)
                seen.begin(host)
            with step_span(number):
                forward_backward(composition, batch, micro_batch=train.micro_batch, loss_function=loss)
                gradients = (p.grad for _, p in composition.named_parameters() if p.grad is not None)
                noted.note(gradients, HOST if config.parallel.offload == "cpu" else "gradients")
                clip_grad_norm_(composition, train.max_norm)
                optimizer.step()
                optimizer.zero_grad()
        gc.collect()
    (_, parts), *others = by_category(seen, noted)
    return [(seen.peak(), parts), *others]


@contextmanager
def copies_noted(noted: Noted) -> Iterator[None]:
    """Note as host memory what would be there if there were a GPU, from when it is made.

    That is what activation offload copies out, and gradients of offloaded parameters once FSDP has
    reduced them. The marks of benchmarks/allocations.py are made for both.
    """
    out_of, post_backward = ActivationOffload.out_of, FSDPParamGroup.post_backward
    known: dict[int, int] = {}

    def copied(offload: ActivationOffload, tensor: Tensor) -> tuple[Tensor, Any]:
        copy, stored = out_of(offload, tensor)
        noted.note([copy], HOST)
        return copy, stored

    def reduced(group: Any, *args: Any) -> None:
        post_backward(group, *args)
        for parameter in group.fsdp_params:
            gradient = parameter.sharded_param.grad
            if not parameter.offload_to_cpu or gradient is None:
                continue
            storage = gradient._local_tensor.untyped_storage()
            if storage._cdata not in known:
                known[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, known.pop, storage._cdata)
                mark("out", storage.nbytes())
                weakref.finalize(storage, mark, "gone", storage.nbytes())
            noted.note([gradient], HOST)

    with (
        mock.patch.object(ActivationOffload, "out_of", copied),
        mock.patch.object(FSDPParamGroup, "post_backward", reduced),
    ):
        yield


def by_category(seen: Allocations, noted: Noted) -> Peaks:
    """Return the bytes of each category at the peak of the second step, and near it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        seen.trace.export_chrome_trace(str(file))
        content = json.loads(file.read_text())
    # A mark that is made within a mode ends after it, and would not contain what follows.
    within = [e for e in content["traceEvents"] if e["name"] != "PythonDispatchMode"]
    trace_of = Trace({"traceEvents": within})
    begin = next(r.start for r in trace_of.ranges if r.name.startswith("mark begin"))
    edges: list[tuple[float, int, str]] = []
    for each in allocations(trace_of, noted.estimate):
        edges.append((each.start, each.bytes, each.category))
        edges.append((each.end, -each.bytes, each.category))
    now: Counter[str] = Counter()
    moments = []
    for time, change, category in sorted(edges, key=lambda edge: edge[0]):
        now[category] += change
        if time >= begin:
            moments.append((now.total() - now[HOST], Counter(now), Counter()))
    return near(max(size for size, _, _ in moments), moments)


def grouped(found: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of each of GROUPS."""
    return {name: sum(found.get(c, 0) for c in parts) for name, parts in GROUPS.items()}


def one_rank(rank: int, ranks: int, port: int, keys: Keys) -> list[Peaks]:
    """Return the peak of every rank."""
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, measure(keys, ranks))
    return everyone


def forked(works: list[Callable[[], Any]], limit: float = 300) -> list[Any]:
    """Return what works return, each in a process of its own, all at the same time."""
    context = multiprocessing.get_context("fork")

    def run(work: Callable[[], Any], sender: Any) -> None:
        torch.set_num_threads(1)
        try:
            sender.send((True, work()))
        except BaseException as error:
            sender.send((False, f"{error!r}\n{traceback.format_exc()}"))
        finally:
            sender.close()
            os._exit(0)  # a thread of gloo may still hold a tensor

    running = []
    for work in works:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=run, args=(work, sender))
        process.start()
        sender.close()
        running.append((process, receiver))
    results = []
    for _, receiver in running:
        if not receiver.poll(limit):
            results.append((False, "took too long"))
            limit = 0
        else:
            try:
                results.append(receiver.recv())
            except EOFError:
                results.append((False, "ended without a result"))
    for process, _ in running:
        process.kill()
        process.join()
    for good, value in results:
        if not good:
            raise RuntimeError(value)
    return [value for _, value in results]


def measured(keys: Keys, ranks: int) -> list[Peaks]:
    """Return the peak of each rank, run in new processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return forked([lambda r=r: one_rank(r, ranks, port, keys) for r in range(ranks)])[0]


def from_table(keys: Keys, ranks: int, rank: int, stream: Any) -> Peaks:
    """Return the planner's peaks of a rank, from a record of the whole step."""
    job, objects = job_of(keys, ranks), None if stream is None else [stream]
    step = RankStep(job, rank, micro_batches=job.micro_batches, device_type="cpu", objects=objects)
    with mock.patch.object(offload, "CHUNK", PIECE):
        one = trace(step)
    categorize(one.record, job.resolved.output)
    live, size, totals = Counter(), 0, []
    for _, place, change in one.record.changes:
        size += change
        live[one.record.allocations[place].category] += change
        totals.append((size, Counter(live), Counter()))
    return near(max(size for size, _, _ in totals), totals)


def near(size: int, moments: Iterable[tuple[int, Counter[str], Counter[str]]]) -> Peaks:
    """Return the moments that hold nearly as much as the peak, the peak first; alike ones once."""
    results = [(n, grouped(live + above)) for n, live, above in moments if n >= (1 - NEAR) * size]
    alike = {
        tuple(parts.values()): (n, parts) for n, parts in sorted(results, key=lambda each: each[0])
    }
    return sorted(alike.values(), key=lambda each: -each[0])


def predicted(keys: Keys, ranks: int) -> tuple[dict[int, Peaks], list[Peaks]]:
    """Return the planner's peaks, from records of some ranks by rank, and by replay."""
    job, cluster = job_of(keys, ranks), load_cluster("cpu")
    rows = estimate.schedule_rows(job)
    with mock.patch.object(offload, "CHUNK", PIECE):
        costs = estimate.rank_costs(job, cluster, rows)
        stream = stream_of(job, cluster) if job.degrees.pp > 1 else None
    replay = []
    for of_rank, row in zip(costs, rows, strict=True):
        size, _ = memory.peak(of_rank.memory, row, job.micro_batches)
        replay.append(near(size, memory.bytes_over_step(of_rank.memory, row, job.micro_batches)))
    each = ranks // job.degrees.pp
    with RecordPool(2) as pool:
        for rank in {*range(0, ranks, each), ranks - 1}:
            pool.submit(rank, from_table, keys, ranks, rank, None if rank < each else stream)
        return dict(pool.results()), replay


def stream_of(job: Job, cluster: Cluster) -> Any:
    """Return shape and type of what a pipeline's stages send."""
    with RecordPool(1) as pool:
        pool.submit("", _stream, job, cluster)
        [(_, result)] = pool.results()
    return result


def _stream(job: Job, cluster: Cluster) -> Any:
    runs = runs_of(job)
    asked = RecordRequest(job, cluster, None, 0, runs and runs.fewest(), None)
    return trace(step_of(asked, 0)).broadcast[0]


def errors(found: Peaks, real: Peaks) -> dict[str, Any]:
    """Return the relative error of the peak, and the largest of a category.

    Categories are compared at the two moments near the peaks that are most alike.
    """
    peak = real[0][0]

    def worst(shares: Mapping[str, int], parts: Mapping[str, int]) -> tuple[float, str]:
        by = {name: (shares[name] - parts[name]) / max(parts[name], 0.05 * peak) for name in GROUPS}
        return max(((error, name) for name, error in by.items()), key=lambda each: abs(each[0]))

    pairs = [(shares, parts) for _, shares in found for _, parts in real]
    shares, parts = min(pairs, key=lambda pair: abs(worst(*pair)[0]))
    error, name = worst(shares, parts)
    return {
        "bytes": found[0][0],
        "error": round(found[0][0] / peak - 1, 5),
        "category_error": round(error, 4),
        "category": name,
        "by_category": shares,
    }


def row_lines(keys: Keys, ranks: int) -> list[dict[str, Any]]:
    """Return the lines of a row, one for each rank."""
    real = measured(keys, ranks)
    table, replay = predicted(keys, ranks)
    each = ranks // len(replay)
    lines = []
    for rank in range(ranks):
        peak, parts = real[rank][0]
        line: dict[str, Any] = {"rank": rank, "measured": peak, "by_category": parts}
        if rank in table:
            line["table"] = errors(table[rank], real[rank])
        if rank % each == 0:
            line["replay"] = errors(replay[rank // each], real[rank])
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="number of the first row")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of rows")
    arguments = parser.parse_args()
    numbers = arguments.only or range(arguments.seed, arguments.seed + arguments.rows)
    worst: dict[str, tuple[float, int]] = {}
    for number in numbers:
        ranks, keys, _ = draw(number)
        row = {"benchmark": "planner_memory", "row": number, "ranks": ranks}
        try:
            lines = row_lines(keys, ranks)
        except Exception as error:
            print(json.dumps({**row, "keys": keys, "failed": repr(error)}), flush=True)
            worst["failed"] = (worst.get("failed", (0, 0))[0] + 1, number)
            continue
        for i, line in enumerate(lines):
            print(json.dumps(row | ({"keys": keys} if i == 0 else {}) | line), flush=True)
            for how in ("table", "replay"):
                for what in ("error", "category_error"):
                    if how in line and abs(line[how][what]) >= worst.get(f"{how} {what}", (-1, 0))[0]:
                        worst[f"{how} {what}"] = abs(line[how][what]), number
    print(json.dumps({"benchmark": "planner_memory", "rows": len(numbers), "largest": worst}))


if __name__ == "__main__":
    sys.exit(main())
