"""A diffusion transformer (DiT; Peebles & Xie 2023, arXiv:2212.09748) as a plain nn.Module.

An image is cut into square patches, which are the tokens. Each layer is conditioned on the time and
the class by an adaptive layer norm that begins as zero (adaLN-Zero). Two things differ from the paper:
each layer has its own small embedding of time and class, so that layers can lie on different stages;
and the linear layers of attention and of the feed-forward network have no biases, as the shifts of
adaLN do their work.

Shapes: B batch, L patches of an image, C elements of a patch, D model width, H heads, K head width.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compose.ops.attention import AttentionOptions

from ..layers.attention import AttentionCore, Documents, documents_of
from ..layers.checks import check_at_least, check_eps
from ..layers.feed_forward import ACTIVATIONS, FeedForward

TICKS = 1 << 20
"""A time of 1. Times are whole numbers of ticks, so that no reduced precision rounds them."""
FREQUENCIES = 128
"""Frequencies of the embedding of a time: 256 sines and cosines, as in the paper."""


@dataclass(frozen=True)
class DiTConfig:
    """The config of a diffusion transformer."""

    image_size: int = 32
    """Height and width of an image in pixels, or of a latent."""
    channels: int = 3
    """Channels of a pixel: 3 is colour, 1 is grey; the published models have latents of 4."""
    patch_size: int = 2
    """Height and width of a patch; divides image_size."""
    n_classes: int = 5
    """Classes of images; one embedding more stands for no class."""
    dim: int = 128
    """Width of the residual stream."""
    n_layers: int = 4
    """Transformer blocks."""
    n_heads: int = 4
    """Heads; head width is dim / n_heads."""
    hidden_dim: int = 512
    """Inner width of the feed-forward network."""
    norm_eps: float = 1e-6
    """Epsilon of the layer norms."""
    label_dropout: float = 0.1
    """Share of the samples that are learnt without their class, for classifier-free guidance."""

    def __post_init__(self) -> None:
        shape = ("image_size", "channels", "patch_size", "n_classes", "dim", "n_heads", "hidden_dim")
        check_at_least(self, 1, *shape)
        check_at_least(self, 1, "n_layers", bits=12)
        if self.image_size % self.patch_size:
            raise ValueError(
                f"patch_size: {self.patch_size} does not divide image_size {self.image_size}"
            )
        if self.dim % 4:
            raise ValueError(
                f"dim: {self.dim} is not a multiple of 4, which the positions' sines and cosines need"
            )
        if self.dim % self.n_heads:
            raise ValueError(f"n_heads: {self.n_heads} does not divide dim {self.dim}")
        if not 0 <= self.label_dropout <= 1:
            raise ValueError(f"label_dropout: {self.label_dropout} should be from 0 to 1")
        check_eps(self)

    @property
    def training_fields(self) -> tuple[str, ...]:
        """The fields that change the training, but not what weights mean."""
        return ("label_dropout",)

    @property
    def patches(self) -> int:
        """Patches of an image: the tokens of a sample."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_dim(self) -> int:
        """Elements of a patch."""
        return self.channels * self.patch_size**2

    def flops_per_token(self, seq_len: int) -> float:
        """Return the matrix-multiply FLOPs of one patch's forward and backward (docs/metrics.md)."""
        layer = 4 * self.dim**2 + 2 * self.dim * self.hidden_dim
        weights = self.n_layers * layer + 2 * self.dim * self.patch_dim
        # A sample's conditioning, which its patches share: the embedding, and adaLN's projection.
        embedding = 2 * FREQUENCIES * self.dim + self.dim**2
        condition = self.n_layers * (embedding + 6 * self.dim**2) + embedding + 2 * self.dim**2
        scores = self.n_layers * 2 * self.dim * seq_len
        return 3 * 2 * (weights + condition / seq_len + scores)


def _published(dim: int, n_layers: int, n_heads: int) -> DiTConfig:
    return DiTConfig(
        channels=4,
        n_classes=1000,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        hidden_dim=4 * dim,
    )


# Published shapes, with patches of 2 x 2 latents: table 1 of the paper.
PRESETS = {
    "debug": DiTConfig(),
    "s_2": _published(384, 12, 6),
    "b_2": _published(768, 12, 12),
    "l_2": _published(1024, 24, 16),
    "xl_2": _published(1152, 28, 16),
}


def waves(places: Tensor, count: int) -> Tensor:
    """Return cosines and sines of places, of wavelengths from 2 pi to 2 pi 10000 (arXiv:1706.03762).

    For places of any shape and ``count`` wavelengths the result is (..., 2 count), in float32.
    """
    steps = torch.arange(count, device=places.device, dtype=torch.float32)
    angles = places[..., None].float() * torch.exp(steps * (-math.log(10_000) / count))
    return torch.cat([angles.cos(), angles.sin()], -1)


class Condition(nn.Module):
    """The shifts, scales and gates of adaLN from a sample's time and class: (B, 1, parts D)."""

    def __init__(self, config: DiTConfig, parts: int) -> None:
        super().__init__()
        self.time_in = nn.Linear(2 * FREQUENCIES, config.dim)
        self.time_out = nn.Linear(config.dim, config.dim)
        self.label = nn.Embedding(config.n_classes + 1, config.dim)
        self.modulation = nn.Linear(config.dim, parts * config.dim)
        # A module, so that a plan can say that patches on several ranks use the result.
        self.shared = nn.Identity()

    def forward(self, times: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the modulation, (B, 1, parts D), of times in ticks (B,) and labels (B,).

        The label n_classes is no class. All but the waves is computed in ``dtype``.
        """
        # The paper's times run to 1000.
        time_BD = waves(times.float() * (1000 / TICKS), FREQUENCIES).to(dtype)
        time_BD = self.time_out(F.silu(self.time_in(time_BD)))
        both_BD = F.silu(time_BD + self.label(labels))
        return self.shared(self.modulation(both_BD)[:, None])


def modulated(x_BLD: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return adaLN: the layer norm of ``x_BLD`` without weights, scaled by 1 + scale and shifted."""
    return F.layer_norm(x_BLD, x_BLD.shape[-1:], eps=eps) * (1 + scale) + shift


class PatchEmbedding(nn.Module):
    """A projection of patches, plus the sines and cosines of their rows and columns."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.columns, self.quarter = config.image_size // config.patch_size, config.dim // 4
        self.projection = nn.Linear(config.patch_dim, config.dim)

    def forward(self, patches: Tensor, positions: Tensor) -> Tensor:
        """Return the stream (B, L, D) of patches (B, L, C), whose positions (B, L) count row by row."""
        x_BLD = self.projection(patches)
        places = [positions // self.columns, positions % self.columns]
        return x_BLD + torch.cat([waves(p, self.quarter) for p in places], -1).to(x_BLD.dtype)


class Attention(nn.Module):
    """Attention of all patches to all; it counts heads from its input."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.n_heads
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.dim, bias=False)
        self.wv = nn.Linear(config.dim, config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        self.core = AttentionCore(AttentionOptions(causal=False))

    def forward(self, x_BLD: Tensor, documents: Documents | None = None) -> Tensor:
        """Return attention's output, (B, L, D); attention stays within a document."""
        q_BLHK, k_BLHK, v_BLHK = (
            w(x_BLD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv)
        )
        return self.wo(self.core(q_BLHK, k_BLHK, v_BLHK, documents).flatten(2))


class Block(nn.Module):
    """One layer: attention and the feed-forward network, each behind adaLN and a gate."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.condition = Condition(config, 6)
        self.attention = Attention(config)
        self.feed_forward = FeedForward(
            config.dim, config.hidden_dim, ACTIVATIONS["gelu_tanh"], gated=False
        )

    def forward(
        self, x_BLD: Tensor, times: Tensor, labels: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """Return the stream after the layer, (B, L, D); arguments as for :class:`DiT`."""
        shift, scale, gate, shift2, scale2, gate2 = self.condition(times, labels, x_BLD.dtype).chunk(
            6, -1
        )
        x_BLD = x_BLD + gate * self.attention(modulated(x_BLD, shift, scale, self.eps), documents)
        return x_BLD + gate2 * self.feed_forward(modulated(x_BLD, shift2, scale2, self.eps))


class FinalLayer(nn.Module):
    """The end of the model: adaLN, and a projection onto the elements of a patch."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.condition = Condition(config, 2)
        self.projection = nn.Linear(config.dim, config.patch_dim)

    def forward(self, x_BLD: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Return the velocity, (B, L, C); arguments as for :class:`DiT`."""
        shift, scale = self.condition(times, labels, x_BLD.dtype).chunk(2, -1)
        return self.projection(modulated(x_BLD, shift, scale, self.eps))


class DiT(nn.Module):
    """The model."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = PatchEmbedding(config)
        # The keys are indices, so that a layer keeps its name when others are removed.
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.final = FinalLayer(config)

    def forward(
        self,
        patches: Tensor,
        times: Tensor,
        labels: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Return the velocity of noisy patches, (B, L, C).

        ``patches`` (B, L, C) are row by row, and ``positions`` (B, L) count from 0 if they are not
        given. ``times`` (B,) are in ticks: 0 is noise, TICKS is an image. The label n_classes is no
        class. For documents see the models of language.
        """
        if positions is None:
            count = torch.arange(patches.shape[1], device=patches.device)
            positions = count.expand(len(patches), -1)
        x_BLD = self.embedding(patches, positions)
        documents = documents_of(document_ids, documents)
        for layer in self.layers.values():
            x_BLD = layer(x_BLD, times, labels, documents)
        return self.final(x_BLD, times, labels)

    @torch.no_grad()
    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill a whole parameter: zeros (biases, adaLN's projection, the last one), else normal.

        With zeros each layer begins as the identity. The standard deviation is 0.02 for embeddings, and
        else that of Glorot & Bengio 2010: the root of 2 / (inputs + outputs).
        """
        zero = name.endswith(("bias", "modulation.weight")) or name == "final.projection.weight"
        if zero:
            tensor.zero_()
            return
        embeds = name.endswith(("label.weight", "time_in.weight", "time_out.weight"))
        tensor.normal_(0.0, 0.02 if embeds else (2 / sum(tensor.shape)) ** 0.5, generator=generator)
