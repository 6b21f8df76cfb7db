"""python examples/ray_train.py --workers N [--gpu] [--failures N] FILE.toml [--table.key=value ...]

Ray starts the workers, one for each GPU, and starts all of them again if one is lost. The run then goes
on from its newest checkpoint: run.dir is a folder that all nodes share, and checkpoint.interval is set.
On a cluster: ray job submit --working-dir . -- python examples/ray_train.py ...
"""

import argparse

from ray.train import FailureConfig, RunConfig, ScalingConfig  # pyright: ignore[reportMissingImports]
from ray.train.torch import TorchConfig, TorchTrainer  # pyright: ignore[reportMissingImports]


def worker(given: dict[str, list[str]]) -> None:
    # Ray sends this function with all that it names; modules of compose are imported where it runs.
    import torch.distributed as dist

    from compose import init_mesh
    from compose.cli.command_line import parse
    from compose.train.processes import process_group
    from compose.train.trainer import Trainer

    dist.destroy_process_group()  # Ray's; the one below is watched, and says which rank is behind
    command = parse(given["words"], "examples/ray_train.py", trains=True)
    with process_group(command.config, command.job.islands) as device:
        mesh = init_mesh(command.config.parallel, device.type)
        Trainer(command.job, mesh, device, command.data).run()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--failures", type=int, default=3)
    own, words = parser.parse_known_args()
    TorchTrainer(
        worker,
        train_loop_config={"words": words},
        torch_config=TorchConfig(backend="gloo"),  # of Ray's own group, which is soon gone
        scaling_config=ScalingConfig(num_workers=own.workers, use_gpu=own.gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=own.failures)),
    ).fit()


if __name__ == "__main__":
    main()
