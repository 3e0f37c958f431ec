"""What images cost under a method that decides image by image, and on which images it finds its setting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from diffrate.errors import DiffRateError
from diffrate.methods.policy import PolicyModel

MEASURED_ON = (
    256  # images: where single ones deviate by 5 %, as ViT-Ti's, the mean of so many is right to 0.3 %
)


def decides_by_image(model: nn.Module) -> bool:
    return isinstance(model, PolicyModel) and model.policy.by_image


def spread_images(loader: Iterable[Any], least: int = MEASURED_ON) -> Tensor:
    """The images of a loader that `Spread` keeps, without their labels; it is read to its end."""
    spread = Spread(least)
    for images, _ in loader:
        spread.add(images)
    return spread.images()


class Spread:
    """Every k-th of the images that go by: from `least` to twice as many, all where there are fewer.

    From the first to the last, because folders are read in the order of their classes, and classes differ in what
    their images cost.
    """

    def __init__(self, least: int = MEASURED_ON) -> None:
        self.least, self.seen, self.step = least, 0, 1
        self.chosen: list[Tensor] = []

    def add(self, images: Tensor) -> None:
        self.chosen += [image.clone() for image in images[-self.seen % self.step :: self.step]]
        self.seen += len(images)
        while len(self.chosen) >= 2 * self.least:
            self.chosen, self.step = self.chosen[::2], 2 * self.step

    def images(self, most: int | None = None) -> Tensor:
        """What was kept, or `most` of it, the first and the last among them."""
        if not self.chosen:
            raise DiffRateError("there are no images to evaluate")
        if most is None or most >= len(self.chosen):
            return torch.stack(self.chosen)
        return torch.stack(
            [self.chosen[i] for i in torch.linspace(0, len(self.chosen) - 1, most).round().int()]
        )


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
