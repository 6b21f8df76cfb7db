"""Llama 3 (Llama team 2024, arXiv:2407.21783) as a plain nn.Module, and its family by options.

The family is what later models changed of it: biases, other norms and places of norms, the kind of
feed-forward network, RoPE of a part of a head or of some layers, and constant factors. The table in
architectures.py says which published architecture has which options.

Shapes: B batch, L sequence length, D model width, H query heads, G key/value heads, K head width,
V vocabulary.
"""

import torch
from torch import Tensor, nn

from compose.ops.attention import AttentionOptions
from compose.ops.layers import RMSNorm

from ..layers.attention import AttentionCore, Documents, Sinks, documents_of
from ..layers.feed_forward import ACTIVATIONS, FeedForward
from ..layers.initial import init_by_depth
from ..layers.norms import NORMS, Scale
from ..layers.rope import RopeFields, rotate, rotation
from .config import LlamaConfig


class Attention(nn.Module):
    """Grouped-query attention; it counts heads from its input, so a rank may hold a part of them."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        c = config
        self.head_dim, self.interleaved = c.head_width, c.rope_interleaved
        self.rope, self.norm_of = c.letter(layer) in "wf", c.qk_norm
        q_dim, kv_dim = c.n_heads * c.head_width, c.n_kv_heads * c.head_width
        self.wq = nn.Linear(c.dim, q_dim, bias=c.qkv_bias)
        self.wk = nn.Linear(c.dim, kv_dim, bias=c.qkv_bias)
        self.wv = nn.Linear(c.dim, kv_dim, bias=c.qkv_bias)
        self.wo = nn.Linear(q_dim, c.dim, bias=c.wo_bias)
        if c.qk_norm != "none":
            whole = c.qk_norm == "width"
            self.q_norm = RMSNorm(q_dim if whole else c.head_width, eps=c.norm_eps)
            self.k_norm = RMSNorm(kv_dim if whole else c.head_width, eps=c.norm_eps)
        scale = c.attention_scale or None
        self.core = AttentionCore(AttentionOptions(window=c.window_of(layer) or None, scale=scale))
        self.sinks = Sinks(c.n_heads) if c.sinks else None

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
        if self.rope:
            q_BLHK = rotate(q_BLHK, cosine, sine, self.interleaved)
            k_BLGK = rotate(k_BLGK, cosine, sine, self.interleaved)
        if self.norm_of == "head_after_rope":
            q_BLHK, k_BLGK = self.q_norm(q_BLHK), self.k_norm(k_BLGK)
        sinks_H = None if self.sinks is None else self.sinks()
        return self.wo(self.core(q_BLHK, k_BLGK, v_BLGK, documents, sinks_H).flatten(2))


class Block(nn.Module):
    """One layer: attention and the feed-forward network, with norms, each added to the stream."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        c = config
        self.scale, self.parallel = c.residual_scale, c.parallel_block
        for name in norms_of(c):
            setattr(self, name, NORMS[c.norm](c.dim, c.norm_eps))
        self.attention = Attention(c, layer)
        self.feed_forward = FeedForward(
            c.dim, c.hidden_dim, ACTIVATIONS[c.activation], c.ffn_gated, c.ffn_bias
        )

    def forward(
        self, x_BLD: Tensor, cosine: Tensor, sine: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """Return the stream after the layer, (B, L, D)."""
        # Without names, a branch and its input are freed as soon as they are used.
        if self.parallel:
            normed = self._normed("attention_norm", x_BLD)
            attention = self.attention(normed, cosine, sine, documents)
            return x_BLD + self._scaled(attention + self.feed_forward(normed))
        x_BLD = x_BLD + self._branch(
            "attention_post_norm",
            self.attention(self._normed("attention_norm", x_BLD), cosine, sine, documents),
        )
        return x_BLD + self._branch("ffn_post_norm", self.feed_forward(self._normed("ffn_norm", x_BLD)))

    def _branch(self, norm: str, branch: Tensor) -> Tensor:
        return self._scaled(self._normed(norm, branch))

    def _normed(self, name: str, x: Tensor) -> Tensor:
        return getattr(self, name)(x) if hasattr(self, name) else x

    def _scaled(self, branch: Tensor) -> Tensor:
        return branch if self.scale == 1 else branch * self.scale


def norms_of(config: LlamaConfig) -> list[str]:
    """Return the names of a layer's norms."""
    before = ["attention_norm"] + ([] if config.parallel_block else ["ffn_norm"])
    after = ["attention_post_norm", "ffn_post_norm"]
    return (before if config.norm_before else []) + (after if config.norm_after else [])


class Llama(nn.Module):
    """The model."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        c = self.config = config
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.dim)
        self.embedding_scale = Scale(c.embedding_scale) if c.embedding_scale != 1 else None
        # The keys are indices, so that a layer keeps its name when others are removed.
        self.layers = nn.ModuleDict({str(i): Block(c, i) for i in range(c.n_layers)})
        self.norm = NORMS[c.norm](c.dim, c.norm_eps)
        # It comes before the projection, whose output is what a loss in chunks replaces.
        self.logit_scale = Scale(c.logit_scale) if c.logit_scale != 1 else None
        self.output = nn.Linear(c.dim, c.vocab_size, bias=False)
        if c.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Return the logits (B, L, V) of tokens (B, L).

        ``positions`` (B, L) count from 0 if they are not given. Attention stays within a document.
        ``document_ids`` (B, L) and ``documents``, which a batch makes of them once, say which; without
        both each row is one.
        """
        c = self.config
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x_BLD = self.tok_embeddings(tokens)
        if self.embedding_scale is not None:
            x_BLD = self.embedding_scale(x_BLD)
        # They are computed, and no buffers, which would have no values if the model is built on meta.
        width, device = c.rotary_dim or c.head_width, tokens.device
        rotations = []
        for rule in (c,) if c.rope_scale_windows else (c, RopeFields()):
            frequency = rule.rope_frequencies(width, c.rope_theta, device)
            rotations.append(rotation(positions, frequency, x_BLD.dtype, rule.rope_scale))
        documents = documents_of(document_ids, documents)
        for name, layer in self.layers.items():
            cosine, sine = rotations[-1 if c.window_of(int(name)) else 0]
            x_BLD = layer(x_BLD, cosine, sine, documents)
        x_BLD = self.norm(x_BLD)
        return self.output(x_BLD if self.logit_scale is None else self.logit_scale(x_BLD))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill a whole parameter."""
        init_by_depth(name, tensor, generator, self.config.n_layers)
