"""Training from scratch, DeiT's way (AdamW, cosine, mixing, erasing, drop path, EMA), for models of this size.

`train` takes any torch dataset. One that holds its images as a tensor (`ImageDataset`) moves to the
device whole and is augmented there, a batch at a time: then nothing but arithmetic takes time.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from diffrate.errors import DiffRateError
from diffrate.evaluate import evaluate
from diffrate.resident import ResidentLoader, in_order, is_resident


@dataclass(frozen=True)
class Recipe:
    """How to train. The defaults are the recipe of the embedded model."""

    epochs: int = field(default=50, metadata={"help": "Passes over the training images."})
    batch_size: int = field(default=256, metadata={"help": "Images per step."})
    lr: float = field(default=1.5e-3, metadata={"help": "Peak learning rate."})
    weight_decay: float = field(default=0.05, metadata={"help": "AdamW's decay of the weight matrices."})
    warmup_epochs: int = field(default=3, metadata={"help": "Epochs of linear warm-up, at most half of all."})
    clip_grad: float = field(default=1.0, metadata={"help": "Largest norm of the gradient."})
    smoothing: float = field(default=0.1, metadata={"help": "Label smoothing."})
    mixup: float = field(default=0.0, metadata={"help": "Mixup's alpha; 0 is off."})
    cutmix: float = field(default=0.0, metadata={"help": "CutMix's alpha; 0 is off."})
    mix_prob: float = field(default=0.5, metadata={"help": "Share of the batches that are mixed."})
    rand_augment: int = field(
        default=0, metadata={"help": "RandAugment's magnitude, drawn per batch; 0 is off."}
    )
    crop_padding: int = field(
        default=2, metadata={"help": "Random crops out of images padded by so many pixels."}
    )
    erasing: float = field(
        default=0.1, metadata={"help": "Share of the images with a random rectangle erased."}
    )
    ema_decay: float = field(default=0.999, metadata={"help": "Decay of the moving average of the weights."})
    precision: str = field(default="bf16", metadata={"help": "no, fp16 or bf16."})
    compile: bool = field(default=False, metadata={"help": "Compile the model with torch.compile."})
    seed: int = field(default=0, metadata={"help": "Seed of order, mixing and augmentation."})

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "lr", "clip_grad"):
            if getattr(self, name) <= 0:
                raise DiffRateError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("smoothing", "mix_prob", "erasing", "ema_decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise DiffRateError(f"{name} must be between 0 and 1, not {getattr(self, name)}")
        if self.precision not in ("no", "fp16", "bf16"):
            raise DiffRateError(f"precision must be no, fp16 or bf16, not {self.precision!r}")
        if self.mixes and self.batch_size % 2:
            raise DiffRateError(f"batch_size must be even to mix images in pairs, not {self.batch_size}")

    @property
    def mixes(self) -> bool:
        return bool((self.mixup or self.cutmix) and self.mix_prob)


@dataclass
class Trained:
    """What `train` returns: where the run got to; the model itself holds the best weights."""

    accuracy: float = -1.0  # of the best weights on the validation images, in percent
    epoch: int = 0  # that gave them, from 1
    seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)  # loss, accuracy and seconds of every epoch


def accuracy(model: nn.Module, dataset: Dataset[Any], batch_size: int = 1000) -> float:
    """Top-1 accuracy in percent, on the model's device."""
    device = next(model.parameters()).device
    return evaluate(model, in_order(dataset, batch_size), device, progress=False).top1


def save_weights(model: nn.Module, path: Path, dtype: torch.dtype | None = None) -> None:
    """The model's state as safetensors, in one move: a reader finds the old file or the new one, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    state = {
        name: value.detach().to("cpu", dtype if value.is_floating_point() else None).contiguous()
        for name, value in model.state_dict().items()
    }
    try:
        part.write_bytes(save(state))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def train(
    model: nn.Module,
    dataset: Dataset[Any],
    validation: Dataset[Any],
    output: Path,
    recipe: Recipe | None = None,
    max_minutes: float = math.inf,
    quiet: bool = False,
) -> Trained:
    """Train `model`, a timm classifier, in place; leave it at the weights in `output/weights.safetensors` (fp16).

    These are the moving average after the epoch with the highest accuracy on `validation`. When
    `max_minutes` would run out during the next epoch, training stops before it.
    """
    begin = time.monotonic()
    recipe = recipe or Recipe()
    accelerator = Accelerator(mixed_precision=recipe.precision)
    model.to(accelerator.device)
    set_seed(recipe.seed)
    loader = _loader(dataset, recipe, accelerator)
    ema = ModelEmaV3(model, decay=recipe.ema_decay, use_warmup=True, warmup_power=0.75)
    optimizer = create_optimizer_v2(model, "adamw", lr=recipe.lr, weight_decay=recipe.weight_decay)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        num_epochs=recipe.epochs,
        warmup_epochs=min(recipe.warmup_epochs, recipe.epochs // 2),
        warmup_lr=recipe.lr / 1000,
        min_lr=recipe.lr / 1000,
        step_on_epochs=False,
        updates_per_epoch=len(loader),
    )
    prepared, optimizer = accelerator.prepare(model, optimizer)
    running: Any = torch.compile(prepared) if recipe.compile else prepared
    objective = _objective(model, recipe)
    best = Trained()
    step = 0
    with _progress(quiet) as progress:
        task = progress.add_task("training", total=recipe.epochs * len(loader))
        for epoch in range(1, recipe.epochs + 1):
            start, total = time.monotonic(), torch.zeros((), device=accelerator.device)
            running.train()
            for images, labels in loader:
                loss = objective(running, images, labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), recipe.clip_grad)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                scheduler.step_update(step)
                ema.update(model, step)
                total += loss.detach()  # read once an epoch: the device never waits for the host
                progress.advance(task)
            mean = total.item() / len(loader)
            if not math.isfinite(mean):
                raise DiffRateError(
                    f"the loss became {mean} in epoch {epoch}; the weights of epoch {best.epoch} are kept"
                )
            with accelerator.autocast():
                score = accuracy(ema.module, validation)
            if score >= best.accuracy:
                best.accuracy, best.epoch = score, epoch
                save_weights(ema.module, output / "weights.safetensors", torch.float16)
            seconds = time.monotonic() - start
            best.history.append({"loss": mean, "accuracy": score, "seconds": seconds})
            best.seconds = time.monotonic() - begin
            # the first epoch also compiles, so the quickest one tells how long the next will take
            pace = min(e["seconds"] for e in best.history)
            progress.console.print(
                f"epoch {epoch:3d}/{recipe.epochs}  loss {mean:.4f}  accuracy {score:.2f} %  {seconds:.1f} s, "
                f"{pace * (recipe.epochs - epoch) / 60:.1f} min left"
            )
            if best.seconds + pace > 60 * max_minutes:
                break
    accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)  # takes autocast off the caller's model
    model.load_state_dict(load_file(output / "weights.safetensors"))
    model.eval()
    return best


def _loader(dataset: Dataset[Any], recipe: Recipe, accelerator: Accelerator) -> Any:
    count = len(dataset)  # type: ignore[arg-type]
    if count < recipe.batch_size:
        raise DiffRateError(f"{count} images do not fill one batch of {recipe.batch_size}")
    if is_resident(dataset):
        options = (recipe.crop_padding, recipe.erasing, recipe.rand_augment, recipe.seed)
        return ResidentLoader(dataset, recipe.batch_size, accelerator.device, *options)
    # any other dataset augments its images itself
    return accelerator.prepare(DataLoader(dataset, recipe.batch_size, shuffle=True, drop_last=True))


def _objective(model: Any, recipe: Recipe) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """The loss of a batch: on smoothed labels, of mixed images where the recipe mixes."""
    if not recipe.mixes:
        smooth = LabelSmoothingCrossEntropy(recipe.smoothing)
        return lambda running, images, labels: smooth(running(images), labels)
    mix = Mixup(
        mixup_alpha=recipe.mixup,
        cutmix_alpha=recipe.cutmix,
        prob=recipe.mix_prob,
        label_smoothing=recipe.smoothing,
        num_classes=model.num_classes,
    )
    soft = SoftTargetCrossEntropy()

    def objective(running: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        images, targets = mix(images, labels)
        return soft(running(images), targets)

    return objective


def _progress(quiet: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(quiet=quiet), transient=True)


if __name__ == "__main__":
    from diffrate.cli.train import main

    main()
