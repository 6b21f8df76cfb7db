"""Training on pairs of replies, of which one is preferred: DPO."""

from typing import Any

from compose.preference.options import RULES, Dpo

TABLES = {"dpo": Dpo}
RUN_RULES = RULES


def task(config: Any) -> Any:
    """Return what a model learns from pairs, if [dpo] is on."""
    from compose.preference.pairs import Preference

    return Preference() if config.dpo.beta else None


def held(job: Any, placed: Any) -> list[str]:
    """Return a line with what the reference takes, of the stages' parameters as they are placed."""
    from compose.preference.reference import as_line

    return [as_line(job, placed)] if job.config.dpo.beta else []


def hooks(trainer: Any) -> list[Any]:
    """Return what gives the loss its reference, if [dpo] is on."""
    from compose.preference.reference import Preferences

    return [Preferences(trainer)] if trainer.config.dpo.beta else []
