"""The sampler draws images of each class for ``python -m compose generate``, in one picture."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from compose.composition import Composition
from compose.config.tables import Config
from compose.errors import ConfigError, whole_number, written
from compose.parallel.mesh import BATCH_AXES
from compose.train.evaluate import forward
from compose.train.step import local_batch
from compose.weights import named_generator

from .images import from_patches
from .model import TICKS, DiTConfig

_AT_ONCE = 32  # images in one forward, each with its class and without
_ROWS = 16  # most classes of a picture, if they are not named
_MOST = 1 << 20


@dataclass(frozen=True)
class Grid:
    """The checked flags."""

    out: Path
    """The file to write."""
    classes: tuple[int, ...]
    """The class of each row."""
    per_class: int = 8
    """Images in a row."""
    steps: int = 50
    """Euler steps from noise to an image."""
    guidance: float = 2.0
    """Weight w of the class: the velocity is v + (w - 1) (v - v without class)."""
    seed: int = 0
    """Seed of the noise."""


class GridSampler:
    """Makes a grid of images: a row for each class."""

    flags: Mapping[str, str] = {
        "--out": "FILE.png to write",
        "--classes": f"numbers of classes, as 0,3; default: all, at most the first {_ROWS}",
        "--per-class": f"images of each; default {Grid.per_class}",
        "--steps": f"Euler steps from noise to an image; default {Grid.steps}",
        "--guidance": f"weight of the class; 1: as learnt; default {Grid.guidance}, or 1 if nothing"
        " was learnt without class",
        "--seed": f"the same gives the same picture; default {Grid.seed}",
    }

    def prepare(self, config: Config, flags: Mapping[str, str]) -> Callable[[Composition], None]:
        """Check the flags; see ``compose.config.models.Sampler``."""
        model: DiTConfig = config.model.config
        if model.channels not in (1, 3):
            raise ConfigError(
                f"model.channels: {model.channels} are of latents, and a picture shows 1 or 3; another"
                " program has to decode them"
            )
        grid = _grid(model, flags)

        def make(composition: Composition) -> None:
            images = sample(composition, model, grid)
            if dist.get_rank() == 0:
                _write(images, grid)
                rows = ", ".join(map(str, grid.classes))
                print(f"{grid.out}: {grid.per_class} images of each of the classes {rows}", flush=True)

        return make


def _grid(model: DiTConfig, flags: Mapping[str, str]) -> Grid:
    problems: list[str] = []

    def number(flag: str, default: float, least: float, kind: type = int) -> float:
        text = flags.get(flag)
        try:
            value = default if text is None else kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= _MOST:
            words = "a whole number" if kind is int else "a number"
            problems.append(f"command line: {flag}: {text} should be {words} from {least} to {_MOST}")
        return value

    per_class = number("--per-class", Grid.per_class, 1)
    steps = number("--steps", Grid.steps, 1)
    # Without dropout of classes, nothing was learnt of an image without class.
    guidance = number("--guidance", Grid.guidance if model.label_dropout else 1.0, 0, float)
    if guidance != 1 and not model.label_dropout:
        problems.append(
            f"command line: --guidance: {guidance:g} needs images without class, and"
            " model.label_dropout = 0 learnt none; nearest: 1"
        )
    seed = number("--seed", Grid.seed, 0)
    words = flags.get("--classes", ",".join(map(str, range(min(_ROWS, model.n_classes))))).split(",")
    if not all(0 <= whole_number(word) < model.n_classes for word in words):
        problems.append(
            f"command line: --classes: {flags['--classes']} should be numbers from 0 to"
            f" {model.n_classes - 1} with commas between them"
        )
    out = flags.get("--out", "")
    if not out.endswith(".png"):
        problems.append(f"command line: --out: {out or 'nothing'} is no .png file")
    elif not Path(out).parent.is_dir():
        problems.append(f"command line: --out: cannot write {out}: there is no such folder")
    if problems:
        raise ConfigError(*problems)
    return Grid(Path(out), tuple(map(int, words)), int(per_class), int(steps), guidance, int(seed))


def sample(composition: Composition, model: DiTConfig, grid: Grid) -> Tensor:
    """Make images by Euler steps along the velocity, from time 0 to 1; a collective.

    Guidance without a classifier: Ho & Salimans 2022, arXiv:2207.12598. Every rank gets all images,
    (n, channels, height, width), row by row of the grid.
    """
    labels = torch.tensor([label for label in grid.classes for _ in range(grid.per_class)])
    # The noise of a place in the grid depends on its class and column alone.
    names = [f"{label} {column}" for label in grid.classes for column in range(grid.per_class)]
    noise = torch.stack(
        [
            torch.randn(
                model.patches, model.patch_dim, generator=named_generator(grid.seed, f"image {name}")
            )
            for name in names
        ]
    )
    parts = [
        _flow(composition, model, grid, x_BLC, classes)
        for x_BLC, classes in zip(noise.split(_AT_ONCE), labels.split(_AT_ONCE), strict=True)
    ]
    return from_patches(torch.cat(parts), model.patch_size, model.channels)


def _flow(
    composition: Composition, model: DiTConfig, grid: Grid, x_BLC: Tensor, labels: Tensor
) -> Tensor:
    device = composition.mesh.device_type
    x_BLC, labels = x_BLC.to(device), labels.to(device)
    both = torch.cat([labels, torch.full_like(labels, model.n_classes)])
    for step in range(grid.steps):
        times = torch.full_like(both, step * TICKS // grid.steps)
        batch = {"patches": torch.cat([x_BLC, x_BLC]), "times": times, "labels": both}
        of_class, of_none = velocity(composition, batch).chunk(2)
        x_BLC = x_BLC + (of_none + grid.guidance * (of_class - of_none)) / grid.steps
    return x_BLC.cpu()


def velocity(composition: Composition, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the model's output for a batch that all ranks have, whole on every rank; a collective.

    It is (B, L, C), float32.
    """
    mesh = composition.mesh
    names, place = mesh.mesh_dim_names or (), mesh.get_coordinate() or []
    # Ranks of these axes compute the same, so one of them speaks.
    speaks = not any(at for name, at in zip(names, place, strict=True) if name in (*BATCH_AXES, "tp"))
    whole = torch.zeros(batch["patches"].shape, device=mesh.device_type)

    def keep(output: Tensor, part: Mapping[str, Tensor]) -> None:
        counted = torch.arange(output.shape[1], device=output.device)
        positions = part["positions"][0] if "positions" in part else counted
        here = positions >= 0  # the others only fill up a rank's part
        whole[:, positions[here]] = output[:, here].float()

    forward(composition, local_batch(composition, batch), each=keep)
    if not speaks:
        whole.zero_()
    dist.all_reduce(whole)
    return whole


def _write(images: Tensor, grid: Grid) -> None:
    """Write images as a grid of rows, with a line of a pixel between them."""
    from PIL import Image

    rows = images.unflatten(0, (len(grid.classes), grid.per_class))
    cells = torch.nn.functional.pad(rows, (1, 1, 1, 1), value=1.0)
    picture = cells.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)  # (height, width, channels)
    pixels = ((picture + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    with written("command line: --out: cannot write", grid.out):
        Image.fromarray(np.squeeze(pixels.numpy())).save(grid.out)
