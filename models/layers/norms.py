"""The check of the config that the norms of all models need."""

import torch


def check_eps(field: str, eps: float) -> None:
    """Raise ValueError unless ``eps`` is above 0 in float32, in which a norm is computed.

    Args:
        field: The field's name, for the message.
        eps: Its value.

    Raises:
        ValueError: ``eps`` is 0 in float32, or below.
    """
    if not eps > 0:
        raise ValueError(f"{field}: {eps} should be above 0")
    smallest = torch.finfo(torch.float32).smallest_normal
    if eps < smallest:
        raise ValueError(f"{field}: {eps} is 0 in float32, which has nothing below {smallest:.1e}")
