"""Observers of a proof: what watches a composition's steps, and adds rows of its own.

An add-on brings its part of the proof in a module ``compose/<add-on>/proof.py`` (``parts_of_add_ons``).
"""

import importlib
import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from compose.composition import Composition
from compose.config.addons import ADD_ONS
from compose.ops.tensors import gathered_objects, local_tensor
from compose.ops.torch_versions import fsdp_parameters
from compose.proof.comparison import Comparison

if TYPE_CHECKING:
    from compose.proof.verify import ProofRun

CODES = 1e-6
"""The relative error of what is computed with codes, in float32 whatever the gradient's type is."""
MARGIN = 1.25
"""A loss may be this many times the expected one: rounding is not quite random."""
_SURE = 4.0
"""And so many standard deviations of it more, which matters for few elements."""


def allowed(expected: float, elements: int) -> float:
    """Return the norm that what was lost may have, if so much is expected of so many elements."""
    return expected * (MARGIN + _SURE / max(elements, 1) ** 0.5)


def parts_of_add_ons(function: str) -> list[Callable[..., Any]]:
    """Return the functions of this name in the modules ``proof`` of the add-ons.

    They may have ``observe(subject)``, which returns an Observer or None; ``prove(job, mesh, device)``,
    which returns a Report of a proof of its own or None; ``extra_steps(config)``, the optimizer steps
    that a proof needs more; and ``shortened(config, steps)``, the config for so few steps and notes.
    """
    names = [f"compose.{add_on}.proof" for add_on in ADD_ONS]
    modules = [importlib.import_module(name) for name in names if importlib.util.find_spec(name)]
    return [getattr(module, function) for module in modules if hasattr(module, function)]


@dataclass(frozen=True)
class Subject:
    """One run of a composition, which observers watch."""

    composition: Composition
    model: nn.Module
    comparison: Comparison
    """Takes the rows."""
    run: "ProofRun"
    train_again: Callable[[Callable[[Composition], None]], Composition]
    """Makes the composition again, calls a function with it, and takes the same steps unwatched."""


@dataclass(frozen=True)
class MessageEffects:
    """The content of a step's messages, as whole tensors by name."""

    received: Mapping[str, Tensor] = field(default_factory=dict)
    """The weights that forward and backward used, the same on every rank."""
    missing: Mapping[str, Tensor] = field(default_factory=dict)
    """The parts that this rank's gradients lack."""
    lossy: set[str] = field(default_factory=set)
    """The parameters whose gradients lost something, and so were summed in float32."""


class Observer:
    """Watches the steps of a composition; all ranks call each method."""

    lossy_messages = False
    """Whether messages lose something, so that one process has to take the composition's gradients."""

    def watch(self, step: int) -> AbstractContextManager[None]:
        """Return the context of forward and backward of step ``step``, counted from 0."""
        return nullcontext()

    def after_backward(self, gradients: Mapping[str, Tensor]) -> MessageEffects | None:
        """Look at this rank's whole gradients, if messages are lossy or types are reduced."""

    def compare(self) -> None:
        """Add rows after the last step."""


class MemoryKeys(Observer):
    """Whether the keys that recompute or move activations and weights took part.

    Results are the same whether a unit keeps its activations, computes them again or moves them. So
    hooks watch what runs. If a unit is recomputed, its inner modules run while it does not run itself.
    If it moves what it saves, its own hooks take these tensors, and hooks around them see none.
    """

    def __init__(self, subject: Subject) -> None:
        setup = subject.run.setup
        self.subject, self.options, self.names = subject, setup.options, setup.units
        self.ran: set[str] = set()  # in their forward an inner module ran
        self.reached: set[str] = set()  # their output had a gradient
        self.again: set[str] = set()  # an inner module ran outside of their forward
        self.kept: set[str] = set()  # a tensor for backward stayed where it was

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Watch the units of the model if the options ask for anything that can be seen."""
        asked = self.options.activation_checkpoint
        seen = asked.mode != "none" or asked.offload
        seen &= self.options.compile.mode == "off"  # a compiler would trace the hooks
        # The identity is in the place of a unit that another stage holds.
        modules = {
            n: m
            for n, m in self.subject.composition.model.named_modules()
            if not isinstance(m, nn.Identity)
        }
        held = {name: modules[name] for name in self.names if seen and name in modules}
        owners = Counter(inner for unit in held.values() for inner in unit.modules())
        with ExitStack() as hooks:
            for name, unit in held.items():
                inner = [part for part in unit.modules() if part is not unit and owners[part] == 1]
                for hook in self._hooks(name, unit, inner):
                    hooks.enter_context(hook)
            yield

    def _hooks(self, name: str, unit: nn.Module, inner: Sequence[nn.Module]) -> list[Any]:
        running: list[saved_tensors_hooks] = []

        def pack(tensor: Tensor) -> Tensor:
            self.kept.add(name)
            return tensor

        def enter(*_: Any) -> None:
            running.append(saved_tensors_hooks(pack, lambda tensor: tensor))
            running[-1].__enter__()

        def leave(*given: Any) -> None:
            running.pop().__exit__()
            for tensor in tree_leaves(given[-1]):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: self.reached.add(name))

        def run(*_: Any) -> None:
            (self.ran if running else self.again).add(name)

        ends = unit.register_forward_hook(leave, prepend=True, always_call=True)
        begins = unit.register_forward_pre_hook(enter)
        return [begins, ends, *(module.register_forward_pre_hook(run) for module in inner)]

    def compare(self) -> None:
        """Note a row for each unit that was watched, and the keys that took no part; a collective."""
        comparison, composition = self.subject.comparison, self.subject.composition
        asked, key = self.options.activation_checkpoint, "activation_checkpoint"
        moved = composition.activations is not None and composition.activations.bytes > 0
        result = self.ran & self.reached, self.again, self.kept, moved, _on_host(composition)
        everyone: list[Any] = gathered_objects(result)
        watched, again, kept = (set[str]().union(*(one[i] for one in everyone)) for i in range(3))

        def note(quantity: str, name: str, right: bool) -> None:
            comparison.value(quantity, name, 0.0 if right else math.inf, 0.0)

        if asked.mode != "none" and not watched:
            comparison.notes.append(f"{key}.mode: not watched in compiled units or units without parts")
        elif asked.mode != "none" and not again:
            comparison.unused.append(f"{key}.mode")
        elif asked.mode != "none":
            every = asked.every if asked.mode == "every_k" else 1
            # A budget may choose any units.
            right = again if asked.mode == "budget" else set(self.names[every - 1 :: every])
            for name in (name for name in self.names if name in watched):
                note("runs again", name, (name in again) == (name in right))
        for name in self.names if asked.offload else ():
            note("kept in place", name, name not in kept)
        if asked.offload and not any(one[3] for one in everyone):
            comparison.unused.append(f"{key}.offload")
        if self.options.parallel.offload == "cpu":
            note("on the host", "parallel.offload", all(one[4] for one in everyone))


def _on_host(composition: Composition) -> bool:
    """Return whether FSDP keeps all parameters of this rank in host memory."""
    params = fsdp_parameters(composition.model)
    on_cpu = [local_tensor(p).device.type == "cpu" for _, p in composition.named_parameters()]
    return bool(params) and all(on_cpu) and all(param.offload_to_cpu for param in params)
