"""The training of one process in plain PyTorch; the proof compares a composition with it.

It runs several times: once as the composition computes, and once exactly, in float64. The distance
between the two is the error that one process makes by rounding. It measures how far a composition may
be from one process.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_flatten, tree_map

from compose.memory.float8 import NOTHING, Choice, apply_float8
from compose.memory.precision import Precision
from compose.ops.cross_entropy import IGNORE, LossFunction, cross_entropy, logits_of
from compose.ops.dropout import DropoutKey, Masks, dropouts
from compose.ops.tensors import at_least_float32
from compose.parallel.expert_parallel import routers
from compose.parallel.output_projection import CrossEntropy
from compose.proof.optimizers import Named
from compose.proof.routing_trace import Choices, follow


def kept_dtype(precision: Precision, parameter: nn.Parameter) -> torch.dtype:
    """Return the type in which a parameter is kept; a frozen one has no master."""
    return precision.master_dtype if parameter.requires_grad else precision.param_dtype


def type_names(precision: Precision) -> str:
    """Return the types that a run computes in, as the rows of its report begin."""
    if not precision.reduced:
        return precision.param
    names = {"param": precision.param, "reduce": precision.reduce, "master": precision.master}
    names |= {"state": precision.optimizer_state}
    names |= {"float8": precision.float8} if precision.float8 != "off" else {}
    return ", ".join(f"{name} {kind}" for name, kind in names.items())


_FLOAT64: Any = "float64"  # which no file may name
EXACT = Precision(_FLOAT64, _FLOAT64, master=_FLOAT64, optimizer_state=_FLOAT64)
"""The precision of a proof's logic: its rounding is too small to hide a fault."""

OptimizerOf = Callable[[Precision, Named], torch.optim.Optimizer]
"""Makes one process's optimizer for some precision, from named whole parameters."""


@dataclass(frozen=True)
class FromComposition:
    """Tensors that one process takes from a composition that rounds, whole, by name."""

    received: Mapping[str, Tensor]
    """Weights that forward and backward use."""
    gradients: Mapping[str, Tensor]
    """Gradients that the optimizer takes."""


class OneProcess:
    """Optimizer steps of the whole model on the global batch, without any of compose's techniques.

    It is plain PyTorch, with four exceptions. ``compose.memory.float8.apply_float8`` makes the float8
    layers (torchao's, in the reduced run alone). ``compose.ops.dropout`` makes the masks of dropout.
    Routers are told what compose/parallel/expert_parallel.py tells them. Where a routing is a tie, the
    composition's counts.

    ``micro_batch`` is the number of samples of one forward; None is all. ``max_norm`` of 0 clips
    nothing. ``tie`` is the margin of a routing up to which its choice is as good as random. ``widens``:
    what float64 it computes with needs ``Widened``.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        loss_function: LossFunction,
        optimizer: OptimizerOf,
        *,
        max_norm: float = 0.0,
        micro_batch: int | None = None,
        loss_scale: float = 1.0,
        tie: float = 0.0,
        float8: Choice = NOTHING,
        widens: bool = False,
    ) -> None:
        self.model = copy.deepcopy(model)
        drops = dropouts(self.model)
        self.dropout = Masks(self.model, [self.model], drops) if drops else None
        self.precision, self.loss_function = precision, loss_function
        self.plain_loss = plain_loss(loss_function)
        self.widens = widens and precision == EXACT
        self.max_norm, self.micro_batch = max_norm, micro_batch
        self.loss_scale, self.tie = loss_scale, tie
        if precision.float8 != "off":
            apply_float8(self.model, float8)
        wide = torch.promote_types(precision.param_dtype, torch.float32)
        # The model has what forward uses, until backward ends, which may run layers again.
        self.used = dict(self.model.named_parameters())
        self.parameters: dict[str, nn.Parameter] = {}
        for name, p in self.used.items():
            kept = p.detach().to(kept_dtype(precision, p)).to(wide) if p.is_floating_point() else p
            self.parameters[name] = nn.Parameter(kept, p.requires_grad)
        self.parts: dict[str, Tensor] = {}  # the sum of the squares of micro-batches' gradients
        self.initial = {name: p.detach().clone() for name, p in self.parameters.items()}
        trained = [(name, p) for name, p in self.parameters.items() if p.requires_grad]
        self.optimizer = optimizer(precision, trained)
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.gradients: dict[str, Tensor] = {}
        self.received: Mapping[str, Tensor] = {}
        self.choices: dict[str, Choices] = {}

    def step(
        self,
        batch: Mapping[str, Tensor],
        routing: Mapping[str, Sequence[Choices]],
        given: FromComposition | None = None,
    ) -> None:
        """Take one optimizer step; note loss, norm and gradients."""
        self.parts = {}
        targets = batch["targets"]
        ignored = targets.isnan() if targets.is_floating_point() else targets == IGNORE
        own_count = getattr(self.loss_function, "count", lambda _: (~ignored).sum())
        count = own_count(targets).clamp(min=1)
        batch = self.begin(batch)
        calls = self._ids(targets)
        with follow(self.model, routing, calls, self.tie) as self.choices, self.modes():
            self.losses.append(self.accumulate(batch, count))
        for router in routers(self.model).values():
            router.finish_step(router.tally)
        found_gradients = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        for gradient in found_gradients.values():
            gradient /= self.loss_scale
        self.gradients = {name: gradient.clone() for name, gradient in found_gradients.items()}
        for name, gradient in given.gradients.items() if given else ():
            if name in found_gradients:  # frozen weights have none
                found_gradients[name].copy_(gradient)
        self.norms.append(self.take_step())

    def take_step(self) -> Tensor:
        """Clip the gradients, take the optimizer's step with them; return their norm before."""
        limit = self.max_norm if self.max_norm > 0 else float("inf")
        norm = nn.utils.clip_grad_norm_(list(self.parameters.values()), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Enter what forward and backward run in."""
        with Widened() if self.widens else nullcontext(), PlainAttention():
            yield

    def _add(self, name: str, gradient: Tensor) -> None:
        """Add a micro-batch's gradient, as a rank does that rounds it before and after it sums."""
        parameter, part = self.parameters[name], (gradient.double() / self.loss_scale).square().sum()
        self.parts[name] = self.parts.get(name, 0.0) + part
        kind, reduce = parameter.dtype, self.precision.reduce_dtype
        narrow = reduce if reduce.itemsize < 4 else kind
        before = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = (before + gradient.to(kind).to(narrow)).to(narrow).to(kind)

    @torch.no_grad()
    def begin(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Begin a step: tell routers and dropout, and return the batch with what dropout needs.

        The model gets the weights that the step uses, which are those that ranks ``received``, if any.
        """
        for name, parameter in self.used.items():
            own = self.parameters[name]
            kind = self.precision.param_dtype if own.is_floating_point() else own.dtype
            parameter.data = self.received.get(name, own).detach().to(own.dtype).to(kind)
        targets = batch["targets"]
        positions = batch.get("positions", targets.new_zeros(targets.shape[:2]))
        for router in routers(self.model).values():
            router.tokens_per_step = (positions >= 0).sum().clamp(min=1)
            router.loss_scale = self.loss_scale
        if self.dropout is None:
            return batch
        samples = torch.arange(len(targets), device=targets.device)
        return {**batch, **self.dropout.begin(DropoutKey(len(self.losses)), samples, None)}

    def accumulate(self, batch: Mapping[str, Tensor], count: Tensor) -> Tensor:
        """Add the gradient of a batch, and return its loss: sums over targets, divided by ``count``."""
        total = torch.zeros((), dtype=torch.float64, device=count.device)
        for part in self._micro_batches(batch):
            targets = part.pop("targets")
            loss = self.plain_loss(self.forward(part), targets.clone()) / count
            (loss * self.loss_scale).backward()
            total += loss.detach()
            for name, parameter in self.used.items():
                if parameter.grad is not None:
                    self._add(name, parameter.grad)
                    parameter.grad = None
        return total

    def _micro_batches(self, batch: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        samples = len(batch["targets"])
        for start in range(0, samples, size := self.micro_batch or samples):
            yield {name: value[start : start + size] for name, value in batch.items()}

    def _ids(self, targets: Tensor) -> Sequence[Tensor]:
        """Return numbers of the tokens of each micro-batch; the batch's are numbered row by row."""
        shape = targets.shape[:2]
        return torch.arange(shape.numel()).view(shape).split(self.micro_batch or len(targets))

    @torch.no_grad()
    def natural(self, batch: Mapping[str, Tensor]) -> dict[str, Choices]:
        """Return what routers choose by themselves, by their names."""
        given, calls = self.begin(batch), self._ids(batch["targets"])
        with follow(self.model, {}, calls, 0.0) as choices, self.modes():
            for part in self._micro_batches(given):
                del part["targets"]
                self.forward(part)
        return choices

    def forward(self, inputs: Mapping[str, Tensor]) -> Any:
        """Run the model on a part of a batch, in copies that it may change, and without its targets."""
        kind = self.precision.param_dtype
        inputs = {n: (v.to(kind) if v.is_floating_point() else v).clone() for n, v in inputs.items()}
        return self.model(**inputs)

    def change(self, name: str) -> Tensor:
        """Return the change of a parameter over all steps."""
        return self.parameters[name].detach() - self.initial[name]


class _InBackward(TorchFunctionMode):
    """A mode that also acts on layers that run again in backward.

    PyTorch takes a mode off while it handles a function. Backward is one, if it is given tensors.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is Tensor.backward:
            func, named["grad_tensors"] = torch.autograd.backward, named.pop("gradient", None)
        if func not in (torch.autograd.backward, torch.autograd.grad):
            return self.handle(func, args, named)
        ends = [tree_map(_edge, argument) for argument in args[:2]]
        if named.get("inputs"):
            named["inputs"] = tree_map(_edge, named["inputs"])
        with self:
            return func(*ends, *args[2:], **named)

    def handle(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call any other function."""
        raise NotImplementedError


def _edge(value: Any) -> Any:
    return get_gradient_edge(value) if isinstance(value, Tensor) and value.requires_grad else value


class Widened(_InBackward):
    """Within this mode float32 that meets float64 becomes float64, and casts to float32 do nothing.

    With ``widens`` false it only notes in ``narrowed`` which functions round float64 to fewer bits.
    """

    def __init__(self, widens: bool = True) -> None:
        super().__init__()
        self.widens, self.narrowed = widens, list[str]()

    def handle(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Widen what ``func`` takes, and note if it rounds."""
        named = dict(kwargs)
        given = [x for x in tree_flatten((args, named))[0] if isinstance(x, Tensor)]
        if not any(x.dtype == torch.float64 for x in given):
            return func(*args, **named)
        if self.widens:
            name = getattr(func, "__name__", "")
            if func is torch.Tensor.float:
                func = torch.Tensor.double
            if not (name.endswith("_") and not name.endswith("__")):  # those work in place
                args, named = tree_map(_widened, (tuple(args), named))
        result = func(*args, **named)
        if any(x.requires_grad and x.dtype == torch.float64 for x in given):
            self.narrowed += [
                resolve_name(func) or str(func)
                for x in tree_flatten(result)[0]
                if isinstance(x, Tensor) and x.requires_grad and x.dtype.itemsize < 8
            ]
        return result


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.float32:
        return value.double()
    return torch.float64 if value is torch.float32 else value


def plain_loss(loss_function: LossFunction) -> LossFunction:
    """Return the loss of next tokens in plain PyTorch; another one is its own."""
    options = loss_function if isinstance(loss_function, CrossEntropy) else None
    if options is None and loss_function is not cross_entropy:
        return loss_function

    def plain(output: Any, targets: Tensor) -> Tensor:
        logits, wanted = at_least_float32(logits_of(output)).flatten(0, -2), targets.flatten()
        result = F.cross_entropy(logits, wanted, ignore_index=IGNORE, reduction="sum")
        squares = logits.logsumexp(-1).square().masked_fill(wanted == IGNORE, 0.0).sum()
        z = squares * (options.z_loss if options else 0.0)
        return result + (z - z.detach())  # it is in the gradient alone

    return plain


class PlainAttention(_InBackward):
    """Within this mode the operator of compose.attention computes all scores at once, in plain PyTorch.

    The operator that models call finds documents and windows by its own rules, and so does context
    parallel. A fault of those rules would be the same in both runs of a proof, and would not be seen.
    So the one process uses a mask (L, L).
    """

    def handle(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute attention plainly, and call any other function."""
        is_attention = func is torch.ops.compose.attention_forward.default
        return (plain_attention if is_attention else func)(*args, **kwargs)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    extents: Tensor | None,
    sinks: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor]:
    """Compute what the operator computes, for whole sequences.

    q is (B, L, H, K), k (B, S, G, K) and v (B, S, G, V); bounds, the first places of documents, is
    (B S + 1,), and sinks (H,). Returns the output (B, L, H, V) and the log-sum-exp (B, L, H).
    """
    _, _, causal, window, scale, softcap = others
    shared = q.shape[2] // k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    seen = _seen(q, k, bounds, causal, window)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    scores = q.to(wide) @ k.to(wide).mT * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores)[:, None, None].expand(len(q), -1, q.shape[2], 1)
        scores = torch.cat([scores, column], -1)
    output = _MeanOfValues.apply(scores, v)
    return output.transpose(1, 2), scores.logsumexp(-1).transpose(1, 2)


class _MeanOfValues(torch.autograd.Function):
    """The mean of values (..., S, V) by the softmax of scores (..., L, S or S + 1 with a sink).

    Backward needs sum_j P_ij dP_ij. Flash kernels take dO_i . O_i for it (Dao et al. 2022,
    arXiv:2205.14135, appendix B.2), with the output O as it was rounded. The error is the same for all
    keys, so that it is multiplied with their mean, which the true gradient does not contain. Keys with
    a large bias make this the largest error of a step in bfloat16, and one process has to show it too.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, values: Tensor) -> Tensor:
        """Return the output (..., L, V), in the type of the values."""
        shares = scores.softmax(-1)
        output = shares[..., : values.shape[-2]].to(values.dtype) @ values
        ctx.save_for_backward(shares, values, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the gradients of scores and values."""
        shares, values, output = ctx.saved_tensors
        wide = gradient.to(shares.dtype)
        of_shares = torch.zeros_like(shares)  # a sink has no value
        of_shares[..., : values.shape[-2]] = wide @ values.to(wide).mT
        mean = (wide * output.to(wide)).sum(-1, keepdim=True)
        of_values = shares[..., : values.shape[-2]].to(values.dtype).mT @ gradient
        return shares * (of_shares - mean), of_values


def _seen(q: Tensor, k: Tensor, bounds: Tensor | None, causal: bool, window: int) -> Tensor:
    """Return whether a query sees a key, (B or 1, 1, L, S)."""
    rows, length, keys = len(q), q.shape[1], k.shape[1]
    distance = torch.arange(length, device=q.device)[:, None] - torch.arange(keys, device=q.device)
    seen = (distance >= 0) if causal else torch.ones_like(distance, dtype=torch.bool)
    if window:
        seen = seen & (distance < window)
    if bounds is None:
        return seen[None, None]
    places = torch.arange(rows * keys, device=q.device, dtype=bounds.dtype)
    ids = torch.searchsorted(bounds, places, right=True).view(rows, keys)
    return (seen & (ids[:, :, None] == ids[:, None, :]))[:, None]
