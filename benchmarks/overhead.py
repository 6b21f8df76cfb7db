"""What the trainer costs over a bare PyTorch loop, in one process: tokens per second, as a ratio.

Both train the same model from the same weights on the same batches with the same optimizer. They take
turns, a few steps each, so that a machine whose speed drifts slows both alike.

    python benchmarks/overhead.py [--steps N]

prints one JSON line: {"benchmark": "overhead", "ratio": trainer / bare loop, ...}.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from compose import init_mesh
from compose.build import build
from compose.cli import parse
from compose.config import Config
from compose.data import training_batches
from compose.registry import find_model
from compose.runtime import process_group
from compose.trainer import Trainer

ROUND = 4  # steps in a turn


class BareLoop:
    """The loop that one would write by hand; it shares nothing with compose but model and data."""

    def __init__(self, config: Config, weights: dict[str, torch.Tensor], device: torch.device) -> None:
        self.device, train = device, config.train
        self.micro_batch = train.micro_batch
        self.model = find_model(config.model.name).Model(config.model.config).to(device)
        self.model.load_state_dict(weights)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.samples, self.global_batch = 0, train.global_batch
        self.batches = training_batches(config)

    def step(self) -> float:
        batch = self.batches.batch(self.samples)
        batch = {name: value.to(self.device) for name, value in batch.items()}
        self.samples += self.global_batch
        count = (batch["targets"] != -100).sum()
        total = 0.0
        for part in zip(*(value.split(self.micro_batch) for value in batch.values()), strict=True):
            micro = dict(zip(batch, part, strict=True))
            targets = micro.pop("targets")
            logits = self.model(**micro).flatten(0, 1).float()
            loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / count
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=48, help="steps of each loop")
    rounds = max(1, parser.parse_args().steps // ROUND)
    train_toml = str(Path(__file__).parent.parent / "train.toml")
    with tempfile.TemporaryDirectory() as folder:
        keys = [f"--run.dir={folder}", "--metrics.tensorboard=false"]
        config = parse([train_toml, *keys], program="overhead.py", trains=True).config
        with process_group(config) as device:
            mesh = init_mesh(config.parallel, device.type)
            model = build(config, mesh, device)
            bare = BareLoop(config, model.state_dict(), device)
            trainer = Trainer(config, mesh, model, device)
            ratios, seconds = [], {"trainer": 0.0, "bare": 0.0}
            for turn in range(-1, rounds):  # the first turn warms up
                spent = {}
                for name, loop in (("trainer", trainer), ("bare", bare)):
                    start = time.perf_counter()
                    for _ in range(ROUND):
                        loop.step()
                    spent[name] = time.perf_counter() - start
                if turn >= 0:
                    ratios.append(spent["bare"] / spent["trainer"])
                    seconds = {name: seconds[name] + spent[name] for name in seconds}
    tokens = rounds * ROUND * config.train.global_batch * config.train.seq_len
    result = {
        "benchmark": "overhead",
        "ratio": round(statistics.median(ratios), 4),
        "tokens_per_second": round(tokens / seconds["trainer"]),
        "bare_tokens_per_second": round(tokens / seconds["bare"]),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
