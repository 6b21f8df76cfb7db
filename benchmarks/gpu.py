"""Figures of one device for benchmarks/first_gpu.py: its limits, and what a step makes of them.

    limits               products of matrices in bfloat16 and float8, and copies
    compiled, eager      compose in bfloat16, from Config to Trainer.step, on a file of random tokens;
                         compiled is compile.mode = "block"
    tensorwise, rowwise  compiled, with that recipe of precision.float8
    bare                 plain PyTorch: the same model, its blocks compiled, a loop written by hand with
                         the same arithmetic, and nothing of compose
    in turn              both of them in memory at once, a step each
    trainer              transformers' Trainer, as its users run it: eager, autocast to bfloat16

A row is tried without recomputation and, where memory does not suffice, with all layers recomputed.
State takes 18 bytes a parameter (weights, gradients and AdamW's means in float32, weights in bfloat16):
22 GB for 1b, 58 for 3b, 66 for 12 of 8b's layers with its embedding and output, 43 for 6. A bare row
takes 20: its gradients are in bfloat16 first.

``mfu`` is of the data sheet's rate in bfloat16, ``of_limit`` of the best product in bfloat16 that was
measured, both where float8 is used too, so that rows compare. ``first_step`` is in seconds.
"""

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import truediv
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_bare import Bare
from benchmarks.gpu_kernels import Figures, Skipped
from benchmarks.gpu_paths import Place, free, mesh_of
from benchmarks.planner_published import content
from compose.cli.command_line import Command, parse
from compose.config.models import find_model
from compose.planner.cluster import load_cluster
from compose.planner.estimate import estimate
from compose.train.metrics import peak_flops
from compose.train.trainer import Trainer

STEPS = 4  # timed in each row
MICRO_BATCHES = 4  # in a step
VOCABULARY = 128_256
TOKENS = 8192  # of a micro-batch
# Square products, and the feed-forward's of 8b, 3b and 1b: (M, N, K).
PRODUCTS = [(2**n,) * 3 for n in (11, 12, 13, 14)]
PRODUCTS += [(8192, 14_336, 4096), (8192, 4096, 14_336), (8192, 8192, 3072), (16_384, 8192, 2048)]
# A CPU's sizes only show that it runs.
SHAPE = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 128, "n_layers": 2, "vocab_size": 256}
TINY_PRODUCTS = [(64, 64, 64), (64, 128, 32)]
CLUSTERS = {"H200": "h200", "H100": "h100_sxm", "A100": "a100_80gb", "B200": "b200", "4090": "rtx4090"}
"""The planner's files by a part of the device's name."""
FLOAT8 = ("tensorwise", "rowwise")


class Case(NamedTuple):
    """One row of training."""

    preset: str
    seq_len: int
    how: str
    model: str = "llama"
    layers: int = 0
    """How many of the preset's layers the device has memory for; 0: all of them."""

    @property
    def name(self) -> str:
        """The row's name."""
        return f"{self.preset} {self.seq_len} {self.how}"


EXPERTS = [  # layers with all their experts, in an H200's memory
    Case("8x7b", 4096, "eager", "mixtral", 3),
    Case("30b_a3b", 4096, "eager", "qwen3", 8),
    Case("16b", 4096, "eager", "deepseek_v3", 7),
    Case("20b", 4096, "eager", "gpt_oss", 5),
]


def cases(small: bool) -> list[Case]:
    """Return the rows, most important first."""
    first = [Case("1b", 4096, how) for how in ("compiled", "in turn")]
    if small:
        return first
    first += [Case("8b", 8192, how) for how in ("compiled", *FLOAT8, "eager", "bare")]
    first += [Case("1b", 4096, how) for how in ("eager", "trainer")]
    first += [Case("3b", 4096, how) for how in ("compiled", "bare", "eager", *FLOAT8)]
    first += EXPERTS + [case._replace(how="compiled") for case in EXPERTS]
    return [*first, Case("8b", 32_768, "eager"), Case("8b", 131_072, "eager")]


def wait(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return how long ``work`` takes."""
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - start


def rate(work: Callable[[], object], amount: float, device: torch.device) -> float:
    """Return ``amount`` per second: the median of five turns of ten calls, after a first."""

    def turn() -> None:
        for _ in range(10):
            work()

    return 10 * amount / median([seconds(turn, device) for _ in range(6)][1:])


def limits(place: Place) -> Figures:
    """Measure products in bfloat16 and float8, and copies on the device and to it."""
    device, result = place.device, Figures()
    best = 0.0
    for m, n, k in PRODUCTS if place.gpu else TINY_PRODUCTS:
        a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        b = torch.randn(n, k, device=device, dtype=torch.bfloat16)
        reached = rate(lambda a=a, b=b: a @ b.T, 2.0 * m * n * k, device)
        best = max(best, reached)
        result[f"{m} x {n} x {k}"] = {"bfloat16": reached, **_float8(a, b, 2.0 * m * n * k, device)}
    source = torch.ones(2**30 if place.gpu else 2**16, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.ones(len(source), dtype=torch.uint8, pin_memory=place.gpu)
    return {
        "bfloat16_flops": best,
        "on_device_bytes_per_s": rate(lambda: target.copy_(source), 2 * len(source), device),
        "from_host_bytes_per_s": rate(
            lambda: target.copy_(host, non_blocking=True), len(source), device
        ),
        "products": result,
    }


def _float8(a: Tensor, b: Tensor, flops: float, device: torch.device) -> Figures:
    """Time the same product in float8, scaled as a whole, or say why there is none."""
    one = torch.ones((), device=device)
    x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)

    def product() -> Tensor:
        return torch._scaled_mm(x, y.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    try:
        return {"float8": rate(product, flops, device)}
    except Exception as error:  # by device and version: RuntimeError, NotImplementedError, ValueError
        return {"no_float8": str(error).partition("\n")[0]}


def command_of(case: Case, recompute: str, place: Place) -> Command:
    """Return the checked command of a row."""
    seq_len = case.seq_len if place.gpu else 32
    micro_batch = max(1, TOKENS // seq_len) if place.gpu else 2
    keys = [
        f"--model.name={case.model}",
        f"--model.preset={case.preset}",
        f"--data.path={place.folder}/tokens.npy",
        f"--train.seq_len={seq_len}",
        f"--train.micro_batch={micro_batch}",
        f"--train.global_batch={MICRO_BATCHES * micro_batch}",
        "--parallel.zero=2",  # whole through a step: nothing is saved by gathering from oneself
        "--precision.param=bfloat16",
        f"--activation_checkpoint.mode={recompute}",
        f"--compile.mode={'off' if case.how in ('eager', 'trainer') else 'block'}",
    ]
    if case.how in FLOAT8:
        keys.append(f"--precision.float8={case.how}")
    if not place.gpu:
        known = find_model(case.model).presets[case.preset]
        keys += [f"--model.{name}={size}" for name, size in SHAPE.items() if hasattr(known, name)]
    elif case.preset == "8b" or case.layers:
        layers = case.layers or 12
        keys.append(f"--model.n_layers={layers if memory_of(place) > 120 else layers // 2}")
    return parse(place.keys(*keys), program="first_gpu.py")


def memory_of(place: Place) -> float:
    """Return the device's memory in GiB."""
    return place.known["versions"]["memory_gib"]


def trainer_of(command: Command, place: Place) -> Trainer:
    """Make a row's trainer, on random tokens."""
    vocabulary = command.config.model.config.vocab_size
    tokens = np.random.default_rng(0).integers(vocabulary, size=2**20, dtype=np.uint32)
    np.save(f"{place.folder}/tokens.npy", tokens)
    return Trainer(command.job, mesh_of(command.job.degrees, place.device), place.device)


def stance(place: Place) -> AbstractContextManager[Any]:
    """Compile, or not where only the paths count: Inductor takes a CPU longer than all the rest."""
    eager = place.small and not place.gpu
    return torch.compiler.set_stance("force_eager") if eager else nullcontext()


def trained(case: Case, place: Place) -> Figures:
    """Train a row, with all layers recomputed if it does not fit otherwise."""
    if case.how in FLOAT8 and not importlib.util.find_spec("torchao"):
        raise Skipped("torchao is not installed")
    try:
        return _trained(case, "none", place)
    except Exception as error:
        if case.how == "bare" or not wants_memory(error):
            raise
    free(place.device)
    return _trained(case, "full", place)


def wants_memory(error: Exception) -> bool:
    """Tell whether an error is one of too little memory; cuBLAS has words of its own for it."""
    return isinstance(error, torch.OutOfMemoryError) or "STATUS_ALLOC_FAILED" in str(error)


def fitting(run: Callable[[Case, Place], Figures], case: Case, place: Place) -> Figures:
    """Run a row, unless the device has no room for it."""
    try:
        return run(case, place)
    except Exception as error:
        if not wants_memory(error):
            raise
    raise Skipped("it does not fit into the device's memory")


def _trained(case: Case, recompute: str, place: Place) -> Figures:
    command = command_of(case, recompute, place)
    bare = Bare(command.config, place.device) if case.how == "bare" else None
    trainer = None if bare else trainer_of(command, place)
    step: Callable[[], object] = bare.step if bare else trainer.step  # type: ignore[union-attr]
    with stance(place):
        first = seconds(step, place.device)
        # All at once: the host may prepare a step while the device is still at the last one.
        spent = seconds(lambda: [step() for _ in range(STEPS)], place.device) / STEPS
    result = _rates(command, spent, place)
    compiled = place.known.get(f"figure: {case._replace(how='compiled').name}")
    if compiled and case.how != "compiled":
        result["over_compiled"] = result["tokens_per_second"] / compiled["tokens_per_second"]
    predicted = place.known.get(f"predicted: {case.name}", {}).get(recompute)
    beside = {"predicted": predicted} if predicted else {}
    return {**result, "recompute": recompute, "first_step": first, **_memory(place), **beside}


def _rates(command: Command, spent: float, place: Place) -> Figures:
    """Return what a step of so many seconds comes to."""
    config, shape = command.config, command.config.model.config
    tokens = config.train.global_batch * config.train.seq_len
    flops = tokens * shape.flops_per_token(config.train.seq_len) / spent
    peak = peak_flops(torch.cuda.get_device_name(), "bfloat16") if place.gpu else None
    limit = place.known.get("limits", {}).get("bfloat16_flops")
    return {
        "layers": shape.n_layers,
        "micro_batch": config.train.micro_batch,
        "tokens_per_second": tokens / spent,
        "mfu": peak and flops / peak,
        "of_limit": limit and flops / limit,
    }


def _memory(place: Place) -> Figures:
    if not place.gpu:
        return {}
    return {
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def in_turn(case: Case, place: Place) -> Figures:
    """Let compose and the bare loop take turns, a step each; the ratio is a median over pairs."""
    command = command_of(case, "none", place)
    steps = {
        "compose": trainer_of(command, place).step,
        "bare": Bare(command.config, place.device).step,
    }
    spent: dict[str, list[float]] = {name: [] for name in steps}
    with stance(place):
        for turn in range(-2, 3 * STEPS):
            for name in sorted(steps, reverse=turn % 2 == 1):
                took = seconds(steps[name], place.device)
                if turn >= 0:
                    spent[name].append(took)
    return {
        **_rates(command, median(spent["compose"]), place),
        "over_bare": median(map(truediv, spent["bare"], spent["compose"])),
        **_memory(place),
    }


def hugging_face(case: Case, place: Place) -> Figures:
    """Train the same shape by transformers' Trainer."""
    for name in ("transformers", "accelerate"):
        if not importlib.util.find_spec(name):
            raise Skipped(f"{name} is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    command = command_of(case, "none", place)
    train, shape = command.config.train, command.config.model.config
    spent: list[float] = []

    class Timed(TrainerCallback):
        start = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            wait(place.device)
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            wait(place.device)
            spent.append(time.perf_counter() - self.start)

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.dim,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        intermediate_size=shape.hidden_dim,
        max_position_embeddings=train.seq_len,
        use_cache=False,
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )
    samples = torch.randint(shape.vocab_size, (train.global_batch, train.seq_len))
    arguments = TrainingArguments(
        output_dir=str(place.folder),
        per_device_train_batch_size=train.micro_batch,
        gradient_accumulation_steps=MICRO_BATCHES,
        max_steps=STEPS + 1,
        bf16=True,
        optim="adamw_torch_fused",
        use_cpu=not place.gpu,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    arguments._n_gpu = 1 if place.gpu else 0  # else DataParallel takes all GPUs
    rows = [{"input_ids": row, "labels": row} for row in samples] * (STEPS + 1)
    with place.device:
        model = LlamaForCausalLM(config)
    Trainer(model, arguments, train_dataset=rows, callbacks=[Timed()]).train()  # type: ignore[arg-type]
    result = _rates(command, median(spent[1:]), place)
    compiled = place.known.get(f"figure: {case._replace(how='compiled').name}")
    if compiled:
        result["over_compiled"] = result["tokens_per_second"] / compiled["tokens_per_second"]
    return {**result, "first_step": spent[0], **_memory(place)}


def predicted(case: Case, place: Place) -> Figures:
    """Return what the planner says of a row, without and with recomputation."""
    name = place.known["versions"].get("device", "cpu")
    file = next((file for part, file in CLUSTERS.items() if part in name), "")
    if place.gpu and not file:
        raise Skipped(f"clusters/ has no file of {name}")
    result = Figures()
    for recompute in ("none", "full"):
        said = estimate(command_of(case, recompute, place).job, load_cluster(file or "cpu"))
        result[recompute] = {
            "tokens_per_second": said.tokens_per_second_per_device,
            "mfu": said.mfu,
            "allocated_gib": said.peaks[0].allocated / 2**30,
        }
    return result


def published(place: Place) -> Figures:
    """Return torchtitan's own figures of 8b on several GPUs: nothing runs here."""
    flops = find_model("llama").presets["8b"].flops_per_token(8192)
    result = Figures()
    for rows in content()["sets"]:
        if rows["name"] not in ("torchtitan", "trainy"):
            continue
        for row in rows["rows"]:
            given = dict(zip(rows["columns"], row, strict=True))
            how = f"{'compiled' if given['compile'] else 'eager'}, float8 {given['float8']}"
            result[f"{rows['title']}: {given['gpus']} GPUs, {how}"] = {
                "tokens_per_second": given["value"],
                "mfu": given["value"] * flops / (peak_flops("H100", "bfloat16") or 1),
                "source": rows["source"],
            }
    return result


def listed(small: bool) -> Iterator[tuple[str, Callable[[Place], Figures], str, bool]]:
    """Yield each path of figures: its name, itself, its lane, and whether it is timed."""
    for case in cases(small):
        if case.how in ("compiled", "eager", *FLOAT8):
            yield f"predicted: {case.name}", partial(predicted, case), "planner", False
    yield "limits", limits, "figures", True
    others = {"in turn": in_turn, "trainer": hugging_face}
    for case in cases(small):
        run = partial(fitting, others.get(case.how, trained), case)
        yield f"figure: {case.name}", run, "figures", True
    yield "published: torchtitan", published, "planner", False
