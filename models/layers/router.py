"""The router of a mixture of experts: which experts a token goes to, and how load is kept even.

Shapes: B batch, L sequence length on this rank, S length of whole sequences, D model width, E experts,
k experts per token, T = B L tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compose.ops.layers import wide_linear

from .checks import check_above_0, check_at_least


@dataclass(frozen=True)
class MoEConfig:
    """The fields of a model's config that its mixture-of-experts layers read.

    ``training_fields`` are those that change how it is trained, and not what its weights mean.
    """

    training_fields: ClassVar[tuple[str, ...]] = (
        "balance_loss",
        "balance_weight",
        "z_weight",
        "bias_rate",
        "capacity_factor",
    )

    n_experts: int = 0
    """Routed experts of a mixture-of-experts layer; 0 makes every layer dense."""
    top_k: int = 2
    """Experts that each token goes to."""
    expert_dim: int = 192
    """Inner width of an expert."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become scores: over all experts, or each by itself."""
    normalize_weights: bool = True
    """Divide the weights of a token's experts by their sum."""
    route_scale: float = 1.0
    """Factor on those weights."""
    n_groups: int = 1
    """Groups of neighbouring experts; a token picks groups first, by their best scores."""
    top_groups: int = 1
    """Groups that a token's experts come from."""
    group_best: int = 2
    """A group's score is the sum of its so many best."""
    balance_loss: Literal["batch", "sequence"] = "batch"
    """The balancing loss evens out the load of the whole batch, or of each sequence."""
    balance_weight: float = 0.0
    """Weight of the balancing loss; 0 is none."""
    z_weight: float = 0.0
    """Weight of the router's z-loss, which keeps its logits small; 0 is none."""
    bias_rate: float = 0.0
    """Step of each expert's selection bias against its load (balancing without a loss); 0 is none."""
    capacity_factor: float = 0.0
    """Rows of a sequence that an expert takes, over an even share; the rest is dropped. 0: no limit."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "n_experts", bits=16)
        for factor in ("balance_weight", "z_weight", "bias_rate", "capacity_factor"):
            if not getattr(self, factor) >= 0:
                raise ValueError(f"{factor}: {getattr(self, factor)} should be at least 0")
        if not self.n_experts:
            return
        sizes = ("top_k", "expert_dim", "n_groups", "top_groups", "group_best")
        check_at_least(self, 1, *sizes)
        check_above_0(self, "route_scale")
        if self.n_experts % self.n_groups:
            raise ValueError(f"n_groups: {self.n_groups} does not divide n_experts {self.n_experts}")
        if self.n_groups > 1 and self.n_experts // self.n_groups < self.group_best:
            few = {1: "one expert; two are scored"} if self.group_best == 2 else {}
            each = self.n_experts // self.n_groups
            few = few.get(each, f"{each}; group_best = {self.group_best} are scored")
            raise ValueError(f"n_groups: {self.n_groups} leaves groups of {few}")
        if self.top_groups > self.n_groups:
            raise ValueError(f"top_groups: {self.top_groups} is more than n_groups {self.n_groups}")
        choice = self.n_experts // self.n_groups * self.top_groups
        if self.top_k > choice:
            raise ValueError(f"top_k: {self.top_k} is more than the {choice} experts to choose from")


class Routing(NamedTuple):
    """The decisions of a router."""

    experts: Tensor
    """The chosen experts, (B, L, k), int64."""
    weights: Tensor
    """The weights of the experts' outputs, (B, L, k), float32."""
    kept: Tensor | None
    """(B, L, k), False where a row is dropped; None: no row is."""
    margin: Tensor
    """The margin of the choice, (B, L), as :meth:`Router.choose` returns it."""


class Gate(nn.Linear):
    """The router's projection, (T, D) to logits (T, E): in float32, or in its input's type if wider."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits (T, E) of ``input`` (T, D)."""
        return self.product(input, self.weight, self.bias)

    product = staticmethod(wide_linear)


class Router(nn.Module):
    """Scores experts, picks k for each token, and keeps the load even.

    A loss of the router is a mean over all tokens of an optimizer step. Its gradient is added in
    backward, and the loss is no part of the model's output. So it needs no path through later layers or
    pipeline stages. The router counts (``tally``) in backward too: once per token, with recomputation
    or without, and nothing in evaluation. After a step, :meth:`finish_step` takes the tally of the
    whole batch.

    ``gate_bias`` gives the projection a bias, which is trained. (``bias`` is the one of the selection,
    which follows the load.) ``tokens_per_step`` are the tokens of the whole batch without padding;
    None: those of one forward. ``loss_scale`` is the factor of its losses' gradients, the same as for
    the model's own loss. ``gather_sequence`` takes (B, L, n) of this rank's tokens and returns (B, S,
    n) of whole sequences, in any order, if other ranks hold the rest.
    """

    bias: Tensor
    load: Tensor
    tally: Tensor

    def __init__(self, dim: int, config: MoEConfig, gate_bias: bool = False) -> None:
        super().__init__()
        self.config = config
        self.gate = Gate(dim, config.n_experts, gate_bias)
        self.tokens_per_step: int | Tensor | None = None
        self.loss_scale = 1.0
        self.gather_sequence: Callable[[Tensor], Tensor] = _alone
        n = config.n_experts
        # The buffers are on a real device even if the model is on meta: their values are constants.
        self.register_buffer("bias", torch.zeros(n, device="cpu"))
        # The share of each expert in the last step's batch.
        self.register_buffer("load", torch.full((n,), 1 / n, device="cpu"))
        # It holds the rows of each expert, then the dropped rows, then the sums over tokens of the
        # balancing loss and the z-loss.
        tally = torch.zeros(n + 3, dtype=torch.float64, device="cpu")
        self.register_buffer("tally", tally, persistent=False)
        self.last: dict[str, Tensor] = {}

    def forward(self, x_BLD: Tensor, real_BL: Tensor | None = None) -> Routing:
        """Choose experts for each token; ``real_BL`` is False for padding, which counts for nothing."""
        c = self.config
        logits_BLE = self.gate(x_BLD.flatten(0, 1)).unflatten(0, x_BLD.shape[:2])
        sigmoid = c.scoring == "sigmoid"
        scores_BLE = logits_BLE.sigmoid() if sigmoid else logits_BLE.softmax(-1)
        experts_BLK, margin_BL = self.choose(scores_BLE.detach() + self.bias)
        picked_BLK = scores_BLE.gather(-1, experts_BLK)
        weights_BLK = picked_BLK
        if c.normalize_weights and c.top_k == 1:
            # The weight is 1, whatever the score. A quotient would have a gradient of rounding errors.
            weights_BLK = weights_BLK * 0 + 1
        elif c.normalize_weights:
            weights_BLK = weights_BLK / (weights_BLK.sum(-1, keepdim=True) + 1e-20)
        weights_BLK = weights_BLK * c.route_scale

        real_BL = torch.ones_like(x_BLD[..., 0], dtype=torch.bool) if real_BL is None else real_BL
        # A row for padding gets no expert: its number is n_experts.
        chosen_BLK = torch.where(real_BL[..., None], experts_BLK, c.n_experts)
        everyone_BSK: Tensor | None = None
        kept_BLK: Tensor | None = None
        if c.capacity_factor or (c.balance_weight and c.balance_loss == "sequence"):
            everyone_BSK = self.gather_sequence(chosen_BLK)
        if c.capacity_factor:
            assert everyone_BSK is not None
            kept_BLK, _ = self.keep(chosen_BLK, picked_BLK.detach(), everyone_BSK)
        if torch.is_grad_enabled():
            probabilities = scores_BLE / scores_BLE.sum(-1, keepdim=True) if sigmoid else scores_BLE
            balance = self._balance(probabilities, real_BL, everyone_BSK)
            z = (logits_BLE.logsumexp(-1).square() * real_BL).sum()
            # A loss with a weight of 0 is only reported.
            loss = sum(
                weight * (value if weight else value.detach())
                for weight, value in ((c.balance_weight, balance), (c.z_weight, z))
            )
            with torch.no_grad():
                counts = count_rows(chosen_BLK, c.n_experts)
                dropped = (
                    counts.new_zeros(()) if kept_BLK is None else (~kept_BLK & real_BL[..., None]).sum()
                )
                result = torch.cat([counts.double(), torch.stack([dropped, balance, z]).double()])
            tokens = self.tokens_per_step
            tokens = real_BL.sum().clamp(min=1) if tokens is None else tokens
            loss = loss * self.loss_scale / tokens
            weights_BLK = cast(Tensor, _Observe.apply(weights_BLK, loss, self, result))
        return Routing(experts_BLK, weights_BLK, kept_BLK, margin_BL)

    def choose(self, scores_BLE: Tensor) -> tuple[Tensor, Tensor]:
        """Choose each token's experts, out of its best groups (DeepSeek-AI 2024, arXiv:2412.19437).

        Returns the experts (B, L, k) and the margin (B, L). The margin is how far the last chosen score
        is ahead of the first one that was not chosen, relative to it.
        """
        c, margin_BL = self.config, torch.full_like(scores_BLE[..., 0], torch.inf)
        if c.top_groups < c.n_groups:
            groups = scores_BLE.unflatten(-1, (c.n_groups, -1))
            best = groups.topk(c.group_best).values.sum(-1).topk(c.top_groups + 1)
            margin_BL = _lead(best.values)
            outside = torch.ones_like(groups[..., 0], dtype=torch.bool)
            outside = outside.scatter(-1, best.indices[..., :-1], False)
            scores_BLE = groups.masked_fill(outside[..., None], -torch.inf).flatten(-2)
        choice = c.n_experts // c.n_groups * c.top_groups
        best = scores_BLE.topk(min(c.top_k + 1, choice))
        if c.top_k < choice:
            margin_BL = torch.minimum(margin_BL, _lead(best.values))
        return best.indices[..., : c.top_k], margin_BL

    def _balance(self, probabilities: Tensor, real_BL: Tensor, everyone_BSK: Tensor | None) -> Tensor:
        """Return the sum over tokens of E sum_e f_e p_e, which is 1 for each token if all is even.

        p_e is the token's probability of e, and f_e the share of e among all choices. The choices are
        those of the batch (Fedus et al. 2021, arXiv:2101.03961, eq. 4; over all ranks as in Qiu et al.
        2025, arXiv:2501.11873), or of the token's sequence (arXiv:2412.19437, eq. 17). The batch's
        share is that of the step before: backward of the first micro-batch begins before the last one
        is routed, and a sum over the current micro-batch would depend on the mesh.
        """
        c, share = self.config, self.load
        if everyone_BSK is not None and c.balance_loss == "sequence":
            counts_BE = torch.stack([count_rows(row, c.n_experts) for row in everyone_BSK])
            share = (counts_BE / counts_BE.sum(-1, keepdim=True).clamp(min=1))[:, None]
        return c.n_experts * ((probabilities * share).sum(-1) * real_BL).sum()

    def keep(
        self, chosen_BLK: Tensor, scores_BLK: Tensor, everyone_BSK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Decide which rows each expert takes: the best-scored of each sequence, up to its capacity.

        ``chosen_BLK`` are the experts of rows; E for padding, which is not taken. ``everyone_BSK`` are
        those of whole sequences.

        Returns True where a row is taken (B, L, k), and the margin (B, L, k), relative to the greater
        score. For a taken row it is how far the row is ahead of the first one beyond the capacity. For
        another row it is how far it is behind the last one within the capacity. It is inf if the expert
        has room for all.
        """
        c = self.config
        scores_BSK = self.gather_sequence(scores_BLK)
        within, beyond = [], []
        for chosen, scores in zip(everyone_BSK.flatten(1), scores_BSK.flatten(1), strict=True):
            counts = count_rows(chosen, c.n_experts)
            capacity = (c.capacity_factor * counts.sum() / c.n_experts).ceil().long().clamp(min=1)
            order = scores.argsort(descending=True)
            best = scores[order[chosen[order].argsort(stable=True)]]
            full = counts > capacity
            last = counts.cumsum(0) - counts + torch.minimum(counts, capacity) - 1
            within.append(torch.where(full, best[last], -torch.inf))
            beyond.append(torch.where(full, best[(last + 1).clamp(max=len(best) - 1)], -torch.inf))

        def of_rows(limits: list[Tensor]) -> Tensor:
            # One more place, for padding, which takes no row.
            limit = F.pad(torch.stack(limits), (0, 1), value=torch.inf)
            return limit.gather(1, chosen_BLK.flatten(1)).view_as(chosen_BLK)

        last_within = of_rows(within)
        kept = scores_BLK >= last_within
        ahead = torch.where(kept, scores_BLK, last_within)
        behind = torch.where(kept, of_rows(beyond), scores_BLK)
        return kept, _relative(ahead, behind)

    @torch.no_grad()
    def finish_step(self, tally: Tensor) -> None:
        """Act on the whole batch's ``tally``, summed over ranks, after an optimizer step's backward.

        Moves each expert's bias by ``bias_rate`` towards an even load (Wang et al. 2024,
        arXiv:2408.15664). Sets ``last``: load (greatest over mean), dropped (rows), balance_loss and
        z_loss (means over tokens, unweighted), bias_change (mean size). If the balancing loss has no
        weight, the batch's is reported.
        """
        c = self.config
        counts, (dropped, balance, z) = tally[: c.n_experts], tally[c.n_experts :]
        mean = counts.mean()
        change = c.bias_rate * (mean - counts).sign().float()
        self.bias += change
        self.load.copy_(counts / counts.sum().clamp(min=1))
        tokens = (counts.sum() / c.top_k).clamp(min=1)
        self.last = {
            "load": counts.max() / mean.clamp(min=1 / c.n_experts),
            "dropped": dropped.clone(),
            "balance_loss": balance / tokens,
            "z_loss": z / tokens,
            "bias_change": change.abs().mean(),
        }
        self.tally.zero_()


def _lead(best: Tensor) -> Tensor:
    """Return the relative lead of the last but one of descending scores (..., n) over the last."""
    return _relative(best[..., -2], best[..., -1])


def _relative(ahead: Tensor, behind: Tensor) -> Tensor:
    return (ahead - behind) / ahead.abs().clamp(min=torch.finfo(ahead.dtype).tiny)


def _alone(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as it is: no other rank holds a part of its sequences."""
    return tensor


class _Observe(torch.autograd.Function):
    """Returns weights as they are; in backward it adds a loss' gradient, and to the router's tally."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, router: Router, found: Tensor) -> Tensor:
        ctx.router, ctx.found, ctx.loss_dtype = router, found, loss.dtype
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.router.tally.add_(ctx.found)  # to set the attribute anew would end a graph
        return grads[0], grads[0].new_ones((), dtype=ctx.loss_dtype), None, None


def count_rows(experts: Tensor, n_experts: int) -> Tensor:
    """Count how often each expert is in ``experts``, of any shape: (E,), int64.

    Numbers are from 0 to E, and E itself is not counted.
    """
    flat = experts.flatten()
    return flat.new_zeros(n_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))[:n_experts]
