"""The output projection with its loss in chunks of tokens, against whole logits: time and peak memory.

    python benchmarks/loss.py [--device cuda] [--tokens T] [--dim D] [--vocab V] [--dtype bfloat16]

prints one JSON line for each chunk size: forward and backward in chunks over the same with whole logits
(time as a ratio, the two taking turns; bytes allocated at the peak beside inputs and weight), and the
errors of the weight's gradient, against float64 in the first rows.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from compose.ops.cross_entropy import chunked_cross_entropy, cross_entropy

TURNS = 5
ROWS = 64  # of the weight, whose gradient is held against float64

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy((hidden @ weight.T)[None], targets[None])


def in_chunks(chunk: int) -> Loss:
    return lambda hidden, weight, targets: chunked_cross_entropy(hidden, weight, targets, chunk)[0]


def step(loss: Loss, given: list[Tensor]) -> list[Tensor]:
    """The gradients of the mean loss, of hidden states and weight."""
    value = loss(given[0], given[1], given[2]) / len(given[2])
    return list(torch.autograd.grad(value, given[:2]))


def peak_bytes(loss: Loss, given: list[Tensor]) -> int:
    """Most bytes allocated and not yet freed during a step, by the profiler; gradients count."""
    if given[0].is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(loss, given)
        return torch.cuda.max_memory_allocated() - before
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(profile_memory=True, activities=cpu) as trace:
        step(loss, given)
    live = peak = 0
    for event in trace.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()  # type: ignore[attr-defined]
            peak = max(peak, live)
    return peak


def seconds(loss: Loss, given: list[Tensor]) -> float:
    start = time.perf_counter()
    step(loss, given)
    if given[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def exact_rows(given: list[Tensor]) -> Tensor:
    """The gradient of the weight's first ROWS rows, in float64, a piece of the tokens at a time."""
    weight, total = given[1].detach().double(), None
    for hidden, targets in zip(given[0].detach().split(256), given[2].split(256), strict=True):
        logits = hidden.double() @ weight.T
        gradient = (logits[:, :ROWS] - logits.logsumexp(1, keepdim=True)).exp()
        gradient -= (targets[:, None] == torch.arange(ROWS, device=targets.device)).double()
        part = gradient.T @ hidden.double()
        total = part if total is None else total + part
    assert total is not None
    return total / len(given[2])


def error(loss: Loss, given: list[Tensor], exact: Tensor) -> float:
    result = step(loss, given)[1][:ROWS].double()
    return float((result - exact).norm() / exact.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=16_000)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tokens, dim, vocab = arguments.tokens, arguments.dim, arguments.vocab
    like = {"device": arguments.device, "dtype": getattr(torch, arguments.dtype)}
    # Targets among the first rows too: those are compared.
    given = [
        torch.randn(tokens, dim, **like).requires_grad_(),
        (torch.randn(vocab, dim, **like) * dim**-0.5).requires_grad_(),
        torch.randint(vocab, (tokens,), device=arguments.device),
    ]
    given[2][: tokens // 4] %= ROWS
    exact = exact_rows(given)
    whole_bytes, whole_error = peak_bytes(whole, given), error(whole, given, exact)
    for chunk in sorted({max(1, tokens // parts) for parts in (32, 16, 8, 4, 2, 1)}):
        loss = in_chunks(chunk)
        turns = [(seconds(loss, given), seconds(whole, given)) for _ in range(TURNS + 1)][1:]
        result = {
            "benchmark": "loss",
            "tokens": tokens,
            "chunk": chunk,
            "time_to_whole": round(statistics.median(a / b for a, b in turns), 3),
            "whole_ms": round(1e3 * statistics.median(b for _, b in turns), 2),
            "peak_bytes": peak_bytes(loss, given),
            "whole_peak_bytes": whole_bytes,
            "error": error(loss, given, exact),
            "whole_error": whole_error,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
