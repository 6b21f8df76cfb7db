"""The experts of gpt-oss (OpenAI 2025, arXiv:2508.10925): a clamped SwiGLU, with biases.

Shapes: D model width, E experts, F an expert's inner width, N rows.
"""

import torch
from torch import Tensor, nn

from .moe import grouped_mm


class ClampedExperts(nn.Module):
    """Experts of (up + 1) gate sigmoid(alpha gate), where ``limit`` bounds gate and up.

    Their weights are stacked: ``gate_up`` (E, 2 F, D), which has the rows of gate and up in turn, and
    ``down`` (E, D, F). So are their biases, ``gate_up_bias`` (E, 2 F) and ``down_bias`` (E, D).
    """

    def __init__(self, n_experts: int, dim: int, expert_dim: int, alpha: float, limit: float) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit
        self.gate_up = nn.Parameter(torch.empty(n_experts, 2 * expert_dim, dim))
        self.gate_up_bias = nn.Parameter(torch.empty(n_experts, 2 * expert_dim))
        self.down = nn.Parameter(torch.empty(n_experts, dim, expert_dim))
        self.down_bias = nn.Parameter(torch.empty(n_experts, dim))
        for weight in self.parameters():
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x_ND: Tensor, counts_E: Tensor) -> Tensor:
        """Run each expert on its rows, as :class:`.moe.Experts` does."""
        return self.run(x_ND, counts_E, self.gate_up, self.gate_up_bias, self.down, self.down_bias)

    def run(
        self,
        x_ND: Tensor,
        counts_E: Tensor,
        gate_up: Tensor,
        gate_up_bias: Tensor,
        down: Tensor,
        down_bias: Tensor,
    ) -> Tensor:
        """Run :meth:`forward` with given parameters, for as many experts as there are counts."""
        hidden = grouped_mm(x_ND, gate_up, counts_E, gate_up_bias)
        gate, up = hidden.unflatten(-1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return grouped_mm((up + 1) * gate * (self.alpha * gate).sigmoid(), down, counts_E, down_bias)
