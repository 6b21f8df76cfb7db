"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), with the llama3 scaling rule."""

import math

import torch
from torch import Tensor


def inverse_frequencies(
    head_dim: int,
    theta: float,
    scaling_factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_seq_len: int = 8192,
    device: torch.device | None = None,
) -> Tensor:
    """Angular frequency of each rotated pair, shape (head_dim / 2,), radians per position.

    ``scaling_factor`` > 1 applies the rule of Llama 3.1 (Llama team 2024, arXiv:2407.21783, and the
    reference code's ``apply_scaling``): wavelengths longer than ``original_max_seq_len /
    low_freq_factor`` are stretched by the factor, those shorter than ``original_max_seq_len /
    high_freq_factor`` are kept, and the ones between are interpolated.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequency = theta**-exponent
    if scaling_factor == 1.0:
        return frequency
    rotations = original_max_seq_len * frequency / (2 * math.pi)
    keep = ((rotations - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return frequency * (keep + (1 - keep) / scaling_factor)


def rotation(positions_BL: Tensor, inverse_frequency: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each float32 of shape (B, L, 1, head_dim / 2)."""
    angles = positions_BL[..., None, None].float() * inverse_frequency
    return angles.cos(), angles.sin()


def rotate(x_BLHK: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of each head: the layout of Hugging Face's weights."""
    first, second = x_BLHK.float().chunk(2, dim=-1)
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat(rotated, dim=-1).type_as(x_BLHK)
