"""The proof of the outer loop: islands are compared with one process that is all of them, in float64.

The weights of each island are moved at random, by moves that every rank can draw. So nothing but the
outer loop is compared; that an island trains as one process does is proved elsewhere (verify.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from compose.base.local_tensor import local_tensor
from compose.build import fill_weights, parallelize
from compose.legality.job import Job
from compose.outer.codes import Code
from compose.outer.exchange import Misses, nobody
from compose.outer.loop import DECAY, OuterLoop
from compose.outer.options import Outer
from compose.proof.one_process import EXACT, precision_of
from compose.proof.report import Comparison, Report, tolerance_of
from compose.runtime.islands import current
from compose.runtime.processes import start_timeout
from compose.weights import local_shard, named_generator

ROUNDS = 3
_SIZE = 1e-2  # of a move, the standard deviation
Message = Sequence[tuple[str, Tensor]]
"""The elements of one rank's message of a fragment: names, and places in the flat parameter."""


@dataclass
class OneProcess:
    """All islands in one process: their weights, and what they have in common; flat, by name."""

    options: Outer
    lr: float
    code: Code
    messages: Sequence[Sequence[Message]]
    """Of each fragment, those of the ranks of an island."""
    islands: list[dict[str, Tensor]]
    misses: Misses = nobody

    def __post_init__(self) -> None:
        self.common = {name: value.clone() for name, value in self.islands[0].items()}
        self.momentum = {name: torch.zeros_like(value) for name, value in self.common.items()}
        self.lost: dict[tuple[int, int, int], Tensor] = {}
        self.due: dict[int, tuple[int, float, list[list[Tensor] | None]]] = {}

    def after_step(self, step: int, last: int) -> None:
        """Do what all islands do after a step; of ``last`` steps, the last one ends all exchanges."""
        many = len(self.messages)
        between = self.options.every // many
        for fragment in [f for f, (due, _, _) in self.due.items() if step >= min(due, last)]:
            self._end(fragment)
        if step == last:
            for fragment in range(many):
                self._begin(fragment, step, 0, 0.0)
        elif step % between == 0:
            delay, mix = self.options.delay, self.options.mix
            self._begin((step // between - 1) % many, step, delay, mix)

    def _begin(self, fragment: int, step: int, delay: int, mix: float) -> None:
        """Note what each island sends of a fragment: for each message, the change as it arrives."""
        sent: list[list[Tensor] | None] = []
        for island, weights in enumerate(self.islands):
            arrived = []
            for rank, message in enumerate(self.messages[fragment]):
                parts = [(self.common[name] - weights[name])[places] for name, places in message]
                change = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
                if self.options.dtype == "float32":
                    arrived.append(change)
                    continue
                key = (fragment, island, rank)
                if key in self.lost:
                    change = change + DECAY * self.lost[key]
                arrived.append(self.code.decode(self.code.encode(change), change))
                if self.options.dtype == "top_k":
                    self.lost[key] = change - arrived[-1]
            sent.append(None if self.misses(f"{step}.{fragment}", island) else arrived)
        self.due[fragment] = (step + delay, mix, sent)
        if delay == 0:
            self._end(fragment)

    def _end(self, fragment: int) -> None:
        _, mix, sent = self.due.pop(fragment)
        there = [arrived for arrived in sent if arrived is not None]
        if not there:
            return
        for rank, message in enumerate(self.messages[fragment]):
            at, mean = 0, sum(arrived[rank] for arrived in there) / len(there)
            for name, places in message:
                gradient = mean[at : at + len(places)]  # type: ignore[index]
                at += len(places)
                momentum = self.options.momentum * self.momentum[name][places] + gradient
                self.momentum[name][places] = momentum
                self.common[name][places] -= self.lr * (gradient + self.options.momentum * momentum)
                for weights, arrived in zip(self.islands, sent, strict=True):
                    if arrived is not None:
                        own, common = weights[name][places], self.common[name][places]
                        weights[name][places] = mix * own + (1 - mix) * common


def messages_of(loop: OuterLoop) -> list[list[Message]]:
    """Return the elements of each rank's message of each fragment; a collective of the island."""
    own: list[Message] = []
    for spans in loop.fragments:
        found = []
        for span in spans:
            parameter = span.held.copies[0]
            places = torch.arange(parameter.numel()).view(parameter.shape)
            begin, end = span.own
            found.append((span.held.name, local_shard(places, parameter).flatten()[begin:end]))
        own.append(found)
    everyone: list[list[Message]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    return [[of_rank[fragment] for of_rank in everyone] for fragment in range(len(own))]


def prove_outer_loop(
    job: Job, mesh: DeviceMesh, device: torch.device, misses: Misses = nobody
) -> Report:
    """Compare the outer loop of a job with one process; all ranks of all islands call it.

    Args:
        job: A job with islands, for the ranks of ``mesh``, which are one island.
        mesh: The mesh of ``compose.init_mesh``.
        device: This rank's device.
        misses: Tells which islands miss an exchange.

    Returns:
        The outer weights and the weights of this island after some rounds, each beside one process's.
    """
    islands, config = current(), job.config
    composition = parallelize(job, mesh, device, replace(job.options, precision=precision_of(EXACT)))
    fill_weights(composition, job, device)
    options, layers = config.outer, job.resolved.checkpoint
    timeout = start_timeout(config.comm)
    loop = OuterLoop(options, composition, layers, islands, timeout)
    loop.exchange.misses = misses
    loop.start()
    beginning: dict[str, Tensor] = {}
    for name, parameter in job.model.named_parameters():
        if parameter.requires_grad:  # what is frozen is not exchanged
            beginning[name] = torch.zeros(parameter.shape, dtype=torch.float64)
    for held in loop.held:
        part = local_shard(beginning[held.name], held.copies[0])
        part.copy_(held.local)
    _joined(beginning)
    one = OneProcess(
        options,
        loop.lr,
        loop.code,
        messages_of(loop),
        [{n: w.flatten().clone() for n, w in beginning.items()} for _ in range(islands.count)],
        misses,
    )
    last = ROUNDS * options.every
    between = options.every // len(loop.fragments)
    at = [0, options.delay // 2, options.delay]  # moves elsewhere would show nothing else
    with torch.no_grad():
        for step in range(1, last + 1):
            if step % between in {(place + after) % between for place in at for after in (0, 1)}:
                for island, weights in enumerate(one.islands):
                    moves = _moves(beginning, step, island)
                    for name, move in moves.items():
                        weights[name] += move.flatten()
                    for held in loop.held if island == islands.index else ():
                        for parameter in held.copies:
                            move = local_shard(moves[held.name], parameter)
                            local_tensor(parameter).detach().add_(move.to(device))
            loop.after_step(step, last)
            one.after_step(step, last)
    loop.close()
    comparison = Comparison(torch.device(mesh.device_type), tolerance_of(EXACT))
    own = one.islands[islands.index]
    for name in beginning:
        held = next((held for held in loop.held if held.name == name), None)
        for quantity, found, right in (
            ("outer weight", held and loop.weights[name], one.common),
            ("island's weight", held and held.local, own),
        ):
            error = None
            if held and found is not None:
                expected = local_shard(right[name].view_as(beginning[name]), held.copies[0])
                apart = (found.cpu().double() - expected).norm() / right[name].norm()
                error = float(apart)
            comparison.value(quantity, name, error, comparison.tolerance.update)
    return comparison.report((), comparison.tolerance.loss)


def _moves(like: Mapping[str, Tensor], step: int, island: int) -> dict[str, Tensor]:
    """Draw a move of all weights of an island, the same on every rank."""
    return {
        name: torch.empty_like(value).normal_(
            0.0, _SIZE, generator=named_generator(step * 1000 + island, name)
        )
        for name, value in like.items()
    }


def _joined(weights: Mapping[str, Tensor]) -> None:
    """Complete whole weights, of which each rank of the island has written its part."""
    everyone: list[Mapping[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, dict(weights))
    for name, value in weights.items():
        for other in everyone:
            value.copy_(torch.where(value == 0, other[name], value))
