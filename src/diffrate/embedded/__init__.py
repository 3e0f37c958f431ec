"""The model and the images that ship with the package, so that everything runs without a download.

A small vision transformer for Fashion-MNIST: 28x28 images in 2x2 patches and a class token give the
197 tokens of the paper's ViTs at 0.35 GMACs. `build` makes the image files, `diffrate train` the
weights; `metrics.json` says how these were made.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from timm.layers import build_sincos2d_pos_embed
from timm.models import VisionTransformer
from torch import Tensor
from torch.utils.data import Dataset

from diffrate.errors import DiffRateError

NAME = "embedded"  # of the model and of the dataset, where one is chosen by its name
FOLDER = Path(__file__).parent
WEIGHTS = FOLDER / "weights.safetensors"
SPLITS = {"search": 1_000, "test": 2_000}
CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
MEAN, STD = 0.2860, 0.3530  # of the 60,000 training images, in [0, 1]


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """Grey images held in memory; an item is a normalised (1, H, W) float tensor and its label.

    `transform`, when given, is applied to the normalised tensor.
    """

    def __init__(self, images: Tensor, labels: Tensor, transform: Callable[[Tensor], Any] | None = None):
        if images.dtype != torch.uint8 or images.ndim != 3:
            raise DiffRateError(
                f"images must be a uint8 tensor (N, H, W), not {images.dtype} {tuple(images.shape)}"
            )
        if labels.shape != images.shape[:1]:
            raise DiffRateError(f"{len(images)} images need as many labels, not {tuple(labels.shape)}")
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = normalise(self.images[index, None])  # (1, H, W)
        return (image if self.transform is None else self.transform(image)), int(self.labels[index])


class Pictures(Dataset[tuple[Any, int]]):
    """The same images as pictures, as a folder has them: whoever reads them sets `transform`; without labels all -1.

    mode  Pillow's, of the pictures: "L", or "RGB" for models that look at colours.
    """

    def __init__(self, split: str, labels: bool = True, mode: str = "L") -> None:
        self.images, self.labels = images(split)
        self.mode = mode
        if not labels:
            self.labels = torch.full_like(self.labels, -1)
        self.transform: Callable[[Image.Image], Any] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        picture = Image.fromarray(self.images[index].numpy()).convert(self.mode)
        return (picture if self.transform is None else self.transform(picture)), int(self.labels[index])


def normalise(images: Tensor) -> Tensor:
    """uint8 pixels to floats of mean 0 and deviation 1 over the training set."""
    return (images.float() / 255 - MEAN) / STD


def model(pretrained: bool = True, **kwargs: Any) -> VisionTransformer:
    """The embedded ViT: 12 blocks, 197 tokens, 10 classes; `kwargs` go to `timm.create_model`."""
    if pretrained and not WEIGHTS.is_file():
        raise DiffRateError(
            f"the embedded weights are missing ({WEIGHTS.name}): make them with `diffrate train`"
        )
    vit = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=28,
        patch_size=2,
        in_chans=1,
        embed_dim=96,
        num_heads=3,
        depth=12,
        num_classes=len(CLASSES),
        checkpoint_path=str(WEIGHTS) if pretrained else "",
        pretrained_cfg_overlay={  # not ViT-Ti's: what timm's data pipeline must know, and nothing to download
            "url": "",
            "hf_hub_id": None,
            "tag": "fashion_mnist",
            "custom_load": False,
            "license": "mit",
            "input_size": (1, 28, 28),
            "mean": (MEAN,),
            "std": (STD,),
            "crop_pct": 1.0,
            "num_classes": len(CLASSES),
        },
        **kwargs,
    )
    assert isinstance(vit, VisionTransformer)
    assert vit.pos_embed is not None
    if not pretrained:
        # Patches of four pixels say little alone: starting from 2-D sine waves, the blocks see at once which are
        # neighbours, instead of learning it first.
        waves = build_sincos2d_pos_embed(list(vit.patch_embed.grid_size), dim=vit.embed_dim)
        with torch.no_grad():
            vit.pos_embed[0, vit.num_prefix_tokens :].copy_(waves)
    return vit


def images(split: str) -> tuple[Tensor, Tensor]:
    """The "search" (1,000, from the training set) or "test" (2,000) images, uint8 (N, 28, 28), and labels (N,)."""
    if split not in SPLITS:
        raise DiffRateError(f"there is no embedded split {split!r}: choose one of {', '.join(SPLITS)}")
    with np.load(FOLDER / f"{split}.npz", allow_pickle=False) as stored:
        return torch.from_numpy(stored["images"]), torch.from_numpy(stored["labels"]).long()


def dataset(split: str, transform: Callable[[Tensor], Any] | None = None) -> ImageDataset:
    """The embedded images as a torch dataset."""
    return ImageDataset(*images(split), transform)
