"""The translation of config.json for the models' hf.py; it refuses what a model here cannot express.

Each key of a config.json is read, or must have the one value that the models here have, or is known to
say nothing about what the weights compute. Any other key may change it, and is refused.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from compose.errors import shown

C = TypeVar("C")

_QUANTIZED = "quantization_config"
BALANCE, BALANCED = "router_aux_loss_coef", "output_router_logits"
"""The key of the balancing loss's weight, and the key without which transformers does not use it."""
# Features that no model here has. The values say that a published model lacks them too.
_NONE_HERE: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "hidden_act": ("silu",),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "moe_frequency": (1,),
    "partial_rotary_factor": (1,),
    "pruned_heads": ({},),
    # Besides weights of 8 bits with a scale for each block, which compose.checkpoint reads.
    _QUANTIZED: (),
}
# Keys that say nothing about the weights: who wrote the file, how text is generated, how results are
# returned.
_BESIDES = """
_attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
_flash_attn_2_enabled _name_or_path _num_labels architectures attn_implementation auto_map
bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size
decoder_start_token_id diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size
eos_token_id ep_size exponential_decay_length_penalty finetuning_task forced_bos_token_id
forced_eos_token_id gradient_checkpointing id2label initializer_range internal_version is_decoder
is_llama_config label2id length_penalty max_length max_new_tokens max_position_embeddings
max_sequence_length max_window_layers min_length model_max_length name_or_path no_repeat_ngram_size
num_beam_groups num_beams num_labels num_return_sequences output_attentions output_hidden_states
output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type
remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class
top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
unsloth_fixed unsloth_version use_bfloat16 use_cache
"""
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
# The rules that scale rotary frequencies, each with its required and its optional parameters.
_RULES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
    ),
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        ("factor", "attention_factor"),
    ),
}
_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True)
class Keys:
    """Every known key of one kind of config.json."""

    fields: Mapping[str, str]
    """The key for each of our fields."""
    read: frozenset[str]
    """Keys that are read besides."""
    only: Mapping[str, tuple[Any, ...]]
    """Keys that must have one of these values, or be absent or null."""
    besides: frozenset[str]
    """Keys that say nothing about what the weights compute."""

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise ValueError for a key that is not known, or has a value that it may not have."""
        for key, allowed in self.only.items():
            if key != _QUANTIZED or not _in_blocks(values.get(key)):
                only(values, key, *allowed)
        known = {*self.fields.values(), *self.read, *self.only, *self.besides}
        for key, value in values.items():
            if key not in known and value is not None:
                raise ValueError(
                    f"{_plain(key)}: {shown(value)} is of a key that is not known here, which may"
                    " change what the weights compute; take it out if it does not"
                )

    def build(self, kind: type[C], **values: Any) -> C:
        """Return ``kind(**values)``; a ValueError names the published keys in place of our fields."""
        try:
            return kind(**values)
        except ValueError as error:
            raise ValueError(
                re.sub(r"\w+", lambda word: self.fields.get(word[0], word[0]), str(error))
            ) from None


def keys(
    fields: Mapping[str, str],
    read: Iterable[str] = (),
    only: Mapping[str, tuple[Any, ...]] | None = None,
    besides: Iterable[str] = (),
    rope: bool = True,
) -> Keys:
    """Return the known keys of one model, with those that all models have.

    The arguments are as in :class:`Keys`; ``rope`` is whether the model has rotary embeddings.
    """
    balance = (BALANCED,) if BALANCE in fields.values() else ()
    read = {"model_type", *(_ROPE if rope else ()), *balance, *read}
    besides = {*besides}
    none_here = {key: one for key, one in _NONE_HERE.items() if key not in read | besides}
    return Keys(
        fields,
        frozenset(read),
        none_here | dict(only or {}),
        # A model may give one of these a meaning.
        frozenset({*_BESIDES.split(), *besides} - {*fields.values(), *read}),
    )


def _in_blocks(given: Any) -> bool:
    """Return whether weights are in e4m3 with a scale for each block of a matrix."""
    if not isinstance(given, Mapping):
        return False
    form = (given.get("quant_method"), given.get("fmt") or "e4m3")
    blocks = given.get("weight_block_size")
    sizes = blocks if isinstance(blocks, list) and len(blocks) == 2 else [0]
    known = form in (("fp8", "e4m3"), ("fp8", "float8_e4m3fn"))
    return known and all(type(one) is int and 0 < one < 2**31 for one in sizes)


def required(values: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value of a key, or the default; ValueError if both are missing."""
    value = default if values.get(key) is None else values[key]
    if value is None:
        raise ValueError(f"{key}: is missing")
    return value


def size(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a whole number; ValueError for anything else, or out of range.

    ``default`` is for a key that is absent or null, which is a ValueError too if there is none.
    """
    value = required(values, key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key}: expected a whole number, got {shown(value)}")
    if not abs(value) < 2**63:
        raise ValueError(f"{key}: {shown(value)} is out of range")
    return value


def number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a finite number; ValueError for anything else."""
    value = required(values, key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{key}: expected a number, got {shown(value)}")
    if not abs(value) < 2.0**1023 or not math.isfinite(value):
        raise ValueError(f"{key}: {shown(value)} is out of range")
    return float(value)


def share(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a number above 0, at most 1; ValueError for anything else."""
    value = number(values, key, default)
    if not 0 < value <= 1:
        raise ValueError(f"{key}: {value} should be above 0, at most 1")
    return value


def truth(values: Mapping[str, Any], key: str, default: bool | None = None) -> bool:
    """Return true or false; ValueError for anything else."""
    value = required(values, key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key}: expected true or false, got {shown(value)}")
    return value


def only(values: Mapping[str, Any], key: str, *allowed: Any) -> None:
    """Raise ValueError if a key has another value than the allowed ones; it may be absent or null."""
    value = values.get(key)
    if value is not None and value not in allowed:
        choice = f", only {' or '.join(json.dumps(one) for one in allowed)}" if allowed else ""
        if key == _QUANTIZED and not allowed:
            choice = ', only quant_method "fp8" with weight_block_size; take the folder in bfloat16'
        raise ValueError(f"{key}: {shown(value)} cannot be expressed here{choice}")


def _plain(key: str) -> str:
    return key if key.isprintable() and len(key) <= _SHOWN else shown(key)


def numbers(values: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """Return a list of finite numbers; ValueError for anything else."""
    value = required(values, key)
    if not isinstance(value, list):
        raise ValueError(f"{key}: expected a list of numbers, got {shown(value)}")
    return tuple(number({key: one}, key) for one in value)


def rope(
    values: Mapping[str, Any],
    kinds: Sequence[str],
    places: Sequence[str] = ("rope_scaling", "rope_parameters"),
    base: str = "rope_theta",
    default: float = 10_000.0,
    part: bool = False,
) -> tuple[float, str, dict[str, Any]]:
    """Return the base of the rotary frequencies, the name of their rule, and its parameters.

    The rule, one of ``kinds``, may be under each of the keys ``places``: transformers has written it in
    two ways. Parameters that are absent or null are left out. But the length before the rule is then
    max_position_embeddings, as in transformers. ``base`` is the key of the base, and ``default`` the
    base if nothing says another. With ``part`` the rule may hold ``partial_rotary_factor``, which is
    then a parameter.

    Raises ValueError if the rule is another one or has an unknown parameter, or two keys contradict
    each other.
    """
    given = {key: rule for key in places if (rule := table(values, key))}
    if any(rule != other for rule in given.values() for other in given.values()):
        raise ValueError(f"{places[0]}: says something else than {places[1]}")
    key, rule = next(iter(given.items()), (places[0], {}))
    for one in ("rope_type", "type"):
        if not isinstance(rule.get(one) or "", str):
            raise ValueError(f"{key}.{one}: expected a name in quotes, got {shown(rule[one])}")
    result = rule.get("rope_type") or rule.get("type") or "default"
    only({f"{key}.type": rule.get("type")}, f"{key}.type", result)
    if result not in ("default", *kinds):
        raise ValueError(f"{key}: {shown(values[key])} cannot be expressed here")
    # The names are those that a message shows.
    flat = {f"{key}.{name}": value for name, value in rule.items() if value is not None}
    needed, besides = _RULES[result]
    if part:
        besides = (*besides, "partial_rotary_factor")
    else:
        only(flat, f"{key}.partial_rotary_factor", 1)
    # "finetuned" is a word of YaRN's own files, on how it was trained.
    names = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned", *needed, *besides}
    for name, value in rule.items():
        if name not in names and value is not None:
            if name == "attn_factor" and result == "yarn":
                raise ValueError(
                    f"{key}.{name}: {shown(value)} is read by vLLM and not by transformers; take it"
                    " out, or write attention_factor, the whole factor on queries and keys"
                )
            raise ValueError(f"{key}.{_plain(name)}: {shown(value)} is of a key that is not known here")
    theta = number(values, base, default)
    inner = number(flat, f"{key}.rope_theta", theta)
    if values.get(base) is not None and inner != theta:
        raise ValueError(f"{base}: {theta} is another than {key}.rope_theta, {inner}")
    length = "original_max_position_embeddings"
    if length in needed and values.get("max_position_embeddings") is not None:
        flat.setdefault(f"{key}.{length}", values["max_position_embeddings"])
    parameters: dict[str, Any] = {}
    for name in (*needed, *besides):
        place = f"{key}.{name}"
        if name in needed or place in flat:
            parameters[name] = _PARAMETERS.get(name, number)(flat, place)
    return inner, result, parameters


_PARAMETERS: Mapping[str, Callable[[Mapping[str, Any], str], Any]] = {
    "original_max_position_embeddings": size,
    "partial_rotary_factor": share,
    "truncate": truth,
    "short_factor": numbers,
    "long_factor": numbers,
}


def table(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an object, empty if the key is absent or null; ValueError for anything else."""
    value = values.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key}: expected an object, got {shown(value)}")
    return dict(value or {})


def layer_types(values: Mapping[str, Any], n_layers: int, *allowed: str) -> list[str]:
    """Return the kind of each layer; ValueError for another number of them, or another kind."""
    types = values["layer_types"]
    if not isinstance(types, list) or len(types) != n_layers or None in types:
        raise ValueError(f"layer_types: expected a list of {n_layers} names, got {shown(types)}")
    for one in types:
        only({"layer_types": one}, "layer_types", *allowed)
    return types


def shortest_pattern(letters: str) -> str:
    """Return the shortest pattern that gives these letters of layers if it is repeated."""
    whole = len(letters)
    starts = (letters[:length] for length in range(1, whole + 1))
    return next((start for start in starts if letters == (start * whole)[:whole]), "")


def unpublished(config: object, whose: str, **only_values: object) -> None:
    """Raise ValueError if a field has another value than given, and config.json has no key for it.

    ``whose`` config.json it is, for the message.
    """
    for field, value in only_values.items():
        if getattr(config, field) != value:
            raise ValueError(f"{field}: {getattr(config, field)} has no place in {whose} config.json")
