"""PyTorch's private names: each that is used here is listed, and is there in the PyTorch installed."""

import ast
import importlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.support.helpers import ROOT

# Every private name, by what would serve instead.
INSTEAD = {
    "no public name is known": """
        torch.utils._python_dispatch.TorchDispatchMode torch.Tensor._version
        torch.overrides._get_current_function_mode_stack
        torch.utils._python_dispatch._get_current_dispatch_mode_stack
        torch.cuda.memory._record_memory_history torch.ops.aten._grouped_mm
        torch.ops.aten._unsafe_view
        torch.ops.aten._scaled_dot_product_efficient_attention
        torch.ops.aten._scaled_dot_product_attention_math
        torch.ops.aten._scaled_dot_product_cudnn_attention
        torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        torch.ops.aten._scaled_dot_product_efficient_attention_backward
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    """,
    "a walk of our own over lists and dicts": """
        torch.utils._pytree.tree_leaves torch.utils._pytree.tree_flatten
        torch.utils._pytree.tree_map torch.utils._pytree.tree_map_only
        torch.utils._pytree.tree_unflatten
    """,
    "a copy, whether it is a view or not": "torch.Tensor._is_view",
    "data_ptr, where there is memory": "torch.UntypedStorage._cdata",
    "named_children and setattr": "torch.nn.Module._modules",
    "named_buffers and setattr": "torch.nn.Module._buffers",
    "state_dict, which runs FSDP's hooks": "torch.nn.Module._non_persistent_buffers_set",
    "no line on a module's hooks": "torch.nn.Module._forward_pre_hooks",
    "no line on a parameter's hooks": """
        torch.Tensor._backward_hooks torch.Tensor._post_accumulate_grad_hooks
    """,
    "the public classes, one by one": "torch.nn.modules.batchnorm._BatchNorm",
    "type(torch.ops.aten.mm.default)": "torch._ops.OpOverload",
    "type(torch.ops.aten.mm)": "torch._ops.OpOverloadPacket",
    "torch.compiler.reset": "torch._dynamo.reset",
    "torch.compile(dynamic=True)": "torch._dynamo.mark_dynamic",
    "RuntimeError": "torch._dynamo.exc.TorchDynamoException",
    "torch.nn.utils.get_total_norm": "torch._foreach_norm",
    "a loop over mul_": "torch._foreach_mul_",
    "a backend that counts its calls": "torch._dynamo.utils.counters",
    "torch.compile(options=)": """
        torch._inductor.config torch._inductor.config._micro_pipeline_tp
    """,
    "nothing since 2.14": "torch.distributed._symmetric_memory.enable_symm_mem_for_group",
    "collectives of an autograd.Function": "torch.distributed._functional_collectives",
    "its own wait()": "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    "torch.distributed.nn.functional": """
        torch.distributed._functional_collectives.all_to_all_single_autograd
    """,
    "the same operators under another namespace": "torch.ops._c10d_functional",
    "torch.distributed.group.WORLD": "torch.distributed.distributed_c10d._get_default_group",
    "a store of compose's own": "torch.distributed.distributed_c10d._get_default_store",
    "groups that compose makes and keeps itself": "torch.distributed.distributed_c10d._world",
    "dp_mesh_dims of fully_shard": """
        torch.distributed.device_mesh.DeviceMesh._concatenate
        torch.distributed.device_mesh.DeviceMesh._flatten
    """,
    "the mesh of experts, kept by the composition": """
        torch.distributed.device_mesh.DeviceMesh._get_root_mesh
    """,
    "FSDPModule.finalize_backward of 2.15, once it reduces over a part of the ranks": """
        torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback
        torch.distributed.fsdp._fully_shard._fsdp_state.FSDPStateContext
    """,
    "another fault in the tests": """
        torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam
        torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._get_grad_inner_tensor
        torch.distributed.pipelining.schedules._PipelineScheduleRuntime._split_inputs
    """,
    "set_custom_all_gather, in the tests": """
        torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultAllGather
    """,
    "parallelize_module": """
        torch.distributed.tensor.parallel.ColwiseParallel._apply
        torch.distributed.tensor.parallel.RowwiseParallel._apply
    """,
    "distribute_module with functions of our own": """
        torch.distributed.tensor.parallel.ColwiseParallel._partition_linear_fn
        torch.distributed.tensor.parallel.ColwiseParallel._prepare_input_fn
        torch.distributed.tensor.parallel.ColwiseParallel._prepare_output_fn
        torch.distributed.tensor.parallel.RowwiseParallel._prepare_input_fn
        torch.distributed.tensor.parallel.RowwiseParallel._prepare_output_fn
        torch.distributed.tensor.parallel.RowwiseParallel._partition_embedding_fn
        torch.distributed.tensor.parallel.SequenceParallel._replicate_module_fn
    """,
    "DTensor.to_local": """
        torch.distributed.tensor.DTensor._local_tensor torch.distributed.tensor.DTensor._spec
    """,
    "DTensor.full_tensor": "torch.distributed.tensor.placement_types._StridedShard",
    "one process for each mesh of the tests": """
        torch.distributed.tensor._redistribute
        torch.distributed.tensor._redistribute._gen_transform_infos
        torch.distributed.tensor.debug._clear_sharding_prop_cache
    """,
    "a CSV file of the schedule": """
        torch.distributed.pipelining.schedules._Action
        torch.distributed.pipelining.schedules._ComputationType
        torch.distributed.pipelining.schedules._PipelineScheduleRuntime._prepare_schedule_with_comms
    """,
    "a loop of our own": "torch.distributed.pipelining.schedules._PipelineScheduleRuntime",
    "torch.autograd.grad, as it does": "torch.distributed.pipelining._backward.stage_backward_weight",
    "gradients taken aside before a step": """
        torch.distributed.pipelining.PipelineStage._post_metadata_inference_cleanup
    """,
    "not needed": """
        torch.distributed.pipelining.PipelineStage._get_init_p2p_neighbors_ops
        torch.distributed.pipelining.PipelineStage._validate_fwd_outputs
    """,
    "a table of our own beside it": "torch.distributed.checkpoint.filesystem._StorageInfo",
    "HashStore": "torch.testing._internal.distributed.fake_pg.FakeStore",
    "torch.cuda.memory_snapshot": "torch.cuda.memory._snapshot",
    "the page pytorch.org/memory_viz, by hand": "torch.cuda._memory_viz.trace",
    "torch.profiler": "torch.autograd._profiler_enabled",
    "a hook that marks a backward": """
        torch._C._current_graph_task_id torch.autograd._engine_run_backward
    """,
    "a mark of our own": """
        torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_reduce
        torch.distributed.fsdp._fully_shard._fsdp_param_group
        torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup
        torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.post_backward
        torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.pre_forward
        torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.is_unsharded
        torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.unshard
    """,
    "fake tensors, once they have a backward without a GPU": """
        torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._validate_no_meta_params
    """,
    "a record that leaves it out": """
        torch.distributed.tensor._sharding_prop.ShardingPropagator
        torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached
        torch.utils._python_dispatch._disable_current_modes
    """,
    "a table of groups by name": "torch.distributed.distributed_c10d._resolve_process_group",
    "str(operator)": "torch.ops.aten.mm.default._schema",
    "varlen_attn, on CUDA": "torch.ops.aten._scaled_dot_product_flash_attention",
    "varlen_attn, which gives no lse's gradient": "torch.ops.aten._flash_attention_forward",
    "varlen_attn": "torch.ops.aten._flash_attention_backward",
    "torch.nn.functional.scaled_mm": "torch._scaled_mm",
    "a loop over copy_": "torch._foreach_copy_",
    "a loop over add_": "torch._foreach_add_",
    "the same tests on a GPU alone": """
        torch._dynamo.backends.common.aot_autograd torch._functorch.aot_autograd.make_boxed_func
        torch._functorch.partitioners.min_cut_rematerialization_partition
        torch._guards.TracingContext torch._guards.tracing torch._inductor.codecache.PyCodeCache
        torch._inductor.compile_fx.compile_fx_inner
        torch._inductor.decomposition.select_decomp_table torch._inductor.graph.GraphLowering
        torch._inductor.runtime.triton_helpers torch._inductor.runtime.triton_heuristics
        torch._guards.detect_fake_mode torch._inductor.fx_passes.joint_graph.joint_graph_passes
        torch._inductor.fx_passes.post_grad.post_grad_passes
        torch._inductor.fx_passes.post_grad.view_to_reshape torch._inductor.virtualized.V
    """,
    "meta tensors, which have no device": """
        torch._subclasses.FakeTensorMode torch._subclasses.fake_tensor.FakeTensorMode
    """,
    "checks at each place that sends": """
        torch.distributed.ProcessGroup._get_backend torch._C._distributed_c10d.Backend._allgather_base
        torch._C._distributed_c10d.Backend._reduce_scatter_base
    """,
    "a wait that is counted on a GPU": "torch.ops.aten._local_scalar_dense",
    "a __torch_function__ that calls super": "torch._C._disabled_torch_function_impl",
}
PRIVATE = {name for names in INSTEAD.values() for name in names.split()}
# The versions that have a name. Others are in all of 2.11 to 2.15, and no later one was tried.
VERSIONS = {
    "torch.distributed.pipelining.PipelineStage._post_metadata_inference_cleanup": "2.12 to 2.16",
    "torch.distributed.pipelining.PipelineStage._get_init_p2p_neighbors_ops": "2.11 to 2.15",
    "torch.distributed.pipelining.PipelineStage._validate_fwd_outputs": "2.11 to 2.12",
}


def _find(name: str) -> None:
    """Raise AttributeError where there is no ``torch.a.b``."""
    parts = name.split(".")
    result: Any = torch
    for i, part in enumerate(parts[1:], 2):
        if part in getattr(result, "__annotations__", ()):  # each object has one
            return
        if not hasattr(result, part):
            try:
                importlib.import_module(".".join(parts[:i]))
            except ImportError:
                raise AttributeError(name) from None
        result = getattr(result, part)


@pytest.mark.parametrize("name", sorted(PRIVATE))
def test_is_there(name: str) -> None:
    first, gone = VERSIONS.get(name, "2.11 to 2.16").split(" to ")
    installed = TorchVersion(torch.__version__)
    there = installed >= first and (gone == "2.16" or installed < gone)
    with nullcontext() if there else pytest.raises(AttributeError):
        _find(name)


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _used(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield a file's private names: whole those below torch, ``.name`` alone those of some object."""
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.split(".")[0]
                names[alias.asname or whole] = whole
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            base, _, rest = ast.unparse(node).partition(".")
            yield f"{names[base]}.{rest}" if base in names else f".{node.attr}"


def _own(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the names that a file gives to something of its own."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


# They belong to a NamedTuple; an FSDPState and its groups, once they are made; a torch.library.Library;
# Inductor's autotuners; a file system of fsspec, whose manual names it; torchao's weights and tensors.
OF_OTHERS = {"_replace", "_asdict", "_state_ctx", "_pre_backward", "_fsdp_param_group"}
OF_OTHERS |= {"_all_gather_result", "_module_fqn", "_destroy", "_precompile_config", "_strip_protocol"}
OF_OTHERS |= {"_module_info", "_param_fqn"}
OF_TORCHAO = {"_data", "_scale", "_orig_dtype", "_linear_mm_config", "_gemm_input_role", "_tensor"}


@pytest.mark.slow
def test_every_private_name_is_listed() -> None:
    known = {"." + name.rpartition(".")[2] for name in PRIVATE}
    known |= {"." + name for name in OF_OTHERS | OF_TORCHAO}
    used = list[tuple[Path, str]]()
    for folder in ("compose", "models", "tests", "benchmarks", "examples"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            nodes = list(ast.walk(ast.parse(file.read_text())))  # of one file at a time
            known |= {"." + name for name in _own(nodes)}
            used += [(file, name) for name in _used(nodes) if _is_private(name)]
    unlisted = [
        f"{file.relative_to(ROOT)}: {name}"
        for file, name in used
        if name not in known
        and name.startswith(("torch.", "."))
        and not any(f"{listed}.".startswith(f"{name}.") for listed in PRIVATE)
    ]
    assert not unlisted


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C._secret()", "torch._C._secret"),
        ("import torch._secret as s", "torch._secret"),
        ("from torch.nn import _secret", "torch.nn._secret"),
        ("from torch import nn\nx = nn.Linear._secret", "torch.nn.Linear._secret"),
        ("x = f(y)._secret", "._secret"),
    ],
)
def test_the_search_finds(source: str, found: str) -> None:
    assert found in list(_used(list(ast.walk(ast.parse(source)))))
