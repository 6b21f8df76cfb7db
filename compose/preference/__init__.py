"""Training on pairs of replies, of which one is preferred: DPO. The table [dpo] and its rules."""

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from compose.config.models import find_model
from compose.config.setup import Rules
from compose.errors import ConfigError
from compose.ops.dropout import dropouts

if TYPE_CHECKING:
    from compose.config.job import Job


@dataclass(frozen=True)
class Dpo:
    """The table [dpo]: direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290)."""

    beta: Annotated[float, Field(ge=0)] = 0.0
    """How close the model must stay to the one at the start, most often 0.1; data.path has pairs. 0: no
    DPO, the next token is learnt."""


RUN_RULES = Rules["Job"]()


@RUN_RULES.add(
    "with dpo.beta, the model predicts the next token and takes documents, and train.loss_chunk and"
    " train.z_loss are 0",
    "a pair is two documents of a row, and its loss is no sum over tokens",
)
def _next_token(job: "Job") -> Iterator[str]:
    beta, name = job.config.dpo.beta, job.config.model.name
    if not beta:
        return
    own = find_model(name).task is not None
    if own or "documents" not in signature(type(job.model).forward).parameters:
        lacks = "learns something else" if own else "takes no documents, which keep a pair's two apart"
        raise ConfigError(
            f"dpo.beta: {beta:g} is for models of the next token, and {name} {lacks}; use dpo.beta = 0"
        )
    for key in ("loss_chunk", "z_loss"):
        if value := getattr(job.config.train, key):
            yield (
                f"train.{key}: {value:g} is of a sum over tokens, and dpo.beta = {beta:g} has a loss of"
                " whole pairs; use 0, or dpo.beta = 0"
            )


@RUN_RULES.add(
    "with dpo.beta, nothing is dropped out",
    "the loss compares the model with its reference, in which nothing is dropped",
)
def _no_dropout(job: "Job") -> Iterator[str]:
    beta, lora = job.config.dpo.beta, job.config.model.lora
    for name in dropouts(job.model)[:1] if beta else ():
        cure = "model.lora.dropout = 0.0" if lora.dropout else "a model without dropout"
        why = f"compares the model with a reference, and {name} drops out"
        yield f"dpo.beta: {beta:g} {why}; use {cure}"


TABLES = {"dpo": Dpo}


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
