"""Keys of runs with compressed messages, and values to send."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from compose import forward_backward
from compose.data.samples import random_batch
from compose.parallel.mesh import batch_share
from compose.proof.comparison import whole
from tests.support.helpers import built

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


@dataclass
class Steps:
    """This records the bytes that steps sent, and the last one's gradients and loss."""

    compressed: bool
    sent: list[dict[tuple[str, str], int]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    loss: float = 0.0


def take_steps(keys: Keys, count: int, add_up: bool = False) -> Steps:
    """Forward and backward of random batches; gradients are set to zero between steps, or add up."""
    job, composition = built(keys)
    index, shares = batch_share(composition.mesh)
    train, vocabulary = job.config.train, job.config.model.config.vocab_size
    result = Steps(composition.compression is not None)
    for step in range(count):
        for parameter in composition.model.parameters() if not add_up else ():
            parameter.grad = None
        batch = random_batch(train.global_batch, train.seq_len, vocabulary, seed=step)
        own = slice(index * train.global_batch // shares, (index + 1) * train.global_batch // shares)
        share = {name: value[own] for name, value in batch.items()}
        result.loss = float(forward_backward(composition, share, micro_batch=train.micro_batch))
        if result.compressed:
            result.sent.append(composition.compression.traffic.take())  # type: ignore[union-attr]
    result.gradients = {name: whole(p.grad) for name, p in composition.named_parameters()}  # type: ignore[arg-type]
    return result
