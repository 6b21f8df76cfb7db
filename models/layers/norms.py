"""The norms of models, and constant factors."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from compose.ops.layers import RMSNorm

NORMS: Mapping[str, Callable[[int, float], nn.Module]] = {
    "rms": lambda dim, eps: RMSNorm(dim, eps=eps),
    "layer": lambda dim, eps: nn.LayerNorm(dim, eps=eps),
    "layer_without_bias": lambda dim, eps: nn.LayerNorm(dim, eps=eps, bias=False),
    "layer_without_weight": lambda dim, eps: nn.LayerNorm(dim, eps=eps, elementwise_affine=False),
}
"""Norms of a width and an epsilon, by their name in a config; LayerNorm is Ba et al. 2016's."""


class Scale(nn.Module):
    """A constant factor.

    It is a module, so that a stage of a pipeline without the embedding has no factor either.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Return the product; a number is multiplied in float32, unrounded."""
        return x * self.factor
