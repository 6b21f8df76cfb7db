"""Records are made in processes, whose ends are told whatever ends them."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from compose.errors import ConfigError
from compose.planner.record_pool import RecordPool
from tests.support.command_lines import execute


def _twice(number: int) -> int:
    time.sleep(0.1 * (number == 1))
    return 2 * number


def _refused() -> None:
    raise ConfigError("this is refused")


def _broken() -> None:
    raise ArithmeticError("this is a defect")


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_results_come_as_they_end() -> None:
    with RecordPool(2) as pool:
        for number in range(4):
            pool.submit(number, _twice, number)
        pool.known("before", 7)
        pool.submit("refused", _refused)
        results = dict(pool.results())
    refused = results.pop("refused")
    assert isinstance(refused, ConfigError)
    assert str(refused) == "this is refused"
    assert results == {"before": 7} | {number: 2 * number for number in range(4)}


def test_more_is_asked_for_while_results_come() -> None:
    with RecordPool(1) as pool:
        pool.submit(1, _twice, 1)
        seen = []
        for name, result in pool.results():
            seen.append(result)
            if name < 3:
                pool.submit(name + 1, _twice, name + 1)
    assert seen == [2, 4, 6]


def test_a_defect_in_a_process_is_told_with_its_traceback() -> None:
    with RecordPool(1) as pool:
        pool.submit("", _broken)
        with pytest.raises(RuntimeError, match=r"(?s)_broken.*this is a defect"):
            next(pool.results())


def test_a_process_that_is_killed_does_not_hang_the_planner() -> None:
    with RecordPool(2) as pool:
        pool.submit("", _killed)
        with pytest.raises(RuntimeError, match=r"has ended \(-9\): the host's memory"):
            next(pool.results())


def _long() -> int:
    return int((torch.rand(1_000_000) < 2).sum())


_WITH_THREADS = """
import torch
from compose.planner.record_pool import RecordPool
from tests.planner.test_record_pool import _long

if __name__ == "__main__":
    torch.set_num_threads(2)
    _long()
    with RecordPool(1) as pool:
        pool.submit("a", _long)
        print(*pool.results())
"""


def test_a_process_does_not_wait_for_the_threads_of_the_one_that_started_it(tmp_path: Path) -> None:
    script = tmp_path / "with_threads.py"
    script.write_text(_WITH_THREADS)
    done = execute(str(script))
    assert done.stdout == "('a', 1000000)\n", done.stderr
