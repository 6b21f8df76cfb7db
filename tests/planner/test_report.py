"""The table of candidates, the command that runs one, and amounts in words."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compose.config.toml import without_file
from compose.planner import report
from compose.planner.answer import composition_in_words
from compose.planner.cluster import load_cluster
from compose.planner.report import (
    as_data,
    between_islands,
    command_line,
    in_words,
    memory,
    seconds,
    table,
    write_toml,
)
from tests.support.planned import recorded, space_of

SPACE = space_of()
SEVERAL = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"


def test_a_key_has_a_column_only_if_some_candidate_changes_it() -> None:
    plain = recorded(SPACE, 1.0, 20.0, parallel__offload="none")
    header, *_ = table(SPACE, [plain]).splitlines()
    assert "offload" not in header
    moved = recorded(SPACE, 2.0, 40.0, parallel__offload="cpu", optimizer__offload="cpu")
    header, one, other = [line.split("  ") for line in table(SPACE, [plain, moved]).splitlines()]
    columns = [name.strip() for name in header if name]
    assert columns[-7:-5] == ["offload", "optimizer.offload"]
    assert [part.strip() for part in one if part].count("none") == 3
    assert [part.strip() for part in other if part].count("cpu") == 2
    assert other[-1] == "does not fit"


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"mode": "none"}, "none"),
        ({"mode": "budget", "budget": 0.25}, "budget 0.25"),
        ({"mode": "every_k", "every": 3}, "every_k 3"),
        ({"mode": "full", "segment": 4}, "full of 4"),
    ],
)
def test_recomputation_has_its_amount(keys: dict[str, Any], text: str) -> None:
    named = {f"activation_checkpoint__{key}": value for key, value in keys.items()}
    header, row = table(SPACE, [recorded(SPACE, 1.0, 1.0, **named)]).splitlines()
    end = header.index("recompute") + len("recompute")
    assert row[:end].endswith(f" {text}")


@pytest.mark.parametrize(
    ("size", "end"), [(20.0, "reserved 20.0 (activations 18.0)"), (0.01, "reserved 0.0")]
)
def test_memory_has_the_categories_that_fill_it(size: float, end: str) -> None:
    assert in_words(SPACE, recorded(SPACE, 1.0, size)).splitlines()[1].endswith(f" GiB, {end}")


def test_tp_that_does_not_divide_a_node_is_told() -> None:
    """In nodes of 8 some group of three ranks is in two nodes, but not if a job has six ranks."""
    for ranks, where, warning in (
        (6, "in the node", ""),
        (24, "over nodes", "tp 3 crosses nodes of 8 ranks"),
    ):
        space = space_of(ranks)
        one = recorded(space, 1.0, 1.0, parallel__tp=3)
        assert f"tensor parallel 3 {where}" in composition_in_words(space, one)
        assert ("crosses" in table(space, [one])) == bool(warning)
        assert as_data(space, [one])["candidates"][0]["why"] == warning


@pytest.mark.parametrize(
    ("ranks", "cluster", "start"),
    [
        (4, "a100_40gb", "--nproc-per-node 4"),
        (16, "a100_40gb", f"--nnodes 2 {SEVERAL} --nproc-per-node 8"),
        (12, "a100_40gb", f"--nnodes 2 {SEVERAL} --nproc-per-node 8"),
        (64, "gb200", f"--nnodes 16 {SEVERAL} --nproc-per-node 4"),
    ],
)
def test_the_command_names_what_differs(ranks: int, cluster: str, start: str) -> None:
    where = space_of(ranks, cluster)
    best = recorded(where, 1.0, 1.0, parallel__zero=3, parallel__tp=2, train__micro_batch=4)
    text = command_line(where, best, "a b.toml", {"model.name": "llama"})
    # A tp of the plan's nodes stays in a node, as it would not in nodes of 6.
    assert text.partition("  # ")[2] == ("--nproc-per-node 4 on the last node" if ranks == 12 else "")
    words = shlex.split(text, comments=True)
    assert " ".join(words).startswith(f"torchrun {start}")
    keys = [word for word in words if word.startswith("--") and "=" in word]
    assert words[words.index("train.py") + 1] == "a b.toml"
    assert keys == [
        "--model.name=llama",
        "--parallel.tp=2",
        f"--parallel.dp_shard={ranks // 2}",
        "--train.micro_batch=4",
    ]


@pytest.mark.parametrize(("objective", "most"), [("time", "fastest"), ("memory", "leanest")])
def test_reasons_are_those_of_the_objective(tmp_path: Path, objective: str, most: str) -> None:
    best = recorded(SPACE, 1.0, 1.0, parallel__zero=3)
    text = write_toml(replace(SPACE, objective=objective), best, "", {}, tmp_path)
    assert f"\nzero = 3  # the {most} stage that fits\n" in text


def test_equal_pipeline_ranks_do_not_hold_less() -> None:
    one = recorded(SPACE, 1.0, 1.0)
    assert one.estimate
    equal = replace(one, estimate=replace(one.estimate, peaks=one.estimate.peaks * 6))
    assert "  the other 2 pipeline ranks hold no more" in in_words(SPACE, equal).splitlines()


@pytest.mark.parametrize(("offload", "reason"), [("none", ""), ("cpu", "  # nothing else fits")])
def test_offload_has_a_reason_if_it_is_on(tmp_path: Path, offload: str, reason: str) -> None:
    text = write_toml(SPACE, recorded(SPACE, 1.0, 1.0, parallel__offload=offload), "", {}, tmp_path)
    assert f'\noffload = "{offload}"{reason}\n' in text


def test_kinds_of_device_have_their_names() -> None:
    kinds = tuple((load_cluster(name), 8) for name in ("a100_40gb", "h100_sxm"))
    first, *_ = in_words(replace(SPACE, kinds=kinds), recorded(SPACE, 1.0, 1.0)).splitlines()
    assert first.startswith("8 x NVIDIA A100-SXM4-40GB + 8 x NVIDIA H100 80GB HBM3, 38.7 GiB of each ")


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({}, "llama debug"),
        ({"model.preset": "1b"}, "llama 1b"),
        ({"model.preset": "8b", "model.n_layers": 42}, "llama of 10.2B parameters"),
    ],
)
def test_data_name_the_model(keys: dict[str, Any], name: str) -> None:
    """A preset with sizes of its own is another model."""
    config = without_file([(key, str(value)) for key, value in keys.items()])
    assert as_data(replace(SPACE, config=config), [])["model"] == name


def test_data_have_the_keys_that_were_refined() -> None:
    keys = {"activation_checkpoint__mode": "budget", "activation_checkpoint__budget": 0.3}
    one = recorded(SPACE, 1.0, 1.0, **keys)
    [data] = as_data(SPACE, [one])["candidates"]
    assert data["keys"]["activation_checkpoint.budget"] == 0.3
    assert "train.loss_chunk" not in data["keys"]


def test_amounts() -> None:
    assert [seconds(value) for value in (0, 123.4, 1.5, 0.9999, 0.0123, 2e-6)] == [
        *["0 s", "123 s", "1.50 s", "1.00 s", "12.3 ms", "2.00 µs"]
    ]
    assert [memory(value) for value in (0, 3 * 2**20, 71.25 * 2**30, 1234567 * 2**30)] == [
        *["0 GiB", "3.00 MiB", "71.2 GiB", "1,234,567 GiB"]
    ]


def test_islands_in_one_node_send_by_its_links(monkeypatch: pytest.MonkeyPatch) -> None:
    links = list[Any]()
    monkeypatch.setattr(
        report, "provided", lambda name: [("", lambda *given: [str(links.append(given[3]))])]
    )
    for islands in (2, 8):  # 4 of the 8 devices of a node, and 16
        where = replace(space_of(2), islands=islands)
        between_islands(where, None, recorded(where, 1.0, 1.0))
    cluster = SPACE.cluster
    assert links == [cluster.within, cluster.between]


def test_islands_share_a_batch_that_was_free(tmp_path: Path) -> None:
    """One island was planned; the run has the samples of both."""
    where = replace(space_of(4), islands=2)
    one = recorded(where, 1.0, 1.0, train__global_batch=128)
    assert "--train.global_batch=256" in command_line(where, one, "", {"train.global_batch": 128})
    assert "\nglobal_batch = 256\n" in write_toml(where, one, "", {}, tmp_path)
    plain = command_line(where, recorded(where, 1.0, 1.0), "", {"train.global_batch": 128})
    assert "--train.global_batch=128" in plain
