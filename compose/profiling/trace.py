"""A profiler's trace, with every operator and allocation in its place and with a label.

It is read from the file for Chrome's viewer, whose format is documented. PyTorch's own objects with the
same content are private, and change.
"""

import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.profiler import record_function

MATMUL, ATTENTION, DATA = "matmul", "attention", "data"
OPTIMIZER, COMMUNICATION = "optimizer", "communication"
# An operator within others gets the label with the highest number: a product within attention is
# attention, Muon's products are the optimizer, and a wait within it is communication.
_ORDER = {"": 0, MATMUL: 1, ATTENTION: 2, DATA: 3, OPTIMIZER: 3, COMMUNICATION: 4}

_NAMES = {
    # The wrapper of a message's result copies parts of it to their places; that is no message.
    COMMUNICATION: r"c10d::|_c10d_functional(?!::_wrap)|_dtensor::|fsdp::|record_param_comms|gloo:"
    r"|nccl:|compose::wait|FSDP::(all_gather|post_backward_reduce|post_backward_rs_wait)",
    OPTIMIZER: r"compose::optimizer|Optimizer\.(step|zero_grad)#",
    DATA: r"compose::data",
    ATTENTION: r"compose::\w*attention_"
    r"|aten::\w*(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention)",
    MATMUL: r"aten::(mm|addmm|bmm|baddbmm|mv|addmv|dot|mkldnn_linear|_addmm_activation|_int_mm"
    r"|(_scaled)?(_grouped)?_mm(_v2)?)$|mkldnn::_linear_pointwise",
}
# The names of kernels whose launching operator is not known, as in a compiled graph.
_KERNELS = {
    COMMUNICATION: r"nccl",
    ATTENTION: r"flash|fmha|attention|attn",
    MATMUL: r"gemm|cutlass|nvjet|cublas|xmma|triton_tem\w*_mm",
}
_BY_NAME = [(label, re.compile(pattern)) for label, pattern in _NAMES.items()]
_BY_KERNEL = [(label, re.compile(pattern, re.I)) for label, pattern in _KERNELS.items()]
_STEP = "ProfilerStep#"  # PyTorch's own tools know steps by this name
_BACKWARD = "autograd::engine::evaluate_function"
# The ranges of FSDP that change types or devices and do not touch its buffers.
_NO_BUFFERS = re.compile(r"FSDP::(cast_|inputs_|post_backward_(accumulate|reshard))")
_REDUCES = "FSDP::post_backward_reduce"
NOTED = "compose::noted"


def step_span(number: int) -> record_function:
    """Return a context that marks the range of one step."""
    return record_function(f"{_STEP}{number}")


@dataclass(slots=True, eq=False)
class Range:
    """An operator or a named range; times are in microseconds."""

    name: str
    start: float
    end: float
    thread: Any
    operator: bool
    parent: "Range | None"
    own: float  # time in which no other range inside it ran
    label: str
    backward: bool  # inside autograd's backward
    buffers: bool  # inside FSDP's work on its buffers
    reduces: bool  # inside FSDP's reduction of gradients
    makes: int  # the number of autograd's node that it may have made, or -1
    runs: int  # the number of autograd's node whose backward it is, or -1


@dataclass(slots=True, eq=False)
class Kernel:
    """Work of a GPU; times are in microseconds."""

    start: float
    end: float
    label: str


@dataclass(slots=True, eq=False)
class Change:
    """A change of memory."""

    time: float
    address: int
    bytes: int  # allocated, or freed if below 0
    within: Range | None  # the innermost range


class Trace:
    """The content of a trace's file, parsed.

    ``ranges`` has those of all threads, each after the range that contains it. ``changes`` are those of
    the device's memory, in order. ``start`` and ``end`` are those of all ``steps`` together. ``thread``
    is the one that trains.
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
        """Fill ``ranges`` and ``changes``; return the ranges by the numbers that kernels refer to."""
        results: dict[int, Range] = {}
        chosen = [e for e in events if e.get("cat") in ("cpu_op", "user_annotation") or _is_memory(e)]
        # The longest of events that begin together is first, and memory events are inside it.
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
                    continue  # a message on its way, which ends elsewhere: no thread waits for it
                one = _range(event, inner)
                self.ranges.append(one)
                within.append(one)
                results[event.get("args", {}).get("External id", -1)] = one
        return results

    def _change(self, event: Mapping[str, Any], within: Range | None) -> None:
        about = event["args"]
        if about["Device Type"] == int(self.gpu):  # c10's numbers: the CPU is 0, CUDA is 1
            self.changes.append(Change(event["ts"], about["Addr"], about["Bytes"], within))

    def _label_backward(self) -> None:
        """Label the backward of attention from plain products, by the operators that made its nodes."""
        made: dict[int, Range] = {}
        # An operator that makes no node has the number of the next one that does. So the last operator
        # with a number has made the node.
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
def _label(name: str) -> str:
    return next((label for label, pattern in _BY_NAME if pattern.match(name)), "")


def _kernel(event: Mapping[str, Any], by_operator: Mapping[int, Range]) -> Kernel:
    name = event["name"]
    launched_by = by_operator.get(event.get("args", {}).get("External id", -2))
    label = launched_by.label if launched_by else ""
    if not label or _BY_KERNEL[0][1].search(name):
        label = next((known for known, pattern in _BY_KERNEL if pattern.search(name)), label)
    return Kernel(event["ts"], event["ts"] + event["dur"], label)


def _last(one: str, other: str) -> str:
    return one if _ORDER[one] >= _ORDER[other] else other
