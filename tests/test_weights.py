"""Initial weights: bitwise the same on every mesh, each from its own name."""

import hashlib

import pytest
import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn

from compose import Plan, init_weights
from compose.build import build
from compose.memory.lora import Lora, adapt
from compose.memory.quantized import Base
from compose.parallel.lora_parallel import Adapter
from compose.proof.comparison import whole
from compose.weights import named_generator
from models.llama import PRESETS, Model
from tests.support.helpers import make_job, parallel, ranks_in, refusal, tier
from tests.support.meshes import MESHES, name_of
from tests.support.pool import Pool, make_mesh


def _fingerprint(keys: dict[str, object]) -> dict[str, str]:
    """SHA-256 of every whole parameter, as this rank sees it."""
    job = make_job(dist.get_world_size(), **keys)
    composition = build(job, make_mesh(job.degrees), torch.device("cpu"))
    return {
        name: hashlib.sha256(whole(p).numpy().tobytes()).hexdigest()
        for name, p in composition.named_parameters()
    }


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[bool, dict[str, str]]:
    """By whether embeddings are tied."""
    return {
        tied: pool.run(_fingerprint, 1, {"model__tie_embeddings": tied})[0] for tied in (True, False)
    }


# Stages 1 to 3 place parameters alike, and every proof compares initial weights too.
PLACEMENTS = [mesh for mesh in MESHES if mesh.get("zero", 3) in (0, 3) and mesh.get("loss", True)]
PLACEMENTS += [{"dp_shard": 4, "tp": 2}, {"tp": 8}]


# Each mesh comes once below the full tier, in turn with tied embeddings and without. Those of two ranks
# are left to proof/test_verify.py, which compares the same weights bitwise on each rank.
@pytest.mark.parametrize(
    ("mesh", "tied"),
    [
        pytest.param(
            mesh,
            tied,
            marks=tier(slow=i % 2 == 1, full=tied != (i % 4 < 2)),
            id=f"{name_of(mesh)}-{'tied' if tied else 'untied'}",
        )
        for i, mesh in enumerate(PLACEMENTS)
        if ranks_in(parallel(**mesh)) > 2
        for tied in (True, False)
    ],
)
def test_bitwise_equal(
    pool: Pool, alone: dict[bool, dict[str, str]], mesh: dict[str, int | bool], tied: bool
) -> None:
    keys = parallel(**mesh) | {"model__tie_embeddings": tied, "train__global_batch": 16}
    ranks = ranks_in(keys)
    assert pool.run(_fingerprint, ranks, keys) == [alone[tied]] * ranks


def test_seed_and_name_choose_the_numbers(pool: Pool, alone: dict[bool, dict[str, str]]) -> None:
    other = pool.run(_fingerprint, 1, {"train__seed": 1})[0]
    matrices = [name for name in other if "norm" not in name]
    assert not any(other[name] == alone[False][name] for name in matrices)
    assert len({alone[False][name] for name in matrices}) == len(matrices)
    first, again = (torch.randn(3, generator=named_generator(0, "a")) for _ in range(2))
    assert torch.equal(first, again)


def test_scale_of_llama_weights() -> None:
    with torch.device("meta"):
        model = Model(PRESETS["debug"])
    init_weights(model, model.init_parameter, seed=0, device=torch.device("cpu"))
    for key, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 1).all()
        else:
            scale = 0.02 / 10**0.5 if key.endswith(("wo.weight", "w2.weight")) else 0.02
            assert float(parameter.detach().std()) == pytest.approx(scale, rel=0.05)


class Linears(nn.Module):
    """A model of one's own, whose init knows no adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())

    def init_parameter(self, name: str, tensor: Tensor, generator: Generator) -> None:
        assert ".lora." not in name
        tensor.normal_(generator=generator)


@pytest.mark.parametrize("base", ["full", "int8", "nf4"])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_adapters_change_nothing_at_first(
    monkeypatch: pytest.MonkeyPatch, device: str, base: Base
) -> None:
    """In a loop of one's own ``init_weights`` fills a model on meta, and ``adapt`` one with values."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    with torch.device(device):
        model = Linears()
    try:
        torch.use_deterministic_algorithms(True)  # memory without values has NaN
        adapt(model, Plan(), Lora(rank=3, targets="all-linear", dora=True, base=base))
    finally:
        torch.use_deterministic_algorithms(False)
    if device == "meta":
        init_weights(model, model.init_parameter, 0, torch.device("cpu"))
    x = torch.randn(5, 64)
    with_adapters = model(x)
    first = set[float]()
    for layer in (model.up, model.down):
        adapter = layer.get_submodule("lora")
        assert isinstance(adapter, Adapter)
        assert 0.9 < float(adapter.A.detach().abs().max()) * layer.in_features**0.5 <= 1
        first.add(float(adapter.A.detach()[0, 0]))
        adapter.off = True
    assert len(first) == 2
    torch.testing.assert_close(with_adapters, model(x), rtol=1e-5, atol=1e-5)


class Buffered(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("table", torch.arange(4.0, device=device))


def test_buffers_keep_their_values_or_are_refused() -> None:
    with torch.device("meta"):
        model, lost = Buffered("cpu"), Buffered("meta")
    fill = lambda name, tensor, generator: tensor.fill_(2.0)  # noqa: E731
    init_weights(model, fill, seed=0, device=torch.device("cpu"))
    assert model.get_buffer("table").tolist() == [0, 1, 2, 3]
    assert model.weight.tolist() == [2, 2, 2]
    assert (
        refusal(init_weights, lost, fill, seed=0, device=torch.device("cpu"))
        == "buffer table is on meta: give it a device where it is made"
    )
