"""LoRA: a composition with adapters equals one process, saves adapters alone, and refuses the rest."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from compose.build import build, build_optimizer
from compose.checkpoint.local_shards import named_tensors
from compose.config.rules import meshes
from compose.errors import ConfigError
from compose.optim.optimizers import make_state
from compose.parallel import lora_parallel
from compose.proof.report import Report
from tests.support.checkpoints import refusal, shards, train_on
from tests.support.helpers import Keys, agreed, make_job, parallel, prove_case, tier
from tests.support.pool import Pool, make_mesh
from tests.support.small_models import ALL, ATTENTION, AXES, DEEPSEEK, MIXTRAL, QWEN, keys_of, lora
from tests.support.training import keys_for

# Odd sizes: a hidden width and a rank that ranks do not divide, and key/value heads that they share.
LLAMA: Keys = {
    "model__dim": 48,
    "model__n_heads": 12,
    "model__n_kv_heads": 2,
    "model__hidden_dim": 90,
} | lora()
FLOAT8: Keys = {"model__dim": 128, "model__hidden_dim": 192} | lora()
CASES = {
    "ds 2 cp 2 tp 2 train__seq_len 18": "slow",
    "tp 4 zero 2 sequence false precision__param bfloat16": "slow",
    "pp 2 ds 2 pp_schedule ZBVZeroBubble model__n_layers 4 zero 1": "slow",
    "dr 2 zero 0 model__tie_embeddings true": "full",
    "dr 2 ds 2 model__lora__rank 1 optimizer__name muon": "slow",
    "ds 4 zero 2 comm__weights int8": "slow",  # gradients of so few elements are never coded
    "ds 2 tp 2 comm__activations int8": "full",
    "ds 2 tp 2 compile__mode block": "full",
    "ds 2 parallel__offload cpu activation_checkpoint__mode full": "full",
    "ds 2 optimizer__offload cpu activation_checkpoint__offload true": "full",
    "ds 4 zero3_reshard 2 precision__param bfloat16": "full",
    "tp 2 precision__param float16 activation_checkpoint__mode selective": "full",
    "ds 2 precision__param bfloat16 precision__master bfloat16": "full",
    "cp 2 tp 2 cp_method ulysses model__n_kv_heads 12": "full",
}
EXPERTS = {
    "ds 2 tp 2 ep 2": QWEN | lora(targets=ATTENTION),
    "cp 2 tp 2 ep 4": DEEPSEEK
    | {"model__bias_rate": 0.0}
    | lora(targets="['layers.*.attention.w*','layers.*.moe.shared.w*','layers.*.feed_forward.w[12]']"),
    "ds 2 ep 2": MIXTRAL | lora(targets=ATTENTION),
}


def proved(pool: Pool, model: Keys, case: str) -> None:
    ranks, keys = keys_of(model, case)
    report = agreed(pool.run(prove_case, ranks, keys))
    assert report.ok, f"{case}\n{report}"
    text = str(report)
    assert "not proved" not in text
    frozen = [row for row in report.rows if row.quantity.endswith("frozen weight")]
    assert frozen
    assert not any(
        row.quantity.endswith("gradient") and ".lora." not in row.name for row in report.rows
    )


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=tier(slow=t == "slow", full=t == "full")) for c, t in CASES.items()]
)
def test_equals_one_process(pool: Pool, case: str) -> None:
    proved(pool, LLAMA, case)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("ds 2 tp 2 precision__float8 tensorwise", marks=pytest.mark.slow),
        pytest.param(
            "ds 2 tp 2 precision__float8 rowwise precision__param bfloat16", marks=pytest.mark.full
        ),
    ],
)
def test_a_base_in_float8(pool: Pool, case: str) -> None:
    proved(pool, FLOAT8, case)


@pytest.mark.full
@pytest.mark.parametrize("case", EXPERTS)
def test_models_with_experts(pool: Pool, case: str) -> None:
    proved(pool, EXPERTS[case], case)


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
        proved(pool, LLAMA | {"model__dim": 64, "model__n_heads": 8}, case)
        count += 1
    assert count == {1: 20, 2: 10, 4: 4}[pp]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes for t in tensors)  # type: ignore[attr-defined]


def _held(keys: Keys) -> tuple[int, int, dict[str, int]]:
    """Bytes of weights and of the optimizer on this rank, and the elements of what is saved."""
    job = make_job(dist.get_world_size(), **keys)
    composition = build(job, make_mesh(job.degrees), torch.device("cpu"))
    optimizer = build_optimizer(composition, job)
    make_state(optimizer)
    states = [v for state in optimizer.state.values() for v in state.values() if v.ndim]
    saved = {name: copies[0].numel() for name, copies in named_tensors(composition, optimizer).items()}
    return _bytes([p for _, p in composition.named_parameters()]), _bytes(states), saved


def test_memory_is_that_of_adapters(pool: Pool) -> None:
    """Frozen weights in two bytes, adapters in four, and two running means for adapters alone."""
    keys: Keys = {"precision__param": "bfloat16", "parallel__dp_shard": 2} | lora(4)
    job = make_job(2, **keys)
    adapters = sum(p.numel() for p in job.model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in job.model.parameters() if not p.requires_grad)
    found = pool.run(_held, 2, keys)
    assert sum(weights for weights, _, _ in found) == 4 * adapters + 2 * frozen
    assert sum(state for _, state, _ in found) == 8 * adapters
    saved = {name: count for name, count in found[0][2].items() if not name.endswith(".step")}
    assert all(".lora." in name for name in saved)
    assert sum(saved.values()) == 3 * adapters


@pytest.mark.slow
def test_resumes_bitwise_on_another_mesh(pool: Pool, tmp_path: Path) -> None:
    """Two steps and two more on the same mesh leave the bits of four; on another mesh, the same run."""
    model = lora() | {"optimizer__warmup": 0}
    mesh: Keys = {"parallel__dp_shard": 2}
    whole = train_on(pool, tmp_path / "whole", model, mesh, 4)
    train_on(pool, tmp_path / "parts", model, mesh, 2)
    parts = train_on(pool, tmp_path / "parts", model, mesh, 4)
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
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


def _adapters(keys: Keys) -> dict[str, Tensor]:
    job = make_job(dist.get_world_size(), **keys)
    model = build(job, make_mesh(job.degrees), torch.device("cpu")).model
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
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
            ' ["layers.*.attention.w*"]',
        ),
        (
            lora(targets="['output']"),
            "model.lora.targets: output is the projection onto the vocabulary, which the loss may"
            " compute itself; name layers before it",
        ),
        (lora(0), "model.lora.rank: 0 adapts nothing; use at least 1, or no [model.lora]"),
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
    ],
)
def test_refused(keys: Keys, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_job(2 if "parallel__pp" in keys else 1, **keys)
    assert caught.value.problems == [message]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rank", -1, "command line: model.lora.rank: -1 should be greater than or equal to 0"),
        ("rank", "2.5", "command line: model.lora.rank: expected int, got 2.5"),
        ("alpha", "x", 'command line: model.lora.alpha: expected float, got "x"'),
        ("rang", 4, "command line: model.lora.rang: unknown key; did you mean model.lora.rank?"),
    ],
)
def test_wrong_keys(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_job(1, **{f"model__lora__{key}": value})
    assert caught.value.problems == [message]


def test_one_table_written_three_ways(tmp_path: Path) -> None:
    from compose.config.toml import dump, load

    file, table = tmp_path / "run.toml", "rank = 4, alpha = 32, targets = ['a']"
    found = []
    for text in (f"[model]\nlora = {{{table}}}\n", "[model.lora]\n" + table.replace(", ", "\n")):
        file.write_text(text)
        found.append(load(str(file), [("model.lora.rank", "8")]).model.lora)
    found.append(load(str(file), [("model.lora", "{rank = 8}")]).model.lora)
    assert found[0] == found[1] == found[2]
    assert (found[0].rank, found[0].scale) == (8, 4.0)
    config = load(str(file))
    again = tmp_path / "again.toml"
    again.write_text(dump(config))
    assert load(str(again)).model == config.model


@pytest.mark.slow
def test_checkpoints_of_others_are_refused(pool: Pool, tmp_path: Path) -> None:
    """Of another rank, of other targets, of other frozen weights, and of a whole model."""
    folder, mesh = tmp_path / "run", parallel(dp_shard=1)
    train_on(pool, folder, lora(targets=ATTENTION), mesh, 2)
    saved = folder / "checkpoints/step-00000002"

    def why(keys: Keys, where: Path = folder) -> list[str]:
        return pool.run(refusal, 1, keys_for(where, **keys, train__seq_len=16))[0]

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


def _prove_broken(keys: Keys, fault: str) -> Report:
    """On every rank: the proof while adapters do one thing wrong."""

    def adds_all(self: Any, x: Tensor) -> Tensor:
        """A row-parallel layer: every rank adds the whole output, before the layer's sum."""
        if self.cut != "columns":
            return forward(self, x)
        h = DTensor.from_local(
            F.linear(x, self.A.to_local()), self.A.device_mesh, [Partial()]
        ).full_tensor()
        return self.scale * F.linear(h, self.B.to_local(grad_placements=[Partial()]))

    def unscaled(self: Any, x: Tensor) -> Tensor:
        return forward(self, x) / self.scale

    places, forward = lora_parallel._PLACES, lora_parallel._CutAdapter.forward
    wrong: dict[str, Any] = {
        "A not summed": mock.patch.dict(places, rows=(places["rows"][0], False, *places["rows"][2:])),
        "B not summed": mock.patch.dict(places, columns=(*places["columns"][:3], False)),
        "added on every rank": mock.patch.object(lora_parallel._CutAdapter, "forward", adds_all),
        "no scale": mock.patch.object(lora_parallel._CutAdapter, "forward", unscaled),
    }
    with wrong[fault]:
        return prove_case(keys)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("A not summed", {"wq.lora.A", "w1.lora.A", "w3.lora.A"}),
        pytest.param("B not summed", {"wo.lora.B", "w2.lora.B"}, marks=pytest.mark.slow),
        pytest.param("added on every rank", None, marks=pytest.mark.slow),
        pytest.param("no scale", None, marks=pytest.mark.slow),
    ],
)
def test_faults_are_named(pool: Pool, fault: str, named: set[str] | None) -> None:
    """A sum that is missing shows in the gradients of those parameters alone; the loss is right."""
    ranks, keys = keys_of(LLAMA, "tp 4")  # ranks share key/value heads: wk and wv are cut otherwise
    report = agreed(pool.run(_prove_broken, ranks, keys, fault))
    assert not report.ok
    failed = {(row.quantity, row.name) for row in report.rows if not row.ok}
    gradients = {name for quantity, name in failed if quantity == "gradient"}
    if named is None:
        assert ("loss", "step 1") in failed
        return
    assert ("loss", "step 1") not in failed
    assert {".".join(name.split(".")[-3:]) for name in gradients} == named
