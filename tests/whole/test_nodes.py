"""A run outlives its nodes: agents of torchrun that are killed, and ones that come."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.command_lines import QUICK
from tests.support.ledger import check_ledger
from tests.support.nodes import Nodes, ranks_of, wait_for

STEPS, BATCH = 100, 12
SAVING = [*QUICK, "--checkpoint.interval=2", "--metrics.console_every=1", "--metrics.tensorboard=false"]
RUN = [*SAVING, f"--train.steps={STEPS}", f"--train.global_batch={BATCH}", "--train.micro_batch=1"]


def check(nodes: Nodes) -> None:
    """The run has taken its last step, and trained each sample once."""
    assert nodes.steps() == list(range(1, STEPS + 1))
    check_ledger(nodes.ledger, samples=STEPS * BATCH, batch=BATCH)


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
    """Agent and ranks at once: 4 ranks, then 2, to the last step."""
    with Nodes(tmp_path, *RUN) as nodes:
        _, second = nodes.join(), nodes.join()
        nodes.wait_for_ranks(4)
        nodes.kill(second)
        nodes.wait_for_ranks(2)
        assert nodes.end() == [0, 137], nodes.said()[-5000:]
    check(nodes)


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


@pytest.mark.slow
def test_a_rank_is_warned(tmp_path: Path) -> None:
    """By a signal to it alone: all ranks of all nodes save, and every node ends with success."""
    with Nodes(tmp_path, *RUN) as nodes:
        _, second = nodes.join(), nodes.join()
        nodes.wait_for_ranks(4)
        (agent,) = ranks_of(second.pid)
        victim = ranks_of(agent)[-1]
        os.kill(victim, signal.SIGTERM)
        assert [node.wait(300) for node in nodes.processes] == [0, 0], nodes.said()[-5000:]
    steps = nodes.steps()
    assert len(steps) < STEPS
    assert f"stopped by SIGTERM after step {len(steps)}; saved: " in nodes.said()
