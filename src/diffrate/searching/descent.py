"""Descent on the counts themselves: the optimiser of the fast recipe.

Real-valued counts, always exactly on the budget. Each step measures the slopes on fresh images, takes a momentum step
of about one token, falling by a cosine, and projects back. The answer at any time is the average over the last part
of the way so far, whose noise it smooths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diffrate.searching.budget import Budget, Space, project
from diffrate.searching.pace import Pace, last_part

FLATTEST = 0.1  # least cost of a block's token that counts, as a share of their mean


@dataclass
class Descent:
    """One descent from `counts` (L,) at some `pace`; `state` and `restore` let it stop and go on at any step."""

    counts: Tensor
    budget: Budget | float
    space: Space
    pace: Pace
    relative: float = 0.0  # 0: every block moves in tokens; 1: in proportion to its count
    path: list[list[float]] = field(default_factory=list)  # the counts after each step

    def scale(self) -> Tensor:
        """(L,) how far each block moves for the same slope."""
        relative = self.counts / self.counts[self.space.free].mean()
        return torch.where(self.space.free, relative.pow(self.relative), torch.full_like(self.counts, 1e-3))

    def along_budget(self) -> Tensor:
        """(L,) the direction in which counts move back onto the budget: by their cost, as `scale` weighs them."""
        free = self.space.free
        slope = _shared(self.cost_gradient(), self.space, torch.mean)
        mean = slope[free].mean()
        # Times of real machines have stairs: where one more token takes next to nothing, blocks must move all the same.
        relative = (slope / mean).clamp_min(FLATTEST) if mean > 0 else torch.ones_like(slope)
        return torch.where(free, relative * self.scale(), torch.full_like(slope, 1e-3))

    def update(self, slopes: Tensor) -> None:
        """One step down `slopes` (L,), the measured change of the loss per token in each block."""
        slopes = _shared(slopes, self.space, lambda part: part[0] / len(part))
        direction = self.scale() * torch.where(self.space.free, slopes, torch.zeros_like(slopes))
        # Only what trades tokens between blocks counts: the share along the budget is undone by the projection.
        normal = self.along_budget()
        gradient = self.cost_gradient()
        along = normal @ gradient
        if along > 0:
            direction = direction - normal * (direction @ gradient) / along
        moved = self.counts - self.pace.step(direction, self.space.free)
        self.counts = project(moved, self.budget, self.space, normal)
        self.path.append(self.counts.tolist())

    def state(self) -> dict[str, Any]:
        """All that changes, as plain numbers: JSON keeps every bit of them."""
        return {"counts": self.counts.tolist(), "path": self.path[:], **self.pace.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.counts = torch.tensor(state["counts"], dtype=torch.float64)
        self.path = list(state["path"])
        self.pace.restore(state)

    def cost_gradient(self) -> Tensor:
        """(L,) what one more token in each block that has a choice takes of the budget."""
        with torch.enable_grad():
            counts = self.counts.clone().requires_grad_(True)
            (slope,) = torch.autograd.grad(self.space.used(counts, self.budget), counts)
        return torch.where(self.space.free, slope, torch.zeros_like(slope))

    def answer(self) -> Tensor:
        """The counts averaged over the last part of the way so far, on the budget."""
        if not self.path:
            return project(self.counts, self.budget, self.space, self.along_budget())
        return project(last_part(self.path), self.budget, self.space, self.along_budget())


def _shared(slopes: Tensor, space: Space, share: Callable[[Tensor], Tensor]) -> Tensor:
    """(L',) slopes where each of the tied blocks has the `share` of what they have together."""
    if space.ties is None:
        return slopes
    slopes = slopes.clone()
    for part in map(list, space.ties):
        slopes[part] = share(slopes[part])
    return slopes
