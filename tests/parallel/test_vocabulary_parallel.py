"""A vocabulary that is cut over ranks: embedding, output and loss equal to the whole ones."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import compose.ops.cross_entropy as vocabulary_module
from compose.ops import operators
from compose.ops.batch import IGNORE
from compose.ops.cross_entropy import cross_entropy, log_z, token_losses
from compose.parallel.stream_messages import send_stream
from compose.parallel.vocabulary_parallel import LocalEmbedding, LocalOutput
from tests.support.helpers import gradients_of, refused
from tests.support.mutation import mutated
from tests.support.pool import Pool


class Ends(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 6, padding_idx=vocabulary - 1)
        self.output = nn.Linear(6, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embed(tokens).tanh())


def _differences(vocabulary: int, sequence: bool, sharded: bool) -> list[str]:
    """List differences of the cut model's loss and gradients from the whole's."""
    torch.manual_seed(0)
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    stream = Shard(1) if sequence else Replicate()
    model = Ends(vocabulary)
    tokens = torch.randint(vocabulary, (2, 3 * size))
    tokens[0, :2] = torch.tensor([0, vocabulary - 1])
    targets = torch.randint(vocabulary, (2, 3 * size))
    targets[1, :2] = IGNORE
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    (loss + logits.logsumexp(-1).square().sum()).backward()
    wanted = gradients_of(model)
    model.zero_grad()
    styles: dict[str, Any] = {
        "embed": LocalEmbedding(stream),
        "output": LocalOutput(stream, sharded=sharded),
    }
    parallelize_module(model, mesh, styles)
    result = model(tokens)
    assert isinstance(result, DTensor) == sharded
    assert result.shape == logits.shape
    here = token_losses(result.flatten(0, 1), targets.flatten()).sum()
    (here + log_z(result).square().sum()).backward()
    wrong = [] if torch.allclose(here, loss) else ["loss"]
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())
    for name, gradient in gradients_of(model).items():
        wrong += [] if torch.allclose(gradient, wanted[name], rtol=1e-4, atol=1e-6) else [name]
    return wrong


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize(("ranks", "vocabulary"), [(1, 5), (2, 7), (3, 10), (4, 13)])
def test_equals_the_whole(
    pool: Pool, ranks: int, vocabulary: int, sequence: bool, sharded: bool
) -> None:
    assert pool.run(_differences, ranks, vocabulary, sequence, sharded) == [[]] * ranks


def _as_on_a_gpu(vocabulary: int) -> list[str]:
    plain = mock.patch.object(operators, "_compiled", lambda function: function)
    with plain, mock.patch.object(vocabulary_module, "compiles", return_value=True):
        return _differences(vocabulary, True, True)


@pytest.mark.parametrize(("ranks", "vocabulary"), [(1, 5), (2, 7), (3, 10)])
def test_the_passes_of_a_gpu_equal_the_whole(pool: Pool, ranks: int, vocabulary: int) -> None:
    """Uncompiled."""
    assert pool.run(_as_on_a_gpu, ranks, vocabulary) == [[]] * ranks


def _with_fault(place: str, old: str, new: str) -> list[str]:
    with mutated(place, old, new):
        return _differences(7, False, True)


@pytest.mark.parametrize(
    ("place", "old", "new", "wrong"),
    [
        (
            "compose.parallel.vocabulary_parallel:_RowEmbedding.forward",
            "result.masked_fill(elsewhere[..., None], 0.0)",
            "result",
            {"loss", "embed.weight", "output.weight"},
        ),
        (
            "compose.parallel.vocabulary_parallel:LocalOutput._apply",
            '("keep", "sum")',
            '("keep", "keep")',
            {"embed.weight"},
        ),
        (
            "compose.ops.cross_entropy:_ChunkedCrossEntropy.backward",
            "scale[part] * share[part, None]",
            "scale[part]",
            {"embed.weight", "output.weight"},
        ),
    ],
)
def test_faults_are_seen(pool: Pool, place: str, old: str, new: str, wrong: set[str]) -> None:
    for result in pool.run(_with_fault, 2, place, old, new):
        assert set(result) == wrong


def _messages() -> None:
    """Compare messages and those of gradients with a sum over ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = init_device_mesh("cpu", (size,)).get_group().group_name
    all_of = torch.randn(size, 2, 3 * size, 5, generator=torch.Generator().manual_seed(0))
    total, mine = all_of.sum(0), slice(3 * rank, 3 * rank + 3)
    wanted = {
        "keep": all_of[rank],
        "sum": total,
        "gather": torch.cat(list(all_of), 1),
        "scatter": total[:, mine],
    }
    for there, expected in wanted.items():
        torch.testing.assert_close(send_stream(there, "keep", group, all_of[rank]), expected)  # type: ignore[arg-type]
    for back, expected in wanted.items():
        x = all_of[rank].clone().requires_grad_()
        if back == "gather":  # its input was a part
            there, inner = "scatter", x.repeat(1, size, 1)
            y = send_stream(there, "gather", group, inner)
            (seen,) = torch.autograd.grad(y, inner, all_of[rank])
        elif back == "scatter":
            part = x.detach()[:, :3].clone().requires_grad_()
            y = send_stream("gather", "scatter", group, part)
            (seen,) = torch.autograd.grad(y, part, all_of[rank])
        else:
            y = send_stream("keep", back, group, x)  # type: ignore[arg-type]
            (seen,) = torch.autograd.grad(y, x, all_of[rank])
        torch.testing.assert_close(seen, expected)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_messages(pool: Pool, ranks: int) -> None:
    pool.run(_messages, ranks)


def _of_no_rank() -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    logits = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(1)])
    return token_losses(logits, torch.tensor([0, 6])).sum().item()


def test_a_target_that_no_rank_has_makes_an_infinite_loss(pool: Pool) -> None:
    assert pool.run(_of_no_rank, 2) == [float("inf")] * 2


def _of_no_row(token: int) -> str:
    """The error of a look-up; nothing is sent, since other ranks would wait."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    embedding: Any = parallelize_module(nn.Embedding(7, 4), mesh, LocalEmbedding(Replicate()))
    embedding.send = lambda rows: rows
    try:
        embedding(torch.tensor([[0, token]]))
    except IndexError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("token", "rank"), [(-1, 0), (7, 2)])
def test_a_token_that_no_rank_has_fails(pool: Pool, token: int, rank: int) -> None:
    """Its row was zeros."""
    said = pool.run(_of_no_row, 3, token)
    assert said == ["index out of range in self" if each == rank else "" for each in range(3)]


def _refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    pairs = [
        (nn.Linear(4, 4), LocalEmbedding(Replicate())),
        (nn.Embedding(4, 4, max_norm=1.0), LocalEmbedding(Replicate())),
        (nn.Embedding(4, 4, scale_grad_by_freq=True), LocalEmbedding(Replicate())),
        (nn.Linear(4, 4), LocalOutput(Replicate())),
    ]
    said = [line for pair in pairs for line in refused(parallelize_module, pair[0], mesh, pair[1])]
    logits = DTensor.from_local(torch.zeros(1, 2, 3), mesh, [Shard(1)])  # sharded over L
    return [*said, *refused(cross_entropy, logits, torch.zeros(1, 4).long())]


def test_refusals(pool: Pool) -> None:
    assert pool.run(_refusals, 2)[0] == [
        "LocalEmbedding: Linear(in_features=4, out_features=4, bias=True) is no nn.Embedding",
        "LocalEmbedding: Embedding(4, 4, max_norm=1.0) has options; use RowwiseParallel",
        "LocalEmbedding: Embedding(4, 4, scale_grad_by_freq=True) has options; use RowwiseParallel",
        "LocalOutput: Linear(in_features=4, out_features=4, bias=True) is no nn.Linear without bias",
        "plan.output: a tensor placed (Shard(dim=0),) is neither whole nor sharded over the vocabulary",
    ]
