"""gpt-oss (OpenAI 2025, arXiv:2508.10925) as a plain nn.Module.

Layers attend to a window or to all keys, and each head has a sink. All projections of attention, the
router and the experts have biases.

Shapes: B batch, L sequence length, D model width, H query heads, G key/value heads, K head width,
V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compose.ops.attention import AttentionOptions

from ..layers.attention import AttentionCore, Documents, Sinks, attention_pairs
from ..layers.checks import check_above_0, check_at_least, check_eps, check_even, check_kv_heads
from ..layers.clamped_experts import ClampedExperts
from ..layers.decoder import Block, Decoder
from ..layers.moe import MoE
from ..layers.rope import YarnFields, rotate, rotation, yarn_magnitude
from ..layers.router import MoEConfig


@dataclass(frozen=True)
class GptOssConfig(YarnFields, MoEConfig):
    """The config of a gpt-oss."""

    vocab_size: int = 257
    """Rows of the embedding; token ids run from 0 to vocab_size - 1."""
    dim: int = 128
    """Width of the residual stream."""
    n_layers: int = 4
    """Transformer blocks."""
    n_heads: int = 8
    """Query heads."""
    n_kv_heads: int = 2
    """Key/value heads; divides n_heads."""
    head_dim: int = 24
    """Width of each head; n_heads * head_dim need not be dim."""
    window: int = 128
    """Keys that a query of a layer with a window attends to, the last of them its own."""
    layer_pattern: str = "wf"
    """Attention of the layers, repeated over them: w has the window, f attends to all keys."""
    n_experts: int = 8
    """Experts of each layer."""
    swiglu_alpha: float = 1.702
    """Factor within the sigmoid of the experts' activation."""
    swiglu_limit: float = 7.0
    """Bound of what enters that activation."""
    balance_weight: float = 1e-2
    """Weight of the balancing loss; 0 is none."""
    norm_eps: float = 1e-5
    """Epsilon of RMSNorm."""
    rope_theta: float = 150_000.0
    """Base of the rotary frequencies."""
    rope_truncate: bool = False
    """Round the bounds between these frequencies to whole pairs."""
    tie_embeddings: bool = False
    """Use the embedding's weight for the output projection too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("vocab_size", "dim", "n_heads", "n_kv_heads", "head_dim", "n_experts", "window")
        check_at_least(self, 1, *sizes)
        check_at_least(self, 1, "n_layers", bits=12)
        check_above_0(self, "swiglu_alpha", "swiglu_limit")
        check_eps(self)
        self.check_yarn(self.rope_theta)
        if not self.layer_pattern or set(self.layer_pattern) - set("wf"):
            raise ValueError(f'layer_pattern: "{self.layer_pattern}" should be letters w and f')
        check_even(self, "head_dim")
        check_kv_heads(self)

    def has_window(self, layer: int) -> bool:
        """Tell whether the layer of this index attends to a window."""
        return self.layer_pattern[layer % len(self.layer_pattern)] == "w"

    def flops_per_token(self, seq_len: int) -> float:
        """Return the matrix-multiply FLOPs of one token's forward and backward (docs/metrics.md)."""
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)
        # Only the experts that a token activates count.
        experts = self.dim * (3 * self.top_k * self.expert_dim + self.n_experts)
        weights = self.n_layers * (attention + experts) + self.vocab_size * self.dim
        windows = [self.window if self.has_window(layer) else 0 for layer in range(self.n_layers)]
        pairs = sum(attention_pairs(seq_len, window) for window in windows)
        return 3 * 2 * (weights + 2 * self.n_heads * self.head_dim * pairs)


def _published(n_layers: int, n_experts: int) -> GptOssConfig:
    return GptOssConfig(
        vocab_size=201_088,
        dim=2880,
        n_layers=n_layers,
        n_heads=64,
        n_kv_heads=8,
        head_dim=64,
        n_experts=n_experts,
        top_k=4,
        expert_dim=2880,
        balance_weight=0.9,
        rope_factor=32.0,
    )


# Published shapes. Where they keep a default, the published models have the same value.
PRESETS = {"debug": GptOssConfig(), "20b": _published(24, 32), "120b": _published(36, 128)}


class Attention(nn.Module):
    """Grouped-query attention; it counts heads from its input, so a rank may hold a part of them."""

    def __init__(self, config: GptOssConfig, window: int | None) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_dim, kv_dim = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, q_dim)
        self.wk = nn.Linear(config.dim, kv_dim)
        self.wv = nn.Linear(config.dim, kv_dim)
        self.wo = nn.Linear(q_dim, config.dim)
        self.core = AttentionCore(AttentionOptions(window=window))
        self.sinks = Sinks(config.n_heads)

    def forward(
        self, x_BLD: Tensor, cosine: Tensor, sine: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """Return attention's output, (B, L, D); cosine and sine of angles are (B, L, 1, K / 2)."""
        q_BLHK = self.wq(x_BLD).unflatten(-1, (-1, self.head_dim))
        k_BLGK = self.wk(x_BLD).unflatten(-1, (-1, self.head_dim))
        v_BLGK = self.wv(x_BLD).unflatten(-1, (-1, self.head_dim))
        q_BLHK, k_BLGK = rotate(q_BLHK, cosine, sine), rotate(k_BLGK, cosine, sine)
        return self.wo(self.core(q_BLHK, k_BLGK, v_BLGK, documents, self.sinks()).flatten(2))


class GptOss(Decoder):
    """The model."""

    config: GptOssConfig

    def make_layer(self, index: int) -> Block:
        """Return a layer, whose attention has a window or none."""
        c = self.config
        attention = Attention(c, c.window if c.has_window(index) else None)
        experts = ClampedExperts(c.n_experts, c.dim, c.expert_dim, c.swiglu_alpha, c.swiglu_limit)
        return Block(c.dim, c.norm_eps, attention, MoE(c.dim, c, experts=experts, gate_bias=True))

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See :class:`Decoder`; YaRN lets queries and keys grow."""
        c = self.config
        frequency = c.yarn(c.head_dim, c.rope_theta, c.rope_truncate, positions.device)
        return rotation(positions, frequency, dtype, yarn_magnitude(c.rope_factor, 1.0))
