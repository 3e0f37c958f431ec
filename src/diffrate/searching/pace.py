"""How far a descent goes at each of its steps, and which part of its way is its answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SLOW = 0.95  # share of the mean square of directions that the past keeps at a step
AVERAGED = 0.7  # share of the way so far, at its end, whose mean is the answer


@dataclass
class Pace:
    """Steps of `first` at the beginning and `last` at the end, by a cosine, along directions with momentum.

    All numbers share one scale, so that a direction's own proportions are kept: a step is as long as asked for where
    directions are as long as they mostly were.
    """

    steps: int
    first: float = 1.0
    last: float = 0.1
    momentum: float = 0.9
    done: int = 0
    velocity: Tensor = field(default_factory=lambda: torch.zeros(0))
    mean_square: float = 0.0

    def step(self, direction: Tensor, moving: Tensor | None = None) -> Tensor:
        """How far to go up `direction` (N,); `moving` (N,) says which of the numbers count for its length."""
        if not len(self.velocity):
            self.velocity = torch.zeros_like(direction)
        progress = self.done / max(self.steps - 1, 1)
        length = self.last + (self.first - self.last) * 0.5 * (1 + math.cos(math.pi * progress))
        counted = direction if moving is None else direction[moving]
        self.velocity = self.momentum * self.velocity + (1 - self.momentum) * direction
        self.mean_square = SLOW * self.mean_square + (1 - SLOW) * float(counted.square().mean())
        self.done += 1
        corrected = self.velocity / (1 - self.momentum**self.done)
        rms = math.sqrt(self.mean_square / (1 - SLOW**self.done)) + 1e-12
        return length * corrected / rms

    def state(self) -> dict[str, Any]:
        """All that changes, as plain numbers: JSON keeps every bit of them."""
        return {"velocity": self.velocity.tolist(), "mean_square": self.mean_square, "done": self.done}

    def restore(self, state: dict[str, Any]) -> None:
        self.velocity = torch.tensor(state["velocity"], dtype=torch.float64)
        self.mean_square, self.done = state["mean_square"], state["done"]


def last_part(path: Sequence[list[float]]) -> Tensor:
    """The mean of the last part of a way, whose noise it smooths."""
    return torch.tensor(path[-math.ceil(AVERAGED * len(path)) :], dtype=torch.float64).mean(dim=0)
