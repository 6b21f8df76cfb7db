"""Code that several test modules use is in modules of helpers."""

import ast
import os
import re
import resource
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support import pool
from tests.support.command_lines import execute
from tests.support.helpers import UNKNOWN_CASES
from tests.support.pool import Pool

FOLDER = Path(__file__).parent


def imported(path: Path) -> list[str]:
    """The modules that a file imports, and what it imports from modules."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module or ''}.{alias.name}" for alias in node.names]
    return names


def test_each_long_case_is_a_test(request: pytest.FixtureRequest) -> None:
    assert request.config.stash[UNKNOWN_CASES] == []


def test_no_module_imports_a_test_module() -> None:
    """A file of tests can then be moved or read by itself."""
    modules = {path.stem for path in FOLDER.rglob("test_*.py")}
    results = [
        f"{path.relative_to(FOLDER)}: {name}"
        for path in FOLDER.rglob("*.py")
        for name in imported(path)
        if modules & set(name.split("."))
    ]
    assert results == []


def test_forks_end_when_one_fails(tmp_path: Path) -> None:
    script, start = tmp_path / "fails.py", time.monotonic()
    script.write_text(
        "import os, pathlib, sys, time\n"
        "print(sys.argv[1:], flush=True)\n"
        "here = pathlib.Path(__file__).parent / 'here'\n"
        "if os.environ['RANK'] == '0':\n"
        "    here.touch()\n"
        "    time.sleep(100)\n"
        "while not here.exists():\n"
        "    time.sleep(0.01)\n"
        "sys.exit(3)\n"
    )
    done = execute(str(script), "--a=1", ranks=2)
    assert (done.returncode, done.stdout, done.stderr) == (1, "['--a=1']\n" * 2, "")
    assert time.monotonic() - start < 90


def _calls(file: Path) -> int:
    """The number of this call, which ``file`` counts."""
    with file.open("a") as opened:
        opened.write("x")
    return file.stat().st_size


def _crash(until: int, count: Path) -> int:
    """The second rank crashes until this is its call of that number; the first waits for it."""
    if dist.get_rank() == 1 and _calls(count) < until:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would tell nothing new
        os.abort()
    dist.barrier()
    return dist.get_rank()


def test_a_crash_of_a_rank_is_borne_once(tmp_path: Path) -> None:
    ranks = Pool(2)
    where = r"(?s:.*)rank 1 ended here:\n(?s:.*)in _crash\n"
    with pytest.warns(UserWarning, match="rank 1 ended with exit code -6; .* runs again" + where):
        assert ranks.run(_crash, 2, 2, tmp_path / "one") == [0, 1]
    with pytest.raises(AssertionError, match="rank 1 ended with exit code -6" + where):
        ranks.run(_crash, 2, 2, tmp_path / "two")
    ranks.close()


def _hang(until: int, count: Path) -> int:
    """The first rank waits for the second, which never comes until this is its call of that number."""
    if dist.get_rank() == 1 and _calls(count) < until:
        time.sleep(600)
    dist.distributed_c10d._get_default_group().set_timeout(timedelta(seconds=1.5))
    dist.barrier()
    return dist.get_rank()


def test_a_rank_that_hangs_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GRACE", 1.0)  # the other rank never ends
    ranks = Pool(3)
    with pytest.warns(UserWarning, match=r"rank 0 failed:(?s:.*) runs again\n\nrank 1 is here:\n"):
        assert ranks.run(_hang, 2, 2, tmp_path / "one") == [0, 1]
    with pytest.raises(AssertionError) as error:
        ranks.run(_hang, 2, 2, tmp_path / "two")
    ranks.close()
    text = str(error.value)
    assert re.match(r"rank 0 failed:\nTraceback(?s:.*)in _hang\n *dist.barrier\(\)\n", text), text
    assert re.search(r"\n\nrank 1 is here:\n(?s:.*)in _hang\n", text), text
    assert "rank 2" not in text


def _compute(seconds: float) -> int:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return dist.get_rank()


@pytest.mark.slow
def test_ranks_that_compute_have_more_time() -> None:
    ranks = Pool(2, timeout=timedelta(seconds=2))  # a job may take 3 s, and 15 if its ranks compute
    assert ranks.run(_compute, 2, 5.0) == [0, 1]
    ranks.close()


@pytest.mark.slow
def test_ranks_that_all_hang_say_where() -> None:
    ranks = Pool(2, timeout=timedelta(seconds=5))
    with pytest.raises(TimeoutError) as error:
        ranks.run(time.sleep, 2, 600)
    ranks.close()
    where = r"\n\nrank {} is here:\n(?s:.*)in _worker\n(?s:.*)"
    text = str(error.value)
    assert re.match("rank 0 did not answer" + where.format(0) + where.format(1), text), text
