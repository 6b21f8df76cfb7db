"""The table [comm]: timeouts, prefetching, and what is sent in fewer bits."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal

from pydantic import Field

from compose.errors import NonNegative, Positive, ReadWith

Density = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[int, Field(ge=1, lt=2**31)]  # more overflow in nanoseconds
_OTHERS = "is read with other messages; set {}"


@dataclass(frozen=True)
class Comm:
    """The table [comm]: timeouts, prefetching, checks and compression of the communication."""

    timeout: Seconds = 600
    """Seconds after which a collective that a rank has not joined is an error."""
    start_timeout: Seconds = 1800
    """Seconds in place of timeout until the first step has ended, which compiles; at least timeout."""
    prefetch: NonNegative = 0
    """FSDP units (layers) that are gathered ahead of the running one, in forward and backward; 0: one
    in backward, and with experts under ep or tp also one in forward."""
    check_every: NonNegative = 0
    """Steps between comparisons of tensors that must be bitwise equal on several ranks; 0 is never."""
    check_state: bool = False
    """Compare the bytes of weights and optimizer state, before each update and save, with those that
    the last update left, and gradients with those that were clipped."""
    check_messages: bool = False
    """Compare checksums of the messages that each rank received in a step with those of the sent
    ones."""
    weights: Literal["off", "int8", "int4_diff"] = "off"
    """How data parallel sends weights: quantized to int8, or their differences from the last sent
    weights in int4."""
    gradients: Literal["off", "bfloat16", "int8", "int4", "powersgd", "top_k"] = "off"
    """How data parallel sends gradients: plain, quantized, low-rank or sparse; sums are in float32."""
    activations: Literal["off", "int8", "float8"] = "off"
    """How tp sends activations and their gradients, and ep the rows of experts."""
    block: Positive = 256
    """Elements of int8, int4 and float8 that share a scale; a power of two."""
    near: Annotated[
        Positive, ReadWith(_OTHERS, gradients=("bfloat16", "int8", "int4"), weights=("int4_diff",))
    ] = 1
    """Number of neighbouring data-parallel ranks with fast (intra-node) links: gradients are summed
    among them in 8 bits or more, then between such groups in the chosen type."""
    error_feedback: bool = True
    """With int4, powersgd and top_k: add the error of a message to the next one."""
    rank: Annotated[Positive, ReadWith(_OTHERS, gradients=("powersgd",))] = 4
    """With powersgd: the rank of what is sent; transformers need 16 or more."""
    density: Annotated[Density, ReadWith(_OTHERS, gradients=("top_k",))] = 0.01
    """With top_k: the fraction of the elements that is sent, those of largest absolute value."""
    start_step: Annotated[
        NonNegative, ReadWith("is for compressed gradients; set {}", gradients=())
    ] = 0
    """Number of first steps in which gradients are sent plain, without compression."""
    measure_every: NonNegative = 0
    """Steps between measurements of how close sent gradients are to true ones, at the cost of sending
    them plain too; 0 is never."""

    @property
    def first_step_timeout(self) -> timedelta:
        """How long a collective waits until the first step has ended."""
        return timedelta(seconds=max(self.start_timeout, self.timeout))

    @property
    def compresses(self) -> bool:
        """Whether data parallel sends weights or gradients in a code."""
        return self.weights != "off" or self.gradients != "off"

    @property
    def codes(self) -> bool:
        """Whether anything is sent in a code."""
        return self.compresses or self.activations != "off"
