"""The plan of the diffusion transformer equals one process, and what it cannot do is refused."""

import re

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from compose.build import build
from compose.config.models import batch_on_meta
from compose.config.rules import meshes
from compose.data.datasets import task_of
from compose.errors import ConfigError
from compose.train.step import forward_backward
from models.dit import PRESETS, Config, Model
from models.dit.model import TICKS
from models.layers.attention import AttentionCore
from tests.support.helpers import Keys, agreed, make_config, make_job, prove_case, tier
from tests.support.pool import Pool, make_mesh
from tests.support.small_models import AXES, DIT, keys_of

CASES = {
    "cp 2 tp 2 cp_balance headtail": "slow",
    "pp 2 ds 2 zero 2 pp_schedule Interleaved1F1B model__n_layers 4": "slow",
    "tp 3 sequence true model__n_heads 3 model__hidden_dim 37": "slow",
    "tp 2 sequence false": "slow",
    "cp 2 cp_method ulysses cp_balance none": "slow",
    "cp 4 cp_method allgather": "slow",
    "dr 2 ds 2 zero 0 model__channels 1 model__n_classes 1": "full",
    "ds 2 tp 2 sequence false precision__param bfloat16": "full",
    "ds 2 cp 2 compile__mode block activation_checkpoint__mode selective": "full",
    "cp 2 tp 2 cp_method ulysses model__n_heads 4": "full",
    "cp 3 cp_method ring cp_balance none": "full",
    "pp 2 tp 2 sequence false pp_schedule GPipe activation_checkpoint__mode full": "full",
    "pp 4 pp_schedule LoopedBFS model__n_layers 8": "full",
    "pp 2 cp 2 pp_schedule 1F1B zero 1": "full",
    "ds 2 optimizer__name muon": "full",
    "dr 2 ds 2 comm__gradients int8": "full",
    "ds 2 tp 2 sequence false precision__float8 rowwise model__dim 64 model__hidden_dim 128"
    " model__n_layers 3": "full",
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=tier(slow=t == "slow", full=t == "full")) for c, t in CASES.items()]
)
def test_equals_one_process(pool: Pool, case: str) -> None:
    ranks, keys = keys_of(DIT, case)
    report = agreed(pool.run(prove_case, ranks, keys))
    assert report.ok, str(report)


@pytest.mark.full
@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_every_mesh_of_eight_ranks(pool: Pool, pp: int) -> None:
    """ZeRO stages, cp methods and the halves of ``sequence`` in turn."""
    proved = 0
    shape = "model__n_layers 8 model__n_heads 8 model__dim 32 model__image_size 8 train__seq_len 16"
    for degrees in meshes(8):
        if degrees["pp"] != pp:
            continue
        case = " ".join(f"{short} {degrees[axis]}" for short, axis in AXES.items())
        case += f" zero {proved % 4} cp_method {('ring', 'allgather', 'ulysses')[proved % 3]}"
        case += f" sequence {('true', 'false')[proved % 2]} {shape}"
        count, keys = keys_of(DIT, case)
        report = agreed(pool.run(prove_case, count, keys))
        assert report.ok, f"{case}\n{report}"
        proved += 1
    assert proved == {1: 20, 2: 10, 4: 4, 8: 1}[pp]


def _accumulated(micro_batches: list[int]) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradients of one batch by micro-batches of several sizes, with targets left out."""
    found = []
    for size in micro_batches:
        job = make_job(1, **(DIT | {"train__micro_batch": size, "train__global_batch": 4}))
        composition = build(job, make_mesh(job.degrees), torch.device("cpu"))
        for parameter in composition.model.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.1, torch.Generator().manual_seed(0))
        batch = task_of(job.config).random_batch(job.config, 4, 0)
        loss = forward_backward(
            composition,
            batch,
            micro_batch=size,
            loss_function=task_of(job.config).loss(job.config),
        )
        gradients = {n: p.grad for n, p in composition.model.named_parameters() if p.grad is not None}
        found.append((loss.item(), gradients))
    return found


def test_accumulation_changes_nothing(pool: Pool) -> None:
    (whole, gradients), *others = pool.run(_accumulated, 1, [4, 2, 1])[0]
    assert len(gradients) == len(list(Model(make_config(1, **DIT).model.config).parameters()))
    for loss, found in others:
        assert loss == pytest.approx(whole, rel=1e-6)
        for name, gradient in gradients.items():
            assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


class PlainCore(torch.nn.Module):
    """Attention of all patches to all, by matrix products that torch counts."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: None) -> Tensor:
        scores = torch.einsum("blhk,bshk->bhls", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("bhls,bshv->blhv", scores.softmax(-1), v)


def _plain(config: Config) -> Model:
    torch.manual_seed(0)
    model = Model(config)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, AttentionCore):
                setattr(module, name, PlainCore())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model


def test_attention_sees_all_patches() -> None:
    config = Config(image_size=6, dim=24, n_heads=2, hidden_dim=36, n_layers=2)
    plain, model = _plain(config), Model(config)
    model.load_state_dict(plain.state_dict())
    patches, times = torch.randn(2, 9, 12), torch.tensor([5, TICKS - 1])
    labels = torch.tensor([0, config.n_classes])
    torch.testing.assert_close(model(patches, times, labels), plain(patches, times, labels))


def test_flops_equal_what_torch_counts() -> None:
    config = Config(image_size=12, dim=48, n_heads=3, hidden_dim=100, n_layers=3)
    model, batch = _plain(config), 2
    patches = torch.randn(batch, config.patches, config.patch_dim)
    times, labels = torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(patches, times, labels).sum().backward()
    counted = counter.get_total_flops() / (batch * config.patches)
    assert config.flops_per_token(config.patches) == pytest.approx(counted, rel=0.02)


def test_published_sizes() -> None:
    """The parameters of table 1 of the paper, but for the time's and class' embedding in each layer
    and the biases."""
    published = {"s_2": 33e6, "b_2": 130e6, "l_2": 458e6, "xl_2": 675e6}
    for name, count in published.items():
        config = PRESETS[name]
        with torch.device("meta"):
            model = Model(config)
        own = sum(
            p.numel()
            for n, p in model.named_parameters()
            if ".condition." in n and "modulation" not in n and not n.startswith("layers.0.")
        )
        rest = sum(p.numel() for p in model.parameters()) - own
        # Theirs also predict a variance: twice the width of the last projection.
        assert rest == pytest.approx(count, rel=0.01), name
        assert config.patches == 256


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"patch_size": 3}, "patch_size: 3 does not divide image_size 32"),
        ({"dim": 30}, "dim: 30 is not a multiple of 4, which the positions' sines and cosines need"),
        ({"n_heads": 3}, "n_heads: 3 does not divide dim 128"),
        ({"n_classes": 0}, "n_classes: 0 should be at least 1, below 2^31"),
        ({"n_layers": 0}, "n_layers: 0 should be at least 1, below 2^12"),
        ({"label_dropout": 1.5}, "label_dropout: 1.5 should be from 0 to 1"),
        ({"norm_eps": 0.0}, "norm_eps: 0.0 should be above 0"),
    ],
)
def test_config_errors(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}$"):
        Config(**keys)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "keys", "message"),
    [
        (
            1,
            {"train__seq_len": 10},
            "train.seq_len: 10 should be 9, the patches of an image of model.image_size 6 with"
            " model.patch_size 2",
        ),
        (
            1,
            {"train__z_loss": 0.1},
            "train.z_loss: 0.1 is of a loss over a vocabulary, which dit does not have; use 0",
        ),
        (
            2,
            {"parallel__ep": 2},
            "plan.expert: the model's plan has nothing under it; add it, or use parallel.ep = 1",
        ),
        (
            2,
            {"parallel__tp": 2, "parallel__dp_shard": 1},
            "train.seq_len: 9 is not a multiple of parallel.tp 2, which parallel.sequence needs;"
            " nearest: 8, or parallel.sequence = false",
        ),
        (
            2,
            {"parallel__pp": 2, "parallel__dp_shard": 1, "parallel__pp_schedule": "ZBVZeroBubble"}
            | {"model__n_layers": 4},
            "parallel.pp_schedule: ZBVZeroBubble runs backward in two parts, which PyTorch cannot do"
            " where a weight enters the stream at several places, as plan.pipeline says; use"
            ' "Interleaved1F1B"',
        ),
    ],
)
def test_what_is_refused(ranks: int, keys: Keys, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_job(ranks, **(DIT | keys))
    assert caught.value.problems == [message]


def test_loss_chunks_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        make_job(1, **(DIT | {"train__loss_chunk": 8}))
    assert caught.value.problems[0] == (
        "train.loss_chunk: 8 is of a loss over a vocabulary, which dit does not have; use 0"
    )


def test_the_batch_on_meta_is_as_the_datas() -> None:
    config = make_config(1, **DIT)
    batch = batch_on_meta(task_of(config), config, samples=3)
    real = task_of(config).open("shapes", config).read(0)
    assert {n: (v.dtype, v.shape[1:]) for n, v in batch.items()} == {
        n: (v.dtype, v.shape) for n, v in real.items()
    }
    assert all(value.is_meta and len(value) == 3 for value in batch.values())
