"""The checks that configs of models share; each raises ValueError with the name of a field."""

from typing import Any

import torch


def check_at_least(config: Any, least: int, *fields: str, bits: int = 31) -> None:
    """Check that fields are at least ``least``, and below 2^bits."""
    for field in fields:
        if not least <= getattr(config, field) < 2**bits:
            value = getattr(config, field)
            raise ValueError(f"{field}: {value} should be at least {least}, below 2^{bits}")


def check_above_0(config: Any, *fields: str) -> None:
    """Check that factors are above 0."""
    for field in fields:
        if not getattr(config, field) > 0:
            raise ValueError(f"{field}: {getattr(config, field)} should be above 0")


def check_even(config: Any, *fields: str) -> None:
    """Check the widths that RoPE rotates."""
    for field in fields:
        if getattr(config, field) % 2:
            raise ValueError(f"{field}: {getattr(config, field)} is not even, and RoPE rotates pairs")


def check_kv_heads(config: Any) -> None:
    """Check that each key/value head serves a whole number of query heads."""
    if config.n_heads % config.n_kv_heads:
        raise ValueError(f"n_kv_heads: {config.n_kv_heads} does not divide n_heads {config.n_heads}")


def check_eps(config: Any, field: str = "norm_eps") -> None:
    """Check that an epsilon is above 0 in float32, in which a norm is computed."""
    check_above_0(config, field)
    smallest, eps = torch.finfo(torch.float32).smallest_normal, getattr(config, field)
    if eps < smallest:
        raise ValueError(f"{field}: {eps} is 0 in float32, which has nothing below {smallest:.1e}")
