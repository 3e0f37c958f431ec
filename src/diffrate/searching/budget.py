"""Budgets: reading them, and the set of schedules that meet one exactly.

Counts are real-valued during a search; `project` moves them to the nearest ones that never rise and cost what the
budget allows, `rounded` to whole tokens just under it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from diffrate.backbones import Backbone
from diffrate.costs.macs import MacCost
from diffrate.errors import DiffRateError
from diffrate.schedule import Schedule


@dataclass(frozen=True)
class Space:
    """The counts that a search chooses, and what they cost.

    least, most  (L',) bounds of each block's count, equal where it has no choice: the first block keeps everything,
                 the last of a class-token model nothing but the prefix, which costs no accuracy at all (so that a
                 budget just below the whole model is met with room to spare). A model whose
                 head looks at every token leaves its last block alone: that block is not among the L'.
    """

    cost: MacCost
    depth: int
    prefix: int
    least: Tensor
    most: Tensor

    @classmethod
    def of(cls, backbone: Backbone, cost: MacCost) -> Space:
        layout = backbone.layout
        if layout.depth < 3:
            raise DiffRateError(
                f"a model of {layout.depth} blocks has none whose tokens a search could choose"
            )
        blocks = layout.depth if layout.compresses_last_block else layout.depth - 1
        least = torch.full((blocks,), float(layout.prefix + 1), dtype=torch.float64)
        most = torch.full((blocks,), float(layout.tokens), dtype=torch.float64)
        least[0] = layout.tokens
        if layout.compresses_last_block:
            least[-1] = most[-1] = layout.prefix
        return cls(cost, layout.depth, layout.prefix, least, most)

    @property
    def tokens(self) -> int:
        return self.cost.tokens

    @property
    def free(self) -> Tensor:
        """(L',) which blocks have a choice."""
        return self.most > self.least

    def freely(self) -> Tensor:
        """(L',) a step of one token in every block that has a choice, and next to none elsewhere."""
        return torch.where(self.free, 1.0, 1e-3).double()

    def searched(self, schedule: Schedule) -> Tensor:
        """(L',) the counts of a schedule that are this search's to choose."""
        return torch.tensor(schedule.effective.merge[: len(self.least)], dtype=torch.float64)

    def gmacs(self, counts: Tensor) -> Tensor:
        left_alone = counts[..., -1:].expand(*counts.shape[:-1], self.depth - counts.shape[-1])
        return self.cost.gmacs(torch.cat([counts, left_alone], dim=-1))

    def every_block(self, counts: list[int]) -> tuple[int, ...]:
        """Counts of all blocks of the model."""
        return tuple(counts + counts[-1:] * (self.depth - len(counts)))


def parse_budgets(text: str, whole: float) -> list[float]:
    """GMACs of "0.8G", "60%" or several with commas, largest first; `whole` is the uncompressed model's."""
    return sorted({_parse(part.strip(), whole) for part in text.split(",")}, reverse=True)


def _parse(text: str, whole: float) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(G|GMACs|M|MMACs|%)", text, flags=re.IGNORECASE)
    if match is None:
        raise DiffRateError(f"cannot read the budget {text!r}: write it as 0.8G (GMACs) or 60%")
    value, unit = float(match[1]), match[2].lower()
    return whole * value / 100 if unit == "%" else value if unit.startswith("g") else value / 1000


def check_budget(budget: float, space: Space) -> None:
    """Refuse a budget that no schedule of this model can meet."""
    least = float(space.gmacs(space.least))
    most = float(space.gmacs(torch.full_like(space.most, space.tokens)))
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


def project(counts: Tensor, budget: float, space: Space, step: Tensor) -> Tensor:
    """Counts within bounds, never rising, that cost `budget`: moved from `counts` along `step` (L,), all one way."""
    weight = 1 / step.clamp_min(1e-6)

    def at(distance: float) -> Tensor:
        moved = torch.minimum(torch.maximum(counts - distance * step, space.least), space.most)
        return monotone(moved, weight)

    reach = 2 * space.tokens / float(step[space.free].min())
    low, high = -reach, reach
    while high - low > 1e-6 * reach:
        middle = (low + high) / 2
        low, high = (middle, high) if float(space.gmacs(at(middle))) > budget else (low, middle)
    return at(high)


def rounded(counts: Tensor, budget: float, space: Space) -> list[int]:
    """Whole counts at most `budget`: rounded down, then raised by the largest remainders while the budget allows."""
    whole = torch.maximum((counts + 1e-6).floor(), space.least)
    for block in reversed(
        range(len(whole))
    ):  # a bound may have been rounded up to: take from the end, which keeps order
        while float(space.gmacs(whole)) > budget and whole[block] > space.least[block]:
            whole[block] -= 1
    for block in (counts - whole).argsort(descending=True).tolist():
        above = space.tokens if block == 0 else whole[block - 1]
        if whole[block] + 1 > min(float(above), float(space.most[block])):
            continue
        whole[block] += 1
        if float(space.gmacs(whole)) > budget:
            whole[block] -= 1
    return [int(n) for n in whole]
