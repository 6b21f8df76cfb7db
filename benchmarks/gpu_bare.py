"""A training loop in plain PyTorch, for benchmarks/gpu.py: nothing in it is compose's but the model."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compose.config.models import find_model
from compose.config.tables import Config


class Bare:
    """The loop that one would write by hand for one device."""

    def __init__(self, config: Config, device: torch.device) -> None:
        """Make the model and the optimizer."""
        self.train, self.shape, self.device = config.train, config.model.config, device
        with device:
            self.model = find_model("llama").Model(self.shape)
        self.masters = [p.detach().clone() for p in self.model.parameters()]
        self.params: list[Tensor] = list(self.model.to(torch.bfloat16).parameters())
        for block in self.model.get_submodule("layers").children():
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self) -> float:
        """Take a step."""
        samples = (self.train.global_batch, self.train.seq_len + 1)
        tokens = torch.randint(self.shape.vocab_size, samples).to(self.device)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        total = torch.zeros((), device=self.device)
        size = self.train.micro_batch
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            logits = self.model(x).flatten(0, 1).float()
            loss = F.cross_entropy(logits, y.flatten(), reduction="sum") / targets.numel()
            del logits  # or it would live on while the next micro-batch makes its own
            loss.backward()
            total += loss.detach()
            self._accumulate()
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.masters)
        return total.item()

    def _accumulate(self) -> None:
        """In float32, and for every micro-batch at once."""
        held = [master.grad for master in self.masters if master.grad is not None]
        results = [p.grad for p in self.params if p.grad is not None]
        if held:
            torch._foreach_add_(held, results)
        for master, p in zip(self.masters, self.params, strict=True):
            if not held and p.grad is not None:
                master.grad = p.grad.float()
            p.grad = None
