"""The config of the llama family, and the published shapes of Llama itself."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..layers.attention import attention_pairs
from ..layers.checks import check_above_0, check_at_least, check_eps, check_even, check_kv_heads
from ..layers.feed_forward import ACTIVATIONS
from ..layers.norms import NORMS
from ..layers.rope import RopeFields


@dataclass(frozen=True)
class LlamaConfig(RopeFields):
    """The config of a Llama, or of a model of its family."""

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
    head_dim: int = 0
    """Width of each head; 0 is dim / n_heads."""
    hidden_dim: int = 384
    """Inner width of the feed-forward network."""
    norm_eps: float = 1e-5
    """Epsilon of the norms."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scale_windows: bool = True
    """Stretch the frequencies of layers with a window too."""
    rotary_dim: int = 0
    """Width of each head's part that is rotated, the first one; 0 is the whole head."""
    rope_interleaved: bool = False
    """Rotate pairs (2 i, 2 i + 1) in place of pairs half a width apart."""
    tie_embeddings: bool = False
    """Use the embedding's weight for the output projection too."""
    window: int = 0
    """Keys that a query of a layer with a window attends to, the last of them its own; 0 is all."""
    layer_pattern: str = "w"
    """Letters of the layers, repeated over them: w has the window, f has none; W and F have no RoPE."""
    sinks: bool = False
    """Give each head a learnt score to which attention can give weight in place of a key."""
    qkv_bias: bool = False
    """Give the projections to queries, keys and values a bias."""
    wo_bias: bool = False
    """Give attention's output projection a bias."""
    ffn_bias: bool = False
    """Give the linear layers of the feed-forward network a bias."""
    ffn_gated: bool = True
    """Multiply the activation by a third linear layer (w3)."""
    activation: str = "silu"
    """The activation of the feed-forward network: silu, gelu, gelu_tanh or relu2."""
    norm: str = "rms"
    """Norms of the stream: rms, layer, layer_without_bias or layer_without_weight."""
    norm_before: bool = True
    """Give attention and the feed-forward network a norm of their input."""
    norm_after: bool = False
    """Give them a norm of their output."""
    qk_norm: str = "none"
    """RMSNorm of queries and keys: none, of each head, head_after_rope, or of the whole width."""
    parallel_block: bool = False
    """Let attention and the feed-forward network read one norm of the same stream."""
    embedding_scale: float = 1.0
    """Factor on the embedding's output."""
    residual_scale: float = 1.0
    """Factor on what attention and the feed-forward network add to the stream."""
    attention_scale: float = 0.0
    """Factor on the products of queries and keys; 0 is head_dim^-0.5."""
    logit_scale: float = 1.0
    """Factor on the logits. It is applied to the output projection's input."""
    architecture: str = "llama"
    """The model_type of an exported config.json, a row of the table in architectures.py."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "vocab_size", "dim", "n_heads", "n_kv_heads", "hidden_dim")
        check_at_least(self, 1, "n_layers", bits=12)
        check_above_0(self, "rope_theta", "embedding_scale", "residual_scale", "logit_scale")
        check_at_least(self, 0, "head_dim", "rotary_dim", "attention_scale")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f'{name}: "{getattr(self, name)}" is none of {", ".join(known)}')
        if self.window < 0:
            raise ValueError(f"window: {self.window} should be at least 1, or 0 for all keys")
        if not self.layer_pattern or set(self.layer_pattern) - set("wfWF"):
            raise ValueError(f'layer_pattern: "{self.layer_pattern}" should be letters w, f, W and F')
        check_eps(self)
        self._check_heads()
        self.check_rope((self.rotary_dim or self.head_width) // 2, self.rope_theta)
        if not (self.norm_before or self.norm_after):
            raise ValueError("norm_before: False leaves no norm; set norm_after")
        if self.parallel_block and (self.norm_after or not self.norm_before):
            raise ValueError("parallel_block: True needs norm_before alone")

    def _check_heads(self) -> None:
        if not self.head_dim and self.dim % (2 * self.n_heads):
            raise ValueError(f"dim: {self.dim} is not a multiple of 2 * n_heads = {2 * self.n_heads}")
        check_even(self, "head_dim", "rotary_dim")
        if self.rotary_dim > self.head_width:
            raise ValueError(f"rotary_dim: {self.rotary_dim} is more than a head's {self.head_width}")
        check_kv_heads(self)

    @property
    def head_width(self) -> int:
        """Width of each head."""
        return self.head_dim or self.dim // self.n_heads

    def letter(self, layer: int) -> str:
        """Return the letter of a layer, counted from 0."""
        return self.layer_pattern[layer % len(self.layer_pattern)]

    def window_of(self, layer: int) -> int:
        """Return the keys that a query of a layer attends to; 0 is all."""
        return self.window if self.letter(layer) in "wW" else 0

    def flops_per_token(self, seq_len: int) -> float:
        """Return the matrix-multiply FLOPs of one token's forward and backward (docs/metrics.md)."""
        attention = 2 * self.dim * self.head_width * (self.n_heads + self.n_kv_heads)
        matrices = 3 if self.ffn_gated else 2
        weights = self.n_layers * (attention + matrices * self.dim * self.hidden_dim)
        weights += self.vocab_size * self.dim
        pairs = sum(attention_pairs(seq_len, self.window_of(layer)) for layer in range(self.n_layers))
        return 3 * 2 * (weights + 2 * self.n_heads * self.head_width * pairs)


CHOICES: Mapping[str, Collection[str]] = {
    "activation": ACTIVATIONS,
    "norm": NORMS,
    "qk_norm": ("none", "head", "head_after_rope", "width"),
}


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
