"""Each benchmark prints one JSON line; the figures of a test run mean nothing, LOG.md has some."""

import json

from tests.test_trainer import execute


def test_overhead() -> None:
    done = execute("benchmarks/overhead.py", "--steps", "4")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["benchmark"] == "overhead"
    assert 0.3 < result["ratio"] < 3
    assert result["tokens_per_second"] > 0
