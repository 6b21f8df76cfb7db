"""A run outlives its nodes: agents of torchrun that are killed, and ones that come."""

import os
import re
import signal
import socket
from pathlib import Path

import pytest

from tests.support.command_lines import QUICK, begin, command, kill_sessions
from tests.support.helpers import ROOT
from tests.support.ledger import check_ledger
from tests.support.nodes import PATH, Nodes, children_of, wait_for
from tests.support.training import lines, logged_steps

STEPS, BATCH = 100, 12
SAVING = [*QUICK, "--checkpoint.interval=2", "--metrics.console_every=1", "--metrics.tensorboard=false"]
RUN = [*SAVING, f"--train.steps={STEPS}", f"--train.global_batch={BATCH}", "--train.micro_batch=1"]


def check(nodes: Nodes, steps: int = STEPS) -> None:
    """The run has gone on to its last step, and trained each sample once."""
    assert re.search(r": resumed after step [1-9]", nodes.said())
    assert nodes.steps() == list(range(1, steps + 1))
    check_ledger(nodes.ledger, samples=steps * BATCH, batch=BATCH)


@pytest.mark.full
def test_an_agent_is_killed_and_a_node_comes_back(tmp_path: Path) -> None:
    """Ranks are 4, then 2, then 4 again. A warning then ends the run with success, and it alone."""
    with Nodes(tmp_path, *RUN) as nodes:
        first, second = nodes.join(), nodes.join()
        nodes.wait_for_ranks(4)
        nodes.kill(second, ranks=False)
        nodes.wait_for_ranks(2)
        line = next(row for row in nodes.said().splitlines() if "stopped" in row)
        assert re.fullmatch(r"stopped by the death of a torchrun after step \d+; saved: .*", line)
        third = nodes.join()
        wait_for(lambda: second.poll() is not None)
        nodes.wait_for_ranks(4)
        first.send_signal(signal.SIGTERM)
        assert [node.wait(300) for node in (first, second, third)] == [0, 137, 0], nodes.said()[-5000:]
    steps = nodes.steps()
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) < STEPS
    assert f"stopped by SIGUSR1 after step {len(steps)}; saved: " in nodes.said()
    check_ledger(nodes.ledger, samples=len(steps) * BATCH, batch=BATCH)


@pytest.mark.slow
def test_a_node_is_lost(tmp_path: Path) -> None:
    """Agent and rank at once: 2 ranks, then 1, to the last step."""
    words = [*RUN, "--train.steps=40", "--train.micro_batch=6", "--checkpoint.interval=1"]
    with Nodes(tmp_path, *words, ranks=1) as nodes:
        _, second = nodes.join(), nodes.join()
        nodes.wait_for_ranks(2)
        nodes.kill(second)
        nodes.wait_for_ranks(1)
        assert nodes.end() == [0, 137], nodes.said()[-5000:]
    check(nodes, steps=40)


@pytest.mark.full
def test_two_nodes_are_lost_at_once(tmp_path: Path) -> None:
    """Of three: 3 ranks, then 1."""
    with Nodes(tmp_path, *RUN, nodes="1:3", ranks=1) as nodes:
        _, second, third = nodes.join(), nodes.join(), nodes.join()
        nodes.wait_for_ranks(3)
        nodes.kill(second, third)
        nodes.wait_for_ranks(1)
        assert nodes.end() == [0, 137, 137], nodes.said()[-5000:]
    check(nodes)


@pytest.mark.full
def test_a_node_is_added(tmp_path: Path) -> None:
    """All ranks save and start again with it: 2 ranks, then 4. No step is taken twice."""
    with Nodes(tmp_path, *RUN) as nodes:
        nodes.join()
        nodes.wait_for_ranks(2)
        nodes.join()
        nodes.wait_for_ranks(4)
        assert nodes.end() == [0, 0], nodes.said()[-5000:]
    check(nodes)
    assert check_ledger(nodes.ledger, samples=STEPS * BATCH, batch=BATCH) == 0


@pytest.mark.full
def test_the_host_of_the_rendezvous_is_lost(tmp_path: Path) -> None:
    """c10d's store goes with it, so the others fail; the same commands go on."""
    with Nodes(tmp_path, *RUN) as nodes:
        first, second = nodes.join(), nodes.join()
        nodes.wait_for_ranks(4)
        nodes.kill(first)
        assert [first.wait(300), second.wait(300)] == [137, 1], nodes.said()[-5000:]
        before = nodes.steps()
        assert len(before) < STEPS
        assert before == list(range(1, len(before) + 1))
    with Nodes(tmp_path, *RUN) as again:
        again.join()
        again.join()
        again.wait_for_ranks(4)
        assert again.end() == [0, 0], again.said()[-5000:]
    check(again)


@pytest.mark.full
def test_a_rank_is_warned(tmp_path: Path) -> None:
    """By a signal to it alone: all ranks of all nodes save, and every node ends with success."""
    with Nodes(tmp_path, *RUN, ranks=1) as nodes:
        _, second = nodes.join(), nodes.join()
        nodes.wait_for_ranks(2)
        (agent,) = children_of(second.pid)
        (victim,) = children_of(agent)
        os.kill(victim, signal.SIGTERM)
        assert [node.wait(300) for node in nodes.processes] == [0, 0], nodes.said()[-5000:]
    steps = nodes.steps()
    assert len(steps) < STEPS
    assert f"stopped by SIGTERM after step {len(steps)}; saved: " in nodes.said()


ELASTIC = [*RUN, "--run.elastic=true"]


@pytest.mark.full
def test_any_number_of_ranks(tmp_path: Path) -> None:
    """4, 3, 2, 4 and 5 ranks in one run: its samples and losses are those of an undisturbed run."""
    # At a high rate training itself makes a difference of rounding grow.
    words = [*ELASTIC, "--train.global_batch=60", "--parallel.tp=2", "--optimizer.lr=3e-4"]
    with Nodes(tmp_path, *words, nodes="1:9") as nodes:
        _, second, third = nodes.join(), nodes.join(1), nodes.join(1)
        nodes.wait_for_ranks(4)
        for killed, left in ((third, 3), (second, 2)):
            nodes.kill(killed)
            nodes.wait_for_ranks(left)
        for come, there in ((2, 4), (1, 5)):
            nodes.join(come)
            nodes.wait_for_ranks(there)
        assert nodes.end() == [0, 137, 137, 0, 0], nodes.said()[-5000:]
    meshes = [line for line in nodes.said().splitlines() if "run.elastic: " in line]
    for mesh in (
        "4 ranks: dp_shard 2, tp 2",
        "3 ranks: dp_shard 3",
        "2 ranks: tp 2",
        "5 ranks: dp_shard 5",
    ):
        assert any(f"run.elastic: {mesh}, micro_batch 1, " in line for line in meshes), meshes
    assert nodes.steps() == list(range(1, STEPS + 1))
    check_ledger(nodes.ledger, samples=STEPS * 60, batch=60)

    whole = tmp_path / "whole"
    words = [word for word in words if "elastic" not in word]
    alone = begin(command("train.py", *words, f"--run.dir={whole}", ranks=2))
    output = alone.communicate(timeout=600)
    assert alone.returncode == 0, output
    for one, other in zip(lines(nodes.run), lines(whole), strict=True):
        assert [one[key] for key in ("step", "samples", "lr")] == [
            other[key] for key in ("step", "samples", "lr")
        ]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


@pytest.mark.full
def test_a_rank_that_no_mesh_uses_waits(tmp_path: Path) -> None:
    """Two samples are too few for five ranks, and 5 divides no heads. A signal to it counts too."""
    words = [*ELASTIC, "--train.global_batch=2", "--parallel.tp=2", "--parallel.cp_method=ulysses"]
    with Nodes(tmp_path, *words, nodes="1:1", ranks=5) as nodes:
        node = nodes.join()
        nodes.wait_for_ranks(5)
        assert re.search(r"run.elastic: 4 ranks: .*; rank 4 waits, since no mesh of 5 ", nodes.said())
        (agent,) = children_of(node.pid)
        spare = children_of(agent)[-1]
        assert "RANK=4" in Path(f"/proc/{spare}/environ").read_text().split("\0")
        os.kill(spare, signal.SIGTERM)
        assert node.wait(300) == 0, nodes.said()[-5000:]
    assert f"stopped by SIGTERM after step {len(nodes.steps())}; saved: " in nodes.said()


@pytest.mark.full
def test_the_commands_of_the_documentation(tmp_path: Path) -> None:
    """Two nodes by docs/operations.md, word for word. One is lost, and the other ends the run."""
    text = (ROOT / "docs/operations.md").read_text()
    (block,) = re.findall(r"```\n(examples/launch.sh --nnodes 1:2 [^\n]*)\n```", text)
    for name in ("examples", "train.py", "train.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    processes = []

    def hosted() -> bool:
        with socket.socket() as one:
            return one.connect_ex(("localhost", 29411)) == 0

    for place in range(2):
        # The first node hosts the rendezvous, and the second one is lost.
        wait_for(lambda: hosted() == bool(processes), 120)
        with (tmp_path / f"node-{place}").open("w") as output:
            words = ["bash", "-c", f"cd {tmp_path} && exec {block}"]
            processes.append(begin(words, output, output, PYTHONPATH=str(ROOT), PATH=PATH))

    def said() -> str:
        return "".join((tmp_path / f"node-{place}").read_text() for place in range(2))

    first, second = processes
    try:
        wait_for(lambda: "  4 ranks: dp_shard 4" in said() and "step  10" in said(), 300)
        (agent,) = children_of(second.pid)
        for pid in (agent, *children_of(agent)):
            os.kill(pid, signal.SIGKILL)
        codes = first.wait(300), second.wait(300)
    finally:
        kill_sessions(processes)
    assert codes == (0, 137), said()[-5000:]
    assert logged_steps(tmp_path / "runs/mine") == list(range(1, 251))
