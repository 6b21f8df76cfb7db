"""Activation checkpointing: the same gradients bitwise, and the bytes that formulas say."""

import weakref
from collections import Counter
from types import ModuleType
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import models.deepseek_v3
import models.llama
import models.qwen3
from compose import ActivationCheckpoint, forward_backward
from compose.build import build
from compose.data.samples import random_batch
from compose.memory.activation_checkpointing import (
    UnitCost,
    apply_activation_checkpointing,
    operators,
    recomputed_units,
    unit_costs,
    within,
)
from compose.memory.segments import apply_segments
from compose.planner.record import RecordedMessage
from compose.planner.trace import RankStep, trace
from tests.support.helpers import (
    Keys,
    make_job,
    parallel,
    ranks_in,
    refusals,
    refused,
    share_of,
    tiered,
)
from tests.support.pool import Pool, make_mesh

LLAMA = models.llama.Config(n_layers=4, dim=64, n_heads=4, n_kv_heads=2, hidden_dim=160)
SMALL: dict[str, tuple[ModuleType, Any]] = {
    "llama": (models.llama, LLAMA),
    "qwen3": (models.qwen3, models.qwen3.PRESETS["debug_moe"]),
    "deepseek_v3": (models.deepseek_v3, models.deepseek_v3.PRESETS["debug"]),
}
OPTIONS = {
    "none": ActivationCheckpoint(),
    "full": ActivationCheckpoint("full"),
    "every_2": ActivationCheckpoint("every_k", every=2),
    "selective": ActivationCheckpoint("selective"),
    "attention": ActivationCheckpoint("selective", keep=("attention",)),
    "products": ActivationCheckpoint("selective", keep=("mm", "aten.bmm")),
    "budget": ActivationCheckpoint("budget", budget=0.4),
}


def make(which: str, options: ActivationCheckpoint) -> nn.Module:
    folder, config = SMALL[which]
    torch.manual_seed(0)
    model = folder.Model(config)
    units = [f"layers.{i}" for i in range(config.n_layers)]
    apply_activation_checkpointing(model, recomputed_units(model, units, options, seq_len=37))
    return model


def run(model: nn.Module, length: int = 37) -> Tensor:
    """A loss over random documents."""
    batch = random_batch(2, length, 257, seed=3)
    targets = batch.pop("targets").clamp(min=0)
    return nn.functional.cross_entropy(model(**batch).flatten(0, 1), targets.flatten())


class Live(TorchDispatchMode):
    """Bytes of the tensors made under it that are still there, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {t.untyped_storage() for t in args if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket.__name__] += 1
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage not in self.known and storage not in given:
                    self.known.add(storage)
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, storage.nbytes())
        return out

    def _gone(self, size: int) -> None:
        self.now -= size


def measured(
    which: str, options: ActivationCheckpoint, length: int = 37
) -> tuple[int, int, Counter[str]]:
    """Bytes kept between the passes, the most at any time, and what ran in backward."""
    model = make(which, options)
    with Live() as live:
        loss = run(model, length)
        kept = live.now
        live.calls.clear()
        loss.backward()
    return kept, live.most, live.calls


@pytest.mark.parametrize("which", SMALL)
def test_gradients_are_bitwise_those_of_mode_none(which: str) -> None:
    expected = make(which, OPTIONS["none"])
    run(expected).backward()
    for name in list(OPTIONS)[1:]:
        model = make(which, OPTIONS[name])
        run(model).backward()
        for (parameter, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), (name, parameter)  # type: ignore[arg-type]


def test_bytes_and_repeated_work_are_those_of_the_formulas() -> None:
    """For Llama: of a layer's token none keeps what unit_costs counts, full D elements; selective
    besides what seven products (3 D + 2 G K + 2 F) and attention (D, and H log-sum-exps) return."""
    length, c = 128, LLAMA
    kept, most, calls = {}, {}, {}
    for name, options in OPTIONS.items():
        kept[name], most[name], calls[name] = measured("llama", options, length)
    elements = 4 * 2 * length * c.n_layers  # bytes of one element a token in all layers
    full = elements * c.dim
    ends = kept["full"] - full
    products = elements * (3 * c.dim + 2 * c.n_kv_heads * c.head_width + 2 * c.hidden_dim)
    attention = elements * (c.dim + c.n_heads)
    none = 2 * sum(unit.everything for unit in costs("llama", length).values())
    assert kept["selective"] - ends == full + products + attention
    assert kept["products"] - ends == full + products
    assert kept["attention"] - ends == full + attention
    assert kept["none"] - ends == pytest.approx(none, rel=0.1)
    assert kept["every_2"] - ends == pytest.approx((none + full) / 2, rel=0.1)
    assert kept["budget"] - ends <= 0.4 * (kept["none"] - ends)
    assert kept["none"] > kept["selective"] > kept["every_2"] > kept["full"]
    assert most["none"] > most["every_2"] > most["selective"] > most["full"]
    flash = "attention_forward"
    again = {name: (calls[name]["mm"] - calls["none"]["mm"], calls[name][flash]) for name in calls}
    # The last product of a layer, that of w2, is no one's input: recomputation stops before it.
    assert again == {
        "none": (0, 0),
        "full": (6 * 4, 4),
        "every_2": (6 * 2, 2),
        "selective": (0, 0),
        "attention": (6 * 4, 0),
        "products": (0, 4),
        "budget": again["budget"],
    }


def costs(which: str, length: int) -> dict[str, UnitCost]:
    folder, config = SMALL[which]
    with torch.device("meta"):
        model = folder.Model(config)
    return unit_costs(model, [f"layers.{i}" for i in range(config.n_layers)], length)


@pytest.mark.parametrize("which", SMALL)
@pytest.mark.parametrize("budget", [0.0, 0.2, 0.45, 0.8, 1.0])
def test_budget_is_kept_and_used(which: str, budget: float) -> None:
    result = costs(which, 64)
    kept = within(result, budget)
    sizes = {
        name: result[name].everything
        if groups is None
        else result[name].input + sum(result[name].bytes[g] for g in groups)
        for name, groups in kept.items()
    }
    everything = sum(unit.everything for unit in result.values())
    assert sum(sizes.values()) <= max(budget * everything, sum(u.input for u in result.values()))
    # The rest would not hold one more group of any unit.
    smallest = max(unit.everything for unit in result.values())
    assert sum(sizes.values()) > budget * everything - smallest
    assert all(groups == () for groups in kept.values()) is (budget == 0)
    assert all(groups is None for groups in kept.values()) is (budget == 1)


def test_experts_in_one_product_cost_as_much() -> None:
    """In bfloat16 one kernel multiplies the rows of all experts."""
    with torch.device("meta"):
        model = models.qwen3.Model(models.qwen3.PRESETS["debug_moe"])
    results = [
        [unit.flops["matmul"] for unit in unit_costs(model.to(dtype), ["layers.0"], 64).values()]
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert results[0] == results[1]


def test_a_module_with_two_names_keeps_its_weights() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, layer)
    unit_costs(model, ["0"], lambda: {"input": torch.empty(1, 4, device="meta")})
    assert isinstance(layer.weight, nn.Parameter)
    assert not layer.weight.is_meta


class Silent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            raise AssertionError
        return x


def test_a_model_that_fails_on_meta_without_a_word_is_named() -> None:
    (line,) = refused(unit_costs, Silent(), [], 8)
    start = "activation_checkpoint.budget: cannot count the bytes of Silent (AssertionError: "
    assert line.startswith(start), line


def test_greedy_takes_the_most_flops_for_a_byte() -> None:
    unit = UnitCost(10, 90, {"attention": 20, "matmul": 30}, {"attention": 60.0, "matmul": 30.0})
    cheap = UnitCost(10, 90, {"attention": 20, "matmul": 30}, {"attention": 20.0, "matmul": 60.0})
    # 200 bytes in all, 20 of them inputs. Per byte: 3, 2, 1, 1.
    both = ("matmul", "attention")
    expected = {0.1: ((), ()), 0.2: (("attention",), ()), 0.35: (("attention",), ("matmul",))}
    expected |= {0.45: (("attention",), both), 0.6: (both, both), 1.0: (None, None)}
    results = {budget: tuple(within({"a": unit, "b": cheap}, budget).values()) for budget in expected}
    assert results == expected


def test_every_k_and_what_is_no_operator() -> None:
    model, units = nn.Sequential(), [str(i) for i in range(7)]
    result = recomputed_units(model, units, ActivationCheckpoint("every_k", every=3), seq_len=37)
    assert result == {"2": frozenset(), "5": frozenset()}
    assert operators(["mm"]) == operators(["aten.mm"]) < operators(["matmul"])
    assert refused(operators, ["attention", "matmull"]) == [
        "activation_checkpoint.keep: 'matmull' is neither matmul nor attention nor messages nor an"
        " operator of aten; did you mean matmul?"
    ]


def test_a_kept_result_that_is_written_to_is_an_error() -> None:
    class Unit(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu_().exp().sin()

    model = nn.Sequential(Unit(5, 5, bias=False))
    apply_activation_checkpointing(model, {"0": operators(["matmul"])})
    loss = model(torch.randn(3, 5, requires_grad=True)).sum()
    assert refused(loss.backward) == [
        "activation_checkpoint.mode: forward works in place on a result of aten.mm.default that is kept"
        ' for backward; use mode = "full", or have forward make a new tensor'
    ]


def test_parts_of_a_kept_result_that_are_written_to() -> None:
    """A GRU adds to parts of its products, which no counter of changes sees."""
    torch.manual_seed(0)
    plain, kept = (nn.Sequential(nn.GRU(4, 4)) for _ in range(2))
    kept.load_state_dict(plain.state_dict())
    apply_activation_checkpointing(kept, {"0": operators(["matmul"])})
    given = torch.randn(3, 2, 4)
    for model in (plain, kept):
        model(given)[0].square().sum().backward()
    for one, other in zip(plain.parameters(), kept.parameters(), strict=True):
        assert one.grad is not None
        assert torch.equal(one.grad, cast(Tensor, other.grad))


def chosen(**keys: object) -> Keys:
    return {f"activation_checkpoint__{key}": value for key, value in keys.items()}


def _differing(keys: dict[str, Any], modes: list[dict[str, Any]]) -> list[str]:
    """On every rank: the parameters whose gradients differ between ``modes`` and mode none."""
    results: list[str] = []
    expected: list[Any] = []
    world = dist.get_world_size()
    mesh = make_mesh(make_job(world, **keys).degrees)
    for mode in [{}, *modes]:
        job = make_job(world, **keys, **chosen(**mode))
        config, composition = job.config, build(job, mesh, torch.device("cpu"))
        batch = random_batch(8, config.train.seq_len, config.model.config.vocab_size, seed=1)
        forward_backward(composition, share_of(batch, mesh), micro_batch=2)
        model = composition.model
        gradients: list[Any] = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]
        expected = expected or gradients
        names = [name for name, _ in model.named_parameters()]
        results += [
            f"{mode} {name}"
            for name, one, other in zip(names, gradients, expected, strict=True)
            if not torch.equal(one, other)
        ]
    return results


MOE: Keys = {"model__name": "qwen3", "model__preset": "debug_moe"}
MESHES: dict[str, Keys] = {
    "ring x tp": parallel(cp=2, tp=2),
    "ep x tp": MOE | parallel(dp_shard=2, ep=4, tp=2),
    "1F1B": parallel(pp=2),
}
MORE: dict[str, Keys] = {
    "allgather": parallel(cp=2, cp_method="allgather"),
    "ulysses x fsdp": parallel(cp=2, cp_method="ulysses", dp_shard=2),
    "interleaved x fsdp": parallel(pp=2, dp_shard=2, pp_schedule="Interleaved1F1B")
    | {"model__n_layers": 6},
    "zero 1, replicas, ep": MOE | parallel(ep=2, dp_replicate=2, dp_shard=2, zero=1),
    "deepseek, ring": parallel(cp=2) | {"model__name": "deepseek_v3"},
    "bfloat16": MOE | parallel(dp_shard=2, ep=2) | {"precision__param": "bfloat16"},
}


@pytest.mark.parametrize("name", tiered(MESHES | MORE, ("ring x tp", "ep x tp"), MORE))
def test_bitwise_on_every_axis(pool: Pool, name: str) -> None:
    keys = (MESHES | MORE)[name]
    modes: list[dict[str, Any]] = [{"mode": "selective"}, {"mode": "budget", "budget": 0.4}]
    if name in MORE:
        modes += [{"mode": "full"}, {"mode": "every_k"}]
    assert pool.run(_differing, ranks_in(keys), keys, modes) == [[]] * ranks_in(keys)


def _messages(keys: dict[str, Any], modes: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
    """On every rank: how often ranks exchange parts in one step, by operator, in each of ``modes``."""
    mesh = make_mesh(make_job(2, **keys).degrees)
    results: dict[str, list[int]] = {}
    for mode in modes.values():
        job = make_job(2, train__seq_len=16, **keys, **chosen(**mode))
        composition = build(job, mesh, torch.device("cpu"))
        batch = random_batch(2, 16, job.config.model.config.vocab_size, seed=1)
        with Live() as live:
            forward_backward(composition, batch)
        for name in ("scatter_stream", "all_to_all_single", "exchange_counts"):
            if live.calls[name]:
                results.setdefault(name, []).append(live.calls[name])
    return results


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # Two layers: after attention, and after the feed-forward, whose sum no one recomputes; the
        # embedding; and the gradients.
        ({"parallel__tp": 2}, {"scatter_stream": [10, 12, 10]}),
        # Rows go there and back, and so do gradients.
        (
            {**MOE, "model__n_layers": 2, "parallel__ep": 2},
            {"all_to_all_single": [8, 12, 8], "exchange_counts": [2, 4, 2]},
        ),
    ],
    ids=["tp", "ep"],
)
def test_kept_messages_are_not_sent_again(
    pool: Pool, keys: dict[str, Any], expected: dict[str, list[int]]
) -> None:
    kept = ["matmul", "attention"]
    modes = {"none": {}, "some": {"mode": "selective", "keep": kept}, "all": {"mode": "selective"}}
    for result in pool.run(_messages, 2, keys, modes):
        assert result == expected


@pytest.mark.parametrize(
    ("keys", "part", "whole"),
    [
        ({"parallel__tp": 2}, "reduce_scatter", "all_gather"),
        ({**MOE, "parallel__ep": 2, "parallel__zero": 2}, "all_to_all", ""),
    ],
    ids=["tp", "ep"],
)
def test_kept_messages_on_a_gpu(keys: dict[str, Any], part: str, whole: str) -> None:
    """They are functional collectives there, and the planner counts them."""

    def sent(**mode: Any) -> Counter[str]:
        work = trace(RankStep(make_job(2, **keys, **chosen(**mode)), micro_batches=1)).record.work
        return Counter(each.kind for each in work if isinstance(each, RecordedMessage))

    none, kept = sent(), sent(mode="selective")
    again = sent(mode="selective", keep=["matmul", "attention"])
    assert {kind for kind in again if again[kind] > kept[kind]} == {part}
    assert {kind for kind in kept if kept[kind] > none[kind]} == ({whole} if whole else set())


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV", "InterleavedZeroBubble"])
@pytest.mark.full
def test_whole_units_under_split_backwards(pool: Pool, schedule: str) -> None:
    keys = parallel(pp=2, pp_schedule=schedule) | {"model__n_layers": 4}
    modes = [{"mode": "every_k"}, {"mode": "full"}]
    assert pool.run(_differing, 2, keys, modes) == [[]] * 2


REFUSED: list[tuple[Keys, str]] = [
    (
        chosen(keep='["mm"]', mode="full"),
        'activation_checkpoint.keep: ["mm"] is read in another mode; set activation_checkpoint.mode ='
        ' "selective"',
    ),
    (
        chosen(budget=0.25, mode="selective"),
        "activation_checkpoint.budget: 0.25 is read in another mode; set activation_checkpoint.mode ="
        ' "budget"',
    ),
    (
        chosen(every=3, mode="every_k"),
        "activation_checkpoint.every: 3 is more than the 2 units, so none would be recomputed;"
        " nearest: 2",
    ),
    (
        chosen(mode="selective") | parallel(pp=2, pp_schedule="ZBVZeroBubble"),
        'activation_checkpoint.mode: "selective" gives what it kept out once, and ZBVZeroBubble runs'
        ' backward in two parts; use activation_checkpoint.mode = "none", or another'
        ' parallel.pp_schedule, as "1F1B"',
    ),
]
test_refused = refusals(REFUSED)


class Counting(nn.Module):
    """Its result depends on how often it ran; and it has running means."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.ones(()))
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x)).tanh() / (self.mean + self.calls).clone()
        self.calls += 1
        self.mean = 0.5 * self.mean + 0.5 * y.detach().mean(0)
        return x + y


def counted(mode: str, segment: int = 1) -> list[Tensor]:
    """The gradients and buffers after two micro-batches, whose forwards run first, and a third."""
    torch.manual_seed(0)
    model = nn.Sequential(Counting(), Counting())
    units = recomputed_units(model, ["0", "1"], ActivationCheckpoint(mode), 1)  # type: ignore[arg-type]
    if segment > 1:
        apply_segments(model, [["0", "1"]])
    else:
        apply_activation_checkpointing(model, units)
    inputs = [torch.randn(5, 4) for _ in range(3)]
    with torch.no_grad():
        model(inputs[2])
    for loss in [model(x).square().sum() for x in inputs[:2]]:
        loss.backward()
    model(inputs[2]).square().sum().backward()
    return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


@pytest.mark.parametrize(("mode", "segment"), [("full", 1), ("selective", 1), ("full", 2)])
def test_what_runs_again_changes_no_buffer(mode: str, segment: int) -> None:
    torch.testing.assert_close(counted(mode, segment), counted("none"), rtol=0, atol=0)
