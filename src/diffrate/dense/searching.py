"""A search for segmentation models: the fast recipe, on how every pixel's answer changes.

What `diffrate.search` does for a classifier, with the divergence from the whole model averaged over a scene, and with
the decoder's MACs in the budget. No labels are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import Dataset

from diffrate.backbones import backbone_of
from diffrate.backbones.timm_metaformer import TimmMetaFormer
from diffrate.costs.macs import GIGA, MacCost
from diffrate.dense.camvid import Scenes, normalized
from diffrate.dense.segmenter import Segmenter
from diffrate.operator import Operator
from diffrate.schedule import Schedule
from diffrate.searching import fast
from diffrate.searching.budget import Budget, Space
from diffrate.searching.many import branches
from diffrate.searching.run import SearchResult, search
from diffrate.searching.starts import starts
from diffrate.searching.subject import Subject, kl

# A class token that nobody asked about any more says little about what a decoder needs: tokens are worth as much to
# their neighbours as the mean one is to it. What kept norms do to a decoder's maps is not known.
OPERATOR = fast.OPERATOR.changed(floor=fast.FLOOR, keep_norm=False)
DEFAULTS = {"cuda": (60, 16), "cpu": (30, 4)}  # steps, and scenes a step


def search_segmenter(
    model: Segmenter,
    scenes: Scenes,
    budget: str | float,
    *,
    operator: Operator = OPERATOR,
    steps: int | None = None,
    batch_size: int | None = None,
    held_out: float = 0.1,
    checks: int = 5,
    accelerator: Accelerator | None = None,
    **more: Any,
) -> SearchResult:
    """Learn how many tokens each block of a segmentation model may keep within `budget`, decoder included.

    scenes    of which `held_out` is the share that decides between the answers of `checks` moments.
    more      what else diffrate.search takes: start, patience, seed, output, resume, name, origin, progress, command.
    """
    accelerator = accelerator or Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    defaults = DEFAULTS["cpu" if accelerator.device.type == "cpu" else "cuda"]
    return search(
        SegmenterSubject(model),
        (SceneImages(scenes, flips=True), SceneImages(scenes, flips=False)),
        budget,
        operator=operator,
        steps=steps or defaults[0],
        batch_size=batch_size or defaults[1],
        held_out=held_out,
        checks=checks,
        accelerator=accelerator,
        **more,
    )


class SceneImages(Dataset[Tensor]):
    """Scenes as a model sees them, half of them mirrored where that is asked for."""

    def __init__(self, scenes: Scenes, flips: bool) -> None:
        self.scenes, self.flips = scenes, flips

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> Tensor:
        image = normalized(self.scenes.images[index])
        return image.flip(-1) if self.flips and float(torch.rand(())) < 0.5 else image


class SegmenterSubject(Subject):
    """A segmentation model. Its answers are (B, P, classes): logits of every place of the decoder's map."""

    classifies = False

    def __init__(self, model: Segmenter) -> None:
        self.model: Segmenter = model
        self.backbone = backbone_of(model.whole)

    def cost(self) -> MacCost:
        return MacCost.of_backbone(self.backbone, behind=self.model.decoder_gmacs() * GIGA)

    def starts(self, space: Space, budget: Budget | float) -> list[Tensor]:
        """Also stairs: what the decoder reads after a block is worth most there, so tokens go in the block behind."""
        found = starts(space, budget)
        stairs = None if self.model.restores else _stairs(space, budget, self.model.taken)
        return found if stairs is None else [*found, stairs]

    def under(self, schedule: Schedule | None) -> Callable[[Tensor], Tensor]:
        model = self.model if schedule is None else self.model.compressed(schedule)
        return lambda images: _places(model.coarse(images))

    def under_many(self, schedules: Sequence[Schedule], images: Tensor) -> Tensor:
        found = (self._stages if isinstance(self.backbone, TimmMetaFormer) else self._plain)(
            schedules, images
        )
        return torch.stack([found[i] for i in range(len(schedules))])

    def divergence(self, teacher: Tensor, answers: Tensor, temperature: float | None = None) -> Tensor:
        temperature = temperature or 1.0  # a scene has many places, unsure ones among them
        return temperature**2 * kl(teacher / temperature, answers / temperature).mean(dim=-1)

    def _plain(self, schedules: Sequence[Schedule], images: Tensor) -> dict[int, Tensor]:
        """The answers of a ViT, from the maps of the blocks that the decoder reads."""
        backbone, (rows, columns) = self.backbone, self.backbone.grid(images)
        found = {}
        for branch in branches(backbone, backbone.start(images, track=True), schedules, self.model.taken):
            for members, chunk in branch.each():  # one after the other they need less memory
                maps = [
                    backbone.norm(grid[chunk]).transpose(1, 2).unflatten(2, (rows, columns)).contiguous()
                    for grid in branch.maps
                ]
                found.update(dict.fromkeys(members, _places(self.model.decoded(maps))))
        return found

    def _stages(self, schedules: Sequence[Schedule], images: Tensor) -> dict[int, Tensor]:
        """Those of a CAFormer, from the maps of its stages."""
        backbone = self.backbone
        assert isinstance(backbone, TimmMetaFormer)
        early = backbone.early(images)
        first = backbone.start_with(backbone.embed_map(early[-1]), images)
        found = {}
        for branch in branches(backbone, first, schedules):
            restored = backbone.restored(branch.tokens)
            for members, chunk in branch.each():
                maps = [*early[: backbone.index], restored[chunk], *backbone.late(restored[chunk])]
                found.update(dict.fromkeys(members, _places(self.model.decoded(maps))))
        return found


def _places(logits: Tensor) -> Tensor:
    """(B, classes, H, W) as (B, H W, classes)."""
    return logits.flatten(2).transpose(1, 2)


def _stairs(space: Space, budget: Budget | float, taken: Sequence[int]) -> Tensor | None:
    """Counts that fall by one factor in block 1 and behind each block of `taken`; None if they cannot be that cheap."""
    blocks = torch.arange(len(space.least))
    power = (blocks > 0).double() + sum((blocks > block).double() for block in taken)

    def counts(factor: float) -> Tensor:
        ideal = space.prefix + (space.tokens - space.prefix) * factor**power
        return torch.minimum(torch.maximum(ideal, space.least), space.most)

    low, high = 0.0, 1.0
    if space.over(counts(low), budget):
        return None
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if space.over(counts(middle), budget) else (middle, high)
    return counts(low)
