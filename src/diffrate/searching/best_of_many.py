"""Where a descent begins: between the best of many random shapes, found by successive halving on the search's images.

How far answers lie from the whole model's varies from image to image, and between two near schedules nearly as much as
between two far ones. Slopes compare near ones, and lead nowhere far where images are few. Shapes that differ widely are
told apart by few images. So all of them see a few, the better half as many again, and so on until a few are left,
whose mean is mostly better than the best of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from accelerate import Accelerator
from torch import Tensor

from diffrate.operator import Operator
from diffrate.portions import Portions
from diffrate.schedule import Schedule
from diffrate.searching import design
from diffrate.searching.budget import Budget, Space, rounded
from diffrate.searching.fast import schedule_of
from diffrate.searching.held_out import HeldOut
from diffrate.searching.images import SearchImages
from diffrate.searching.many import in_order
from diffrate.searching.report import Progress
from diffrate.searching.split import LEVELS, even_split
from diffrate.searching.starts import Start, random_starts

MOST = 256  # shapes
FEWEST = 64  # of fewer the best are hardly better than a simple shape
LEFT = 4  # whose mean is the beginning
FIRST = (16, 32)  # images that all of them see, at least and at most
AT_ONCE = 32  # shapes that share a walk
EFFORT = 0.75  # of what the descent takes, in forward passes, that this may take


class BestOfMany:
    """Finds a beginning on the images that the descent will see; `reduce` adds sums over all processes."""

    def __init__(
        self,
        images: SearchImages,
        held_out: HeldOut,
        batch_size: int,
        accelerator: Accelerator,
        workers: int,
        reduce: Callable[[Tensor], Tensor],
        bar: Progress,
    ) -> None:
        self.subject, self.images, self.held_out = held_out.subject, images, held_out
        self.batch_size, self.accelerator, self.workers = batch_size, accelerator, workers
        self.reduce, self.bar = reduce, bar
        least, most = FIRST
        self.first = max(min(batch_size // 5, most), least)
        self.portions = Portions("the choice of a beginning")

    def count(self, space: Space, steps: int, others: int = 0) -> int:
        """How many shapes a search of so many steps can afford, a power of two; none if they would be too few.

        Only for classifiers: what a decoder reads makes other shapes good than random ones.
        """
        if not self.subject.classifies:
            return 0
        # The schedules of a step share about half of their blocks. Shapes share some too, but are charged in full.
        passes = EFFORT * steps * self.batch_size * (1 + design.size(space, others) / 2)
        count = MOST
        while count >= FEWEST and self.first * count * (count // LEFT).bit_length() / 2 > passes:
            count //= 2
        return count if count >= FEWEST else 0

    def begin(
        self, space: Space, budget: Budget | float, operator: Operator, simple: Start, steps: int, seed: int
    ) -> Start:
        """The mean of the best of random starts and a `simple` one.

        The simple one alone where a search is short, where next to no other counts meet the budget, and where
        held-out images say that it is clearly better.
        """

        def schedule(start: Start) -> Schedule:
            return schedule_of(rounded(start.counts, budget, space), space, operator, start.shares)

        others = len(simple.shares) if operator.splits else 0  # that a step of the descent measures too
        shapes = random_starts(space, budget, self.count(space, steps, others), seed)
        levels = itertools.cycle(even_split(space, level) for level in LEVELS)
        drawn = [simple, *map(Start, shapes, levels)]
        made = ((start, schedule(start)) for start in drawn)
        different = {(each.prune, each.merge): (start, each) for start, each in made}
        if len(different) < FEWEST:
            return simple
        left = list(different.values())
        rounds = self._rounds(len(left))
        self.bar.start(f"{Budget.of(budget)}: where to begin", sum(n * (b - a) for n, _, a, b in rounds), 0)
        totals = torch.zeros(len(left), dtype=torch.float64)
        for _, size, first, last in rounds:
            totals = totals + self._divergences([each for _, each in left], size, first, last)
            best = totals.argsort(stable=True)[: max(LEFT, len(left) // 2)]
            left, totals = [left[i] for i in best.tolist()], totals[best]
        mean = Start.between([start for start, _ in left], budget, space)
        at_mean, at_simple = (self.held_out.each(schedule(start)) for start in (mean, simple))
        return simple if self.held_out.clearly_above(at_mean, at_simple) else mean

    def _rounds(self, count: int) -> list[tuple[int, int, int, int]]:
        """Of each round: how many shapes, and their images, the batches of this size from `first` to before `last`."""
        found, seen, largest = [], 0, self.first
        while 2 * largest <= self.batch_size:
            largest *= 2
        while count > LEFT:
            size = min(seen, largest) or self.first
            found.append((count, size, seen // size, max(2 * seen, self.first) // size))
            count, seen = max(LEFT, count // 2), 2 * seen or self.first
        return found

    @torch.no_grad()
    def _divergences(self, schedules: Sequence[Schedule], size: int, first: int, last: int) -> Tensor:
        """(S,) sums over the images of some batches, of all processes."""
        accelerator, subject = self.accelerator, self.subject
        shares = accelerator.process_index, accelerator.num_processes
        order = in_order(schedules)
        groups = [order[i : i + AT_ONCE] for i in range(0, len(order), AT_ONCE)]
        sums = torch.zeros(len(schedules), dtype=torch.float64, device=accelerator.device)
        subject.model.eval()
        with accelerator.autocast():
            for batch in self.images.batches(first, last, size, self.workers, *shares):
                images = batch.images.to(accelerator.device)
                teacher = self.portions.joined(subject.under(None), images) if len(images) else None
                for group in groups:
                    if teacher is not None:
                        answers = self.portions.joined(
                            partial(self._answers, [schedules[i] for i in group]), images
                        )
                        each = subject.divergence(teacher, answers.transpose(0, 1))  # (S, B)
                        sums[group] += each.sum(dim=1, dtype=torch.float64)
                    self.bar.advance(len(group))
        return self.reduce(sums).cpu()

    def _answers(self, schedules: Sequence[Schedule], images: Tensor) -> Tensor:
        """(B, S, …)"""
        return self.subject.under_many(schedules, images).transpose(0, 1)
