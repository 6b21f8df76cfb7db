"""The files of a tokenizer: what is odd is named, and copying follows no link."""

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import AutoTokenizer

from compose.config.tables import Data
from compose.data import special_tokens
from compose.data.batches import Batches
from compose.data.datasets import keep_tokenizer
from compose.data.samples import open_samples
from compose.data.special_tokens import KEYS
from compose.data.tokenizer import JsonTokenizer, copy_tokenizer, copy_with_config, open_tokenizer
from compose.errors import ConfigError
from tests.support.data_made import token_set
from tests.support.helpers import make_config, refusal
from tests.support.tokenizer_kinds import save_kind
from tests.support.tokenizers_made import save_tokenizer

OUT = "is a link that leads out of its folder; put the file itself there"
NO_TOKEN = "is no token: neither a string nor has it content"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path / "tokenizer").parent


def refused(path: Path) -> list[str]:
    return [line.replace(f"{path}/", "") for line in refusal(open_tokenizer, path).splitlines()]


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ("[]", "is a list, not an object"),
        ("null", "is null, not an object"),
        ('{"eos_token": NaN}', "holds NaN, which is not JSON"),
        ('{"eos_token": 5}', f"eos_token: {NO_TOKEN}"),
        ('{"eos_token": {"content": 5}}', f"eos_token: {NO_TOKEN}"),
        ('{"pad_token": ["a"]}', f"pad_token: {NO_TOKEN}"),
        ('{"extra_special_tokens": 5}', "extra_special_tokens: is no list of tokens"),
        (
            '{"added_tokens_decoder": {"x": "a"}}',
            "added_tokens_decoder: is no object of tokens by their ids",
        ),
        ('{"added_tokens_decoder": {"3": 4}}', f"added_tokens_decoder.3: {NO_TOKEN}"),
        ('{"a": ' * 5000, "is nested too deeply"),
        ('{"a": "\xff"}', "is not UTF-8: byte 7: invalid start byte"),
    ],
)
def test_odd_configs_are_named(tokenizer: Path, config: str, line: str) -> None:
    (tokenizer / "tokenizer_config.json").write_bytes(config.encode("latin-1"))
    assert refused(tokenizer) == [f"tokenizer_config.json: {line}"]


def test_what_a_config_may_hold(tokenizer: Path) -> None:
    config: dict[str, Any] = {
        "add_eos_token": True,
        "eos_token": {"content": "<|im_end|>"},
        "bos_token": "<s>",
        "pad_token": None,
    }
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    result = open_tokenizer(tokenizer)
    assert result.special == {"eos_token": "<|im_end|>", "bos_token": "<s>"}
    assert result.end == result.tokenizer.token_to_id("<|im_end|>")


TOKEN = {"content": "<|end|>", "lstrip": False, "rstrip": False, "normalized": False}
# These files lie beside a tokenizer.json, whose own tokens are those of SPECIAL.
FOLDERS: dict[str, dict[str, dict[str, Any]]] = {
    "a map alone": {"special_tokens_map": {"eos_token": "<|end|>", "bos_token": "<s>"}},
    "a map of tokens": {"special_tokens_map": {"eos_token": TOKEN, "pad_token": "<|im_end|>"}},
    "a map before a config": {
        "tokenizer_config": {"eos_token": "<|im_end|>", "bos_token": "<s>", "pad_token": "<|im_end|>"},
        "special_tokens_map": {"eos_token": "<|end|>", "bos_token": None},
    },
    "added tokens before a map": {
        "tokenizer_config": {"eos_token": "<|im_end|>", "added_tokens_decoder": {"0": TOKEN}},
        "special_tokens_map": {"eos_token": "<|end|>"},
    },
    "tokens that tokenizer.json lacks": {
        "tokenizer_config": {
            "eos_token": "<|new|>",
            "image_token": "<|image|>",
            "extra_special_tokens": ["<|more|>"],
            "added_tokens_decoder": {
                "301": {"content": "<|plain|>", "special": False, "lstrip": True},
                "300": {"content": "<|first|>", "special": True},
            },
        },
    },
    "an older file of added tokens": {
        "tokenizer_config": {"eos_token": "<|end|>", "additional_special_tokens": ["<|b|>"]},
        "added_tokens": {"<|b|>": 301, "<|a|>": 300},
    },
    "words on the start that are ignored": {
        "tokenizer_config": {"bos_token": "<s>", "add_bos_token": True, "add_eos_token": True}
    },
    "split": {"tokenizer_config": {"eos_token": "<|end|>", "split_special_tokens": True}},
    "a class": {"tokenizer_config": {"tokenizer_class": "GPTNeoXTokenizer"}},
    "a class that another model has": {
        "tokenizer_config": {"tokenizer_class": "LlamaTokenizer"},
        "config": {"model_type": "llama"},
    },
    "a model's class": {"config": {"model_type": "qwen3"}},
    "a model without a class": {
        "tokenizer_config": {"tokenizer_class": "LlamaTokenizer"},
        "config": {"model_type": "mixtral", "eos_token_id": 2},
    },
    "nothing": {},
}


@pytest.mark.parametrize("name", FOLDERS)
def test_special_tokens_are_those_of_transformers(tokenizer: Path, name: str) -> None:
    (tokenizer / "tokenizer_config.json").unlink()
    for file, values in FOLDERS[name].items():
        (tokenizer / f"{file}.json").write_text(json.dumps(values))
    ours, theirs = open_tokenizer(tokenizer), AutoTokenizer.from_pretrained(tokenizer)
    unused = ("pad_token", "unk_token")  # of these no text speaks
    expected = {n: t for n, t in theirs.special_tokens_map.items() if n not in unused}
    assert {n: t for n, t in ours.special.items() if n not in unused} == expected
    if theirs.eos_token:
        assert ours.end == theirs.eos_token_id
    known = "<|end|> <|im_end|><s> <|new|> <|image|><|more|>  <|plain|> <|first|> <|a|><|b|> </s>"
    for text in (known, "def add(a, b)", " a <|endoftext|>"):
        assert ours.encode(text, markup=True) == theirs(text)["input_ids"]


def test_every_key_of_transformers_is_looked_at() -> None:
    """Its code reads keys of tokenizer_config.json; a new one fails until it is listed."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    parts = (
        PreTrainedTokenizerBase.__init__,
        PreTrainedTokenizerBase._from_pretrained,
        PreTrainedTokenizerFast.__init__,
        PreTrainedTokenizerFast.convert_to_native_format,
    )
    source = "".join(inspect.getsource(part) for part in parts)
    words = re.findall(r"kwargs(?:\.get|\.pop|\.setdefault)?[\[(]\s*\"(\w+)\"", source)
    words += re.findall(r"\"(\w+)\" (?:not )?in (?:init_)?kwargs", source)
    own = {"_json_truncation", "_json_padding", "_spm_precompiled_charsmap", "tokenizer"}
    result = {*words, *PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES} - own
    assert len(result) > 40
    assert not result - {*KEYS.read, *KEYS.only, *KEYS.besides}
    assert not set(PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES) - KEYS.read


def test_keys_that_may_not_be_set_are_refused(tokenizer: Path) -> None:
    config = {"fix_mistral_regex": True, "fast_tokenizer_files": ["tokenizer.4.json"], "new": 5}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    assert refused(tokenizer) == [
        'tokenizer_config.json: fast_tokenizer_files: ["tokenizer.4.json"] is not supported here',
        "tokenizer_config.json: fix_mistral_regex: true is not supported here",
    ]


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff", b"[" * 5000, b'{"model": 5}', b"\xef\xbb\xbf{}"]
)
def test_what_is_no_tokenizer_is_named(tokenizer: Path, content: bytes) -> None:
    (tokenizer / "tokenizer.json").write_bytes(content)
    (line,) = refused(tokenizer)
    assert line.startswith("tokenizer.json: is no tokenizer.json: ")


def test_a_panic_of_its_library_is_named(tokenizer: Path) -> None:
    """Where its Rust code panics, tokenizers raises what is no Exception."""

    class PanicException(BaseException):
        pass

    class Loaded:
        @staticmethod
        def from_str(text: str) -> None:
            raise PanicException("range end index 18446744073709551615 out of range")

    with mock.patch("tokenizers.Tokenizer", Loaded):
        (line,) = refused(tokenizer)
    why = "range end index 18446744073709551615 out of range"
    assert line == f"tokenizer.json: is no tokenizer.json: {why}"


def test_a_tokenizer_that_cannot_encode_is_named(tmp_path: Path) -> None:
    words = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(words))
    line = refusal(JsonTokenizer(path).encode, "what it lacks")
    assert line.startswith(f"{path}: cannot encode a text: ")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_link_out_of_the_folder_is_not_followed(tokenizer: Path, tmp_path: Path, name: str) -> None:
    path = tokenizer / name
    path.unlink(missing_ok=True)
    (tmp_path / "secret").write_text("{}")
    path.symlink_to("../secret")
    assert refused(tokenizer) == [f"{name}: {OUT}"]
    with pytest.raises(ConfigError, match=OUT):
        copy_tokenizer(tokenizer, tmp_path / "copy")
    assert not list((tmp_path / "copy").glob("*"))


def test_a_link_that_a_person_names_is(tokenizer: Path, tmp_path: Path) -> None:
    link = tmp_path / "other" / "tokenizer.json"
    link.parent.mkdir()
    link.symlink_to(tokenizer / "tokenizer.json")
    assert open_tokenizer(link).sha256 == open_tokenizer(tokenizer).sha256


def test_copies_replace_links(tokenizer: Path, tmp_path: Path) -> None:
    """A copy replaces what is in its way, also a link, whose target is left alone."""
    mine, folder = tmp_path / "mine", tmp_path / "run"
    mine.write_text("mine")
    folder.mkdir()
    for name in ("tokenizer.json", ".tokenizer.json.new", "tokenizer_config.json"):
        (folder / name).symlink_to(mine)
    copy_tokenizer(tokenizer, folder)
    assert mine.read_text() == "mine"
    assert sorted(path.name for path in folder.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    for path in tokenizer.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()
        assert not (folder / path.name).is_symlink()


def keep(data: Path, folder: Path, **keys: object) -> None:
    """Keep the tokenizer of a run that is trained on a token set."""
    batches = Batches([open_samples(str(data), Data(), 8, 64)], global_batch=1, seed=0)
    keep_tokenizer(dataclasses.replace(make_config(1, **keys), data=Data()), batches, folder)


def test_a_run_writes_its_tokenizer_into_no_link(tokenizer: Path, tmp_path: Path) -> None:
    data = token_set(tmp_path / "data")
    (data / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    folder = tmp_path / "run" / "tokenizer"
    folder.parent.mkdir()
    (tmp_path / "else").mkdir()
    folder.symlink_to(tmp_path / "else")
    with pytest.raises(ConfigError, match=f"run.dir: {folder}: is a link; remove it"):
        keep(data, folder)
    assert not list((tmp_path / "else").iterdir())
    folder.unlink()
    keep(data, folder)
    assert {path.name for path in folder.iterdir()} == {"tokenizer.json", "generation_config.json"}
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()
    with pytest.raises(ConfigError, match=f"run.dir: {folder}: cannot be written: Is a directory"):
        keep(data, folder)


def test_a_run_keeps_the_files_of_its_data(tokenizer: Path, tmp_path: Path) -> None:
    """Chat files of the first weights' folder go, and the end of the documents is noted."""
    base, data, folder = tmp_path / "base", token_set(tmp_path / "data"), tmp_path / "run" / "tokenizer"
    copy_tokenizer(tokenizer, base)
    copy_tokenizer(tokenizer, data)
    (base / "config.json").write_text("{}")
    (base / "generation_config.json").write_text('{"top_k": 3}')
    (base / "chat_template.jinja").write_text("another")
    (base / "special_tokens_map.json").write_text('{"eos_token": "<s>"}')
    folder.parent.mkdir()
    keep(data, folder, checkpoint__load_hf=base)
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json")
    }
    tokens = [open_tokenizer(folder).tokenizer.token_to_id(each) for each in ("<|end|>", "<|im_end|>")]
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"top_k": 3, "eos_token_id": [*tokens, 49]}  # as the data's manifest has it


@pytest.mark.parametrize(
    ("kind", "config", "model"),
    [
        ("llama2", {"tokenizer_class": "LlamaTokenizer"}, "mixtral"),
        ("llama2", {"tokenizer_class": "LlamaTokenizer"}, "llama"),
        ("llama2", {"tokenizer_class": "LlamaTokenizer"}, "phi3"),
        ("qwen", {"tokenizer_class": None, "eos_token": None}, "qwen3"),
    ],
)
def test_a_copy_without_its_model_means_the_same(
    tmp_path: Path, kind: str, config: dict[str, Any], model: str
) -> None:
    """A model's type may decide how its tokenizer works, and a token set has no model."""
    source, copy = save_kind(tmp_path / "source", kind, **config), tmp_path / "copy"
    before = (source / "tokenizer_config.json").read_text()
    (source / "config.json").write_text(json.dumps({"model_type": model}))
    copy_tokenizer(source, copy)
    one, other = open_tokenizer(source), open_tokenizer(copy)
    for text in (" a", "a</s> b<|endoftext|>"):
        assert one.encode(text, markup=True) == other.encode(text, markup=True)
    assert (one.end, one.special) == (other.end, other.special)
    copy_with_config(source, tmp_path / "kept")
    assert (tmp_path / "kept/tokenizer_config.json").read_text() == before


def test_models_whose_tokenizer_is_tokenizer_json_alone() -> None:
    """transformers' table has them so, whatever class tokenizer_config.json names."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    kinds = {name: TOKENIZER_MAPPING_NAMES.get(name) for name in special_tokens._OF_NO_CLASS}
    assert set(kinds.values()) == {"TokenizersBackend"}
    llama = {"tokenizer_class": "LlamaTokenizer"}
    assert special_tokens._class(llama, {"model_type": "phi3"}) == ""
    assert special_tokens._class(llama, {"model_type": "llama"}) == "LlamaTokenizer"
