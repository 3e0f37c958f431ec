"""Mean intersection over union of a segmentation model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from diffrate.dense.camvid import VOID, Scenes, normalized
from diffrate.devices import autocast, now
from diffrate.modes import evaluating
from diffrate.portions import Portions


@dataclass(frozen=True)
class SegmentationScore:
    """miou and accuracy (mean over classes, and of all pixels) in percent; classes that do not occur are left out."""

    miou: float
    mean_accuracy: float
    pixel_accuracy: float
    images: int
    images_per_second: float
    iou: list[float] = field(default_factory=list)


def confusion(predicted: Tensor, labels: Tensor, classes: int = VOID) -> Tensor:
    """(classes, classes) counts of pixels by true class (rows) and predicted class; void pixels are left out."""
    known = labels < classes
    pairs = labels[known].long() * classes + predicted[known].long()
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)


def score(counts: Tensor, images: int, seconds: float) -> SegmentationScore:
    """The figures of a confusion matrix."""
    counts = counts.double()
    right, true, predicted = counts.diagonal(), counts.sum(dim=1), counts.sum(dim=0)
    union = true + predicted - right
    occurs = true > 0
    iou = 100 * right / union.clamp_min(1)
    return SegmentationScore(
        miou=float(iou[occurs].mean()),
        mean_accuracy=float((100 * right / true.clamp_min(1))[occurs].mean()),
        pixel_accuracy=float(100 * right.sum() / true.sum().clamp_min(1)),
        images=images,
        images_per_second=images / max(seconds, 1e-9),
        iou=[round(value, 2) for value in iou.tolist()],
    )


def evaluate_segmenter(
    model: nn.Module,
    scenes: Scenes,
    device: torch.device,
    batch_size: int = 16,
    amp: bool = False,
    amp_dtype: str = "bfloat16",
) -> SegmentationScore:
    """Segment every scene, padding included, and compare with the labels where there are any."""
    model.to(device)
    counts = torch.zeros(VOID, VOID, dtype=torch.int64, device=device)
    seconds, portions = 0.0, Portions("the evaluation")
    with evaluating(model), torch.inference_mode():
        for start in range(0, len(scenes), batch_size):
            images = normalized(scenes.images[start : start + batch_size].to(device))
            labels = scenes.labels[start : start + batch_size].to(device)
            began = now(device)
            with autocast(device, amp, amp_dtype):
                predicted = portions.joined(lambda some: model(some).argmax(dim=1), images)
            seconds += now(device) - began
            counts += confusion(predicted, labels)
    return score(counts.cpu(), len(scenes), seconds)
