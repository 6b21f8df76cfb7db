"""GPT of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053) as far as its time is concerned.

It has no biases and no learned positions, and its norms have no mean: Megatron's kernels fuse them with
what is there anyway. Shapes: B batch, L sequence length, D model width, H heads, K head width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The config of a GPT."""

    vocab_size: int = 256
    """Rows of the embedding."""
    dim: int = 64
    """Width of the residual stream."""
    n_layers: int = 2
    """Transformer blocks."""
    n_heads: int = 4
    """Heads."""
    flash: bool = True
    """One fused attention; false: scores, softmax and their dropout are in memory, as before 2023."""
    dropout: float = 0.0
    """Rate for scores and for the output of each branch."""
    recompute_core: bool = False
    """Recompute only what lies between the projections of attention (Korthikanti et al. 2022)."""

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of forward and backward, scores above the diagonal not counted.

        Args:
            seq_len: Tokens of a sample.
        """
        weights = self.n_layers * 12 * self.dim**2 + self.vocab_size * self.dim
        return 6 * (weights + self.n_layers * self.dim * seq_len)


class Core(nn.Module):
    """Attention between its projections."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.flash, self.dropout = config.flash, config.dropout

    def forward(self, qkv: Tensor) -> Tensor:
        """Return (B, L, H, K) for (B, L, H, 3K)."""
        q, k, v = (x.transpose(1, 2) for x in qkv.chunk(3, -1))
        if self.flash:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        batch, heads, length, width = q.shape
        q, k, v = (x.reshape(batch * heads, length, width) for x in (q, k, v))
        # Megatron's kernel masks, scales and normalises at once.
        scores = torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1)
        result = torch.bmm(F.dropout(scores, self.dropout), v)
        return result.view(batch, heads, length, width).transpose(1, 2)


class Attention(nn.Module):
    """Attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.width = config.dim // config.n_heads
        self.wqkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        self.core = Core(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, L, D) for (B, L, D)."""
        return self.wo(self.core(self.wqkv(x).unflatten(-1, (-1, 3 * self.width))).flatten(2))


class FeedForward(nn.Module):
    """The feed-forward network."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, 4 * dim, bias=False)
        self.w2 = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, L, D) for (B, L, D)."""
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(config.dim), Attention(config)
        self.ffn_norm, self.feed_forward = nn.RMSNorm(config.dim), FeedForward(config.dim)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, L, D) for (B, L, D)."""
        x = x + F.dropout(self.attention(self.attention_norm(x)), self.dropout)
        return x + F.dropout(self.feed_forward(self.ffn_norm(x)), self.dropout)


class GPT(nn.Module):
    """The model."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm = nn.RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, L, V) of tokens (B, L)."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))

    @torch.no_grad()
    def init_parameter(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Fill a whole parameter.

        Args:
            name: The parameter's name.
            tensor: The parameter.
            generator: The random numbers.
        """
        if tensor.ndim == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02, generator=generator)
