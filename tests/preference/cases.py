"""Pairs of random tokens, and a plain reference of the loss."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from compose.preference.pairs import Preference
from tests.support.helpers import Keys, make_config, ranks_in

BASE: Keys = {
    "dpo__beta": 0.3,
    "train__global_batch": 4,
    "train__micro_batch": 2,
    "train__seq_len": 27,
}
LORA: Keys = {"model__lora__rank": 2, "model__lora__targets": '["layers.*.attention.w*"]'}
MESHES: dict[str, Keys] = {
    "tp x dp": {"parallel__dp_shard": 2, "parallel__tp": 2, "train__seq_len": 30},
    "pp": {"parallel__pp": 2, "train__micro_batch": 1},
    "cp": {"parallel__cp": 2},
    "ulysses x tp": {"parallel__cp": 2, "parallel__tp": 2, "parallel__cp_method": "ulysses"},
    "zero 1": {"parallel__dp_shard": 2, "parallel__zero": 1},
    "ZBVZeroBubble x cp": {
        "parallel__pp": 2,
        "parallel__cp": 2,
        "parallel__pp_schedule": "ZBVZeroBubble",
        "model__n_layers": 4,
        "train__micro_batch": 1,
    },
    "experts": {
        "parallel__dp_shard": 2,
        "parallel__ep": 2,
        "model__name": "qwen3",
        "model__preset": "debug_moe",
    },
    "one pair": {
        "parallel__tp": 2,
        "train__global_batch": 1,
        "train__micro_batch": 1,
        "train__seq_len": 14,
    },
    "adapters": {"parallel__dp_shard": 2, **LORA},
}


def batch_of(samples: int, seed: int = 0, **keys: Any) -> dict[str, Tensor]:
    """A random batch of pairs."""
    return Preference().random_batch(make_config(1, **BASE | keys), samples, seed)


def dpo(logits: Tensor, targets: Tensor, beta: float) -> Tensor:
    """The sum of the losses of pairs, as TRL's DPOTrainer computes them (loss_type "sigmoid").

    It gathers log-probabilities of all tokens, adds those of each reply, and subtracts the reference's.
    """
    learnt = ~targets[..., 0].isnan()
    ids = targets[..., 0].nan_to_num().long()
    logps = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    chosen, rejected = (
        [((logps, targets[..., 2])[which] * mask).nansum(1) for which in (0, 1)]
        for mask in (learnt & (targets[..., 1] == side) for side in (1, -1))
    )
    logratios, reference = chosen[0] - rejected[0], chosen[1] - rejected[1]
    return -F.logsigmoid(beta * (logratios - reference))[learnt.any(1)].sum()


def keys_of(case: str) -> tuple[Keys, int]:
    """The keys of a mesh, and its ranks."""
    keys = BASE | MESHES[case]
    return keys, ranks_in(keys)
