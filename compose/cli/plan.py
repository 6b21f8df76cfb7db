"""The command plan: which mesh and options suit a model on a cluster."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from compose.cli import COMMANDS
from compose.cli.command_line import ParsedWords, check_out, flag_error, number_of, read_arguments
from compose.cli.question import (
    STANDARD,
    Question,
    amount,
    amount_in_words,
    for_devices,
    freed,
    parameters,
    pinned,
    pinned_words,
    question_words,
    read_question,
)
from compose.config.job import check_dealt
from compose.config.models import find_model, folder_name
from compose.config.tables import TABLES, without_add_ons
from compose.config.toml import COMMAND_LINE, files_of, values_of
from compose.errors import ConfigError, did_you_mean, refused_in, write_whole, written
from compose.planner import report
from compose.planner.against_run import against, comparison_table, corrected
from compose.planner.answer import (
    batch_table,
    composition_in_words,
    example_tokens,
    expected,
    further,
    further_in_words,
    kwh_of,
    legend,
    sensitivities,
    sentences,
)
from compose.planner.candidates import (
    Candidate,
    Space,
    candidates,
    capacity,
    fits,
    lack_of_node,
    shape_for,
    with_keys,
)
from compose.planner.cluster import load_cluster
from compose.planner.estimate import check_counted
from compose.planner.explain import explain, why_no_mesh
from compose.planner.measure import as_toml
from compose.planner.page import page_of
from compose.planner.record_cache import default_folder
from compose.planner.report import SearchResult
from compose.planner.search import MOST, fewest, own, search

T = TypeVar("T")
_OBJECTIVES = ("time", "memory", "devices", "params")
_ONE_BATCH = ("--as-is", "--objective devices", "--objective params")
_WRITTEN = ("--json", "--report", "--write")
_OF_A_SEARCH = ("--candidates", "--seconds", "--objective", "--free", "--keep", "--tokens")


def plan(arguments: Sequence[str]) -> int:
    """Find the best mesh of a cluster for a model."""
    given = read_arguments(arguments, "python -m compose plan", COMMANDS["plan"])
    _check_flags(given)
    if "--against" in given.flags:
        return _against(given)
    largest, began = given.flags.get("--objective") == "params", time.monotonic()
    question, searched = _largest(given, began) if largest else (read_question(given), None)
    if "--as-is" not in given.flags:
        question = for_devices(given, question)
    space, answer, batches, firsts = _space(given, question), {}, [], []
    cut, refused = list[str](), list[ConfigError]()
    if searched:
        results, cut = searched.candidates, [_looked_at(searched)] * searched.capped
    elif "--as-is" in given.flags:
        with refused_in(question.where):
            results = [own(space)]
    elif space.objective == "devices":
        space, results = _fewest(given, question, space)
    else:
        asked, left = question.batches or (space.config.train.global_batch,), ()
        for number, batch in enumerate(asked):
            keys = {"train.global_batch": batch}
            one = replace(question, config=with_keys(question.config, keys)) if number else question
            if number and "--model" in given.flags:
                model, count = given.flags["--model"], parameters(one.config)
                one = replace(one, words=question_words(model, count, one.config, batch_given=True))
            here = _space(given, one) if number else space
            try:
                batches.append((one, here, _search(given, one, here, began)))
            except KeyboardInterrupt:
                if not batches:
                    raise
                left = asked[number:]
                break
            except ConfigError as error:
                if len(question.batches) < 2:
                    raise
                print(f"batch {batch}: {error}", file=sys.stderr)
                refused.append(error)
                continue
            if batches[-1][2].capped:
                cut = [f"batch {batch}: " * (len(asked) > 1) + _looked_at(batches[-1][2])]
                left = asked[number + 1 :]
                break
        if not batches:
            raise refused[-1]
        cut += [f"batch {', '.join(map(str, left))} left out"] if left else []
        firsts = [(space, one.candidates[0]) for _, space, one in batches]
        rates = [(fits(*row), row[1].recorded.tokens_per_second_per_device) for row in firsts]
        question, space, searched = batches[rates.index(max(rates))]
        results = searched.candidates
    best = results[0]
    if "--as-is" not in given.flags:
        late = time.monotonic() - began > amount(given, "--seconds", math.inf)
        answer = _answer(given, question, space, results, not (cut or late or space.kinds))
    if len(batches) > 1:
        print(batch_table(firsts, answer["tokens"]), "", sep="\n")
    print(report.table(space, results), legend(space), report.in_words(space, best), sep="\n\n")
    if space.islands > 1:
        print("", *report.between_islands(space, question.config.outer, best), sep="\n")
    if words := "--as-is" not in given.flags and pinned_words(space.config, pinned(given, question)):
        print("", words, sep="\n")
    if cut:
        print(f"capped: {', and '.join(cut)}; without the cap the answer may be another")
    if not fits(space, best):
        print(_short(space, best, searched))
    if "--explain" in given.flags:
        lines = _unless_stopped(lambda: explain(space, results))
        variants = None if lines is None else _unless_stopped(lambda: further(space, best))
        print("", "Beside the first one:", *(lines or []), sep="\n")
        print(*(further_in_words(best, one) for one in variants or []), sep="\n")
    if "--write" not in given.flags and fits(space, best):
        file = "" if question.keys else given.file
        print("", "To run it, with --data.path for the data (--write keeps it in a file):", sep="\n")
        print(report.command_line(space, best, file, _set_there(given, question)))
    _write(given, question, space, results, answer)
    return 0


def _check_flags(given: ParsedWords) -> None:
    """Raise ConfigError for flags without an effect beside another, and for outputs that are inputs."""
    flags, objective = given.flags, given.flags.get("--objective")
    files = [flag for flag in _WRITTEN if flag in flags]
    for flag in files:
        check_out(flag, Path(flags[flag]))
    if "--against" in flags:
        for word in (*given.plain, *flags):
            if word not in ("--against", "--cluster", "--write"):
                raise flag_error("--against", f"goes with --cluster and --write; remove {word}")
        for key, _ in given.overrides:
            if key != "model.path":
                raise flag_error("--against", f"takes the keys of the run; remove --{key}")
        return
    for flag in _OF_A_SEARCH if "--as-is" in flags else ():
        if flag in flags:
            raise flag_error("--as-is", f"searches nothing; remove {flag}")
    for flag in ("--candidates", "--seconds") if objective == "devices" else ():
        if flag in flags:
            raise flag_error("--objective", f"devices searches by its own rule; remove {flag}")
    if "--days" in flags and objective != "devices":
        raise flag_error("--days", "goes with --objective devices")
    other = "--as-is" if "--as-is" in flags else f"--objective {objective}"
    if "," in flags.get("--batch", "") and other in _ONE_BATCH:
        raise flag_error("--batch", f"{other} takes one number")
    if "--tokens" in flags:
        amount(given, "--tokens")
    if not files:
        return
    by_name = "--model" in flags or flags.get("--objective") == "params"
    names = [*([] if by_name else files_of(given.file)), flags.get("--cluster", "")]
    places = [text.partition("x")[2] for text in flags.get("--gpus", "").split("+")]
    if model := flags.get("--model"):
        places += [model, os.path.join(model, "config.json")]
    names += filter(os.path.isfile, places)
    used = {os.path.realpath(name): f"{name} is read for this plan" for name in names if name}
    for flag in files:
        place = os.path.realpath(flags[flag])
        if place in used:
            raise flag_error(flag, f"{used[place]}; give another name")
        used[place] = f"{flags[flag]} is the file of {flag}"


def _answer(
    given: ParsedWords, question: Question, space: Space, results: Sequence[Candidate], made: bool
) -> dict[str, Any]:
    """Print the answer in sentences, each once it is known, and return it for JSON."""
    tokens = amount(given, "--tokens", example_tokens(space))
    what = f"{amount_in_words(tokens)} tokens"
    if "--tokens" not in given.flags:
        which = " that a token uses" if example_tokens(space) < 20 * parameters(space.config) else ""
        what += f" (20 for each parameter{which}, as in Hoffmann et al. 2022)"
    others = _unless_stopped(lambda: expected(space, results)) if made else []
    made, others = made and others is not None, others or []
    first = sentences(space, results[0], others, [], (tokens, what))[: 1 + bool(others)]
    print(*filter(None, [question.words]), *first, sep="\n", flush=True)
    variants = (_unless_stopped(lambda: sensitivities(space, results[0])) if made else []) or []
    texts = sentences(space, results[0], others, variants, (tokens, what))
    print(*texts[len(first) :], "", sep="\n")
    return {
        "sentences": texts,
        "tokens": tokens,
        "kwh": kwh_of(space, results[0], tokens),
        "composition": composition_in_words(space, results[0]),
        "expected": {other.name: other.as_data(space) for other in others},
        "sensitivities": {variant.name: variant.step for variant in variants},
    }


def _unless_stopped(compare: Callable[[], list[T]]) -> list[T] | None:
    """Return comparisons; None after Ctrl-C, since the search has its answer."""
    try:
        return compare()
    except KeyboardInterrupt:
        print("interrupted: some comparisons are left out", file=sys.stderr)
        return None


def _against(given: ParsedWords) -> int:
    """Compare a run with its prediction; --write makes a corrected cluster's file."""
    if not given.flags.get("--cluster"):
        raise flag_error("plan", "--against needs --cluster, on which the run was made")
    cluster, folder = load_cluster(given.flags["--cluster"]), Path(given.flags["--against"])
    for key, value in given.overrides:
        if key == "model.path":  # the code of a run's model, which is then known
            find_model(folder_name(value))
    rows = against(folder, cluster)
    print(comparison_table(rows))
    if "--write" in given.flags:
        notes = [f"{cluster.name}, corrected by the run {folder}"]
        _write_file("--write", Path(given.flags["--write"]), as_toml(corrected(cluster, rows), notes))
    return 0


def _space(given: ParsedWords, question: Question) -> Space:
    objective = given.flags.get("--objective", "time")
    if objective not in _OBJECTIVES:
        near = did_you_mean(objective, _OBJECTIVES)
        raise flag_error("--objective", f"{objective} is none of {', '.join(_OBJECTIVES)}{near}")
    cluster, world_size = question.cluster, question.world_size
    if world_size > cluster.node and world_size % cluster.node:
        print(
            f"cluster {cluster.name}: its nodes of {cluster.node} do not divide {world_size} ranks; the"
            " last node is taken as whole",
            file=sys.stderr,
        )
    fixed = set(pinned(given, question))
    config, islands = question.config, 1
    with refused_in(question.where):
        check_counted(config)
    if "outer" in TABLES and config.outer.every:
        islands, all_ranks = config.parallel.dp_replicate, world_size
        if islands < 2 or world_size % islands:
            raise ConfigError(
                f"{question.where}: outer.every makes islands of the ranks of parallel.dp_replicate;"
                f" set that to 2 or more that divide {world_size}; it is {islands}"
            )
        if not config.outer.offload:
            raise ConfigError(
                f"{question.where}: outer.offload: false keeps outer weights on the device, which plan"
                " does not count; plan with outer.offload = true"
            )
        world_size, train = world_size // islands, config.train
        check_dealt(train.global_batch, islands)
        config = replace(
            without_add_ons(config),
            parallel=replace(config.parallel, dp_replicate=1),
            train=replace(train, global_batch=train.global_batch // islands),
        )
        fixed.add("parallel.dp_replicate")
        print(f"islands: {islands} of {world_size} of the {all_ranks} ranks; planned is one of them")
    pins, freely, cache = frozenset(fixed), freed(given), default_folder()
    of_one_kind = {"--objective": objective in ("devices", "params"), "outer.every": islands > 1}
    for key, there in of_one_kind.items():
        if there and question.kinds:
            raise flag_error(key, "goes with one kind of device; --gpus names several")
    return Space(config, cluster, world_size, pins, objective, islands, freely, cache, question.kinds)


def _largest(given: ParsedWords, began: float) -> tuple[Question, SearchResult]:
    """Search the standard sizes from the largest on, and return the first that fits."""
    for what in [*given.plain, *(flag for flag in ("--model",) if flag in given.flags)]:
        raise flag_error("--objective", f"params looks for a standard size; it goes without {what}")
    if "--gpus" not in given.flags:
        raise flag_error("--objective", "params needs --gpus, as 16xa100_40gb")
    for name in reversed([*STANDARD]):
        given.flags["--model"] = name
        question = read_question(given)
        origins = {"parallel.offload": "--objective params", **question.given}
        question = replace(question, given=origins)
        space = _space(given, question)
        if next(candidates(space, shape_for(space)), None):
            searched = _search(given, question, space, began)
            if fits(space, searched.candidates[0]):
                return question, searched
        _progress(time.monotonic(), f"{name} does not fit")
    raise flag_error("--objective", f"none of {', '.join(STANDARD)} fits on {given.flags['--gpus']}")


def _fewest(given: ParsedWords, question: Question, space: Space) -> tuple[Space, list[Candidate]]:
    tokens, days = amount(given, "--tokens"), amount(given, "--days")
    with refused_in(question.where):
        result = fewest(space, tokens, days, partial(_progress, time.monotonic()))
    if not result[1]:
        raise ConfigError(
            f"{question.where}: {space.world_size} devices of {space.cluster.name} do not see"
            f" {tokens:g} tokens in {days:g} days; give more of --world-size or --days"
        )
    return result


def _progress(began: float, text: str) -> None:
    print(f"{time.monotonic() - began:5.0f} s  {text}", file=sys.stderr, flush=True)


def _search(given: ParsedWords, question: Question, space: Space, began: float) -> SearchResult:
    most = number_of(given, "--candidates", "candidates", MOST)
    seconds = amount(given, "--seconds", math.inf) - (time.monotonic() - began)
    with refused_in(question.where):
        result = search(space, most, seconds, partial(_progress, time.monotonic()))
    if not result.candidates:
        raise ConfigError(
            f"{question.where}: no mesh of {space.world_size} ranks is legal: {why_no_mesh(space)}"
        )
    return result


def _looked_at(searched: SearchResult) -> str:
    many, fit = len(searched.candidates), searched.let_through
    if many > fit:
        return f"no candidate may fit, and {many} of those that need least memory were looked at"
    return f"{many} of {fit} candidates that may fit were looked at"


def _short(space: Space, best: Candidate, searched: SearchResult | None) -> str:
    over = (best.reserved - capacity(space.cluster)) / 2**30
    by = f"the best {lack_of_node(space, best) or f'is short of {over:.1f} GiB a device'}"
    if searched and not searched.certain:
        more = searched.let_through
        return f"{_looked_at(searched)}, and none fits; {by}; --candidates {more} looks at all of them"
    if searched is None:
        return f"this composition does not fit: {by.replace('the best', 'it')}"
    # The search has tried everything that takes less memory, except where a key is pinned.
    return f"nothing fits; {by}; more devices would help"


def _write(
    given: ParsedWords,
    question: Question,
    space: Space,
    recorded: Sequence[Candidate],
    answer: dict[str, Any],
) -> None:
    file, there = "" if question.keys else given.file, _set_there(given, question)
    texts: dict[str, Callable[[Path], str]] = {
        "--json": lambda path: json.dumps(report.as_data(space, recorded) | answer, indent=1),
        "--report": lambda path: page_of(report.as_data(space, recorded) | answer),
        "--write": lambda path: report.write_toml(space, recorded[0], file, there, path),
    }
    for flag, text in texts.items():
        if flag in given.flags:
            path = Path(given.flags[flag])
            _write_file(flag, path, text(path))


def _set_there(given: ParsedWords, question: Question) -> dict[str, object]:
    """Return the values of the keys that the command line sets; a table's are those of its keys."""
    values = values_of(question.config)
    names = dict.fromkeys([name for name, _ in (*question.keys, *given.overrides)])
    names |= dict.fromkeys(question.changed)
    return {key: values[key] for name in names for key in values if f"{key}.".startswith(f"{name}.")}


def _write_file(flag: str, path: Path, text: str) -> None:
    with written(f"{COMMAND_LINE}: {flag}: cannot write", path):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_text(text, encoding="utf-8")  # a device or a pipe must stay what it is
        else:
            write_whole(path, text)
    print(f"{path}: written", flush=True)
