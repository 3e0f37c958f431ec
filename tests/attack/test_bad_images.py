"""A sample of the odd and damaged images; `make attack` reads hundreds of them."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from attack.images import NAMES, attack, png_of
from conftest import TINY_FLAGS, check_refused, pixels, random_vit
from diffrate.data import ImageFiles, UnreadableImageError, augmenting, preprocessing
from diffrate.errors import DiffRateError


def test_odd_and_damaged_images(tiny_vit: nn.Module, tmp_path: Path) -> None:
    found = attack(tmp_path, tiny_vit, count=150, seed=3)
    assert not found.defects
    assert found.ended.total() > 290  # two readers


def test_sixteen_bits_keep_their_brightness(tiny_vit: nn.Module, tmp_path: Path) -> None:
    deep = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    files = ImageFiles([tmp_path / "deep.png"], preprocessing(tiny_vit))
    assert np.array_equal(np.asarray(files.image(0))[..., 0], deep // 256)


def test_a_strip_is_refused_before_it_is_resized(tiny_vit: nn.Module, tmp_path: Path) -> None:
    """Made 32 pixels high, 30,000 x 1 would be nearly a million wide; at 224 it would not fit into memory."""
    (tmp_path / "strip.png").write_bytes(png_of(30_000, 1))
    with pytest.raises(UnreadableImageError, match="its sides are 30000 and 1 pixels"):
        ImageFiles([tmp_path / "strip.png"], preprocessing(tiny_vit))[0]
    (tmp_path / "long.png").write_bytes(png_of(2000, 10))
    assert torch.isfinite(ImageFiles([tmp_path / "long.png"], preprocessing(tiny_vit))[0]).all()


def test_a_pipe_is_not_waited_for(tiny_vit: nn.Module, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(UnreadableImageError, match="not a file"):
        ImageFiles([tmp_path / "pipe.png"], preprocessing(tiny_vit))[0]


def test_a_tiny_crop_would_ask_for_a_huge_image(tiny_vit: nn.Module) -> None:
    with pytest.raises(DiffRateError, match=r"crop_pct is a fraction from 0\.05"):
        preprocessing(tiny_vit, crop_pct=1e-4)


@pytest.mark.parametrize("workers", [0, 2])
def test_hostile_names_stay_in_one_line(diffrate_cli, eval_flags, image_folder, workers) -> None:
    bad = image_folder / "val" / "000" / f"{NAMES[0]}<b>.png"
    bad.write_bytes(b"no image")
    check_refused(
        diffrate_cli(*eval_flags, "--workers", workers), r"cannot read the image \S+/000/a.b<b>\.png: not a"
    )


@pytest.mark.parametrize("name", NAMES)
def test_pictures_of_images_with_hostile_names(diffrate_cli, checkpoint, tmp_path: Path, name: str) -> None:
    image = tmp_path / f"{name.replace('/', '_')}.png"
    Image.new("RGB", (40, 40)).save(image)
    flags = [
        *TINY_FLAGS,
        "--checkpoint",
        checkpoint,
        "--schedule",
        tmp_path / "s.json",
        "--output",
        tmp_path / "out",
    ]
    assert diffrate_cli("compress", *TINY_FLAGS, "--merge", "17,9,5,3", "-o", tmp_path / "s.json").code == 0
    ran = diffrate_cli("visualize", image, *flags, "--format", "png")
    assert ran.code == 0, ran.err
    (picture,) = (tmp_path / "out").iterdir()
    assert picture.name.isprintable()
    assert not set(picture.name) & set('<>"|?*')


def test_augmentation_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its full magnitude RandAugment posterizes to 0 bits, which Pillow refuses: one image in 600."""
    config = preprocessing(random_vit())
    augment = augmenting(config, auto_augment="rand-m9-mstd0.5-inc1")
    operations = [op for part in augment.transforms for op in getattr(part, "ops", [])]
    assert {"PosterizeIncreasing"} <= {op.name for op in operations}
    image = Image.fromarray(pixels(0))
    for operation in operations:
        monkeypatch.setattr("random.gauss", lambda *_: 99.0)
        operation.prob = 1.0
        assert operation(image).size == image.size
