"""The rules that stretch rotary frequencies, by our fields and as config.json has them."""

from collections.abc import Mapping
from typing import Any

from .published import size
from .rope import RopeFields, yarn_magnitude

LENGTH = "original_max_position_embeddings"
# The parameters of each rule, by our fields.
_RULE: dict[str, dict[str, str]] = {
    "linear": {},
    "dynamic": {},
    "llama3": {
        "rope_low_freq_factor": "low_freq_factor",
        "rope_high_freq_factor": "high_freq_factor",
        "rope_original_seq_len": LENGTH,
    },
    "yarn": {
        "rope_original_seq_len": LENGTH,
        "rope_beta_fast": "beta_fast",
        "rope_beta_slow": "beta_slow",
        "rope_truncate": "truncate",
        "rope_magnitude": "attention_factor",
    },
    "longrope": {
        "rope_original_seq_len": LENGTH,
        "rope_short_factors": "short_factor",
        "rope_long_factors": "long_factor",
        "rope_magnitude": "attention_factor",
    },
}
_BETAS = ("rope_beta_fast", "rope_beta_slow")


def read_rule(values: Mapping[str, Any], kind: str, rule: Mapping[str, Any]) -> dict[str, Any]:
    """Return our fields of a rule; none if it changes nothing.

    ``kind`` and ``rule`` are its name and parameters as
    :func:`~compose.models.layers.published.rope` returns them. Raises ValueError if the factor is
    not above 0, the original length is too small, or that of the rule "dynamic" is missing.
    """
    least = 2 if kind == "longrope" else 1
    if rule.get(LENGTH, least) < least:
        raise ValueError(f"{LENGTH}: {rule[LENGTH]} should be at least {least}")
    length = size(values, "max_position_embeddings", 0)
    factor = rule.get("factor", length / rule[LENGTH] if kind == "longrope" else 1.0)
    if not factor > 0:
        raise ValueError(f"rope_scaling.factor: {factor} should be above 0")
    for one in ("mscale", "mscale_all_dim"):
        if rule.get(one, 0) < 0:
            raise ValueError(f"rope_scaling.{one}: {rule[one]} should be at least 0")
    magnitude = rule.get("attention_factor", 0.0)
    if not magnitude and rule.get("mscale") and rule.get("mscale_all_dim"):
        above, below = (yarn_magnitude(factor, rule[one]) for one in ("mscale", "mscale_all_dim"))
        magnitude = above / below if factor > 1 else 1.0
    if kind == "default" or (factor == 1 and kind != "longrope" and magnitude in (0, 1)):
        return {}
    result = {ours: rule[theirs] for ours, theirs in _RULE[kind].items() if theirs in rule}
    if kind == "yarn":  # transformers takes 0 for absent
        result |= {one: result.get(one) or getattr(RopeFields, one) for one in _BETAS}
    if kind == "dynamic":
        result["rope_original_seq_len"] = size(values, "max_position_embeddings")
    known = RopeFields(factor, kind, result.get("rope_original_seq_len", 0))
    if magnitude == known.rope_scale:
        magnitude = 0.0
    return result | {"rope_rule": kind, "rope_scaling": factor, "rope_magnitude": magnitude}


def positions(c: RopeFields) -> int:
    """Return the longest text that a config.json names, if it is not known from another file."""
    if c.rope_rule == "dynamic":  # the rule is about this length
        return c.rope_original_seq_len
    # All published models of llama3's rule were trained to one length, whatever their factor.
    scaled = c.rope_rule == "llama3" and c.rope_scaling != 1
    return 131_072 if scaled else round(c.rope_original_seq_len * c.rope_scaling)


def written_rule(c: RopeFields) -> dict[str, Any] | None:
    """Return config.json's object of the rule; None without one."""
    if not (c.rope_stretches or c.rope_magnitude):
        return None
    rule: dict[str, Any] = {"rope_type": c.rope_rule, "factor": c.rope_scaling}
    for ours, theirs in _RULE[c.rope_rule].items():
        value = getattr(c, ours)
        rule[theirs] = list(value) if isinstance(value, tuple) else value
    if not c.rope_magnitude:
        rule.pop("attention_factor", None)
    return rule
