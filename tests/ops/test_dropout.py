"""Dropout on every mesh: masks that are those of one process, and what they look like."""

import copy
import hashlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.utils.checkpoint import checkpoint

from compose import (
    ActivationCheckpoint,
    Compile,
    DropoutKey,
    Options,
    Parallel,
    Pipeline,
    Plan,
    Precision,
    Trial,
    apply,
    evaluate,
    forward_backward,
    verify,
)
from compose.config.composition_rules import check_setup
from compose.config.models import ModelFolder, find_model
from compose.config.setup import Setup
from compose.memory.compilation import graphs_compiled
from compose.ops.dropout import SAMPLES, Masks, dropouts, refuse_functions
from compose.parallel.context_parallel import ContextParallel
from compose.plan import resolve
from compose.proof.report import Report
from compose.train import trainer
from models import gpt2
from models.layers.attention import AttentionCore
from tests.support import training
from tests.support.helpers import agreed, proved, refused, share_of, small_ones_move, tiered
from tests.support.mutation import mutated
from tests.support.pool import Pool, make_mesh


class Scores(nn.Module):
    """Causal attention with dropout on its probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = q @ k.mT
        scores = scores.tril() + torch.full_like(scores, -1e4).triu(1)
        return (self.drop(scores.softmax(-1)) @ v).transpose(1, 2)


class Layer(nn.Module):
    """Attention, and a network with dropout inside and behind it."""

    def __init__(self, width: int, core: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.core = nn.LayerNorm(width), core()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.inner, self.outer = nn.Dropout(0.3), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, 12)).chunk(3, -1)
        x = x + self.out(self.core(*heads).flatten(2))
        return x + self.outer(self.down(self.inner(F.gelu(self.up(x)))))


class Uneven(Layer):
    """Two ranks do not divide the features inside its network."""

    def __init__(self, width: int, core: type[nn.Module]) -> None:
        super().__init__(width, core)
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)


class Model(nn.Module):
    def __init__(
        self,
        layers: int = 2,
        core: type[nn.Module] = Scores,
        width: int = 8,
        layer: Callable[[int, type[nn.Module]], nn.Module] = Layer,
    ) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(11, width), nn.Dropout(0.1)
        self.layers = nn.ModuleList(layer(width, core) for _ in range(layers))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PLAN = Plan(
    shard=["embed", "layers.*", "head"],
    checkpoint=["layers.*"],
    compile=["layers.*"],
    pipeline=Pipeline(["embed", "drop"], "layers", ["head"]),
)


_part: dict[str, Any] = {"use_local_output": True}
# The stream is a part of the tokens, of the heads in attention, and of the features inside the network.
SEQUENCE = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "drop": SequenceParallel(**_part),
    "layers.*.norm": SequenceParallel(**_part),
    "layers.*.qkv": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.core.drop": SequenceParallel(sequence_dim=1, **_part),
    "layers.*.out": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.inner": SequenceParallel(sequence_dim=2, **_part),
    "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.outer": SequenceParallel(**_part),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
# The stream is whole, and so is the network but for its features.
WHOLE = {
    "layers.*.up": ColwiseParallel(use_local_output=False),
    "layers.*.inner": SequenceParallel(sequence_dim=2, use_local_output=False),
    "layers.*.down": RowwiseParallel(),
}
TENSOR = {
    "sequence": replace(PLAN, tensor=SEQUENCE),
    "whole": replace(
        PLAN,
        tensor=WHOLE,
        replicate=[
            *("embed", "drop", "head"),
            *(f"layers.*.{name}" for name in ("norm", "qkv", "core.drop", "out", "outer")),
        ],
    ),
}
# Cores that cp replaces have no dropout of their own.
RING = replace(
    TENSOR["sequence"],
    tensor={name: style for name, style in SEQUENCE.items() if "core" not in name},
    context={"layers.*.core": ContextParallel()},
)
FLAT = replace(RING, tensor={}, context={"layers.*.core": ContextParallel(balance="none")})


def _batch(samples: int = 4, length: int = 6) -> dict[str, Tensor]:
    tokens = torch.randint(11, (samples, length + 1), generator=torch.Generator().manual_seed(5))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def _proof(options: Options, layers: int = 2, plan: Plan = PLAN) -> Report:
    """On every rank: the proof of two steps, the one process with other micro-batches."""
    torch.manual_seed(0)
    batches = [_batch(), _batch()]
    mesh = make_mesh(options.parallel)
    options = replace(options, seq_len=6)
    layer = Uneven if plan.replicate else Layer
    model = Model(layers, AttentionCore if plan.context else Scores, layer=layer)
    with small_ones_move():
        return verify(model, plan, mesh, batches, options, Trial(micro_batch=1))


P = Parallel
FULL, SELECTIVE = ActivationCheckpoint("full"), ActivationCheckpoint("selective")
OFFLOAD = ActivationCheckpoint("full", offload=True)
SEGMENT = ActivationCheckpoint("full", segment=2)


def _recomputed(parallel: Parallel, how: ActivationCheckpoint = FULL) -> Options:
    return Options(parallel, activation_checkpoint=how)


CASES: dict[str, tuple[Options, int, Plan]] = {
    **{f"zero {zero}": (Options(P(dp_shard=2, zero=zero)), 2, PLAN) for zero in (0, 1, 2, 3)},  # type: ignore[arg-type]
    "replicas": (Options(P(dp_replicate=2, dp_shard=1)), 2, PLAN),
    "1F1B": (Options(P(pp=2, dp_shard=1)), 2, PLAN),
    "1F1B, full": (_recomputed(P(pp=2, dp_shard=1)), 2, PLAN),
    "interleaved, selective": (
        _recomputed(P(pp=2, dp_shard=1, pp_schedule="Interleaved1F1B"), SELECTIVE),
        4,
        PLAN,
    ),
    "zero 3, segment": (_recomputed(P(dp_shard=2), SEGMENT), 2, PLAN),
    "zero bubble, full": (_recomputed(P(pp=2, dp_shard=1, pp_schedule="ZBVZeroBubble")), 4, PLAN),
    "offload": (_recomputed(P(dp_shard=2), OFFLOAD), 2, PLAN),
    "tp sequence": (_recomputed(P(tp=2, dp_shard=1)), 2, TENSOR["sequence"]),
    "tp whole": (_recomputed(P(tp=2, dp_shard=1)), 2, TENSOR["whole"]),
    # The length is no multiple of the chunks, so that it is padded.
    "cp headtail": (_recomputed(P(cp=2, dp_shard=1)), 2, RING),
    "cp none": (_recomputed(P(cp=2, dp_shard=1)), 2, FLAT),
    "cp x tp": (Options(P(cp=2, tp=2, dp_shard=1)), 2, RING),
    "dp x tp, pp": (_recomputed(P(dp_shard=2, tp=2, pp=2)), 2, TENSOR["sequence"]),
    "hsdp x cp": (Options(P(dp_shard=2, dp_replicate=2, cp=2)), 2, RING),
    "bfloat16": (Options(P(dp_shard=2), Precision("bfloat16")), 2, PLAN),
}
QUICK = (
    "zero 3",
    "replicas",
    "1F1B, full",
    "zero bubble, full",
    "tp sequence",
    "tp whole",
    "cp headtail",
)


@pytest.mark.parametrize("name", tiered(CASES, CASES.keys() - QUICK))
def test_equals_one_process(pool: Pool, name: str) -> None:
    options, layers, plan = CASES[name]
    p = options.parallel
    ranks = p.dp_replicate * p.dp_shard * p.cp * p.tp * p.pp
    proved(pool.run(_proof, ranks, options, layers, plan))


FAULTS: dict[str, tuple[str, str, str, tuple[Options, int, Plan]]] = {
    "another rank's samples": (
        "compose.train.step:_with_masks",
        "index * len(first)",
        "0 * index",
        CASES["zero 2"],
    ),
    "a rank's tokens begin at 0": (
        "compose.ops.dropout:Masks.drop",
        "mesh.get_local_rank()",
        "0",
        (Options(P(tp=2, dp_shard=1)), 2, TENSOR["sequence"]),
    ),
    "the tokens of a rank of cp in another order": (
        "compose.train.step:_with_masks",
        "for start in starts]",
        "for start in starts[::-1]]",
        (Options(P(cp=2, dp_shard=1)), 2, RING),
    ),
    "another micro-batch when it runs again": (
        "compose.ops.dropout:Masks.in_recomputation",
        "self.samples = samples",
        "pass",
        CASES["1F1B, full"],
    ),
}


def _faulty(fault: str) -> Report:
    place, old, new, case = FAULTS[fault]
    with mutated(place, old, new):
        return _proof(*case)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(pool: Pool, fault: str) -> None:
    report = agreed(pool.run(_faulty, 2, fault))
    bad = {row.quantity for row in report.rows if not row.ok}
    assert {"gradient", "update"} <= bad


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.drop, self.head = nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.into(x).relu()))


def _summed(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets, reduction="sum")


def _thrown_away() -> tuple[bool, bool]:
    """Whether the proof holds for a network with dropout, and whether without rank 1's gradients."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 5), "targets": torch.randint(3, (8,))}
    mesh = make_mesh(Parallel(dp_shard=2))
    how = (Small(), Plan(), mesh, batch, Options(Parallel(dp_shard=2)), Trial(loss_function=_summed))
    good = verify(*how)
    with mutated(
        "compose.train.step:_run",
        "value.backward()",
        "(value * (1 - torch.distributed.get_rank())).backward()",
    ):
        return good.ok, verify(*how).ok


def test_lost_gradients_are_seen_behind_dropout(pool: Pool) -> None:
    """The same masks in float64 leave an error of rounding alone, so nothing hides behind masks."""
    assert pool.run(_thrown_away, 2) == [(True, False)] * 2


KEY = DropoutKey(0)


def _masks(shape: tuple[int, ...], p: float = 0.5, key: DropoutKey = KEY, name: str = "drop") -> Tensor:
    """Where elements of a tensor of ones are kept, and by what they are multiplied."""
    model = nn.ModuleDict({name: nn.Dropout(p)})
    masks = Masks(model, [], [name])
    masks.samples = masks.begin(key, torch.arange(shape[0]), None)[SAMPLES]
    return model[name](torch.ones(shape, dtype=torch.float64))


def _by_hand(x: int, last: bool = True) -> int:
    """The hash of 32 bits, without the limits of a type."""
    x ^= x >> 16
    x = x * 0x21F0AAAD % 2**32
    x ^= x >> 15
    x = x * 0x735A2D97 % 2**32
    return x ^ x >> 15 if last else x


def test_the_mask_by_hand() -> None:
    """The same mask from whole numbers, for elements of tensors of one to four dims."""
    for shape in ((50,), (9, 8), (4, 5, 6), (2, 3, 4, 5)):
        result = _masks(shape, 0.3, DropoutKey(7, 3, 11), "second")
        digest = hashlib.sha256(b"3/7/second").digest()
        for place in itertools.product(*map(range, shape)):
            hashed = place[0] + 11 ^ int.from_bytes(digest[:4], "big")
            for index in place[1:]:
                hashed = _by_hand(hashed) ^ _by_hand(index)
            signed = (_by_hand(hashed, last=False) + 2**31) % 2**32 - 2**31
            kept = signed >= round(0.3 * 2**32) - 2**31
            assert float(result[place]) == (1 / 0.7 if kept else 0.0)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_rate(p: float) -> None:
    result = _masks((8, 64, 512), p)
    kept = result != 0
    assert float((result[kept] - 1 / (1 - p)).abs().max()) < 1e-12
    deviation = (p * (1 - p)) ** 0.5

    def worst(means: Tensor, of: int) -> float:
        """The greatest distance from the rate, in standard deviations of a mean of so many."""
        return float((means - (1 - p)).abs().max()) / (deviation / of**0.5)

    share = kept.double()
    assert worst(share.mean(), kept.numel()) < 4
    assert worst(share.mean((1, 2)), 64 * 512) < 4
    assert worst(share.mean((0, 2)), 8 * 512) < 4.5
    assert worst(share.mean((0, 1)), 8 * 64) < 5.5


def test_masks_are_independent() -> None:
    """Two masks agree in half of their elements, whatever differs, and products of four in none."""
    shape = (6, 40, 200)
    base = _masks(shape) != 0
    others = {
        "step": _masks(shape, key=DropoutKey(1)) != 0,
        "seed": _masks(shape, key=DropoutKey(0, 1)) != 0,
        "module": _masks(shape, name="other") != 0,
        "sample": base.roll(1, 0),
        "token": base.roll(1, 1),
        "feature": base.roll(1, 2),
    }
    for what, other in others.items():
        agree = float((base == other).double().mean())
        assert abs(agree - 0.5) < 5 * 0.5 / base.numel() ** 0.5, what
    signs = base.double() * 2 - 1
    pairs = signs[:, ::2] * signs[:, 1::2]
    fours = pairs[..., ::2] * pairs[..., 1::2]
    assert abs(float(fours.mean())) < 5 / fours.numel() ** 0.5


def test_p_of_one_and_none() -> None:
    assert float(_masks((3, 4), p=1.0).abs().max()) == 0
    assert dropouts(nn.Sequential(nn.Dropout(0.0), nn.Dropout(0.2), nn.Linear(2, 2))) == ["1"]


class Flat(Small):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.into(x).flatten(0, 1))).view(*x.shape[:2], 3)


def _refused() -> list[str]:
    mesh = make_mesh(Parallel(dp_shard=1))
    batch = {"x": torch.randn(2, 3, 5), "targets": torch.randint(3, (2, 3))}
    composition, flat = apply(Small(), Plan(), mesh), apply(Flat(), Plan(), mesh)
    results = [
        *refused(forward_backward, composition, batch),
        *refused(composition.model, batch["x"]),
        *refused(forward_backward, flat, batch, dropout=DropoutKey(0)),
    ]
    composition.model.eval()
    forward_backward(composition, batch)
    return results


def test_what_is_refused(pool: Pool) -> None:
    assert pool.run(_refused, 1)[0] == [
        "dropout: drop would drop the same elements in every step; give forward_backward"
        " dropout=DropoutKey(step), or call model.eval()",
        "dropout: drop runs in training mode outside of forward_backward, which numbers its samples;"
        " call model.eval()",
        "dropout: drop takes (6, 64), and masks belong to samples: it should take (2, ...); reshape its"
        " input, or use p = 0",
    ]


def test_tensor_parallel_without_a_place() -> None:
    plan = replace(TENSOR["whole"], replicate=[*list(TENSOR["whole"].replicate)[2:], "embed"])
    model = Model()
    options = Options(P(tp=2, dp_shard=1))
    setup = Setup(model, resolve(plan, model), options, 2, "cpu")
    assert refused(check_setup, setup) == [
        "plan.tensor: no style says which part of its input the dropout drop has on a rank; list it in"
        " replicate if all, or give it SequenceParallel(sequence_dim=n, use_local_output=True) if a"
        " part of dim n"
    ]


def _evaluated() -> tuple[float, float, bool]:
    """The loss in evaluation, that of the model without dropout, and whether a step then drops."""
    torch.manual_seed(0)
    mesh, model, batch = make_mesh(Parallel(dp_shard=2)), Model(), _batch()
    plain = F.cross_entropy(copy.deepcopy(model).eval()(batch["tokens"]).mT, batch["targets"]).item()
    composition = apply(model, PLAN, mesh, Options(Parallel(dp_shard=2)))
    share = share_of(batch, mesh)
    total, count = evaluate(composition, share)
    dropped = float(forward_backward(composition, share, dropout=DropoutKey(0)))
    return float(total / count), plain, abs(dropped - plain) > 1e-3


def test_evaluation_drops_nothing(pool: Pool) -> None:
    for result, expected, drops in pool.run(_evaluated, 2):
        assert result == pytest.approx(expected, rel=1e-6)
        assert drops


class Twice(Small):
    """It runs one nn.Dropout twice, and the function twice."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.drop(self.into(x)).relu())
        return self.head(F.dropout(F.dropout(hidden, 0.3, self.training), 0.4, self.training))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Twice(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def _twice() -> tuple[Report, float]:
    """The proof of such a model that recomputes, and how often two calls of one module agree."""
    torch.manual_seed(0)
    mesh, trial = make_mesh(Parallel(dp_shard=2)), Trial(micro_batch=1, loss_function=_summed)
    batch = {"x": torch.randn(4, 5), "targets": torch.arange(4) % 3}
    options = Options(Parallel(dp_shard=2), activation_checkpoint=FULL)
    report = verify(Stack(), Plan(checkpoint=["first"]), mesh, [batch, batch], options, trial)
    model = nn.Sequential(nn.Dropout(0.5))
    masks = Masks(model, [], ["0"])
    masks.samples = masks.begin(KEY, torch.arange(50), None)[SAMPLES]
    ones = torch.ones(50, 400)
    return report, float((model(ones) == model(ones)).double().mean())


def test_a_module_that_drops_twice(pool: Pool) -> None:
    results = pool.run(_twice, 2)
    proved([report for report, _ in results])
    assert abs(results[0][1] - 0.5) < 5 * 0.5 / 20_000**0.5


def _functions_refused() -> list[str]:
    model, mesh = Twice(), make_mesh(Parallel(tp=2, dp_shard=1))
    plan = Plan(
        tensor={"into": ColwiseParallel(output_layouts=Replicate())}, replicate=["drop", "head"]
    )
    composition = apply(model, plan, mesh, Options(Parallel(tp=2, dp_shard=1)))
    batch = {"x": torch.randn(2, 5), "targets": torch.arange(2)}
    return refused(forward_backward, composition, batch, loss_function=_summed, dropout=DropoutKey(0))


def test_stages_that_share_a_dropout() -> None:
    model = Model()
    model.layers[1].outer = model.layers[0].outer
    stages = Options(Parallel(pp=2, dp_shard=1))
    assert refused(check_setup, Setup(model, resolve(PLAN, model), stages, 2, "cpu")) == [
        "plan.pipeline: layers.0.outer and layers.1.outer are one nn.Dropout, whose masks depend on how"
        " often it has run; give each layer its own, or use parallel.pp = 1"
    ]


def test_a_function_under_tensor_parallel(pool: Pool) -> None:
    line = (
        "dropout: with tp, Twice calls torch.nn.functional.dropout, and no style says on which part of"
        " a tensor; use nn.Dropout with a style of plan.tensor"
    )
    assert pool.run(_functions_refused, 2) == [[line]] * 2


class ByFunction(nn.Module):
    """It drops by a function alone, or inside of attention."""

    def __init__(self, p: float, attends: bool) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.p, self.attends = p, attends

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        if self.attends:
            q = x[:, None]
            return self.head(
                F.scaled_dot_product_attention(q, q, q, None, self.training * self.p)[:, 0]
            )
        return self.head(F.dropout(x, self.p, self.training))


def _only_functions(p: float, attends: bool) -> list[list[str]]:
    """The refusals in evaluation, and then in training."""
    composition = apply(ByFunction(p, attends), Plan(), make_mesh(Parallel(dp_shard=2)))
    batch, results = {"x": torch.randn(2, 5), "targets": torch.arange(2)}, []
    for trains in (False, True):
        composition.model.train(trains)
        results.append(refused(forward_backward, composition, batch, loss_function=_summed))
    return results


@pytest.mark.parametrize(
    ("attends", "function"), [(False, "dropout"), (True, "scaled_dot_product_attention")]
)
def test_functions_without_a_module_that_drops(pool: Pool, attends: bool, function: str) -> None:
    line = (
        f"dropout: the model calls {function} with a rate above 0 and has no nn.Dropout, so ranks would"
        " not drop what one process does; use nn.Dropout, or a rate of 0"
    )
    assert pool.run(_only_functions, 2, 0.3, attends) == [[[], [line]]] * 2
    assert pool.run(_only_functions, 2, 0.0, attends) == [[[], []]] * 2


class Checkpointed(Small):
    """It computes a part again in backward by itself."""

    def __init__(self, reentrant: bool, function: bool) -> None:
        super().__init__()
        self.reentrant, self.function = reentrant, function

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.part, self.into(x), use_reentrant=self.reentrant))

    def part(self, x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.3, self.training) if self.function else self.drop(x.sin()).sin()


def _checkpointed() -> list[str]:
    mesh, lines = make_mesh(Parallel(dp_shard=1)), []
    batch = {"x": torch.randn(2, 5), "targets": torch.arange(2)}
    for reentrant, function in itertools.product((False, True), repeat=2):
        composition = apply(Checkpointed(reentrant, function), Plan(), mesh)
        given = (composition, batch)
        lines += refused(forward_backward, *given, loss_function=_summed, dropout=KEY)
        composition.model.eval()
        forward_backward(*given, loss_function=_summed)
    return lines


def test_a_checkpoint_of_the_model_itself(pool: Pool) -> None:
    """What runs again outside of ``in_recomputation`` would drop other elements."""
    line = "dropout: {} runs inside the model's own checkpoint, which would drop other elements when it"
    line += " computes again; leave that out, and use activation_checkpoint.mode"
    lines = pool.run(_checkpointed, 1)[0]
    assert lines == [line.format(name) for name in ("drop", "Checkpointed", "drop", "Checkpointed")]


INSIDE: dict[str, tuple[Callable[[float], nn.Module], str]] = {
    "attention": (lambda p: nn.MultiheadAttention(4, 2, dropout=p), "multi_head_attention_forward"),
    "1d": (nn.Dropout1d, "dropout1d"),
    "2d": (nn.Dropout2d, "dropout2d"),
    "3d": (nn.Dropout3d, "dropout3d"),
    "alpha": (nn.AlphaDropout, "alpha_dropout"),
    "feature": (nn.FeatureAlphaDropout, "feature_alpha_dropout"),
    "lstm": (lambda p: nn.LSTM(4, 4, 2, dropout=p), ""),
    "gru": (lambda p: nn.GRU(4, 4, 2, dropout=p), ""),
}
"""Modules whose masks PyTorch draws, and the functions that they call."""


class Inside(nn.Module):
    """Such a module behind an nn.Dropout, or without one."""

    def __init__(self, kind: str, p: float, drops: bool) -> None:
        super().__init__()
        self.drop, self.inner = nn.Dropout(0.1) if drops else nn.Identity(), INSIDE[kind][0](p)

    def forward(self, x: Tensor, weights: bool) -> Any:
        x = self.drop(x)
        attends = isinstance(self.inner, nn.MultiheadAttention)
        return self.inner(x, x, x, need_weights=weights) if attends else self.inner(x)


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("kind", INSIDE)
def test_masks_that_pytorch_draws_are_refused(kind: str, drops: bool) -> None:
    def lines(p: float, trains: bool, functions: str, weights: bool) -> list[str]:
        model = Inside(kind, p, drops).train(trains)
        x = torch.ones(2, 3, 4, *[1] * {"2d": 1, "3d": 2}.get(kind, 0))
        if not drops:
            refuse_functions([model])
            return refused(model, x, weights)
        masks = Masks(model, [model], ["drop"], functions)
        return refused(lambda: model(x, weights, **masks.begin(KEY, torch.arange(2), None)))

    function = INSIDE[kind][1]
    name = type(INSIDE[kind][0](0.0)).__name__
    line = f"dropout: {name} inner calls {function} with a rate above 0, which takes no mask; use"
    if not drops:
        line = (
            f"dropout: the model calls {function} with a rate above 0 and has no nn.Dropout, so ranks"
            " would not drop what one process does; use"
        )
    line += " nn.Dropout, or a rate of 0"
    if not function:
        line = (
            f"dropout: {name} inner drops inside its kernel, which takes no mask; give it dropout=0, or"
            " one module for each layer and nn.Dropout between"
        )
    for functions, weights in itertools.product(("tie", "refuse"), (False, True)):
        assert lines(0.3, True, functions, weights) == [line]
        assert lines(0.3, False, functions, weights) == lines(0.0, True, functions, weights) == []


def test_a_stages_copy_of_a_module_drops_what_the_module_does() -> None:
    """A stage has copies of the modules around its layers, and a function is called in one of them."""
    results = []
    for copies in (False, True):
        torch.manual_seed(0)
        model = stage = Stack()
        if copies:
            stage = copy.copy(model)
            stage._modules = {**model._modules, "first": copy.copy(model.first)}
        masks = Masks(model, [stage], ["first.drop"])
        results.append(stage(torch.ones(4, 5), **masks.begin(KEY, torch.arange(4), None)))
    assert torch.equal(*results)


class Thin(nn.Module):
    """What Inductor compiles in a quarter of the time of a layer."""

    def __init__(self, width: int, core: type[nn.Module]) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.linear(x))


def _compiled(backend: str, recompute: str, layer: type[nn.Module]) -> tuple[bool, int, int]:
    """Whether four steps have the gradients of those without a compiler; graphs; breaks of graphs."""
    torch._dynamo.reset()
    counters.clear()
    mesh, result = make_mesh(Parallel(dp_shard=1)), []
    for options in (Compile(), Compile("block", backend=backend)):
        torch.manual_seed(0)
        how = Options(compile=options, activation_checkpoint=ActivationCheckpoint(recompute))  # type: ignore[arg-type]
        composition = apply(
            Model(3, layer=layer), PLAN, mesh, replace(how, parallel=Parallel(dp_shard=1))
        )
        for step in range(4):
            forward_backward(composition, _batch(), micro_batch=2, dropout=DropoutKey(step))
        result.append([p.grad for p in composition.model.parameters()])
    # Another mask changes a gradient by some tenths; Inductor adds in another order.
    same = all(float((x - y).norm()) <= 1e-5 * float(x.norm()) for x, y in zip(*result, strict=True))
    return same, graphs_compiled(), sum(counters["graph_break"].values())


@pytest.mark.parametrize(
    ("backend", "recompute", "layer"),
    [("aot_eager", mode, Layer) for mode in ("none", "full", "selective")]
    + [("inductor", "none", Thin), *(("inductor", mode, Layer) for mode in ("none", "full"))],
)
@pytest.mark.slow
def test_layers_share_a_graph_for_all_steps(
    pool: Pool, backend: str, recompute: str, layer: type[nn.Module]
) -> None:
    """In C++ a product of int32 that overflows is undefined, and compilers make use of that."""
    assert pool.run(_compiled, 1, backend, recompute, layer) == [(True, 1, 0)]


@pytest.mark.parametrize("shape", [(4, 12), (4, 5, 12), (2, 33, 12), (3, 7, 5, 12)])
def test_hashes_do_not_overflow_under_a_compiler(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traced model keeps the elements that an eager run keeps."""
    model = nn.Sequential(nn.Dropout(0.3))
    masks, x = Masks(model, [], ["0"]), torch.ones(shape)
    masks.samples = masks.begin(DropoutKey(3), torch.arange(shape[0]), None)[SAMPLES]
    eager = model(x)
    model[0].__dict__["dropout_calls"] = 0
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(model(x), eager)


class Dropping(gpt2.Model):
    """The GPT-2 of this project with dropout behind its embeddings."""

    def __init__(self, config: gpt2.Config) -> None:
        super().__init__(config)
        tokens = nn.Sequential(self.embeddings.tokens, nn.Dropout(0.3))
        self.embeddings.register_module("tokens", tokens)


def _trained(folder: str, steps: list[int]) -> tuple[list[float], list[DropoutKey]]:
    """Losses of a run that stops and resumes, and the keys of its steps."""
    keys: list[DropoutKey] = []
    real = trainer.forward_backward

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        keys.append(kwargs["dropout"])
        return real(*args, **kwargs)

    def find(name: str) -> ModelFolder:
        return replace(find_model(name), Model=Dropping, plan=lambda config, parallel: Plan())

    settings = {"run__dir": folder, "train__steps": 4, "train__seed": 9, "checkpoint__interval": 1}
    for stop in steps:
        with (
            mock.patch("compose.config.job.find_model", find),
            mock.patch.object(trainer, "forward_backward", noted),
        ):
            training.train({"model__name": "gpt2", **settings, "train__stop_after": stop})
    return [line["loss"] for line in training.lines(Path(folder))], keys


def test_a_resumed_run_drops_what_it_would_have(pool: Pool, tmp_path: Path) -> None:
    losses, keys = pool.run(_trained, 2, str(tmp_path / "whole"), [4])[0]
    assert keys == [DropoutKey(step, 9) for step in range(4)]
    assert pool.run(_trained, 1, str(tmp_path / "parts"), [2, 4])[0] == (pytest.approx(losses), keys)
