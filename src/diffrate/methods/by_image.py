"""What images cost under a method that decides image by image, and on which images it finds its setting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from diffrate.errors import DiffRateError
from diffrate.methods.policy import PolicyModel

MEASURED_ON = (
    256  # images: the mean cost of so many is that of all to 0.3 % (ViT-Ti, where single ones deviate by 5 %)
)


def decides_by_image(model: nn.Module) -> bool:
    return isinstance(model, PolicyModel) and model.policy.by_image


def spread_images(loader: Iterable[Any], least: int = MEASURED_ON) -> Tensor:
    """Every k-th image of a loader's batches, without labels: from `least` to twice as many, all where there are fewer.

    From the first to the last, because folders are read in the order of their classes, and classes differ in what
    their images cost. The loader is read to its end.
    """
    chosen: list[Tensor] = []
    seen, step = 0, 1
    for images, _ in loader:
        chosen += [image.clone() for image in images[-seen % step :: step]]
        seen += len(images)
        while len(chosen) >= 2 * least:
            chosen, step = chosen[::2], 2 * step
    if not chosen:
        raise DiffRateError("there are no images to evaluate")
    return torch.stack(chosen)


class ImageCosts:
    """What the images cost under a method that decides image by image: alone, and padded to their batch's longest."""

    def __init__(self, model: nn.Module) -> None:
        assert isinstance(model, PolicyModel)
        self.model = model
        self.alone: list[Tensor] = []
        self.in_batch: list[Tensor] = []

    def add(self, images: Tensor) -> None:
        counts = self.model.image_counts(images)
        self.alone.append(self.model.gmacs_of_counts(counts))
        longest = counts.amax(dim=0, keepdim=True).expand_as(counts)
        self.in_batch.append(self.model.gmacs_of_counts(longest))

    def mean(self) -> float:
        return float(torch.cat(self.alone).mean())

    def padded(self) -> float:
        return float(torch.cat(self.in_batch).mean())
