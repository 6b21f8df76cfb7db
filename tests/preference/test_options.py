"""The rules of [dpo]."""

from tests.preference.cases import LORA
from tests.support.helpers import refusals

test_refused = refusals(
    [
        (
            {"model__name": "dit", "train__seq_len": 256},
            "dpo.beta: 0.1 is for models of the next token, and dit learns something else; use"
            " dpo.beta = 0",
        ),
        (
            {"train__loss_chunk": 8},
            "train.loss_chunk: 8 is of a sum over tokens, and dpo.beta = 0.1 has a loss of whole pairs;"
            " use 0, or dpo.beta = 0",
        ),
        (
            {"train__z_loss": 1e-3},
            "train.z_loss: 0.001 is of a sum over tokens, and dpo.beta = 0.1 has a loss of whole pairs;"
            " use 0, or dpo.beta = 0",
        ),
        (
            LORA | {"model__lora__dropout": 0.1},
            "dpo.beta: 0.1 compares the model with a reference, and layers.0.attention.wq.lora.dropout"
            " drops out; use model.lora.dropout = 0.0",
        ),
    ],
    {"dpo__beta": 0.1},
    ["another task", "chunks", "z-loss", "dropout"],
)
