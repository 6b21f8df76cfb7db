"""Images from a folder, and images as rows of patches."""

import hashlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from compose.errors import ConfigError, printable

from .model import DiTConfig

_SUFFIXES = (".png", ".jpg", ".jpeg")
# Pillow would choose a decoder by the content. Some of its decoders start other programs.
_FORMATS = ("PNG", "JPEG")


class ImageSet(Protocol):
    """A numbered set of images."""

    @property
    def content(self) -> str:
        """A digest that tells these images from others."""
        ...

    def __len__(self) -> int:
        """Return the number of images, at least 1."""
        ...

    def read(self, index: int) -> tuple[Tensor, int]:
        """Return an image (channels, height, width), from -1 to 1, and its class."""
        ...


def to_patches(images: Tensor, size: int) -> Tensor:
    """Cut images (..., channels, height, width) into square patches (..., L, C), row by row."""
    cut = images.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return cut.movedim((-4, -2), (-5, -4)).flatten(-3).flatten(-3, -2)


def from_patches(patches: Tensor, size: int, channels: int) -> Tensor:
    """Put patches (..., L, C) together to square images; the inverse of :func:`to_patches`."""
    rows = round(patches.shape[-2] ** 0.5)
    cut = patches.unflatten(-2, (rows, rows)).unflatten(-1, (channels, size, size))
    return cut.movedim((-5, -4), (-4, -2)).flatten(-2).flatten(-3, -2)


class Images:
    """Images of files, cut and resized to squares."""

    def __init__(
        self,
        name: str,
        files: Sequence[tuple[Path, int]],
        size: int,
        channels: int,
        skip_unreadable: bool,
    ) -> None:
        """Take files with the numbers of their classes, under the name that the user gave.

        With ``skip_unreadable`` the next image takes the place of one that cannot be read.
        """
        self.name, self.files, self.size, self.channels = name, files, size, channels
        self.skip_unreadable = skip_unreadable
        self.unreadable = set[Path]()

    @property
    def content(self) -> str:
        """A digest of the names, sizes and classes of the files."""
        digest = hashlib.sha256()
        for path, label in self.files:
            line = [os.fsencode(path.name), str(label).encode(), str(path.stat().st_size).encode()]
            digest.update(b"\0".join(line) + b"\n")
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> tuple[Tensor, int]:
        """Return an image and its class; ConfigError if none can be read, or one may not be skipped."""
        for after in range(len(self.files)):
            path, label = self.files[(index + after) % len(self.files)]
            try:
                return _opened(path, self.size, self.channels), label
            except Exception as error:  # any error: the file may come from anyone
                self._unreadable(path, error)
        raise ConfigError(f"data.path: {self.name}: none of its {len(self)} images can be read")

    def _unreadable(self, path: Path, error: Exception) -> None:
        from PIL import UnidentifiedImageError

        reason = (getattr(error, "strerror", "") or str(error) or "damaged").partition("\n")[0]
        if isinstance(error, UnidentifiedImageError):
            reason = f"it is damaged, or neither {' nor '.join(_FORMATS)}"
        problem = f"data.path: {printable(str(path))}: cannot be read as an image: {printable(reason)}"
        if not self.skip_unreadable:
            raise ConfigError(
                f"{problem}; repair or remove it, or set data.skip_unreadable = true"
            ) from None
        if path not in self.unreadable:
            self.unreadable.add(path)
            print(f"{problem}; skipped, {len(self.unreadable)} in all", file=sys.stderr, flush=True)


def folder_of_images(path: str, model: DiTConfig, skip_unreadable: bool) -> Images:
    """Open a folder: its subfolders are the classes, by name; images beside them are class 0.

    Files and folders whose names begin with a dot are left out.

    Raises ConfigError if there are no images, or more classes than the model has.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"{path} is no folder of images; name one, or shapes for drawn ones")
    inside = [each for each in sorted(folder.iterdir()) if not _is_hidden(each, folder)]
    classes = [each for each in inside if each.is_dir()]
    if len(classes) > model.n_classes:
        raise ConfigError(
            f"{path} has {len(classes)} folders, each a class; set model.n_classes to at least"
            f" {len(classes)} (it is {model.n_classes})"
        )
    files = [(file, 0) for file in inside if _is_image(file)]
    for label, each in enumerate(classes):
        visible = (file for file in sorted(each.rglob("*")) if not _is_hidden(file, folder))
        files += [(file, label) for file in visible if _is_image(file)]
    if not files:
        raise ConfigError(f"{path} has no image ({', '.join(_SUFFIXES)}) in it or in its folders")
    return Images(path, files, model.image_size, model.channels, skip_unreadable)


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _SUFFIXES and path.is_file()


def _opened(path: Path, size: int, channels: int) -> Tensor:
    """Return the square in the middle of an image, upright as its EXIF says."""
    from PIL import Image, ImageOps

    with Image.open(path, formats=_FORMATS) as image:
        with suppress(SyntaxError):  # of a damaged header, which tells no orientation
            ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I"):  # 16 bits, of which convert would keep those up to 255
            image = image.point(lambda value: value / 257)
        square = ImageOps.fit(image.convert("RGB" if channels == 3 else "L"), (size, size))
    pixels = torch.from_numpy(np.array(square)).float() / 127.5 - 1
    return pixels.movedim(-1, 0) if channels == 3 else pixels[None]
