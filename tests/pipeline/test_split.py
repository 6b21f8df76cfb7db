"""A model whose forward does more than call the modules of its stages cannot be cut."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel

from compose import Options, Parallel, Pipeline, Plan, Trial, apply, forward_backward, verify
from compose.parallel.output_projection import CrossEntropy
from compose.pipeline.split import balanced, split
from compose.proof.report import Report
from tests.support.helpers import proved, refusal
from tests.support.pool import Pool, make_mesh

CURE = "or use parallel.pp = 1 (docs/plan.md, Pipeline parallel)"
LATER = "a later stage calls {} with the stream {} in place of tokens{}; take lengths, positions and"
LATER += " masks from other inputs of the model, " + CURE


class Embedding(nn.Module):
    """It is called by keyword, with the tokens second."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 6)

    def forward(self, tokens: Tensor, shift: float = 0.0) -> Tensor:
        return self.table(tokens) + shift


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, hidden: Tensor, scale: Tensor | None = None) -> tuple[Tensor, None]:
        scaled = self.linear(self.norm(hidden)).tanh()
        return hidden + (scaled if scale is None else scaled * scale.mean()), None


class Model(nn.Module):
    """Its layers return a tuple; what subclasses do to the stream they do in ``between``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(6, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x, scale = self.between(self.embedding(shift=0.5, tokens=tokens), tokens)
        for layer in self.layers:
            x = layer(x, scale=scale)[0]
        return self.head(x)

    def between(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, None


class Added(Model):
    """GPT-2 of transformers adds positions so."""

    def between(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return x + torch.arange(x.shape[1])[:, None], None


class Unpacked(Model):
    def between(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        _, length = tokens.shape
        return x, torch.ones(length)


class Masked(Model):
    def between(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, (tokens != 0).float().flatten(1)[:, :4]


class Long(Model):
    def between(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, torch.ones(tokens.shape[1])


class InPlace(Model):
    def between(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return x.mul_(2.0), None


class FromTheFirst(Model):
    """All layers get what the first one got."""

    def between(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, x


class Counted(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(shift=0.5, tokens=tokens)
        for number, layer in enumerate(self.layers):
            x, _ = layer(x, scale=torch.full((1,), number + 1.0))
        return self.head(x)


class HandedOn(Model):
    """A layer takes what the layers before it made."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, scale = self.between(self.embedding(shift=0.5, tokens=tokens), tokens)
        for layer in self.layers:
            before = x
            x, _ = layer(x, scale=scale)
            scale = x - before
        return self.head(x)


class FromTheEmbedding(Model):
    """A skip connection that crosses stages."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = before = self.embedding(shift=0.5, tokens=tokens)
        for layer in self.layers:
            x = layer(x)[0] + before
        return self.head(x)


class ScaledAtTheEnd(Model):
    """A stage has another last layer."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(shift=0.5, tokens=tokens)
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x)[0] * (3.0 if number == len(self.layers) else 1.0)
        return self.head(x)


class RegularizedByItsWeights(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + sum(p.square().sum() for p in self.parameters())


class RunTwice(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(shift=0.5, tokens=tokens)
        for layer in [*self.layers, *self.layers]:
            x, _ = layer(x)
        return self.head(x)


class Numbered(Model):
    """nn.TransformerEncoder looks at its first layer so."""

    def between(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, None if self.layers[0].training else torch.ones(1)


CHANGED = "{} does something to the stream outside the modules of first, layers and last: without them"
CHANGED += " it takes (1, 4, 6) and returns (1, 4, 6), not the same; do that in a module of first or"
CHANGED += " last, " + CURE
IN_STAGE = (
    "{0} gets {1} = {2} in its stage, and {3}, not the same, if all layers are there: a stage hands"
)
IN_STAGE += (
    " on the stream alone, and counts its layers anew; let {1} depend on nothing but what the layer"
)
IN_STAGE += " before returned, " + CURE
STREAM = "(1, 4, 6)"


PIPELINE = Pipeline(["embedding"], "layers", ["head"])


def _batch() -> dict[str, Tensor]:
    tokens = torch.randint(8, (2, 5), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def _verified() -> Report:
    """Its layers are shared out by FLOPs."""
    mesh, options = make_mesh(Parallel(pp=2)), Options(Parallel(pp=2))
    return verify(Model(), Plan(pipeline=PIPELINE), mesh, _batch(), options, Trial(micro_batch=1))


def test_called_by_keyword(pool: Pool) -> None:
    proved(pool.run(_verified, 2))


class Counting(Model):
    """Its embedding counts its calls, as running means do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.register_buffer("calls", torch.zeros(()))
        self.embedding.register_forward_pre_hook(self.count)

    @staticmethod
    def count(module: Any, args: Any) -> None:
        module.calls += 1


def _calls_of_the_embedding() -> float:
    model, parallel = Counting(), Parallel(pp=2)
    composition = apply(model, Plan(pipeline=PIPELINE), make_mesh(parallel), Options(parallel))
    forward_backward(composition, _batch(), micro_batch=1)
    return float(getattr(model.embedding, "calls", 0.0))


def test_a_trial_leaves_buffers_as_they_were(pool: Pool) -> None:
    assert pool.run(_calls_of_the_embedding, 2) == [2.0, 0.0]


def test_a_balanced_model_keeps_a_forward_of_a_layers_own() -> None:
    model = Model()
    layer: Any = model.layers[1]
    own = layer.forward = partial(Layer.forward, layer)
    balanced(model, PIPELINE, 2, 8)
    assert [vars(layer).get("forward") for layer in model.layers] == [None, own, None, None]


class Ending(Model):
    """Its projection is within a module that the last stage alone has."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8, bias=False))


def _ends() -> Report:
    mesh, options = make_mesh(Parallel(pp=2)), Options(Parallel(pp=2))
    plan, trial = Plan(pipeline=PIPELINE, output="head.1"), Trial(1, CrossEntropy(chunk=2))
    return verify(Ending(), plan, mesh, _batch(), options, trial)


def test_a_projection_within_a_module_of_the_last_stage(pool: Pool) -> None:
    proved(pool.run(_ends, 2))


def _refused(kind: type[Model], tp: int) -> str:
    parallel = Parallel(pp=2, tp=tp, pp_layers=(2, 2))
    tensor: Any = {
        "embedding.table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.norm": SequenceParallel(use_local_output=True),
        "layers.*.linear": SequenceParallel(use_local_output=True),
        "head": SequenceParallel(use_local_output=True),
    }
    plan = Plan(tensor=tensor if tp > 1 else {}, pipeline=PIPELINE)
    composition = apply(kind(), plan, make_mesh(parallel), Options(parallel))
    return refusal(forward_backward, composition, _batch(), micro_batch=1)


@pytest.mark.parametrize(
    ("kind", "tp", "line"),
    [
        (Added, 1, CHANGED.format("Added")),
        (
            Unpacked,
            1,
            "ValueError: too many values to unpack (expected 2) (in forward of Unpacked): "
            + LATER.format("Unpacked", "(1, 4, 6)", ""),
        ),
        (
            Masked,
            1,
            "layers get scale = (1, 4) in the first stage, and (1, 4), not the same, in others: "
            + LATER.format("Masked", "(1, 4, 6)", ""),
        ),
        (InPlace, 1, CHANGED.format("InPlace")),
        (FromTheFirst, 1, IN_STAGE.format("layers.2", "scale", "the stream", STREAM)),
        (Counted, 1, IN_STAGE.format("layers.2", "scale", "(1,)", "(1,)")),
        (HandedOn, 1, IN_STAGE.format("layers.2", "scale", "None", STREAM)),
        (FromTheEmbedding, 1, IN_STAGE.format("layers.3", "hidden", STREAM, STREAM)),
        (ScaledAtTheEnd, 1, IN_STAGE.format("layers.2", "hidden", STREAM, STREAM)),
        (RegularizedByItsWeights, 1, IN_STAGE.format("layers.2", "hidden", STREAM, STREAM)),
        (
            RunTwice,
            1,
            "RunTwice does not call layers in their order, and what is last after them; a stage calls"
            f" its own alone; do so, {CURE}",
        ),
        (
            Numbered,
            1,
            "a forward looks up layers by number or name, and a stage holds only some; iterate over all"
            f" of them, {CURE}",
        ),
        pytest.param(
            Long,
            2,
            "layers get scale = (4,) in the first stage, and (2,), not the same, in others: "
            + LATER.format("Long", "(1, 2, 6)", " (with SequenceParallel the stream is L / tp long)"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_refused_on_every_rank(pool: Pool, kind: type[Model], tp: int, line: str) -> None:
    result = pool.run(_refused, 2 * tp, kind, tp)
    assert result == [f"plan.pipeline: {line}"] * 2 * tp


class Steered(Model):
    """Its layers get an attribute, which a loop sets."""

    scale: Tensor | None = None

    def between(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, self.scale


def _steered() -> float:
    """The greatest error of three losses, of steps before which the loop sets the attribute, or not."""
    torch.manual_seed(0)
    model, parallel, batch = Steered(), Parallel(pp=2), _batch()
    plain = copy.deepcopy(model)
    composition = apply(model, Plan(pipeline=PIPELINE), make_mesh(parallel), Options(parallel))
    error = 0.0
    for scale in (None, torch.full((1,), 3.0), torch.full((1,), 9.0)):
        model.scale = plain.scale = scale
        loss = forward_backward(composition, batch, micro_batch=1)
        logits = plain(batch["tokens"]).flatten(0, 1)
        wanted = nn.functional.cross_entropy(logits, batch["targets"].flatten())
        error = max(error, float((loss - wanted).detach().abs()))
    return error


def test_stages_get_what_a_loop_sets_on_the_model(pool: Pool) -> None:
    assert max(pool.run(_steered, 2)) < 1e-6


def test_a_forward_of_the_object_is_refused() -> None:
    model: Any = Model()
    model.forward = partial(Model.forward, model)
    whole = replace(PIPELINE, whole_forward=True)
    for pipeline in (PIPELINE, whole):
        assert refusal(split, model, pipeline, (2, 2), [0]) == (
            "plan.pipeline: the forward of Model was set on that object, and stages run that of its"
            " class; write it as a method of a subclass of Model, or use parallel.pp = 1"
        )
