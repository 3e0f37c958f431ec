"""When a device has no memory for a batch: fewer images at a time, said once, with the same result.

A batch that is evaluated, searched on or trained on runs in portions, whose answers, sums or gradients are put together
again. Where the batch is what is measured, it is made smaller instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate.utils import release_memory
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor

from diffrate.errors import DiffRateError

T = TypeVar("T")


NO_MEMORY = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")  # of libraries, and of CUDA itself


def out_of_memory(error: BaseException) -> bool:
    """Whether fewer images would have gone through: of the device, or of a library that had to allocate there."""
    if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in NO_MEMORY):
        return True
    if "CUDNN_STATUS_NOT_SUPPORTED" in str(error):  # which accelerate counts, and is mostly something else
        return False
    return isinstance(error, Exception) and bool(should_reduce_batch_size(error))


class Portions:
    """How many images run at once: as many as come, until memory runs out; from then on half as many, and so on.

    what    the work in words, for the note that says so.
    splits  False: nothing is split, and the error is the caller's.
    """

    def __init__(self, what: str, splits: bool = True) -> None:
        self.what, self.splits = what, splits
        self.most: int | None = None

    def fitted(self, run: Callable[[list[slice]], T], count: int) -> T:
        """`run` with the portions of a batch of `count`; it is called again, with smaller ones, where memory runs out.

        What an attempt that fails has changed must not matter.
        """
        while True:
            size = count if self.most is None else min(self.most, count)
            try:
                parts = [slice(i, min(i + size, count)) for i in range(0, count, max(size, 1))]
                return run(parts or [slice(0, 0)])
            except RuntimeError as error:
                if not self.splits or size <= 1 or not out_of_memory(error):
                    raise
            # Only here, where the error is gone, so is what it kept alive.
            release_memory()
            self.most = (size + 1) // 2
            warnings.warn(
                f"{size} images at once take more memory than there is: {self.what} goes on with {self.most} at a time",
                RuntimeWarning,
                stacklevel=2,
            )

    def joined(self, forward: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        """`forward` of all images, whose answers have the images as their first dimension."""

        def run(parts: list[slice]) -> Tensor:
            return (
                forward(images) if len(parts) == 1 else torch.cat([forward(images[part]) for part in parts])
            )

        return self.fitted(run, len(images))


def largest_that_fits(run: Callable[[int], T], batch_size: int, what: str) -> T:
    """`run` of a batch size, or of the largest half, quarter, … of it for which there is memory."""
    while True:
        try:
            return run(batch_size)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        release_memory()
        if batch_size == 1:
            raise DiffRateError(f"{what} takes more memory than there is, even for one image")
        batch_size //= 2
        warnings.warn(
            f"a batch of {2 * batch_size} takes more memory than there is: {what} is of {batch_size} images",
            RuntimeWarning,
            stacklevel=2,
        )
