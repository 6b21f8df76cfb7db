"""An endless set of drawn shapes, for which nothing has to be downloaded."""

import colorsys
import math
from collections.abc import Callable

import torch
from torch import Tensor

from compose.weights import named_generator

_COUNT = 1 << 31  # samples of an epoch, which no run reaches the end of


def _circle(x: Tensor, y: Tensor) -> Tensor:
    return torch.hypot(x, y) - 1


def _square(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x.abs(), y.abs()) - 0.85


def _triangle(x: Tensor, y: Tensor) -> Tensor:
    slant = x.abs() * math.sqrt(0.75) - y / 2
    return torch.maximum(slant, y) - 0.55


def _cross(x: Tensor, y: Tensor) -> Tensor:
    long, short = torch.maximum(x.abs(), y.abs()) - 1, torch.minimum(x.abs(), y.abs()) - 0.33
    return torch.maximum(long, short)


def _ring(x: Tensor, y: Tensor) -> Tensor:
    return (torch.hypot(x, y) - 0.75).abs() - 0.22


KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "cross": _cross,
    "ring": _ring,
}
"""The classes, in order: for a place, how far it is from the shape of size 1, below 0 inside."""


class Shapes:
    """One shape on a dark ground in each image; kind, colour, size and place are of its number."""

    def __init__(self, size: int, channels: int, n_classes: int) -> None:
        """Take the form of the images; the first kinds are drawn if there are fewer classes."""
        self.size, self.channels = size, channels
        self.kinds = list(KINDS.values())[:n_classes]

    @property
    def content(self) -> str:
        """A digest that tells these images from others."""
        return f"shapes 1: {self.size} {self.channels} {len(self.kinds)}"

    def __len__(self) -> int:
        return _COUNT

    def read(self, index: int) -> tuple[Tensor, int]:
        """Return an image (channels, height, width), from -1 to 1, and its class."""
        label = index % len(self.kinds)
        generator = named_generator(0, f"shape {index}")
        hue, dark, radius, across, down = torch.rand(5, generator=generator).tolist()
        radius = 0.4 + 0.25 * radius
        centre = [(2 * place - 1) * (0.9 - radius) for place in (across, down)]
        places = (torch.arange(self.size) + 0.5) * (2 / self.size) - 1
        x, y = (places[None, :] - centre[0]) / radius, (places[:, None] - centre[1]) / radius
        distance = self.kinds[label](*torch.broadcast_tensors(x, y)) * radius
        cover = (0.5 - distance * self.size / 2).clamp(0, 1)  # of a pixel, so that edges are smooth
        colour = torch.tensor(colorsys.hsv_to_rgb(hue, 0.85, 1.0))[:, None, None] * 2 - 1
        ground = 0.3 * dark - 1
        image = colour * cover + ground * (1 - cover)
        return (image if self.channels == 3 else image.mean(0, keepdim=True)), label
