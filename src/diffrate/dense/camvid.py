"""Scenes with a label for every pixel, from folders laid out as CamVid's: train/ and trainannot/, val/, test/.

A split is small (367 images of 360x480), so it is read once and stays in memory, on the device if there is room.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from diffrate.data import naming
from diffrate.errors import DiffRateError

CLASSES = (
    *("sky", "building", "pole", "road", "pavement", "tree"),
    *("sign", "fence", "car", "pedestrian", "cyclist"),
)
VOID = len(CLASSES)  # not counted, in training or evaluation


@dataclass
class Scenes:
    """images (N, 3, H, W) and labels (N, H, W), both uint8, padded below and to the right to whole patches."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.images)

    @property
    def size(self) -> tuple[int, int]:
        return int(self.images.shape[-2]), int(self.images.shape[-1])

    def to(self, device: torch.device) -> Scenes:
        return Scenes(self.images.to(device), self.labels.to(device))


def normalized(images: Tensor) -> Tensor:
    """uint8 images as a model sees them."""
    mean, std = (
        torch.tensor(values, device=images.device).view(3, 1, 1)
        for values in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    )
    return (images.float() / 255 - mean) / std


def load_scenes(data_dir: str | Path, split: str, stride: int = 16, labelled: bool = True) -> Scenes:
    """One split, in the order of its file names; `stride` is what the padded height and width are multiples of.

    labelled  whether labels are read; otherwise every pixel is void.
    """
    root = Path(data_dir)
    files = sorted(path for path in (root / split).glob("*") if path.suffix.lower() in (".jpg", ".png"))
    if not files:
        raise DiffRateError(f"there are no images in {root / split}")
    images, labels = [], []
    for path in files:
        image = np.array(_read(path).convert("RGB"))
        label = np.full(image.shape[:2], VOID, np.uint8)
        if labelled:
            label = _labels(path, root / f"{split}annot" / f"{path.stem}.png", label.shape)
        images.append(torch.from_numpy(image).permute(2, 0, 1))
        labels.append(torch.from_numpy(label.copy()))
    if len({image.shape for image in images}) > 1:
        raise DiffRateError(f"the images in {root / split} are not all of one size")
    height, width = labels[0].shape
    pad = (0, -width % stride, 0, -height % stride)
    return Scenes(F.pad(torch.stack(images), pad), F.pad(torch.stack(labels), pad, value=VOID))


def _labels(path: Path, annotation: Path, shape: tuple[int, ...]) -> np.ndarray:
    if not annotation.is_file():
        raise DiffRateError(f"{path} has no labels: {annotation} does not exist")
    label = np.asarray(_read(annotation))
    if label.shape != shape or label.max() > VOID:
        raise DiffRateError(f"{annotation} does not label {path} with {len(CLASSES)} classes and void")
    return label


def _read(path: Path) -> Image.Image:
    with naming(lambda: path), Image.open(path) as opened:
        opened.load()
        return opened
