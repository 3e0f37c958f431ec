"""Training batches from a dataset that lives on the device whole.

Random crops, mirroring and erasing work on a batch at once, without a loop over images or a wait for the host, which
timm's own would need. RandAugment is timm's, image by image on the host.
"""

import math
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

from diffrate.data import rand_augment as image_by_image
from diffrate.embedded import MEAN, ImageDataset, normalise
from diffrate.seeding import seeded


def is_resident(dataset: Dataset[Any]) -> TypeGuard[ImageDataset]:
    """Whether the images can move to the device whole; a dataset's own transform needs them one by one."""
    return isinstance(dataset, ImageDataset) and dataset.transform is None


class ResidentImages:
    """Images and labels on the device, and batches of them, augmented by a seed."""

    def __init__(
        self,
        dataset: ImageDataset,
        device: torch.device | str,
        crop_padding: int = 0,
        erasing: float = 0.0,
        rand_augment: int = 0,
    ) -> None:
        self.images, self.labels = dataset.images[:, None].to(device), dataset.labels.to(device)
        self.crop_padding, self.erasing = crop_padding, erasing
        size = self.images.shape[-1]
        self.rand_augment = image_by_image(rand_augment, size, (MEAN,)) if rand_augment else None
        self.generator = torch.Generator(device)

    def augmented(self, index: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """The images of an index (B,), normalised, and their labels: the same for the same seed."""
        self.generator.manual_seed(seed)
        images = crop_and_flip(self.images[index], self.crop_padding, self.generator)
        if self.rand_augment is not None:
            with seeded(seed % 2**31):  # it draws from the generators that all share
                drawn = [self.rand_augment(to_pil_image(image)) for image in images.cpu()]
            images = torch.stack([pil_to_tensor(image) for image in drawn]).to(images.device)
        return erase(normalise(images), self.erasing, self.generator), self.labels[index]


def crop_and_flip(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """A random shift of up to `padding` pixels and a mirroring of every second image, as one gather."""
    b, _, h, w = images.shape
    device = images.device
    shift = torch.randint(2 * padding + 1, (2, b, 1), generator=generator, device=device)
    mirrored = torch.rand(b, 1, generator=generator, device=device) < 0.5
    x = torch.arange(w, device=device)
    rows = torch.arange(h, device=device) + shift[0]  # (B, H)
    columns = torch.where(mirrored, w - 1 - x, x) + shift[1]  # (B, W)
    padded = F.pad(images, (padding,) * 4).movedim(1, -1)  # (B, H + 2p, W + 2p, C)
    chosen = padded[torch.arange(b, device=device)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return chosen.movedim(-1, 1)


def erase(images: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Random erasing as in timm (2 to 33 % of the area, sides up to 1 : 3, noise), for the whole batch at once."""
    b, _, h, w = images.shape
    u = torch.rand(5, b, 1, 1, 1, generator=generator, device=images.device)
    area = h * w * (0.02 + (1 / 3 - 0.02) * u[0])
    aspect = torch.exp((2 * u[1] - 1) * math.log(3))
    high, wide = (area * aspect).sqrt().clamp(max=h), (area / aspect).sqrt().clamp(max=w)
    y = torch.arange(h, device=images.device)[:, None] - (h - high) * u[2]  # (B, 1, H, 1), 0 at the top edge
    x = torch.arange(w, device=images.device) - (w - wide) * u[3]  # (B, 1, 1, W)
    inside = (y >= 0) & (y < high) & (x >= 0) & (x < wide) & (u[4] < probability)
    noise = torch.randn(images.shape, generator=generator, device=images.device)
    return torch.where(inside, noise, images)
