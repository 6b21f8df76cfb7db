"""python -m compose generate: the text of a plain loop on every mesh, and refusals in one line."""

import contextlib
import copy
import errno
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from compose.__main__ import main
from compose.build import build, build_optimizer
from compose.checkpoint.checkpointer import Checkpointer
from compose.checkpoint.hf_folder import load_hf, name_of
from compose.checkpoint.store import Progress
from compose.cli.generate import _source, _tokenizer, generate, job_of, open_model
from compose.config.toml import dump
from compose.data.tokenizer import ByteTokenizer
from compose.errors import ConfigError
from compose.train.sampling import Sampling, next_logits, sample, sample_token
from compose.weights import materialize
from models import llama
from tests.support.command_lines import execute
from tests.support.helpers import Keys, keys_in, make_config, make_job, printed, refusal
from tests.support.hugging_face import save_model
from tests.support.pool import Pool, make_mesh
from tests.support.small_models import QWEN
from tests.support.tokenizers_made import save_tokenizer

Runs = dict[str, tuple[Path, nn.Module]]
CPU = torch.device("cpu")
PROMPT = ByteTokenizer().encode("def __init__(self):\n")
GREEDY = Sampling(max_tokens=12, temperature=0)
DRAWN = Sampling(max_tokens=12, temperature=1.5, top_p=0.9, seed=3)
LLAMA: Keys = {"model__tie_embeddings": True}
EXPERTS: Keys = QWEN | {"model__n_layers": 2, "model__capacity_factor": 0.5}


def _saved(keys: Keys, folder: Path, steps: Sequence[int]) -> dict[str, Tensor]:
    """Save checkpoints of a model that was not trained, but is sure of what it says; its state."""
    job = make_job(1, **keys)
    composition = build(job, make_mesh(job.degrees), CPU)
    with torch.no_grad():
        for parameter in composition.model.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1)
    optimizer = build_optimizer(composition, job)
    checkpointer = Checkpointer(job.config, composition, optimizer, folder)
    for step in steps:
        checkpointer.save(Progress(step, 0, 0), wait=True)
    return composition.model.state_dict()


@pytest.fixture(scope="module")
def runs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return a run's folder and the plain model, by model."""
    results = {}
    for name, keys in {"llama": LLAMA, "experts": EXPERTS}.items():
        folder = tmp_path_factory.mktemp(name)
        state = pool.run(_saved, 1, keys, folder, [1, 2])[0]
        model = copy.deepcopy(make_job(1, **keys).model)
        materialize(model, CPU)
        model.load_state_dict(state)
        results[name] = folder, model
    return results


def plain(model: nn.Module, sampling: Sampling, prompt: Sequence[int] = PROMPT) -> list[int]:
    """Sample the plain model in a plain loop."""
    known = list(prompt)
    for _ in range(sampling.max_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([known]))[0, -1]
        known.append(sample_token(logits, len(known), sampling))
    return known[len(prompt) :]


def newest(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").iterdir(), reverse=True)


def _continued(
    source: Path, folders: list[Path], meshes: dict[str, Keys], ends: Sequence[int] = ()
) -> dict[str, list[list[int]]]:
    """Sample on each mesh, greedily and at random."""
    results = {}
    with mock.patch("compose.cli.generate.launched_ranks", return_value=dist.get_world_size()):
        for name, keys in meshes.items():
            overrides = [(f"parallel.{key}", str(value)) for key, value in keys.items()]
            job = job_of(source, folders, overrides)
            composition = open_model(job, folders, make_mesh(job.degrees), CPU)
            results[name] = [list(sample(composition, PROMPT, how, ends)) for how in (GREEDY, DRAWN)]
    return results


MESHES: dict[str, dict[str, Keys]] = {
    "llama": {
        "dp_shard 2": {},
        "tp 2": {"tp": 2},
        "pp 2": {"pp": 2},
        "V": {"pp": 2, "pp_schedule": "ZBVZeroBubble"},
        "cp 2": {"cp": 2, "cp_balance": "none"},
    },
    "experts": {"ep 2": {"ep": 2}, "tp 2": {"tp": 2, "ep": 2}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_the_same_on_every_mesh(pool: Pool, runs: Runs, name: str) -> None:
    meshes, (run, model) = MESHES[name], runs[name]
    expected = [plain(model, how) for how in (GREEDY, DRAWN)]
    assert expected[0] != expected[1]
    assert len(set(expected[0])) > 2, "nothing to go wrong"
    for result in pool.run(_continued, 2, run, newest(run), meshes):
        assert result == dict.fromkeys(meshes, expected)


def test_the_end_token_ends_it(pool: Pool, runs: Runs) -> None:
    run, model = runs["llama"]
    expected = plain(model, GREEDY)
    end = expected[5]
    result = pool.run(_continued, 1, run, newest(run), {"one": {}}, [end])[0]["one"][0]
    assert result == expected[: expected.index(end)]


def _unread(run: Path) -> str:
    """What is said if the reader of standard output has ended."""
    output = mock.Mock()
    output.write.side_effect = BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    with (
        mock.patch.object(sys, "stdout", output),
        mock.patch("compose.cli.generate.process_group", return_value=contextlib.nullcontext(CPU)),
        mock.patch("compose.cli.generate.launched_ranks", return_value=1),
    ):
        return refusal(generate, [str(run), "--prompt=x", "--max-tokens=1"])


def test_a_text_that_nobody_reads(pool: Pool, runs: Runs) -> None:
    """As after ``| head``; a full disk is the same."""
    assert pool.run(_unread, 1, runs["llama"][0]) == ["standard output: Broken pipe"]


def _logits(run: Path, lengths: Sequence[int]) -> list[Tensor]:
    """Behind so many tokens of the prompt, with experts, on tp 2."""
    with mock.patch("compose.cli.generate.launched_ranks", return_value=2):
        job = job_of(run, newest(run), [("parallel.tp", "2")])
    composition = open_model(job, newest(run), make_mesh(job.degrees), CPU)
    results = [next_logits(composition, PROMPT[:length]) for length in lengths]
    return [logits for logits in results if logits is not None]


def test_padding_takes_no_experts_place(pool: Pool, runs: Runs) -> None:
    """Experts take a few tokens of a sequence; tp 2 pads one of odd length."""
    run, model = runs["experts"]
    lengths = range(7, 20, 2)
    for result in pool.run(_logits, 2, run, lengths):
        for length, logits in zip(lengths, result, strict=True):
            with torch.no_grad():
                expected = model(torch.tensor([PROMPT[:length]]))[0, -1]
            assert (logits - expected).norm() < 1e-5 * expected.norm(), length


def _from_hugging_face(folder: Path) -> list[list[int]]:
    return _continued(folder, [], {"tp 2": {"tp": 2}})["tp 2"]


def test_hugging_faces_folder(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    save_model(folder, {})
    job = make_job(1)
    model = copy.deepcopy(job.model)
    materialize(model, CPU)
    load_hf(model, folder, name_of("llama", job.config.model.config))
    result = pool.run(_from_hugging_face, 2, folder)
    assert result == [[plain(model, how) for how in (GREEDY, DRAWN)]] * 2


def _opened(run: Path, folders: list[Path]) -> tuple[list[str], list[str], float]:
    """Return problems, printed lines and the sum of a weight."""
    job = job_of(run, folders, [])
    with printed() as said:
        try:
            composition = open_model(job, folders, make_mesh(job.degrees), CPU)
        except ConfigError as error:
            return error.problems, [], 0.0
    words = "\n".join(said).splitlines()
    return [], words, next(composition.model.parameters()).sum().item()


def test_damage(pool: Pool, runs: Runs, tmp_path: Path) -> None:
    """A run's newest that is whole is taken; what is asked for by name is refused."""
    run = tmp_path / "run"
    shutil.copytree(runs["llama"][0], run)
    new, old = newest(run)
    shard = next(new.glob("__*"))
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    words = f"{new}: damaged: {shard.name} is not what was written (checksum)"
    refused, said, weight = pool.run(_opened, 1, run, [new, old])[0]
    assert (refused, said) == ([], [words, f"{old}: taken instead"])
    assert weight == pytest.approx(next(runs["llama"][1].parameters()).sum().item())
    assert pool.run(_opened, 1, run, [new])[0][0] == [words]


def test_which_tokenizer(runs: Runs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["llama"][0], run)
    folders = newest(run)
    config = job_of(run, folders, []).config
    larger = replace(config, model=replace(config.model, config=llama.Config(vocab_size=400)))
    assert isinstance(_tokenizer("", run, folders, config), ByteTokenizer)
    assert refusal(_tokenizer, "", run, folders, larger) == (
        f"{run}/tokenizer/tokenizer.json: no such file, and model.vocab_size 400 is not that of bytes;"
        " give --tokenizer FILE, a tokenizer.json, or --tokenizer bytes"
    )
    assert isinstance(_tokenizer("bytes", run, folders, larger), ByteTokenizer)
    file = save_tokenizer(run / "tokenizer")
    other = save_tokenizer(tmp_path / "other", vocab_size=280)
    assert _tokenizer("", run, folders, larger).name == str(file)
    assert _tokenizer(str(other), run, folders, larger).name == str(other)
    assert _tokenizer("", tmp_path / "other", [], larger).name == str(other)  # as Hugging Face has it
    more = '{"additional_special_tokens": ["<image>"]}'  # the model has no row for it
    (tmp_path / "other/special_tokens_map.json").write_text(more)
    exact = replace(config, model=replace(config.model, config=llama.Config(vocab_size=280)))
    assert _tokenizer(str(other), run, folders, exact).vocab_size == 281
    assert refusal(_tokenizer, str(other), run, folders, config) == (
        f"{other}: has 281 ids, the model's vocabulary 257; give the --tokenizer that it was trained"
        " with"
    )


def test_generate_says_what_is_wrong(runs: Runs, tmp_path: Path) -> None:
    run = runs["llama"][0]
    new, unsaved = newest(run)[0], tmp_path / "unsaved"
    unsaved.mkdir()
    (unsaved / "metrics.jsonl").touch()
    say, half = ["--prompt", "x"], tmp_path / "half.jsonl"
    half.write_text('"a"\n"a\\ud83d"\n')
    cases: dict[str, Sequence[object]] = {
        "command line: generate: needs one CHECKPOINT, got 0": say,
        "command line: generate: needs one CHECKPOINT, got 2": [run, new, *say],
        "command line: --prompt: needs a text to continue": [run],
        "command line: --promt: unknown option; did you mean --prompt?": [run, "--promt=x"],
        "command line: --top-p: 1.5 should be less than or equal to 1": [run, *say, "--top-p=1.5"],
        "command line: --top-p: 0 should be greater than 0": [run, *say, "--top-p", "0"],
        "command line: --temperature: nan should be a finite number": [run, *say, "--temperature=nan"],
        "command line: --max-tokens: ten should be a valid integer\n"
        "command line: --seed: -1 should be greater than or equal to 0": [
            *(run, *say, "--max-tokens=ten", "--seed=-1")
        ],
        "command line: --cache: yes should be 'auto', 'on' or 'off'": [run, *say, "--cache=yes"],
        "command line: gone: no such folder": ["gone", *say],
        f"command line: {unsaved}: the run has saved no checkpoint; train with checkpoint.interval"
        " above 0": [unsaved, *say],
        f"command line: {tmp_path}: is neither a checkpoint (manifest.json) nor Hugging Face's folder"
        " (config.json, and model.safetensors or model.safetensors.index.json)": [tmp_path, *say],
        f"{new}/config.toml: parallel: the degrees' product tp 2 does not divide the world size 1;"
        " nearest: parallel.tp = 1": [run, *say, "--parallel.tp=2"],
        "command line: parallel.tpp: unknown key; did you mean parallel.tp?": [
            *(run, *say, "--parallel.tpp=2")
        ],
        "nowhere: no such file": [run, *say, "--tokenizer=nowhere"],
        "command line: --prompt: holds half a character": [run, "--prompt=a\ud83d"],
        f"{half}:2: holds half a character, \\ud83d": [run, "--prompts", half],
    }
    for message, words in cases.items():
        assert refusal(main, ["generate", *map(str, words)]) == message


@pytest.mark.parametrize(
    "line",
    [
        *("--chat --prompt text run", "--no-special-tokens --seed 3 run", "--best run", "-h run"),
        *("--prompt=text --chat run", "--prompt text --train.steps 3 run other"),
    ],
)
def test_the_checkpoint_is_the_first_word_that_is_no_value(line: str) -> None:
    """Some flags have none."""
    assert _source(line.split()) == Path("run")


@pytest.mark.parametrize("words", ["--model.path=mine", "--model.path mine"])
def test_the_folder_of_a_model_in_one_word_or_two(words: str) -> None:
    with mock.patch("compose.cli.generate._sampler", return_value=None) as asked:
        generate(["run", "--help", *words.split()])
    assert asked.call_args.args == (Path("run"), ["mine"])


def test_another_model_is_refused(pool: Pool, runs: Runs) -> None:
    new = newest(runs["llama"][0])[0]
    assert pool.run(_other, 1, new)[0] == [f"{new}: was made with model.dim = 64, not 32"]


def _other(folder: Path) -> list[str]:
    job = job_of(folder, [folder], [("model.dim", "32")])
    return refusal(open_model, job, [folder], make_mesh(job.degrees), CPU).splitlines()


def test_what_was_compiled_is_not(tmp_path: Path) -> None:
    """After eight lengths torch.compile would give up."""
    trained = make_config(1, compile__mode="block")
    (tmp_path / "config.toml").write_text(dump(trained))
    assert job_of(tmp_path, [tmp_path], []).config.compile.mode == "off"
    assert job_of(tmp_path, [tmp_path], [("compile.mode", "block")]).config.compile.mode == "block"


@pytest.mark.parametrize(
    ("trained", "given"),
    [
        ("optimizer.name=muon", "offload=cpu"),
        ("metrics.noise_scale=true train.micro_batch=1 model.tie_embeddings=true", "pp=2"),
        ("activation_checkpoint.mode=full activation_checkpoint.segment=2", "pp=2"),
        ("checkpoint.memory=3 run.dir=run", "tp=2"),
    ],
)
def test_keys_of_training_forbid_no_mesh(tmp_path: Path, trained: str, given: str) -> None:
    """Nothing is trained here."""
    (tmp_path / "config.toml").write_text(dump(make_config(1, **keys_in(trained))))
    key, _, value = given.partition("=")
    with mock.patch("compose.cli.generate.launched_ranks", return_value=2):
        assert refusal(job_of, tmp_path, [tmp_path], [(f"parallel.{key}", value)]) == ""


def test_the_command(runs: Runs) -> None:
    """On two ranks, of which one speaks."""
    run, model = runs["llama"]
    words = ["generate", str(run), "--prompt", "def __init__(self):\n", "--max-tokens=12"]
    words += ["--temperature=1.5", "--top-p=0.9", "--seed=3", "--prompt", "abc"]
    done = execute("-m", "compose", *words, ranks=2)
    assert done.returncode == 0, done.stderr
    texts = []
    for prompt in (PROMPT, list(b"abc")):
        ids = [*plain(model, DRAWN, prompt), ByteTokenizer.end]
        texts.append(ByteTokenizer().decode([*prompt, *ids[: ids.index(ByteTokenizer.end)]]) + "\n")
    assert done.stdout == "".join(texts).replace("\r", "\n")  # as a text file is read
    said = [line for line in done.stderr.splitlines() if line.startswith("generate: a prompt")]
    assert said == [f"generate: a prompt of {count} tokens" for count in (len(PROMPT), 3)]
