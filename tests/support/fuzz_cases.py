"""The cases of tests/whole/test_fuzz.py: a command on files of which one, or a word, is odd."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import train
from compose.__main__ import main
from compose.checkpoint import store
from compose.cli.command_line import parse
from compose.config.tables import TABLES
from compose.config.toml import load
from compose.data.datasets import open_data, training_batches
from compose.errors import docs
from tests.support.fuzzing import Watch, odd_file, odd_toml, odd_words
from tests.support.helpers import ROOT

# Keys that a command line gets, but for what is written where, and what is slow.
KEYS = [
    f"{table}.{key}"
    for table, kind in TABLES.items()
    for key in docs(kind)
    if key not in ("dir", "offload_dir") and table != "compile"
]
NUMBERS = ["optimizer.lr", "optimizer.eps", "optimizer.beta1", "train.max_norm", "train.z_loss"]
NUMBERS += ["train.seed", "optimizer.weight_decay", "train.loss_chunk", "optimizer.min_lr"]
VALUES = ["0", "1", "-1", "1e-38", "1e30", "1e300", "2", "0.5", "9223372036854775807", "3"]
STEP = "run/checkpoints/step-00000002"
GIVEN = ["in/train.toml", "--run.dir=run", "--train.stop_after=3", "--data.path=in/set"]


Command = Callable[[], object]


@dataclass(frozen=True)
class Valid:
    """Cases change these. files: right ones, by kind. outside: what nobody may touch."""

    files: Path
    outside: Path
    watch: Watch


class Case:
    """One case, of the files of ``valid`` in a folder of its own, in which it runs."""

    def __init__(self, valid: Valid, number: int, folder: Path) -> None:
        self.random, self.folder, self.outside = Random(number), folder, valid.outside
        for name in ("in", "run"):
            shutil.copytree(valid.files / name, folder / name)
        (folder / "out").mkdir()
        self.writes = [folder / "out", folder / "runs"]
        self.kind = self.random.choices(list(KINDS), [share for share, _ in KINDS.values()])[0]
        self.command = KINDS[self.kind][1](self)

    def odd_toml(self) -> Command:
        """A run's own file."""
        self.writes.append(self.folder / "run")
        path = self.folder / "in/train.toml"
        if self.random.random() < 0.1:
            odd_file(self.random, path)
            if path.is_fifo():  # as a shell makes of <(...), and whoever names one waits for it
                path.unlink()
        else:
            path.write_bytes(odd_toml(self.random, path.read_bytes()))
        file, out = "in/train.toml", "--out=out/x.svg"
        ways: list[Command] = [
            lambda: train.main([file, "--dry-run", "--world-size=4"]),
            lambda: main(["legal", file, "--world-size", "4"]),
            lambda: main(["schedule", file, "--parallel.pp=2", out]),
            lambda: parse([file], "train.py", trains=True),
        ]
        return self.random.choices(ways, [1, 1, 1, 5])[0]

    def odd_words(self) -> Command:
        self.writes.append(self.folder / "run")
        commands = [
            ["train", *GIVEN, "--dry-run"],
            ["generate", "run", "--prompt=a", "--max-tokens=1", "--seed=0"],
            ["convert", "run", "out/model", "--dtype=float32"],
            ["tokenize", "--tokenizer=in/tokenizer", "--out=out/set", "in/text.txt"],
            ["legal", "in/train.toml", "--world-size=2"],
            ["schedule", "in/train.toml", "--parallel.pp=2", "--out=out/x.svg"],
        ]
        command, *words = self.random.choice(commands)
        words = odd_words(self.random, words, KEYS)
        return lambda: train.main(words) if command == "train" else main([command, *words])

    def odd_numbers(self) -> Command:
        self.writes.append(self.folder / "run")
        shutil.rmtree(self.folder / "run")
        keys = {self.random.choice(NUMBERS): self.random.choice(VALUES) for _ in range(2)}
        return lambda: train.main([*GIVEN, *(f"--{key}={value}" for key, value in keys.items())])

    def odd_run(self) -> Command:
        self.writes.append(self.folder / "run")
        self._odd_checkpoint()
        return lambda: train.main(GIVEN)

    def odd_to_generate(self) -> Command:
        source = self._odd_checkpoint()
        return lambda: main(["generate", source, "--prompt=a", "--max-tokens=1"])

    def odd_to_export(self) -> Command:
        source = self._odd_checkpoint()
        return lambda: main(["convert", source, "out/model"])

    def _odd_checkpoint(self) -> str:
        """Make a run's files odd; return what to name."""
        run, name = self.folder / "run", self.random.choice(["run", STEP])
        step = self.folder / STEP
        for _ in range(self.random.choice([1, 1, 2])):
            within = step if self.random.random() < 0.8 else run
            # Not the checkpoint itself: a link that a person names leads to what that person means.
            result = sorted(path for path in within.rglob("*") if path != step)
            if result:
                odd_file(self.random, self.random.choice(result), self.outside)
        manifest = step / store.MANIFEST
        if self.random.random() < 0.6 and manifest.is_file() and not manifest.is_symlink():
            # Odd files then pass the check of the manifest.
            whole = (p for p in step.iterdir() if p != manifest and p.is_file() and not p.is_symlink())
            manifest.write_text(json.dumps({"files": store.manifest_entries(whole)}))
        return name

    def odd_model(self) -> Command:
        name = self.random.choice(["in/whole", "in/parts"])
        for _ in range(self.random.choice([1, 1, 2])):
            result = self.random.choice(sorted((self.folder / name).iterdir()))
            odd_file(self.random, result, self.outside)
        way = self.random.randrange(4)
        if way == 0:
            return lambda: main(["generate", name, "--prompt=a", "--max-tokens=1"])
        if way == 1:
            shutil.rmtree(self.folder / "run")
            self.writes.append(self.folder / "run")
            words = [f"--checkpoint.load_hf={name}", "--train.stop_after=1"]
            return lambda: train.main([*GIVEN, *words])
        return lambda: main(["convert", name, "out/run"])

    def odd_tokens(self) -> Command:
        self.writes.append(self.folder / "run")
        name = self.random.choice(["in/set", "in/chats", "in/ids.bin", "in/ids.npy"])
        path = self.folder / name
        if path.is_dir():
            odd_file(self.random, self.random.choice(sorted(path.iterdir())), self.outside)
        else:
            odd_file(self.random, path)

        def read() -> None:
            words = ["in/train.toml", f"--data.path={name}"]
            command = parse(words, "train.py", trains=True)
            assert command.data is not None
            batches = training_batches(command.config, command.data)
            for step in range(3):
                batches.batch(2 * step)

        return read

    def odd_images(self) -> Command:
        odd_file(self.random, self.folder / f"in/images/{self.random.randrange(2)}.png")
        skip = self.random.choice(["true", "false"])
        words = [("model.name", "dit"), ("data.path", "in/images"), ("data.skip_unreadable", skip)]
        config = load(str(ROOT / "train.toml"), words)

        def read() -> None:
            samples = open_data(config).sets[0]
            for number in range(len(samples)):
                samples.read(number)

        return read

    def odd_table(self) -> Command:
        odd_file(self.random, self.folder / "in/table.csv")
        words = ["in/train.toml", "--parallel.pp=2", "--parallel.pp_schedule=in/table.csv"]
        words += ["--train.micro_batch=1", "--model.n_layers=2"]
        return lambda: main(["schedule", *words, "--out=out/x.svg"])

    def odd_cluster(self) -> Command:
        path = self.folder / "in/cluster.toml"
        path.write_bytes(odd_toml(self.random, path.read_bytes()))
        words = ["in/train.toml", "--cluster=in/cluster.toml", "--world-size=1", "--as-is"]

        def plan() -> None:
            main(["plan", *words, "--json=out/plan.json", "--report=out/plan.html"])
            text = (self.folder / "out/plan.json").read_text()
            assert not re.search("NaN|Infinity", text), text

        return plan

    def odd_measured(self) -> Command:
        run = self.folder / "run"
        names = ["metrics.jsonl", "traces/step1-1_summary.json", "config.toml", "traces"]
        odd_file(self.random, run / self.random.choice([*names[:2], *names]), self.outside)
        words = ["plan", "--against=run", "--cluster=cpu", "--write=out/corrected.toml"]
        return lambda: main(words)

    def odd_tokenizer(self) -> Command:
        folder = self.folder / "in/tokenizer"
        odd_file(self.random, self.random.choice(sorted(folder.iterdir())), self.outside)
        if self.random.random() < 0.3:
            odd_file(self.random, self.folder / "in/chats.jsonl")
        words = ["--workers=1", "--tokenizer=in/tokenizer", "--out=out/set"]
        more = ["--chat", "in/chats.jsonl"] if self.random.random() < 0.7 else ["in/text.txt"]
        return lambda: main(["tokenize", *words, *more])


# The share of each kind among the cases.
KINDS: dict[str, tuple[int, Callable[[Case], Command]]] = {
    "toml": (10, Case.odd_toml),
    "words": (8, Case.odd_words),
    "numbers": (1, Case.odd_numbers),
    "run": (4, Case.odd_run),
    "generate": (6, Case.odd_to_generate),
    "export": (6, Case.odd_to_export),
    "model": (8, Case.odd_model),
    "tokens": (7, Case.odd_tokens),
    "tokenizer": (5, Case.odd_tokenizer),
    "images": (2, Case.odd_images),
    "table": (1, Case.odd_table),
    "cluster": (1, Case.odd_cluster),
    "measured": (1, Case.odd_measured),
}
