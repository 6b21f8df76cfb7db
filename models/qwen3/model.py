"""Qwen3, dense and mixture of experts (Qwen team 2025, arXiv:2505.09388), as a plain nn.Module.

By its options the model is another mixture of experts with attention over all keys, as OLMoE or
GLM-4.5. The table in hf.py says which published architecture has which options.

Shapes: B batch, L sequence length, D model width, H query heads, G key/value heads, K head width,
V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from compose.ops.attention import AttentionOptions
from compose.ops.layers import RMSNorm

from ..layers.attention import AttentionCore, Documents, attention_pairs
from ..layers.checks import check_above_0, check_at_least, check_eps, check_even, check_kv_heads
from ..layers.decoder import Block, Decoder
from ..layers.feed_forward import FeedForward
from ..layers.moe import MoE
from ..layers.rope import RopeFields, rotate, rotation
from ..layers.router import MoEConfig


@dataclass(frozen=True)
class Qwen3Config(RopeFields, MoEConfig):
    """The config of a Qwen3, dense or with experts."""

    vocab_size: int = 257
    """Rows of the embedding; token ids run from 0 to vocab_size - 1."""
    dim: int = 128
    """Width of the residual stream."""
    n_layers: int = 5
    """Transformer blocks."""
    n_heads: int = 8
    """Query heads."""
    n_kv_heads: int = 2
    """Key/value heads; divides n_heads."""
    head_dim: int = 32
    """Width of each head; n_heads * head_dim need not be dim."""
    hidden_dim: int = 384
    """Inner width of the feed-forward network, where there are no experts."""
    norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary frequencies."""
    tie_embeddings: bool = False
    """Use the embedding's weight for the output projection too."""
    qk_norm: Literal["none", "head", "head_after_rope", "width"] = "head"
    """RMSNorm of queries and keys: none, of each head, head_after_rope, or of the whole width."""
    qkv_bias: bool = False
    """Give the projections to queries, keys and values a bias."""
    rotary_dim: int = 0
    """Width of each head's part that is rotated, the first one; 0 is the whole head."""
    rope_interleaved: bool = False
    """Rotate pairs (2 i, 2 i + 1) in place of pairs half a width apart."""
    norm_after: bool = False
    """Normalize the outputs of attention and the experts, and not their inputs."""
    n_dense_layers: int = 0
    """First layers without experts, where there are experts."""
    shared_dim: int = 0
    """Inner width of an expert that every token goes to besides; 0 is n_shared_experts * expert_dim."""
    n_shared_experts: int = 0
    """Experts that every token goes to besides; they are one network, as many times as wide."""
    shared_gate: bool = False
    """Multiply that network's output by the sigmoid of a projection of the token to one number."""
    embedding_scale: float = 1.0
    """Factor on the embedding's output."""
    residual_scale: float = 1.0
    """Factor on what attention and the experts add to the stream."""
    attention_scale: float = 0.0
    """Factor on the products of queries and keys; 0 is head_dim^-0.5."""
    logit_scale: float = 1.0
    """Factor on the logits. It is applied to the output projection's input."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("vocab_size", "dim", "n_heads", "n_kv_heads", "head_dim", "hidden_dim")
        check_at_least(self, 1, *sizes)
        check_at_least(self, 1, "n_layers", bits=12)
        check_above_0(self, "rope_theta", "embedding_scale", "residual_scale", "logit_scale")
        check_at_least(self, 0, "n_dense_layers", "shared_dim", "n_shared_experts", "attention_scale")
        if self.n_experts and self.n_dense_layers > self.n_layers:
            raise ValueError(
                f"n_dense_layers: {self.n_dense_layers} is more than n_layers {self.n_layers}"
            )
        if self.shared_gate and not self.shared_width:
            raise ValueError(
                "shared_gate: True needs an expert that every token goes to; set shared_dim"
            )
        check_eps(self)
        check_even(self, "head_dim", "rotary_dim")
        if not 0 <= self.rotary_dim <= self.head_dim:
            raise ValueError(f"rotary_dim: {self.rotary_dim} is no part of head_dim {self.head_dim}")
        self.check_rope((self.rotary_dim or self.head_dim) // 2, self.rope_theta)
        check_kv_heads(self)

    @property
    def shared_width(self) -> int:
        """Inner width of the network of shared experts; 0 without one."""
        return (self.shared_dim or self.n_shared_experts * self.expert_dim) if self.n_experts else 0

    def is_dense(self, layer: int) -> bool:
        """Tell whether the layer of this index has a dense feed-forward network."""
        return layer < self.n_dense_layers or not self.n_experts

    def flops_per_token(self, seq_len: int) -> float:
        """Return the matrix-multiply FLOPs of one token's forward and backward (docs/metrics.md)."""
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)
        # Only the experts that a token activates count.
        hidden = self.top_k * self.expert_dim + self.shared_width
        experts = self.dim * (3 * hidden + self.n_experts + self.shared_gate)
        n_dense = self.n_dense_layers if self.n_experts else self.n_layers
        weights = self.n_layers * attention + n_dense * 3 * self.dim * self.hidden_dim
        weights += (self.n_layers - n_dense) * experts + self.vocab_size * self.dim
        scores = self.n_layers * 2 * self.n_heads * self.head_dim * attention_pairs(seq_len)
        return 3 * 2 * (weights + scores)


def _published(dim: int, n_layers: int, n_heads: int, hidden_dim: int, tied: bool) -> Qwen3Config:
    """Return a published dense model; this function holds what all sizes share."""
    return Qwen3Config(
        vocab_size=151_936,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        head_dim=128,
        hidden_dim=hidden_dim,
        tie_embeddings=tied,
    )


def _published_moe(dim: int, n_layers: int, n_heads: int, expert_dim: int) -> Qwen3Config:
    """Return a published mixture of experts; the balancing loss's weight is that of the model cards."""
    return Qwen3Config(
        vocab_size=151_936,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=4,
        head_dim=128,
        n_experts=128,
        top_k=8,
        expert_dim=expert_dim,
        balance_weight=1e-3,
    )


PRESETS = {
    "debug": Qwen3Config(),
    "debug_moe": Qwen3Config(n_experts=8, balance_weight=1e-2),
    "0.6b": _published(1024, 28, 16, 3072, tied=True),
    "1.7b": _published(2048, 28, 16, 6144, tied=True),
    "4b": _published(2560, 36, 32, 9728, tied=True),
    "8b": _published(4096, 36, 32, 12_288, tied=False),
    "14b": _published(5120, 40, 40, 17_408, tied=False),
    "32b": _published(5120, 64, 64, 25_600, tied=False),
    "30b_a3b": _published_moe(2048, 48, 32, 768),
    "235b_a22b": _published_moe(4096, 94, 64, 1536),
}


class Attention(nn.Module):
    """Grouped-query attention with an RMSNorm of queries and keys (QK-Norm).

    It counts heads from its input, so a rank may hold a part of them.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        c = config
        self.head_dim, self.norm_of, self.interleaved = c.head_dim, c.qk_norm, c.rope_interleaved
        q_dim, kv_dim = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        self.wq = nn.Linear(c.dim, q_dim, bias=c.qkv_bias)
        self.wk = nn.Linear(c.dim, kv_dim, bias=c.qkv_bias)
        self.wv = nn.Linear(c.dim, kv_dim, bias=c.qkv_bias)
        self.wo = nn.Linear(q_dim, c.dim, bias=False)
        if c.qk_norm != "none":
            whole = c.qk_norm == "width"
            self.q_norm = RMSNorm(q_dim if whole else c.head_dim, eps=c.norm_eps)
            self.k_norm = RMSNorm(kv_dim if whole else c.head_dim, eps=c.norm_eps)
        self.core = AttentionCore(AttentionOptions(scale=c.attention_scale or None))

    def forward(
        self, x_BLD: Tensor, cosine: Tensor, sine: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """Return attention's output, (B, L, D).

        Cosine and sine of the positions' angles are (B, L, 1, K / 2), or of fewer pairs.
        """
        q, k = self.wq(x_BLD), self.wk(x_BLD)
        if self.norm_of == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q_BLHK, k_BLGK, v_BLGK = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, self.wv(x_BLD)))
        del q, k  # else they would outlive their rotation
        if self.norm_of == "head":
            q_BLHK, k_BLGK = self.q_norm(q_BLHK), self.k_norm(k_BLGK)
        q_BLHK = rotate(q_BLHK, cosine, sine, self.interleaved)
        k_BLGK = rotate(k_BLGK, cosine, sine, self.interleaved)
        if self.norm_of == "head_after_rope":
            q_BLHK, k_BLGK = self.q_norm(q_BLHK), self.k_norm(k_BLGK)
        return self.wo(self.core(q_BLHK, k_BLGK, v_BLGK, documents).flatten(2))


class Qwen3(Decoder):
    """The model."""

    config: Qwen3Config

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config, config.embedding_scale, config.logit_scale)

    def make_layer(self, index: int) -> Block:
        """Return a layer, dense or with experts."""
        c, attention = self.config, Attention(self.config)
        if c.is_dense(index):
            network = FeedForward(c.dim, c.hidden_dim)
        else:
            shared = FeedForward(c.dim, c.shared_width) if c.shared_width else None
            network = MoE(c.dim, c, shared, shared_gate=c.shared_gate)
        return Block(c.dim, c.norm_eps, attention, network, c.residual_scale, c.norm_after)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See :class:`Decoder`."""
        c = self.config
        width = c.rotary_dim or c.head_dim
        frequency = c.rope_frequencies(width, c.rope_theta, positions.device)
        return rotation(positions, frequency, dtype, c.rope_scale)
