"""generate with a cache of keys and values: the tokens and logits of the whole text, and less work."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from compose import AttentionOptions, ConfigError, Parallel, Plan, apply
from compose.build import build
from compose.commands.cache import KeyValues, attention_cores, next_logits, obstacle, open_cache
from compose.commands.generate import Sampling, sample
from compose.composition.state import Composition
from compose.operators.attention import attention
from models.layers.attention import AttentionCore
from tests.experts import DEEPSEEK, MIXTRAL, QWEN
from tests.helpers import Keys, make_job, parallel, tier
from tests.pool import Pool, make_mesh

CPU = torch.device("cpu")
TEXT = [(i * i * 7 + 3) % 250 for i in range(40)]
NEW = 12
LLAMA: Keys = {"model__n_layers": 2}
WINDOW: Keys = LLAMA | {"model__window": 7, "model__sinks": True}
QWEN_DENSE: Keys = QWEN | {"model__n_layers": 2, "model__n_experts": 0, "model__hidden_dim": 48}
QWEN_EXPERTS: Keys = QWEN | {"model__n_layers": 2, "model__tie_embeddings": True}
DEEP: Keys = DEEPSEEK | {"model__n_layers": 2, "model__rope_factor": 4.0}
MIX: Keys = MIXTRAL | {"model__n_layers": 2}
MODELS = {
    "llama": LLAMA,
    "window and sinks": WINDOW,
    "qwen3": QWEN_DENSE,
    "qwen3 experts": QWEN_EXPERTS,
    "deepseek_v3": DEEP,
    "mixtral": MIX,
}


def composed(keys: Keys, world_size: int = 1) -> Composition:
    """A model that was not trained, but is sure of what it says."""
    job = make_job(world_size, **keys)
    composition = build(job, make_mesh(job.degrees), CPU)
    with torch.no_grad():
        for name, parameter in composition.model.named_parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1)
            if "sinks" in name:
                parameter.add_(1.0)
    return composition


def _compared(
    keys: Keys, ranks: int, lengths: Sequence[int], dtype: torch.dtype = torch.float32
) -> list[tuple[float, list[int], list[int]]]:
    """Of prompts of so many tokens, and then each more: the greatest error of logits, and the likeliest
    next tokens, of the whole text and with a cache."""
    composition, found = composed(keys, ranks), []
    composition.model.to(dtype)
    for length in lengths:
        cache = open_cache(composition, "on")
        assert cache is not None
        wholes, others, worst = [], [], 0.0
        for end in range(length, length + NEW):
            whole = next_logits(composition, TEXT[:end])
            cached = next_logits(composition, TEXT[:end], cache)
            assert whole is not None
            assert cached is not None
            assert cached.dtype == whole.dtype
            worst = max(worst, float((cached - whole).norm() / whole.norm()))
            wholes.append(int(whole.argmax()))
            others.append(int(cached.argmax()))
        found.append((worst, wholes, others))
    return found


def case(name: str, ranks: int, lengths: Sequence[int], **axes: Any) -> Any:
    slow = ranks == 4 or (ranks == 2 and name in ("llama", "qwen3", "mixtral"))
    words = " ".join(f"{axis} {degree}" for axis, degree in axes.items()) or "one process"
    keys = MODELS[name] | parallel(**axes)
    return pytest.param(keys, ranks, lengths, id=f"{name}, {words}", marks=tier(slow=slow))


CASES = [
    *[case(name, 1, (1, 20)) for name in MODELS],
    # tp pads a text of odd length, and each token alone.
    *[case(name, 2, (1, 9, 16), tp=2) for name in MODELS],
    case("window and sinks", 2, (2, 19), dp_shard=2),
    case("qwen3 experts", 2, (3,), dp_shard=2, ep=2),
    case("deepseek_v3", 2, (3,), tp=2, sequence=False),
    case("mixtral", 2, (3, 6), tp=2, ep=2, sequence=False, loss=False),
    # Two ranks share a head of keys and values.
    case("window and sinks", 4, (1, 9, 10), tp=4),
    case("qwen3", 4, (1, 9, 10), tp=4),
    case("mixtral", 4, (1, 9, 10), tp=4, ep=2),
    case("deepseek_v3", 4, (5,), tp=2, dp_shard=2, ep=2),
]


@pytest.mark.parametrize(("keys", "ranks", "lengths"), CASES)
def test_the_same_as_the_whole_text(
    pool: Pool, keys: Keys, ranks: int, lengths: Sequence[int]
) -> None:
    for found in pool.run(_compared, ranks, keys, ranks, lengths):
        for worst, whole, cached in found:
            assert worst < 1e-5
            assert cached == whole
            assert len(set(whole)) > 2, "nothing to go wrong"


@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS)
def test_the_same_in_float64(pool: Pool, keys: Keys) -> None:
    ((worst, whole, cached),) = pool.run(_compared, 1, keys, 1, [11], torch.float64)[0]
    assert worst < 1e-12
    assert cached == whole
