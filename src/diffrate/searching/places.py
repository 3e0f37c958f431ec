"""Where to remove tokens, when every removal costs time of its own.

On a real machine ranking and merging take time however few tokens go, so that the blocks which remove any must be few.
That is no slope: a handful of places are tried on held-out images, and the descent then learns the counts, with
blocks between two removals tied together.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from diffrate.operator import Operator
from diffrate.searching import fast
from diffrate.searching.budget import Budget, Space, project, rounded
from diffrate.searching.held_out import HeldOut

REMOVALS = (1, 2, 3, 4, 6)  # how many blocks remove tokens, beside all of them
SPENT = 0.97  # of the budget that counts must use: where removals alone take most of it, only the fewest tokens fit


def best_places(space: Space, budget: Budget, operator: Operator, held_out: HeldOut) -> Space:
    """The space with its blocks tied as does best on held-out images; as it is where removals cost nothing."""
    if not space.cost.charges_removal or "latency_ms" not in budget.targets:
        return space
    candidates = places(space, budget)
    if not candidates:
        return space

    def loss(tied: Space) -> float:
        start = first_counts(tied, budget)
        return held_out.mean(held_out.each(fast.schedule_of(rounded(start, budget, tied), tied, operator)))

    return min(candidates, key=loss)


def places(space: Space, budget: Budget) -> list[Space]:
    """Spaces with one to all blocks removing tokens, evenly spread, early and late, that can meet the budget.

    Where the removals of many blocks take what the budget has, nothing lies between keeping next to no token and being
    over it: such spaces are left out, if others can spend the budget.
    """
    blocks = len(space.least)
    last_is_free = bool(space.most[-1] > space.least[-1])
    # A last block that keeps only the prefix stands for itself.
    inner = blocks if last_is_free else blocks - 1
    found = {}
    for removals in (*REMOVALS, inner - 1):
        for first in (1, 2, 3):
            starts = sorted({first + (i * (inner - first)) // removals for i in range(removals)})
            if starts[-1] < inner:
                found[tuple(starts)] = starts
    variants = [_tied(space, starts, inner) for starts in found.values()]
    whole = torch.full_like(space.most, space.tokens)
    dropped = torch.minimum(whole, space.most)
    if not last_is_free and float(space.used(dropped, budget)) > float(space.used(whole, budget)):
        variants = [_last_joined(variant) for variant in variants]
    possible = [variant for variant in variants if not variant.over(variant.least, budget)]
    return [variant for variant in possible if _spent(variant, budget) >= SPENT] or possible


def _spent(space: Space, budget: Budget) -> float:
    """The share of the budget that the counts to begin from use."""
    start = rounded(first_counts(space, budget), budget, space)
    return float(space.used(torch.tensor(start, dtype=torch.float64), budget))


def first_counts(space: Space, budget: Budget) -> Tensor:
    """(L',) counts on the budget that fall by one factor from each tied part to the next."""
    step = {block: i for i, part in enumerate(space.parts) for block in part}
    power = torch.tensor([float(step[block]) for block in range(len(space.least))], dtype=torch.float64)

    def at(factor: float) -> Tensor:
        counts = space.prefix + (space.tokens - space.prefix) * factor**power
        return torch.minimum(torch.maximum(counts, space.least), space.most)

    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if space.over(at(middle), budget) else (middle, high)
    return project(at(low), budget, space, space.freely())


def _tied(space: Space, starts: list[int], inner: int) -> Space:
    """Blocks from each start to the next share a count; those before the first keep everything."""
    least, most = space.least.clone(), space.most.clone()
    least[: starts[0]] = space.tokens
    ends = [*starts[1:], inner]
    parts = [tuple(range(starts[0])), *(tuple(range(a, b)) for a, b in zip(starts, ends, strict=True))]
    if inner < len(least):
        parts.append((inner,))
    return replace(space, least=least, most=most, ties=tuple(parts))


def _last_joined(space: Space) -> Space:
    """With the last block keeping what the one before does: where dropping the rest costs more than it saves."""
    assert space.ties is not None
    least, most = space.least.clone(), space.most.clone()
    least[-1], most[-1] = least[-2], most[-2]
    parts = [*space.ties[:-2], space.ties[-2] + space.ties[-1]]
    return replace(space, least=least, most=torch.as_tensor(most), ties=tuple(parts))
