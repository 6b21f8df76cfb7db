"""The plan that cuts Gemma 3: one value, for any mesh."""

from dataclasses import replace

from compose import Parallel, Plan

from ..layers.plans import decoder, grouped_attention, qk_norms, residual_stream
from .model import Gemma3Config


def plan(model: Gemma3Config, parallel: Parallel) -> Plan:
    """Return the plan of a Gemma 3 for these degrees."""
    # Those after attention and the feed-forward network run on the stream too: w2 and wo have brought
    # it into its layout.
    post_norms = ["attention_post_norm", "ffn_post_norm"] if model.post_norms else []
    result = decoder(
        model,
        parallel,
        grouped_attention(residual_stream(parallel), model.n_kv_heads)
        | qk_norms("head" if model.qk_norm else "none", model.n_heads, model.n_kv_heads),
        (model.n_heads, model.n_kv_heads),
        hidden_dim=model.hidden_dim,
        norms=["attention_norm", "ffn_norm", *post_norms],
        first=["embedding_scale"],
        last=["softcap"],
    )
    # Where logits are capped, they are not the projection's output, which the plan promises.
    return replace(result, output="") if model.final_softcap else result
