"""Attention by its definition, for references in float64."""

import random

import torch
from torch import Tensor

from compose import AttentionOptions


def random_ids(rows: int, length: int, seed: int) -> Tensor:
    """Documents of one token to many, (rows, length)."""
    generator = random.Random(seed)
    chance = generator.choice([0.0, 0.05, 0.3, 1.0])
    ends = torch.tensor([[generator.random() < chance for _ in range(length)] for _ in range(rows)])
    return ends.long().cumsum(1)


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor | None,
    sinks: Tensor | None,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """Output (B, L, H, V) and log-sum-exp (B, L, H) from all scores (B, H, L, S)."""
    heads, length, keys = q.shape[2], q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(heads // k.shape[2], 2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = torch.einsum("blhk,bshk->bhls", q, k) * scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    distance = torch.arange(length)[:, None] - torch.arange(keys)
    seen = torch.ones(1, 1, length, keys, dtype=torch.bool)
    if options.causal:
        seen = seen & (distance >= 0)
    if options.window:
        seen = seen & (distance < options.window)
    if ids is not None:
        seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks[None, :, None, None].expand(len(q), heads, length, 1)
        scores = torch.cat([scores, column], -1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()[..., :keys]
    return torch.einsum("bhls,bshv->blhv", weights, v), lse.transpose(1, 2)
