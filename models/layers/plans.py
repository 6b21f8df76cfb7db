"""The part of a plan that belongs to a shared layer."""

from dataclasses import dataclass

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleInputOutput, SequenceParallel

from compose.parallel.expert_parallel import ExpertParallel, GatherSequence
from compose.parallel.local_parallel import LocalColwise, LocalInput, LocalRowwise


def feed_forward(name: str, stream: Placement, even: bool) -> dict[str, ParallelStyle]:
    """Entries of ``tensor`` for a SwiGLU of w1, w2, w3. even: tp divides its inner width.

    name: its pattern. stream: layout of its input and output, (B, L, D) over tp.
    """
    return {
        name: LocalInput(stream),
        f"{name}.w[13]": LocalColwise(even),
        f"{name}.w2": LocalRowwise(stream),
    }


def float8_feed_forward(name: str) -> list[str]:
    """Entries of ``float8`` for the same."""
    return [name, f"{name}.w[123]"]


def outermost(n_layers: int) -> list[str]:
    """The first layer and the last, which suffer most from float8; none if there are no others."""
    return ["layers.0", f"layers.{n_layers - 1}"] if n_layers > 2 else []


@dataclass(frozen=True)
class MoEPlan:
    """How layers.moe.MoE is cut: what it adds to ``tensor``, ``expert`` and ``context`` of a Plan.

    name: pattern of the layer. stream: layout of its input, (B, L, D) over tp. tp: that degree.
    shared_dim: inner width of the shared expert, 0 without one.
    """

    name: str
    stream: Placement
    tp: int
    shared_dim: int = 0

    @property
    def tensor(self) -> dict[str, ParallelStyle]:
        styles: dict[str, ParallelStyle] = {
            # Each rank routes a part of the tokens: the same part twice would be wasted work.
            self.name: PrepareModuleInputOutput(
                input_layouts=(self.stream, Replicate()),
                desired_input_layouts=(Shard(1), Shard(1)),
                use_local_input=True,
                output_layouts=Shard(1),
                desired_output_layouts=self.stream,
            ),
            f"{self.name}.router": GatherSequence(),
            # Whole, on this rank's tokens alone (T, D): the gradient is summed over tp.
            f"{self.name}.router.gate": SequenceParallel(sequence_dim=0, use_local_output=True),
        }
        if self.shared_dim:
            styles |= feed_forward(f"{self.name}.shared", Shard(1), self.shared_dim % self.tp == 0)
        return styles

    @property
    def compile(self) -> list[str]:
        """Of layers with experts, what is compiled: how many rows an expert gets no graph can know."""
        layer = self.name.rpartition(".")[0]
        names = [f"{layer}.attention_norm", f"{layer}.attention", f"{layer}.ffn_norm"]
        return names + ([f"{self.name}.shared"] if self.shared_dim else [])

    @property
    def float8(self) -> list[str]:
        """The shared expert alone: the others' products are grouped, and not nn.Linear's."""
        return float8_feed_forward(f"{self.name}.shared") if self.shared_dim else []

    @property
    def expert(self) -> dict[str, ParallelStyle]:
        return {f"{self.name}.experts": ExpertParallel()}

    @property
    def context(self) -> dict[str, ParallelStyle]:
        return {f"{self.name}.router": GatherSequence()}
