"""compose.attention against its definition, PyTorch's own checks, transformers, and bad input."""

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from benchmarks.context import peak_of
from compose import AttentionOptions, Documents, attention, forward_backward
from compose.build import fill_weights, parallelize
from compose.data.samples import random_batch
from compose.ops import attention_kernels, gpu_attention, operators
from compose.ops.attention import attention_backward, attention_forward, tensors_of
from compose.proof.one_process import PlainAttention
from tests.support.gpu_kernels import AMPERE, HOPPER, on_cpu, play
from tests.support.helpers import Keys, make_job, parallel, proofs, prove_step, refused, tier
from tests.support.plain_attention import plain
from tests.support.pool import Pool, make_mesh


class Case:
    """Drawn inputs of attention, in float64."""

    def __init__(self, seed: int, longest: int = 150) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        length = rng.choice([n for n in (1, 2, 7, 64, 65, longest) if n <= longest])
        heads, groups = rng.choice([(4, 4), (4, 1), (6, 2), (1, 1), (3, 3)])
        self.rows, width, narrow = rng.choice([1, 2, 3]), 8, rng.choice([8, 5, 11])
        shapes = [(heads, width), (groups, width), (groups, narrow)]
        q, k, v = (torch.randn(self.rows, length, n, w, dtype=torch.float64) for n, w in shapes)
        self.sinks = None
        if rng.random() < 0.5:
            self.sinks = torch.randn(heads, dtype=torch.float64) * rng.choice([1.0, 30.0, -30.0])
        ends = rng.choice([None, 0.0, 0.1, 0.5, 1.0])
        self.ids = None
        if ends is not None:
            self.ids = (torch.rand(self.rows, length) < ends).long().cumsum(1)
        causal = rng.random() < 0.8
        self.options = AttentionOptions(
            causal=causal,
            window=rng.choice([None, 1, 2, 3, 64, 100, 1000]) if causal else None,
            scale=rng.choice([None, 0.3]),
            softcap=rng.choice([0.0, 0.0, 3.0]),
        )
        self.inputs = [x.requires_grad_() for x in (q, k, v, self.sinks) if x is not None]
        self.documents = None if self.ids is None else Documents(self.ids)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, self.documents, sinks, self.options)

    def exactly(self) -> tuple[Tensor, Tensor]:
        q, k, v = self.inputs[:3]
        return plain(q, k, v, self.ids, self.sinks, self.options)


def close(found: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], inputs: list[Tensor]) -> None:
    """Output, log-sum-exp, and the gradients of a random function of both."""
    weights = [torch.randn_like(x) for x in right]
    both = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(made, weights, strict=True)), inputs)  # type: ignore[arg-type]
        for made in (found, right)
    ]
    for one, other in zip((*found, *both[0]), (*right, *both[1]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-9)


# By name: the device that is played, and the type that tensors are taken for.
PLAYED = {
    "flash": (AMPERE, torch.bfloat16),
    "cudnn": (HOPPER, torch.bfloat16),
    "efficient": (AMPERE, torch.float32),
}


@pytest.fixture(params=["cpu", *PLAYED, "plain"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The CPU's kernel, emulations of the GPU's, and the one for all that these do not take."""
    if request.param == "plain":
        monkeypatch.setattr(operators, "device_of", lambda q: "none")
    elif request.param in PLAYED:
        play(monkeypatch, *PLAYED[request.param])
    # Small limits make many tiles.
    monkeypatch.setattr(attention_kernels, "_PLAIN_SCORES", 500)
    monkeypatch.setattr(gpu_attention, "_MASK", 500)
    with on_cpu():
        yield request.param


def test_equals_the_definition(kernel: str) -> None:
    for seed in range(120 if kernel == "cpu" else 60):
        case = Case(seed)
        close(case.run(*case.inputs), case.exactly(), case.inputs)


def test_pieces_equal_the_definition(kernel: str) -> None:
    """Pieces of queries against pieces of keys, as context parallel has them, merged."""
    size = 6
    for seed in range(60):
        rng = random.Random(seed)
        case = Case(seed, longest=7)
        count = rng.choice([2, 3, 4])
        options = AttentionOptions(window=rng.choice([None, 1, 3, 6, 7, 8, 20]))
        torch.manual_seed(seed)
        heads, groups = case.inputs[0].shape[2], case.inputs[1].shape[2]
        q, k, v = (
            torch.randn(2, size * count, n, 8, dtype=torch.float64, requires_grad=True)
            for n in (heads, groups, groups)
        )
        ids = (torch.rand(2, size * count) < rng.choice([0.0, 0.1, 0.6])).long().cumsum(1)
        documents = None if seed % 4 == 0 else Documents(ids)
        right, lse = plain(q, k, v, None if documents is None else ids, None, options)
        chosen = sorted(rng.sample(range(count), rng.randint(1, count)))
        places = torch.cat([torch.arange(c * size, (c + 1) * size) for c in chosen])
        starts = tuple(c * size for c in chosen)
        all_starts = (0,) if seed % 2 else tuple(c * size for c in range(count))
        result = attention_forward(
            q[:, places], k, v, *tensors_of(documents), None, starts, all_starts, *options.given(q)
        )
        close(result, (right[:, places], lse[:, places]), [q, k, v])


def test_the_proofs_reference_equals_the_definition() -> None:
    for seed in range(40):
        case = Case(seed)
        with PlainAttention():
            result = case.run(*case.inputs)
        assert result[0].grad_fn is not None
        assert "compose" not in str(result[0].grad_fn)
        close(result, case.exactly(), case.inputs)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=tier(slow=s > 2)) for s in range(8)])
def test_gradcheck(seed: int) -> None:
    case = Case(seed, longest=9)
    assert torch.autograd.gradcheck(case.run, case.inputs)


def test_opcheck() -> None:
    for seed in (0, 3, 5, 8):
        case = Case(seed, longest=9)
        q, k, v = case.inputs[:3]
        given = (*tensors_of(case.documents), case.sinks, (0,), (0,), *case.options.given(q))
        torch.library.opcheck(attention_forward, (q, k, v, *given))


@pytest.mark.parametrize("wide", [False, True])
def test_opcheck_of_backward(wide: bool) -> None:
    """A graph that took gradients for narrower than they are would not cast them."""
    q, k, v = (torch.randn(1, 5, 2, 8, dtype=torch.bfloat16) for _ in range(3))
    rest = (0,), (0,), *AttentionOptions().given(q)
    out, lse = attention_forward(q, k, v, None, None, None, *rest)
    given = (torch.ones_like(out), None, q, k, v, out, lse, None, None, *rest)
    torch.library.opcheck(attention_backward, given, {"wide": wide}, test_utils="test_faketensor")


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 5, 33])
def test_equals_transformers(window: int | None, groups: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 37, 16) for n in (4, groups, groups))
    sinks = torch.randn(4)
    module = SimpleNamespace(num_key_value_groups=4 // groups, sinks=sinks, training=False)
    distance = torch.arange(37)[:, None] - torch.arange(37)
    hidden = (distance < 0) | (distance >= (window or 37))
    mask = torch.zeros(37, 37).masked_fill(hidden, -torch.inf)
    right, _ = eager_attention_forward(module, q, k, v, mask, 0.25)  # type: ignore[arg-type]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    result, _ = attention(q, k, v, None, sinks, AttentionOptions(window=window))
    assert (result - right).abs().max() < 1e-6


def test_half_precision_rounds_once() -> None:
    """In bfloat16, over many blocks: within two roundings of the exact output."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 700, 2, 16).bfloat16() for _ in range(3))
    options = AttentionOptions(window=130)
    right = plain(q.double(), k.double(), v.double(), None, None, options)[0]
    result = attention(q, k, v, options=options)[0]
    assert (result - right).norm() < 2 * (right.bfloat16() - right).norm()


def test_memory_is_linear_in_the_length() -> None:
    def peak(length: int, window: int | None) -> int:
        ids = torch.arange(length)[None] // 700
        q, k, v = (torch.randn(1, length, 2, 8, requires_grad=True) for _ in range(3))

        def run() -> None:
            options = AttentionOptions(window=window)
            attention(q, k, v, Documents(ids), None, options)[0].sum().backward()

        return peak_of(run)

    for window in (None, 100):
        assert peak(4096, window) < 2.2 * peak(2048, window)


def test_flops_are_those_of_the_pairs() -> None:
    q, k, v = (torch.randn(1, 64, n, 8, requires_grad=True) for n in (4, 2, 2))
    for window, pairs in ((None, 64 * 65 / 2), (10, 64 * 10 - 45)):
        with FlopCounterMode(display=False) as counted:
            attention(q, k, v, options=AttentionOptions(window=window))[0].sum().backward()
        assert counted.get_total_flops() == 4 * pairs * 2 * (2 + 5) * 8


def test_documents() -> None:
    ids = torch.tensor([[5, 5, 5, 2], [2, 2, 7, 7]])
    documents = Documents(ids)
    assert documents.bounds.tolist() == [0, 3, 4, 6, 8, 8, 8, 8, 8]
    assert documents.extents.tolist() == [4, 3]
    assert documents.bounds.dtype == torch.int32
    assert documents[1:].bounds.tolist() == [0, 2, 4, 4, 4]
    assert (len(documents), documents.shape) == (2, (2, 4))


REFUSED: dict[str, dict[str, Any]] = {
    "window 0 should be at least 1, or None for all": {"options": AttentionOptions(window=0)},
    "a window needs causal = True": {"options": AttentionOptions(causal=False, window=3)},
    "sinks (3,) should be (4,), one for each query head": {"sinks": torch.zeros(3)},
    "q, k and v are of 2 x 5, 2 x 5, 2 x 4 tokens; they need equal rows, and k and v equal lengths": {
        "v": torch.randn(2, 4, 2, 8)
    },
    "q, k and v are of 2 x 5, 1 x 5, 1 x 5 tokens; they need equal rows, and k and v equal lengths": (
        dict.fromkeys("kv", torch.randn(1, 5, 2, 8))
    ),
    "documents of 1 x 6 tokens, and keys of 2 x 5": {"documents": Documents(torch.zeros(1, 6))},
    "4 query heads cannot share 3 heads of keys and 3 of values": dict.fromkeys(
        "kv", torch.randn(2, 5, 3, 8)
    ),
    "queries are 8 wide and keys 9; they should be equal": {"k": torch.randn(2, 5, 2, 9)},
    "5 queries and 6 keys are not one sequence; causal attention needs as many": dict.fromkeys(
        "kv", torch.randn(2, 6, 2, 8)
    ),
    "5 queries and 6 keys have no documents in common; give documents where both are one sequence": {
        **dict.fromkeys("kv", torch.randn(2, 6, 2, 8)),
        "documents": Documents(torch.zeros(2, 6)),
        "options": AttentionOptions(causal=False),
    },
    "q, k and v are float32, float32, float16; give them one floating-point type": {
        "v": torch.randn(2, 5, 2, 8).half()
    },
    "q, k and v are int64, int64, int64; give them one floating-point type": dict.fromkeys(
        "qkv", torch.zeros(2, 5, 4, 8, dtype=torch.long)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    inputs = {name: torch.randn(2, 5, n, 8) for name, n in zip("qkv", (4, 2, 2), strict=True)}
    assert refused(attention, **{**inputs, **REFUSED[message]}) == [f"attention: {message}"]


def test_a_model_refuses_a_window_below_1() -> None:
    assert refused(make_job, 1, model__window=-2) == [
        "command line: model.window: -2 should be at least 1, or 0 for all keys"
    ]


class _NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ != "_local_scalar_dense", "a number is read"
        return func(*args, **(kwargs or {}))


class _NoCopies(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(func, "__name__", "") not in ("item", "tolist", "cpu"), func
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_is_waited_for() -> Iterator[None]:
    """Within it no tensor may be read: on a GPU each such read waits for the device."""
    with _NoReads(), _NoCopies():
        yield


def _step_that_reads_nothing() -> None:
    job = make_job(1, model__window=5, model__sinks=True)
    composition = parallelize(job, make_mesh(job.degrees), torch.device("cpu"), job.config.options)
    fill_weights(composition, job, torch.device("cpu"))
    batch = random_batch(4, job.config.train.seq_len, 257, seed=1)
    with nothing_is_waited_for():
        loss = forward_backward(composition, batch, micro_batch=2)
    assert loss.item() > 0
    with pytest.raises(AssertionError), nothing_is_waited_for():
        loss.item()


def test_a_step_reads_nothing(pool: Pool) -> None:
    pool.run(_step_that_reads_nothing, 1)


# Windows and sinks on every mesh: each composition equals one process, with documents.
WINDOW_KEYS: Keys = {
    "model__n_layers": 2,
    "model__n_heads": 8,
    "model__n_kv_heads": 2,
    "train__micro_batch": 1,
    "train__global_batch": 4,
}


def _windowed(window: int, sinks: bool = True, **axes: object) -> Keys:
    return {"model__window": window, "model__sinks": sinks} | parallel(**axes)


# Every method meets both balances, tp, pp, a window and sinks. Windows end within a chunk (3), over an
# edge of chunks (12), and over several (25).
COVERING: dict[str, Keys] = {
    "one process's types": _windowed(3),
    "zero 3": _windowed(3, dp_shard=2),
    "tp": _windowed(12, tp=4),
    "ring": _windowed(12, cp=4, cp_balance="headtail"),
    "ring in pieces x tp": _windowed(3, cp=2, tp=2, cp_balance="none"),
    "ring x pp": _windowed(25, False, cp=2, pp=2),
    "allgather x tp": _windowed(12, cp=2, tp=2, cp_method="allgather"),
    "allgather in pieces x pp": _windowed(3, cp=2, pp=2, cp_method="allgather", cp_balance="none"),
    "ulysses x pp": _windowed(12, cp=2, pp=2, cp_method="ulysses"),
    "ulysses in pieces x tp": _windowed(25, cp=2, tp=2, cp_method="ulysses", cp_balance="none"),
}
ALL: dict[str, Keys] = {
    f"{method} {balance} window {window} sinks {sinks} {axes}": _windowed(
        window, sinks, cp=2, cp_method=method, cp_balance=balance, **axes
    )
    for method, balance, window, sinks, axes in itertools.product(
        ("ring", "allgather", "ulysses"),
        ("headtail", "none"),
        (3, 12, 25),
        (False, True),
        ({"tp": 2, "pp": 2}, {"tp": 2, "dp_shard": 2}, {"pp": 2, "dp_shard": 2}, {"dp_shard": 4}),
    )
}
test_windows_and_sinks_equal_one_process = proofs(
    COVERING | ALL, WINDOW_KEYS, COVERING.keys() - {"zero 3", "ring", "tp"}, ALL, prove_step
)
