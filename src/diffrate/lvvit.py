"""LV-ViT, which timm does not have: a ViT with a convolutional stem and scaled residuals (Jiang et al., 2021).

Parameters have the names of the published checkpoints. The head that was trained with token labels (aux_head) is kept
so that they load, and is off at inference: logits come from the class token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.layers import to_2tuple
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

__all__ = ["LvViT", "checkpoint_filter_fn", "lvvit_s"]

CONFIG = {
    "num_classes": 1000,
    "input_size": (3, 224, 224),
    "pool_size": None,
    "crop_pct": 0.9,
    "interpolation": "bicubic",
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "first_conv": "patch_embed.conv1",
    "classifier": "head",
    "architecture": "lvvit_s",
}


class ConvStem(nn.Module):
    """Three convolutions at half the image's resolution, then patches of half the size: (B, 3, H, W) to (B, P, C)."""

    def __init__(
        self, img_size: Any, patch_size: Any, in_chans: int, embed_dim: int, width: int = 64, **_: Any
    ) -> None:
        super().__init__()
        self.img_size, self.patch_size = to_2tuple(img_size), to_2tuple(patch_size)
        self.grid_size = tuple(n // p for n, p in zip(self.img_size, self.patch_size, strict=True))
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.conv1 = nn.Conv2d(in_chans, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        half = tuple(p // 2 for p in self.patch_size)
        self.proj = nn.Conv2d(width, embed_dim, half, stride=half)

    def feat_ratio(self, as_scalar: bool = True) -> Any:
        return max(self.patch_size) if as_scalar else self.patch_size

    def forward(self, images: Tensor) -> Tensor:
        if tuple(images.shape[-2:]) != self.img_size:
            raise AssertionError(f"Input size {tuple(images.shape[-2:])} is not the model's {self.img_size}")
        x = images
        for conv, norm in ((self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)):
            x = norm(conv(x)).relu()
        return self.proj(x).flatten(2).transpose(1, 2)


class Divide(nn.Module):
    """What a residual branch is scaled by, in the place of a LayerScale."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x / self.by

    def extra_repr(self) -> str:
        return f"by={self.by}"


class LvViT(VisionTransformer):
    """A VisionTransformer of timm with the stem and the residual scaling (`skip_lam`) of LV-ViT."""

    def __init__(self, skip_lam: float = 2.0, **kwargs: Any) -> None:
        super().__init__(embed_layer=ConvStem, norm_layer=partial(nn.LayerNorm, eps=1e-5), **kwargs)
        for block in self.blocks:
            block.ls1, block.ls2 = Divide(skip_lam), Divide(skip_lam)
        self.aux_head = nn.Linear(self.embed_dim, self.num_classes) if self.num_classes > 0 else nn.Identity()


@register_model
def lvvit_s(pretrained: bool = False, pretrained_cfg: Any = None, **kwargs: Any) -> LvViT:
    """LV-ViT-S: 16 blocks of width 384, 26 million parameters."""
    if pretrained:
        raise RuntimeError("its weights are not on timm's hub: give their file as a checkpoint")
    kwargs.pop("pretrained_cfg_overlay", None)
    kwargs.pop("cache_dir", None)
    defaults: dict[str, Any] = {
        "embed_dim": 384,
        "depth": 16,
        "num_heads": 6,
        "mlp_ratio": 3.0,
        "qkv_bias": False,
    }
    model: Any = LvViT(**(defaults | kwargs))
    model.pretrained_cfg = model.default_cfg = dict(CONFIG)
    made: LvViT = model
    return made
