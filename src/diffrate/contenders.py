"""Models side by side on the same images: what each costs, how right it is and how fast it runs, beside the first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from diffrate.evaluate import Comparison, Evaluation, compare_evaluations, evaluate_in_turn
from diffrate.methods import cost_of, settings_of

NUMBERS = ("top1", "top5", "loss", "images", "images_per_second")


@dataclass(frozen=True)
class Contender:
    """One model of the comparison, and what it did."""

    name: str
    settings: dict[str, Any]  # its schedule, or a method's own parameters; empty for the uncompressed model
    gmacs: float
    evaluation: Evaluation
    comparison: Comparison  # with the uncompressed model, on the same images
    speedup: float  # over the uncompressed model, in the same run

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "gmacs": self.gmacs,
            **{name: getattr(self.evaluation, name) for name in NUMBERS},
            "speedup": self.speedup,
            "comparison": asdict(self.comparison),
            **self.settings,
        }


def contend(
    models: Mapping[str, nn.Module],
    loader: Iterable[Any],
    device: str | torch.device = "cpu",
    amp: bool = False,
    amp_dtype: str = "float16",
) -> list[Contender]:
    """Every model on every batch, in turns; the first is the uncompressed one, which the others are held against."""
    evaluations = evaluate_in_turn(models, loader, device, amp, amp_dtype)
    reference = evaluations[next(iter(models))]
    return [
        Contender(
            name,
            settings_of(model),
            cost_of(model),
            evaluations[name],
            compare_evaluations(evaluations[name], reference),
            evaluations[name].images_per_second / reference.images_per_second,
        )
        for name, model in models.items()
    ]
