"""Keys of runs with compressed messages, and values to send."""

import torch
from torch import Tensor

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


def drawn(kind: str, count: int = 2**18, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(4, count, generator=generator)
    return normal[0] if kind == "normal" else normal[0] / (normal[1:].square().mean(0)).sqrt()
