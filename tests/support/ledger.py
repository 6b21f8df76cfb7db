"""What the ledgers of train_with_ledger.py say."""

import contextlib
import json
from pathlib import Path

from tests.support.fault_runs import history


def doing(ledger: Path) -> dict[int, set[str]]:
    """Read what ranks are doing, by process."""
    words = [path.read_text().split() for path in ledger.glob("*.now")]
    return {int(line[0]): set(line[1:]) for line in words if line}


def world_at_work(ledger: Path) -> set[int]:
    """The number of ranks that those say who are in a step now."""
    result = set()
    for pid, now in doing(ledger).items():
        with contextlib.suppress(OSError):  # it may have ended
            variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
            result |= {int(v[11:]) for v in variables if "step" in now and v.startswith("WORLD_SIZE=")}
    return result


def check_ledger(ledger: Path, samples: int, batch: int) -> int:
    """The history that survived has trained each of ``samples`` once, on any number of ranks.

    Returns how many batches the first rank has read again.
    """
    seen = history(ledger, samples, batch)
    assert (seen.lost, seen.repeated, seen.problems) == (0, 0, [])
    entries = map(json.loads, (ledger / "0.jsonl").read_text().splitlines())
    firsts = [entry["batch"][0] for entry in entries if "batch" in entry]
    return len(firsts) - len(set(firsts))
