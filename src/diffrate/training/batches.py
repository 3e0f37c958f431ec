"""The batches of a training run, by the number of the step.

A step is shared out in equal parts: one for each process and each round of gradient accumulation. What a part holds
and how it is augmented depends on the step alone, so that however many processes share a batch, together they see the
same images, and a resumed run sees those of an undisturbed one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from diffrate.embedded import ImageDataset, normalise
from diffrate.errors import DiffRateError
from diffrate.resident import ResidentImages, is_resident
from diffrate.seeding import SeededItems, load_batches, permutation
from diffrate.training.recipe import Recipe

Part = tuple[Tensor, Tensor]  # images (b, C, H, W) and labels (b,)


class Batches(Protocol):
    """Where the images of steps come from."""

    def parts(self, first: int, last: int, process: int, processes: int) -> Iterator[Part]:
        """This process's parts of the steps first … last - 1, `recipe.accumulate` of them for each step."""


def training_batches(dataset: Dataset[Any], recipe: Recipe, device: torch.device, workers: int) -> Batches:
    """A dataset that holds its images as a tensor moves to the device; any other is read by workers."""
    count = len(dataset)  # type: ignore[arg-type]
    if count < recipe.batch_size:
        raise DiffRateError(f"{count} images do not fill one batch of {recipe.batch_size}")
    if is_resident(dataset):
        return ResidentBatches(dataset, recipe, device)
    return LoadedBatches(dataset, recipe, device, workers)


def indices(recipe: Recipe, count: int, step: int) -> list[int]:
    """Which images a step has: epochs in a new order each, without the rest that does not fill a batch."""
    epoch, position = divmod(step, count // recipe.batch_size)
    order = permutation(recipe.seed, epoch, count)
    start = position * recipe.batch_size
    return [order[i // recipe.repeats] for i in range(start, start + recipe.batch_size)]


def share(size: int, part: int, parts: int) -> list[int]:
    """The places of a batch that one part has: from both ends inwards, so that mixing an image with its mirror

    place, as timm's Mixup does, pairs the same images whether the batch is whole or shared out.
    """
    if size % (2 * parts):
        return list(range(part * size // parts, (part + 1) * size // parts))
    low, high = part * size // (2 * parts), (part + 1) * size // (2 * parts)
    return [*range(low, high), *range(size - high, size - low)]


class LoadedBatches:
    """Images of any dataset, which augments them itself, each from a seed of its own."""

    def __init__(self, dataset: Dataset[Any], recipe: Recipe, device: torch.device, workers: int) -> None:
        self.items, self.count = SeededItems(dataset), len(dataset)  # type: ignore[arg-type]
        self.recipe, self.device, self.workers = recipe, device, workers

    def parts(self, first: int, last: int, process: int, processes: int) -> Iterator[Part]:
        keys = _Keys(self.recipe, self.count, first, last, process, processes)
        pinned = self.device.type == "cuda"
        for batch in load_batches(self.items, keys, self.workers, pinned):
            if batch.unreadable:
                raise DiffRateError(batch.unreadable[0])
            yield (
                batch.images.to(self.device, non_blocking=pinned),
                batch.labels.to(self.device, non_blocking=pinned),
            )


class _Keys:
    """The (index, seed) of every part of a run: one list for its whole length, made as it is read."""

    def __init__(
        self, recipe: Recipe, count: int, first: int, last: int, process: int, processes: int
    ) -> None:
        self.recipe, self.count, self.steps = recipe, count, range(first, last)
        self.mine = range(process * recipe.accumulate, (process + 1) * recipe.accumulate)
        self.parts = processes * recipe.accumulate

    def __len__(self) -> int:
        return len(self.steps) * len(self.mine)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        size = self.recipe.batch_size
        for step in self.steps:
            chosen = indices(self.recipe, self.count, step)
            for part in self.mine:
                places = share(size, part, self.parts)
                yield [(chosen[i], (self.recipe.seed * 1_000_003 + step * size + i) % 2**31) for i in places]


class ResidentBatches:
    """Images that lie on the device whole, augmented there a batch at a time."""

    def __init__(self, dataset: ImageDataset, recipe: Recipe, device: torch.device) -> None:
        self.recipe, self.device, self.count = recipe, device, len(dataset)
        self.images = ResidentImages(
            dataset, device, recipe.crop_padding, recipe.erasing, recipe.rand_augment
        )

    def parts(self, first: int, last: int, process: int, processes: int) -> Iterator[Part]:
        recipe, each = self.recipe, self.count // self.recipe.batch_size
        mine = range(process * recipe.accumulate, (process + 1) * recipe.accumulate)
        places = [
            torch.tensor(share(recipe.batch_size, part, processes * recipe.accumulate), device=self.device)
            for part in mine
        ]
        batches: list[Tensor] = []
        for step in range(first, last):
            if not batches or step % each == 0:  # once an epoch: a copy to the device waits for it
                steps = range(step - step % each, step - step % each + each)
                order = torch.tensor([i for s in steps for i in indices(recipe, self.count, s)])
                batches = list(order.to(self.device).split(recipe.batch_size))
            # The whole batch is augmented, whoever has which part of it: it is quick, and draws the same everywhere.
            images, labels = self.images.augmented(batches[step % each], recipe.seed * 1_000_003 + step)
            for part in places:
                yield images[part], labels[part]


def validation_batches(
    dataset: Dataset[Any], batch_size: int, workers: int, process: int = 0, processes: int = 1
) -> Any:
    """This process's share of the validation images; every process has as many batches as the others."""
    count = len(dataset)  # type: ignore[arg-type]
    if count < processes:
        raise DiffRateError(f"{processes} processes cannot share {count} validation images")
    rounds = min(-(-count // (batch_size * processes)), count // processes)
    chosen = [part.tolist() for part in torch.arange(process, count, processes).tensor_split(rounds)]
    if is_resident(dataset):
        return ((normalise(dataset.images[i][:, None]), dataset.labels[i]) for i in chosen)
    return DataLoader(dataset, batch_sampler=chosen, num_workers=workers)
