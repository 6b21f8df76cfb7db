"""The diffusion transformer: its batches, sizes and FLOPs, and what it cannot do is refused."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from compose.build import build
from compose.config.models import batch_on_meta
from compose.data.datasets import task_of
from compose.train.step import forward_backward
from models.dit import PRESETS, Config, Model
from models.dit.model import TICKS
from tests.support.helpers import Keys, make_config, make_job, refused
from tests.support.pool import Pool, make_mesh
from tests.support.small_models import DIT
from tests.support.transformers_models import attend_row_by_row


def _accumulated(micro_batches: list[int]) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradients of one batch by micro-batches of several sizes, with targets left out."""
    results = []
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
        results.append((loss.item(), gradients))
    return results


def test_accumulation_changes_nothing(pool: Pool) -> None:
    (whole, gradients), *others = pool.run(_accumulated, 1, [4, 2, 1])[0]
    assert len(gradients) == len(list(Model(make_config(1, **DIT).model.config).parameters()))
    for loss, result in others:
        assert loss == pytest.approx(whole, rel=1e-6)
        for name, gradient in gradients.items():
            assert (result[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def _plain(config: Config) -> Model:
    torch.manual_seed(0)
    model = Model(config)
    attend_row_by_row(model)
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
            1,
            {"train__loss_chunk": 8},
            "train.loss_chunk: 8 is of a loss over a vocabulary, which dit does not have; use 0",
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
    problems = refused(make_job, ranks, **(DIT | keys))
    assert problems[0] == message
    assert len(problems) == 1 + ("train__loss_chunk" in keys)


def test_the_batch_on_meta_is_as_the_datas() -> None:
    config = make_config(1, **DIT)
    batch = batch_on_meta(task_of(config), config, samples=3)
    real = task_of(config).open("shapes", config).read(0)
    assert {n: (v.dtype, v.shape[1:]) for n, v in batch.items()} == {
        n: (v.dtype, v.shape) for n, v in real.items()
    }
    assert all(value.is_meta and len(value) == 3 for value in batch.values())
