"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437) and V2 (arXiv:2405.04434) as a plain nn.Module.

Shapes: B batch, L sequence length, D model width, H heads, C width of a latent, K width of a head's
query and key (nope_dim + rope_dim) or of a part of it, V of its value.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from compose.ops.layers import RMSNorm

from ..layers.attention import AttentionCore, Documents, attention_pairs
from ..layers.checks import check_at_least, check_eps, check_even
from ..layers.decoder import Block, Decoder
from ..layers.feed_forward import FeedForward
from ..layers.moe import MoE
from ..layers.rope import YarnFields, rotate, rotation, yarn_growth, yarn_magnitude
from ..layers.router import MoEConfig


@dataclass(frozen=True)
class DeepSeekV3Config(YarnFields, MoEConfig):
    """The config of a DeepSeek-V3 or V2."""

    vocab_size: int = 257
    """Rows of the embedding; token ids run from 0 to vocab_size - 1."""
    dim: int = 128
    """Width of the residual stream."""
    n_layers: int = 4
    """Transformer blocks."""
    n_dense_layers: int = 1
    """First layers with a dense feed-forward network; the others are mixtures of experts."""
    n_heads: int = 8
    """Attention heads."""
    q_rank: int = 48
    """Width of the latent that queries are made from; 0 makes them from the residual stream."""
    kv_rank: int = 32
    """Width of the latent that keys and values are made from."""
    nope_dim: int = 16
    """Width of each head's query and key without position."""
    rope_dim: int = 8
    """Width that RoPE rotates besides; this part of the key is shared by all heads."""
    v_dim: int = 16
    """Width of each head's value."""
    hidden_dim: int = 384
    """Inner width of the dense layers' feed-forward network."""
    n_shared_experts: int = 1
    """Experts that every token goes to besides; they are one network, as many times as wide."""
    norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    latent_norm_eps: float = 0.0
    """Epsilon of the latents' norms, 1e-6 in published models; 0: norm_eps."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_mscale: float = 1.0
    """Weight of YaRN's growth of the rotated part of queries and keys, over rope_mscale_all_dim's."""
    rope_mscale_all_dim: float = 1.0
    """Weight of YaRN's growth of whole queries and keys."""
    tie_embeddings: bool = False
    """Use the embedding's weight for the output projection too."""
    n_experts: int = 8
    """Routed experts of a mixture-of-experts layer; 0 makes every layer dense."""
    top_k: int = 3
    """Routed experts that each token goes to."""
    expert_dim: int = 96
    """Inner width of an expert."""
    scoring: Literal["softmax", "sigmoid"] = "sigmoid"
    """How the router's logits become scores: over all experts, or each by itself."""
    route_scale: float = 2.5
    """Factor on the weights of a token's experts."""
    n_groups: int = 4
    """Groups of neighbouring experts; a token picks groups first, by their two best scores."""
    top_groups: int = 2
    """Groups that a token's experts come from."""
    bias_rate: float = 1e-2
    """Step of each expert's selection bias against its load (balancing without a loss); 0 is none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("vocab_size", "dim", "n_heads", "kv_rank", "nope_dim", "rope_dim", "v_dim")
        check_at_least(self, 1, *sizes, "hidden_dim")
        check_at_least(self, 1, "n_layers", bits=12)
        check_at_least(self, 0, "n_dense_layers", "q_rank", "n_shared_experts")
        check_at_least(self, 0, "rope_mscale", "rope_mscale_all_dim")
        check_eps(self)
        if self.latent_norm_eps:
            check_eps(self, "latent_norm_eps")
        self.check_yarn(self.rope_theta)
        check_even(self, "rope_dim")
        if self.n_dense_layers > self.n_layers:
            raise ValueError(
                f"n_dense_layers: {self.n_dense_layers} is more than n_layers {self.n_layers}"
            )

    @property
    def shared_width(self) -> int:
        """Inner width of the network of shared experts; 0 without one."""
        return self.n_shared_experts * self.expert_dim

    def is_dense(self, layer: int) -> bool:
        """Tell whether the layer of this index has a dense feed-forward network."""
        return layer < self.n_dense_layers or not self.n_experts

    def flops_per_token(self, seq_len: int) -> float:
        """Return the matrix-multiply FLOPs of one token's forward and backward (docs/metrics.md)."""
        k_dim = self.nope_dim + self.rope_dim
        attention = self.dim * (self.kv_rank + self.rope_dim)
        attention += self.kv_rank * self.n_heads * (self.nope_dim + self.v_dim)
        attention += self.n_heads * self.v_dim * self.dim
        attention += self.q_rank * self.dim
        attention += (self.q_rank or self.dim) * self.n_heads * k_dim
        dense = 3 * self.dim * self.hidden_dim
        # Only the experts that a token activates count.
        experts = 3 * self.dim * self.expert_dim * (self.top_k + self.n_shared_experts)
        experts += self.dim * self.n_experts
        n_dense = sum(self.is_dense(layer) for layer in range(self.n_layers))
        weights = self.n_layers * attention + n_dense * dense + (self.n_layers - n_dense) * experts
        weights += self.vocab_size * self.dim
        scores = self.n_layers * self.n_heads * (k_dim + self.v_dim) * attention_pairs(seq_len)
        return 3 * 2 * (weights + scores)


# Published shapes. The first is DeepSeek-V2-Lite. Where it keeps a default, V3 has the same value.
PRESETS = {
    "debug": DeepSeekV3Config(),
    "16b": DeepSeekV3Config(
        vocab_size=102_400,
        dim=2048,
        n_layers=27,
        n_dense_layers=1,
        n_heads=16,
        q_rank=0,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        v_dim=128,
        hidden_dim=10_944,
        n_experts=64,
        top_k=6,
        expert_dim=1408,
        n_shared_experts=2,
        scoring="softmax",
        normalize_weights=False,
        route_scale=1.0,
        n_groups=1,
        top_groups=1,
        balance_loss="sequence",
        balance_weight=1e-3,
        bias_rate=0.0,
        rope_factor=40.0,
        rope_mscale=0.707,
        rope_mscale_all_dim=0.707,
    ),
    "671b": DeepSeekV3Config(
        vocab_size=129_280,
        dim=7168,
        n_layers=61,
        n_dense_layers=3,
        n_heads=128,
        q_rank=1536,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        v_dim=128,
        hidden_dim=18_432,
        n_experts=256,
        top_k=8,
        expert_dim=2048,
        n_shared_experts=1,
        n_groups=8,
        top_groups=4,
        balance_loss="sequence",
        balance_weight=1e-4,
        bias_rate=1e-3,
        rope_factor=40.0,
    ),
}


class Attention(nn.Module):
    """Multi-head latent attention: keys and values of all heads are made from one narrow latent.

    Only ``rope_dim`` of a query and a key carry position, and that part of the key is made once for all
    heads. The module counts heads from its input, so a rank may hold a part of them.
    """

    def __init__(self, config: DeepSeekV3Config) -> None:
        super().__init__()
        c = self.config = config
        q_dim = c.n_heads * (c.nope_dim + c.rope_dim)
        latent_eps = c.latent_norm_eps or c.norm_eps
        if c.q_rank:
            self.wq_a = nn.Linear(c.dim, c.q_rank, bias=False)
            self.q_norm = RMSNorm(c.q_rank, eps=latent_eps)
            self.wq_b = nn.Linear(c.q_rank, q_dim, bias=False)
        else:
            self.wq = nn.Linear(c.dim, q_dim, bias=False)
        self.wkv_a = nn.Linear(c.dim, c.kv_rank + c.rope_dim, bias=False)
        self.kv_norm = RMSNorm(c.kv_rank, eps=latent_eps)
        self.wkv_b = nn.Linear(c.kv_rank, c.n_heads * (c.nope_dim + c.v_dim), bias=False)
        self.wo = nn.Linear(c.n_heads * c.v_dim, c.dim, bias=False)
        # This is a module, so that a plan can name the tensor that all heads share.
        self.rope_key = nn.Identity()
        self.core = AttentionCore()

    def forward(
        self, x_BLD: Tensor, cosine: Tensor, sine: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """Return attention's output, (B, L, D); cosine and sine are (B, L, 1, rope_dim / 2)."""
        c = self.config
        q_BLK = self.wq_b(self.q_norm(self.wq_a(x_BLD))) if c.q_rank else self.wq(x_BLD)
        q_BLHK = q_BLK.unflatten(-1, (-1, c.nope_dim + c.rope_dim))
        q_nope_BLHK, q_rope_BLHK = q_BLHK.split((c.nope_dim, c.rope_dim), dim=-1)
        q_rope_BLHK = rotate(q_rope_BLHK, cosine, sine, interleaved=True)

        latent_BLC, k_rope_BLK = self.wkv_a(x_BLD).split((c.kv_rank, c.rope_dim), dim=-1)
        kv_BLHK = self.wkv_b(self.kv_norm(latent_BLC)).unflatten(-1, (-1, c.nope_dim + c.v_dim))
        k_nope_BLHK, v_BLHV = kv_BLHK.split((c.nope_dim, c.v_dim), dim=-1)
        k_rope_BL1K = self.rope_key(rotate(k_rope_BLK[:, :, None], cosine, sine, interleaved=True))
        k_rope_BLHK = k_rope_BL1K.expand(-1, -1, k_nope_BLHK.shape[2], -1)

        q_BLHK = torch.cat([q_nope_BLHK, q_rope_BLHK], dim=-1)
        k_BLHK = torch.cat([k_nope_BLHK, k_rope_BLHK], dim=-1)
        # The core's own scale does not include YaRN. So the queries get the keys' factor too.
        q_BLHK = q_BLHK * yarn_magnitude(c.rope_factor, c.rope_mscale_all_dim) ** 2
        return self.wo(self.core(q_BLHK, k_BLHK, v_BLHV, documents).flatten(2))


class DeepSeekV3(Decoder):
    """The model."""

    config: DeepSeekV3Config

    def make_layer(self, index: int) -> Block:
        """Return a layer, dense or with experts."""
        c, attention = self.config, Attention(self.config)
        if c.is_dense(index):
            network = FeedForward(c.dim, c.hidden_dim)
        else:
            network = MoE(c.dim, c, FeedForward(c.dim, c.shared_width) if c.shared_width else None)
        return Block(c.dim, c.norm_eps, attention, network)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See :class:`Decoder`; YaRN lets the rotated part of queries and keys grow."""
        c = self.config
        frequency = c.yarn(c.rope_dim, c.rope_theta, True, positions.device)
        growth = yarn_growth(c.rope_factor, c.rope_mscale, c.rope_mscale_all_dim)
        return rotation(positions, frequency, dtype, growth)
