"""The parts of a plan that belong to shared layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleInputOutput

from compose import Parallel, Pipeline, Plan
from compose.parallel.context_parallel import ContextParallel
from compose.parallel.expert_parallel import ExpertParallel, GatherSequence
from compose.parallel.local_parallel import (
    LocalColwise,
    LocalHeads,
    LocalInput,
    LocalLinear,
    LocalNorm,
    LocalRowwise,
    LocalWideNorm,
)
from compose.parallel.vocabulary_parallel import LocalEmbedding, LocalOutput


def residual_stream(parallel: Parallel) -> Placement:
    """Return the layout of the residual stream between layers, (B, L, D) over tp."""
    return Shard(1) if parallel.sequence else Replicate()


def grouped_attention(stream: Placement, n_kv_heads: int) -> dict[str, ParallelStyle]:
    """Return the entries of ``tensor`` for each layer's attention of wq, wk, wv and wo."""
    name = "layers.*.attention"
    return {
        name: LocalInput(stream, inputs=4),
        f"{name}.wq": LocalColwise(),
        f"{name}.w[kv]": LocalHeads(n_kv_heads),
        f"{name}.wo": LocalRowwise(stream),
    }


def feed_forward(name: str, stream: Placement, even: bool) -> dict[str, ParallelStyle]:
    """Return the entries of ``tensor`` for a feed-forward network of w1, w2 and, if it is gated, w3.

    ``name`` is the pattern of the layer, ``stream`` the layout of its input and output, (B, L, D) over
    tp. ``even``: tp divides its inner width.
    """
    return {
        name: LocalInput(stream),
        f"{name}.w[13]": LocalColwise(even),
        f"{name}.w2": LocalRowwise(stream),
    }


def qk_norms(kind: str, n_heads: int, n_kv_heads: int) -> dict[str, ParallelStyle]:
    """Return the entries of ``tensor`` for RMSNorms of queries and keys: none, of heads, or "width"."""
    if kind == "none":
        return {}
    if kind == "width":
        names = {"q": n_heads, "k": n_kv_heads}
        return {f"layers.*.attention.{one}_norm": LocalWideNorm(heads) for one, heads in names.items()}
    # They are whole and run on this rank's heads, so their gradients are summed over tp.
    return {"layers.*.attention.[qk]_norm": LocalNorm(sequence_dim=2)}


def float8_feed_forward(name: str) -> list[str]:
    """Return the entries of ``float8`` for the same layer."""
    return [name, f"{name}.w[123]"]


def outermost(n_layers: int) -> list[str]:
    """Return the first layer and the last, which lose most by float8; none if there are no others."""
    return ["layers.0", f"layers.{n_layers - 1}"] if n_layers > 2 else []


@dataclass(frozen=True)
class MoEPlan:
    """The cut of a layers.moe.MoE: its entries in ``tensor``, ``expert`` and ``context`` of a Plan."""

    name: str
    """The pattern of the layer."""
    stream: Placement
    """The layout of its input, (B, L, D) over tp."""
    tp: int
    """The tensor-parallel degree."""
    shared_dim: int = 0
    """Inner width of the shared expert; 0 without one."""
    shared_gate: bool = False
    """Whether the shared expert has a gate."""

    @property
    def tensor(self) -> dict[str, ParallelStyle]:
        """The entries of ``tensor``."""
        styles: dict[str, ParallelStyle] = {
            # A rank routes its own part of the tokens, so that no work is done twice.
            self.name: PrepareModuleInputOutput(
                input_layouts=(self.stream, Replicate()),
                desired_input_layouts=(Shard(1), Shard(1)),
                use_local_input=True,
                output_layouts=Shard(1),
                desired_output_layouts=self.stream,
            ),
            f"{self.name}.router": GatherSequence(),
            # The gate is whole and runs on this rank's tokens (T, D): its gradient is summed over tp.
            f"{self.name}.router.gate": LocalLinear(),
        }
        if self.shared_dim:
            styles |= feed_forward(f"{self.name}.shared", Shard(1), self.shared_dim % self.tp == 0)
        if self.shared_gate:
            styles[f"{self.name}.shared_gate"] = LocalLinear()
        return styles

    @property
    def compile(self) -> list[str]:
        """The compiled parts of such layers: all but the router, whose hooks are outside of graphs."""
        layer = self.name.rpartition(".")[0]
        names = [f"{layer}.attention_norm", f"{layer}.attention", f"{layer}.ffn_norm"]
        names.append(f"{self.name}.experts")
        return names + ([f"{self.name}.shared"] if self.shared_dim else [])

    @property
    def float8(self) -> list[str]:
        """The shared expert alone: the products of the others are grouped, and not nn.Linear's."""
        return float8_feed_forward(f"{self.name}.shared") if self.shared_dim else []

    @property
    def expert(self) -> dict[str, ParallelStyle]:
        """The entries of ``expert``."""
        return {f"{self.name}.experts": ExpertParallel()}

    @property
    def context(self) -> dict[str, ParallelStyle]:
        """The entries of ``context``."""
        return {f"{self.name}.router": GatherSequence()}


def decoder(
    model: Any,
    parallel: Parallel,
    attention: Mapping[str, ParallelStyle],
    heads: tuple[int, int],
    *,
    hidden_dim: int = 0,
    moe: MoEPlan | None = None,
    norms: Sequence[str] = ("attention_norm", "ffn_norm"),
    whole: Sequence[str] = (),
    first: Sequence[str] = (),
    last: Sequence[str] = (),
) -> Plan:
    """Return the plan of a decoder like :class:`.decoder.Decoder`, of dense layers, experts, or both.

    ``attention`` are the entries of ``tensor`` for attention. ``hidden_dim`` is the inner width of
    dense layers, 0 if there are none. ``norms`` are those of a layer. ``whole`` are the modules that
    every rank of tp computes. ``first`` and ``last`` are other modules of the first stage and of the
    last, without weights.
    """
    stream = residual_stream(parallel)
    on_stream = [*(f"layers.*.{norm}" for norm in norms), "norm"]
    embedding, ends = "tok_embeddings", ["norm", "output"]
    dense = "layers.*.feed_forward" if hidden_dim else ""
    compiled = [*moe.compile, *([dense] if dense else [])] if moe else ["layers.*"]
    return Plan(
        tensor={
            embedding: LocalEmbedding(stream),
            **({norm: LocalNorm() for norm in on_stream} if parallel.sequence else {}),
            **attention,
            **(feed_forward(dense, stream, hidden_dim % parallel.tp == 0) if dense else {}),
            **(moe.tensor if moe else {}),
            "output": LocalOutput(stream, sharded=parallel.loss),
        },
        context={"layers.*.attention.core": ContextParallel(parallel.cp_method, parallel.cp_balance)}
        | (moe.context if moe else {}),
        expert=moe.expert if moe else {},
        replicate=[*whole, *([] if parallel.sequence else on_stream)],
        # A tied weight must be in one unit.
        shard=["layers.*", [embedding, *ends]]
        if model.tie_embeddings
        else [embedding, "layers.*", ends],
        checkpoint=["layers.*"],
        compile=compiled,
        float8=["layers.*.attention", "layers.*.attention.w*"]
        + (float8_feed_forward(dense) if dense else [])
        + (moe.float8 if moe else []),
        float8_except=outermost(model.n_layers),
        pipeline=Pipeline(first=[embedding, *first], layers="layers", last=[*ends, *last]),
        heads=heads,
        output="output",
    )
