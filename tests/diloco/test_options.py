"""Wrong options of islands are refused in a line each."""

from pathlib import Path

import pytest

from compose.cli.plan import plan
from tests.diloco.cases import outer
from tests.support.helpers import Keys, refusals, refused

TWO: Keys = {"parallel__dp_replicate": 2, "parallel__dp_shard": 1}
REFUSED: list[tuple[Keys, str]] = [
    (
        outer(every=4) | {"parallel__dp_shard": 2},
        "outer.every: 4 is for islands, the ranks of parallel.dp_replicate, which is 1; use"
        " parallel.dp_replicate = 2 or more, or outer.every = 0",
    ),
    (
        outer(every=5, fragments=1) | TWO,
        "outer.every: 5 is not a multiple of the 2 fragments that outer.fragments = 1 makes of 2"
        " layers; nearest: 4",
    ),
    (
        outer(every=4, fragments=1, delay=2) | TWO,
        "outer.delay: 2 is not less than the 2 steps from one exchange to the next (outer.every /"
        " fragments, of which there are 2); nearest: 1",
    ),
    (
        outer(every=4, dtype="top_k", density=0.001) | TWO,
        "outer.density: 0.001 is 4.096 of 4096 elements, and 4096 are cut into fours; nearest:"
        " 0.0009765625",
    ),
    (
        outer(every=4, density=0.25) | TWO,
        'outer.density: 0.25 is read with top_k; set outer.dtype = "top_k"',
    ),
    (
        outer(dtype="int8", delay=3),
        "outer.delay: 3 is read with islands; set outer.every\n"
        'outer.dtype: "int8" is read with islands; set outer.every',
    ),
    (
        outer(every=4) | TWO | {"parallel__dp_replicate": 3},
        "train.global_batch: 16 cannot be dealt to 3 islands, the ranks of dp_replicate; nearest: 18",
    ),
    (
        outer(every=4) | TWO | {"train__micro_batch": 16},
        "train.global_batch: 16 is not a multiple of dp_replicate x dp_shard x train.micro_batch ="
        " 2 x 16 = 32; nearest: 32, or train.micro_batch = 8",
    ),
    (
        outer(every=4)
        | TWO
        | {"data__validation": "stdlib", "train__validate_every": 2, "train__patience": 3}
        | {"checkpoint__interval": 2, "checkpoint__keep_best": 1},
        "train.patience: 3 goes by one validation loss, and each island has its own; use train.patience"
        " = 0, or outer.every = 0\n"
        "checkpoint.keep_best: 1 goes by one validation loss, and each island has its own; use"
        " checkpoint.keep_best = 0, or outer.every = 0",
    ),
    (outer(mix=1.0) | TWO, "command line: outer.mix: 1.0 should be less than 1"),
    (outer(evry=4) | TWO, "command line: outer.evry: unknown key; did you mean outer.every?"),
    (
        outer(dtype="int9") | TWO,
        'command line: outer.dtype: expected "float32" | "bfloat16" | "int8" | "e3m0" | "top_k",'
        ' got "int9"',
    ),
]
test_one_line_each = refusals(REFUSED)


PLAN = ("train.toml", "--cluster", "internet_1g", "--world-size", "16", "--as-is")


def test_the_planner_needs_to_know_the_islands() -> None:
    assert refused(plan, [*PLAN, "--outer.every=30"]) == [
        "train.toml: outer.every makes islands of the ranks of parallel.dp_replicate; set that to 2 or"
        " more that divide 16; it is 1",
    ]
    assert refused(
        plan, [*PLAN, "--outer.every=30", "--parallel.dp_replicate=4", "--outer.offload=false"]
    ) == [
        "train.toml: outer.offload: false keeps outer weights on the device, which plan does not count;"
        " plan with outer.offload = true",
    ]


def test_the_planner_plans_one_island(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "planned.toml"
    islands = ["--outer.every=30", "--outer.delay=2", "--parallel.dp_replicate=4", f"--write={file}"]
    assert plan([*PLAN, "--parallel.dp_shard=4", "--train.micro_batch=1", *islands]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "islands: 4 of 4 of the 16 ranks; planned is one of them"
    begin = lines.index("bytes that a rank sends to other islands (float32, fragments 1):")
    # 1,009,280 parameters over four ranks, 4 bytes each, to three islands; the first has more.
    sent = int(lines[begin + 1].split()[3].replace(",", ""))
    assert 1 < sent / (3 * 1_009_280) < 1.001
    # At 94% of 1 Gbit/s for a node of 8, and with 20 ms.
    seconds = sent / (0.94 * 0.015625e9) + 0.02
    assert lines[begin + 3].startswith(f"  a round takes {seconds:.3g} s; training waits")
    # Two float32 for each number of its quarter.
    kept = [
        line for line in lines if line.startswith("outer weights and momentum, not counted above: ")
    ]
    assert len(kept) == 1
    size = int(kept[0].partition(": ")[2].split()[0].replace(",", ""))
    assert 1 < size / (8 * 1_009_280 / 4) < 1.001
    assert kept[0].endswith(" GiB, in host memory")
    text = file.read_text()
    assert "# Planned for 16 ranks of internet_1g." in text
    assert "dp_replicate = 4" in text
    assert "every = 30" in text
