"""Small diffusion transformers, and runs of them."""

from tests.support.helpers import Keys

# 9 patches: an odd number, which no two ranks can share evenly.
DIT: Keys = {
    "model__name": "dit",
    "model__image_size": 6,
    "model__dim": 24,
    "model__n_heads": 2,
    "model__hidden_dim": 36,
    "model__n_layers": 2,
    "train__seq_len": 9,
    "train__micro_batch": 1,
}
