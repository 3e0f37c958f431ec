"""Where a search begins: simple schedules that meet a budget, and random ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from diffrate.published import profiles
from diffrate.searching.budget import Budget, Space, project


class Start(NamedTuple):
    """Where a descent begins: counts (L',) on the budget, and the shares (P,) of what goes that are merged.

    Only an operator that prunes and merges looks at the latter.
    """

    counts: Tensor
    shares: Tensor

    @classmethod
    def between(cls, some: Sequence[Start], budget: Budget | float, space: Space) -> Start:
        """The mean of some, on the budget."""
        counts, shares = (torch.stack(each).mean(dim=0) for each in zip(*some, strict=True))
        return cls(project(counts, budget, space, space.freely()), shares)


def starts(space: Space, budget: Budget | float) -> list[Tensor]:
    """Schedules on the budget to begin from: simple ones, and the shape that the paper's searches found.

    Simple: image tokens falling by a constant factor, or as 1 - a d^p. The paper's: of the published schedules,
    stretched to this model's depth, the one that costs closest to the budget.
    """
    depth = torch.linspace(0, 1, len(space.least), dtype=torch.float64)

    def power(p: float) -> Callable[[float], Tensor]:
        return lambda a: 1 - a * depth**p

    def geometric(a: float) -> Tensor:
        return (1 - a) ** (depth * (len(depth) - 1))

    simple = (_on_budget(shape, space, budget) for shape in [geometric, power(1.0), power(1.5)])
    found = [*simple, _published_start(space, budget)]
    return [counts for counts in found if counts is not None]


def random_starts(space: Space, budget: Budget | float, count: int, seed: int) -> list[Tensor]:
    """As many random shapes on the budget: shares drawn evenly, sorted over the blocks, and raised to a power."""
    free = space.free
    found = []
    for i in range(count):
        draw = random.Random(f"start-{seed}-{i}")
        shares = torch.ones(len(free), dtype=torch.float64)
        drawn = sorted((draw.random() for _ in range(int(free.sum()))), reverse=True)
        shares[free] = torch.tensor(drawn, dtype=torch.float64)
        found.append(_on_budget(partial(_powered, shares), space, budget))
    return [counts for counts in found if counts is not None]


def _powered(shares: Tensor, a: float) -> Tensor:
    """Shares to a power from 0, for a = 0, to one that leaves none of those below 1."""
    return shares ** math.tan(a * math.pi / 2)


def _on_budget(shape: Callable[[float], Tensor], space: Space, budget: Budget | float) -> Tensor | None:
    """Counts of a shape, whose shares of the image tokens fall as `a` goes from 0 to 1; None: it costs too much."""

    def counts(a: float) -> Tensor:
        ideal = space.prefix + (space.tokens - space.prefix) * shape(a)
        return torch.minimum(torch.maximum(ideal, space.least), space.most)

    if space.over(counts(1.0), budget):
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if space.over(counts(middle), budget) else (low, middle)
    return project(counts(high), budget, space, space.freely())


def _published_start(space: Space, budget: Budget | float) -> Tensor:
    def stretched(profile: list[float]) -> Tensor:
        blocks = len(profile)
        depth = torch.linspace(0, blocks - 1, len(space.least), dtype=torch.float64)
        below = depth.floor().long().clamp_max(blocks - 2)
        share = torch.tensor(profile, dtype=torch.float64)
        mixed = share[below] + (share[below + 1] - share[below]) * (depth - below)
        ideal = space.prefix + (space.tokens - space.prefix) * mixed
        return torch.minimum(torch.maximum(ideal, space.least), space.most)

    nearest = min(map(stretched, profiles()), key=lambda counts: abs(float(space.used(counts, budget)) - 1))
    return project(nearest, budget, space, space.freely())
