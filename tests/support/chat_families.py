"""Chat templates in the styles of the families of models, and the tokenizers that go with them.

In the files a backslash joins two lines. ⟦ and ⟧ stand around what a reply is. ``plain`` leaves them
out. ``tagged`` makes {% generation %} of them, by which transformers marks what is learnt.
"""

import json
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers import decoders as decoder
from tokenizers import models as model
from tokenizers import normalizers as normal
from tokenizers import pre_tokenizers as pre
from tokenizers import processors as post
from tokenizers import trainers as trainer

FOLDER = Path(__file__).parents[1] / "data" / "chat_templates"
OPEN = ("alpaca", "falcon", "glm")
"""Those that write nothing after a reply."""
FAMILIES = {
    path.stem: path.read_text(encoding="utf-8").replace("\\\n", "").removesuffix("\n")
    for path in sorted(FOLDER.glob("*.jinja"))
}
_REPLY = (
    "{% if m.role == 'assistant' %}{% generation %}BODY{% endgeneration %}{% else %}BODY{% endif %}"
)


def plain(source: str) -> str:
    """The template as its authors would write it."""
    return source.replace("⟦", "").replace("⟧", "")


def tagged(source: str) -> str:
    """The template with tags around the replies, for transformers."""
    first, *rest = source.split("⟦")
    parts = [each.partition("⟧") for each in rest]
    return first + "".join(_REPLY.replace("BODY", body) + "{{ '' }}" + rest for body, _, rest in parts)


KINDS = ("gpt2", "llama 3", "qwen 2", "deepseek", "llama 2", "gemma", "t5", "bert")
TEXT = [
    "def add(a, b):\n    return a + b\n",
    "naïve words, and ½ of them: 日本語 \n\n new lines\n\n\n and more",
    "user and assistant, system, tool, think, the weather in Paris is nice",
    '{"name": "get_weather", "arguments": {"city": "Paris"}}',
    "Hello world, how are you?  Fine. \t tab",
]
_NAMED = ["<unk>", "<s>", "</s>", "<pad>"]
_BYTES = [f"<0x{i:02X}>" for i in range(256)]
_PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TOKENS = r"<[|｜][^|｜<>]+[|｜]>|\[/?[A-Z_]+\]|<(?:start|end)_of_turn>"  # noqa: RUF001


def _split(*patterns: str) -> pre.PreTokenizer:
    splits = [pre.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre.Sequence([*splits, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def _begun(*more: post.PostProcessor) -> post.PostProcessor:
    first = post.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    return post.Sequence([*more, first])


def make_tokenizer(kind: str) -> Tokenizer:
    """A tokenizer with the parts of a published one, trained on a few lines."""
    spaces = normal.Replace(" ", "▁")
    if kind in ("llama 2", "gemma"):
        found = Tokenizer(model.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        found.normalizer = (
            normal.Sequence([normal.Prepend("▁"), spaces]) if kind == "llama 2" else spaces
        )
        if kind == "gemma":
            found.pre_tokenizer = pre.Split(" ", "merged_with_previous")
        found.decoder = decoder.Sequence(
            [decoder.Replace("▁", " "), decoder.ByteFallback(), decoder.Fuse()]
        )
        found.post_processor = _begun()
        training = trainer.BpeTrainer(
            vocab_size=520, special_tokens=_NAMED + _BYTES, limit_alphabet=60, show_progress=False
        )
    elif kind == "t5":
        found = Tokenizer(model.Unigram())
        found.normalizer = normal.Sequence([normal.NFKC(), normal.Replace(Regex(" {2,}"), " ")])
        found.pre_tokenizer = pre.Sequence([pre.WhitespaceSplit(), pre.Metaspace()])
        found.decoder = decoder.Metaspace()
        training = trainer.UnigramTrainer(
            vocab_size=300, special_tokens=_NAMED, unk_token="<unk>", show_progress=False
        )
    elif kind == "bert":
        found = Tokenizer(model.WordPiece(unk_token="<unk>"))
        found.normalizer, found.pre_tokenizer = normal.BertNormalizer(), pre.BertPreTokenizer()
        found.decoder = decoder.WordPiece()
        training = trainer.WordPieceTrainer(vocab_size=300, special_tokens=_NAMED, show_progress=False)
    else:
        found = Tokenizer(model.BPE(ignore_merges=kind == "llama 3"))
        qwen = _LLAMA_3.replace("{1,3}", "")
        found.pre_tokenizer = {
            "gpt2": pre.ByteLevel(add_prefix_space=False),
            "llama 3": _split(_LLAMA_3),
            "qwen 2": _split(qwen),
            "deepseek": _split(r"\p{N}{1,3}", r"[\p{Han}\p{Hiragana}\p{Katakana}]+", qwen),
        }[kind]
        if kind == "qwen 2":
            found.normalizer = normal.NFC()
        ends = post.ByteLevel(trim_offsets=False)
        found.decoder = decoder.ByteLevel()
        found.post_processor = ends if kind in ("gpt2", "qwen 2") else _begun(ends)
        training = trainer.BpeTrainer(
            vocab_size=420,
            special_tokens=_NAMED,
            initial_alphabet=pre.ByteLevel.alphabet(),
            show_progress=False,
        )
    found.train_from_iterator(TEXT * 3, training)
    sources = "".join(FAMILIES.values())
    special = dict.fromkeys(re.findall(_TOKENS, sources))
    found.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in special])
    found.add_tokens([AddedToken(each, special=False, normalized=False) for each in _PLAIN])
    return found


def save_family(folder: Path, kind: str) -> Tokenizer:
    """Write a tokenizer of a kind into a folder, without a template. Return it."""
    folder.mkdir(parents=True, exist_ok=True)
    found = make_tokenizer(kind)
    found.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return found
