"""Llama 3 (Llama team 2024, arXiv:2407.21783) as a plain nn.Module.

Shapes: B batch, L sequence length, D model width, H query heads, G key/value heads, K head width,
V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compose.ops.attention import AttentionOptions
from compose.ops.layers import RMSNorm
from models.layers.attention import AttentionCore, Documents, Sinks, attention_pairs, documents_of
from models.layers.feed_forward import FeedForward
from models.layers.norms import check_eps
from models.layers.rope import inverse_frequencies, rotate, rotation


@dataclass(frozen=True)
class LlamaConfig:
    """The config of a Llama."""

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
    hidden_dim: int = 384
    """Inner width of the feed-forward network."""
    norm_eps: float = 1e-5
    """Epsilon of RMSNorm."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: float = 1.0
    """Factor of the llama3 rule that stretches long wavelengths; 1 is off."""
    rope_original_seq_len: int = 8192
    """Length the model was trained at before rope_scaling."""
    rope_low_freq_factor: float = 1.0
    """Wavelengths above rope_original_seq_len / this are stretched in full."""
    rope_high_freq_factor: float = 4.0
    """Wavelengths below rope_original_seq_len / this are kept."""
    tie_embeddings: bool = False
    """Use the embedding's weight for the output projection too."""
    window: int = 0
    """Keys that a query attends to, the last of them its own; 0 is all."""
    sinks: bool = False
    """Give each head a learnt score to which attention can give weight in place of a key."""

    def __post_init__(self) -> None:
        for size in ("vocab_size", "dim", "n_heads", "n_kv_heads", "hidden_dim"):
            if not 1 <= getattr(self, size) < 2**31:
                raise ValueError(f"{size}: {getattr(self, size)} should be at least 1, below 2^31")
        if not 1 <= self.n_layers < 2**12:
            raise ValueError(f"n_layers: {self.n_layers} should be at least 1, below 2^12")
        for factor in ("rope_theta", "rope_scaling"):
            if not getattr(self, factor) > 0:
                raise ValueError(f"{factor}: {getattr(self, factor)} should be above 0")
        if self.window < 0:
            raise ValueError(f"window: {self.window} should be at least 1, or 0 for all keys")
        check_eps("norm_eps", self.norm_eps)
        low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
        if self.rope_scaling != 1 and not 0 < low < high:
            raise ValueError(f"rope_low_freq_factor: {low} should be above 0, below {high}")
        if self.rope_scaling != 1 and not 1 <= self.rope_original_seq_len < 2**31:
            length = self.rope_original_seq_len
            raise ValueError(f"rope_original_seq_len: {length} should be at least 1, below 2^31")
        if self.dim % (2 * self.n_heads):
            raise ValueError(f"dim: {self.dim} is not a multiple of 2 * n_heads = {2 * self.n_heads}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads: {self.n_kv_heads} does not divide n_heads {self.n_heads}")

    @property
    def head_dim(self) -> int:
        """Width of each head."""
        return self.dim // self.n_heads

    def flops_per_token(self, seq_len: int) -> float:
        """Return the matrix-multiply FLOPs of one token's forward and backward (docs/metrics.md)."""
        attention = self.dim * (2 * self.dim + 2 * self.n_kv_heads * self.head_dim)
        weights = self.n_layers * (attention + 3 * self.dim * self.hidden_dim)
        weights += self.vocab_size * self.dim
        scores = self.n_layers * 2 * self.dim * attention_pairs(seq_len, self.window)
        return 3 * 2 * (weights + scores)


def _llama31(dim: int, n_layers: int, n_heads: int, hidden_dim: int, **other: float) -> LlamaConfig:
    shape = {"vocab_size": 128_256, "n_kv_heads": 8, "rope_theta": 500_000.0, "rope_scaling": 8.0}
    return LlamaConfig(
        dim=dim, n_layers=n_layers, n_heads=n_heads, hidden_dim=hidden_dim, **{**shape, **other}
    )  # type: ignore[arg-type]


# Published shapes: 1b and 3b are Llama 3.2, the others Llama 3.1.
PRESETS = {
    "debug": LlamaConfig(),
    "1b": _llama31(2048, 16, 32, 8192, rope_scaling=32.0, tie_embeddings=True),
    "3b": _llama31(3072, 28, 24, 8192, rope_scaling=32.0, tie_embeddings=True),
    "8b": _llama31(4096, 32, 32, 14_336),
    "70b": _llama31(8192, 80, 64, 28_672),
    "405b": _llama31(16_384, 126, 128, 53_248),
}


class Attention(nn.Module):
    """Grouped-query attention; it counts heads from its input, so a rank may hold a part of them."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        self.core = AttentionCore(AttentionOptions(window=config.window or None))
        self.sinks = Sinks(config.n_heads) if config.sinks else None

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
        q_BLHK, k_BLGK = rotate(q_BLHK, cosine, sine), rotate(k_BLGK, cosine, sine)
        sinks_H = None if self.sinks is None else self.sinks()
        return self.wo(self.core(q_BLHK, k_BLGK, v_BLGK, documents, sinks_H).flatten(2))


class Block(nn.Module):
    """One layer: attention and the feed-forward network, each after a norm and added to the stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config.dim, config.hidden_dim)

    def forward(
        self, x_BLD: Tensor, cosine: Tensor, sine: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """Return the stream after the layer; arguments as for :class:`Attention`.

        Args:
            x_BLD: The stream.
            cosine: Of the positions' angles, (B, L, 1, K / 2).
            sine: Of the positions' angles, (B, L, 1, K / 2).
            documents: The documents; None makes each row one.

        Returns:
            (B, L, D).
        """
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), cosine, sine, documents)
        return x_BLD + self.feed_forward(self.ffn_norm(x_BLD))


class Llama(nn.Module):
    """The model."""

    def __init__(self, config: LlamaConfig) -> None:
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
            positions: (B, L); None counts from 0.
            document_ids: (B, L); attention stays within a document. None makes each row one.
            documents: The same, made once for a batch; ``document_ids`` is then not read.

        Returns:
            (B, L, V).
        """
        c = self.config
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        # It is computed, and no buffer, which would have no values if the model is built on meta.
        frequency = inverse_frequencies(
            c.head_dim,
            c.rope_theta,
            c.rope_scaling,
            c.rope_low_freq_factor,
            c.rope_high_freq_factor,
            c.rope_original_seq_len,
            device=tokens.device,
        )
        x_BLD = self.tok_embeddings(tokens)
        cosine, sine = rotation(positions, frequency, x_BLD.dtype)
        documents = documents_of(document_ids, documents)
        for layer in self.layers.values():
            x_BLD = layer(x_BLD, cosine, sine, documents)
        return self.output(self.norm(x_BLD))

    @torch.no_grad()
    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill a whole parameter: zeros (biases, sinks), ones (norms), else normal.

        The projections that end a residual branch are scaled by (2 n_layers)^-1/2 (Radford et al. 2019,
        GPT-2), so that the stream's variance does not grow with depth.

        Args:
            name: The parameter's name.
            tensor: The parameter.
            generator: The random numbers.
        """
        if tensor.ndim == 1:
            tensor.fill_(0.0 if name.endswith(("bias", "sinks.weight")) else 1.0)
            return
        ends_branch = name.endswith(("wo.weight", "w2.weight"))
        scale = (2 * self.config.n_layers) ** -0.5 if ends_branch else 1.0
        tensor.normal_(0.0, 0.02 * scale, generator=generator)
