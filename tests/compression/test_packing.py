"""Rows of a unit as messages, and back."""

import pytest
import torch

from compose.compression import codec
from compose.compression.codec import Blocks
from compose.compression.packing import Packing, UnitLayout
from tests.compression.cases import drawn

SHAPES = [(70, 67), (5,), (3, 4), (129, 40), (1,)]


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("bits", [0, 4, 8, 16])
def test_rows_come_back_with_odd_sizes(monkeypatch: pytest.MonkeyPatch, bits: int, ranks: int) -> None:
    packing = Packing(UnitLayout.of(SHAPES, ranks), Blocks(bits, 64, rotate=bits == 4))
    rows = drawn("normal", ranks * packing.layout.numel).view(ranks, -1)
    messages = packing.pack(rows)
    assert messages.shape == (ranks, packing.bytes(rows.dtype))
    back, moved = torch.empty_like(rows), rows.clone()
    packing.unpack(messages, back)
    packing.unpack(messages, moved, base=True)
    # Larger units have a call for each run of coded parameters, not one for all.
    monkeypatch.setattr(codec, "AT_ONCE", 64)
    assert torch.equal(packing.pack(rows), messages)
    for base, result in ((False, back), (True, moved)):
        out = rows.clone()
        packing.unpack(messages, out, base)
        assert torch.equal(out, result)
    begin = 0
    for part in packing.layout.parts:
        place = slice(begin, begin + part.numel)
        begin += part.numel
        error = float((back[:, place] - rows[:, place]).norm() / rows[:, place].norm())
        limit = {0: 0.0, 4: 0.2, 8: 0.02, 16: 0.004}[bits]
        assert error <= (limit if part.compressed else 0.0)
    torch.testing.assert_close(packing.sum(messages, rows.dtype), back.sum(0, keepdim=True))
    assert [part.compressed for part in packing.layout.parts] == [True, False, False, True, False]
