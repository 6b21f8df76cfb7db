"""The mixture-of-experts layer on one process: against a loop over tokens; its losses and counts."""

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from models.layers.clamped_experts import ClampedExperts
from models.layers.moe import Experts, MoE, grouped_mm
from models.layers.router import MoEConfig, Router

DIM = 9
SOFTMAX = MoEConfig(n_experts=5, top_k=2, expert_dim=7)
SIGMOID = MoEConfig(
    n_experts=8, top_k=3, expert_dim=5, scoring="sigmoid", n_groups=4, top_groups=2, route_scale=2.5
)


def inputs(batch: int = 3, length: int = 11, seed: int = 0) -> Tensor:
    return torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(seed))


def make(config: MoEConfig, shared: bool = False) -> MoE:
    torch.manual_seed(1)
    moe = MoE(DIM, config, nn.Linear(DIM, DIM) if shared else None)
    moe.router.bias.normal_(std=0.1)
    return moe


def by_hand(moe: MoE, x_BLD: Tensor) -> Tensor:
    """Token by token, with nothing of the layer's but its weights."""
    c = moe.router.config
    rows = []
    for x in x_BLD.flatten(0, 1):
        logits = moe.router.gate.weight @ x
        scores = logits.sigmoid() if c.scoring == "sigmoid" else logits.softmax(0)
        choice = (scores + moe.router.bias).tolist()
        size = c.n_experts // c.n_groups
        groups = [
            sorted(range(g * size, (g + 1) * size), key=choice.__getitem__) for g in range(c.n_groups)
        ]
        groups.sort(key=lambda group: -sum(choice[e] for e in group[-2:]))
        allowed = [e for group in groups[: c.top_groups] for e in group]
        picked = sorted(allowed, key=lambda e: -choice[e])[: c.top_k]
        total = sum(scores[e] for e in picked) if c.normalize_weights else 1.0
        y = torch.zeros(DIM)
        assert isinstance(moe.experts, Experts)
        for e in picked:
            w1, w2, w3 = (w[e] for w in (moe.experts.w1, moe.experts.w2, moe.experts.w3))
            y = y + c.route_scale * scores[e] / total * (w2 @ (F.silu(w1 @ x) * (w3 @ x)))
        rows.append(y if moe.shared is None else y + moe.shared(x))
    return torch.stack(rows).view_as(x_BLD)


def gradients_of(module: nn.Module) -> list[Tensor]:
    results = [parameter.grad for parameter in module.parameters()]
    assert all(gradient is not None for gradient in results)
    return results  # type: ignore[return-value]


@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared"])
@pytest.mark.parametrize(
    "config",
    [
        SOFTMAX,
        SIGMOID,
        replace(SOFTMAX, normalize_weights=False, route_scale=0.5),
        replace(SOFTMAX, top_k=5),
        replace(SOFTMAX, n_experts=1, top_k=1),
    ],
    ids=["softmax", "sigmoid in groups", "not normalized", "all experts", "one expert"],
)
def test_equals_a_loop_over_tokens(config: MoEConfig, shared: bool) -> None:
    moe, x = make(config, shared), inputs().requires_grad_()
    parameters = [x, *moe.parameters()]
    weight = inputs(seed=2)
    result = moe(x)
    expected = by_hand(moe, x)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad((result * weight).sum(), parameters, allow_unused=True)
    wanted = torch.autograd.grad((expected * weight).sum(), parameters, allow_unused=True)
    for gradient, want in zip(gradients, wanted, strict=True):
        assert gradient is not None
        # Where no token went, plain autograd may have found nothing at all.
        torch.testing.assert_close(gradient, torch.zeros_like(gradient) if want is None else want)


@pytest.mark.parametrize("config", [SOFTMAX, replace(SOFTMAX, n_experts=1, top_k=1)], ids=["5", "1"])
def test_many_rows_of_an_expert(config: MoEConfig) -> None:
    moe, x = make(config), inputs(2, 150).requires_grad_()
    result, expected = moe(x), by_hand(moe, x)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    weight = inputs(2, 150, seed=2)
    given = [x, *moe.experts.parameters()]
    gradients, wanted = (torch.autograd.grad((y * weight).sum(), given) for y in (result, expected))
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-5)


def test_experts_without_tokens_and_a_lone_token() -> None:
    moe = make(replace(SOFTMAX, top_k=1))
    moe.router.bias.copy_(torch.tensor([0.0, 0.0, 9.0, 0.0, 0.0]))
    for x in (inputs(), inputs(1, 1)):
        moe.zero_grad()
        result = moe(x)
        torch.testing.assert_close(result, by_hand(moe, x), rtol=1e-5, atol=1e-6)
        result.sum().backward()
        for weight in moe.experts.parameters():
            assert weight.grad is not None
            assert [e for e, part in enumerate(weight.grad) if part.any()] == [2]


def test_a_weight_that_is_always_1_gives_the_gate_no_gradient() -> None:
    """No rounding errors either: Muon, or AdamW with a small eps, would make steps of them."""
    moe = make(replace(SOFTMAX, top_k=1, route_scale=0.5))
    moe(inputs()).square().sum().backward()
    gradient = moe.router.gate.weight.grad
    assert gradient is not None
    assert not gradient.any()


def relative(value: Tensor, expected: Tensor) -> float:
    return float(((value - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 9, 0], [9, 0, 0, 0], [3, 0, 300, 1]])
def test_kernel_equals_the_loop(counts: list[int]) -> None:
    """In bfloat16, aligned rows are one grouped kernel's; else a loop's."""
    torch.manual_seed(0)
    aligned, odd = Experts(4, 16, 24).bfloat16(), Experts(4, 15, 23).bfloat16()
    for experts, dim in ((aligned, 16), (odd, 15)):
        x = torch.randn(sum(counts), dim, dtype=torch.bfloat16, requires_grad=True)
        given = torch.tensor(counts)
        result = experts(x, given)
        exact = copy.deepcopy(experts).float()
        x32 = x.detach().float().requires_grad_()
        expected = exact(x32, given)
        assert relative(result, expected) < 2e-2
        (result.float() ** 2).sum().backward()
        (expected**2).sum().backward()
        for value, want in ((x.grad, x32.grad), (experts.w2.grad, exact.w2.grad)):
            assert relative(value, want) < 5e-2  # type: ignore[arg-type]


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 9, 0], [9, 0, 0, 0]])
@pytest.mark.parametrize(("dim", "inner"), [(16, 24), (15, 23)], ids=["kernel", "loop"])
def test_biases_are_those_of_each_expert(dim: int, inner: int, counts: list[int]) -> None:
    """In float32 row by row; in bfloat16, as one kernel or a loop, as in float32."""
    torch.manual_seed(0)
    experts = ClampedExperts(4, dim, inner, 1.7, 0.8)
    x, given = torch.randn(9, dim, requires_grad=True), torch.tensor(counts)
    result = experts(x, given)
    rows = []
    for row, e in zip(x, torch.arange(4).repeat_interleave(given).tolist(), strict=True):
        both = experts.gate_up[e] @ row + experts.gate_up_bias[e]
        gate, up = both[::2].clamp(max=0.8), both[1::2].clamp(-0.8, 0.8)
        hidden = (up + 1) * gate * (1.7 * gate).sigmoid()
        rows.append(experts.down[e] @ hidden + experts.down_bias[e])
    torch.testing.assert_close(result, torch.stack(rows))
    parameters = [x, *experts.parameters()]
    expected = torch.autograd.grad((torch.stack(rows) ** 2).sum(), parameters)
    gradients = torch.autograd.grad((result**2).sum(), parameters)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)
    half, x16 = copy.deepcopy(experts).bfloat16(), x.detach().bfloat16().requires_grad_()
    found16 = half(x16, given)
    assert relative(found16, result) < 2e-2
    (found16.float() ** 2).sum().backward()
    for value, want in zip((x16, *half.parameters()), expected, strict=True):
        assert value.grad is not None
        assert relative(value.grad, want) < 5e-2


def test_kernel_is_used_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *a, **k: calls.append(1) or real(*a, **k))
    counts = torch.tensor([2, 3])
    for dim, dtype, used in ((16, torch.bfloat16, 1), (12, torch.bfloat16, 0), (16, torch.float32, 0)):
        calls.clear()
        x, weight = torch.randn(5, dim, dtype=dtype), torch.randn(2, 8, dim, dtype=dtype)
        assert grouped_mm(x, weight, counts).shape == (5, 8)
        assert len(calls) == used


def test_biases_enter_at_one_place_with_and_without_rows() -> None:
    """Else ranks without rows recompute a layer less often than others in a backward in two parts."""
    places = set()
    for counts in ([2, 3], [0, 0]):
        x, bias = torch.randn(sum(counts), 16).bfloat16(), torch.randn(2, 8).bfloat16()
        weight = torch.randn(2, 8, 16).bfloat16()
        out = grouped_mm(x, weight.requires_grad_(), torch.tensor(counts), bias.requires_grad_())
        assert out.grad_fn is not None
        places.add((out.grad_fn.name(), len(out.grad_fn.next_functions)))
    assert places == {("_AddBiasBackward", 3)}


def test_router_computes_in_float32() -> None:
    moe, x = make(SIGMOID).bfloat16(), inputs().bfloat16()
    routing = moe.router(x)
    scores = F.linear(x.float(), moe.router.gate.weight.float()).sigmoid()
    expected = scores.gather(-1, routing.experts)
    expected = expected / expected.sum(-1, keepdim=True) * 2.5
    assert routing.weights.dtype == torch.float32
    torch.testing.assert_close(routing.weights, expected)
    assert moe(x).dtype == torch.bfloat16


def test_bias_chooses_but_does_not_weigh() -> None:
    moe, x = make(replace(SOFTMAX, top_k=1, normalize_weights=False)), inputs()
    moe.router.bias.zero_()
    moe.router.bias[3] = 2.0
    routing = moe.router(x)
    assert (routing.experts == 3).all()
    expected = moe.router.gate(x.flatten(0, 1)).softmax(-1)[:, 3].view(3, 11, 1)
    torch.testing.assert_close(routing.weights, expected)


def losses(moe: MoE, x: Tensor, share: Tensor) -> Tensor:
    """Mean over tokens of both losses, by their formulas. share: (B, E), of each sequence's tokens."""
    c = moe.router.config
    logits = F.linear(x, moe.router.gate.weight)
    scores = logits.sigmoid() if c.scoring == "sigmoid" else logits.softmax(-1)
    p = scores / scores.sum(-1, keepdim=True)
    balance = c.n_experts * (p * share[:, None]).sum(-1)
    return (c.balance_weight * balance + c.z_weight * logits.logsumexp(-1) ** 2).mean()


@pytest.mark.parametrize("kind", ["batch", "sequence"])
@pytest.mark.parametrize("config", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
def test_gradient_of_auxiliary_losses(config: MoEConfig, kind: str) -> None:
    config = replace(config, balance_loss=kind, balance_weight=0.3, z_weight=0.02)
    moe, x = make(config), inputs().requires_grad_()
    # The load is the last step's: a batch has none while its first micro-batch runs.
    load = torch.arange(1.0, config.n_experts + 1)
    moe.router.load.copy_(load / load.sum())
    parameters = [x, moe.router.gate.weight]
    routing = moe.router(x)
    result = torch.autograd.grad(0 * routing.weights.sum(), parameters)
    share = moe.router.load.clone().expand(3, -1)
    if kind == "sequence":
        counts = F.one_hot(routing.experts, config.n_experts).sum((1, 2)).float()
        share = counts / counts.sum(1, keepdim=True)
    expected = torch.autograd.grad(losses(moe, x, share), parameters)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-7)
    moe.router.finish_step(moe.router.tally)
    last = {name: float(value) for name, value in moe.router.last.items()}
    with torch.no_grad():
        expected_loss = float(losses(moe, x, share))
    total = 0.3 * last["balance_loss"] + 0.02 * last["z_loss"]
    assert total == pytest.approx(expected_loss, rel=1e-5)


def test_balancing_loss_is_one_where_all_is_even() -> None:
    moe = make(replace(SOFTMAX, balance_weight=1.0))
    nn.init.zeros_(moe.router.gate.weight)
    moe(inputs()).sum().backward()
    moe.router.finish_step(moe.router.tally)
    assert float(moe.router.last["balance_loss"]) == pytest.approx(1.0)


def test_counts_each_token_once() -> None:
    x = inputs().requires_grad_()
    moe = make(SOFTMAX)
    chosen = moe.router(x).experts
    assert not moe.router.tally.any(), "nothing was counted before backward"
    with torch.no_grad():
        moe(x)
    assert not moe.router.tally.any(), "nothing is counted in evaluation"
    checkpoint(moe, x, use_reentrant=False).sum().backward()
    counts = torch.bincount(chosen.flatten(), minlength=5)
    assert moe.router.tally[:5].tolist() == counts.tolist(), "recomputation counted again"
    moe(x).sum().backward()
    assert moe.router.tally[:5].tolist() == (2 * counts).tolist(), "micro-batches add up"


def test_micro_batches_are_one_batch() -> None:
    config = replace(SOFTMAX, balance_weight=0.3, z_weight=0.1, bias_rate=0.01)
    whole, parts, x = make(config), make(config), inputs(4)
    load = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1])
    for moe in (whole, parts):
        moe.router.load.copy_(load)
        moe.router.tokens_per_step = 44
    (whole(x) ** 2).sum().backward()
    for part in x.split([1, 3]):
        (parts(part) ** 2).sum().backward()
    for moe in (whole, parts):
        moe.router.finish_step(moe.router.tally)
    torch.testing.assert_close(gradients_of(whole), gradients_of(parts))
    assert torch.equal(whole.router.bias, parts.router.bias)
    assert torch.equal(whole.router.load, parts.router.load)


@pytest.mark.parametrize("kind", ["batch", "sequence"])
def test_losses_are_scaled_as_the_models(kind: str) -> None:
    """By a power of 2, which is exact."""
    config = replace(SOFTMAX, balance_loss=kind, balance_weight=0.3, z_weight=0.1)
    plain, scaled, x = make(config), make(config), inputs()
    scaled.router.loss_scale = 64.0
    (plain(x) ** 2).sum().backward()
    ((scaled(x) ** 2).sum() * 64).backward()
    for a, b in zip(gradients_of(plain), gradients_of(scaled), strict=True):
        assert torch.equal(a * 64, b)
    assert torch.equal(plain.router.tally, scaled.router.tally), "what is reported is not scaled"


def test_bias_moves_against_the_load() -> None:
    router = Router(DIM, replace(SOFTMAX, bias_rate=0.25))
    router.finish_step(torch.tensor([9.0, 1.0, 4.0, 4.0, 2.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    assert router.bias.tolist() == [-0.25, 0.25, 0.0, 0.0, 0.25]
    assert router.load.tolist() == pytest.approx([0.45, 0.05, 0.2, 0.2, 0.1])
    assert {k: float(v) for k, v in router.last.items()} == pytest.approx(
        {"load": 2.25, "dropped": 0, "balance_loss": 0, "z_loss": 0, "bias_change": 0.15}
    )
    assert not router.tally.any()


def test_capacity_drops_the_lowest_scores_of_each_sequence() -> None:
    config = replace(SOFTMAX, capacity_factor=1.0)
    moe, x = make(config), inputs(2, 10).requires_grad_()
    with torch.no_grad():
        routing = moe.router(x)
        scores = moe.router.gate(x.flatten(0, 1)).softmax(-1).view(2, 10, 5)
    assert routing.kept is not None
    capacity = 4  # 10 tokens x 2 over 5 experts
    dropped = 0
    for b in range(2):
        for e in range(5):
            here = [(t, j) for t in range(10) for j in range(2) if routing.experts[b, t, j] == e]
            here.sort(key=lambda at: -float(scores[b, at[0], e]))
            kept = [at for at in here if routing.kept[b, at[0], at[1]]]
            assert kept == here[:capacity]
            dropped += len(here) - len(kept)
    assert dropped > 0, "the case must drop some"
    result = moe(x)
    # Dropped tokens count for nothing; the rest is as it was.
    uncapped = MoE(DIM, SOFTMAX)
    uncapped.load_state_dict(moe.state_dict())
    expected = torch.zeros_like(result)
    for b in range(2):
        for t in range(10):
            for j in range(2):
                if routing.kept[b, t, j]:
                    e, w = routing.experts[b, t, j], routing.weights[b, t, j]
                    one = torch.zeros(5, dtype=torch.int64).scatter(0, e, 1)
                    expected[b, t] += w * uncapped.experts(x[b, t][None], one)[0]
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    result.sum().backward()
    moe.router.finish_step(moe.router.tally)
    assert float(moe.router.last["dropped"]) == dropped


def test_gradient_where_rows_are_dropped() -> None:
    moe = make(replace(SOFTMAX, capacity_factor=0.5)).double()
    x = inputs(2, 5).double().requires_grad_()
    kept = moe.router(x).kept
    assert kept is not None
    assert 0 < kept.sum() < kept.numel() - 5
    assert not kept.any(-1).all(), "a token of which no row is left"
    assert torch.autograd.gradcheck(moe, x)


class Moves(TorchDispatchMode):
    """Counts operators that sort, and those that write rows somewhere into a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.sorts, self.written = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.sorts += name in ("sort", "argsort")
        self.written += name.startswith(("index_copy", "index_add", "index_put")) or (
            name.startswith(("scatter", "zero", "new_zeros")) and args[0].shape[-1] == DIM
        )
        return func(*args, **(kwargs or {}))


def test_rows_are_sorted_once_and_only_gathered() -> None:
    moe, x = make(SOFTMAX), inputs().requires_grad_()
    with Moves() as moves:
        moe(x).sum().backward()
    assert (moves.sorts, moves.written) == (1, 0)


@pytest.mark.parametrize("kind", ["batch", "sequence"])
def test_padding_counts_for_nothing(kind: str) -> None:
    config = replace(SOFTMAX, balance_loss=kind, balance_weight=0.3, z_weight=0.1, capacity_factor=1.0)
    padded, plain, x = make(config), make(config), inputs(2, 8)
    filler = 5 * inputs(2, 3, seed=3)
    real = torch.tensor([[True] * 8 + [False] * 3] * 2)
    for moe in (padded, plain):
        moe.router.tokens_per_step = 16
    y = padded(torch.cat([x, filler], 1), real)[:, :8]
    expected = plain(x)
    torch.testing.assert_close(y, expected)
    (y**2).sum().backward()
    (expected**2).sum().backward()
    assert torch.equal(padded.router.tally[:6], plain.router.tally[:6]), "counts"
    torch.testing.assert_close(padded.router.tally, plain.router.tally, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(gradients_of(padded), gradients_of(plain))


def test_buffers_are_made_on_a_real_device() -> None:
    with torch.device("meta"):
        moe = MoE(DIM, SOFTMAX)
    assert all(p.is_meta for p in moe.parameters())
    assert not any(b.is_meta for b in moe.buffers())
    assert set(moe.state_dict()) - set(dict(moe.named_parameters())) == {"router.bias", "router.load"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_experts": -1}, "n_experts: -1 should be at least 0, below 2^16"),
        ({"n_experts": 4, "top_k": 5}, "top_k: 5 is more than the 4 experts to choose from"),
        ({"n_experts": 4, "top_k": 0}, "top_k: 0 should be at least 1, below 2^31"),
        ({"n_experts": 6, "n_groups": 4}, "n_groups: 4 does not divide n_experts 6"),
        ({"n_experts": 4, "n_groups": 4}, "n_groups: 4 leaves groups of one expert; two are scored"),
        ({"n_experts": 4, "n_groups": 2, "top_groups": 3}, "top_groups: 3 is more than n_groups 2"),
        (
            {"n_experts": 8, "n_groups": 4, "top_k": 3},
            "top_k: 3 is more than the 2 experts to choose from",
        ),
        ({"n_experts": 4, "route_scale": 0.0}, "route_scale: 0.0 should be above 0"),
        ({"bias_rate": -0.1}, "bias_rate: -0.1 should be at least 0"),
        ({"capacity_factor": float("nan")}, "capacity_factor: nan should be at least 0"),
    ],
)
def test_bad_config(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        MoEConfig(**fields)  # type: ignore[arg-type]
