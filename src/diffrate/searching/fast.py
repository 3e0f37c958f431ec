"""The fast recipe: descent on measured slopes of the divergence from the uncompressed model.

No labels, no proxies and no backward pass: see slopes.py for how a dozen slopes are measured at the price of one, and
descent.py for what is done with them. Merging only, by importance-weighted means, of the tokens that lose least.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diffrate.backbones import Backbone
from diffrate.operator import Operator
from diffrate.schedule import Schedule
from diffrate.searching.budget import Space, project, rounded
from diffrate.searching.descent import Descent, perturbed
from diffrate.searching.slopes import variant_logits

OPERATOR = Operator(operation="merge", mean="attention", choice="cost")
SHARE = 0.1  # of a block's tokens, by which its count is changed to measure the slope
TRAVEL = 120  # tokens of 197 that a count could travel at the first step's length


class FastRecipe:
    """One budget's search. `reduce` adds sums over all processes."""

    def __init__(
        self,
        backbone: Backbone,
        space: Space,
        operator: Operator,
        budget: float,
        start: Tensor,
        steps: int,
        seed: int,
        reduce: Callable[[Tensor], Tensor],
    ) -> None:
        self.backbone, self.operator, self.reduce, self.seed = backbone, operator, reduce, seed
        length = TRAVEL / steps * space.tokens / 197
        self.descent = Descent(
            start, budget, space, steps, first_step=length, last_step=length / 10, relative=0.5
        )

    def step(self, images: Tensor, labels: Tensor, teacher: Tensor) -> float:
        """Measure the slopes on these images and move the counts; returns the loss at the counts before."""
        kept = self.counts()
        draw = random.Random(f"{self.seed}-{self.descent.budget}-{self.descent.done}")
        changed = perturbed(kept, self.descent.space, SHARE, [draw.random() < 0.5 for _ in kept])
        logits = variant_logits(self.backbone, images, kept, changed, self.operator)
        sums = divergence(teacher, logits).sum(dim=-1, dtype=torch.float64)  # (1 + L',)
        sums = self.reduce(torch.cat([sums, sums.new_tensor([images.shape[0]])])).cpu()
        losses = sums[:-1] / sums[-1]
        difference = torch.tensor(changed, dtype=torch.float64) - torch.tensor(kept, dtype=torch.float64)
        slopes = torch.where(
            difference == 0, 0.0, (losses[1:] - losses[0]) / difference.where(difference != 0, 1.0)
        )
        self.descent.update(slopes)
        return float(losses[0])

    def counts(self) -> list[int]:
        """The whole counts of the present point."""
        d = self.descent
        return rounded(d.counts, d.budget, d.space)

    def answer(self) -> Schedule:
        """The schedule that this search would return now."""
        d = self.descent
        return self.schedule(rounded(d.answer(), d.budget, d.space))

    def schedule(self, counts: list[int]) -> Schedule:
        kept = self.descent.space.every_block(counts)
        return Schedule(kept, kept, self.backbone.layout.prefix, self.operator)

    def state(self) -> dict[str, Any]:
        return self.descent.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.descent.restore(state)


def divergence(teacher: Tensor, logits: Tensor) -> Tensor:
    """KL(teacher || student) per image, (..., B), in fp32."""
    target = teacher.float().log_softmax(dim=-1)
    return (target.exp() * (target - logits.float().log_softmax(dim=-1))).sum(dim=-1)


def starts(space: Space, budget: float) -> list[Tensor]:
    """Simple schedules on the budget to begin from: image tokens falling by a constant factor, or as 1 - a d^p."""
    depth = torch.linspace(0, 1, len(space.least), dtype=torch.float64)
    step = torch.where(space.free, 1.0, 1e-3).double()

    def solve(shape: Callable[[float], Tensor]) -> Tensor | None:
        def counts(a: float) -> Tensor:
            ideal = space.prefix + (space.tokens - space.prefix) * shape(a)
            return torch.minimum(torch.maximum(ideal, space.least), space.most)

        if float(space.gmacs(counts(1.0))) > budget:
            return None
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if float(space.gmacs(counts(middle))) > budget else (low, middle)
        return project(counts(high), budget, space, step)

    def power(p: float) -> Callable[[float], Tensor]:
        return lambda a: 1 - a * depth**p

    def geometric(a: float) -> Tensor:
        return (1 - a) ** (depth * (len(depth) - 1))

    found = map(solve, [geometric, power(1.0), power(1.5), power(2.0)])
    return [counts for counts in found if counts is not None]
