"""The images of a search: a part held out, the rest in an order that depends on the seed alone.

Every image of every step is drawn and augmented from its own seed, so that a resumed run sees what an undisturbed one
would have seen, and two processes together see what one would. A search on few images passes over them many times: of
each it may see a few augmented views again and again, which stay in memory, on the device that looks at them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from diffrate.errors import DiffRateError
from diffrate.seeding import Batch, Item, SeededItems, collate, load_batches, load_items, permutation

FEWEST = 16
MOST_HELD_OUT = 2000  # of a large set: they stay on the device, and their mean is known well enough
MEMORY = 2 * 2**30  # bytes of images that a search keeps; what does not fit is read again


class SearchImages:
    """A dataset split for a search; `plain` is the same images without augmentation, for the held-out part.

    held_out  share of the images kept apart, at most MOST_HELD_OUT of them.
    views     augmented views of each image, seen in turns and kept; None: a new one at every pass.
    """

    def __init__(
        self,
        augmented: Dataset[Any],
        plain: Dataset[Any],
        held_out: float,
        seed: int,
        views: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        count = len(augmented)  # type: ignore[arg-type]
        if count < FEWEST:
            raise DiffRateError(
                f"a search needs at least {FEWEST} images, and about 1,000 to be good; here are {count}"
            )
        if count != len(plain):  # type: ignore[arg-type]
            raise DiffRateError("the augmented and the plain images of a search must be the same ones")
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        held = min(max(1, round(held_out * count)), count - 1, MOST_HELD_OUT)
        self.seed, self.count, self.views = seed, count, views
        self.kept: dict[tuple[int, int], Item] = {}
        self.room, self.device = MEMORY, device or torch.device("cpu")
        self.held_out, self.training = sorted(order[:held]), sorted(order[held:])
        self.augmented, self.plain = SeededItems(augmented), SeededItems(plain)

    def keys(self, step: int, batch_size: int) -> list[tuple[int, int]]:
        """(index, seed) of the images of one step: passes over the training part, each in a new order."""
        n = len(self.training)
        keys = []
        for position in range(step * batch_size, (step + 1) * batch_size):
            epoch, place = divmod(position, n)
            index = self.training[permutation(self.seed, epoch, n)[place]]
            number = position if self.views is None else (epoch % self.views) * self.count + index
            keys.append((index, (self.seed * 1_000_003 + number) % 2**31))
        return keys

    def batches(
        self, first: int, last: int, batch_size: int, workers: int, process: int = 0, processes: int = 1
    ) -> Iterator[Batch]:
        """The batches of steps first … last - 1, of which this process gets every `processes`-th image."""
        steps = [self.keys(step, batch_size)[process::processes] for step in range(first, last)]
        return (
            load_batches(self.augmented, steps, workers) if self.views is None else self._kept(steps, workers)
        )

    def _kept(self, steps: list[list[tuple[int, int]]], workers: int) -> Iterator[Batch]:
        """Batches of which every view that comes again, and fits into memory, is read once."""
        seen = Counter(key for step in steps for key in step)
        planned, missing = set(self.kept), []
        sample = next((key for step in steps for key in step), None)
        size = 1 if sample is None else max(1, _bytes(self.augmented[sample]))
        fits = len(planned) + self.room // size
        for step in steps:
            missing.append([key for key in step if key not in planned])
            again = [key for key in missing[-1] if seen[key] > 1]
            planned.update(again[: max(0, fits - len(planned))])
        loaded = load_items(self.augmented, [keys for keys in missing if keys], workers, self.device)
        for step, keys in zip(steps, missing, strict=True):
            read = dict(zip(keys, next(loaded), strict=True)) if keys else {}
            for key, item in read.items():
                if key in planned and key not in self.kept:
                    self.kept[key] = item
                    self.room -= _bytes(item)
            yield collate([read[key] if key in read else self.kept[key] for key in step])

    def held_out_batches(
        self, batch_size: int, workers: int, process: int = 0, processes: int = 1
    ) -> Iterator[Batch]:
        """The held-out images; several processes share each batch, so that together they see what one would."""
        keys = [(index, 0) for index in self.held_out]
        batches = [keys[i : i + batch_size][process::processes] for i in range(0, len(keys), batch_size)]
        return load_batches(self.plain, [batch for batch in batches if batch], workers)


def _bytes(item: Item) -> int:
    return 0 if item[0] is None else item[0].numel() * item[0].element_size()
