"""Ring attention as one would write it by hand on SDPA's kernel: one piece of a sequence a rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_ops = torch.ops.aten


def _passed(x: Tensor) -> Tensor:
    """Send ``x`` to the next rank and return what the one before sends."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    got = torch.empty_like(x)
    works = [dist.isend(x, (rank + 1) % ranks), dist.irecv(got, (rank - 1) % ranks)]
    for work in works:
        work.wait()  # type: ignore[union-attr]
    return got


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        kv, out, lse = torch.stack([k, v]), torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
        for hop in range(ranks):
            if hop <= rank:
                o, s = _ops._scaled_dot_product_flash_attention_for_cpu(q, kv[0], kv[1], 0.0, hop == 0)
                both = torch.logaddexp(lse, s)
                out = out * (lse - both).exp()[..., None] + o * (s - both).exp()[..., None]
                lse = both
            kv = _passed(kv) if hop < ranks - 1 else kv
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        q, k, v, out, lse = ctx.saved_tensors
        kv, dq = torch.stack([k, v]), torch.zeros_like(q)
        dkv = torch.zeros_like(kv)
        for hop in range(ranks):
            if hop <= rank:
                result = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
                    grads[0], q, kv[0], kv[1], out, lse, 0.0, hop == 0
                )
                dq += result[0]
                dkv += torch.stack(result[1:])
            kv = _passed(kv) if hop < ranks - 1 else kv
            dkv = _passed(dkv)
        return dq, dkv[0], dkv[1]


class RingCore(nn.Module):
    """Causal attention over all ranks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        out: Any = _Ring.apply(q, k, v)
        return out.transpose(1, 2)
