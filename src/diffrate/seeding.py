"""Randomness by number: what a search or a training draws for an image or a step depends on its number alone.

A resumed run then sees what an undisturbed one would have seen, and several processes together see what one would.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from diffrate.data import UnreadableImageError


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


Item = tuple[Tensor | None, int, str]  # an image or None, its label or -1, and why it could not be read


class SeededItems(Dataset[Any]):
    """Items of a dataset by (index, seed): the same pair gives the same augmented image, in any process."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, key: tuple[int, int]) -> Item:
        index, seed = key
        try:
            with seeded(seed):
                item = self.dataset[index]
        except UnreadableImageError as error:
            return None, -1, str(error)
        image, label = item if isinstance(item, tuple | list) else (item, -1)
        return image, int(label), ""


def load_batches(
    dataset: SeededItems, keys: Iterable[list[tuple[int, int]]], workers: int, pin_memory: bool = False
) -> Iterator[Batch]:
    """The batches behind lists of (index, seed), read by worker processes where there are any."""
    loader: Any = DataLoader(
        dataset, batch_sampler=keys, num_workers=workers, collate_fn=collate, pin_memory=pin_memory
    )
    return iter(loader)


def load_items(
    dataset: SeededItems, keys: Iterable[list[tuple[int, int]]], workers: int
) -> Iterator[list[Item]]:
    """The same, each batch as the list of its items, readable or not."""
    loader: Any = DataLoader(dataset, batch_sampler=keys, num_workers=workers, collate_fn=_packed)
    return map(_unpacked, loader)


Packed = tuple[Tensor, list[tuple[bool, int, str]]]  # the images, and of every item whether it is one of them


def _packed(items: list[Item]) -> Packed:
    """All images as one tensor: each that a worker process sends holds a file descriptor open."""
    images = [image for image, _, _ in items if image is not None]
    told = [(image is not None, label, reason) for image, label, reason in items]
    return torch.stack(images) if images else torch.empty(0), told


def _unpacked(packed: Packed) -> list[Item]:
    images = iter(packed[0])
    return [(next(images) if there else None, label, reason) for there, label, reason in packed[1]]


def collate(items: list[Item]) -> Batch:
    images = [image for image, _, _ in items if image is not None]
    labels = [label for image, label, _ in items if image is not None]
    unreadable = [reason for _, _, reason in items if reason]
    return Batch(torch.stack(images) if images else torch.empty(0), torch.tensor(labels), unreadable)


@functools.lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, n: int) -> list[int]:
    order: list[int] = torch.randperm(
        n, generator=torch.Generator().manual_seed(seed * 7919 + epoch + 1)
    ).tolist()
    return order
