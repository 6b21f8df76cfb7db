"""Faults of every key of [comm]."""

from tests.proof.sensitivity.row import Keys, table

SHAPE: Keys = {
    "train__global_batch": 8,
    "train__micro_batch": 1,
    "train__seq_len": 16,
    "model__dim": 64,
    "model__hidden_dim": 96,
    "model__n_layers": 1,
}
SHARDED: Keys = SHAPE | {"parallel__dp_shard": 2}
UNEVEN: Keys = SHAPE | {"parallel__dp_shard": 3, "train__global_batch": 6}
NEAR: Keys = SHAPE | {"parallel__dp_shard": 4, "comm__gradients": "int4", "comm__near": 2}
INT8: Keys = SHARDED | {"comm__gradients": "int8"}
INT4: Keys = SHARDED | {"comm__gradients": "int4"}
LOW_RANK: Keys = SHARDED | {"comm__gradients": "powersgd"}
LATE: Keys = LOW_RANK | {"comm__start_step": 100}
TOP_K: Keys = SHARDED | {"comm__gradients": "top_k", "comm__density": 0.1}
ROWS: Keys = SHAPE | {"parallel__tp": 2, "comm__activations": "int8"}
ODD_ROWS: Keys = SHAPE | {
    "train__seq_len": 31,
    "parallel__tp": 4,
    "parallel__sequence": False,
    "comm__activations": "float8",
}
EXPERTS: Keys = {
    "train__global_batch": 4,
    "train__seq_len": 16,
    "model__name": "mixtral",
    "model__preset": "debug",
    "model__n_layers": 1,
    "parallel__dp_shard": 2,
    "parallel__ep": 2,
    "comm__activations": "float8",
}

FAULTS = table(
    """
[comm.weights]
int8 weights are 2% too large | SHARDED comm__weights=int8 | lost of weights
    in compose.compression.gather:QuantizedGather.fill
    - self.packing.unpack(gathered(message, group), rows)
    + self.packing.unpack(gathered(message, group), rows); rows.mul_(1.02)
differences of weights are doubled | SHARDED comm__weights=int4_diff | lost of weights 2
    in compose.compression.gather:DifferenceGather._received
    own.to(wide) - sent => 2 * (own.to(wide) - sent)
weights are another where no account is open | SHARDED comm__weights=int8 | unwatched update
    in compose.compression.gather:QuantizedGather.__call__ with untouched='gradient/*'
    - self.fill(rows, input_tensor, group)
    + self.fill(rows, input_tensor, group); rows.mul_(1 if self.observer else 1.01)
a stale base | UNEVEN comm__weights=int4_diff | gradient 2
    in compose.compression.gather:DifferenceGather.fill with ranks=3
    self.kept["base"], self.sent = base, True => self.kept['base'] = self.__dict__.setdefault('first', base.clone()).clone(); self.sent = True
own weights that stay exact | UNEVEN comm__weights=int4_diff | gradient 2
    in compose.compression.gather:DifferenceGather.fill with ranks=3
    base[group.rank()], self.writes_base = self.own, False => self.writes_base = False

[comm.gradients]
PowerSGD doubled | LATE | gradient 2
    in compose.compression.reduce:LowRankSum.reduce_scatter with untouched='gradient/*'
    (left[i][me] @ q.T).view(1, -1) => 2 * (left[i][me] @ q.T).view(1, -1)
PowerSGD zeroed | LATE | gradient 2
    in compose.compression.reduce:LowRankSum.reduce_scatter with untouched='gradient/*'
    (left[i][me] @ q.T).view(1, -1) => 0 * (left[i][me] @ q.T).view(1, -1)
PowerSGD doubled where no account is open | LOW_RANK | unwatched update
    in compose.compression.reduce:LowRankSum.reduce_scatter with untouched='gradient/*'
    (left[i][me] @ q.T).view(1, -1) => (1 if self.observer else 2) * (left[i][me] @ q.T).view(1, -1)
integers of 8 bits are 2% too large | INT8 | lost of gradients
    in compose.compression.codec:_decode_into
    - codes.float() * steps
    -
    + codes.float() * steps * 1.02
    +
the halves of a block of 4 bits change places | INT4 | lost of gradients
    in compose.compression.codec:_packed
    (low & 15) | (high << 4) => (high & 15) | (low << 4)
bfloat16 cuts off what it should round | SHARDED comm__gradients=bfloat16 | lost of gradients
    in compose.compression.codec:Blocks.encode
    - x.to(self._without_scale(x.dtype)).contiguous()
    + (x.float().view(torch.int32) & -0x200000).view(torch.float32).to(torch.bfloat16).contiguous()
the largest elements go to the next one's place | TOP_K | gradient
    in compose.compression.reduce:TopKSum.unpack
    out.scatter_(1, places, => out.scatter_(1, places.roll(1, 1),
the smallest elements are sent | TOP_K | gradient
    in compose.compression.reduce:TopKSum.pack
    .topk(count, 1, sorted=False) => .topk(count, 1, sorted=False, largest=False)
a block off by one | INT8 | lost of gradients
    in compose.compression.packing:Packing._write
    .unflatten(-1, (self.blocks, width)) => .unflatten(-1, (self.blocks, width)).roll(1, -2)
integer sums | INT8 | gradient
    in compose.compression.codec:_decode_into
    out.add_(result) => out.add_(result.sign())
a sum that is a mean | INT8 | gradient
    in compose.compression.codec:decode_into
    - _sum_into(place, terms, bits, add, compiled)
    -         else
    + _sum_into(place, terms, bits, add, compiled).div_(len(terms))
    +         else
replicas left out | SHAPE parallel__dp_replicate=2 parallel__dp_shard=2 parallel__zero=1 comm__gradients=powersgd | gradient
    in compose.compression.compressor:ReplicaSum.hook with ranks=4
    -     self.sum(flat)
    +     pass
no message is in codes | INT8 | option | comm.gradients
    in compose.apply:apply with untouched='gradient/*'
    (compress(options, mesh) for _, compress in provided("compress")) => iter(())

[comm.activations]
activations doubled where no account is open | ROWS | unwatched update
    in compose.compression.activations:ModuleMessages.brings with untouched='gradient/*'
    - return result
    -
    + return 2 * result
    +
rows of experts doubled where no account is open | EXPERTS | unwatched update
    in compose.compression.activations:ModuleMessages.brings with untouched='gradient/*'
    - return result
    -
    + return 2 * result
    +
activations doubled | ROWS | lost of activations
    in compose.compression.activations:_send
    result.to(tensor.dtype), gradient => 2 * result.to(tensor.dtype), gradient
activations in float8 are 2% too large | ODD_ROWS | rounding of activations
    in compose.compression.activations:_decoded_float8 with ranks=4
    * scales => * scales * 1.02
no activations are sent in codes | ROWS | option | comm.activations
    in compose.compression.activations:_moved
    return send(tensor, kind, group, key, gradient) => return send_plain(tensor, kind, group)
a neighbour's scale of a row | ODD_ROWS | lost of activations
    in compose.compression.activations:_decoded_float8 with ranks=4
    * scales => * scales.roll(1, 0)
a neighbour's rows | ODD_ROWS | lost of activations
    in compose.compression.activations:_sum with ranks=4
    list(codes) => list(codes.roll(1, 0))
a rank left out | ODD_ROWS | lost of activations
    in compose.compression.activations:_sum with ranks=4
    got[1:] => got[2:]
a gradient that is summed twice | EXPERTS | lost of activations' gradients
    in compose.compression.activations:_exchange_rows
    result = code.decode( => result = (1 + gradient) * code.decode(

[comm.block]
another block | INT8 comm__block=64 | form of messages | comm.block
    in compose.compression.reduce:SumSettings.blocks
    self.comm.block => 256

[comm.near]
there are no near ranks | NEAR | option | comm.near
    in compose.compression.gather:levels_of with ranks=4
    near in (1, count) => near in (1, 2, count)
near ranks sum one row twice | NEAR | gradient
    in compose.compression.reduce:BlockSum.reduce_scatter with ranks=4
    - self.intra_packing.sum(got[:, k], rows.dtype) for k in
    + self.intra_packing.sum(got[:, 0], rows.dtype) for k in
a neighbour's scale | NEAR | lost of gradients
    in compose.compression.codec:read_steps with ranks=4
    = codes[..., -SCALE_BYTES:] => = codes[..., -SCALE_BYTES:].roll(1, -2)

[comm.error_feedback]
no residual is added to blocks | INT4 | added | comm.error_feedback
    in compose.compression.codec:_round_with_residual with untouched='gradient/*'
    x + rest * ADDED => x + rest * 0
the residual of blocks is doubled | INT4 | lost of residuals 2
    in compose.compression.codec:_round_with_residual
    .mul_(kept_steps * scale) => .mul_(2 * kept_steps * scale)
what was sent stays in the residual | INT4 | lost of residuals
    in compose.compression.codec:_round_with_residual
    rest.add_(x).sub_(rounded * steps) => rest.add_(x).sub_(rounded * steps * (1 - ADDED))
PowerSGD forgets the residual | LOW_RANK | lost of residuals 2
    in compose.compression.packing:Feedback.added_to with untouched='gradient/*'
    self.code.sum_into(blocks, self.codes(x)[None], wide) => blocks.zero_()
top_k adds the residual twice | TOP_K | lost of residuals 2
    in compose.compression.packing:Feedback.added_to
    - self.code.sum_into(blocks, self.codes(x)[None], wide)
    + self.code.sum_into(blocks, self.codes(x)[None], wide); blocks.mul_(2)
error feedback is off all the same | INT4 | form of messages | comm.error_feedback
    in compose.compression.reduce:BlockSum.__init__
    settings.comm.error_feedback and bits == 4 => False
error feedback is on all the same | TOP_K comm__error_feedback=False | form of messages | comm.error_feedback
    in compose.compression.reduce:SumSettings.feedback
    - if self.comm.error_feedback else None
    +

[comm.rank]
another rank | LOW_RANK comm__rank=2 | form of messages | comm.rank
    in compose.compression.reduce:LowRankSum.__init__
    settings.comm.rank => 1

[comm.density]
another density | TOP_K | form of messages | comm.density
    in compose.compression.reduce:TopKSum.__init__
    density * part.numel => 0.5 * density * part.numel

[comm.start_step]
start_step is passed over | LATE | form of messages | comm.start_step
    in compose.compression.reduce:StepProgress.chosen with untouched='gradient/*'
    self.step >= self.start_step => True
codes begin a step late | LATE | form of messages | comm.start_step
    in compose.compression.reduce:StepProgress.chosen with untouched='gradient/*'
    self.step >= self.start_step => self.step > self.start_step
""",  # noqa: E501
    globals(),
)
BY_KEY = FAULTS
SILENT = {
    "comm.timeout": "it ends a run that waits, and changes no number",
    "comm.start_timeout": "the same until the first step has ended",
    "comm.prefetch": "gathers begin earlier and bring the same; a wrong order would be a wrong weight",
    "comm.check_every": "it compares what ranks hold, and stops a run that differs",
    "comm.check_state": "it compares what a rank holds with what it held, and stops a run that differs",
    "comm.check_messages": "it compares what was received with what was sent, and stops a run",
    "comm.measure_every": "it opens accounts, which may only note: the rows 'unwatched update'",
}
