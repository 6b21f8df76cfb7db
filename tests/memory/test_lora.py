"""LoRA: a composition with adapters equals one process, saves adapters alone, and refuses the rest."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compose import Parallel
from compose.build import build_optimizer
from compose.checkpoint.local_shards import named_tensors
from compose.config.models import find_model
from compose.config.rules import meshes
from compose.memory.lora import linear_layers
from compose.optim.optimizers import make_state
from compose.parallel.lora_parallel import Adapter
from tests.support.checkpoints import goes_on_bitwise, resume, shards, train_on
from tests.support.faults import with_fault
from tests.support.helpers import (
    Keys,
    agreed,
    built,
    keys_in,
    make_job,
    parallel,
    prove_case,
    proved,
    refusals,
    refused,
    tiered,
)
from tests.support.mutation import mutated
from tests.support.pool import Pool
from tests.support.small_models import (
    ALL,
    ATTENTION,
    AXES,
    DEEPSEEK,
    GPT2,
    MIXTRAL,
    QWEN,
    keys_of,
    lora,
)
from tests.support.training import keys_for
from tests.support.transformers_models import GEMMA2, QWEN2_MOE
from tests.support.transformers_models import GPT2 as GPT2_CONFIG

# Odd sizes: a hidden width and a rank that ranks do not divide, and key/value heads that they share.
LLAMA: Keys = {
    "model__dim": 48,
    "model__n_heads": 12,
    "model__n_kv_heads": 2,
    "model__hidden_dim": 90,
} | lora()
DORA = lora(targets="all-linear", dora=True, dropout=0.3)
FLOAT8: Keys = {"model__dim": 128, "model__hidden_dim": 192} | lora()
SLOW = (
    "ds 2 cp 2 tp 2 train__seq_len 18",
    "tp 4 zero 2 sequence false precision__param bfloat16",
    "pp 2 ds 2 pp_schedule ZBVZeroBubble model__n_layers 4 zero 1",
    "dr 2 ds 2 model__lora__rank 1 optimizer__name muon",
    "ds 4 zero 2 comm__weights int8",  # gradients of so few elements are never coded
)
FULL = (
    "dr 2 zero 0 model__tie_embeddings true",
    "ds 2 tp 2 comm__activations int8",
    "ds 2 tp 2 compile__mode block",
    "ds 2 parallel__offload cpu activation_checkpoint__mode full",
    "ds 2 optimizer__offload cpu activation_checkpoint__offload true",
    "ds 4 zero3_reshard 2 precision__param bfloat16",
    "tp 2 precision__param float16 activation_checkpoint__mode selective",
    "ds 2 precision__param bfloat16 precision__master bfloat16",
    "cp 2 tp 2 cp_method ulysses model__n_kv_heads 12",
)
CASES: dict[str, Keys] = dict.fromkeys((*SLOW, *FULL), LLAMA) | {
    # A base in float8.
    "ds 2 tp 2 precision__float8 tensorwise": FLOAT8,
    "ds 2 tp 2 precision__float8 rowwise precision__param bfloat16": FLOAT8,
    # Models with experts.
    "ds 2 tp 2 ep 2": QWEN | lora(targets=ATTENTION),
    "cp 2 tp 2 ep 4": DEEPSEEK
    | {"model__bias_rate": 0.0}
    | lora(targets="['layers.*.attention.w*','layers.*.moe.shared.w*','layers.*.feed_forward.w[12]']"),
    "ds 2 ep 2": MIXTRAL | lora(targets=ATTENTION),
    # DoRA and dropout: norms of rows that tp cuts, and masks that no mesh changes.
    "ds 2 tp 2 zero 2": LLAMA | DORA,
    "cp 2": LLAMA | DORA | {"activation_checkpoint__mode": "full"},
    "pp 2 dr 2 zero 0": LLAMA | DORA,
    "tp 4 precision__param bfloat16": LLAMA | DORA | {"model__lora__rslora": True},
    "ds 2 tp 2 compile__mode block zero 1": LLAMA | DORA,
    "cp 2 tp 2 ep 2": DEEPSEEK | {"model__bias_rate": 0.0} | DORA,
    "tp 2 zero 0": GPT2 | lora(targets="all-linear", dora=True),
}
NEW = ("ds 2 tp 2 zero 2", "cp 2", "pp 2 dr 2 zero 0", "cp 2 tp 2 ep 2", "tp 2 zero 0")


def prove_adapters(pool: Pool, model: Keys, case: str) -> None:
    ranks, keys = keys_of(model, case)
    report = proved(pool.run(prove_case, ranks, keys), case)
    text = str(report)
    assert "not proved" not in text
    frozen = [row for row in report.rows if row.quantity.endswith("frozen weight")]
    assert frozen
    assert not any(
        row.quantity.endswith("gradient") and ".lora." not in row.name for row in report.rows
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_by_hand(dora: bool, bias: bool) -> None:
    """DoRA (Liu et al. 2024, arXiv:2402.09353) gives each row of W + scale B A a length of its own."""
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 3, bias=bias), torch.randn(4, 5)
    adapter = Adapter(layer, 2, 0.5, dora=dora)
    layer.add_module("lora", adapter)
    adapter.attach(layer)
    for parameter in adapter.parameters():
        nn.init.normal_(parameter)
    weight = layer.weight + 0.5 * adapter.B @ adapter.A
    if adapter.magnitude is not None:
        weight = adapter.magnitude[:, None] * weight / weight.norm(dim=1, keepdim=True)
    torch.testing.assert_close(layer(x), F.linear(x, weight, layer.bias))


@pytest.mark.parametrize("case", tiered(CASES, (*SLOW, *NEW), CASES.keys() - {*SLOW, *NEW}))
def test_equals_one_process(pool: Pool, case: str) -> None:
    prove_adapters(pool, CASES[case], case)


@pytest.mark.full
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_every_mesh_of_eight_ranks(pool: Pool, pp: int) -> None:
    """ZeRO stages and layouts of the stream in turn."""
    count = 0
    for degrees in meshes(8):
        if degrees["pp"] != pp:
            continue
        zero = count % 4 if degrees["dp_shard"] == 1 else 1 + count % 3
        case = " ".join(f"{short} {degrees[axis]}" for short, axis in AXES.items())
        case += f" zero {zero} sequence {('true', 'false')[count % 2]} model__n_layers 4"
        prove_adapters(pool, LLAMA | {"model__dim": 64, "model__n_heads": 8}, case)
        count += 1
    assert count == {1: 20, 2: 10, 4: 4}[pp]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes for t in tensors)  # type: ignore[attr-defined]


def _held(keys: Keys) -> tuple[int, int, dict[str, int]]:
    """Bytes of weights and of the optimizer on this rank, and the elements of what is saved."""
    job, composition = built(keys)
    optimizer = build_optimizer(composition, job)
    make_state(optimizer)
    states = [v for state in optimizer.state.values() for v in state.values() if v.ndim]
    tensors = named_tensors(composition, optimizer, adapters=True)
    saved = {name: copies[0].numel() for name, copies in tensors.items()}
    return _bytes([p for _, p in composition.named_parameters()]), _bytes(states), saved


def test_memory_is_that_of_adapters(pool: Pool) -> None:
    """Frozen weights in two bytes, adapters in four, and two running means for adapters alone."""
    keys: Keys = {"precision__param": "bfloat16", "parallel__dp_shard": 2} | lora(4)
    job = make_job(2, **keys)
    adapters = sum(p.numel() for p in job.model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in job.model.parameters() if not p.requires_grad)
    result = pool.run(_held, 2, keys)
    assert sum(weights for weights, _, _ in result) == 4 * adapters + 2 * frozen
    assert sum(state for _, state, _ in result) == 8 * adapters
    saved = {name: count for name, count in result[0][2].items() if not name.endswith(".step")}
    assert all(".lora." in name for name in saved)
    assert sum(saved.values()) == 3 * adapters


@pytest.mark.slow
def test_resumes_bitwise_on_another_mesh(pool: Pool, tmp_path: Path) -> None:
    """Two steps and two more on the same mesh leave the bits of four; on another mesh, the same run."""
    model = lora() | {"optimizer__warmup": 0}
    mesh = parallel(dp_shard=2)
    whole = goes_on_bitwise(pool, tmp_path, model, mesh)
    steps = [
        folder / "checkpoints/step-00000004" for folder in (tmp_path / "whole", tmp_path / "parts")
    ]
    assert shards(steps[0]) == shards(steps[1])
    train_on(pool, tmp_path / "other", model, mesh, 2)
    other = train_on(pool, tmp_path / "other", model, {"parallel__tp": 2, "parallel__dp_shard": 1}, 4)
    assert other.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.allclose(other[name], value, rtol=1e-4, atol=1e-6), name


def test_first_adapters_do_not_depend_on_the_mesh_or_the_base(pool: Pool) -> None:
    job = make_job(1, **lora())
    (alone,) = pool.run(_adapters, 1, lora())
    for name, value in alone.items():
        if name.endswith("B"):
            assert not value.any()
        else:
            bound = job.model.get_parameter(name).shape[1] ** -0.5
            assert 0.9 * bound < float(value.abs().max()) <= bound
    assert len({float(v.flatten()[0]) for n, v in alone.items() if n.endswith("A")}) == len(alone) / 2


def test_diffusion_models_take_adapters_without_tensor_parallel(pool: Pool) -> None:
    """Their plan has styles that no cut of an adapter follows from, which tp alone uses."""
    keys = keys_in("model.name=dit model.n_layers=2 model.dim=32 model.image_size=8 train.seq_len=16")
    prove_adapters(pool, keys | lora(targets="all-linear"), "ds 2")


def test_a_router_before_all_adapters_is_compared(pool: Pool) -> None:
    """No backward passes it."""
    late = lora(targets="['layers.1.attention.wq']")
    prove_adapters(pool, MIXTRAL | {"model__n_layers": 2} | late, "ds 2 ep 2")


def _adapters(keys: Keys) -> dict[str, Tensor]:
    model = built(keys)[1].model
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


NOTHING_ADAPTED = "model.lora.rank: 0 adapts nothing; use at least 1, or no [model.lora]"
REFUSED: list[tuple[Keys, str]] = [
    (
        lora(targets="['layers.*.atention.wq']"),
        "model.lora.targets: pattern 'layers.*.atention.wq' matches no module;"
        " did you mean layers.*.attention.wq?",
    ),
    (
        lora(targets="['layers.*.attention']"),
        "model.lora.targets: pattern 'layers.*.attention' matches no nn.Linear: layers.0.attention"
        " is Attention; did you mean layers.*.attention.wq?",
    ),
    (
        lora(targets="['norm']"),
        "model.lora.targets: pattern 'norm' matches no nn.Linear: norm is RMSNorm",
    ),
    (
        lora(targets="[]"),
        "model.lora.targets: [] names no layer; give patterns of linear layers, as"
        ' ["layers.*.attention.w*"], or "all-linear"',
    ),
    (
        lora(targets="all_linear"),
        'command line: model.lora.targets: expected "all-linear" or list of str, got "all_linear";'
        " did you mean all-linear?",
    ),
    (lora(dropout=1.0), "command line: model.lora.dropout: 1.0 should be less than 1"),
    (
        lora(dora=True) | {"precision__float8": "rowwise"},
        'precision.float8: "rowwise" does not go with model.lora.dora = true; use "off"',
    ),
    (
        lora(targets="['output']"),
        "model.lora.targets: output is the projection onto the vocabulary, which the loss may"
        " compute itself; name layers before it",
    ),
    (
        # Its logits are capped, so that the plan names no output projection.
        {"model__name": "gemma3", "model__final_softcap": 30.0} | lora(targets="['output']"),
        "model.lora.targets: output shares its weight with another module, which an adapter would not"
        " change; name others",
    ),
    (lora(0), NOTHING_ADAPTED),
    *(
        ({f"model__lora__{key}": value}, NOTHING_ADAPTED)
        for key, value in {
            "alpha": 4.0,
            "rslora": True,
            "dora": True,
            "dropout": 0.1,
            "base": "int8",
        }.items()
    ),
    (
        lora(17),
        "model.lora.rank: 17 is more than layers.0.attention.wk has, which is 16 x 64; nearest: 16",
    ),
    (
        QWEN | lora(targets="['layers.*.moe.experts']"),
        "model.lora.targets: pattern 'layers.*.moe.experts' names layers.0.moe.experts, whose"
        " weights are stacks of experts, and no nn.Linear; name layers of attention, or dense ones",
    ),
    (
        QWEN | lora(targets="['layers.*.moe.experts.w1']"),
        "model.lora.targets: pattern 'layers.*.moe.experts.w1' names layers.0.moe.experts.w1, whose"
        " weights are stacks of experts, and no nn.Linear; name layers of attention, or dense ones",
    ),
    (
        DEEPSEEK | lora(targets=ATTENTION) | {"model__bias_rate": 0.01},
        "model.bias_rate: 0.01 moves the biases of routers, and model.lora freezes all but"
        " adapters; use model.bias_rate = 0.0",
    ),
    (
        lora(targets="['layers.0.*.w*']") | {"parallel__pp": 2, "train__micro_batch": 1},
        "model.lora.targets: stage 1 of the pipeline, with layers 1 to 1, has no adapter and so no"
        " gradient; name layers of every stage, or set parallel.pp_layers",
    ),
    (
        {"model__lora__rank": -1},
        "command line: model.lora.rank: -1 should be greater than or equal to 0",
    ),
    ({"model__lora__rank": "2.5"}, "command line: model.lora.rank: expected int, got 2.5"),
    ({"model__lora__alpha": "x"}, 'command line: model.lora.alpha: expected float, got "x"'),
    (
        {"model__lora__rang": 4},
        "command line: model.lora.rang: unknown key; did you mean model.lora.rank?",
    ),
]
test_refused = refusals(REFUSED)


@pytest.mark.parametrize(
    ("config", "others"),
    [
        # Logits are capped, so that the plan names no output projection.
        (GEMMA2, {"output"}),
        (QWEN2_MOE, {"output", *(f"layers.{i}.moe.shared_gate" for i in range(3))}),
        (GPT2_CONFIG, {"output"}),
    ],
    ids=["gemma2", "qwen2_moe", "gpt2"],
)
def test_all_linear_leaves_out_the_ends_and_gates(config: Any, others: set[str]) -> None:
    name = type(config).__module__.split(".")[-2]
    model, plan = find_model(name).on_meta(config), find_model(name).plan(config, Parallel())
    every = {one for one, module in model.named_modules() if type(module) is nn.Linear}
    assert every - set(linear_layers(model, plan)) == others


def test_one_table_written_three_ways(tmp_path: Path) -> None:
    from compose.config.toml import dump, load

    file, table = tmp_path / "run.toml", "rank = 4, alpha = 32, targets = ['a']"
    results = []
    for text in (f"[model]\nlora = {{{table}}}\n", "[model.lora]\n" + table.replace(", ", "\n")):
        file.write_text(text)
        results.append(load(str(file), [("model.lora.rank", "8")]).model.lora)
    results.append(load(str(file), [("model.lora", "{rank = 8}")]).model.lora)
    assert results[0] == results[1] == results[2]
    assert (results[0].rank, results[0].scale) == (8, 4.0)
    config = load(str(file))
    again = tmp_path / "again.toml"
    again.write_text(dump(config))
    assert load(str(again)).model == config.model


@pytest.mark.slow
def test_checkpoints_of_others_are_refused(pool: Pool, tmp_path: Path) -> None:
    """They have another rank, other targets or frozen weights, or a whole model."""
    folder, mesh = tmp_path / "run", parallel(dp_shard=1)
    train_on(pool, folder, lora(targets=ATTENTION), mesh, 2)
    saved = folder / "checkpoints/step-00000002"

    def why(keys: Keys, where: Path = folder) -> list[str]:
        return pool.run(refused, 1, resume, keys_for(where, **keys, train__seq_len=16))[0]

    assert why(lora(4, ATTENTION)) == [
        f"{saved}: was made with model.lora.rank = 3, not 4",
        f"{saved}: was made with model.lora.alpha = 6.0, not 8.0",
    ]
    assert why(lora(3, ALL)) == [
        f'{saved}: was made with model.lora.targets = ["layers.*.attention.w*"], not'
        ' ["layers.*.attention.w*", "layers.*.feed_forward.w*"]'
    ]
    assert why(lora(3, ATTENTION) | {"train__seed": 1}) == [
        f"{saved}: holds adapters of other weights: of weights drawn by train.seed = 0, not of weights"
        " drawn by train.seed = 1"
    ]
    assert why({}) == [f"{saved}: holds adapters alone; set model.lora as its run had it"]
    train_on(pool, tmp_path / "whole", {}, mesh, 2)
    other = tmp_path / "whole/checkpoints/step-00000002"
    assert why(lora(), tmp_path / "whole") == [
        f"{other}: holds the whole model; use model.lora.rank = 0, or a new run.dir"
    ]


# In the forward of a cut adapter: what stands there and what in its place; the gradients that fail, if
# the loss is right.
FAULTS: dict[str, tuple[str, str, set[str]]] = {
    "A not summed": (
        "local_weight(self.A, sum_a)",
        'local_weight(self.A, sum_a and self.cut != "rows")',
        {"wq.lora.A", "w1.lora.A", "w3.lora.A"},
    ),
    "B not summed": (
        "local_weight(self.B, sum_b)",
        'local_weight(self.B, sum_b and self.cut != "columns")',
        {"wo.lora.B", "w2.lora.B"},
    ),
    # All ranks of a row-parallel layer add the whole output, before the layer's sum.
    "added on every rank": (
        "F.linear(h, local_weight(self.B, sum_b))",
        "F.linear(DTensor.from_local(h, self.A.device_mesh, [torch.distributed.tensor.Partial()])"
        ".full_tensor()"
        ' if self.cut == "columns" else h, local_weight(self.B, sum_b))',
        set(),
    ),
    "no scale": ("self.scale * F.linear", "F.linear", set()),
}


# Elsewhere: the place, what stands there and what in its place, and the mesh.
OTHER_FAULTS = {
    "the norm of a row's part": (
        "compose.parallel.lora_parallel:_CutAdapter.summed",
        'self.cut != "columns"',
        "True",
        "tp 2",
    ),
    "the vector's gradient not summed": (
        "compose.parallel.lora_parallel:_CutAdapter.held",
        "local_weight(magnitude, _PLACES[self.cut][3])",
        "local_weight(magnitude, False)",
        "tp 4",
    ),
    "a bias is scaled": (
        "compose.parallel.lora_parallel:_CutAdapter.held",
        "local_tensor(bias)",
        "None",
        "tp 2",
    ),
    "masks by rank": ("compose.train.step:_with_masks", "index * len(first)", "0", "dr 2"),
    "masks of the first columns": (
        "compose.parallel.lora_parallel:AdapterParallel._apply",
        "local_region(module.A)[1].start",
        "0",
        "tp 2",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", OTHER_FAULTS)
def test_faults_of_dora_and_dropout_are_seen(pool: Pool, fault: str) -> None:
    place, old, new, mesh = OTHER_FAULTS[fault]
    model, more = LLAMA | DORA, {"model__lora__dropout": 0.0}
    if "bias" in fault:
        model = GPT2 | DORA | more
    ranks, keys = keys_of(model if "masks" in fault else model | more, mesh)
    fault_there = partial(mutated, place, old, new)
    assert not agreed(pool.run(with_fault, ranks, fault_there, keys)).ok


@pytest.mark.parametrize("fault", tiered(FAULTS, FAULTS.keys() - {"A not summed"}))
def test_faults_are_named(pool: Pool, fault: str) -> None:
    """A sum that is missing shows in the gradients of those parameters alone; the loss is right."""
    old, new, named = FAULTS[fault]
    ranks, keys = keys_of(LLAMA, "tp 4")  # ranks share key/value heads: wk and wv are cut otherwise
    fault_there = partial(mutated, "compose.parallel.lora_parallel:_CutAdapter.forward", old, new)
    report = agreed(pool.run(with_fault, ranks, fault_there, keys))
    assert not report.ok
    failed = {(row.quantity, row.name) for row in report.rows if not row.ok}
    gradients = {name for quantity, name in failed if quantity == "gradient"}
    assert (("loss", "step 1") in failed) == (not named)
    if named:
        assert {".".join(name.split(".")[-3:]) for name in gradients} == named
