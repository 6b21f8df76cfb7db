"""Samples are a function of (seed, step); no mesh changes them."""

import threading
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compose.data.batches import Batches, Interleaving, in_order, shuffled
from compose.data.samples import Windows
from compose.data.token_files import TokenRow
from compose.errors import ConfigError
from compose.ops.batch import IGNORE


def batches(*sets: Windows, share: tuple[int, int] = (0, 1), **keys: Any) -> Batches:
    return Batches(sets, share=share, **{"global_batch": 6, "seed": 3, **keys})


def row(n: int, name: str = "row", first: int = 0) -> Windows:
    return Windows(name, TokenRow([np.arange(first, first + n) % 290]), -1, seq_len=7, vocab_size=300)


@pytest.mark.parametrize("size", [1, 2, 3, 64, 65, 1000, 4097])
@pytest.mark.parametrize("key", [0, 1, 12345])
def test_shuffled_is_a_permutation(size: int, key: int) -> None:
    order = [shuffled(i, size, key) for i in range(size)]
    assert sorted(order) == list(range(size))
    if size >= 64:
        assert order != list(range(size))
        assert order != [shuffled(i, size, key + 1) for i in range(size)]
        # No drift: neighbours end up as far apart as in a random order.
        steps = np.abs(np.diff(order))
        assert 0.25 < steps.mean() / size < 0.42


@pytest.mark.parametrize("size", [5, 6, 7])
def test_orders_of_a_small_set_are_equally_frequent(size: int) -> None:
    """The first two samples of many epochs: chi-square for each degree of freedom is near 1."""
    keys, pairs = 1500, Counter[tuple[int, ...]]()
    for key in range(keys):
        pairs[tuple(shuffled(place, size, key) for place in (0, 1))] += 1
    expected, many = keys / size / (size - 1), size * (size - 1)
    square = sum(n**2 for n in pairs.values()) / expected - keys
    assert square / (many - 1) < 1.5


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_ranks_slices_make_up_the_global_batch(count: int) -> None:
    for step in (0, 5, 17):
        whole = batches(row(500)).batch(6 * step)
        parts = [batches(row(500), share=(index, count)).batch(6 * step) for index in range(count)]
        for name, value in whole.items():
            assert torch.equal(torch.cat([part[name] for part in parts]), value)


def test_an_epoch_sees_every_window_once() -> None:
    source = row(7 * 12 + 1)
    seen = torch.cat([batches(source).batch(6 * step)["tokens"][:, 0] for step in range(2)])
    again = torch.cat([batches(source).batch(6 * step)["tokens"][:, 0] for step in range(2, 4)])
    assert sorted(seen.tolist()) == sorted(again.tolist()) == [7 * i for i in range(12)]
    assert seen.tolist() != again.tolist()
    assert not torch.equal(
        batches(source).batch(0)["tokens"], batches(source, seed=4).batch(0)["tokens"]
    )


@pytest.mark.parametrize("global_batch", [1, 2, 6])
def test_samples_are_counted_from_the_first_of_the_run(global_batch: int) -> None:
    """Sample n is the same in every batch and share; and an older checkpoint goes on where it was."""
    source, count = row(7 * 30 + 1), 2 if global_batch > 1 else 1
    wanted = [source.read(shuffled(n, 30, 3 * 1_000_003))["tokens"].tolist() for n in range(24)]
    results = [
        sample.tolist()
        for first in range(0, 24, global_batch)
        for index in range(count)
        for sample in batches(source, global_batch=global_batch, share=(index, count)).batch(first)[
            "tokens"
        ]
    ]
    assert results == wanted


def test_for_a_gpu_the_next_batch_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread reads batches once, also after a jump; an unreadable sample raises in its turn."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(Tensor, "pin_memory", lambda value: value.clone())
    plain = batches(row(500))
    ahead = batches(row(500), device=torch.device("cuda", 0))
    real, reads = ahead._read, list[tuple[int, bool]]()

    def read(first: int) -> dict[str, Tensor]:
        reads.append((first, threading.current_thread() is threading.main_thread()))
        if first == 606:
            raise ConfigError("a sample cannot be read")
        return real(first)

    monkeypatch.setattr(ahead, "_read", read)
    for first in (0, 6, 12, 600):
        for name, value in ahead.batch(first).items():
            assert torch.equal(value, plain.batch(first)[name])
    assert ahead.reader
    ahead.reader.submit(lambda: None).result()
    assert reads == [(first, False) for first in (0, 6, 12, 18, 600, 606)]
    with pytest.raises(ConfigError, match="a sample cannot be read"):
        ahead.batch(606)
    ahead.reader.shutdown()


def test_each_set_of_a_mixture_has_an_order_of_its_own() -> None:
    mixed = batches(row(7 * 40 + 1, "a"), row(7 * 40 + 1, "b"), global_batch=80)
    order: list[list[int]] = [[], []]
    for number, first in enumerate(mixed.batch(0)["tokens"][:, 0].tolist()):
        order[mixed.interleaving.place(number)[0]].append(first)
    assert sorted(order[0]) == sorted(order[1]) == [7 * i for i in range(40)]
    assert sum(a == b for a, b in zip(*order, strict=True)) < 10


@pytest.mark.parametrize(
    "weights", [[1], [1, 1], [7, 3], [1, 0.001], [5, 3, 2], [1, 2, 3, 4, 5], [0.1, 0.2, 0.7]]
)
def test_sets_get_their_share_of_any_stretch(weights: list[float]) -> None:
    exact = [Fraction(str(weight)) for weight in weights]
    dealt = Interleaving(exact)
    places = [dealt.place(number) for number in range(3000)]
    for index in range(len(weights)):
        # The numbers of a set come once, in order.
        assert [n for which, n in places if which == index] == list(range(dealt.taken(3000)[index]))
    share = [weight / sum(exact) for weight in exact]
    for stop in (1, 2, 10, 77, 500, 3000):
        for start in (0, stop // 3, stop // 2):
            counts = Counter(which for which, _ in places[start:stop])
            for index, part in enumerate(share):
                assert abs(counts[index] - part * (stop - start)) < len(weights) + 1


def test_a_mixture_goes_through_epochs_of_each_set() -> None:
    """With 12 and 5 windows by 2 to 1, each is seen once in every epoch of its set."""
    mixed = batches(
        row(7 * 12 + 1, "a"), row(7 * 5 + 1, "b", first=100), weights=[Fraction(2), Fraction(1)]
    )
    seen = torch.cat([mixed.batch(6 * step)["tokens"][:, 0] for step in range(15)]).tolist()
    ours, others = [n for n in seen if n < 100], [n for n in seen if n >= 100]
    assert (len(ours), len(others)) == (60, 30)
    for epoch in range(5):
        assert sorted(ours[12 * epoch : 12 * epoch + 12]) == [7 * i for i in range(12)]
    for epoch in range(6):
        assert sorted(others[5 * epoch : 5 * epoch + 5]) == [100 + 7 * i for i in range(5)]
    assert ours[:12] != ours[12:24]
    assert mixed.epochs(90) == {"a": 5.0, "b": 6.0}
    assert mixed.epochs(6) == {"a": 4 / 12, "b": 2 / 5}


def test_without_weights_sets_are_mixed_by_size() -> None:
    mixed = batches(row(7 * 40 + 1, "a"), row(7 * 20 + 1, "b", first=100))
    assert mixed.epochs(60) == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_validation_sees_each_sample_once(count: int) -> None:
    """11 samples in batches of 4: the last batch has one row that holds nothing."""
    samples = row(7 * 11 + 1)
    parts = [list(in_order(samples, 4, (index, count))) for index in range(count)]
    assert {len(part) for part in parts} == {3}
    whole = [{k: torch.cat([part[i][k] for part in parts]) for k in parts[0][i]} for i in range(3)]
    tokens = torch.cat([batch["tokens"] for batch in whole])
    assert torch.equal(tokens[:11].flatten(), torch.arange(77))
    targets = torch.cat([batch["targets"] for batch in whole])
    assert (targets[11] == IGNORE).all()
    assert (whole[2]["positions"][3] == -1).all()
    assert torch.equal(targets[:11].flatten(), torch.arange(1, 78))
