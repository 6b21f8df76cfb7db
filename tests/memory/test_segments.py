"""Segments: the same gradients bitwise, one kept input for k layers, and each layer once again."""

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models.llama
from compose.data.samples import random_batch
from compose.memory.activation_checkpointing import apply_activation_checkpointing
from compose.memory.segments import apply_segments, segments_of
from compose.planner.memory import categorize
from compose.planner.record import RecordedMessage
from compose.planner.trace import RankStep, trace
from tests.support.helpers import Keys, make_job, parallel, proofs, prove_step, refusals, refused

LAYERS, LENGTH = 5, 16
LLAMA = models.llama.Config(n_layers=LAYERS, dim=64, n_heads=4, n_kv_heads=2, hidden_dim=160)


def make(segment: int) -> nn.Module:
    """A model in segments of so many layers; with 0 it keeps everything."""
    torch.manual_seed(0)
    model = models.llama.Model(LLAMA)
    units = [f"layers.{i}" for i in range(LAYERS)] if segment else []
    if segment == 1:
        apply_activation_checkpointing(model, dict.fromkeys(units, frozenset()))
    else:
        apply_segments(model, segments_of(units, segment or 1))
    return model


def loss_of(model: nn.Module) -> Tensor:
    batch = random_batch(2, LENGTH, 257, seed=3)
    targets = batch.pop("targets").clamp(min=0)
    return nn.functional.cross_entropy(model(**batch).flatten(0, 1), targets.flatten())


def kept_bytes(model: nn.Module) -> tuple[int, Tensor]:
    """The bytes that a forward's graph keeps as inputs of layers, and the loss."""
    layers: Any = model.get_submodule("layers")
    streams: list[weakref.ref[Any]] = []
    for layer in layers.values():
        layer.register_forward_pre_hook(
            lambda _, given: streams.append(weakref.ref(given[0].untyped_storage()))
        )
    loss = loss_of(model)
    gc.collect()
    return sum(storage.nbytes() for ref in streams if (storage := ref()) is not None), loss


@pytest.mark.parametrize(("segment", "inputs"), [(1, 5), (2, 3), (3, 2), (5, 1)])
def test_one_input_is_kept_for_each_segment_and_gradients_are_bitwise_the_same(
    segment: int, inputs: int
) -> None:
    expected = make(0)
    loss_of(expected).backward()
    model = make(segment)
    calls = [0] * LAYERS
    for i in range(LAYERS):

        def count(*_: Any, i: int = i) -> None:
            calls[i] += 1

        model.get_submodule(f"layers.{i}.ffn_norm").register_forward_pre_hook(count)
    kept, loss = kept_bytes(model)
    assert kept == inputs * 2 * LENGTH * LLAMA.dim * 4
    loss.backward()
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name  # type: ignore[arg-type]
    assert calls == [2] * LAYERS  # once in forward and once again
    assert kept_bytes(model)[0] == kept  # the last backward has left nothing


def test_nothing_lives_on_when_a_graph_is_dropped() -> None:
    """A forward without backward, as of a validation with gradients, leaves no memory to collect."""
    model = make(3)
    seen: list[weakref.ref[Any]] = []
    model.get_submodule("layers.1").register_forward_hook(
        lambda _, __, output: seen.append(weakref.ref(output.untyped_storage()))
    )
    gc.disable()
    try:
        loss = loss_of(model)
        loss.backward()
        del loss
        assert seen[0]() is None
    finally:
        gc.enable()
    with torch.no_grad():
        assert torch.equal(loss_of(model), loss_of(make(0)))


class _Pair(nn.Module):
    """A layer with two streams, each of which the next one takes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, a: Tensor, *, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        noise = torch.rand_like(a)
        return a + self.one(b).tanh() * noise * scale, b + self.two(a).sin()


class _Pairs(nn.Module):
    def __init__(self, between: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Pair() for _ in range(4))
        self.between = between

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        for layer in self.layers:
            if self.between:
                a, b = a * 1.5, b.clone()
            a, b = layer(a, b=b, scale=0.5)
        return (a * b).sum()


def _pairs(segment: int, between: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = _Pairs(between)
    apply_segments(model, segments_of([f"layers.{i}" for i in range(4)], segment))
    return model


def test_layers_of_several_streams_and_of_frozen_inputs() -> None:
    torch.manual_seed(1)
    a, b = torch.randn(3, 6), torch.randn(3, 6)  # no gradient: weights alone have one
    gradients = []
    for segment in (1, 4):
        model = _pairs(segment)
        torch.manual_seed(2)
        model(a, b).backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_a_model_that_works_between_its_layers_is_refused() -> None:
    a = torch.randn(3, 6)
    assert refused(_pairs(2, between=True), a, a) == [
        "activation_checkpoint.segment: layers.1 takes nothing that layers.0 returned just before, and"
        " so cannot be computed again from there; use activation_checkpoint.segment = 1"
    ]


SEGMENT: Keys = {"activation_checkpoint__mode": "full", "activation_checkpoint__segment": 2}
MOE: Keys = {"model__name": "qwen3", "model__preset": "debug_moe"}
COMPILED: Keys = parallel(dp_shard=2) | {"compile__mode": "block"}
FIVE: Keys = SEGMENT | {"model__n_layers": 5}
CASES: dict[str, Keys] = {
    "zero 3, of 3": FIVE | parallel(dp_shard=2) | {"activation_checkpoint__segment": 3},
    "pp": FIVE | parallel(pp=2),
    "ep, of 3": FIVE | MOE | parallel(dp_shard=4, ep=2) | {"activation_checkpoint__segment": 3},
    "gpt2, tp": FIVE | parallel(tp=2) | {"model__name": "gpt2", "model__max_seq_len": 32},
    "cp, zero 2": FIVE | parallel(cp=2, zero=2) | {"model__n_layers": 4},
    "hsdp": FIVE | parallel(dp_replicate=2, dp_shard=2),
    "ddp": FIVE | parallel(dp_replicate=2, dp_shard=1, zero=0),
    "interleaved, zero 3": FIVE
    | parallel(pp=2, dp_shard=2, pp_schedule="Interleaved1F1B")
    | {"model__n_layers": 8},
    "offloaded, of 3": FIVE
    | parallel(dp_shard=2, offload="cpu")
    | {"activation_checkpoint__offload": True, "activation_checkpoint__segment": 3},
    "compiled": FIVE | COMPILED | {"compile__backend": "aot_eager"},
    "compiled by Inductor": FIVE | COMPILED,
    "bfloat16, of 4, prefetch": FIVE
    | parallel(dp_shard=2, tp=2)
    | {"precision__param": "bfloat16", "comm__prefetch": 2, "activation_checkpoint__segment": 4},
    "lora": FIVE
    | parallel(dp_shard=2)
    | {"model__lora__rank": 2, "model__lora__targets": "['layers.*.attention.w*']"},
    "deepseek, ep": FIVE | parallel(dp_shard=2, ep=2) | {"model__name": "deepseek_v3"},
    "gemma3, tp x cp": FIVE | parallel(cp=2, tp=2) | {"model__name": "gemma3"},
    "zero 3, hpz": FIVE | parallel(dp_shard=4, zero3_reshard=2),
}
test_equals_one_process = proofs(
    CASES, slow=tuple(CASES)[2:], full=["compiled by Inductor"], prove=prove_step
)


def _step(keys: Keys, segment: int) -> tuple[Counter[str], Counter[str]]:
    """The messages of a step of FSDP, and the most bytes of each category that there are at once."""
    recompute: Keys = {
        "activation_checkpoint__mode": "full",
        "activation_checkpoint__segment": segment,
    }
    job = make_job(4, **parallel(dp_shard=4), model__n_layers=5, **keys, **recompute)
    record = trace(RankStep(job, micro_batches=1)).record
    categorize(record, job.resolved.output or "")
    live, most = Counter[str](), Counter[str]()
    for _, place, change in record.changes:
        category = record.allocations[place].category
        live[category] += change
        most[category] = max(most[category], live[category])
    return Counter(each.kind for each in record.work if isinstance(each, RecordedMessage)), most


@pytest.mark.parametrize(("keys", "units"), [({}, 1), (MOE | parallel(ep=2), 2)])
def test_fsdp_gathers_a_layer_again_only_if_two_follow_it_in_its_segment(
    keys: Keys, units: int
) -> None:
    """A layer is freed after it was computed again, but for the one whose backward comes next. Each
    sends its gradient when its own backward ends. While the last layer of four is in backward, one is
    computed again and the next one travels. Experts are a unit of their own, half of them on a rank."""
    sent, most = zip(*(_step(keys, segment) for segment in (1, 2, 4)), strict=True)
    gathers = [messages["all_gather"] for messages in sent]
    assert gathers == [gathers[0], gathers[0], gathers[0] + 2 * units]  # 4 layers, and 1
    assert len({messages["reduce_scatter"] for messages in sent}) == 1
    assert len({bytes_of["gradients"] for bytes_of in most}) == 1
    weights = make_job(4, **parallel(dp_shard=4), **keys).model.get_submodule("layers.0")
    parts = [p.numel() // (2 if ".experts." in name else 1) for name, p in weights.named_parameters()]
    whole = [bytes_of["gathered"] - most[0]["gathered"] for bytes_of in most]
    assert whole == [0, 0, 4 * sum(parts)]


REFUSED: list[tuple[Keys, str]] = [
    (
        {"activation_checkpoint__segment": 2, "activation_checkpoint__mode": "every_k"},
        "activation_checkpoint.segment: 2 is read in another mode; set activation_checkpoint.mode ="
        ' "full"',
    ),
    (
        SEGMENT | {"activation_checkpoint__segment": 3},
        "activation_checkpoint.segment: 3 is more than the 2 units of the model; nearest: 2",
    ),
    (
        SEGMENT | parallel(pp=2) | {"activation_checkpoint__segment": 4, "model__n_layers": 5},
        "activation_checkpoint.segment: 4 is more than the 3 units of the longest stage; nearest: 3",
    ),
    (
        SEGMENT | parallel(pp=2, pp_schedule="ZBVZeroBubble"),
        "activation_checkpoint.segment: 2 would be computed again for each part of a backward, and"
        " ZBVZeroBubble runs it in two; use activation_checkpoint.segment = 1, or"
        ' parallel.pp_schedule = "Interleaved1F1B"',
    ),
    (
        SEGMENT | {"compile__mode": "model"},
        'activation_checkpoint.segment: 2 and compile.mode = "model", which makes one graph of all'
        ' layers, do not go together; use compile.mode = "block"',
    ),
]
test_refused = refusals(REFUSED)
