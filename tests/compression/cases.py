"""Keys of runs with coded messages."""

Keys = dict[str, object]
SMALL: Keys = {
    "train__global_batch": 8,
    "train__micro_batch": 1,
    "train__seq_len": 32,
    "model__dim": 64,
    "model__hidden_dim": 190,
    "model__n_layers": 2,
}
EXPERTS: Keys = {"model__name": "deepseek_v3", "model__preset": "debug"}


def comm(gradients: str = "off", weights: str = "off", **more: object) -> Keys:
    keys = {"gradients": gradients, "weights": weights, **more}
    return {f"comm__{key}": value for key, value in keys.items()}


INT8, INT4 = comm("int8", "int8"), comm("int4", "int4_diff")


def given(keys: Keys) -> Keys:
    shape = {k: v for k, v in SMALL.items() if not ("model__name" in keys and k.startswith("model__"))}
    return shape | keys
