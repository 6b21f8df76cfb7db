"""Chat templates in the styles of the families of models, and the tokenizers that go with them.

In the files a backslash joins two lines. ⟦ and ⟧ stand around what a reply is. ``plain`` leaves them
out. ``tagged`` makes {% generation %} of them, by which transformers marks what is learnt.
"""

import json
import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from tests.support.tokenizer_kinds import KINDS as MAKERS

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


# The kinds of tokenizers that chats are read with, by the names of models that have such ones.
KINDS = {
    "gpt2": "gpt2",
    "llama 3": "llama3",
    "qwen 2": "qwen",
    "deepseek": "deepseek",
    "llama 2": "llama2",
    "gemma": "gemma",
    "t5": "metaspace",
    "bert": "word_piece",
}
_NAMED = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
_TOKENS = r"<[|｜][^|｜<>]+[|｜]>|\[/?[A-Z_]+\]|<(?:start|end)_of_turn>"  # noqa: RUF001


def save_family(folder: Path, kind: str) -> Tokenizer:
    """Write a tokenizer of a kind into a folder, without a template. Return it.

    It has the tokens of all templates.
    """
    folder.mkdir(parents=True, exist_ok=True)
    result, _ = MAKERS[KINDS[kind]]()
    special = dict.fromkeys([*_NAMED.values(), *re.findall(_TOKENS, "".join(FAMILIES.values()))])
    result.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in special])
    result.add_tokens([AddedToken(each, special=False, normalized=False) for each in _PLAIN])
    result.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_NAMED))
    return result
