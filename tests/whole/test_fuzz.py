"""Odd files and command lines, drawn by the case's number: each works, or is refused in clear lines.

``--cases N`` draws N of them. A case that failed is drawn again by its own number, as
``pytest 'tests/whole/test_fuzz.py::test_odd_input[217]' --cases 218``.
"""

import contextlib
import faulthandler
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from PIL import Image

import train
from compose.__main__ import main
from compose.checkpoint import store
from compose.checkpoint.hf_conversion import export
from compose.errors import ConfigError
from compose.planner.cluster import FOLDER
from compose.train.processes import TrainingError
from compose.train.sampling import Sampling, sample_token
from tests.support.fuzz_cases import GIVEN, STEP, Case, Command, Valid
from tests.support.fuzzing import TooSlow, Watch, limits
from tests.support.helpers import ROOT
from tests.support.tokenizers_made import save_tokenizer

SECONDS, WAIT, MEMORY = 20.0, 120.0, 8 << 30  # that one case may take: of work, of the clock, and bytes
TINY = {
    "preset": '"debug"\nn_layers = 1\ndim = 16\nhidden_dim = 16\nn_heads = 2\nn_kv_heads = 1\n'
    "vocab_size = 300",
    "path": '"in/text.txt"',
    "steps": "9",
    "stop_after": "2",
    "seq_len": "8",
    "global_batch": "2",
    "micro_batch": "1",
    "interval": "2",
    "tensorboard": "false",
    "start_timeout": "60",
    "device": '"cpu"',
}
PROFILE = {
    "ranks": [
        {
            "seconds_per_step": 0.5,
            "time": dict.fromkeys(("matmul", "attention", "communication", "optimizer", "other"), 0.2),
            "memory": {
                "peak": 9,
                "at_peak": dict.fromkeys(
                    ("weights", "gradients", "optimizer", "communication", "activations"), 1
                ),
            },
        }
    ]
}


class _Exited(BaseException):
    """In place of a process's end."""


def _tiny() -> str:
    """train.toml of a small run, without its comments."""
    lines = (line.partition("  #")[0].rstrip() for line in (ROOT / "train.toml").open())
    results = []
    for line in lines:
        key, equals, _ = line.partition(" = ")
        # profile.steps and model.path stay as they are.
        tiny = equals and key in TINY and line not in ("steps = []", 'path = ""')
        results.append(f"{key} = {TINY[key]}" if tiny else line)
    return "\n".join(line for line in results if line and not line.startswith("#"))


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Valid:
    """A run with a checkpoint, Hugging Face's folders, a tokenizer, token sets and files of tokens."""
    folder = tmp_path_factory.mktemp("valid")
    there, outside = folder / "in", folder / "outside"
    there.mkdir()
    (there / "train.toml").write_text(_tiny())
    (there / "text.txt").write_text("words and more words\n" * 40)
    save_tokenizer(there / "tokenizer")
    roles = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "a + b"}]
    (there / "chats.jsonl").write_text(f"{json.dumps({'messages': roles})}\n" * 8)
    words = ["tokenize", "--workers=1", "--tokenizer", "in/tokenizer", "--out"]
    with _inside(folder), contextlib.redirect_stdout(io.StringIO()):
        assert main([*words, "in/set", "in/text.txt"]) == 0
        assert main([*words, "in/chats", "--chat", "in/chats.jsonl"]) == 0
        train.main(["in/train.toml", "--run.dir=run", '--data.path="in/set"'])
        step = folder / "run/checkpoints/step-00000002"
        export(step, there / "whole", original=there / "tokenizer")
        export(step, there / "parts", original=there / "tokenizer", shard_bytes=4000)
    (there / "cluster.toml").write_text((FOLDER / "h100_sxm.toml").read_text())
    (there / "table.csv").write_text("0F0,,0B0\n,1F0,1B0\n")
    (there / "images").mkdir()
    for number in range(2):
        Image.new("RGB", (9, 7)).save(there / f"images/{number}.png")
    with (folder / "run/metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "tokens_per_second": 9.5}\n')
    traces = folder / "run/traces"
    traces.mkdir()
    (traces / "step1-1_summary.json").write_text(json.dumps(PROFILE))
    (there / "ids.bin").write_bytes(bytes(range(256)) * 2)
    header = b"{'descr': '<u2', 'fortran_order': False, 'shape': (64,), }"
    header = header.ljust(117) + b"\n"
    (there / "ids.npy").write_bytes(b"\x93NUMPY\x01\x00\x76\x00" + header + bytes(128))
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    for one in (there / "whole", there / "set", step):
        for path in one.iterdir():
            shutil.copy(path, outside / path.name)
    return Valid(folder, outside, Watch(outside))


def _exits(code: int) -> None:
    raise _Exited(code)


def _refused(case: Case) -> list[str]:
    """Run a case; the lines that it was refused in, if it was."""
    try:
        case.command()
    except (ConfigError, TrainingError) as error:
        return str(error).split("\n")
    except SystemExit as request:
        if request.code != 0:  # which --help alone may say
            raise
    except _Exited as end:  # of a process group, which has said why
        why = end.__context__
        if not isinstance(why, (ConfigError, TrainingError)):
            raise (why or end) from None
        return str(why).split("\n")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return []


def test_odd_input(valid: Valid, case_number: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No traceback, no hang, nothing outside of what the command writes is touched."""
    folder = tmp_path_factory.mktemp("case")
    case = Case(valid, case_number, folder)
    said = io.StringIO()
    # A wait that no signal ends, as in a library, ends the process and prints its place.
    faulthandler.dump_traceback_later(1.5 * WAIT, exit=True, file=2)
    try:
        with (
            _inside(folder),
            mock.patch("os._exit", _exits),
            mock.patch.dict(os.environ, {"HOME": str(folder / "runs")}),
            mock.patch("os.cpu_count", return_value=1),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(said),
            valid.watch.over(*case.writes) as touched,
            limits(SECONDS, WAIT, MEMORY),
        ):
            lines = _refused(case)
    except TooSlow:
        pytest.fail(f"case {case_number}, {case.kind}: works for {SECONDS:.0f} s or waits {WAIT:.0f} s")
    finally:
        faulthandler.cancel_dump_traceback_later()
    for line in lines + said.getvalue().splitlines():
        assert line.strip(), f"case {case_number}, {case.kind}: an empty line of {lines}"
        assert line.isprintable(), f"case {case_number}, {case.kind}: {line!a}"
        assert len(line) < 1000, f"case {case_number}, {case.kind}: {len(line)} characters: {line}"
        assert "Traceback" not in line, f"case {case_number}, {case.kind}: {said.getvalue()}"
    assert len(lines) < 100, f"case {case_number}, {case.kind}: {len(lines)} lines"
    assert not touched, f"case {case_number}, {case.kind}: touched {touched}"
    shutil.rmtree(folder)


@pytest.fixture
def work(valid: Valid, tmp_path: Path) -> Iterator[Path]:
    """The valid files, to be changed, in a folder that is the working one; and ``elsewhere`` beside."""
    for name in ("in", "run"):
        shutil.copytree(valid.files / name, tmp_path / "work" / name)
    shutil.copytree(valid.outside, tmp_path / "elsewhere")
    with _inside(tmp_path / "work"):
        yield tmp_path / "work"


def _sum(step: Path) -> None:
    files = (path for path in step.iterdir() if path.name != store.MANIFEST)
    (step / store.MANIFEST).write_text(json.dumps({"files": store.manifest_entries(files)}))


def _problem(command: Command) -> str:
    with (
        limits(SECONDS, WAIT, MEMORY),
        mock.patch("os._exit", _exits),
        pytest.raises((ConfigError, _Exited)) as caught,
    ):
        command()
    if dist.is_initialized():
        dist.destroy_process_group()
    error = caught.value.__context__ if isinstance(caught.value, _Exited) else caught.value
    assert isinstance(error, ConfigError)
    return str(error)


def test_the_original_that_a_checkpoint_names_is_not_read(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its run has kept what an export needs; where it has not, a line says what to do."""
    named = tmp_path / "elsewhere"
    assert (named / "tokenizer_config.json").exists()
    state = json.loads((work / STEP / store.STATE).read_text())
    (work / STEP / store.STATE).write_text(json.dumps({**state, "hugging_face": str(named)}))
    _sum(work / STEP)
    shutil.rmtree(work / "run/tokenizer")
    assert main(["convert", "run", "out"]) == 0
    assert sorted(path.name for path in Path("out").iterdir()) == [
        *("config.json", "generation_config.json", "model.safetensors")
    ]
    assert capsys.readouterr().err == (
        f"run: was made from {named}, of which its run kept nothing; to export the tokenizer too, give"
        " that folder as --original\n"
    )
    assert main(["convert", "run", "given", "--original", str(named)]) == 0
    assert (work / "given/tokenizer.json").exists()
    assert capsys.readouterr().err == ""


def test_a_run_keeps_what_an_export_needs(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder of its first weights may be gone by then, with either way to begin."""
    config = json.loads((work / "in/whole/config.json").read_text())
    (work / "in/whole/config.json").write_text(json.dumps({**config, "bos_token_id": 259}))
    assert main(["convert", "in/whole", "imported"]) == 0
    train.main([*GIVEN[:1], "--run.dir=begun", "--checkpoint.load_hf=in/whole", "--data.path=in/set"])
    shutil.rmtree(work / "in/whole")
    for run in ("imported", "begun"):
        capsys.readouterr()
        assert main(["convert", run, f"{run}-out"]) == 0
        assert capsys.readouterr().err == ""
        assert (work / f"{run}-out/tokenizer.json").exists()
        assert json.loads((work / f"{run}-out/config.json").read_text())["bos_token_id"] == 259


def test_a_checkpoints_config_extends_nothing(work: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere/base.toml").write_text("[train]\nsteps = 3\n")
    config = work / STEP / "config.toml"
    config.write_text(f'extends = "{tmp_path}/elsewhere/base.toml"\n{config.read_text()}')
    _sum(work / STEP)
    words = ["generate", "run", "--prompt=a", "--max-tokens=1"]
    line = f"{STEP}/config.toml: extends: is of a checkpoint, whose files stand alone"
    assert _problem(lambda: main(words)) == line
    config.unlink()
    config.symlink_to(tmp_path / "elsewhere/base.toml")
    assert "is a symbolic link" in _problem(lambda: main(words))


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/step-00000002"])
def test_checkpoints_elsewhere_are_not_read(work: Path, tmp_path: Path, name: str) -> None:
    """By way of a link in a run's folder, which a person named, or is to go on."""
    shutil.move(work / "run" / name, tmp_path / "elsewhere/moved")
    (work / "run" / name).symlink_to(tmp_path / "elsewhere/moved")
    line = f"run/{name}: is a link that leads out of its folder; put the file itself there"
    assert _problem(lambda: main(["convert", "run", "out"])) == line
    assert _problem(lambda: main(["generate", "run", "--prompt=a"])) == line
    if name != "checkpoints":
        assert _problem(lambda: train.main(GIVEN)) == f"in/train.toml: run.dir: {line}"


@pytest.mark.parametrize("name", [store.STATE, store.MANIFEST, "metadata.json", "config.toml"])
def test_what_describes_a_checkpoint_elsewhere_is_not_read(valid: Valid, work: Path, name: str) -> None:
    """By ``convert`` and ``generate``, before or after they check."""
    (work / STEP / name).unlink()
    (work / STEP / name).symlink_to(valid.outside / name)
    results = []
    for words in (["convert", "run", "out"], ["generate", "run", "--prompt=a", "--max-tokens=1"]):
        with valid.watch.over(work) as touched:
            results.append(_problem(lambda words=words: main(words)))
        assert touched == []
    assert (
        results[0]
        == f"run/checkpoints/step-00000002: damaged: {name} cannot be read: is a symbolic link"
    )


def test_a_tokenizer_elsewhere_is_not_copied(work: Path, tmp_path: Path) -> None:
    shutil.move(work / "run/tokenizer", tmp_path / "elsewhere/moved")
    (work / "run/tokenizer").symlink_to(tmp_path / "elsewhere/moved")
    line = f"{work}/run/tokenizer: is a link that leads out of its folder; put the file itself there"
    assert _problem(lambda: main(["convert", "run", "out"])) == line
    assert _problem(lambda: main(["generate", "run", "--prompt=a"])) == line


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "chats.jsonl"])
def test_nobody_waits_for_a_pipe(work: Path, name: str) -> None:
    path = work / "in/tokenizer" / name if name != "chats.jsonl" else work / "in" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    words = ["--workers=1", "--tokenizer=in/tokenizer", "--out=out", "--chat", "in/chats.jsonl"]
    result = _problem(lambda: main(["tokenize", *words]))
    assert result == f"{path.relative_to(work)}: cannot be read: is no file"


def test_weights_that_are_no_numbers_say_nothing(work: Path) -> None:
    """Not even where the likeliest token would be taken."""
    shard = next((work / STEP).glob("__*.safetensors"))
    content = bytearray(shard.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start:] = b"\xff" * (len(content) - start)
    shard.write_bytes(content)
    _sum(work / STEP)
    for temperature in ("0", "1"):
        words = ["generate", "run", "--prompt=a", "--max-tokens=1", f"--temperature={temperature}"]
        assert _problem(lambda words=words: main(words)) == (
            "token 1: the model's logits are not finite: its weights are damaged, or too large for"
            " precision.param"
        )


def test_a_temperature_near_0_takes_the_likeliest() -> None:
    sampling = Sampling(temperature=1e-320)
    assert sample_token(torch.tensor([1.0, 3.0, 2.0]), 0, sampling) == 1
