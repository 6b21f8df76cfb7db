"""The loss on data that is not trained on, the same on every mesh."""

import torch

from compose.build import loss_function
from compose.composition import Composition
from compose.config.job import Job
from compose.data.batches import in_order
from compose.data.samples import Samples
from compose.parallel.mesh import batch_share
from compose.parallel.stragglers import report_phase
from compose.train.evaluate import evaluate
from compose.train.step import on_device


class Validation:
    """Measures the loss of ``data.validation`` every ``train.validate_every`` steps, and at the end."""

    def __init__(self, job: Job, samples: Samples | None, device: torch.device, last_step: int) -> None:
        self.job, self.samples, self.device, self.last_step = job, samples, device, last_step
        self.function = loss_function(job.config)

    def loss(self, composition: Composition, step: int) -> float | None:
        """Return the mean loss over all targets after a step.

        Args:
            composition: What ``compose.apply`` returned.
            step: Steps taken so far.

        Returns:
            The loss in nats; None if it is not due.
        """
        train = self.job.config.train
        if not self.samples or not (step % train.validate_every == 0 or step == self.last_step):
            return None
        report_phase(step, "validation")
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        count = torch.zeros((), dtype=torch.int64, device=self.device)
        for batch in in_order(self.samples, self.job.global_batch, batch_share(composition.mesh)):
            here = on_device(batch, self.device)
            loss, targets = evaluate(
                composition, here, micro_batch=train.micro_batch, loss_function=self.function
            )
            total, count = total + loss, count + targets
        return (total / count.clamp(min=1)).item()
