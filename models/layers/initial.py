"""The first values of a model's parameters."""

import torch
from torch import Generator, Tensor

_ENDS_OF_BRANCHES = ("wo.weight", "w2.weight", "experts.w2", "experts.down")


@torch.no_grad()
def init_by_depth(name: str, tensor: Tensor, generator: Generator, n_layers: int) -> None:
    """Fill a whole parameter: zeros (biases, sinks), ones (norms), else normal.

    The projections that end a residual branch are scaled by (2 n_layers)^-1/2 (Radford et al. 2019,
    GPT-2), so that the stream's variance does not grow with depth.
    """
    if name.endswith(("bias", "sinks.weight")):
        tensor.zero_()
    elif tensor.ndim == 1:
        tensor.fill_(1.0)
    else:
        scale = (2 * n_layers) ** -0.5 if name.endswith(_ENDS_OF_BRANCHES) else 1.0
        tensor.normal_(0.0, 0.02 * scale, generator=generator)
