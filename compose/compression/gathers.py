"""Gathers of a unit's weights in fewer bytes, for ``FSDPModule.set_custom_all_gather``.

A rank computes with the weights that the others received, so all of them compute with the same ones.
Master weights stay exact.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from compose.compression.account import Account
from compose.compression.blocks import Blocks
from compose.compression.exchange import OwnMemory, Traffic, gathered
from compose.compression.layout import Layout, Packing
from compose.compression.reductions import Levels
from compose.ops import operators


class CodedGather(OwnMemory):
    """The all-gather of one unit in blocks of 8 bits.

    It is qwZ of ZeRO++ (Wang et al. 2023, arXiv:2306.10209).
    """

    def __init__(self, layout: Layout, code: Blocks, traffic: Traffic) -> None:
        self.packing, self.traffic, self.account = Packing(layout, code), traffic, Account()

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill ``output_tensor`` with the shards of all ranks of ``group``, as they are received.

        Args:
            output_tensor: (n S,), for n ranks.
            input_tensor: This rank's shard, (S,), which may be a part of ``output_tensor``.
            group: The n ranks that share the unit.
            async_op: Ignored; FSDP waits for what is on its stream.
        """
        rows = output_tensor.view(group.size(), -1)
        self.traffic.instead("weights", input_tensor.nbytes * (group.size() - 1))
        if self.account.open:
            self._expect(input_tensor, group.rank())
        self.fill(rows, input_tensor, group)
        if self.account.open:
            self.account.received = rows[group.rank()].clone()

    def fill(self, rows: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
        """Fill rows (n, S) from each rank's ``own`` (S,)."""
        message = self.packing.pack(own[None])[0]
        self.traffic.count("weights", message.numel(), group.size())
        self.packing.unpack(gathered(message, group), rows)

    def _expect(self, own: Tensor, rank: int) -> None:
        self.account.squares = torch.zeros(0)
        self.account.expect(self.packing, own[None])

    def state(self) -> dict[str, Tensor]:
        """Return nothing: each gather stands alone."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take nothing."""


class DifferenceGather(CodedGather):
    """The all-gather of what has changed, in blocks of 4 bits.

    It is that of SDP4Bit (Jia et al. 2024, arXiv:2410.15526). What was received stays here as the base
    of the next difference. A step's first gather sends it; the later ones have nothing to send, as
    weights do not change within a step. With ``levels`` a rank keeps one part for each of its
    neighbours, and they gather the unit from one another, plain.

    The first gather of all sends the weights themselves.
    """

    def __init__(
        self, layout: Layout, code: Blocks, traffic: Traffic, levels: Levels | None = None
    ) -> None:
        super().__init__(layout, code, traffic)
        self.levels = levels
        self.base: Tensor | None = None
        self.own: Tensor | None = None
        """This rank's row of the base, if gathers may write to the base."""
        self.writes_base = False
        self.in_step = self.sent = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a gather. On a CPU a gather without a message gets the base itself.

        New memory and a copy would take a CPU longer than the codes. FSDP writes this rank's exact
        weights to that memory first. Then :meth:`fill` puts back the weights that were received. On a
        GPU another stream may still read the base, so each gather gets memory of its own.
        """
        base = self.base
        if base is None or self.own is None or not self._has_all or base.dtype != dtype:
            return super().allocate(size, dtype=dtype, device=device)
        self.writes_base = True
        return base.view(*size)

    def begin(self) -> None:
        """Note that a step begins; weights do not change until :meth:`end`."""
        self.in_step, self.sent = True, False

    def end(self) -> None:
        """Note that the step has ended."""
        self.in_step = False

    def fill(self, rows: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
        """Fill rows (n, S) from each rank's ``own`` (S,)."""
        far = self.levels.far if self.levels else group
        near = 1 if self.levels else None
        base = self.base
        if base is None or not self._has_all:
            base = self._received(own, far, near)
        if self.in_step and not self.sent:
            self.base, self.sent = base, True
            whole = self.levels is None and operators.device_of(base) == "cpu"
            self.own = base[group.rank()].clone() if whole else None
        if self.writes_base:
            assert self.own is not None
            base[group.rank()], self.writes_base = self.own, False
            return
        if self.levels is None:
            rows.copy_(base)
            return
        # Rank k near + j of the unit is place j on node k.
        inner = self.levels.near
        self.traffic.count("weights", base.nbytes, inner.size(), inner.size())
        parts = gathered(base.reshape(-1), inner).view(inner.size(), far.size(), -1)
        rows.copy_(parts.transpose(0, 1).reshape(rows.shape))

    @property
    def _has_all(self) -> bool:
        """Whether this step's weights were received."""
        return self.in_step and self.sent

    def _expect(self, own: Tensor, rank: int) -> None:
        if self.base is None or (self.in_step and not self.sent):
            self.account.squares = torch.zeros(0)
        if self.base is not None and not self.sent:
            place = self.levels.far.rank() if self.levels else rank
            self.account.expect(self.packing, (own - self.base[place])[None])

    def _received(self, own: Tensor, group: dist.ProcessGroup, near: int | None) -> Tensor:
        if self.base is None:
            self.traffic.count("weights", own.nbytes, group.size(), near)
            return gathered(own, group)
        wide = torch.promote_types(own.dtype, torch.float32)
        # What is not coded travels as it is: its base is zero.
        sent = self.packing.coded_only(self.base[group.rank()][None]).to(wide)
        message = self.packing.pack(own.to(wide) - sent)[0]
        self.traffic.count("weights", message.numel(), group.size(), near)
        # Within a step nobody else reads the base.
        base = self.base.to(wide) if self.in_step else self.base.to(wide, copy=True)
        self.packing.unpack(gathered(message, group), base, base=True)
        return base.to(own.dtype)

    def state(self) -> dict[str, Tensor]:
        """Return what was received last."""
        return {} if self.base is None else {"base": self.base}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what was received last."""
        self.base = state.get("base")
