"""Tables of pipeline schedules: whole, possible, and refused with one line where they are not."""

import os
from pathlib import Path

import pytest

from compose.pipeline.schedules import (
    SCHEDULES,
    ZERO_BUBBLE,
    Action,
    Table,
    build_table,
    check_table,
    execution_order,
    placement,
    read_table,
    splits_backward,
    stages_per_rank,
)
from tests.support.helpers import refusal, refused

ALL = [(name, pp, m) for name in SCHEDULES for pp in (2, 3, 4) for m in (1, 2, 3, 4, 6, 8, 12, 24)]


def accepted(name: str, pp: int, micro_batches: int) -> bool:
    if name in ("Interleaved1F1B", "InterleavedZeroBubble"):  # whole rounds of about pp each
        return micro_batches % max(1, micro_batches // pp) == 0
    return name != "DualPipeV" or micro_batches >= 2 * pp


def write_rows(*rows: str) -> None:
    """Write table.csv in the current folder, a row for each text, cells between blanks."""
    Path("table.csv").write_text(
        "".join(",".join(row.split()) + "\n" for row in rows), encoding="utf-8"
    )


def write_table(table: Table) -> None:
    write_rows(*(" ".join(map(str, row)) for row in table))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, so that messages name files as a person would."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ranks_of(table: Table) -> list[int]:
    """The rank of each stage."""
    return [
        rank for _, rank in sorted({(a.stage, rank) for rank, row in enumerate(table) for a in row})
    ]


@pytest.mark.parametrize(("name", "pp", "micro_batches"), ALL)
def test_named_schedules_are_whole(name: str, pp: int, micro_batches: int) -> None:
    if not accepted(name, pp, micro_batches):
        assert f"cannot run {micro_batches} micro-batches" in refusal(
            build_table, name, pp, 0, micro_batches
        )
        return
    table = build_table(name, pp, 0, micro_batches)
    check_table(table, name)
    stages = pp * stages_per_rank(name)
    actions = [action for row in table for action in row]
    assert len(table) == pp
    for kinds in ("F", "BI", "BW"):  # a backward is whole or in halves
        results = [(a.stage, a.micro_batch) for a in actions if a.kind in kinds]
        assert sorted(results) == [(stage, n) for stage in range(stages) for n in range(micro_batches)]


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"])
@pytest.mark.parametrize("virtual_stages", [1, 3, 4])
def test_other_numbers_of_stages(name: str, virtual_stages: int) -> None:
    table = build_table(name, 2, virtual_stages, 4)
    check_table(table, name)
    assert placement(name, 2, virtual_stages) == ranks_of(table) == [0, 1] * virtual_stages


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
def test_v_schedules_turn_at_the_last_rank(name: str) -> None:
    table = build_table(name, 3, 0, 6)
    assert placement(name, 3, 0) == ranks_of(table) == [0, 1, 2, 2, 1, 0]


def test_execution_order_keeps_rows_and_runs_all() -> None:
    table = build_table("ZBVZeroBubble", 4, 0, 8)
    order = execution_order(table)
    assert len(order) == len(set(order)) == sum(map(len, table))
    for row in table:
        assert [action for action in order if action in row] == row


@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_round_trip(name: str, folder: Path) -> None:
    table = build_table(name, 2, 0, 4)
    write_table(table)
    assert read_table("table.csv") == table
    assert stages_per_rank("table.csv") == SCHEDULES[name]
    assert build_table("table.csv", 2, SCHEDULES[name], 4) == table


def test_csv_as_a_person_writes_it(folder: Path) -> None:
    Path("table.csv").write_text(" 0F0, ,0B0,\n\n,1F0,1B0\n", encoding="utf-8")
    expected: Table = [
        [Action(0, "F", 0), Action(0, "B", 0)],
        [Action(1, "F", 0), Action(1, "B", 0)],
    ]
    assert build_table("table.csv", 2, 0, 1) == expected


KNOWN = (
    "(known: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV,"
    " PipeDream, PipeDream2BW, or a .csv file)"
)


@pytest.mark.parametrize(
    ("name", "pp", "virtual_stages", "micro_batches", "message"),
    [
        ("1F1b", 2, 0, 4, f"pp_schedule: unknown schedule '1F1b'; did you mean 1F1B? {KNOWN}"),
        ("Gpipe", 2, 0, 4, f"pp_schedule: unknown schedule 'Gpipe'; did you mean GPipe? {KNOWN}"),
        ("chimera", 2, 0, 4, f"pp_schedule: unknown schedule 'chimera' {KNOWN}"),
        (
            "ZBVZeroBubble",
            2,
            3,
            4,
            "pp_virtual_stages: ZBVZeroBubble has 2 on each rank, not 3; use 2, or another"
            " parallel.pp_schedule",
        ),
        (
            "1F1B",
            2,
            2,
            4,
            "pp_virtual_stages: 1F1B has 1 on each rank, not 2; use 1, or another parallel.pp_schedule",
        ),
        (
            "Interleaved1F1B",
            2,
            0,
            5,
            "pp_schedule: Interleaved1F1B with parallel.pp 2 cannot run 5 micro-batches (PyTorch:"
            " Interleaved 1F1B requires the number of microbatches to be a multiple of the number of"
            " rounds (2), but got 5); nearest: 4 or 6",
        ),
        (
            "DualPipeV",
            2,
            0,
            3,
            "pp_schedule: DualPipeV with parallel.pp 2 cannot run 3 micro-batches (PyTorch: DualPipeV"
            " requires at least as many microbatches as stages, but got 3 microbatches and 4 stages);"
            " nearest: 4",
        ),
    ],
)
def test_refused_by_name(
    name: str, pp: int, virtual_stages: int, micro_batches: int, message: str
) -> None:
    assert refusal(build_table, name, pp, virtual_stages, micro_batches) == f"parallel.{message}"


def test_unreadable_csv(folder: Path) -> None:
    Path("bytes.csv").write_bytes(b"0F0,\xff\xfe\n")
    Path("long.csv").write_text(" " * 140_000, encoding="utf-8")
    os.mkfifo("pipe.csv")
    for name, why in (
        ("none.csv", "No such file or directory"),
        ("bytes.csv", "not a text file"),
        ("long.csv", "field larger than field limit (131072)"),
        ("pipe.csv", "is no file"),
    ):
        assert refusal(read_table, name) == f"parallel.pp_schedule: cannot read {name}: {why}"


@pytest.mark.parametrize("cell", ["1G0", "F0", "1F", "1f0", "-1F0", "1F0B1", f"{'9' * 5000}F0"])
def test_bad_cell(cell: str, folder: Path) -> None:
    write_rows("0F0 0B0", f"1F0 {cell}")
    shown = f"'{cell}'" if len(cell) < 9 else f"'{'9' * 199}..."
    assert refusal(read_table, "table.csv") == (
        f"parallel.pp_schedule: table.csv, row 2: {shown} is not an action"
        " (stage, F, B, I or W, micro-batch: 2F0)"
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0 0F0 0B0", "1F0 1B0"), "0F0 is in the table twice"),
        (("0B0 0F0", "1F0 1B0"), "0B0 stands before 0F0"),
        (("0F0 0B0", "1I0 1F0 1W0"), "1I0 stands before 1F0"),
        (("0F0 0B0", "1F0 1W0 1I0"), "1W0 stands before 1I0"),
        (
            ("0F0 0B0", "1F0 1I0"),
            "stage 1 has F and I of micro-batch 0; it takes F and B, or F, I and W",
        ),
        (("0F0", "1F0 1B0"), "stage 0 has F of micro-batch 0; it takes F and B, or F, I and W"),
        (
            ("0F0 0B0 0I0 0W0", "1F0 1B0"),
            "stage 0 has B and F and I and W of micro-batch 0; it takes F and B, or F, I and W",
        ),
        (
            ("0F0 0F1 0B0 0B1", "1F0 1B0"),
            "stage 1 has nothing of micro-batch 1; it takes F and B, or F, I and W",
        ),
        # Rank 0 wants micro-batch 0 back before it sends 1, which rank 1 wants before it sends 0 back.
        (
            ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            "ranks wait for each other; 0B0 can never run",
        ),
        (("0F0 1F0 0B0", "1B0"), "stage 1 is on ranks 0 and 1; use one"),
        (
            ("0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1"),
            "stage 1, the last, runs its forwards out of order",
        ),
    ],
)
def test_impossible_tables(rows: tuple[str, ...], message: str, folder: Path) -> None:
    write_rows(*rows)
    micro_batches = 2 if "F1" in rows[0] else 1
    assert refusal(build_table, "table.csv", 2, 1, micro_batches) == (
        f"parallel.pp_schedule: table.csv: {message}"
    )


def test_csv_of_another_size(folder: Path) -> None:
    start = "parallel.pp_schedule: table.csv has"
    degrees = "ask for 0 to 3"
    write_table(build_table("1F1B", 2, 0, 4))
    assert refused(build_table, "table.csv", 4, 0, 4) == [
        f"{start} 2 rows, one for each rank; parallel.pp is 4",
        f"{start} stages 0 to 1; parallel.pp 4 and parallel.pp_virtual_stages {degrees}",
    ]
    assert refused(build_table, "table.csv", 2, 2, 4) == [
        f"{start} stages 0 to 1; parallel.pp 2 and parallel.pp_virtual_stages {degrees}"
    ]
    assert refused(build_table, "table.csv", 2, 2000, 4) == [
        "parallel.pp_virtual_stages: 2000 on each rank; use at most 1000"
    ]
    assert refused(build_table, "table.csv", 2, 0, 6) == [
        f"{start} micro-batches 0 to 3; train.global_batch and train.micro_batch make 6, 0 to 5"
    ]
    write_rows("0F0 0F2 0B0 0B2", "1F0 1F2 1B0 1B2")
    assert refused(build_table, "table.csv", 2, 0, 2) == [
        f"{start} micro-batches 0, 2; train.global_batch and train.micro_batch make 2, 0 to 1"
    ]
    write_rows("0F0 0B0", "2F0 2B0")
    assert refused(placement, "table.csv", 2, 0) == [f"{start} stages 0, 2; count them from 0 on"]
    write_rows("0F0 0B0", "1F0 1B0")  # ranks 2 and 3 have no stage
    assert refused(placement, "table.csv", 4, 0) == [
        f"{start} 2 rows, one for each rank; parallel.pp is 4"
    ]
    write_rows("0F0 0B0", "1F0 0F0 1B0")  # nor has rank 0, if the last row counts
    assert refused(placement, "table.csv", 2, 0) == [
        "parallel.pp_schedule: table.csv: stage 0 is on ranks 0 and 1; use one"
    ]
    write_rows("")
    assert refused(build_table, "table.csv", 1, 0, 1) == [
        "parallel.pp_schedule: table.csv holds no action"
    ]


def test_schedules_that_split_backward(folder: Path) -> None:
    """By name, and as a table of actions."""
    for name, stages in SCHEDULES.items():
        splits = name in ZERO_BUBBLE
        assert splits_backward(name, 2, stages, 0) == splits, name
        write_table(build_table(name, 2, stages, 4))
        assert splits_backward("table.csv", 2, stages, 4) == splits, name
