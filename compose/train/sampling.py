"""How a text is continued: the logits of the next token, with or without a cache, and its draw.

Causal attention is the only place where a token of a language model reads others. If the keys and
values of each attention core are kept, a token runs through the model once, alone (Pope et al. 2022,
arXiv:2211.05102, section 2).

An attention core is a module with ``options`` (compose.AttentionOptions), called as ``core(q, k, v,
documents=None, sinks=None)``. A cache takes the place of its forward while the model runs, and keeps
the keys and values of this rank's heads: with latent attention those of all heads, and not the latent.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, cast
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compose.composition import Composition
from compose.config.toml import COMMAND_LINE
from compose.data.chat_messages import Chat
from compose.data.chat_replies import Replies
from compose.data.tokenizer import JsonTokenizer, Tokenizer
from compose.errors import ConfigError, NonNegative, Positive
from compose.ops.attention import AttentionOptions, attention
from compose.ops.tensors import at_least_float32
from compose.parallel.expert_parallel import routers
from compose.parallel.mesh import axis_size
from compose.train.evaluate import forward
from compose.train.step import local_batch
from compose.weights import named_generator

Wanted = Literal["auto", "on", "off"]
"""Whether to keep keys and values: where it can be done, or else refuse, or never."""
Forward = Callable[..., Tensor]
_NOT_FINITE = sys.maxsize
"""A rank whose logits are not finite sends it in place of a token; it is greater than each token."""


class NotFinite(ConfigError):
    """The model's logits are not finite; every rank raises it at the same token."""


@dataclass(frozen=True)
class Sampling:
    """The options for continuing a text."""

    max_tokens: Positive = 128
    """Most tokens after the prompt; the text may end before."""
    temperature: Annotated[float, Field(ge=0)] = 0.8
    """Divides the logits; 0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Sample from the fewest tokens that together have this probability."""
    seed: NonNegative = 0
    """The same seed gives the same text, on every mesh."""
    cache: Wanted = "auto"
    """Keep keys and values, so that a token runs once; "auto": where the model can have it."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits of tokens that are in the text already, from generation_config.json."""


class KeyValues:
    """The keys and values of one attention core: of all tokens so far, or of its window.

    The tensors have room for more tokens, and are doubled when it is used up. A window is a ring: a
    token takes the place of the one that no query sees any more.
    """

    def __init__(self, options: AttentionOptions) -> None:
        self.window = options.window
        # The one query sees all keys that are kept.
        self.options = replace(options, causal=False, window=None)
        self.length = 0
        """Tokens so far, with those that a window has left behind."""
        self._kept: list[Tensor] = []

    @property
    def kept(self) -> list[Tensor]:
        """The keys (B, S, G, K) and the values (B, S, G, V), in any order."""
        held = min(self.length, self.window or self.length)
        return [kept[:, :, :held].transpose(1, 2) for kept in self._kept]

    def query(self, q_B1HK: Tensor, sinks: Tensor | None) -> Tensor:
        """Return attention (B, 1, H, V) of the last token's query to the keys that are kept."""
        keys, values = self.kept
        return attention(q_B1HK, keys, values, None, sinks, self.options)[0]

    def append(self, k_BLGK: Tensor, v_BLGV: Tensor) -> None:
        """Add the keys and values of the next tokens; L is 1, except for the first tokens."""
        before, self.length = self.length, self.length + k_BLGK.shape[1]
        # Heads come first, so that the keys of a head lie together.
        new = [x.transpose(1, 2) for x in (k_BLGK, v_BLGV)]
        room = self._kept[0].shape[2] if self._kept else 0
        if room < min(self.length, self.window or self.length):
            room = min(1 << self.length.bit_length(), self.window or sys.maxsize)
            grown = [x.new_empty((*x.shape[:2], room, x.shape[3])) for x in new]
            for old, more in zip(self._kept, grown, strict=False):
                more[:, :, : old.shape[2]] = old
            self._kept = grown
        first = max(before, self.length - room)
        places = torch.arange(first, self.length, device=k_BLGK.device) % room
        for kept, x in zip(self._kept, new, strict=True):
            kept[:, :, places] = x[:, :, first - before :]


class Cache:
    """The keys and values of a model for which :func:`obstacle` finds nothing; rows are sequences."""

    def __init__(self, composition: Composition) -> None:
        self.length = 0
        """Tokens so far."""
        self.of = {core: KeyValues(core.options) for core in attention_cores(composition).values()}
        """Keys and values by attention core."""

    @contextmanager
    def taking(self, count: int) -> Iterator[None]:
        """Let a forward inside take the next ``count`` tokens, 1 but for the first time."""
        assert count == 1 or not self.length
        with ExitStack() as stack:
            for core, kept in self.of.items():
                forward = partial(_attend, kept, count, core.forward)
                stack.enter_context(mock.patch.object(core, "forward", forward))
            yield
        self.length += count


def _attend(
    cache: KeyValues,
    count: int,
    former: Forward,
    q_BLHK: Tensor,
    k_BLGK: Tensor,
    v_BLGV: Tensor,
    documents: Any = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return what the core returns for the next ``count`` of L tokens; the others are padding."""
    begins = not cache.length
    cache.append(k_BLGK[:, :count], v_BLGV[:, :count])
    if begins:
        return former(q_BLHK, k_BLGK, v_BLGV, documents, sinks)
    return F.pad(cache.query(q_BLHK[:, :1], sinks), (0, 0, 0, 0, 0, q_BLHK.shape[1] - 1))


def attention_cores(composition: Composition) -> dict[str, Any]:
    """Return the attention cores of a model by name: the modules that have AttentionOptions."""
    named = composition.model.named_modules()
    return {n: m for n, m in named if isinstance(getattr(m, "options", None), AttentionOptions)}


def next_logits(
    composition: Composition, tokens: Sequence[int], cache: Cache | None = None
) -> Tensor | None:
    """Return the logits of the token after ``tokens``, the whole text; a collective.

    With a cache only tokens that are not in it run, and are added to it. Logits (V,) are on the CPU;
    ranks without the last token get None.
    """
    mesh = composition.mesh
    first = cache.length if cache else 0
    new, length = tokens[first:], len(tokens)
    missing = -len(new) % axis_size(mesh, "tp")
    # The padding changes nothing: attention is causal, and experts do not count it.
    batch = {
        "tokens": torch.tensor([[*new, *[new[-1]] * missing]], device=mesh.device_type),
        "positions": torch.tensor([[*range(first, length), *[-1] * missing]], device=mesh.device_type),
    }
    results: list[Tensor] = []

    def keep(output: Tensor, part: Mapping[str, Tensor]) -> None:
        for place in (part["positions"][0] == length - 1).nonzero().flatten().tolist():
            row = output[0, place]
            results.append(row.full_tensor() if isinstance(row, DTensor) else row)

    with cache.taking(len(new)) if cache else ExitStack():
        forward(composition, local_batch(composition, batch), each=keep)
    return results[0].cpu() if results else None


def open_cache(composition: Composition, wanted: Wanted) -> Cache | None:
    """Return an empty cache for a model, or None if every token is to run the whole text; a collective.

    If the model cannot have a cache, "on" raises ConfigError, and "auto" says why on standard error.
    """
    if wanted == "off":
        return None
    why = obstacle(composition)
    if not why:
        return Cache(composition)
    if wanted == "on":
        raise ConfigError(f"{COMMAND_LINE}: --cache: on, but {why}; use --cache auto")
    if dist.get_rank() == 0:
        print(f"generate: every token runs the whole text again: {why}", file=sys.stderr)
    return None


def obstacle(composition: Composition) -> str:
    """Return why a model cannot have a cache of keys and values, or ""; a collective."""
    for axis in ("pp", "cp"):
        if (size := axis_size(composition.mesh, axis)) > 1:
            return f"parallel.{axis} = {size} cuts the text or the model into parts that have no cache"
    if composition.float8.recipe != "off":
        return f"precision.float8 = {composition.float8.recipe} scales all tokens of a text together"
    cores = attention_cores(composition)
    if not cores:
        return "the model has no attention core (a module with compose.AttentionOptions)"
    for name, core in cores.items():
        if not core.options.causal:
            return f"{name} is not causal, so later tokens change what earlier ones give"
    return _mixed_elsewhere(composition, cores)


def _mixed_elsewhere(composition: Composition, cores: Mapping[str, Any]) -> str:
    """Return why a model mixes tokens, or may, while its attention cores mix none.

    It runs on two tokens. The logits of the second one must not depend on the first.
    """
    length, calls = 2 + -2 % axis_size(composition.mesh, "tp"), Counter[str]()
    problems, differs = list[str](), False

    def _alone(
        name: str,
        core: Any,
        former: Forward,
        q_BLHK: Tensor,
        k_BLGK: Tensor,
        v_BLGV: Tensor,
        documents: Any = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        nonlocal differs
        calls[name] += 1
        if torch.compiler.is_compiling():
            problems.append("the model is compiled (compile.mode), and a cache grows with each token")
        elif calls[name] > 1:
            problems.append(f"{name} runs more than once in the model's forward")
        elif documents is not None:
            problems.append(f"{name} attends within documents, of which a token alone does not tell")
        elif not q_BLHK.shape[1] == k_BLGK.shape[1] == length:
            problems.append(f"{name} has other queries and keys than one for each token")
        else:
            cache = KeyValues(core.options)
            cache.append(k_BLGK, v_BLGV)
            whole = former(q_BLHK, k_BLGK, v_BLGV, documents, sinks)
            far = _distance(whole[:, -1:], cache.query(q_BLHK[:, -1:], sinks))
            differs = differs or far > torch.finfo(whole.dtype).eps ** 0.5  # of another kernel
        return v_BLGV.repeat_interleave(q_BLHK.shape[2] // v_BLGV.shape[2], 2)

    def _routed(router: nn.Module, inputs: Any, routing: Any) -> None:
        if getattr(routing, "kept", None) is not None:
            problems.append("experts have a capacity, and the whole text competes for it")

    with ExitStack() as stack:
        for name, core in cores.items():
            alone = partial(_alone, name, core, core.forward)
            stack.enter_context(mock.patch.object(core, "forward", alone))
        for router in routers(composition.model).values():
            stack.callback(cast(nn.Module, router).register_forward_hook(_routed).remove)
        one = next_logits(composition, [0, 0])
        assert one is not None
        calls.clear()
        other = next_logits(composition, [len(one) - 1, 0])
        assert other is not None
    problems += [f"{name} does not run in the model's forward" for name in cores if not calls[name]]
    # The same kernels at the same shapes give the same bits. But experts may get more or fewer tokens,
    # whose products round in another way, and layers add to that.
    eps = torch.finfo(one.dtype).eps
    most = max(8 * eps, 1e-4) if routers(composition.model) else eps
    mixes = _distance(one, other) > most
    # Ranks hold other heads, and round in other ways, and must agree.
    result = torch.tensor([int(differs), int(mixes)], device=composition.mesh.device_type)
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    differs, mixes = result.tolist()
    if differs:
        problems.append("a core with AttentionOptions computes something else than compose.attention")
    if mixes:
        problems.append("the model mixes tokens outside of its attention cores")
    return next(iter(problems), "")


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the relative difference of two tensors."""
    return float((one - other).double().norm() / one.double().norm())


def sample(
    composition: Composition, tokens: Sequence[int], sampling: Sampling, ends: Collection[int] = ()
) -> Iterator[int]:
    """Yield the tokens with which the model continues ``tokens``, up to one of ``ends``.

    This is a collective: every rank must take all tokens, and gets the same ones.
    """
    yield from sample_with(composition, tokens, sampling, open_cache(composition, sampling.cache), ends)


def sample_with(
    composition: Composition,
    tokens: Sequence[int],
    sampling: Sampling,
    cache: Cache | None,
    ends: Collection[int] = (),
) -> Iterator[int]:
    """Do what :func:`sample` does, with an empty cache or none; ``sampling.cache`` does not count."""
    known = list(tokens)
    for _ in range(sampling.max_tokens):
        logits = next_logits(composition, known, cache)
        result = -1
        if logits is not None:
            logits = penalized(logits, known, sampling.repetition_penalty)
            result = sample_token(logits, len(known), sampling)
        # Ranks with logits have the same ones, except for rounding. The other ranks send -1.
        chosen = torch.tensor(result, device=composition.mesh.device_type)
        dist.all_reduce(chosen, op=dist.ReduceOp.MAX)
        token = int(chosen)
        if token == _NOT_FINITE:
            raise NotFinite(
                f"token {len(known)}: the model's logits are not finite: its weights are damaged, or"
                " too large for precision.param"
            )
        if token in ends:
            return
        known.append(token)
        yield token


def penalized(logits: Tensor, known: Sequence[int], penalty: float) -> Tensor:
    """Make tokens of the text so far less likely in logits (V,) (Keskar et al., arXiv:1909.05858)."""
    if penalty == 1:
        return logits
    seen, logits = torch.tensor(sorted(set(known))), at_least_float32(logits)
    there = logits[seen]
    return logits.index_copy(0, seen, torch.where(there < 0, there * penalty, there / penalty))


def sample_token(logits: Tensor, position: int, sampling: Sampling) -> int:
    """Return a token by logits (V,): the likeliest one, or one drawn by the seed and its position.

    If they are not finite, it is ``_NOT_FINITE``, which is no token.
    """
    if not bool(logits.max().isfinite()):  # NaN is the greatest; -inf forbids a token
        return _NOT_FINITE
    if sampling.temperature == 0:
        return int(logits.argmax())
    # Subtract the greatest logit: a temperature near 0 would make others infinite.
    below = logits.double() - logits.max()
    probabilities = nucleus((below / sampling.temperature).softmax(-1), sampling.top_p)
    generator = named_generator(sampling.seed, str(position))
    return int(torch.multinomial(probabilities, 1, generator=generator))


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Set the probabilities (V,) to 0, but of the fewest tokens that have ``top_p`` together.

    They are not normalised again (Holtzman et al. 2019, arXiv:1904.09751).
    """
    ordered, places = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    return probabilities.index_fill(0, places[before >= top_p], 0.0)


def chat_ids(tokenizer: JsonTokenizer, prompts: Sequence[str | Chat]) -> list[list[int]]:
    """Return the ids of each prompt, as the tokenizer's chat template writes it before a reply.

    A text is the message of a user.
    """
    replies, result = Replies(tokenizer), []
    for prompt in prompts:
        plain = isinstance(prompt, str)
        asked = Chat([{"role": "user", "content": prompt}], [], {}) if plain else prompt
        try:
            messages = asked.messages if plain else replies.form(asked)[0]
            written = replies.template.text(messages, asked.more, prompt=True)
        except ValueError as error:
            raise ConfigError(f"{tokenizer.path.parent}: {error}") from None
        result.append(tokenizer.encode_markup(written)[0])
    return result


def text_of(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of ``prompt``, and then the text that each token adds.

    The bytes of an unfinished character wait for the rest of it.
    """
    known, shown = list(prompt), 0
    for more in itertools.chain([[]], ([token] for token in tokens)):
        known += more
        whole = tokenizer.decode(known).rstrip("\ufffd")
        yield whole[shown:]
        shown = max(shown, len(whole))
    yield tokenizer.decode(known)[shown:]
