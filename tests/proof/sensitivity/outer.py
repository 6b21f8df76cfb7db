"""Faults of the outer loop, by the key of [outer] that they break."""

from tests.diloco.cases import EXPERTS, STREAMING
from tests.proof.sensitivity.row import Keys, table

SMALL: Keys = {"train__global_batch": 8, "train__micro_batch": 1, "parallel__dp_shard": -1}

FAULTS = table(
    """
[outer.every]
exchanges a step early | STREAMING SMALL | outer weight
    in compose.diloco.loop:OuterLoop.after_update
    step % self.between == 0 => (step + 1) % self.between == 0
no exchange after the last step | STREAMING SMALL | island's weight
    in compose.diloco.loop:OuterLoop.after_update
    - if step == last:
    -             for
    + if step == last:
    +             return
    +             for
an island left out of the average | STREAMING SMALL | outer weight
    in compose.diloco.loop:OuterLoop._end
    for message in arrived: => for message in arrived[1:]:

[outer.lr]
the rate is not read | STREAMING SMALL outer__lr=0.4 | outer weight
    in compose.diloco.loop:OuterLoop.__init__
    options.lr or best_lr => best_lr
the rate of fewer islands | STREAMING SMALL | outer weight
    in compose.diloco:best_lr
    known <= workers => known < workers

[outer.momentum]
momentum without Nesterov | STREAMING SMALL | outer weight
    in compose.diloco.loop:OuterLoop._step
    new -= self.lr * self.options.momentum * span.take(kept).double() => pass
momentum that is not kept | STREAMING train__global_batch=8 train__micro_batch=1 parallel__dp_shard=2 | outer weight
    in compose.diloco.loop:OuterLoop._step with ranks=4
    self.options.momentum * span.take(kept).double() + (wide - mean) => wide - mean

[outer.fragments]
the next fragment's turn | STREAMING SMALL | outer weight
    in compose.diloco.loop:OuterLoop.after_update
    (step // self.between - 1) % many => step // self.between % many
a fragment applied twice | STREAMING SMALL | outer weight
    in compose.diloco.loop:OuterLoop._end
    self._spread(fragment, mean.to(theta.dtype)) => [*self._spread(fragment, mean.to(theta.dtype))] * 2
fragments of what a rank holds | STREAMING SMALL | outer weight | output.weight
    in compose.diloco.fragments:rows_of with ranks=4
    torch.arange(*region[0]) => torch.arange(region[0][1] - region[0][0])
neighbouring layers make a fragment | SMALL outer__every=4 outer__fragments=2 model__n_layers=4 | outer weight | layers.*
    in compose.diloco.fragments:shares
    results[layer % count] => results[layer * count // len(layers)]
a neighbour's part | STREAMING train__global_batch=8 train__micro_batch=1 parallel__dp_shard=1 parallel__tp=2 | outer weight
    in compose.diloco.loop:OuterLoop._spread with ranks=4
    for one in everyone] => for one in reversed(everyone)]
frozen weights are exchanged | STREAMING SMALL model__lora__rank=3 model__lora__targets="['layers.*.attention.w*','layers.*.feed_forward.w*']" | island's weight | layers.*.attention.wq.weight
    in compose.diloco.fragments:fragments_of
    if parameter.requires_grad: => if True:

[outer.delay]
one step late | STREAMING SMALL | outer weight
    in compose.diloco.loop:OuterLoop.after_update
    step >= min(self.pending.due, last) => step > min(self.pending.due, last)
no delay | STREAMING SMALL | island's weight
    in compose.diloco.loop:OuterLoop.after_update
    step, self.options.delay, self => step, 0, self

[outer.mix]
mixed the other way around | SMALL outer__every=4 outer__fragments=1 outer__delay=1 outer__mix=0.25 | island's weight
    in compose.diloco.loop:OuterLoop._step
    span.take(local).to(common.dtype), mix) => span.take(local).to(common.dtype), 1 - mix)

[outer.dtype]
what arrives in bfloat16 is doubled | STREAMING SMALL outer__dtype=bfloat16 | outer weight
    in compose.diloco.loop:OuterLoop._end
    - self.code.decode(message[CHECK:end].to(theta.device), theta).double()
    + 2 * self.code.decode(message[CHECK:end].to(theta.device), theta).double()
what arrives in e3m0 is doubled | STREAMING SMALL outer__dtype=e3m0 | outer weight
    in compose.diloco.loop:OuterLoop._end
    - self.code.decode(message[CHECK:end].to(theta.device), theta).double()
    + 2 * self.code.decode(message[CHECK:end].to(theta.device), theta).double()
what arrives in top_k is doubled | STREAMING SMALL outer__dtype=top_k | outer weight
    in compose.diloco.loop:OuterLoop._end
    - self.code.decode(message[CHECK:end].to(theta.device), theta).double()
    + 2 * self.code.decode(message[CHECK:end].to(theta.device), theta).double()
what arrives in int8 is doubled | STREAMING SMALL outer__dtype=int8 | lost of changes | outer.dtype
    in compose.diloco.messages:BlockCode.decode
    self.blocks.decode( => 2 * self.blocks.decode(
int8 is rounded down | STREAMING SMALL outer__dtype=int8 | lost of changes | outer.dtype
    in compose.compression.codec:_rounded
    .round_() => .floor_()
e3m0 rounds at the middle of the exponents | STREAMING SMALL outer__dtype=e3m0 | outer weight
    in compose.diloco.messages:E3M0.encode
    ratio / 0.75 => ratio / 0.70710678
e3m0 takes a neighbour's scale | STREAMING SMALL outer__dtype=e3m0 | outer weight
    in compose.diloco.messages:E3M0.decode
    * scales.float() => * scales.float().roll(1, 0)
the change is sent as it is | STREAMING SMALL outer__dtype=bfloat16 | outer weight
    in compose.diloco.messages:code_of
    - if options.dtype == "float32" else 16
    +
top_k sends the smallest | STREAMING SMALL outer__dtype=top_k | lost of changes | outer.dtype
    in compose.diloco.messages:TopKCode.encode
    .topk(self.kept, 1) => .topk(self.kept, 1, largest=False)
half as many are sent | STREAMING SMALL outer__dtype=top_k outer__density=0.03125 | outer weight
    in compose.diloco.messages:code_of
    round(options.density * ROW) => round(options.density / 2 * ROW)
what was lost is added twice | STREAMING SMALL outer__dtype=top_k | outer weight
    in compose.diloco.loop:OuterLoop._begin
    DECAY * residual => 2 * DECAY * residual
what was lost is forgotten | STREAMING SMALL outer__dtype=top_k | outer weight
    in compose.diloco.loop:OuterLoop._begin
    self.residuals[fragment] = codes => self.residuals[fragment] = 0 * codes

[outer.grace]
a late island is waited for | STREAMING SMALL outer__grace=1 | waited for a late island | outer.grace
    in compose.diloco.messages:WorkerExchange._present
    map(str, ready) => map(str, range(count))

[buffers]
routers' biases stay apart | SMALL EXPERTS outer__every=2 | island's weight | layers.*.bias
    in compose.diloco.loop:OuterLoop._end
    self._set_averaged(sums / len(arrived)) => pass
buffers of one island alone | STREAMING SMALL EXPERTS | island's weight | layers.*.bias
    in compose.diloco.messages:averaged_buffers
    for buffer in persistent_buffers(model).values() if => for name, buffer in persistent_buffers(model).items() if 'bias' not in name and
""",  # noqa: E501
    globals() | {"EXPERTS": EXPERTS, "STREAMING": STREAMING},
    islands=2,
)
BY_KEY = FAULTS | {"outer.density": FAULTS["outer.dtype"][-3:-2]}
SILENT = {"outer.offload": "it moves memory; on a CPU it changes nothing, and the proof says so"}
