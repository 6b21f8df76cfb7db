"""Small models of odd sizes that are compared with those of transformers."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from compose import AttentionOptions
from compose.checkpoint import hf_folder
from compose.checkpoint.hf_folder import HfName, load_hf, name_of
from compose.checkpoint.hf_stored import Named, grouped, stored
from compose.config.hugging_face import config_problems, find_hf, read_config
from models import deepseek_v3, gemma3, gpt2, gpt_oss, llama, mixtral, qwen3
from models.layers.attention import AttentionCore, Documents

_HEADS: dict[str, Any] = {"n_heads": 6, "n_kv_heads": 2}
_SIZES: dict[str, Any] = {"vocab_size": 91, "n_layers": 3, **_HEADS}
LLAMA = llama.Config(**_SIZES, dim=48, hidden_dim=70)
QWEN3 = qwen3.Config(**_SIZES, dim=45, head_dim=14, hidden_dim=71)
QWEN3_MOE = qwen3.Config(**_SIZES, dim=45, head_dim=14, n_experts=7, top_k=3, expert_dim=19)
# A mixture of experts without the norms of Qwen3's queries and keys.
_MOE = dataclasses.replace(QWEN3_MOE, qk_norm="none", head_dim=12, dim=72)
QWEN2_MOE = dataclasses.replace(
    _MOE, qkv_bias=True, shared_dim=23, shared_gate=True, normalize_weights=False
)
OLMOE = dataclasses.replace(_MOE, qk_norm="width", normalize_weights=False)
FLEX_OLMO = dataclasses.replace(OLMOE, norm_after=True, n_kv_heads=3)
GRANITE_MOE = dataclasses.replace(
    _MOE, embedding_scale=3.0, residual_scale=0.6, attention_scale=0.2, logit_scale=0.25, head_dim=14
)
_SIGMOID: dict[str, Any] = {"scoring": "sigmoid", "n_dense_layers": 1, "route_scale": 2.5}
DOTS1 = dataclasses.replace(_MOE, **_SIGMOID, qk_norm="head", n_shared_experts=2, bias_rate=0.1)
GLM4_MOE = dataclasses.replace(
    DOTS1, qk_norm="none", qkv_bias=True, rotary_dim=6, n_experts=6, n_groups=3, top_groups=2
)
MINIMAX_M2 = dataclasses.replace(
    _MOE, qk_norm="width", rotary_dim=8, head_dim=14, scoring="sigmoid", bias_rate=0.1
)
MIXTRAL = mixtral.Config(**_SIZES, dim=60, n_experts=5, top_k=2, expert_dim=19, window=7)
_GPT2: dict[str, Any] = {"max_seq_len": 70, "dim": 42, "n_heads": 6, "hidden_dim": 71}
GPT2 = gpt2.Config(vocab_size=91, n_layers=3, **_GPT2, norm_eps=1e-3)
OPT = dataclasses.replace(GPT2, norm_eps=1e-5, activation="relu", position_offset=2)
GPT_BIGCODE = dataclasses.replace(GPT2, n_kv_heads=1)
# Local and global layers in turn; the factor of scores is not that of their width.
GEMMA3 = gemma3.Config(
    **_HEADS,
    vocab_size=91,
    n_layers=5,
    dim=54,
    head_dim=14,
    hidden_dim=71,
    global_every=2,
    window=7,
    rope_scaling=3.0,
    query_pre_attn_scalar=9,
    final_softcap=4.0,
)
# Caps that matter, where scores and logits are small.
GEMMA2 = dataclasses.replace(
    GEMMA3, qk_norm=False, rope_scaling=1.0, rope_local_theta=1e6, attention_softcap=0.7
)
GEMMA1 = gemma3.Config(
    n_heads=6,
    n_kv_heads=1,
    vocab_size=91,
    n_layers=3,
    dim=51,
    head_dim=14,
    hidden_dim=71,
    rope_theta=100.0,
    global_every=1,
    qk_norm=False,
    post_norms=False,
)
# YaRN keeps two of five pairs, slows two down, and one is between.
_YARN: dict[str, Any] = {"rope_theta": 100.0, "rope_factor": 8.0, "rope_original_len": 64}
_YARN["rope_beta_fast"] = 4.0
_EXPERTS: dict[str, Any] = {"top_k": 2, "expert_dim": 19}
GPT_OSS = gpt_oss.Config(
    **_SIZES, **_EXPERTS, **_YARN, dim=45, head_dim=10, n_experts=5, window=7, swiglu_limit=0.5
)
_LATENTS: dict[str, Any] = {"q_rank": 13, "kv_rank": 17, "nope_dim": 14, "rope_dim": 10, "v_dim": 11}
_GROUPS: dict[str, Any] = {"n_experts": 6, "n_groups": 3, "top_groups": 2}
DEEPSEEK = deepseek_v3.Config(
    **_LATENTS, **_EXPERTS, **_GROUPS, vocab_size=91, n_layers=3, n_heads=3, dim=45, hidden_dim=71
)
YARN = dataclasses.replace(DEEPSEEK, **_YARN, rope_mscale=0.7)
# DeepSeek-V2-Lite: a softmax over all experts, without groups, normalization or bias.
DEEPSEEK_V2 = dataclasses.replace(
    YARN,
    q_rank=0,
    kv_rank=18,  # transformers views a row as complex numbers
    scoring="softmax",
    normalize_weights=False,
    n_groups=1,
    top_groups=1,
    group_best=1,
    rope_mscale=0.707,
    rope_mscale_all_dim=0.707,
    bias_rate=0.0,
)


class RowByRow(nn.Module):
    """Attention that computes a query's own keys, or the last ``window``, and no more."""

    def __init__(self, options: AttentionOptions) -> None:
        super().__init__()
        self.options = options

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        rows = []
        for i in range(q.shape[2]):
            end = i + 1 if self.options.causal else k.shape[2]
            own = slice(max(0, end - (self.options.window or end)), end)
            scores = q[:, :, i : i + 1] @ k[:, :, own].mT * q.shape[-1] ** -0.5
            rows.append(scores.softmax(-1) @ v[:, :, own])
        return torch.cat(rows, 2).transpose(1, 2)


def attend_row_by_row(model: nn.Module) -> None:
    """Let a model's attention be of matrix products that torch counts."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, AttentionCore):
                setattr(module, name, RowByRow(child.options))


def bert(kind: str, dropout: float = 0.0, **sizes: Any) -> nn.Module:
    """A small BERT of transformers, of the class of this name."""
    import transformers

    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config: Any = transformers.BertConfig(**{**shape, **rates, **sizes})
    return getattr(transformers, kind)(config)


def published(tensors: dict[str, Tensor], hf_name: HfName) -> dict[str, Tensor]:
    """``tensors`` as Hugging Face names and lays them, each expert by itself."""
    return as_files((name, stored(hf_name(name)), tensor) for name, tensor in tensors.items())


def as_files(tensors: Iterable[Named]) -> dict[str, Tensor]:
    """Our tensors as those of Hugging Face's files, by name."""
    files: dict[str, Tensor] = {}
    for group in grouped(tensors):
        place, values = group[0][1], [tensor.detach() for _, _, tensor in group]
        names = place.names(values[0].shape)
        files |= {name: one.contiguous() for name, one in zip(names, place.theirs(values), strict=True)}
    return files


def randomize(model: nn.Module) -> None:
    """Give every parameter other values, norms too."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)


def compare(
    folder: Path, model: nn.Module, tensors: dict[str, Tensor], keys: dict[str, Any], batch: int
) -> None:
    """transformers' model of ``tensors`` and ``keys`` gives the logits of ``model``.

    And a folder that transformers writes is read as the same model, bit for bit.
    """
    from transformers import AutoModelForCausalLM

    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(keys))
    # Its other ways to run experts want aligned rows.
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, experts_implementation="eager"
    )
    other, info = loaded
    # A network without width has nothing to save.
    empty = {name for name, parameter in other.named_parameters() if not parameter.numel()}
    assert set(info["missing_keys"]) == empty
    assert not any(problem for key, problem in info.items() if key != "missing_keys"), info

    tokens = torch.randint(keys["vocab_size"], (batch, 61))
    with torch.no_grad():
        expected, result = other.eval()(tokens).logits, model.eval()(tokens)
    assert expected.dtype == torch.float32
    assert float((result - expected).norm() / expected.norm()) < 1e-5
    _is_read_back(folder / "theirs", model, other)


def _is_read_back(folder: Path, model: Any, other: Any) -> None:
    other.save_pretrained(folder)
    name = type(model).__module__.split(".")[-2]
    assert config_problems(folder, name, model.config) == []
    again = type(model)(find_hf(name).config_from_hf(read_config(folder)))
    load_hf(again, folder, name_of(name, again.config))
    both = (hf_folder.published(one, name_of(name, again.config)) for one in (model, again))
    for (ours, _, tensor), (_, _, read) in zip(*both, strict=True):
        assert torch.equal(tensor, read), ours
