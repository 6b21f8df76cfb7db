"""DeepSeek-V3: what its layers promise the plan, and its initial weights."""

import dataclasses
import re

import pytest
import torch
from torch import Tensor, nn

from models.deepseek_v3 import PRESETS, Config, Model
from models.deepseek_v3.model import Attention
from models.layers.rope import rotation
from tests.support.transformers_models import YARN


def test_debug_is_the_default() -> None:
    assert PRESETS["debug"] == Config()


class Watch(nn.Identity):
    """Keeps what goes through it."""

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, input: Tensor) -> Tensor:
        self.seen.append(input)
        return input


@pytest.mark.parametrize("q_rank", [0, 13])
def test_parts_of_the_heads_sum_to_the_whole(q_rank: int) -> None:
    """Parts are as on ranks of tp: rows of some heads in projections to heads, columns in wo."""
    torch.manual_seed(0)
    config = dataclasses.replace(YARN, q_rank=q_rank)
    whole = Attention(config)
    x = torch.randn(2, 9, config.dim)
    cosine, sine = rotation(torch.arange(9)[None], torch.rand(config.rope_dim // 2), torch.float32)
    shared: list[Tensor] = []
    total = torch.zeros_like(x)
    for heads in (slice(0, 1), slice(1, 3)):
        part = Attention(config)
        part.load_state_dict(whole.state_dict())
        for name in ("wq_b" if q_rank else "wq", "wkv_b"):
            linear = part.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            rows = linear.weight.detach().unflatten(0, (config.n_heads, -1))[heads]
            linear.weight = nn.Parameter(rows.flatten(0, 1))
        columns = part.wo.weight.detach().unflatten(1, (config.n_heads, -1))[:, heads]
        part.wo.weight = nn.Parameter(columns.flatten(1))
        part.rope_key = Watch(shared)
        total = total + part(x, cosine, sine)
    torch.testing.assert_close(total, whole(x, cosine, sine))
    assert [key.shape for key in shared] == 2 * [(2, 9, 1, config.rope_dim)]
    torch.testing.assert_close(shared[0], shared[1], rtol=0, atol=0)


def test_initial_weights() -> None:
    config = dataclasses.replace(PRESETS["debug"], n_layers=2)
    model, generator = Model(config), torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        model.init_parameter(name, parameter, generator)
        if parameter.ndim == 1:
            assert name.endswith("norm.weight")
            assert (parameter == 1).all()
            continue
        ends_branch = re.search(r"(attention\.wo|feed_forward\.w2|shared\.w2|experts\.w2)(\.|$)", name)
        std = float(parameter.detach().std())
        assert std == pytest.approx(0.01 if ends_branch else 0.02, rel=0.1), name
