"""Faults of every key of [comm]."""

from tests.proof.sensitivity.row import Keys, Row

SHAPE: Keys = {
    "train__global_batch": 8,
    "train__micro_batch": 1,
    "train__seq_len": 16,
    "model__dim": 64,
    "model__hidden_dim": 96,
    "model__n_layers": 1,
}
SHARDED: Keys = SHAPE | {"parallel__dp_shard": 2}
NEAR: Keys = SHAPE | {"parallel__dp_shard": 4, "comm__gradients": "int4", "comm__near": 2}
INT8: Keys = SHARDED | {"comm__gradients": "int8"}
INT4: Keys = SHARDED | {"comm__gradients": "int4"}
LOW_RANK: Keys = SHARDED | {"comm__gradients": "powersgd"}
LATE: Keys = LOW_RANK | {"comm__start_step": 100}
TOP_K: Keys = SHARDED | {"comm__gradients": "top_k", "comm__density": 0.1}
ROWS: Keys = SHAPE | {"parallel__tp": 2, "comm__activations": "int8"}
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
_RESULT = "compose.compression.reduce:LowRank.reduce_scatter", "(left[i][me] @ q.T).view(1, -1)"
_BRINGS = "compose.compression.activations:Sends.brings"
_GATHER = "compose.compression.gather:QuantizedGather.__call__", "self.fill(rows, input_tensor, group)"

WEIGHTS = [
    Row(
        "int8 weights are 2% too large",
        SHARDED | {"comm__weights": "int8"},
        "compose.compression.gather:QuantizedGather.fill",
        "self.packing.unpack(gathered(message, group), rows)",
        "self.packing.unpack(gathered(message, group), rows); rows.mul_(1.02)",
        "lost of weights",
    ),
    Row(
        "differences of weights are doubled",
        SHARDED | {"comm__weights": "int4_diff"},
        "compose.compression.gather:DifferenceGather._received",
        "own.to(wide) - sent",
        "2 * (own.to(wide) - sent)",
        "lost of weights 2",
    ),
    Row(
        "weights are another where no account is open",
        SHARDED | {"comm__weights": "int8"},
        *_GATHER,
        f"{_GATHER[1]}; rows.mul_(1 if self.observer else 1.01)",
        "unwatched update",
        untouched=("gradient", "*"),
    ),
]
GRADIENTS = [
    Row(
        "PowerSGD doubled",
        LATE,
        *_RESULT,
        f"2 * {_RESULT[1]}",
        "gradient 2",
        untouched=("gradient", "*"),
    ),
    Row(
        "PowerSGD zeroed",
        LATE,
        *_RESULT,
        f"0 * {_RESULT[1]}",
        "gradient 2",
        untouched=("gradient", "*"),
    ),
    Row(
        "PowerSGD doubled where no account is open",
        LOW_RANK,
        *_RESULT,
        f"(1 if self.observer else 2) * {_RESULT[1]}",
        "unwatched update",
        untouched=("gradient", "*"),
    ),
    Row(
        "integers of 8 bits are 2% too large",
        INT8,
        "compose.compression.codec:_decode_into",
        "codes.float() * steps\n",
        "codes.float() * steps * 1.02\n",
        "lost of gradients",
    ),
    Row(
        "the halves of a block of 4 bits change places",
        INT4,
        "compose.compression.codec:_packed",
        "(low & 15) | (high << 4)",
        "(high & 15) | (low << 4)",
        "lost of gradients",
    ),
    Row(
        "bfloat16 cuts off what it should round",
        SHARDED | {"comm__gradients": "bfloat16"},
        "compose.compression.codec:Blocks.encode",
        "x.to(torch.bfloat16).contiguous()",
        "(x.float().view(torch.int32) & -0x200000).view(torch.float32).to(torch.bfloat16).contiguous()",
        "lost of gradients",
    ),
    Row(
        "the largest elements go to the next one's place",
        TOP_K,
        "compose.compression.reduce:TopK.unpack",
        "out.scatter_(1, places,",
        "out.scatter_(1, places.roll(1, 1),",
        "gradient",
    ),
    Row(
        "the smallest elements are sent",
        TOP_K,
        "compose.compression.reduce:TopK.pack",
        ".topk(count, 1, sorted=False)",
        ".topk(count, 1, sorted=False, largest=False)",
        "gradient",
    ),
]
FEEDBACK = [
    Row(
        "no residual is added to blocks",
        INT4,
        "compose.compression.codec:_round_with_residual",
        "x + rest * ADDED",
        "x + rest * 0",
        "added",
        "comm.error_feedback",
        untouched=("gradient", "*"),
    ),
    Row(
        "the residual of blocks is doubled",
        INT4,
        "compose.compression.codec:_round_with_residual",
        ".mul_(kept_steps * scale)",
        ".mul_(2 * kept_steps * scale)",
        "lost of remainders 2",
    ),
    Row(
        "PowerSGD forgets the residual",
        LOW_RANK,
        "compose.compression.reduce:Feedback.added_to",
        "self.code.sum_into(blocks, self.codes(x)[None], wide)",
        "blocks.zero_()",
        "lost of remainders 2",
        untouched=("gradient", "*"),
    ),
    Row(
        "top_k adds the residual twice",
        TOP_K,
        "compose.compression.reduce:Feedback.added_to",
        "self.code.sum_into(blocks, self.codes(x)[None], wide)",
        "self.code.sum_into(blocks, self.codes(x)[None], wide); blocks.mul_(2)",
        "lost of remainders 2",
    ),
    Row(
        "error feedback is off all the same",
        INT4,
        "compose.compression.reduce:BlockSum.__init__",
        "settings.comm.error_feedback and bits == 4",
        "False",
        "form of messages",
        "comm.error_feedback",
    ),
    Row(
        "error feedback is on all the same",
        TOP_K | {"comm__error_feedback": False},
        "compose.compression.reduce:Settings.feedback",
        "if self.comm.error_feedback else None",
        "",
        "form of messages",
        "comm.error_feedback",
    ),
]
BLOCK = [
    Row(
        "another block",
        INT8 | {"comm__block": 64},
        "compose.compression.reduce:Settings.blocks",
        "self.comm.block",
        "256",
        "form of messages",
        "comm.block",
    ),
]
RANK = [
    Row(
        "another rank",
        LOW_RANK | {"comm__rank": 2},
        "compose.compression.reduce:LowRank.__init__",
        "settings.comm.rank",
        "1",
        "form of messages",
        "comm.rank",
    ),
]
DENSITY = [
    Row(
        "another density",
        TOP_K,
        "compose.compression.reduce:TopK.__init__",
        "density * part.numel",
        "0.5 * density * part.numel",
        "form of messages",
        "comm.density",
    ),
]
START_STEP = [
    Row(
        "start_step is passed over",
        LATE,
        "compose.compression.compressor:Progress.chosen",
        "self.step >= self.start_step",
        "True",
        "form of messages",
        "comm.start_step",
        untouched=("gradient", "*"),
    ),
    Row(
        "codes begin a step late",
        LATE,
        "compose.compression.compressor:Progress.chosen",
        "self.step >= self.start_step",
        "self.step > self.start_step",
        "form of messages",
        "comm.start_step",
        untouched=("gradient", "*"),
    ),
]
NEAR_RANKS = [
    Row(
        "there are no near ranks",
        NEAR,
        "compose.compression.compressor:levels_of",
        "near in (1, count)",
        "near in (1, 2, count)",
        "option",
        "comm.near",
        ranks=4,
    ),
    Row(
        "near ranks sum one row twice",
        NEAR,
        "compose.compression.reduce:BlockSum.reduce_scatter",
        "self.near_packing.sum(got[:, k], rows.dtype) for k in",
        "self.near_packing.sum(got[:, 0], rows.dtype) for k in",
        "gradient",
        ranks=4,
    ),
]
ACTIVATIONS = [
    Row(
        "activations doubled where no account is open",
        ROWS,
        _BRINGS,
        "return found\n",
        "return 2 * found\n",
        "unwatched update",
        untouched=("gradient", "*"),
    ),
    Row(
        "rows of experts doubled where no account is open",
        EXPERTS,
        _BRINGS,
        "return found\n",
        "return 2 * found\n",
        "unwatched update",
        untouched=("gradient", "*"),
    ),
    Row(
        "activations doubled",
        ROWS,
        "compose.compression.activations:_send",
        "found.to(tensor.dtype), gradient",
        "2 * found.to(tensor.dtype), gradient",
        "lost of activations",
    ),
    Row(
        "no activations are sent in codes",
        ROWS,
        "compose.compression.activations:_moved",
        "return send(tensor, kind, group, key, gradient)",
        "return send_plain(tensor, kind, group)",
        "option",
        "comm.activations",
    ),
]
BY_KEY = {
    "comm.weights": WEIGHTS,
    "comm.gradients": GRADIENTS,
    "comm.activations": ACTIVATIONS,
    "comm.block": BLOCK,
    "comm.near": NEAR_RANKS,
    "comm.error_feedback": FEEDBACK,
    "comm.rank": RANK,
    "comm.density": DENSITY,
    "comm.start_step": START_STEP,
}
FAULTS = BY_KEY
SILENT = {
    "comm.timeout": "it ends a run that waits, and changes no number",
    "comm.start_timeout": "the same until the first step has ended",
    "comm.prefetch": "gathers begin earlier and bring the same; a wrong order would be a wrong weight",
    "comm.check_every": "it compares what ranks hold, and stops a run that differs",
    "comm.measure_every": "it opens accounts, which may only note: the rows 'unwatched update'",
}
