"""Sets of images for a search and for a training: augmented, and as an evaluation sees them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset

from diffrate.data.folders import EVAL_SPLITS, TRAIN_SPLITS, Images, build_dataset, check_labels
from diffrate.data.transforms import RAND_AUGMENT, augmenting, image_mode, plain_transform, preprocessing
from diffrate.errors import DiffRateError

STREAMED = 10_000  # images of a stream that a search reads


def search_datasets(
    model: nn.Module,
    data_dir: str | Path | None = None,
    dataset: str = "",
    split: str | None = None,
    labels: bool = False,
    heavy: bool = False,
    img_size: int | tuple[int, int] | None = None,
    crop_pct: float | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    interpolation: str | None = None,
    class_map: str | None = None,
    most: int | None = None,
) -> tuple[Any, Any]:
    """The images of a search twice: augmented, and as an evaluation sees them.

    Light augmentation is a crop of at least a third of the image and mirroring; `heavy` is the paper's: small crops,
    RandAugment(9, 0.5) and random erasing. Without a split, the training images. Of a stream the first `STREAMED`.

    most  no more images than these: of a folder evenly spread, of other sets the first.
    """
    config = preprocessing(model, img_size, crop_pct, mean, std, interpolation)
    light = {"scale": (0.35, 1.0), "color_jitter": None, "re_prob": 0.0}
    strong = {
        "auto_augment": RAND_AUGMENT.format(9),
        "color_jitter": None,
        "re_prob": 0.25,
        "re_mode": "pixel",
    }
    augment = augmenting(config, **(strong if heavy else light))
    plain = plain_transform(config)
    mode = image_mode(config)
    found = build_dataset(data_dir, dataset, split, class_map, labels, mode=mode, usual=TRAIN_SPLITS)
    if labels:
        check_labels(found, model)
    if isinstance(found, IterableDataset):
        found = [pair for pair, _ in zip(found, range(most or STREAMED), strict=False)]
    elif most is not None and isinstance(found, Images):
        found.spread(most)
    elif most is not None:
        found = Subset(found, range(min(most, len(found))))
    return Transformed(found, augment), Transformed(found, plain)


def training_datasets(
    model: nn.Module,
    data_dir: str | Path | None = None,
    dataset: str = "",
    split: str | None = None,
    val_split: str | None = None,
    rand_augment: int = 9,
    color_jitter: float = 0.3,
    erasing: float = 0.25,
    smallest_crop: float = 0.08,
    img_size: int | tuple[int, int] | None = None,
    crop_pct: float | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    interpolation: str | None = None,
    class_map: str | None = None,
) -> tuple[Any, Any]:
    """The images of a training, augmented as DeiT does, and those that choose its best epoch, as an evaluation does."""
    config = preprocessing(model, img_size, crop_pct, mean, std, interpolation)
    augment = augmenting(
        config,
        scale=(smallest_crop, 1.0),
        auto_augment=RAND_AUGMENT.format(rand_augment) if rand_augment else None,
        color_jitter=color_jitter,
        re_prob=erasing,
        re_mode="pixel",
    )
    plain = plain_transform(config)
    mode = image_mode(config)
    sets = []
    for name, usual, transform in ((split, TRAIN_SPLITS, augment), (val_split, EVAL_SPLITS, plain)):
        found = build_dataset(data_dir, dataset, name, class_map, mode=mode, usual=usual)
        if isinstance(found, IterableDataset):
            raise DiffRateError(
                "training reads images in any order, which a stream cannot give: use folders or hfds/"
            )
        check_labels(found, model)
        sets.append(Transformed(found, transform))
    return sets[0], sets[1]


class Transformed(Dataset[tuple[Any, int]]):
    """Images of a dataset through a transform; several views may share one dataset."""

    def __init__(self, images: Any, transform: Callable[[Image.Image], Any]) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = self.images[index]
        return self.transform(image), int(label)
