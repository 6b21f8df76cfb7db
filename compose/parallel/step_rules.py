"""Rules of a step that models, losses, batches and loops must obey, so that no gradient is lost.

Some code works on one process, but not on several ranks. Not all of it can be seen before the first
step. So each rule is checked in a step, and a model or loop that breaks it is refused in one line. Most
checks need no message of their own, and do not make the host wait for its GPU.
"""

import gc
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from compose.errors import ConfigError
from compose.ops.batch import IGNORE
from compose.ops.tensors import checksums, local_tensor
from compose.ops.torch_versions import fsdp_parameters
from compose.parallel.gradient_sum import DATA_AXES, has_shards
from compose.parallel.mesh import BATCH_AXES, axis_size, sum_over
from compose.parallel.name_patterns import parent

if TYPE_CHECKING:
    from compose.parallel.data_parallel import DataParallel


def check_loss(function: Any) -> None:
    """Raise ConfigError for a loss of PyTorch that ignores other targets, or that is a mean."""
    if hasattr(function, "count"):
        return
    given: dict[str, Any] = {}
    with suppress(TypeError, ValueError):  # it is not written in Python
        given = {name: each.default for name, each in signature(function).parameters.items()}
    given |= getattr(function, "__dict__", {})
    if given.get("reduction") in ("mean", "batchmean"):
        raise ConfigError(
            "loss_function: it returns a mean, which is divided by the count of targets once more; give"
            ' it reduction="sum"'
        )
    index = given.get("ignore_index", IGNORE)
    if index != IGNORE:
        raise ConfigError(
            f"loss_function: it ignores the target {index}, and the sum is divided by the count of all"
            f" targets but {IGNORE}; put {IGNORE} there, which ignore_index is by default"
        )


_SAID = {
    "got mixed torch.Tensor and DTensor": "forward uses a weight outside of its module, where a rank"
    " has a part of it; let its module do that, or a unit of plan.shard that holds it",
    "storage of size 0": "backward needs a weight that FSDP has freed; let units of plan.shard return"
    " tensors in lists, dicts or dataclasses, change none in place, and compute no gradients inside",
    "RegisterPostBackwardFunction is a view": "a unit of plan.shard works in place on its input; let"
    " it make a new tensor",
    "a leaf Variable that requires grad": "a stage works in place on its input; let it make a new"
    " tensor",
    "When use_reentrant=True": "a checkpoint with use_reentrant=True has no backward in two parts; use"
    " use_reentrant=False",
}
"""Parts of PyTorch's errors for models that cannot run on several ranks, and their meaning."""
_MIXED = (  # the meaning of the first one with tp
    "a module computes with a weight that plan.tensor or plan.replicate has placed and with a plain"
    " tensor, as nn.GRU, nn.LSTM and nn.MultiheadAttention do; one of replicate may take one tensor"
    " alone, by position, and make no other; or use parallel.tp = 1"
)


@contextmanager
def said_plainly(mesh: DeviceMesh) -> Iterator[None]:
    """Turn these errors of PyTorch into a ConfigError; with tp, styles too may cause them."""
    try:
        yield
    except RuntimeError as error:
        meant = [line for part, line in _SAID.items() if part in str(error)]
        if axis_size(mesh, "tp") > 1:
            meant = [_MIXED] if next(iter(_SAID)) in str(error) else []
        if not meant:
            raise
        raise ConfigError(f"model: {meant[0]}") from error


def same_rows(batch: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
    """Raise ConfigError if ranks that must run the same samples got different ones; a collective.

    Such ranks differ in pp, cp and tp alone. The host waits for the device.
    """
    axes = [axis for axis in ("pp", "cp", "tp") if axis_size(mesh, axis) > 1]
    given = [value for value in batch.values() if type(value) is Tensor and not value.is_meta]
    if not axes or not given:
        return
    own = (checksums(given).sum() & 0xFFFFFFFF).double().to(mesh.device_type)
    total = sum_over(own, mesh, axes)
    ranks = math.prod(axis_size(mesh, axis) for axis in axes)
    if float(total) != float(own) * ranks:
        raise ConfigError(
            f"batch: ranks that differ in {' and '.join(axes)} alone run the same samples, and were"
            " given others; give each rank of one share the same batch"
            " (compose.parallel.mesh.batch_share)"
        )


def check_micro_batches(
    parts: Iterable["DataParallel"], own: int, total: Tensor, mesh: DeviceMesh, zero: int
) -> None:
    """Raise ConfigError if ranks that must run equally many micro-batches run unequal numbers of them.

    They must from ZeRO stage ``zero`` on, and where tokens go to experts on ranks with other samples.
    ``own`` is this rank's number, and ``total`` the sum over the ranks of BATCH_AXES. The host waits
    for a GPU only if ``own`` differs from that of the last step.
    """
    stages = [part for part in parts if part.exchanges_tokens or _sends_each(part, zero)]
    is_new = any(part.micro_batches != own for part in stages)
    for part in stages:
        part.micro_batches = own
    if not stages or type(total) is not Tensor or not (total.is_cpu or (total.is_cuda and is_new)):
        return
    if float(total - own * math.prod(axis_size(mesh, axis) for axis in BATCH_AXES)):
        degree = "parallel.ep = 1" if stages[0].exchanges_tokens else f"parallel.zero = {zero - 1}"
        raise ConfigError(
            f"batch: this rank's samples make {own} micro-batches, and other ranks' another number, so"
            f" that ranks would wait for messages for ever; give each as many, or use {degree}"
        )


def _sends_each(part: "DataParallel", zero: int) -> bool:
    return part.zero >= zero and isinstance(part.model, FSDPModule)


@contextmanager
def kept_gathered(parts: Iterable["DataParallel"]) -> Iterator[None]:
    """Keep weights that FSDP has gathered after a forward, as long as the step runs.

    Weights that were gathered before the step are freed, since the shards may have changed.
    """
    parts = [*parts]
    if any(part.failed for part in parts):
        raise ConfigError(
            "composition: an error has ended an earlier step midway, and its gradients and gathered"
            " weights would be a part of this one; make a new one by compose.apply"
        )
    try:
        for part in parts:
            part.order, part.keeps_gathered = [], True
            free_gathered(part)
            part.changes.begin(part.model)
        yield
    except Exception as error:
        for part in parts:
            part.failed = isinstance(part.model, FSDPModule) and not isinstance(error, ConfigError)
        raise
    finally:
        for part in parts:
            part.keeps_gathered = False


def end_own_forward(part: "DataParallel", model: nn.Module, *unused: Any) -> None:
    """Shard a model's parameters again after a forward that a caller ran outside of a step.

    Otherwise gathered weights would stay the model's parameters: an optimizer that is made of them
    would train nothing, and the gradients of the shards would be neither cleared nor clipped.
    """
    if not part.keeps_gathered and not torch.compiler.is_compiling():
        _free(model)


def _free(model: nn.Module) -> None:
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def free_gathered(part: "DataParallel") -> None:
    """Free weights that a forward outside of steps has gathered, since the shards may have changed.

    Raise ConfigError for a parameter that was added after ``compose.apply``, if the others have shards,
    and for one that was frozen there, and so rounded, and is trained now.
    """
    model = part.model
    if not isinstance(model, FSDPModule):
        return
    _free(model)
    for name, p in model.named_parameters():
        summed = isinstance(p, DTensor) or (part.sums is not None and not has_shards(p))
        if p.requires_grad and part.master not in (None, p.dtype):
            raise ConfigError(
                f"model: {name} was frozen in compose.apply, and so is kept in {p.dtype}; let it be"
                " trained there, and freeze it afterwards"
            )
        if p.requires_grad and not summed:
            raise ConfigError(
                f"model: the parameter {name} is new since compose.apply, and ranks would not sum its"
                " gradient; add it before, or copy its values into the one that was there"
            )


class Changes:
    """A record of the state that a step's forwards change, which must be equal on several ranks.

    Buffers that a checkpoint has must be equal over the data axes, and the states of PyTorch's
    generators over tp. Each is compared once.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, tuple[Tensor, int]] = {}
        self.state, self.compared = 0, set[str]()
        self.gathered: dict[str, tuple[int, int]] = {}

    def begin(self, model: nn.Module) -> None:
        """Record the state before the forwards."""
        self.buffers, self.state, self.gathered = _buffers(model), _generators(), _gathered(model)

    def lost(self, model: nn.Module) -> str:
        """Return the name of a parameter that was changed where FSDP had gathered it; empty if none."""
        now = _gathered(model)
        return next((name for name, was in self.gathered.items() if now.get(name) != was), "")

    def end(self, model: nn.Module) -> tuple[dict[str, Tensor], int]:
        """Return changed buffers by name, and a digest of the generators if they were drawn from."""
        now, written = _buffers(model), set[str]()
        for name, (buffer, version) in now.items():
            was, earlier = self.buffers.get(name, (None, 0))
            if not (was is buffer and earlier == version):
                written.add(parent(name))
        # A kernel of BatchNorm writes its means without a count; the module itself counts batches.
        new = [name for name in now if parent(name) in written and name not in self.compared]
        changed = {name: now[name][0] for name in new}
        drawn = self.state if "" not in self.compared and self.state != _generators() else 0
        self.compared |= {*changed, *([""] if drawn else [])}
        self.buffers = {}
        return changed, drawn


def without_gradient(model: nn.Module) -> list[str]:
    """Return the names of trained parameters that have no gradient."""
    # Parameters of a unit that stays gathered have no gradients: the sums are those of the shards.
    shards = {getattr(p, "_unsharded_param", None): p.sharded_param for p in fsdp_parameters(model)}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [name for name, p in trained if shards.get(p, p).grad is None]


def lost(name: str, zero: int) -> ConfigError:
    """Return the error for a gradient that a sum over copies of shards would leave out."""
    return ConfigError(
        f"model: {name} has a gradient in some micro-batches of a step alone, and with"
        f" parallel.dp_replicate and parallel.zero = {zero} it would be lost; use parallel.zero = 1, or"
        " let each forward use every parameter, as by adding 0.0 * parameter.sum() to its output"
    )


def _refuse_optimizers(model: nn.Module, replaced: Iterable[tuple[str, Any]]) -> None:
    here = {name for name, _ in model.named_parameters()}
    if held := held_by_optimizers({id(old()): name for name, old in replaced if name in here}):
        raise ConfigError(
            f"optimizer: it has {held} as it was before compose.apply, and so would not train it; make"
            " it afterwards, of model.parameters()"
        )


def held_by_optimizers(names: Mapping[int, str]) -> str:
    """Return the name of a tensor, by its id, that an optimizer of this process has; empty if none."""

    def held() -> str:
        kinds = [x for x in gc.get_objects() if issubclass(type(x), torch.optim.Optimizer)]
        each = [id(p) for x in kinds for group in x.param_groups for p in group["params"]]
        return next((names[key] for key in each if key in names), "")

    if not names or not held():
        return ""
    gc.collect()  # it may be garbage
    return held()


def check_gradients(
    model: nn.Module, parts: Iterable["DataParallel"], mesh: DeviceMesh, device: torch.device
) -> None:
    """Raise ConfigError if ranks have gradients of different parameters in a step.

    A message holds the gradients of a rank without names. So gradients of different parameters would be
    added. It is also raised if forward used a parameter as it was before the model was cut.
    """
    parts = [*parts]
    for part in parts:
        # Most former parameters are gone. One that a closure still uses gets gradients.
        part.replaced = [(name, old) for name, old in part.replaced if old() is not None]
        if part.is_new and part.replaced:
            _refuse_optimizers(model, part.replaced)
        part.is_new = False
        for name, old in part.replaced:
            if getattr(old(), "grad", None) is not None:
                raise ConfigError(
                    f"model: forward uses {name} as it was before the model was cut, as a closure holds"
                    " it, and so it is not trained; look it up in its module"
                )
    axes = (*DATA_AXES, "tp")  # tp sums gradients of weights that are applied to a part of a sequence
    if (ranks := math.prod(axis_size(mesh, axis) for axis in axes)) == 1:
        return
    lacking = [name for part in parts for name in part.lacking] + without_gradient(model)
    changed = False
    for part in parts:
        # With ZeRO-1 ranks may run unequal numbers of micro-batches; only the first and last send.
        units, order = len({*part.order}), part.order
        order = order if part.zero >= 2 else order[:units] + order[-units:]
        changed |= order != part.former_order
        part.order, part.former_order = [], order
    both = f"{' '.join(lacking)} {[part.former_order for part in parts]}"
    buffers, drawn = dict[str, Tensor](), 0
    for part in parts:
        if lost := part.changes.lost(part.model):
            raise ConfigError(
                f"model: forward changes the parameter {lost} where FSDP has gathered it, and the"
                " change is lost; make it between two steps, or use parallel.zero = 0"
            )
        more, drawn = part.changes.end(part.model)
        buffers |= more
    digest = checksums([*buffers.values()]).sum() & 0xFFFFFFFF if buffers else 0
    zero = torch.zeros((), dtype=torch.float64, device=device)
    own, states = torch.stack([zero + zlib.crc32(both.encode()), zero + digest]), zero + drawn
    total = sum_over(own, mesh, DATA_AXES)
    over_tp = sum_over(torch.stack([total[0], states]), mesh, ("tp",))
    # The host waits for a GPU only if a gradient is lacking or something is new. The planner's
    # simulation has no number to read.
    waits = total.is_cuda and (bool(lacking) or changed or bool(buffers) or bool(drawn))
    if type(total) is not Tensor or not (total.is_cpu or waits):
        return
    tp = axis_size(mesh, "tp")
    (gradients, written), (all_gradients, all_states) = own.tolist(), over_tp.tolist()
    if float(total[1]) != written * ranks / tp:
        raise ConfigError(
            f"model: forward changes {', '.join([*buffers][:3])}, and ranks of data change buffers"
            " otherwise, so that each has a model of its own; use GroupNorm in place of BatchNorm,"
            " nn.SyncBatchNorm, or eval() of that module"
        )
    if all_states != drawn * tp:
        raise ConfigError(
            "model: forward draws random numbers, and ranks of tp would draw others, each for its part"
            " of one sample; give them one seed (torch.manual_seed) before the first step"
        )
    if all_gradients != gradients * ranks:
        number = lacking[0].rpartition("/")[0] if lacking else ""
        where = [f"{number}/{name}" if number else name for name, _ in model.named_parameters()]
        name = next((name for name in where if name in lacking), "some parameter").rpartition("/")[2]
        raise ConfigError(
            f"model: {name} has a gradient on some ranks and not on others, or they run units of"
            " plan.shard in another order, so that their sums are wrong; let each forward use every"
            " parameter, as by adding 0.0 * parameter.sum() to its output, and in one order"
        )


def _buffers(model: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Return the buffers that a checkpoint has, with how often they were written to."""
    held = {
        f"{path}.{key}".lstrip("."): local_tensor(buffer)
        for path, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set
    }
    results = dict[str, tuple[Tensor, int]]()
    for name, x in held.items():
        if type(x) is Tensor and not (x.is_meta or x.is_inference()):  # a simulation compares nothing
            results[name] = (x, x._version)
    return results


def _gathered(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return how often gathered weights were written to, except by FSDP, and where they are."""
    records = [(p._param_fqn, getattr(p, "_unsharded_param", None)) for p in fsdp_parameters(model)]
    held = [(name, local_tensor(p)) for name, p in records if p is not None]
    plain = [
        (name, x) for name, x in held if type(x) in (Tensor, nn.Parameter) and not x.is_inference()
    ]
    return {name: (x._version, x.untyped_storage()._cdata) for name, x in plain}


def _generators() -> int:
    """Return a digest of the states of PyTorch's generators."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return sum(zlib.crc32(state.numpy().tobytes()) for state in states if type(state) is Tensor)
