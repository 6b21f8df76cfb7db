"""A run that learns chats, from Hugging Face's folder and back: transformers says what `generate` says.

The models are tiny and random, and learn a few chats with tools by heart.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from compose.__main__ import main
from compose.checkpoint.hf_folder import find_hf
from compose.cli.generate import encode_prompts
from compose.data.tokenizer import open_tokenizer
from tests.support.command_lines import execute
from tests.support.helpers import make_job
from tests.support.pool import Pool
from tests.support.tokenizer_kinds import save_kind
from tests.support.training import keys_for, train

TOOLS = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    " {{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
)
CHATML = (
    TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    + CALLS
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}"
    + TOOLS
    + "{% for m in messages %}[{{ m.role }}]\n\n{{ m.content or '' }}"
    + CALLS
    + "<|eot_id|>{% endfor %}{% if add_generation_prompt %}[assistant]\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}"
    + TOOLS
    + "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    + "{{ (m.content or '') | trim }}"
    + CALLS
    + "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
SHAPE = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 96}
# The tokenizer's kind, its template, the token that ends the base model's texts, and that of a turn.
FAMILIES: dict[str, tuple[str, str, str, str, dict[str, Any]]] = {
    "llama": ("llama3", LLAMA, "<|end_of_text|>", "<|eot_id|>", {}),
    "qwen3": ("qwen", CHATML, "<|endoftext|>", "<|im_end|>", {"head_dim": 16}),
    "gemma3": (
        "gemma",
        GEMMA,
        "<eos>",
        "<end_of_turn>",
        {"head_dim": 16, "window": 16, "global_every": 2},
    ),
}
QUESTIONS = ["the user", "def foo.bar()", "return ½"]


def base_of(folder: Path, name: str) -> dict[str, Any]:
    """Save a base model as transformers does; the keys of its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, template, end, _, more = FAMILIES[name]
    save_kind(folder, kind, eos_token=end)
    tokenizer = open_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    sizes = {**SHAPE, **more, "vocab_size": tokenizer.vocab_size}
    keys = {f"model__{key}": value for key, value in sizes.items()} | {"model__name": name}
    config = make_job(1, **keys).config.model.config
    values: dict[str, Any] = {**find_hf(name).hf_config(config), "eos_token_id": tokenizer.end}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    model.save_pretrained(folder)
    return keys


def chats(path: Path) -> Path:
    """A question has one answer; some call a tool."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    replies: list[dict[str, Any]] = [
        {"content": "naïve user"},
        {"content": "", "tool_calls": [call]},
        {"content": "a 1234567"},
    ]
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", **reply}], "tools": tools}
        for q, reply in zip(QUESTIONS, replies, strict=True)
        for tools in ([], [tool])
    ]
    random.Random(0).shuffle(rows)
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen3", "gemma3"))]
)
def test_transformers_says_the_same(pool: Pool, tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    keys, (*_, turn, _) = base_of(tmp_path / "base", name), FAMILIES[name]
    words = ["tokenize", "--chat", "--tokenizer", str(tmp_path / "base"), "--workers=1"]
    assert main([*words, "--out", str(tmp_path / "set"), str(chats(tmp_path / "c.jsonl"))]) == 0
    run, exported = tmp_path / "run", tmp_path / "exported"
    more = {
        "checkpoint__load_hf": tmp_path / "base",
        "checkpoint__interval": 60,
        "data__path": tmp_path / "set",
        "train__seq_len": 128,
        "train__steps": 60,
        "train__stop_after": 60,
        "train__global_batch": 2,
        "optimizer__lr": 1e-2,
        "optimizer__warmup": 2,
    }
    pool.run(train, 1, keys_for(run, **keys, **more))
    assert main(["convert", str(run), str(exported)]) == 0

    tokenizer = AutoTokenizer.from_pretrained(exported)
    model: Any = AutoModelForCausalLM.from_pretrained(exported).eval()
    ends = model.generation_config.eos_token_id
    assert tokenizer.convert_tokens_to_ids([FAMILIES[name][2], turn]) == ends
    said, expected = [], []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        own = encode_prompts(open_tokenizer(exported), [question], chat=True)
        assert own == prompt["input_ids"].tolist()
        ids = model.generate(**prompt, do_sample=False, max_new_tokens=30)[0, len(own[0]) :].tolist()
        expected.append(tokenizer.decode(ids[:-1] if ids[-1] in ends else ids))
        said.append(ids[-1])
    assert said.count(tokenizer.convert_tokens_to_ids(turn)) > 1, "replies end"
    for source in (run, exported):
        flags = [f"--prompt={question}" for question in QUESTIONS]
        done = execute(
            *("-m", "compose", "generate", str(source), "--chat", *flags),
            *("--temperature=0", "--max-tokens=30", "--run.device=cpu"),
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "".join(f"{text}\n" for text in expected)
        assert done.stderr.count("generate: a prompt of ") == len(QUESTIONS)
