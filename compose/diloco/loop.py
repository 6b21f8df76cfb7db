"""The outer loop of DiLoCo: workers train alone, exchange what they have learned, take an outer step.

With theta the outer weights, which are the same on all workers, and w the weights of one worker, an
exchange of a fragment begins after a step t and ends after step t + delay:

    change  = theta - w(t), as each worker sends it         (the outer gradient)
    g       = the mean of the changes of all workers that take part
    m      <- momentum m + g
    theta  <- theta - lr (g + momentum m)
    w      <- theta + mix (w(t + delay) - theta)

With momentum this is DiLoCo (Douillard et al. 2023, arXiv:2311.08105); with lr 1 and momentum 0 it is
the mean of the weights, LocalSGD (Stich 2018, arXiv:1805.09767). Fragments, delay and mix are those of
Streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512). The state of the inner optimizer stays with
its worker.
"""

import contextlib
from collections.abc import Collection, Iterator
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from compose.checkpoint.local_shards import LocalShard, local_shard_of
from compose.composition import Composition
from compose.compression.gather import Forms, check
from compose.diloco import Outer, best_lr
from compose.diloco.fragments import ParameterSpan, fragments_of
from compose.diloco.messages import (
    CHECK,
    Code,
    WorkerExchange,
    averaged_buffers,
    checksum,
    code_of,
    ended,
    outer_dtype,
)
from compose.ops.tensors import gathered, local_region, local_tensor
from compose.optim.rounding import random_bits, store
from compose.parallel.data_parallel import cuts_stacks
from compose.train.hooks import Hook
from compose.train.processes import TrainingError
from compose.train.workers import Worker

DECAY = 0.95
"""The part of what top_k has not sent that is added to what it sends next (arXiv:2508.15706)."""
_LOOK = 0.5  # seconds between two looks at whether workers are to stop


@dataclass
class Pending:
    """An exchange that has begun."""

    fragment: int
    due: int  # the step after which it ends
    mix: float  # the part of the worker's own weights that stays
    messages: "Future[list[Tensor | None]]"


class OuterLoop(Hook):
    """The outer weights of a model on this rank, and the exchanges that change them."""

    def __init__(
        self,
        options: Outer,
        composition: Composition,
        layers: list[str],
        worker: Worker,
        timeout: timedelta,
        last: int,
    ) -> None:
        """Prepare, before the weights are filled; after step ``last`` all fragments are exchanged."""
        self.options, self.composition, self.worker, self.last = options, composition, worker, last
        self.lr = options.lr or best_lr(worker.count)
        self.fragments = fragments_of(composition, layers, options.fragments)
        self.between = options.every // len(self.fragments)
        self.exchange = WorkerExchange(worker, dist.get_rank(), timeout, options.grace)
        self.weights: dict[str, Tensor] = {}
        self.momentum: dict[str, Tensor] = {}
        self.residuals: dict[int, Tensor] = {}  # with top_k, the residual of each fragment
        self.pending: Pending | None = None
        self.seen: dict[str, float] = {}
        self.started = False
        parameters = {span.parameter.name: span.parameter for spans in self.fragments for span in spans}
        self.parameters = list(parameters.values())
        self.buffers = averaged_buffers(composition.model)
        for parameter in self.parameters:
            local = parameter.local
            wide = torch.promote_types(local.dtype, torch.float32)
            device = "cpu" if options.offload else local.device
            self.weights[parameter.name] = torch.zeros(local.shape, dtype=wide, device=device)
            if options.momentum:
                self.momentum[parameter.name] = torch.zeros_like(self.weights[parameter.name])
        self.dtype = outer_dtype(composition)
        self.code: Code = code_of(options, self.dtype)
        # Earlier versions cut parameters and stacks in other places: with a mark theirs is not read.
        marks = {"rows": bool(options.fragments), "stacks": cuts_stacks(composition.model)}
        same = asdict(replace(options, offload=True))  # where they are kept changes no value
        self.fingerprint = (same, *(mark for mark, has in marks.items() if has))

    def start(self, done: int) -> None:
        """Let the outer weights be the model's, the same on all workers, unless they were loaded."""
        if not self.started:
            self._copy_weights(())

    @torch.no_grad()
    def _copy_weights(self, but: Collection[str]) -> None:
        for parameter in self.parameters:
            if f"outer.{parameter.name}.weight" not in but:
                self.weights[parameter.name].copy_(parameter.local)
        self.started = True

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        """Begin and end the exchanges that are due, also if the step was skipped; a collective."""
        with record_function("compose::outer"):
            many, last = len(self.fragments), self.last
            if self.pending and step >= min(self.pending.due, last):
                self._end(step)
            if step == last:
                for fragment in range(many):
                    self._begin(fragment, step, 0, 0.0, waits=True)
            elif step % self.between == 0:
                fragment = (step // self.between - 1) % many
                self._begin(fragment, step, self.options.delay, self.options.mix)

    def _begin(self, fragment: int, step: int, delay: int, mix: float, waits: bool = False) -> None:
        theta, own = self._own(fragment, self.weights), self._own(fragment, None)
        codes, change = own, theta - own
        if self.options.dtype != "float32":
            codes = change
        if self.options.dtype == "top_k":
            residual = self.residuals.get(fragment)
            codes = change if residual is None else change + DECAY * residual.to(change.device)
        body = self.code.encode(codes)
        if self.options.dtype == "top_k":
            self.residuals[fragment] = codes - self.code.decode(body, codes)
        averaged = self._averaged(fragment).float().view(torch.uint8)
        message = torch.cat([checksum(theta).cpu(), body.cpu(), averaged.cpu()])
        name = f"{step}.{fragment}"
        self.pending = Pending(fragment, step + delay, mix, self.exchange.begin(name, message, waits))
        self.seen["change_norm"] = float(change.norm())
        if delay == 0:
            self._end(step)

    def _received(self, pending: Pending, step: int) -> list[Tensor | None]:
        """Wait for the messages; a worker that is to stop must not wait for this one meanwhile."""
        while self.worker.count > 1 and not pending.messages.done():
            wait([pending.messages], _LOOK)
            if dist.get_rank() == 0:
                self.worker.note_stop(step)
        return pending.messages.result()

    def _end(self, step: int) -> None:
        assert self.pending is not None
        pending, messages = self.pending, self._received(self.pending, step)
        fragment, self.pending = pending.fragment, None
        arrived = [message for message in messages if message is not None]
        took_part = messages[self.worker.index] is not None
        self.seen["islands"] = len(arrived)
        if not arrived:
            return
        if any(not torch.equal(message[:CHECK], arrived[0][:CHECK]) for message in arrived):
            with contextlib.suppress(RuntimeError):  # another worker may have ended already
                self.exchange.close()  # all have to read this worker's message, to say the same
            raise TrainingError(
                "the outer weights of islands differ: silent corruption; go on from the last checkpoint"
            )
        theta = self._own(fragment, self.weights)
        averaged = self._averaged(fragment)
        end = len(arrived[0]) - 4 * averaged.numel()
        # In the same order and in float64 everywhere, so that the result is bitwise the same.
        total, sums = torch.zeros_like(theta, dtype=torch.float64), averaged.double() * 0
        for message in arrived:
            total += self.code.decode(message[CHECK:end].to(theta.device), theta).double()
            values = message[end:].clone().view(torch.float32)
            sums += values.to(sums.device).double()
        mean = total / len(arrived)
        if self.options.dtype != "float32":
            mean = theta.double() - mean
        if took_part:
            self._set_averaged(sums / len(arrived))
        for span, values in self._spread(fragment, mean.to(theta.dtype)):
            self._step(span, values, pending.mix if took_part else None, step)

    def _step(self, span: ParameterSpan, mean: Tensor, mix: float | None, step: int) -> None:
        """Take the outer step of a span; with ``mix`` None this worker keeps its own weights."""
        theta = self.weights[span.parameter.name]
        wide, mean = span.take(theta).double(), mean.to(theta.device).double()
        # To a rate of 1 lerp returns the mean itself, bit for bit.
        new = torch.lerp(wide, mean, self.lr)
        if self.momentum:
            kept = self.momentum[span.parameter.name]
            momentum = self.options.momentum * span.take(kept).double() + (wide - mean)
            span.put(kept, momentum)
            new -= self.lr * self.options.momentum * span.take(kept).double()
        span.put(theta, new)
        if mix is None:
            return
        for parameter in span.parameter.copies:
            local = local_tensor(parameter).detach()
            common = span.take(theta).to(local.device)
            new = torch.lerp(common, span.take(local).to(common.dtype), mix)
            if local.dtype == torch.bfloat16:  # to the nearest small changes would be lost
                place = local_region(parameter) or (slice(0, 1),), parameter.shape or (1,)
                bits = random_bits(0, f"{span.parameter.name}/{step}/outer", *place, local)
                common, new = new, torch.empty_like(new, dtype=local.dtype)
                store(new, common, span.take(bits))
            span.put(local, new)

    def _own(self, fragment: int, of: dict[str, Tensor] | None) -> Tensor:
        """Return the vector that this rank sends of a fragment, from ``of`` or from the model."""
        parts = [torch.zeros(0, dtype=self.dtype)]
        for span in self.fragments[fragment]:
            begin, end = span.own
            local = of[span.parameter.name] if of is not None else span.parameter.local
            parts.append(span.take(local)[begin:end].to(self.dtype))
        return torch.cat([part.to(self._home) for part in parts])

    @property
    def _home(self) -> torch.device:
        """The device of the outer weights, and so of all residuals, whose norms are stacked."""
        return next((weight.device for weight in self.weights.values()), torch.device("cpu"))

    def _spread(self, fragment: int, own: Tensor) -> Iterator[tuple[ParameterSpan, Tensor]]:
        """Yield the values of each span whole, from what each of its ranks has; a collective."""
        together: dict[dist.ProcessGroup | None, list[tuple[ParameterSpan, Tensor]]] = {}
        at = 0
        for span in self.fragments[fragment]:
            size = span.own[1] - span.own[0]
            together.setdefault(span.parameter.group, []).append((span, own[at : at + size]))
            at += size
        for group, parts in together.items():
            if group is None:
                yield from parts
                continue
            # The last ranks of a span have less of it.
            padded = [nn.functional.pad(part, (0, span.each - len(part))) for span, part in parts]
            mine = torch.cat(padded).to(self.composition.mesh.device_type)
            everyone, at = gathered(mine, group), 0
            for span, _ in parts:
                pieces = [one[at : at + span.each] for one in everyone]
                at += span.each
                yield span, torch.cat(pieces)[: span.size]

    def _averaged(self, fragment: int) -> Tensor:
        """Return the model's buffers that training changes, whose mean the last fragment brings."""
        if fragment != len(self.fragments) - 1 or not self.buffers:
            return torch.zeros(0)
        return torch.cat([buffer.detach().flatten() for buffer in self.buffers])

    def _set_averaged(self, values: Tensor) -> None:
        if len(values):
            parts = values.split([buffer.numel() for buffer in self.buffers])
            for buffer, part in zip(self.buffers, parts, strict=True):
                buffer.copy_(part.view_as(buffer))

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last step.

        ``bytes`` that this rank has sent since the last call; of the last exchange the number of
        ``islands`` that took part and ``change_norm``, the norm of this rank's part of the change; and
        with top_k ``lost_norm``, the norm of residuals.
        """
        metrics: dict[str, float] = {"bytes": self.exchange.sent, **self.seen}
        self.exchange.sent = 0
        if self.residuals:
            norms = torch.stack([residual.norm() for residual in self.residuals.values()])
            metrics["lost_norm"] = float(norms.norm())
        return {"outer": metrics}

    def tensors(self) -> dict[str, LocalShard]:
        """Return this rank's part of the outer weights and their momentum, by name."""
        tensors: dict[str, LocalShard] = {}
        for parameter in self.parameters:
            shard, name = local_shard_of(parameter.copies[0]), f"outer.{parameter.name}"
            tensors[f"{name}.weight"] = replace(shard, local=self.weights[parameter.name])
            if self.momentum:
                tensors[f"{name}.momentum"] = replace(shard, local=self.momentum[parameter.name])
        return tensors

    def before_save(self, step: int) -> None:
        """Wait for the messages that :meth:`state` has, as long as no worker is to stop."""
        if self.pending:
            self._received(self.pending, step)

    @property
    def keeps(self) -> bool:
        """Whether there is more between two steps than the outer weights and their momentum."""
        return self.options.delay > 0 or self.options.dtype == "top_k"

    def state(self) -> dict[str, Tensor] | None:
        """Return residuals and messages on their way, which it waits for."""
        if not self.keeps:
            return None
        state = {f"outer.lost.{fragment}": value for fragment, value in self.residuals.items()}
        if self.pending:
            key = f"outer.pending.{self.pending.fragment}.{self.pending.due}"
            for worker, message in enumerate(self.pending.messages.result()):
                if message is not None:
                    state[f"{key}.{worker}"] = message
        return state

    def _forms(self, step: int) -> Forms:
        """Return the forms of what :meth:`state` may return after a step, without the prefix."""
        results: Forms = {}
        for fragment, spans in enumerate(self.fragments):
            size = sum(end - begin for begin, end in (span.own for span in spans))
            if self.options.dtype == "top_k":
                results[f"lost.{fragment}"] = (size,), self.dtype
            message = CHECK + self.code.size(size) + 4 * self._averaged(fragment).numel()
            for due in range(step + 1, step + self.options.delay + 1):
                for worker in range(self.worker.count):
                    results[f"pending.{fragment}.{due}.{worker}"] = (message,), torch.uint8
        return results

    def load(self, state: dict[str, Tensor], read: Collection[str], step: int) -> None:
        """Go on with this rank's ``state``; outer weights that were not read begin as the model's."""
        self._copy_weights(read)
        names = [name for name in state if name.startswith("outer.")] if self.keeps else []
        own = {name.removeprefix("outer."): state.pop(name) for name in names}
        check(own, self._forms(step))
        begun = [name for name in sorted(own) if name.startswith("pending.")]
        same = tuple(f"{name.rpartition('.')[0]}." for name in begun[:1])
        check({name: own[name] for name in begun if not name.startswith(same)}, {})
        messages: list[Tensor | None] = [None] * self.worker.count
        for name, value in own.items():
            kind, *numbers = name.split(".")
            first, *others = map(int, numbers)
            if kind == "lost":
                self.residuals[first] = value.to(self._home)
                continue
            due, worker = others
            messages[worker] = value
            self.pending = Pending(first, due, self.options.mix, ended(messages))

    def close(self, failed: bool) -> None:
        """Wait until other workers have read all messages; after an error some may be gone."""
        if not failed:
            self.exchange.close()
