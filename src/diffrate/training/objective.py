"""The loss of a batch: on smoothed labels, of mixed images, and near to the answers of a teacher."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

from diffrate.outputs import class_count, main_output
from diffrate.training.recipe import Recipe


class Objective:
    """What a recipe minimises.

    teacher  the model whose answers to the same images count by `recipe.distillation`; in evaluation mode.
    """

    needs_teacher: ClassVar[bool] = False  # whatever the recipe says

    def __init__(self, model: nn.Module, recipe: Recipe, teacher: nn.Module | None = None) -> None:
        self.recipe, self.teacher = recipe, teacher
        self.mix: Any = None
        self.of_labels: nn.Module = LabelSmoothingCrossEntropy(recipe.smoothing)
        if recipe.mixes:
            self.mix = Mixup(
                mixup_alpha=recipe.mixup,
                cutmix_alpha=recipe.cutmix,
                prob=recipe.mix_prob,
                label_smoothing=recipe.smoothing,
                num_classes=class_count(model),
            )
            self.of_labels = SoftTargetCrossEntropy()

    def mixed(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels as the loss takes them; mixed with each other where the recipe says so."""
        if self.mix is None:
            return images, labels
        pair: tuple[Tensor, Tensor] = self.mix(images, labels)
        return pair

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of images and labels from `mixed`, or of some of them."""
        return self.loss(model(images), images, labels)

    def loss(self, output: Any, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of what the model made of these images, which may be mixed, as the labels then are."""
        logits = main_output(output).float()
        loss: Tensor = self.of_labels(logits, labels)
        weight = self.recipe.distillation
        if self.teacher is None or not weight:
            return loss
        with torch.no_grad():
            answers = main_output(self.teacher(images)).float()
        return (1 - weight) * loss + weight * divergence(logits, answers, self.recipe.temperature)


def divergence(logits: Tensor, answers: Tensor, temperature: float) -> Tensor:
    """Kullback-Leibler divergence from the teacher's answers, times the temperature's square, as Hinton et al."""
    student, teacher = (F.log_softmax(each / temperature, dim=-1) for each in (logits, answers))
    return temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)
