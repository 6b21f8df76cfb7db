"""PyTorch's private names: each that is used here is listed, and is there in the PyTorch installed."""

import ast
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.support.helpers import ROOT

# Every private name, with the version that is the first without it, or may be, and what would serve
# instead. All of 2.11 to 2.15 have those of 2.16: no later one was tried. "2.12 to": 2.11 lacks it.
PRIVATE = {
    "torch.utils._python_dispatch.TorchDispatchMode": ("2.16", "no public name is known"),
    "torch.utils._pytree.tree_leaves": ("2.16", "a walk of our own over lists and dicts"),
    "torch.utils._pytree.tree_flatten": ("2.16", "a walk of our own over lists and dicts"),
    "torch.utils._pytree.tree_map": ("2.16", "a walk of our own over lists and dicts"),
    "torch.utils._pytree.tree_map_only": ("2.16", "a walk of our own over lists and dicts"),
    "torch.Tensor._is_view": ("2.16", "a copy, whether it is a view or not"),
    "torch.Tensor._version": ("2.16", "no public name is known"),
    "torch.UntypedStorage._cdata": ("2.16", "data_ptr, where there is memory"),
    "torch.nn.Module._modules": ("2.16", "named_children and setattr"),
    "torch.nn.modules.batchnorm._BatchNorm": ("2.16", "the public classes, one by one"),
    "torch._ops.OpOverload": ("2.16", "type(torch.ops.aten.mm.default)"),
    "torch._ops.OpOverloadPacket": ("2.16", "type(torch.ops.aten.mm)"),
    "torch._dynamo.reset": ("2.16", "torch.compiler.reset"),
    "torch._dynamo.mark_dynamic": ("2.16", "torch.compile(dynamic=True)"),
    "torch._dynamo.exc.TorchDynamoException": ("2.16", "RuntimeError"),
    "torch.overrides._get_current_function_mode_stack": ("2.16", "no public name is known"),
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": (
        "2.16",
        "no public name is known",
    ),
    "torch._foreach_norm": ("2.16", "torch.nn.utils.get_total_norm"),
    "torch._foreach_mul_": ("2.16", "a loop over mul_"),
    "torch._dynamo.utils.counters": ("2.16", "a backend that counts its calls"),
    "torch._inductor.config": ("2.16", "torch.compile(options=)"),
    "torch._inductor.config._micro_pipeline_tp": ("2.16", "torch.compile(options=)"),
    "torch.distributed._symmetric_memory.enable_symm_mem_for_group": ("2.16", "nothing since 2.14"),
    # Functional collectives: the only ones that autograd and torch.compile see through.
    "torch.distributed._functional_collectives": ("2.16", "collectives of an autograd.Function"),
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": ("2.16", "its own wait()"),
    "torch.distributed._functional_collectives.all_to_all_single_autograd": (
        "2.16",
        "torch.distributed.nn.functional",
    ),
    "torch.ops._c10d_functional": ("2.16", "the same operators under another namespace"),
    "torch.distributed.distributed_c10d._get_default_group": ("2.16", "torch.distributed.group.WORLD"),
    "torch.distributed.distributed_c10d._get_default_store": ("2.16", "a store of compose's own"),
    "torch.distributed.distributed_c10d._world": ("2.16", "groups that compose makes and keeps itself"),
    # Data parallel.
    "torch.distributed.device_mesh.DeviceMesh._concatenate": ("2.16", "dp_mesh_dims of fully_shard"),
    "torch.distributed.device_mesh.DeviceMesh._flatten": ("2.16", "dp_mesh_dims of fully_shard"),
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh": (
        "2.16",
        "the mesh of experts, kept by the composition",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback": (
        "2.16",
        "FSDPModule.finalize_backward of 2.15, once it reduces over a part of the ranks",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPStateContext": ("2.16", "the same"),
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": ("2.16", "another fault in the tests"),
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._get_grad_inner_tensor": (
        "2.16",
        "another fault in the tests",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultAllGather": (
        "2.16",
        "set_custom_all_gather, in the tests",
    ),
    # Tensor parallel.
    "torch.distributed.tensor.parallel.ColwiseParallel._apply": ("2.16", "parallelize_module"),
    "torch.distributed.tensor.parallel.RowwiseParallel._apply": ("2.16", "parallelize_module"),
    "torch.distributed.tensor.parallel.ColwiseParallel._partition_linear_fn": (
        "2.16",
        "distribute_module with functions of our own",
    ),
    "torch.distributed.tensor.parallel.RowwiseParallel._partition_embedding_fn": ("2.16", "the same"),
    "torch.distributed.tensor.parallel.SequenceParallel._replicate_module_fn": ("2.16", "the same"),
    "torch.autograd.Variable._execution_engine": ("2.16", "finish_backward after each backward"),
    "torch.distributed.tensor.DTensor._local_tensor": ("2.16", "DTensor.to_local"),
    "torch.distributed.tensor.DTensor._spec": ("2.16", "DTensor.to_local"),
    "torch.distributed.tensor.placement_types._StridedShard": ("2.16", "DTensor.full_tensor"),
    "torch.distributed.tensor._redistribute": ("2.16", "one process for each mesh of the tests"),
    "torch.distributed.tensor._redistribute._gen_transform_infos": ("2.16", "the same"),
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": ("2.16", "the same"),
    # Pipelines: the runtime that executes a table.
    "torch.distributed.pipelining.schedules._Action": ("2.16", "a CSV file of the schedule"),
    "torch.distributed.pipelining.schedules._ComputationType": ("2.16", "a CSV file of the schedule"),
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime": ("2.16", "a loop of our own"),
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime._prepare_schedule_with_comms": (
        "2.16",
        "a CSV file of the schedule",
    ),
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime._split_inputs": (
        "2.16",
        "another fault in the tests",
    ),
    "torch.distributed.pipelining.PipelineStage._post_metadata_inference_cleanup": (
        "2.12 to 2.16",
        "gradients taken aside before a step",
    ),
    "torch.distributed.pipelining.PipelineStage._get_init_p2p_neighbors_ops": ("2.15", "not needed"),
    "torch.distributed.pipelining.PipelineStage._validate_fwd_outputs": ("2.12", "not needed"),
    # Checkpoints and measurements.
    "torch.distributed.checkpoint.filesystem._StorageInfo": ("2.16", "a table of our own beside it"),
    "torch.testing._internal.distributed.fake_pg.FakeStore": ("2.16", "HashStore"),
    "torch.cuda.memory._record_memory_history": ("2.16", "no public name is known"),
    "torch.cuda.memory._snapshot": ("2.16", "torch.cuda.memory_snapshot"),
    "torch.cuda._memory_viz.trace": ("2.16", "the page pytorch.org/memory_viz, by hand"),
    "torch.autograd._profiler_enabled": ("2.16", "torch.profiler"),
    "torch._C._current_graph_task_id": ("2.16", "a hook that marks a backward"),
    # A world that is not there: each name is replaced while the planner records a step.
    "torch.autograd._engine_run_backward": ("2.16", "a hook that marks a backward"),
    "torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_reduce": (
        "2.16",
        "a mark of our own",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": ("2.16", "the same"),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": ("2.16", "the same"),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.post_backward": (
        "2.16",
        "the same",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.unshard": (
        "2.16",
        "the same",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._validate_no_meta_params": (
        "2.16",
        "fake tensors, once they have a backward without a GPU",
    ),
    "torch.distributed.tensor._sharding_prop.ShardingPropagator": (
        "2.16",
        "a record that leaves it out",
    ),
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached": (
        "2.16",
        "the same",
    ),
    "torch.utils._python_dispatch._disable_current_modes": ("2.16", "the same"),
    "torch.distributed.distributed_c10d._resolve_process_group": ("2.16", "a table of groups by name"),
    "torch.ops.aten.mm.default._schema": ("2.16", "str(operator)"),
    "torch.ops.aten._grouped_mm": ("2.16", "no public name is known"),
    "torch.ops.aten._scaled_dot_product_efficient_attention": ("2.16", "no public name is known"),
    "torch.ops.aten._scaled_dot_product_attention_math": ("2.16", "no public name is known"),
    # Attention's kernels, of which the log-sum-exp is wanted.
    "torch.ops.aten._scaled_dot_product_flash_attention": ("2.16", "varlen_attn, on CUDA"),
    "torch.ops.aten._flash_attention_forward": ("2.16", "varlen_attn, which gives no lse's gradient"),
    "torch.ops.aten._flash_attention_backward": ("2.16", "varlen_attn"),
    "torch.ops.aten._scaled_dot_product_cudnn_attention": ("2.16", "no public name is known"),
    "torch.ops.aten._scaled_dot_product_cudnn_attention_backward": ("2.16", "no public name is known"),
    "torch.ops.aten._scaled_dot_product_efficient_attention_backward": (
        "2.16",
        "no public name is known",
    ),
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": ("2.16", "no public name is known"),
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": (
        "2.16",
        "no public name is known",
    ),
    "torch._scaled_mm": ("2.16", "torch.nn.functional.scaled_mm"),
    "torch._foreach_copy_": ("2.16", "a loop over copy_"),
    "torch._foreach_add_": ("2.16", "a loop over add_"),
    # Graphs and kernels that the tests make without a GPU.
    "torch._dynamo.backends.common.aot_autograd": ("2.16", "the same tests on a GPU alone"),
    "torch._functorch.aot_autograd.make_boxed_func": ("2.16", "the same tests on a GPU alone"),
    "torch._functorch.partitioners.min_cut_rematerialization_partition": (
        "2.16",
        "the same tests on a GPU alone",
    ),
    "torch._guards.TracingContext": ("2.16", "the same tests on a GPU alone"),
    "torch._guards.tracing": ("2.16", "the same tests on a GPU alone"),
    "torch._inductor.codecache.PyCodeCache": ("2.16", "the same tests on a GPU alone"),
    "torch._inductor.compile_fx.compile_fx_inner": ("2.16", "the same tests on a GPU alone"),
    "torch._inductor.decomposition.select_decomp_table": ("2.16", "the same tests on a GPU alone"),
    "torch._inductor.graph.GraphLowering": ("2.16", "the same tests on a GPU alone"),
    "torch._inductor.runtime.triton_helpers": ("2.16", "the same tests on a GPU alone"),
    "torch._inductor.runtime.triton_heuristics": ("2.16", "the same tests on a GPU alone"),
    "torch._guards.detect_fake_mode": ("2.16", "the same tests on a GPU alone"),
    "torch._inductor.fx_passes.joint_graph.joint_graph_passes": (
        "2.16",
        "the same tests on a GPU alone",
    ),
    "torch._inductor.fx_passes.post_grad.post_grad_passes": ("2.16", "the same tests on a GPU alone"),
    "torch._inductor.fx_passes.post_grad.view_to_reshape": ("2.16", "the same tests on a GPU alone"),
    "torch._inductor.virtualized.V": ("2.16", "the same tests on a GPU alone"),
    "torch._subclasses.FakeTensorMode": ("2.16", "meta tensors, which have no device"),
    "torch._subclasses.fake_tensor.FakeTensorMode": ("2.16", "the same"),
    "torch.ops.aten._local_scalar_dense": ("2.16", "a wait that is counted on a GPU"),
    "torch._C._disabled_torch_function_impl": ("2.16", "a __torch_function__ that calls super"),
}


def _find(name: str) -> None:
    """Raise AttributeError where there is no ``torch.a.b``."""
    parts = name.split(".")
    found: Any = torch
    for i, part in enumerate(parts[1:], 2):
        if part in getattr(found, "__annotations__", ()):  # each object has one
            return
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:i]))
            except ImportError:
                raise AttributeError(name) from None
        found = getattr(found, part)


@pytest.mark.parametrize("name", PRIVATE)
def test_is_there(name: str) -> None:
    first, _, gone = PRIVATE[name][0].rpartition(" to ")
    installed = TorchVersion(torch.__version__)
    if installed >= (first or "2.11") and (installed < gone or gone == "2.16"):
        _find(name)
    else:
        with pytest.raises(AttributeError):
            _find(name)


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _used(tree: ast.Module) -> Iterator[str]:
    """Yield a file's private names: whole those below torch, ``.name`` alone those of some object."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.split(".")[0]
                names[alias.asname or whole] = whole
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            base, _, rest = ast.unparse(node).partition(".")
            yield f"{names[base]}.{rest}" if base in names else f".{node.attr}"


def _own(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file gives to something of its own."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


# Of a NamedTuple; of an FSDPState and its groups, once they are made; of a torch.library.Library; of
# Inductor's autotuners; of torchao's weights and tensors.
OF_OTHERS = {"_replace", "_asdict", "_state_ctx", "_fsdp_param_group", "_all_gather_result"}
OF_OTHERS |= {"_module_fqn", "_destroy", "_precompile_config"}
OF_TORCHAO = {"_data", "_scale", "_orig_dtype", "_linear_mm_config", "_gemm_input_role", "_tensor"}


@pytest.mark.slow
def test_every_private_name_is_listed() -> None:
    trees = {}
    for folder in ("compose", "models", "tests", "benchmarks", "examples"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            trees[file] = ast.parse(file.read_text())
    known = {"." + name.rpartition(".")[2] for name in PRIVATE}
    known |= {"." + name for name in OF_OTHERS | OF_TORCHAO}
    known |= {"." + name for tree in trees.values() for name in _own(tree)}
    unlisted = [
        f"{file.relative_to(ROOT)}: {name}"
        for file, tree in trees.items()
        for name in _used(tree)
        if name not in known
        and _is_private(name)
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
    assert found in list(_used(ast.parse(source)))
