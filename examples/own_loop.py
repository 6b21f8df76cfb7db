"""Your own PyTorch loop, without the trainer: a model, its plan, the proof, and training.

torchrun --nproc-per-node 4 examples/own_loop.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from compose import (
    Options,
    Parallel,
    Plan,
    Trial,
    apply,
    clip_grad_norm_,
    forward_backward,
    init_mesh,
    verify,
)
from compose.parallel.mesh import batch_share


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(20, 64), nn.Linear(64, 20)
        self.head = nn.Linear(20, 7)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(image + self.outer(F.gelu(self.inner(image))))


PLAN = Plan(
    tensor={"inner": ColwiseParallel(), "outer": RowwiseParallel()},
    replicate=["head"],
    shard=["inner", "outer", "head"],
)


def loss_function(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets, reduction="sum")


def main(steps: int = 20) -> list[float]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images, labels = torch.randn(64, 20), torch.randint(7, (64,))
    tp = 2 if dist.get_world_size() % 2 == 0 else 1
    parallel = Parallel(dp_shard=-1, tp=tp, zero=2)
    mesh, options = init_mesh(parallel), Options(parallel)
    model = Classifier()
    batch = {"image": images, "targets": labels}
    report = verify(model, PLAN, mesh, batch, options, Trial(loss_function=loss_function))
    composition = apply(model, PLAN, mesh, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    index, count = batch_share(mesh)
    mine = {name: value.chunk(count)[index] for name, value in batch.items()}
    losses = []
    for _ in range(steps):
        loss = forward_backward(composition, mine, micro_batch=8, loss_function=loss_function)
        clip_grad_norm_(composition, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(report)
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    dist.barrier()  # or a rank may end while gloo still holds a tensor of the last collective
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
