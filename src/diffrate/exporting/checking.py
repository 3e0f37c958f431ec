"""Whether an exported model gives what PyTorch gives, image by image.

Where two tokens are equal to within rounding, which of them goes is chance: PyTorch itself gives one of two answers as
its input changes in the last bits. Such an image counts as a tie where the exported model gives an answer of PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Run = Callable[[Tensor], Tensor]
AT_ONCE = 16  # images
ROUNDING = (1e-6, 1e-5)  # relative changes of pixels
TRIALS = 8  # of each


@dataclass(frozen=True)
class Agreement:
    """The largest difference of any output over all images that are not ties, and how many are."""

    images: int
    largest_difference: float
    ties: int


def agreement(ours: Run, theirs: Run, images: Tensor, tolerance: float) -> Agreement:
    """Compare two models on images in batches, and on the first one by itself."""
    largest, ties = 0.0, set()
    for first, batch in [
        (0, images[:1]),
        *zip(range(0, len(images), AT_ONCE), images.split(AT_ONCE), strict=True),
    ]:
        expected, given = ours(batch), theirs(batch)
        if expected.shape != given.shape or not given.isfinite().all():
            return Agreement(len(images), float("inf"), 0)
        differences = (expected - given).abs().flatten(1).amax(dim=1)
        for i, difference in enumerate(differences.tolist()):
            if difference > tolerance and _is_tie(ours, batch[i], given[i], tolerance):
                ties.add(first + i)
            else:
                largest = max(largest, difference)
    return Agreement(len(images), largest, len(ties))


def _is_tie(ours: Run, image: Tensor, given: Tensor, tolerance: float) -> bool:
    """Whether rounding alone brings our model to the answer `given`."""
    generator = torch.Generator().manual_seed(0)
    for size in ROUNDING:
        noise = size * torch.randn(TRIALS, *image.shape, generator=generator)
        answers = ours(image * (1 + noise))
        if (answers - given).abs().flatten(1).amax(dim=1).min() <= tolerance:
            return True
    return False
