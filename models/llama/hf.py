"""Hugging Face's weights and config.json of the llama family, by the table in architectures.py."""

import math
from collections.abc import Mapping
from typing import Any

from compose.checkpoint.hf_stored import Stored

from ..layers.hf_names import in_layer
from ..layers.published import (
    layer_types,
    number,
    only,
    rope,
    share,
    shortest_pattern,
    shown,
    size,
    table,
    truth,
)
from ..layers.published_rope import LENGTH, positions, read_rule, written_rule
from ..layers.rope import RULES
from .architectures import ARCHITECTURES, Architecture
from .config import LlamaConfig

MODEL_TYPES = tuple(ARCHITECTURES)

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_WORDS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu2": "relu2"}
_ACTIVATIONS = {theirs: ours for ours, theirs in _WORDS.items()}
_ACTIVATIONS |= {"swish": "silu", "gelu_new": "gelu_tanh"}


def hf_name(name: str, config: LlamaConfig | None = None) -> str | Stored:
    """Return the place of our parameter in Hugging Face's files; KeyError if they have none.

    It is a name, such as 'model.layers.3.post_attention_layernorm.weight', or the part of a fused
    tensor.
    """
    c = config or LlamaConfig()
    row = ARCHITECTURES[c.architecture]
    module, _, kind = name.rpartition(".")
    prefix, part = in_layer(module)
    for theirs, ours in row.fused.items():
        if part in ours:
            sizes = {"attention.wq": c.n_heads, "attention.wk": c.n_kv_heads}
            rows = tuple(sizes.get(one, c.n_kv_heads) * c.head_width for one in ours)
            return Stored(
                f"{prefix}{theirs}.{kind}",
                part=ours.index(part),
                parts=len(ours),
                rows=rows if "attention.wq" in ours else (),
            )
    return f"{prefix}{row.modules[part]}.{kind}"


def hf_config(config: LlamaConfig) -> dict[str, Any]:
    """Return the config.json of a model of this shape, with the keys of the published ones.

    Raises ValueError for what its architecture cannot have.
    """
    c = config
    if c.architecture not in ARCHITECTURES:
        raise ValueError(f'architecture: "{c.architecture}" is none of {", ".join(ARCHITECTURES)}')
    row = ARCHITECTURES[c.architecture]
    for ours, value in row.fixed.items():
        if getattr(c, ours) != value:
            has = f"{value} alone" if value and value != "none" else "none"
            raise _unfit(ours, row, has)
    if c.dim % c.n_heads and row.whole_heads:
        raise _unfit("dim", row, f"a multiple of n_heads = {c.n_heads} alone")
    if not row.own_head_dim and c.head_width * c.n_heads != c.dim:
        raise _unfit("head_dim", row, "dim / n_heads alone")
    values = row.write(c.architecture, c)
    for ours in row.inverse:
        values[row.keys.fields[ours]] = 1 / getattr(c, ours)
    if "attention_scale" in row.keys.fields:
        values[row.keys.fields["attention_scale"]] = c.attention_scale or c.head_width**-0.5
    for theirs, fields in row.flags.items():
        given = [getattr(c, ours) for ours in fields]
        if len(set(given)) > 1:
            raise _unfit(fields[0], row, f"the same value for {', '.join(fields)}")
        values[theirs] = given[0]
    return values | {
        "head_dim": c.head_width,
        "hidden_act": _WORDS[c.activation],
        **_written_rope(c, row),
        **_written_layers(c, row),
    }


def config_from_hf(values: Mapping[str, Any]) -> LlamaConfig:
    """Return the config for a config.json, the inverse of :func:`hf_config`.

    Raises ValueError, with key and value, for what its architecture cannot have here.
    """
    name = values.get("model_type") or "llama"
    if name == "mistral" and values.get("layer_types") is not None:
        name = "ministral"  # transformers reads such a file so: it was published before that class
    row = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if row is None:
        raise ValueError(f"model_type: {shown(name)} is not of the llama family here")
    given, values = values, _older(name, values)
    row.keys.check(values)
    chosen = row.read(LlamaConfig, values, besides=("n_kv_heads",))
    absent = row.kv_heads if "num_key_value_heads" not in values else 0
    chosen["n_kv_heads"] = size(values, "num_key_value_heads", absent or chosen["n_heads"])
    for theirs, fields in row.flags.items():
        chosen |= dict.fromkeys(fields, truth(values, theirs, theirs in row.true))
    for ours in {"attention_scale", *row.inverse} & row.keys.fields.keys():
        theirs = row.keys.fields[ours]
        if values.get(theirs) is not None and not chosen[ours] > 0:
            raise ValueError(f"{theirs}: {chosen[ours]} should be above 0")
    for ours in row.inverse:
        chosen[ours] = 1 / chosen[ours]
    act = {"hidden_act": values.get("hidden_act") or row.activation}
    only(act, "hidden_act", *_ACTIVATIONS)
    chosen["activation"] = _ACTIVATIONS[act["hidden_act"]]
    width, rest = divmod(chosen["dim"], max(chosen["n_heads"], 1))
    heads = size(values, "head_dim", width if "head_dim" in values else row.head_dim or width)
    if not row.own_head_dim:
        only({"head_dim": heads}, "head_dim", width)
    if heads != width or rest:
        chosen["head_dim"] = 0 if rest and row.whole_heads else heads
    chosen |= _read_layers(values, row, chosen) | _read_rope(values, row, heads)
    one_base = row.fixed.get("rope_scale_windows", True) or chosen["rope_theta"] == row.theta
    if not one_base and table(table(given, "rope_parameters"), _LOCAL).get("rope_theta") is None:
        raise ValueError(
            f"rope_theta: {chosen['rope_theta']} is read by transformers for {_GLOBAL} alone; write it"
            f" in rope_parameters.{_GLOBAL} and in rope_parameters.{_LOCAL}"
        )
    return row.keys.build(LlamaConfig, **chosen, architecture=name)


def _unfit(field: str, row: Architecture, has: str) -> ValueError:
    return ValueError(
        f"{field}: {row.architecture} has {has}, so no file of theirs can hold this model"
    )


def _older(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config.json in the one form in which RoPE is read here."""
    values = dict(values)
    place = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rule = values.get(place)
    if not isinstance(rule, Mapping):
        return values
    kind = rule.get("rope_type") or rule.get("type")
    if name == "phi3" and kind in ("su", "yarn", "longrope"):
        length = size(values, LENGTH, 4096)
        rule = {one: rule[one] for one in rule if one != "type"}
        values[place] = rule | {"rope_type": "longrope", LENGTH: length}
    if name == "hunyuan_v1_dense" and kind == "dynamic" and rule.get("alpha"):
        # A factor on the base, whatever the length. The other keys are not read by transformers.
        base = number(values, "rope_theta", number(rule, "rope_theta", 10_000.0))
        heads, alpha = max(size(values, "num_attention_heads"), 1), number(rule, "alpha")
        width = size(values, "head_dim", size(values, "hidden_size") // heads)
        if not 0 < alpha < 2**31:
            raise ValueError(f"{place}.alpha: {alpha} should be above 0, below 2^31")
        if width <= 2:
            raise ValueError(f"head_dim: {width} should be above 2, with {place}.alpha")
        stretched = base * alpha ** (width / (width - 2))
        values |= {"rope_theta": stretched, place: None}
    if name == "olmo3" and {_LOCAL, _GLOBAL} & rule.keys():
        rules = {f"{place}.{one}": rule.get(one) for one in (_LOCAL, _GLOBAL)}
        local, whole = (table(rules, one) for one in rules)
        only({f"{place}.{_LOCAL}": local.get("rope_type")}, f"{place}.{_LOCAL}", "default")
        only({"rope_theta": local.get("rope_theta")}, "rope_theta", whole.get("rope_theta"))
        values[place] = whole
    return values


def _read_rope(values: Mapping[str, Any], row: Architecture, head: int) -> dict[str, Any]:
    part = "rotary_dim" not in row.fixed
    kinds = ("longrope",) if LENGTH in row.keys.read else RULES
    theta, kind, rule = rope(values, kinds, default=row.theta, part=part)
    if not row.fixed.get("rope_scale_windows", True):
        # The key is within an object of a kind of layers, and transformers reads it beside these.
        place = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
        only({f"{place}.truncate": rule.get("truncate")}, f"{place}.truncate", True)
    result = {"rope_theta": theta, **read_rule(values, kind, rule)}
    if part:
        given = rule.get("partial_rotary_factor")
        fraction = share(values, "partial_rotary_factor", row.part if given is None else given)
        only({"partial_rotary_factor": given}, "partial_rotary_factor", fraction)
        rotated = int(head * fraction)
        if not 2 <= rotated <= head or rotated % 2:
            raise ValueError(
                f"partial_rotary_factor: {fraction} rotates {rotated} of a head's {head} numbers,"
                " and RoPE rotates pairs"
            )
        result["rotary_dim"] = 0 if rotated == head else rotated
    return result


def _written_rope(c: LlamaConfig, row: Architecture) -> dict[str, Any]:
    length = positions(c)
    values: dict[str, Any] = {"rope_theta": c.rope_theta, "max_position_embeddings": length}
    rule = written_rule(c)
    if rule and LENGTH in row.keys.read:  # versions before 5 want it there, and three keys of the rule
        if c.rope_rule != "longrope":
            raise _unfit("rope_rule", row, "longrope alone")
        values[LENGTH] = rule.pop(LENGTH)
        rule = {"type": rule.pop("rope_type")} | rule
        if rule["factor"] == length / values[LENGTH]:
            del rule["factor"]
    if "rotary_dim" not in row.fixed:
        fraction = (c.rotary_dim or c.head_width) / c.head_width
        if int(c.head_width * fraction) < c.rotary_dim:
            fraction = math.nextafter(fraction, 1)
        values["partial_rotary_factor"] = fraction
    one_rule = row.fixed.get("rope_scale_windows", True)
    if not one_rule and rule and not rule.get("truncate", True):
        raise _unfit("rope_truncate", row, "True alone")
    if one_rule or c.rope_theta == row.theta:
        return values | {"rope_scaling": rule}
    # Without such objects transformers takes rope_theta for some of the layers alone.
    rules = {_LOCAL: {"rope_type": "default"}, _GLOBAL: rule or {"rope_type": "default"}}
    del values["rope_theta"]
    return values | {
        "rope_parameters": {one: {**own, "rope_theta": c.rope_theta} for one, own in rules.items()}
    }


def _read_layers(
    values: Mapping[str, Any], row: Architecture, chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """Return our fields of the layers' windows and RoPE: the shortest pattern of letters."""
    n_layers, window = chosen["n_layers"], row.window
    if not row.layers or not 1 <= n_layers < 2**12:  # which the config refuses
        return {}
    if "sliding_window" in values:
        window = size(values, "sliding_window", 0)
    if values.get("sliding_window") is not None and window < 1:
        raise ValueError(f"sliding_window: {window} should be at least 1, or null for none")
    if "use_sliding_window" in row.keys.read and not truth(values, "use_sliding_window", False):
        window = 0
    turned = [True] * n_layers
    if row.layers == "free":
        every = size(values, "no_rope_layer_interval", 4)
        turned = [bool((i + 1) % max(every, 1)) for i in range(n_layers)]
        given = values.get("no_rope_layers")
        if given is not None:
            if (
                not isinstance(given, list)
                or len(given) < n_layers
                or not all(x in (0, 1) for x in given)
            ):
                raise ValueError(f"no_rope_layers: expected 0 or 1 for each layer, got {shown(given)}")
            turned = [bool(one) for one in given[:n_layers]]
    local = _local_layers(values, row, turned, window)
    if row.layers == "rotated" or (row.layers == "rotated if any" and window):
        turned = local
    letters = "".join("FWfw"[2 * rope + near] for rope, near in zip(turned, local, strict=True))
    if not letters.strip("f"):
        return {}
    if not any(local) and row.layers != "rotated if any":
        window = 0
    return {"window": window, "layer_pattern": shortest_pattern(letters)}


def _local_layers(
    values: Mapping[str, Any], row: Architecture, turned: list[bool], window: int
) -> list[bool]:
    """Return which layers have a window."""
    n_layers = len(turned)
    if values.get("layer_types") is not None and row.layers != "all":
        # Without a window there is but one kind.
        known = (_LOCAL, _GLOBAL) if window else (_GLOBAL,)
        return [one == _LOCAL for one in layer_types(values, n_layers, *known)]
    if not window or row.layers in ("all", "each"):
        return [window > 0] * n_layers
    if row.layers == "last":
        first = size(values, "max_window_layers", 28)
        return [i >= first for i in range(n_layers)]
    if row.layers == "free":
        return [not one for one in turned]
    every = size(values, "sliding_window_pattern", 4)
    return [bool((i + 1) % max(every, 1)) for i in range(n_layers)]


def _written_layers(c: LlamaConfig, row: Architecture) -> dict[str, Any]:
    if not row.layers:
        return {}
    local = [c.window_of(i) > 0 for i in range(c.n_layers)]
    turned = [c.letter(i) in "wf" for i in range(c.n_layers)]
    whole = row.layers == "rotated if any" and not c.window
    wanted = (
        turned if row.layers == "free" else local if "rotated" in row.layers and not whole else None
    )
    if turned != (wanted or [True] * c.n_layers):
        raise _unfit("layer_pattern", row, "other layers without RoPE")
    # transformers asks some for a window, though no layer has it.
    unused = row.window if row.layers in ("each", "some", "rotated") else None
    values: dict[str, Any] = {"sliding_window": c.window or unused}
    if row.layers == "all":
        if len(set(local)) > 1:
            raise _unfit("layer_pattern", row, "layers of one kind alone")
        return {"sliding_window": c.window if local[0] else None}
    values["layer_types"] = [_LOCAL if one else _GLOBAL for one in local]
    if "use_sliding_window" in row.keys.read:
        values["use_sliding_window"] = any(local)
    if row.layers == "last":
        values["max_window_layers"] = local.index(True) if any(local) else c.n_layers
    if row.layers == "free":
        values["no_rope_layers"] = [int(one) for one in turned]
    return values
