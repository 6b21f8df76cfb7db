"""The preset "hf", and names of the hub: what a config takes from a folder, and what it refuses."""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

import train
from compose.__main__ import main
from compose.checkpoint.store import newest_first
from compose.cli.question import model_keys
from compose.config import hugging_face
from compose.config.hugging_face import hub_name, model_folder, no_folder
from compose.config.tables import Config
from compose.config.toml import dump, load, override
from compose.errors import ConfigError, leads_out, toml_value
from tests.support.helpers import ROOT, make_config, refusal
from tests.support.hugging_face import MODELS, assert_same, read_tensors, save_model
from tests.support.tokenizers_made import save_tokenizer
from tests.support.training import lines

SHAPE: dict[str, object] = {"model__dim": 48, "model__hidden_dim": 80, "model__rope_theta": 7e4}
HASH = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, with a Llama in ``hf`` and no cache of the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    save_model(tmp_path / "hf", SHAPE)
    (tmp_path / "mine.toml").write_text('[model]\npreset = "hf"\n[checkpoint]\nload_hf = "hf"\n')
    return tmp_path


def of(*words: tuple[str, str], file: str = "mine.toml") -> Config:
    return load(file, words)


def test_every_field_is_the_folders() -> None:
    assert of().model.name == "llama"
    assert of().model.config == make_config(1, **SHAPE).model.config
    shutil.rmtree("hf")
    save_model(Path("hf"), MODELS["qwen3"])
    result = of().model
    assert result.name == "qwen3"
    assert (result.config.n_layers, result.config.n_experts) == (2, 8)
    # A field that only training needs may be another.
    assert of(("model.balance_weight", "0.5")).model.config.balance_weight == 0.5


def test_a_nearer_preset_takes_the_place_of_a_name() -> None:
    """The default file names llama, so a command line asks for another folder by the preset alone."""
    shutil.rmtree("hf")
    save_model(Path("hf"), MODELS["qwen3"])
    Path("named.toml").write_text('[model]\nname = "llama"\npreset = "debug"\n')
    words = (("model.preset", "hf"), ("checkpoint.load_hf", "hf"))
    assert of(*words, file="named.toml").model.name == "qwen3"
    both = "command line: model.name: 'gpt2' is not what hf holds; set it to qwen3, or leave it out"
    assert refusal(lambda: of(("model.name", "gpt2"), *words, file="named.toml")) == both


def test_a_name_chooses_among_models_of_one_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a copy of models/llama, which has its hf.py."""
    types = {"llama": ["llama"], "qwen3": ["llama"]}
    monkeypatch.setattr(hugging_face, "_model_types", lambda name: types.get(name, ()))
    assert of(("model.name", "llama")).model.name == "llama"
    assert refusal(of) == (
        "mine.toml: checkpoint.load_hf: hf/config.json: model_type: 'llama' is llama and qwen3 of"
        " models/; set model.name (for convert in the file of --config)"
    )


CONTRADICTIONS = {
    "model.n_layers=5": "mine.toml: checkpoint.load_hf: hf: is a model with n_layers = {n}, not 5",
    "model.dim=x": 'command line: model.dim: expected int, got "x"',
    "model.dims=4": "command line: model.dims: unknown key; did you mean model.dim?",
    "model.name=gpt2": "command line: model.name: 'gpt2' is not what hf holds; set it to llama, or"
    " leave it out",
    "checkpoint.load_hf=gone": "command line: checkpoint.load_hf: gone: no such folder",
    "checkpoint.load_hf=": 'mine.toml: model.preset: "hf" is the model of checkpoint.load_hf, which is'
    " empty; set it to a folder with config.json",
    "checkpoint.load_hf=some/Model-0.5B": "command line: checkpoint.load_hf: some/Model-0.5B: is no"
    " folder; as a name of Hugging Face's hub it is not in the local cache ({cache}), and nothing is"
    " downloaded here; fetch it with: hf download some/Model-0.5B --local-dir Model-0.5B",
}


@pytest.mark.parametrize("word", CONTRADICTIONS)
def test_what_contradicts_the_folder_is_one_line(here: Path, word: str) -> None:
    key, _, value = word.partition("=")
    line = CONTRADICTIONS[word].format(cache=here / "cache", n=of().model.config.n_layers)
    assert refusal(of, (key, value)) == line


def test_a_config_json_that_no_model_here_has() -> None:
    Path("hf/config.json").write_text('{"model_type": "mamba"}')
    assert refusal(of).startswith(
        "mine.toml: checkpoint.load_hf: hf/config.json: model_type: 'mamba' is no model here (known: "
    )


def test_what_a_run_has_written_needs_no_folder(here: Path) -> None:
    config = of()
    Path("config.toml").write_text(dump(config))
    shutil.rmtree("hf")
    for again in (load("config.toml"), load("config.toml", alone=True), override(config, [])):
        assert again.model == config.model
    # One that an older version has written lacks newer fields, which then have their defaults.
    text = Path("config.toml").read_text()
    Path("config.toml").write_text("".join(s for s in text.splitlines(True) if "norm_eps" not in s))
    assert load("config.toml", alone=True).model.config == config.model.config
    assert refusal(load, "config.toml") == "config.toml: checkpoint.load_hf: hf: no such folder"


WORDS = [
    *("--train.seq_len=16", "--train.global_batch=2", "--checkpoint.interval=1", "--train.steps=4"),
    *(
        "--metrics.tensorboard=false",
        "--data.path=text",
        "--checkpoint.load_hf=hf",
        str(ROOT / "train.toml"),
    ),
]


@pytest.mark.slow
def test_a_run_equals_that_of_typed_fields_and_goes_on_without_the_folder(here: Path) -> None:
    """Losses, norms and checkpoints are bitwise those of the run whose fields are typed."""
    fields = asdict(of().model.config).items()
    Path("text").write_text("What a run learns. " * 40)
    typed = ["--model.name=llama", *(f"--model.{key}={toml_value(value)}" for key, value in fields)]
    train.main([*WORDS, *typed, "--run.dir=typed", "--train.stop_after=3"])
    train.main([*WORDS, "--model.preset=hf", "--run.dir=hf_", "--train.stop_after=2"])
    Path("hf").rename("moved")
    train.main([*WORDS, "--model.preset=hf", "--run.dir=hf_", "--train.stop_after=3"])
    kept = [
        [(line["loss"], line["grad_norm"]) for line in lines(Path(run))] for run in ("typed", "hf_")
    ]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 3
    stored = [newest_first(Path(run) / "checkpoints")[0] for run in ("typed", "hf_")]
    assert_same(*map(read_tensors, stored))
    states = [json.loads((folder / "state.json").read_text()) for folder in stored]
    assert states[0] == states[1] | {"hugging_face": states[0]["hugging_face"]}
    # A new run has nothing else to begin with, nor has one of adapters.
    line = "command line: checkpoint.load_hf: hf: no such folder"
    assert refusal(train.main, [*WORDS, "--model.preset=hf", "--run.dir=new"]) == line
    again = [*WORDS, "--model.preset=hf", "--run.dir=hf_", "--model.lora.rank=2"]
    again.append('--model.lora.targets=["layers.*.attention.w*"]')
    assert refusal(train.main, again).endswith("checkpoint.load_hf: hf: no such folder")


def cached(cache: Path, name: str = "some/Model-0.5B") -> Path:
    """Move ``hf`` into a cache as the hub's client keeps it; returned is the snapshot."""
    place = cache / f"models--{name.replace('/', '--')}"
    snapshot = place / "snapshots" / HASH
    for each in (snapshot, place / "blobs", place / "refs"):
        each.mkdir(parents=True)
    (place / "refs/main").write_text(HASH)
    for number, path in enumerate(sorted(Path("hf").iterdir())):
        path.rename(place / f"blobs/{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    return snapshot


CACHES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")


@pytest.mark.parametrize("variable", [*CACHES, "HOME"])
def test_a_name_of_the_hub_is_found_in_its_cache(
    here: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    below: dict[str, str] = dict(zip(CACHES, ("", "", "hub", "huggingface/hub"), strict=True))
    snapshot = cached(here / "place" / below.get(variable, ".cache/huggingface/hub"))
    monkeypatch.setenv("THERE", str(here))
    monkeypatch.setenv(variable, str(here / "place") if variable == "HOME" else "$THERE/place")
    result = of(("checkpoint.load_hf", "some/Model-0.5B"))
    assert result.checkpoint.load_hf == str(snapshot)
    assert result.model.config.dim == 48
    assert hub_name(snapshot) == "some/Model-0.5B"
    assert hub_name("hf") == hub_name("") == ""
    # A folder of that name goes first.
    Path("some/Model-0.5B").mkdir(parents=True)
    assert model_folder("some/Model-0.5B") == "some/Model-0.5B"


def test_names_that_the_cache_cannot_have(here: Path) -> None:
    snapshot = cached(here / "cache", "gpt2")
    assert model_folder("gpt2") == str(snapshot)
    ref = snapshot.parent.parent / "refs/main"
    for odd in ("../../..", "", HASH[:-1], HASH.upper(), f"{HASH}/..", "0" * 40):
        ref.write_text(odd)
        assert model_folder("gpt2") == "gpt2"
    ref.unlink()
    os.mkfifo(ref)  # it would never end
    assert model_folder("gpt2") == "gpt2"
    for text in ("", ".", "..", "a/b/c", "a--b", "../gpt2", "gpt2/", "-x/y", "x" * 97, "a b/c", "é/b"):
        assert model_folder(text) == text
        assert no_folder(text) == f"{text}: no such folder"
    assert "hf download" not in no_folder("cache/gone")  # a folder that is there has no such one


def test_links_into_the_blobs_beside_a_snapshot_alone(here: Path) -> None:
    snapshot = cached(here / "cache")
    model, file = snapshot.parent.parent, snapshot / "config.json"
    assert not leads_out(file, snapshot)
    (here / "linked").symlink_to(snapshot)
    assert not leads_out(here / "linked/config.json", here / "linked")
    for inside in ("blobs/0", "snapshots/other/x"):
        (model / inside).parent.mkdir(exist_ok=True)
        (model / inside).write_text("{}")
    (here / "cache/models--b/blobs").mkdir(parents=True)
    (here / "cache/models--b/blobs/0").write_text("{}")
    (model / "blobs/deep").mkdir()
    (model / "blobs/out").symlink_to(here / "mine.toml")
    odd = ("refs/main", "snapshots/other/x", "blobs/deep/x", "blobs/out", "../models--b/blobs/0")
    for target in (*(model / each for each in odd), here / "mine.toml"):
        file.unlink()
        file.symlink_to(target)
        assert leads_out(file, snapshot), target
    # Folders of these names elsewhere are no cache.
    plain = here / "snapshots/1"
    plain.mkdir(parents=True)
    (here / "blobs").mkdir()
    (here / "blobs/0").write_text("{}")
    (plain / "config.json").symlink_to("../../blobs/0")
    assert leads_out(plain / "config.json", plain)


NO_FOLDER = "is no folder; as a name of Hugging Face's hub it is not in the local cache"


def test_commands_take_names_of_the_hub(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They say which folder it is, or how to fetch it."""
    name = "some/Model-0.5B"
    save_tokenizer(Path("hf"))
    (here / "text").write_text("def f(): pass")
    commands = [
        ["convert", name, "run"],
        ["tokenize", "--tokenizer", name, "--out=set", "--workers=1", "--end=<|end|>", "text"],
        ["generate", name, "--prompt=def", "--max-tokens=1", "--tokenizer=bytes"],
        ["verify", "mine.toml", f"--checkpoint.load_hf={name}", "--model.dims=1"],
    ]
    for words in commands:
        assert f"{name}: {NO_FOLDER}" in refusal(main, words), words
    with pytest.raises(ConfigError, match=NO_FOLDER):
        model_keys(name)
    snapshot = cached(here / "cache")
    for words, flag in zip(commands[:3], ("", "--tokenizer: ", ""), strict=True):
        assert main(words) == 0
        assert f"{flag}{name} of the hub's local cache: {snapshot}\n" in capsys.readouterr().err
    assert model_keys(name)[0] == ("model.name", "llama")
    train.main(["mine.toml", f"--checkpoint.load_hf={name}", "--dry-run"])
    line = f"checkpoint.load_hf: {name} of the hub's local cache: {snapshot}\n"
    assert capsys.readouterr().err == f"--model: {line.partition(': ')[2]}{line}"
