"""The fault lab: runs that are disturbed at random moments, and held against undisturbed ones.

    python -m benchmarks.faults [--out runs/faults.jsonl] [--faults 300] [--seed 0] [--only KIND ...]

Each run of a small model has a mesh, keys, and several faults, all drawn from the seed and the run's
number: kills, stops, exceptions, slow ranks, full disks, torn and flipped files, flipped bits in
memory, lost torchruns and lost nodes. It is started again until it ends. A line of the output is a
fault: seconds until it was noticed and until the first step after it ended, the steps lost, the samples
lost and trained twice by the ledger, and whether the end is bitwise that of the undisturbed run. Runs
that the file has are skipped. A run that fails is printed with the command that repeats it, and its
folder is kept. On a busy machine raise ``--timeout``.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.fault_runs import Case, Disturbed, judge, undisturbed
from tests.support.planned_faults import FLIPPED, IN_COPY, STARTING, TORN, Planned

STEPS, BATCH = 40, 8
SIZES = {"n_layers": 2, "dim": 32, "n_heads": 4, "n_kv_heads": 2}
BASE = (
    *(f"--model.{name}={size}" for name, size in SIZES.items()),
    "--train.seq_len=16",
    f"--train.global_batch={BATCH}",
    "--train.micro_batch=2",
    f"--train.steps={STEPS}",
    "--metrics.tensorboard=false",
)
# Ranks, and keys of [parallel] or of other tables.
MESHES: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "zero 3": (2, ("dp_shard=2",)),
    "zero 1": (2, ("dp_shard=2", "zero=1", "optimizer.name=muon")),
    "replicas": (2, ("dp_replicate=2", "zero=0")),
    "hsdp": (4, ("dp_replicate=2", "dp_shard=2")),
    "tp": (2, ("tp=2", "dp_shard=1")),
    "pp": (2, ("pp=2", "dp_shard=1")),
    "pp and dp": (4, ("pp=2", "dp_shard=2")),
    "cp": (2, ("cp=2", "dp_shard=1")),
    "experts": (2, ("dp_shard=2", "ep=2", "model.name=mixtral", "model.expert_dim=48")),
    "islands": (2, ("dp_replicate=2", "dp_shard=1", "outer.every=5")),
    "coded": (2, ("dp_shard=2", "comm.gradients=powersgd")),
    "compiled": (2, ("dp_shard=2", "compile.mode=block")),
    "pipedream": (
        2,
        ("pp=2", "dp_shard=1", "pp_schedule=PipeDream", "train.max_norm=0", "train.micro_batch=8"),
    ),
}
# Two torchruns with a rank each. With run.elastic the mesh changes when a node is lost.
NODES: dict[str, tuple[int, tuple[str, ...]]] = {
    "nodes": (1, ("dp_shard=-1",)),
    "elastic nodes": (1, ("tp=2", "dp_shard=1")),
}
COMPARED = ("replicas", "hsdp")  # where every tensor has a copy, with comm.check_every
# How often kinds are drawn.
KINDS = {
    "kill": 30,
    "exception": 14,
    "stop": 7,
    "slow rank": 4,
    "full disk": 7,
    TORN: 9,
    FLIPPED: 9,
    "bit in memory": 8,
    IN_COPY: 12,
    "lost agent": 8,
    "lost node": 8,
}
ENDING = ("kill", "exception", "lost agent", "lost node", TORN, FLIPPED, IN_COPY, "bit in memory")


def drawn(seed: int, number: int, only: Sequence[str], meshes: Sequence[str]) -> Case:
    """The run of a number."""
    chance = random.Random(f"{seed}/{number}")
    kinds = {kind: weight for kind, weight in KINDS.items() if not only or kind in only}
    names = [*MESHES, *NODES]
    if set(kinds) == {"lost node"}:
        names = [*NODES]
    elif set(kinds) == {"bit in memory"}:
        names = [*COMPARED]
    mesh = chance.choice([name for name in names if not meshes or name in meshes])
    ranks, keys = (MESHES | NODES)[mesh]
    if mesh not in NODES:
        kinds.pop("lost node", None)
    if mesh not in COMPARED:
        kinds.pop("bit in memory", None)
    # Where copies in memory are refused there are none.
    memory = chance.choice([0, 0, 1, 2]) if mesh not in ("islands", "pipedream") else 0
    for kind in (TORN, FLIPPED) if memory else (IN_COPY,):
        kinds.pop(kind, None)  # a start from memory reads no checkpoint
    if not kinds:
        kinds["kill"] = 1
    interval = chance.choice([1, 2, 3, 5])
    world = ranks * (2 if mesh in NODES else 1)
    count = chance.randint(3, 6)
    places = sorted(chance.randint(2, STEPS) for _ in range(count))
    plan: list[Planned] = []
    for step in places:
        kind = chance.choices(list(kinds), list(kinds.values()))[0]
        plan.append(_fault(chance, kind, mesh, world, step, interval, plan, memory))
    saving = [f"--checkpoint.interval={interval}"]
    saving.append(f"--checkpoint.async={chance.choice(['true', 'true', 'false'])}")
    if memory:
        saving.append(f"--checkpoint.memory={memory}")
    if any(fault.kind == "bit in memory" for fault in plan):
        saving.append("--comm.check_every=1")
    if mesh == "elastic nodes":
        saving.append("--run.elastic=true")
    whole = (*BASE, *(f"--{'' if '.' in key else 'parallel.'}{key}" for key in keys))
    return Case(
        number,
        mesh,
        ranks,
        whole,
        tuple(saving),
        plan,
        restarts=chance.choice([0, 100]) if mesh not in NODES else 100,
        nodes=2 if mesh in NODES else 1,
        fewest=chance.choice([1, 2]) if mesh == "nodes" else 1,
    )


def _fault(
    chance: random.Random,
    kind: str,
    mesh: str,
    world: int,
    step: int,
    interval: int,
    before: list[Planned],
    memory: int,
) -> Planned:
    """A fault of a kind, after the others of a run."""
    rank, seed = chance.randrange(world), chance.randrange(2**30)
    delay = chance.choice([0.0, chance.uniform(0, 0.05), chance.uniform(0, 0.5)])
    if kind == "exception":
        hows = ["data", "forward", "optimizer"] + ["backward"] * (mesh != "compiled")
        return Planned(kind, chance.choice(hows), rank, step=step, seed=seed)
    if kind == "slow rank":
        return Planned(kind, "", rank, step=step, delay=chance.uniform(0.1, 0.5), seconds=2.0)
    if kind == "full disk":
        how = chance.choice(["shards", "log"])
        # Long enough for a save or a line to come.
        moment = "save" if how == "shards" else "step"
        return Planned(kind, how, rank if how == "shards" else 0, moment, step, 0.0, 1.0)
    if kind == IN_COPY:
        return Planned(kind, "", rank, step=max(step, 4), seed=seed)
    if kind in (TORN, FLIPPED):
        return Planned(kind, "", 0, step=max(step, 3 * interval), seed=seed)
    if kind == "bit in memory":
        how = chance.choice(["weight", "gradient", "moment"])
        return Planned(kind, how, rank, step=max(step, 2), seed=seed)
    how, seconds = "", 0.0
    if kind == "stop":
        seconds = chance.choice([0.0, chance.uniform(0.5, 5)])
        if world == 1:  # nobody is there to notice
            seconds = max(seconds, 1.0)
    if kind.startswith("lost"):
        how = "alone" if kind == "lost agent" and chance.random() < 0.5 else "with its ranks"
    recovery = not before or before[-1].kind in ENDING
    moment = chance.choice(["step", "copy", "save", "publish", "prune", *["memory"] * (memory > 0)])
    if recovery and chance.random() < 0.4:
        moment = chance.choice(STARTING)
        if moment == "load" and not before:
            moment = "groups"  # there is nothing to load
        delay = chance.uniform(0, 4) if moment == "start" else delay
        if moment == "first step" and mesh == "compiled":
            delay = chance.uniform(0, 10)
    rank = 0 if moment in ("publish", "prune") else rank  # which alone publishes
    return Planned(kind, how, rank, moment, step, delay, seconds, seed)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description="The fault lab")
    parser.add_argument("--out", type=Path, default=Path("runs/faults.jsonl"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=300, help="until so many have happened")
    parser.add_argument("--only", nargs="*", default=[], choices=[*KINDS], metavar="KIND")
    parser.add_argument("--meshes", nargs="*", default=[], choices=[*MESHES, *NODES], metavar="MESH")
    parser.add_argument("--run", type=int, nargs="*", help="numbers of runs; default: from 0 on")
    parser.add_argument("--timeout", type=int, default=12, help="comm.timeout of the runs")
    parser.add_argument("--until", help="begin no run after this time, as 23:30")
    given = parser.parse_args(arguments)
    rows, folder = _read(given.out), given.out.with_suffix(".runs").resolve()
    mine = [row for row in rows if row["seed"] == given.seed]
    known = {row["run"] for row in mine}
    failed = 0
    for number in given.run if given.run is not None else range(10**6):
        happened = sum(row["kind"] != "none" for row in mine)
        if (given.run is None and happened >= given.faults) or _late(given.until):
            break
        if number in known:
            continue
        new = _one(number, given, folder)
        failed += bool(new[0]["failures"])
        mine += new
        with given.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in new)
    _show(mine)
    return 1 if failed else 0


def _late(until: str | None) -> bool:
    return until is not None and time.strftime("%H:%M") >= until


def _one(number: int, given: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run a number; return its rows, at least one."""
    case = drawn(given.seed, number, given.only, given.meshes)
    waits = (f"--comm.timeout={given.timeout}", f"--comm.start_timeout={4 * given.timeout}")
    whole = undisturbed(case, folder / case.mesh.replace(" ", "-"))
    place = folder / f"{given.seed}-{number}"
    shutil.rmtree(place, ignore_errors=True)
    case = Case(**{**vars(case), "saving": (*case.saving, *waits)})
    begun = time.monotonic()
    run = Disturbed(case, place, limit=600 + (60 + 10 * given.timeout) * len(case.plan))
    run.run()
    rows = judge(run, whole)
    seconds = round(time.monotonic() - begun, 1)
    common = {"seed": given.seed, "run": number, "mesh": case.mesh, "seconds": seconds}
    common |= {"launches": len(run.launches), "missed": len(case.plan) - len(rows)}
    kinds = ", ".join(f"{row['kind']} ({row['moment']})" for row in rows)
    print(f"run {number}: {case.mesh}, {seconds:.0f} s: {kinds or 'no fault'}", flush=True)
    if run.failures:
        words = ["python -m benchmarks.faults", f"--seed {given.seed} --run {number} --out again.jsonl"]
        for name in ("only", "meshes"):
            if getattr(given, name):
                words.append(f"--{name} " + " ".join(f"'{each}'" for each in getattr(given, name)))
        print(f"FAILED: {'; '.join(run.failures)}\n  {' '.join(words)}\n  {place}", flush=True)
    else:
        shutil.rmtree(place)
    return [{**common, **row, "failures": run.failures} for row in rows or [{"kind": "none"}]]


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table with a row for each kind: medians, and the largest in brackets."""
    print(
        "| fault | happened | noticed in (s) | recovered in (s) | steps lost | samples lost, repeated |"
        " bitwise, not, other mesh | failed |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    for kind in [*KINDS, "all"]:
        of = [row for row in rows if row["kind"] in (KINDS if kind == "all" else [kind])]
        if not of:
            continue
        ends = [row["bitwise"] for row in of]
        middles = [_middle(of, key) for key in ("noticed", "recovered", "steps_lost")]
        cells = [kind, str(len(of)), *middles]
        runs = {(row["seed"], row["run"]): row for row in of}.values()  # whose samples are counted once
        sums = [sum(row[f"samples_{what}"] for row in runs) for what in ("lost", "repeated")]
        cells.append(", ".join(map(str, sums)))
        cells.append(", ".join(str(ends.count(end)) for end in (True, False, None)))
        cells.append(str(sum(bool(row["failures"]) for row in of)))
        print(f"| {' | '.join(cells)} |")


def _middle(rows: Sequence[dict[str, Any]], key: str) -> str:
    values = [row[key] for row in rows if row.get(key) is not None]
    return f"{statistics.median(values):.1f} ({max(values):.1f})" if values else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
