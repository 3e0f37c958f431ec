"""Schedules to compare a searched one with, at the same MACs; under the paper's operator, or under any that is given.

A search by the fast recipe has an operator of its own: counts alone are compared only where both have the same one.
Like a search, they leave the first block alone, and the last one too where the head looks at all tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from diffrate import published
from diffrate.backbones import Layout, backbone_of
from diffrate.costs.macs import MacCost
from diffrate.errors import DiffRateError
from diffrate.methods.fit import HALVINGS, out_of_reach, smallest_within
from diffrate.operator import Operator
from diffrate.schedule import Schedule

CLOSE = 0.01  # a published schedule this near to the budget is taken as it is


def constant_rate(model: nn.Module, budget: float, operator: Operator = Operator()) -> Schedule:
    """The same share of the image tokens removed in every block."""
    layout = backbone_of(model).layout

    def kept(t: float) -> list[float]:
        return [(1 - t) ** min(i, _last_block(layout)) for i in range(layout.depth)]

    return _schedule(model, budget, kept, "constant rate", operator)


def constant_number(model: nn.Module, budget: float, operator: Operator = Operator()) -> Schedule:
    """The same number of tokens removed in every block, while there are any."""
    layout = backbone_of(model).layout

    def kept(t: float) -> list[float]:
        return [1 - t * min(i, _last_block(layout)) for i in range(layout.depth)]

    return _schedule(model, budget, kept, "constant number", operator)


def stepwise(model: nn.Module, budget: float, operator: Operator = Operator()) -> Schedule:
    """The same share of the image tokens removed at a quarter, half and three quarters of the depth."""
    layout = backbone_of(model).layout
    stages = {max(1, round(layout.depth * share)) for share in (1 / 4, 1 / 2, 3 / 4)}
    stages = {stage for stage in stages if stage <= _last_block(layout)}

    def kept(t: float) -> list[float]:
        return [(1 - t) ** sum(stage <= i for stage in stages) for i in range(layout.depth)]

    return _schedule(model, budget, kept, "stepwise", operator)


def random_schedule(
    model: nn.Module, budget: float, seed: int = 0, operator: Operator = Operator()
) -> Schedule:
    """Counts that fall at random from block to block, split at random between pruning and merging."""
    return random_schedules(model, budget, [seed], operator)[0]


def random_schedules(
    model: nn.Module,
    budget: float,
    seeds: Sequence[int],
    operator: Operator = Operator(),
    last_is_free: bool = False,
) -> list[Schedule]:
    """A random schedule for each seed, thousands at once.

    The share of image tokens that a block keeps is drawn evenly from 0 to 1 and sorted over the blocks; all shares are
    then raised to the power that meets the budget.

    last_is_free  give up the image tokens of the last block where only the class token matters there, as searches do:
                  the other blocks then have more to spend.
    """
    backbone = backbone_of(model)
    layout, cost = backbone.layout, MacCost.of_backbone(backbone)
    last = _last_block(layout)
    shares, splits = torch.ones(len(seeds), layout.depth, dtype=torch.float64), []
    for row, seed in enumerate(seeds):
        draw = random.Random(seed)
        falling = sorted((draw.random() for _ in range(last)), reverse=True)
        shares[row, 1:] = torch.tensor(
            falling + falling[-1:] * (layout.depth - 1 - last), dtype=torch.float64
        )
        splits.append([draw.random() for _ in range(layout.depth)])
    if last_is_free and layout.compresses_last_block:
        shares[:, -1] = 0.0

    def counts(t: Tensor) -> Tensor:
        power = (t / (1 - t)).unsqueeze(1)
        kept = torch.where(shares < 1, shares**power, 1.0)
        wanted = layout.prefix + ((layout.tokens - layout.prefix) * kept).round()
        return wanted.clamp(layout.prefix + 1, layout.tokens)

    above, under = torch.zeros(len(seeds), dtype=torch.float64), torch.ones(len(seeds), dtype=torch.float64)
    least, most = cost.gmacs(counts(under)), cost.gmacs(counts(above))
    if bool(((budget < least) | (budget > most)).any()):
        raise out_of_reach("a random schedule", budget, float(least.max()), float(most.min()))
    under = torch.where(most <= budget, above, under)
    for _ in range(HALVINGS):
        middle = (above + under) / 2
        dear = cost.gmacs(counts(middle)) > budget
        above, under = torch.where(dear, middle, above), torch.where(dear, under, middle)
    found, spent = counts(under).long().tolist(), cost.gmacs(counts(under)).tolist()
    made = {"by": "random", "budget_gmacs": budget}
    return [
        _made(layout, kept, operator, split, gmacs, {**made, "seed": seed})
        for kept, split, gmacs, seed in zip(found, splits, spent, seeds, strict=True)
    ]


def published_schedule(model: nn.Module, budget: float, family: str | None = None) -> Schedule:
    """The paper's schedule for a model of this shape that costs nearest to the budget, moved onto it.

    The shares that it keeps are raised to a common power. One within 1 % of the budget is taken as it is.

    family  one of the paper's models, such as "ViT-B-DeiT", to borrow from another one of this depth.
    """
    backbone = backbone_of(model)
    layout = backbone.layout
    cost = MacCost.of_backbone(backbone)
    fitting = [
        Schedule(tuple(row["prune"]), tuple(row["merge"]), layout.prefix, img_size=layout.img_size, made=row)
        for row in _rows(layout, family)
    ]
    if not fitting or layout.prefix != 1:
        raise DiffRateError(
            f"no schedule is published for {layout.depth} blocks, {layout.tokens} tokens "
            f"and {layout.prefix} prefix tokens"
        )
    nearest = min(fitting, key=lambda s: abs(cost.of_schedule(s) - budget))
    made = {"by": published.ORIGIN, "family": nearest.made["family"], "paper_gmacs": nearest.made["gmacs"]}
    if abs(cost.of_schedule(nearest) - budget) <= CLOSE * budget:
        return replace(nearest, cost={"gmacs": cost.of_schedule(nearest)}, made=made)
    effective = nearest.effective
    shares = [(n - layout.prefix) / (layout.tokens - layout.prefix) for n in effective.merge]
    between = [
        (p - n) / (b - n) if b > n else 0.0
        for p, n, b in zip(
            effective.prune, effective.merge, (layout.tokens, *effective.merge[:-1]), strict=True
        )
    ]
    made["note"] = f"moved from {cost.of_schedule(nearest):.4g} onto {budget:.4g} GMACs"
    moved = _schedule(
        model, budget, lambda t: _powers(shares, t), "the published schedule", Operator(), between
    )
    return replace(moved, made={**made, "budget_gmacs": budget})


def _rows(layout: Layout, family: str | None) -> list[dict[str, Any]]:
    if family is None:
        return published.for_shape(layout.depth, layout.tokens, layout.dim, layout.mean_pooled)
    rows = [row for row in published.table() if row["family"] == family]
    return [row for row in rows if (len(row["merge"]), row["merge"][0]) == (layout.depth, layout.tokens)]


def _powers(shares: Sequence[float], t: float) -> list[float]:
    """Each share to the power t / (1 - t): all ones at t = 0, the shares themselves at one half, nothing at 1."""
    power = t / (1 - t) if t < 1 else float("inf")
    return [share**power if share < 1 else 1.0 for share in shares]


def _last_block(layout: Layout) -> int:
    """The last block that may remove tokens."""
    return layout.depth - 1 if layout.compresses_last_block else layout.depth - 2


def _schedule(
    model: nn.Module,
    budget: float,
    kept: Callable[[float], list[float]],
    method: str,
    operator: Operator,
    splits: Sequence[float] | None = None,
) -> Schedule:
    """The schedule of the smallest t in [0, 1] whose kept(t), shares of the image tokens, cost at most the budget.

    splits  for each block, the share of what it removes that is merged; half of it without, where the operator prunes
            and merges.
    """
    backbone = backbone_of(model)
    layout = backbone.layout
    cost = MacCost.of_backbone(backbone)

    def counts(t: float) -> list[int]:
        images = layout.tokens - layout.prefix
        wanted = (layout.prefix + round(images * share) for share in kept(t))
        return [max(layout.prefix + 1, min(layout.tokens, count)) for count in wanted]

    def gmacs(t: float) -> float:
        return float(cost.gmacs([float(n) for n in counts(t)]))

    t = smallest_within(gmacs, budget, method)
    return _made(layout, counts(t), operator, splits, gmacs(t), {"by": method, "budget_gmacs": budget})


def _made(
    layout: Layout,
    merge: Sequence[int],
    operator: Operator,
    splits: Sequence[float] | None,
    gmacs: float,
    made: dict[str, Any],
) -> Schedule:
    prune = list(merge)
    if splits is None and operator.splits:
        splits = [0.5] * layout.depth
    if splits is not None:
        before = [merge[0], *merge[:-1]]
        prune = [n + round(s * (b - n)) for n, b, s in zip(merge, before, splits, strict=True)]
    return Schedule(
        tuple(prune), tuple(merge), layout.prefix, operator, None, layout.img_size, {"gmacs": gmacs}, made
    )
