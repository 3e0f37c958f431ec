"""Training of a segmentation model on scenes in memory: flips, scales and crops on the device, AdamW, cosine."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn

from diffrate.dense.camvid import VOID, Scenes, normalized
from diffrate.dense.miou import SegmentationScore, evaluate_segmenter
from diffrate.dense.segmenter import Segmenter
from diffrate.devices import autocast
from diffrate.errors import DiffRateError, shown
from diffrate.training.recipe import LARGEST_RATE


@dataclass(frozen=True)
class SegmentationRecipe:
    """How to train. `backbone_lr` is a factor: pretrained weights are to move less than a fresh decoder."""

    epochs: int = field(default=150, metadata={"help": "Passes over the training scenes."})
    batch_size: int = field(default=16, metadata={"help": "Scenes per step."})
    lr: float = field(default=1e-3, metadata={"help": "Peak learning rate of the decoder."})
    backbone_lr: float = field(
        default=0.2, metadata={"help": "Learning rate of the backbone, as a share of it."}
    )
    weight_decay: float = field(default=0.05, metadata={"help": "AdamW's decay."})
    warmup_epochs: int = field(default=5, metadata={"help": "Epochs of linear warm-up."})
    smallest_scale: float = field(
        default=0.75, metadata={"help": "Scenes are scaled by a factor from here …"}
    )
    largest_scale: float = field(default=1.75, metadata={"help": "… to here, and cropped."})
    amp: bool = field(default=True, metadata={"help": "Mixed precision (bfloat16)."})
    seed: int = field(default=0, metadata={"help": "Seed of order and augmentation."})

    def __post_init__(self) -> None:
        if min(self.epochs, self.batch_size, self.lr, self.smallest_scale) <= 0:
            raise DiffRateError("epochs, batch_size, lr and smallest_scale must be above 0")
        for name in ("lr", "backbone_lr", "weight_decay"):
            if not 0 <= getattr(self, name) <= LARGEST_RATE:
                raise DiffRateError(
                    f"{name} must be from 0 to {LARGEST_RATE:g}, not {shown(getattr(self, name))}"
                )
        if not 0 <= self.seed < 2**31:
            raise DiffRateError(f"seed must be from 0 to {2**31 - 1}, not {shown(self.seed)}")
        if self.smallest_scale > self.largest_scale:
            raise DiffRateError("smallest_scale must not be above largest_scale")


@dataclass
class TrainedSegmenter:
    """The last epoch's score on the validation scenes, and how it came about."""

    score: SegmentationScore
    seconds: float
    epochs: int
    history: list[dict[str, float]]


def train_segmenter(
    model: Segmenter,
    scenes: Scenes,
    validation: Scenes,
    device: torch.device,
    recipe: SegmentationRecipe | None = None,
    max_minutes: float = math.inf,
    every: int = 10,
) -> TrainedSegmenter:
    """Train in place; scores on `validation` every so many epochs go into the history.

    When `max_minutes` would run out, the cosine is cut short after the epoch that fits.
    """
    recipe = recipe or SegmentationRecipe()
    torch.manual_seed(recipe.seed)
    model.to(device)
    scenes = scenes.to(device)
    generator = torch.Generator(device=device).manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(_groups(model, recipe), lr=recipe.lr, weight_decay=recipe.weight_decay)
    steps = math.ceil(len(scenes) / recipe.batch_size)
    schedule = CosineLRScheduler(
        optimizer,
        t_initial=recipe.epochs * steps,
        lr_min=recipe.lr / 100,
        warmup_t=min(recipe.warmup_epochs, recipe.epochs // 2) * steps,
        warmup_lr_init=recipe.lr / 100,
        t_in_epochs=False,
    )
    started, history, epoch = time.monotonic(), [], 0
    for epoch in range(1, recipe.epochs + 1):
        model.train()
        total = torch.zeros((), device=device)
        order = torch.randperm(len(scenes), device=device, generator=generator)
        for step, chosen in enumerate(order.split(recipe.batch_size)):
            images, labels = augmented(
                normalized(scenes.images[chosen]), scenes.labels[chosen].long(), recipe, generator
            )
            with autocast(device, recipe.amp, "bfloat16"):
                logits = model(images)
            loss = F.cross_entropy(logits.float(), labels, ignore_index=VOID)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step_update((epoch - 1) * steps + step + 1)
            total += loss.detach()
        seconds = time.monotonic() - started
        entry = {"epoch": float(epoch), "loss": float(total) / steps, "seconds": round(seconds, 1)}
        last = epoch == recipe.epochs or seconds * (epoch + 1) / epoch > 60 * max_minutes
        if last or epoch % every == 0:
            entry["miou"] = evaluate_segmenter(model, validation, device, recipe.batch_size, recipe.amp).miou
        history.append(entry)
        if not math.isfinite(entry["loss"]):
            raise DiffRateError("the training loss is not finite: lower the learning rate")
        if last:
            break
    result = evaluate_segmenter(model, validation, device, recipe.batch_size, recipe.amp)
    return TrainedSegmenter(result, time.monotonic() - started, epoch, history)


def _groups(model: Segmenter, recipe: SegmentationRecipe) -> list[dict[str, object]]:
    """The backbone's parameters learn more slowly; vectors are not decayed."""
    groups = []
    backbone = set(model.whole.parameters())
    for inside in (True, False):
        for flat in (True, False):
            chosen = [p for p in model.parameters() if (p in backbone) == inside and (p.ndim < 2) == flat]
            factor = recipe.backbone_lr if inside else 1.0
            decay = 0.0 if flat else recipe.weight_decay
            groups.append({"params": chosen, "lr": recipe.lr * factor, "weight_decay": decay})
    return groups


def augmented(
    images: Tensor, labels: Tensor, recipe: SegmentationRecipe, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A batch flipped, scaled by one factor, cropped or padded to its size, and changed in brightness and contrast."""
    count, height, width = labels.shape

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, device=images.device, generator=generator)

    flip = draw(count) < 0.5
    images = torch.where(flip[:, None, None, None], images.flip(-1), images)
    labels = torch.where(flip[:, None, None], labels.flip(-1), labels)
    low, high = recipe.smallest_scale, recipe.largest_scale
    factor = low + (high - low) * float(draw(1))
    size = (max(1, round(height * factor)), max(1, round(width * factor)))
    images = F.interpolate(images, size=size, mode="bilinear", align_corners=False)
    labels = F.interpolate(labels[:, None].float(), size=size, mode="nearest")[:, 0].long()
    pad = (0, max(0, width - size[1]), 0, max(0, height - size[0]))
    images, labels = F.pad(images, pad), F.pad(labels, pad, value=VOID)
    top = int(float(draw(1)) * (labels.shape[1] - height + 1))
    left = int(float(draw(1)) * (labels.shape[2] - width + 1))
    images = images[:, :, top : top + height, left : left + width]
    labels = labels[:, top : top + height, left : left + width]
    contrast, brightness = 0.7 + 0.6 * draw(count, 1, 1, 1), 0.6 * (draw(count, 1, 1, 1) - 0.5)
    return images * contrast + brightness, labels
