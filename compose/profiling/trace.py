"""A profiler's trace, with every operator and allocation in its place and under a label.

What is read is the file for Chrome's viewer, whose format is documented; PyTorch's own objects of the
same content are private, and change.
"""

import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.profiler import record_function

Label = str
MATMUL, ATTENTION, DATA, OPTIMIZER, COMMUNICATION = (
    "matmul",
    "attention",
    "data",
    "optimizer",
    "communication",
)
# An operator within others has the label that comes last here: a product within attention is attention,
# Muon's products are the optimizer, and a wait within it is communication.
_ORDER = {"": 0, MATMUL: 1, ATTENTION: 2, DATA: 3, OPTIMIZER: 3, COMMUNICATION: 4}

_NAMES = {
    COMMUNICATION: r"c10d::|_c10d_functional|_dtensor::|fsdp::|record_param_comms|gloo:|nccl:"
    r"|compose::wait|FSDP::(all_gather|post_backward_reduce|post_backward_rs_wait)",
    OPTIMIZER: r"compose::optimizer|Optimizer\.(step|zero_grad)#",
    DATA: r"compose::data",
    ATTENTION: r"aten::\w*(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention)",
    MATMUL: r"aten::(mm|addmm|bmm|baddbmm|mv|addmv|dot|mkldnn_linear|_addmm_activation|_int_mm"
    r"|(_scaled)?(_grouped)?_mm(_v2)?)$|mkldnn::_linear_pointwise",
}
# Kernels of which it is not known what launched them, as those of a compiled graph.
_KERNELS = {
    COMMUNICATION: r"nccl",
    ATTENTION: r"flash|fmha|attention|attn",
    MATMUL: r"gemm|cutlass|nvjet|cublas|xmma|triton_tem\w*_mm",
}
_BY_NAME = [(label, re.compile(pattern)) for label, pattern in _NAMES.items()]
_BY_KERNEL = [(label, re.compile(pattern, re.I)) for label, pattern in _KERNELS.items()]
_STEP = "ProfilerStep#"  # PyTorch's own tools know steps by this name
_BACKWARD = "autograd::engine::evaluate_function"
# Of FSDP's ranges, those that change types or devices, not places.
_NO_BUFFERS = re.compile(r"FSDP::(cast_|inputs_|post_backward_accumulate)")
_REDUCES = "FSDP::post_backward_reduce"
NOTED = "compose::noted"


def span(name: str) -> record_function:
    """A range of this name in a trace, if one is made; ``data`` and ``optimizer`` have labels."""
    return record_function(f"compose::{name}")


def step_span(number: int) -> record_function:
    """The range of one step."""
    return record_function(f"{_STEP}{number}")


@dataclass(slots=True, eq=False)
class Range:
    """An operator or a named range; times in microseconds.

    own: time in which no other range within it went on. backward: within autograd's backward. buffers:
    within what FSDP does to its buffers; reduces: within its reduction of gradients. makes: number of
    the node of autograd that this may have made; runs: of the node whose backward this is; or -1.
    """

    name: str
    start: float
    end: float
    thread: Any
    operator: bool
    parent: "Range | None"
    own: float
    label: Label
    backward: bool
    buffers: bool
    reduces: bool
    makes: int
    runs: int


@dataclass(slots=True, eq=False)
class Kernel:
    """Work of a GPU; times in microseconds."""

    start: float
    end: float
    label: Label


@dataclass(slots=True, eq=False)
class Change:
    """bytes: allocated at ``address``, or freed if below 0. within: the innermost range."""

    time: float
    address: int
    bytes: int
    within: Range | None


class Trace:
    """The content of a trace's file. ``gpu``: training is on one; else on the CPU.

    ranges: of all threads, each after the one that it is in. kernels: of the GPU. changes: of the
    device's memory, in order. steps: their numbers. start, end: of the steps, together. thread: that
    trains. Raises IndexError where there is no range of a step.
    """

    def __init__(self, content: Mapping[str, Any], gpu: bool = False) -> None:
        events: list[dict[str, Any]] = content["traceEvents"]
        self.ranges: list[Range] = []
        self.changes: list[Change] = []
        self.gpu = gpu
        launched = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        by_operator = self._nest(events)
        self._label_backward()
        self.changes.sort(key=lambda change: change.time)
        self.kernels = [_kernel(event, by_operator) for event in launched]
        steps = [r for r in self.ranges if r.name.startswith(_STEP)]
        self.steps = [int(r.name.removeprefix(_STEP)) for r in steps]
        self.thread = steps[0].thread
        self.start, self.end = steps[0].start, max(r.end for r in steps)

    def _nest(self, events: Iterable[dict[str, Any]]) -> dict[int, Range]:
        """Fill ``ranges`` and ``changes``; the ranges by the number that kernels know them by."""
        found: dict[int, Range] = {}
        chosen = [e for e in events if e.get("cat") in ("cpu_op", "user_annotation") or _is_memory(e)]
        # What begins together: the longer one first, and memory within it.
        chosen.sort(key=lambda e: (str(e["tid"]), e["ts"], -e.get("dur", -1)))
        for _, group in itertools.groupby(chosen, key=lambda e: str(e["tid"])):
            within: list[Range] = []
            for event in group:
                start = event["ts"]
                while within and within[-1].end <= start:
                    within.pop()
                inner = within[-1] if within else None
                if _is_memory(event):
                    self._change(event, inner)
                    continue
                if inner and start + event["dur"] > inner.end + 1:
                    continue  # ends elsewhere: a message on its way, that nobody waits for
                one = _range(event, inner)
                self.ranges.append(one)
                within.append(one)
                found[event.get("args", {}).get("External id", -1)] = one
        return found

    def _change(self, event: Mapping[str, Any], within: Range | None) -> None:
        about = event["args"]
        if about["Device Type"] == int(self.gpu):  # c10's numbers: the CPU is 0, CUDA is 1
            self.changes.append(Change(event["ts"], about["Addr"], about["Bytes"], within))

    def _label_backward(self) -> None:
        """Attention out of plain products has a backward of plain products: known by what was made."""
        made: dict[int, Range] = {}
        # An operator that makes no node has the number of the next one that does: the last has made it.
        for one in self.ranges:
            if one.makes >= 0 and (one.makes not in made or made[one.makes].start <= one.start):
                made[one.makes] = one
        for one in self.ranges:
            if one.runs in made and made[one.runs].label == ATTENTION:
                one.label = _last(one.label, ATTENTION)
            if one.parent:
                one.label = _last(one.label, one.parent.label)


def _is_memory(event: Mapping[str, Any]) -> bool:
    return event.get("name") == "[memory]"


def _range(event: Mapping[str, Any], parent: Range | None) -> Range:
    name, start, length = event["name"], event["ts"], event["dur"]
    node, thread = (event.get("args", {}).get(key, -1) for key in ("Sequence number", "Fwd thread id"))
    label, backward = _label(name), name.startswith(_BACKWARD)
    buffers, reduces = name.startswith("FSDP::"), name.startswith(_REDUCES)
    if parent:
        parent.own -= length
        label, backward = _last(label, parent.label), backward or parent.backward
        buffers, reduces = buffers or parent.buffers, reduces or parent.reduces
    return Range(
        name,
        start,
        start + length,
        event["tid"],
        event["cat"] == "cpu_op",
        parent,
        length,
        label,
        backward,
        buffers and not _NO_BUFFERS.match(name),
        reduces,
        node if thread == 0 else -1,
        node if thread > 0 else -1,
    )


@functools.cache
def _label(name: str) -> Label:
    return next((label for label, pattern in _BY_NAME if pattern.match(name)), "")


def _kernel(event: Mapping[str, Any], by_operator: Mapping[int, Range]) -> Kernel:
    name = event["name"]
    launched_by = by_operator.get(event.get("args", {}).get("External id", -2))
    label = launched_by.label if launched_by else ""
    if not label or _BY_KERNEL[0][1].search(name):
        label = next((known for known, pattern in _BY_KERNEL if pattern.search(name)), label)
    return Kernel(event["ts"], event["ts"] + event["dur"], label)


def _last(one: Label, other: Label) -> Label:
    return one if _ORDER[one] >= _ORDER[other] else other
