"""The images of a search: a part held out, the rest in an order that depends on the seed alone.

Every image of every step is drawn and augmented from its own seed, so that a resumed run sees what an undisturbed one
would have seen, and two processes together see what one would.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from diffrate.errors import DiffRateError
from diffrate.seeding import Batch, SeededItems, load_batches, permutation

FEWEST = 16


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
            order = permutation(self.seed, position // n, n)
            keys.append((self.training[order[position % n]], (self.seed * 1_000_003 + position) % 2**31))
        return keys

    def batches(
        self, first: int, last: int, batch_size: int, workers: int, process: int = 0, processes: int = 1
    ) -> Iterator[Batch]:
        """The batches of steps first … last - 1, of which this process gets every `processes`-th image."""
        steps = [self.keys(step, batch_size)[process::processes] for step in range(first, last)]
        return load_batches(self.augmented, steps, workers)

    def held_out_batches(
        self, batch_size: int, workers: int, process: int = 0, processes: int = 1
    ) -> Iterator[Batch]:
        """The held-out images; several processes share each batch, so that together they see what one would."""
        keys = [(index, 0) for index in self.held_out]
        batches = [keys[i : i + batch_size][process::processes] for i in range(0, len(keys), batch_size)]
        return load_batches(self.plain, [batch for batch in batches if batch], workers)
