"""What a search compresses, and whose answers it compares: here a classifier, in dense/ a segmentation model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from diffrate.backbones import backbone_of
from diffrate.compressed import compress
from diffrate.costs.macs import MacCost
from diffrate.outputs import main_output
from diffrate.schedule import Schedule
from diffrate.searching.budget import Budget, Space
from diffrate.searching.many import logits_of_many
from diffrate.searching.starts import starts

# Where there are few classes a model is sure of most images, and the few others make nearly all of the divergence.
# Softened by this temperature, as in distillation, its answers differ on more of them. With a thousand classes that
# would mostly count classes which no image has.
SOFT = 4.0
FEW = 100  # classes; measured with 10, where it helps, and with 1,000, where it does not


class Subject:
    """A classifier. Its answers are logits (B, classes), of the first head where there are two."""

    classifies: ClassVar[bool] = True  # whether labels could say how good its answers are

    def __init__(self, model: nn.Module) -> None:
        self.model = model  # all of it: moved to a device, frozen and set to evaluation
        self.backbone = backbone_of(model)

    def cost(self) -> MacCost:
        """MACs of the whole model, of which the search changes those of the blocks."""
        return MacCost.of_backbone(self.backbone)

    def starts(self, space: Space, budget: Budget | float) -> list[Tensor]:
        """Counts on the budget to begin from, of which held-out images choose."""
        return starts(space, budget)

    def under(self, schedule: Schedule | None) -> Callable[[Tensor], Tensor]:
        """Images to answers, under a schedule or uncompressed."""
        model = self.model if schedule is None else compress(self.model, schedule)
        return lambda images: main_output(model(images))

    def under_many(self, schedules: Sequence[Schedule], images: Tensor) -> Tensor:
        """(S, B, …) answers under each of the schedules, which share an operator: see many.py."""
        return logits_of_many(self.backbone, images, schedules)

    def divergence(self, teacher: Tensor, answers: Tensor, temperature: float | None = None) -> Tensor:
        """(…, B) how far answers lie from the whole model's, of every image; softened where there are few classes."""
        if temperature is None:
            temperature = SOFT if teacher.shape[-1] <= FEW else 1.0
        return temperature**2 * kl(teacher / temperature, answers / temperature)


def kl(teacher: Tensor, logits: Tensor) -> Tensor:
    """KL(teacher || student) over the last dimension, in fp32.

    The sum of p (log p - log q) - p + q: the last two cancel, but where p and q are close every term is then small by
    itself, and rounding does not drown it.
    """
    target, student = teacher.float().log_softmax(dim=-1), logits.float().log_softmax(dim=-1)
    gap = target - student
    near = gap.clamp(-1, 1)
    terms = torch.where(gap == near, near.neg().expm1() + near, gap - 1) * target.exp()
    return (terms + torch.where(gap == near, 0.0, student.exp())).sum(dim=-1)
