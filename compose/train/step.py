"""Forward, backward and gradient clipping of one optimizer step, the same on every mesh."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from compose.composition import Composition
from compose.errors import ConfigError
from compose.memory.float8 import shared_scales
from compose.ops.batch import IGNORE, Documents, check_rows, count_places, empty, targets_of
from compose.ops.cross_entropy import LossFunction, count_for, cross_entropy
from compose.ops.dropout import DropoutKey
from compose.ops.tensors import local_tensor
from compose.ops.torch_versions import begin_fsdp_backward_at
from compose.parallel.context_parallel import chunk_count, chunk_starts, pad_sequence, shard_sequence
from compose.parallel.expert_parallel import begin_step, finish_step
from compose.parallel.hpz import hpz_shards
from compose.parallel.mesh import AXES, BATCH_AXES, Share, axis_size, batch_share, sum_over
from compose.parallel.output_projection import StepLoss, step_loss
from compose.parallel.step_rules import (
    check_gradients,
    check_loss,
    check_micro_batches,
    kept_gathered,
    said_plainly,
    same_rows,
)


def forward_backward(
    composition: Composition,
    batch: Mapping[str, Tensor],
    *,
    micro_batch: int | Share | None = None,
    loss_function: LossFunction = cross_entropy,
    loss_scale: float = 1.0,
    dropout: DropoutKey | None = None,
) -> Tensor:
    """Accumulate the gradient of the global batch's mean loss.

    The sum of losses is divided by the number of targets in the *global* batch, or by the result of
    ``loss_function.count``. So the result does not depend on how samples and masked targets are spread
    over ranks and micro-batches. Routers (compose/parallel/expert_parallel.py) use the counts of the
    whole batch. After it call ``clip_grad_norm_``, and then the optimizer's ``step``.

    Args:
        composition: What ``compose.apply`` returned.
        batch: This rank's share of the global batch (``compose.parallel.mesh.batch_share``), each
            tensor (samples, ...). ``targets`` goes to ``loss_function``, and all other tensors to the
            model by name. With cp, give whole sequences: tensors of two or more dims are cut along
            their second dim here.
        micro_batch: Samples in one forward; None means the whole share. If ranks have unequal shares
            (``compose.parallel.mesh.deal``), give this rank's Share; rows of padding are then added.
        loss_function: Takes (output, targets) and returns a sum over targets, not a mean. All elements
            are targets except integers of IGNORE and floats of NaN. With a CrossEntropy that has
            ``chunk``, the output projection computes the loss; this needs Plan.output.
        loss_scale: Multiplies the gradients, but not the returned loss. Give ``clip_grad_norm_`` the
            same one, which divides by it.
        dropout: The step's number and the run's seed, for a model with dropout in training mode.

    Returns:
        The mean loss of the global batch, a float64 scalar, the same on every rank. In a pipeline
        without a flush it is 0 except on the last stage (compose/pipeline/pipedream.py).

    Raises:
        ValueError: ``micro_batch`` is below 1.
        ConfigError: The ranks cannot share the sequences, a model with dropout gets no DropoutKey, the
            ranks have gradients of different parameters, tensors of the batch have unequal numbers of
            rows, or the loss is a mean or ignores other targets than IGNORE.
    """
    model, mesh = composition.model, composition.mesh
    targets = targets_of(batch)
    check_loss(loss_function)
    learned = loss_function.parameters() if isinstance(loss_function, nn.Module) else ()
    if any(parameter.requires_grad for parameter in learned):
        raise ConfigError(
            f"loss_function: {type(loss_function).__name__} has parameters that are trained, whose"
            " gradients are not summed over ranks; make them the model's"
        )
    share = None
    if isinstance(micro_batch, Share):
        share, micro_batch = micro_batch, micro_batch.micro_batch
    micro_batch = samples_at_once(batch, micro_batch)
    if any(part.is_new for part in composition.data):
        same_rows(batch, mesh)
    own = count_for(loss_function, targets)
    runs = -(-(len(targets) + (share.padding if share else 0)) // micro_batch)
    counts = torch.stack([own, count_places(batch).to(own), torch.full_like(own, runs)])
    count, places, all_runs = sum_over(counts, mesh, BATCH_AXES).clamp(min=1)
    check_micro_batches(composition.data, runs, all_runs, mesh, zero=2)
    begin_step(model, places, loss_scale)

    if share and share.padding:
        batch = _filled_up(model, batch, share.padding)
    batch = local_batch(composition, batch)
    loss_function, batch = begun(loss_function, composition, batch, micro_batch)
    batch = _with_masks(composition, batch, dropout, share)
    # loss_parallel only changes cross-entropy on DTensors.
    losses = step_loss(loss_function, count / loss_scale, composition.output)
    scales = shared_scales(model, composition.float8)
    hpz = hpz_shards([gather for data in composition.data for gather in data.gathers])
    compressed = composition.compression
    sent = compressed.optimizer_step(loss_scale) if compressed else nullcontext()
    gathered = kept_gathered(composition.data)
    with gathered, scales, loss_parallel(), hpz, sent, losses as loss, said_plainly(mesh):
        if composition.pipeline:
            total = composition.pipeline.run(batch, micro_batch, loss)
        else:
            total = _run(composition, batch, micro_batch, loss)
    check_gradients(model, composition.data, mesh, total.device)
    finish_step(model, mesh)
    axes = (*(() if composition.late else ("pp",)), *BATCH_AXES, "cp")
    return sum_over(total.double(), mesh, axes) / loss_scale


def begun(
    function: LossFunction, composition: Composition, batch: Mapping[str, Any], micro_batch: int | None
) -> tuple[LossFunction, Mapping[str, Any]]:
    """Return the loss and the batch (of :func:`local_batch`) after ``function.begin``, if it exists.

    A loss that compares the model with a reference model runs the reference's forward in ``begin``, and
    puts the result into the targets.
    """
    begin = getattr(function, "begin", None)
    return begin(composition, batch, micro_batch) if begin else (function, batch)


def samples_at_once(batch: Mapping[str, Tensor], micro_batch: int | None) -> int:
    """Return ``micro_batch``, or the samples of the batch for None; ValueError if that is below 1."""
    check_rows(batch, micro_batch)
    size = len(next(iter(batch.values()))) if micro_batch is None else micro_batch
    if size < 1:
        raise ValueError(f"micro_batch: {size} should be at least 1")
    return size


def on_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return a batch on ``device``, without waiting for the copies.

    ``document_ids`` stay in host memory, where :func:`local_batch` computes where documents begin.
    So no step waits for the device.
    """
    if device.type != "cuda":
        return {name: value.to(device) for name, value in batch.items()}
    return {
        name: value if name == "document_ids" else value.pin_memory().to(device, non_blocking=True)
        for name, value in batch.items()
    }


def local_batch(composition: Composition, batch: Mapping[str, Tensor]) -> Mapping[str, Any]:
    """Return the tensors that this rank runs of its share of a batch: with cp, its part of sequences.

    A rank with a part of a sequence cannot count ``positions`` itself, so they are added. A model that
    takes ``documents`` gets the documents (compose.Documents) of the whole sequences in place of
    ``document_ids``. Raises ConfigError if the ranks of tp cannot share the sequences.
    """
    mesh, model = composition.mesh, composition.model
    for name in ("positions", "document_ids"):
        if name in batch and not _takes(model, name) and not _takes(model, "documents"):
            raise ConfigError(
                f"batch: {type(model).__name__}.forward names no {name}, so that it would ignore the"
                " documents of a row; leave it out, with one document in a row"
            )
    cp, tp = axis_size(mesh, "cp"), axis_size(mesh, "tp")
    if cp > 1 and "targets" in batch and batch["targets"].ndim == 1:
        raise ConfigError(
            "batch: targets are one for each sample, and with parallel.cp each rank of a sequence"
            f" counts them; give one for each token, {IGNORE} for none, or use parallel.cp = 1"
        )
    if cp > 1 or composition.pipeline:
        batch = _with_positions(model, batch)
    if cp > 1:
        batch = _padded(composition, batch, chunk_count(cp, composition.balance) * tp)
    else:  # generation has no targets
        _check_length(batch.get("targets", next(iter(batch.values()))), composition.sequence_ranks)
    rest = {name: value for name, value in batch.items() if name != "document_ids"}
    ids, device = batch.get("document_ids"), next(iter(rest.values())).device
    documents = {}
    if ids is not None and _takes(model, "documents"):
        documents = {"documents": Documents(ids, device)}
    elif ids is not None:
        rest["document_ids"] = ids.to(device)
    if cp > 1:
        rest = shard_sequence(rest, mesh["cp"], composition.balance)
    return {**rest, **documents}


def _takes(model: nn.Module, name: str) -> bool:
    return name in signature(type(model).forward).parameters


def _with_masks(
    composition: Composition, batch: Mapping[str, Any], key: DropoutKey | None, share: Share | None
) -> Mapping[str, Any]:
    """Add the samples' numbers to a local batch, if the model has dropout: masks depend on them."""
    if composition.dropout is None:
        return batch
    mesh, (index, _), places = composition.mesh, batch_share(composition.mesh), None
    first = next(iter(batch.values()))
    if axis_size(mesh, "cp") > 1:
        length = next(v.shape[1] for v in batch.values() if isinstance(v, Tensor) and v.ndim > 1)
        starts = chunk_starts(
            mesh.get_local_rank("cp"), axis_size(mesh, "cp"), composition.balance, length
        )
        pieces = [torch.arange(start, start + length // len(starts)) for start in starts]
        places = torch.cat(pieces).to(first.device)
    samples = torch.arange(len(first), device=first.device)
    samples += share.first if share else index * len(first)
    return {**batch, **composition.dropout.begin(key, samples, places)}


def _filled_up(model: nn.Module, batch: Mapping[str, Tensor], rows: int) -> Mapping[str, Tensor]:
    """Add rows of padding to a share of a batch: without targets, and not counted by routers."""
    batch = _with_positions(model, batch)
    more = empty({name: value.new_empty((rows, *value.shape[1:])) for name, value in batch.items()})
    return {name: torch.cat([value, more[name]]) for name, value in batch.items()}


def _padded(composition: Composition, batch: Mapping[str, Tensor], unit: int) -> Mapping[str, Tensor]:
    """Pad sequences. For attention that is not causal, padding must be a document of its own."""
    first, model = next(value for value in batch.values() if value.ndim > 1), composition.model
    length, told = first.shape[1], _takes(model, "documents")
    if length % unit and told and "document_ids" not in batch:
        ids = torch.zeros(first.shape[:2], dtype=torch.int64)  # in host memory, as from the data
        batch = {**batch, "document_ids": ids}
    elif length % unit and not told and not composition.causal:
        raise ConfigError(
            f"batch: attention that is not causal sees the padding of {length} tokens for parallel.cp,"
            f" since forward takes no documents; nearest: {-(-length // unit) * unit}"
        )
    return pad_sequence(batch, unit)


def _with_positions(model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if "positions" in batch or not _takes(model, "positions"):
        return batch
    tokens = next(value for name, value in batch.items() if name != "targets" and value.ndim > 1)
    counted = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
    return {**batch, "positions": counted}


def _check_length(sequences: Tensor, ranks: int) -> None:
    length = sequences.shape[1] if sequences.ndim > 1 else 0
    if length % ranks:
        raise ConfigError(
            f"batch: sequences of {length} tokens cannot be shared by the {ranks} ranks of tp, as"
            f" SequenceParallel in the plan has them; nearest: {-(-length // ranks) * ranks}, padded"
        )


def micro_batches(batch: Mapping[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """Yield parts of ``size`` samples of a batch; the last may have fewer."""
    for start in range(0, len(next(iter(batch.values()))), size):
        yield {name: value[start : start + size] for name, value in batch.items()}


def _run(whole: Composition, batch: Mapping[str, Any], micro_batch: int, loss: StepLoss) -> Tensor:
    """Run forward and backward of one micro-batch after another, and return the sum of their losses."""
    model, data = whole.model, whole.data[0]
    total = torch.zeros((), device=batch["targets"].device)
    parts = list(micro_batches(batch, micro_batch))
    for number, part in enumerate(parts):
        data.prepare_micro_batch(last=number == len(parts) - 1)
        targets = part.pop("targets")
        loss.expect(targets)
        output = model(**part)
        value = loss(output, targets)
        begin_fsdp_backward_at(value, model, output)
        del output  # otherwise its memory would stay during backward
        value.backward()
        data.end_micro_batch()
        total = total + value.detach()  # not in place: the loss may be wider than float32
    return total


@torch.no_grad()
def clip_grad_norm_(composition: Composition, max_norm: float, loss_scale: float = 1.0) -> Tensor:
    """Scale all gradients in place so that their global 2-norm is at most ``max_norm``.

    The norm counts every element of every parameter once, on every mesh. The formula is that of
    ``torch.nn.utils.clip_grad_norm_``.

    Args:
        composition: What ``compose.apply`` returned.
        max_norm: The limit; 0 turns clipping off.
        loss_scale: The ``loss_scale`` of ``forward_backward``. The gradients are divided by it first.

    Returns:
        The norm before clipping and without the scale, a float64 scalar, the same on every rank. In a
        pipeline without a flush it is the norm of the stage's own gradients.

    Raises:
        ValueError: A gradient has not been summed over ranks yet, or ``max_norm`` is not 0 in a
            pipeline without a flush.
    """
    if composition.late and max_norm > 0:
        raise ValueError("max_norm: no stage of a pipeline without a flush waits for the others' norms")
    lists = _gradients(composition, composition.model)
    # Gradients may be in host memory.
    total = _share(lists).to(composition.mesh.device_type)
    axes = [axis for axis in AXES if axis != "pp" or not composition.late]
    norm = sum_over(total, composition.mesh, axes).sqrt() / loss_scale
    if max_norm > 0 or loss_scale != 1:
        clipped = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm > 0 else torch.ones_like(norm)
        scale = clipped / loss_scale
        for some in lists.values():
            torch._foreach_mul_(some, scale.to(some[0]))
    return norm


@torch.no_grad()
def squared_norm_share(composition: Composition, part: nn.Module) -> Tensor:
    """Return what this rank adds to the squared norm of the gradients of ``part``, a float64 scalar.

    The sum over all ranks counts every element once. ValueError as for :func:`clip_grad_norm_`.
    """
    return _share(_gradients(composition, part))


_Lists = dict[tuple[int, torch.dtype, torch.device], list[Tensor]]
"""Gradients by the number of ranks that hold them, and by type and device, for few kernel launches."""


def _gradients(composition: Composition, part: nn.Module) -> _Lists:
    mesh, mine = composition.mesh, set(part.parameters())
    stage = mesh.size() // axis_size(mesh, "pp")
    lists: _Lists = {}
    for name, parameter in composition.named_parameters():
        if parameter not in mine or (gradient := parameter.grad) is None:
            continue
        # A stage's parameters are on one rank of the pp axis; a tied one is on one rank per holder.
        local, copies = local_tensor(gradient), stage * composition.holders(name)
        if isinstance(gradient, DTensor):
            for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
                if placement.is_partial():
                    raise ValueError(f"a gradient is still to be summed: {gradient.placements}")
                copies //= 1 if placement.is_replicate() else size
        lists.setdefault((copies, local.dtype, local.device), []).append(local)
    return lists


def _share(lists: _Lists) -> Tensor:
    norms: dict[int, list[Tensor]] = {}
    for (copies, dtype, _), some in lists.items():
        wide = torch.promote_types(dtype, torch.float32)
        norms.setdefault(copies, []).extend(torch._foreach_norm(some, 2, dtype=wide))
    # Every one of the n ranks that hold an element adds 1/n of its square to the sum over all ranks.
    squares = [torch.stack(some).double().square().sum() / copies for copies, some in norms.items()]
    return torch.stack(squares or [torch.zeros((), dtype=torch.float64)]).sum()
