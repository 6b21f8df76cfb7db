"""generate with a cache of keys and values: the tokens and logits of the whole text, and less work."""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from compose import AttentionOptions, Documents, Parallel, Plan, apply
from compose.build import build
from compose.composition import Composition
from compose.data.tokenizer import ByteTokenizer
from compose.ops.attention import attention
from compose.train.sampling import (
    Cache,
    KeyValues,
    Sampling,
    next_logits,
    nucleus,
    obstacle,
    open_cache,
    sample,
    sample_token,
    text_of,
)
from models.layers.attention import AttentionCore
from tests.support.helpers import Keys, keys_in, make_job, parallel, printed, refusal, tier
from tests.support.pool import Pool, make_mesh
from tests.support.small_models import DEEPSEEK, MIXTRAL, QWEN

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


# In the default tier on two ranks.
QUICK = ("window and sinks",)


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
    """Return, for prompts of so many tokens, the greatest error of logits with a cache, and the
    likeliest next tokens without and with it."""
    composition, result = composed(keys, ranks), []
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
        result.append((worst, wholes, others))
    return result


def case(name: str, ranks: int, lengths: Sequence[int], **axes: Any) -> Any:
    quick = ranks == 1 or (ranks == 2 and name in QUICK and "sequence" not in axes and "ep" not in axes)
    words = " ".join(f"{axis} {degree}" for axis, degree in axes.items()) or "one process"
    keys = MODELS[name] | parallel(**axes)
    return pytest.param(keys, ranks, lengths, id=f"{name}, {words}", marks=tier(slow=not quick))


CASES = [
    *[case(name, 1, (1, 20)) for name in MODELS],
    # tp pads a text of odd length, and each token alone.
    *[case(name, 2, (1, 9), tp=2) for name in MODELS],
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
def test_the_same_as_the_whole_text(pool: Pool, keys: Keys, ranks: int, lengths: Sequence[int]) -> None:
    for result in pool.run(_compared, ranks, keys, ranks, lengths):
        for worst, whole, cached in result:
            assert worst < 1e-5
            assert cached == whole
            assert len(set(whole)) > 2, "nothing to go wrong"


@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS)
def test_the_same_in_float64(pool: Pool, keys: Keys) -> None:
    ((worst, whole, cached),) = pool.run(_compared, 1, keys, 1, [11], torch.float64)[0]
    assert worst < 1e-12
    assert cached == whole


def _sampled(keys: Keys, ranks: int, sampling: Sampling) -> dict[str, list[int]]:
    composition = composed(keys, ranks)
    before = {name: vars(module).copy() for name, module in composition.model.named_modules()}
    results = {
        how: list(sample(composition, TEXT[:5], replace(sampling, cache=how))) for how in ("on", "off")
    }
    after = {name: vars(module) for name, module in composition.model.named_modules()}
    assert [vars.keys() for vars in before.values()] == [vars.keys() for vars in after.values()]
    return results


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_the_same_text(pool: Pool, temperature: float) -> None:
    """On tp 2, where each token is padded; the model is left as it was."""
    sampling = Sampling(max_tokens=25, temperature=temperature, top_p=0.9, seed=3)
    for result in pool.run(_sampled, 2, WINDOW | parallel(tp=2), 2, sampling):
        assert result["on"] == result["off"]
        assert len(set(result["on"])) > 2, "nothing to go wrong"


def _half(keys: Keys) -> tuple[float, float]:
    """The errors of bfloat16's logits against float32's: of the whole text, and with a cache."""
    composition = composed(keys)

    def logits(cache: Cache | None) -> Tensor:
        results = [next_logits(composition, TEXT[:end], cache) for end in range(20, 20 + NEW)]
        return torch.stack([row for row in results if row is not None]).float()

    exact = logits(None)
    composition.model.to(torch.bfloat16)
    whole, cached = logits(None), logits(open_cache(composition, "on"))
    norm = float(exact.norm())
    return float((whole - exact).norm()) / norm, float((cached - exact).norm()) / norm


@pytest.mark.parametrize("name", ["llama", "window and sinks", "qwen3", "deepseek_v3"])
def test_bfloat16(pool: Pool, name: str) -> None:
    """Kernels round one row in another way than many; neither is further from float32."""
    of_whole, of_cached = pool.run(_half, 1, MODELS[name])[0]
    assert of_whole / 2 < of_cached < 2 * of_whole


def _work(keys: Keys) -> tuple[list[int], dict[int, int], list[int]]:
    """Return, over 200 tokens, the lengths that layers see, FLOPs of some, and room for keys."""
    composition = composed(keys)
    cache = open_cache(composition, "on")
    assert cache is not None
    lengths: set[int] = set()
    flops = {}
    text = [i * 11 % 250 for i in range(200)]
    next_logits(composition, text[:3], cache)
    layers = composition.model.get_submodule("layers").children()
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs: lengths.add(inputs[0].shape[1]))
        for layer in layers
    ]
    for length in range(4, 201):
        # Also where the room is doubled.
        counted = length in (20, 30, 31, 63, 64, 65, 66, 199, 200)
        with FlopCounterMode(display=False) if counted else nullcontext() as counter:
            next_logits(composition, text[:length], cache)
        if counter:
            flops[length] = counter.get_total_flops()
    for hook in hooks:
        hook.remove()
    assert all(kept.length == 200 for kept in cache.of.values())
    return sorted(lengths), flops, [kept.kept[0].shape[1] for kept in cache.of.values()]


@pytest.mark.parametrize(
    ("keys", "width"),
    # Heads times the widths of a key and a value, in each of 2 layers.
    [(LLAMA, 8 * (8 + 8)), (WINDOW, 0), (QWEN_EXPERTS, 4 * (8 + 8)), (DEEP, 4 * (24 + 16))],
    ids=["llama", "window", "qwen3 experts", "deepseek_v3"],
)
def test_the_work_for_a_token_is_attentions(pool: Pool, keys: Keys, width: int) -> None:
    """Layers see one token, and a key more costs one product of each head with it and its value."""
    lengths, flops, held = pool.run(_work, 1, keys)[0]
    assert lengths == [1]
    assert held == [200 if width else 7] * 2
    assert len(flops) == 9
    for length in flops:
        assert flops[length] - flops[20] == 2 * 2 * width * (length - 20), length


@pytest.mark.parametrize("window", [None, 1, 5, 8, 100])
def test_keys_and_values(window: int | None) -> None:
    """A cache gives what one attention does; its room doubles, up to the window."""
    options = AttentionOptions(window=window, softcap=2.0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 40, heads, width, generator=generator)
        for heads, width in ((4, 6), (2, 6), (2, 3))
    )
    sinks = torch.randn(4, generator=generator)
    whole, _ = attention(q, k, v, None, sinks, options)
    for first in (1, 4, 5, 6, 8, 11, 39):
        cache, rooms = KeyValues(options), set()
        cache.append(k[:, :first], v[:, :first])
        for i in range(first, 40):
            cache.append(k[:, i : i + 1], v[:, i : i + 1])
            result = cache.query(q[:, i : i + 1], sinks)
            assert (result - whole[:, i : i + 1]).norm() < 1e-6 * whole[:, i].norm(), i
            assert cache.kept[0].shape[1] == min(i + 1, window or 40)
            rooms.add(cache.kept[0].untyped_storage().nbytes() // (2 * 2 * 6 * 4))
        most = min(64, window or 64)
        assert max(rooms) == most
        assert all(room == most or room.bit_count() == 1 for room in rooms)


class Own(nn.Module):
    """A model of the user's own, whose attention does not run as a cache needs it, or does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding, self.output = nn.Embedding(11, 8), nn.Linear(8, 11)
        options = AttentionOptions(causal=kind != "bidirectional", softcap=3.0)
        if kind != "coreless":
            self.core = Biased(options) if kind == "biased" else AttentionCore(options)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens) + positions[..., None].to(self.output.weight).cos()
        if self.kind == "registers":
            x = torch.cat([torch.ones_like(x[:, :1]), x], 1)
        if self.kind == "shift":  # a twentieth of the token before
            x = x + 0.05 * F.pad(x, (0, 0, 1, -1))
        if self.kind == "mean":
            x = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        if self.kind in ("coreless", "both"):
            x = x + F.scaled_dot_product_attention(x, x, x, is_causal=True)
        heads = x.unflatten(-1, (2, 4))
        documents = Documents(tokens) if self.kind == "documents" else None
        if self.kind not in ("coreless", "idle"):
            x = x + self.core(heads, heads, heads, documents).flatten(2)
        if self.kind == "twice":
            x = x + self.core(heads, heads, heads).flatten(2)
        return self.output(x[:, -tokens.shape[1] :])


class Biased(AttentionCore):
    """Attention that computes something besides."""

    def forward(self, q_BLHK: Tensor, *others: Any) -> Tensor:  # type: ignore[override]
        return super().forward(q_BLHK * torch.arange(1, 1 + q_BLHK.shape[1])[:, None, None], *others)


KINDS = {
    "good": "",
    "coreless": "the model has no attention core (a module with compose.AttentionOptions)",
    "bidirectional": "core is not causal, so later tokens change what earlier ones give",
    "biased": "a core with AttentionOptions computes something else than compose.attention",
    "mean": "the model mixes tokens outside of its attention cores",
    "both": "the model mixes tokens outside of its attention cores",
    "shift": "the model mixes tokens outside of its attention cores",
    "registers": "core has other queries and keys than one for each token",
    "documents": "core attends within documents, of which a token alone does not tell",
    "twice": "core runs more than once in the model's forward",
    "idle": "core does not run in the model's forward",
}


def _own() -> list[tuple[str, str, list[list[int]]]]:
    """Return each model's obstacle to a cache, and its texts by default and without one."""
    mesh, result = make_mesh(Parallel()), []
    for kind in KINDS:
        torch.manual_seed(0)
        composition = apply(Own(kind), Plan(), mesh)
        if kind == "shift":
            composition.model.bfloat16()
        texts = [
            list(sample(composition, [1, 2, 3], Sampling(max_tokens=9, seed=1, cache=how)))
            for how in ("auto", "off")
        ]
        result.append((kind, obstacle(composition), texts))
    return result


def test_models_of_ones_own(pool: Pool) -> None:
    """A cache is never silently wrong."""
    result = pool.run(_own, 1)[0]
    assert [kind for kind, *_ in result] == list(KINDS)
    for kind, why, (cached, whole) in result:
        assert why == KINDS[kind], kind
        assert cached == whole, kind


CUT = "cuts the text or the model into parts that have no cache"
REFUSED: dict[str, tuple[Keys, int, str]] = {
    "pp": (LLAMA | keys_in("pp=2 train.global_batch=4"), 2, f"parallel.pp = 2 {CUT}"),
    "cp": (LLAMA | keys_in("cp=2"), 2, f"parallel.cp = 2 {CUT}"),
    "capacity": (
        QWEN_EXPERTS | keys_in("tp=2 model.capacity_factor=0.5"),
        2,
        "experts have a capacity, and the whole text competes for it",
    ),
    "compile": (
        LLAMA | keys_in("compile.mode=block"),
        1,
        "the model is compiled (compile.mode), and a cache grows with each token",
    ),
}


def _refused(keys: Keys, ranks: int) -> tuple[str, list[str]]:
    """Return a cache's refusal, and the lines printed otherwise."""
    composition = composed(keys, ranks)
    with printed() as said:
        assert open_cache(composition, "auto") is None
        assert open_cache(composition, "off") is None
    refused = refusal(lambda: list(sample(composition, TEXT[:3], Sampling(cache="on"))))
    return refused, said


@pytest.mark.parametrize("name", [pytest.param(n, marks=tier(full=n == "compile")) for n in REFUSED])
def test_what_has_no_cache(pool: Pool, name: str) -> None:
    """One rank says why, in one line."""
    keys, ranks, why = REFUSED[name]
    result = pool.run(_refused, ranks, keys, ranks)
    assert result[0][0] == f"command line: --cache: on, but {why}; use --cache auto"
    assert [said for _, said in result] == [
        [f"generate: every token runs the whole text again: {why}"],
        *[[]] * (ranks - 1),
    ]


def test_nucleus() -> None:
    """The fewest that are enough, whatever their order; of equal ones the first."""
    probabilities = torch.tensor([0.125, 0.5, 0.0625, 0.25, 0.0625])
    for top_p, kept in [
        (1.0, {0, 1, 2, 3, 4}),
        (0.9375, {0, 1, 2, 3}),
        (0.875, {0, 1, 3}),
        (0.76, {0, 1, 3}),
        (0.75, {1, 3}),
        (0.51, {1, 3}),
        (0.5, {1}),
        (1e-9, {1}),
    ]:
        result = nucleus(probabilities, top_p)
        assert set(result.nonzero().flatten().tolist()) == kept, top_p
        assert torch.equal(result[list(kept)], probabilities[list(kept)])
    for seed in range(20):
        drawn = torch.rand(50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        drawn /= drawn.sum()
        kept = nucleus(drawn, 0.8)
        assert kept.sum() >= 0.8 > kept.sum() - kept[kept > 0].min()
        assert kept[kept > 0].min() >= drawn[kept == 0].max()


def test_temperature() -> None:
    """Tokens are drawn as often as softmax(logits / temperature) says, by seed and position alone."""
    logits = torch.tensor([1.0, 3.0, 2.0, -torch.inf, 0.0])
    assert sample_token(logits, 5, Sampling(temperature=0, top_p=1e-3)) == 1
    draws = 4000
    for temperature in (0.5, 1.0, 2.0):
        expected = (logits / temperature).softmax(0)
        how = [Sampling(temperature=temperature, top_p=1, seed=seed) for seed in range(4)]
        counts = Counter(
            sample_token(logits, place, each) for each in how for place in range(draws // 4)
        )
        for token, share in enumerate(expected.tolist()):
            deviation = (share * (1 - share) / draws) ** 0.5
            assert abs(counts[token] / draws - share) <= 4 * deviation, (temperature, token)
    again = [sample_token(logits, place, Sampling(temperature=2)) for place in range(30)]
    assert again == [sample_token(logits, place, Sampling(temperature=2)) for place in range(30)]
    assert again != [
        sample_token(logits, place, Sampling(temperature=2, seed=1)) for place in range(30)
    ]


def test_text_comes_in_whole_characters() -> None:
    euro, broken = list("€".encode()), [0xFF]
    pieces = list(text_of(ByteTokenizer(), list(b"a"), [*euro, 98, *broken, 99, *euro[:2]]))
    assert pieces == ["a", "", "", "€", "b", "", "\ufffdc", "", "", "\ufffd"]
