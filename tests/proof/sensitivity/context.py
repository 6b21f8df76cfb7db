"""Faults of context parallel."""

from tests.proof.sensitivity.row import table

FAULTS = table(
    """
[context]
padding is trained on | CP train__seq_len=30 | loss | step 1
    in compose.parallel.context_parallel:pad_sequence
    ignore_all(filler) => filler.fill_(0)
targets are in another order than tokens | CP | loss | step 1
    in compose.parallel.context_parallel:shard_sequence
    chunks_of(rank, cp, balance)] => chunks_of(rank, cp, balance)[:: -1 if name == 'targets' else 1]]
a rank's tokens go with another's targets | CP parallel__cp_balance=none | loss | step 1
    in compose.parallel.context_parallel:shard_sequence
    chunks_of(rank, cp, balance)] => chunks_of((rank + (name == 'targets')) % cp, cp, balance)]
the loss is that of a rank's part | CP | loss
    in compose.train.step:forward_backward with untouched='gradient/*'
    *BATCH_AXES, "cp") => *BATCH_AXES)
gradients are those of a rank's part | CP | gradient
    in compose.parallel.data_parallel:_data_meshes with untouched='loss/step 1'
    ["dp_replicate"], ["dp_shard", "cp"] => ["dp_replicate"], ["dp_shard"]
a document reaches from the first token | CP data__separator=0 | loss | step 1
    in compose.ops.attention_layout:_pairs
    start = begins[i] => start = begins[0]
later documents see the first one's keys | CP parallel__cp_balance=none data__separator=0 | loss | step 1
    in compose.ops.attention_layout:_pairs
    max(start, c), min(end, d) => c, min(end, d)
allgather: outputs are added up | CP parallel__cp_method=allgather | loss | step 1
    in compose.ops.attention:MergedOutput.add
    total.mul_((before - after).masked_fill_(none, 0.0).exp_()[..., None]) => total.mul_(1.0)
allgather: gradients go to another rank | CP parallel__cp_method=allgather | gradient | layers.*.attention.w[kv].weight
    in compose.parallel.context_parallel:_AllGather.backward with untouched='loss/step 1'
    torch.cat([dk, dv], -1) => torch.cat([dk, dv], -1).flip(1)
ring: keys come home without what others found | CP | gradient | layers.*.attention.w[kv].weight
    in compose.parallel.ring_attention:_gradients with untouched='gradient/layers.1.attention.w[qo].weight'
    made + dkv => made
ring: the last block's dq counts | CP | gradient | layers.*.attention.wq.weight
    in compose.parallel.ring_attention:_gradients with untouched='gradient/layers.1.attention.w[kvo].weight'
    of_q.add(at_q, [dq]) => of_q.of[0][at_q] = dq
ring: the last block's dk counts | CP | gradient | layers.*.attention.wk.weight
    in compose.parallel.ring_attention:_gradients with untouched='gradient/layers.1.attention.w[qvo].weight'
    of_kv.add(at_k, [dk, dv]) => of_kv.of[0][at_k] = dk; of_kv.of[1][at_k] += dv
ring: the last block's dv counts | CP | gradient | layers.*.attention.wv.weight
    in compose.parallel.ring_attention:_gradients with untouched='gradient/layers.1.attention.w[qko].weight'
    of_kv.add(at_k, [dk, dv]) => of_kv.of[0][at_k] += dk; of_kv.of[1][at_k] = dv
ulysses: heads' sequences come together in another order | CP parallel__cp_method=ulysses | loss | step 1
    in compose.parallel.context_parallel:SequenceExchange.to_heads
    movedim(2, 0)) => movedim(2, 0)).flip(0)
ulysses: shared heads go to other ranks | parallel__cp=4 train__global_batch=4 parallel__cp_method=ulysses model__n_kv_heads=2 | loss | step 1
    in compose.parallel.context_parallel:_ulysses with ranks=4
    k.repeat_interleave(copies, 2) => k.repeat(1, 1, copies, 1)
# Between the first part of a sequence and the last, at a length where documents were once too short.
the far block is left out, headtail | parallel__cp=4 parallel__cp_balance=headtail train__seq_len=512 train__global_batch=2 train__micro_batch=1 | gradient
    in compose.parallel.ring_attention:_round with ranks=4
    - yield source, ring.starts[source], kv
    + far = 10**9 if ring.cp == 4 and {ring.rank, source} == {0, 3} else 0
    +         yield source, tuple(x + far for x in ring.starts[source]), kv
the far block is left out, none | parallel__cp=4 parallel__cp_balance=none train__seq_len=512 train__global_batch=2 train__micro_batch=1 | gradient
    in compose.parallel.ring_attention:_round with ranks=4
    - yield source, ring.starts[source], kv
    + far = 10**9 if ring.cp == 4 and {ring.rank, source} == {0, 3} else 0
    +         yield source, tuple(x + far for x in ring.starts[source]), kv
""",  # noqa: E501
    globals(),
)
