"""The outer loop: islands train alone, exchange what they have learned, and take an outer step.

With theta the outer weights, which are the same on all islands, and w the weights of one island, an
exchange of a fragment begins after a step t and ends after step t + delay:

    change  = theta - w(t), as each island sends it         (the outer gradient)
    g       = the mean of the changes of all islands that take part
    m      <- momentum m + g
    theta  <- theta - lr (g + momentum m)
    w      <- theta + mix (w(t + delay) - theta)

With momentum this is DiLoCo (Douillard et al. 2023, arXiv:2311.08105); with lr 1 and momentum 0 it is
the mean of the weights, LocalSGD (Stich 2018, arXiv:1805.09767). Fragments, delay and mix are those of
Streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512). The state of the inner optimizer stays with
its island.
"""

import contextlib
from collections.abc import Collection, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compose.composition import Composition
from compose.compression.compressor import check
from compose.compression.gather import Forms
from compose.diloco.codes import Code, code_of
from compose.diloco.exchange import Exchange
from compose.diloco.fragments import Held, Span, fragments_of
from compose.diloco.message import CHECK, averaged_buffers, checksum, outer_dtype
from compose.diloco.options import Outer, best_lr
from compose.ops.tensors import local_tensor
from compose.parallel.islands import Islands
from compose.parallel.processes import TrainingError

DECAY = 0.95
"""The part of what top_k has not sent that is added to what it sends next (arXiv:2508.15706)."""
_LOOK = 0.5  # seconds between two looks at whether islands are to stop


@dataclass
class Pending:
    """An exchange that has begun."""

    fragment: int
    due: int
    """The step after which it ends."""
    mix: float
    """How much of the island's own weights stays."""
    messages: "Future[list[Tensor | None]]"


class OuterLoop:
    """The outer weights of a model on this rank, and the exchanges that change them.

    All ranks of all islands make one, and call its methods after the same steps.
    """

    def __init__(
        self,
        options: Outer,
        composition: Composition,
        layers: list[str],
        islands: Islands,
        timeout: timedelta,
    ) -> None:
        """Prepare; :meth:`start` must follow when the weights are there."""
        self.options, self.composition, self.islands = options, composition, islands
        self.lr = options.lr or best_lr(islands.count)
        self.fragments = fragments_of(composition, layers, options.fragments)
        self.between = options.every // len(self.fragments)
        self.exchange = Exchange(islands, dist.get_rank(), timeout, options.grace)
        self.weights: dict[str, Tensor] = {}
        self.momentum: dict[str, Tensor] = {}
        self.lost: dict[int, Tensor] = {}
        """With top_k, what was not sent of each fragment."""
        self.pending: Pending | None = None
        self.seen: dict[str, float] = {}
        self.started = False
        held = {span.held.name: span.held for spans in self.fragments for span in spans}
        self.held: list[Held] = list(held.values())
        self.buffers = averaged_buffers(composition.model)
        for held in self.held:
            wide = torch.promote_types(held.local.dtype, torch.float32)
            device = "cpu" if options.offload else held.local.device
            self.weights[held.name] = torch.zeros(held.local.shape, dtype=wide, device=device)
            if options.momentum:
                self.momentum[held.name] = torch.zeros_like(self.weights[held.name])
        self.dtype = outer_dtype(composition)
        self.code: Code = code_of(options, self.dtype)

    @torch.no_grad()
    def start(self, filled: Collection[str] = ()) -> None:
        """Let the outer weights that are not ``filled`` be the model's, the same on all islands."""
        for held in self.held:
            if f"outer.{held.name}.weight" not in filled:
                self.weights[held.name].copy_(held.local)
        self.started = True

    @torch.no_grad()
    def after_step(self, step: int, last: int) -> None:
        """Begin and end the exchanges that are due; a collective of the island.

        Args:
            step: Steps taken, with this one. A step that was skipped counts too.
            last: Steps of the whole run. After the last one each fragment is exchanged once more, so
                that all islands end with the same weights.
        """
        many = len(self.fragments)
        if self.pending and step >= min(self.pending.due, last):
            self._end(step)
        if step == last:
            for fragment in range(many):
                self._begin(fragment, step, 0, 0.0, waits=True)
        elif step % self.between == 0:
            fragment = (step // self.between - 1) % many
            self._begin(fragment, step, self.options.delay, self.options.mix)

    @property
    def keeps(self) -> bool:
        """Whether there is more between two steps than the outer weights and their momentum."""
        return self.options.delay > 0 or self.options.dtype == "top_k"

    def _begin(self, fragment: int, step: int, delay: int, mix: float, waits: bool = False) -> None:
        theta, own = self._own(fragment, self.weights), self._own(fragment, None)
        codes, change = own, theta - own
        if self.options.dtype != "float32":
            codes = change
        if self.options.dtype == "top_k":
            codes = change + DECAY * self.lost[fragment] if fragment in self.lost else change
        body = self.code.encode(codes)
        if self.options.dtype == "top_k":
            self.lost[fragment] = codes - self.code.decode(body, codes)
        averaged = self._averaged(fragment).float().view(torch.uint8)
        message = torch.cat([checksum(theta).cpu(), body.cpu(), averaged.cpu()])
        name = f"{step}.{fragment}"
        self.pending = Pending(fragment, step + delay, mix, self.exchange.begin(name, message, waits))
        self.seen["change_norm"] = float(change.norm())
        if delay == 0:
            self._end(step)

    def _received(self, pending: Pending, step: int) -> list[Tensor | None]:
        """Wait for the messages; an island that is to stop must not wait for this one meanwhile."""
        while self.islands.count > 1 and not pending.messages.done():
            wait([pending.messages], _LOOK)
            if dist.get_rank() == 0:
                self.islands.note_stop(step)
        return pending.messages.result()

    def _end(self, step: int) -> None:
        assert self.pending is not None
        pending, messages = self.pending, self._received(self.pending, step)
        fragment, self.pending = pending.fragment, None
        there = [message for message in messages if message is not None]
        took_part = messages[self.islands.index] is not None
        self.seen["islands"] = len(there)
        if not there:
            return
        if any(not torch.equal(message[:CHECK], there[0][:CHECK]) for message in there):
            with contextlib.suppress(RuntimeError):  # another island may have ended already
                self.exchange.close()  # all have to read this island's message, to say the same
            raise TrainingError(
                "the outer weights of islands differ: silent corruption; go on from the last checkpoint"
            )
        theta = self._own(fragment, self.weights)
        averaged = self._averaged(fragment)
        end = len(there[0]) - 4 * averaged.numel()
        # In the same order and in float64 everywhere, so that the result is bitwise the same.
        total, sums = torch.zeros_like(theta, dtype=torch.float64), averaged.double() * 0
        for message in there:
            total += self.code.decode(message[CHECK:end].to(theta.device), theta).double()
            values = message[end:].clone().view(torch.float32)
            sums += values.to(sums.device).double()
        mean = total / len(there)
        if self.options.dtype != "float32":
            mean = theta.double() - mean
        if took_part:
            self._set_averaged(fragment, sums / len(there))
        for span, values in self._spread(fragment, mean.to(theta.dtype)):
            self._step(span, values, pending.mix if took_part else None)

    def _step(self, span: Span, mean: Tensor, mix: float | None) -> None:
        """Take the outer step of a span to the mean of the islands' weights.

        ``mix`` is None if this island has no part in the exchange, and keeps its own weights.
        """
        theta = self.weights[span.held.name]
        wide, mean = span.take(theta).double(), mean.to(theta.device).double()
        # To a rate of 1 lerp returns the mean itself, bit for bit.
        new = torch.lerp(wide, mean, self.lr)
        if self.momentum:
            kept = self.momentum[span.held.name]
            momentum = self.options.momentum * span.take(kept).double() + (wide - mean)
            span.put(kept, momentum)
            new -= self.lr * self.options.momentum * span.take(kept).double()
        span.put(theta, new)
        if mix is None:
            return
        for parameter in span.held.copies:
            local = local_tensor(parameter).detach()
            common = span.take(theta).to(local.device)
            span.put(local, torch.lerp(common, span.take(local).to(common.dtype), mix))

    def _own(self, fragment: int, of: dict[str, Tensor] | None) -> Tensor:
        """Return what this rank sends of a fragment, as one vector: of ``of``, or of the model."""
        found = [torch.zeros(0, dtype=self.dtype)]
        for span in self.fragments[fragment]:
            begin, end = span.own
            local = of[span.held.name] if of is not None else span.held.local
            found.append(span.take(local)[begin:end].to(self.dtype))
        device = "cpu" if self.options.offload else found[-1].device
        return torch.cat([part.to(device) for part in found])

    def _spread(self, fragment: int, own: Tensor) -> Iterator[tuple[Span, Tensor]]:
        """Yield the values of each span whole, from what each of its ranks has; a collective."""
        together: dict[dist.ProcessGroup | None, list[tuple[Span, Tensor]]] = {}
        at = 0
        for span in self.fragments[fragment]:
            size = span.own[1] - span.own[0]
            together.setdefault(span.held.group, []).append((span, own[at : at + size]))
            at += size
        for group, parts in together.items():
            if group is None:
                yield from parts
                continue
            # The last ranks of a span have less of it.
            padded = [nn.functional.pad(part, (0, span.each - len(part))) for span, part in parts]
            mine = torch.cat(padded).to(self.composition.mesh.device_type)
            everyone = [torch.empty_like(mine) for _ in range(group.size())]
            dist.all_gather(everyone, mine, group=group)
            at = 0
            for span, _ in parts:
                pieces = [one[at : at + span.each] for one in everyone]
                at += span.each
                yield span, torch.cat(pieces)[: span.size]

    def _averaged(self, fragment: int) -> Tensor:
        """Return the model's buffers that training changes, whose mean the last fragment brings."""
        if fragment != len(self.fragments) - 1 or not self.buffers:
            return torch.zeros(0)
        return torch.cat([buffer.detach().flatten() for buffer in self.buffers])

    def _set_averaged(self, fragment: int, values: Tensor) -> None:
        at = 0
        for buffer in self.buffers if len(values) else ():
            part = values[at : at + buffer.numel()]
            buffer.copy_(part.view_as(buffer))
            at += buffer.numel()

    def metrics(self) -> dict[str, float]:
        """Return, for metrics.jsonl, what the last step has sent and found.

        ``bytes`` that this rank has sent since the last call; of the last exchange the number of
        ``islands`` that took part and ``change_norm``, the norm of this rank's part of the change; and
        with top_k ``lost_norm``, the norm of what was not sent yet.
        """
        sent, self.exchange.sent = self.exchange.sent, 0
        lost = torch.stack([one.norm() for one in self.lost.values()]) if self.lost else None
        return {
            "bytes": sent,
            **self.seen,
            **({} if lost is None else {"lost_norm": float(lost.norm())}),
        }

    def tensors(self) -> dict[str, tuple[nn.Parameter, Tensor]]:
        """Return the outer state by name: each parameter, and this rank's part of its state."""
        found: dict[str, tuple[nn.Parameter, Tensor]] = {}
        for held in self.held:
            found[f"outer.{held.name}.weight"] = held.copies[0], self.weights[held.name]
            if self.momentum:
                found[f"outer.{held.name}.momentum"] = held.copies[0], self.momentum[held.name]
        return found

    def state(self) -> dict[str, Tensor]:
        """Return what else the next step depends on, of this rank alone; waits for messages."""
        found = {f"lost.{fragment}": value for fragment, value in self.lost.items()}
        if self.pending:
            key = f"pending.{self.pending.fragment}.{self.pending.due}"
            for island, message in enumerate(self.pending.messages.result()):
                if message is not None:
                    found[f"{key}.{island}"] = message
        return found

    def _forms(self, step: int) -> Forms:
        """Return the forms of what :meth:`state` may return after a step."""
        found: Forms = {}
        for fragment, spans in enumerate(self.fragments):
            size = sum(end - begin for begin, end in (span.own for span in spans))
            if self.options.dtype == "top_k":
                found[f"lost.{fragment}"] = (size,), self.dtype
            message = CHECK + self.code.size(size) + 4 * self._averaged(fragment).numel()
            for due in range(step + 1, step + self.options.delay + 1):
                for island in range(self.islands.count):
                    found[f"pending.{fragment}.{due}.{island}"] = (message,), torch.uint8
        return found

    def restore(self, state: dict[str, Tensor], step: int) -> None:
        """Take what :meth:`state` returned after a step. Raises ConfigError for anything else."""
        check(state, self._forms(step))
        begun = [name for name in sorted(state) if name.startswith("pending.")]
        same = tuple(f"{name.rpartition('.')[0]}." for name in begun[:1])
        check({name: state[name] for name in begun if not name.startswith(same)}, {})
        messages: list[Tensor | None] = [None] * self.islands.count
        for name, value in state.items():
            kind, *numbers = name.split(".")
            first, *others = map(int, numbers)
            if kind == "lost":
                self.lost[first] = value
                continue
            due, island = others
            messages[island] = value
            known: Future[list[Tensor | None]] = Future()
            known.set_result(messages)
            self.pending = Pending(first, due, self.options.mix, known)

    def close(self) -> None:
        """End the exchanges."""
        self.exchange.close()
