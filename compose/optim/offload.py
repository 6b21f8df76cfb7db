"""AdamW whose state is in host memory or in files, and on the device one piece at a time.

It follows ZeRO-Infinity (Rajbhandari et al. 2021, arXiv:2104.07857). The step is torch's fused one,
piece by piece. An element's new value depends on that element alone, so the weights are bitwise those
of a run whose state is on the device. While one piece is computed, the next ones are copied in and the
last one is copied out.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from compose.ops.tensors import local_tensor
from compose.optim.offload_files import ScratchFolder, TensorFile, page_aligned
from compose.optim.rounding import load_state, steps

CHUNK = 2**22  # elements of a piece, a multiple of 1024
SLOTS = 4  # pieces in memory at once
MEANS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of this rank's part of a parameter of ``group``."""

    parameter: nn.Parameter
    group: dict[str, Any]
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return these elements of ``tensor``, which is placed as the parameter is; a view."""
        return local_tensor(tensor).view(-1)[self.start : self.stop]

    def of_memory(self, memory: Sequence[Tensor]) -> list[Tensor]:
        """Return as many elements of each tensor."""
        return [each[: self.stop - self.start] for each in memory]


@dataclass
class PieceMemory:
    """Memory for the means of one piece."""

    host: list[Tensor]
    """Memory that files are read into."""
    device: list[Tensor]
    """Memory on the GPU, if parameters are on one."""
    ready: Any = None
    """The event after which ``device`` is filled."""
    done: Any = None
    """The event after which the piece was computed."""
    stored: Future[None] | None = None
    """Done when the slot is free again."""


class OffloadedAdamW(torch.optim.Optimizer):
    """torch's fused AdamW (arXiv:1711.05101), whose state is not on the device.

    ``state`` has tensors as any optimizer's has. Those in files are mapped, and take no memory until
    they are read. The first step raises ConfigError if the folder is in use, has no room, or was not
    made by a run.

    Parameters are plain or DTensors; float32, or float64 without files. ``folder`` is scratch for files
    of the state: a new one, or one that a run left; :meth:`close` removes it. Without it the state is
    in host memory, pinned if parameters are on a GPU.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        folder: Path | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.folder = folder
        self.scratch: ScratchFolder | None = None
        self._remove: Callable[[], object] = lambda: None
        self.bytes_moved = 0
        self.waited = 0.0  # seconds in which nothing could be computed
        self.files: dict[nn.Parameter, list[TensorFile]] = {}
        self.slots: list[PieceMemory] = []
        self.device = self.param_groups[0]["params"][0].device
        # Copies into the GPU and out of it have a stream each.
        self.streams = [torch.cuda.Stream(self.device) for _ in range(2)] if self._on_gpu else []

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _threads(self) -> ThreadPoolExecutor:
        """Return threads that use this rank's GPU: a new thread would use the first of the machine."""
        if not self._on_gpu:
            return ThreadPoolExecutor(2)
        return ThreadPoolExecutor(2, initializer=torch.cuda.set_device, initargs=(self.device,))

    @steps
    def step(self) -> None:  # type: ignore[override]
        """Take a step for the parameters that have a gradient."""
        self.bytes_moved, self.waited = 0, 0.0
        pieces = list(self._pieces())
        if self.folder is None and not self._on_gpu:
            for piece in pieces:  # the state is used where it is
                self._update(piece, self._means(piece))
            return
        if not self.slots:
            self.slots = [self._slot() for _ in range(SLOTS)]
        if self._on_gpu:  # earlier users of the slots' memory may still run
            self.streams[0].wait_stream(torch.cuda.current_stream(self.device))
        with self._threads() as readers, self._threads() as writers:
            coming: list[Future[list[Tensor]]] = []
            for i, piece in enumerate(pieces):
                while len(coming) < min(len(pieces), i + SLOTS):
                    slot = self.slots[len(coming) % SLOTS]
                    coming.append(readers.submit(self._load, pieces[len(coming)], slot, slot.stored))
                slot = self.slots[i % SLOTS]
                means = self._wait(coming[i])
                if self._on_gpu:
                    torch.cuda.current_stream(self.device).wait_event(slot.ready)
                self._update(piece, means)
                if self._on_gpu:
                    slot.done = torch.cuda.current_stream(self.device).record_event()
                slot.stored = writers.submit(self._store, piece, slot)
                self.bytes_moved += 16 * (piece.stop - piece.start)
            for slot in self.slots:
                if slot.stored:
                    self._wait(slot.stored)
                slot.stored = None

    def close(self) -> None:
        """Remove the files; no step can follow."""
        self._remove()

    def metrics(self) -> dict[str, float]:
        """Return the bytes moved and the seconds waited since the last call or step."""
        results = {"optimizer_bytes": self.bytes_moved, "optimizer_waited": self.waited}
        self.bytes_moved, self.waited = 0, 0.0
        return results

    def _wait(self, work: Future[Any]) -> Any:
        begun = time.perf_counter()
        result = work.result()
        self.waited += time.perf_counter() - begun
        return result

    def _pieces(self) -> Iterator[Piece]:
        """Count the steps of all parameters that have a gradient, and yield their pieces."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self.state_of(parameter)["step"] += 1
                count = local_tensor(parameter).numel()
                for start in range(0, count, CHUNK):
                    yield Piece(parameter, group, start, min(start + CHUNK, count))

    load_state_dict = load_state  # type: ignore[assignment]

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state of ``parameter``, and make it if there is none."""
        state, files = self.state[parameter], []
        if state:
            return state
        if self.folder is not None and not self.scratch:
            self.scratch = ScratchFolder(self.folder)
            self._remove = weakref.finalize(self, self.scratch.remove)
        state["step"] = torch.zeros((), device=parameter.device)
        for key in MEANS:
            count = local_tensor(parameter).numel()
            if self.scratch and count:
                files.append(TensorFile(self.scratch, f"{len(self.files):05d}.{key}", count))
                held = files[-1].mapped()
            else:
                held = torch.zeros(count, dtype=parameter.dtype, pin_memory=self._on_gpu)
            state[key] = _placed_as(parameter, held.view(local_tensor(parameter).shape))
        self.files[parameter] = files
        return state

    def _slot(self) -> PieceMemory:
        host = [page_aligned(CHUNK, pinned=self._on_gpu) for _ in MEANS] if self.folder else []
        like = self.param_groups[0]["params"][0]
        device = [torch.empty(CHUNK, dtype=like.dtype, device=self.device) for _ in MEANS]
        return PieceMemory(host, device if self._on_gpu else [])

    def _means(self, piece: Piece) -> list[Tensor]:
        return [piece.of(self.state[piece.parameter][key]) for key in MEANS]

    @torch.no_grad()
    def _load(self, piece: Piece, slot: PieceMemory, free: Future[None] | None) -> list[Tensor]:
        """Return the means of ``piece`` on the device; runs in a thread."""
        if free:
            free.result()
        host = piece.of_memory(slot.host) if slot.host else self._means(piece)
        for file, memory in zip(self.files[piece.parameter], host, strict=False):
            file.read(piece.start, memory)
        if not slot.device:
            return host
        means = piece.of_memory(slot.device)
        with torch.cuda.stream(self.streams[0]):
            for source, target in zip(host, means, strict=True):
                target.copy_(source, non_blocking=True)
            slot.ready = self.streams[0].record_event()
        return means

    @torch.no_grad()
    def _store(self, piece: Piece, slot: PieceMemory) -> None:
        """Copy the means of ``piece`` back to where they are kept; runs in a thread."""
        host = piece.of_memory(slot.host) if slot.host else self._means(piece)
        if slot.device:
            with torch.cuda.stream(self.streams[1]):
                self.streams[1].wait_event(slot.done)
                for source, target in zip(piece.of_memory(slot.device), host, strict=True):
                    target.copy_(source, non_blocking=True)
                self.streams[1].synchronize()
        for file, memory in zip(self.files[piece.parameter], host, strict=False):
            file.write(piece.start, memory)

    def _update(self, piece: Piece, means: Sequence[Tensor]) -> None:
        gradient, group = piece.parameter.grad, piece.group
        assert gradient is not None
        # The function adds one to the step itself, and would do so for every piece.
        step = self.state[piece.parameter]["step"] - 1
        adamw(
            [piece.of(piece.parameter)],
            [local_tensor(gradient).reshape(-1)[piece.start : piece.stop]],
            [means[0]],
            [means[1]],
            [],
            [step],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _placed_as(parameter: Tensor, held: Tensor) -> Tensor:
    """Return ``held``, in host memory, as this rank's part of a tensor placed as the parameter is."""
    if not isinstance(parameter, DTensor):
        return held
    # DTensor.from_local would copy it to the device.
    whole = torch.empty_like(parameter, device="cpu", requires_grad=False)
    whole.to_local().set_(held)  # type: ignore[call-overload]
    return whole
