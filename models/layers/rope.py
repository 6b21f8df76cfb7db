"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), and the rules of llama3 and YaRN."""

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


def yarn_frequencies(
    head_dim: int,
    theta: float,
    factor: float,
    original_max_seq_len: int,
    beta_fast: float,
    beta_slow: float,
    device: torch.device | None = None,
) -> Tensor:
    """Frequencies as :func:`inverse_frequencies`, scaled by YaRN (Peng et al. 2023, arXiv:2309.00071).

    Pairs that turn more than ``beta_fast`` times within ``original_max_seq_len`` are kept, those that
    turn less than ``beta_slow`` times are slowed down by ``factor``. Between them the blend is linear
    in the pair's index, from whole index to whole index: as DeepSeek's models were trained, where the
    paper has it linear in the turns.
    """
    frequency = inverse_frequencies(head_dim, theta, device=device)
    if factor == 1.0:
        return frequency

    def index(turns: float) -> float:
        """The pair that turns so often: theta^(-2 i / head_dim) * length = 2 pi turns, solved for i."""
        ratio = original_max_seq_len / (2 * math.pi * turns)
        return head_dim / 2 * math.log(ratio) / math.log(theta)

    first = max(math.floor(index(beta_fast)), 0)
    # Bounded by the width, where the pairs are half as many: so it is for the published weights.
    last = min(math.ceil(index(beta_slow)), head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
    slowed = ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)
    return frequency * (1 - slowed + slowed / factor)


def yarn_magnitude(factor: float, mscale: float) -> float:
    """YaRN's factor on queries and on keys alike, against the entropy that a longer context adds.

    ``mscale`` weighs the part that grows with ``factor``; the paper has 1.
    """
    return 1 + 0.1 * mscale * math.log(factor)


def yarn_weight(factor: float, magnitude: float) -> float:
    """The ``mscale`` with which :func:`yarn_magnitude` is ``magnitude``; ``factor`` is above 1."""
    return (magnitude - 1) / (0.1 * math.log(factor))


def rotation(
    positions_BL: Tensor, inverse_frequency: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each of shape (B, L, 1, head_dim / 2).

    They are float32, or of ``dtype``, that of what is rotated, where this is wider.
    """
    wide = torch.promote_types(dtype, torch.float32)
    angles = positions_BL[..., None, None].to(wide) * inverse_frequency
    return angles.cos(), angles.sin()


def rotate(x_BLHK: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of each head: the layout of Hugging Face's weights.

    ``interleaved``: the pairs (2 i, 2 i + 1), that of Meta's and DeepSeek's weights.
    """
    x = x_BLHK.to(torch.promote_types(x_BLHK.dtype, torch.float32))
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    whole = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return whole.type_as(x_BLHK)
