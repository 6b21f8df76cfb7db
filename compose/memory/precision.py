"""The table [precision]: in which types a step computes, reduces and keeps."""

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Precision:
    """The table [precision]."""

    param: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of parameters and activations in forward and backward; with float16 the loss is scaled
    dynamically."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are accumulated and reduced."""
    float8: Literal["off", "tensorwise", "rowwise", "rowwise_gw_hp"] = "off"
    """How products of the plan's linear layers are scaled to 8 bits; needs torchao."""
    master: Literal["float32", "bfloat16"] = "float32"
    """Type in which weights are kept between steps; bfloat16 is rounded stochastically."""
    optimizer_state: Literal["float32", "bfloat16"] = "float32"
    """Type of the optimizer's running means; bfloat16 is rounded stochastically."""

    @property
    def param_dtype(self) -> torch.dtype:
        """``param`` as torch's type."""
        return getattr(torch, self.param)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """``reduce`` as torch's type."""
        return getattr(torch, self.reduce)

    @property
    def master_dtype(self) -> torch.dtype:
        """``master`` as torch's type."""
        return getattr(torch, self.master)

    @property
    def state_dtype(self) -> torch.dtype:
        """``optimizer_state`` as torch's type."""
        return getattr(torch, self.optimizer_state)
