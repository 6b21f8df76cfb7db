"""The text model of Gemma 3 (Gemma team 2025, arXiv:2503.19786) as a plain nn.Module.

Most layers are local: their attention slides over a window. Every sixth layer is global. The two kinds
have rotary frequencies of their own. A norm stands before and after attention and the feed-forward
network. By its options the model is a Gemma 2 (Gemma team 2024, arXiv:2408.00118) or 1
(arXiv:2403.08295) too; hf.py has the table.

Shapes: B batch, L sequence length, D model width, H query heads, G key/value heads, K head width,
V vocabulary.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from compose.ops.attention import AttentionOptions
from compose.ops.layers import RMSNorm

from ..layers.attention import AttentionCore, Documents, attention_pairs, documents_of
from ..layers.checks import check_above_0, check_at_least, check_eps, check_even, check_kv_heads
from ..layers.feed_forward import ACTIVATIONS, FeedForward
from ..layers.norms import Scale
from ..layers.rope import inverse_frequencies, rotate, rotation


@dataclass(frozen=True)
class Gemma3Config:
    """The config of a Gemma 3."""

    vocab_size: int = 257
    """Rows of the embedding; token ids run from 0 to vocab_size - 1."""
    dim: int = 128
    """Width of the residual stream."""
    n_layers: int = 6
    """Transformer blocks."""
    n_heads: int = 8
    """Query heads."""
    n_kv_heads: int = 2
    """Key/value heads; divides n_heads."""
    head_dim: int = 32
    """Width of each head; n_heads * head_dim need not be dim."""
    hidden_dim: int = 384
    """Inner width of the feed-forward network."""
    norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    global_every: int = 3
    """Every so many layers, one attends to all keys; the other layers are local."""
    window: int = 64
    """Keys that a query of a local layer attends to, the last of them its own."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary frequencies of global layers."""
    rope_scaling: float = 1.0
    """Factor that slows down all rotary frequencies of global layers; 1 is off."""
    rope_local_theta: float = 10_000.0
    """Base of the rotary frequencies of local layers."""
    query_pre_attn_scalar: int = 0
    """Scores are products divided by the root of this; 0 is head_dim."""
    attention_softcap: float = 0.0
    """Unless it is 0, a score s becomes attention_softcap tanh(s / attention_softcap)."""
    final_softcap: float = 0.0
    """The same for the logits. With it the loss cannot be computed in chunks (train.loss_chunk)."""
    tie_embeddings: bool = True
    """Use the embedding's weight for the output projection too."""
    qk_norm: bool = True
    """Normalize each query and key head; Gemma 1 and 2 do not."""
    post_norms: bool = True
    """Normalize the outputs of attention and the feed-forward network too; Gemma 1 does not."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "dim", "n_heads", "n_kv_heads", "head_dim", "hidden_dim")
        check_at_least(self, 1, *sizes, "global_every", "window")
        check_at_least(self, 1, "n_layers", bits=12)
        check_above_0(self, "rope_theta", "rope_scaling", "rope_local_theta")
        if not 0 <= self.query_pre_attn_scalar < 2**31:
            scalar = self.query_pre_attn_scalar
            raise ValueError(
                f"query_pre_attn_scalar: {scalar} should be at least 1, below 2^31, or 0 for head_dim"
            )
        for cap in ("attention_softcap", "final_softcap"):
            if not getattr(self, cap) >= 0:
                raise ValueError(f"{cap}: {getattr(self, cap)} should be above 0, or 0 for none")
        check_eps(self)
        check_even(self, "head_dim")
        check_kv_heads(self)

    def is_global(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, attends to all keys."""
        return (layer + 1) % self.global_every == 0

    def flops_per_token(self, seq_len: int) -> float:
        """Return the matrix-multiply FLOPs of one token's forward and backward (docs/metrics.md)."""
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)
        weights = self.n_layers * (attention + 3 * self.dim * self.hidden_dim)
        weights += self.vocab_size * self.dim
        whole = self.n_layers // self.global_every
        pairs = whole * attention_pairs(seq_len)
        pairs += (self.n_layers - whole) * attention_pairs(seq_len, self.window)
        return 3 * 2 * (weights + 2 * self.n_heads * self.head_dim * pairs)


# The sizes are from their config.json, else the defaults of transformers' Gemma3TextConfig. The two
# small sizes read text alone. The others read images too; these are their text models.
_TEXT = Gemma3Config(
    vocab_size=262_144, n_heads=4, n_kv_heads=1, head_dim=256, global_every=6, window=512
)
_OF_IMAGES = replace(_TEXT, vocab_size=262_208, window=1024, rope_scaling=8.0)
PRESETS = {
    "debug": Gemma3Config(),
    "270m": replace(_TEXT, dim=640, n_layers=18, hidden_dim=2048),
    "1b": replace(_TEXT, dim=1152, n_layers=26, hidden_dim=6912),
    "4b": replace(_OF_IMAGES, dim=2560, n_layers=34, n_heads=8, n_kv_heads=4, hidden_dim=10_240),
    "12b": replace(_OF_IMAGES, dim=3840, n_layers=48, n_heads=16, n_kv_heads=8, hidden_dim=15_360),
    "27b": replace(
        _OF_IMAGES,
        dim=5376,
        n_layers=62,
        n_heads=32,
        n_kv_heads=16,
        head_dim=128,
        hidden_dim=21_504,
        query_pre_attn_scalar=168,
    ),
}


class Softcap(nn.Module):
    """Keeps logits between -cap and cap: cap tanh(logits / cap) (Gemma team 2024, arXiv:2408.00118).

    It is a module, so that only the last stage of a pipeline has it.
    """

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, logits: Tensor) -> Tensor:
        """Return the capped logits."""
        return torch.tanh(logits / self.cap) * self.cap


class Attention(nn.Module):
    """Grouped-query attention with an RMSNorm of each query and key head (QK-Norm), if any.

    It counts heads from its input, so a rank may hold a part of them.
    """

    def __init__(self, config: Gemma3Config, window: int | None) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_dim, kv_dim = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, q_dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(q_dim, config.dim, bias=False)
        norm = partial(RMSNorm, config.head_dim, eps=config.norm_eps, offset=1.0)
        self.q_norm, self.k_norm = (norm() if config.qk_norm else nn.Identity() for _ in range(2))
        scale = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
        self.core = AttentionCore(
            AttentionOptions(window=window, scale=scale, softcap=config.attention_softcap)
        )

    def forward(
        self, x_BLD: Tensor, cosine: Tensor, sine: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """Return attention's output, (B, L, D); cosine and sine of angles are (B, L, 1, K / 2)."""
        q_BLHK = self.wq(x_BLD).unflatten(-1, (-1, self.head_dim))
        k_BLGK = self.wk(x_BLD).unflatten(-1, (-1, self.head_dim))
        v_BLGK = self.wv(x_BLD).unflatten(-1, (-1, self.head_dim))
        q_BLHK, k_BLGK = self.q_norm(q_BLHK), self.k_norm(k_BLGK)
        q_BLHK, k_BLGK = rotate(q_BLHK, cosine, sine), rotate(k_BLGK, cosine, sine)
        return self.wo(self.core(q_BLHK, k_BLGK, v_BLGK, documents).flatten(2))


class Block(nn.Module):
    """One layer: attention and the feed-forward network, each after a norm, or between two.

    ``window`` makes it local; None makes it global.
    """

    def __init__(self, config: Gemma3Config, window: int | None) -> None:
        super().__init__()
        norm = partial(RMSNorm, config.dim, eps=config.norm_eps, offset=1.0)
        self.attention_norm = norm()
        self.attention = Attention(config, window)
        self.attention_post_norm = norm() if config.post_norms else nn.Identity()
        self.ffn_norm = norm()
        self.feed_forward = FeedForward(config.dim, config.hidden_dim, ACTIVATIONS["gelu_tanh"])
        self.ffn_post_norm = norm() if config.post_norms else nn.Identity()

    def forward(
        self, x_BLD: Tensor, cosine: Tensor, sine: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """Return the stream after the layer, (B, L, D)."""
        found_BLD = self.attention(self.attention_norm(x_BLD), cosine, sine, documents)
        x_BLD = x_BLD + self.attention_post_norm(found_BLD)
        return x_BLD + self.ffn_post_norm(self.feed_forward(self.ffn_norm(x_BLD)))


class RoundedScale(Scale):
    """A constant factor, rounded to the type of what it multiplies, as for the published weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the product."""
        return x * torch.full((), self.factor, dtype=x.dtype, device=x.device)


class Gemma3(nn.Module):
    """The model."""

    def __init__(self, config: Gemma3Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.embedding_scale = RoundedScale(config.dim**0.5)
        # The keys are indices, so that a layer keeps its name when others are removed.
        self.layers = nn.ModuleDict(
            {
                str(i): Block(config, None if config.is_global(i) else config.window)
                for i in range(config.n_layers)
            }
        )
        self.norm = RMSNorm(config.dim, eps=config.norm_eps, offset=1.0)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.softcap = Softcap(config.final_softcap) if config.final_softcap else nn.Identity()
        if config.tie_embeddings:
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
        # They are computed, and no buffers, which would have no values if the model is built on meta.
        whole = inverse_frequencies(c.head_dim, c.rope_theta, device=tokens.device) / c.rope_scaling
        local = inverse_frequencies(c.head_dim, c.rope_local_theta, device=tokens.device)
        x_BLD = self.embedding_scale(self.tok_embeddings(tokens))
        rotations = [rotation(positions, frequency, x_BLD.dtype) for frequency in (local, whole)]
        documents = documents_of(document_ids, documents)
        for name, layer in self.layers.items():
            cosine, sine = rotations[c.is_global(int(name))]
            x_BLD = layer(x_BLD, cosine, sine, documents)
        return self.softcap(self.output(self.norm(x_BLD)))

    @torch.no_grad()
    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill a whole parameter: zeros (norms, whose factor is 1 + weight), else normal.

        The projections that end a residual branch need no smaller values where the norm after them
        gives the branch its size. Without it they are scaled by (2 n_layers)^-1/2, as GPT-2's.
        """
        if tensor.ndim == 1:
            tensor.zero_()
            return
        ends_branch = not self.config.post_norms and name.endswith(("wo.weight", "w2.weight"))
        scale = (2 * self.config.n_layers) ** -0.5 if ends_branch else 1.0
        tensor.normal_(0.0, 0.02 * scale, generator=generator)
