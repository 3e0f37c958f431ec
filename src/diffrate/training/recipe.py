"""How to train: one set of numbers, and the three that have a name: the paper's fine-tuning, DeiT's training from
scratch, and that of the embedded model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diffrate.errors import DiffRateError, shown

LARGEST_RATE = 100.0  # of learning: nothing stays finite above
LARGEST = 1e9  # of any number: more is a slip of the finger, and infinity is none


def _field(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Recipe:
    """How to train. The defaults are DeiT's, from scratch on ImageNet."""

    epochs: int = _field(300, "Passes over the training images.")
    batch_size: int = _field(1024, "Images per step, over all processes.")
    accumulate: int = _field(1, "Parts in which each process runs its share of a step, to save memory.")
    opt: str = _field("adamw", "timm's name of the optimiser.")
    lr: float = _field(1e-3, "Peak learning rate, for this batch size.")
    min_lr: float = _field(1e-5, "Learning rate at the end of the cosine, which steps with every batch.")
    warmup_epochs: int = _field(5, "Epochs of linear warm-up, at most half of all.")
    warmup_lr: float = _field(1e-6, "Learning rate at the start of the warm-up.")
    weight_decay: float = _field(0.05, "Decay of the weight matrices.")
    layer_decay: float = _field(
        1.0, "Factor on the learning rate from one block to the one before; 1 is off."
    )
    clip_grad: float = _field(0.0, "Largest norm of the gradient; 0 is off.")
    smoothing: float = _field(0.1, "Label smoothing.")
    mixup: float = _field(0.8, "Mixup's alpha; 0 is off.")
    cutmix: float = _field(1.0, "CutMix's alpha; 0 is off.")
    mix_prob: float = _field(1.0, "Share of the batches that are mixed.")
    rand_augment: int = _field(9, "RandAugment's magnitude; 0 is off.")
    erasing: float = _field(0.25, "Share of the images with a random rectangle erased.")
    crop_padding: int = _field(0, "Resident images: random crops out of images padded by so many pixels.")
    smallest_crop: float = _field(0.08, "Folders: smallest random crop, as a share of the image.")
    color_jitter: float = _field(0.3, "Folders: strength of the colour jitter; with RandAugment it is off.")
    repeats: int = _field(3, "Views of each image in an epoch, which then shows fewer different images.")
    distillation: float = _field(0.0, "Weight of the uncompressed model's answers in the loss; 0 is off.")
    temperature: float = _field(1.0, "Temperature of both answers in the distillation.")
    ema_decay: float = _field(0.0, "Decay of a moving average of the weights; 0 is off.")
    precision: str = _field("bf16", "no, fp16 or bf16.")
    compile: bool = _field(False, "Compile the model with torch.compile; on GPUs, as CUDA graphs.")
    grad_checkpointing: bool = _field(False, "Compute each block twice instead of keeping its activations.")
    seed: int = _field(0, "Seed of order, mixing and augmentation.")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not abs(value) <= LARGEST:
                raise DiffRateError(f"{name} must be a number of at most {LARGEST:.0e}, not {shown(value)}")
        for name in ("lr", "min_lr", "warmup_lr"):
            if getattr(self, name) > LARGEST_RATE:
                raise DiffRateError(f"{name} must be at most {LARGEST_RATE:g}, not {getattr(self, name):g}")
        if not 0 <= self.rand_augment <= 30 or self.color_jitter < 0 or not self.warmup_epochs >= 0:
            raise DiffRateError(
                "rand_augment is from 0 to 30, and color_jitter and warmup_epochs are not negative"
            )
        if not 0 <= self.seed < 2**31:
            raise DiffRateError(f"seed must be from 0 to {2**31 - 1}, not {shown(self.seed)}")
        for name in ("epochs", "batch_size", "accumulate", "lr", "layer_decay", "repeats", "temperature"):
            if getattr(self, name) <= 0:
                raise DiffRateError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("clip_grad", "mixup", "cutmix", "min_lr", "warmup_lr", "weight_decay", "crop_padding"):
            if getattr(self, name) < 0:
                raise DiffRateError(f"{name} must not be negative, as {getattr(self, name)} is")
        shares = ("smoothing", "mix_prob", "erasing", "ema_decay", "distillation", "smallest_crop")
        for name in (*shares, "layer_decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise DiffRateError(f"{name} must be between 0 and 1, not {getattr(self, name)}")
        if self.precision not in ("no", "fp16", "bf16"):
            raise DiffRateError(f"precision must be no, fp16 or bf16, not {self.precision!r}")

    @property
    def mixes(self) -> bool:
        return bool((self.mixup or self.cutmix) and self.mix_prob)

    def check_parts(self, processes: int) -> None:
        """Raise where a step cannot be shared out in equal parts, each of them whole pairs if images are mixed."""
        parts = processes * self.accumulate
        least = 2 * parts if self.mixes else parts
        if self.batch_size % least:
            pairs = ", each of them even to mix images in pairs" if self.mixes else ""
            raise DiffRateError(
                f"a batch_size of {self.batch_size} does not fall into {parts} equal parts{pairs}: "
                f"choose a multiple of {least}"
            )


# From scratch, as DeiT: lr 5e-4 for each 512 images of a batch.
DEIT = Recipe()
# The paper's fine-tuning: the schedule fixed, the rest of DeiT's augmentation.
FINETUNE = Recipe(epochs=30, lr=2e-5, min_lr=1e-6, warmup_epochs=0, repeats=1)
# The embedded model's: small images, few of them.
EMBEDDED = Recipe(
    epochs=50, batch_size=256, lr=1.5e-3, min_lr=1.5e-6, warmup_lr=1.5e-6, warmup_epochs=3, clip_grad=1.0,
    mixup=0.0, cutmix=0.0, mix_prob=0.5, rand_augment=0, erasing=0.1, crop_padding=2, repeats=1,
    ema_decay=0.999,
)  # fmt: skip
