"""Runs with adapters, for tests of LoRA."""

from tests.support.helpers import Keys

ATTENTION = "['layers.*.attention.w*']"
ALL = "['layers.*.attention.w*','layers.*.feed_forward.w*']"


def lora(rank: int = 3, targets: str = ALL, **more: object) -> Keys:
    """Keys of [model.lora]; the rank divides nothing."""
    keys = {"rank": rank, "targets": targets, **more}
    return {f"model__lora__{key}": value for key, value in keys.items()}
