"""Mixtral (Mistral AI team 2024, arXiv:2401.04088) as a plain nn.Module.

Every layer is a mixture of experts, and attention may slide over a window, as in Mistral 7B (Jiang et
al. 2023, arXiv:2310.06825).

Shapes: B batch, L sequence length, D model width, H query heads, G key/value heads, K head width,
V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compose.ops.attention import AttentionOptions

from ..layers.attention import AttentionCore, Documents, attention_pairs
from ..layers.checks import check_above_0, check_at_least, check_eps, check_kv_heads
from ..layers.decoder import Block, Decoder
from ..layers.moe import MoE
from ..layers.rope import inverse_frequencies, rotate, rotation
from ..layers.router import MoEConfig


@dataclass(frozen=True)
class MixtralConfig(MoEConfig):
    """The config of a Mixtral."""

    vocab_size: int = 257
    """Rows of the embedding; token ids run from 0 to vocab_size - 1."""
    dim: int = 128
    """Width of the residual stream."""
    n_layers: int = 5
    """Transformer blocks."""
    n_heads: int = 8
    """Query heads; head width is dim / n_heads."""
    n_kv_heads: int = 2
    """Key/value heads; divides n_heads."""
    n_experts: int = 8
    """Experts of each layer."""
    balance_weight: float = 1e-2
    """Weight of the balancing loss; 0 is none."""
    norm_eps: float = 1e-5
    """Epsilon of RMSNorm."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary frequencies."""
    tie_embeddings: bool = False
    """Use the embedding's weight for the output projection too."""
    window: int = 0
    """Keys that a query attends to, the last of them its own; 0 is all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "vocab_size", "dim", "n_heads", "n_kv_heads", "n_experts")
        check_at_least(self, 1, "n_layers", bits=12)
        check_above_0(self, "rope_theta")
        if self.window < 0:
            raise ValueError(f"window: {self.window} should be at least 1, or 0 for all keys")
        check_eps(self)
        if self.dim % (2 * self.n_heads):
            raise ValueError(f"dim: {self.dim} is not a multiple of 2 * n_heads = {2 * self.n_heads}")
        check_kv_heads(self)

    @property
    def head_dim(self) -> int:
        """Width of each head."""
        return self.dim // self.n_heads

    def flops_per_token(self, seq_len: int) -> float:
        """Return the matrix-multiply FLOPs of one token's forward and backward (docs/metrics.md)."""
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)
        # Only the experts that a token activates count.
        experts = self.dim * (3 * self.top_k * self.expert_dim + self.n_experts)
        weights = self.n_layers * (attention + experts) + self.vocab_size * self.dim
        scores = self.n_layers * 2 * self.dim * attention_pairs(seq_len, self.window)
        return 3 * 2 * (weights + scores)


# Their config.json has these values, also the weight of the balancing loss.
PRESETS = {
    "debug": MixtralConfig(),
    "8x7b": MixtralConfig(
        vocab_size=32_000,
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        expert_dim=14_336,
        balance_weight=0.02,
    ),
    "8x22b": MixtralConfig(
        vocab_size=32_000,
        dim=6144,
        n_layers=56,
        n_heads=48,
        n_kv_heads=8,
        expert_dim=16_384,
        balance_weight=0.001,
    ),
}


class Attention(nn.Module):
    """Grouped-query attention; it counts heads from its input, so a rank may hold a part of them."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        self.core = AttentionCore(AttentionOptions(window=config.window or None))

    def forward(
        self, x_BLD: Tensor, cosine: Tensor, sine: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """Return attention's output, (B, L, D); cosine and sine of angles are (B, L, 1, K / 2)."""
        q_BLHK = self.wq(x_BLD).unflatten(-1, (-1, self.head_dim))
        k_BLGK = self.wk(x_BLD).unflatten(-1, (-1, self.head_dim))
        v_BLGK = self.wv(x_BLD).unflatten(-1, (-1, self.head_dim))
        q_BLHK, k_BLGK = rotate(q_BLHK, cosine, sine), rotate(k_BLGK, cosine, sine)
        return self.wo(self.core(q_BLHK, k_BLGK, v_BLGK, documents).flatten(2))


class Mixtral(Decoder):
    """The model."""

    config: MixtralConfig

    def make_layer(self, index: int) -> Block:
        """Return a layer."""
        c = self.config
        return Block(c.dim, c.norm_eps, Attention(c), MoE(c.dim, c))

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See :class:`Decoder`."""
        c = self.config
        frequency = inverse_frequencies(c.head_dim, c.rope_theta, device=positions.device)
        return rotation(positions, frequency, dtype)
