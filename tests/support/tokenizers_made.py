"""Tokenizers for tests, made on the spot, with chat templates of two kinds."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = [
    "def add(a, b):\n    return a + b\n",
    "naïve words, and ½ of them: 日本語",
    "user and assistant",
]
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>", "<s>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Models that think leave out the thoughts of all replies but the last.
THINKING = """\
{{ bos_token }}
{%- for m in messages %}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and not loop.last %}
{{ m.content.split('</think>')[-1] }}
{%- else %}
{{ m.content }}
{%- endif %}
<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""


def save_tokenizer(folder: Path, template: str = CHATML, vocab_size: int = 300) -> Path:
    """A byte-level BPE tokenizer in ``folder``, its path."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "eos_token": "<|end|>",
        "bos_token": "<s>",
        "chat_template": template,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"
