"""Pipelines without a flush: PipeDream and PipeDream-2BW, whose gradients are of older weights.

A stage takes its optimizer's step as soon as it has the gradient, and no stage waits for the others'
steps. So a rank's step holds forwards of later batches. With d stages, counted from 0, the step t from
0, the weights w_s(t) of stage s before it, and f_t the loss of its batch:

    PipeDream      w_s(t+1) = w_s(t) - lr grad_s f_t(w_0(t-d+1), ..., w_{d-2}(t-1), w_{d-1}(t))
    PipeDream2BW   w(t+1) = w(t) - lr grad f_t(w(t-1))

Before the first step the weights are w(0). The first is Narayanan et al. 2019 (SOSP, section 3.3) with
weight stashing and without vertical sync; a step has one micro-batch. The second is Narayanan et al.
2021 (arXiv:2006.09503, section 3.1); a step has d micro-batches or more.

The order of both is 1F1B over all micro-batches of the run: stage s runs d-1-s forwards first, and then
one forward and one backward in turn. A batch keeps the weights that were the newest when the stage took
it up, until its backward has ended: the optimizer writes into a new copy. So stage s has d-s versions,
the newest among them, and with 2BW two.

- The end of a run drops the forwards of later batches. Its ranks ran them while they waited.
- A checkpoint holds the versions that batches in flight use (:meth:`AsynchronousRunner.stashed`). A
  resumed run computes these batches' forwards again. On another mesh it begins with an empty pipeline.
- Validation uses the newest weights, and its messages go between those of two steps.
- Loss and norm of a step are sums over stages. All ranks read them ``late`` steps later, and at
  checkpoints. So no norm can clip gradients, and a step that was not finite cannot be skipped.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compose.errors import ConfigError
from compose.parallel.mesh import begin_messages, wait_for
from compose.parallel.output_projection import StepLoss
from compose.pipeline.pipeline_parallel import PendingTensor, PipelineRunner, check_whole
from compose.pipeline.stage import plain_stream

Version = dict[str, nn.Parameter]
"""The weights of a stage at one step, by name. Backward leaves gradients in them."""


@dataclass
class _MicroBatch:
    """A micro-batch of a batch that the stage has taken up."""

    given: Any
    """The first argument of forward; after the first stage it comes from the stage before."""
    inputs: Mapping[str, Any]
    targets: Tensor
    loss: StepLoss
    version: Version
    output: Tensor | None = None
    """The loss, on the last stage."""


class AsynchronousRunner(PipelineRunner):
    """Runs this rank's stage for PipeDream and PipeDream-2BW; ranks have one stage each."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        one = self.schedule.name == "PipeDream"
        self.behind = self.pp - 1 - self.rank
        """The forwards that run before the first backward."""
        self.ahead = self.behind if one else 1
        """The batches that the stage has taken up between two steps."""
        # In the time of so many steps every stage has ended a step that the last one has ended.
        self.late = self.pp if one else 1
        self.waiting: deque[_MicroBatch] = deque()
        self.flight: deque[_MicroBatch] = deque()
        self.versions: deque[Version] = deque()
        """The versions of the batches that are taken up, in order."""
        self.restored: deque[Version] = deque()
        self.newest: Version | None = None
        self.incoming: PendingTensor | None = None
        self.form = torch.empty(0)

    def needed(self) -> range:
        """Return which batches the next step takes up, counted from its own."""
        return range(len(self.versions), self.ahead + 1)

    @property
    def own(self) -> Version:
        """The stage's parameters by name, which the optimizer has."""
        return dict(self.stages[0].module.named_parameters())

    def run(self, batch: Mapping[str, Any], micro_batch: int, loss: StepLoss) -> Tensor:
        """Take up a batch; run a step once there are enough of them, and return this stage's loss."""
        samples, last = len(batch["targets"]), self.rank == self.pp - 1
        check_whole(samples, micro_batch)
        self.attributes.bring()
        inputs = dict(batch)
        targets, first = inputs.pop("targets"), self._first(inputs)
        self.form = self.stream(
            first[:micro_batch], {name: value[:micro_batch] for name, value in inputs.items()}
        )
        version = self._next_version()
        self.versions.append(version)
        for start in range(0, samples, micro_batch):
            cut = slice(start, start + micro_batch)
            parts = {name: value[cut] for name, value in inputs.items()}
            self.waiting.append(_MicroBatch(first[cut], parts, targets[cut], loss, version))
        total = torch.zeros((), device=targets.device)
        if len(self.versions) <= self.ahead:
            while self.waiting and len(self.flight) < self.behind:
                sent = self._forward()
                wait_for(begin_messages(self.group, [(sent, self.rank + 1)]))
            return total
        for _ in range(samples // micro_batch):
            self._forward()
            value = self._backward()
            total = total + value if last else total
        self._end_step()
        return total

    def _next_version(self) -> Version:
        """Return the weights of the next batch: the newest, but for those of a checkpoint's batches."""
        if self.restored:
            return self.restored.popleft()
        if self.newest is None:
            self.newest = {n: nn.Parameter(p.data, p.requires_grad) for n, p in self.own.items()}
        return self.newest

    def _forward(self) -> Tensor:
        """Run the next forward, and return what the next stage gets."""
        unit = self.waiting.popleft()
        if self.rank:
            message = self.incoming or self._exchange(None)
            unit.given, self.incoming = message.wait().requires_grad_(), None
        unit.loss.expect(unit.targets)
        with self._running(unit.version):
            output = self.stages[0].module(unit.given, **unit.inputs)
            last = self.rank == self.pp - 1
            unit.output = unit.loss(output, unit.targets) if last else plain_stream(output)
        self.flight.append(unit)
        return unit.output.detach().contiguous()

    def _backward(self) -> Tensor:
        """Run the oldest backward after a forward, and return its micro-batch's output.

        The rank sends the result of the forward and receives the gradient at once, and so do the
        messages to the stage before. So two ranks list the messages between them in one order, and none
        is left that a validation between two steps would take for its own.
        """
        gradient = None
        newest = self.flight[-1].output
        if self.rank < self.pp - 1:
            assert newest is not None
            sent = newest.detach().contiguous()
            gradient = torch.empty_like(sent)
            next_rank = self.rank + 1
            wait_for(begin_messages(self.group, [(sent, next_rank)], [(gradient, next_rank)]))
        unit = self.flight.popleft()
        assert unit.output is not None
        with self._running(unit.version):  # backward may run parts of the forward again
            torch.autograd.backward(unit.output, gradient)
        if self.rank:
            self.incoming = self._exchange(unit.given.grad.contiguous())
        return unit.output.detach()

    def _exchange(self, gradient: Tensor | None) -> PendingTensor:
        """Begin to send a gradient to the stage before, if there is one, and to receive from it."""
        device = next(iter(self.own.values())).device
        buffer, before = torch.empty_like(self.form, device=device, requires_grad=False), self.rank - 1
        sent = [] if gradient is None else [(gradient, before)]
        return PendingTensor(buffer, begin_messages(self.group, sent, [(buffer, before)]), gradient)

    @contextmanager
    def _running(self, version: Version) -> Iterator[None]:
        """Let the stage have the parameters of a version."""
        module, own = self.stages[0].module, self.own
        try:
            _put(module, version)
            yield
        finally:
            _put(module, own)

    @torch.no_grad()
    def _end_step(self) -> None:
        """Give the gradients to the stage's own parameters, summed over ranks, for the optimizer.

        If batches in flight use the newest weights, the optimizer gets a copy of them.
        """
        version, own = self.versions.popleft(), self.own
        sums = self.data[self.stages[0].index].sums
        assert sums is not None
        sums.begin(last=True)
        for name, parameter in version.items():
            own[name].grad, parameter.grad = parameter.grad, None
        sums.finish()
        if any(used is self.newest for used in self.versions):
            for parameter in own.values():
                parameter.data = parameter.data.clone()
        self.newest = None

    def stashed(self) -> dict[str, Tensor]:
        """Return the weights that the batches taken up use, by "place.name"; between two steps."""
        return {
            f"{place}.{name}": parameter.detach()
            for place, version in enumerate(self.versions)
            for name, parameter in version.items()
        }

    def restore(self, stashed: Mapping[str, Tensor]) -> None:
        """Go on with what :meth:`stashed` has returned; nothing is an empty pipeline.

        Raises ConfigError if it cannot have returned that.
        """
        own = self.own
        places = range(self.ahead if stashed else 0)
        shapes = {f"{i}.{name}": (p.shape, p.dtype) for i in places for name, p in own.items()}
        given = {name: (tensor.shape, tensor.dtype) for name, tensor in stashed.items()}
        if wrong := sorted(name for name, _ in shapes.items() ^ given.items()):
            raise ConfigError(f"{wrong[0]} is no version of this stage's weights")
        for i in places:
            versions = {n: stashed[f"{i}.{n}"].to(p.device) for n, p in own.items()}
            self.restored.append(
                {n: nn.Parameter(v, own[n].requires_grad) for n, v in versions.items()}
            )


def _put(module: nn.Module, parameters: Version) -> None:
    for name, parameter in parameters.items():
        where, _, last = name.rpartition(".")
        setattr(module.get_submodule(where), last, parameter)
