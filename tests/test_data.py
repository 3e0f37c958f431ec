"""Images: pixels and labels as they lie on disk, and no mistake in silence."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torch.utils.data import IterableDataset

from conftest import pixels, write_image
from diffrate.data import UnreadableImageError, build_loader, preprocessing, search_datasets
from diffrate.data.folders import find_folder
from diffrate.data.loader import WholeStream
from diffrate.data.reading import class_indices
from diffrate.errors import DiffRateError


def read(model: nn.Module, folder: Path, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """All images and labels; by default nothing is resized and pixels come as 0 … 1."""
    plain = {"crop_pct": 1.0, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "workers": 0}
    images, labels = zip(*build_loader(model, folder, **{**plain, **options}), strict=True)
    return torch.cat(images), torch.cat(labels)


@pytest.mark.parametrize("workers", [0, 2])
def test_pixels_and_labels_are_those_on_disk(tiny_vit: nn.Module, image_folder: Path, workers: int) -> None:
    images, labels = read(tiny_vit, image_folder, split="val", batch_size=5, workers=workers)
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    expected = np.stack([pixels(i) for i in range(12)]).transpose(0, 3, 1, 2) / 255
    assert np.allclose(images.numpy(), expected, atol=1e-6)


def test_normalisation_is_the_models_unless_given(tiny_vit: nn.Module, image_folder: Path) -> None:
    plain, _ = read(tiny_vit, image_folder)
    default, _ = read(tiny_vit, image_folder, mean=None, std=None)
    assert tiny_vit.pretrained_cfg["mean"] == (0.5, 0.5, 0.5)
    assert torch.allclose(default, (plain - 0.5) / 0.5, atol=1e-5)


def test_size_and_crop_follow_the_model_unless_given(tiny_vit: nn.Module, image_folder: Path) -> None:
    assert preprocessing(tiny_vit)["input_size"] == (3, 32, 32)
    assert preprocessing(tiny_vit)["crop_pct"] == tiny_vit.pretrained_cfg["crop_pct"]
    images, _ = read(tiny_vit, image_folder, img_size=(16, 24))
    assert images.shape[1:] == (3, 16, 24)


def test_grey_models_get_grey_images(image_folder: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, in_chans=1, num_classes=3)
    images, _ = read(model, image_folder, mean=(0.0,), std=(1.0,))
    assert images.shape == (12, 1, 32, 32)


def test_numbered_folders_are_class_indices_even_when_some_are_missing(
    tiny_vit: nn.Module, image_folder: Path
) -> None:
    shutil.rmtree(image_folder / "val" / "001")
    _, labels = read(tiny_vit, image_folder)
    assert labels.tolist() == [0] * 4 + [2] * 4


def test_class_indices_of_names() -> None:
    assert class_indices({"003": 0, "017": 1}) == {0: 3, 1: 17}
    assert class_indices({"cat": 0, "dog": 1}) == {}
    assert class_indices({"1": 0, "10": 1}) == {}


def test_named_folders_are_numbered_in_sorted_order(tiny_vit: nn.Module, tmp_path: Path) -> None:
    for i, name in enumerate(["dog", "ant", "cat"]):
        write_image(tmp_path / name / "a.png", i)
    images, labels = read(tiny_vit, tmp_path)
    seeds = [1, 2, 0]  # ant, cat, dog
    assert labels.tolist() == [0, 1, 2]
    assert np.allclose(images.numpy()[0], pixels(seeds[0]).transpose(2, 0, 1) / 255, atol=1e-6)


def test_class_map_numbers_the_folders(tiny_vit: nn.Module, tmp_path: Path) -> None:
    for i, name in enumerate(["ant", "cat", "dog"]):
        write_image(tmp_path / "images" / name / "a.png", i)
    (tmp_path / "map.txt").write_text("dog\ncat\nant\n")
    _, labels = read(tiny_vit, tmp_path / "images", class_map=str(tmp_path / "map.txt"))
    assert labels.tolist() == [2, 1, 0]


def test_fewer_named_classes_than_the_model_has_are_remarked(tiny_vit: nn.Module, tmp_path: Path) -> None:
    write_image(tmp_path / "dog" / "a.png", 0)
    with pytest.warns(UserWarning, match="1 classes and the model 3"):
        read(tiny_vit, tmp_path)


@pytest.mark.parametrize("layout", ["{i}.png", "a/b/{i}.png", "x{i}/{i}.png"])
def test_without_labels_any_folder_of_images_is_read(
    tiny_vit: nn.Module, tmp_path: Path, layout: str
) -> None:
    for i in range(5):
        write_image(tmp_path / layout.format(i=i), i)
    images, labels = read(tiny_vit, tmp_path, labels=False)
    assert labels.tolist() == [-1] * 5
    assert np.allclose(images.numpy()[3], pixels(3).transpose(2, 0, 1) / 255, atol=1e-6)


@pytest.mark.parametrize(
    ("workers", "damage"), [(0, "text"), (0, "truncated"), (0, "empty"), (1, "truncated")]
)
def test_unreadable_image_is_named(
    tiny_vit: nn.Module, image_folder: Path, workers: int, damage: str
) -> None:
    bad = image_folder / "val" / "001" / "05.png"
    bad.write_bytes({"text": b"no image", "truncated": bad.read_bytes()[:1500], "empty": b""}[damage])
    with pytest.raises(
        UnreadableImageError, match=r"^cannot read the image \S+val/001/05\.png: .+$"
    ) as error:
        read(tiny_vit, image_folder, split="val", workers=workers)
    assert "\n" not in str(error.value)
    assert "Traceback" not in str(error.value)


def test_split_is_a_subfolder_and_must_exist(tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    (tmp_path / "search").mkdir()
    assert find_folder(tmp_path, "search") == tmp_path / "search"
    assert find_folder(tmp_path, None) == tmp_path / "val"
    assert find_folder(tmp_path / "search", None) == tmp_path / "search"
    with pytest.raises(DiffRateError, match="has no split 'test'"):
        find_folder(tmp_path, "test")


def test_missing_empty_and_flat_folders_are_one_sentence_each(tiny_vit: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(DiffRateError, match=r"absent does not exist$"):
        read(tiny_vit, tmp_path / "absent")
    with pytest.raises(DiffRateError, match=r"holds no images$"):
        read(tiny_vit, tmp_path)
    with pytest.raises(DiffRateError, match="--data-dir"):
        build_loader(tiny_vit)
    write_image(tmp_path / "a.png", 0)
    with pytest.raises(DiffRateError, match="outside of class folders"):
        read(tiny_vit, tmp_path)


def test_more_classes_than_the_model_has_are_refused(tiny_vit: nn.Module, image_folder: Path) -> None:
    write_image(image_folder / "val" / "003" / "12.png", 12)
    with pytest.raises(DiffRateError, match="4 classes, the highest with index 3, but the model has only 3"):
        read(tiny_vit, image_folder)


def test_a_model_without_classifier_is_refused_only_where_labels_matter(image_folder: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=0)
    with pytest.raises(DiffRateError, match="no classifier"):
        read(model, image_folder)
    assert len(read(model, image_folder, labels=False)[0]) == 12


def test_unknown_datasets_are_one_sentence(tiny_vit: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(DiffRateError, match="cannot open the dataset torch/nothing") as error:
        build_loader(tiny_vit, tmp_path, dataset="torch/nothing")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options", [{"mean": (0.5, 0.5)}, {"crop_pct": 0.0}, {"batch_size": 0}, {"workers": -1}]
)
def test_bad_options_are_one_sentence(
    tiny_vit: nn.Module, image_folder: Path, options: dict[str, object]
) -> None:
    with pytest.raises(DiffRateError):
        read(tiny_vit, image_folder, **options)


def test_a_stream_that_skips_images_is_found_out() -> None:
    batches = [(torch.zeros(4, 3, 8, 8), torch.zeros(4)), (torch.zeros(3, 3, 8, 8), torch.zeros(3))]
    assert len(list(WholeStream(batches, 7))) == 2
    with pytest.raises(UnreadableImageError, match="only 7 of the 8 images"):
        list(WholeStream(batches, 8))


def test_search_images_are_the_training_ones_augmented_and_plain(tmp_path, tiny_vit):
    for split, seeds in (("train", range(4)), ("val", range(10, 12))):
        for seed in seeds:
            write_image(tmp_path / split / f"{seed:02d}.png", seed=seed)
    augmented, plain = search_datasets(tiny_vit, tmp_path, crop_pct=1.0)
    assert len(augmented) == len(plain) == 4
    image, label = plain[2]
    wanted = (torch.from_numpy(pixels(2)).permute(2, 0, 1) / 255 - 0.5) / 0.5
    torch.testing.assert_close(image, wanted)
    assert label == -1
    torch.manual_seed(0)
    views = [augmented[2][0] for _ in range(6)]
    assert all(view.shape == (3, 32, 32) for view in views)
    assert not any(torch.equal(views[0], view) for view in views[1:])
    chosen, _ = search_datasets(tiny_vit, tmp_path, split="val")
    assert len(chosen) == 2


class Stream(IterableDataset):
    def __init__(self, images: list[Any]) -> None:
        self.images = images

    def __iter__(self) -> Iterator[Any]:
        return iter(self.images)


@pytest.mark.parametrize(("most", "wanted"), [(2, [0, 1]), (9, [0, 1, 2, 3, 4]), (None, [0, 1, 2, 3, 4])])
@pytest.mark.parametrize("kind", [list, Stream])
def test_a_search_takes_the_first_of_sets_that_are_no_folders(
    tiny_vit: nn.Module, monkeypatch: pytest.MonkeyPatch, kind: Any, most: int | None, wanted: list[int]
) -> None:
    images = [(Image.new("RGB", (32, 32), (value, 0, 0)), value) for value in range(5)]
    monkeypatch.setattr("diffrate.data.sets.build_dataset", lambda *_, **__: kind(images))
    for found in search_datasets(tiny_vit, most=most):
        assert [found[i][1] for i in range(len(found))] == wanted


def test_a_search_takes_images_evenly_spread_over_a_folder(tiny_vit: nn.Module, tmp_path: Path) -> None:
    for label in range(3):
        for i in range(4):
            write_image(tmp_path / str(label) / f"{i}.png", seed=4 * label + i)
    for found in search_datasets(tiny_vit, tmp_path, labels=True, most=3):
        assert [label for _, label in found] == [0, 1, 2]
