"""The documents of a batch: made once, and handed to the attention of every layer."""

import torch
from torch import Tensor


class Documents:
    """Where the documents of a batch begin and end.

    Rows are laid end to end, so that a place in the batch is one number from 0 to B S. A document never
    reaches over the end of its row. The tensors have sizes that depend on the batch's shape alone, so a
    compiled layer serves any number of documents, and no number is waited for.
    """

    def __init__(self, ids: Tensor, device: torch.device | None = None) -> None:
        """Find the documents.

        Args:
            ids: (B, S), integers. Each run of equal ids in a row is one document. If they are in host
                memory, a GPU is not waited for.
            device: Where attention runs; None is where ``ids`` is.
        """
        self.ids, self.shape = ids, tuple(ids.shape)
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        begins = begins.flatten()
        total = begins.numel()
        places = torch.arange(total, device=ids.device, dtype=torch.int32)
        # Every place that begins no document is written to the end, where its value is the right one.
        number = torch.where(begins, begins.cumsum(0) - 1, total)
        bounds = torch.full((total + 1,), total, device=ids.device, dtype=torch.int32)
        bounds.index_put_((number,), torch.where(begins, places, total))
        longest = bounds.diff().amax()
        pinned = device is not None and device.type == "cuda" and not ids.is_cuda
        bounds = bounds.pin_memory() if pinned else bounds
        self.bounds = bounds.to(device or ids.device, non_blocking=True)
        """(B S + 1,), int32: the first place of each document; B S follows, to the end."""
        self.extents = torch.stack([begins.sum(), longest]).to("cpu" if not ids.is_meta else "meta")
        """(2,), int64, in host memory: the number of documents, and the tokens of the longest."""

    @property
    def mask(self) -> Tensor:
        """Return a mask (B, 1, S, S), bool, that is True where a query may attend; for references."""
        return (self.ids[:, :, None] == self.ids[:, None, :]).tril()[:, None]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.ids)

    def __getitem__(self, rows: slice) -> "Documents":
        """Return the documents of some rows."""
        return Documents(self.ids[rows], self.bounds.device)
