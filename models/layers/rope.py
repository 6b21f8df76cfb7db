"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), and the rules that stretch it."""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from .checks import check_above_0, check_at_least


def inverse_frequencies(
    head_dim: int,
    theta: float,
    scaling_factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_seq_len: int = 8192,
    device: torch.device | None = None,
) -> Tensor:
    """Return the angular frequency of each rotated pair, (head_dim / 2,), in radians per position.

    ``scaling_factor`` > 1 applies the rule of Llama 3.1 (Llama team 2024, arXiv:2407.21783, and the
    reference code's ``apply_scaling``). Wavelengths longer than ``original_max_seq_len /
    low_freq_factor`` are stretched by the factor. Wavelengths shorter than ``original_max_seq_len /
    high_freq_factor`` are kept. Those between are interpolated.
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
    truncate: bool = True,
    device: torch.device | None = None,
) -> Tensor:
    """Return frequencies as :func:`inverse_frequencies`, scaled by YaRN.

    YaRN is that of Peng et al. 2023, arXiv:2309.00071. Pairs that turn more than ``beta_fast``
    times within ``original_max_seq_len`` are kept. Pairs that turn less than ``beta_slow`` times
    are slowed down by ``factor``. Between them the blend is linear in the pair's index; with
    ``truncate`` it goes from whole index to whole index. DeepSeek's models and gpt-oss were trained
    so; in the paper the blend is linear in the turns.
    """
    frequency = inverse_frequencies(head_dim, theta, device=device)
    if factor == 1.0:
        return frequency

    def index(turns: float) -> float:
        """Solve theta^(-2 i / head_dim) * length = 2 pi turns for i, the pair that turns so often."""
        ratio = original_max_seq_len / (2 * math.pi * turns)
        # Far outside of all pairs the ratio may be 0 or infinite.
        return head_dim / 2 * math.log(min(max(ratio, 1e-300), 1e300)) / math.log(theta)

    first, last = index(beta_fast), index(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    # The bound is the width, though there are half as many pairs: so it was for the published weights.
    first, last = max(first, 0), min(last, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
    slowed = ((pairs - first) / (last - first or 1e-3)).clamp(0, 1)
    return frequency * (1 - slowed + slowed / factor)


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Return YaRN's factor on both queries and keys, which offsets a longer context's entropy.

    The paper has an ``mscale`` of 1.
    """
    return 1 + 0.1 * mscale * math.log(factor)


def yarn_growth(factor: float, mscale: float, all_dim: float) -> float:
    """Return the factor on the rotated part of queries and keys, over that on all of them."""
    return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)


def yarn_weight(factor: float, magnitude: float) -> float:
    """Return the ``mscale`` for which :func:`yarn_magnitude` is ``magnitude``; factors are above 1."""
    return (magnitude - 1) / (0.1 * math.log(factor))


RULES = ("linear", "dynamic", "llama3", "yarn", "longrope")
"""Rules whose factor above 1 stretches frequencies."""
UP_TO_ORIGINAL = ("dynamic", "longrope")
"""Rules whose frequencies depend on the length at hand; here they serve up to the original length."""


@dataclass(frozen=True)
class RopeFields:
    """The fields of a model's config on the rule that stretches rotary frequencies."""

    rope_scaling: float = 1.0
    """Factor of the rule that stretches long wavelengths; 1 is off."""
    rope_rule: str = "llama3"
    """That rule: linear, dynamic, llama3, yarn or longrope."""
    rope_original_seq_len: int = 8192
    """Length the model was trained at before rope_scaling."""
    rope_low_freq_factor: float = 1.0
    """llama3: wavelengths above rope_original_seq_len / this are stretched in full."""
    rope_high_freq_factor: float = 4.0
    """llama3: wavelengths below rope_original_seq_len / this are kept."""
    rope_beta_fast: float = 32.0
    """yarn: pairs that turn more often within rope_original_seq_len are kept."""
    rope_beta_slow: float = 1.0
    """yarn: pairs that turn less often are slowed down in full."""
    rope_truncate: bool = True
    """yarn: blend from whole index to whole index of the pairs."""
    rope_magnitude: float = 0.0
    """yarn, longrope: factor on queries and keys; 0 is that of the rule."""
    rope_short_factors: tuple[float, ...] = ()
    """longrope: divisors of the frequencies up to rope_original_seq_len, one for each pair."""
    rope_long_factors: tuple[float, ...] = ()
    """longrope: divisors above that length. They are kept for export, and not used here."""

    def check_rope(self, pairs: int, theta: float) -> None:
        """Raise ValueError if a field is out of its range.

        So many pairs of a head are rotated, with frequencies of this base.
        """
        check_above_0(self, "rope_scaling")
        check_at_least(self, 0, "rope_scaling", "rope_magnitude")
        if self.rope_rule not in RULES:
            raise ValueError(f'rope_rule: "{self.rope_rule}" is none of {", ".join(RULES)}')
        if not self.rope_stretches:
            return
        low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
        if self.rope_rule == "llama3" and not 0 < low < high:
            raise ValueError(f"rope_low_freq_factor: {low} should be above 0, below {high}")
        fast, slow = self.rope_beta_fast, self.rope_beta_slow
        if self.rope_rule == "yarn" and not 0 < slow <= fast:
            raise ValueError(f"rope_beta_slow: {slow} should be above 0, at most {fast}")
        if self.rope_rule == "yarn" and not theta > 1:
            raise ValueError(f"rope_theta: {theta} should be above 1 with the rule yarn")
        # longrope divides by the logarithm of the length.
        check_at_least(self, 2 if self.rope_rule == "longrope" else 1, "rope_original_seq_len")
        for name in ("rope_short_factors", "rope_long_factors") if self.rope_rule == "longrope" else ():
            factors = getattr(self, name)
            if len(factors) != pairs or not all(0 < factor < 2**31 for factor in factors):
                raise ValueError(f"{name}: should be {pairs} numbers above 0, one for each pair")

    @property
    def rope_stretches(self) -> bool:
        """Whether a rule changes the frequencies."""
        return self.rope_scaling != 1 or self.rope_rule == "longrope"

    @property
    def max_seq_len(self) -> int | None:
        """The longest sequence, where frequencies depend on the length at hand; None: no limit."""
        bounded = self.rope_stretches and self.rope_rule in UP_TO_ORIGINAL
        return self.rope_original_seq_len if bounded else None

    def rope_frequencies(self, dim: int, theta: float, device: torch.device) -> Tensor:
        """Return the stretched frequencies of a head's part of width ``dim``.

        "dynamic" stretches nothing up to ``rope_original_seq_len``, and LongRoPE (Ding et al. 2024,
        arXiv:2402.13753) has its short factors there.
        """
        factor, length = self.rope_scaling, self.rope_original_seq_len
        if self.rope_rule == "llama3":
            bounds = (self.rope_low_freq_factor, self.rope_high_freq_factor)
            return inverse_frequencies(dim, theta, factor, *bounds, length, device=device)
        if self.rope_rule == "yarn":
            bounds = (self.rope_beta_fast, self.rope_beta_slow)
            return yarn_frequencies(dim, theta, factor, length, *bounds, self.rope_truncate, device)
        plain = inverse_frequencies(dim, theta, device=device)
        if self.rope_rule == "longrope" and self.rope_short_factors:
            return plain / torch.tensor(self.rope_short_factors, dtype=plain.dtype, device=device)
        return plain / factor if self.rope_rule == "linear" else plain

    @property
    def rope_scale(self) -> float:
        """The factor on cosine and sine, with which queries and keys grow."""
        factor = self.rope_scaling
        if self.rope_magnitude or factor <= 1:
            return self.rope_magnitude or 1.0
        if self.rope_rule == "longrope":
            return math.sqrt(1 + math.log(factor) / math.log(self.rope_original_seq_len))
        return yarn_magnitude(factor, 1.0) if self.rope_rule == "yarn" else 1.0


@dataclass(frozen=True)
class YarnFields:
    """The fields of a model's config on YaRN, where there is no other rule."""

    rope_factor: float = 1.0
    """Factor of YaRN on the context's length; 1 is none."""
    rope_original_len: int = 4096
    """Length the model was trained at before rope_factor."""
    rope_beta_fast: float = 32.0
    """Frequencies that turn more often within rope_original_len are kept."""
    rope_beta_slow: float = 1.0
    """Frequencies that turn less often within rope_original_len are divided by rope_factor."""

    def check_yarn(self, theta: float) -> None:
        """Raise ValueError if a field is out of its range; the frequencies are of this base."""
        check_at_least(self, 1, "rope_original_len", "rope_factor")
        check_above_0(self, "rope_beta_slow")
        if not theta > 1:
            raise ValueError(f"rope_theta: {theta} should be above 1")
        fast, slow = self.rope_beta_fast, self.rope_beta_slow
        if not fast >= slow:
            raise ValueError(f"rope_beta_fast: {fast} is less than rope_beta_slow {slow}")

    def yarn(self, dim: int, theta: float, truncate: bool, device: torch.device) -> Tensor:
        """Return the frequencies of a head's part of width ``dim``."""
        bounds = (self.rope_beta_fast, self.rope_beta_slow, truncate)
        length = self.rope_original_len
        return yarn_frequencies(dim, theta, self.rope_factor, length, *bounds, device=device)


def rotation(
    positions_BL: Tensor, inverse_frequency: Tensor, dtype: torch.dtype, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's angles, times ``scale``: (B, L, 1, head_dim / 2) each.

    They are float32, or of ``dtype``, the type of what is rotated, if that is wider.
    """
    wide = torch.promote_types(dtype, torch.float32)
    angles = positions_BL[..., None, None].to(wide) * inverse_frequency
    cosine, sine = angles.cos(), angles.sin()
    return (cosine, sine) if scale == 1 else (cosine * scale, sine * scale)


def rotate(x_BLHK: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of each head, the layout of Hugging Face's weights.

    If cosine and sine are of fewer pairs, the first part of each head is rotated and the rest is kept.
    With ``interleaved`` the pairs are (2 i, 2 i + 1), the layout of Meta's and DeepSeek's weights.
    """
    rotated = 2 * cosine.shape[-1]
    if rotated < x_BLHK.shape[-1]:
        first = rotate(x_BLHK[..., :rotated], cosine, sine, interleaved)
        return torch.cat([first, x_BLHK[..., rotated:]], -1)
    if not torch.compiler.is_compiling() and type(x_BLHK) is Tensor:
        return cast(Tensor, _Rotate.apply(x_BLHK, cosine, sine, interleaved))
    x = x_BLHK.to(torch.promote_types(x_BLHK.dtype, torch.float32))
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    both = (first * cosine - second * sine, second * cosine + first * sine)
    whole = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, dim=-1)
    return whole.type_as(x_BLHK)


class _Rotate(torch.autograd.Function):
    """The rotation over whole heads, which takes a third of the time of that over halves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.interleaved = interleaved
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if interleaved:
            partner = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
            cosine = cosine.repeat_interleave(2, -1)
            sine = torch.stack([-sine, sine], -1).flatten(-2)
        else:
            half = sine.shape[-1]
            partner = torch.cat([wide[..., half:], wide[..., :half]], -1)
            cosine, sine = torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1)
        return partner.mul_(sine).addcmul_(wide, cosine).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        return _Rotate.apply(grads[0], cosine, -sine, ctx.interleaved), None, None, None
