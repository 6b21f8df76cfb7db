"""Faults of the outer loop, by the key of [outer] that they break."""

from tests.diloco.cases import EXPERTS, STREAMING, outer
from tests.proof.sensitivity.row import Keys, Row
from tests.support.lora import lora

LOOP = "compose.diloco.loop:OuterLoop"
INIT, BEGIN, END, STEP = (f"{LOOP}.{name}" for name in ("__init__", "_begin", "_end", "_step"))
AFTER = f"{LOOP}.after_step"
DECODED = "self.code.decode(message[CHECK:end].to(theta.device), theta).double()"
# Both fail: the outer weights are those of the islands.
OUTER, ISLAND, LOST = "outer weight", "island's weight", "lost of changes"


def fault(
    name: str,
    keys: Keys,
    place: str,
    old: str,
    new: str,
    quantity: str = OUTER,
    names: str = "*",
    ranks: int = 2,
) -> Row:
    """A row for two islands."""
    small: Keys = {"train__global_batch": 8, "train__micro_batch": 1, "parallel__dp_shard": -1}
    return Row(name, small | keys, place, old, new, quantity, names, ranks=ranks, islands=2)


EVERY = [
    fault(
        "exchanges a step early",
        STREAMING,
        AFTER,
        "step % self.between == 0",
        "(step + 1) % self.between == 0",
    ),
    fault(
        "no exchange after the last step",
        STREAMING,
        AFTER,
        "if step == last:\n        for",
        "if step == last:\n        return\n        for",
        ISLAND,
    ),
    fault(
        "an island left out of the average",
        STREAMING,
        END,
        "for message in there:",
        "for message in there[1:]:",
    ),
]
RATES = [
    fault("the rate is not read", STREAMING | outer(lr=0.4), INIT, "options.lr or best_lr", "best_lr"),
    fault(
        "the rate of fewer islands",
        STREAMING,
        "compose.diloco.options:best_lr",
        "known <= islands",
        "known < islands",
    ),
    fault(
        "momentum without Nesterov",
        STREAMING,
        STEP,
        "new -= self.lr * self.options.momentum * span.take(kept).double()",
        "pass",
    ),
    fault(
        "momentum that is not kept",
        STREAMING | {"parallel__dp_shard": 2},
        STEP,
        "self.options.momentum * span.take(kept).double() + (wide - mean)",
        "wide - mean",
        ranks=4,
    ),
]
FRAGMENTS = [
    fault(
        "the next fragment's turn",
        STREAMING,
        AFTER,
        "(step // self.between - 1) % many",
        "step // self.between % many",
    ),
    fault(
        "a fragment applied twice",
        STREAMING,
        END,
        "self._spread(fragment, mean.to(theta.dtype))",
        "[*self._spread(fragment, mean.to(theta.dtype))] * 2",
    ),
    fault(
        "fragments of what a rank holds",
        STREAMING,
        "compose.diloco.fragments:rows_of",
        "torch.arange(*place[0])",
        "torch.arange(place[0][1] - place[0][0])",
        names="output.weight",
        ranks=4,
    ),
    fault(
        "neighbouring layers make a fragment",
        outer(every=4, fragments=2) | {"model__n_layers": 4},
        "compose.diloco.fragments:shares",
        "found[layer % count]",
        "found[layer * count // len(layers)]",
        names="layers.*",
    ),
    fault(
        "a neighbour's part",
        STREAMING | {"parallel__dp_shard": 1, "parallel__tp": 2},
        f"{LOOP}._spread",
        "for one in everyone]",
        "for one in reversed(everyone)]",
        ranks=4,
    ),
    fault(
        "frozen weights are exchanged",
        STREAMING | lora(3),
        "compose.diloco.fragments:fragments_of",
        "if parameter.requires_grad:",
        "if True:",
        ISLAND,
        "layers.*.attention.wq.weight",
    ),
]
DELAY = [
    fault(
        "one step late",
        STREAMING,
        AFTER,
        "step >= min(self.pending.due, last)",
        "step > min(self.pending.due, last)",
    ),
    fault("no delay", STREAMING, AFTER, "step, self.options.delay, self", "step, 0, self", ISLAND),
]
MIX = [
    fault(
        "mixed the other way around",
        STREAMING | outer(mix=0.25),
        STEP,
        "span.take(local).to(common.dtype), mix)",
        "span.take(local).to(common.dtype), 1 - mix)",
        ISLAND,
    ),
]
CODES = [
    *(
        fault(
            f"what arrives in {dtype} is doubled",
            STREAMING | outer(dtype=dtype),
            END,
            DECODED,
            f"2 * {DECODED}",
        )
        for dtype in ("bfloat16", "e3m0", "top_k")
    ),
    fault(
        "what arrives in int8 is doubled",
        STREAMING | outer(dtype="int8"),
        "compose.diloco.codes:Int8.decode",
        "self.blocks.decode(",
        "2 * self.blocks.decode(",
        LOST,
        "outer.dtype",
    ),
    fault(
        "int8 is rounded down",
        STREAMING | outer(dtype="int8"),
        "compose.compression.codec:_rounded",
        ".round_()",
        ".floor_()",
        LOST,
        "outer.dtype",
    ),
    fault(
        "e3m0 rounds at the middle of the exponents",
        STREAMING | outer(dtype="e3m0"),
        "compose.diloco.codes:E3M0.encode",
        "ratio / 0.75",
        "ratio / 0.70710678",
    ),
    fault(
        "e3m0 takes a neighbour's scale",
        STREAMING | outer(dtype="e3m0"),
        "compose.diloco.codes:E3M0.decode",
        "* scales.float()",
        "* scales.float().roll(1, 0)",
    ),
    fault(
        "the change is sent as it is",
        STREAMING | outer(dtype="bfloat16"),
        "compose.diloco.codes:code_of",
        'if options.dtype == "float32" else torch.bfloat16',
        "",
    ),
    fault(
        "top_k sends the smallest",
        STREAMING | outer(dtype="top_k"),
        "compose.diloco.codes:TopK.encode",
        ".topk(self.kept, 1)",
        ".topk(self.kept, 1, largest=False)",
        LOST,
        "outer.dtype",
    ),
    fault(
        "half as many are sent",
        STREAMING | outer(dtype="top_k", density=0.03125),
        "compose.diloco.codes:code_of",
        "round(options.density * ROW)",
        "round(options.density / 2 * ROW)",
    ),
    fault(
        "what was lost is added twice",
        STREAMING | outer(dtype="top_k"),
        BEGIN,
        "DECAY * self.lost",
        "2 * DECAY * self.lost",
    ),
    fault(
        "what was lost is forgotten",
        STREAMING | outer(dtype="top_k"),
        BEGIN,
        "self.lost[fragment] = codes",
        "self.lost[fragment] = 0 * codes",
    ),
]
GRACE = [
    fault(
        "a late island is waited for",
        STREAMING | outer(grace=1),
        "compose.diloco.exchange:Exchange._there",
        "map(str, ready)",
        "map(str, range(count))",
        "waited for a late island",
        "outer.grace",
    ),
]
BUFFERS = [
    fault(
        "routers' biases stay apart",
        outer(every=2) | EXPERTS,
        END,
        "self._set_averaged(fragment, sums / len(there))",
        "pass",
        ISLAND,
        "layers.*.bias",
    ),
    fault(
        "buffers of one island alone",
        STREAMING | EXPERTS,
        "compose.diloco.message:averaged_buffers",
        "if name in persistent and",
        "if 'bias' not in name and name in persistent and",
        ISLAND,
        "layers.*.bias",
    ),
]
BY_KEY = {
    "outer.every": EVERY,
    "outer.lr": RATES[:2],
    "outer.momentum": RATES[2:],
    "outer.fragments": FRAGMENTS,
    "outer.delay": DELAY,
    "outer.mix": MIX,
    "outer.dtype": CODES,
    "outer.density": CODES[-3:-2],
    "outer.grace": GRACE,
}
SILENT = {"outer.offload": "it moves memory; on a CPU it changes nothing, and the proof says so"}
FAULTS = {"outer": [*EVERY, *RATES, *FRAGMENTS, *DELAY, *MIX, *CODES, *GRACE, *BUFFERS]}
