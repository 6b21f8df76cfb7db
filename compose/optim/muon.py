"""Muon: orthogonalized momentum, for matrices that may be cut over any mesh."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compose.ops.cross_entropy import at_least_float32
from compose.optim.assignment import Layout, Messages, Slab, assigned, in_flight, layout_of
from compose.optim.regions import Region, chunks, lengths, local, within
from compose.optim.rounding import random_bits, store
from compose.optim.state import MakesState

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7  # added to the norm by which matrices are divided
SCALE = 0.2


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return nearly U V^T for each matrix U S V^T in (..., R, C), and zeros for zeros.

    These are five quintic iterations of Newton and Schulz, in the type of ``matrices``, with the
    coefficients of Jordan et al. 2024 (kellerjordan.github.io/posts/muon). They bring small singular
    values up fast. But they bring singular values to between 0.7 and 1.2, not to 1.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # this gives the smaller of the two Gram matrices
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide)
    x = (x / (norm + EPS)).to(matrices.dtype)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(MakesState):
    """Muon (Jordan et al. 2024), with the scale of Moonlight (Liu et al. 2025, arXiv:2502.16982).

    For a matrix W (R, C) with gradient G, momentum m and weight decay w:

        M <- m M + G
        W <- (1 - lr w) W - lr 0.2 sqrt(max(R, C)) orthogonalized(G + m M)

    The elements of a step have a root mean square of about 0.2 lr, as AdamW's do. So AdamW's learning
    rate and weight decay can be used here too.

    Args:
        params: Named parameters or groups of them, as torch's optimizers take them. They are matrices
            (R, C), or stacks of them (E, R, C), one for each expert; float32 or bfloat16; plain, or
            DTensors in any placement on meshes of the ranks of ``group``. All these ranks take the step
            together. If a gradient is None on one of them, it must be None on all.
        lr: The learning rate.
        momentum: Decay of the sum of gradients.
        weight_decay: Decoupled weight decay.
        group: The ranks that share the matrices; None is all ranks.
        mesh: As for ``layout_of`` (assignment.py).
        dtype: Type in which matrices are sent and orthogonalized. None is bfloat16 on a GPU, whose
            matrix units are several times as fast in it, and float32 on a CPU, which gains nothing by
            it.
        state_dtype: As for AdamW (adamw.py).
        seed: As for AdamW (adamw.py).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        *,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        dtype: torch.dtype | None = None,
        state_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.group = group or (dist.group.WORLD if dist.is_initialized() else None)
        self.rank = dist.get_rank(self.group) if self.group else 0
        self.state_dtype, self.seed = state_dtype, seed
        self.matrices: list[tuple[str, nn.Parameter, dict[str, Any]]] = [
            (name, parameter, options)
            for options in self.param_groups
            for name, parameter in zip(options["param_names"], options["params"], strict=True)
        ]
        for name, parameter, _ in self.matrices:
            if parameter.ndim not in (2, 3):
                raise ValueError(f"{name} is no matrix or stack of matrices: {tuple(parameter.shape)}")
        self.device = self.matrices[0][1].device
        self.dtype = dtype or (torch.float32 if self.device.type == "cpu" else torch.bfloat16)
        self.layouts: list[Layout] = []
        known: dict[Any, Layout] = {}  # many layers have the same layout
        for _, parameter, _ in self.matrices:
            key = _placed(parameter)
            if key not in known:
                known[key] = layout_of(parameter, self.group, mesh)
            self.layouts.append(known[key])
        if self.group and self.group.size() > 1:
            # NCCL needs a first collective of the whole group before some of its ranks send messages.
            dist.all_reduce(torch.zeros((), device=self.device), group=self.group)
        # Each rank may have other tensors that it handles alone.
        cut = {i: len(layout.regions) > 1 for i, layout in enumerate(self.layouts)}
        self.rounds = assigned({i: x for i, x in enumerate(self.layouts) if cut[i]})
        self.rounds += assigned({i: x for i, x in enumerate(self.layouts) if not cut[i]})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step for the parameters that have a gradient; a collective of ``group``."""
        for _, parameter, _ in self.matrices:
            if parameter.grad is not None:
                self._begin(parameter)
        for slabs in self.rounds:
            here = [slab for slab in slabs if self.matrices[slab.parameter][1].grad is not None]
            own = self._gather(here)
            result = None if own is None else orthogonalized(own)
            del own
            for some in in_flight(here):
                self._scatter(some, result)

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state of ``parameter``, and make it if there is none."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())  # it is on the host, since the host reads it
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=self.state_dtype)
        return state

    def _begin(self, parameter: nn.Parameter) -> None:
        there, here = (getattr(x, "placements", ()) for x in (parameter.grad, parameter))
        if there != here:
            raise ValueError(f"a gradient is placed as {there}, its parameter as {here}")
        self.state_of(parameter)["step"] += 1

    def _gather(self, slabs: Sequence[Slab]) -> Tensor | None:
        """Update the momentum, gather slabs on their owners, and return the slab of this rank."""
        messages, arriving = Messages(self.group), []
        own: Tensor | None = None
        for slab in slabs:
            layout = self.layouts[slab.parameter]
            mine = layout.part(self.rank, slab.region)
            if not mine:
                continue
            part, copy = self._momentum(slab.parameter, mine), layout.replica[slab.owner]
            if slab.owner == self.rank:
                own = part.new_empty(lengths(slab.region))
                own[within(mine, slab.region)] = part
                for rank, region in layout.parts(slab.region):
                    if rank != self.rank and layout.replica[rank] == copy:
                        piece = messages.receive(region, rank, self.dtype, self.device)
                        arriving.append((within(region, slab.region), piece))
            elif layout.replica[self.rank] == copy:  # the other replicas would send the same
                messages.send(part, slab.owner)
        messages.exchange()
        for place, piece in arriving:
            assert own is not None
            own[place] = piece
        return own

    def _scatter(self, slabs: Sequence[Slab], result: Tensor | None) -> None:
        """Give every rank its part of the owners' results, and take the step with it.

        ``result`` belongs to the slab that this rank owns, which need not be one of ``slabs``.
        """
        messages, found = Messages(self.group), []
        for slab in slabs:
            layout = self.layouts[slab.parameter]
            mine = layout.part(self.rank, slab.region)
            if slab.owner == self.rank:
                assert result is not None
                packed: dict[str, Tensor] = {}  # replicas get the same message
                for rank, region in layout.parts(slab.region):
                    piece = packed.get(str(region))
                    if piece is None:
                        piece = packed[str(region)] = result[within(region, slab.region)].contiguous()
                    if rank != self.rank:
                        messages.send(piece, rank)
                found.append((slab.parameter, mine, packed[str(mine)]))
            elif mine:
                piece = messages.receive(mine, slab.owner, self.dtype, self.device)
                found.append((slab.parameter, mine, piece))
        messages.exchange()
        for parameter, region, piece in found:
            self._update(parameter, region, piece)

    def _momentum(self, number: int, region: Region) -> Tensor:
        """Update this rank's momentum in ``region``; return it with Nesterov's look ahead."""
        name, parameter, options = self.matrices[number]
        gradient = self._stack(parameter.grad, number)
        buffer = self._stack(self.state[parameter]["momentum_buffer"], number)
        purpose = f"{name}/{int(self.state[parameter]['step'])}/state"
        ahead = torch.empty(lengths(region), dtype=self.dtype, device=self.device)
        shape, held = self.layouts[number].shape, self.layouts[number].regions[self.rank]
        for part in chunks(region):
            here = within(part, held)
            g = at_least_float32(gradient[here])
            momentum = at_least_float32(buffer[here]) * options["momentum"]
            momentum += g
            ahead[within(part, region)] = g.add(momentum, alpha=options["momentum"])
            store(buffer[here], momentum, random_bits(self.seed, purpose, part, shape, buffer))
        return ahead

    def _update(self, number: int, region: Region, direction: Tensor) -> None:
        name, parameter, options = self.matrices[number]
        weight = self._stack(parameter, number)
        purpose = f"{name}/{int(self.state[parameter]['step'])}/weight"
        shape, held = self.layouts[number].shape, self.layouts[number].regions[self.rank]
        lr, scale = options["lr"], SCALE * math.sqrt(max(shape[1:]))
        for part in chunks(region):
            here = within(part, held)
            new = at_least_float32(weight[here]) * (1 - lr * options["weight_decay"])
            new.add_(direction[within(part, region)].to(new.dtype), alpha=-lr * scale)
            store(weight[here], new, random_bits(self.seed, purpose, part, shape, weight))

    def _stack(self, tensor: Tensor | None, number: int) -> Tensor:
        """Return this rank's part of a tensor like parameter ``number``, as a view with three dims."""
        part = local(tensor)
        return part if part.ndim == 3 else part.unsqueeze(0)


def _placed(parameter: nn.Parameter) -> tuple[Any, ...]:
    """Return all that decides where the parts of a parameter are."""
    if isinstance(parameter, DTensor):
        return parameter.shape, parameter.placements, parameter.device_mesh
    return (parameter.shape,)
