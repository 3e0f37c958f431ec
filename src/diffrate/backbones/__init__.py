"""What the walk needs to know of a model family, and the one place that picks the family of a model."""

from __future__ import annotations

from torch import nn

from diffrate.backbones.base import Backbone, Layout
from diffrate.backbones.hf_vit import HfViT
from diffrate.backbones.openclip_vit import OpenClipViT
from diffrate.backbones.refusals import reason_for, refusal
from diffrate.backbones.timm_eva import TimmEva
from diffrate.backbones.timm_metaformer import TimmMetaFormer
from diffrate.backbones.timm_relpos import TimmRelPos
from diffrate.backbones.timm_vit import TimmViT
from diffrate.backbones.torchvision_vit import TorchvisionViT

FAMILIES: tuple[type[Backbone], ...] = (
    *(TimmViT, TimmEva, TimmRelPos, TimmMetaFormer),
    *(HfViT, TorchvisionViT, OpenClipViT),
)


def backbone_of(model: nn.Module) -> Backbone:
    """The adapter for a model; UnsupportedModelError with the reason where no family can compress it correctly."""
    for family in FAMILIES:
        if family.accepts(model):
            return family(model)
    reason = reason_for(model)
    if reason is not None:
        raise refusal(model, reason)
    supported = ", ".join(family.describes for family in FAMILIES)
    raise refusal(model, f"supported are {supported}")


__all__ = ["Backbone", "Layout", "backbone_of"]
