"""Where a step on CUDA would make the host wait for the device, found without a GPU.

A real Trainer runs in the planner's fake world: tensors on meta stand for tensors on CUDA, and tensors
on the CPU are host memory. Every operation that a GPU's host would wait for is noted with the line of
the project that asks for it, and gets a made-up result.
"""

import copy
import itertools
import linecache
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from compose.apply import apply
from compose.composition import Composition
from compose.config.job import Job
from compose.ops import cross_entropy, operators
from compose.parallel.mesh import init_mesh
from compose.planner import fake_world as worlds
from compose.planner.fake_world import OnMeta, fake_world
from compose.planner.recorder import Recorder
from compose.train import evaluate
from compose.train import trainer as trainer_module
from compose.train.trainer import Trainer
from tests.support.helpers import ROOT

CUDA = torch.device("cuda", 0)
# Operators whose result's size or value is read on the host.
_WAIT = {
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "bincount",
    "equal",
    "histc",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
# Methods that read values on the host; on meta PyTorch has none to give.
_READ: dict[str, Any] = {
    "item": lambda t: t.item(),
    "tolist": lambda t: t.tolist(),
    "__bool__": bool,
    "__float__": float,
    "__int__": int,
    "__index__": int,
    "cpu": lambda t: t,
    "numpy": lambda t: t.numpy(),
}


class Waits:
    """The lines at which the host waits, and how often; empty while nobody watches."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.watching = False
        self.pinned: set[int] = set()
        self.kept: list[Tensor] = []

    def note(self, what: str) -> None:
        if self.watching:
            self.found[f"{_line()}: {what}"] += 1

    def pin(self, tensor: Tensor) -> Tensor:
        self.pinned.add(tensor.untyped_storage()._cdata)
        self.kept.append(tensor)  # so that nothing else gets its address
        return tensor

    def copied(self, source: Tensor, to_host: Tensor | None, non_blocking: bool) -> None:
        """Note a copy between host and device, unless nobody waits for it."""
        host = source if to_host is None else to_host
        if host.untyped_storage()._cdata not in self.pinned:
            self.note("copy of memory that is not pinned")
        elif not non_blocking:
            self.note("copy without non_blocking")


def _line() -> str:
    """The innermost line of the project that is running: file, function, and the line's text."""
    frame = sys._getframe(1)
    while frame:
        name = frame.f_code.co_filename
        if name.startswith((f"{ROOT}/compose/", f"{ROOT}/models/")) and "/planner/" not in name:
            text = linecache.getline(name, frame.f_lineno).strip()
            return f"{Path(name).relative_to(ROOT)}, {frame.f_code.co_name}: {text}"
        frame = frame.f_back  # type: ignore[assignment]
    return "".join(traceback.format_stack(limit=12))


class _OnCuda(OnMeta):
    """OnMeta, where the project's own code sees tensors on CUDA; reads are noted."""

    waits: Waits  # of the run

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        waits, name = self.waits, getattr(func, "__name__", "")
        first: Any = args[0] if args else None
        if name == "__get__" and isinstance(first, Tensor) and first.is_meta and _asked_by_us():
            what = getattr(func, "__self__", None)
            if what is Tensor.device:
                return CUDA
            if what is Tensor.is_cuda:
                return True
            if what is Tensor.is_meta:
                waits.note("another path than on a GPU")
        on_device = isinstance(first, Tensor) and first.is_meta
        if name in _READ and on_device:
            waits.note(name)
            # PyTorch's stages of a pipeline ask each other whether all are there; no signal has come.
            value = torch.zeros if _asked_by_us() else torch.ones
            return _READ[name](value(first.shape, dtype=first.dtype))
        if name in ("tensor", "as_tensor") and self._replaces(kwargs.get("device")):
            waits.note(f"torch.{name} on the device")
        if name == "pin_memory":
            return waits.pin(first.clone()) if not on_device else first
        if kwargs.pop("pin_memory", False):
            return waits.pin(func(*args, **kwargs))
        return super().__torch_function__(func, types, args, kwargs)


def _asked_by_us() -> bool:
    frame: Any = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__":  # another mode passes the call on
        frame = frame.f_back
    name = frame.f_code.co_filename
    return name.startswith((f"{ROOT}/compose/", f"{ROOT}/models/")) and "/planner/" not in name


class _Watch(Recorder):
    """Runs operators, and notes those that a GPU's host waits for."""

    def __init__(self, waits: Waits) -> None:
        super().__init__("cuda")
        self.waits = waits

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        name = func.overloadpacket.__name__
        meta = [t.is_meta for t in given]
        if not any(meta) and str(kwargs.get("device")) != "meta":
            return func(*args, **kwargs)
        if name in ("_to_copy", "copy_") and not all(meta[:1] if name == "_to_copy" else meta[:2]):
            source = given[-1] if name == "copy_" else given[0]
            to_host = given[0] if name == "copy_" and not meta[0] else None
            if source.ndim or name == "_to_copy":
                self.waits.copied(source, to_host, bool(_flag(func, args, kwargs)))
        elif name == "_to_copy" and str(kwargs.get("device")) == "cpu":
            self.waits.note("copy to the host")
            return torch.ones(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype)
        elif name in _WAIT or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.waits.note(name)
        elif name in ("index", "index_put_", "index_put"):
            chosen = [t for t in args[1] if t is not None]
            if any(t.dtype in (torch.bool, torch.uint8) for t in chosen):
                self.waits.note(f"{name} by a mask")
            if not all(t.is_meta for t in chosen):
                self.waits.note(f"{name} by places in host memory")
        return super().__torch_dispatch__(func, types, args, kwargs)


def _flag(func: Any, args: Any, kwargs: Any) -> Any:
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == "non_blocking":
            return args[i] if i < len(args) else kwargs.get("non_blocking")
    return None


def _on_meta(job: Job, mesh: DeviceMesh, device: torch.device) -> Composition:
    """Stand in for ``parallelize``, buffers on meta."""
    model = copy.deepcopy(job.model)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to("meta"))
    return apply(model, job.resolved, mesh, job.options)


@contextmanager
def _cuda(waits: Waits) -> Iterator[None]:
    """Stand-ins for what of torch.cuda and of the store a run calls."""

    def synchronize(*unused: Any) -> None:
        waits.note("torch.cuda.synchronize")

    def nothing(*unused: Any, **named: Any) -> None:
        pass

    def gather(result: list[Any], mine: Any, **unused: Any) -> None:
        waits.note("all_gather_object")
        result[:] = [mine for _ in result]

    real_batches = trainer_module.training_batches
    saves = mock.Mock(failed=0, copying=0, end=lambda: "")
    saves.resume.return_value = saves.finished.return_value = None
    with ExitStack() as stack:
        for owner, name, other in (
            (worlds, "OnMeta", _OnCuda),
            (operators, "_watched", lambda: False),
            (operators, "_compiled", lambda function: function),
            (cross_entropy, "_adds_to_float32", lambda *args: False),
            (torch.cuda, "synchronize", synchronize),
            (torch.cuda, "max_memory_allocated", lambda *args: 0),
            (torch.cuda, "get_device_name", lambda *args: "H100"),
            (dist, "all_gather_object", gather),
            (trainer_module, "report_phase", nothing),
            (evaluate, "report_phase", nothing),
            (trainer_module, "set_timeout", nothing),
            (trainer_module, "parallelize", _on_meta),
            # No thread reads ahead: it would not be seen, and it needs a device.
            (trainer_module, "training_batches", lambda *args: real_batches(*args[:3])),
            (trainer_module, "fill_weights", nothing),
            (torch.cuda, "get_rng_state", lambda *args: torch.zeros(1)),
            (torch.cuda, "set_rng_state", nothing),
            (trainer_module, "Checkpointer", lambda *args: saves),
        ):
            stack.enter_context(mock.patch.object(owner, name, other))
        yield


def waits_of(job: Job) -> Counter[str]:
    """Where the second step of a run would wait for the device, and how often.

    The first one may prepare what all others use.
    """
    waits = Waits()
    _OnCuda.waits = waits
    watch = _Watch(waits)
    with _cuda(waits), fake_world(0, job.world_size, watch):
        mesh = init_mesh(job.degrees, "cuda")
        with OnMeta(["cuda"], kernels="cpu"):
            trainer = Trainer(job, mesh, CUDA)
        real, begun = trainer.batches.batch, itertools.count(1)

        def batch(samples: int) -> Any:
            waits.watching = next(begun) == 2
            return real(samples)

        with _OnCuda(["cuda"]), watch, mock.patch.object(trainer.batches, "batch", batch):
            trainer.run()
    return waits.found
