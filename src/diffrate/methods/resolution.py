"""Plain lower resolution: the same weights on smaller images, the baseline that token compression must beat.

Images are resized (bicubic, antialiased) and the position embedding is resampled by timm's own `set_input_size`.
Whole patches alone would miss a budget by several percent, so two neighbouring sizes share the images: so many get
the larger one that the mean cost is the budget. Images take turns, and the turns go on from batch to batch, so that any
number of images in batches of any size is within one image of that share.
"""

from __future__ import annotations

import copy
import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffrate.backbones import backbone_of
from diffrate.costs.macs import gmacs
from diffrate.errors import DiffRateError


class LowerResolution(nn.Module):
    """smaller, larger  models for two sizes; share  of the images that go through the larger one.

    `eval()` and `train()` begin the turns anew: an evaluation gives every image the size that it had in the last one.
    """

    def __init__(self, smaller: nn.Module, larger: nn.Module, share: float) -> None:
        super().__init__()
        self.smaller, self.larger, self.share = smaller, larger, share
        self.sizes = tuple(backbone_of(model).layout.img_size for model in (smaller, larger))
        self.gmacs = share * gmacs(larger) + (1 - share) * gmacs(smaller)
        self.seen = 0  # images since the turns began

    @classmethod
    def at(cls, model: nn.Module, budget: float) -> LowerResolution:
        """At a mean cost of `budget` GMACs an image."""
        larger, most = model, gmacs(model)
        if budget > most:
            raise DiffRateError(f"the whole model costs {most:.4g} GMACs, less than a budget of {budget:.4g}")
        for size in smaller_sizes(model):
            smaller = resized(model, size)
            least = gmacs(smaller)
            if least <= budget:
                return cls(smaller, larger, (budget - least) / (most - least))
            larger, most = smaller, least
        raise DiffRateError(
            f"lower resolution cannot meet a budget of {budget:.4g} GMACs: it reaches {most:.4g}"
        )

    def train(self, mode: bool = True) -> LowerResolution:
        self.seen = 0
        return super().train(mode)

    def forward(self, images: Tensor) -> Tensor:
        larger = in_turns(len(images), self.share, self.seen, images.device)
        count = turns(self.seen + len(images), self.share) - turns(self.seen, self.share)
        self.seen += len(images)
        order = larger.byte().argsort(stable=True)  # the smaller size first; nobody waits for how many
        logits: Tensor | None = None
        for index, model, size in zip(
            order.split((len(images) - count, count)), (self.smaller, self.larger), self.sizes, strict=True
        ):
            if len(index):
                part = model(resize(images[index], size))
                logits = part.new_empty(len(images), *part.shape[1:]) if logits is None else logits
                logits[index] = part
        return images.new_empty(0) if logits is None else logits

    def settings(self) -> dict[str, Any]:
        return {
            "method": "resolution",
            "sizes": [list(size) for size in self.sizes],
            "share_of_larger": self.share,
        }


def smaller_sizes(model: nn.Module) -> list[tuple[int, int]]:
    """(height, width) of ever smaller inputs in the model's own shape, a patch of the longer side at a time."""
    patch_embed = cast(Any, getattr(model, "patch_embed", None))
    if patch_embed is None or not hasattr(model, "set_input_size"):
        raise DiffRateError(f"{type(model).__name__} has no other input sizes to offer")
    rows, columns = patch_embed.grid_size
    height, width = patch_embed.patch_size
    long = max(rows, columns)

    def side(patches: int, k: int) -> int:
        return max(1, round(patches * k / long))

    return [(side(rows, k) * height, side(columns, k) * width) for k in range(long - 1, 0, -1)]


def resized(model: nn.Module, size: tuple[int, int]) -> nn.Module:
    """The model for another input size; all weights but the position embedding are shared with it."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    other = copy.deepcopy(model, shared)
    cast(Any, other).set_input_size(img_size=size)
    return other


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    if images.shape[-2:] == size:
        return images
    # Not every device resizes half precision.
    small = F.interpolate(images.float(), size, mode="bicubic", antialias=True, align_corners=False)
    return small.to(images.dtype)


def in_turns(count: int, share: float, before: int = 0, device: torch.device | str | None = None) -> Tensor:
    """(count,) bool, evenly spread: of any first n, about share x n are true.

    before  images that had their turns already.
    """
    where = (
        device if torch.device(device or "cpu").type in ("cpu", "cuda") else None
    )  # others have no such numbers
    images = torch.arange(before, before + count + 1, dtype=torch.float64, device=where)
    return ((images * share + 1e-9).floor().diff() > 0).to(device or "cpu")


def turns(images: int, share: float) -> int:
    """How many of the first so many images are true in `in_turns`."""
    return math.floor(images * share + 1e-9)
