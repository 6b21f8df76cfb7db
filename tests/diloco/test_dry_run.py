"""The dry run prints what islands send, byte for byte."""

from typing import Any

import pytest
import torch

from compose.build import build
from compose.cli.dry_run import describe
from compose.diloco.loop import OuterLoop
from compose.parallel.islands import current
from compose.parallel.processes import start_timeout
from tests.diloco.cases import INSIDE, outer
from tests.support.helpers import Keys, make_job, tier
from tests.support.pool import Pool, make_mesh

CODES: dict[str, Keys] = {
    "float32": {},
    "bfloat16": outer(dtype="bfloat16"),
    "int8": outer(dtype="int8"),
    "e3m0": outer(dtype="e3m0"),
    "top_k": outer(dtype="top_k"),
}
ODD: Keys = {"model__n_layers": 5, "model__hidden_dim": 90, "train__global_batch": 24}


def _sent(keys: Keys) -> list[int]:
    """What this rank sends of each fragment."""
    job, islands = make_job(**keys), current()  # type: ignore[arg-type]
    composition = build(job, make_mesh(job.degrees), torch.device("cpu"))
    options, layers = job.config.outer, list(job.resolved.checkpoint)
    loop = OuterLoop(options, composition, layers, islands, start_timeout(job.config.comm))
    loop.start()
    found = []
    for step in range(1, options.every + 1):
        loop.after_step(step, 1000)
        if size := loop.metrics()["bytes"]:
            found.append(int(size))
    loop.close()
    return found


def _said(keys: Keys, capsys: pytest.CaptureFixture[str]) -> list[int]:
    """What the dry run prints: bytes in a round, and at once."""
    describe(make_job(**keys))  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("bytes that a rank sends to"))
    return [int(lines[begin + i][22:].split()[0].replace(",", "")) for i in (1, 2)]


def _compare(pool: Pool, inside: str, codes: Keys, capsys: pytest.CaptureFixture[str]) -> None:
    ranks, mesh = INSIDE[inside]
    islands = 2 if ranks == 4 else 3
    keys: dict[str, Any] = {"world_size": islands * ranks, "parallel__dp_replicate": islands}
    keys |= {"train__micro_batch": 1, **outer(every=6, fragments=2), **ODD, **mesh, **codes}
    if "model__name" in mesh:
        del keys["model__hidden_dim"]
    if "parallel__pp" in mesh:
        keys |= {"model__tie_embeddings": True}
    sent = pool.run(_sent, islands * ranks, keys, islands=islands)
    most = max(sent, key=sum)
    assert len(most) == 3
    assert _said(keys, capsys) == [sum(most), max(most)]


@pytest.mark.parametrize(
    "inside", [pytest.param(n, marks=tier(slow=n != "tp x zero 3")) for n in INSIDE]
)
def test_as_sent_from_each_mesh(pool: Pool, inside: str, capsys: pytest.CaptureFixture[str]) -> None:
    _compare(pool, inside, CODES["int8"], capsys)


@pytest.mark.parametrize("code", CODES)
def test_as_sent_in_each_code(pool: Pool, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    _compare(pool, "zero 3", CODES[code], capsys)
