"""Qwen3, dense and mixture of experts (Qwen team 2025, arXiv:2505.09388), as a plain nn.Module.

Shapes: B batch, L sequence length, D model width, H query heads, G key/value heads, K head width,
V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compose.ops.layers import RMSNorm
from models.layers.attention import AttentionCore, Documents, attention_pairs, documents_of
from models.layers.feed_forward import FeedForward
from models.layers.moe import MoE
from models.layers.norms import check_eps
from models.layers.rope import inverse_frequencies, rotate, rotation
from models.layers.router import MoEConfig


@dataclass(frozen=True)
class Qwen3Config(MoEConfig):
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

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("vocab_size", "dim", "n_heads", "n_kv_heads", "head_dim", "hidden_dim")
        for size in sizes:
            if not 1 <= getattr(self, size) < 2**31:
                raise ValueError(f"{size}: {getattr(self, size)} should be at least 1, below 2^31")
        if not 1 <= self.n_layers < 2**12:
            raise ValueError(f"n_layers: {self.n_layers} should be at least 1, below 2^12")
        if not self.rope_theta > 0:
            raise ValueError(f"rope_theta: {self.rope_theta} should be above 0")
        check_eps("norm_eps", self.norm_eps)
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim} is not even, and RoPE rotates pairs")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads: {self.n_kv_heads} does not divide n_heads {self.n_heads}")

    def flops_per_token(self, seq_len: int) -> float:
        """Return the matrix-multiply FLOPs of one token's forward and backward (docs/metrics.md)."""
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)
        hidden, router = self.hidden_dim, 0
        if self.n_experts:  # only the experts that a token activates count
            hidden, router = self.top_k * self.expert_dim, self.dim * self.n_experts
        weights = self.n_layers * (attention + 3 * self.dim * hidden + router)
        weights += self.vocab_size * self.dim
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
    """Grouped-query attention with an RMSNorm of each query and key head (QK-Norm).

    It counts heads from its input, so a rank may hold a part of them.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_dim, kv_dim = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, q_dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(q_dim, config.dim, bias=False)
        self.q_norm = RMSNorm(config.head_dim, eps=config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.norm_eps)
        self.core = AttentionCore()

    def forward(
        self, x_BLD: Tensor, cosine: Tensor, sine: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """Return attention's output.

        Args:
            x_BLD: The stream.
            cosine: Of the positions' angles, (B, L, 1, K / 2).
            sine: Of the positions' angles, (B, L, 1, K / 2).
            documents: The documents; None makes each row one.

        Returns:
            (B, L, D).
        """
        q_BLHK = self.wq(x_BLD).unflatten(-1, (-1, self.head_dim))
        k_BLGK = self.wk(x_BLD).unflatten(-1, (-1, self.head_dim))
        v_BLGK = self.wv(x_BLD).unflatten(-1, (-1, self.head_dim))
        q_BLHK, k_BLGK = self.q_norm(q_BLHK), self.k_norm(k_BLGK)
        q_BLHK, k_BLGK = rotate(q_BLHK, cosine, sine), rotate(k_BLGK, cosine, sine)
        return self.wo(self.core(q_BLHK, k_BLGK, v_BLGK, documents).flatten(2))


class Block(nn.Module):
    """One layer: attention and a feed-forward network or experts, each after a norm."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        if config.n_experts:
            self.moe = MoE(config.dim, config)
        else:
            self.feed_forward = FeedForward(config.dim, config.hidden_dim)

    def forward(
        self,
        x_BLD: Tensor,
        cosine: Tensor,
        sine: Tensor,
        real_BL: Tensor,
        documents: Documents | None = None,
    ) -> Tensor:
        """Return the stream after the layer.

        Args:
            x_BLD: The stream.
            cosine: Of the positions' angles, (B, L, 1, K / 2).
            sine: Of the positions' angles, (B, L, 1, K / 2).
            real_BL: False for padding, which routers do not count.
            documents: The documents; None makes each row one.

        Returns:
            (B, L, D).
        """
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), cosine, sine, documents)
        x = self.ffn_norm(x_BLD)
        return x_BLD + (self.moe(x, real_BL) if hasattr(self, "moe") else self.feed_forward(x))


class Qwen3(nn.Module):
    """The model."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        # The keys are indices, so that a layer keeps its name when others are removed.
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Return the logits of tokens.

        Args:
            tokens: (B, L), int64.
            positions: (B, L), -1 for padding; None counts from 0.
            document_ids: (B, L); attention stays within a document. None makes each row one.
            documents: The same, made once for a batch; ``document_ids`` is then not read.

        Returns:
            (B, L, V).
        """
        c = self.config
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        # It is computed, and no buffer, which would have no values if the model is built on meta.
        frequency = inverse_frequencies(c.head_dim, c.rope_theta, device=tokens.device)
        x_BLD = self.tok_embeddings(tokens)
        cosine, sine = rotation(positions, frequency, x_BLD.dtype)
        documents = documents_of(document_ids, documents)
        real_BL = (positions >= 0).expand(len(tokens), -1)
        for layer in self.layers.values():
            x_BLD = layer(x_BLD, cosine, sine, real_BL, documents)
        return self.output(self.norm(x_BLD))

    @torch.no_grad()
    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill a whole parameter: zeros (biases), ones (norms), else normal.

        The projections that end a residual branch are scaled by (2 n_layers)^-1/2 (Radford et al. 2019,
        GPT-2), so that the stream's variance does not grow with depth.

        Args:
            name: The parameter's name.
            tensor: The parameter.
            generator: The random numbers.
        """
        if tensor.ndim == 1:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
            return
        ends_branch = name.endswith(("wo.weight", "w2.weight", "experts.w2"))
        scale = (2 * self.config.n_layers) ** -0.5 if ends_branch else 1.0
        tensor.normal_(0.0, 0.02 * scale, generator=generator)
