"""Pipeline parallel: stages on different ranks, and a schedule that runs micro-batches through them.

The runtime of ``torch.distributed.pipelining`` executes a schedule's table (schedules.py). This file
adds what that runtime lacks: ZeRO stages that keep their meaning (data_parallel.py), a parameter shared
by several stages, and stages that need no shapes from the user.

For each micro-batch and cut, one activation goes forward and its gradient backward: 2 B L D elements,
1/tp of it with sequence parallel, and nothing else. The price is idle time
(``python -m compose schedule``).
"""

import inspect
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import _Action, _ComputationType

from compose.errors import ConfigError
from compose.ops.batch import Sample
from compose.ops.tensors import gathered_objects, local_tensor, on_first_rank
from compose.parallel.data_parallel import DataParallel
from compose.parallel.mesh import begin_messages, wait_for
from compose.parallel.output_projection import StepLoss
from compose.pipeline.schedules import ASYNCHRONOUS, Schedule, build_table, forwards, placement
from compose.pipeline.split import Attributes, Stage, Tied, balanced, split
from compose.pipeline.stage import PlainStage, Runtime, RuntimeStage, check_detached, plain_stream
from compose.pipeline.stand_ins import CutTrial, outputs_of_layers, try_first_stage

if TYPE_CHECKING:
    from compose.plan import Pipeline


def apply_pipeline_parallel(
    model: nn.Module, pipeline: "Pipeline", mesh: DeviceMesh, schedule: Schedule, seq_len: Sample
) -> "PipelineRunner":
    """Cut ``model`` in place, so that it keeps what this rank runs, on the 1-D ``mesh`` of pp.

    Without ``schedule.layers`` the stages are balanced by FLOPs, which are counted for ``seq_len``
    tokens of a sample, or for what makes its inputs.
    """
    ranks = placement(schedule.name, mesh.size(), schedule.virtual_stages)
    layers = schedule.layers or balanced(model, pipeline, len(ranks), seq_len)
    mine = [stage for stage, rank in enumerate(ranks) if rank == mesh.get_local_rank()]
    stages, ties, trial = split(model, pipeline, layers, mine)
    attributes = Attributes(model, [*(stage.module for stage in stages), trial.shell])
    model.forward = _not_whole
    model.train = partial(_train, weakref.ref(model), [stage.module for stage in stages])
    kind = PipelineRunner
    if schedule.name in ASYNCHRONOUS:
        from compose.pipeline.pipedream import AsynchronousRunner as kind
    return kind(stages, ties, ranks, schedule, mesh, trial, attributes)


def _train(
    model: Callable[[], nn.Module | None], stages: Sequence[nn.Module], mode: bool = True
) -> nn.Module:
    """Set the mode of a model and of its stages, which have the modules around the layers twice."""
    whole = cast(nn.Module, model())
    for module in (whole, *stages):
        type(module).train(module, mode)
    return whole


def _not_whole(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("this rank holds some stages of the model: run it by compose.forward_backward")


class PipelineRunner:
    """Runs this rank's stages, in step with those of the other ranks of the pp axis.

    ``placement`` is the pp rank of every stage. ``ties`` are the parameters that stages share, the same
    list on every rank. ``trial`` is what tries the cut, and ``attributes`` are those of the model.
    """

    loss: StepLoss
    """The loss of the current step."""
    late = 0
    """Steps after which all ranks can know the numbers of a step; 0: at its end."""

    def __init__(
        self,
        stages: Sequence[Stage],
        ties: Sequence[Tied],
        placement: Sequence[int],
        schedule: Schedule,
        mesh: DeviceMesh,
        trial: CutTrial,
        attributes: Attributes,
    ) -> None:
        self.stages, self.ties = stages, ties
        self.trial, self.attributes = trial, attributes
        self.placement, self.schedule = placement, schedule
        self.data: dict[int, DataParallel] = {}
        """The work of data parallel around forward and backward, by the numbers of the stages."""
        self.device_type, self.is_new = mesh.device_type, True
        self.group, self.pp, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        self.first_argument = next(iter(inspect.signature(stages[0].module.forward).parameters))
        # The runtime for the last batch's shapes; it holds buffers for every micro-batch.
        self.runtime: tuple[Any, Runtime] | None = None
        # The tensor that goes from stage to stage, and the samples of its micro-batch, by shapes.
        self.streams: dict[Any, tuple[Tensor, int]] = {}

    @property
    def aliases(self) -> dict[str, str]:
        """Return names of the whole model by names in a stage, where they differ."""
        return {name: tied.name for tied in self.ties for _, name in tied.holders if name != tied.name}

    def check_ties(self) -> None:
        """Raise ConfigError if tensor parallel places a tied parameter otherwise in another stage."""
        for tied in self.ties:
            names, own = dict(tied.holders), self._held(tied).items()
            mine = [(names[stage], getattr(p, "placements", "not at all")) for stage, p in own]
            held = [one for rank in gathered_objects(mine, self.group) for one in rank]
            for name, placements in held[1:]:
                first, other = held[0]
                if placements != other:
                    raise ConfigError(
                        f"plan.tensor: {first} and {name} are one tied parameter but are placed"
                        f" differently: {other} and {placements}"
                    )

    def is_last(self, stage: Stage) -> bool:
        """Tell whether ``stage`` ends the model."""
        return stage.index == len(self.placement) - 1

    def needed(self) -> range:
        """Return which batches the next step needs, counted from its own."""
        return range(1)

    def forward_order(self, micro_batches: int) -> dict[str, list[int]]:
        """Return, for every module of this rank's stages, its micro-batches in the order they run."""
        per_rank = len(self.placement) // self.pp
        table = build_table(self.schedule.name, self.pp, per_rank, micro_batches)
        return {
            name: [a.micro_batch for a in table[self.rank] if (a.kind, a.stage) == ("F", stage.index)]
            for stage in self.stages
            for name, _ in stage.module.named_modules()
        }

    def run(self, batch: Mapping[str, Any], micro_batch: int, loss: StepLoss) -> Tensor:
        """Run forward and backward of all micro-batches."""
        samples = len(batch["targets"])
        check_whole(samples, micro_batch)
        self.attributes.bring()
        inputs = dict(batch)
        targets, first = inputs.pop("targets"), self._first(inputs)
        key = (samples // micro_batch, *_forms(first, inputs))
        if self.runtime is None or self.runtime[0] != key:
            self.runtime = key, self._runtime(first, inputs, micro_batch)
        self.loss = loss
        earlier = self._take_tied_gradients()
        losses: list[Tensor] = []
        arguments = (first,) if self.placement[0] == self.rank else ()
        try:
            self.runtime[1].step(
                *arguments,
                target=targets,
                losses=losses,
                return_outputs=False,
                **cast(Any, {**inputs, "targets": targets}),
            )
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # PyTorch's own error holds the whole schedule
        if self.is_new and not targets.is_meta and type(targets) is Tensor:
            tied = {parameter for tied in self.ties for parameter in self._held(tied).values()}
            check_detached(self.runtime[1].stages, tied, self.group)
        self.is_new = False
        self._sum_tied_gradients(earlier)
        total = torch.zeros((), device=targets.device)
        return total + sum(x.detach() for x in losses)

    def _first(self, inputs: dict[str, Any]) -> Any:
        """Return the first argument, and take it from the inputs of stages that do not need it."""
        if (name := self.first_argument) not in inputs:
            raise ConfigError(
                f"batch: has no {name}, the first argument of the model's forward; give it under that"
                " name"
            )
        return inputs[name] if self.trial.cut.whole_forward else inputs.pop(name)

    @torch.no_grad()
    def forward(
        self,
        parts: Sequence[Mapping[str, Any]],
        each: Callable[[Tensor, Mapping[str, Any]], None],
        before: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Run only the forward of every micro-batch.

        ``each`` is called with the last stage's output and the part, on the rank of the last stage, and
        ``before`` with the part before that stage runs. All parts have the same samples.
        """
        self.attributes.bring()
        inputs = [{k: v for k, v in part.items() if k != "targets"} for part in parts]
        firsts = [self._first(part) for part in inputs]
        check_whole(sum(map(len, firsts)), len(firsts[0]))
        stream = self.stream(firsts[0], inputs[0])
        modules = {stage.index: stage.module for stage in self.stages}
        # Messages that have come to a stage of this rank or are on their way, and those that leave.
        inbox: dict[tuple[int, int], PendingTensor] = {}
        sent: list[PendingTensor] = []
        # All ranks follow one order, so the two ranks of a message begin it at the same place, and no
        # two ranks wait for each other.
        for stage, _, number in forwards(self.placement, len(parts)):
            rank = self.placement[stage]
            after = self.placement[stage + 1] if stage + 1 < len(self.placement) else None
            if rank == self.rank:
                if after is None:
                    before(parts[number])
                stream_in = inbox.pop((stage, number)).wait() if stage else firsts[number]
                output = modules[stage](stream_in, **inputs[number])
                if after is None:
                    each(output, parts[number])
                elif after == rank:
                    inbox[stage + 1, number] = PendingTensor(plain_stream(output))
                else:
                    stream_out = plain_stream(output).contiguous()
                    sent.append(
                        PendingTensor(stream_out, begin_messages(self.group, [(stream_out, after)]))
                    )
            elif after == self.rank:
                buffer = torch.empty_like(stream, device=firsts[0].device)
                works = begin_messages(self.group, (), [(buffer, rank)])
                inbox[stage + 1, number] = PendingTensor(buffer, works)
        for message in sent:
            message.wait()
        for data in self.data.values():
            data.finish_backward(last=True)

    def _runtime(self, first: Tensor, inputs: Mapping[str, Any], micro_batch: int) -> Runtime:
        # After an error PyTorch logs the whole schedule, which hides the error.
        logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
        count = len(first) // micro_batch
        name, per_rank = self.schedule.name, len(self.placement) // self.pp
        table = build_table(name, self.pp, per_rank, count)
        sample = first[:micro_batch].to("meta")
        stream = self.stream(first[:micro_batch], {k: v[:micro_batch] for k, v in inputs.items()})
        last = len(self.placement) - 1
        stages: list[Any] = [
            RuntimeStage(
                PlainStage(stage.module, lambda: self.loss, last=stage.index == last),
                stage.index,
                last + 1,
                first.device,
                input_args=sample if stage.index == 0 else stream,
                output_args=stream,  # not used for the last stage
                group=self.group,
            )
            for stage in self.stages
        ]
        for stage in stages:
            stage.data = self.data[stage.stage_index]
        # The last stage has computed the loss itself.
        runtime = Runtime(stages, count, loss_fn=lambda loss, targets: loss, scale_grads=False)
        runtime.micro_batch, runtime.stages = micro_batch, stages
        runtime._prepare_schedule_with_comms(
            {
                rank: [_Action(a.stage, _ComputationType(a.kind), a.micro_batch) for a in row]
                for rank, row in enumerate(table)
            }
        )
        return runtime

    def stream(self, first: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Return what one micro-batch sends between stages, on meta; the first stage tries it once.

        A trial gathers weights, so the ranks of data parallel must try together. They may have unequal
        numbers of samples. So another number of them alone is no reason for a trial.
        """
        key = tuple((shape[1:], dtype) for shape, dtype in _forms(first, inputs))
        stream, samples = self.streams.get(key, (None, 0))
        if stream is None or (samples != len(first) and samples != len(stream)):
            stream, samples = self._try_stream(first, inputs), len(first)
            self.streams[key] = stream, samples
        if samples == len(first):
            return stream
        return torch.empty_like(stream[:1].expand(len(first), *stream.shape[1:]), requires_grad=True)

    def _try_stream(self, first: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        def tried() -> tuple[torch.Size, torch.dtype, Any]:
            module = self.stages[0].module
            with torch.no_grad():
                output = try_first_stage(module, self.trial, first, inputs)
            return output.shape, output.dtype, outputs_of_layers(module)

        shape, dtype, outputs = on_first_rank(tried, group=self.group, first=self.placement[0])
        for stage in self.stages:
            outputs_of_layers(stage.module, outputs)
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    def _take_tied_gradients(self) -> dict[str, Tensor]:
        """Take the gradients that tied parameters already have, by name; they are sums already."""
        earlier = {}
        for tied in self.ties:
            for parameter in self._held(tied).values():
                if parameter.grad is not None:
                    earlier[tied.name] = _local_gradient(parameter)
                    parameter.grad = None
        return earlier

    def _sum_tied_gradients(self, earlier: Mapping[str, Tensor]) -> None:
        """Give every copy of a tied parameter the sum of all gradients, bitwise the same.

        The sum includes the ``earlier`` gradients.
        """
        for tied in self.ties:
            ranks = sorted({self.placement[stage] for stage, _ in tied.holders})
            held = self._held(tied)
            if not any(parameter.requires_grad for parameter in held.values()):
                continue
            # Messages are sent from the device, but gradients may be in host memory.
            gradients = {s: _local_gradient(p).to(self.device_type) for s, p in held.items()}
            like = next(iter(gradients.values()))
            sent: list[tuple[Tensor, int]] = []
            received: list[tuple[Tensor, int]] = []
            for stage, _ in tied.holders:
                source = self.placement[stage]
                if source == self.rank:
                    sent += [(gradients[stage], other) for other in ranks if other != self.rank]
                else:
                    gradients[stage] = torch.empty_like(like)
                    received.append((gradients[stage], source))
            wait_for(begin_messages(self.group, sent, received))
            # Every rank adds in the order of stages, since floating-point sums depend on the order.
            total = torch.stack([gradients[stage] for stage, _ in tied.holders]).sum(0)
            if tied.name in earlier:
                total += earlier[tied.name].to(total)
            for parameter in held.values():
                _local_gradient(parameter).copy_(total)

    def _held(self, tied: Tied) -> dict[int, nn.Parameter]:
        """Return this rank's copies of a tied parameter, by stage."""
        own = {stage.index: stage.module for stage in self.stages}
        return {s: own[s].get_parameter(name) for s, name in tied.holders if s in own}


@dataclass(frozen=True)
class PendingTensor:
    """A tensor that is on its way to or from another rank, or has arrived."""

    tensor: Tensor
    works: Sequence[dist.Work] = ()
    sent: Tensor | None = None
    """Another tensor, which is sent meanwhile and must stay until then."""

    def wait(self) -> Tensor:
        """Wait for the message, and return its tensor."""
        wait_for(self.works)
        return self.tensor


def _forms(first: Tensor, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what compiled shapes and buffers depend on."""
    return tuple((x.shape, getattr(x, "dtype", None)) for x in (first, *inputs.values()))


def check_whole(samples: int, micro_batch: int) -> None:
    """Raise ConfigError unless ``samples`` are whole micro-batches."""
    if samples % micro_batch:
        raise ConfigError(
            f"micro_batch: {samples} samples are no whole number of micro-batches of {micro_batch},"
            " which a pipeline needs"
        )


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_tensor(parameter.grad)
