"""The table [checkpoint]."""

from dataclasses import dataclass
from typing import Literal

from compose.errors import LocalPath, NonNegative, Positive


@dataclass(frozen=True)
class Checkpoint:
    """The table [checkpoint]: when a run is saved, and what it begins with."""

    interval: NonNegative = 0
    """Steps between checkpoints in run.dir, one at the end besides; 0 is off."""
    resume: Literal["auto", "none"] = "auto"
    """auto: go on from the newest checkpoint in run.dir that is whole; none: run.dir must be new."""
    load_hf: LocalPath = ""
    """Hugging Face folder (config.json, safetensors) with the weights to begin with; empty: drawn."""
    async_: bool = True
    """Write while training goes on; the step waits for a copy of the state only."""
    keep_last: Positive = 2
    """Newest checkpoints to keep."""
    keep_every: NonNegative = 0
    """Keep those of every so many steps too; 0 is none."""
    fail_after: NonNegative = 0
    """Stop the run after so many failed saves; 0 trains on."""
