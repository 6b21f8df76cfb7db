"""Faults of data and tensor parallel."""

from tests.proof.sensitivity.row import TP, Keys, table
from tests.support.small_models import DEEPSEEK

PLAIN_TP: Keys = TP | {"parallel__sequence": False}

FAULTS = table(
    """
[data]
replicas are never reduced | SHARDED parallel__dp_replicate=2 | gradient
    in compose.parallel.data_parallel:DataParallel.prepare_micro_batch with ranks=4
    model.set_requires_all_reduce(complete) => model.set_requires_all_reduce(False)
ZeRO 0 averages over ranks | SHARDED parallel__zero=0 | gradient
    in compose.parallel.gradient_sum:GradientSum._send with untouched='loss/step 1'
    flat = _flat(parameters) => flat = _flat(parameters) / self.groups[0].size()
ZeRO 0: sums are put back doubled | SHARDED parallel__zero=0 | gradient
    in compose.parallel.gradient_sum:GradientSum.finish with untouched='loss/step 1'
    _put(parameters, flat) => _put(parameters, flat * 2)
ZeRO 0 with cp sums over replicas alone | CP parallel__zero=0 | gradient
    in compose.parallel.data_parallel:_data_meshes with untouched='loss/step 1'
    ["dp_replicate", "cp"], ["dp_shard"] => ["dp_replicate"], ["dp_shard"]
whole parameters: a norm's gradient stays a part of tp | TP | gradient | layers.*.attention_norm.weight
    in compose.parallel.gradient_sum:_complete with untouched='gradient/layers.*.attention.w?.weight'
    dist.all_reduce(flat, group=mesh.get_group()) => pass
ZeRO 1 averages over ranks | SHARDED parallel__zero=1 | gradient
    in compose.parallel.data_parallel:apply_data_parallel with untouched='loss/step 1'
    set_gradient_divide_factor(1.0) => set_gradient_divide_factor(2.0)
ZeRO 1 never reduces | SHARDED parallel__zero=1 | gradient
    in compose.parallel.data_parallel:DataParallel.prepare_micro_batch
    set_requires_gradient_sync(complete or zero >= 2) => set_requires_gradient_sync(zero >= 2)
ZeRO 2 loses all micro-batches but the last | SHARDED parallel__zero=2 | gradient
    in compose.train.step:_run with untouched='loss/step 1'
    value.backward() => (value if number == len(parts) - 1 else value * 0).backward()
ZeRO 3 averages over micro-batches | SHARDED | gradient
    in compose.train.step:_run with untouched='loss/step 1'
    value.backward() => (value / len(parts)).backward()
the loss is that of the last micro-batch | SHARDED | loss
    in compose.train.step:_run with untouched='gradient/*'
    total = total + value.detach() => total = value.detach()
ignored targets count | SHARDED | loss | step 1
    in compose.train.step:forward_backward
    count_for(loss_function, targets) => count_for(loss_function, targets.clamp(min=0))
ignored targets count, also where the loss is checked | SHARDED | loss | step 1
    in compose.ops.batch:count_targets
    ~ignored(targets) => targets
each rank draws weights of its own | SHARDED | initial weight | layers.0.attention.wq.weight
    in compose.weights:init_weights
    - named_generator(seed, of or name, device))
    + named_generator(seed + __import__('torch').distributed.get_rank(), of or name, device))
a rank's buffers are others | DEEPSEEK FEW parallel__dp_shard=2 | buffer | *.router.bias
    in compose.weights:materialize with untouched='initial weight/*'
    buffer.clone() for => buffer + __import__('torch').distributed.get_rank() for
a later gather takes another's part | parallel__dp_shard=4 parallel__zero3_reshard=2 train__global_batch=8 | gradient | layers.*
    in compose.parallel.hpz:HpzGather.__call__ with ranks=4
    [self.neighbours.rank()] => [0]
a step's weights are kept for the next | parallel__dp_shard=4 parallel__zero3_reshard=2 train__global_batch=8 | loss | step 2
    in compose.parallel.hpz:hpz_shards with ranks=4 untouched='gradient/*'
    gather.keeping, gather.kept = False, None => gather.keeping = False
clipping scales a copy of what is in host memory | SHARDED parallel__offload=cpu | update
    in compose.train.step:clip_grad_norm_ with untouched='gradient/*'
    _foreach_mul_(some, => _foreach_mul_([x.clone() for x in some],

[tensor]
a rank's embedding counts from the first row | TP | loss
    in compose.parallel.vocabulary_parallel:_RowEmbedding.forward
    at = input - first => at = input
the output's input is summed over nothing | PLAIN_TP | gradient | layers.*.attention.wq.weight
    in compose.parallel.vocabulary_parallel:LocalOutput._apply with untouched=gradient/output.weight
    ("keep", "sum") => ("keep", "keep")
a sequence comes together in another order | TP | gradient
    in compose.parallel.stream_messages:_gathered
    return torch.cat(parts, 1) => return torch.cat(parts, 1).roll(1, 1)
what ranks found is averaged | TP | loss | step 1
    in compose.parallel.stream_messages:_scattered
    total = parts[0] + parts[1] => total = (parts[0] + parts[1]) / 2
LocalInput: without a sequence the gradient stays a part | PLAIN_TP | gradient | layers.0.*
    in compose.parallel.local_parallel:LocalInput._apply with untouched='loss/step 1'
    ("keep", "sum") => ("keep", "keep")
LocalRowwise: the gradient of a sum is summed | PLAIN_TP | gradient | layers.*.attention.wo.weight
    in compose.parallel.local_parallel:LocalRowwise._apply with untouched=gradient/output.weight
    ("sum", "keep") => ("sum", "sum")
LocalColwise: its input gets no gradient | TP | gradient | layers.*.ffn_norm.weight
    in compose.parallel.local_parallel:_ColumnLinear.forward with untouched=gradient/norm.weight
    F.linear(input, => F.linear(input.detach(),
LocalHeads: a rank takes another's head | parallel__tp=4 train__global_batch=4 | gradient | layers.*.attention.wk.weight
    in compose.parallel.local_parallel:LocalHeads._apply with ranks=4
    device_mesh.get_local_rank() * self.n_heads // size => device_mesh.get_local_rank() % self.n_heads
LocalNorm: its gradient stays a part | TP | gradient | layers.*.attention_norm.weight
    in compose.parallel.local_parallel:_LocalRMSNorm.forward with untouched='gradient/layers.*.attention.w?.weight'
    local_weight(self.weight, partial=True) => local_weight(self.weight)
loss parallel: the loss is averaged over ranks | TP | loss | step 1
    in compose.ops.cross_entropy:_ChunkedCrossEntropy.forward
    - (log_zs - target).masked_fill_(ignored, 0.0)
    + (log_zs - target).masked_fill_(ignored, 0.0) / max(1, len(result))
loss parallel: the z-loss is that of a part of the vocabulary | TP train__z_loss=0.1 | gradient | output.weight
    in compose.ops.cross_entropy:_LogZ.forward with untouched='loss/step 1'
    rows.gathered(logits.logsumexp(-1)).logsumexp(0) => rows.gathered(logits.logsumexp(-1))[0]
loss parallel in chunks: the hidden states' gradient stays a part | TP train__loss_chunk=16 | gradient | norm.weight
    in compose.ops.cross_entropy:chunked_cross_entropy with untouched=gradient/output.weight
    Partial() if rows.group else Replicate() => Replicate()
a shard counts in the norm as a copy does | TP | grad_norm
    in compose.train.step:_gradients with untouched='gradient/*'
    copies //= 1 if placement.is_replicate() else size => copies //= 1
data parallel cuts before tensor parallel | SHARDED parallel__tp=2 | initial weight | layers.*.attention.wq.weight
    in compose.ops.tensors:local_region with ranks=4 untouched='initial weight/*norm.weight'
    sorted(cuts) => cuts
a tie is lost | TP model__tie_embeddings=True | gradient | tok_embeddings.weight
    in compose.parallel.tensor_parallel:apply_tensor_parallel
    tie(model, [first, *others]) => tie(model, [first])
""",  # noqa: E501
    globals() | {"DEEPSEEK": DEEPSEEK},
)
