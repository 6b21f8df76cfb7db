"""The copies that elementwise kernels of a CPU make."""

import torch
from torch import Tensor

from compose.planner.record import casts


def test_a_cpu_casts_before_it_adds() -> None:
    wide, narrow = torch.empty(6), torch.empty(6, dtype=torch.bfloat16)
    assert casts("add_", [wide, narrow], [wide], [wide]) == 6 * 4
    assert casts("add_", [narrow, wide], [narrow], [narrow]) == 2 * 6 * 4
    assert casts("add", [wide, wide], [], [wide]) == 0
    assert casts("mul", [wide, narrow], [narrow], [narrow]) == 6 * 4  # out=narrow, which is not read
    assert casts("mm", [wide, narrow], [], [wide]) == 0
    one: Tensor = torch.tensor(1.0)
    assert casts("mul", [narrow, one], [], [narrow]) == 0
