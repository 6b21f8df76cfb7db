"""A diffusion transformer learns from noise, times and images that do not depend on the mesh."""

import io
import struct
import zlib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from compose.config.tables import Config
from compose.data.datasets import open_data, task_of, training_batches
from compose.errors import ConfigError
from models.dit.flow import squared_error
from models.dit.images import Images, from_patches, to_patches
from models.dit.model import TICKS
from models.dit.shapes import KINDS, Shapes
from tests.support.helpers import make_config, refused
from tests.support.mutation import mutated
from tests.support.pool import Pool
from tests.support.small_models import DIT


def config_of(**keys: object) -> Config:
    """A config that names data."""
    return make_config(1, **(DIT | {"train__global_batch": 4, "data__path": "shapes"} | keys))


def folder_of(folder: Path, names: list[str], size: tuple[int, int] = (9, 7)) -> Path:
    """A folder of pictures of one colour each."""
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.full((*size, 3), 40 * number, np.uint8)
        Image.fromarray(pixels).save(path)
    return folder


def test_patches_go_back() -> None:
    images = torch.arange(2 * 3 * 6 * 6).view(2, 3, 6, 6)
    patches = to_patches(images, 2)
    assert patches.shape == (2, 9, 12)
    assert patches[0, 1].tolist() == images[0, :, 0:2, 2:4].flatten().tolist()
    assert torch.equal(from_patches(patches, 2, 3), images)


def test_noise_does_not_depend_on_the_mesh() -> None:
    """The shares of 1, 2 and 4 data ranks are the same batch; another seed's is another."""
    config = config_of()
    data = open_data(config)
    whole = training_batches(config, data).batch(8)
    for count in (2, 4):
        parts = [training_batches(config, data, (index, count)).batch(8) for index in range(count)]
        for name, value in whole.items():
            assert torch.equal(torch.cat([part[name] for part in parts]), value)
    other = config_of(train__seed=1)
    assert not torch.equal(training_batches(other, open_data(other)).batch(8)["times"], whole["times"])


def test_an_epoch_has_noise_of_its_own(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [f"{n}.png" for n in range(4)])
    config = config_of(data__path=folder)
    batches = training_batches(config, open_data(config))
    first, second = batches.batch(0), batches.batch(4)
    assert len({*first["times"].tolist(), *second["times"].tolist()}) == 8
    # The image is what the noisy patches and the velocity say: at time t it is p + (1 - t) v.
    for batch in (first, second):
        left = 1 - batch["times"][:, None, None] / TICKS
        result = (batch["patches"] + left * batch["targets"]).mean((1, 2))
        colours = ((result + 1) * 127.5).round().int().tolist()
        assert sorted(colours) == [0, 40, 80, 120]


def test_classes_are_left_out_by_the_number_of_the_sample() -> None:
    config = config_of(model__label_dropout=0.25)
    samples = task_of(config).open("shapes", config)
    labels = [int(samples.read(n)["labels"]) for n in range(400)]
    dropped = [n for n, label in enumerate(labels) if label == 5]
    assert 70 < len(dropped) < 130
    assert all(label in (n % 5, 5) for n, label in enumerate(labels))
    assert labels != [int(samples.read(n, epoch=1)["labels"]) for n in range(400)]


@pytest.mark.parametrize("channels", [1, 3])
def test_shapes(channels: int) -> None:
    """A shape covers a part of an image, and a number has one image."""
    shapes = Shapes(32, channels, 7)
    assert len(shapes.kinds) == len(KINDS)
    for label in range(5):
        image, result = shapes.read(label + 5 * 11)
        assert (image.shape, result) == ((channels, 32, 32), label)
        assert -1 <= image.min() < image.max() <= 1
        assert 0.02 < (image.amax(0) > -0.5).float().mean() < 0.6
    assert torch.equal(shapes.read(77)[0], Shapes(32, channels, 5).read(77)[0])


def test_a_folder_of_classes(tmp_path: Path) -> None:
    names = ["top.png", "a/1.png", "b/deep/2.jpg", "b/3.JPEG"]
    folder = folder_of(tmp_path, [*names, ".ipynb_checkpoints/1.png", "b/.cache/3.png", "._top.png"])
    (folder / "b" / "notes.txt").write_text("no image")
    config = config_of(data__path=folder)
    (images,) = (each.images for each in open_data(config).sets)  # type: ignore[attr-defined]
    assert isinstance(images, Images)
    read = map(images.read, range(len(images)))
    results = [(round(float((image.mean() + 1) * 127.5)), label) for image, label in read]
    assert results == [(0, 0), (40, 0), (120, 1), (80, 1)]
    assert images.read(0)[0].shape == (3, 6, 6)
    grey = config_of(data__path=folder, model__channels=1)
    assert open_data(grey).sets[0].read(1)["patches"].shape == (9, 4)


def test_an_image_is_as_a_viewer_shows_it(tmp_path: Path) -> None:
    """Grey of 16 bits keeps its shades, and a photograph is upright; a damaged EXIF says nothing."""
    shades = np.arange(36, dtype=np.uint16).reshape(6, 6) * 7 * 257
    Image.fromarray(shades).save(tmp_path / "0.png")
    lower, turned = np.zeros((6, 6), np.uint8), Image.Exif()
    lower[3:] = 255
    turned[0x0112] = 6  # the camera was turned: the first row is at the right
    Image.fromarray(lower).save(tmp_path / "1.png", exif=turned)
    Image.fromarray(lower).save(tmp_path / "2.jpg", exif=b"Exif\0\0" + b"\xff" * 20, quality=100)
    for channels in (1, 3):
        images = Images("", [(path, 0) for path in sorted(tmp_path.iterdir())], 6, channels, False)
        read = [((images.read(n)[0] + 1) * 127.5).round() for n in range(3)]
        wanted = (shades // 257, np.rot90(lower, -1), lower)
        for image, pixels in zip(read, wanted, strict=True):
            assert np.abs(image.numpy() - pixels.astype(int)).max() <= 1


def test_an_unreadable_image_stops_the_run_or_is_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, ["0.png", "1.png", "2.png"])
    (folder / "1.png").write_bytes((folder / "1.png").read_bytes()[:40])
    line = f"data.path: {folder}/1.png: cannot be read as an image: "
    samples = open_data(config_of(data__path=folder)).sets[0]
    (problem,) = refused(samples.read, 1)
    assert problem.startswith(line)
    assert problem.endswith("; repair or remove it, or set data.skip_unreadable = true")
    skipping = open_data(config_of(data__path=folder, data__skip_unreadable=True)).sets[0]
    images = skipping.images  # type: ignore[attr-defined]
    for _ in range(2):
        assert torch.equal(images.read(1)[0], images.read(2)[0])
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(line)
    assert said[0].endswith("; skipped, 1 in all")
    for name in ("0.png", "2.png"):
        (folder / name).write_text("no image")
    with pytest.raises(ConfigError, match=r"^data.path: .*: none of its 3 images can be read$"):
        images.read(0)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
OTHER = "it is damaged, or neither PNG nor JPEG"
STRANGE: dict[str, str] = {
    "eps": OTHER,
    "dds": OTHER,
    "avif": OTHER,
    "empty profile": "index out of range",
    "no bytes": OTHER,
}


def strange(kind: str) -> bytes:
    """The bytes of a file that is no image, or an odd one."""
    if kind == "eps":
        return EPS
    if kind == "dds":  # of a pixel format that there is not
        return b"DDS " + struct.pack("<31I", 124, 0, 9, 9, *[0] * 14, 32, 4, 0x30305858, *[0] * 10)
    if kind == "avif":
        return struct.pack(">I", 28) + b"ftypavif" + bytes(4) + b"avifmif1miaf"
    image = io.BytesIO()
    Image.new("RGB", (9, 7)).save(image, "PNG")
    content = image.getvalue()
    if kind == "no bytes":
        return b""
    chunk = struct.pack(">I", 0) + b"iCCP" + struct.pack(">I", zlib.crc32(b"iCCP"))
    return content[:-12] + chunk + content[-12:]  # behind the pixels, as it is read last


@pytest.mark.parametrize("kind", STRANGE)
def test_a_file_that_is_not_what_its_name_says(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is no image, whatever other decoders make of it: one of them starts Ghostscript."""
    started: list[str] = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: started.append("gs"))
    folder = folder_of(tmp_path, ["0.png", "1.png"])
    (folder / "0.png").write_bytes(strange(kind))
    line = f"data.path: {folder}/0.png: cannot be read as an image: {STRANGE[kind]}"
    samples = open_data(config_of(data__path=folder)).sets[0]
    cure = "; repair or remove it, or set data.skip_unreadable = true"
    assert refused(samples.read, 0) == [line + cure]
    skipping = open_data(config_of(data__path=folder, data__skip_unreadable=True)).sets[0]
    images = skipping.images  # type: ignore[attr-defined]
    assert torch.equal(images.read(0)[0], images.read(1)[0])
    assert capfd.readouterr().err.splitlines() == [f"{line}; skipped, 1 in all"]
    assert started == []


def test_what_is_no_data(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    folder = folder_of(tmp_path / "many", [f"{n}/x.png" for n in range(3)])
    cases = {
        "README.md": "README.md is no folder of images; name one, or shapes for drawn ones",
        str(empty): f"{empty} has no image (.png, .jpg, .jpeg) in it or in its folders",
        str(
            folder
        ): f"{folder} has 3 folders, each a class; set model.n_classes to at least 3 (it is 2)",
    }
    for path, message in cases.items():
        assert refused(open_data, config_of(data__path=path, model__n_classes=2)) == [
            f"data.path: {message}"
        ]
    assert refused(open_data, config_of(model__channels=4)) == [
        "data.path: shapes cannot be read with model.channels 4: an image has 3, or 1 if it is grey;"
        " the presets with 4 are of latents, for which there is no data here"
    ]


def test_squared_error_leaves_out_what_is_nan() -> None:
    output = torch.tensor([[[1.0, 2.0]]], requires_grad=True)
    loss = squared_error(output, torch.tensor([[[float("nan"), 5.0]]]))
    loss.backward()
    assert loss == 9.0
    assert output.grad is not None
    assert output.grad.tolist() == [[[0.0, -6.0]]]


def _shares(fault: bool) -> torch.Tensor:
    """The noisy patches of the whole batch, put together of the ranks' shares."""
    config = config_of()
    place = "models.dit.flow:NoisyImages.read"
    by_rank = mutated(place, "named_generator(", "torch.Generator().manual_seed(dist.get_rank()) or (")
    import models.dit.flow as flow

    flow.dist = dist  # type: ignore[attr-defined]
    with by_rank if fault else nullcontext():
        ranks = dist.get_world_size()
        batches = training_batches(config, open_data(config), (dist.get_rank(), ranks))
        mine = batches.batch(0)["patches"].contiguous()
    parts = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(parts, mine)
    return torch.cat(parts)


def test_noise_of_a_rank_would_be_seen(pool: Pool) -> None:
    whole = pool.run(_shares, 1, False)[0]
    assert torch.equal(pool.run(_shares, 2, False)[0], whole)
    assert not torch.equal(pool.run(_shares, 2, True)[0], pool.run(_shares, 1, True)[0])
