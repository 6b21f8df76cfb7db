"""Compile the kernels of a model's training step for sm_90, on a machine without a GPU.

    python -m tests.support.cross_compile [--table.key=value ...]

prints a JSON line for each kernel that Inductor writes for the model's layers and for the loss: its
name, and the bytes of its machine code.

PyTorch runs a step on the CPU. Inductor gets each graph of it with all tensors on CUDA, and is told of
an H100. Triton's own compiler makes machine code of the kernels that Inductor writes; it needs no GPU.
"""

import contextlib
import copy
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._subclasses import FakeTensorMode
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.runtime import driver  # pyright: ignore[reportMissingImports]

from compose import forward_backward, init_mesh
from compose.build import fill_weights, loss_function, parallelize
from compose.data.datasets import task_of
from compose.memory.compilation import Compile
from compose.ops.cross_entropy import fused_gradient, fused_sums
from tests.support.helpers import make_job

CUDA = torch.device("cuda", 0)
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 * 2**30,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65_536,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
    L2_cache_size=50 * 2**20,
    warp_size=32,
    is_integrated=False,
    gcnArchName="",
)
# Inductor asks these before it writes CUDA code.
ANSWERS: dict[str, Any] = {
    "torch.cuda.is_available": lambda: True,
    "torch.cuda.device_count": lambda: 1,
    "torch.cuda.current_device": lambda: 0,
    "torch.cuda.get_device_properties": lambda device=None: H100,
    "torch.cuda._get_device_properties": lambda device=None: H100,
    "torch.cuda.get_device_capability": lambda device=None: (9, 0),
    "torch.cuda.is_bf16_supported": lambda *given, **more: True,
    "torch.cuda.get_rng_state": lambda *given: torch.zeros(16, dtype=torch.uint8),
    "torch.cuda.set_rng_state": lambda *given: None,
    "torch.cuda.synchronize": lambda *given: None,
    "torch.cuda._lazy_init": lambda: None,
    "torch.cuda._exchange_device": lambda index: 0,
    "torch.cuda._maybe_exchange_device": lambda index: 0,
    "torch.version.cuda": "13.0",
    "torch._inductor.scheduler.has_triton": lambda *given: True,
    "torch.utils._triton.has_triton": lambda *given: True,
}


class Driver:
    """Triton compiles for this driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


class Written(Exception):
    """The code of a graph was written; it would be loaded next."""


@contextlib.contextmanager
def h100(codes: list[str]) -> Iterator[None]:
    """While within: an H100 seems to be there, and Inductor's code is added to ``codes``."""

    def written(graph: GraphLowering) -> None:
        code, _ = graph.codegen()
        codes.append(code.value)
        raise Written

    with contextlib.ExitStack() as stack:
        for name, answer in ANSWERS.items():
            stack.enter_context(mock.patch(name, answer, create=True))
        stack.enter_context(mock.patch.object(GraphLowering, "compile_to_module", written))
        yield


def on_cuda(module: fx.GraphModule, inputs: Sequence[Any], codes: list[str]) -> None:
    """Have Inductor write the code of a graph as on CUDA."""
    module = copy.deepcopy(module)
    for node in module.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": CUDA}
    module.recompile()
    # The numbers of rows that a graph does not know are symbols of the mode that has traced it.
    with detect_fake_mode(inputs) or FakeTensorMode() as mode:
        given = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA)
            if isinstance(x, Tensor)
            else x
            for x in inputs
        ]
    before = len(codes)
    with h100(codes), tracing(TracingContext(mode)), torch.no_grad():
        try:
            compile_fx_inner(module, given)
        except Exception:
            if len(codes) == before:
                raise


def backend_of(codes: list[str]) -> Any:
    """Return a backend of torch.compile: it runs graphs as they are, and writes their code."""

    def compiler(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        on_cuda(module, inputs, codes)
        return make_boxed_func(module.forward)

    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        decompositions=select_decomp_table,
        partition_fn=min_cut_rematerialization_partition,
    )


def compiled(code: str) -> Iterator[tuple[str, int]]:
    """Yield the kernels of a graph's code: the name, and the bytes of the machine code."""
    pattern = r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)"
    launchable = mock.patch.object(
        triton_heuristics.StaticTritonCompileResult, "can_statically_launch", return_value=None
    )
    as_it_is = mock.patch.object(
        triton_heuristics, "TritonCompileResult", lambda binary, *given: binary
    )
    no_driver = mock.patch.object(triton_helpers, "set_driver_to_gpu")
    with h100([]), launchable, as_it_is, no_driver:
        for name, source in re.findall(pattern, code, re.DOTALL):
            kernel = getattr(PyCodeCache.load(source), name)
            binaries = [kernel._precompile_config(config) for config in kernel.configs]
            assert all(".target sm_90" in binary.asm["ptx"] for binary in binaries)
            yield name, len(binaries[0].asm["cubin"])


def write_loss(codes: list[str]) -> None:
    """Have Inductor write the loss' passes over logits, which a GPU compiles in any run."""
    logits, at = torch.randn(64, 500).bfloat16(), torch.randint(500, (64, 1))
    here, one = torch.ones(64, 1, dtype=torch.bool), torch.ones(64)
    backend = backend_of(codes)
    top, _, _ = torch.compile(fused_sums, backend=backend, dynamic=False)(logits, at, here)
    torch.compile(fused_gradient, backend=backend, dynamic=False)(logits, top, one, at, here)


def main(keys: Sequence[str]) -> None:
    """Take one step of a small model, and compile what Inductor writes for it."""
    driver.set_active(Driver())
    codes: list[str] = []
    words = dict(word.removeprefix("--").split("=", 1) for word in keys)
    job = make_job(1, **{key.replace(".", "__"): value for key, value in words.items()})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config, cpu = job.config, torch.device("cpu")
    how = Compile("block", backend=backend_of(codes))
    composition = parallelize(job, init_mesh(job.degrees), cpu, replace(job.options, compile=how))
    fill_weights(composition, job, cpu)
    batch = task_of(config).random_batch(config, config.train.micro_batch, seed=0)
    forward_backward(composition, batch, loss_function=loss_function(config))
    write_loss(codes)
    for code in codes:
        for name, size in compiled(code):
            print(json.dumps({"kernel": name, "bytes": size}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
