"""The paths of a training step that benchmarks/first_gpu.py tries in its own processes.

A path takes a :class:`Place` and returns figures. It raises Skipped with the reason why it cannot run
here, and anything else if it fails.
"""

import contextlib
import gc
import importlib.metadata
import json
import platform
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.cuda import nccl
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_kernels import Figures, Skipped
from compose import Parallel, forward_backward, init_mesh
from compose.build import fill_weights, loss_function, parallelize
from compose.cli.command_line import Command, parse
from compose.data.datasets import task_of
from compose.errors import ConfigError
from compose.memory import activation_offload, float8
from compose.memory.compilation import Compile, graphs_compiled
from compose.memory.precision import Precision
from compose.parallel.mesh import batch_share
from compose.proof.prove import prove
from compose.train.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
TRAIN_TOML = str(ROOT / "train.toml")
MOST_WAITS = 2
"""How often the host may wait for the device in a step."""
HALF = "--precision.param=bfloat16"
SMALL = ("--train.global_batch=4", "--train.micro_batch=2", "--train.seq_len=32")
"""The batch on a CPU."""
LAYERS = {"gemma3": 3}
FAMILIES = {
    "llama": (),
    "gpt2": ("--model.name=gpt2",),
    "qwen3": ("--model.name=qwen3",),
    "qwen3 moe": ("--model.name=qwen3", "--model.preset=debug_moe"),
    "gemma3": ("--model.name=gemma3",),
    "mixtral": ("--model.name=mixtral",),
    "deepseek_v3": ("--model.name=deepseek_v3",),
    "gpt_oss": ("--model.name=gpt_oss",),
    "dit": ("--model.name=dit",),
}
"""The keys of each family's debug model."""
PRECISIONS = {
    "float32": (),
    "bfloat16": (HALF,),
    "float16": ("--precision.param=float16",),
    **{
        f"float8 {kind}": (HALF, f"--precision.float8={kind}")
        for kind in ("tensorwise", "rowwise", "rowwise_gw_hp")
    },
}


@dataclass(frozen=True)
class Place:
    """Where a path runs."""

    device: torch.device
    small: bool
    """Whether as little as possible should run."""
    folder: Path
    """A folder of the path's own."""
    seconds: float = 60.0
    """The path is cut off after so many."""
    known: Mapping[str, Figures] = field(default_factory=dict)
    """The figures of the paths that have passed, by name."""

    @property
    def gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def keys(self, *given: str) -> list[str]:
        """Return a command line of train.toml with these keys, tiny on a CPU."""
        words = [TRAIN_TOML, f"--run.device={self.device.type}", f"--run.dir={self.folder}/run"]
        words.append("--metrics.tensorboard=false")
        if not self.gpu:
            name = next((k.split("=")[1] for k in given if k.startswith("--model.name=")), "llama")
            words += [*SMALL, f"--model.n_layers={LAYERS.get(name, 2)}"]
            words += ["--model.image_size=8", "--train.seq_len=16"] if name == "dit" else []
        return [*words, *given]

    def command(self, *given: str, trains: bool = False) -> Command:
        """Return the checked command of such a command line."""
        return parse(self.keys(*given), program="first_gpu.py", trains=trains)


def versions(place: Place) -> Figures:
    """Return what the other lines depend on."""
    results: Figures = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "torchao", "transformers", "tensorboard", "pytest", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            results[name] = importlib.metadata.version(name)
    if place.gpu:
        about = torch.cuda.get_device_properties(place.device)
        results |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, nccl.version())),
            "device": about.name,
            "capability": f"{about.major}.{about.minor}",
            "multiprocessors": about.multi_processor_count,
            "memory_gib": round(about.total_memory / 2**30, 1),
            "devices": torch.cuda.device_count(),
        }
    return results


_meshes: dict[Parallel, DeviceMesh] = {}
_last: list[Parallel] = [Parallel()]


def mesh_of(parallel: Parallel, device: torch.device) -> DeviceMesh:
    """Return the mesh, made once in a process.

    DTensor caches results by a mesh's layout, with the names of its process groups. Another mesh has
    others, so the caches are emptied between two.
    """
    if parallel not in _meshes:
        _meshes[parallel] = init_mesh(parallel, device.type)
    if parallel != _last[0]:
        _clear_sharding_prop_cache()
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()
    _last[0] = parallel
    return _meshes[parallel]


def free(device: torch.device) -> None:
    """Let go of what a path has left behind."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def verified(*keys: str, place: Place) -> Figures:
    """Prove that a composition equals one process, as ``python -m compose verify`` does."""
    # A debug model's layers are too small to gain from offload or float8.
    any_size = dict.fromkeys(float8.CROSSOVERS, ())
    with (
        mock.patch.object(activation_offload, "LEAST", 1),
        mock.patch.object(float8, "CROSSOVERS", any_size),
    ):
        try:
            job = place.command(*keys).job
        except ConfigError as error:
            if "precision.float8" in str(error) and place.gpu:  # an older GPU, or no torchao
                raise Skipped(str(error)) from None
            raise
        report = prove(job, mesh_of(job.degrees, place.device), place.device)
    for row in report.failed:
        raise AssertionError(
            f"{row.quantity} of {row.name}: error {row.error:.1e}, allowed {row.tolerance:.0e}, on rank"
            f" {row.rank}; {report.verdict}"
        )
    assert report.ok, report.verdict
    return {"quantities": len(report.rows), "verdict": report.verdict}


def compiled(mode: str, dtype: str, *keys: str, place: Place) -> Figures:
    """Compare a compiled step with the eager one, and count graphs, breaks and recompilations.

    In a reduced type both are held against float32: the compiled one may be twice as far from it.
    """
    counters.clear()
    job = place.command(f"--precision.param={dtype}", *keys).job
    mesh, config = mesh_of(job.degrees, place.device), job.config
    index, count = batch_share(mesh)
    batch = task_of(config).random_batch(config, config.train.global_batch, seed=2)
    share = {name: value.chunk(count)[index].to(place.device) for name, value in batch.items()}
    # Inductor's own compiler of C++ takes a CPU half a minute for each graph.
    backend = "inductor" if place.gpu or not place.small else "aot_eager"
    graphs: list[int] = []

    def gradients(precision: Precision, how: Compile) -> dict[str, Tensor]:
        options = replace(job.options, precision=precision, compile=how)
        composition = parallelize(job, mesh, place.device, options)
        fill_weights(composition, job, place.device)
        torch.manual_seed(0)
        for (
            parameter
        ) in composition.model.parameters():  # behind weights of zero all gradients are zero
            part = local(parameter.detach())
            part.add_(0.02 * torch.randn(part.shape).to(part))
        for _ in range(3):
            composition.model.zero_grad()
            size, loss = config.train.micro_batch, loss_function(config)
            forward_backward(composition, share, micro_batch=size, loss_function=loss)
            graphs.append(graphs_compiled())
        result = composition.model.named_parameters()
        return {name: local(p.grad).double() for name, p in result if p.grad is not None}

    wide = gradients(Precision(), Compile())
    eager = gradients(config.precision, Compile())
    how = Compile(mode, config.compile.async_tp, backend)  # type: ignore[arg-type]
    result = gradients(config.precision, how)
    # A bias that softmax ignores has a gradient of rounding alone: all gradients are its measure.
    least = 1e-4 * torch.stack([x.norm() for x in wide.values()]).norm()
    sizes = {name: wide[name].norm() + least for name in wide}
    errors = {name: ((result[name] - wide[name]).norm() / sizes[name]).item() for name in wide}
    allowed = {name: 2 * ((eager[name] - wide[name]).norm() / sizes[name]).item() for name in wide}
    worst = max(errors, key=lambda name: errors[name] - allowed[name])
    assert errors[worst] <= allowed[worst] + 1e-5, (
        f"the gradient of {worst} is {errors[worst]:.1e} away from float32, and an eager one"
        f" {allowed[worst] / 2:.1e}"
    )
    breaks = sum(counters["graph_break"].values())
    figures = {"graphs": graphs[-1], "breaks": breaks, "recompiled": graphs[-1] - graphs[-3]}
    assert mode != "block" or not breaks, f"{breaks} graph breaks in {graphs[-1]} graphs"
    assert mode == "off" or graphs[-1], "nothing was compiled"
    late = figures["recompiled"]
    assert not late, f"{late} graphs were compiled after the first step"
    return figures | {"error": errors[worst]}


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fused_tp(place: Place) -> Figures:
    """Compile tp with its messages inside the products, and count the operators that do so."""
    if not place.gpu:
        raise Skipped("async_tp needs GPUs")
    results: dict[str, int] = {}
    keys = ("--parallel.tp=2", "--parallel.dp_shard=-1", "--compile.mode=block")
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        figures = compiled("block", "bfloat16", *keys, "--compile.async_tp=true", place=place)
    for event in trace.events() or ():
        if event.name.startswith("symm_mem::fused"):
            results[event.name] = results.get(event.name, 0) + 1
    assert any("all_gather" in name for name in results), f"no all-gather is in a product: {results}"
    return figures | results


class Reads(TorchDispatchMode):
    """Counts operators whose result the host waits for, on a device that has no count of its own."""

    NAMES = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        if func.name().split(".")[0] in self.NAMES:
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def waits(device: torch.device) -> Iterator[list[str]]:
    """Note where the host waits for the device: by PyTorch's own mode, and ``synchronize``."""
    results: list[str] = []
    if device.type != "cuda":
        with Reads() as reads:
            yield results
        results += reads.found
        return
    synchronize = torch.cuda.synchronize

    def noted(*args: Any) -> None:
        results.append("torch.cuda.synchronize")
        synchronize(*args)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        torch.cuda.synchronize = noted
        try:
            yield results
        finally:
            torch.cuda.synchronize = synchronize
            torch.cuda.set_sync_debug_mode("default")
    for one in warned:
        if "synchronizing" in str(one.message):
            results.append(f"{Path(one.filename).name}, line {one.lineno}")


@contextlib.contextmanager
def trainer_of(place: Place, *keys: str) -> Iterator[Trainer]:
    """Make the trainer of a run."""
    command = place.command(*keys, trains=True)
    mesh = mesh_of(command.job.degrees, place.device)
    trainer = Trainer(command.job, mesh, place.device, command.data)
    try:
        yield trainer
    finally:
        trainer.report.close()
        trainer.run_folder.release()


def synchronisations(*keys: str, place: Place) -> Figures:
    """Count how often the host waits in a step of a run."""
    with trainer_of(place, *keys) as trainer:
        for _ in range(3):
            trainer.step()
        with waits(place.device) as result:
            trainer.step()
    where = dict(Counter(result))
    assert len(result) <= MOST_WAITS, f"the host waits {len(result)} times in a step: {where}"
    return {"waits": len(result), "where": where}


def profiled(place: Place) -> Figures:
    """Profile two steps of a run, and read the summary."""
    with trainer_of(place, "--profile.steps=[3, 4]", "--train.stop_after=5") as trainer:
        trainer.run()
    summary = place.folder / "run" / "traces" / "step3-4_summary.json"
    (result,) = json.loads(summary.read_text())["ranks"]
    assert abs(sum(result["time"].values()) - 1) < 1e-3, f"the parts of the time are {result['time']}"
    return result["time"]


def remembered(place: Place) -> Figures:
    """Take a memory snapshot of two steps, and read what held the most."""
    if not place.gpu:
        raise Skipped("memory snapshots are of CUDA's allocator")
    keys = ("--profile.steps=[3, 4]", "--profile.memory=true", "--train.stop_after=5", HALF)
    with trainer_of(place, *keys) as trainer:
        trainer.run()
    folder = place.folder / "run" / "traces"
    assert (folder / "step3-4_rank0_memory.pickle").stat().st_size, "the snapshot is empty"
    (result,) = json.loads((folder / "step3-4_summary.json").read_text())["ranks"]
    memory = result["memory"]
    assert sum(memory["at_peak"].values()) == memory["peak"], f"parts are not the whole: {memory}"
    return {"peak": memory["peak"], **memory["at_peak"]}
