"""The architectures of transformers that a Llama of options here can be: one row for each.

A row says how its config.json, its names of weights and its options differ from LlamaForCausalLM's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..layers.hf_names import FEED_FORWARD, FIELDS, MODULES, MULTIPLIERS, QK_NORMS
from ..layers.kinds import Kind
from ..layers.published import keys
from .config import LlamaConfig

_FIELDS = FIELDS | {"hidden_dim": "intermediate_size"}
_MODULES = MODULES | QK_NORMS | FEED_FORWARD
_ROPE = {one.name for one in fields(LlamaConfig) if one.name.startswith("rope_")}
_ROPE -= {"rope_scale_windows", "rope_interleaved"}
# The fields that hf.py reads by rules of their own, in every architecture.
_BY_RULE = {*_ROPE, "activation", "head_dim", "architecture"}
_READ = ("head_dim", "hidden_act", "max_position_embeddings")
_LAYERS = {"window", "layer_pattern"}
_LAYER_KEYS = ("sliding_window", "layer_types")
# Published files have some. There is none here, and it changes nothing outside of training.
_DROPOUT = ("attention_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout")
_DROPOUT += ("resid_pdrop", "embd_pdrop")


@dataclass(frozen=True)
class Architecture(Kind):
    """A row of the table; ``fixed`` holds every field that its config.json cannot choose."""

    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Keys that are true or false, each with our fields that have its value."""
    true: tuple[str, ...] = ()
    """Flags that are true if they are absent."""
    layers: str = ""
    """Which layers have a window: "all" if there is one; "each", unless layer_types says which; the
    "last"; "some"; empty: none. Which have RoPE: "rotated", those with a window; "rotated if any" has
    one; any with "free"; else all."""
    window: int = 0
    """The window if no key says another."""
    part: float = 1.0
    """The part of a head that is rotated if no key says another; 1: it is always the whole head."""
    theta: float = 10_000.0
    """Base of the rotary frequencies if no key says another."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Their modules that are several of ours, one after another."""
    inverse: tuple[str, ...] = ()
    """Our fields whose key holds 1 / value."""
    whole_heads: bool = False
    """Whether n_heads must divide dim, even where heads have a width of their own."""
    kv_heads: int = 0
    """Key/value heads if no key says another; 0: as many as query heads."""
    head_dim: int = 0
    """Width of a head if no key says another; 0: dim / n_heads."""
    own_head_dim: bool = True
    """Whether a head can be of another width than dim / n_heads."""
    activation: str = "silu"
    """Their word for the activation if hidden_act is absent."""


def _row(
    name: str,
    own: Mapping[str, str] | None = None,
    fixed: Mapping[str, Any] | None = None,
    modules: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    flags: Mapping[str, tuple[str, ...]] | None = None,
    read: tuple[str, ...] = (),
    only: Mapping[str, tuple[Any, ...]] | None = None,
    besides: tuple[str, ...] = (),
    **other: Any,
) -> Architecture:
    """Return a row: what is given is beside, or in place of, what Llama has."""
    given = {**_FIELDS, **(own or {})}
    given = {ours: theirs for ours, theirs in given.items() if ours not in (fixed or {})}
    flags = flags or {}
    chosen = {*given, *_BY_RULE, *(one for ours in flags.values() for one in ours)}
    if other.get("layers"):
        chosen |= _LAYERS
        read += _LAYER_KEYS
    if "part" in other:
        chosen.add("rotary_dim")
        read += ("partial_rotary_factor",)
    known = keys(given, (*_READ, *flags, *read), only, besides)
    rest = {one.name: one.default for one in fields(LlamaConfig) if one.name not in chosen}
    return Architecture(
        name,
        known,
        {**rest, **(fixed or {})},
        {**_MODULES, **(modules or {})},
        {"tie_embeddings": False, "norm_eps": 1e-6, **(defaults or {})},
        # Some have a default that a small vocabulary does not have.
        writes={} if name == "LlamaForCausalLM" else {"pad_token_id": None},
        flags=flags,
        **other,
    )


_QKV, _QKVO = ("qkv_bias",), ("qkv_bias", "wo_bias")
_BIASES = {"attention_bias": _QKVO, "mlp_bias": ("ffn_bias",)}
_POST_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
_AFTER = {"norm_before": False, "norm_after": True}
_LAYER_NORM_EPS = {"norm_eps": "layer_norm_eps"}
_GATE_UP = {"mlp.gate_up_proj": ("feed_forward.w1", "feed_forward.w3")}
_UNGATED = {"feed_forward.w1": "mlp.up_proj", "feed_forward.w2": "mlp.down_proj"}
_ONES: dict[str, Any] = dict.fromkeys(MULTIPLIERS, 1.0)
_OLMO2: dict[str, Any] = {**_AFTER, "qk_norm": "width"}
_COHERE: dict[str, Any] = {
    "norm": "layer_without_bias",
    "parallel_block": True,
    "rope_interleaved": True,
}
_GLM: dict[str, Any] = {
    "flags": {"attention_bias": _QKV},
    "part": 0.5,
    "fused": _GATE_UP,
    "defaults": {"norm_eps": 1.5625e-7},
    "true": ("attention_bias",),
    "head_dim": 128,
    "kv_heads": 2,
}
# Older files have words on images, on layers that share keys, and on special tokens.
_HUNYUAN = """
anyres_pooling_size anyres_vit_max_image_size anyres_vit_two_views attention_head_dim
cla_share_factor class_num dense_list eod_token_id im_end_id im_newline_id im_start_id
image_token_id mask_init_id max_image_size num_media_embeds org_vocab_size pad_id pool_type
skip_cls_token text_end_id text_start_id video_end_id video_start_id
"""
_TIED: dict[str, Any] = {"norm_eps": 1e-5, "tie_embeddings": True}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _row(
        "LlamaForCausalLM",
        flags=_BIASES,
        # rope_interleaved is a key of older files: pairs in Meta's layout.
        only={"rope_interleaved": (False,), "use_sliding_window": (False,)},
        besides=("embd_pdrop", "resid_pdrop"),
        whole_heads=True,
    ),
    "mistral": _row(
        "MistralForCausalLM",
        layers="all",
        window=4096,
        kv_heads=8,
    ),
    "ministral": _row(
        "MinistralForCausalLM",
        layers="each",
        window=4096,
        kv_heads=8,
    ),
    "qwen2": _row(
        "Qwen2ForCausalLM",
        fixed={"qkv_bias": True},
        layers="last",
        read=("use_sliding_window", "max_window_layers"),
        window=4096,
        # Its biases of q, k and v are there, whatever attention_bias says.
        only={"use_mrope": (False,), "attention_bias": (True, False)},
        kv_heads=32,
    ),
    "smollm3": _row(
        "SmolLM3ForCausalLM",
        flags=_BIASES,
        layers="free",
        read=("use_sliding_window", "no_rope_layers", "no_rope_layer_interval"),
        defaults={"tie_embeddings": True},
        theta=2_000_000.0,
        kv_heads=4,
    ),
    "phi3": _row(
        "Phi3ForCausalLM",
        layers="all",
        part=1.0,
        read=("original_max_position_embeddings",),
        defaults={"norm_eps": 1e-5},
        fused={
            "self_attn.qkv_proj": ("attention.wq", "attention.wk", "attention.wv"),
            **_GATE_UP,
        },
        besides=_DROPOUT,
        own_head_dim=False,
        # Phi-4-mini has these besides.
        only={"full_attn_mod": (1,), "interpolate_factor": (1,), "lm_head_bias": (False,)},
    ),
    "olmo": _row(
        "OlmoForCausalLM",
        fixed={"norm": "layer_without_weight", "norm_eps": 1e-5},
        flags={"attention_bias": _QKVO},
        only={"clip_qkv": ()},
    ),
    "olmo2": _row(
        "Olmo2ForCausalLM",
        fixed=_OLMO2,
        modules=_POST_NORMS,
        flags={"attention_bias": _QKVO},
        defaults={"norm_eps": 1e-5},
    ),
    "olmo3": _row(
        "Olmo3ForCausalLM",
        fixed=_OLMO2 | {"rope_scale_windows": False},
        modules=_POST_NORMS,
        flags={"attention_bias": _QKVO},
        layers="some",
        defaults={"norm_eps": 1e-5},
        theta=500_000.0,
        window=4096,
    ),
    "granite": _row(
        "GraniteForCausalLM",
        MULTIPLIERS,
        flags=_BIASES,
        inverse=("logit_scale",),
        defaults=_ONES,
        besides=_DROPOUT,
    ),
    "hyperclovax": _row(
        "HyperCLOVAXForCausalLM",
        MULTIPLIERS,
        modules={"attention_post_norm": "post_norm1", "ffn_post_norm": "post_norm2"},
        flags=_BIASES | {"use_post_norm": ("norm_after",)},
        defaults=_ONES | {"attention_scale": 0.0},
        besides=_DROPOUT,
        true=("use_post_norm",),
        whole_heads=True,
    ),
    "stablelm": _row(
        "StableLmForCausalLM",
        _LAYER_NORM_EPS,
        fixed={"norm": "layer"},
        flags={"use_qkv_bias": _QKV, "use_parallel_residual": ("parallel_block",)},
        only={"qk_layernorm": (False,)},
        part=0.25,
        own_head_dim=False,
        defaults={"norm_eps": 1e-5},
        besides=_DROPOUT,
        kv_heads=32,
    ),
    "starcoder2": _row(
        "Starcoder2ForCausalLM",
        {"norm_eps": "norm_epsilon"},
        fixed={"norm": "layer", "ffn_gated": False},
        modules={"feed_forward.w1": "mlp.c_fc", "feed_forward.w2": "mlp.c_proj"},
        flags={"use_bias": (*_QKVO, "ffn_bias")},
        layers="all",
        only={
            "mlp_type": ("default",),
            "norm_type": ("layer_norm",),
            "scale_attn_weights": (True,),
        },
        activation="gelu_pytorch_tanh",
        defaults=_TIED,
        # Published files have words of StarCoder 1 too, which transformers does not read.
        besides=(
            *(*_DROPOUT, "layer_norm_epsilon", "activation_function"),
            *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
        ),
        true=("use_bias",),
        kv_heads=2,
    ),
    "cohere": _row(
        "CohereForCausalLM",
        _LAYER_NORM_EPS | {"logit_scale": "logit_scale"},
        fixed=_COHERE,
        flags={"attention_bias": _QKVO},
        only={"use_qk_norm": (False,)},
        defaults=_TIED | {"logit_scale": 0.0625},
        theta=500_000.0,
    ),
    "cohere2": _row(
        "Cohere2ForCausalLM",
        _LAYER_NORM_EPS | {"logit_scale": "logit_scale"},
        fixed=_COHERE,
        flags={"attention_bias": _QKVO},
        layers="rotated",
        read=("sliding_window_pattern",),
        only={
            "order_of_interleaved_layers": ("local_attn_first",),
            "position_embedding_type": ("rope_gptj",),
            "rotary_pct": (1,),
            "use_embedding_sharing": (True,),
            "use_gated_activation": (True,),
            "use_qk_norm": (False,),
            "use_parallel_block": (True,),
            "use_parallel_embedding": (True, False),
        },
        besides=("_sliding_window_pattern", "cache_implementation", "layer_switch"),
        defaults=_TIED | {"logit_scale": 0.0625},
        window=4096,
    ),
    "glm": _row("GlmForCausalLM", fixed={"rope_interleaved": True}, **_GLM),
    "glm4": _row(
        "Glm4ForCausalLM",
        fixed={"rope_interleaved": True, "norm_after": True},
        modules={
            "attention_post_norm": "post_self_attn_layernorm",
            "ffn_post_norm": "post_mlp_layernorm",
        },
        **_GLM,
    ),
    "exaone4": _row(
        "Exaone4ForCausalLM",
        fixed=_AFTER | {"qk_norm": "head"},
        modules=_POST_NORMS,
        layers="rotated if any",
        read=("sliding_window_pattern",),
        defaults={"norm_eps": 1e-5},
        window=4096,
        kv_heads=32,
    ),
    "ernie4_5": _row(
        "Ernie4_5ForCausalLM",
        fixed={"rope_interleaved": True},
        flags={"use_bias": (*_QKVO, "ffn_bias")},
        defaults=_TIED,
        theta=500_000.0,
        head_dim=128,
        kv_heads=2,
    ),
    "hunyuan_v1_dense": _row(
        "HunYuanDenseV1ForCausalLM",
        fixed={"qk_norm": "head_after_rope"},
        modules={
            "attention.q_norm": "self_attn.query_layernorm",
            "attention.k_norm": "self_attn.key_layernorm",
        },
        flags={"attention_bias": _QKVO},
        only={
            "norm_type": ("rms",),
            "add_classification_head": (False,),
            "use_cla": (False,),
            "use_qk_norm": (True,),
            "use_rotary_pos_emb": (True,),
        },
        besides=(*_HUNYUAN.split(), *_DROPOUT),
        defaults={"norm_eps": 1e-5},
    ),
    "seed_oss": _row(
        "SeedOssForCausalLM",
        flags={
            "attention_bias": _QKV,
            "attention_out_bias": ("wo_bias",),
            "mlp_bias": ("ffn_bias",),
        },
        besides=_DROPOUT,
        true=("attention_bias",),
        head_dim=128,
        kv_heads=8,
    ),
    "arcee": _row(
        "ArceeForCausalLM",
        fixed={"ffn_gated": False},
        modules=_UNGATED,
        flags=_BIASES,
        activation="relu2",
        defaults={"norm_eps": 1e-5},
        whole_heads=True,
    ),
    "jais2": _row(
        "Jais2ForCausalLM",
        _LAYER_NORM_EPS,
        fixed={"norm": "layer", "ffn_gated": False},
        modules=_UNGATED,
        flags=_BIASES,
        activation="relu2",
        defaults={"norm_eps": 1e-5},
        true=("attention_bias", "mlp_bias"),
        whole_heads=True,
    ),
    "helium": _row(
        "HeliumForCausalLM",
        fixed={"rope_interleaved": True},
        flags={"attention_bias": _QKV, "mlp_bias": ("ffn_bias",)},
        own_head_dim=False,
        defaults={"norm_eps": 1e-8},
        head_dim=128,
        kv_heads=20,
        theta=100_000.0,
    ),
}
