"""The command `python -m compose plan`: which mesh and options suit a model on a cluster."""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from compose.cli.command_line import Arguments, read_arguments, world_size_of
from compose.config.job import make_job, of_one_island
from compose.config.tables import Config, without_add_ons
from compose.config.toml import COMMAND_LINE, given_keys, load
from compose.errors import ConfigError, did_you_mean, whole_number, write_whole
from compose.planner.cluster import as_toml, load_cluster
from compose.planner.feedback import against, as_text, corrected
from compose.planner.page import write_html
from compose.planner.report import alternatives, as_data, in_words, table, write_toml
from compose.planner.search import DEGREES, TRIED, Candidate, Space, capacity, fewest, fits, own, search
from compose.planner.trace import diloco_bytes, diloco_lines, diloco_wait

_FLAGS = {
    "--cluster": "NAME or FILE.toml",
    "--world-size": "N",
    "--as-is": "",
    "--explain": "",
    "--objective": "time|memory|devices",
    "--tokens": "T",
    "--days": "D",
    "--free": "KEY[,KEY]",
    "--candidates": "N",
    "--against": "RUN_DIR",
    "--json": "FILE",
    "--report": "FILE.html",
    "--write": "FILE.toml",
}
_ABOUT = """\
Looks for the best mesh and options of FILE on a cluster. Prints the best candidates, each with an
estimate of its memory and step time (docs/planning.md). No GPU is needed.

  --cluster     a cluster of clusters/, or a file like one
  --world-size  ranks
  --as-is       estimate FILE as it is, and look for nothing
  --explain     say what the best candidate's alternatives cost
  --objective   what is made small: step time (default), memory, or the number of devices
  --tokens      with --objective devices: tokens to train on
  --days        with --objective devices: days for them
  --free        keys that FILE sets and the search may change
  --candidates  how many candidates are estimated in full; default: 12
  --against     folder of a run: compare its time and memory with the estimate
  --json        file for all candidates
  --report      page for a browser
  --write       file for FILE with the best candidate's keys; with --against, for a corrected cluster
"""
_OBJECTIVES = ("time", "memory", "devices")
_SECONDS = 60.0


def plan(arguments: Sequence[str]) -> int:
    """Find the best mesh: python -m compose plan FILE.toml --cluster NAME --world-size N."""
    given = read_arguments(arguments, "python -m compose plan", _FLAGS, _ABOUT)
    if "--against" in given.flags:
        return _against(given)
    space = _space(given)
    if "--as-is" in given.flags:
        try:
            found = [own(space)]
        except ConfigError as error:
            raise ConfigError(*(f"{given.file}: {problem}" for problem in error.problems)) from None
    elif space.objective == "devices":
        space, found = _fewest(given, space)
    else:
        found = _search(given, space)
    best = found[0]
    print(table(space, found), in_words(space, best), sep="\n\n")
    if space.islands > 1:
        print("", *_between_islands(given, space, best), sep="\n")
    if not fits(space, best):
        print(_short(space, best))
    if "--explain" in given.flags:
        print("", *alternatives(space, best), sep="\n")
    _write(given, space, found)
    return 0


def _against(given: Arguments) -> int:
    """Compare a run with its prediction; --write makes a corrected cluster's file."""
    if not given.flags.get("--cluster"):
        raise ConfigError(f"{COMMAND_LINE}: plan: --against needs --cluster, on which the run was made")
    cluster, folder = load_cluster(given.flags["--cluster"]), Path(given.flags["--against"])
    rows = against(folder, cluster)
    print(as_text(rows))
    if "--write" in given.flags:
        path = Path(given.flags["--write"])
        notes = [f"{cluster.name}, corrected by the run {folder}"]
        try:
            write_whole(path, as_toml(corrected(cluster, rows), notes).encode())
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"{COMMAND_LINE}: --write: cannot write {path}: {reason}") from None
        print(f"{path}: written", flush=True)
    return 0


def _space(given: Arguments) -> Space:
    for flag in ("--cluster", "--world-size"):
        if not given.flags.get(flag):
            raise ConfigError(f"{COMMAND_LINE}: plan: needs {flag}; see --help")
    objective = given.flags.get("--objective", "time")
    if objective not in _OBJECTIVES:
        raise ConfigError(
            f"{COMMAND_LINE}: --objective: {objective} is none of {', '.join(_OBJECTIVES)}"
            f"{did_you_mean(objective, _OBJECTIVES)}"
        )
    cluster, world_size = load_cluster(given.flags["--cluster"]), world_size_of(given)
    if world_size > cluster.node and world_size % cluster.node:
        print(
            f"cluster {cluster.name}: its nodes of {cluster.node} do not divide {world_size} ranks; the"
            " last node is taken as whole",
            file=sys.stderr,
        )
    keys = given_keys(given.file, given.overrides)
    # The mesh is what is looked for. Only the command line fixes it.
    fixed = {key for key, origin in keys.items() if origin == COMMAND_LINE or key not in DEGREES}
    known = [*DEGREES, *TRIED]
    for key in filter(None, given.flags.get("--free", "").split(",")):
        if key not in known:
            raise ConfigError(
                f"{COMMAND_LINE}: --free: {key} is no key that is tried{did_you_mean(key, known)}"
                f" (known: {', '.join(known)})"
            )
        fixed.discard(key)
    config, islands = load(given.file, given.overrides), 1
    if config.outer.every:
        islands, all_ranks = config.parallel.dp_replicate, world_size
        if islands < 2 or world_size % islands:
            raise ConfigError(
                f"{given.file}: outer.every makes islands of the ranks of parallel.dp_replicate; set"
                f" that to 2 or more that divide {world_size}; it is {islands}"
            )
        config, world_size = of_one_island(config), world_size // islands
        config = without_add_ons(config)
        fixed.add("parallel.dp_replicate")
        print(f"islands: {islands} of {world_size} of the {all_ranks} ranks; planned is one of them")
    return Space(config, cluster, world_size, frozenset(fixed), objective, islands)


def _between_islands(given: Arguments, space: Space, best: Candidate) -> list[str]:
    """Return what islands send each other, and how long training waits for it."""
    outer = load(given.file, given.overrides).outer
    messages = diloco_bytes(make_job(best.config, space.world_size), outer)
    assert best.estimate is not None
    link, seconds = space.cluster.between, best.estimate.step_seconds
    return [
        *diloco_lines(messages, space.islands, outer),
        diloco_wait(messages, space.islands, outer, link, seconds),
    ]


def _fewest(given: Arguments, space: Space) -> tuple[Space, list[Candidate]]:
    amounts = {flag: _amount(given, flag) for flag in ("--tokens", "--days")}
    found = fewest(space, amounts["--tokens"], amounts["--days"], _progress())
    if not found[1]:
        raise ConfigError(
            f"{given.file}: {space.world_size} devices of {space.cluster.name} do not see"
            f" {amounts['--tokens']:g} tokens in {amounts['--days']:g} days; give more of --world-size"
            " or --days"
        )
    return found


def _amount(given: Arguments, flag: str) -> float:
    text = given.flags.get(flag, "")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        what = f"{text} is not" if text else "--objective devices needs"
        raise ConfigError(f"{COMMAND_LINE}: {flag}: {what} a number above 0, as 15e12")
    return value


def _progress() -> Callable[[str], None]:
    began = time.monotonic()

    def progress(text: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {text}", file=sys.stderr, flush=True)

    return progress


def _search(given: Arguments, space: Space) -> list[Candidate]:
    text = given.flags.get("--candidates", "12")
    if (most := whole_number(text)) < 1:
        raise ConfigError(f"{COMMAND_LINE}: --candidates: {text} is not a number of candidates")
    try:
        found = search(space, most, _SECONDS, _progress())
    except ConfigError as error:
        raise ConfigError(*(f"{given.file}: {problem}" for problem in error.problems)) from None
    if not found:
        raise ConfigError(
            f"{given.file}: no mesh of {space.world_size} ranks divides train.global_batch ="
            f" {space.config.train.global_batch} and may fit on {space.cluster.name}; use more ranks,"
            " recomputation, or parallel.offload"
        )
    return found


def _short(space: Space, best: Candidate) -> str:
    over = (best.reserved - capacity(space.cluster)) / 2**30
    cures = ["more devices"]
    if best.config.activation_checkpoint.mode != "full":
        cures.append('activation_checkpoint.mode = "full"')
    if best.config.parallel.offload == "none":
        cures.append('parallel.offload = "cpu" with zero 3')
    return f"nothing fits; the best is short of {over:.1f} GiB a device; {', '.join(cures)} would help"


def _write(given: Arguments, space: Space, found: Sequence[Candidate]) -> None:
    data = as_data(space, found)
    for flag in ("--json", "--report", "--write"):
        if flag not in given.flags:
            continue
        path = Path(given.flags[flag])
        try:
            if flag == "--json":
                write_whole(path, json.dumps(data, indent=1).encode())
            elif flag == "--report":
                write_html(data, path)
            else:
                config = load(given.file, given.overrides)
                set_there = {name: _value(config, name) for name, _ in given.overrides}
                text = write_toml(space, found[0], given.file, set_there, path)
                write_whole(path, text.encode())
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"{COMMAND_LINE}: {flag}: cannot write {path}: {reason}") from None
        print(f"{path}: written", flush=True)


def _value(config: Config, name: str) -> object:
    """Return the value of a key of the config."""
    head, _, key = name.partition(".")
    held = getattr(config, head)
    if head == "model" and not hasattr(held, key):
        held = held.config
    return getattr(held, key)
