"""Budgets: reading them, and the set of schedules that meet one exactly.

Counts are real-valued during a search; `project` moves them to the nearest ones that never rise and cost what the
budget allows, `rounded` to whole tokens just under it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from diffrate.costs.macs import MacCost
from diffrate.errors import DiffRateError


@dataclass(frozen=True)
class Bounds:
    """Least and most tokens of each block, (L,) each: equal where a block has no choice."""

    least: Tensor
    most: Tensor


def parse_budgets(text: str, whole: float) -> list[float]:
    """GMACs of "0.8G", "60%" or several with commas, largest first; `whole` is the uncompressed model's."""
    budgets = sorted({_parse(part.strip(), whole) for part in text.split(",")}, reverse=True)
    return budgets


def _parse(text: str, whole: float) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(G|GMACs|M|MMACs|%)", text, flags=re.IGNORECASE)
    if match is None:
        raise DiffRateError(f"cannot read the budget {text!r}: write it as 0.8G (GMACs) or 60%")
    value, unit = float(match[1]), match[2].lower()
    return whole * value / 100 if unit == "%" else value if unit.startswith("g") else value / 1000


def check_budget(budget: float, cost: MacCost, bounds: Bounds) -> None:
    """Refuse a budget that no schedule of this model can meet."""
    least, most = float(cost.gmacs(bounds.least)), float(cost.gmacs(torch.full_like(bounds.most, cost.tokens)))
    if not least <= budget < most:
        raise DiffRateError(
            f"a budget of {budget:.4g} GMACs cannot be met: this model costs {most:.4g} whole "
            f"and {least:.4g} at the least"
        )


def monotone(counts: Tensor, weight: Tensor) -> Tensor:
    """The nearest counts that never rise from block to block: pool neighbours that do, at their weighted mean."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, w in zip(counts.tolist(), weight.tolist(), strict=True):
        mean, length = value, 1
        while pools and pools[-1][0] < mean:
            before, before_weight, before_length = pools.pop()
            mean = (mean * w + before * before_weight) / (w + before_weight)
            w, length = w + before_weight, length + before_length
        pools.append((mean, w, length))
    return torch.tensor([mean for mean, _, length in pools for _ in range(length)], dtype=torch.float64)


def project(counts: Tensor, budget: float, cost: MacCost, bounds: Bounds, step: Tensor) -> Tensor:
    """Counts within bounds, never rising, that cost `budget`: moved from `counts` along `step` (L,), all one way."""
    weight = 1 / step.clamp_min(1e-6)

    def at(distance: float) -> Tensor:
        moved = torch.minimum(torch.maximum(counts - distance * step, bounds.least), bounds.most)
        return monotone(moved, weight)

    low, high = -float(bounds.most.max()) / float(step.min()), float(bounds.most.max()) / float(step.min())
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float(cost.gmacs(at(middle))) > budget else (low, middle)
    return at(high)


def rounded(counts: Tensor, budget: float, cost: MacCost, bounds: Bounds) -> list[int]:
    """Whole counts at most `budget`: rounded down, then raised by the largest remainders while the budget allows."""
    whole = torch.maximum(counts.floor(), bounds.least)
    while float(cost.gmacs(whole)) > budget:
        whole[int((whole - bounds.least).argmax())] -= 1  # only where a bound was rounded up to
    for block in (counts - whole).argsort(descending=True).tolist():
        above = cost.tokens if block == 0 else whole[block - 1]
        if whole[block] + 1 > min(float(above), float(bounds.most[block])):
            continue
        whole[block] += 1
        if float(cost.gmacs(whole)) > budget:
            whole[block] -= 1
    return [int(n) for n in whole]
