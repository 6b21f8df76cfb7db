"""The profile of a run's time and memory: the table [profile], its rules, and its hook."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from compose.config.setup import Rules, all_keys_read
from compose.errors import ConfigError, NonNegative, ReadWith

if TYPE_CHECKING:
    from compose.config.job import Job

_WITH_STEPS = ReadWith("is never read; set {} too", steps=())


@dataclass(frozen=True)
class Profile:
    """The table [profile]."""

    steps: tuple[NonNegative, ...] = ()
    """First and last step to profile, as [11, 13]; empty is off. Files are in run.dir/traces."""
    ranks: Annotated[tuple[NonNegative, ...], _WITH_STEPS] = (0,)
    """Ranks that are profiled; empty: all."""
    memory: Annotated[bool, _WITH_STEPS] = False
    """Write a memory snapshot beside each trace, for pytorch.org/memory_viz."""


RUN_RULES = Rules["Job"]()


@RUN_RULES.add(
    "profile.steps is a first and a last step of this run, the last one not before the first",
    "a range that is never reached would leave nothing, without a word",
)
def _steps(job: "Job") -> None:
    steps, train = job.config.profile.steps, job.config.train
    if not steps:
        return
    end = 2**63 if train.epochs else train.last_step  # the data say it
    nearest = sorted(min(max(1, step), end) for step in (steps[0], steps[-1]))
    for wrong, words in (
        (len(steps) != 2, "should be a first and a last step"),
        (steps[0] > steps[-1], "ends before it begins"),
        (steps[0] < 1, "begins before the first step, 1"),
        (steps[-1] > end, f"goes beyond the run's last step, {end}"),
    ):
        if wrong:
            raise ConfigError(f"profile.steps: {list(steps)} {words}; nearest: {nearest}")


@RUN_RULES.add("profile.ranks are ranks", "a rank that is not there writes nothing")
def _ranks(job: "Job") -> None:
    absent = [rank for rank in job.config.profile.ranks if rank >= job.world_size]
    if absent:
        raise ConfigError(
            f"profile.ranks: {absent[0]} is none of the {job.world_size} ranks; nearest:"
            f" {job.world_size - 1}"
        )


RUN_RULES.add(
    "profile.ranks and profile.memory go with profile.steps", "without it nothing is profiled"
)(all_keys_read("profile", lambda job: job.config.profile))

TABLES = {"profile": Profile}


def hooks(trainer: Any) -> list[Any]:
    """Return the profiler, if steps are to be profiled."""
    from compose.profiling.profiler import Profiler

    return [Profiler(trainer)] if trainer.config.profile.steps else []
