"""Where a descent begins: between the best of many random shapes, found by successive halving on the search's images.

How far answers lie from the whole model's varies from image to image, and between two near schedules nearly as much as
between two far ones. Slopes compare near ones: where images are few, or budgets tight, they drown in that. Shapes that
differ widely do not. So all of them see a few images, the better half as many again, and so on until a few are left,
whose mean is mostly better than the best of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import Tensor

from diffrate.operator import Operator
from diffrate.portions import Portions
from diffrate.searching.budget import Budget, Space, project, rounded
from diffrate.searching.fast import schedule_of
from diffrate.searching.images import SearchImages
from diffrate.searching.report import Progress
from diffrate.searching.starts import random_starts
from diffrate.searching.subject import Subject

MOST = 256  # shapes
FEWEST = 64  # of so few the best are no better than a simple shape
LEFT = 4  # whose mean is the beginning
FIRST = (8, 32)  # images that all of them see, at least and at most
EFFORT = 0.25  # of the descent's forward passes that may be spent on this


class BestOfMany:
    """Finds a beginning on the images that the descent will see; `reduce` adds sums over all processes."""

    def __init__(
        self,
        subject: Subject,
        images: SearchImages,
        batch_size: int,
        accelerator: Accelerator,
        workers: int,
        reduce: Callable[[Tensor], Tensor],
        bar: Progress,
    ) -> None:
        self.subject, self.images, self.accelerator, self.workers = subject, images, accelerator, workers
        self.reduce, self.batch_size, self.bar = reduce, batch_size, bar
        least, most = FIRST
        self.first = max(min(batch_size // 5, most), least, accelerator.num_processes)
        self.portions = Portions("the choice of a beginning")

    def count(self, space: Space, steps: int) -> int:
        """How many shapes a search of so many steps can afford, a power of two; none if they would be too few."""
        passes = (
            EFFORT * steps * self.batch_size * len(space.least) / 2
        )  # a block's variant runs from there on
        count = MOST
        while count >= FEWEST and self.first * count * (count // LEFT).bit_length() / 2 > passes:
            count //= 2
        return count if count >= FEWEST else 0

    def begin(
        self, space: Space, budget: Budget | float, operator: Operator, simple: Tensor, steps: int, seed: int
    ) -> Tensor:
        """The mean of the best of random counts and `simple` ones; these alone where a search is short."""
        count = self.count(space, steps)
        if not count:
            return simple
        left = [simple, *random_starts(space, budget, count - 1, seed)]
        totals = torch.zeros(len(left), dtype=torch.float64)
        seen = 0
        self.bar.start(f"{Budget.of(budget)}: where to begin", 2 * (count - LEFT), 0)
        while len(left) > LEFT:
            totals = totals + self._divergences(left, space, budget, operator, seen)
            seen = 2 * seen or self.first
            best = totals.argsort(stable=True)[: max(LEFT, len(left) // 2)]
            left, totals = [left[i] for i in best.tolist()], totals[best]
        return project(torch.stack(left).mean(dim=0), budget, space, space.freely())

    @torch.no_grad()
    def _divergences(
        self, candidates: list[Tensor], space: Space, budget: Budget | float, operator: Operator, seen: int
    ) -> Tensor:
        """(S,) sums over as many images as were `seen`, the next ones; at first over the first few."""
        process, processes = self.accelerator.process_index, self.accelerator.num_processes
        step, size = (1, seen) if seen else (0, self.first)
        (batch,) = self.images.batches(step, step + 1, size, self.workers, process, processes)
        images = batch.images.to(self.accelerator.device)
        self.subject.model.eval()
        sums = torch.zeros(len(candidates), dtype=torch.float64, device=self.accelerator.device)
        if len(images):
            with self.accelerator.autocast():
                teacher = self.portions.joined(self.subject.under(None), images)
                for i, counts in enumerate(candidates):
                    schedule = schedule_of(rounded(counts, budget, space), space, operator)
                    answers = self.portions.joined(self.subject.under(schedule), images)
                    sums[i] = self.subject.divergence(teacher, answers).double().sum()
                    self.bar.update(None)
        return self.reduce(sums).cpu()
