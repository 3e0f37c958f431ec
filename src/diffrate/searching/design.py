"""What a step of the descent measures: schedules around the present one, in which all counts change at once.

What an image makes of other counts is mostly chance, and as much for one changed block as for all. So no block is
weighed alone: each count goes up in half of the schedules and down in the other half, evenly against every other block
(the columns of a Hadamard matrix), and least squares tell the slopes apart. Every pass then speaks for every block:
where counts lie well apart, a slope from twelve schedules has 1/24 of the variance that one changed count against an
unchanged schedule has. Where they are level, some of their changes are not to be had: counts must fall.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from diffrate.searching.budget import Space

SHARE = 0.1  # of a block's tokens, by which its count goes up or down
FEWEST = 8  # schedules
RIDGE = 0.01  # of the least squares, where columns hardly differ


def size(space: Space, others: int = 0) -> int:
    """How many schedules a step measures: twelve for the ten counts of twelve blocks, and always a column to spare.

    others    numbers beside the counts whose slopes are measured too.
    """
    return 1 + _prime(max(FEWEST - 1, len(space.choices) + others + 1))


def around(counts: Tensor, space: Space, draw: random.Random, others: int = 0) -> tuple[Tensor, Tensor]:
    """(S, L) whole counts that fall from block to block: `counts` (L,) with each block that has a choice changed.

    And (S, `others`) which way other numbers change, as evenly against each count and against each other.

    Where a change would make counts rise, the earlier block takes the later ones down with it in half of the schedules,
    and in the others the later one lifts the earlier ones: always down would look like a change of all schedules.
    """
    parts, signs = space.choices, hadamard(size(space, others))
    drawn = draw.sample(range(1, len(signs)), len(parts) + 1 + others)
    columns = torch.stack([signs[:, i] * draw.choice((-1, 1)) for i in drawn], dim=1)
    lifts, ways, of_others = columns.split([1, len(parts), others], dim=1)
    changed = counts.repeat(len(signs), 1)
    for part, way in zip(map(list, parts), ways.T, strict=True):
        changed[:, part] += way[:, None] * _change(counts)[part]
    whole = torch.minimum(torch.maximum(changed.round(), space.least), space.most)
    lifted = whole.flip(1).cummax(dim=1).values.flip(1)
    return torch.where(lifts > 0, lifted, whole.cummin(dim=1).values), of_others


def slopes(
    counts: Tensor, space: Space, measured: Tensor, losses: Tensor, others: Tensor
) -> tuple[float, Tensor, Tensor]:
    """The loss around `counts`, (L,) its slopes per token, and (O,) those of other numbers.

    From the losses (S,) of the counts `measured` (S, L), where the others had changed by `others` (S, O). Blocks that
    share one count have its slope at the first of them.
    """
    first = [part[0] for part in space.choices]
    change = _change(counts)[first]
    moved = torch.cat([torch.ones(len(losses), 1), (measured - counts)[:, first] / change, others], dim=1)
    ridge = torch.full((moved.shape[1],), RIDGE * len(losses), dtype=torch.float64)
    ridge[0] = 0.0
    fitted = torch.linalg.solve(moved.T @ moved + ridge.diag(), moved.T @ losses.double())
    found = torch.zeros_like(counts)
    of_counts, of_others = fitted[1:].split([len(first), others.shape[1]])
    found[first] = of_counts / change
    return float(fitted[0]), found, of_others


def hadamard(order: int) -> Tensor:
    """(order, order) of +1 and -1 with orthogonal columns, the first of +1 alone.

    Paley's: by squares modulo order - 1, a prime of the form 4 k + 3.
    """
    prime = order - 1
    squares = {i * i % prime for i in range(1, prime)}
    found = torch.ones(order, order, dtype=torch.float64)
    for i in range(prime):
        for j in range(prime):
            found[1 + i, 1 + j] = -1.0 if i == j or (j - i) % prime in squares else 1.0
    return found


def _prime(least: int) -> int:
    """The first prime of the form 4 k + 3 from `least` on."""
    found = least
    while found % 4 != 3 or any(found % i == 0 for i in range(2, found)):
        found += 1
    return found


def _change(counts: Tensor) -> Tensor:
    return (SHARE * counts).clamp_min(1.0)
