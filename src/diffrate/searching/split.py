"""Where an operator prunes and merges: the share of the tokens that a block removes which it merges.

What a block keeps says what it costs, and nothing of how the others went. So the shares cost nothing, and are learned
beside the counts from the same forward passes: further columns of the same design.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diffrate.schedule import Schedule
from diffrate.searching.budget import Space
from diffrate.searching.pace import Pace, last_part

EVEN = 0.5
# Of all blocks together, in the random shapes that a search may begin at.
LEVELS = (0.0, 0.25, EVEN, 0.75, 1.0)
CHANGE = 0.25  # by which a share goes up or down in what a step measures
TRAVEL = 1.0  # how far a share could travel at the first step's length


@dataclass
class Split:
    """The shares (P,) of `Space.choices`, and their descent; `state` and `restore` let it stop and go on."""

    shares: Tensor
    pace: Pace
    path: list[list[float]] = field(default_factory=list)  # the shares after each step

    @classmethod
    def begin(cls, shares: Tensor, steps: int) -> Split:
        length = TRAVEL / steps
        return cls(shares, Pace(steps, first=length, last=length / 10))

    def around(self, ways: Tensor) -> Tensor:
        """(S, P) shares around the present ones, changed the `ways` (S, P) of ±1."""
        return (self.shares + CHANGE * ways).clamp(0, 1)

    def changes(self, shares: Tensor) -> Tensor:
        """(S, P) how far they lie from the present ones, in units of a full change."""
        return (shares - self.shares) / CHANGE

    def update(self, slopes: Tensor) -> None:
        """One step down `slopes` (P,), of the loss per full change."""
        self.shares = (self.shares - self.pace.step(slopes)).clamp(0, 1)
        self.path.append(self.shares.tolist())

    def answer(self) -> Tensor:
        return last_part(self.path) if self.path else self.shares

    def state(self) -> dict[str, Any]:
        return {"shares": self.shares.tolist(), "path": self.path[:], **self.pace.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.shares = torch.tensor(state["shares"], dtype=torch.float64)
        self.path = list(state["path"])
        self.pace.restore(state)


def even_split(space: Space, share: float = EVEN) -> Tensor:
    """The same share in all blocks."""
    return torch.full((len(space.choices),), share, dtype=torch.float64)


def split_of(schedule: Schedule, space: Space) -> Tensor:
    """The shares of a schedule, as its whole tokens tell them: of many surely, of none not at all.

    Where one token goes and is merged, any share above one half may have been meant: taken is the middle. `pruned`
    gives the schedule back.
    """
    if not schedule.operator.splits:  # which of the two it does is not in its counts
        return even_split(space, float(schedule.operator.operation == "merge"))
    found = even_split(space)
    runs = schedule.effective
    for i, part in enumerate(space.choices):
        before = [runs.merge[block - 1] if block else runs.tokens for block in part]
        removed = sum(a - runs.merge[block] for a, block in zip(before, part, strict=True))
        merged = sum(runs.prune[block] - runs.merge[block] for block in part)
        found[i] = (merged + EVEN) / (removed + 1)
    return found


def pruned(kept: tuple[int, ...], shares: Tensor, space: Space) -> tuple[int, ...]:
    """What is left after pruning alone where `kept` is left in the end, in whole tokens."""
    after = list(kept)
    for part, share in zip(space.choices, shares.tolist(), strict=True):
        for block in part:
            before = kept[block - 1] if block else kept[0]
            after[block] += round(share * (before - kept[block]))
    return tuple(after)
