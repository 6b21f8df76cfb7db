"""The parts of a plan that belong to shared layers."""

from dataclasses import dataclass

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleInputOutput

from compose.parallel.expert_parallel import ExpertParallel, GatherSequence
from compose.parallel.local_parallel import (
    LocalColwise,
    LocalInput,
    LocalLinear,
    LocalNorm,
    LocalRowwise,
    LocalWideNorm,
)


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
