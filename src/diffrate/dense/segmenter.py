"""A segmentation model: a timm backbone, whole or compressed, and Semantic FPN on its restored feature maps."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models import load_checkpoint
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from diffrate.backbones import backbone_of
from diffrate.compressed import CompressedModel, compress
from diffrate.costs.macs import gmacs
from diffrate.dense.fpn import Scales, SemanticFPN
from diffrate.errors import DiffRateError
from diffrate.models import create_timm, first_line
from diffrate.modes import evaluating
from diffrate.schedule import Schedule

LEVELS = 4
STRIDE = 16  # of a ViT's patches, and of the stage of a CAFormer that is compressed


class Segmenter(nn.Module):
    """Images to logits of every pixel. `compressed` is the same model, weights shared, under a schedule."""

    def __init__(self, backbone: nn.Module, classes: int, width: int = 128) -> None:
        super().__init__()
        self.backbone: Any = backbone
        layout = backbone_of(backbone).layout
        self.restores = layout.restores
        if self.restores:  # a hierarchical model: one map a stage
            self.taken = list(range(LEVELS))
            stages: Any = self.backbone.feature_info
            channels = [info["num_chs"] for info in stages]
            self.scales: nn.Module = nn.Identity()
        else:  # a plain ViT: four blocks, evenly spaced up to the last
            self.taken = [(i + 1) * layout.depth // LEVELS - 1 for i in range(LEVELS)]
            channels = [layout.dim] * LEVELS
            self.scales = Scales(layout.dim)
        self.decoder = SemanticFPN(channels, classes, width)

    def forward(self, images: Tensor) -> Tensor:
        """(B, classes, H, W) logits."""
        return F.interpolate(
            self.coarse(images), size=images.shape[-2:], mode="bilinear", align_corners=False
        )

    def coarse(self, images: Tensor) -> Tensor:
        """(B, classes, H / 4, W / 4) logits, as they leave the decoder."""
        maps = self.backbone.forward_intermediates(
            images, indices=self.taken, norm=not self.restores, intermediates_only=True
        )
        return self.decoded(maps)

    def decoded(self, maps: Sequence[Tensor]) -> Tensor:
        """The same from the backbone's maps."""
        logits: Tensor = self.decoder(self.scales(maps))
        return logits

    @property
    def whole(self) -> nn.Module:
        """The backbone as it came."""
        backbone: nn.Module = self.backbone
        return backbone.original if isinstance(backbone, CompressedModel) else backbone

    def compressed(self, schedule: Schedule) -> Segmenter:
        """This model with its tokens compressed by a schedule; the weights are shared."""
        other = Segmenter.__new__(Segmenter)
        nn.Module.__init__(other)
        other.backbone = compress(self.whole, schedule)
        other.restores, other.taken = self.restores, self.taken
        other.scales, other.decoder = self.scales, self.decoder
        other.training = self.training
        return other

    def decoder_gmacs(self) -> float:
        """GMACs behind the backbone, which no schedule changes, counted on a blank image."""
        layout = backbone_of(self.whole).layout
        parameter = next(self.parameters())
        image = torch.zeros(
            1, layout.in_chans, *layout.img_size, dtype=parameter.dtype, device=parameter.device
        )
        counter = FlopCounterMode(display=False)
        with evaluating(self), torch.no_grad():
            maps = self.backbone.forward_intermediates(
                image, indices=self.taken, norm=not self.restores, intermediates_only=True
            )
            with counter:
                self.decoder(self.scales(maps))
        return counter.get_total_flops() / 2e9

    def gmacs(self) -> float:
        """GMACs of one image through backbone and decoder."""
        return gmacs(self.backbone) + self.decoder_gmacs()


def build_segmenter(
    model: str,
    classes: int,
    img_size: tuple[int, int],
    checkpoint: str | Path | None = None,
    width: int = 128,
    drop_path: float = 0.0,
) -> Segmenter:
    """Semantic FPN on a timm model for images of `img_size`, with the backbone's weights from `checkpoint`.

    Every block but the first may be compressed, save the last: its tokens are what the decoder sees.
    """
    if not timm.is_model(model):
        raise DiffRateError(f"timm knows no model {model!r}")
    if img_size[0] % STRIDE or img_size[1] % STRIDE:
        raise DiffRateError(
            f"a segmentation model takes images of whole {STRIDE}-pixel patches, not {img_size}"
        )
    arguments: dict[str, Any] = {"num_classes": 0, "global_pool": "", "drop_path_rate": drop_path}
    try:
        backbone = create_timm(model, img_size, **arguments)
    except Exception as error:  # timm raises every kind of exception here
        raise DiffRateError(f"timm could not build {model}: {first_line(error)}") from error
    if checkpoint is not None:
        _load_backbone(backbone, model, Path(checkpoint))
    return Segmenter(backbone, classes, width)


def _load_backbone(backbone: nn.Module, name: str, checkpoint: Path) -> None:
    """All weights of the backbone; those of a classifier in the file are left out."""
    if not checkpoint.is_file():
        raise DiffRateError(f"checkpoint {checkpoint} does not exist")
    family = sys.modules[type(backbone).__module__]
    try:
        keys = load_checkpoint(
            backbone,
            str(checkpoint),
            strict=False,
            filter_fn=getattr(family, "checkpoint_filter_fn", None),
            weights_only=True,
        )
    except Exception as error:  # a corrupt file raises whatever its format's parser raises
        traceback.clear_frames(error.__traceback__)  # in which timm has left the file open
        raise DiffRateError(
            f"checkpoint {checkpoint} does not load into {name}: {first_line(error)}"
        ) from error
    if keys.missing_keys:
        raise DiffRateError(f"checkpoint {checkpoint} has no {keys.missing_keys[0]} for {name}")
