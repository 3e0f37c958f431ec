"""Budgets: reading them, and the set of schedules that meet one exactly.

A budget is a target for one metric or for several at once; a plain number is GMACs. Counts are real-valued during a
search; `project` moves them to the nearest ones that never rise and cost what the budget allows, `rounded` to whole
tokens just under it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from diffrate.backbones import Backbone
from diffrate.costs.base import METRICS, CostModel
from diffrate.errors import DiffRateError
from diffrate.isotonic import monotone
from diffrate.schedule import Schedule

WRITTEN = "0.8G (GMACs), 60%, 2.1ms, 90mW or 5mJ"  # any budget
# Weight of each metric's loss where a budget is a penalty: the paper's lambdas, of which it tells that of MACs alone.
LAMBDAS = {"gmacs": 5.0, "latency_ms": 20.0, "power_at_rate_mw": 20.0, "energy_mj": 20.0}


@dataclass(frozen=True)
class Budget:
    """Targets, by metric, that a schedule must meet together."""

    targets: Mapping[str, float]

    @classmethod
    def of(cls, value: Budget | float) -> Budget:
        return value if isinstance(value, Budget) else cls({"gmacs": float(value)})

    @property
    def leading(self) -> float:
        """The first target's value."""
        return next(iter(self.targets.values()))

    def __str__(self) -> str:
        return ",".join(f"{target:.4g}{METRICS[metric].unit}" for metric, target in self.targets.items())

    def used(self, prices: Mapping[str, Tensor]) -> Tensor:
        """The largest share of a target that is used: at most 1 where all of them are met."""
        return torch.stack([prices[metric] / target for metric, target in self.targets.items()]).amax(dim=0)

    def loss(self, prices: Mapping[str, Tensor], lambdas: Mapping[str, float] = LAMBDAS) -> Tensor:
        """The paper's losses: squared for MACs, and log cosh for what hardware says (appendix B.2).

        Inside log cosh costs are relative to their target, so that milliseconds and milliwatts weigh alike.
        """
        losses = []
        for metric, target in self.targets.items():
            price = prices[metric]
            loss = (price - target).square() if metric == "gmacs" else log_cosh(price / target - 1)
            losses.append(lambdas[metric] * loss)
        return torch.stack(losses).sum(dim=0)


def log_cosh(x: Tensor) -> Tensor:
    """log(cosh(x)) that does not overflow."""
    return x.abs() + torch.nn.functional.softplus(-2 * x.abs()) - math.log(2)


@dataclass(frozen=True)
class Space:
    """The counts that a search chooses, and what they cost.

    least, most  (L',) bounds of each block's count, equal where it has no choice: the first block keeps everything,
                 the last of a class-token model nothing but the prefix, which costs no accuracy at all (so that a
                 budget just below the whole model is met with room to spare). A model whose
                 head looks at every token leaves its last block alone: that block is not among the L'.
    ties         blocks that share one count, for costs that charge every removal; None: every block has its own.
    """

    cost: CostModel
    depth: int
    prefix: int
    least: Tensor
    most: Tensor
    ties: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def of(cls, backbone: Backbone, cost: CostModel) -> Space:
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

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The blocks that share a count, in order; by themselves where nothing is tied."""
        return self.ties or tuple((block,) for block in range(len(self.least)))

    @property
    def choices(self) -> tuple[tuple[int, ...], ...]:
        """Those of `parts` that have a choice."""
        return tuple(part for part in self.parts if bool(self.free[list(part)].any()))

    def tied(self, counts: Tensor, weight: Tensor) -> Tensor:
        """(L',) counts with those of tied blocks at their weighted mean."""
        if self.ties is None:
            return counts
        counts = counts.clone()
        for part in map(list, self.ties):
            counts[part] = (counts[part] * weight[part]).sum() / weight[part].sum()
        return counts

    def searched(self, schedule: Schedule) -> Tensor:
        """(L',) the counts of a schedule that are this search's to choose."""
        return torch.tensor(schedule.effective.merge[: len(self.least)], dtype=torch.float64)

    def price(self, counts: Tensor) -> dict[str, Tensor]:
        """Each metric of counts (..., L')."""
        left_alone = counts[..., -1:].expand(*counts.shape[:-1], self.depth - counts.shape[-1])
        return self.cost.price(torch.cat([counts, left_alone], dim=-1))

    def gmacs(self, counts: Tensor) -> Tensor:
        return self.price(counts)["gmacs"]

    def used(self, counts: Tensor, budget: Budget | float) -> Tensor:
        """The share of the budget that counts (..., L') use, by the metric that is nearest its target."""
        return Budget.of(budget).used(self.price(counts))

    def over(self, counts: Tensor, budget: Budget | float) -> bool:
        """Whether counts (L',) cost more than the budget."""
        return float(self.used(counts, budget)) > 1

    def every_block(self, counts: list[int]) -> tuple[int, ...]:
        """Counts of all blocks of the model."""
        return tuple(counts + counts[-1:] * (self.depth - len(counts)))


def parse_budgets(text: str, whole: Mapping[str, float], written: str = WRITTEN) -> list[Budget]:
    """Budgets of "0.8G", "60%" (of the MACs), "2.1ms", or several with commas; `whole` are the whole model's costs.

    Different metrics must be met together ("2.9G,37ms,90mW" is one budget); several values of one metric are several
    budgets, largest first, each with the targets of the other metrics.

    written  how one may be written, for whoever wrote another thing.
    """
    values: dict[str, set[float]] = {}
    for part in text.split(","):
        metric, value = _parse(part.strip(), whole, written)
        values.setdefault(metric, set()).add(value)
    if sum(len(several) > 1 for several in values.values()) > 1:
        raise DiffRateError(f"cannot read the budget {text!r}: only one metric may have several values")
    falling = [sorted(several, reverse=True) for several in values.values()]
    return [Budget(dict(zip(values, targets, strict=True))) for targets in itertools.product(*falling)]


def parse_gmacs(text: str, whole: float) -> list[float]:
    """Budgets of MACs alone, largest first: "0.8G", "60%" of the `whole` model's GMACs, or several with commas."""
    budgets = parse_budgets(text, dict.fromkeys(METRICS, whole), "0.8G (GMACs) or 60%")
    if any(set(budget.targets) != {"gmacs"} for budget in budgets):
        raise DiffRateError(f"cannot take the budget {text!r}: here it is in MACs, such as 0.8G or 60%")
    return [budget.leading for budget in budgets]


def _parse(text: str, whole: Mapping[str, float], written: str) -> tuple[str, float]:
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(G|GMACs|M|MMACs|%|ms|mW|mJ)", text, flags=re.IGNORECASE)
    if match is None or not float(match[1]):
        raise DiffRateError(f"cannot read the budget {text!r}: write it as {written}")
    value, unit = float(match[1]), match[2].lower()
    if unit == "%":
        return "gmacs", whole["gmacs"] * value / 100
    if unit[0] == "g" or unit in ("m", "mmacs"):
        return "gmacs", value if unit[0] == "g" else value / 1000
    metric = next(name for name, known in METRICS.items() if known.unit.lower() == unit)
    if metric not in whole:
        how = "--profile-table or --hardware" if unit == "ms" else "--hardware"
        raise DiffRateError(
            f"a budget of {text} needs {how}: MACs alone say nothing about {METRICS[metric].words}"
        )
    return metric, value


def check_budget(budget: Budget | float, space: Space) -> None:
    """Refuse a budget that no schedule of this model can meet, or that asks for nothing."""
    budget = Budget.of(budget)
    least, most = space.price(space.least), space.price(torch.full_like(space.most, space.tokens))
    for metric, target in budget.targets.items():
        words, highest = METRICS[metric].words, float(most[metric])
        lowest = min(float(least[metric]), highest)  # removing tokens may take longer than it saves
        if target < lowest:
            raise DiffRateError(
                f"a budget of {target:.4g} {words} cannot be met: this model costs {highest:.4g} whole and "
                f"{lowest:.4g} at the least"
            )
    if all(target >= float(most[metric]) for metric, target in budget.targets.items()):
        whole = Budget({metric: float(most[metric]) for metric in budget.targets})
        raise DiffRateError(f"a budget of {budget} asks for nothing: the whole model costs {whole}")


def project(counts: Tensor, budget: Budget | float, space: Space, step: Tensor) -> Tensor:
    """Counts within bounds, never rising, that cost `budget`: moved from `counts` along `step` (L,), all one way."""
    weight = 1 / step.clamp_min(1e-6)

    def at(distance: float) -> Tensor:
        moved = torch.minimum(torch.maximum(counts - distance * step, space.least), space.most)
        return monotone(space.tied(moved, weight), weight)

    reach = 2 * space.tokens / float(step[space.free].min())
    low, high = -reach, reach
    while high - low > 1e-6 * reach:
        middle = (low + high) / 2
        low, high = (middle, high) if space.over(at(middle), budget) else (low, middle)
    return at(high)


def rounded(counts: Tensor, budget: Budget | float, space: Space) -> list[int]:
    """Whole counts at most `budget`: rounded down, then raised by the largest remainders while the budget allows."""
    whole = torch.maximum((counts + 1e-6).floor(), space.least)
    parts = [list(part) for part in space.parts]
    for part in reversed(parts):  # a bound may have been rounded up to: take from the end, which keeps order
        while space.over(whole, budget) and (whole[part] > space.least[part]).all():
            whole[part] -= 1
    for i in (counts - whole)[[part[0] for part in parts]].argsort(descending=True).tolist():
        if _can_rise(whole, parts[i], space):
            whole[parts[i]] += 1
            if space.over(whole, budget):
                whole[parts[i]] -= 1
    return [int(n) for n in _for_free(whole, budget, space)]


def _can_rise(whole: Tensor, part: list[int], space: Space) -> bool:
    above = space.tokens if part[0] == 0 else float(whole[part[0] - 1])
    return float(whole[part[0]]) + 1 <= min(above, float(space.most[part].min()))


def _for_free(whole: Tensor, budget: Budget | float, space: Space) -> Tensor:
    """Counts raised while that takes nothing more of the budget: hardware works in whole arrays or tiles of tokens."""
    used = float(space.used(whole, budget))
    for part in map(list, space.parts):
        while _can_rise(whole, part, space):
            whole[part] += 1
            if float(space.used(whole, budget)) > used:
                whole[part] -= 1
                break
    return whole
