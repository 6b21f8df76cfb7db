"""The rules between keys: one table. Each rule has a condition, a reason and a cure.

The checks run before any process group is started. ``compose.apply`` checks the rules of the
composition (composition_rules.py) again, for users who call it without a config. The rules here are
those of a run: what its batch, data and optimizer need besides. ``python -m compose.config.rules``
prints docs/composition.md from the whole table.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from compose.config import composition_rules, setup
from compose.config.addons import provided
from compose.config.composition_rules import COMPOSITION, segment_is_short
from compose.config.job import Job, make_job, share_problems
from compose.config.models import find_model, max_seq_len
from compose.config.setup import Rule, Rules, Target
from compose.config.tables import Config
from compose.errors import ConfigError, noted, toml_value
from compose.object_storage import Remote, as_path
from compose.ops.tensors import tied_names
from compose.optim.lr_schedule import rate_problems
from compose.optim.parameter_rules import parameter_rules
from compose.parallel.mesh import divisors, meshes, resolve_degrees
from compose.parallel.name_patterns import around
from compose.parallel.tensor_parallel import sequence_ranks
from compose.pipeline.schedules import build_table, placement
from compose.pipeline.split import balanced, layer_names, stages_of

RUN = Rules[Job](composition_rules.RUN_OF_STEP)


@RUN.add(
    "the keys suit what the model learns",
    "the task of the model's folder reads some keys otherwise, or not at all",
)
def _task(job: Job) -> Iterator[str]:
    if task := find_model(job.config.model.name).task:
        yield from task.check(job.config)


RUN.add(
    "global_batch is a multiple of dp_replicate x dp_shard x micro_batch; with run.elastic, or"
    " parallel.speeds, which has a speed for each of these ranks, it need not be, but then float8,"
    " noise_scale and islands are off",
    "every rank runs the same number of equal micro-batches, since collectives must match; unequal"
    " shares are filled up with padding",
)(share_problems)


@RUN.add(
    "with sequence, or with experts, and without cp, seq_len is a multiple of tp",
    "a local tensor carries no global shape, so every rank must hold an equal part",
)
def _sequence(job: Job) -> Iterator[str]:
    seq_len, tp = job.config.train.seq_len, job.degrees.tp
    # With cp, a sequence is padded to a length that both degrees divide.
    if seq_len % sequence_ranks(job.model, job.resolved.tensor, tp) == 0 or job.degrees.cp > 1:
        return
    nearest = max(1, round(seq_len / tp)) * tp
    why, cure = "parallel.sequence", ", or parallel.sequence = false"
    if job.plan.expert:
        why, cure = "a mixture of experts", ""
    yield (
        f"train.seq_len: {seq_len} is not a multiple of parallel.tp {tp}, which {why} needs; nearest:"
        f" {nearest}{cure}"
    )


@RUN.add(
    "seq_len is at most model.max_seq_len, if the model has this key",
    "a table of positions has no row for a later token",
)
def _positions(job: Job) -> Iterator[str]:
    seq_len, most = job.config.train.seq_len, max_seq_len(job.config.model.config)
    if most is not None and seq_len > most:
        # In a model with a table the length is a key; in others it follows from their RoPE.
        own = "max_seq_len" in vars(job.config.model.config)
        yield (
            f"train.seq_len: {seq_len} is more than the {most} positions that the model has;"
            f" nearest: {most}{f', or model.max_seq_len = {seq_len}' if own else ''}"
        )


@RUN.add(
    "the schedule can run as many micro-batches as global_batch and micro_batch make",
    "interleaved schedules go in rounds of equal length; DualPipeV fills every stage first",
    upstream="torch/distributed/pipelining/schedules.py, ScheduleInterleaved1F1B,"
    " ScheduleInterleavedZeroBubble and ScheduleDualPipeV, __init__",
)
def _micro_batches(job: Job) -> Iterator[str]:
    degrees, counts = job.degrees, {share.micro_batches for share in job.shares} or {job.micro_batches}
    problems, pipeline = list[str](), job.resolved.pipeline
    # Another rule refuses more ranks than layers, for which a table takes long to make.
    short = pipeline is not None and degrees.pp > len(layer_names(job.model, pipeline)) + 2
    for count in sorted(counts - {0}) if degrees.pp > 1 and not short else ():
        with noted(problems):
            build_table(degrees.pp_schedule, degrees.pp, degrees.pp_virtual_stages, count)
    times = degrees.dp_replicate * degrees.dp_shard * job.config.train.micro_batch
    for problem in problems:
        equal = "; nearest: " in problem and not job.shares
        unit = f" (train.global_batch is {times} times that)" if equal else ""
        yield problem + unit


@RUN.add(
    "with metrics.noise_scale, a step has several micro-batches, and each one's gradient can be summed",
    "the noise is the difference between the gradient of one micro-batch and that of all",
)
def _noise_scale(job: Job) -> Iterator[str]:
    train, degrees, quantized = job.config.train, job.degrees, job.config.comm.gradients
    if not job.config.metrics.noise_scale or not job.micro_batches:
        return
    if job.micro_batches == 1:
        problem = "compares a step's first micro-batch with all of them, and the step has one"
        cure = f"train.global_batch = {2 * train.global_batch}"
        if train.micro_batch > 1:
            cure = f"train.micro_batch = {divisors(train.micro_batch)[-2]}"
    elif quantized != "off":
        problem = f'reads exact sums, and comm.gradients = "{quantized}" rounds them'
        cure = 'comm.gradients = "off"'
    elif job.setup.splits_backward:
        problem = f"reads the gradients of one backward, and {degrees.pp_schedule} runs it in two parts"
        cure = 'parallel.pp_schedule = "Interleaved1F1B"'
    elif degrees.pp > 1 and tied_names(job.model):
        problem = "reads sums, and weights that stages share are summed at the end of a step"
        cure = "parallel.pp = 1"
    else:
        return
    yield f"metrics.noise_scale: true {problem}; use {cure}, or false"


@RUN.add(
    'metrics.slow_rank, and parallel.speeds = "measure", go without compile.mode = "model"',
    "layers are timed one by one, and a graph of the whole model has no layers",
)
def _timed(job: Job) -> Iterator[str]:
    slow, compiled = job.config.metrics.slow_rank, job.config.compile.mode
    if compiled == "model" and (slow or job.degrees.speeds == "measure"):
        key = f"metrics.slow_rank: {slow}" if slow else 'parallel.speeds: "measure"'
        yield f'{key} times layers, and compile.mode = "model" has none; use compile.mode = "block"'


@RUN.add(
    "metrics.samples_every goes with metrics.prompts, and with a model that continues a text",
    "without a prompt there is no sample, and other tasks make none of a text",
)
def _samples(job: Job) -> Iterator[str]:
    options, name = job.config.metrics, job.config.model.name
    key = f"metrics.samples_every: {options.samples_every}"
    if options.samples_every and find_model(name).task:
        yield f"{key} continues texts, and model.name = {name} learns no text; use 0"
    elif options.samples_every and not (options.prompts and all(options.prompts)):
        yield f'{key} needs texts to continue; set metrics.prompts, as ["Once upon a time"], or 0'


RUN.add("the other keys of samples go with metrics.samples_every", "without it they are never read")(
    setup.all_keys_read("metrics", lambda job: job.config.metrics)
)


@RUN.add(
    "with train.loss_chunk, the plan names the output projection", "a loss in chunks takes its place"
)
def _output(job: Job) -> Iterator[str]:
    if job.config.train.loss_chunk and not job.plan.output:
        yield (
            f"train.loss_chunk: {job.config.train.loss_chunk} needs a projection whose output are the"
            " logits, and the model's plan names none (plan.output); use train.loss_chunk = 0"
        )


@RUN.add(
    "data.validation and train.validate_every go together",
    "one says on what the loss is measured, the other when",
)
def _validation(job: Job) -> Iterator[str]:
    every, path = job.config.train.validate_every, job.config.data.validation
    if every and not path:
        yield f"train.validate_every: {every} has nothing to measure; set data.validation"
    if path and not every:
        yield f"data.validation: {path} is never read; set train.validate_every too"


@RUN.add(
    "train.patience and checkpoint.keep_best go with train.validate_every, and keep_best with"
    " checkpoint.interval",
    "they compare validation losses, and a run without checkpoints has none to keep",
)
def _best(job: Job) -> Iterator[str]:
    train, keep = job.config.train, job.config.checkpoint
    for key, value in (("train.patience", train.patience), ("checkpoint.keep_best", keep.keep_best)):
        if value and not train.validate_every:
            yield (
                f"{key}: {value} compares validation losses, and none is measured; set"
                f" train.validate_every and data.validation, or {key} = 0"
            )
    if keep.keep_best and not keep.interval:
        yield (
            f"checkpoint.keep_best: {keep.keep_best} keeps checkpoints, and the run has none; set"
            " checkpoint.interval, or checkpoint.keep_best = 0"
        )


RUN.add("run.min_ranks goes with run.elastic", "no other run chooses its mesh")(
    setup.all_keys_read("run", lambda job: job.config.run)
)


@RUN.add(
    "with checkpoint.memory, run.dir is a folder of this machine, checkpoint.resume is auto, and there"
    " are no islands, no adapters and no optimizer.offload",
    "a restart knows its copies by run.dir; islands go on from one step; the others are not proved",
)
def _copies(job: Job) -> Iterator[str]:
    config = job.config
    if not config.checkpoint.memory:
        return
    key = f"checkpoint.memory: {config.checkpoint.memory}"
    if not config.run.dir:
        yield f"{key} needs a run.dir, by which a restart knows its copies; set run.dir, or use 0"
    elif isinstance(as_path(config.run.dir), Remote):
        yield f"{key} goes with a run.dir of this machine, and {config.run.dir} is none; use 0"
    if config.checkpoint.resume == "none":
        yield f'{key} is for a restart, and checkpoint.resume = "none" begins anew; use "auto", or 0'
    if job.islands > 1:
        yield f"{key} does not go with islands, which go on from one step; use outer.every = 0, or 0"
    for other, value, needed in (
        ("optimizer.offload", config.optimizer.offload, "none"),
        ("model.lora.rank", config.model.lora.rank, 0),
    ):
        if value != needed:
            yield (
                f"{key} is not proved with {other} = {toml_value(value)}; use checkpoint.memory = 0, or"
                f" {other} = {toml_value(needed)}"
            )


RUN.add("train.min_delta goes with train.patience", "without it nothing counts improvements")(
    setup.all_keys_read("train", lambda job: job.config.train)
)


RUN.add(
    "optimizer.warmup_from is below optimizer.warmup, and optimizer.decay_end is 0 or above it",
    "the learning rate rises in warmup, and cannot fall before it has risen",
)(lambda job: rate_problems(job.config.optimizer))


@RUN.add(
    "the patterns of lr_scale, weight_decay_scale and muon_except name parameters; with muon,"
    " layers hold matrices",
    "a mistyped pattern would leave what it means as it is, and muon without matrices is AdamW",
)
def _optimizer(job: Job) -> None:
    parameter_rules(job.model, job.plan, job.config.optimizer)


@RUN.add(
    "with optimizer.offload, the optimizer is the fused AdamW, its state and the weights float32",
    "its step is taken piece by piece: Muon needs matrices whole, and pieces in bfloat16 are not"
    " written",
)
def _optimizer_offload(job: Job) -> Iterator[str]:
    options, precision = job.config.optimizer, job.config.precision
    if options.offload == "none":
        return
    needs = {
        "optimizer.name": (options.name, "adamw"),
        "optimizer.implementation": (options.implementation, "fused"),
        "precision.optimizer_state": (precision.optimizer_state, "float32"),
        "precision.master": (precision.master, "float32"),
    }
    for key, (value, needed) in needs.items():
        if value != needed:
            why = f'{value} with optimizer.offload = "{options.offload}"'
            yield f'{key}: {why}; use "{needed}", or optimizer.offload = "none"'


@RUN.add(
    "with model.lora, routers keep their biases",
    "an export of adapters could not hold what else has changed",
)
def _frozen_routers(job: Job) -> Iterator[str]:
    rate = getattr(job.config.model.config, "bias_rate", 0.0)
    if job.config.model.lora.rank and rate:
        yield (
            f"model.bias_rate: {rate:g} moves the biases of routers, and model.lora freezes all but"
            " adapters; use model.bias_rate = 0.0"
        )


@RUN.add(
    "with model.lora.base int8 or nf4, tp is 1, and compile, float8 and comm.weights are off; with"
    " model.lora.dora, float8 is off",
    "bytes are no matrix to cut, trace, multiply or compress; a float8 weight has no norms",
)
def _quantized_base(job: Job) -> Iterator[str]:
    lora, config = job.config.model.lora, job.config
    if lora.base != "full" and importlib.util.find_spec("torchao") is None:
        yield (
            f"model.lora.base: \"{lora.base}\" needs torchao; pip install 'dtensor-compose[float8]', or"
            ' use model.lora.base = "full"'
        )
        return
    asked = [("precision.float8", config.precision.float8, "off")]
    why = "model.lora.dora = true"
    if lora.base != "full":
        why = f'model.lora.base = "{lora.base}"'
        asked += [("parallel.tp", job.degrees.tp, 1), ("compile.mode", config.compile.mode, "off")]
        asked += [("comm.weights", config.comm.weights, "off")]
    for key, value, only in asked if lora.dora or lora.base != "full" else ():
        if value != only:
            yield f"{key}: {toml_value(value)} does not go with {why}; use {toml_value(only)}"


@RUN.add(
    "with pp, every stage has a trained weight; with model.lora, an adapter",
    "a stage that trains nothing has no backward, for which the stages after it wait",
)
def _trained(job: Job) -> Iterator[str]:
    pipeline, layers = job.plan.pipeline, job.degrees.pp_layers
    if job.degrees.pp == 1 or pipeline is None or not layers:
        return
    stage_of = stages_of(job.model, pipeline, layers)
    weights = job.model.named_parameters(remove_duplicate=False)
    trained = {stage_of.get(outer) for name, p in weights if p.requires_grad for outer in around(name)}
    # Another rule speaks of stages without layers between the ends.
    for stage in sorted({0, len(layers) - 1, *stage_of.values()} - trained)[:1]:
        start, count = sum(layers[:stage]), layers[stage]
        held = f"layers {start} to {start + count - 1}" if count else "no layers"
        key, lack, cure = "parallel.pp_layers", "trained weight", "give it one, or use parallel.pp = 1"
        if job.config.model.lora.rank:
            key, lack = "model.lora.targets", "adapter"
            cure = "name layers of every stage, or set parallel.pp_layers"
        yield (
            f"{key}: stage {stage} of the pipeline, with {held}, has no {lack} and so no gradient;"
            f" {cure}"
        )


@RUN.add("with parallel.offload, the optimizer is AdamW", "Muon's messages are the device's")
def _muon_offload(job: Job) -> Iterator[str]:
    if job.degrees.offload != "none" and job.config.optimizer.name != "adamw":
        yield (
            f"optimizer.name: {job.config.optimizer.name} sends matrices from device to device, and"
            f' parallel.offload = "cpu" has them in host memory; use "adamw", or parallel.offload ='
            ' "none"'
        )


RUN += [rule for _, rules in provided("RUN_RULES") for rule in rules]
RULES: list[Rule[Any]] = [*COMPOSITION, *RUN]


def check(
    config: Config, world_size: int, target: Target | None = None, model: nn.Module | None = None
) -> Job:
    """Return the job of a config on a number of ranks, with its degrees and its stages' layers.

    ``target`` are the devices that it is planned for; None: those of this machine. ``model`` is the
    config's on meta, if it is there already.
    Raises ConfigError, with all problems, if it is not legal.
    """
    degrees = resolve_degrees(config.parallel, world_size)
    job = replace(make_job(replace(config, parallel=degrees), world_size, model), target=target)
    problems = setup.problems_of(COMPOSITION, job.setup) + setup.problems_of(RUN, job)
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    if degrees.pp == 1:
        return job
    if not degrees.pp_layers:
        ranks = placement(degrees.pp_schedule, degrees.pp, degrees.pp_virtual_stages)
        speeds = [degrees.stage_speeds[rank] for rank in ranks]
        assert job.plan.pipeline is not None
        layers = balanced(job.model, job.plan.pipeline, len(ranks), job.options.sample, speeds)
        job = replace(job, config=replace(job.config, parallel=replace(degrees, pp_layers=layers)))
    # These rules read the layers of stages, which are known only now.
    if problems := [*_trained(job), *segment_is_short(job.setup)]:
        raise ConfigError(*problems)
    return job


def survey(config: Config, world_size: int) -> Iterator[tuple[dict[str, int], list[str]]]:
    """Yield the degrees of each mesh of so many ranks, with the problems of ``config`` on it."""
    model = find_model(config.model.name).on_meta(config.model.config)
    for degrees in meshes(world_size):
        problems = list[str]()
        with noted(problems):
            parallel = replace(config.parallel, **degrees)
            check(replace(config, parallel=parallel), world_size, model=model)
        yield degrees, problems


if __name__ == "__main__":
    print(setup.markdown(RULES))
