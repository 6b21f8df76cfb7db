"""The model learns the velocity from noise to an image, along a straight line.

Flow matching (Lipman et al. 2022, arXiv:2210.02747) with the straight paths of rectified flow (Liu et
al. 2022, arXiv:2209.03003). For an image x and noise e of a standard normal, the point at time t from 0
to 1 is (1 - t) e + t x. The model sees this point, t and the class, and learns the velocity x - e.
"""

import torch
from torch import Generator, Tensor

from compose.config.models import Sampler
from compose.config.tables import Config, Data
from compose.data.samples import Samples
from compose.data.token_files import TokenSet
from compose.errors import ConfigError
from compose.ops.batch import ignored
from compose.ops.cross_entropy import LossFunction
from compose.ops.tensors import at_least_float32
from compose.weights import named_generator

from .images import ImageSet, folder_of_images, to_patches
from .model import TICKS, DiTConfig
from .sampler import GridSampler
from .shapes import Shapes

SHAPES = "shapes"
"""The name in ``data.path`` of the drawn set."""


class FlowMatching:
    """The task of a model that turns noise into images of a class."""

    sampler: Sampler | None = GridSampler()

    def check(self, config: Config) -> list[str]:
        """Return the keys that do not suit images; see ``compose.config.models.Task.check``."""
        model, train = config.model.config, config.train
        problems = []
        if train.seq_len != model.patches:
            problems.append(
                f"train.seq_len: {train.seq_len} should be {model.patches}, the patches of an image of"
                f" model.image_size {model.image_size} with model.patch_size {model.patch_size}"
            )
        problems += [
            f"train.{key}: {getattr(train, key):g} is of a loss over a vocabulary, which"
            f" {config.model.name} does not have; use 0"
            for key in ("loss_chunk", "z_loss")
            if getattr(train, key)
        ]
        return problems

    def open(self, path: str, config: Config) -> Samples:
        """Open a folder of images or the drawn shapes; see ``compose.config.models.Task.open``.

        The default of ``data.path`` is what needs no files, so here it is the shapes.
        """
        model: DiTConfig = config.model.config
        if model.channels not in (1, 3):
            raise ConfigError(
                f"{path} cannot be read with model.channels {model.channels}: an image has 3, or 1 if"
                " it is grey; the presets with 4 are of latents, for which there is no data here"
            )
        if path in (SHAPES, Data.path):
            images: ImageSet = Shapes(model.image_size, model.channels, model.n_classes)
        else:
            images = folder_of_images(path, model, config.data.skip_unreadable)
        return NoisyImages(SHAPES if path == Data.path else path, images, model, config.train.seed)

    def random_batch(self, config: Config, samples: int, seed: int) -> dict[str, Tensor]:
        """Return random patches and targets; the share of targets that are NaN grows to a half."""
        model: DiTConfig = config.model.config
        generator = torch.Generator().manual_seed(seed)
        shape = (samples, model.patches, model.patch_dim)
        ignore = torch.linspace(0, 0.5, samples)[:, None, None]
        drop = torch.rand(shape, generator=generator) < ignore
        return {
            "patches": torch.randn(shape, generator=generator),
            "times": torch.randint(TICKS, (samples,), generator=generator),
            "labels": torch.randint(model.n_classes + 1, (samples,), generator=generator),
            "targets": torch.randn(shape, generator=generator).masked_fill(drop, float("nan")),
        }

    def loss(self, config: Config) -> LossFunction:
        """Return the squared error; divided by the number of targets it is the mean."""
        return squared_error


def squared_error(velocity: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of squared differences, over targets that are not NaN, in float32 or wider.

    The model's output and the targets, the velocity of each element, are (B, L, C).
    """
    difference = at_least_float32(velocity) - targets
    return difference.masked_fill(ignored(targets), 0.0).square().sum()


class NoisyImages:
    """Samples of a set of images: each gets a time and noise of its own in each epoch.

    Time, noise and whether the class is left out depend on the seed, the number of the sample and the
    epoch alone, and so not on the mesh.
    """

    token_set: TokenSet | None = None
    tokenizer: str | None = None

    def __init__(self, name: str, images: ImageSet, model: DiTConfig, seed: int) -> None:
        self.name, self.images, self.model, self.seed = name, images, model, seed

    @property
    def content(self) -> str:
        """The digest of the images."""
        return self.images.content

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int, epoch: int = 0) -> dict[str, Tensor]:
        """Return one sample; see ``compose.data.samples.Samples.read``."""
        image, label = self.images.read(index)
        generator = named_generator(self.seed, f"noise {epoch} {index}")
        return noisy(image, label, self.model, generator)


def noisy(image: Tensor, label: int, model: DiTConfig, generator: Generator) -> dict[str, Tensor]:
    """Return a sample: an image (channels, height, width) at a random time of its way from noise.

    It has ``patches`` (L, C), ``times`` and ``labels`` (), and ``targets`` (L, C).
    """
    time = torch.randint(TICKS, (), generator=generator)
    noise = torch.randn(image.shape, generator=generator)
    kept = torch.rand((), generator=generator) >= model.label_dropout
    share = (time / TICKS).item()
    return {
        "patches": to_patches((1 - share) * noise + share * image, model.patch_size),
        "times": time,
        "labels": torch.where(kept, label, model.n_classes),
        "targets": to_patches(image - noise, model.patch_size),
    }
