"""Faults of pipeline and expert parallel."""

from tests.proof.sensitivity.row import FEW, Keys, table
from tests.support.small_models import DEEPSEEK, QWEN

PP: Keys = {"parallel__pp": 2, "train__global_batch": 8}
VIRTUAL: Keys = PP | {"model__n_layers": 4}
EP: Keys = QWEN | FEW | {"parallel__dp_shard": 2, "parallel__ep": 2}
BIASED: Keys = DEEPSEEK | FEW

FAULTS = table(
    """
[pipeline]
1F1B averages over micro-batches | PP | gradient
    in compose.pipeline.pipeline_parallel:PipelineRunner._runtime with untouched='loss/step 1'
    scale_grads=False => scale_grads=True
the loss is that of the first micro-batch | PP | loss
    in compose.pipeline.pipeline_parallel:PipelineRunner.run with untouched='gradient/*'
    for x in losses) => for x in losses[:1])
a stage's norm counts as a copy's | PP | grad_norm
    in compose.train.step:_gradients with untouched='gradient/*'
    stage = mesh.size() // axis_size(mesh, "pp") => stage = mesh.size()
Interleaved1F1B hands on targets of other samples | VIRTUAL parallel__pp_schedule=Interleaved1F1B | loss | step 1
    in compose.pipeline.pipeline_parallel:PipelineRunner.run
    "targets": targets} => "targets": targets.flip(0)}
Interleaved1F1B reduces no micro-batch as the last | parallel__pp=2 train__global_batch=16 model__n_layers=4 parallel__dp_shard=2 parallel__zero=1 parallel__pp_schedule=Interleaved1F1B | gradient
    in compose.pipeline.stage:RuntimeStage.backward_maybe_with_nosync with ranks=4 untouched='loss/step 1'
    self.data.prepare_micro_batch(last=last_backward) => self.data.prepare_micro_batch(last=False)
ZBVZeroBubble leaves gradients unreduced | VIRTUAL parallel__pp_schedule=ZBVZeroBubble parallel__dp_shard=2 | gradient
    in compose.ops.torch_versions:finish_fsdp_backward with ranks=4 untouched='loss/step 1'
    state._root_post_backward_final_callback() => pass
DualPipeV reduces no halved backward as the last | parallel__pp=2 train__global_batch=16 model__n_layers=4 parallel__pp_schedule=DualPipeV parallel__zero=1 parallel__dp_shard=2 | gradient
    in compose.pipeline.stage:RuntimeStage.backward_maybe_with_nosync with ranks=4 untouched='loss/step 1'
    self.data.finish_backward(last=last_backward, => self.data.finish_backward(last=False,
a tied weight's gradient is the stages' mean | PP model__tie_embeddings=True | gradient | tok_embeddings.weight
    in compose.pipeline.pipeline_parallel:PipelineRunner._sum_tied_gradients with untouched='gradient/layers.*'
    .sum(0) => .mean(0)
a tied weight's copies are drawn by their own names | PP model__tie_embeddings=True | initial weight | tok_embeddings.weight
    in compose.weights:init_weights with untouched='initial weight/layers.*'
    in whole.named_parameters() => in module_of(whole).named_parameters()

[experts]
rows go to other experts | EP | loss | step 1
    in compose.parallel.expert_parallel:_run_on_owners
    - _transposed(counts_from, sum(received))
    + _transposed(counts_from, sum(received)); order, places = order.flip(0), len(order) - 1 - places
rows do not go back to their places | EP | loss | step 1
    in compose.parallel.expert_parallel:_run_on_owners
    _Permute.apply(result, places, order) => _Permute.apply(result, order, places)
gradients of rows go to other places | EP | gradient | layers.*.moe.experts.*
    in compose.parallel.expert_parallel:_Permute.backward with untouched='loss/step 1'
    grads[0].index_select(0, back) => grads[0].index_select(0, back.argsort())
each rank draws the first experts | EP | initial weight | layers.*.moe.experts.*
    in compose.weights:init_weights with untouched='initial weight/layers.*.attention.*'
    f"{name}.{number}" => f"{name}.{place}"
capacity is that of a rank's part of a sequence | QWEN FEW parallel__cp=2 model__capacity_factor=1.0 | gradient | layers.*.moe.experts.*
    in compose.parallel.expert_parallel:_gather_sequence
    gathered(tensor, group) => [tensor] * group.size()
routers count padding | QWEN train__seq_len=13 model__n_layers=2 train__global_batch=8 parallel__cp=2 | buffer after | *.router.load
    in compose.parallel.context_parallel:pad_sequence
    filler.fill_(-1) => filler.fill_(0)
padding counts among the tokens of a step | EP | gradient | layers.*.router.gate.weight
    in compose.ops.batch:count_places with untouched='loss/step 1'
    >= 0 => >= -1
routers act on one tp rank's counts | BIASED parallel__tp=2 | buffer after | *.router.load
    in compose.parallel.expert_parallel:finish_step
    mesh, _TOKEN_AXES) => mesh, _TOKEN_AXES[:3])
a router's bias moves twice | BIASED parallel__dp_shard=2 | buffer after | *.router.load
    in compose.parallel.expert_parallel:finish_step with untouched='gradient/*'
    router.finish_step(tally) => router.finish_step(tally); router.finish_step(tally)
expert_mesh takes the smaller for what divides both | QWEN train__seq_len=16 model__n_layers=2 train__global_batch=12 parallel__dp_shard=3 parallel__ep=2 parallel__dp_replicate=2 | -
    in compose.parallel.expert_parallel:expert_mesh with ranks=6 raises="shape '[1, 2, 1, 2]' is invalid"
    math.gcd(inner, ep) => min(inner, ep)
""",  # noqa: E501
    globals() | {"QWEN": QWEN},
)
