"""The tokens that end a text which a model writes, by all files that name such tokens."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compose.config.json_files import KnownKeys, read_json
from compose.data.chat_template import ChatTemplate
from compose.data.special_tokens import GENERATION, MODEL, model_ends, read_beside
from compose.data.tokenizer import FILE, ByteTokenizer, JsonTokenizer, Tokenizer, open_tokenizer
from compose.errors import ConfigError

KEYS = KnownKeys(
    read="bos_token_id eos_token_id pad_token_id repetition_penalty",
    # Another value of these keys would change the likeliest text.
    only={
        "encoder_repetition_penalty guidance_scale num_beams num_return_sequences": (None, 1),
        "encoder_no_repeat_ngram_size min_length min_new_tokens no_repeat_ngram_size": (None, 0),
        "bad_words_ids begin_suppress_tokens constraints dola_layers exponential_decay_length_penalty"
        " force_words_ids forced_bos_token_id forced_eos_token_id max_time penalty_alpha"
        " sequence_bias stop_strings suppress_tokens token_healing watermarking_config": (
            *(None, False, [], {}),
        ),
    },
    # The flags of `generate` say how long a text is and how it is sampled. The rest is about beams,
    # which are refused, a second model that saves time, caches, and what transformers returns.
    besides="assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight"
    " assistant_lookbehind cache_config cache_implementation compile_config continuous_batching_config"
    " decoder_start_token_id disable_compile diversity_penalty do_sample early_stopping epsilon_cutoff"
    " eta_cutoff is_assistant length_penalty low_memory max_cache_len max_length"
    " max_matching_ngram_size max_new_tokens min_p num_assistant_tokens num_assistant_tokens_schedule"
    " num_beam_groups output_attentions output_hidden_states output_logits output_scores"
    " prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values renormalize_logits"
    " return_dict_in_generate speculation_type target_lookbehind temperature top_h top_k top_p"
    " transformers_version typical_p use_cache use_mtp _commit_hash _from_model_config",
)
"""The keys of generation_config.json, which has the fields of transformers' GenerationConfig."""


def end_ids(tokenizer: Tokenizer, folder: Path | None = None) -> list[int]:
    """Return the ids that end a text.

    They are the tokenizer's own, those that end a reply in its chat template, and those of the JSON
    files in the model's ``folder`` and beside the tokenizer.
    """
    ids = [tokenizer.end] if tokenizer.end >= 0 else []
    folders = [folder] if folder else []
    if isinstance(tokenizer, JsonTokenizer):
        folders.append(tokenizer.path.parent)
        ids += turn_ends(tokenizer)
    for each in folders:
        ids += model_ends(each)
    return list(dict.fromkeys(ids))


def turn_ends(tokenizer: JsonTokenizer) -> list[int]:
    """Return the special tokens with which the tokenizer's chat template ends a reply."""
    try:
        template = ChatTemplate(tokenizer)
    except ConfigError:
        return []
    tokens = tokenizer.tokenizer.get_added_tokens_decoder()
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    ends: list[int] = []
    # A call of a tool may end in another way.
    for reply in ({"content": "a"}, {"content": "", "tool_calls": [call]}):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", **reply}]
        try:
            text = template.text(messages, {})
        except ValueError:  # some templates want more
            continue
        ids, _ = tokenizer.encode_markup(text.rstrip())
        token = tokens.get(ids[-1]) if ids else None
        if token and (token.special or "tool_calls" not in reply):
            ends.append(ids[-1])
    return ends


def repetition_penalty(folders: Iterable[Path]) -> float:
    """Return what the generation_config.json of a model divides the logits of repeated tokens by."""
    for path in (folder / GENERATION for folder in folders):
        if path.exists():
            values = read_json(path, dict[str, Any])
            penalty = values.get("repetition_penalty") or 1.0
            problems = KEYS.problems(values)
            if isinstance(penalty, bool) or not isinstance(penalty, int | float) or penalty <= 0:
                problems.append(f"repetition_penalty: {penalty!r} is no number above 0")
            if problems:
                raise ConfigError(*(f"{path}: {line}" for line in problems))
            return float(penalty)
    return 1.0


def generation_values(folder: Path | None, vocab_size: int) -> dict[str, Any]:
    """Return the ids of special tokens for the config.json and generation_config.json of a model."""
    # All keys are written: for an absent one transformers takes an id of some published model.
    known = read_beside(folder, MODEL) | read_beside(folder, GENERATION) if folder else {}
    results = {key: known.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tokenizer: Tokenizer | None = None
    if folder and (folder / FILE).exists():
        tokenizer = open_tokenizer(folder)
        vocabulary = tokenizer.tokenizer.get_vocab()
        for name in ("bos_token", "pad_token"):
            token = tokenizer.special.get(name)
            place = vocabulary.get(token or "", vocab_size)
            if results[f"{name}_id"] is None and place < vocab_size:  # the model may lack a row for it
                results[f"{name}_id"] = place
    elif vocab_size == ByteTokenizer.vocab_size:
        tokenizer = ByteTokenizer()
    if tokenizer:
        ends = [each for each in end_ids(tokenizer, folder) if each < vocab_size]
        results["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
    return results
