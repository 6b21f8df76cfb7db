"""Llama: documents, and the frequencies of rotary embeddings."""

import math

import pytest
import torch

from compose.data.samples import random_batch
from models.layers.attention import Documents
from models.layers.rope import inverse_frequencies
from models.llama import Model
from tests.support.transformers_models import LLAMA


def test_documents_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    model = Model(LLAMA)
    batch = {n: v[1:] for n, v in random_batch(2, 40, LLAMA.vocab_size, seed=0).items()}
    packed = model(batch["tokens"], batch["positions"], batch["document_ids"])
    ids = batch["document_ids"][0]
    assert ids.max() >= 3
    for document in ids.unique():
        here = ids == document
        torch.testing.assert_close(packed[:, here], model(batch["tokens"][:, here]))


def test_document_mask() -> None:
    mask = Documents(torch.tensor([[0, 0, 1]])).mask
    assert mask.tolist() == [[[[True, False, False], [True, True, False], [False, False, True]]]]


@pytest.mark.parametrize("turns", [(1.0, 4.0), (1.5, 3.0)])
def test_frequencies_between_the_bands_are_interpolated(turns: tuple[float, float]) -> None:
    """llama3's rule, pair by pair: what turns seldom is slowed, what turns often is kept, and between
    them the part that is kept grows with the turns within the first length."""
    low, high = turns
    plain, scaled = (
        inverse_frequencies(64, 500_000.0, factor, low, high, 8192).tolist() for factor in (1.0, 8.0)
    )
    between = 0
    for before, after in zip(plain, scaled, strict=True):
        turned = before * 8192 / (2 * math.pi)
        if turned <= low or turned >= high:
            expected = before if turned >= high else before / 8
        else:
            between += 1
            kept = (turned - low) / (high - low)
            expected = kept * before + (1 - kept) * before / 8
            assert before / 8 < after < before
        assert after == pytest.approx(expected, rel=1e-5)
    assert between >= 2
