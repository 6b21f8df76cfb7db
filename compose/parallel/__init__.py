"""This room answers which ranks hold what: the mesh, and how a model is cut over its axes.

It exports the table [parallel], the mesh, and the styles that a Plan takes.
"""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.parallel.context_parallel import ContextParallel
    from compose.parallel.expert_parallel import ExpertParallel
    from compose.parallel.local_parallel import LocalColwise, LocalHeads, LocalInput
    from compose.parallel.mesh import (
        AXES,
        BATCH_AXES,
        Parallel,
        axis_size,
        batch_share,
        init_mesh,
    )
    from compose.parallel.tensor_parallel import HeadParallel, Replicated

__all__ = [
    "AXES",
    "BATCH_AXES",
    "ContextParallel",
    "ExpertParallel",
    "HeadParallel",
    "LocalColwise",
    "LocalHeads",
    "LocalInput",
    "Parallel",
    "Replicated",
    "axis_size",
    "batch_share",
    "init_mesh",
]

export(
    __name__,
    {
        "AXES": "compose.parallel.mesh",
        "BATCH_AXES": "compose.parallel.mesh",
        "ContextParallel": "compose.parallel.context_parallel",
        "ExpertParallel": "compose.parallel.expert_parallel",
        "HeadParallel": "compose.parallel.tensor_parallel",
        "LocalColwise": "compose.parallel.local_parallel",
        "LocalHeads": "compose.parallel.local_parallel",
        "LocalInput": "compose.parallel.local_parallel",
        "Parallel": "compose.parallel.mesh",
        "Replicated": "compose.parallel.tensor_parallel",
        "axis_size": "compose.parallel.mesh",
        "batch_share": "compose.parallel.mesh",
        "init_mesh": "compose.parallel.mesh",
    },
)
