"""The table [dpo] and its rules."""

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from compose.config.models import find_model
from compose.config.setup import Rules
from compose.errors import ConfigError
from compose.ops.dropout import dropouts

if TYPE_CHECKING:
    from compose.config.job import Job

Beta = Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class Dpo:
    """The table [dpo]: direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290)."""

    beta: Beta = 0.0
    """How strongly the model is held to the one that it begins as, most often 0.1; the data are pairs.
    0: no pairs, the next token is learnt."""


RULES = Rules["Job"]()


@RULES.add(
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


@RULES.add(
    "with dpo.beta, nothing is dropped out",
    "the loss compares the model with its reference, in which nothing is dropped",
)
def _no_dropout(job: "Job") -> Iterator[str]:
    beta, lora = job.config.dpo.beta, job.config.model.lora
    for name in dropouts(job.model)[:1] if beta else ():
        cure = "model.lora.dropout = 0.0" if lora.dropout else "a model without dropout"
        why = f"compares the model with a reference, and {name} drops out"
        yield f"dpo.beta: {beta:g} {why}; use {cure}"
