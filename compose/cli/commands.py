"""The commands verify, schedule, legal, measure, convert and tokenize; each imports what it needs."""

import contextlib
import itertools
import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

from compose.cli import COMMANDS
from compose.cli.command_line import (
    check_out,
    flag_error,
    is_first_rank,
    launched_ranks,
    model_path,
    number_of,
    parse,
    read_arguments,
    read_flags,
)
from compose.config import rules
from compose.config.hugging_face import left_out
from compose.config.tables import Config
from compose.config.toml import COMMAND_LINE, load
from compose.errors import ConfigError, printable, refused_in, write_whole, written
from compose.object_storage import as_path
from compose.parallel.mesh import AXES, init_mesh, meshes
from compose.train.processes import process_group
from compose.train.workers import this_worker

if TYPE_CHECKING:
    from compose.data.token_set_writing import TokenCounts

_MESHES = 2000  # they take about a minute


def verify(arguments: Sequence[str]) -> int:
    """Prove that the composition equals one process; 1 if it does not."""
    from compose.proof.observers import parts_of_add_ons
    from compose.proof.prove import prove
    from compose.proof.report import joined

    job = parse(arguments, "python -m compose verify").job
    with process_group(job.config, job.islands) as device:
        mesh = init_mesh(job.degrees, device.type)
        reports = [part(job, mesh, device) for part in (prove, *parts_of_add_ons("prove"))]
        report = joined([one for one in reports if one])
        if dist.get_rank() == 0:
            worker = this_worker()
            verdicts = worker.everyone("verify", "" if report.ok else str(report))
            several = verdicts if job.islands > 1 else []
            wrong = [f"island {i}: {text}" for i, text in enumerate(several) if text]
            if worker.speaks:
                print("\n".join(wrong) or report, flush=True)
    return 0 if report.ok else 1


def schedule(arguments: Sequence[str]) -> int:
    """Draw the pipeline's timeline."""
    from compose.pipeline import pictures, timeline

    given = read_arguments(arguments, "python -m compose schedule", COMMANDS["schedule"])
    out = given.flags.get("--out", "")
    if out and Path(out).suffix not in (".svg", ".png"):
        raise flag_error("--out", f"{out} is neither .svg nor .png")
    config = load(given.file, given.overrides)
    degrees = [getattr(config.parallel, axis) for axis in AXES]
    fewest = math.prod(max(1, degree) for degree in degrees)
    world_size = number_of(given, "--world-size", "ranks", fewest)
    with refused_in(given.file):
        job = rules.check(config, world_size)
        if job.degrees.pp == 1:
            raise ConfigError("parallel.pp: 1 has no schedule; set --parallel.pp=2 or more")
    table, title = timeline.of_run(job.degrees, job.micro_batches)
    slots = timeline.simulate(table)
    columns = shutil.get_terminal_size((100, 24)).columns
    print(title, pictures.as_text(slots, sys.stdout.isatty(), columns), sep="\n")
    print(timeline.report(table, job.degrees.pp_schedule, job.degrees.pp_virtual_stages))
    with written(f"{COMMAND_LINE}: --out: cannot write", Path(out)):
        if out.endswith(".svg"):
            Path(out).write_text(pictures.as_svg(pictures.drawing(slots, title)), encoding="utf-8")
        elif out:
            pictures.write_png(pictures.drawing(slots, title), out)
    return 0


def legal(arguments: Sequence[str]) -> int:
    """List the legal meshes of N ranks."""
    given = read_arguments(arguments, "python -m compose legal", COMMANDS["legal"])
    world_size = number_of(given, "--world-size", "ranks")
    if not world_size:
        raise flag_error("legal", "needs --world-size N, the number of ranks")
    if len([*itertools.islice(meshes(world_size), _MESHES + 1)]) > _MESHES:
        many = f"{world_size} ranks have more than {_MESHES:,} meshes, the most that legal checks"
        raise flag_error("--world-size", f"{many}; python -m compose plan looks for the best ones")
    config = load(given.file, given.overrides)
    legal, refused = [], Counter[str]()
    for degrees, problems in rules.survey(config, world_size):
        if problems:
            refused[problems[0]] += 1
        else:
            legal.append(degrees)
    print("  ".join(AXES))
    for degrees in legal:
        print("  ".join(f"{degrees[axis]:<{len(axis)}}" for axis in AXES).rstrip())
    end = ":" if refused else ""
    print(f"{len(legal)} meshes of {world_size} ranks are legal, {refused.total()} are not{end}")
    for problem, count in refused.most_common():
        print(f"{count:>4}  {problem}")
    return 0


def measure(arguments: Sequence[str], seconds: float = 0.0) -> int:
    """Measure this machine for the planner, within ``seconds``; 0: as long as a person waits."""
    from compose.planner import measure as machine
    from compose.planner.cluster import load_cluster

    given = read_flags("measure", arguments)
    if given.plain:
        raise flag_error("measure", f"takes no {given.plain[0]}; --out names the file")
    if not given.flags.get("--out"):
        raise flag_error("measure", "needs --out FILE.toml, the file to write")
    out = Path(given.flags["--out"])
    launched_ranks()
    if is_first_rank():
        if out.suffix != ".toml":
            raise flag_error("--out", f"{out} is no .toml file")
        check_out("--out", out)
    with process_group(Config()) as device:
        cluster = machine.measure(device, machine.makers_peaks(device), seconds or machine.SECONDS)
        if dist.get_rank() == 0:
            write_whole(out, machine.as_toml(cluster, machine.notes_of(cluster)))
            print(f"{out}: {machine.in_words(load_cluster(str(out)))}", flush=True)
    return 0


def convert(arguments: Sequence[str]) -> int:
    """Convert Hugging Face weights to a checkpoint or back."""
    from compose.checkpoint.hf_conversion import export, export_adapters, import_
    from compose.checkpoint.hf_folder import checkpoints, is_hugging_face, model_in
    from compose.checkpoint.safetensors_files import DTYPES
    from compose.checkpoint.store import read_state

    given = read_flags("convert", arguments)
    folders, flags = given.plain, given.flags
    if len(folders) != 2:
        raise flag_error("convert", f"needs SOURCE and TARGET, got {len(folders)} folders")
    source, target = model_path(folders[0]), as_path(folders[1])
    config = load(flags["--config"]) if "--config" in flags else None
    if is_hugging_face(source):
        for flag in ("--original", "--dtype", "--merged", "--best"):
            if flag in flags:
                raise flag_error(flag, "is for the way to Hugging Face")
        if line := left_out(source):
            print(line, file=sys.stderr)
        done = import_(source, target, config or Config(model=model_in(source)))
        then = f"a run with --run.dir={target} begins with it"
    else:
        name = flags.get("--dtype", "float32")
        kinds = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
        if name not in kinds:
            raise flag_error("--dtype", f"{name} is none of {', '.join(kinds)}")
        original = as_path(flags["--original"]) if "--original" in flags else None
        checkpoint, merged = checkpoints(source, "--best" in flags)[0], "--merged" in flags
        adapters = False
        if "--best" in flags:
            print(f"{checkpoint}: has the lowest validation loss", flush=True)
        with contextlib.suppress(ConfigError):  # the export says what is wrong
            adapters = read_state(checkpoint).lora is not None
        if merged and not adapters:
            raise flag_error("--merged", f"{checkpoint} holds no adapters")
        if adapters and not merged:
            for flag in ("--original", "--dtype"):
                if flag in flags:
                    raise flag_error(flag, "is for whole weights; give --merged too")
            done, then = export_adapters(checkpoint, target, config), "peft opens it"
            if done.doubtful:
                then += f", but may lose the adapter of {done.doubtful}; give --merged (docs/lora.md)"
        else:
            done = export(checkpoint, target, config, original, kinds[name])
            then = "transformers opens it"
    if done.original:
        print(
            f"{source}: was made from {printable(done.original)}, of which its run kept nothing;"
            " to export the tokenizer too, give that folder as --original",
            file=sys.stderr,
        )
    files = f"{done.files} file{'s' * (done.files > 1)}"
    print(f"{done.path}: {done.tensors} tensors, {done.bytes:,} bytes, in {files}; {then}", flush=True)
    return 0


def tokenize(arguments: Sequence[str]) -> int:
    """Turn text or chats into ids."""
    from compose.data.chat_messages import FIELDS, PLAIN, SHAPES, ChatNames
    from compose.data.token_files import open_token_set
    from compose.data.token_set_writing import describe_job, make_token_set, replies_for
    from compose.data.tokenizer import open_tokenizer
    from compose.planner.sweep import cores

    given = read_flags("tokenize", arguments)
    files, flags = given.plain, given.flags
    missing = [name for name in ("--tokenizer", "--out") if not flags.get(name)]
    if missing or not files:
        raise flag_error("tokenize", f"needs {[*missing, 'FILES'][0]}; see --help")
    workers = number_of(given, "--workers", "processes", cores())
    tokenizer = open_tokenizer(model_path(flags["--tokenizer"], "--tokenizer: "))
    pairs, added = "--pairs" in flags, "--no-special-tokens" not in flags
    chat = pairs or "--chat" in flags
    if chat and not added:
        template = "is for text; a chat has the tokens that its template writes"
        raise flag_error("--no-special-tokens", template)
    end: int | None = tokenizer.end
    if "--end" in flags:
        end = None
        with contextlib.suppress(UnicodeEncodeError):
            end = tokenizer.tokenizer.token_to_id(flags["--end"])
    if end is None:
        raise flag_error("--end", f"{flags['--end']} is no token of {tokenizer.name}")
    for flag in () if chat else ("--shape", "--fields", "--roles"):
        if flag in flags:
            raise flag_error(flag, "is for chats; give --chat too")
    if pairs and "--shape" in flags:
        raise flag_error("--shape", "is for --chat; rows of --pairs have chosen and rejected")
    shape, fields = "chosen" if pairs else flags.get("--shape", ""), _named(flags, "--fields")
    roles = tuple(_named(flags, "--roles").items())
    for flag, given, known in (
        ("--shape", [shape] if shape else [], [*SHAPES, PLAIN]),
        ("--fields", fields, FIELDS),
    ):
        if wrong := [name for name in given if name not in known]:
            raise flag_error(flag, f"{wrong[0]} is none of {', '.join(known)}")
    kind = "pairs" if pairs else "chat" if chat else "text"
    field = flags.get("--field", "messages" if chat else "text")
    if chat and field != "messages":
        fields["messages"] = field
    job = describe_job(tokenizer, kind, field, end, [Path(name) for name in files])
    names = ChatNames(shape, tuple(fields.items()), roles)
    added = job.added if added else False
    job = replace(job, added=added, skip_bad="--skip-bad" in flags, names=names)
    if end < 0 and (not chat or replies_for(job, tokenizer).plain):
        raise flag_error("--end", f"{tokenizer.name} does not say which token ends a document")
    target = Path(flags["--out"])
    bar = ProgressBar(sum(size for _, size, _ in job.files))
    counts = make_token_set(job, target, workers, bar)
    bar.end()
    left_out = f", {counts.empty:,} without a reply left out" if chat and counts.empty else ""
    what = "conversations" if chat else "documents"
    what = f"{what} of {counts.documents // 2:,} pairs" if pairs else what
    print(f"{target}: {counts.tokens:,} tokens, {counts.documents:,} {what}{left_out}", flush=True)
    if chat or counts.bad:
        lengths = np.diff(open_token_set(target).ends, prepend=0)
        print(_table(counts, lengths, chat), flush=True)
    return 0


def _named(flags: Mapping[str, str], flag: str) -> dict[str, str]:
    """Return the names in a flag's value, as in prompt=question,completion=answer."""
    parts = [part.partition("=") for part in flags.get(flag, "").split(",") if flag in flags]
    if wrong := ["".join(part) for part in parts if not all(part)]:
        raise flag_error(flag, f"{wrong[0]!r} is not NAME=NAME")
    return {name.strip(): value.strip() for name, _, value in parts}


def _table(counts: "TokenCounts", lengths: np.ndarray, chat: bool) -> str:
    """Return what became of the rows."""
    from compose.data.token_files import as_table

    half, most = np.percentile(lengths, [50, 99]).astype(int) if len(lengths) else (0, 0)
    share = 100 * counts.learnt / max(1, counts.tokens)
    lines = [
        ("rows", counts.rows + counts.bad, ""),
        ("replies", counts.replies if chat else None, "to learn"),
        ("tokens learnt", counts.learnt if chat else None, f"{share:.1f} % of {counts.tokens:,}"),
        ("longest", int(lengths.max(initial=0)), f"tokens; half have at most {half:,}, 99 % {most:,}"),
        ("empty", counts.empty or None, "left out: " + ("no reply to learn" if chat else "no text")),
        *(("note", count, note) for note, count in counts.notes.items()),
        ("bad", counts.bad or None, "left out (--skip-bad), for example:"),
    ]
    return "\n".join([as_table(lines), *(f"    {reason}" for reason in counts.reasons)])


class ProgressBar:
    """The progress on standard error.

    On a terminal it is one line that changes; else it prints a line for each tenth.
    """

    def __init__(self, size: int) -> None:
        self.size, self.begun, self.shown = max(1, size), time.monotonic(), 0
        self.first: int | None = None  # bytes that an earlier attempt has finished
        self.terminal = sys.stderr.isatty()

    def __call__(self, done: int, counts: "TokenCounts") -> None:
        """Show how far the job is."""
        passed = time.monotonic() - self.begun
        if self.first is None:
            self.first = done
        rate = (done - self.first) / passed if passed else 0.0
        left = f"{(self.size - done) / rate:,.0f} s left" if rate else "..."
        part = done / self.size
        words = f"{part:4.0%}  {done / 1e6:,.1f} MB  {counts.tokens:,} tokens  {left}"
        if self.terminal:
            bar = "#" * int(30 * part)
            print(f"\r[{bar:<30}] {words:<60}", end="", file=sys.stderr, flush=True)
        elif int(10 * part) > self.shown:
            self.shown = int(10 * part)
            print(words, file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the line on a terminal."""
        if self.terminal:
            print(file=sys.stderr)
