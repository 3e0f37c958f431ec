"""Schedules to compare a searched one with, at the same MACs and on the same engine.

They take the schedules of known methods, not the methods whole. ToMe-like: equally many tokens merged in every block,
but by this package's ranking and matching instead of ToMe's bipartite one. EViT-like: pruning in three steps, without
EViT's fused token and without its fine-tuning. Like a search, they leave the first block alone, and the last one too
where the head looks at all tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from diffrate.backbones import Layout, backbone_of
from diffrate.costs.macs import MacCost
from diffrate.errors import DiffRateError
from diffrate.operator import Operator
from diffrate.schedule import Schedule

STAGES = (1 / 4, 1 / 2, 3 / 4)  # of the depth: blocks 4, 7 and 10 of 12, as in EViT
HALVINGS = 60  # of the interval in which a schedule's one parameter lies


def constant_merging(model: nn.Module, budget: float) -> Schedule:
    """ToMe-like: the same number of tokens merged in every block, while there are any, into means weighted by size.

    budget  GMACs that the schedule may cost; it stays at most 1 % below where a token costs less than that.
    """
    layout = backbone_of(model).layout
    last = _last_block(layout)

    def counts(t: float) -> list[int]:
        per_block = t * (layout.tokens - layout.prefix)  # a real number: what is rounded is the sum so far
        return [_kept(layout, layout.tokens - per_block * min(i, last)) for i in range(layout.depth)]

    return _schedule(
        model, budget, counts, "ToMe-like constant merging", Operator(operation="merge", mean="size")
    )


def stepwise_pruning(model: nn.Module, budget: float) -> Schedule:
    """EViT-like: the same share of the image tokens pruned at a quarter, half and three quarters of the depth."""
    layout = backbone_of(model).layout
    stages = sorted({max(1, round(layout.depth * share)) for share in STAGES})
    stages = [stage for stage in stages if stage <= _last_block(layout)]

    def counts(t: float) -> list[int]:
        kept = [(1 - t) ** sum(stage <= i for stage in stages) for i in range(layout.depth)]
        return [_kept(layout, layout.prefix + (layout.tokens - layout.prefix) * share) for share in kept]

    return _schedule(model, budget, counts, "EViT-like stepwise pruning", Operator(operation="prune"))


def random_schedule(model: nn.Module, budget: float, seed: int = 0) -> Schedule:
    """Counts that fall at random from block to block, split at random between pruning and merging."""
    layout = backbone_of(model).layout
    draw = random.Random(seed)
    last = _last_block(layout)
    falling = [1.0, *sorted((draw.random() for _ in range(last)), reverse=True)]
    falling += falling[-1:] * (layout.depth - len(falling))
    splits = [draw.random() for _ in range(layout.depth)]

    def counts(t: float) -> list[int]:
        power = t / (1 - t) if t < 1 else float("inf")
        kept = [share**power if share < 1 else 1.0 for share in falling]
        return [_kept(layout, layout.prefix + (layout.tokens - layout.prefix) * share) for share in kept]

    return _schedule(model, budget, counts, "random", Operator(), splits, seed=seed)


def _last_block(layout: Layout) -> int:
    """The last block that may remove tokens."""
    return layout.depth - 1 if layout.compresses_last_block else layout.depth - 2


def _kept(layout: Layout, count: float) -> int:
    """A whole count that leaves the prefix and at least one image token."""
    return max(layout.prefix + 1, min(layout.tokens, round(count)))


def _schedule(
    model: nn.Module,
    budget: float,
    counts: Callable[[float], list[int]],
    method: str,
    operator: Operator,
    splits: Sequence[float] | None = None,
    **made: Any,
) -> Schedule:
    """The schedule of the smallest t in [0, 1] whose counts(t), which fall with t, cost at most the budget."""
    backbone = backbone_of(model)
    cost = MacCost.of_backbone(backbone)

    def gmacs(t: float) -> float:
        return float(cost.gmacs([float(n) for n in counts(t)]))

    least, most = gmacs(1.0), gmacs(0.0)
    if not least <= budget <= most:
        raise DiffRateError(
            f"{method} cannot meet a budget of {budget:.4g} GMACs: it reaches from {least:.4g} to {most:.4g}"
        )
    above, under = 0.0, 1.0
    if budget == most:
        under = 0.0
    for _ in range(HALVINGS):
        middle = (above + under) / 2
        above, under = (middle, under) if gmacs(middle) > budget else (above, middle)
    merge = counts(under)
    prune = merge  # the operators that only merge or only prune look at the smaller count alone
    if splits is not None:
        before = [merge[0], *merge[:-1]]
        prune = [n + round(s * (b - n)) for n, b, s in zip(merge, before, splits, strict=True)]
    return Schedule(
        tuple(prune),
        tuple(merge),
        backbone.layout.prefix,
        operator,
        img_size=backbone.layout.img_size,
        cost={"gmacs": gmacs(under)},
        made={"by": method, "budget_gmacs": budget, **made},
    )
