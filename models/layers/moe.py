"""Mixture of experts (Shazeer et al. 2017, arXiv:1701.06538), as it runs on one process.

    router   scores every expert for every token and picks k of them (router.py)
    experts  run the tokens that chose them, sorted by expert
    moe      sorts the rows, runs the experts, restores the order, and sums by the router's weights

Shapes: B batch, L sequence length, D model width, E experts, k experts per token, F an expert's inner
width, T = B L tokens, N = T k rows that experts run (fewer if tokens are dropped).
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compose.ops.layers import grouped_mm as operator

from .router import MoEConfig, Router, Routing, count_rows


class Experts(nn.Module):
    """SwiGLU experts as stacked weights: w1 and w3 (E, F, D), w2 (E, D, F), as nn.Linear's are."""

    def __init__(self, n_experts: int, dim: int, expert_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, expert_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, expert_dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, expert_dim, dim))
        for weight in self.parameters():
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x_ND: Tensor, counts_E: Tensor) -> Tensor:
        """Run each expert on its rows, sorted by expert; the result (N, D) has the same order."""
        return self.run(x_ND, counts_E, self.w1, self.w2, self.w3)

    @staticmethod
    def run(x_ND: Tensor, counts_E: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        """Run :meth:`forward` with given weights, for as many experts as there are counts."""
        hidden = F.silu(grouped_mm(x_ND, w1, counts_E)) * grouped_mm(x_ND, w3, counts_E)
        return grouped_mm(hidden, w2, counts_E)


def grouped_mm(
    x_NK: Tensor, weight_EMK: Tensor, counts_E: Tensor, bias_EM: Tensor | None = None
) -> Tensor:
    """Multiply each expert's rows by its transposed weight, in one kernel where there is one.

    Rows are sorted by expert. ``bias_EM`` is what each expert adds to its rows. Returns (N, M).
    """
    if _has_kernel(x_NK, weight_EMK):
        ends = counts_E.cumsum(0, dtype=torch.int32)
        whole = F.grouped_mm(x_NK, weight_EMK.transpose(-2, -1), offs=ends)
    elif torch.compiler.is_compiling():  # no graph can read the counts
        whole = operator(x_NK, weight_EMK, counts_E)
    else:
        parts = x_NK.split(_even(x_NK, len(weight_EMK)) if x_NK.is_meta else counts_E.tolist())
        # The backward of unbind is one stack. Indexing would make a whole gradient for each expert.
        pairs = zip(parts, weight_EMK.unbind(), strict=True)
        whole = torch.cat([F.linear(*each) for each in pairs])
    # A rank without a row has no kernel. Its biases must be added at a place of their own all the same:
    # a backward in two parts recomputes a layer once for each place, with the messages of all ranks.
    return whole if bias_EM is None else cast(Tensor, _AddBias.apply(whole, bias_EM, counts_E))


class _AddBias(torch.autograd.Function):
    """Rows (N, M), each with the bias of its expert; bias (E, M).

    A bias' gradient is the sum over its expert's rows. It is a product with ones and zeros (E, N):
    indexing would add the rows by atomic operations, in any order and in their own type.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
        numbers = torch.arange(len(bias), device=rows.device)
        experts = numbers.repeat_interleave(counts, output_size=len(rows))
        ctx.save_for_backward(numbers, experts)
        return rows + bias.index_select(0, experts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        numbers, experts = ctx.saved_tensors
        return grads[0], (numbers[:, None] == experts).to(grads[0].dtype) @ grads[0], None


def _even(x: Tensor, experts: int) -> list[int]:
    """Return even counts, as there are none on meta."""
    return [len(x) // experts + (i < len(x) % experts) for i in range(experts)]


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Tell whether ``grouped_mm`` takes these: bfloat16, rows of whole 16 bytes, at least one row."""
    aligned = x.shape[-1] % 8 == 0 and weight.shape[-2] % 8 == 0 and len(x) > 0
    if x.dtype != torch.bfloat16 or not aligned:
        return False
    if x.is_cpu or x.is_meta:
        return True
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 0)


class MoE(nn.Module):
    """The layer, (B, L, D) to (B, L, D); every token also goes to the expert ``shared``, if any.

    The router's weights are applied after the experts. If all rows of a token are dropped, it gets the
    output of ``shared`` alone. ``experts`` are others than :class:`Experts`, with the same forward.
    ``shared_gate`` gives the output of ``shared`` a weight between 0 and 1, which each token chooses.
    """

    def __init__(
        self,
        dim: int,
        config: MoEConfig,
        shared: nn.Module | None = None,
        experts: nn.Module | None = None,
        gate_bias: bool = False,
        shared_gate: bool = False,
    ) -> None:
        super().__init__()
        self.router = Router(dim, config, gate_bias)
        self.experts = experts or Experts(config.n_experts, dim, config.expert_dim)
        self.shared = shared
        self.shared_gate = nn.Linear(dim, 1, bias=False) if shared_gate else None

    def forward(self, x_BLD: Tensor, real_BL: Tensor | None = None) -> Tensor:
        """Run the layer; ``real_BL`` is False for padding, which is computed but not counted."""
        routing: Routing = self.router(x_BLD, real_BL)
        k, n_experts = routing.experts.shape[-1], self.router.config.n_experts
        rows_N = routing.experts.flatten()
        if routing.kept is not None:
            rows_N = rows_N.where(routing.kept.flatten(), n_experts)
        order = rows_N.argsort(stable=True)
        counts_E = count_rows(rows_N, n_experts)
        if routing.kept is not None and not x_BLD.is_meta:  # meta tensors have no counts
            order = order[: int(counts_E.sum())]
        # Where each row went. A dropped row has the place after all of them.
        places = order.new_full((len(rows_N),), len(order))
        places.scatter_(0, order, torch.arange(len(order), device=order.device))
        x_TD = x_BLD.flatten(0, 1)
        out_ND = self.experts(_Dispatch.apply(x_TD, order, places, k), counts_E)
        weights_TK = routing.weights.flatten(0, 1).to(out_ND.dtype)
        out_BLD = cast(Tensor, _Combine.apply(out_ND, weights_TK, order, places)).view_as(x_BLD)
        if self.shared is None:
            return out_BLD
        shared_BLD = self.shared(x_BLD)
        if self.shared_gate is not None:
            shared_BLD = self.shared_gate(x_BLD).sigmoid() * shared_BLD
        return out_BLD + shared_BLD


class _Dispatch(torch.autograd.Function):
    """Rows for the experts, (N, D): row i belongs to token ``order[i] // k`` of (T, D).

    The gradient of a token is the sum over its k rows, in their order. Indexing would add them by
    atomic operations, in any order.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order: Tensor, places: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.k = k
        return x_TD.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole = _restored(grads[0], *ctx.saved_tensors)
        return whole.unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    """Each token's sum (T, D) of its rows (N, D) by their weights (T, k): those dropped are zero.

    A row's gradient is its token's by its weight. Autograd would take a product of matrices (k, 1) and
    (1, D) for each token. A GPU has no fast kernel for it.
    """

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, weights_TK: Tensor, order: Tensor, places: Tensor) -> Tensor:
        back_TKD = _restored(rows_ND, places).unflatten(0, weights_TK.shape)
        ctx.save_for_backward(back_TKD, weights_TK, order)
        return (weights_TK[:, None] @ back_TKD).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back_TKD, weights_TK, order = ctx.saved_tensors
        (grad_TD,) = grads
        of_rows = grad_TD.index_select(0, order // weights_TK.shape[1])
        of_rows *= weights_TK.flatten().index_select(0, order)[:, None]
        of_weights = grad_TD[:, None] @ back_TKD.transpose(1, 2)
        return of_rows, of_weights.squeeze(1), None, None


def _restored(rows: Tensor, places: Tensor) -> Tensor:
    """Return the row of each place; the place after all rows has zeros."""
    if len(rows) < len(places):
        rows = F.pad(rows, (0, 0, 0, 1))
    return rows.index_select(0, places)
