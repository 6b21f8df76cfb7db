"""The options of attention, and the checks of what it is given."""

from dataclasses import dataclass

from torch import Tensor

from compose.errors import ConfigError
from compose.ops.documents import Documents


@dataclass(frozen=True)
class AttentionOptions:
    """Who attends to whom, and how scores are made."""

    causal: bool = True
    """Whether a query sees only the keys up to its own."""
    window: int | None = None
    """Keys that a query sees, the last of them its own; None is all. It needs ``causal``."""
    scale: float | None = None
    """Scores are products times this; None is the root of 1 / K."""
    softcap: float = 0.0
    """Unless it is 0, a score s becomes softcap tanh(s / softcap)."""

    def given(self, q: Tensor) -> tuple[bool, int, float, float]:
        """Return them as the operator takes them: causal, window (0 is all), scale and softcap."""
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        return self.causal, self.window or 0, scale, self.softcap


def check(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: AttentionOptions) -> None:
    """Raise ConfigError, in one line, if attention cannot be computed."""
    heads, groups = q.shape[2], k.shape[2]
    check_window(options.window)
    if options.window is not None and not options.causal:
        raise ConfigError("attention: a window needs causal = True")
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        kinds = ", ".join(str(x.dtype).removeprefix("torch.") for x in (q, k, v))
        raise ConfigError(f"attention: q, k and v are {kinds}; give them one floating-point type")
    if q.shape[-1] != k.shape[-1]:
        raise ConfigError(
            f"attention: queries are {q.shape[-1]} wide and keys {k.shape[-1]}; they should be alike"
        )
    if heads % groups or v.shape[2] != groups:
        raise ConfigError(
            f"attention: {heads} query heads cannot share {groups} heads of keys and {v.shape[2]} of"
            " values"
        )
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise ConfigError(
            f"attention: sinks {tuple(sinks.shape)} should be ({heads},), one for each query head"
        )
    if options.causal and q.shape[1] != k.shape[1]:
        raise ConfigError(
            f"attention: {q.shape[1]} queries and {k.shape[1]} keys are not one sequence; causal"
            " attention needs as many"
        )


def check_window(window: int | None, name: str = "attention: window") -> None:
    """Raise ConfigError if a window holds not even the query's own key."""
    if window is not None and window < 1:
        raise ConfigError(f"{name} {window} should be at least 1, or None for all")


def check_documents(documents: Documents | None, rows: int, length: int) -> None:
    """Raise ConfigError if documents are those of another batch."""
    if documents is not None and documents.shape != (rows, length):
        raise ConfigError(
            f"attention: documents of {' x '.join(map(str, documents.shape))} tokens, and keys of"
            f" {rows} x {length}"
        )
