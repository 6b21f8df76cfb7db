"""This room answers how a model is cut into stages, and in which order they run.

It exports schedules, the split, and what runs a schedule on PyTorch's pipelining runtime.
"""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.pipeline.pipeline_parallel import PipelineRunner, apply_pipeline_parallel
    from compose.pipeline.schedules import SCHEDULES, Schedule, build_table

__all__ = ["SCHEDULES", "PipelineRunner", "Schedule", "apply_pipeline_parallel", "build_table"]

export(
    __name__,
    {
        "PipelineRunner": "compose.pipeline.pipeline_parallel",
        "SCHEDULES": "compose.pipeline.schedules",
        "Schedule": "compose.pipeline.schedules",
        "apply_pipeline_parallel": "compose.pipeline.pipeline_parallel",
        "build_table": "compose.pipeline.schedules",
    },
)
