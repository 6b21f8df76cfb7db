"""Faults in what a diffusion transformer uses."""

from tests.proof.sensitivity.row import Keys, table
from tests.support.small_models import DIT

SMALL: Keys = DIT | {"train__global_batch": 4}
CP: Keys = SMALL | {"parallel__cp": 2, "parallel__dp_shard": 1}
TP: Keys = SMALL | {"parallel__tp": 3, "parallel__dp_shard": 1, "model__n_heads": 3}

FAULTS = table(
    """
[diffusion]
the mean of a rank's own targets, not of all | SMALL parallel__dp_shard=2 | loss | step 1
    in compose.train.step:forward_backward
    - sum_over(counts, mesh, BATCH_AXES).clamp(min=1)
    + counts.clamp(min=1) * 2
a patch is lost at each border of cp | CP model__image_size=8 train__seq_len=16 | gradient | layers.*.attention.w?.weight
    in compose.parallel.context_parallel:shard_sequence
    pieces = value.chunk(count, 1) => pieces = [piece[:, :-1] for piece in value.chunk(count, 1)]
patches attend to padding | CP | gradient | layers.*.attention.w?.weight
    in compose.train.step:_padded
    told and "document_ids" => not told and "document_ids"
a sample's time is cut with its patches | CP model__image_size=8 train__seq_len=16 | gradient | layers.*.condition.*
    in compose.parallel.context_parallel:shard_sequence
    - result[name] = value
    -
    + result[name] = value.roll(rank)
    +
LocalLinear: its gradient stays a part | TP | gradient | *.projection.weight
    in compose.parallel.local_parallel:_TokenLinear.forward with ranks=3 untouched='gradient/layers.*.attention.w?.weight'
    local_weight(self.weight, partial=True) => local_weight(self.weight)
the modulation's gradient stays a part | TP | gradient | layers.*.condition.*
    in compose.parallel.tensor_parallel:_summed_gradient with ranks=3 untouched='gradient/layers.*.attention.w?.weight'
    [Partial()] => [Replicate()]
""",  # noqa: E501
    globals(),
)
