"""The dense feed-forward network."""

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

Activation = Callable[[Tensor], Tensor]


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0)^2 (So et al. 2021, arXiv:2109.08668)."""
    return F.relu(x).square()


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": squared_relu,
}


class FeedForward(nn.Module):
    """A gated linear unit (Shazeer 2020, arXiv:2002.05202): SwiGLU if ``activation`` is silu.

    Without ``gated`` it is two linear layers with the activation between. ``bias`` gives each linear
    layer a bias.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        activation: Activation = F.silu,
        gated: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.w1 = nn.Linear(dim, hidden_dim, bias=bias)
        self.w2 = nn.Linear(hidden_dim, dim, bias=bias)
        self.w3 = nn.Linear(dim, hidden_dim, bias=bias) if gated else None

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return the layer's output, (B, L, D) for (B, L, D)."""
        if self.w3 is None:
            return self.w2(self.activation(self.w1(x_BLD)))
        return self.w2(self.activation(self.w1(x_BLD)) * self.w3(x_BLD))
