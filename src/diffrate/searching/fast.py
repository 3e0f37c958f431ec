"""The fast recipe: descent on measured slopes of the divergence from the uncompressed model.

No labels, no proxies and no backward pass. The straight-through gradient of the paper is biased where it counts: a
revived token is taken to live to the end, and a block above the running minimum gets none. A schedule has only a dozen
numbers, so real forward passes can measure their slopes: design.py says of which schedules, many.py runs them at the
price of a few, descent.py moves the counts, and pace.py says how far. By default tokens are merged only, those that
lose least, into importance-weighted means that are as long as their longest member; where an operator prunes and
merges, split.py learns how much of each.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from diffrate.operator import Operator
from diffrate.portions import Portions
from diffrate.schedule import Schedule
from diffrate.searching.budget import Budget, Space, project, rounded
from diffrate.searching.descent import Descent
from diffrate.searching.design import around, slopes
from diffrate.searching.held_out import HeldOut
from diffrate.searching.pace import Pace
from diffrate.searching.split import Split, even_split, pruned, split_of
from diffrate.searching.starts import Start
from diffrate.searching.subject import SOFT, Subject

OPERATOR = Operator(operation="merge", mean="attention", choice="cost", keep_norm=True)
FLOOR = 1.0  # the other choice, for models whose class token ignores most of an image: held-out images decide
BEHIND = 2.0  # standard errors on held-out images, by which a start is clearly worse than the first of four
TRAVEL = 80  # tokens of 197 that a count could travel at the first step's length


class FastRecipe:
    """One budget's search. `reduce` adds sums over all processes.

    Where the operator prunes and merges, how much of each is learned beside the counts.
    """

    returns_last: ClassVar[bool] = False  # held-out images choose among its answers

    def __init__(
        self,
        subject: Subject,
        space: Space,
        operator: Operator,
        budget: Budget | float,
        steps: int,
        start: Start,
        seed: int,
        reduce: Callable[[Tensor], Tensor],
    ) -> None:
        self.subject, self.operator, self.reduce, self.seed = subject, operator, reduce, seed
        self.portions = Portions("the search")
        length = TRAVEL / steps * space.tokens / 197
        self.descent = Descent(start.counts, budget, space, Pace(steps, length, length / 10), relative=0.5)
        self.split = Split.begin(start.shares, steps) if operator.splits else None

    @torch.no_grad()
    def step(self, images: Tensor, labels: Tensor) -> float:
        """Measure the slopes on these images and move the counts; returns the loss around the counts before."""
        subject, descent, split = self.subject, self.descent, self.split
        subject.model.eval()
        draw = random.Random(f"{self.seed}-{Budget.of(descent.budget).leading}-{descent.pace.done}")
        others = len(split.shares) if split else 0
        measured, ways = around(descent.counts, descent.space, draw, others)
        shares = split.around(ways) if split else ways  # (S, 0) where there is nothing to split
        schedules = [
            schedule_of([int(n) for n in each], descent.space, self.operator, share)
            for each, share in zip(measured, shares, strict=True)
        ]

        def added(parts: list[slice]) -> Tensor:
            sums = []
            for part in parts:
                answers = subject.under_many(schedules, images[part])
                each = subject.divergence(subject.under(None)(images[part]), answers)  # (S, b)
                sums.append(
                    torch.cat([each.sum(dim=-1, dtype=torch.float64), each.new_tensor([each.shape[1]])])
                )
            return torch.stack(sums).sum(dim=0)

        sums = self.reduce(self.portions.fitted(added, len(images))).cpu()
        losses = sums[:-1] / sums[-1]
        if not losses.isfinite().all():
            return float("nan")  # and the counts stay where they were
        changes = split.changes(shares) if split else ways
        loss, of_counts, of_shares = slopes(descent.counts, descent.space, measured, losses, changes)
        descent.update(of_counts)
        if split:
            split.update(of_shares)
        return loss

    def present(self) -> Schedule:
        """The schedule of the present point."""
        d = self.descent
        shares = self.split.shares if self.split else None
        return schedule_of(rounded(d.counts, d.budget, d.space), d.space, self.operator, shares)

    def answer(self) -> Schedule:
        """The schedule that this search would return now."""
        d = self.descent
        shares = self.split.answer() if self.split else None
        return schedule_of(rounded(d.answer(), d.budget, d.space), d.space, self.operator, shares)

    def state(self) -> dict[str, Any]:
        split = {"split": self.split.state()} if self.split else {}
        return {**self.descent.state(), **split}

    def restore(self, state: dict[str, Any]) -> None:
        self.descent.restore(state)
        if self.split:
            self.split.restore(state["split"])


def schedule_of(
    counts: list[int], space: Space, operator: Operator, shares: Tensor | None = None
) -> Schedule:
    """Counts as a schedule; where the operator prunes and merges, with `shares` of what goes merged, else half."""
    kept = after_pruning = space.every_block(counts)
    if operator.splits:
        after_pruning = pruned(kept, even_split(space) if shares is None else shares, space)
    return Schedule(after_pruning, kept, space.prefix, operator)


def best_start(
    space: Space,
    budget: Budget | float,
    operator: Operator,
    held_out: HeldOut,
    start: Schedule | None,
    last: Schedule | None,
) -> Start:
    """Where to begin: at `start`, if it is given, else between the best of some simple schedules and the `last` answer.

    The best are the first on held-out images and all that are not clearly behind it; their mean is the beginning.
    Which of these is first is mostly chance, and a descent does not forget where it began: along directions in which
    the loss hardly changes it goes nowhere. How much of what goes is merged is taken from the `last` answer by all.
    """
    step = space.freely()
    if last is None and start is not None:
        return Start(project(space.searched(start), budget, space, step), split_of(start, space))
    shares = even_split(space) if last is None else split_of(last, space)
    candidates = held_out.subject.starts(space, budget)
    if last is not None or not candidates:
        counts = space.most if last is None else space.searched(last)
        candidates = [project(counts, budget, space, step), *candidates]
    if len(candidates) == 1:
        return Start(candidates[0], shares)
    losses = [
        held_out.each(schedule_of(rounded(counts, budget, space), space, operator, shares))
        for counts in candidates
    ]
    first = min(losses, key=held_out.mean)
    good = [
        counts
        for counts, loss in zip(candidates, losses, strict=True)
        if loss is first or not held_out.clearly_above(loss, first, BEHIND)
    ]
    return Start(project(torch.stack(good).mean(dim=0), budget, space, step), shares)


def best_operator(
    space: Space, budget: Budget | float, operator: Operator, held_out: HeldOut, counts: Tensor
) -> Operator:
    """The operator, or the same with a floor where that is clearly better at these counts on held-out images.

    By softened answers, with any number of classes: 200 images tell the right one of both by these, and not without.
    """
    other = operator.changed(floor=FLOOR)
    whole = rounded(counts, budget, space)
    as_given, floored = (held_out.each(schedule_of(whole, space, o), SOFT) for o in (operator, other))
    return other if held_out.clearly_above(as_given, floored) else operator
