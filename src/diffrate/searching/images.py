"""The images of a search: a part held out, the rest in an order that depends on the seed alone.

Every image of every step is drawn and augmented from its own seed, so that a resumed run sees what an undisturbed one
would have seen, and two processes together see what one would.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from diffrate.data import UnreadableImageError
from diffrate.errors import DiffRateError

FEWEST = 16


class Batch(NamedTuple):
    """images (B, C, H, W), labels (B,) or -1, and what could not be read; perhaps no image at all."""

    images: Tensor
    labels: Tensor
    unreadable: list[str]


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """All that is random inside is random by `seed` alone (Python's, numpy's and torch's), and nothing outside."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class SeededItems(Dataset[Any]):
    """Items of a dataset by (index, seed): the same pair gives the same augmented image, in any process."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor | None, int, str]:
        index, seed = key
        try:
            with seeded(seed):
                item = self.dataset[index]
        except UnreadableImageError as error:
            return None, -1, str(error)
        image, label = item if isinstance(item, tuple | list) else (item, -1)
        return image, int(label), ""


class SearchImages:
    """A dataset split for a search; `plain` is the same images without augmentation, for the held-out part."""

    def __init__(self, augmented: Dataset[Any], plain: Dataset[Any], held_out: float, seed: int) -> None:
        count = len(augmented)  # type: ignore[arg-type]
        if count < FEWEST:
            raise DiffRateError(
                f"a search needs at least {FEWEST} images, and about 1,000 to be good; here are {count}"
            )
        if count != len(plain):  # type: ignore[arg-type]
            raise DiffRateError("the augmented and the plain images of a search must be the same ones")
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        held = min(max(1, round(held_out * count)), count - 1)
        self.seed, self.count = seed, count
        self.held_out, self.training = sorted(order[:held]), sorted(order[held:])
        self.augmented, self.plain = SeededItems(augmented), SeededItems(plain)

    def keys(self, step: int, batch_size: int) -> list[tuple[int, int]]:
        """(index, seed) of the images of one step: passes over the training part, each in a new order."""
        n = len(self.training)
        keys = []
        for position in range(step * batch_size, (step + 1) * batch_size):
            order = _permutation(self.seed, position // n, n)
            keys.append((self.training[order[position % n]], (self.seed * 1_000_003 + position) % 2**31))
        return keys

    def batches(
        self, first: int, last: int, batch_size: int, workers: int, process: int = 0, processes: int = 1
    ) -> Iterator[Batch]:
        """The batches of steps first … last - 1, of which this process gets every `processes`-th image."""
        steps = [self.keys(step, batch_size)[process::processes] for step in range(first, last)]
        return _load(self.augmented, steps, workers)

    def held_out_batches(
        self, batch_size: int, workers: int, process: int = 0, processes: int = 1
    ) -> Iterator[Batch]:
        """The held-out images; several processes share each batch, so that together they see what one would."""
        keys = [(index, 0) for index in self.held_out]
        batches = [keys[i : i + batch_size][process::processes] for i in range(0, len(keys), batch_size)]
        return _load(self.plain, [batch for batch in batches if batch], workers)


def _load(dataset: SeededItems, keys: Sequence[list[tuple[int, int]]], workers: int) -> Iterator[Batch]:
    loader: Any = DataLoader(dataset, batch_sampler=keys, num_workers=workers, collate_fn=_collate)
    return iter(loader)


def _collate(items: list[tuple[Tensor | None, int, str]]) -> Batch:
    images = [image for image, _, _ in items if image is not None]
    labels = [label for image, label, _ in items if image is not None]
    unreadable = [reason for _, _, reason in items if reason]
    return Batch(torch.stack(images) if images else torch.empty(0), torch.tensor(labels), unreadable)


@functools.lru_cache(maxsize=8)
def _permutation(seed: int, epoch: int, n: int) -> list[int]:
    order: list[int] = torch.randperm(
        n, generator=torch.Generator().manual_seed(seed * 7919 + epoch + 1)
    ).tolist()
    return order
