"""Questions to the planner: the picks of thirty, drawn ones, and picks against exhaustive records.

    python benchmarks/planner_questions.py picks [--number N] [--out picks.json] [--against picks.json]
    python benchmarks/planner_questions.py drawn [--number 200] [--seed 0] [--out answers.jsonl]
    python benchmarks/planner_questions.py exhaustive [--out benchmarks/results/planner_regret.jsonl]
    python benchmarks/planner_questions.py records [--out benchmarks/results/planner_records.json]

``picks`` asks thirty questions and writes the keys and the figures of each pick; two files that were
made on a quiet machine, under load or on one core must be equal, bit by bit. ``drawn`` asks drawn
questions and prints a line for each absurdity of an answer. ``exhaustive`` records all legal candidates
of five models on two clusters (every mesh, micro-batch and way to recompute, by ZeRO-3 and 1F1B),
and prints the time of the pick over that of the fastest that fits and, as the planner wants, leaves 5%
of the memory; what the file has already is not made again. ``records`` records a few compositions of
each family of models, which tests/planner/test_quick_estimate.py holds the quick estimates against.
Each ends with 1 if something is wrong: a pick, an absurdity, a regret above 3%.
"""

import argparse
import contextlib
import io
import json
import math
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import compose.cli.plan
from compose.__main__ import main as compose_main
from compose.config.toml import load
from compose.errors import ConfigError
from compose.planner.candidates import (
    Candidate,
    Space,
    candidates,
    fits,
    order,
    shape_for,
    with_keys,
)
from compose.planner.cluster import cluster_names, load_cluster
from compose.planner.record_cache import default_folder
from compose.planner.report import describe
from compose.planner.search import record_all, search

HERE = Path(__file__).parent

GIB = 2**30
# Thirty questions of one line: a model, devices, and what else was asked.
QUESTIONS = (
    "--model 1b --gpus 1xh100_sxm",
    "--model 1b --gpus 8xrtx4090",
    "--model 1b --gpus 8xh100_sxm --seq-len 32768",
    "--model 3b --gpus 2xrtx4090",
    "--model 3b --gpus 8xa100_40gb",
    "--model 7b --gpus 8xa100_80gb",
    "--model 7b --gpus 8xa100_40gb --seq-len 2048",
    "--model 7b --gpus 16xrtx4090",
    "--model 8b --gpus 8xh100_sxm",
    "--model 8b --gpus 8xh200 --seq-len 131072",
    "--model 8b --gpus 64xh100_sxm",
    "--model 8b --gpus 64xethernet_25g",
    "--model 8b --gpus 2xrtx4090",
    "--model 13b --gpus 16xa100_40gb",
    "--model 13b --gpus 8xb200",
    "--model 13b --gpus 32xh100_sxm --tokens 1T",
    "--model 30b --gpus 32xa100_80gb",
    "--model 70b --gpus 64xh100_sxm",
    "--model 70b --gpus 16xb200",
    "--model 70b --gpus 64xa100_80gb",
    "--model 70b --gpus 512xh100_sxm",
    "--model 175b --gpus 1024xa100_80gb",
    "--model 405b --gpus 512xh100_sxm",
    "--model 405b --gpus 8xh100_sxm",
    "--model mixtral:8x7b --gpus 64xh100_sxm",
    "--model qwen3:30b_a3b --gpus 16xh200",
    "--model deepseek_v3:16b --gpus 16xh100_sxm",
    "--model deepseek_v3:671b --gpus 2048xh100_sxm",
    "--model gpt2:1558m --gpus 8xa100_40gb",
    "--model gemma3:4b --gpus 4xa100_80gb",
)
_DENSE = ("1b", "3b", "7b", "8b", "13b", "30b", "70b")
_OTHERS = ("mixtral:8x7b", "qwen3:30b_a3b", "deepseek_v3:16b", "gpt2:1558m", "gemma3:4b", "gpt_oss:20b")


def answer(words: Sequence[str]) -> tuple[int, str, dict[str, Any] | None]:
    """Return the exit code, what was printed, and the answer as data, if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        path, printed = Path(folder) / "answer.json", io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                code = compose_main(["plan", *words, f"--json={path}"])
            except ConfigError as error:
                code = 2
                print(*error.problems, sep="\n")
            except Exception:
                code = 3
                traceback.print_exc(file=printed)
        data = json.loads(path.read_text()) if path.exists() else None
    return code, printed.getvalue(), data


def drawn(number: int, seed: int) -> Iterator[list[str]]:
    """Yield drawn questions; each is a function of its seed and its place."""
    for place in range(number):
        rng = random.Random(f"{seed} {place}")
        model = rng.choice(_DENSE if rng.random() < 0.6 else _OTHERS)
        cluster = rng.choice([name for name in cluster_names() if name not in ("cpu", "internet_1g")])
        gpus = rng.choice((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 96, 128, 256))
        words = [f"--model={model}", f"--gpus={gpus}x{cluster}"]
        if rng.random() < 0.5:
            words.append(f"--seq-len={rng.choice((512, 1000, 2048, 4096, 8192, 16384, 65536))}")
        if rng.random() < 0.3:
            words.append(f"--batch={rng.choice((gpus, 8 * gpus, 64 * gpus))}")
        if rng.random() < 0.3:
            words.append(f"--tokens={rng.choice(('1B', '300B', '15e12'))}")
        if rng.random() < 0.2:
            words.append("--objective=memory")
        yield words


def absurd(
    code: int, printed: str, data: Mapping[str, Any] | None, gpus: int, cluster: str, timed: bool
) -> list[str]:
    """Return what is absurd in an answer."""
    if "Traceback" in printed:
        return ["a traceback"]
    if data is None:
        lines = [line for line in printed.splitlines() if line]
        return [] if code == 2 and lines else [f"exit code {code} without an answer"]
    if code not in (0, 1):
        return [f"exit code {code} with an answer"]
    of_cluster = load_cluster(cluster)
    shares = of_cluster.efficiencies.products
    problems: list[str] = []
    tokens = data["global_batch"] * data["seq_len"]
    for one in data["candidates"]:
        keys, memory, step = one["keys"], one["memory"], one["step_seconds"]
        name = ", ".join(f"{k.partition('.')[2]} {v}" for k, v in keys.items())
        degrees = [keys[f"parallel.{a}"] for a in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
        checks = {
            "the degrees are not those of the devices": math.prod(degrees) == gpus,
            "a step of no time": 0 < step < math.inf,
            "more products than the device can": one["mfu"] <= max(shares.values()),
            "a bubble that is no share": 0 <= one["bubble"] < 1,
            "waits for longer than the step": all(
                0 <= v <= step * 1.001 for v in one["exposed"].values()
            ),
            "tokens per second are others": math.isclose(
                one["tokens_per_second_per_device"] * step * gpus, tokens, rel_tol=1e-6
            ),
            "allocated is above reserved": 0 < memory["allocated"] <= memory["reserved"],
            "categories are not the whole": math.isclose(
                sum(memory["by_category"].values()), memory["allocated"], rel_tol=0.01
            ),
            "fits and does not": one["fits"] == (memory["reserved"] <= data["capacity"])
            or one["host_bytes"] > 0,
        }
        problems += [f"{text}: {name}" for text, good in checks.items() if not good]
    first, *others = data["candidates"]
    for other in others:
        if first["fits"] < other["fits"]:
            problems.append("the pick does not fit, and another does")
        slower = first["step_seconds"] > 1.05 * other["step_seconds"]
        if slower and timed and first["fits"] and other["fits"]:
            problems.append("another that fits is more than 5% faster than the pick")
    return problems


def _pick(data: Mapping[str, Any] | None, printed: str) -> dict[str, Any]:
    if data is None:
        return {"message": printed.strip().splitlines()[-1:]}
    first = data["candidates"][0]
    return {k: first[k] for k in ("keys", "fits", "step_seconds", "mfu", "bubble", "memory")}


def picks(number: int, out: Path | None, against: Path | None) -> int:
    """Ask the first of the thirty questions; compare with another file of picks."""
    results = {}
    for question in QUESTIONS[:number]:
        began = time.monotonic()
        # The records that only say what to buy next are left out.
        with mock.patch.object(compose.cli.plan, "sensitivities", return_value=[]):
            _, printed, data = answer(question.split())
        results[question] = _pick(data, printed)
        print(f"{time.monotonic() - began:6.1f} s  {question}: {_line(results[question])}", flush=True)
        if out:  # after each, so that a run that is cut off loses nothing
            out.write_text(json.dumps(results, indent=1))
    if not against:
        return 0
    before = json.loads(against.read_text())
    now = json.loads(json.dumps(results))
    different = [question for question in now if now[question] != before.get(question)]
    print(f"{len(now) - len(different)} of {len(now)} picks are equal")
    for question in different:
        print(f"different: {question}")
    return int(bool(different))


def _line(pick: Mapping[str, Any]) -> str:
    if "message" in pick:
        return " ".join(pick["message"])
    keys = {k.rpartition(".")[2]: v for k, v in pick["keys"].items()}
    shown = [f"{k} {v}" for k, v in keys.items() if v not in (1, 0, "none", "")]
    size = pick["memory"]["reserved"] / GIB
    return f"{', '.join(shown)}: {pick['step_seconds']:.3f} s, {size:.1f} GiB, MFU {pick['mfu']:.1%}"


def fuzz(number: int, seed: int, out: Path | None) -> int:
    """Ask drawn questions; return 1 if an answer is absurd."""
    wrong = 0
    for place, words in enumerate(drawn(number, seed)):
        count, _, cluster = words[1].removeprefix("--gpus=").partition("x")
        began = time.monotonic()
        code, printed, data = answer(words)
        timed = "--objective=memory" not in words
        problems = absurd(code, printed, data, int(count), cluster, timed)
        wrong += bool(problems)
        line = {"place": place, "words": words, "pick": _pick(data, printed), "absurd": problems}
        if out:
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
        print(f"{time.monotonic() - began:6.1f} s  {place} {' '.join(words)}: {_line(line['pick'])}")
        for problem in problems:
            print(f"   absurd: {problem}", flush=True)
    print(f"{wrong} of {number} answers are absurd")
    return int(wrong > 0)


# Models and devices that are small enough to record all candidates.
_SMALL: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("llama", "1b", 4096, {}),
    ("llama", "3b", 8192, {"model.n_layers": 14}),
    ("gpt2", "774m", 1024, {}),
    ("qwen3", "1.7b", 4096, {}),
    ("qwen3", "30b_a3b", 4096, {"model.n_layers": 6}),
)
_SMALL_GPUS = 4
_SMALL_CLUSTERS = ("rtx4090", "l40s")
# The ZeRO stage, the schedule and what the search changes only later keep one value. ``candidates``
# tries all values of the other keys.
_PINNED = {
    "parallel.zero": 3,
    "parallel.pp_schedule": "1F1B",
    "parallel.offload": "none",
    "optimizer.offload": "none",
    "train.loss_chunk": 0,
    "activation_checkpoint.budget": 0.5,
    "activation_checkpoint.every": 2,
    "activation_checkpoint.segment": 1,
}
_REGRET = 1.03


def exhaustive(out: Path | None) -> int:
    """Record all legal candidates; return 1 if a pick takes 3% longer than the fastest that fits."""
    known = [json.loads(line) for line in out.read_text().splitlines()] if out and out.exists() else []
    wrong = sum(one.get("regret", 0.0) > _REGRET or not one.get("fits", True) for one in known)
    for model, preset, seq_len, more in _SMALL:
        for name in _SMALL_CLUSTERS:
            if any((one["model"], one["cluster"]) == (f"{model} {preset}", name) for one in known):
                continue
            keys = {
                "model.name": model,
                "model.preset": preset,
                "train.seq_len": seq_len,
                "train.global_batch": 8 * _SMALL_GPUS,
                "precision.param": "bfloat16",
                **_PINNED,
                **more,
            }
            space = _space(keys, name, _SMALL_GPUS, frozenset(keys))
            pick = search(space).candidates[0]
            # For memory no way to recompute is left out, and ``anyway`` leaves out no size.
            whole = replace(space, objective="memory")
            every = [c.config for c in candidates(whole, shape_for(space), anyway=True)]
            began = time.monotonic()
            recorded = [c for c in record_all(space, every) if isinstance(c, Candidate)]
            suitable = [c for c in recorded if fits(space, c)]
            line: dict[str, Any] = {"model": f"{model} {preset}", "cluster": name}
            line |= {"candidates": len(every), "legal": len(recorded), "fit": len(suitable)}
            if suitable and pick.estimate:
                best = min(suitable, key=lambda c: order(space, c))
                line["regret"] = _step(pick) / _step(best)
                line |= {"pick": describe(pick), "best": describe(best), "fits": fits(space, pick)}
                if _step(fastest := min(suitable, key=_step)) < _step(best):
                    line["fuller"] = describe(fastest)
                wrong += line["regret"] > _REGRET or not fits(space, pick)
            print(f"{time.monotonic() - began:6.1f} s  {json.dumps(line)}", flush=True)
            if out:
                with out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    return int(wrong > 0)


FAMILIES = (
    ("llama", "8b", 4096),
    ("qwen3", "1.7b", 4096),
    ("qwen3", "30b_a3b", 4096),
    ("mixtral", "8x7b", 4096),
    ("gpt_oss", "20b", 4096),
    ("deepseek_v3", "16b", 4096),
    ("gpt2", "774m", 1024),
    ("gemma3", "4b", 4096),
)
COMPOSITIONS: tuple[dict[str, Any], ...] = (
    {"parallel.dp_shard": 8},
    {"parallel.dp_shard": 8, "train.micro_batch": 2, "activation_checkpoint.mode": "full"},
    {"parallel.dp_shard": 8, "parallel.zero": 1, "activation_checkpoint.mode": "selective"},
    {"parallel.dp_shard": 4, "parallel.tp": 2, "train.micro_batch": 4},
    {"parallel.dp_shard": 8, "parallel.ep": 4, "activation_checkpoint.mode": "full"},  # with experts
)
RECORDED_ON = "h100_sxm", 8


def recorded_space(model: str, preset: str, seq_len: int) -> Space:
    """Return the space of a family's recorded compositions."""
    cluster, gpus = RECORDED_ON
    keys = {"model.name": model, "model.preset": preset, "train.seq_len": seq_len}
    keys |= {"train.global_batch": 4 * gpus, "train.micro_batch": 1, "precision.param": "bfloat16"}
    return _space(keys, cluster, gpus)


def records(out: Path | None) -> int:
    """Record the compositions of each family."""
    rows: list[dict[str, Any]] = []
    for model, preset, seq_len in FAMILIES:
        space = recorded_space(model, preset, seq_len)
        made = record_all(space, [with_keys(space.config, keys) for keys in COMPOSITIONS])
        for keys, one in zip(COMPOSITIONS, made, strict=True):
            line: dict[str, Any] = {"model": [model, preset, seq_len], "keys": keys}
            if isinstance(one, Candidate):
                line |= {"allocated": max(p.allocated for p in one.recorded.peaks), "step": _step(one)}
                line |= {"over": one.rough.memory / line["allocated"], "rough": one.rough.step}
                rows.append({k: line[k] for k in ("model", "keys", "allocated", "step")})
            print(json.dumps(line), flush=True)
        if out:
            out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    return 0


def _space(
    keys: Mapping[str, Any], cluster: str, gpus: int, pins: frozenset[str] = frozenset()
) -> Space:
    config = load(str(HERE.parent / "train.toml"), [(key, str(value)) for key, value in keys.items()])
    return Space(config, load_cluster(cluster), gpus, pins, cache=default_folder())


def _step(candidate: Candidate) -> float:
    return candidate.estimate.step_seconds if candidate.estimate else math.inf


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("picks", "drawn", "exhaustive", "records"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.what == "picks":
        return picks(given.number, given.out, given.against)
    if given.what == "exhaustive":
        return exhaustive(given.out)
    if given.what == "records":
        return records(given.out)
    return fuzz(given.number, given.seed, given.out)


if __name__ == "__main__":
    sys.exit(main())
