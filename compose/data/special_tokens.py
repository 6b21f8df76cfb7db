"""The special tokens of a tokenizer's folder, by the rules of transformers' AutoTokenizer.

tokenizer_config.json names them. special_tokens_map.json does so for older files, and so may the class
of the tokenizer, where neither has a word.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compose.config.json_files import KnownKeys, read_json
from compose.errors import ConfigError, refuse_link_out

CONFIG = "tokenizer_config.json"
MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"
GENERATION = "generation_config.json"
MODEL = "config.json"
"""The config of Hugging Face's model, which has the ids of special tokens too."""
KEYS = KnownKeys(
    read="bos_token eos_token unk_token sep_token pad_token cls_token mask_token add_prefix_space"
    " added_tokens_decoder additional_special_tokens chat_template extra_special_tokens legacy"
    " split_special_tokens tokenizer_class",
    only={"fast_tokenizer_files": (None, [], ["tokenizer.json"]), "fix_mistral_regex": (None, False)},
    # transformers ignores add_bos_token and add_eos_token beside a tokenizer.json, whose post-processor
    # says what is added. The rest is about padding, truncation, the text that ids make, other files, or
    # how transformers' classes were made.
    besides="add_bos_token add_eos_token auto_map backend chat_control_tokens"
    " clean_up_tokenization_spaces"
    " clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    " errors files_loaded gguf_file init_inputs is_local local_files_only max_len max_length"
    " merges merges_file model_input_names model_max_length model_specific_special_tokens name_or_path"
    " pad_to_multiple_of pad_token_type_id padding_side post_processor processor_class response_schema"
    " response_template sp_model_kwargs spaces_between_special_tokens special_tokens_map_file stride"
    " tokenizer_file tokenizer_object tokenizer_padding tokenizer_truncation trim_offsets"
    " truncation_side truncation_strategy unk_id use_default_system_prompt verbose vocab vocab_file",
)
"""The keys of tokenizer_config.json. transformers ignores others, and so does this."""
LLAMA = "LlamaTokenizer"
"""The class of Llama 2's kind."""
# The tokens that transformers' classes name where a file names none.
_S, _TEXT = {"bos_token": "<s>", "eos_token": "</s>"}, "<|endoftext|>"
_CLASSES: Mapping[str, Mapping[str, str]] = {
    LLAMA: _S,
    "CodeLlamaTokenizer": _S,
    "XLMRobertaTokenizer": _S,
    "T5Tokenizer": {"eos_token": "</s>"},
    "GemmaTokenizer": {"bos_token": "<bos>", "eos_token": "<eos>"},
    "Qwen2Tokenizer": {"eos_token": _TEXT},
    "GPT2Tokenizer": {"bos_token": _TEXT, "eos_token": _TEXT},
    "GPTNeoXTokenizer": {"bos_token": _TEXT, "eos_token": _TEXT},
    "CohereTokenizer": {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"},
}
# The class of a model that names none.
_OF_MODEL = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    "gpt2": "GPT2Tokenizer",
}
# Models whose tokenizer is tokenizer.json alone, whatever class is named (transformers'
# TOKENIZER_MAPPING_NAMES has TokenizersBackend for them).
_OF_NO_CLASS = (
    *("mistral", "ministral", "mixtral", "phi3", "ernie4_5", "hyperclovax", "minimax_m2"),
    *("olmo2", "olmo3", "flex_olmo", "glm", "glm4", "glm4_moe", "granite", "granitemoe"),
    *("stablelm", "gpt_bigcode"),
)
# A token of such a name that the vocabulary lacks is in no text, and needs no row of the model.
_UNUSED = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class SpecialTokens:
    """The content of a tokenizer's folder besides tokenizer.json."""

    config: Mapping[str, Any]  # the content of tokenizer_config.json
    names: Mapping[str, str]  # special tokens by a name such as "eos_token"
    added: Sequence[tuple[str, Mapping[str, bool]]]
    """Tokens to add to those of tokenizer.json, with their options; most are there already."""
    kind: str
    """The tokenizer's class in transformers, if it makes a tokenizer of its own; else empty."""
    split: bool  # whether special tokens in a text are ordinary text, whatever the text is


def read_special_tokens(folder: Path, vocabulary: Collection[str], byte_level: bool) -> SpecialTokens:
    """Read the special tokens beside a tokenizer.json."""
    path, config = folder / CONFIG, read_beside(folder, CONFIG)
    problems = KEYS.problems({key: config[key] for key in KEYS.only if key in config})
    kind = _class(config, read_beside(folder, MODEL), byte_level)
    names = dict(_CLASSES.get(kind, {}))
    _name(names, config, path)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    decoder = config.get("added_tokens_decoder")
    added: dict[str, Any] = {}
    if decoder is None:  # then older files count, and the map comes before the config
        if (folder / MAP).exists():
            named = read_json(folder / MAP, dict[str, Any])
            _name(names, named, folder / MAP)
            extra = named.get("extra_special_tokens") or named.get("additional_special_tokens") or extra
        if (folder / ADDED).exists():
            older = read_json(folder / ADDED, dict[str, int])
            added = {str(place): token for token, place in older.items()}
    elif isinstance(decoder, dict) and all(re.fullmatch("[0-9]{1,18}", key) for key in decoder):
        added = decoder
    else:
        problems.append("added_tokens_decoder: is no object of tokens by their ids")
    if isinstance(extra, dict):
        _name(names, extra, path, every=True)
        extra = []
    if not isinstance(extra, list):
        problems.append("extra_special_tokens: is no list of tokens")
    if problems:
        raise ConfigError(*(f"{path}: {line}" for line in problems))
    tokens = [_token(added[key], path, f"added_tokens_decoder.{key}") for key in sorted(added, key=int)]
    tokens += [
        (content, {"special": True})
        for name, content in names.items()
        if name not in _UNUSED or content in vocabulary
    ]
    tokens += [
        (content, {"special": True, **options})
        for content, options in (_token(each, path, "extra_special_tokens") for each in extra)
    ]
    split = config.get("split_special_tokens") is True
    return SpecialTokens(config, names, tokens, kind, split)


def _name(names: dict[str, str], values: Mapping[str, Any], path: Path, every: bool = False) -> None:
    """Put the special tokens that a file names into ``names``; null takes one out."""
    for name, value in values.items():
        # Keys such as "add_eos_token" hold true or false, and no token.
        if not (every or name.endswith("_token")) or isinstance(value, bool):
            continue
        names.pop(name, None)
        if value is not None:
            names[name] = _token(value, path, name)[0]


def _token(value: Any, path: Path, key: str) -> tuple[str, dict[str, bool]]:
    options = dict(value) if isinstance(value, dict) else {}
    content = options.pop("content", None) if isinstance(value, dict) else value
    if not isinstance(content, str):
        raise ConfigError(f"{path}: {key}: is no token: neither a string nor has it content")
    known = ("lstrip", "rstrip", "normalized", "single_word", "special")
    return content, {name: bool(options[name]) for name in known if name in options}


def class_of_copy(folder: Path) -> str:
    """Return the class that a copy without config.json must name; "" if the copy has it anyway."""
    config, alone = read_beside(folder, CONFIG), "PreTrainedTokenizerFast"
    kind = _class(config, read_beside(folder, MODEL))
    return "" if kind == _class(config, {}) else kind or alone


def _class(config: Mapping[str, Any], model: Mapping[str, Any], byte_level: bool = False) -> str:
    """Return the class of the tokenizer in transformers, or nothing if it is tokenizer.json alone."""
    kind = config.get("tokenizer_class") or model.get("tokenizer_class")
    name = str(kind).removesuffix("Fast") if kind else _OF_MODEL.get(str(model.get("model_type")), "")
    if (name == LLAMA and byte_level) or model.get("model_type") in _OF_NO_CLASS:
        return ""
    return name


def model_ends(folder: Path) -> list[int]:
    """Return the ids that end a text, by generation_config.json and config.json of a folder."""
    results: list[int] = []
    for name in (GENERATION, MODEL):
        given = read_beside(folder, name).get("eos_token_id")
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
            raise ConfigError(f"{folder / name}: eos_token_id: is neither an id nor a list of ids")
        results += [each for each in ids if each >= 0]
    return results


def read_beside(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of a JSON file in a tokenizer's folder; nothing if it is not there."""
    path = folder / name
    if not path.exists():
        return {}
    refuse_link_out(path, folder)
    return read_json(path, dict[str, Any])
