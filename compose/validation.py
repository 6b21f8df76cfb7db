"""The loss on data that is not trained on, the same on every mesh."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compose.build import loss_function
from compose.config import Config
from compose.data import validation_set
from compose.data.batches import in_order
from compose.evaluate import evaluate
from compose.mesh import batch_share
from compose.runtime import note


class Validation:
    """Measures ``data.validation`` every ``train.validate_every`` steps, and after the last."""

    def __init__(self, config: Config, mesh: DeviceMesh, device: torch.device, last_step: int) -> None:
        self.config, self.mesh, self.device, self.last_step = config, mesh, device, last_step
        self.samples = validation_set(config)
        self.function = loss_function(config)

    def loss(self, model: nn.Module, step: int) -> float | None:
        """Mean over all targets, in nats, after ``step`` steps; None where it is not due."""
        train = self.config.train
        if not self.samples or not (step % train.validate_every == 0 or step == self.last_step):
            return None
        note(f"validation after step {step}")
        total, count = 0.0, 0
        for batch in in_order(self.samples, train.global_batch, batch_share(self.mesh)):
            here = {name: value.to(self.device) for name, value in batch.items()}
            loss, targets = evaluate(
                model, here, self.mesh, micro_batch=train.micro_batch, loss_function=self.function
            )
            total, count = total + loss.item(), count + int(targets.item())
        return total / max(1, count)
