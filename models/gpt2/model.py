"""GPT-2 as a plain nn.Module.

It is that of Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". The published
models were trained with a dropout of 0.1. This one has none, as models have that see each token once.
By its options it is an OPT (Zhang et al. 2022, arXiv:2205.01068) or a StarCoder (Li et al. 2023,
arXiv:2305.06161) too; hf.py has the table.

Shapes: B batch, L sequence length, D model width, H heads, K head width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.attention import AttentionCore, Documents, attention_pairs, documents_of
from ..layers.checks import check_at_least, check_eps
from ..layers.feed_forward import ACTIVATIONS, FeedForward
from ..layers.initial import init_by_depth


@dataclass(frozen=True)
class GPT2Config:
    """The config of a GPT-2."""

    vocab_size: int = 257
    """Rows of the embedding; token ids run from 0 to vocab_size - 1."""
    max_seq_len: int = 1024
    """Rows of the table of positions: the most tokens of a sample."""
    dim: int = 128
    """Width of the residual stream."""
    n_layers: int = 5
    """Transformer blocks."""
    n_heads: int = 8
    """Heads; head width is dim / n_heads."""
    hidden_dim: int = 512
    """Inner width of the feed-forward network."""
    norm_eps: float = 1e-5
    """Epsilon of LayerNorm."""
    tie_embeddings: bool = True
    """Use the embedding's weight for the output projection too."""
    n_kv_heads: int = 0
    """Key/value heads; divides n_heads. 0 is n_heads."""
    activation: Literal["gelu_tanh", "gelu", "relu"] = "gelu_tanh"
    """The activation of the feed-forward network."""
    position_offset: int = 0
    """Row of the table of positions that the first token has; rows before it are not used."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "vocab_size", "max_seq_len", "dim", "n_heads", "hidden_dim")
        check_at_least(self, 1, "n_layers", bits=12)
        check_eps(self)
        check_at_least(self, 0, "n_kv_heads", "position_offset")
        if self.dim % self.n_heads:
            raise ValueError(f"dim: {self.dim} is not a multiple of n_heads = {self.n_heads}")
        if self.n_heads % self.kv_heads:
            raise ValueError(f"n_kv_heads: {self.n_kv_heads} does not divide n_heads {self.n_heads}")

    @property
    def head_dim(self) -> int:
        """Width of each head."""
        return self.dim // self.n_heads

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.n_kv_heads or self.n_heads

    def flops_per_token(self, seq_len: int) -> float:
        """Return the matrix-multiply FLOPs of one token's forward and backward (docs/metrics.md)."""
        attention = 2 * self.dim + 2 * self.kv_heads * self.head_dim
        weights = self.n_layers * self.dim * (attention + 2 * self.hidden_dim)
        weights += self.vocab_size * self.dim
        scores = self.n_layers * 2 * self.dim * attention_pairs(seq_len)
        return 3 * 2 * (weights + scores)


def _published(dim: int, n_layers: int, n_heads: int) -> GPT2Config:
    return GPT2Config(
        vocab_size=50_257, dim=dim, n_layers=n_layers, n_heads=n_heads, hidden_dim=4 * dim
    )


# The published shapes: gpt2, gpt2-medium, gpt2-large and gpt2-xl.
PRESETS = {
    "debug": GPT2Config(),
    "124m": _published(768, 12, 12),
    "355m": _published(1024, 24, 16),
    "774m": _published(1280, 36, 20),
    "1558m": _published(1600, 48, 25),
}


class Embeddings(nn.Module):
    """The embeddings of tokens and of their positions, added up."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.offset = config.position_offset
        self.positions = nn.Embedding(config.max_seq_len + self.offset, config.dim)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the stream before the first layer, (B, L, D); a position of -1 is padding."""
        # No target and no other token reads a padding's row.
        return self.tokens(tokens) + self.positions(positions.clamp(min=0) + self.offset)


class Attention(nn.Module):
    """Grouped-query attention; it counts heads from its input, so a rank may hold a part of them."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.dim)
        self.wk = nn.Linear(config.dim, config.kv_heads * config.head_dim)
        self.wv = nn.Linear(config.dim, config.kv_heads * config.head_dim)
        self.wo = nn.Linear(config.dim, config.dim)
        self.core = AttentionCore()

    def forward(self, x_BLD: Tensor, documents: Documents | None = None) -> Tensor:
        """Return attention's output, (B, L, D); without documents, each row is one."""
        q_BLHK, k_BLGK, v_BLGK = (
            project(x_BLD).unflatten(-1, (-1, self.head_dim)) for project in (self.wq, self.wk, self.wv)
        )
        return self.wo(self.core(q_BLHK, k_BLGK, v_BLGK, documents).flatten(2))


class Block(nn.Module):
    """One layer: attention and the feed-forward network, each after a norm and added to the stream."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        # Its GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415) is the approximation by a tanh.
        activation = F.relu if config.activation == "relu" else ACTIVATIONS[config.activation]
        self.feed_forward = FeedForward(
            config.dim, config.hidden_dim, activation, gated=False, bias=True
        )

    def forward(self, x_BLD: Tensor, documents: Documents | None = None) -> Tensor:
        """Return the stream after the layer, (B, L, D)."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), documents)
        return x_BLD + self.feed_forward(self.ffn_norm(x_BLD))


class GPT2(nn.Module):
    """The model."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        # The keys are indices, so that a layer keeps its name when others are removed.
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.output.weight = self.embeddings.tokens.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Return the logits (B, L, V) of tokens (B, L).

        ``positions`` (B, L) are -1 for padding, and below max_seq_len; without them they count from 0.
        Attention stays within a document. ``document_ids`` (B, L) and ``documents``, which a batch
        makes of them once, say which; without both each row is one.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        documents = documents_of(document_ids, documents)
        x_BLD = self.embeddings(tokens, positions)
        for layer in self.layers.values():
            x_BLD = layer(x_BLD, documents)
        return self.output(self.norm(x_BLD))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill a whole parameter."""
        init_by_depth(name, tensor, generator, self.config.n_layers)
