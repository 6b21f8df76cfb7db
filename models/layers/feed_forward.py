"""The dense feed-forward network."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """A gated linear unit (Shazeer 2020, arXiv:2002.05202): SwiGLU if ``activation`` is silu."""

    def __init__(
        self, dim: int, hidden_dim: int, activation: Callable[[Tensor], Tensor] = F.silu
    ) -> None:
        super().__init__()
        self.activation = activation
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return the layer's output, (B, L, D) for (B, L, D)."""
        return self.w2(self.activation(self.w1(x_BLD)) * self.w3(x_BLD))
