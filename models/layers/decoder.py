"""The decoder that models of experts share: all but attention, and the angles by which it rotates.

Shapes: B batch, L sequence length, D model width, K head width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from compose.ops.layers import RMSNorm

from .attention import Documents, documents_of
from .feed_forward import FeedForward
from .initial import init_by_depth
from .moe import MoE
from .norms import Scale


class Block(nn.Module):
    """One layer: attention and a feed-forward network or experts, each after or before a norm.

    ``scale`` is the factor on what they add to the stream. ``after`` puts each norm behind its branch.
    """

    def __init__(
        self,
        dim: int,
        norm_eps: float,
        attention: nn.Module,
        network: FeedForward | MoE,
        scale: float = 1.0,
        after: bool = False,
    ) -> None:
        super().__init__()
        self.scale, self.after = scale, after
        self.attention_norm = RMSNorm(dim, eps=norm_eps)
        self.attention = attention
        self.ffn_norm = RMSNorm(dim, eps=norm_eps)
        if isinstance(network, MoE):
            self.moe = network
        else:
            self.feed_forward = network

    def forward(
        self,
        x_BLD: Tensor,
        cosine: Tensor,
        sine: Tensor,
        real_BL: Tensor,
        documents: Documents | None = None,
    ) -> Tensor:
        """Return the stream after the layer, (B, L, D); ``real_BL`` is False for padding."""
        first, second = self.attention_norm, self.ffn_norm
        # Without names, a branch and its input are freed as soon as they are used.
        x_BLD = x_BLD + self._branch(
            first, self.attention(x_BLD if self.after else first(x_BLD), cosine, sine, documents)
        )
        return x_BLD + self._branch(
            second, self._network(x_BLD if self.after else second(x_BLD), real_BL)
        )

    def _network(self, x_BLD: Tensor, real_BL: Tensor) -> Tensor:
        return self.moe(x_BLD, real_BL) if hasattr(self, "moe") else self.feed_forward(x_BLD)

    def _branch(self, norm: nn.Module, branch: Tensor) -> Tensor:
        branch = norm(branch) if self.after else branch
        return branch if self.scale == 1 else branch * self.scale


class Decoder(nn.Module):
    """Embedding, layers, and projection onto the vocabulary; a model makes the layers and the angles.

    The factors are on the embedding's output, and on the projection's input.
    """

    config: Any

    def __init__(self, config: Any, embedding_scale: float = 1.0, logit_scale: float = 1.0) -> None:
        super().__init__()
        c = self.config = config
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.dim)
        self.embedding_scale = Scale(embedding_scale) if embedding_scale != 1 else None
        # The keys are indices, so that a layer keeps its name when others are removed.
        self.layers = nn.ModuleDict({str(i): self.make_layer(i) for i in range(c.n_layers)})
        self.norm = RMSNorm(c.dim, eps=c.norm_eps)
        self.logit_scale = Scale(logit_scale) if logit_scale != 1 else None
        self.output = nn.Linear(c.dim, c.vocab_size, bias=False)
        if c.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def make_layer(self, index: int) -> Block:
        """Return a layer by its index."""
        raise NotImplementedError

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the angles of positions (B, L), (B, L, 1, K / 2) or of fewer pairs.

        They are computed, and no buffers, which would have no values if the model is built on meta.
        ``dtype`` is the type of what is rotated.
        """
        raise NotImplementedError

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Return the logits (B, L, V) of tokens (B, L).

        ``positions`` (B, L) are -1 for padding; without them they count from 0. Attention stays within
        a document. ``document_ids`` (B, L) and ``documents``, which a batch makes of them once, say
        which; without both each row is one.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x_BLD = self.tok_embeddings(tokens)
        if self.embedding_scale is not None:
            x_BLD = self.embedding_scale(x_BLD)
        cosine, sine = self.angles(positions, x_BLD.dtype)
        documents = documents_of(document_ids, documents)
        real_BL = (positions >= 0).expand(len(tokens), -1)
        for layer in self.layers.values():
            x_BLD = layer(x_BLD, cosine, sine, real_BL, documents)
        x_BLD = self.norm(x_BLD)
        return self.output(x_BLD if self.logit_scale is None else self.logit_scale(x_BLD))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill a whole parameter."""
        init_by_depth(name, tensor, generator, self.config.n_layers)
