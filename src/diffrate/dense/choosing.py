"""A schedule for a segmentation model: of a few simple ones on the budget, the best by mIoU on held-out scenes.

Quicker than a search (searching.py), and not as good. The shapes are plateaus, which drop tokens early and keep what a
decoder is to see, and those that a search starts from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffrate.dense.camvid import Scenes
from diffrate.dense.miou import evaluate_segmenter
from diffrate.dense.searching import OPERATOR, SegmenterSubject
from diffrate.dense.segmenter import Segmenter
from diffrate.schedule import Schedule
from diffrate.searching.budget import Space, check_budget, rounded
from diffrate.searching.fast import schedule_of

PLATEAUS = (0, 1 / 6, 1 / 3, 1 / 2)  # where they begin, as a share of the depth


@dataclass(frozen=True)
class Chosen:
    """The schedule, its mIoU on the scenes it was chosen by, and what the others had."""

    schedule: Schedule
    miou: float
    others: list[float]


def choose_schedule(
    model: Segmenter,
    budget: float,
    scenes: Scenes,
    device: torch.device,
    batch_size: int = 16,
    amp: bool = False,
) -> Chosen:
    """The best schedule for `budget` GMACs of the whole model, decoder included."""
    subject = SegmenterSubject(model)
    space = Space.of(subject.backbone, subject.cost())
    check_budget(budget, space)
    tried = []
    for counts in [*plateaus(space, budget), *subject.starts(space, budget)]:
        schedule = schedule_of(rounded(counts, budget, space), space, OPERATOR)
        score = evaluate_segmenter(model.compressed(schedule), scenes, device, batch_size, amp)
        tried.append((score.miou, schedule))
    tried.sort(key=lambda each: each[0], reverse=True)
    miou, best = tried[0]
    return Chosen(best, miou, [score for score, _ in tried[1:]])


def plateaus(space: Space, budget: float) -> list[Tensor]:
    """Counts on the budget that fall over a few blocks to one level and stay there, for each place to begin."""
    depth = len(space.least)
    found = []
    for share in PLATEAUS:
        fall = ((torch.arange(depth) - round(share * depth)) / max(depth / 6, 1)).clamp(0, 1).double()
        low, high = float(space.prefix + 1), float(space.tokens)

        def counts(level: float, fall: Tensor = fall) -> Tensor:
            ideal = space.tokens + (level - space.tokens) * fall
            return torch.minimum(torch.maximum(ideal, space.least), space.most)

        if float(space.gmacs(counts(low))) > budget:
            continue
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if float(space.gmacs(counts(middle))) > budget else (middle, high)
        found.append(counts(low))
    return found
