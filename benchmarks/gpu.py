"""What one GPU makes of a training step, beside what it can do: one command, under nine minutes.

    python benchmarks/gpu.py [--budget SECONDS] [--device cpu --tiny]

prints JSON lines. First what the device itself reaches: products of matrices in bfloat16 and float8
("gpu_matmul"), and copies ("gpu_copy"). Then rows of training ("gpu"), the most important first, of
Llama 1b and 3b in full and of blocks of 8b's shape, as many as fit with all their state:

    eager, compiled        compose in bfloat16, from Config to Trainer.step, on a file of random tokens;
                           compiled is compile.mode = "block"
    tensorwise, rowwise    compiled, with that recipe of precision.float8
    bare                   plain PyTorch: the same model, its blocks compiled, a loop written by hand
                           with the same arithmetic, and nothing of compose

A row is tried without recomputation and, where memory does not suffice, with all layers recomputed.
State takes 18 bytes a parameter (weights, gradients and AdamW's means in float32, weights in bfloat16):
22 GB for 1b, 58 for 3b, 66 for 12 of 8b's layers with its embedding and output. All of 8b, 145, leaves
no room for activations on a device of 150. A bare row takes 20: its gradients are in bfloat16 first.

``mfu`` is of the data sheet's rate in bfloat16, ``of_ceiling`` of the best product in bfloat16 that was
measured, both where float8 is used too, so that rows compare. ``first_step`` is in seconds, with none
of Inductor's files there, and ``first_step_warm`` with all, but the row's graphs to be traced anew.

A row that fails says why, and those after it go on; one for which the budget leaves no time is said to
be skipped. The last line ("gpu_aims") holds three figures against their aims; null is not measured.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from compose import ConfigError, init_mesh
from compose.commands.cli import Command, parse
from compose.config import Config
from compose.registry import find_model
from compose.runtime.processes import process_group
from compose.train.metrics import peak_flops
from compose.train.trainer import Trainer

TRAIN_TOML = str(Path(__file__).parent.parent / "train.toml")
STEPS = 4  # timed in each row
MICRO_BATCHES = 4  # in a step


class Sizes(NamedTuple):
    """matmul: (M, N, K) of products. copy: bytes. tokens: of a micro-batch, by preset. vocab_size: of
    the presets. guess: seconds of a row, before there has been one. keys: over those of the preset."""

    matmul: list[tuple[int, int, int]]
    copy: int
    tokens: dict[str, int]
    vocab_size: int
    guess: float
    keys: list[str]


LAYERS = {"8b": 12}  # of a preset that is not run in full
FULL = Sizes(
    # Square ones, and the feed-forward's of 8b, 3b and 1b.
    [(2**n,) * 3 for n in (11, 12, 13, 14)]  # type: ignore[misc]
    + [(8192, 14_336, 4096), (8192, 4096, 14_336), (8192, 8192, 3072), (16_384, 8192, 2048)],
    2**30,
    {"8b": 8192, "3b": 8192, "1b": 16_384},
    128_256,
    60.0,
    [],
)
SHAPE = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 128, "n_layers": 2, "vocab_size": 256}
TINY = Sizes(
    [(64, 64, 64), (64, 128, 32)],
    2**16,
    {"8b": 64},
    256,
    0.0,
    [f"--model.{name}={size}" for name, size in SHAPE.items()],
)


class Case(NamedTuple):
    preset: str
    seq_len: int
    how: str


def cases(tiny: bool) -> list[Case]:
    """The rows, most important first."""
    hows = ("compiled", "bare", "tensorwise", "rowwise", "eager")
    if tiny:
        return [Case("8b", 32, how) for how in hows]
    rest = [("1b", 4096), ("3b", 4096), ("8b", 4096), ("1b", 8192), ("3b", 8192)]
    return [Case("8b", 8192, how) for how in hows] + [
        Case(preset, seq_len, how)
        for group in (hows[:2], hows[4:], hows[2:4])
        for preset, seq_len in rest
        for how in group
    ]


def show(benchmark: str, **found: Any) -> None:
    rounded = {name: float(f"{x:.4g}") if isinstance(x, float) else x for name, x in found.items()}
    print(json.dumps({"benchmark": benchmark, **rounded}), flush=True)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - start


def rate(work: Callable[[], object], amount: float, device: torch.device) -> float:
    """``amount`` per second, of ten calls at once: the median of five such turns, after a first."""

    def turn() -> None:
        for _ in range(10):
            work()

    return 10 * amount / median([seconds(turn, device) for _ in range(6)][1:])


def measure_matmul(sizes: Sizes, device: torch.device) -> float:
    """Show what products reach; the best in bfloat16, FLOP/s."""
    best = 0.0
    for m, n, k in sizes.matmul:
        a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        b = torch.randn(n, k, device=device, dtype=torch.bfloat16)
        flops = 2.0 * m * n * k
        reached = rate(lambda a=a, b=b: a @ b.T, flops, device)
        best = max(best, reached)
        small = _float8(a, b, flops, device)
        show("gpu_matmul", m=m, n=n, k=k, bfloat16_tflops=reached / 1e12, **small)
    show("gpu_ceiling", bfloat16_tflops=best / 1e12)
    return best


def _float8(a: Tensor, b: Tensor, flops: float, device: torch.device) -> dict[str, Any]:
    """The same product in float8, scaled as a whole, or why there is none."""
    one = torch.ones((), device=device)
    x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)

    def product() -> Tensor:
        return torch._scaled_mm(x, y.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    try:
        return {"float8_tflops": rate(product, flops, device) / 1e12}
    except Exception as error:  # by device and version: RuntimeError, NotImplementedError, ValueError
        return {"float8_tflops": None, "float8": _line(error)}


def measure_copy(sizes: Sizes, device: torch.device) -> None:
    """Show bytes per second: of a copy on the device, counted once read and once written, and to it."""
    source = torch.ones(sizes.copy, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.ones(sizes.copy, dtype=torch.uint8, pin_memory=device.type == "cuda")
    on_device = rate(lambda: target.copy_(source), 2 * sizes.copy, device)
    from_host = rate(lambda: target.copy_(host, non_blocking=True), sizes.copy, device)
    show("gpu_copy", on_device_gb_per_s=on_device / 1e9, from_host_gb_per_s=from_host / 1e9)


class Bare:
    """The loop that one would write by hand for one device."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.train, self.shape, self.device = config.train, config.model.config, device
        with device:
            self.model = find_model("llama").Model(self.shape)
        self.masters = [p.detach().clone() for p in self.model.parameters()]
        self.params: list[Tensor] = list(self.model.to(torch.bfloat16).parameters())
        for block in self.model.get_submodule("layers").children():
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self) -> float:
        samples = (self.train.global_batch, self.train.seq_len + 1)
        tokens = torch.randint(self.shape.vocab_size, samples).to(self.device)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        total = torch.zeros((), device=self.device)
        size = self.train.micro_batch
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            logits = self.model(x).flatten(0, 1).float()
            loss = F.cross_entropy(logits, y.flatten(), reduction="sum") / targets.numel()
            del logits  # or it would live on while the next micro-batch makes its own
            loss.backward()
            total += loss.detach()
            self._accumulate()
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.masters)
        return total.item()

    def _accumulate(self) -> None:
        """In float32, and for every micro-batch at once."""
        held = [master.grad for master in self.masters if master.grad is not None]
        found = [p.grad for p in self.params if p.grad is not None]
        if held:
            torch._foreach_add_(held, found)
        for master, p in zip(self.masters, self.params, strict=True):
            if not held and p.grad is not None:
                master.grad = p.grad.float()
            p.grad = None


class Rows:
    """Trains rows, and keeps what the aims ask for. ceiling: FLOP/s, as measured."""

    def __init__(
        self, tiny: bool, mesh: DeviceMesh, device: torch.device, ceiling: float, folder: Path
    ) -> None:
        self.sizes, self.mesh, self.device = TINY if tiny else FULL, mesh, device
        self.ceiling, self.folder, self.count = ceiling, folder, 0
        self.speeds: dict[Case, float] = {}
        self.of_ceiling: list[float] = []
        name = torch.cuda.get_device_name() if device.type == "cuda" else ""
        self.peak = peak_flops(name, "bfloat16")

    def command(self, case: Case, recompute: str) -> Command:
        micro_batch = self.sizes.tokens[case.preset] // case.seq_len
        self.count += 1
        # Files of its own: else a row would find what another has compiled.
        for cache in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            os.environ[cache] = f"{self.folder}/{self.count}.{cache}"
        keys = [
            f"--run.dir={self.folder}/{self.count}",
            f"--run.device={self.device.type}",
            f"--model.preset={case.preset}",
            f"--data.path={self.folder}/tokens.npy",
            f"--train.seq_len={case.seq_len}",
            f"--train.micro_batch={micro_batch}",
            f"--train.global_batch={MICRO_BATCHES * micro_batch}",
            "--parallel.zero=2",  # whole through a step: nothing is saved by gathering from oneself
            "--precision.param=bfloat16",
            f"--activation_checkpoint.mode={recompute}",
            f"--compile.mode={'off' if case.how == 'eager' else 'block'}",
            "--metrics.tensorboard=false",
        ]
        if case.preset in LAYERS:
            keys.append(f"--model.n_layers={LAYERS[case.preset]}")
        if case.how in ("tensorwise", "rowwise"):
            keys.append(f"--precision.float8={case.how}")
        return parse([TRAIN_TOML, *keys, *self.sizes.keys], program="gpu.py", trains=True)

    def run(self, case: Case) -> dict[str, Any]:
        """What the row shows, be it why there is nothing."""
        if case.how in ("tensorwise", "rowwise") and not importlib.util.find_spec("torchao"):
            return {"not_available": "torchao is not installed"}
        result: dict[str, Any] = {}
        for recompute in ("none",) if case.how == "bare" else ("none", "full"):
            torch.compiler.reset()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                return {"recompute": recompute} | self._trained(case, self.command(case, recompute))
            except ConfigError as error:
                return {"not_available": _line(error)}
            except Exception as error:  # whatever it is, the other rows are still to be measured
                # Not all that want memory say so by its OutOfMemoryError: cuBLAS does not.
                result = {"recompute": recompute, "failed": f"{type(error).__name__}: {_line(error)}"}
        return result

    def _trained(self, case: Case, command: Command) -> dict[str, Any]:
        config = command.config
        shape, train = config.model.config, config.train
        if case.how == "bare":
            bare = Bare(config, self.device)
            model, step = bare.model, bare.step
        else:
            with contextlib.redirect_stdout(sys.stderr):  # the trainer greets
                trainer = Trainer(command.job, self.mesh, self.device, command.data)
                model, step = trainer.composition.model, trainer.step
        first, warm = seconds(step, self.device), None
        if case.how != "eager":
            torch.compiler.reset()
            warm = seconds(step, self.device)
        # All at once: what the host does for a step may run while the device is still at the last one.
        spent = seconds(lambda: [step() for _ in range(STEPS)], self.device)
        speed = STEPS * train.global_batch * train.seq_len / spent
        flops = speed * shape.flops_per_token(train.seq_len)
        self.speeds[case] = speed
        if (case.preset, case.how) == ("8b", "compiled"):
            self.of_ceiling.append(flops / self.ceiling)
        return {
            "layers": shape.n_layers,
            "parameters": sum(p.numel() for p in model.parameters()),
            "micro_batch": train.micro_batch,
            "micro_batches": MICRO_BATCHES,
            "tokens_per_second": speed,
            "mfu": self.peak and flops / self.peak,
            "of_ceiling": flops / self.ceiling,
            "first_step": first,
            "first_step_warm": warm,
            **self._memory(),
            **self._ratios(case),
        }

    def _memory(self) -> dict[str, float | None]:
        names = {"allocated_gib": "max_memory_allocated", "reserved_gib": "max_memory_reserved"}
        if self.device.type != "cuda":
            return dict.fromkeys(names)
        return {name: getattr(torch.cuda, peak)() / 2**30 for name, peak in names.items()}

    def _ratios(self, case: Case) -> dict[str, float]:
        """Of this row's speed and another's of the same shape, by what both are."""
        here = {known.how: speed for known, speed in self.speeds.items() if known[:2] == case[:2]}
        if case.how == "bare" and "compiled" in here:
            return {"compiled_over_bare": here["compiled"] / here["bare"]}
        if case.how != "bare" and "compiled" in here:
            return {"over_compiled": here[case.how] / here["compiled"]}
        return {}

    def aims(self) -> dict[str, Any]:
        """The best of 8b's rows for the first two, the worst of all for the third."""
        over: dict[str, list[float]] = {"float8": [], "bare": []}
        for case, speed in self.speeds.items():
            compiled = self.speeds.get(case._replace(how="compiled"))
            if compiled and case.how == "bare":
                over["bare"].append(compiled / speed)
            elif compiled and case.preset == "8b" and case.how in ("tensorwise", "rowwise"):
                over["float8"].append(speed / compiled)
        found = {
            "8b_of_ceiling": (max(self.of_ceiling, default=None), 0.85),
            "8b_float8_over_bfloat16": (max(over["float8"], default=None), 1.25),
            "over_bare": (min(over["bare"], default=None), 0.98),
        }
        return {
            name: {"measured": value and float(f"{value:.4g}"), "at_least": aim}
            for name, (value, aim) in found.items()
        }


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def scratch(vocab_size: int) -> Iterator[Path]:
    """A folder with random tokens."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(vocab_size, size=2**20, dtype=np.uint32)
        np.save(f"{folder}/tokens.npy", tokens)
        yield Path(folder)


def main() -> None:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--budget", type=float, default=520, help="seconds for all of it")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    options = parser.parse_args()
    sizes = TINY if options.tiny else FULL
    if options.tiny:
        torch.compiler.set_stance("force_eager")  # compiling takes longer than all the rest
    base = parse([TRAIN_TOML, f"--run.device={options.device}"], program="gpu.py").config
    with scratch(sizes.vocab_size) as folder, process_group(base) as device:
        ceiling = measure_matmul(sizes, device)
        measure_copy(sizes, device)
        rows = Rows(options.tiny, init_mesh(base.parallel, device.type), device, ceiling, folder)
        taken: list[float] = []
        for case in cases(options.tiny):
            left = options.budget - (time.perf_counter() - start)
            need = max(taken, default=sizes.guess)
            if left < need:
                why = f"{max(left, 0):.0f} s of --budget are left, and a row may take {need:.0f}"
                show("gpu", **case._asdict(), skipped=why)
                continue
            began = time.perf_counter()
            show("gpu", **case._asdict(), **rows.run(case))
            taken.append(time.perf_counter() - began)
        made_by = torch.cuda.get_device_name() if device.type == "cuda" else device.type
        show("gpu_aims", **rows.aims(), device=made_by, torch=torch.__version__)


if __name__ == "__main__":
    main()
