"""What the norms of all models here ask of their config."""

import torch


def check_eps(field: str, eps: float) -> None:
    """Raises ValueError where ``eps`` is not above 0 in float32, which a norm is computed in."""
    if not eps > 0:
        raise ValueError(f"{field}: {eps} should be above 0")
    smallest = torch.finfo(torch.float32).smallest_normal
    if eps < smallest:
        raise ValueError(f"{field}: {eps} is 0 in float32, which has nothing below {smallest:.1e}")
