"""Batches for an evaluation, in a fixed order, with nothing missing in silence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from timm.data import create_loader
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from diffrate.data.folders import build_dataset, check_labels
from diffrate.data.reading import Images, UnreadableImageError
from diffrate.data.transforms import image_mode, preprocessing
from diffrate.errors import DiffRateError

MOST_WORKERS = 256
LARGEST_BATCH = 1 << 20


def build_loader(
    model: nn.Module,
    data_dir: str | Path | None = None,
    dataset: str = "",
    split: str | None = None,
    batch_size: int = 64,
    workers: int = 2,
    img_size: int | tuple[int, int] | None = None,
    crop_pct: float | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    interpolation: str | None = None,
    class_map: str | None = None,
    labels: bool = True,
    device: torch.device | str = "cpu",
    most: int | None = None,
) -> Any:
    """An evaluation loader of (images, labels) on `device`, in a fixed order, with the model's own preprocessing.

    Folders hold one folder a class. Names that are numbers of one width (`000` … `999`) are the class indices;
    other names are numbered in sorted order. `labels=False` reads any folder of images, flat or nested.
    `most` limits the images: of folders evenly spread, of other datasets the first.
    """
    if not 1 <= batch_size <= LARGEST_BATCH or not 0 <= workers <= MOST_WORKERS:
        raise DiffRateError(
            f"batch size must be from 1 to {LARGEST_BATCH} and workers from 0 to {MOST_WORKERS}"
        )
    config = preprocessing(model, img_size, crop_pct, mean, std, interpolation)
    images = build_dataset(
        data_dir, dataset, split, class_map, labels, batch_size=batch_size, mode=image_mode(config)
    )
    if labels:
        check_labels(images, model)
    if most is not None and isinstance(images, Images):
        images.spread(most)
    loader = create_loader(
        images,
        batch_size=batch_size,
        num_workers=workers,
        device=torch.device(device),
        pin_memory=torch.device(device).type == "cuda",
        persistent_workers=False,
        **config,
    )
    if most is not None and not isinstance(images, Images):
        return FirstImages(loader, most)
    if isinstance(images, IterableDataset):
        return WholeStream(loader, getattr(images.reader, "num_samples", None) or 0)  # type: ignore[attr-defined]
    return loader


class FirstImages:
    """A loader that ends after the first `count` images, for datasets that cannot be asked for chosen ones."""

    def __init__(self, loader: Any, count: int) -> None:
        self.loader, self.count = loader, count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        left = self.count
        for images, targets in self.loader:
            yield images[:left], targets[:left]
            left -= len(images)
            if left <= 0:
                return


class WholeStream:
    """A loader over a stream that raises when a pass gives fewer images than the dataset declares.

    Stream readers log the samples that they cannot read and go on, so that their number is the only trace.
    """

    def __init__(self, loader: Any, declared: int) -> None:
        self.loader = loader
        self.declared = declared

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        seen = 0
        for images, targets in self.loader:
            seen += len(images)
            yield images, targets
        if seen < self.declared:
            raise UnreadableImageError(
                f"only {seen} of the {self.declared} images that the dataset declares could be read"
            )
