"""Small tokenizers of the kinds that are published, trained on the spot."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

_TEXT = "the a user assistant def return naïve ½ 日本語 🙂 it's 1234567 x+=y; == === foo.bar() ÉCOLE"
WORDS = _TEXT.split(" ")
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")


def text_of(count: int, seed: int = 0, lines: bool = True) -> str:
    """A text of words, runs of white space, and numbers."""
    chance = random.Random(seed)
    gaps = [" ", " ", " ", "  ", "    ", "\t", *(["\n", "\n", "\n\n", "\n  ", "\r\n"] if lines else [])]
    return "".join(chance.choice(WORDS) + chance.choice(gaps) for _ in range(count))


def _trained(model: Any, trainer: Any, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        if name != "post_processor":
            setattr(tokenizer, name, part)
    tokenizer.train_from_iterator([text_of(400, seed) for seed in range(3)], trainer)
    return tokenizer


def _bpe(special: list[str], **options: Any) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False, **options)


def _bytes(special: list[str]) -> trainers.BpeTrainer:
    return _bpe(special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def _byte_level(*patterns: str) -> Any:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, plain])


def _begun_with(token: str) -> Any:
    """A byte-level tokenizer adds a token at the start."""
    template = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, 0)]
    )
    return processors.Sequence([processors.ByteLevel(trim_offsets=True), template])


def _template(tokenizer: Tokenizer, single: str, *special: str) -> None:
    pairs = [(token, tokenizer.token_to_id(token)) for token in special]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} $B", special_tokens=pairs
    )


FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]


def gpt2() -> tuple[Tokenizer, dict[str, Any]]:
    """Byte-level BPE, whose post-processor adds nothing."""
    result = _trained(
        models.BPE(),
        _bytes(["<|endoftext|>"]),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoder=decoders.ByteLevel(),
    )
    result.post_processor = processors.ByteLevel(trim_offsets=False)
    return result, {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}


def qwen() -> tuple[Tokenizer, dict[str, Any]]:
    """A pattern of its own, NFC, and no token at the start."""
    result = _trained(
        models.BPE(),
        _bytes(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
        normalizer=normalizers.NFC(),
        pre_tokenizer=_byte_level(QWEN),
        decoder=decoders.ByteLevel(),
    )
    result.post_processor = processors.ByteLevel(trim_offsets=True)
    return result, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def llama3() -> tuple[Tokenizer, dict[str, Any]]:
    """A pattern with three digits together, and a token at the start."""
    result = _trained(
        models.BPE(ignore_merges=True),
        _bytes(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]),
        pre_tokenizer=_byte_level(LLAMA3),
        decoder=decoders.ByteLevel(),
    )
    result.post_processor = _begun_with("<|begin_of_text|>")
    return result, {"eos_token": "<|eot_id|>", "bos_token": "<|begin_of_text|>"}


def deepseek() -> tuple[Tokenizer, dict[str, Any]]:
    """Three patterns, one after the other, and a token at the start."""
    result = _trained(
        models.BPE(),
        _bytes(["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]),  # noqa: RUF001
        pre_tokenizer=_byte_level(r"\p{N}{1,3}", r"[\p{Han}\p{Hiragana}\p{Katakana}]+", QWEN),
        decoder=decoders.ByteLevel(),
    )
    result.post_processor = _begun_with("<｜begin▁of▁sentence｜>")  # noqa: RUF001
    names = {"eos_token": "<｜end▁of▁sentence｜>", "bos_token": "<｜begin▁of▁sentence｜>"}  # noqa: RUF001
    return result, names


def llama2() -> tuple[Tokenizer, dict[str, Any]]:
    """No words: BPE takes the whole text, with a space before it."""
    result = _trained(
        models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True),
        _bpe(["<unk>", "<s>", "</s>", *FALLBACK], max_token_length=8),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        pre_tokenizer=pre_tokenizers.Split(Regex("[^▁]+▁*|▁+"), "isolated"),
    )
    result.pre_tokenizer = None
    result.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    _template(result, "<s> $A", "<s>")
    return result, {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}


def gemma() -> tuple[Tokenizer, dict[str, Any]]:
    """Spaces as a character, no space before a text, and ends of lines as added tokens."""
    result = _trained(
        models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True),
        _bpe(["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", *FALLBACK]),
        normalizer=normalizers.Replace(" ", "▁"),
        pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
        decoder=decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        ),
    )
    lines = ["\n" * count for count in (1, 2, 3)]
    result.add_tokens([AddedToken(line, normalized=False, special=False) for line in lines])
    _template(result, "<bos> $A", "<bos>")
    return result, {"eos_token": "<eos>", "bos_token": "<bos>", "pad_token": "<pad>"}


def metaspace() -> tuple[Tokenizer, dict[str, Any]]:
    """Unigram over words with a space before each, and a token at the end."""
    result = _trained(
        models.Unigram(),
        trainers.UnigramTrainer(
            vocab_size=300,
            special_tokens=["<pad>", "</s>", "<unk>"],
            unk_token="<unk>",
            show_progress=False,
        ),
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]),
        pre_tokenizer=pre_tokenizers.Metaspace(),
        decoder=decoders.Metaspace(),
    )
    _template(result, "$A </s>", "</s>")
    return result, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def word_piece() -> tuple[Tokenizer, dict[str, Any]]:
    """Words without case, and a token at both sides."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    result = _trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False),
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
    )
    result.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return result, {
        "sep_token": "[SEP]",
        "cls_token": "[CLS]",
        "unk_token": "[UNK]",
        "eos_token": "[SEP]",
    }


def words() -> tuple[Tokenizer, dict[str, Any]]:
    """Whole words, most of them unknown, cut at 16 by the file, and filled up to 16."""
    result = _trained(
        models.WordLevel(unk_token="<unk>"),
        trainers.WordLevelTrainer(
            vocab_size=12, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
        ),
        pre_tokenizer=pre_tokenizers.Whitespace(),
    )
    result.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
    result.enable_truncation(16)
    result.enable_padding(length=16)
    return result, {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}


_MAKERS = (gpt2, qwen, llama3, deepseek, llama2, gemma, metaspace, word_piece, words)
KINDS: dict[str, Callable[[], tuple[Tokenizer, dict[str, Any]]]] = {
    maker.__name__: maker for maker in _MAKERS
}


def save_kind(folder: Path, kind: str, **config: Any) -> Path:
    """Save a tokenizer of a kind as transformers does, without keys that are None; ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, named = KINDS[kind]()
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **config}
    values = {key: value for key, value in values.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder
