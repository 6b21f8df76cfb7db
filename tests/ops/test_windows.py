"""Windows and sinks on every mesh: each composition equals one process, with documents."""

import itertools
from typing import Any

import pytest

from tests.support.helpers import agreed, parallel, prove_step, tier
from tests.support.pool import Pool

KEYS: dict[str, Any] = {
    "model__n_layers": 2,
    "model__n_heads": 8,
    "model__n_kv_heads": 2,
    "train__micro_batch": 1,
    "train__global_batch": 4,
}
# Within a chunk, over an edge of chunks, and over several.
WINDOWS = (3, 12, 25)


def case(name: str, ranks: int, window: int, sinks: bool, **axes: Any) -> Any:
    """A row of the table."""
    keys = KEYS | {"model__window": window, "model__sinks": sinks} | parallel(**axes)
    return pytest.param(ranks, keys, id=name)


# Every method meets both balances, tp, pp, a window and sinks.
COVERING = [
    case("one process's types", 1, 3, True),
    case("zero 3", 2, 3, True, dp_shard=2),
    case("tp", 4, 12, True, tp=4),
    case("ring", 4, 12, True, cp=4, cp_balance="headtail"),
    case("ring in pieces x tp", 4, 3, True, cp=2, tp=2, cp_balance="none"),
    case("ring x pp", 4, 25, False, cp=2, pp=2),
    case("allgather x tp", 4, 12, True, cp=2, tp=2, cp_method="allgather"),
    case("allgather in pieces x pp", 4, 3, True, cp=2, pp=2, cp_method="allgather", cp_balance="none"),
    case("ulysses x pp", 4, 12, True, cp=2, pp=2, cp_method="ulysses"),
    case("ulysses in pieces x tp", 4, 25, True, cp=2, tp=2, cp_method="ulysses", cp_balance="none"),
]
ALL = [
    case(
        f"{method} {balance} window {window} sinks {sinks} {axes}",
        8,
        window,
        sinks,
        cp=2,
        cp_method=method,
        cp_balance=balance,
        **axes,
    )
    for method, balance, window, sinks, axes in itertools.product(
        ("ring", "allgather", "ulysses"),
        ("headtail", "none"),
        WINDOWS,
        (False, True),
        ({"tp": 2, "pp": 2}, {"tp": 2, "dp_shard": 2}, {"pp": 2, "dp_shard": 2}, {"dp_shard": 4}),
    )
]
SOFT = ("zero 3", "ring", "tp")


@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        *(
            pytest.param(*row.values, id=row.id, marks=tier(slow=row.id not in SOFT))
            for row in COVERING
        ),
        *(pytest.param(*row.values, id=row.id, marks=tier(full=True)) for row in ALL),
    ],
)
def test_equals_one_process(pool: Pool, ranks: int, keys: dict[str, Any]) -> None:
    report = agreed(pool.run(prove_step, ranks, keys))
    assert report.ok, str(report)
