"""Between config.json and our configs, for the models' hf.py; what cannot be said is refused."""

import json
from collections.abc import Mapping
from typing import Any


def required(values: Mapping[str, Any], key: str) -> Any:
    """The value of ``key``. Raises ValueError where there is none."""
    if values.get(key) is None:
        raise ValueError(f"{key}: is missing")
    return values[key]


def only(values: Mapping[str, Any], key: str, *allowed: Any) -> None:
    """Raises ValueError where ``key`` has another value; where it is absent or null, all is well."""
    value = values.get(key)
    if value is not None and value not in allowed:
        choice = f", only {' or '.join(json.dumps(one) for one in allowed)}" if allowed else ""
        raise ValueError(f"{key}: {json.dumps(value)} cannot be expressed here{choice}")


def common(values: Mapping[str, Any]) -> None:
    """Refuse what none of the models here has."""
    only(values, "hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias"):
        only(values, key, False)
    only(values, "attention_dropout", 0)
    only(values, "quantization_config")


def rope(values: Mapping[str, Any], *kinds: str) -> tuple[float, dict[str, Any]]:
    """(base of the rotary frequencies, parameters of a scaling rule, {} for none), in both ways that
    transformers has written them. Raises ValueError for a rule that is not among ``kinds``."""
    together = values.get("rope_parameters") or {}
    key = "rope_parameters" if together else "rope_scaling"
    rule = dict(together or values.get("rope_scaling") or {})
    theta = rule.pop("rope_theta", None) or values.get("rope_theta") or 10_000.0
    kind = rule.get("rope_type") or rule.get("type") or "default"
    for place in (rule, values):
        only(place, "partial_rotary_factor", 1)
    if kind != "default" and kind not in kinds:
        raise ValueError(f"{key}: {json.dumps(values[key])} cannot be expressed here")
    return float(theta), {} if kind == "default" else rule


def unpublished(config: object, whose: str, **only_values: object) -> None:
    """Raises ValueError for a field of ``config`` with another value, for which ``whose`` config.json
    has no key."""
    for field, value in only_values.items():
        if getattr(config, field) != value:
            raise ValueError(f"{field}: {getattr(config, field)} has no place in {whose} config.json")
