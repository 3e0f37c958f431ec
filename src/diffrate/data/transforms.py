"""From a decoded image to a model's input: as its weights were trained, or augmented."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.data.auto_augment import rand_augment_transform
from torch import nn

from diffrate.errors import DiffRateError, shown
from diffrate.models import input_size

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
INPUT = ("input_size", "interpolation", "mean", "std")  # of the values of `preprocessing`
RAND_AUGMENT = "rand-m{}-mstd0.5-inc1"  # as DeiT has it, with its magnitude
SMALLEST_CROP = 0.05  # of a side: images are resized to the model's size divided by it


def preprocessing(
    model: nn.Module,
    img_size: int | tuple[int, int] | None = None,
    crop_pct: float | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    interpolation: str | None = None,
) -> dict[str, Any]:
    """Image size, crop and normalisation: what is given, the rest as the model's weights were trained."""
    for name, value in (("mean", mean), ("std", std)):
        if value is not None and len(value) not in (1, 3):
            raise DiffRateError(f"{name} takes one number or three, not {len(value)}")
        least = 1e-6 if name == "std" else -1e6
        if value is not None and not all(least <= number <= 1e6 for number in value):
            raise DiffRateError(f"{name} of the normalisation cannot be {', '.join(f'{v:g}' for v in value)}")
    if crop_pct is not None and not SMALLEST_CROP <= crop_pct <= 2:
        raise DiffRateError(f"crop_pct is a fraction from {SMALLEST_CROP} to 2 such as 0.9, not {crop_pct:g}")
    if interpolation is not None and interpolation not in INTERPOLATIONS:
        raise DiffRateError(
            f"interpolation is one of {', '.join(INTERPOLATIONS)}, not {shown(interpolation)}"
        )
    size = (img_size, img_size) if isinstance(img_size, int) else img_size or input_size(model)
    given = {"crop_pct": crop_pct, "mean": mean, "std": std, "interpolation": interpolation}
    config: dict[str, Any] = resolve_data_config(
        {"input_size": (_channels(model), *size), **given}, model=model
    )
    return config


def plain_transform(config: Mapping[str, Any]) -> Callable[[Image.Image], Any]:
    """What an evaluation does to an image, from the values of `preprocessing`."""
    made: Callable[[Image.Image], Any] = create_transform(
        is_training=False, **{name: config[name] for name in (*INPUT, "crop_pct", "crop_mode")}
    )
    return made


def augmenting(config: Mapping[str, Any], **arguments: Any) -> Callable[[Image.Image], Any]:
    """timm's transform for training, from the values of `preprocessing`."""
    made = create_transform(is_training=True, **{name: config[name] for name in INPUT}, **arguments)
    for part in made.transforms:
        _never_to_0_bits(part)
    augment: Callable[[Image.Image], Any] = made
    return augment


def rand_augment(magnitude: int, size: int, mean: tuple[float, ...]) -> Callable[[Image.Image], Image.Image]:
    """timm's RandAugment by itself, of images with sides of `size` pixels and the mean of their channels in [0, 1]."""
    fill = tuple(min(255, round(255 * x)) for x in mean)
    settings = {"translate_const": int(0.45 * size), "img_mean": fill}
    made = rand_augment_transform(RAND_AUGMENT.format(magnitude), settings)
    _never_to_0_bits(made)
    augment: Callable[[Image.Image], Image.Image] = made
    return augment


def _never_to_0_bits(part: Any) -> None:
    """RandAugment's full magnitude posterizes to 0 bits, which Pillow no longer does: just below it, to 1 bit.

    One image in 600 would fail.
    """
    for operation in getattr(part, "ops", []):
        operation.magnitude_max = min(operation.magnitude_max or 10, 9.999)


def image_mode(config: Mapping[str, Any]) -> str:
    return "L" if config["input_size"][0] == 1 else "RGB"


def _channels(model: nn.Module) -> int:
    projection = getattr(getattr(model, "patch_embed", None), "proj", None)
    if isinstance(projection, nn.Conv2d):
        return projection.in_channels
    return int(getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224))[0])
