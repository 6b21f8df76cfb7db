"""Faults of the loss, and of what saves memory."""

from tests.proof.sensitivity.row import Keys, table

ONE: Keys = {"train__global_batch": 8}
THREE: Keys = ONE | {
    "model__n_layers": 3,
    "activation_checkpoint__mode": "full",
    "activation_checkpoint__segment": 2,
}
# Enough of a micro-batch that its activations are worth a copy.
LARGE: Keys = ONE | {"train__seq_len": 128, "train__micro_batch": 4}

FAULTS = table(
    """
[loss]
the loss has half the gradient | train__global_batch=8 | gradient
    in compose.ops.cross_entropy:_ChunkedCrossEntropy.backward with ranks=1 untouched='loss/step 1'
    d.mul_(scale[part] * share[part, None]) => d.mul_(0.99 * scale[part] * share[part, None])
half the z-loss, of whole logits | train__global_batch=8 train__z_loss=0.1 | gradient
    in compose.parallel.output_projection:CrossEntropy.__call__ with ranks=1 untouched='loss/step 1'
    z = self.z_loss * squares => z = 0.5 * self.z_loss * squares
the loss is that of the last chunk | train__global_batch=8 train__loss_chunk=16 | loss
    in compose.ops.cross_entropy:chunked_cross_entropy with ranks=1 untouched='gradient/*'
    loss + losses.sum() => losses.sum()
the output's gradient is that of the last chunk | train__global_batch=8 train__loss_chunk=16 | gradient | output.weight
    in compose.ops.cross_entropy:_add_product with ranks=1 untouched='gradient/layers.*'
    total.addmm_(a, b) => total.addmm_(a, b, beta=0)
half the z-loss, in chunks | train__global_batch=8 train__loss_chunk=16 train__z_loss=0.1 | gradient
    in compose.ops.cross_entropy:_one_chunk with ranks=1 untouched='loss/step 1'
    (1 + 2 * z_loss * log_zs) => (1 + z_loss * log_zs)

[activation_checkpoint.mode]
recomputed layers hand no gradient back | train__global_batch=8 activation_checkpoint__mode=full | gradient | tok_embeddings.weight
    in compose.memory.activation_checkpointing:_recomputing with ranks=1 untouched='loss/step 1'
    *args, => *(x.detach() if hasattr(x, 'detach') else x for x in args),
no layer runs again | train__global_batch=8 activation_checkpoint__mode=full | option | activation_checkpoint.mode
    in compose.memory.activation_checkpointing:apply_activation_checkpointing with ranks=1
    in units.items() => in ()
the last layer does not run again, on stages | train__global_batch=8 parallel__pp=2 parallel__dp_shard=1 model__n_layers=4 activation_checkpoint__mode=selective | runs again | layers.3
    in compose.memory.activation_checkpointing:recomputed_units with untouched='runs again/layers.[012]'
    dict.fromkeys(units, operators(options.keep)) => dict.fromkeys(units[:-1], operators(options.keep))

[activation_checkpoint.segment]
the second layer of a segment hands no gradient back | THREE | gradient | layers.0.*
    in compose.memory.segments:_LayerSegment._run with ranks=1 untouched='loss/step 1'
    else inputs[x.first] => else inputs[x.first].detach()
a layer is computed again from another input | THREE | gradient | layers.1.*
    in compose.memory.segments:_LayerSegment._run with ranks=1 untouched='gradient/output.weight'
    return given[x.index] if => return given[x.index] * 1.01 if
the last segment is forgotten if it is short | THREE | runs again | layers.2
    in compose.memory.segments:segments_of with ranks=1 untouched='runs again/layers.[01]'
    range(0, len(units), length) => range(0, len(units) - 1, length)

[activation_checkpoint.every]
the first layers run again, not the second ones | train__global_batch=8 activation_checkpoint__mode=every_k activation_checkpoint__every=2 | runs again | layers.0
    in compose.memory.activation_checkpointing:recomputed_units with ranks=1
    units[options.every - 1 :: => units[options.every - 2 ::
a layer that runs again has another input, every_k | train__global_batch=8 activation_checkpoint__mode=every_k activation_checkpoint__every=2 | gradient | layers.0.*
    in compose.memory.activation_checkpointing:_recomputing with ranks=1 untouched='loss/step 1'
    *args, => *(x.detach() if hasattr(x, 'detach') else x for x in args),

[activation_checkpoint.keep]
backward finds other products than forward kept | train__global_batch=8 activation_checkpoint__mode=selective activation_checkpoint__keep='["matmul"]' | gradient | layers.*
    in compose.memory.activation_checkpointing:_KeptOperatorsOnly.__torch_dispatch__ with ranks=1 untouched='loss/step 1'
    - return self.mode.__torch_dispatch__(func, types, args, kwargs)
    + y = self.mode.__torch_dispatch__(func, types, args, kwargs); return y * 1.01 if 'Cached' in type(self.mode).__name__ else y

[activation_checkpoint.budget]
no layer runs again, budget | train__global_batch=8 activation_checkpoint__mode=budget activation_checkpoint__budget=0.1 | option | activation_checkpoint.mode
    in compose.memory.activation_checkpointing:apply_activation_checkpointing with ranks=1
    in units.items() => in ()
a layer that runs again has another input, budget | train__global_batch=8 activation_checkpoint__mode=budget activation_checkpoint__budget=0.1 | gradient | tok_embeddings.weight
    in compose.memory.activation_checkpointing:_recomputing with ranks=1 untouched='loss/step 1'
    *args, => *(x.detach() if hasattr(x, 'detach') else x for x in args),

[activation_checkpoint.offload]
activations stay where they are | LARGE activation_checkpoint__offload=True activation_checkpoint__mode=full | kept in place | layers.*
    in compose.apply:apply with ranks=1 untouched='runs again/*'
    activations.wrap(model.get_submodule(name)) => pass
no activation is worth a copy | LARGE activation_checkpoint__offload=True | option | activation_checkpoint.offload
    in compose.memory.activation_offload:_UnitForward.pack with ranks=1
    local.nbytes < LEAST or => True or
activations are rounded on their way to the host | LARGE activation_checkpoint__offload=True | gradient | layers.*
    in compose.memory.activation_offload:ActivationOffload._copied with ranks=1 untouched='loss/step 1'
    copy = tensor.clone() => copy = tensor.bfloat16().to(tensor.dtype)

[parallel.offload]
weights stay on the device | SHARDED parallel__offload=cpu | on the host | parallel.offload
    in compose.parallel.data_parallel:apply_data_parallel with untouched='gradient/*'
    if how.offload: => if False:

[compile]
a compiled layer gets no documents | TP compile__mode=block model__n_layers=1 | loss | step 1
    in compose.memory.compilation:apply_compile
    - _settled(torch.compile(module.forward, fullgraph=True, **how))
    + (lambda f: lambda *a, **k: f(a[0], a[1], a[2], None))(_settled(torch.compile(module.forward, fullgraph=True, dynamic=False, backend='aot_eager')))
""",  # noqa: E501
    globals(),
)
BY_KEY = FAULTS
SILENT: dict[str, str] = {}
