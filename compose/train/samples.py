"""Texts that the model continues while it is trained, for a person to look at."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from compose.config.models import max_seq_len
from compose.config.tables import Config
from compose.data.chat_template import has_template
from compose.data.datasets import tokenizer_of
from compose.data.generation_config import end_ids, repetition_penalty
from compose.data.samples import Samples
from compose.data.tokenizer import JsonTokenizer
from compose.errors import ConfigError
from compose.object_storage import as_path
from compose.train.heartbeat import report_phase
from compose.train.hooks import Hook
from compose.train.sampling import Cache, NotFinite, Sampling, chat_ids, obstacle, sample_with, text_of

if TYPE_CHECKING:
    from compose.train.trainer import Trainer


class Prompts:
    """The prompts of ``metrics.prompts`` as ids, and what ends a text."""

    def __init__(self, config: Config, sets: Sequence[Samples]) -> None:
        """Encode the prompts; with chats they are a user's messages in the tokenizer's template.

        Raises ConfigError if there is no tokenizer, a prompt has no token, or a text is too long.
        """
        given, more = config.metrics.prompts, config.metrics.sample_tokens
        self.tokenizer = tokenizer = tokenizer_of(config, sets)
        chats = any(each.token_set.manifest.kind != "text" for each in sets if each.token_set)
        if chats and isinstance(tokenizer, JsonTokenizer) and has_template(tokenizer):
            encoded = chat_ids(tokenizer, given)
        else:
            encoded = [tokenizer.encode(text, added=True, markup=True) for text in given]
        self.ids = dict(zip(given, encoded, strict=True))
        """The tokens of each prompt, by its text."""
        most, size = max_seq_len(config.model.config), config.model.config.vocab_size
        for prompt, ids in self.ids.items():
            if not ids:
                raise ConfigError(f"metrics.prompts: {prompt!r} has no token of {tokenizer.name}")
            if max(ids) >= size:
                raise ConfigError(
                    f"metrics.prompts: {prompt!r} has the id {max(ids)} of {tokenizer.name}, and the"
                    f" model's vocabulary {size}"
                )
            if most is not None and len(ids) + more > most:
                raise ConfigError(
                    f"metrics.sample_tokens: {more} after a prompt of {len(ids)} are more than the"
                    f" {most} positions that the model has"
                )
        original = config.checkpoint.load_hf
        ends = [each.token_set.manifest.tokenizer.end for each in sets if each.token_set]
        self.ends = {*end_ids(tokenizer, as_path(original) if original else None), *ends}
        beside = [tokenizer.path.parent] if isinstance(tokenizer, JsonTokenizer) else []
        beside += [as_path(original)] if original else []
        self.repetition_penalty = repetition_penalty(beside)


class PromptSamples(Hook):
    """Continues the prompts every ``metrics.samples_every`` steps, and at the end."""

    def __init__(self, trainer: "Trainer") -> None:
        options, train = trainer.config.metrics, trainer.config.train
        self.composition, self.say = trainer.composition, trainer.worker.say
        self.prompts = Prompts(trainer.config, trainer.batches.sets)
        self.every, self.last = options.samples_every, train.last_step
        self.sampling = Sampling(
            options.sample_tokens,
            options.sample_temperature,
            seed=train.seed,
            repetition_penalty=self.prompts.repetition_penalty,
        )
        self.cached: bool | None = None
        """Whether keys and values are kept. The first texts decide; None: not decided yet."""

    def measure(self, step: int) -> dict[str, Any]:
        """Return the continuation of each prompt as ``texts``; nothing of training is changed.

        A line takes the place of a text whose logits are not finite.
        """
        if step % self.every and step != self.last:
            return {}
        texts: dict[str, str] = {}
        # torch.compile would make a graph for each length.
        with torch.compiler.set_stance("force_eager"):
            if self.cached is None:
                self.cached = not obstacle(self.composition)
            for prompt, ids in self.prompts.ids.items():
                report_phase(step, "samples")
                cache = Cache(self.composition) if self.cached else None
                given = (self.composition, ids, self.sampling, cache, self.prompts.ends)
                try:
                    tokens = [*sample_with(*given)]
                except NotFinite as error:
                    self.say(f"metrics.prompts: step {step}: {prompt!r} has no text: {error}")
                    self.cached = None  # decide again: these weights show nothing
                    continue
                _, *pieces = text_of(self.prompts.tokenizer, ids, tokens)
                texts[prompt] = "".join(pieces)
        return {"texts": texts} if texts else {}
